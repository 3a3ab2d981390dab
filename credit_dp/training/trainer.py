"""The training step: the same on every mesh, in the order of `Trainer.train_step`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from credit_dp.config import TrainerConfig
from credit_dp.data.loader import Batch
from credit_dp.distributed.collectives import sum_over_ranks
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.models.blocks import draw_noise, draw_stochastic_depths
from credit_dp.process import OPTIMISER, profile_region
from credit_dp.training.augmentation import Augmentation
from credit_dp.training.cuda_graph import StepGraph
from credit_dp.training.diffusion import Denoising, set_level
from credit_dp.training.forward_backward import ForwardBackward, PrepareForward, clip_gradients
from credit_dp.training.non_finite import NonFiniteGuard, diagnose_non_finite
from credit_dp.training.optim import seed_step, step_unless
from credit_dp.training.replicas import check_replicas
from credit_dp.training.state import TrainingState
from credit_dp.training.step_agreement import reduce_step
from credit_dp.training.throughput import ThroughputMeter


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
        config: of the trainer.
        state: all that changes while training.
        forward_backward: computes the gradients of a batch on this mesh.
        manager: this rank's coordinates on the mesh.
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

        Args:
            batch: this rank's rows and samples.
            pending_signal: returns the signal for which this rank has to stop, or 0.

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
        #    for NaN and infinity. Here the host waits for the device, unless the check is
        #    late: then it waits for the step before, which the device has done long ago. A late
        #    check of this step is read in the next one; of a step that is logged, and so of one
        #    that is validated or saved, every check is read now.
        late = config.check_finite == "late" and not self.should_log(state.step + 1)
        numbers = reduce_step(share, norm, pending_signal(), manager)
        check = self.guard.check(numbers, partial(self.diagnose, batch), late)

        # 4. Update the weights and their average. Each rank updates its own weights; nothing is
        #    sent. The guard updates the average itself once a late check is read.
        if check.accepted:
            with profile_region(OPTIMISER):
                step_unless(state.optimizer, check.rejected)
            if state.average is not None and check.rejected is None:
                state.average.update()

        # 5. The learning rate moves on after a skipped step, too: it follows the step's number.
        state.schedule.step()
        state.step += 1

        # 6. Compare replicas if it is due: checksums of all parameters, gathered and reduced (MAX).
        if self.check_every and state.step % self.check_every == 0:
            check_replicas(state.parameters, manager, state.step)

        if not self.should_log(state.step):
            return StepRecord(state.step, lr, stop_signal=check.stop_signal)
        extra = {**self.throughput.metrics(), **self.loss_by_field(), **self.guard.metrics()}
        return StepRecord(
            state.step, lr, check.loss, check.grad_norm, extra, stop_signal=check.stop_signal
        )

    def compute_gradients(self, batch: Batch, begin: PrepareForward | None = None) -> Tensor:
        """Compute the gradients of the coming step, and return this rank's share of the loss.

        Called again with the same batch it draws the same random numbers: that is how the origin of
        a non-finite number is found.

        Args:
            batch: this rank's rows and samples.
            begin: called before each forward pass of a part of the model, too.
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
        members, denoising = own_members(self.config.members, manager), self.denoising
        if denoising is not None:
            batch = denoising(batch, state.step, [i for of_micro in samples for i in of_micro])

        def prepare(part: nn.Module, micro: int, forecast_step: int) -> None:
            # Per sample and member, not per rank: all bands drop the same branches, and have the
            # same noise.
            rows = [(sample, member) for sample in samples[micro] for member in members]
            numbers = [sample * self.config.members + member for sample, member in rows]
            draw_stochastic_depths(part, state.seed, state.step, numbers)
            if denoising is not None:
                set_level(part, denoising.levels(state.step, samples[micro]))
            else:
                keys = [
                    (state.seed, state.step, sample, forecast_step, member)
                    for sample, member in rows
                ]
                draw_noise(part, keys)
            if begin is not None:
                begin(part, micro, forecast_step)

        if self.graph is not None and begin is None:
            return self.graph(batch, prepare)
        return self.forward_backward(batch, prepare)

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
