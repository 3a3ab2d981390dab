"""The state of a training run: all that a checkpoint holds, under the same names on every mesh.

`TrainingState` gathers model, optimizer, schedule, sampler and random numbers. Saving takes its
`tensors`, `constant_fields` and `metadata`. Loading happens in three steps, in this order:
`allocate_tensors` creates what the checkpoint has, the reader fills these tensors in place, and
`load_metadata` restores the rest.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from credit_dp.errors import UserError
from credit_dp.training.checkpoint_shards import Shape
from credit_dp.training.data_description import DataDescription
from credit_dp.training.optim import WeightAverage, restore_schedule
from credit_dp.training.optimizers import Muon
from credit_dp.training.parameter_shards import is_fsdp_module

# Names of tensors in a checkpoint; a prefix is followed by the name in the model.
MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimiser."
AVERAGE_PREFIX = "average."
GENERATOR_KEY = "random.generator"
STATIC_KEY = "static"
VALID_KEY = "valid"

# Keys of the metadata.
AVERAGE_UPDATES_KEY = "averaged"  # number of updates of the averages
HISTORY_KEY = "gradients"
VALIDATIONS_KEY = "validations"
OPTIMIZER_KEY = "optimizer"  # its name

NORM_WINDOW = 100  # number of gradient norms that a new one is compared with


@final
@dataclass
class GradientHistory:
    """The gradient norms of the last steps that were taken, and the number of skipped steps.

    Attributes:
        norms: before clipping, of steps whose update was applied.
        skipped: steps of the whole run whose update was skipped.
        in_a_row: how many of these came last, one after the other.
    """

    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORM_WINDOW))
    skipped: int = 0
    in_a_row: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain numbers."""
        return {**asdict(self), "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the history."""
        self.norms.clear()
        self.norms.extend(state["norms"])
        self.skipped = state["skipped"]
        self.in_a_row = state["in_a_row"]


@final
@dataclass
class ValidationHistory:
    """The lowest validation error of a run so far, and how long ago it was found.

    Attributes:
        lowest: None before the first validation with a finite error.
        without_lower: validations since then.
    """

    lowest: float | None = None
    without_lower: int = 0

    def add(self, error: float) -> None:
        """Take in the error of one more validation; one that is not finite is not lower."""
        if math.isfinite(error) and (self.lowest is None or error < self.lowest):
            self.lowest, self.without_lower = error, 0
        else:
            self.without_lower += 1


class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restore the state."""


@final
@dataclass
class TrainingState:
    """All that changes during training, so that a checkpoint of it is complete.

    Attributes:
        parts: the pipeline stages that this rank holds, or the complete model without a pipeline.
            They are not wrapped in DDP, so that names are the same on every mesh.
        optimizer: of all parameters that are not frozen.
        schedule: of the learning rate.
        sampler: the position in the sequence of samples.
        data: what the model is trained on; see `describe_data`.
        seed: of everything random.
        step: the number of steps taken.
        static: reads the static fields of the globe, `(S, H, W)` in the store's units.
        valid: reads where output fields have values, `(outputs, H, W)`; None if everywhere.
            Checkpoints have `static` and `valid` so that the model can be used without the data.
        average: the moving average of the weights, if there is one.
        history: of the gradients.
        validations: the lowest error of the validations.
        optimizer_name: the optimizer's name in the config.
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
    validations: ValidationHistory = field(default_factory=ValidationHistory)
    optimizer_name: str = "adamw"

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Switch to evaluation mode inside the context, with averaged weights if there are any."""
        # Averages replace sharded parameters: gathered ones would keep their old values. They are
        # sharded again before the averages are swapped out, as callbacks run in reverse order.
        reshard_parameters(self.parts)
        with ExitStack() as stack:
            if self.average is not None:
                stack.enter_context(self.average.swapped_in())
            stack.callback(reshard_parameters, self.parts)
            stack.callback(self.train)
            self.train(False)
            yield

    @cached_property
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters on this rank that are not frozen, by name."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank holds, or has a shard of, by name."""
        return named_parameters(self.parts)

    def train(self, mode: bool = True) -> None:
        """Set the model to training mode or evaluation mode."""
        for part in self.parts:
            part.train(mode)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that this rank has or has a shard of, by their names in a checkpoint.

        Writing into them changes the state, except for the random generator's, which is a copy.
        """
        moments = {
            f"{OPTIMIZER_PREFIX}{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        averages = {} if self.average is None else self.average.averages
        averaged = {f"{AVERAGE_PREFIX}{name}": average for name, average in averages.items()}
        # `seed_step` seeds every step from (seed, step, data rank, model rank), so that training
        # needs the seed only. The generator's state is saved for random numbers that are
        # drawn between steps.
        model = model_tensors(self.parts)
        return {**model, **moments, **averaged, GENERATOR_KEY: torch.get_rng_state()}

    def constant_fields(self) -> dict[str, Tensor]:
        """Read the fields that do not change in training; one rank does it for all."""
        fields = {} if self.static is None else {STATIC_KEY: torch.from_numpy(self.static())}
        valid = None if self.valid is None else self.valid()
        if valid is not None:  # as bytes: shards hold no booleans
            fields[VALID_KEY] = torch.from_numpy(valid).to(torch.uint8)
        return fields

    def metadata(self) -> dict[str, Any]:
        """Return the numbers and texts of a checkpoint, which are the same on every rank."""
        return {
            "step": self.step,
            "seed": self.seed,
            OPTIMIZER_KEY: self.optimizer_name,
            "schedule": self.schedule.state_dict(),
            "sampler": self.sampler.state_dict(),
            "data": self.data,
            HISTORY_KEY: self.history.state_dict(),
            VALIDATIONS_KEY: asdict(self.validations),
            **({} if self.average is None else {AVERAGE_UPDATES_KEY: self.average.updates}),
        }

    def allocate_tensors(
        self, saved: dict[str, Shape], dtype: Callable[[str], torch.dtype]
    ) -> dict[str, Tensor]:
        """Return the tensors into which those of a checkpoint are to be read.

        The optimizer's tensors are newly allocated; those of parameters that are frozen now are
        left out. So are averages that the checkpoint does not have: `load_metadata` sets them to
        the weights.

        Raises:
            UserError: the checkpoint has other tensors of a parameter than the optimizer keeps.
        """
        if self.step:  # at step 0, keep what some optimizers allocate when they are constructed
            self.optimizer.state.clear()
        parameters = self.trainable_parameters
        moments = defaultdict[str, dict[str, Shape]](dict)  # by name of the parameter, and key
        for tensor_name, shape in saved.items():
            name, _, key = tensor_name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
            if tensor_name.startswith(OPTIMIZER_PREFIX) and name in parameters:
                moments[name][key] = shape
        # Keys of single numbers. Those of a parameter without dimensions do not tell.
        numbers = {"step"} | {
            key
            for name, shapes in moments.items()
            for key, shape in shapes.items()
            if shape == () != parameters[name].shape
        }
        for name, shapes in moments.items():
            parameter = parameters[name]
            like_parameter = {
                key for key, shape in shapes.items() if shape != () or key not in numbers
            }
            is_kept = all(shapes[key] == parameter.shape for key in like_parameter)
            if isinstance(self.optimizer, Muon):  # it keeps others of matrices than of biases
                is_kept = self.optimizer.state_keys(parameter) == shapes.keys()
            if not is_kept:
                raise UserError(
                    f"resume: the checkpoint has {', '.join(sorted(shapes))} of {name}, which "
                    f"optimizer={self.optimizer_name} does not keep with its keys now. Set the "
                    "keys of optimizer to those of the checkpoint, or start a new run with "
                    "init_from."
                )
            for key in shapes:
                if key in like_parameter:
                    value = torch.zeros_like(parameter, requires_grad=False)
                else:
                    number_dtype = dtype(f"{OPTIMIZER_PREFIX}{name}.{key}")
                    value = allocate_number(self.optimizer, parameter, key, number_dtype)
                self.optimizer.state[parameter][key] = value
        tensors = self.tensors().items()
        optional = (AVERAGE_PREFIX, OPTIMIZER_PREFIX)
        return {n: t for n, t in tensors if n in saved or not n.startswith(optional)}

    def load_metadata(self, metadata: dict[str, Any], generator: Tensor) -> None:
        """Restore counters, schedule and random numbers; settings of the present config stay.

        Call it after the tensors are filled: averages that the checkpoint lacks start from them.
        """
        restore_schedule(self.optimizer, self.schedule, metadata["schedule"])
        self.sampler.load_state_dict(metadata["sampler"])
        torch.set_rng_state(generator)
        self.seed = metadata["seed"]
        self.step = metadata["step"]
        self.history.load_state_dict(metadata[HISTORY_KEY])
        # Older checkpoints have none.
        self.validations = ValidationHistory(**metadata.get(VALIDATIONS_KEY, {}))
        if self.average is not None:
            saved = metadata["tensors"]
            new = [n for n in self.average.averages if AVERAGE_PREFIX + n not in saved]
            self.average.reset_to_parameters(new, metadata.get(AVERAGE_UPDATES_KEY, 0))


def reshard_parameters(parts: tuple[nn.Module, ...]) -> None:
    """Reshard FSDP parameters, which a forward pass without a backward pass leaves gathered."""
    for part in parts:
        for module in part.modules():
            if is_fsdp_module(module):
                module.reshard()


def named_parameters(parts: tuple[nn.Module, ...]) -> dict[str, nn.Parameter]:
    """Return the parameters of some stages of a model, sorted by name."""
    return dict(sorted(p for part in parts for p in part.named_parameters()))


def trainable_saved_parameters(parts: tuple[nn.Module, ...]) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by their names in `named_tensors`."""
    saved = named_tensors(parts).items()
    return {n: p for n, p in saved if isinstance(p, nn.Parameter) and p.requires_grad}


def model_tensors(parts: tuple[nn.Module, ...]) -> dict[str, Tensor]:
    """Return the tensors of `named_tensors` by their names in a checkpoint, detached."""
    return {MODEL_PREFIX + name: value.detach() for name, value in named_tensors(parts).items()}


def named_tensors(parts: tuple[nn.Module, ...]) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by name; of a tied one only the first name.

    Raises:
        UserError: a `state_dict` has something else, which only a pickled file could hold.
    """
    entries = {
        name: value for part in parts for name, value in part.state_dict(keep_vars=True).items()
    }
    tensors: dict[str, Tensor] = {}
    known: set[int] = set()
    # Sorted, because modules may be registered in another order on another mesh: the first name of
    # a tied parameter must be the same everywhere.
    for name in sorted(entries):
        value = entries[name]
        if not isinstance(value, Tensor):
            raise UserError(
                f"model: {name} is kept by the model's state_dict, but is a "
                f"{type(value).__name__}; checkpoints hold tensors only. Keep it as a buffer."
            )
        if id(value) not in known:
            known.add(id(value))
            tensors[name] = value
    return tensors


def allocate_number(
    optimizer: Optimizer, parameter: nn.Parameter, key: str, dtype: torch.dtype
) -> Tensor:
    """Return a single number of a parameter's state, where torch's `load_state_dict` has it.

    The CPU counts steps, unless the whole update runs on the device.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
