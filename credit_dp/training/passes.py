"""One pass over a batch: forward and backward of its micro-batches, on the model or its stages."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from credit_dp.data.loader import Batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.forecast.step import ForecastStep
from credit_dp.spans import BACKWARD, FORWARD, span
from credit_dp.training.gradients import average_gradients
from credit_dp.training.loss import WeightedLoss
from credit_dp.training.recomputed import Recomputed

if TYPE_CHECKING:
    from credit_dp.pipeline_parallel.pipeline import Pipeline

# Prepares a part of the model for a micro-batch, given by its number.
Prepare = Callable[[nn.Module, int], None]


class Pass(ABC):
    """Leaves the gradients of the global batch in `.grad`, as one process would have them.

    Ranks of a domain have the loss of their own rows only, so that gradients are summed over the
    domain; over the data axis they are averaged. What averages over both (DDP, FSDP2) therefore
    gets a loss that is multiplied by the ranks of a domain.

    Args:
        loss: of a forecast step, of a micro-batch.
        micros: into how many micro-batches a batch is cut.
        domain: ranks of a domain.

    Attributes:
        detail: this rank's share of the last batch's loss, by forecast step and channel,
            `(steps, C)`; the loss is the mean over steps of the sum over channels.
    """

    def __init__(self, loss: WeightedLoss, micros: int, domain: int) -> None:
        self.loss = loss
        self.micros = micros
        self.domain = domain
        self.detail = self.no_loss()

    def no_loss(self, steps: int = 1) -> Tensor:
        """Zeros like `detail`."""
        return self.loss.weight.new_zeros(steps, self.channels)

    @property
    def channels(self) -> int:
        """How many come out of a forecast step."""
        return len(self.loss.scale)

    @abstractmethod
    def __call__(self, batch: Batch, prepare: Prepare) -> Tensor:
        """Add to the gradients, and return this rank's share of the batch's loss."""

    def waited(self) -> str:
        """How long ranks waited for each other in the last pass, for people; collective."""
        return ""


@final
class ModelPass(Pass):
    """Over a model that this rank holds whole, in rollouts of as many steps as targets.

    The gradient goes back through all steps, each of which starts from the rank's own rows of the
    one before. A sample loses the same branches to stochastic depth in all of them.

    Args:
        model: what `forecast` calls: in DDP, sharded by FSDP2, or alone.
    """

    def __init__(
        self,
        model: nn.Module,
        forecast: ForecastStep,
        loss: WeightedLoss,
        micros: int,
        domain: int,
    ) -> None:
        super().__init__(loss, micros, domain)
        self.model = model
        self.forecast = forecast

    def __call__(self, batch: Batch, prepare: Prepare) -> Tensor:
        """See `Pass`. Gradients are sent once, after the last micro-batch, by DDP; FSDP2 adds up
        shares, and sends at each.

        Raises:
            UserError: the loss does not depend on a parameter, which DDP would wait for.
        """
        self.detail = self.no_loss(self._steps(batch))
        for micro, part in enumerate(batch.split(self.micros)):
            prepare(self.model, micro)
            with self._sending(micro == self.micros - 1):
                with span(FORWARD):
                    losses = self._losses(part) / self.micros
                with span(BACKWARD):
                    torch.autograd.backward(losses.mean(0).sum() * self.domain)
            self.detail += losses.detach()
        self._refuse_unused()
        return self.detail.mean(0).sum()

    def _losses(self, part: Batch) -> Tensor:
        """What each channel adds to the loss of each step: `(steps, C)`."""
        steps = self._steps(part)
        targets = part.target.tensor_split(steps, dim=1)
        forcings = part.forcing.tensor_split(steps, dim=1)
        forecasts = self.forecast.rollout(part.now, forcings, part.static)
        # Targets first: a rollout that is asked for no more makes no further state.
        pairs = zip(targets, forecasts, strict=False)
        return torch.stack([self.loss.by_channel(made, target) for target, made in pairs])

    def _steps(self, batch: Batch) -> int:
        return batch.target.shape[1] // self.channels

    def _refuse_unused(self) -> None:
        if not isinstance(self.model, DistributedDataParallel):
            return
        model = self.model.module
        plain = model.model if isinstance(model, Recomputed) else model
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise UserError(
                    f"parallel.data_mode: ddp needs every parameter in the loss, {name} is not. "
                    "Take it out of the model, set its requires_grad to False, or use "
                    "parallel.data_mode=fsdp2."
                )

    def _sending(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()


@final
class PipelinePass(Pass):
    """Over the stages of a model that this rank holds.

    Args:
        pipeline: all ranks' stages.
        forecast: knows how an output becomes fields.
        group: over which gradients are averaged after the last micro-batch; None where that is
            done by FSDP2, or there is nobody else.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        forecast: ForecastStep,
        loss: WeightedLoss,
        micros: int,
        manager: DomainParallelManager,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(loss, micros, manager.domain_world_size)
        self.pipeline = pipeline
        self.forecast = forecast
        self.group = group

    def __call__(self, batch: Batch, prepare: Prepare) -> Tensor:
        """See `Pass`; the share is zero on ranks that have not the last stage."""
        inputs = torch.cat([batch.now, batch.forcing, batch.static], dim=1)
        channels, self.detail = self.channels, self.no_loss()
        # The state that the output is added to goes with the target, as more channels of it.
        wanted = torch.cat([batch.target, batch.now[:, -self.forecast.states :]], dim=1)

        def loss(output: Tensor, wanted: Tensor) -> Tensor:
            target, last = wanted[:, :channels], wanted[:, channels:]
            losses = self.loss.by_channel(self.forecast.fields(output, last), target) / self.micros
            self.detail += losses.detach()
            return losses.sum() * self.domain

        def begin(part: int, micro: int) -> None:
            prepare(self.pipeline.parts[part], micro)

        total = self.pipeline.backward(inputs, wanted, loss, begin)
        if self.group is not None:
            parameters = (p for part in self.pipeline.parts for p in part.parameters())
            average_gradients(parameters, self.group)
        return total / self.domain

    def waited(self) -> str:
        """See `Pass`: the mean over the pipeline, beside what equal stages would take."""
        measured, theory = self.pipeline.bubble(), self.pipeline.bubble_of_equal_stages()
        return (
            f"pipeline: ranks waited {measured:.1%} of the last step's forwards and backwards, "
            f"{theory:.1%} in theory"
        )
