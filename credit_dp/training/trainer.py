"""The training step: the same on every mesh, in the order of `Trainer.train_step`.

Below it stand what the ranks agree on in a step, `reduce_step`, and `NonFiniteGuard`, which skips
steps or ends the run.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from credit_dp.config import TrainerConfig
from credit_dp.constants import constant_tensor
from credit_dp.data.loader import Batch
from credit_dp.distributed.collectives import all_gather_object, sum_over_ranks
from credit_dp.distributed.signals import STOP_SIGNALS
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import message_device
from credit_dp.errors import UserError
from credit_dp.models.blocks import draw_noise, draw_stochastic_depths
from credit_dp.process import OPTIMISER, profile_region
from credit_dp.training.augmentation import Augmentation
from credit_dp.training.cuda_graph import StepGraph
from credit_dp.training.diffusion import Denoising, set_level
from credit_dp.training.forward_backward import ForwardBackward, PrepareForward, clip_gradients
from credit_dp.training.non_finite import diagnose_non_finite
from credit_dp.training.optim import seed_step, take_step
from credit_dp.training.replicas import check_replicas
from credit_dp.training.state import TrainingState
from credit_dp.training.throughput import ThroughputMeter

logger = logging.getLogger(__name__)

MIN_NORMS = 20  # gradient norms of taken steps that are needed to compare a new one with
MAX_CONSECUTIVE_SKIPS = 10  # the run ends when this many steps in a row had to be skipped


@final
@dataclass(frozen=True)
class LossNames:
    """Names of the parts of a loss.

    Attributes:
        variables: the variable of each output channel.
        step_hours: hours of one forecast step.
    """

    variables: tuple[str, ...]
    step_hours: int

    def loss_by_name(self, losses: Tensor) -> dict[str, float]:
        """Return `loss/VARIABLE`, a mean over the steps, and `loss/+HOURSh` of several steps.

        The losses of all variables add up to the loss; those of the lead times have it as mean.

        Shapes:
            `(steps, channels)`: what each channel adds to the loss of each step.
        """
        by_name = dict.fromkeys((f"loss/{variable}" for variable in self.variables), 0.0)
        for variable, part in zip(self.variables, losses.mean(0).tolist(), strict=True):
            by_name[f"loss/{variable}"] += part
        steps = losses.sum(1).tolist()
        if len(steps) > 1:
            hours = (self.step_hours * step for step in range(1, len(steps) + 1))
            by_name |= {f"loss/+{h}h": part for h, part in zip(hours, steps, strict=True)}
        return by_name


@final
@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step leaves for the log.

    `loss` is that of the global batch before the step's update, `grad_norm` the global norm before
    clipping. Both are None, and `extra` is empty, at steps that are not logged. `stop_signal` is
    the signal for which all ranks stop after this step; 0: none.
    """

    step: int
    lr: float
    loss: float | None = None
    grad_norm: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    stop_signal: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the numbers that there are, by name."""
        named = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}
        return {**{name: x for name, x in named.items() if x is not None}, **self.extra}


def own_members(members: int, manager: DomainParallelManager) -> range:
    """Return the numbers of the members that this rank computes, of `members` of each sample."""
    count = members // manager.ensemble_parallel_size
    return range(manager.ensemble_rank * count, (manager.ensemble_rank + 1) * count)


@final
class Trainer:
    """Takes optimizer steps on batches of the rank's own rows.

    Args:
        forward_backward: computes the gradients of a batch on this mesh.
        check_every: steps between checks that replicas are equal; 0: before the first step only.
        names: names of the parts of the loss, if they are to be logged.
        augmentation: changes the samples before they are used, if there is one.
        denoising: makes the noisy targets of a diffusion model, if it is one.
        graph: replays `forward_backward`, if it is to be captured.
    """

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainingState,
        forward_backward: ForwardBackward,
        manager: DomainParallelManager,
        check_every: int = 0,
        names: LossNames | None = None,
        augmentation: Augmentation | None = None,
        denoising: Denoising | None = None,
        graph: StepGraph | None = None,
    ) -> None:
        self.config = config
        self.state = state
        self.forward_backward = forward_backward
        self.manager = manager
        self.check_every = check_every
        self.names = names
        self.augmentation = augmentation
        self.denoising = denoising
        self.graph = graph
        self.throughput = ThroughputMeter(manager)
        self.guard = NonFiniteGuard(config, state, manager)

    def start(self, newest_checkpoint: Callable[[], Path | None] = lambda: None) -> None:
        """Set the model to training and check that replicas are equal; collective.

        Args:
            newest_checkpoint: returns the newest checkpoint or None, for the line that ends a run.

        Raises:
            UserError: ranks that should hold equal parameters do not; on all ranks alike.
        """
        self.guard.newest_checkpoint = newest_checkpoint
        self.state.train()
        check_replicas(self.state.parameters, self.manager, self.state.step)

    def train_step(self, batch: Batch, pending_signal: Callable[[], int] = lambda: 0) -> StepRecord:
        """Take one optimizer step on a batch, and return what there is to log.

        Every rank of the run calls this with its own rows of its own samples. All ranks run the
        numbered blocks in this order; within a group, collectives come in the same order on every
        rank.

        Raises:
            UserError: the loss or the gradient is not finite and training has to stop, or replicas
                differ; on all ranks alike.
        """
        config, state, manager = self.config, self.state, self.manager
        lr = float(state.schedule.get_last_lr()[0])
        self.guard.save_buffers()

        # 0. Turn, mirror and add noise. The rows of mirrored samples travel between the ranks of
        #    the domain, which draw the same for a sample.
        if self.augmentation is not None:
            samples = [sample for part in self.sample_indices(batch) for sample in part]
            batch = self.augmentation(batch, state.step, samples)

        # 1. Seed, forward and backward: `.grad` holds the gradient of the global batch.
        share = self.compute_gradients(batch)

        # 2. Clip. The norm is the same on every rank: gradients are summed over bands and members
        #    and averaged over the data axis; stages and FSDP shards add up their squares
        #    (all-reduce).
        parameters = state.trainable_parameters.values()
        norm = clip_gradients(parameters, config.gradient_clip, manager)

        # 3. Reduce the loss and agree on a signal to stop: one all-reduce over all ranks. Then look
        #    for NaN and infinity. Here the host waits for the device, unless the device decides:
        #    then the host waits for the step before, which the device has done long ago, and reads
        #    the numbers of this one in the next. It reads those of a step that is logged now, and
        #    so of one that is validated or saved.
        on_device = config.check_finite == "late" and not self.should_log(state.step + 1)
        numbers = reduce_step(share, norm, pending_signal(), manager)
        decision = self.guard.decide(numbers, partial(self.diagnose, batch), on_device)

        # 4. Update the weights and their average. Each rank updates its own weights; nothing is
        #    sent. Where the device decides, the guard updates the average once it knows.
        if not decision.skip:
            with profile_region(OPTIMISER):
                take_step(state.optimizer, decision.skip_on_device)
            if state.average is not None and decision.skip_on_device is None:
                state.average.update()

        # 5. The learning rate moves on after a skipped step, too: it follows the step's number.
        state.schedule.step()
        state.step += 1

        # 6. Compare replicas if it is due: checksums of all parameters, gathered and reduced (MAX).
        if self.check_every and state.step % self.check_every == 0:
            check_replicas(state.parameters, manager, state.step)

        if not self.should_log(state.step):
            return StepRecord(state.step, lr, stop_signal=decision.stop_signal)
        extra = {**self.throughput.metrics(), **self.loss_by_field(), **self.guard.metrics()}
        return StepRecord(
            state.step, lr, decision.loss, decision.grad_norm, extra, decision.stop_signal
        )

    def compute_gradients(self, batch: Batch, observe: PrepareForward | None = None) -> Tensor:
        """Compute the gradients of the coming step, and return this rank's share of the loss.

        Called again with the same batch it draws the same random numbers: that is how the origin of
        a non-finite number is found, by an `observe` that is called before each forward pass.
        """
        state, manager = self.state, self.manager
        # Stages draw different numbers, too; the first band of the first stage, with the first
        # members, draws those of a run on one process.
        stage_and_members = (
            manager.pipeline_rank * manager.ensemble_parallel_size + manager.ensemble_rank
        )
        model_rank = stage_and_members * manager.domain_parallel_size + manager.domain_rank
        seed_step(state.seed, state.step, manager.dp_rank, model_rank)
        state.optimizer.zero_grad(set_to_none=True)
        samples = self.sample_indices(batch)
        if self.denoising is not None:
            batch = self.denoising(batch, state.step, [i for part in samples for i in part])
        prepare_forward = partial(self.prepare_forward, samples, observe)
        if self.graph is not None and observe is None:
            return self.graph(batch, prepare_forward)
        return self.forward_backward(batch, prepare_forward)

    def prepare_forward(
        self,
        samples: Sequence[range],
        observe: PrepareForward | None,
        part: nn.Module,
        micro: int,
        forecast_step: int,
    ) -> None:
        """Draw what a part of the model needs for its coming forward pass; see `PrepareForward`.

        Numbers are drawn per sample and member, not per rank: all bands drop the same branches, and
        have the same noise. `samples` are those of each micro-batch.
        """
        state, members = self.state, own_members(self.config.members, self.manager)
        rows = [(sample, member) for sample in samples[micro] for member in members]
        numbers = [sample * self.config.members + member for sample, member in rows]
        draw_stochastic_depths(part, state.seed, state.step, numbers)
        if self.denoising is not None:
            set_level(part, self.denoising.levels(state.step, samples[micro]))
        else:
            keys = [
                (state.seed, state.step, sample, forecast_step, member) for sample, member in rows
            ]
            draw_noise(part, keys)
        if observe is not None:
            observe(part, micro, forecast_step)

    def diagnose(self, batch: Batch) -> str:
        """Return a sentence on where a batch went wrong; collective."""
        again = partial(self.compute_gradients, batch)
        return diagnose_non_finite(self.state, self.manager, self.forward_backward, batch, again)

    def loss_by_field(self) -> dict[str, float]:
        """Return the last step's loss of each variable and lead time, by name; collective."""
        if self.names is None:
            return {}
        losses = self.forward_backward.channel_losses
        return self.names.loss_by_name(self.sum_over_mesh(losses) / self.manager.dp_world_size)

    def sample_indices(self, batch: Batch) -> list[range]:
        """Return which samples of the global batch each micro-batch of this rank has.

        What is drawn for a sample depends on this index, so that it is the same on every mesh.
        """
        samples = len(batch.times)
        first = self.manager.dp_rank * samples
        size = samples // self.forward_backward.n_microbatches
        return [range(start, start + size) for start in range(first, first + samples, size)]

    def should_log(self, step: int) -> bool:
        """Whether this step is logged; the same answer on every rank."""
        config = self.config
        every = (config.log_every, config.checkpoint_every, config.validate_every or config.steps)
        return step in (1, config.steps) or any(step % n == 0 for n in every)

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        config = self.config
        candidate = config.keep_best and step % (config.validate_every or config.steps) == 0
        return candidate or step == config.steps or step % config.checkpoint_every == 0

    def sum_over_mesh(self, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares; collective.

        Of the pipeline's ranks only those of the last stage have a share that is not zero.
        """
        total = sum_over_ranks(share, self.manager)
        total = self.manager.ensemble_transport.all_reduce(total)
        if self.manager.pipeline_parallel_size > 1:
            dist.all_reduce(total, group=self.manager.pipeline_group)
        return total


@final
class AgreedStep(NamedTuple):
    """What all ranks know of a step: the same numbers on each of them.

    `loss` is that of the global batch, `grad_norm` the norm of the global gradient before clipping,
    `stop_signal` the signal for which all ranks stop after this step; 0: none.
    """

    loss: float
    grad_norm: float
    stop_signal: int

    @classmethod
    def read(cls, numbers: Sequence[float]) -> AgreedStep:
        """Read what `reduce_step` returned."""
        loss, grad_norm, *marks = numbers
        return cls(loss, grad_norm, marked_signal(marks))


def reduce_step(
    share: Tensor, norm: Tensor, pending_signal: int, manager: DomainParallelManager
) -> Tensor:
    """Return the numbers of an `AgreedStep`, on the device and in float64; collective.

    All travel in one message of all ranks: two ranks never see different numbers, and a step waits
    for the device at most once. A signal may reach one rank only, or each rank during another step:
    a rank puts a 1 into the message for the signal that reached it, and all read the same sum.

    `share` is this rank's share of the loss, zero where it has none, as on early pipeline stages.
    `norm` is that of the global gradient, the same on all ranks.

    Shapes:
        -> `(2 + stop signals,)`.
    """
    share = share.detach().double()
    numbers = torch.stack([share, norm.detach().to(share)])
    total = torch.cat([numbers, signal_marks(pending_signal, share)])
    if manager.mesh is not None:
        dist.all_reduce(total)
    else:
        total = manager.transport.all_reduce(total)
    sizes = [manager.dp_world_size, manager.world_size, *[1] * len(STOP_SIGNALS)]
    return total / constant_tensor(sizes, total.device, total.dtype)


def agree_on_signal(pending_signal: int, manager: DomainParallelManager) -> int:
    """Return the signal for which all ranks have to stop, or 0, outside of a step; collective."""
    distributed = manager.mesh is not None
    device = message_device() if distributed else torch.device("cpu")
    marks = signal_marks(pending_signal, torch.zeros(0, device=device))
    if distributed:
        dist.all_reduce(marks)
    return marked_signal(marks.tolist())


def signal_marks(number: int, like: Tensor) -> Tensor:
    """Return a 1 for a signal, and zeros for all other stop signals; for 0 only zeros.

    Shapes:
        -> `(stop signals,)`, on the device and in the dtype of `like`.
    """
    marks = like.new_zeros(len(STOP_SIGNALS))
    if number:  # a number from the host makes it wait for a GPU
        marks[[int(each) for each in STOP_SIGNALS].index(number)] = 1
    return marks


def marked_signal(marks: Sequence[float]) -> int:
    """Return the largest signal that is marked in the sum of all ranks' marks; 0: none."""
    return max(
        (int(number) for number, mark in zip(STOP_SIGNALS, marks, strict=True) if mark), default=0
    )


@final
class StepDecision(NamedTuple):
    """Whether to update the weights, decided alike by all ranks after the backward pass.

    Attributes:
        loss: of the global batch; None if only the device knows it yet.
        grad_norm: before clipping; None if only the device knows it yet.
        skip: whether to leave out the update, as far as the host knows.
        stop_signal: the signal for which all ranks stop after this step; 0: none.
        skip_on_device: 1 on the device if the update has to be left out, else 0; None: the host
            has decided.
    """

    loss: float | None
    grad_norm: float | None
    skip: bool
    stop_signal: int = 0
    skip_on_device: Tensor | None = None


@final
class UnreadStep(NamedTuple):
    """A step on which the device has decided, and whose numbers the host has not read yet.

    Attributes:
        step: the number of steps that were taken before.
        numbers: on their way to the host's memory, or there.
        arrival: of the numbers; None if they are there.
        diagnose: see `NonFiniteGuard.decide`.
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

    It does not if the loss or the gradient is not finite, or the gradient has exploded. The
    gradient norms of earlier steps, `history`, are part of checkpoints. `newest_checkpoint` is
    called on rank 0 when training stops.
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
        self.unread: UnreadStep | None = None

    def save_buffers(self) -> None:
        """Keep a copy of the buffers that a forward pass may change, if steps may be skipped."""
        if self.config.on_nonfinite == "skip":
            self.buffers = [buffer.clone() for buffer in self._persistent_buffers()]

    def decide(
        self, numbers: Tensor, diagnose: Callable[[], str], on_device: bool = False
    ) -> StepDecision:
        """Decide on the update; collective, with the same result on all ranks.

        Args:
            numbers: of this step, as `reduce_step` returns them.
            diagnose: finds the origin of a non-finite number; collective, and returns the same
                sentence on every rank.
            on_device: whether the device decides, and the host reads the numbers in the next call.
                The host decides now if the step before says that training stops.

        Raises:
            UserError: training has to stop, because of this step or of the one before, if the
                device decided on it; the same line on all ranks.
        """
        # Every decision before this one is known from here on: the history is complete.
        stop_signal = self._read_step_before()
        if on_device and not stop_signal:
            return self._decide_on_device(numbers, diagnose)
        decision = self._decide_on_host(numbers.tolist(), diagnose)
        if decision.skip:
            self._undo_step()
        return decision._replace(stop_signal=stop_signal or decision.stop_signal)

    def _decide_on_device(self, numbers: Tensor, diagnose: Callable[[], str]) -> StepDecision:
        """Decide as `_decide_on_host` will in the next step, and undo what forward changed.

        The next forward may start from a step that was left out, as it would if the host had left
        it out.
        """
        loss, norm = numbers[:2]
        is_good = torch.isfinite(loss) & torch.isfinite(norm) & (norm <= self._largest_norm())
        if self.buffers:
            with torch.no_grad():
                for buffer, before in zip(self._persistent_buffers(), self.buffers, strict=True):
                    buffer.copy_(torch.where(is_good.to(buffer.device), buffer, before))
        arrival = None
        if numbers.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
        self.unread = UnreadStep(self.state.step, numbers, arrival, diagnose)
        return StepDecision(None, None, skip=False, skip_on_device=~is_good)

    def _read_step_before(self) -> int:
        """Do what is left to do for the step before, if the device decided on it; collective.

        Its gradients are gone, but not its batch and not the weights and moments that it started
        from, if it was skipped: no later step was taken.

        Returns:
            The signal for which all ranks stop; 0: none.

        Raises:
            UserError: see `decide`. The state is then that before the skipped step.
        """
        unread, self.unread = self.unread, None
        if unread is None:
            return 0
        now, self.state.step = self.state.step, unread.step
        decision = self._decide_on_host(unread.read(), unread.diagnose)
        self.state.step = now
        if not decision.skip and self.state.average is not None:
            self.state.average.update()
        return decision.stop_signal

    def _decide_on_host(
        self, numbers: Sequence[float], diagnose: Callable[[], str]
    ) -> StepDecision:
        """Decide on the step after `state.step`, and write the decision into the history."""
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
            return StepDecision(loss, grad_norm, skip=False, stop_signal=stop_signal)
        self.history.in_a_row += 1
        if self.config.on_nonfinite == "stop" or self.history.in_a_row >= MAX_CONSECUTIVE_SKIPS:
            raise UserError(self._error_message(fault, "" if finite else diagnose()))
        self._record_skip(fault)
        return StepDecision(loss, grad_norm, skip=True, stop_signal=stop_signal)

    def metrics(self) -> dict[str, float]:
        """Return the number of steps that the run has skipped, for the log."""
        return {"skipped": self.history.skipped} if self.config.on_nonfinite == "skip" else {}

    def _largest_norm(self) -> float:
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
        self.history.skipped += 1
        if self.manager.rank == 0:
            logger.warning(
                "%s: skipped (%d in a row; the run stops at %d)",
                fault,
                self.history.in_a_row,
                MAX_CONSECUTIVE_SKIPS,
            )

    def _undo_step(self) -> None:
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
