"""Functions of torch that are computed on bands in one node of autograd.

torch computes a linear layer by several operators, forward and backward, and each costs time of
Python. Where every row is computed by itself, torch's kernels compute the whole layer instead. In
any other case the rules of the function's operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.band_tensor.moving import (
    refresh,
    refresh_all,
)
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
    are_saved_tensors_seen,
    disable_torch_function,
    is_dispatch_mode_active,
    is_forward_gradient_active,
    is_function_mode_active,
    is_transform_active,
)

aten = torch.ops.aten
PLAIN = (Tensor, nn.Parameter)  # other types may compute functions in their own way


class Layer(NamedTuple):
    """How a layer is computed on the rows of one rank.

    Attributes:
        function: torch's, of the field, parameters and settings.
        operator: that says which strides the result has.
        arguments: returns those of the operator, from those of the function.
        saves_all: whether torch saves all operands; else the field, if the weight has a gradient,
            and the weight, if the field has one.
        forward: returns the local result, and what backward needs beside the arguments.
        backward: returns the local gradients of the field, weight and bias; it gets the gradient,
            the field, weight, bias, settings, what `forward` has kept, and which are needed.
    """

    function: Callable[..., Tensor]
    operator: Any
    arguments: Callable[..., tuple[Any, ...]]
    saves_all: bool
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
        ctx.bias = None
        if bias is not None and not layer.saves_all:
            ctx.bias, bias = (bias.shape, bias.dtype, bias.device), None
        ctx.save_for_backward(x, weight, bias, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradients; those of parameters are this rank's part."""
        x, weight, bias, *kept = ctx.saved_tensors
        layer, settings, needs = ctx.layer, ctx.settings, ctx.needs_input_grad[1:4]
        refresh_all(x, grad)
        is_like_x = type(grad) is BandTensor and grad.rows == x.rows and grad.dtype is x.dtype
        if torch.is_grad_enabled() or keeps_messages() or not is_like_x:
            if ctx.bias is not None:  # its values do not matter
                shape, dtype, device = ctx.bias
                bias = torch.zeros(shape, dtype=dtype, device=device, requires_grad=needs[2])
            grads = _gradients_by_rules(layer, (x, weight, bias), settings, grad, needs)
        else:
            found = layer.backward(grad.local, x.local, weight, bias, settings, kept, needs)
            domain = x.domain
            grad_x = found[0]
            grads = [_whole_part(each, domain) for each in found]
            if grad_x is not None:
                like = contiguous(tuple(x.shape), grad_x.dtype, grad_x.device)
                grads[0] = new_tensor(grad_x, x.rows, domain, like)
        return None, *grads, None


# The descriptions of results, by what decides on them.
_results: dict[Any, Described] = {}


def _run(
    layer: Layer, x: BandTensor, weight: Any, bias: Any, settings: tuple[Any, ...]
) -> tuple[BandTensor, tuple[Tensor, ...]]:
    weight_key = None if weight is None else (weight.shape, weight.dtype)
    key = (layer, describe(x), weight_key, bias is None, settings)
    like = _results.get(key)
    if like is None:
        likes = result_strides(layer.operator, layer.arguments(x, weight, bias, *settings), {})
        assert likes is not None
        like = _results[key] = likes[0]
    local, kept = layer.forward(x.local, weight, bias, settings)
    return new_tensor(like.in_order(local), x.rows, x.domain, like), kept


def _whole_part(grad: Tensor | None, domain: Domain) -> BandTensor | None:
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
    with torch.enable_grad():
        # Views, as one operand may depend on another one: that gradient is not of this function.
        operands = [
            None if x is None
            else x.view_as(x) if needs_more
            else x.detach().requires_grad_(is_needed)
            for x, is_needed in zip(operands, needs, strict=True)
        ]  # fmt: skip
        wanted = [x for x, is_needed in zip(operands, needs, strict=True) if is_needed]
        y = layer.function(*operands, *settings)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=needs_more))
    return [next(found) if is_needed else None for is_needed in needs]


def call(layer: Layer, x: Any, weight: Any, bias: Any, settings: tuple[Any, ...], own: int) -> Any:
    """Return a layer of a field, or of any other tensor.

    Args:
        own: the number of last dimensions that are computed together.
    """
    if type(x) is BandTensor and not _is_observed(x):
        with disable_torch_function():  # as in rules
            refresh(x)
            rows = x.rows
            if type(rows) is Band and rows.dim < -own:
                needs = [p is not None and p.requires_grad for p in (x, weight, bias)]
                if not torch.is_grad_enabled() or not any(needs):
                    return _run(layer, x, weight, bias, settings)[0]
                # What torch does not save may be written to.
                if layer.saves_all or (needs[0] and needs[1]):
                    return OnRows.apply(layer, x, weight, bias, settings)  # type: ignore[no-untyped-call]
    return layer.function(x, weight, bias, *settings)


def _is_observed(x: Tensor) -> bool:
    return (
        is_transform_active()
        or is_function_mode_active()
        or is_dispatch_mode_active()
        or is_forward_gradient_active()
        or are_saved_tensors_seen()
        or torch.is_autocast_enabled(x.device.type)
    )


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
    grad_x = (rows @ weight.conj()).view(x.shape) if needs[0] else None
    grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]).conj() if needs[1] else None
    return [grad_x, grad_weight, rows.sum(0) if needs[2] else None]


LINEAR = Layer(F.linear, aten.linear.default, lambda *args: args, False, _linear, _linear_backward)


def linear(input: Any, weight: Any, bias: Any = None, **others: Any) -> Any:
    """Compute `F.linear`."""
    are_usual = (
        type(weight) in PLAIN
        and weight.ndim == 2
        and weight.numel() > 0
        and (bias is None or (type(bias) in PLAIN and bias.ndim == 1))
    )
    # Of other fields torch makes a copy, and saves that.
    if are_usual and not others and type(input) is BandTensor and input.is_contiguous():
        return call(LINEAR, input, weight, bias, (), 1)
    return F.linear(input, weight, bias, **others)


# ---------------------------------------------------------------- norms of the last dimensions


def _norm_arguments(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> tuple[Any, ...]:
    return x, list(shape), weight, bias, eps


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    shape, eps = settings
    y, *moments = torch.native_layer_norm(x, shape, weight, bias, eps)
    return y, tuple(moments)


def _norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: Any,
    kept: Any,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    shape, _ = settings
    found: Sequence[Tensor | None] = aten.native_layer_norm_backward.default(
        grad.contiguous(), x, shape, *kept, weight, bias, list(needs)
    )
    return found


LAYER_NORM = Layer(
    lambda x, weight, bias, shape, eps: F.layer_norm(x, shape, weight, bias, eps),
    aten.native_layer_norm.default,
    _norm_arguments,
    True,
    _norm,
    _norm_backward,
)


def layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    """Compute `F.layer_norm`."""
    are_numbers = type(eps) is float and {*map(type, normalized_shape)} == {int}
    if are_numbers and all([p is None or type(p) in PLAIN for p in (weight, bias)]):
        shape = tuple(normalized_shape)
        return call(LAYER_NORM, input, weight, bias, (shape, eps), len(shape))
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


FUNCTIONS = {F.linear: linear, F.layer_norm: layer_norm}
