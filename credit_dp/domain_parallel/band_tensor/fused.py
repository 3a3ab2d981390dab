"""Layers of torch that are computed on bands in one node of autograd.

torch computes a linear layer by several operators, forward and backward, and each costs time of
Python. Where every row is computed by itself, layers call torch's kernels for the whole layer
instead. In any other case they call torch's function, which the rules of its operators compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.band_tensor.moving import refresh
from credit_dp.domain_parallel.band_tensor.strides import (
    Described,
    contiguous,
    describe,
    result_strides,
)
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    Band,
    BandTensor,
    Domain,
    new_tensor,
)
from credit_dp.domain_parallel.transport import keeps_messages
from credit_dp.torch_private import (
    disable_torch_function,
    is_dispatch_mode_active,
    is_forward_gradient_active,
    is_transform_active,
)

aten = torch.ops.aten
PLAIN_DISPATCH = Tensor.__torch_dispatch__


class Layer(NamedTuple):
    """How a layer is computed on the rows of one rank.

    Attributes:
        function: torch's, of the field, parameters and settings.
        operator: that says which strides the result has.
        forward: returns the local result, and what backward needs beside the arguments.
        backward: returns the local gradients of the field, weight and bias; it gets the gradient,
            the field, weight, bias, settings, what `forward` has kept, and which are needed.
    """

    function: Callable[..., Tensor]
    operator: Any
    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., Sequence[Tensor | None]]


class OnRows(torch.autograd.Function):
    """A layer on the rows of a rank."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        x: BandTensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: tuple[Any, ...],
    ) -> BandTensor:
        """Return the layer's result."""
        y, kept = _run(layer, x, weight, bias, settings)
        ctx.layer, ctx.settings = layer, settings
        ctx.save_for_backward(x, weight, bias, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradients; those of parameters are this rank's part."""
        x, weight, bias, *kept = ctx.saved_tensors
        layer, settings, needs = ctx.layer, ctx.settings, ctx.needs_input_grad[1:4]
        refresh(x)
        if type(grad) is BandTensor:
            refresh(grad)
        if torch.is_grad_enabled() or keeps_messages() or not _is_like(grad, x):
            grads = _gradients_by_rules(layer, (x, weight, bias), settings, grad, needs)
        else:
            found = layer.backward(grad.local, x.local, weight, bias, settings, kept, needs)
            domain = x.domain
            of_x = found[0]
            grads = [_whole_part(each, domain) for each in found]
            if of_x is not None:
                like = contiguous(tuple(x.shape), of_x.dtype, of_x.device)
                grads[0] = new_tensor(of_x, x.rows, domain, like)
        return None, *grads, None


# The descriptions of results, by what decides on them.
_results: dict[Any, Described] = {}


def _run(
    layer: Layer, x: BandTensor, weight: Any, bias: Any, settings: tuple[Any, ...]
) -> tuple[BandTensor, tuple[Tensor, ...]]:
    key = (layer, describe(x), weight.shape, weight.dtype, bias is None)
    like = _results.get(key)
    if like is None:
        likes = result_strides(layer.operator, (x, weight, bias), {})
        assert likes is not None
        like = _results[key] = likes[0]
    local, kept = layer.forward(x.local, weight, bias, settings)
    return new_tensor(like.in_order(local), x.rows, x.domain, like), kept


def _is_like(grad: Any, x: BandTensor) -> bool:
    return type(grad) is BandTensor and grad.rows == x.rows and grad.dtype is x.dtype


def _whole_part(grad: Tensor | None, domain: Domain) -> BandTensor | None:
    """Return a parameter's gradient as this rank's part of a sum."""
    if grad is None:
        return None
    like = contiguous(tuple(grad.shape), grad.dtype, grad.device)
    return new_tensor(like.in_order(grad), PARTIAL, domain, like)


def _gradients_by_rules(
    layer: Layer,
    operands: Sequence[Any],
    settings: tuple[Any, ...],
    grad: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return gradients by torch's function, which may have gradients in turn."""
    needs_more = torch.is_grad_enabled()
    wanted = [x for x, is_needed in zip(operands, needs, strict=True) if is_needed]
    with torch.enable_grad():
        if not needs_more:
            operands = [
                x.detach().requires_grad_(is_needed) if x is not None else None
                for x, is_needed in zip(operands, needs, strict=True)
            ]
            wanted = [x for x, is_needed in zip(operands, needs, strict=True) if is_needed]
        y = layer.function(*operands, *settings)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=needs_more))
    return [next(found) if is_needed else None for is_needed in needs]


def call(layer: Layer, x: Any, weight: Any, bias: Any, settings: tuple[Any, ...], own: int) -> Any:
    """Return a layer of a field, or of any other tensor.

    Args:
        layer: how to compute it.
        x: the field.
        weight, bias: its parameters; None if there is none.
        settings: other arguments.
        own: the number of last dimensions that are computed together.
    """
    if type(x) is BandTensor and not _is_observed(x) and _are_plain(weight, bias):
        with disable_torch_function():  # as in rules
            refresh(x)
            rows = x.rows
            if type(rows) is Band and rows.dim < -own:
                needs = [p is not None and p.requires_grad for p in (x, weight, bias)]
                if not torch.is_grad_enabled() or not any(needs):
                    return _run(layer, x, weight, bias, settings)[0]
                # Of a frozen layer torch saves no field, so that it may be written to.
                if needs[1]:
                    return OnRows.apply(layer, x, weight, bias, settings)  # type: ignore[no-untyped-call]
    return layer.function(x, weight, bias, *settings)


def _is_observed(x: Tensor) -> bool:
    """Return whether something has to see torch's own operators."""
    return (
        is_transform_active()
        or is_dispatch_mode_active()
        or is_forward_gradient_active()
        or torch.is_autocast_enabled(x.device.type)
    )


def _are_plain(*parameters: Tensor | None) -> bool:
    return all([p is None or type(p).__torch_dispatch__ is PLAIN_DISPATCH for p in parameters])


# ---------------------------------------------------------------- linear layers


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    return F.linear(x, weight, bias), ()


def _linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: Any,
    kept: Any,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    rows = grad.reshape(-1, grad.shape[-1])
    of_x = (rows @ weight.conj()).view(x.shape) if needs[0] else None
    of_weight = rows.t() @ x.reshape(-1, x.shape[-1]).conj() if needs[1] else None
    return [of_x, of_weight, rows.sum(0) if needs[2] else None]


LINEAR = Layer(F.linear, aten.linear.default, _linear, _linear_backward)


def linear(module: nn.Linear, input: Any) -> Any:  # torch's name
    """Compute a linear layer: its forward."""
    return call(LINEAR, input, module.weight, module.bias, (), 1)


FORWARDS: dict[Any, Callable[[Any, Any], Any]] = {nn.Linear.forward: linear}


def fuse(module: nn.Module) -> None:
    """Let a layer of torch compute bands in one node, if it is one of these."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    forward = FORWARDS.get(type(module).forward)
    if forward is not None and "forward" not in module.__dict__:
        module.__dict__["forward"] = partial(forward, module)


def unfuse(module: nn.Module) -> None:
    """Undo `fuse`."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, partial) and forward.func in FORWARDS.values():
        del module.__dict__["forward"]
