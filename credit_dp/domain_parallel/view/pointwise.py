"""Rules of pointwise functions, which act on each entry, and of dropped channels."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.partition import LARGEST_BAND
from credit_dp.domain_parallel.rules import RULES
from credit_dp.domain_parallel.view.function_rules import (
    OF_FEW_ROWS,
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    is_in_place,
    layout_before,
    layout_of,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.memory import is_certain_copy
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    bands_of,
    functions_named,
    is_band,
    local_of,
    map_values,
    same_random_numbers,
    whole,
    with_layout,
    wrap,
)

TENSORS = frozenset([Tensor, nn.Parameter, GlobalTensor])
# Types of arguments that are no tensors, nor have others in them.
PLAIN = frozenset([int, float, bool, complex, str, type(None), torch.dtype])
POINTWISE = (
    "abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "angle", "arccos", "arccosh",
    "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "asin", "asinh", "atan", "atan2", "atanh",
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max",
    "clamp_min", "clip", "clone", "conj", "contiguous", "copysign", "cos", "cosh", "deg2rad",
    "detach", "digamma", "div", "divide", "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2",
    "expm1", "fill", "float_power", "floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "ge",
    "gelu", "greater", "greater_equal", "gt", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "heaviside", "hypot", "i0", "isclose", "isfinite", "isinf", "isnan", "ldexp", "le",
    "leaky_relu", "lerp", "less", "less_equal", "lgamma", "log", "log10", "log1p", "log2",
    "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logit",
    "logsigmoid", "lt", "maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "ne", "neg",
    "negative", "nextafter", "not_equal", "ones_like", "positive", "pow", "rad2deg", "reciprocal",
    "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sgn", "sigmoid", "sign",
    "signbit", "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "softsign", "sqrt",
    "square", "sub", "subtract", "tan", "tanh", "tanhshrink", "threshold", "true_divide",
    "trunc", "where", "xlogy", "zeros_like", "empty_like", "full_like", "float",
    "double", "half", "bfloat16", "int", "long", "bool", "dropout", "masked_fill", "cpu", "cuda",
    "complex", "polar", "real", "imag", "conj_physical", "resolve_conj", "resolve_neg", "isposinf",
    "isneginf", "isreal", "log_sigmoid", "expit", "copy_", "zero_", "requires_grad_", "hardtanh_",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__pow__", "__rpow__", "__neg__", "__abs__", "__and__", "__or__", "__xor__",
    "__invert__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__",
    "__floordiv__", "__rdiv__", "__div__", "__rfloordiv__", "__rand__", "__ror__", "__rxor__",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__",
)  # fmt: skip

CONTIGUOUS = frozenset(functions_named("contiguous"))


def common_layout(bands: Sequence[GlobalTensor]) -> Layout:
    """Return the layout in which bands meet, that of the largest; with `dim` from the end.

    If several are the largest, their rows are in the dimension in which those of the first are, to
    which a residual adds; and it is the layout of bands that end at windows: the other bands move
    once, instead of going back and forth around each attention.
    """
    if len(bands) == 1:
        return _from_end(bands[0])
    first = _from_end(max(bands, key=GlobalTensor.numel))
    largest = max(bands, key=lambda x: (x.numel(), *_preference(_from_end(x), first.dim)))
    return _from_end(largest)


def _from_end(x: GlobalTensor) -> Layout:
    """Return the layout of a band with `dim` from the end."""
    layout = layout_of(x)
    return layout.at(layout.dim - x.ndim)


def _preference(layout: Layout, dim: int) -> tuple[bool, bool, int]:
    """Return whether bands are balanced, in a dimension, and of which number they are multiples."""
    partition = layout.partition
    limit = LARGEST_BAND * partition.height
    is_balanced = min(partition.sizes) > 0 and max(partition.sizes) * partition.ranks <= limit
    return is_balanced, layout.dim == dim, gcd(*partition.bounds[:-1])


def align(x: Any, layout: Layout, view: GlobalView) -> Any:
    """Return the local part of a tensor that broadcasts against others with `layout`.

    One that is broadcast along rows is small: if it has bands elsewhere, they are gathered.

    Raises:
        NoRuleError: it has another number of rows.
    """
    if not isinstance(x, Tensor):
        return x
    if x.ndim < -layout.dim or x.shape[layout.dim] == 1 != layout.size:
        return whole(x)
    if x.shape[layout.dim] != layout.size:
        raise NoRuleError
    return with_layout(x, layout.at(x.ndim + layout.dim), view)


def _aligned(args: Args) -> tuple[GlobalTensor, list[Any]] | None:
    """Return a band and the local arguments, if no rows are moved, cut or gathered for these.

    None if bands have several layouts or numbers of dimensions, or another argument has rows.
    """
    first: Any = args[0] if args and is_band(args[0]) else next(filter(is_band, args), None)
    if first is None:
        return None
    rows, ndim = first.rows, first.local.ndim
    local_args: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is GlobalTensor and x.rows is not None:
            if x is not first and (x.rows != rows or x.ndim != ndim):
                return None
            local_args.append(x.local)
        elif kind in TENSORS:
            dim = rows.dim - ndim
            if x.ndim >= -dim and x.shape[dim] != 1:
                return None
            local_args.append(local_of(x))
        elif kind in PLAIN:
            local_args.append(x)
        else:
            return None
    return first, local_args


def pointwise(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function that acts on each entry, with broadcasting."""
    in_place = is_in_place(func, kwargs)
    # What most calls are, in a fraction of the time.
    is_plain = not kwargs or PLAIN.issuperset(map(type, kwargs.values()))
    aligned = _aligned(args) if is_plain else None
    if aligned is not None and (not in_place or aligned[0] is args[0]):
        first, local_args = aligned
        result = func(*local_args, **kwargs)
        if in_place:
            return first
        if func in CONTIGUOUS and result is first.local and is_certain_copy(first):
            result = result.view_as(result)  # another tensor for autograd
        layout: Any = first.rows
        if isinstance(result, Tensor):
            more_dims = result.ndim - first.local.ndim
            layout = layout.at(layout.dim + more_dims) if more_dims else layout
            return GlobalTensor(result, layout, first.view_)
        return wrap(result, layout, first.view_)
    bands = bands_of((args, kwargs))
    view = bands[0].view_
    if in_place:
        target = args[0]
        layout = layout_of(target)
        layout = layout.at(layout.dim - target.ndim)
    else:
        layout = common_layout(bands)
    local_args, local_kwargs = map_values(lambda x: align(x, layout, view), (args, kwargs))
    result = func(*local_args, **local_kwargs)
    if in_place:
        return target
    if isinstance(result, Tensor):
        return GlobalTensor(result, layout.at(result.ndim + layout.dim), view)
    return result  # `x.type()` is a string


for _name in POINTWISE:
    for _function in functions_named(_name, f"{_name}_"):
        RULES[_function] = pointwise
    OF_FEW_ROWS.update(functions_named(f"{_name}_"))


@layout_before(*POINTWISE, *(f"{name}_" for name in POINTWISE))
def _layout_before_write(x: Any, args: Args, kwargs: Kwargs) -> Layout | None:
    """Return where the rows of a band lie in a tensor to whose entries its entries are written."""
    band = max(bands_of((args[1:], kwargs)), key=GlobalTensor.numel)
    layout = _from_end(band)
    return layout.at(x.ndim + layout.dim) if x.shape[layout.dim] == layout.size else None


@rule_for("to", "type", "type_as")
def convert(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Convert to a type or device, maybe that of another tensor, of which nothing else counts."""
    x = args[0]
    local_args, local_kwargs = map_values(local_of, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    if type(x) is not GlobalTensor or not isinstance(result, Tensor):
        return result
    return x if result is x.local else GlobalTensor(result, x.rows, x.view_)


@rule_for("where")
def where(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Choose entries; with one argument it returns indices, which are the globe's."""
    if len(args) + len(kwargs) == 1:
        raise NoRuleError
    return pointwise(func, args, kwargs)


@rule_for("prelu")
def prelu(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A slope for each channel, which is dimension 1 whatever the weight's shape."""
    arguments = bind(("input", "weight"), args, kwargs)
    x, weight = arguments["input"], arguments["weight"]
    layout = layout_of(x)
    require_whole(weight)
    if layout.dim == 1:
        raise NoRuleError
    return wrap(func(x.local, local_of(weight)), layout, x.view_)


# Functions that return a view of fewer dimensions, as they add one and remove it.
DIMS_WITH_BATCH = {F.dropout1d: 3, F.dropout3d: 5}


@rule_for("dropout1d", "dropout2d", "dropout3d", "feature_dropout")
def channel_dropout(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Drop whole channels, the same on all ranks of the domain."""
    x = args[0]
    if _keeps_all(args, kwargs, is_training=True):
        is_batched = x.ndim == DIMS_WITH_BATCH.get(func, x.ndim)
        return x if is_batched or kwargs.get("inplace") else x.view_as(x)
    options = {name: value for name, value in kwargs.items() if name != "inplace"}
    mask = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
    mask = mask.view(*x.shape[:2], *[1] * (x.ndim - 2))
    with same_random_numbers(x.view_, x.device):
        mask = func(mask, *args[1:3], **options)
    return x.mul_(mask) if kwargs.get("inplace") else x * mask


@rule_for("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return the argument in evaluation; dropped entries are drawn for the globe."""
    if _keeps_all(args, kwargs, is_training=False):
        return args[0]
    raise NoRuleError


def _keeps_all(args: Args, kwargs: Kwargs, is_training: bool) -> bool:
    """Whether a dropout drops nothing; `is_training` is the default of its argument `training`."""
    options = {("training" if name == "train" else name): x for name, x in kwargs.items()}
    defaults = {"p": 0.5, "training": is_training}
    arguments = defaults | bind(("input", "p", "training", "inplace"), args, options)
    return not arguments["training"] or arguments["p"] == 0
