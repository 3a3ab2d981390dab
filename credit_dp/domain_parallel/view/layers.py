"""Rules of convolutions, pools, interpolation and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.reductions import accumulation_dtype, sum_over_bands
from credit_dp.domain_parallel.known_rows import KnownRows
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.layers.conv import _RowConv
from credit_dp.domain_parallel.layers.norm import ReductionLayer
from credit_dp.domain_parallel.layers.resample import AntialiasedUpsample, has_one_column
from credit_dp.domain_parallel.rules import RULES
from credit_dp.domain_parallel.view.function_rules import (
    RULES_FOR_WHOLE,
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_of,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.shapes import (
    move_rows,
    with_bands,
    with_rows_everywhere,
)
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    call_whole,
    functions_named,
    is_band,
    local_of,
    saved_tensors_hooks,
    with_layout,
    wrap,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import disable_current_modes, parameters_of

# ---------------------------------------------------------------- calls of layers


class TooFewRowsError(NoRuleError):
    """A result has fewer rows than there are ranks."""


@final
class LayerCall(NamedTuple):
    """How a layer is called on bands; it depends on these and on its settings only.

    Attributes:
        layer: the layer; None if the function acts on each row.
        source: where the rows of its input are.
        bands: of its input and output.
        result: where the rows of its output are; None if every rank holds all.
        may_share_rows: whether it may read rows that others have fetched.
    """

    layer: RowLayer | None
    source: Layout
    bands: Bands
    result: Layout | None
    may_share_rows: bool


def call_layer(
    func: Function,
    x: GlobalTensor,
    kind: type[nn.Module],
    settings: dict[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> Any:
    """Compute a function on a band by the domain-parallel layer of a torch layer; a collective.

    Args:
        func: computes the function on the band alone, if the layer doesn't couple its rows.
        x: the band.
        kind: the torch layer.
        settings: the arguments of its constructor.
        tensors: parameters of this call, by name; the layer keeps none.

    Raises:
        NoRuleError: the layer does not support these rows.
        TooFewRowsError: the result has too few of them.
    """
    view, layout = x.view_, layout_of(x)
    key = (kind, tuple(settings.items()), layout, x.ndim, x.dtype)
    call: LayerCall | None = view.layer_calls.get(key)
    if call is None:
        call = view.layer_calls[key] = _plan_call(x, layout, kind, settings)
    if call.layer is None:
        # A band that ends at windows may be empty, which torch's convolutions and pools don't take.
        x = with_rows_everywhere(x)
        return wrap(func(x.local), x.rows, view)
    local = with_layout(x, call.source, view)  # unfolded, if need be
    known = _known_rows(x) if call.may_share_rows and local is x.local else None
    compute: Callable[..., Tensor] = call.layer.compute
    if known is not None:
        compute = partial(compute, known=known)
    result = _compute(call.layer, compute, local, call.bands, tensors or {})
    return wrap(result, call.result, view)


def _plan_call(
    x: GlobalTensor, layout: Layout, kind: type[nn.Module], settings: dict[str, Any]
) -> LayerCall:
    """Return how to call a layer; raises as `call_layer` does."""
    layer = _layer(x, layout, kind, settings)
    if isinstance(layer, UserError):
        raise NoRuleError from layer
    if layer is None:
        return LayerCall(None, layout, Bands(layout.partition, layout.partition), layout, False)
    # Layers take and return the manager's bands of a height; the rule may get other ones. Of these
    # convolutions fetch what they need, so that padded rows don't move before, and norms keep them.
    source = layout.partition
    is_conv, is_norm = isinstance(layer, _RowConv), isinstance(layer, ReductionLayer)
    if not (is_norm or is_conv) or layout.outer != 1 or 0 in source.sizes:
        source = x.view_.manager.partition(layout.size)
    if 0 in source.sizes:
        raise NoRuleError
    result: Layout | None = None
    bands = Bands(source, source)
    if layer.output_is_banded:
        target = source if is_norm else x.view_.partition(layer.out_height(layout.size))
        if target is None:
            raise TooFewRowsError
        if x.view_.recorder is not None:
            x.view_.recorder.add_level(target.height)
        bands = Bands(source, target)
        result = Layout(layout.dim, 1, target)
    return LayerCall(layer, Layout(layout.dim, 1, source), bands, result, is_conv)


def _known_rows(x: GlobalTensor) -> KnownRows | None:
    """Return the rows of a field that convolutions have fetched, maybe none yet.

    None if the convolutions of a field can't share rows, or must not:

    - Inference mode counts no changes, so that it is unknown whether rows are still right.
    - A checkpointed block must find what it found the first time when it is computed again. Then
      its arguments are new tensors, though two may have been one, or one that its code knows from
      elsewhere. So a block shares the rows of fields only that it has computed itself.
    """
    is_from_here = x.hooks is saved_tensors_hooks()
    if x.local.is_inference() or not is_from_here:
        return None
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if is_cast else x.dtype
    if x.known_rows is None or not x.known_rows.is_valid(dtype):
        x.known_rows = KnownRows(x.local)
    return x.known_rows


def _layer(
    x: GlobalTensor, layout: Layout, kind: type[nn.Module], settings: dict[str, Any]
) -> RowLayer | UserError | None:
    """Return the layer of a call, None if it acts on each row, or why there is none."""
    dim = layout.dim - x.ndim
    layers: dict[Any, RowLayer | UserError | None] = x.view_.layers
    key = (kind, tuple(settings.items()), dim, x.ndim, x.dtype)
    if key not in layers:
        layers[key] = _make_layer(x.view_, dim, x.ndim, kind, settings)
    return layers[key]


@cache
def _without_values(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a torch layer that does not draw its parameters, which takes longer than a call."""
    return type(kind.__name__, (kind,), {"reset_parameters": lambda self: None})


def _make_layer(
    view: GlobalView, dim: int, ndim: int, kind: type[nn.Module], settings: dict[str, Any]
) -> RowLayer | UserError | None:
    with disable_current_modes(), torch.device("meta"):
        module = _without_values(kind)(**settings)  # type: ignore[arg-type]
        module.__class__ = kind
    try:
        layer = RULES[kind](module)
        if not isinstance(layer, RowLayer):
            return None
        layer.adopt_manager(view.manager)
        if not layer.couples_rows(dim, ndim):
            return None
        layer.set_plan(dim, {})
    except UserError as error:
        # Its traceback would keep the tensors of all callers alive with the view.
        return UserError(str(error))
    return layer


def _compute(
    layer: RowLayer,
    compute: Callable[[Tensor, Bands], Tensor],
    local: Tensor,
    bands: Bands,
    tensors: Mapping[str, Tensor],
) -> Tensor:
    """Compute a layer with the parameters of one call."""
    parameters = parameters_of(layer)  # the same dictionary as that of the torch layer
    parameters.update({name: local_of(x) for name, x in tensors.items()})
    try:
        return compute(local, bands)
    finally:
        # What belongs to the model must not stay alive with the layer, nor be used by another call.
        parameters.update(dict.fromkeys(tensors))


def _tuple(value: Any, count: int) -> tuple[Any, ...]:
    """Return a setting with one value for each spatial dimension."""
    if isinstance(value, (tuple, list)):
        return tuple(value) * count if len(value) == 1 else tuple(value)
    return (value,) * count


def with_spatial_rows(x: Any, count: int) -> Any:
    """Return `(B, C, ...)` with `count` spatial dimensions and bands in one of these, or samples.

    Bands of channels are moved; a collective.

    Raises:
        NoRuleError: `x` is no such band.
    """
    layout = layout_of(x)
    if x.ndim != count + 2:
        raise NoRuleError
    if layout.dim != 1:
        return x
    # Rows come before columns, and samples are the last resort.
    order = [x.ndim - 2, x.ndim - 1, *range(2, x.ndim - 2), 0]
    for dim in dict.fromkeys(d for d in order if d != 1):
        partition = x.view_.partition(x.shape[dim])
        if partition is not None:
            return with_bands(x, Layout(dim, 1, partition))
    raise NoRuleError


# Settings of convolutions and pools that have one value for each spatial dimension.
SPATIAL_SETTINGS = (
    "kernel_size", "stride", "padding", "output_padding", "dilation", "output_size"
)  # fmt: skip


def _rows_before_columns(
    rule: Callable[[Any, dict[str, Any], dict[str, Tensor]], Any],
    x: Any,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
) -> Any:
    """Call a rule for rows in the last dimension but one, with spatial dimensions exchanged.

    Args:
        rule: of the field, the settings of the layer and its parameters.
        x: a band with rows in any spatial dimension.
        settings: arguments of the layer's constructor; a sequence has a value per dimension.
        tensors: the parameters.
    """
    dim = layout_of(x).dim - x.ndim
    if dim == -2 or x.ndim < 4:
        return rule(x, settings, tensors)
    exchanged = dict(settings)
    for name in SPATIAL_SETTINGS:
        value = settings.get(name)
        if isinstance(value, (tuple, list)):
            values = list(value)
            values[dim], values[-2] = values[-2], values[dim]
            exchanged[name] = tuple(values)
    parameters = {
        name: local_of(tensor).transpose(dim, -2) if name == "weight" else tensor
        for name, tensor in tensors.items()
    }
    result = rule(x.transpose(dim, -2), exchanged, parameters)
    return result.transpose(dim, -2)


def _with_rows_enough(
    rule: Callable[[Any, dict[str, Any], dict[str, Tensor]], Any],
    x: GlobalTensor,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    shape_of_result: Callable[[], Sequence[int]],
) -> Any:
    """Call a rule as `_rows_before_columns`, by columns if the result has fewer rows than ranks."""
    try:
        return _rows_before_columns(rule, x, settings, tensors)
    except TooFewRowsError:
        pass  # not while it is handled: it would keep tensors of the rule alive
    with disable_current_modes():
        sizes = shape_of_result()
    least = {d: min(x.shape[d], sizes[d]) for d in range(2, x.ndim) if d != layout_of(x).dim}
    dim = max(least, key=least.__getitem__, default=None)
    partition = None if dim is None else x.view_.partition(x.shape[dim])
    if dim is None or partition is None or least[dim] < x.view_.ranks:
        raise TooFewRowsError
    return _rows_before_columns(rule, with_bands(x, Layout(dim, 1, partition)), settings, tensors)


def _in_rows_again(x: Any, y: Any) -> Any:
    """Return what upsampling makes of a field with fewer rows than ranks, as bands if it has more.

    Such a field is whole, or has bands of columns.
    """
    if type(x) is not GlobalTensor or type(y) is not GlobalTensor or not 4 <= x.ndim == y.ndim:
        return y
    partition = x.view_.partition(y.shape[-2])
    is_band_of_columns = is_band(y) and layout_of(y).dim == y.ndim - 1
    if x.shape[-2] >= x.view_.ranks or partition is None or is_band(y) > is_band_of_columns:
        return y
    return with_bands(y, Layout(y.ndim - 2, 1, partition))


# ---------------------------------------------------------------- convolutions

# Parameters after input and weight, in the order of torch's functions, with their defaults.
CONV: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
TRANSPOSE: dict[str, Any] = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "groups": 1,
    "dilation": 1,
}


def _local_conv(func: Function, arguments: Mapping[str, Any], x: Tensor) -> Any:
    """Call a convolution on a local tensor, with the other arguments of the call."""
    return func(x, *[local_of(arguments[name]) for name in arguments if name != "input"])


def weights_of(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters among the arguments of a convolution or norm."""
    return {name: arguments[name] for name in ("weight", "bias") if arguments[name] is not None}


def conv(
    kind: type[nn.Module],
    defaults: dict[str, Any],
    count: int,
    func: Function,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Convolutions with `count` spatial dimensions, transposed ones too."""
    names = ("input", "weight", *defaults)
    given = defaults | bind(names, args, kwargs)
    arguments = {name: given[name] for name in names}
    source, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    require_whole(weight, bias)
    if defaults is TRANSPOSE and not is_band(source):
        return _in_rows_again(source, call_whole(func, args, kwargs))
    x = with_spatial_rows(source, count)
    if layout_of(x).dim == 0:
        return GlobalTensor(_local_conv(func, arguments, x.local), layout_of(x), x.view_)
    groups = arguments["groups"]
    of_call = [name for name in SPATIAL_SETTINGS if name in arguments]
    settings = {
        "in_channels": x.shape[1],
        "out_channels": weight.shape[1] * groups if defaults is TRANSPOSE else weight.shape[0],
        "kernel_size": tuple(weight.shape[2:]),
        "groups": groups,
        "bias": bias is not None,
    }
    for name in of_call:
        value = arguments[name]
        settings[name] = value if isinstance(value, str) else _tuple(value, count)

    def rule(x: GlobalTensor, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        local_arguments = arguments | {name: settings[name] for name in of_call} | tensors
        compute = partial(_local_conv, func, local_arguments)
        return call_layer(compute, x, kind, settings, tensors)

    def shape_of_result() -> torch.Size:
        tensors = {name: _meta(x) for name, x in weights_of(arguments).items()}
        shape: torch.Size = _local_conv(func, arguments | tensors, _meta(x)).shape
        return shape

    result = _with_rows_enough(rule, x, settings, weights_of(arguments), shape_of_result)
    return _in_rows_again(source, result) if defaults is TRANSPOSE else result


def _meta(x: Tensor) -> Tensor:
    """Return a tensor with a shape and no values."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


# ---------------------------------------------------------------- pools and interpolation


def pool(
    kind: type[nn.Module],
    names: tuple[str, ...],
    count: int,
    func: Function,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Pools with `count` spatial dimensions."""
    settings = bind(names, args, kwargs)
    if not settings.get("stride"):
        settings.pop("stride", None)  # the size of the kernel
    x = with_spatial_rows(settings.pop("input"), count)
    if layout_of(x).dim == 0:
        return wrap(func(x.local, **settings), layout_of(x), x.view_)
    for name in SPATIAL_SETTINGS:
        if settings.get(name) is not None:
            settings[name] = _tuple(settings[name], count)

    def rule(x: GlobalTensor, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        if kind in ADAPTIVE_AVERAGES:
            result = _average_to_few_rows(x, settings["output_size"])
            if result is not None:
                return result
        return call_layer(partial(func, **settings), x, kind, settings)

    if not settings.get("return_indices"):
        return _with_rows_enough(rule, x, settings, {}, lambda: func(_meta(x), **settings).shape)
    if layout_of(x).dim == max(x.ndim - 2, 2):
        with suppress(NoRuleError):
            return rule(x, settings, {})
    # Indices count along all of a channel, whose rows could be in any dimension.
    x = move_rows(x, range(2, x.ndim))
    return wrap(func(x.local, **settings), layout_of(x), x.view_)


def pool_with_indices(
    kind: type[nn.Module],
    names: tuple[str, ...],
    count: int,
    func: Function,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Max pools that return where the maxima are, whatever `return_indices` says."""
    settings = bind(names, args, kwargs) | {"return_indices": True}

    def compute(x: Tensor, **settings: Any) -> Any:
        return func(x, **{k: v for k, v in settings.items() if k != "return_indices"})

    return pool(kind, names, count, compute, (settings.pop("input"),), settings)


UNPOOL = ("input", "indices", "kernel_size", "stride", "padding", "output_size")


@rule_for("max_unpool1d", "max_unpool2d", "max_unpool3d")
def unpool(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Values put to indices of their channel, by ranks that share the channels or the samples."""
    settings = bind(UNPOOL, args, kwargs)
    x, indices = settings.pop("input"), settings.pop("indices")
    if func not in UNPOOLS or x.ndim != UNPOOLS[func] + 2:
        raise NoRuleError
    band = x if is_band(x) else indices
    moved = band if layout_of(band).dim < 2 else move_rows(band, range(2, x.ndim))
    layout, view = layout_of(moved), band.view_
    local, local_indices = (
        with_layout(moved if part is band else part, layout, view) for part in (x, indices)
    )
    return wrap(func(local, local_indices, **settings), layout, view)


UNPOOLS = {getattr(F, f"max_unpool{count}d"): count for count in (1, 2, 3)}


ADAPTIVE_AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def _average_to_few_rows(x: GlobalTensor, sizes: tuple[Any, ...]) -> GlobalTensor | None:
    """Return an adaptive average with fewer rows than ranks, which each rank adds its rows to.

    None if there are more.
    """
    layout, view = layout_of(x), x.view_
    position = layout.dim - x.ndim
    rows = layout.size if sizes[position] is None else sizes[position]
    if not 0 < rows < view.ranks or layout.outer != 1 or not x.is_floating_point():
        return None
    # Each row of the result is the mean of some rows of the globe. Sums are in at least float32, as
    # in torch; a product with weights would be in half precision under autocast.
    height, first = layout.size, layout.partition.bounds[view.rank]
    bounds = [(i * height // rows, -(-(i + 1) * height // rows)) for i in range(rows)]
    local, wide = x.local.movedim(layout.dim, -1), accumulation_dtype(x.local)
    parts = []
    for start, stop in bounds:
        band = local[..., max(start - first, 0) : max(stop - first, 0)]
        parts.append(band.sum(-1, dtype=wide) / (stop - start))
    total = sum_over_bands(torch.stack(parts, layout.dim), view.manager.transport)
    function = getattr(F, f"adaptive_avg_pool{x.ndim - 2}d")
    return GlobalTensor(function(total, sizes).to(x.dtype), None, view)


MAX_POOL = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "ceil_mode",
    "return_indices",
)
AVG_POOL = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
# Name of a function without its number of dimensions, that of the layer, parameters. max_pool2d of
# torch.nn.functional chooses between two functions, of which `_max_pool2d` is one.
POOLS = (
    ("max_pool", "MaxPool", MAX_POOL),
    ("_max_pool", "MaxPool", MAX_POOL),
    ("avg_pool", "AvgPool", AVG_POOL),
    ("adaptive_avg_pool", "AdaptiveAvgPool", ("input", "output_size")),
    ("adaptive_max_pool", "AdaptiveMaxPool", ("input", "output_size", "return_indices")),
)


def _register_layers() -> None:
    """Register the rules of functions that exist for one, two and three spatial dimensions."""
    for count in (1, 2, 3):
        rules: list[tuple[str, Callable[..., Any]]] = [
            (f"conv{count}d", partial(conv, getattr(nn, f"Conv{count}d"), CONV, count)),
            (
                f"conv_transpose{count}d",
                partial(conv, getattr(nn, f"ConvTranspose{count}d"), TRANSPOSE, count),
            ),
        ]
        for name, kind, names in POOLS:
            settings = getattr(nn, f"{kind}{count}d"), names, count
            rules.append((f"{name}{count}d", partial(pool, *settings)))
            if "return_indices" in names:
                rule = partial(pool_with_indices, *settings)
                rules.append((f"{name}{count}d_with_indices", rule))
        for name, rule_of_count in rules:
            RULES.update(dict.fromkeys(functions_named(name), rule_of_count))


_register_layers()


@rule_for("pixel_shuffle", "pixel_unshuffle")
def shuffle(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Pixel shuffles."""
    is_shuffle = func.__name__ == "pixel_shuffle"
    name = "upscale_factor" if is_shuffle else "downscale_factor"
    settings = bind(("input", name), args, kwargs)
    x = settings.pop("input")
    layout_of(x)
    factor = settings[name]
    return _shuffle_view(x, factor) if is_shuffle else _unshuffle_view(x, factor)


def _shuffle_view(x: GlobalTensor, factor: int) -> Any:
    """Return a pixel shuffle of the last three dimensions."""
    *batch, channels, height, width = x.shape
    n = len(batch)
    parts = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return parts.permute(order).reshape(*batch, -1, height * factor, width * factor)


def _unshuffle_view(x: GlobalTensor, factor: int) -> Any:
    """Return the inverse of a pixel shuffle of the last three dimensions."""
    *batch, channels, height, width = x.shape
    n = len(batch)
    rows, columns = height // factor, width // factor
    parts = x.reshape(*batch, channels, rows, factor, columns, factor)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return parts.permute(order).reshape(*batch, channels * factor**2, rows, columns)


INTERPOLATE = (
    "input",
    "size",
    "scale_factor",
    "mode",
    "align_corners",
    "recompute_scale_factor",
    "antialias",
)


@rule_for("interpolate", "upsample")
def interpolate(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Interpolation to a size or by a factor."""
    source = args[0] if args else kwargs["input"]
    if not is_band(source):
        return _in_rows_again(source, call_whole(func, args, kwargs))
    return _in_rows_again(source, _interpolate_band(func, args, kwargs))


def _interpolate_band(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return an interpolated band."""
    settings = bind(INTERPOLATE, args, kwargs)
    x = settings.pop("input")
    kind: type[nn.Module] = nn.Upsample
    antialias = settings.pop("antialias", False)
    if antialias:
        func, kind = partial(func, antialias=True), AntialiasedUpsample
    x = with_spatial_rows(x, x.ndim - 2)
    layout = layout_of(x)
    if layout.dim == 0:
        return wrap(func(x.local, **settings), layout, x.view_)
    for name in ("size", "scale_factor"):
        if isinstance(settings.get(name), (list, torch.Size)):
            settings[name] = tuple(settings[name])
    if isinstance(settings.get("size"), int):
        settings["size"] = (settings["size"],) * (x.ndim - 2)
    exchanged = layout.dim == x.ndim - 1 and x.ndim > 3
    if layout.dim != x.ndim - 2 and not exchanged and x.ndim > 3:
        raise NoRuleError
    if exchanged:
        for name in ("size", "scale_factor"):
            if isinstance(settings.get(name), tuple):
                *others, rows, columns = settings[name]
                settings[name] = (*others, columns, rows)
        x = x.transpose(-1, -2)
    width = x.shape[-1]
    if antialias and has_one_column(width, settings.get("size"), settings.get("scale_factor")):
        raise NoRuleError
    output: Any = call_layer(partial(func, **settings), x, kind, settings)
    return output.transpose(-1, -2) if exchanged else output


# Upsampled fields become bands again.
RULES_FOR_WHOLE.update(
    functions_named(*(f"conv_transpose{n}d" for n in (1, 2, 3)), "interpolate", "upsample")
)

# ---------------------------------------------------------------- recurrent layers

CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


@rule_for("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Recurrent layers: each rank computes its own sequences."""
    is_lstm = func.__name__ == "lstm"
    names = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train",
             "bidirectional", "batch_first")  # fmt: skip
    arguments = bind(names, args, kwargs)
    if len(arguments) != len(names) or isinstance(arguments["has_biases"], (list, tuple)):
        raise NoRuleError  # of packed sequences, which have no rows
    x = with_rows_everywhere(arguments["input"])
    layout, view = layout_of(x), x.view_
    require_whole(arguments["params"])
    draws = arguments["dropout"] and arguments["train"] and arguments["num_layers"] > 1
    batch = 0 if arguments["batch_first"] else 1
    if draws or x.ndim != 3:
        raise NoRuleError
    if layout.dim != batch:
        # Rows that are steps of a sequence: each rank gets some of the sequences.
        x = move_rows(x, [d for d in range(3) if d != batch])
        layout = layout_of(x)
    state = layout.at(1)
    hidden = arguments["hx"] if is_lstm else (arguments["hx"],)
    # cuDNN refuses hidden states that are not contiguous, as parts of whole ones are.
    local_hidden = [with_layout(h, state, view).contiguous() for h in hidden]
    others = [arguments[name] for name in names[3:]]
    parameters = [local_of(p) for p in arguments["params"]]
    output, *states = func(
        x.local, local_hidden if is_lstm else local_hidden[0], parameters, *others
    )
    return (wrap(output, layout, view), *(wrap(h, state, view) for h in states))


@rule_for(*CELLS)
def recurrent_cell(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Cells of recurrent layers whose batch has rows."""
    x, hidden, *parameters = args
    x = with_rows_everywhere(x)
    layout, view = layout_of(x), x.view_
    require_whole(parameters)
    if kwargs or layout.dim != 0 or x.ndim != 2:
        raise NoRuleError
    if func.__name__ == "lstm_cell":
        hidden = tuple(with_layout(h, layout, view) for h in hidden)
    else:
        hidden = with_layout(hidden, layout, view)
    return wrap(func(x.local, hidden, *map(local_of, parameters)), layout, view)
