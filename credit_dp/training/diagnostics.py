"""Non-finite losses and gradients: what is done about them, and where they began."""

from __future__ import annotations

import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from credit_dp.config.training import TrainerConfig
from credit_dp.data.loader import Batch
from credit_dp.distributed.collectives import all_gather_object
from credit_dp.distributed.report import rank_name
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.data_description import DataDescription
from credit_dp.training.forward_backward import ForwardBackward, PrepareMicroBatch
from credit_dp.training.replicas import local_tensor
from credit_dp.training.state import TrainingState

NOT_REPRODUCED = (
    "Computed again, everything was finite: look for faulty hardware, and for numbers that are not "
    "drawn from the step's seed. "
)


class NonFiniteFinding(NamedTuple):
    """Something that is not finite; the smallest one of all ranks was first."""

    order: tuple[int, ...]
    message: str


def diagnose_non_finite(
    state: TrainingState,
    manager: DomainParallelManager,
    gradients: ForwardBackward,
    batch: Batch,
    repeat: Callable[[PrepareMicroBatch], Tensor],
) -> str:
    """Compute a batch again and watch; a sentence or two, the same on every rank.

    Collective. Gradients are left as they come, not clipped.

    Args:
        repeat: computes the gradients; it tells the given function of each micro-batch first.
    """
    watch = NonFiniteHooks(manager)
    # Compiled code does not stop at modules; if there is any, its compiler has been imported.
    compiled = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with watch.register_hooks(state.parts), stance:
        repeat(watch.begin)
    names = BatchChannelNames(state.data)
    # In the order of cause and consequence.
    found = [
        earliest_message(watch.finding),
        earliest_message(find_non_finite_gradient(state.parts, manager)),
        earliest_message(find_non_finite_field(batch, names, gradients)),
        earliest_message(find_non_finite_loss(gradients.channel_losses, names)),
    ]
    module, gradient, field, loss = found
    if not any(found):
        return NOT_REPRODUCED
    return "".join(f"{words}. " for words in (module or gradient, field or loss) if words)


def earliest_message(clue: NonFiniteFinding | None) -> str | None:
    """The words of the first clue of all ranks; collective."""
    clues = [other for other in all_gather_object(clue) if other is not None]
    return min(clues).message if clues else None


@final
class NonFiniteHooks:
    """Notes the first module whose output is not finite on this rank."""

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.finding: NonFiniteFinding | None = None
        self.micro = self.calls = 0

    def begin(self, part: nn.Module, micro: int) -> None:
        """A micro-batch begins."""
        self.micro = micro

    @contextmanager
    def register_hooks(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Watch all modules of these parts."""
        with ExitStack() as hooks:
            for number, part in enumerate(parts):
                for name, module in part.named_modules():
                    see = partial(
                        self.check_output, name or "the model", stage_index(number, self.manager)
                    )
                    hooks.callback(module.register_forward_hook(see).remove)
            yield

    def check_output(
        self, name: str, stage: int, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """A module has made its output; what is inside of it came before."""
        self.calls += 1
        if self.finding is None and not all(map(all_finite, iter_tensors(output))):
            manager = self.manager
            rank = rank_name(manager.rank, manager.dp_world_size, manager.domain_world_size)
            words = f"The first output that is not finite is that of {name}, on {rank}"
            self.finding = NonFiniteFinding((self.micro, stage, self.calls, manager.rank), words)


def find_non_finite_gradient(
    parts: Sequence[nn.Module], manager: DomainParallelManager
) -> NonFiniteFinding | None:
    """The first parameter in the order of backward whose gradient is not finite."""
    for number, part in reversed([*enumerate(parts)]):
        for place, (name, parameter) in reversed([*enumerate(part.named_parameters())]):
            if parameter.grad is not None and not all_finite(parameter.grad):
                words = (
                    "All outputs are finite; the first gradient that is not, from the loss "
                    f"backwards, is that of {name}"
                )
                return NonFiniteFinding((-stage_index(number, manager), -place), words)
    return None


def find_non_finite_field(
    batch: Batch, names: BatchChannelNames, gradients: ForwardBackward
) -> NonFiniteFinding | None:
    """The first variable of a batch that is not finite on this rank's rows."""
    target, points = batch.target, gradients.loss.points
    if points is not None and target.shape[1]:
        steps = target.tensor_split(target.shape[1] // gradients.channels, dim=1)
        target = torch.cat([points.zero_invalid(step) for step in steps], dim=1)
    kinds = [
        ("input", batch.state, names.prognostic),
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
            return NonFiniteFinding((number, sample, channel), words)
    return None


def find_non_finite_loss(detail: Tensor, names: BatchChannelNames) -> NonFiniteFinding | None:
    """The first variable, of `(steps, C)` losses, whose loss is not finite on this rank."""
    places = (~torch.isfinite(detail)).nonzero().tolist()
    if not places:
        return None
    step, channel = min(places)
    name = names.out[channel] if names.out else f"channel {channel}"
    return NonFiniteFinding(
        (step, channel), f"Variable {name} is not finite in the forecast, or in its error"
    )


@final
class BatchChannelNames:
    """What the channels of a batch are called, as far as the data's description tells."""

    def __init__(self, data: DataDescription) -> None:
        fields = data.get("fields", {})
        self.out = [
            variable if level is None else f"{variable}_{level}"
            for variable, level in fields.get("channels", [])
        ]
        self.prognostic = self.out[: len(self.out) - fields.get("diagnostic", 0)]
        self.forcing: list[str] = data.get("data.forcing", [])
        self.static: list[str] = data.get("data.static", [])


def stage_index(part: int, manager: DomainParallelManager) -> int:
    """Which stage of the whole pipeline a part of this rank is."""
    return part * manager.pipeline_parallel_size + manager.pipeline_rank


def iter_tensors(output: Any) -> Iterator[Tensor]:
    """Those that a module has made."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from iter_tensors(part)


def all_finite(value: Tensor) -> bool:
    """Whether all of it, or all of this rank's share, is finite."""
    return bool(torch.isfinite(local_tensor(value)).all())


MIN_NORMS = 20  # accepted gradient norms; with fewer none is compared with them
MAX_CONSECUTIVE_SKIPS = 10  # so many steps that would have to be skipped end the run after all

logger = logging.getLogger(__name__)


@final
class NonFiniteGuard:
    """Decides after each backward pass whether the optimiser may take its step.

    What it knows of earlier steps, `history`, belongs into checkpoints.

    Args:
        config: of the trainer.
        state: what would change.
        manager: this rank's place in the mesh.

    Attributes:
        checkpoint: finds the newest checkpoint, or None; asked on one rank when training stops.
    """

    def __init__(
        self, config: TrainerConfig, state: TrainingState, manager: DomainParallelManager
    ) -> None:
        self.config = config
        self.state = state
        self.manager = manager
        self.checkpoint: Callable[[], Path | None] = lambda: None
        self.history = state.history
        self.buffers: list[Tensor] = []

    def begin(self) -> None:
        """Remember what a forward pass may change, if its step may be skipped."""
        if self.config.on_nonfinite == "skip":
            self.buffers = [buffer.clone() for buffer in self._persistent_buffers()]

    def accepts(self, share: Tensor, norm: Tensor, diagnose: Callable[[], str]) -> bool:
        """Whether to take the step; the same on every rank. Collective.

        Args:
            share: this rank's share of the loss.
            norm: of the global gradient, before clipping.
            diagnose: looks for where it began; collective, and gives every rank the same sentence.

        Raises:
            UserError: if training is to stop; the same line on all ranks.
        """
        loss, size = self._reduce_loss_and_norm(share, norm)
        finite = math.isfinite(loss) and math.isfinite(size)
        fault = self._explosion_message(size) if finite else self._non_finite_message(loss, size)
        if not fault:
            self.history.norms.append(size)
            self.history.in_a_row = 0
            return True
        self.history.in_a_row += 1
        if self.config.on_nonfinite == "stop" or self.history.in_a_row >= MAX_CONSECUTIVE_SKIPS:
            raise UserError(self._error_message(fault, "" if finite else diagnose()))
        self._skip_step(fault)
        return False

    def metrics(self) -> dict[str, float]:
        """For the log: how many steps the run has skipped."""
        return {"skipped": self.history.skipped} if self.config.on_nonfinite == "skip" else {}

    def _reduce_loss_and_norm(self, share: Tensor, norm: Tensor) -> tuple[float, float]:
        """The loss and the norm, from one sum, so that no rank sees other numbers than another."""
        total = torch.stack([share.detach().double(), norm.detach().to(share.device).double()])
        if self.manager.mesh is not None:
            dist.all_reduce(total)
        else:
            total = self.manager.transport.all_reduce(total)
        loss, size = total.tolist()
        return loss / self.manager.dp_world_size, size / self.manager.world_size

    def _non_finite_message(self, loss: float, norm: float) -> str:
        return (
            f"the loss has to stay finite, but is {loss} with gradient norm {norm} at step "
            f"{self.state.step + 1}"
        )

    def _explosion_message(self, norm: float) -> str:
        """What is wrong with a finite norm, if anything."""
        most = self.config.exploding
        norms = self.history.norms
        if most is None or len(norms) < MIN_NORMS:
            return ""
        usual = statistics.median(norms)
        if not norm > most * usual > 0:
            return ""
        return (
            f"the gradient norm is {norm:.3g} at step {self.state.step + 1}, {norm / usual:.3g} "
            f"times the median of the last {len(norms)}; trainer.exploding={most:g} allows "
            "no more than that many times"
        )

    def _error_message(self, fault: str, finding: str) -> str:
        """The line that ends the run; collective."""
        path = all_gather_object(self.checkpoint() if self.manager.rank == 0 else None)[0]
        saved = "There is no checkpoint yet" if path is None else f"The last checkpoint is {path}"
        often = f", {self.history.in_a_row} times in a row" if self.history.in_a_row > 1 else ""
        advice = (
            f"Lower optimizer.lr (now {self.state.schedule.base_lrs[0]}) or trainer.gradient_clip "
            f"(now {self.config.gradient_clip})"
        )
        if self.config.on_nonfinite == "stop":
            advice += ", or leave such steps out with trainer.on_nonfinite=skip"
        return f"trainer: {fault}{often}. {finding}The step was not taken. {saved}. {advice}."

    def _skip_step(self, fault: str) -> None:
        """Leave all as it was before the step."""
        self.history.skipped += 1
        if self.manager.rank == 0:
            logger.warning(
                "%s: skipped (%d in a row; the run stops at %d)",
                fault,
                self.history.in_a_row,
                MAX_CONSECUTIVE_SKIPS,
            )
        with torch.no_grad():
            for buffer, before in zip(self._persistent_buffers(), self.buffers, strict=True):
                buffer.copy_(before)
        # Changes nothing without gradients; but the schedule warns of steps that it does not see.
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.optimizer.step()

    def _persistent_buffers(self) -> Iterator[Tensor]:
        """Those that checkpoints hold: running statistics, for one."""
        for part in self.state.parts:
            kept = part.state_dict(keep_vars=True)
            yield from (buffer for name, buffer in part.named_buffers() if name in kept)
