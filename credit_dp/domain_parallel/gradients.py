"""The loss and the gradients of a training loop around a converted model.

Each rank has the loss of its own rows, and these parts add up to the loss of the globe
(`global_mean`). Backward therefore leaves a part of each parameter's gradient on each rank, and
`sum_gradients` adds them up. Both are for loops of users; the trainer of this package shares
`reduce_gradients` with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from credit_dp.constants import constant_tensor
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError

BUCKET = 2**25  # bytes of gradients that are sent at once
SUMMED = "summed_over_ranks"  # attribute of a gradient, which backward keeps when it adds to it


def global_mean(
    values: Tensor, manager: DomainParallelManager, weights: Tensor | None = None
) -> Tensor:
    """Return the mean of the values of all bands, such as the errors that a loss is the mean of.

    The number is that of the whole globe, with the same bits on every rank of the domain. Its
    gradient on a rank is that of the rank's own values: with `sum_gradients` the parameters'
    gradients are those of one process. Collective of the domain in forward; backward sends nothing.

    Args:
        values: on this rank's rows, of its own samples; on its GPU if the ranks send by nccl.
        weights: of the values and on their device, for example the areas of the rows; only their
            ratios matter. None: all alike.

    Shapes:
        values `(..., H_local, W)`, weights of a shape that broadcasts to it, such as `(H_local, 1)`
        -> `()`, in float32 or more.
    """
    weighted = values if weights is None else values * weights
    # Half precision has no number of many points, and integers no mean.
    own = weighted.sum(dtype=torch.promote_types(weighted.dtype, torch.float32))
    if weights is None:
        weight = torch.full((), values.numel(), dtype=torch.float64, device=own.device)
    else:
        weight = weights.detach().double().expand_as(values).sum()
    total, total_weight = manager.transport.all_reduce(torch.stack([own.detach().double(), weight]))
    mean: Tensor = _GlobalValue.apply(  # type: ignore[no-untyped-call]
        own / total_weight.to(own.dtype), (total / total_weight).to(own.dtype)
    )
    return mean


@final
class _GlobalValue(torch.autograd.Function):
    """The sum of all ranks' parts, whose gradient goes to this rank's part alone."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.no_grad()
def sum_gradients(model: nn.Module, manager: DomainParallelManager) -> None:
    """Sum the gradient of each parameter over the domain, and average it over the data axis.

    Call it once for each step of the optimizer, on all ranks: after the last backward of the step,
    however many there were, and before gradients are clipped. Gradients are then those of the
    globe, equal on all ranks. A rank without a gradient of a parameter takes part with zeros; a
    parameter without a gradient on all ranks keeps None. A single rank has nothing to do.

    Gradients are sent in the order of `model.parameters()`, about 32 MB in one message.

    Args:
        model: converted, and in no wrapper that averages gradients itself.

    Raises:
        UserError: the gradients are summed already and were not set to None since: a second sum
            would count parts twice. Or DDP or FSDP averages them.
    """
    if manager.replicas == 1:
        return
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second
    sharding = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    wrappers = (DistributedDataParallel, *sharding)
    if any(isinstance(module, wrappers) for module in model.modules()):
        raise UserError(
            "sum_gradients: needs a model whose gradients nothing else averages, got one in "
            "DistributedDataParallel or FSDP. Leave sum_gradients out, and multiply the loss by "
            "manager.domain_parallel_size before backward."
        )
    # Alike on all ranks, as they call this and `zero_grad` at the same places.
    summed = (n for n, p in model.named_parameters() if hasattr(p.grad, SUMMED))
    name = next(summed, None)
    if name is not None:
        raise UserError(
            f"sum_gradients: the gradient of {name} is summed over the ranks already. Call it once "
            "for each step of the optimizer, after the last backward, and between two steps "
            "optimizer.zero_grad(), whose default sets gradients to None."
        )

    def over_replicas(total: Tensor) -> Tensor:
        if manager.data_parallel_group is not None and manager.data_parallel_size > 1:
            total /= manager.data_parallel_size
            dist.all_reduce(total, group=manager.data_parallel_group)
        # The domain last: its ranks compare the bits of their parameters.
        total = manager.ensemble_transport.all_reduce(total)
        return manager.transport.all_reduce(total)

    parameters = list(model.parameters())
    reduce_gradients(parameters, over_replicas)
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is not None:
            setattr(parameter.grad, SUMMED, True)


def reduce_gradients(
    parameters: Iterable[nn.Parameter], reduce: Callable[[Tensor], Tensor]
) -> None:
    """Replace gradients by what a collective makes of them, many in one message.

    Ranks call it with the same parameters, frozen ones are left out. A missing gradient counts as
    zeros, and stays missing where no rank has one.

    Args:
        parameters: in the same order on all ranks.
        reduce: sums a vector over ranks; may write into it.
    """
    for bucket in _buckets(parameters):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        there = [p.grad is not None for p in bucket]
        marks = constant_tensor(there, gradients[0].device, gradients[0].dtype)
        total = reduce(torch.cat([marks, *(gradient.flatten() for gradient in gradients)]))
        sizes = [len(bucket), *(gradient.numel() for gradient in gradients)]
        marks, *parts = torch.split(total, sizes)
        for at, (parameter, part) in enumerate(zip(bucket, parts, strict=True)):
            if parameter.grad is not None or marks[at]:
                parameter.grad = gradients[at].copy_(part.view_as(parameter))


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        full = sum(p.nbytes for p in bucket) >= BUCKET
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
