"""Rules of functions that are a few others: losses, distances, and torch's own Python functions."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.rules import RULES
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_before,
    layout_of,
    python_of,
    require,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.pointwise import pointwise
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    bands_of,
    global_tensors,
    is_band,
    local_of,
    whole,
    with_layout,
    wrap,
)

# ---------------------------------------------------------------- torch's Python code


def run_torch_code(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a Python function of torch, which calls functions that have rules."""
    return python_of(func)(*args, **kwargs)


for _function in (
    F.normalize,
    F.local_response_norm,
    F.lp_pool1d,
    F.lp_pool2d,
    F.lp_pool3d,
    F.multi_head_attention_forward,
):
    RULES[_function] = run_torch_code

# ---------------------------------------------------------------- distances


def _unit_vectors(x: Tensor, dim: int, eps: float) -> Tensor:
    """Return vectors over their norm, or over `eps` if that is larger, which no gradient sees."""
    norm = torch.linalg.vector_norm(x, 2, dim, True)
    difference = (norm.clamp_min(eps) - norm).detach()
    unit: Tensor = x / (norm + difference)
    return unit


@rule_for("cosine_similarity")
def cosine_similarity(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The cosine of the angle between vectors."""
    defaults = {"dim": 1, "eps": 1e-8}
    arguments = defaults | bind(("x1", "x2", "dim", "eps"), args, _named_x1(kwargs))
    a, b = require(arguments, "x1", "x2")
    dim, eps = arguments["dim"], arguments["eps"]
    ndim = max(a.ndim, b.ndim)
    dim = dim % ndim - ndim
    if -dim > min(a.ndim, b.ndim) or a.shape[dim] != b.shape[dim]:
        # One entry stands for a vector of equal entries, which is longer than the entry.
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    return (_unit_vectors(a, dim, eps) * _unit_vectors(b, dim, eps)).sum(dim)


def _named_x1(kwargs: Kwargs) -> Kwargs:
    return {("x1" if name == "input" else name): x for name, x in kwargs.items()}


@rule_for("pairwise_distance")
def pairwise_distance(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The norm of the differences along the last dimension."""
    defaults = {"p": 2.0, "eps": 1e-6, "keepdim": False}
    names = ("x1", "x2", "p", "eps", "keepdim")
    arguments = defaults | bind(names, args, _named_x1(kwargs))
    a, b = require(arguments, "x1", "x2")
    difference = a - b + arguments["eps"]
    return torch.linalg.vector_norm(difference, arguments["p"], -1, arguments["keepdim"])


# ---------------------------------------------------------------- losses

# Losses of each entry, and then their mean or sum.
POINTWISE_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss", "poisson_nll_loss",
)  # fmt: skip
# A mean weighted by their weights is not the mean of weighted losses.
WEIGHTED_MEAN = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)


def _loss_arguments(func: Function, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a loss, but for `size_average` and `reduce`.

    Raises:
        NoRuleError: one of those two is passed; torch has replaced them by `reduction`.
    """
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if any(arguments.pop(name, None) is not None for name in ("size_average", "reduce")):
        raise NoRuleError
    return arguments


def pointwise_loss(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A loss of each entry, and its mean or sum."""
    arguments = _loss_arguments(func, args, kwargs)
    reduction = arguments.pop("reduction")
    if func in WEIGHTED_MEAN and arguments.get("weight") is not None:
        raise NoRuleError
    shapes = [arguments[name].shape for name in ("input", "target")]
    if shapes[0] != shapes[1]:
        raise NoRuleError
    losses = pointwise(func, (), arguments | {"reduction": "none"})
    if reduction == "batchmean":
        return losses.sum() / shapes[0][0]
    return losses if reduction == "none" else getattr(losses, reduction)()


for _name in POINTWISE_LOSSES:
    RULES[getattr(F, _name)] = pointwise_loss


def class_loss(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Losses of class scores in dimension 1, and their mean or sum."""
    arguments = _loss_arguments(func, args, kwargs)
    x, target = arguments.pop("input"), arguments.pop("target")
    reduction, weight = arguments.pop("reduction"), arguments.get("weight")
    layout, view = layout_of(x), x.view_
    require_whole(weight)
    if layout.dim == 1 or x.ndim < 2:
        raise NoRuleError
    result = layout.at(layout.dim - (layout.dim > 1))
    has_indices = target.ndim == x.ndim - 1
    local_target = with_layout(target, result if has_indices else layout, view)
    arguments["weight"] = local_of(weight)
    losses = func(x.local, local_target, reduction="none", **arguments)
    losses = wrap(losses, result, view)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if not has_indices:
        return losses.mean()
    if weight is not None:
        raise NoRuleError
    return losses.sum() / (target != arguments["ignore_index"]).sum()


RULES.update(dict.fromkeys((F.cross_entropy, F.nll_loss), class_loss))

# ---------------------------------------------------------------- tables and samples


@rule_for("embedding")
def embedding(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Vectors from a table that every rank has, for indices with rows."""
    if func is not F.embedding:
        raise NoRuleError
    bound = signature(func).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    x, weight = arguments.pop("input"), arguments.pop("weight")
    require_whole(weight)
    if any(arguments.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        raise NoRuleError
    return wrap(func(x.local, local_of(weight), **arguments), layout_of(x), x.view_)


@rule_for("one_hot")
def one_hot(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Unit vectors of classes, if their number is passed and not that of the data."""
    arguments = {"num_classes": -1} | bind(("input", "num_classes"), args, kwargs)
    x, classes = arguments["input"], arguments["num_classes"]
    if classes < 0:
        raise NoRuleError
    return wrap(func(x.local, classes), layout_of(x), x.view_)


@rule_for("grid_sample")
def grid_sample(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Samples at positions with rows, of a field that is gathered as a position may be anywhere."""
    if func is not F.grid_sample:
        raise NoRuleError
    arguments = dict(signature(func).bind(*args, **kwargs).arguments)
    x, grid = arguments.pop("input"), arguments.pop("grid")
    layout = layout_of(grid)
    if layout.dim == grid.ndim - 1 or layout.dim == 0:
        raise NoRuleError
    result = func(whole(x), grid.local, **arguments)
    return wrap(result, layout.at(layout.dim + 1), grid.view_)


@rule_for("broadcast_tensors")
def broadcast_tensors(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Tensors that are expanded to their common shape."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))  # type: ignore[no-untyped-call]
    return [x if x.shape == shape else x.expand(shape) for x in tensors]


@rule_for("meshgrid")
def meshgrid(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Grids of coordinates, of which some have rows."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    indexing = kwargs.get("indexing", "ij")
    if any(x.ndim != 1 for x in tensors) or len(kwargs) > 1 or indexing not in ("ij", "xy"):
        raise NoRuleError
    order = list(range(len(tensors)))
    if indexing == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    shape = [len(tensors[i]) for i in order]
    grids = []
    for i, x in enumerate(tensors):
        sizes = [len(x) if j == i else 1 for j in order]
        grids.append(x.reshape(sizes).expand(shape))
    return tuple(grids)


# ---------------------------------------------------------------- gathers by indices


@rule_for("gather", "take_along_dim")
def gather(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Entries along a dimension by the indices of each entry; a band takes those of its rows."""
    is_gather = func.__name__ == "gather"
    names = ("input", "dim", "index") if is_gather else ("input", "index", "dim")
    kwargs = {("index" if name == "indices" else name): x for name, x in kwargs.items()}
    sparse = kwargs.pop("sparse_grad", False)
    arguments = bind(names, args, kwargs)
    x, dim, index = require(arguments, "input", "dim", "index")
    if dim is None or sparse or not isinstance(index, Tensor) or index.ndim != x.ndim:
        raise NoRuleError
    dim %= x.ndim
    if not is_gather:
        if 0 in (*x.shape, *index.shape):
            raise NoRuleError
        x, index = _broadcast_but(x, index, dim)
    for d in range(x.ndim):
        if d != dim and index.shape[d] < x.shape[d]:
            x = x.narrow(d, 0, index.shape[d])
    if is_band(x) and layout_of(x).dim == dim and _is_vector(index, dim):
        first = [slice(None) if d == dim else 0 for d in range(index.ndim)]
        return x.index_select(dim, index[tuple(first)])
    # Rows along which is indexed are moved away: each rank then has all entries of its part.
    layout, view = _layout_to_gather(x, dim, index)
    local, local_index = (with_layout(part, layout, view) for part in (x, index))
    return wrap(local.gather(dim, local_index), layout, view)


def _broadcast_but(x: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return tensors that are broadcast against each other but for one dimension."""
    sizes = [
        -1 if d == dim else max(pair)
        for d, pair in enumerate(zip(x.shape, index.shape, strict=True))
    ]
    return x.expand(sizes), index.expand(sizes)


def _is_vector(index: Tensor, dim: int) -> bool:
    """Return whether all ranks have these indices, the same for all entries of other dimensions."""
    if is_band(index) or index.shape[dim] == 0:
        return False
    of_dims = zip(index.shape, local_of(index).stride(), strict=True)
    return all(d == dim or size == 1 or stride == 0 for d, (size, stride) in enumerate(of_dims))


def _layout_to_gather(x: Tensor, dim: int, index: Tensor) -> tuple[Layout, GlobalView]:
    """Return along which dimension tensors are cut whose entries are looked up along `dim`.

    Raises:
        NoRuleError: in no dimension have both a part for each rank.
    """
    bands = bands_of([index, x])  # none if `x` was narrowed to fewer rows than there are ranks
    view = global_tensors([index, x])[0].view_
    fitting = [d for d in range(x.ndim) if d != dim and x.shape[d] == index.shape[d]]
    for band in bands:
        if layout_of(band).dim in fitting:
            return layout_of(band), view
    for d in sorted(fitting, key=lambda d: -x.shape[d]):
        partition = view.partition(x.shape[d])
        if partition is not None:
            return Layout(d, 1, partition), view
    raise NoRuleError


# Functions that write a source to indices of a dimension, with the parameters after these.
WRITES_AT: dict[str, tuple[str, ...]] = {
    "scatter": ("source", "reduce"),
    "scatter_add": ("source",),
    "scatter_reduce": ("source", "reduce", "include_self"),
    "index_add": ("source", "alpha"),
    "index_copy": ("source",),
    "index_fill": ("source",),
}
SOURCES = ("src", "value", "tensor")  # other names of `source`


@rule_for(*WRITES_AT, *(f"{name}_" for name in WRITES_AT))
def write_at(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Write to, or add at, indices of a dimension, whose entries each rank needs all of.

    Rows along it are moved to another dimension.
    """
    name = func.__name__.rstrip("_")
    names = ("input", "dim", "index", *WRITES_AT[name])
    kwargs = {("source" if key in SOURCES else key): x for key, x in kwargs.items()}
    arguments = bind(names, args, kwargs)
    x, dim, index, source = require(arguments, "input", "dim", "index", "source")
    in_place = func.__name__ != name
    by_entry = name.startswith("scatter")
    options = {name: arguments[name] for name in names[4:] if name in arguments}
    if x.ndim == 0 or (in_place and not is_band(x)) or (by_entry and index.ndim != x.ndim):
        raise NoRuleError
    if any(isinstance(value, Tensor) for value in options.values()):
        raise NoRuleError
    dim %= x.ndim
    layout, view = _layout_to_write(x, dim, index, source)
    of_each = [part for part in (x, source) if isinstance(part, Tensor) and part.ndim]
    local, *local_source = (with_layout(part, layout, view) for part in of_each)
    # Vectors of indices are indices of the dimension alone.
    local_index = with_layout(index, layout, view) if by_entry else whole(index)
    # Bands that were moved are a copy, which is written to x afterwards.
    write = getattr(local, func.__name__ if in_place and local is x.local else name)
    part = write(dim, local_index, *(local_source or [local_of(source)]), **options)
    if not in_place:
        return wrap(part, layout, view)
    if local is not x.local:
        x.local.copy_(with_layout(GlobalTensor(part, layout, view), layout_of(x), view))
    return x


def _layout_to_write(x: Any, dim: int, index: Tensor, source: Any) -> tuple[Layout, GlobalView]:
    """Return along which dimension a tensor can be cut that is written to at indices of `dim`.

    Raises:
        NoRuleError: in no dimension have all tensors a part for each rank.
    """
    tensors = [t for t in (x, source, index) if isinstance(t, Tensor) and t.ndim == x.ndim]
    if isinstance(source, Tensor) and source.ndim not in (0, x.ndim):
        raise NoRuleError
    if index.ndim != x.ndim and index.ndim != 1:
        raise NoRuleError
    bands = bands_of([x, source, index])
    view = bands[0].view_

    def fits(d: int) -> bool:
        return d != dim and all(t.shape[d] == x.shape[d] for t in tensors)

    for band in bands:
        if band.ndim == x.ndim and fits(layout_of(band).dim):
            return layout_of(band), view
    for d in sorted(filter(fits, range(x.ndim)), key=lambda d: -x.shape[d]):
        partition = view.partition(x.shape[d])
        if partition is not None:
            return Layout(d, 1, partition), view
    raise NoRuleError


@layout_before(*(f"{name}_" for name in WRITES_AT))
def _layout_before_write(x: Any, args: Args, kwargs: Kwargs) -> Layout | None:
    """Return how a tensor is cut that is written to at indices of a dimension."""
    arguments = dict(zip(("input", "dim", "index", "source"), args, strict=False)) | kwargs
    source = next((arguments[key] for key in ("source", *SOURCES) if key in arguments), None)
    return _layout_to_write(x, arguments["dim"] % x.ndim, arguments["index"], source)[0]


# ---------------------------------------------------------------- orders of channels and dimensions


@rule_for("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Channels of groups, interleaved."""
    arguments = bind(("input", "groups"), args, kwargs)
    x, groups = arguments["input"], arguments["groups"]
    parts = x.unflatten(1, (groups, x.shape[1] // groups))
    return parts.transpose(1, 2).flatten(1, 2)


@rule_for("fliplr", "flipud")
def flip_named(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Flips of columns or rows of matrices."""
    (x,) = args
    return x.flip(1 if func.__name__ == "fliplr" else 0)


@rule_for("rot90")
def rot90(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Rotations by right angles."""
    arguments: dict[str, Any] = {"k": 1, "dims": (0, 1)}
    arguments |= bind(("input", "k", "dims"), args, kwargs)
    x, turns, (first, second) = arguments["input"], arguments["k"] % 4, arguments["dims"]
    if turns == 2:
        return x.flip((first, second))
    if turns == 0:
        return x.clone()
    if turns == 1:
        return x.flip(second).transpose(first, second)
    return x.transpose(first, second).flip(second)
