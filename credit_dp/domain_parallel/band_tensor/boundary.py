"""Where a model on tensors of the globe begins and ends: bands go in, bands come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Rules are registered when their modules are imported.
from credit_dp.domain_parallel.band_tensor import (  # noqa: F401
    attention,
    convolutions,
    interpolation,
    losses,
    norms,
    padding,
    pointwise,
    pooling,
    products,
    recurrent,
    reductions,
    spectral,
    views,
)
from credit_dp.domain_parallel.band_tensor.moving import among_zeros, refresh, with_rows
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Rows,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.torch_private import tree_map


class Enter(torch.autograd.Function):
    """Show what a rank holds as the globe's tensor; its gradient is this rank's share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, domain: Domain) -> BandTensor:
        """Return the tensor of the globe."""
        ctx.rows, ctx.domain = rows, domain
        return BandTensor(x.detach(), rows, domain, _strides(x, rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of the band, or the share of that of a whole tensor."""
        if isinstance(ctx.rows, Band):
            local = Leave.apply(grad, ctx.rows, ctx.domain)  # type: ignore[no-untyped-call]
        else:
            local = share(grad, ctx.domain)
        return local, None, None


class Leave(torch.autograd.Function):
    """Return what a rank holds of the globe's tensor; a gradient of a whole one is a share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, domain: Domain) -> Tensor:
        """Return the local tensor in memory of its own: the model may have saved what it holds."""
        ctx.rows, ctx.domain = rows, domain
        local = with_rows(x, rows, domain)
        is_shared = local is x or (
            type(x) is BandTensor and (local is x.local or x.rows is PARTIAL)
        )
        return local.clone() if is_shared else local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient as one of the globe."""
        rows = ctx.rows if isinstance(ctx.rows, Band) else PARTIAL
        return Enter.apply(grad, rows, ctx.domain), None, None  # type: ignore[no-untyped-call]


def _strides(x: Tensor, rows: Rows) -> tuple[int, ...] | None:
    """Return the strides of the globe's tensor whose dimensions are ordered as those of a band."""
    if x.is_contiguous() or not isinstance(rows, Band):
        return None if x.is_contiguous() else x.stride()
    sizes = list(x.shape)
    sizes[rows.dim] = rows.size
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: -strides[d])
    back = sorted(range(x.ndim), key=lambda d: order[d])
    return torch.empty([sizes[d] for d in order], device="meta").permute(back).stride()


def share(grad: Tensor, domain: Domain) -> Tensor:
    """Return this rank's share of a gradient of the globe: the ranks' sum is the gradient."""
    if type(grad) is not BandTensor:  # made from tensors that every rank has
        return grad / domain.ranks
    refresh(grad)
    if grad.rows is PARTIAL:
        return grad.local
    if grad.rows is WHOLE:
        return grad.local / domain.ranks
    assert isinstance(grad.rows, Band)
    return among_zeros(grad.local, grad.rows, domain.rank)


def leave(x: Any, domain: Domain) -> Any:
    """Return an output of a model: rows of fields in the bands of their height, the rest whole."""
    if not isinstance(x, Tensor):
        return x
    rows: Rows = WHOLE
    if x.ndim >= FIELD_DIMS and x.shape[ROW_DIM] >= domain.ranks:
        rows = Band(ROW_DIM, 1, domain.bounds(x.shape[ROW_DIM]))
    return Leave.apply(x, rows, domain)  # type: ignore[no-untyped-call]


def attach(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[Sequence[int]]
) -> Domain:
    """Let a model compute on tensors of the globe, in place; its parameters stay as they are.

    Args:
        model: any model.
        manager: this rank's position in the mesh.
        shapes: of the globe's inputs.

    Returns:
        the domain, which counts what runs whole.
    """
    domain = Domain(manager)
    # Kept with the model, as torch makes new ones, without hooks, once nobody holds them.
    accumulators: list[Any] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            node.register_prehook(lambda grads: (share(grads[0], domain),))
            accumulators.append(node)
    model.__dict__["_band_accumulators"] = accumulators

    def enter(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        rows: Rows = WHOLE
        for shape in shapes:
            partition = manager.partition(shape[ROW_DIM])
            if x.ndim == len(shape) and x.shape[ROW_DIM] == partition.sizes[domain.rank]:
                rows = Band(ROW_DIM, 1, partition.bounds)
        return Enter.apply(x, rows, domain)  # type: ignore[no-untyped-call]

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(enter, args), tree_map(enter, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return tree_map(lambda x: leave(x, domain), output)

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    return domain
