"""The audit of code between the layers: does any operation mix rows?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.planning.trace import TensorRef, Trace, TraceStep
from credit_dp.errors import UserError


class RowLayout(NamedTuple):
    """Dimension `dim` holds, slowest first, `outer` x `height` rows x `inner` entries."""

    dim: int
    outer: int
    inner: int
    height: int

    @property
    def alignment(self) -> tuple[int, int, int]:
        """Equal for tensors whose bands hold the same entries of dimension `dim`."""
        return self.dim, self.outer, self.height * self.inner


def narrow_to_band(whole: Tensor, rows: RowLayout, band: slice) -> Tensor:
    """Return the globe's rows `band` of a tensor that has all of them, as a view."""
    first, number = band.start * rows.inner, (band.stop - band.start) * rows.inner
    return whole.narrow(rows.dim, first, number)


class RowCouplingError(Exception):
    """The operation mixes rows, or may."""


Layout = RowLayout | None
LayoutRule = Callable[[TraceStep, list[Layout]], Layout]


def _pointwise(step: TraceStep, given: list[Layout]) -> Layout:
    """Operands broadcast against each other: their rows must fall on each other."""
    ndim = max(len(ref.shape) for ref in step.inputs)
    aligned = [
        layout._replace(dim=layout.dim + ndim - len(ref.shape))
        for ref, layout in zip(step.inputs, given, strict=True)
        if layout is not None
    ]
    if len({layout.alignment for layout in aligned}) > 1:
        raise RowCouplingError("joins tensors whose rows lie in different places")
    return aligned[0]


def _like_first_input(step: TraceStep, given: list[Layout]) -> Layout:
    return given[0]


def _dims_argument(step: TraceStep, key: str, ndim: int, default: int | None = None) -> set[int]:
    value = step.arguments.get(key, default)
    dims = [value] if isinstance(value, int) else value
    return {d % ndim for d in dims} if dims else set(range(ndim))


def _acts_along(key: str, default: int | None = None) -> LayoutRule:
    """Operations along dimensions that may not be the rows'."""

    def handler(step: TraceStep, given: list[Layout]) -> Layout:
        (ref, *_), layout = step.inputs, given[0]
        if layout is None:
            raise RowCouplingError("takes rows where none are expected")
        if layout.dim in _dims_argument(step, key, len(ref.shape), default):
            raise RowCouplingError("mixes rows")
        return layout

    return handler


def _reduce(step: TraceStep, given: list[Layout]) -> Layout:
    layout = _acts_along("dim")(step, given)
    ndim = len(step.inputs[0].shape)
    if layout is None or step.arguments.get("keepdim"):
        return layout
    before = [d for d in _dims_argument(step, "dim", ndim) if d < layout.dim]
    return layout._replace(dim=layout.dim - len(before))


def _slice(step: TraceStep, given: list[Layout]) -> Layout:
    layout = given[0]
    unchanged = step.inputs[0].shape == step.outputs[0].shape and step.arguments.get("step", 1) == 1
    return layout if unchanged else _acts_along("dim", 0)(step, given)


def _select(step: TraceStep, given: list[Layout]) -> Layout:
    layout = _acts_along("dim", 0)(step, given)
    dim = step.arguments.get("dim", 0) % len(step.inputs[0].shape)
    return layout and layout._replace(dim=layout.dim - (dim < layout.dim))


def _cat(step: TraceStep, given: list[Layout]) -> Layout:
    (layout, *others) = given
    ndim = len(step.inputs[0].shape)
    dim = step.arguments.get("dim", 0) % (ndim + (step.name == "aten.stack"))
    if layout is None or any(not other or other.alignment != layout.alignment for other in others):
        raise RowCouplingError("joins tensors whose rows lie in different places")
    if step.name == "aten.stack":
        return layout._replace(dim=layout.dim + (dim <= layout.dim))
    if dim == layout.dim:
        raise RowCouplingError("changes the number of rows")
    return layout


def _view(step: TraceStep, given: list[Layout]) -> Layout:
    """A view keeps the order of entries: find the dimension that holds whole rows again."""
    layout, old, new = given[0], step.inputs[0].shape, step.outputs[0].shape
    if layout is None:
        return None
    before = prod(old[: layout.dim]) * layout.outer
    after = layout.inner * prod(old[layout.dim + 1 :])
    for dim, size in enumerate(new):
        ahead, behind = prod(new[:dim]), prod(new[dim + 1 :])
        if before % ahead == 0 and after % behind == 0:
            outer, inner = before // ahead, after // behind
            if outer * layout.height * inner == size:
                return RowLayout(dim, outer, inner, layout.height)
    raise RowCouplingError("splits rows")


def _permute(step: TraceStep, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.inputs[0].shape)
    order = list(range(ndim))
    if step.name == "aten.permute":
        order = [d % ndim for d in step.arguments["dims"]]
    else:
        a, b = (step.arguments.get(key, i) % ndim for i, key in enumerate(("dim0", "dim1")))
        order[a], order[b] = order[b], order[a]
    return layout and layout._replace(dim=order.index(layout.dim))


def _expand(step: TraceStep, given: list[Layout]) -> Layout:
    layout = given[0]
    extra = len(step.outputs[0].shape) - len(step.inputs[0].shape)
    return layout and layout._replace(dim=layout.dim + extra)


def _repeat(step: TraceStep, given: list[Layout]) -> Layout:
    layout = _expand(step, given)
    if layout is None or step.arguments["repeats"][layout.dim] != 1:
        raise RowCouplingError("changes the number of rows")
    return layout


def _index(step: TraceStep, given: list[Layout]) -> Layout:
    """One list of indices along a dimension that holds no rows."""
    layout, indices = given[0], step.arguments["indices"]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    if layout is None or any(given[1:]) or len(places) != 1 or places[0] == layout.dim:
        raise RowCouplingError("mixes rows")
    if len(indices[places[0]].shape) != 1:
        raise RowCouplingError("is not known to keep rows apart")
    return layout


def _pad(step: TraceStep, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.inputs[0].shape)
    pads = step.arguments.get("pad") or step.arguments["padding"]
    at = 2 * (ndim - 1 - layout.dim) if layout else 0
    if any(pads[at : at + 2]):
        raise RowCouplingError("changes the number of rows")
    return layout


def _resize(step: TraceStep, given: list[Layout]) -> Layout:
    """Interpolation to as many rows, by a size and not by a factor, leaves them as they are."""
    layout = given[0]
    if layout is None or layout.dim < 2:
        return layout
    by_factor = any(step.arguments.get(f"scales{axis}") for axis in ("", "_d", "_h", "_w"))
    if by_factor or step.inputs[0].shape[layout.dim] != step.outputs[0].shape[layout.dim]:
        raise RowCouplingError("mixes rows")
    return layout


def _matmul(step: TraceStep, given: list[Layout]) -> Layout:
    """`mm`, `bmm` and their forms with an addend: the contracted dimension may hold no rows."""
    a, b = given[-2:]
    batched = len(step.inputs[-1].shape) - 2  # 1 for bmm
    if (a and a.dim == batched + 1) or (b and b.dim == batched):
        raise RowCouplingError("mixes rows")
    if a and b and (a != b or a.dim >= batched):
        raise RowCouplingError("mixes rows")
    return _join_addends(step, a or b, list(zip(given[:-2], step.inputs, strict=False)))


def _join_addends(
    step: TraceStep, layout: Layout, addends: Sequence[tuple[Layout, TensorRef]]
) -> Layout:
    """What is added to a result has its rows where the result has them, or none."""
    for addend, ref in addends:
        shifted = addend and addend._replace(
            dim=addend.dim + len(step.outputs[0].shape) - len(ref.shape)
        )
        if shifted and layout and shifted.alignment != layout.alignment:
            raise RowCouplingError("joins tensors whose rows lie in different places")
        layout = layout or shifted
    return layout


def _layer_norm(step: TraceStep, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.inputs[0].shape)
    if layout is None or layout.dim >= ndim - len(step.arguments["normalized_shape"]):
        raise RowCouplingError("mixes rows")
    return layout


def _convolution(step: TraceStep, given: list[Layout]) -> Layout:
    layout = given[0]
    if layout is not None and layout.dim == 0:
        return layout  # rows are folded with samples
    spatial = layout.dim - 2 if layout else -1
    if layout is None or spatial < 0:
        raise RowCouplingError("mixes rows")
    settings = (step.arguments[key][spatial] for key in ("stride", "padding", "output_padding"))
    if (step.inputs[1].shape[layout.dim], *settings) != (1, 1, 0, 0):
        raise RowCouplingError("mixes rows")
    return layout


def _avg_pool(step: TraceStep, given: list[Layout]) -> Layout:
    """Windows of one row, or rows among samples or channels."""
    layout, kernel = given[0], step.arguments["kernel_size"]
    window = layout.dim - len(step.inputs[0].shape) + len(kernel) if layout else 0
    sizes = [kernel, step.arguments.get("stride") or kernel, step.arguments.get("padding", [0])]
    if layout is None or (window >= 0 and [s[window % len(s)] for s in sizes] != [1, 1, 0]):
        raise RowCouplingError("mixes rows")
    return layout


def _couples_last_dims(spatial: int) -> LayoutRule:
    """Operations on the last dimensions, where no rows may be."""

    def handler(step: TraceStep, given: list[Layout]) -> Layout:
        layout = given[0]
        if layout is None or layout.dim >= len(step.inputs[0].shape) - spatial:
            raise RowCouplingError("mixes rows")
        return layout

    return handler


def _pixel_shuffle(step: TraceStep, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.inputs[0].shape)
    if layout is not None and layout.dim < ndim - 3:
        return layout  # rows are folded with samples
    if layout is None or layout.dim != ndim - 2:
        raise RowCouplingError("mixes rows")
    if step.name == "aten.pixel_shuffle":
        return layout._replace(inner=layout.inner * step.arguments["upscale_factor"])
    inner, rest = divmod(layout.inner, step.arguments["downscale_factor"])
    if rest:
        raise RowCouplingError("mixes rows")
    return layout._replace(inner=inner)


def _attention(step: TraceStep, given: list[Layout]) -> Layout:
    layouts = set(given[:3])
    layout = given[0]
    if len(layouts) > 1 or layout is None or layout.dim > 1:
        raise RowCouplingError("attends across rows")
    return _join_addends(step, layout, list(zip(given[3:], step.inputs[3:], strict=True)))


def _gather(step: TraceStep, given: list[Layout]) -> Layout:
    """Entries by number along a dimension without rows; the numbers have the entries' rows."""
    entries, numbers = given
    if entries is None or numbers is None or entries.alignment != numbers.alignment:
        raise RowCouplingError("joins tensors whose rows lie in different places")
    return _acts_along("dim")(step, given)


def _embedding(step: TraceStep, given: list[Layout]) -> Layout:
    """A table's line for each number: the numbers may have rows."""
    table, numbers = given
    if table is not None:
        raise RowCouplingError("mixes rows")
    return numbers


def _couples_dims(*dims: int) -> LayoutRule:
    """Operations that mix entries of some dimensions, counted from the start, and no others."""

    def handler(step: TraceStep, given: list[Layout]) -> Layout:
        layout = given[0]
        if layout is None or layout.dim in dims:
            raise RowCouplingError("mixes rows")
        return layout

    return handler


def _view_as_complex(step: TraceStep, given: list[Layout]) -> Layout:
    return _couples_dims(len(step.inputs[0].shape) - 1)(step, given)


def _fused_layer(inputs: int) -> LayoutRule:
    """Layers of a transformer in one operation: samples alone are apart."""

    def handler(step: TraceStep, given: list[Layout]) -> Layout:
        layout = given[0]
        if layout is None or layout.dim != 0 or set(given[:inputs]) != {layout}:
            raise RowCouplingError("attends across rows")
        if any(given[inputs:]):
            raise RowCouplingError("joins tensors whose rows lie in different places")
        return layout

    return handler


FACTORIES = {
    f"aten.{name}"
    for name in (
        *("empty", "zeros", "ones", "full", "rand", "randn"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
    )
}
# Their sizes may depend on the number of rows; the shapes are compared instead.
RESHAPES = {f"aten.{name}" for name in ("view", "_unsafe_view", "reshape", "expand")}
SIZE_ARGUMENTS = ("size", "shape", "output_size")
RESIZES = {
    *(f"aten.upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(
        f"aten.{kind}{n}d"
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    ),
}
RANDOM_OPERATIONS = {
    f"aten.{name}"
    for name in (
        *("rand", "randn", "rand_like", "randn_like", "randint", "randperm", "uniform_"),
        *("normal_", "bernoulli", "bernoulli_", "native_dropout"),
    )
}


def _rules_for(handler: LayoutRule, *names: str) -> dict[str, LayoutRule]:
    return {f"aten.{name}": handler for name in names}


LAYOUT_RULES: dict[str, LayoutRule] = {
    **_rules_for(
        _like_first_input,
        *("clone", "detach", "alias", "_to_copy", "contiguous", "bernoulli_", "native_dropout"),
        *("zero_", "fill_", "lift_fresh", "uniform_", "normal_", "bernoulli"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    ),
    **_rules_for(_like_first_input, "_conj", "_neg_view", "view_as_real"),
    **_rules_for(_pointwise, "_prelu_kernel", "copy_", "hardswish", "hardswish_", "threshold_"),
    **_rules_for(_pointwise, "mish_", "log_sigmoid_forward", "complex", "polar"),
    **_rules_for(_pointwise, "masked_fill", "masked_fill_"),
    **_rules_for(_reduce, "sum", "mean", "amax", "amin", "var", "var_mean", "std", "logsumexp"),
    **_rules_for(_reduce, "linalg_vector_norm", "max", "min", "argmax", "argmin", "prod"),
    **_rules_for(_reduce, "any", "all", "median", "nanmedian", "kthvalue", "mode"),
    **_rules_for(_acts_along("dim"), "_softmax", "_safe_softmax", "_log_softmax", "cumsum"),
    **_rules_for(_acts_along("dim"), "cumprod", "cummax", "cummin", "logcumsumexp"),
    **_rules_for(_acts_along("dim"), "_fft_r2c", "_fft_c2r", "_fft_c2c"),
    **_rules_for(_acts_along("dim", -1), "glu", "sort", "topk"),
    **_rules_for(_gather, "gather"),
    **_rules_for(_embedding, "embedding"),
    **_rules_for(_couples_dims(1), "channel_shuffle", "native_channel_shuffle"),
    **_rules_for(_view_as_complex, "view_as_complex"),
    **_rules_for(_acts_along("dims"), "flip", "roll"),
    **_rules_for(
        _acts_along("dim", 0), "split", "split_with_sizes", "unsafe_split", "index_select"
    ),
    **_rules_for(_slice, "slice"),
    **_rules_for(_select, "select", "unbind"),
    **_rules_for(_cat, "cat", "stack"),
    **_rules_for(_view, "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"),
    **_rules_for(_permute, "permute", "transpose", "transpose_", "t"),
    **_rules_for(_expand, "expand"),
    **_rules_for(_repeat, "repeat"),
    **_rules_for(_index, "index"),
    **_rules_for(_pad, "constant_pad_nd"),
    **_rules_for(
        _pad, *(f"re{kind}_pad{n}d" for kind in ("flection", "plication") for n in (1, 2, 3))
    ),
    **dict.fromkeys(RESIZES, _resize),
    **_rules_for(_matmul, "mm", "addmm", "bmm", "baddbmm"),
    **_rules_for(_layer_norm, "native_layer_norm", "_fused_rms_norm"),
    **_rules_for(_convolution, "convolution"),
    **_rules_for(_avg_pool, "avg_pool2d", "avg_pool3d"),
    **_rules_for(_couples_last_dims(1), "max_pool1d"),
    **{
        name: handler
        for n in (1, 2, 3)
        for name, handler in _rules_for(
            _couples_last_dims(n),
            *(f"max_pool{n}d_with_indices", f"_adaptive_avg_pool{n}d", f"adaptive_max_pool{n}d"),
        ).items()
    },
    **_rules_for(_pixel_shuffle, "pixel_shuffle", "pixel_unshuffle"),
    **_rules_for(
        _attention,
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    ),
    **_rules_for(_fused_layer(1), "_transformer_encoder_layer_fwd"),
    **_rules_for(_fused_layer(3), "_native_multi_head_attention"),
}


def layout_of_new_tensor(step: TraceStep, given: list[Layout]) -> Layout:
    """Return the rows of the tensor that a new one is made after, if they fit the new one."""
    layout = given[0] if given else None
    if layout is None or len(step.inputs[0].shape) != len(step.outputs[0].shape):
        return None
    return layout if step.inputs[0].shape[layout.dim] == step.outputs[0].shape[layout.dim] else None


def layout_after(step: TraceStep, given: list[Layout]) -> Layout:
    """Return where the rows are after an operation; `given` has those of its tensors.

    Raises:
        MixedError: the operation mixes rows, or is not known not to.
    """
    if step.op is not None and torch.Tag.pointwise in step.op.tags:
        return _pointwise(step, given)
    handler = LAYOUT_RULES.get(step.name)
    if handler is None:
        raise RowCouplingError("is not known to keep rows apart")
    return handler(step, given)


# Part of an operation's name -> the exact one of `functional`.
FUNCTIONAL_ALTERNATIVES = {
    "aten.mean": "mean",
    "aten.sum": "mean",
    "upsample": "interpolate",
    "adaptive_avg_pool": "interpolate",
    "_pad": "pad",
    "aten.roll": "roll",
}

CONTROL_FLOW_DIFFERS = (
    "control flow depends on the number of rows or on the type of a sharded layer"
)

# What these need instead of a size taken from a tensor, which is a band's.
CALL_HINTS = {
    "interpolate": "(x, scale_factor=...), or with size=(rows, columns) of the whole globe as "
    "constants, or nn.Upsample"
}


def audit(whole: Trace, band: Trace, heights: dict[int, int]) -> None:
    """Refuse code that mixes rows.

    Args:
        whole: the trace of the whole globe.
        band: the trace of one band.
        heights: global number of rows -> the band's.

    Raises:
        AuditError: an operation mixes rows or is unknown, with the line of code.
    """
    refusals = list(_refusals(whole, band, heights))
    if refusals:
        raise AuditError(refusals)


class AuditError(UserError):
    """Code mixes rows. The message tells of the first place, `refusals` of all that were found."""

    def __init__(self, refusals: list[str]) -> None:
        super().__init__(refusals[0])
        self.refusals = refusals


def _refusals(whole: Trace, band: Trace, heights: dict[int, int]) -> Iterator[str]:
    """Tell of each operation that is refused, as long as it is clear where rows are after it."""
    layouts: dict[int, Layout] = {}
    last = ""
    for step, other in zip(whole.steps, band.steps, strict=False):
        last = step.location or last
        if step.op is not other.op:
            yield refusal_message(last, CONTROL_FLOW_DIFFERS)
            return
        try:
            _check_step(step, other, heights, layouts)
        except RowCouplingError as error:
            yield refusal_message(step.location, str(error), _operation_label(step))
            if len(step.outputs) != len(other.outputs):
                return
            try:
                for ref, made in zip(step.outputs, other.outputs, strict=True):
                    layouts[ref.number] = _layout_from_shapes(ref, made, heights)
            except RowCouplingError:
                return
    if len(whole.steps) != len(band.steps):
        yield refusal_message(last, CONTROL_FLOW_DIFFERS)


def refusal_message(where: str, reason: str, operation: str = "") -> str:
    """Say where code mixes rows, what it does, and what to do instead."""
    instead = next(
        (name for part, name in FUNCTIONAL_ALTERNATIVES.items() if part in operation), None
    )
    call = f"credit_dp.domain_parallel.functional.{instead}{CALL_HINTS.get(instead or '', '')}"
    fix = f"Use {call}, or put" if instead else "Put"
    colon = ": " if operation else ""
    return (
        f"{where}: {operation}{colon}{reason}. {fix} this into a module of its own and name it in "
        "custom_converters={TYPE: function(module) -> replacement}."
    )


def _operation_label(step: TraceStep) -> str:
    place = step.arguments.get("label", "output")
    return step.name or (place if isinstance(place, str) else "a module from custom_converters")


def _check_step(
    step: TraceStep, other: TraceStep, heights: dict[int, int], layouts: dict[int, Layout]
) -> None:
    given = [layouts.get(ref.number) for ref in step.inputs]
    if [(r.number, r.value) for r in step.inputs] != [(r.number, r.value) for r in other.inputs]:
        raise RowCouplingError("what it works on depends on the number of rows")
    if len(step.outputs) != len(other.outputs):
        raise RowCouplingError("what it makes depends on the number of rows")
    if step.op is None:
        _check_layer(step, other, heights, layouts, given)
        return
    if _comparable_settings(step) != _comparable_settings(other):
        raise RowCouplingError("a number depends on the number of rows")
    if step.name in FACTORIES or (step.name in RESHAPES and not any(given)):
        seen = [
            _layout_from_shapes(ref, band, heights)
            for ref, band in zip(step.outputs, other.outputs, strict=True)
        ]
        made = [layout and (layout_of_new_tensor(step, given) or layout) for layout in seen]
    else:
        layout = layout_after(step, given) if any(given) else None
        # Beside its result an operation may make what has no rows: the state of random numbers.
        made = [
            None if 0 in ref.shape or (at > 0 and ref.shape == band.shape) else layout
            for at, (ref, band) in enumerate(zip(step.outputs, other.outputs, strict=True))
        ]
    if step.name in RANDOM_OPERATIONS and not any(made):
        raise RowCouplingError("draws numbers that would differ between the ranks of a globe")
    for ref, band, layout in zip(step.outputs, other.outputs, made, strict=True):
        _check_shapes(ref, band, layout, heights)
        layouts[ref.number] = layout


def _check_layer(
    step: TraceStep,
    other: TraceStep,
    heights: dict[int, int],
    layouts: dict[int, Layout],
    given: list[Layout],
) -> None:
    """A layer gets rows where it was planned to; others have them in the last dimension but one."""
    if step.settings != other.settings:
        raise RowCouplingError(CONTROL_FLOW_DIFFERS)
    takes = step.arguments.get("input_layouts")
    for at, (ref, layout) in enumerate(zip(step.inputs, given, strict=True)):
        if takes is not None and (layout and layout.alignment) != (
            takes[at] and takes[at].alignment
        ):
            raise RowCouplingError("gets rows in another place than it seemed")
        if takes is None and layout and layout.alignment[:2] != (len(ref.shape) - 2, 1):
            raise RowCouplingError("rows have left the last dimension but one")
    makes = step.arguments.get("output_layouts") or [None] * len(step.outputs)
    for ref, band, layout in zip(step.outputs, other.outputs, makes, strict=True):
        if takes is None:
            layout = _layout_from_shapes(ref, band, heights)
        _check_shapes(ref, band, layout, heights)
        layouts[ref.number] = layout


def _comparable_settings(step: TraceStep) -> dict[str, object]:
    """What is given beside tensors, without sizes that are compared as shapes."""
    settings = step.settings
    if step.name == "aten.slice":
        whole = step.inputs[0].shape == step.outputs[0].shape and settings.get("step", 1) == 1
        return {} if whole else settings
    sized = step.name in RESHAPES | FACTORIES | RESIZES
    return {key: value for key, value in settings.items() if not (sized and key in SIZE_ARGUMENTS)}


def _layout_from_shapes(ref: TensorRef, band: TensorRef, heights: dict[int, int]) -> Layout:
    """Where the two runs' shapes differ, one dimension at most, there are the rows."""
    if len(ref.shape) != len(band.shape):
        raise RowCouplingError(f"makes {ref.shape} of the globe and {band.shape} of a band")
    differing = [d for d, (a, b) in enumerate(zip(ref.shape, band.shape, strict=True)) if a != b]
    if not differing:
        return None
    dim = differing[0]
    size, local = ref.shape[dim], band.shape[dim]
    for height in sorted(heights, reverse=True):
        if len(differing) == 1 and size * heights[height] == local * height and size % height == 0:
            return RowLayout(dim, 1, size // height, height)
    raise RowCouplingError(f"makes {ref.shape} of the globe and {band.shape} of a band")


def _check_shapes(ref: TensorRef, band: TensorRef, layout: Layout, heights: dict[int, int]) -> None:
    """The layout predicted must be the one that the shapes show."""
    expected = list(ref.shape)
    if layout is not None:
        expected[layout.dim] = layout.outer * heights[layout.height] * layout.inner
        if ref.shape[layout.dim] != layout.outer * layout.height * layout.inner:
            raise RowCouplingError("changes the number of rows")
    if tuple(expected) != band.shape:
        raise RowCouplingError(f"makes {ref.shape} of the globe and {band.shape} of a band")
