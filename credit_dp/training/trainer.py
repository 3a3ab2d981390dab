"""The training loop: one optimiser step after another, the same on every mesh."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from credit_dp.config import TrainerConfig
from credit_dp.data.loader import Batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.metrics import sum_over_ranks
from credit_dp.forecast.step import ForecastStep
from credit_dp.models.blocks import draw_depths
from credit_dp.training.checkpoint import TrainingState
from credit_dp.training.loss import WeightedLoss
from credit_dp.training.optimisation import seed_step


@final
@dataclass(frozen=True)
class Record:
    """What one optimiser step leaves for the log.

    `loss` is that of the global batch before the step's update, `grad_norm` the global norm before
    clipping; both None at steps that nobody looks at, where they are not computed.
    """

    step: int
    lr: float
    loss: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None  # per step, averaged since the last record with numbers

    def numbers(self) -> dict[str, float]:
        """Those that are there, by name."""
        named = {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "seconds": self.seconds,
        }
        return {name: value for name, value in named.items() if value is not None}


@final
class Trainer:
    """Takes optimiser steps on batches of the rank's own rows.

    `forecast` calls the model through its DDP wrapper where there is more than one rank.
    """

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainingState,
        forecast: ForecastStep,
        loss: WeightedLoss,
        manager: DomainParallelManager,
    ) -> None:
        self.config = config
        self.state = state
        self.forecast = forecast
        self.loss = loss
        self.manager = manager

    def steps(self, batches: Iterable[Batch]) -> Iterator[Record]:
        """Train from the state's step to `trainer.steps`, telling of each step once it is done.

        Raises:
            UserError: the loss or the gradient is not finite; on all ranks alike.
        """
        self.state.model.train()
        since, began = self.state.step, time.monotonic()
        left = self.config.steps - self.state.step
        for _, batch in zip(range(left), batches, strict=False):
            lr = float(self.state.schedule.get_last_lr()[0])
            share, norm = self.update(batch)
            self.state.step += 1
            if not self.observed(self.state.step):
                yield Record(self.state.step, lr)
                continue
            loss = self.global_loss(share)
            self.refuse_non_finite(loss, norm.item())
            pace = (time.monotonic() - began) / (self.state.step - since)
            yield Record(self.state.step, lr, loss, norm.item(), pace)
            since, began = self.state.step, time.monotonic()

    def update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One optimiser step: this rank's share of the loss, and the global gradient norm."""
        state, manager = self.state, self.manager
        seed_step(state.seed, state.step, manager.dp_rank, manager.domain_rank)
        draw_depths(state.model, state.seed, state.step, self.places(batch))
        state.optimiser.zero_grad(set_to_none=True)
        forecast = self.forecast(batch.now, batch.forcing, batch.static)
        share = self.loss(forecast, batch.target)
        # DDP averages over all ranks. Over the data axis that is what is wanted; over the domain
        # axis gradients have to be summed, since each rank's loss is only its rows' share.
        torch.autograd.backward(share * manager.domain_world_size)
        # After DDP every rank holds the gradient of the whole globe and batch, so this norm is
        # already the global one: it is the same everywhere, and so is the clipping.
        limit = self.config.gradient_clip
        norm = clip_grad_norm_(state.model.parameters(), math.inf if limit is None else limit)
        state.optimiser.step()
        state.schedule.step()
        return share.detach(), norm.detach()

    def places(self, batch: Batch) -> range:
        """Which samples of the global batch these are.

        What is drawn for a sample goes by its place, so that it is the same on every mesh.
        """
        size = len(batch.now)
        return range(self.manager.dp_rank * size, (self.manager.dp_rank + 1) * size)

    def observed(self, step: int) -> bool:
        """Whether the numbers of this step are wanted; the same answer on every rank.

        Before a checkpoint they are, so that no checkpoint holds weights that are not numbers.
        """
        every = (self.config.log_every, self.config.checkpoint_every)
        return step in (1, self.config.steps) or any(step % n == 0 for n in every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return step == self.config.steps or step % self.config.checkpoint_every == 0

    def in_step(self) -> bool:
        """Whether all ranks are at the same step; collective, and the same answer on every rank."""
        own = torch.tensor([self.state.step, self.state.step**2], device=self.loss.weight.device)
        total, squares = sum_over_ranks(own, self.manager).tolist()
        # Cauchy-Schwarz: the square of a sum reaches this bound only if all terms are equal.
        return bool(total**2 == squares * self.manager.world_size)

    def global_loss(self, share: Tensor) -> float:
        """The loss of the whole globe and batch: summed over rows, averaged over the data axis."""
        total = float(sum_over_ranks(share, self.manager))
        return total / self.manager.dp_world_size

    def refuse_non_finite(self, loss: float, norm: float) -> None:
        """End the run when training has diverged.

        Both numbers are the same on all ranks, so all of them end here, and none waits for another.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        raise UserError(
            f"trainer: the loss has to stay finite, but is {loss} with gradient norm {norm} at "
            f"step {self.state.step}. Lower optimizer.lr (now {self.state.schedule.base_lrs[0]}) "
            f"or trainer.gradient_clip (now {self.config.gradient_clip})."
        )
