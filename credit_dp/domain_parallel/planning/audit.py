"""The audit of code between the layers: does any operation mix rows?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.planning.trace import Ref, Step, Trace
from credit_dp.errors import UserError


class Rows(NamedTuple):
    """Dimension `dim` holds, slowest first, `outer` x `height` rows x `inner` entries."""

    dim: int
    outer: int
    inner: int
    height: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Equal for tensors whose bands hold the same entries of dimension `dim`."""
        return self.dim, self.outer, self.height * self.inner


def narrowed(whole: Tensor, rows: Rows, band: slice) -> Tensor:
    """Return the globe's rows `band` of a tensor that has all of them, as a view."""
    first, number = band.start * rows.inner, (band.stop - band.start) * rows.inner
    return whole.narrow(rows.dim, first, number)


class MixedError(Exception):
    """The operation mixes rows, or may."""


Layout = Rows | None
Handler = Callable[[Step, list[Layout]], Layout]


def pointwise(step: Step, given: list[Layout]) -> Layout:
    """Operands broadcast against each other: their rows must fall on each other."""
    ndim = max(len(ref.shape) for ref in step.refs)
    aligned = [
        layout._replace(dim=layout.dim + ndim - len(ref.shape))
        for ref, layout in zip(step.refs, given, strict=True)
        if layout is not None
    ]
    if len({layout.place for layout in aligned}) > 1:
        raise MixedError("joins tensors whose rows lie in different places")
    return aligned[0]


def _first(step: Step, given: list[Layout]) -> Layout:
    return given[0]


def _dims(step: Step, key: str, ndim: int, default: int | None = None) -> set[int]:
    value = step.given.get(key, default)
    dims = [value] if isinstance(value, int) else value
    return {d % ndim for d in dims} if dims else set(range(ndim))


def _along(key: str, default: int | None = None) -> Handler:
    """Operations along dimensions that may not be the rows'."""

    def handler(step: Step, given: list[Layout]) -> Layout:
        (ref, *_), layout = step.refs, given[0]
        if layout is None:
            raise MixedError("takes rows where none are expected")
        if layout.dim in _dims(step, key, len(ref.shape), default):
            raise MixedError("mixes rows")
        return layout

    return handler


def _reduce(step: Step, given: list[Layout]) -> Layout:
    layout = _along("dim")(step, given)
    ndim = len(step.refs[0].shape)
    if layout is None or step.given.get("keepdim"):
        return layout
    before = [d for d in _dims(step, "dim", ndim) if d < layout.dim]
    return layout._replace(dim=layout.dim - len(before))


def _slice(step: Step, given: list[Layout]) -> Layout:
    layout = given[0]
    unchanged = step.refs[0].shape == step.made[0].shape and step.given.get("step", 1) == 1
    return layout if unchanged else _along("dim", 0)(step, given)


def _select(step: Step, given: list[Layout]) -> Layout:
    layout = _along("dim", 0)(step, given)
    dim = step.given.get("dim", 0) % len(step.refs[0].shape)
    return layout and layout._replace(dim=layout.dim - (dim < layout.dim))


def _cat(step: Step, given: list[Layout]) -> Layout:
    (layout, *others) = given
    ndim = len(step.refs[0].shape)
    dim = step.given.get("dim", 0) % (ndim + (step.name == "aten.stack"))
    if layout is None or any(not other or other.place != layout.place for other in others):
        raise MixedError("joins tensors whose rows lie in different places")
    if step.name == "aten.stack":
        return layout._replace(dim=layout.dim + (dim <= layout.dim))
    if dim == layout.dim:
        raise MixedError("changes the number of rows")
    return layout


def _view(step: Step, given: list[Layout]) -> Layout:
    """A view keeps the order of entries: find the dimension that holds whole rows again."""
    layout, old, new = given[0], step.refs[0].shape, step.made[0].shape
    if layout is None:
        return None
    before = prod(old[: layout.dim]) * layout.outer
    after = layout.inner * prod(old[layout.dim + 1 :])
    for dim, size in enumerate(new):
        ahead, behind = prod(new[:dim]), prod(new[dim + 1 :])
        if before % ahead == 0 and after % behind == 0:
            outer, inner = before // ahead, after // behind
            if outer * layout.height * inner == size:
                return Rows(dim, outer, inner, layout.height)
    raise MixedError("splits rows")


def _permute(step: Step, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.refs[0].shape)
    order = list(range(ndim))
    if step.name == "aten.permute":
        order = [d % ndim for d in step.given["dims"]]
    else:
        a, b = (step.given.get(key, i) % ndim for i, key in enumerate(("dim0", "dim1")))
        order[a], order[b] = order[b], order[a]
    return layout and layout._replace(dim=order.index(layout.dim))


def _expand(step: Step, given: list[Layout]) -> Layout:
    layout = given[0]
    extra = len(step.made[0].shape) - len(step.refs[0].shape)
    return layout and layout._replace(dim=layout.dim + extra)


def _repeat(step: Step, given: list[Layout]) -> Layout:
    layout = _expand(step, given)
    if layout is None or step.given["repeats"][layout.dim] != 1:
        raise MixedError("changes the number of rows")
    return layout


def _index(step: Step, given: list[Layout]) -> Layout:
    """One list of indices along a dimension that holds no rows."""
    layout, indices = given[0], step.given["indices"]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    if layout is None or any(given[1:]) or len(places) != 1 or places[0] == layout.dim:
        raise MixedError("mixes rows")
    if len(indices[places[0]].shape) != 1:
        raise MixedError("is not known to keep rows apart")
    return layout


def _pad(step: Step, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.refs[0].shape)
    pads = step.given.get("pad") or step.given["padding"]
    at = 2 * (ndim - 1 - layout.dim) if layout else 0
    if any(pads[at : at + 2]):
        raise MixedError("changes the number of rows")
    return layout


def _resize(step: Step, given: list[Layout]) -> Layout:
    """Interpolation to as many rows, by a size and not by a factor, leaves them as they are."""
    layout = given[0]
    if layout is None or layout.dim < 2:
        return layout
    by_factor = any(step.given.get(f"scales{axis}") for axis in ("", "_d", "_h", "_w"))
    if by_factor or step.refs[0].shape[layout.dim] != step.made[0].shape[layout.dim]:
        raise MixedError("mixes rows")
    return layout


def _product(step: Step, given: list[Layout]) -> Layout:
    """`mm`, `bmm` and their forms with an addend: the contracted dimension may hold no rows."""
    a, b = given[-2:]
    batched = len(step.refs[-1].shape) - 2  # 1 for bmm
    if (a and a.dim == batched + 1) or (b and b.dim == batched):
        raise MixedError("mixes rows")
    if a and b and (a != b or a.dim >= batched):
        raise MixedError("mixes rows")
    return _joined(step, a or b, list(zip(given[:-2], step.refs, strict=False)))


def _joined(step: Step, layout: Layout, addends: Sequence[tuple[Layout, Ref]]) -> Layout:
    """What is added to a result has its rows where the result has them, or none."""
    for addend, ref in addends:
        shifted = addend and addend._replace(
            dim=addend.dim + len(step.made[0].shape) - len(ref.shape)
        )
        if shifted and layout and shifted.place != layout.place:
            raise MixedError("joins tensors whose rows lie in different places")
        layout = layout or shifted
    return layout


def _layer_norm(step: Step, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.refs[0].shape)
    if layout is None or layout.dim >= ndim - len(step.given["normalized_shape"]):
        raise MixedError("mixes rows")
    return layout


def _convolution(step: Step, given: list[Layout]) -> Layout:
    layout = given[0]
    if layout is not None and layout.dim == 0:
        return layout  # rows are folded with samples
    spatial = layout.dim - 2 if layout else -1
    if layout is None or spatial < 0:
        raise MixedError("mixes rows")
    settings = (step.given[key][spatial] for key in ("stride", "padding", "output_padding"))
    if (step.refs[1].shape[layout.dim], *settings) != (1, 1, 0, 0):
        raise MixedError("mixes rows")
    return layout


def _average(step: Step, given: list[Layout]) -> Layout:
    """Windows of one row, or rows among samples or channels."""
    layout, kernel = given[0], step.given["kernel_size"]
    window = layout.dim - len(step.refs[0].shape) + len(kernel) if layout else 0
    sizes = [kernel, step.given.get("stride") or kernel, step.given.get("padding", [0])]
    if layout is None or (window >= 0 and [s[window % len(s)] for s in sizes] != [1, 1, 0]):
        raise MixedError("mixes rows")
    return layout


def _apart_in(spatial: int) -> Handler:
    """Operations on the last dimensions, where no rows may be."""

    def handler(step: Step, given: list[Layout]) -> Layout:
        layout = given[0]
        if layout is None or layout.dim >= len(step.refs[0].shape) - spatial:
            raise MixedError("mixes rows")
        return layout

    return handler


def _shuffle(step: Step, given: list[Layout]) -> Layout:
    layout, ndim = given[0], len(step.refs[0].shape)
    if layout is not None and layout.dim < ndim - 3:
        return layout  # rows are folded with samples
    if layout is None or layout.dim != ndim - 2:
        raise MixedError("mixes rows")
    if step.name == "aten.pixel_shuffle":
        return layout._replace(inner=layout.inner * step.given["upscale_factor"])
    inner, rest = divmod(layout.inner, step.given["downscale_factor"])
    if rest:
        raise MixedError("mixes rows")
    return layout._replace(inner=inner)


def _attention(step: Step, given: list[Layout]) -> Layout:
    layouts = set(given[:3])
    layout = given[0]
    if len(layouts) > 1 or layout is None or layout.dim > 1:
        raise MixedError("attends across rows")
    return _joined(step, layout, list(zip(given[3:], step.refs[3:], strict=True)))


def _gather(step: Step, given: list[Layout]) -> Layout:
    """Entries by number along a dimension without rows; the numbers have the entries' rows."""
    entries, numbers = given
    if entries is None or numbers is None or entries.place != numbers.place:
        raise MixedError("joins tensors whose rows lie in different places")
    return _along("dim")(step, given)


def _embedding(step: Step, given: list[Layout]) -> Layout:
    """A table's line for each number: the numbers may have rows."""
    table, numbers = given
    if table is not None:
        raise MixedError("mixes rows")
    return numbers


def _apart_from(*dims: int) -> Handler:
    """Operations that mix entries of some dimensions, counted from the start, and no others."""

    def handler(step: Step, given: list[Layout]) -> Layout:
        layout = given[0]
        if layout is None or layout.dim in dims:
            raise MixedError("mixes rows")
        return layout

    return handler


def _as_complex(step: Step, given: list[Layout]) -> Layout:
    return _apart_from(len(step.refs[0].shape) - 1)(step, given)


def _whole_layer(inputs: int) -> Handler:
    """Layers of a transformer in one operation: samples alone are apart."""

    def handler(step: Step, given: list[Layout]) -> Layout:
        layout = given[0]
        if layout is None or layout.dim != 0 or set(given[:inputs]) != {layout}:
            raise MixedError("attends across rows")
        if any(given[inputs:]):
            raise MixedError("joins tensors whose rows lie in different places")
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
SIZED = {f"aten.{name}" for name in ("view", "_unsafe_view", "reshape", "expand")}
SIZES = ("size", "shape", "output_size")
RESIZES = {
    *(f"aten.upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(
        f"aten.{kind}{n}d"
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    ),
}
RANDOM = {
    f"aten.{name}"
    for name in (
        *("rand", "randn", "rand_like", "randn_like", "randint", "randperm", "uniform_"),
        *("normal_", "bernoulli", "bernoulli_", "native_dropout"),
    )
}


def _handlers(handler: Handler, *names: str) -> dict[str, Handler]:
    return {f"aten.{name}": handler for name in names}


HANDLERS: dict[str, Handler] = {
    **_handlers(
        _first,
        *("clone", "detach", "alias", "_to_copy", "contiguous", "bernoulli_", "native_dropout"),
        *("zero_", "fill_", "lift_fresh", "uniform_", "normal_", "bernoulli"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    ),
    **_handlers(_first, "_conj", "_neg_view", "view_as_real"),
    **_handlers(pointwise, "_prelu_kernel", "copy_", "hardswish", "hardswish_", "threshold_"),
    **_handlers(pointwise, "mish_", "log_sigmoid_forward", "complex", "polar"),
    **_handlers(pointwise, "masked_fill", "masked_fill_"),
    **_handlers(_reduce, "sum", "mean", "amax", "amin", "var", "var_mean", "std", "logsumexp"),
    **_handlers(_reduce, "linalg_vector_norm", "max", "min", "argmax", "argmin", "prod"),
    **_handlers(_reduce, "any", "all", "median", "nanmedian", "kthvalue", "mode"),
    **_handlers(_along("dim"), "_softmax", "_safe_softmax", "_log_softmax", "cumsum"),
    **_handlers(_along("dim"), "cumprod", "cummax", "cummin", "logcumsumexp"),
    **_handlers(_along("dim"), "_fft_r2c", "_fft_c2r", "_fft_c2c"),
    **_handlers(_along("dim", -1), "glu", "sort", "topk"),
    **_handlers(_gather, "gather"),
    **_handlers(_embedding, "embedding"),
    **_handlers(_apart_from(1), "channel_shuffle", "native_channel_shuffle"),
    **_handlers(_as_complex, "view_as_complex"),
    **_handlers(_along("dims"), "flip", "roll"),
    **_handlers(_along("dim", 0), "split", "split_with_sizes", "unsafe_split", "index_select"),
    **_handlers(_slice, "slice"),
    **_handlers(_select, "select", "unbind"),
    **_handlers(_cat, "cat", "stack"),
    **_handlers(_view, "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"),
    **_handlers(_permute, "permute", "transpose", "transpose_", "t"),
    **_handlers(_expand, "expand"),
    **_handlers(_repeat, "repeat"),
    **_handlers(_index, "index"),
    **_handlers(_pad, "constant_pad_nd"),
    **_handlers(
        _pad, *(f"re{kind}_pad{n}d" for kind in ("flection", "plication") for n in (1, 2, 3))
    ),
    **dict.fromkeys(RESIZES, _resize),
    **_handlers(_product, "mm", "addmm", "bmm", "baddbmm"),
    **_handlers(_layer_norm, "native_layer_norm", "_fused_rms_norm"),
    **_handlers(_convolution, "convolution"),
    **_handlers(_average, "avg_pool2d", "avg_pool3d"),
    **_handlers(_apart_in(1), "max_pool1d"),
    **{
        name: handler
        for n in (1, 2, 3)
        for name, handler in _handlers(
            _apart_in(n),
            *(f"max_pool{n}d_with_indices", f"_adaptive_avg_pool{n}d", f"adaptive_max_pool{n}d"),
        ).items()
    },
    **_handlers(_shuffle, "pixel_shuffle", "pixel_unshuffle"),
    **_handlers(
        _attention,
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    ),
    **_handlers(_whole_layer(1), "_transformer_encoder_layer_fwd"),
    **_handlers(_whole_layer(3), "_native_multi_head_attention"),
}


def layout_of_new(step: Step, given: list[Layout]) -> Layout:
    """Return the rows of the tensor that a new one is made after, if they fit the new one."""
    layout = given[0] if given else None
    if layout is None or len(step.refs[0].shape) != len(step.made[0].shape):
        return None
    return layout if step.refs[0].shape[layout.dim] == step.made[0].shape[layout.dim] else None


def layout_after(step: Step, given: list[Layout]) -> Layout:
    """Return where the rows are after an operation; `given` has those of its tensors.

    Raises:
        MixedError: the operation mixes rows, or is not known not to.
    """
    if step.op is not None and torch.Tag.pointwise in step.op.tags:
        return pointwise(step, given)
    handler = HANDLERS.get(step.name)
    if handler is None:
        raise MixedError("is not known to keep rows apart")
    return handler(step, given)


# Part of an operation's name -> the exact one of `functional`.
INSTEAD = {
    "aten.mean": "mean",
    "aten.sum": "mean",
    "upsample": "interpolate",
    "adaptive_avg_pool": "interpolate",
    "_pad": "pad",
    "aten.roll": "roll",
}

OTHER_WAY = "control flow depends on the number of rows or on the type of a sharded layer"

# What these need instead of a size taken from a tensor, which is a band's.
SETTINGS = {
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
        last = step.where or last
        if step.op is not other.op:
            yield refusal(last, OTHER_WAY)
            return
        try:
            _judge(step, other, heights, layouts)
        except MixedError as error:
            yield refusal(step.where, str(error), _label(step))
            if len(step.made) != len(other.made):
                return
            try:
                for ref, made in zip(step.made, other.made, strict=True):
                    layouts[ref.number] = _seen(ref, made, heights)
            except MixedError:
                return
    if len(whole.steps) != len(band.steps):
        yield refusal(last, OTHER_WAY)


def refusal(where: str, reason: str, operation: str = "") -> str:
    """Say where code mixes rows, what it does, and what to do instead."""
    instead = next((name for part, name in INSTEAD.items() if part in operation), None)
    call = f"credit_dp.domain_parallel.functional.{instead}{SETTINGS.get(instead or '', '')}"
    fix = f"Use {call}, or put" if instead else "Put"
    colon = ": " if operation else ""
    return (
        f"{where}: {operation}{colon}{reason}. {fix} this into a module of its own and name it in "
        "custom_converters={TYPE: function(module) -> replacement}."
    )


def _label(step: Step) -> str:
    place = step.given.get("place", "output")
    return step.name or (place if isinstance(place, str) else "a module from custom_converters")


def _judge(step: Step, other: Step, heights: dict[int, int], layouts: dict[int, Layout]) -> None:
    given = [layouts.get(ref.number) for ref in step.refs]
    if [(r.number, r.value) for r in step.refs] != [(r.number, r.value) for r in other.refs]:
        raise MixedError("what it works on depends on the number of rows")
    if len(step.made) != len(other.made):
        raise MixedError("what it makes depends on the number of rows")
    if step.op is None:
        _judge_layer(step, other, heights, layouts, given)
        return
    if _numbers(step) != _numbers(other):
        raise MixedError("a number depends on the number of rows")
    if step.name in FACTORIES or (step.name in SIZED and not any(given)):
        seen = [_seen(ref, band, heights) for ref, band in zip(step.made, other.made, strict=True)]
        made = [layout and (layout_of_new(step, given) or layout) for layout in seen]
    else:
        layout = layout_after(step, given) if any(given) else None
        # Beside its result an operation may make what has no rows: the state of random numbers.
        made = [
            None if 0 in ref.shape or (at > 0 and ref.shape == band.shape) else layout
            for at, (ref, band) in enumerate(zip(step.made, other.made, strict=True))
        ]
    if step.name in RANDOM and not any(made):
        raise MixedError("draws numbers that would differ between the ranks of a globe")
    for ref, band, layout in zip(step.made, other.made, made, strict=True):
        _check_shapes(ref, band, layout, heights)
        layouts[ref.number] = layout


def _judge_layer(
    step: Step,
    other: Step,
    heights: dict[int, int],
    layouts: dict[int, Layout],
    given: list[Layout],
) -> None:
    """A layer gets rows where it was planned to; others have them in the last dimension but one."""
    if step.settings != other.settings:
        raise MixedError(OTHER_WAY)
    takes = step.given.get("takes")
    for at, (ref, layout) in enumerate(zip(step.refs, given, strict=True)):
        if takes is not None and (layout and layout.place) != (takes[at] and takes[at].place):
            raise MixedError("gets rows in another place than it seemed")
        if takes is None and layout and layout.place[:2] != (len(ref.shape) - 2, 1):
            raise MixedError("rows have left the last dimension but one")
    makes = step.given.get("makes") or [None] * len(step.made)
    for ref, band, layout in zip(step.made, other.made, makes, strict=True):
        if takes is None:
            layout = _seen(ref, band, heights)
        _check_shapes(ref, band, layout, heights)
        layouts[ref.number] = layout


def _numbers(step: Step) -> dict[str, object]:
    """What is given beside tensors, without sizes that are compared as shapes."""
    settings = step.settings
    if step.name == "aten.slice":
        whole = step.refs[0].shape == step.made[0].shape and settings.get("step", 1) == 1
        return {} if whole else settings
    sized = step.name in SIZED | FACTORIES | RESIZES
    return {key: value for key, value in settings.items() if not (sized and key in SIZES)}


def _seen(ref: Ref, band: Ref, heights: dict[int, int]) -> Layout:
    """Where the two runs' shapes differ, one dimension at most, there are the rows."""
    if len(ref.shape) != len(band.shape):
        raise MixedError(f"makes {ref.shape} of the globe and {band.shape} of a band")
    differing = [d for d, (a, b) in enumerate(zip(ref.shape, band.shape, strict=True)) if a != b]
    if not differing:
        return None
    dim = differing[0]
    size, local = ref.shape[dim], band.shape[dim]
    for height in sorted(heights, reverse=True):
        if len(differing) == 1 and size * heights[height] == local * height and size % height == 0:
            return Rows(dim, 1, size // height, height)
    raise MixedError(f"makes {ref.shape} of the globe and {band.shape} of a band")


def _check_shapes(ref: Ref, band: Ref, layout: Layout, heights: dict[int, int]) -> None:
    """The layout predicted must be the one that the shapes show."""
    expected = list(ref.shape)
    if layout is not None:
        expected[layout.dim] = layout.outer * heights[layout.height] * layout.inner
        if ref.shape[layout.dim] != layout.outer * layout.height * layout.inner:
            raise MixedError("changes the number of rows")
    if tuple(expected) != band.shape:
        raise MixedError(f"makes {ref.shape} of the globe and {band.shape} of a band")
