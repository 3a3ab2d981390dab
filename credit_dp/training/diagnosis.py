"""Finds where a batch went wrong: the first module, and the variable, with values that are no
numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.data.batch import Batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.launch.place import name_of
from credit_dp.training.agreement import gather
from credit_dp.training.data_description import Description
from credit_dp.training.passes import Pass, Prepare
from credit_dp.training.replicas import shard
from credit_dp.training.state import TrainingState

UNKNOWN = (
    "Computed again, everything was finite: look for faulty hardware, and for numbers that are not "
    "drawn from the step's seed. "
)


class Clue(NamedTuple):
    """Something that is not finite; the smallest one of all ranks was first."""

    order: tuple[int, ...]
    words: str


def diagnose(
    state: TrainingState,
    manager: DomainParallelManager,
    gradients: Pass,
    batch: Batch,
    repeat: Callable[[Prepare], Tensor],
) -> str:
    """Compute a batch again and watch; a sentence or two, the same on every rank.

    Collective. Gradients are left as they come, not clipped.

    Args:
        repeat: computes the gradients; it tells the given function of each micro-batch first.
    """
    watch = Watch(manager)
    # Compiled code does not stop at modules; if there is any, its compiler has been imported.
    compiled = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with watch.hooked(state.parts), stance:
        repeat(watch.begin)
    names = Names(state.data)
    # In the order of cause and consequence.
    found = [
        first(watch.clue),
        first(gradient_clue(state.parts, manager)),
        first(field_clue(batch, names, gradients)),
        first(loss_clue(gradients.detail, names)),
    ]
    module, gradient, field, loss = found
    if not any(found):
        return UNKNOWN
    return "".join(f"{words}. " for words in (module or gradient, field or loss) if words)


def first(clue: Clue | None) -> str | None:
    """The words of the first clue of all ranks; collective."""
    clues = [other for other in gather(clue) if other is not None]
    return min(clues).words if clues else None


@final
class Watch:
    """Notes the first module whose output is not finite on this rank."""

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.clue: Clue | None = None
        self.micro = self.calls = 0

    def begin(self, part: nn.Module, micro: int) -> None:
        """A micro-batch begins."""
        self.micro = micro

    @contextmanager
    def hooked(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Watch all modules of these parts."""
        with ExitStack() as hooks:
            for number, part in enumerate(parts):
                for name, module in part.named_modules():
                    see = partial(self.see, name or "the model", stage(number, self.manager))
                    hooks.callback(module.register_forward_hook(see).remove)
            yield

    def see(self, name: str, stage: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module has made its output; what is inside of it came before."""
        self.calls += 1
        if self.clue is None and not all(map(is_finite, tensors(output))):
            manager = self.manager
            rank = name_of(manager.rank, manager.dp_world_size, manager.domain_world_size)
            words = f"The first output that is not finite is that of {name}, on {rank}"
            self.clue = Clue((self.micro, stage, self.calls, manager.rank), words)


def gradient_clue(parts: Sequence[nn.Module], manager: DomainParallelManager) -> Clue | None:
    """The first parameter in the order of backward whose gradient is not finite."""
    for number, part in reversed([*enumerate(parts)]):
        for place, (name, parameter) in reversed([*enumerate(part.named_parameters())]):
            if parameter.grad is not None and not is_finite(parameter.grad):
                words = (
                    "All outputs are finite; the first gradient that is not, from the loss "
                    f"backwards, is that of {name}"
                )
                return Clue((-stage(number, manager), -place), words)
    return None


def field_clue(batch: Batch, names: Names, gradients: Pass) -> Clue | None:
    """The first variable of a batch that is not finite on this rank's rows."""
    target, points = batch.target, gradients.loss.points
    if points is not None and target.shape[1]:
        steps = target.tensor_split(target.shape[1] // gradients.channels, dim=1)
        target = torch.cat([points.only(step) for step in steps], dim=1)
    kinds = [
        ("input", batch.now, names.prognostic),
        ("forcing", batch.forcing, names.forcing),
        ("static field", batch.static, names.static),
        ("target", target, names.out),
    ]
    for number, (kind, field, channels) in enumerate(kinds):
        places = (~torch.isfinite(field).all(-1).all(-1)).nonzero().tolist()
        if places:
            sample, channel = min(places)
            name = channels[channel % len(channels)] if channels else f"channel {channel}"
            words = f"Variable {name} is not finite in the {kind} of {batch.times[sample]!s:.13}"
            return Clue((number, sample, channel), words)
    return None


def loss_clue(detail: Tensor, names: Names) -> Clue | None:
    """The first variable, of `(steps, C)` losses, whose loss is not finite on this rank."""
    places = (~torch.isfinite(detail)).nonzero().tolist()
    if not places:
        return None
    step, channel = min(places)
    name = names.out[channel] if names.out else f"channel {channel}"
    return Clue((step, channel), f"Variable {name} is not finite in the forecast, or in its error")


@final
class Names:
    """What the channels of a batch are called, as far as the data's description tells."""

    def __init__(self, data: Description) -> None:
        fields = data.get("fields", {})
        self.out = [
            variable if level is None else f"{variable}_{level}"
            for variable, level in fields.get("channels", [])
        ]
        self.prognostic = self.out[: len(self.out) - fields.get("diagnostic", 0)]
        self.forcing: list[str] = data.get("data.forcing", [])
        self.static: list[str] = data.get("data.static", [])


def stage(part: int, manager: DomainParallelManager) -> int:
    """Which stage of the whole pipeline a part of this rank is."""
    return part * manager.pipeline_parallel_size + manager.pipeline_rank


def tensors(output: Any) -> Iterator[Tensor]:
    """Those that a module has made."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors(part)


def is_finite(value: Tensor) -> bool:
    """Whether all of it, or all of this rank's share, is finite."""
    return bool(torch.isfinite(shard(value)).all())
