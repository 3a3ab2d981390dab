"""One pass over a batch: forward and backward of its micro-batches, on the model or its stages."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from credit_dp.data.loader import Batch
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.forecast.step import ForecastStep
from credit_dp.pipeline_parallel.pipeline import Pipeline
from credit_dp.training.gradients import average_gradients
from credit_dp.training.loss import WeightedLoss

# Prepares a part of the model for a micro-batch, given by its number.
Prepare = Callable[[nn.Module, int], None]


class Pass(ABC):
    """Leaves the gradients of the global batch in `.grad`, as one process would have them.

    Ranks of a domain have the loss of their own rows only, so that gradients are summed over the
    domain; over the data axis they are averaged. What averages over both (DDP, FSDP2) therefore
    gets a loss that is multiplied by the ranks of a domain.

    Args:
        loss: of a micro-batch.
        micros: into how many micro-batches a batch is cut.
        domain: ranks of a domain.
    """

    def __init__(self, loss: WeightedLoss, micros: int, domain: int) -> None:
        self.loss = loss
        self.micros = micros
        self.domain = domain

    @abstractmethod
    def __call__(self, batch: Batch, prepare: Prepare) -> Tensor:
        """Add to the gradients, and return this rank's share of the batch's loss."""

    def waited(self) -> str:
        """How long ranks waited for each other in the last pass, for people; collective."""
        return ""


@final
class ModelPass(Pass):
    """Over a model that this rank holds whole.

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
        total = self.loss.weight.new_zeros(())
        for micro, part in enumerate(batch.split(self.micros)):
            prepare(self.model, micro)
            with self._sending(micro == self.micros - 1):
                forecast = self.forecast(part.now, part.forcing, part.static)
                share = self.loss(forecast, part.target) / self.micros
                torch.autograd.backward(share * self.domain)
            total += share.detach()
        self._refuse_unused()
        return total

    def _refuse_unused(self) -> None:
        if not isinstance(self.model, DistributedDataParallel):
            return
        for name, parameter in self.model.module.named_parameters():
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
        channels = len(self.loss.scale)
        # The state that the output is added to goes with the target, as more channels of it.
        wanted = torch.cat([batch.target, batch.now[:, -self.forecast.states :]], dim=1)

        def loss(output: Tensor, wanted: Tensor) -> Tensor:
            target, last = wanted[:, :channels], wanted[:, channels:]
            share = self.loss(self.forecast.fields(output, last), target)
            return share * self.domain / self.micros

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
