"""Non-finite (NaN or infinite) losses and gradients: where they began, and what a run does then."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.config.training import TrainerConfig
from credit_dp.data.loader import Batch
from credit_dp.distributed.collectives import all_gather_object
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.torch_private import is_compiler_imported
from credit_dp.training.data_description import DataDescription
from credit_dp.training.forward_backward import ForwardBackward, PrepareForward
from credit_dp.training.replicas import local_tensor, replica_name
from credit_dp.training.state import TrainingState
from credit_dp.training.step_agreement import AgreedStep

NOT_REPRODUCED = (
    "Computed again, everything was finite: look for faulty hardware, and for numbers that are not "
    "drawn from the step's seed. "
)


class NonFiniteFinding(NamedTuple):
    """Something that is not finite. Of the findings of all ranks the smallest came first."""

    order: tuple[int, ...]
    message: str


def diagnose_non_finite(
    state: TrainingState,
    manager: DomainParallelManager,
    forward_backward: ForwardBackward,
    batch: Batch,
    compute_gradients: Callable[[PrepareForward], Tensor],
) -> str:
    """Compute a batch again with hooks on all modules, and return a sentence or two.

    Collective; the same text on every rank. The gradients stay in `.grad`, not clipped.

    Args:
        compute_gradients: computes the gradients of the batch; it calls the given function before
            each forward pass.
    """
    hooks = NonFiniteHooks(manager)
    # Compiled code does not call hooks of modules. If there is any, its compiler is imported.
    compiled = is_compiler_imported()
    stance = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with hooks.register_hooks(state.parts), stance:
        compute_gradients(hooks.begin_forward)
    names = BatchChannelNames(state.data)
    # All four on every rank, for each of them gathers.
    module = earliest_message(hooks.finding)
    gradient = earliest_message(find_non_finite_gradient(state.parts, manager))
    field = earliest_message(find_non_finite_field(batch, names, forward_backward))
    loss = earliest_message(find_non_finite_loss(forward_backward.channel_losses, names))
    if not any((module, gradient, field, loss)):
        return NOT_REPRODUCED
    # A cause hides its consequence: a gradient follows from an output, a loss from a field.
    sentences = (module or gradient, field or loss)
    return "".join(f"{sentence}. " for sentence in sentences if sentence)


def earliest_message(finding: NonFiniteFinding | None) -> str | None:
    """Return the message of the first finding of all ranks; collective."""
    findings = [other for other in all_gather_object(finding) if other is not None]
    return min(findings).message if findings else None


@final
class NonFiniteHooks:
    """Hooks that record the first module whose output is not finite on this rank."""

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.finding: NonFiniteFinding | None = None
        self.micro = self.calls = 0

    def begin_forward(self, part: nn.Module, micro: int, forecast_step: int) -> None:
        """Remember the number of the micro-batch."""
        self.micro = micro

    @contextmanager
    def register_hooks(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Register the hooks on all modules of these parts, and remove them at the end."""
        with ExitStack() as handles:
            for number, part in enumerate(parts):
                stage = stage_index(number, self.manager)
                for name, module in part.named_modules():
                    hook = partial(self.check_output, name or "the model", stage)
                    handles.callback(module.register_forward_hook(hook).remove)
            yield

    def check_output(
        self, name: str, stage: int, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """Look at the output of a module; modules inside it were looked at before."""
        self.calls += 1
        if self.finding is None and not all(map(all_finite, iter_tensors(output))):
            manager = self.manager
            rank = replica_name(manager.rank, manager)
            message = f"The first non-finite output comes from {name}, on {rank}"
            self.finding = NonFiniteFinding((self.micro, stage, self.calls, manager.rank), message)


def find_non_finite_gradient(
    parts: Sequence[nn.Module], manager: DomainParallelManager
) -> NonFiniteFinding | None:
    """Return the parameter nearest to the loss whose gradient is not finite."""
    for number, part in reversed([*enumerate(parts)]):
        for index, (name, parameter) in reversed([*enumerate(part.named_parameters())]):
            if parameter.grad is not None and not all_finite(parameter.grad):
                message = (
                    "All outputs are finite; the non-finite gradient nearest to the loss is that "
                    f"of {name}"
                )
                return NonFiniteFinding((-stage_index(number, manager), -index), message)
    return None


def find_non_finite_field(
    batch: Batch, names: BatchChannelNames, forward_backward: ForwardBackward
) -> NonFiniteFinding | None:
    """Return the first variable of a batch that is not finite on this rank's rows."""
    target, points = batch.target, forward_backward.loss.points
    if points is not None and target.shape[1]:
        # A target is NaN where its variable is not defined, as a sea temperature on land.
        steps = target.tensor_split(target.shape[1] // forward_backward.channels, dim=1)
        target = torch.cat([points.zero_invalid(step) for step in steps], dim=1)
    kinds = [
        ("input", batch.state, names.prognostic),
        ("forcing", batch.forcing, names.forcing),
        ("static field", batch.static, names.static),
        ("target", target, names.out),
    ]
    for number, (kind, field, channels) in enumerate(kinds):
        indices = (~torch.isfinite(field).all(-1).all(-1)).nonzero().tolist()
        if indices:
            sample, channel = min(indices)
            name = channels[channel % len(channels)] if channels else f"channel {channel}"
            message = f"Variable {name} is not finite in the {kind} of {batch.times[sample]!s:.13}"
            return NonFiniteFinding((number, sample, channel), message)
    return None


def find_non_finite_loss(losses: Tensor, names: BatchChannelNames) -> NonFiniteFinding | None:
    """Return the first variable, of `(steps, C)` losses, whose loss is not finite on this rank."""
    indices = (~torch.isfinite(losses)).nonzero().tolist()
    if not indices:
        return None
    step, channel = min(indices)
    name = names.out[channel] if names.out else f"channel {channel}"
    message = f"Variable {name} is not finite in the forecast, or in its error"
    return NonFiniteFinding((step, channel), message)


@final
class BatchChannelNames:
    """Names of a batch's channels, as far as the data's description has them."""

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
    """Return which stage of the whole pipeline a part of this rank is."""
    return part * manager.pipeline_parallel_size + manager.pipeline_rank


def iter_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from iter_tensors(part)


def all_finite(value: Tensor) -> bool:
    """Whether all entries, or all those of this rank's shard, are finite."""
    return bool(torch.isfinite(local_tensor(value)).all())


MIN_NORMS = 20  # accepted gradient norms that are needed before a new one is compared with them
MAX_CONSECUTIVE_SKIPS = 10  # the run ends when this many steps in a row had to be skipped

logger = logging.getLogger(__name__)


@final
class StepCheck(NamedTuple):
    """The loss of the global batch, the global gradient norm, and whether to take the step.

    Attributes:
        loss: of the global batch; None until a late check is read.
        grad_norm: before clipping; None until a late check is read.
        accepted: whether to take the step, as far as the host knows.
        stop_signal: the signal for which all ranks stop after this step; 0: none.
        rejected: of a late check: 1 on the device if the step must not be taken, otherwise 0.
    """

    loss: float | None
    grad_norm: float | None
    accepted: bool
    stop_signal: int = 0
    rejected: Tensor | None = None


@final
class LateCheck(NamedTuple):
    """The check of a step that the host has not read yet.

    Attributes:
        step: the number of steps that were taken before.
        numbers: on their way to the host's memory, or there.
        arrival: of the numbers; None if they are there.
        diagnose: see `NonFiniteGuard.check`.
    """

    step: int
    numbers: Tensor
    arrival: torch.cuda.Event | None
    diagnose: Callable[[], str]

    def read(self) -> list[float]:
        """Return the numbers; waits until they are there, not for what was launched later."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.numbers.tolist()


@final
class NonFiniteGuard:
    """Decides after each backward pass whether the optimizer may take its step.

    `history` holds the gradient norms of earlier steps and belongs into checkpoints.

    Args:
        config: of the trainer.
        state: the state that a step would change.
        manager: this rank's coordinates on the mesh.

    Attributes:
        newest_checkpoint: returns the newest checkpoint or None; called on rank 0 when training
            stops.
    """

    def __init__(
        self, config: TrainerConfig, state: TrainingState, manager: DomainParallelManager
    ) -> None:
        self.config = config
        self.state = state
        self.manager = manager
        self.newest_checkpoint: Callable[[], Path | None] = lambda: None
        self.history = state.history
        self.buffers: list[Tensor] = []
        self.unread: LateCheck | None = None

    def save_buffers(self) -> None:
        """Keep a copy of the buffers that a forward pass may change, if steps may be skipped."""
        if self.config.on_nonfinite == "skip":
            self.buffers = [buffer.clone() for buffer in self._persistent_buffers()]

    def check(self, numbers: Tensor, diagnose: Callable[[], str], late: bool = False) -> StepCheck:
        """Return whether to take the step, and what the ranks have agreed on; collective.

        All ranks get the same answer, for it follows from the same numbers.

        Args:
            numbers: of this step, as `reduce_step` returns them.
            diagnose: finds the origin of a non-finite number; collective, and returns the same
                sentence on every rank.
            late: whether the host reads this check in the next call only; it does so now if the
                step before says that training stops.

        Raises:
            UserError: training has to stop, because of this step or of the one before, if its check
                was late; the same line on all ranks.
        """
        # Every decision before this one is known from here on: the history is complete.
        stop_signal = self._read_late_check()
        if late and not stop_signal:
            return self._check_on_device(numbers, diagnose)
        check = self._judge(numbers.tolist(), diagnose)
        if not check.accepted:
            self._undo_step()
        return check._replace(stop_signal=stop_signal or check.stop_signal)

    def _check_on_device(self, numbers: Tensor, diagnose: Callable[[], str]) -> StepCheck:
        """Decide on the device, as `_judge` will in the next step, and undo what forward changed.

        The next forward may start from a step that was left out, as it would if the host had left
        it out.
        """
        loss, norm = numbers[:2]
        accepted = torch.isfinite(loss) & torch.isfinite(norm) & (norm <= self._largest_norm())
        if self.buffers:
            with torch.no_grad():
                for buffer, before in zip(self._persistent_buffers(), self.buffers, strict=True):
                    buffer.copy_(torch.where(accepted.to(buffer.device), buffer, before))
        arrival = None
        if numbers.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        self.unread = LateCheck(self.state.step, numbers, arrival, diagnose)
        return StepCheck(None, None, accepted=True, rejected=~accepted)

    def _read_late_check(self) -> int:
        """Do what is left to do for the step before, if its check was late; collective.

        Its gradients are gone, but not its batch and not the weights and moments that it started
        from, if it was rejected: no later step was taken.

        Returns:
            The signal for which all ranks stop; 0: none.

        Raises:
            UserError: see `check`. The state is then that before the rejected step.
        """
        unread, self.unread = self.unread, None
        if unread is None:
            return 0
        now, self.state.step = self.state.step, unread.step
        check = self._judge(unread.read(), unread.diagnose)
        self.state.step = now
        if check.accepted and self.state.average is not None:
            self.state.average.update()
        return check.stop_signal

    def _judge(self, numbers: Sequence[float], diagnose: Callable[[], str]) -> StepCheck:
        """Decide on the step after `state.step`, and write the decision into the history.

        Args:
            numbers: see `check`.
            diagnose: see `check`.
        """
        loss, grad_norm, stop_signal = AgreedStep.read(numbers)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            fault = self._explosion_message(grad_norm)
        else:
            fault = (
                f"the loss has to stay finite, but is {loss} with gradient norm {grad_norm} at "
                f"step {self.state.step + 1}"
            )
        if not fault:
            self.history.norms.append(grad_norm)
            self.history.in_a_row = 0
            return StepCheck(loss, grad_norm, accepted=True, stop_signal=stop_signal)
        self.history.in_a_row += 1
        if self.config.on_nonfinite == "stop" or self.history.in_a_row >= MAX_CONSECUTIVE_SKIPS:
            raise UserError(self._error_message(fault, "" if finite else diagnose()))
        self._record_skip(fault)
        return StepCheck(loss, grad_norm, accepted=False, stop_signal=stop_signal)

    def metrics(self) -> dict[str, float]:
        """Return the number of steps that the run has skipped, for the log."""
        return {"skipped": self.history.skipped} if self.config.on_nonfinite == "skip" else {}

    def _largest_norm(self) -> float:
        """Return the largest norm that the coming step may have."""
        norms = self.history.norms
        if self.config.exploding is None or len(norms) < MIN_NORMS:
            return math.inf
        return self.config.exploding * statistics.median(norms) or math.inf

    def _explosion_message(self, norm: float) -> str:
        """Return what is wrong with a finite norm, or an empty string."""
        if norm <= self._largest_norm():
            return ""
        norms = self.history.norms
        return (
            f"the gradient norm is {norm:.3g} at step {self.state.step + 1}, "
            f"{norm / statistics.median(norms):.3g} times the median of the last {len(norms)}; at "
            f"most trainer.exploding={self.config.exploding:g} times is allowed"
        )

    def _error_message(self, fault: str, finding: str) -> str:
        """Return the line that ends the run; collective."""
        newest = self.newest_checkpoint() if self.manager.rank == 0 else None
        path = all_gather_object(newest)[0]
        saved = "There is no checkpoint yet" if path is None else f"The last checkpoint is {path}"
        often = f", {self.history.in_a_row} times in a row" if self.history.in_a_row > 1 else ""
        advice = (
            f"Lower optimizer.lr (now {self.state.schedule.base_lrs[0]}) or trainer.gradient_clip "
            f"(now {self.config.gradient_clip})"
        )
        if self.config.on_nonfinite == "stop":
            advice += ", or skip such steps with trainer.on_nonfinite=skip"
        return f"trainer: {fault}{often}. {finding}The step was not taken. {saved}. {advice}."

    def _record_skip(self, fault: str) -> None:
        """Count a step that is left out, and say so."""
        self.history.skipped += 1
        if self.manager.rank == 0:
            logger.warning(
                "%s: skipped (%d in a row; the run stops at %d)",
                fault,
                self.history.in_a_row,
                MAX_CONSECUTIVE_SKIPS,
            )

    def _undo_step(self) -> None:
        """Restore everything to what it was before the step."""
        with torch.no_grad():
            for buffer, before in zip(self._persistent_buffers(), self.buffers, strict=True):
                buffer.copy_(before)
        # A step without gradients changes nothing, but the schedule warns if there was none.
        self.state.optimizer.zero_grad(set_to_none=True)
        self.state.optimizer.step()

    def _persistent_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that checkpoints hold: running statistics, for example."""
        for part in self.state.parts:
            kept = part.state_dict(keep_vars=True)
            yield from (buffer for name, buffer in part.named_buffers() if name in kept)
