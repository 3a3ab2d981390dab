"""Forward and backward of a batch: its micro-batches, on the model or its stages."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from credit_dp.config import Config
from credit_dp.data.loader import Batch
from credit_dp.distributed.process_groups import new_group_of
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.gradients import reduce_gradients
from credit_dp.domain_parallel.recomputation import (
    CheckpointedForward,
    has_several_layers,
    repeated_blocks,
)
from credit_dp.domain_parallel.transport import message_device
from credit_dp.errors import UserError
from credit_dp.models.blocks import keep_draws
from credit_dp.models.segments import SegmentedModel
from credit_dp.process import BACKWARD, FORWARD, profile_region
from credit_dp.torch_private import version_of
from credit_dp.training.forecast_step import ForecastStep, repeat_members
from credit_dp.training.loss import WeightedLoss
from credit_dp.training.parameter_shards import is_dtensor, is_fsdp_module

if TYPE_CHECKING:
    from credit_dp.pipeline_parallel.pipeline import Pipeline


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks of a group, as DDP does in backward.

    Collective. A missing gradient counts as zeros, and stays missing where no rank has one.
    """
    size = dist.get_world_size(group)

    def mean(total: Tensor) -> Tensor:
        total /= size
        dist.all_reduce(total, group=group)
        return total

    reduce_gradients(parameters, mean)


def new_stage_group(manager: DomainParallelManager) -> dist.ProcessGroup | None:
    """Return the group of all ranks that hold the same stages; None if this rank is alone there.

    A collective of all ranks.
    """
    if manager.replicas == 1:
        return None
    return new_group_of(torch.arange(manager.world_size).view(-1, manager.replicas).tolist())


def clip_gradients(
    parameters: Iterable[nn.Parameter], limit: float | None, manager: DomainParallelManager
) -> Tensor:
    """Scale all gradients down to a global norm of `limit`, and return the norm before.

    Gradients are those of the whole globe and batch already: alike on all replicas, or a share of
    them with fsdp2; other ranks of the pipeline have other parameters.
    The norm is the same on every rank. Collective over the pipeline group, and with fsdp2 over the
    ranks that share the parameters.
    """
    learning = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in learning if p.grad is not None])
    if is_dtensor(norm):
        norm = norm.full_tensor()
    if manager.pipeline_parallel_size > 1:
        # In one dtype: a stage in which nothing learns has a norm of another.
        squares = norm.double().square().to(message_device(manager.pipeline_group))
        dist.all_reduce(squares, group=manager.pipeline_group)
        norm = squares.sqrt()
    if limit is not None and not math.isinf(limit):
        clip_grads_with_norm_(learning, limit, norm)
    return norm


@final
class ActivationCheckpointWrapper(nn.Module):
    """Keeps only the input of each forward pass, and what it received, and computes the rest again.

    DDP is wrapped around it and not the other way round: DDP's own forward must not run again in
    backward.

    Args:
        model: the model on its device, its parameters sharded already if they are to be.

    Raises:
        UserError: at the first forward pass, if it changes a buffer: the second pass would again.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.checkpointed = CheckpointedForward(model, "the model", keep_draws, with_hooks=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        return self.checkpointed(x)  # type: ignore[no-any-return]


def recomputed_modules(model: nn.Module, config: Config, domain: int) -> list[str]:
    """Return the paths of the modules that backward computes again; "" stands for the model.

    A model stops checkpointing its blocks by itself where that would send rows again, and with
    `trainer.checkpoint_activations=blocks`. It sends again in a pipeline, or within a step that is
    computed again.

    Args:
        domain: ranks that share its rows.
    """
    chosen = config.trainer.checkpoint_activations
    if chosen == "step":
        return [""]
    if not isinstance(model, SegmentedModel):
        return repeated_blocks(model) if chosen == "blocks" else []
    segments = model.segments()
    if chosen == "blocks":
        model.checkpointing = False
    else:
        by_itself = getattr(config.model, "activation_checkpointing", False)
        sends_again = by_itself and domain > 1 and config.parallel.pipeline == 1
        segments = [s for s in segments if s.is_recomputed and sends_again]
        model.checkpointing = not segments and (by_itself or model.checkpointing)
    names = dict.fromkeys(segment.name for segment in segments)
    return [name for name in names if has_several_layers(model.get_submodule(name))]


# Called before each forward pass of a part of the model, with the part, the number of the
# micro-batch, from 0, and that of the forecast step, from 1.
PrepareForward = Callable[[nn.Module, int, int], None]


class ForwardBackward(ABC):
    """Computes the gradients of the global batch, as one process would have them, into `.grad`.

    A rank has the loss of its own rows only, of an ensemble also of some channels only; therefore
    gradients are summed over the domain and the ensemble axis and averaged over the data axis. DDP
    and FSDP2 average over all of them: the loss that they see is multiplied by the number of ranks
    that share a sample.

    Args:
        ranks_per_sample: how many ranks share a sample, each with a part of its loss.
        members: forecasts of each sample on this rank. The model sees them as more samples, so that
            all that works for samples works for them; only the loss takes them together.

    Attributes:
        channel_losses: this rank's share of the last batch's loss by forecast step and channel,
            `(steps, C)`; the loss is the mean over steps of the sum over channels.
    """

    def __init__(
        self, loss: WeightedLoss, n_microbatches: int, ranks_per_sample: int, members: int = 1
    ) -> None:
        self.loss = loss
        self.n_microbatches = n_microbatches
        self.ranks_per_sample = ranks_per_sample
        self.members = members
        self.channel_losses = self.zero_losses()

    def zero_losses(self, steps: int = 1) -> Tensor:
        """Return zeros of the shape of `channel_losses`."""
        return self.loss.weight.new_zeros(steps, self.channels)

    @property
    def channels(self) -> int:
        """Number of output channels of a forecast step."""
        return len(self.loss.scale)

    @abstractmethod
    def __call__(self, batch: Batch, prepare_forward: PrepareForward) -> Tensor:
        """Add to the gradients, and return this rank's share of the batch's loss; collective."""

    def bubble_message(self) -> str:
        """Return a sentence on how long pipeline ranks waited for each other; collective."""
        return ""


@final
class ModelForwardBackward(ForwardBackward):
    """Forward and backward of a model that is not cut into stages.

    A rollout has as many steps as the batch has targets. Each step starts from the rank's own rows
    of the step before, and the gradient goes back through all of them. Stochastic depth drops the
    same branches of a sample in all steps; noise is new in each.

    Args:
        model: the model that `forecast` calls, wrapped in DDP, sharded by FSDP2, or neither.
        ranks_per_sample: how many ranks share a sample, each with a part of its loss.
        sum_whole_gradients: whether FSDP2 adds up the micro-batches' gradients before it reduces
            them.
        without_gradient: parameters that the output does not depend on, which DDP leaves out.
    """

    def __init__(
        self,
        model: nn.Module,
        forecast: ForecastStep,
        loss: WeightedLoss,
        n_microbatches: int,
        ranks_per_sample: int,
        *,
        sum_whole_gradients: bool = True,
        members: int = 1,
        without_gradient: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(loss, n_microbatches, ranks_per_sample, members)
        self.model = model
        self.without_gradient = {id(parameter) for parameter in without_gradient}
        self.forecast = forecast
        self.sum_whole_gradients = sum_whole_gradients

    def __call__(self, batch: Batch, prepare_forward: PrepareForward) -> Tensor:
        """Add to the gradients, and return this rank's share of the batch's loss; collective.

        Gradients are sent once, after the last micro-batch. Until then a rank adds up those of its
        own samples, of all parameters with FSDP2, too (unless `sum_whole_gradients` is False).

        Raises:
            UserError: the loss has no gradient, or a parameter has none, for which DDP waits, or
                one that DDP does not average.
        """
        self.channel_losses = self.zero_losses(self._rollout_length(batch))
        for micro, part in enumerate(batch.split(self.n_microbatches)):
            last = micro == self.n_microbatches - 1
            before = self._gradient_states() if last else []
            with self._gradient_sync(last):
                with profile_region(FORWARD):
                    losses = self._compute_losses(part, micro, prepare_forward)
                    losses = losses / self.n_microbatches
                if not losses.requires_grad:
                    raise UserError(
                        "model: the loss depends on no parameter that is trained, so that nothing "
                        "is learned. Take torch.no_grad, detach and numpy out of the model's "
                        "forward, or other parameters out of trainer.freeze."
                    )
                with profile_region(BACKWARD):
                    torch.autograd.backward(losses.mean(0).sum() * self.ranks_per_sample)
            self.channel_losses += losses.detach()
        self._check_all_parameters_used(before)
        return self.channel_losses.mean(0).sum()

    def _compute_losses(self, part: Batch, micro: int, prepare_forward: PrepareForward) -> Tensor:
        """Return what each channel adds to the loss of each step: `(steps, C)`."""
        members = self.members
        steps = self._rollout_length(part)
        targets = part.target.tensor_split(steps, dim=1)
        forcings = (repeat_members(x, members) for x in part.forcing.tensor_split(steps, dim=1))
        state, static = repeat_members(part.state, members), repeat_members(part.static, members)
        given = (repeat_members(x, members) for x in targets)
        forecasts = self.forecast.rollout(state, forcings, static, given)
        losses = []
        for step, target in enumerate(targets, start=1):
            prepare_forward(self.model, micro, step)
            losses.append(self.loss.by_channel(next(forecasts), target))
        return torch.stack(losses)

    def _rollout_length(self, batch: Batch) -> int:
        return batch.target.shape[1] // self.channels

    def _learning_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters of a model in DDP; none of another one."""
        if not isinstance(self.model, DistributedDataParallel):
            return []
        model = self.model.module
        if isinstance(model, ActivationCheckpointWrapper):
            model = model.model
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def _gradient_states(self) -> list[tuple[int, int] | None]:
        """Return what changes if backward adds to a gradient, or DDP moves it to where it sends."""
        gradients = [parameter.grad for _, parameter in self._learning_parameters()]
        return [None if g is None else (g.data_ptr(), version_of(g)) for g in gradients]

    def _check_all_parameters_used(self, before: list[tuple[int, int] | None]) -> None:
        """Check the gradients after the last micro-batch, given their states before it.

        DDP sends only what the last backward adds to: a parameter that is used in earlier
        micro-batches alone keeps this rank's own gradient, and those sent with it do, too.
        """
        states = zip(self._learning_parameters(), before, self._gradient_states(), strict=True)
        for (name, parameter), old, new in states:
            has_gradient = new is not None
            was_sent = has_gradient and (new != old or not parameter.numel())
            if has_gradient if id(parameter) in self.without_gradient else not was_sent:
                raise UserError(
                    f"parallel.data_mode: ddp needs the same parameters in the loss of every step, "
                    f"but {name} is only in some. Use it in each step or in none, name it in "
                    "trainer.freeze, or set parallel.data_mode=fsdp2."
                )

    def _gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if self.n_microbatches == 1:
            return contextlib.nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext() if last else self.model.no_sync()
        # The root of FSDP's modules may be inside the wrapper that recomputes activations.
        root = next((module for module in self.model.modules() if is_fsdp_module(module)), None)
        if root is not None and self.sum_whole_gradients:
            root.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


@final
class PipelineForwardBackward(ForwardBackward):
    """Forward and backward of a model that is cut into pipeline stages.

    Args:
        group: ranks over which gradients are averaged after the last micro-batch; None where FSDP2
            does that, or where this rank is alone with its stages.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        forecast: ForecastStep,
        loss: WeightedLoss,
        n_microbatches: int,
        manager: DomainParallelManager,
        group: dist.ProcessGroup | None,
        members: int = 1,
    ) -> None:
        super().__init__(loss, n_microbatches, manager.ranks_per_sample, members)
        self.pipeline = pipeline
        self.forecast = forecast
        self.group = group

    def __call__(self, batch: Batch, prepare_forward: PrepareForward) -> Tensor:
        """Add to the gradients, and return this rank's share of the batch's loss; collective.

        The share is zero on ranks that do not hold the last stage.
        """
        inputs = torch.cat([batch.state, batch.forcing, batch.static], dim=1)
        inputs = repeat_members(inputs, self.members)
        channels, self.channel_losses = self.channels, self.zero_losses()
        # The output is added to the newest state, which only the first stage gets as an input. To
        # the last stage it travels with the target, as more channels.
        last_state = batch.state[:, -self.forecast.states :]
        targets = torch.cat([batch.target, last_state], dim=1)

        def loss(output: Tensor, targets: Tensor) -> Tensor:
            target, state = targets[:, :channels], targets[:, channels:]
            state = repeat_members(state, self.members)
            forecast = self.forecast.fields_from_output(output, state)
            losses = self.loss.by_channel(forecast, target) / self.n_microbatches
            self.channel_losses += losses.detach()
            return losses.sum() * self.ranks_per_sample

        def prepare_stage(stage: int, micro: int) -> None:
            prepare_forward(self.pipeline.stage_modules[stage], micro, 1)

        total = self.pipeline.forward_backward(inputs, targets, loss, prepare_stage)
        if self.group is not None:
            parameters = (p for part in self.pipeline.stage_modules for p in part.parameters())
            average_gradients(parameters, self.group)
        return total / self.ranks_per_sample

    def bubble_message(self) -> str:
        """Return the mean share of waiting over the pipeline, beside that of equal stages."""
        measured, theory = self.pipeline.bubble(), self.pipeline.ideal_bubble()
        return (
            f"pipeline: ranks waited {measured:.1%} of the last step's forwards and backwards, "
            f"{theory:.1%} in theory"
        )
