"""The training loop: one optimizer step after another, the same on every mesh."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from credit_dp.config import TrainerConfig
from credit_dp.data.loader import Batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.metrics import sum_over_ranks
from credit_dp.models.blocks import draw_stochastic_depths
from credit_dp.profiling import OPTIMISER, profile_region
from credit_dp.training.checkpoint import TrainingState
from credit_dp.training.diagnostics import NonFiniteGuard, diagnose_non_finite
from credit_dp.training.forward_backward import ForwardBackward, PrepareMicroBatch, clip_gradients
from credit_dp.training.optim import seed_step
from credit_dp.training.replicas import check_replicas
from credit_dp.training.throughput import ThroughputMeter


@final
@dataclass(frozen=True)
class LossNames:
    """Of the channels that come out, and the hours of a forecast step.

    Attributes:
        variables: of each channel.
        step_hours: of one forecast step.
    """

    variables: tuple[str, ...]
    step_hours: int

    def loss_by_name(self, losses: Tensor) -> dict[str, float]:
        """`loss/VARIABLE`, its mean over the steps, and `loss/+HOURSh` if there are several steps.

        Either kind adds up to, or has the mean of, the loss.

        Shapes:
            `(steps, channels)`, what each channel adds to the loss of each step.
        """
        found = dict.fromkeys((f"loss/{variable}" for variable in self.variables), 0.0)
        for variable, part in zip(self.variables, losses.mean(0).tolist(), strict=True):
            found[f"loss/{variable}"] += part
        steps = losses.sum(1).tolist()
        if len(steps) > 1:
            hours = (self.step_hours * step for step in range(1, len(steps) + 1))
            found |= {f"loss/+{h}h": part for h, part in zip(hours, steps, strict=True)}
        return found


@final
@dataclass(frozen=True)
class StepRecord:
    """What one optimiser step leaves for the log.

    `loss` is that of the global batch before the step's update, `grad_norm` the global norm before
    clipping; both None at steps that nobody looks at, where they are not computed.
    """

    step: int
    lr: float
    loss: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None  # per step, averaged since the last record with numbers
    extra: Mapping[str, float] = field(
        default_factory=dict
    )  # see `ThroughputMeter` and `loss_by_field`

    def metrics(self) -> dict[str, float]:
        """Those that are there, by name."""
        named = {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "seconds": self.seconds,
        }
        found = {name: value for name, value in named.items() if value is not None}
        return {**found, **self.extra}


@final
class Trainer:
    """Takes optimiser steps on batches of the rank's own rows.

    Args:
        config: of the trainer.
        state: what changes.
        gradients: how a batch's come about on this mesh.
        manager: this rank's place in the mesh.
        check_every: steps between checks that replicas are equal; 0: the first time only.
        measures: of what a step takes and sends.
        names: of the parts of the loss, if they are to be told.
    """

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainingState,
        gradients: ForwardBackward,
        manager: DomainParallelManager,
        check_every: int = 0,
        measures: ThroughputMeter | None = None,
        names: LossNames | None = None,
    ) -> None:
        self.config = config
        self.state = state
        self.forward_backward = gradients
        self.manager = manager
        self.check_every = check_every
        self.throughput_meter = measures or ThroughputMeter(manager)
        self.names = names
        self.guard = NonFiniteGuard(config, state, manager)

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        """Train from the state's step to `trainer.steps`, telling of each step once it is done.

        Raises:
            UserError: see `NonFiniteGuard`, or ranks that should have equal parameters have not;
            on all ranks alike.
        """
        self.state.train()
        check_replicas(self.state.parameters, self.manager, self.state.step)
        since, began = self.state.step, time.monotonic()
        left = self.config.steps - self.state.step
        for _, batch in zip(
            range(left), self.throughput_meter.timed_batches(batches), strict=False
        ):
            lr = float(self.state.schedule.get_last_lr()[0])
            share, norm = self.update(batch)
            self.state.step += 1
            if self.check_every and self.state.step % self.check_every == 0:
                check_replicas(self.state.parameters, self.manager, self.state.step)
            if not self.should_log(self.state.step):
                yield StepRecord(self.state.step, lr)
                continue
            loss = self.global_loss(share)
            pace = (time.monotonic() - began) / (self.state.step - since)
            more = {
                **self.throughput_meter.metrics(),
                **self.loss_by_field(),
                **self.guard.metrics(),
            }
            yield StepRecord(self.state.step, lr, loss, norm.item(), pace, more)
            since, began = self.state.step, time.monotonic()

    def update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One optimiser step: this rank's share of the loss, and the global gradient norm."""
        state = self.state
        self.guard.begin()
        share = self.compute_gradients(batch)
        norm = clip_gradients(
            state.trainable_parameters.values(), self.config.gradient_clip, self.manager
        )
        if self.guard.accepts(share, norm, partial(self.diagnose, batch)):
            with profile_region(OPTIMISER):
                state.optimizer.step()
            if state.average is not None:
                state.average.update()
        state.schedule.step()
        return share, norm.detach()

    def compute_gradients(self, batch: Batch, begin: PrepareMicroBatch | None = None) -> Tensor:
        """Leave the gradients of the coming step, and return this rank's share of the loss.

        `begin` is told of each micro-batch before it is computed.
        """
        state, manager = self.state, self.manager
        # Stages draw different numbers, too; those of the first one are what one process draws.
        place = manager.pipeline_rank * manager.domain_parallel_size + manager.domain_rank
        seed_step(state.seed, state.step, manager.dp_rank, place)
        state.optimizer.zero_grad(set_to_none=True)
        places = self.sample_indices(batch)

        def prepare(part: nn.Module, micro: int) -> None:
            draw_stochastic_depths(part, state.seed, state.step, places[micro])
            if begin is not None:
                begin(part, micro)

        return self.forward_backward(batch, prepare)

    def diagnose(self, batch: Batch) -> str:
        """Where a batch went wrong, for people; collective."""
        again = partial(self.compute_gradients, batch)
        return diagnose_non_finite(self.state, self.manager, self.forward_backward, batch, again)

    def loss_by_field(self) -> dict[str, float]:
        """The last step's loss of each variable and each lead, by name; collective."""
        if self.names is None:
            return {}
        return self.names.loss_by_name(
            self.sum_over_mesh(self.forward_backward.channel_losses) / self.manager.dp_world_size
        )

    def sample_indices(self, batch: Batch) -> list[range]:
        """Which samples of the global batch those of each micro-batch are.

        What is drawn for a sample goes by its place, so that it is the same on every mesh.
        """
        samples = len(batch.times)
        first, size = (
            self.manager.dp_rank * samples,
            samples // self.forward_backward.n_microbatches,
        )
        starts = range(first, first + samples, size)
        return [range(start, start + size) for start in starts]

    def should_log(self, step: int) -> bool:
        """Whether the numbers of this step are wanted; the same answer on every rank."""
        config = self.config
        every = (config.log_every, config.checkpoint_every, config.validate_every or config.steps)
        return step in (1, config.steps) or any(step % n == 0 for n in every)

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        config = self.config
        candidate = config.keep_best and step % config.validate_every == 0
        return candidate or step == config.steps or step % config.checkpoint_every == 0

    def global_loss(self, share: Tensor) -> float:
        """The loss of the whole globe and batch: summed over rows, averaged over the data axis.

        Of the pipeline's ranks only the last one has a share that is not zero.
        """
        return float(self.sum_over_mesh(share)) / self.manager.dp_world_size

    def sum_over_mesh(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares; collective."""
        total = sum_over_ranks(share, self.manager)
        if self.manager.pipeline_parallel_size > 1:
            dist.all_reduce(total, group=self.manager.pipeline_group)
        return total
