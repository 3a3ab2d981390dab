"""All that changes while training: what a checkpoint holds, under names that every mesh shares."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from credit_dp.errors import UserError
from credit_dp.training.data_description import DataDescription
from credit_dp.training.optim import WeightAverage, restore_schedule
from credit_dp.training.own_optimizer import ADAMW, StateLayout
from credit_dp.training.parameter_shards import is_fsdp_module
from credit_dp.training.shards import Shape

MODEL_PREFIX, OPTIMIZER_PREFIX, GENERATOR_KEY, STATIC_KEY = (
    "model.",
    "optimiser.",
    "random.generator",
    "static",
)
VALID_KEY = "valid"
AVERAGE_UPDATES_KEY = "averaged"  # how many updates averages have taken in
AVERAGE_PREFIX = "average."  # of a weight, which is called as in the model
HISTORY_KEY = "gradients"
OPTIMIZER_KEY = "optimizer"  # its name; checkpoints without one are of adamw

NORM_WINDOW = 100  # accepted gradient norms that new ones are compared with


@final
@dataclass
class GradientHistory:
    """What has been seen of gradients: the last norms whose steps were taken, and skipped steps."""

    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORM_WINDOW))
    skipped: int = 0
    in_a_row: int = 0

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return {**asdict(self), "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again."""
        self.norms.clear()
        self.norms.extend(state["norms"])
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]


class Stateful(Protocol):
    """Something that can tell and take back where it stands."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Stand there again."""


@final
@dataclass
class TrainingState:
    """All that changes while training, so that a checkpoint of it is complete.

    `parts` are the stretches of the plain or converted model that this rank holds, all of it
    without a pipeline; not their DDP wrapper: names are then the same on every mesh. `data`
    describes what it trains on; see `describe_data`. `static` reads the globe's static fields,
    `(S, H, W)` in the store's units, and `valid` where the fields that come out have values,
    `(outputs, H, W)`, or None: checkpoints carry both for use of the model without the data.
    `average` follows the weights, if they are averaged; `history` is of the gradients. `optimizer`
    is the optimiser's name in the config, and `layout` what it keeps.
    """

    parts: tuple[nn.Module, ...]
    optimizer: Optimizer
    schedule: LambdaLR
    sampler: Stateful
    data: DataDescription
    seed: int
    step: int = 0
    static: Callable[[], NDArray[np.float32]] | None = None
    valid: Callable[[], NDArray[np.bool_] | None] | None = None
    average: WeightAverage | None = None
    history: GradientHistory = field(default_factory=GradientHistory)
    optimizer_name: str = "adamw"
    layout: StateLayout = ADAMW

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Let the model forecast meanwhile, with the averages of its weights if there are any."""
        reshard_parameters(self.parts)
        with ExitStack() as after:
            if self.average is not None:
                after.enter_context(self.average.swapped_in())
            after.callback(reshard_parameters, self.parts)
            after.callback(self.train)
            self.train(False)
            yield

    @property
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Those of `parameters` that are not frozen."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds, or has a share of, by name."""
        return named_parameters(self.parts)

    def train(self, mode: bool = True) -> None:
        """Set whether the model trains or forecasts."""
        for part in self.parts:
            part.train(mode)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that this rank has or has a share of; writing into them changes the state.

        But for the random generator, which is a copy.
        """
        moments = {
            f"{OPTIMIZER_PREFIX}{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        averages = {} if self.average is None else self.average.averages
        averaged = {f"{AVERAGE_PREFIX}{name}": average for name, average in averages.items()}
        # Each step's numbers are drawn from (seed, step, rank), so the seed is what has to be
        # kept; the generator's own state is for whoever draws outside of a step.
        model = model_tensors(self.parts)
        return {**model, **moments, **averaged, GENERATOR_KEY: torch.get_rng_state()}

    def constant_fields(self) -> dict[str, Tensor]:
        """What a checkpoint carries besides: read by one rank, for all."""
        found = {} if self.static is None else {STATIC_KEY: torch.from_numpy(self.static())}
        valid = None if self.valid is None else self.valid()
        if valid is not None:  # as bytes: shards hold no booleans
            found[VALID_KEY] = torch.from_numpy(valid).to(torch.uint8)
        return found

    def metadata(self) -> dict[str, Any]:
        """The rest: numbers and text, the same on every rank."""
        return {
            "step": self.step,
            "seed": self.seed,
            OPTIMIZER_KEY: self.optimizer_name,
            "schedule": self.schedule.state_dict(),
            "sampler": self.sampler.state_dict(),
            "data": self.data,
            HISTORY_KEY: self.history.state_dict(),
            **({} if self.average is None else {AVERAGE_UPDATES_KEY: self.average.updates}),
        }

    def allocate_tensors(self, saved: dict[str, Shape]) -> dict[str, Tensor]:
        """The tensors to load those of a checkpoint into; forgets the optimiser's own.

        What it knows of a parameter that is frozen now has no room, nor has an average that it does
        not have: that one starts from the weights, see `load_metadata`.

        Raises:
            UserError: the checkpoint has others of a parameter than the optimiser keeps.
        """
        if self.step:  # else they are those that some optimisers have before their first step
            self.optimizer.state.clear()
        parameters, found = self.trainable_parameters, defaultdict[str, list[str]](list)
        for each in saved:
            name, _, key = each.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
            if each.startswith(OPTIMIZER_PREFIX) and name in parameters:
                found[name].append(key)
        for name, keys in found.items():
            if self.layout.keys is not None and {*keys} not in self.layout.keys:
                raise UserError(
                    f"resume: the checkpoint has {', '.join(sorted(keys))} of {name}, which "
                    f"optimizer={self.optimizer_name} does not keep with its keys now. Set the "
                    "keys of "
                    "optimizer to those of the checkpoint, or start a new run with init_from."
                )
            for key in keys:
                number = self.layout.scalars.get(key)
                self.optimizer.state[parameters[name]][key] = allocate_moment(
                    parameters[name], number
                )
        tensors = self.tensors().items()
        optional = (AVERAGE_PREFIX, OPTIMIZER_PREFIX)
        return {n: t for n, t in tensors if n in saved or not n.startswith(optional)}

    def load_metadata(self, numbers: dict[str, Any], generator: Tensor) -> None:
        """Stand where a checkpoint's numbers do; what the config sets stays as it is."""
        restore_schedule(self.optimizer, self.schedule, numbers["schedule"])
        self.sampler.load_state_dict(numbers["sampler"])
        torch.set_rng_state(generator)
        self.seed, self.step = numbers["seed"], numbers["step"]
        if HISTORY_KEY in numbers:  # not in those of earlier versions
            self.history.load_state_dict(numbers[HISTORY_KEY])
        if self.average is not None:
            new = [n for n in self.average.averages if AVERAGE_PREFIX + n not in numbers["tensors"]]
            self.average.reset_to_parameters(new, numbers.get(AVERAGE_UPDATES_KEY, 0))


def reshard_parameters(parts: tuple[nn.Module, ...]) -> None:
    """Bring parameters that are shared out back to that form; forwards without backwards don't."""
    for part in parts:
        for module in part.modules():
            if is_fsdp_module(module):
                module.reshard()


def named_parameters(parts: tuple[nn.Module, ...]) -> dict[str, nn.Parameter]:
    """The parameters of some stretches of a model, sorted by name."""
    return dict(sorted(p for part in parts for p in part.named_parameters()))


def trainable_saved_parameters(parts: tuple[nn.Module, ...]) -> dict[str, nn.Parameter]:
    """Those that are not frozen, by their names in `model_tensors`."""
    saved = named_tensors(parts).items()
    return {n: p for n, p in saved if isinstance(p, nn.Parameter) and p.requires_grad}


def model_tensors(parts: tuple[nn.Module, ...]) -> dict[str, Tensor]:
    """What `named_tensors` names, as it is in a checkpoint."""
    return {MODEL_PREFIX + name: value.detach() for name, value in named_tensors(parts).items()}


def named_tensors(parts: tuple[nn.Module, ...]) -> dict[str, Tensor]:
    """Parameters and buffers that are saved, by name; of a tied one only the first name.

    Raises:
        UserError: a module keeps something else, which no checkpoint could hold without pickle.
    """
    found = {
        name: value for part in parts for name, value in part.state_dict(keep_vars=True).items()
    }
    tensors: dict[str, Tensor] = {}
    known: set[int] = set()
    for name in sorted(found):  # by name, as modules may be registered in another order elsewhere
        value = found[name]
        if not isinstance(value, Tensor):
            raise UserError(
                f"model: {name} is kept by the model's state_dict, but is a "
                f"{type(value).__name__}; checkpoints hold tensors only. Keep it as a buffer."
            )
        if id(value) not in known:
            known.add(id(value))
            tensors[name] = value
    return tensors


def allocate_moment(parameter: nn.Parameter, number: Tensor | None) -> Tensor:
    """Room for what the optimiser keeps of a parameter: a tensor like it, or like a `number`."""
    if number is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return torch.zeros_like(number, device="cpu" if number.is_cpu else parameter.device)
