"""The audit of code between the layers: does any operation couple rows?

The planner traces the model twice, on the whole globe and on a band. The audit walks through both
traces together and keeps a `RowLayout` for every tensor: the dimension that holds its rows, if any.
For each operation, a rule (`LAYOUT_RULES`) derives the layout of the result from those of the
operands or raises `RowCouplingError`; an operation without a rule is refused. The result is then
checked against the shapes of both runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
        """A key that is equal if bands of two tensors hold the same entries of dimension `dim`."""
        return self.dim, self.outer, self.height * self.inner


def narrow_to_band(global_tensor: Tensor, rows: RowLayout, band: slice) -> Tensor:
    """Return a view of the rows `band` of a tensor with all rows of the globe."""
    first, length = band.start * rows.inner, (band.stop - band.start) * rows.inner
    return global_tensor.narrow(rows.dim, first, length)


class RowCouplingError(Exception):
    """The operation couples rows or is not known to be row-local."""


Layout = RowLayout | None
LayoutRule = Callable[[TraceStep, list[Layout]], Layout]


def _pointwise(step: TraceStep, layouts: list[Layout]) -> Layout:
    """Elementwise operations: after broadcasting, all operands must have aligned rows."""
    ndim = max(len(ref.shape) for ref in step.inputs)
    aligned = [
        layout._replace(dim=layout.dim + ndim - len(ref.shape))
        for ref, layout in zip(step.inputs, layouts, strict=True)
        if layout is not None
    ]
    if len({layout.alignment for layout in aligned}) > 1:
        raise RowCouplingError("combines tensors whose rows are not aligned")
    return aligned[0]


def _like_first_input(step: TraceStep, layouts: list[Layout]) -> Layout:
    return layouts[0]


def _dims_argument(step: TraceStep, key: str, ndim: int, default: int | None = None) -> set[int]:
    value = step.arguments.get(key, default)
    dims = [value] if isinstance(value, int) else value
    return {d % ndim for d in dims} if dims else set(range(ndim))


def _couples(dims_of: Callable[[TraceStep, int], Collection[int]]) -> LayoutRule:
    """Return a rule for operations that couple some dimensions of their first operand.

    `dims_of` returns these, given the operation and the number of dimensions.
    """

    def rule(step: TraceStep, layouts: list[Layout]) -> Layout:
        layout = layouts[0]
        if layout is None or layout.dim in dims_of(step, len(step.inputs[0].shape)):
            raise RowCouplingError("mixes rows")
        return layout

    return rule


def _acts_along(key: str, default: int | None = None) -> LayoutRule:
    """Return a rule for operations along the dimensions in argument `key`: not those of rows."""
    return _couples(lambda step, ndim: _dims_argument(step, key, ndim, default))


def _couples_last_dims(spatial: int) -> LayoutRule:
    """Return a rule for operations that couple the last `spatial` dimensions."""
    return _couples(lambda step, ndim: range(ndim - spatial, ndim))


def _reduce(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = _acts_along("dim")(step, layouts)
    ndim = len(step.inputs[0].shape)
    if layout is None or step.arguments.get("keepdim"):
        return layout
    before = [d for d in _dims_argument(step, "dim", ndim) if d < layout.dim]
    return layout._replace(dim=layout.dim - len(before))


def _slice(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = layouts[0]
    # `x[:, :, :n]` with n not below the number of rows cuts nothing off.
    unchanged = step.inputs[0].shape == step.outputs[0].shape and step.arguments.get("step", 1) == 1
    return layout if unchanged else _acts_along("dim", 0)(step, layouts)


def _select(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = _acts_along("dim", 0)(step, layouts)
    dim = step.arguments.get("dim", 0) % len(step.inputs[0].shape)
    return layout and layout._replace(dim=layout.dim - (dim < layout.dim))


def _cat(step: TraceStep, layouts: list[Layout]) -> Layout:
    (layout, *others) = layouts
    ndim = len(step.inputs[0].shape)
    dim = step.arguments.get("dim", 0) % (ndim + (step.name == "aten.stack"))
    if layout is None or any(not other or other.alignment != layout.alignment for other in others):
        raise RowCouplingError("combines tensors whose rows are not aligned")
    if step.name == "aten.stack":
        return layout._replace(dim=layout.dim + (dim <= layout.dim))
    if dim == layout.dim:
        raise RowCouplingError("changes the number of rows")
    return layout


def _view(step: TraceStep, layouts: list[Layout]) -> Layout:
    """Views keep the order of entries: find the new dimension that holds complete rows."""
    layout = layouts[0]
    old = step.inputs[0].shape
    new = step.outputs[0].shape
    if layout is None:
        return None
    # Entries before and after the rows in row-major order; the new dimensions must split likewise.
    before = prod(old[: layout.dim]) * layout.outer
    after = layout.inner * prod(old[layout.dim + 1 :])
    for dim, size in enumerate(new):
        before_dim, after_dim = prod(new[:dim]), prod(new[dim + 1 :])
        if before % before_dim == 0 and after % after_dim == 0:
            outer, inner = before // before_dim, after // after_dim
            if outer * layout.height * inner == size:
                return RowLayout(dim, outer, inner, layout.height)
    raise RowCouplingError("splits rows")


def _permute(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = layouts[0]
    ndim = len(step.inputs[0].shape)
    order = list(range(ndim))
    if step.name == "aten.permute":
        order = [d % ndim for d in step.arguments["dims"]]
    else:
        a, b = (step.arguments.get(key, i) % ndim for i, key in enumerate(("dim0", "dim1")))
        order[a], order[b] = order[b], order[a]
    return layout and layout._replace(dim=order.index(layout.dim))


def _expand(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = layouts[0]
    extra = len(step.outputs[0].shape) - len(step.inputs[0].shape)
    return layout and layout._replace(dim=layout.dim + extra)


def _repeat(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = _expand(step, layouts)
    if layout is None or step.arguments["repeats"][layout.dim] != 1:
        raise RowCouplingError("changes the number of rows")
    return layout


def _index(step: TraceStep, layouts: list[Layout]) -> Layout:
    """Indexing with a single vector of indices, along a dimension without rows."""
    layout = layouts[0]
    indices = step.arguments["indices"]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if layout is None or any(layouts[1:]) or len(dims) != 1 or dims[0] == layout.dim:
        raise RowCouplingError("mixes rows")
    if len(indices[dims[0]].shape) != 1:
        raise RowCouplingError("is not known to be row-local")
    return layout


def _pad(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = layouts[0]
    ndim = len(step.inputs[0].shape)
    pads = step.arguments.get("pad") or step.arguments["padding"]
    index = 2 * (ndim - 1 - layout.dim) if layout else 0
    if any(pads[index : index + 2]):
        raise RowCouplingError("changes the number of rows")
    return layout


def _resize(step: TraceStep, layouts: list[Layout]) -> Layout:
    """Interpolation to the same number of rows, by `size`, leaves rows as they are.

    With a scale factor torch may sample between rows even if their number stays.
    """
    layout = layouts[0]
    if layout is None or layout.dim < 2:
        return layout
    by_factor = any(step.arguments.get(f"scales{axis}") for axis in ("", "_d", "_h", "_w"))
    if by_factor or step.inputs[0].shape[layout.dim] != step.outputs[0].shape[layout.dim]:
        raise RowCouplingError("mixes rows")
    return layout


def _matmul(step: TraceStep, layouts: list[Layout]) -> Layout:
    """`mm`, `bmm` and their forms with an addend: no rows in the contracted dimension."""
    # Operands are `([addend,] a, b)`; `a` is contracted along its last dimension, `b` along its
    # last but one. If both have rows, these have to be in the batch of `bmm`.
    a, b = layouts[-2:]
    batched = len(step.inputs[-1].shape) - 2  # 1 for bmm
    if (a and a.dim == batched + 1) or (b and b.dim == batched):
        raise RowCouplingError("mixes rows")
    if a and b and (a != b or a.dim >= batched):
        raise RowCouplingError("mixes rows")
    return _join_addends(step, a or b, list(zip(layouts[:-2], step.inputs, strict=False)))


def _join_addends(
    step: TraceStep, layout: Layout, addends: Sequence[tuple[Layout, TensorRef]]
) -> Layout:
    """Return the layout of a sum: addends have rows aligned with the result, or none."""
    for addend, ref in addends:
        shifted = addend and addend._replace(
            dim=addend.dim + len(step.outputs[0].shape) - len(ref.shape)
        )
        if shifted and layout and shifted.alignment != layout.alignment:
            raise RowCouplingError("combines tensors whose rows are not aligned")
        layout = layout or shifted
    return layout


def _convolution(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = layouts[0]
    if layout is not None and layout.dim == 0:
        return layout  # rows are folded with samples
    # Along the rows only a pointwise kernel is row-local: size 1, stride 1, no padding.
    spatial = layout.dim - 2 if layout else -1
    if layout is None or spatial < 0:
        raise RowCouplingError("mixes rows")
    settings = (step.arguments[key][spatial] for key in ("stride", "padding", "output_padding"))
    if (step.inputs[1].shape[layout.dim], *settings) != (1, 1, 0, 0):
        raise RowCouplingError("mixes rows")
    return layout


def _avg_pool(step: TraceStep, layouts: list[Layout]) -> Layout:
    """Average pools with windows of one row, or with rows among samples or channels."""
    layout = layouts[0]
    kernel = step.arguments["kernel_size"]
    kernel_dim = layout.dim - len(step.inputs[0].shape) + len(kernel) if layout else 0
    sizes = [kernel, step.arguments.get("stride") or kernel, step.arguments.get("padding", [0])]
    if layout is None or (kernel_dim >= 0 and [s[kernel_dim % len(s)] for s in sizes] != [1, 1, 0]):
        raise RowCouplingError("mixes rows")
    return layout


def _pixel_shuffle(step: TraceStep, layouts: list[Layout]) -> Layout:
    layout = layouts[0]
    ndim = len(step.inputs[0].shape)
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


def _attention(step: TraceStep, layouts: list[Layout]) -> Layout:
    # Query, key and value: rows may only be among samples or heads, which do not interact.
    layout = layouts[0]
    if len(set(layouts[:3])) > 1 or layout is None or layout.dim > 1:
        raise RowCouplingError("attends across rows")
    return _join_addends(step, layout, list(zip(layouts[3:], step.inputs[3:], strict=True)))


def _gather(step: TraceStep, layouts: list[Layout]) -> Layout:
    """`gather` along a dimension without rows, with an index whose rows are aligned."""
    source, index = layouts
    if source is None or index is None or source.alignment != index.alignment:
        raise RowCouplingError("combines tensors whose rows are not aligned")
    return _acts_along("dim")(step, layouts)


def _embedding(step: TraceStep, layouts: list[Layout]) -> Layout:
    """A lookup in a table without rows; the indices may have rows."""
    table, indices = layouts
    if table is not None:
        raise RowCouplingError("mixes rows")
    return indices


def _fused_layer(inputs: int) -> LayoutRule:
    """Return a rule for fused transformer layers: only samples are independent of each other."""

    def rule(step: TraceStep, layouts: list[Layout]) -> Layout:
        layout = layouts[0]
        if layout is None or layout.dim != 0 or set(layouts[:inputs]) != {layout}:
            raise RowCouplingError("attends across rows")
        if any(layouts[inputs:]):
            raise RowCouplingError("combines tensors whose rows are not aligned")
        return layout

    return rule


FACTORIES = {
    f"aten.{name}"
    for name in (
        *("empty", "zeros", "ones", "full", "rand", "randn"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
    )
}
# Their size arguments may depend on the number of rows; the shapes of the results are compared.
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


def _rules_for(rule: LayoutRule, *names: str) -> dict[str, LayoutRule]:
    return {f"aten.{name}": rule for name in names}


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
    # Torch 2.11 does not tag these as pointwise.
    **_rules_for(_pointwise, "leaky_relu", "leaky_relu_", "elu_", "celu_", "hardtanh_"),
    **_rules_for(_pointwise, "hardsigmoid_"),
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
    **_rules_for(_couples(lambda *_: (1,)), "channel_shuffle", "native_channel_shuffle"),
    **_rules_for(_couples_last_dims(1), "view_as_complex", "max_pool1d"),
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
    **_rules_for(
        _couples(lambda step, ndim: range(ndim - len(step.arguments["normalized_shape"]), ndim)),
        *("native_layer_norm", "_fused_rms_norm"),
    ),
    **_rules_for(_convolution, "convolution"),
    **_rules_for(_avg_pool, "avg_pool2d", "avg_pool3d"),
    **{
        name: rule
        for n in (1, 2, 3)
        for name, rule in _rules_for(
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


def layout_of_new_tensor(step: TraceStep, layouts: list[Layout]) -> Layout:
    """Return the layout of a new tensor (`new_zeros`, ...): that of its template if it fits."""
    layout = layouts[0] if layouts else None
    if layout is None or len(step.inputs[0].shape) != len(step.outputs[0].shape):
        return None
    return layout if step.inputs[0].shape[layout.dim] == step.outputs[0].shape[layout.dim] else None


def layout_after(step: TraceStep, layouts: list[Layout]) -> Layout:
    """Return the layout of an operation's result, given those of its tensor operands.

    Raises:
        RowCouplingError: the operation couples rows or is not known to be row-local.
    """
    if step.op is not None and torch.Tag.pointwise in step.op.tags:
        return _pointwise(step, layouts)
    rule = LAYOUT_RULES.get(step.name)
    if rule is None:
        raise RowCouplingError("is not known to be row-local")
    return rule(step, layouts)


# Part of an operation's name -> the exact function in `functional` to recommend.
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

# The commands convert by `row_rules`; `custom_converters` is for callers in Python.
NAME_RULE = (
    "Name a rule for a module's type in row_rules of the model, or in Python pass "
    "custom_converters={TYPE: function(module) -> replacement}"
)

# How to call these: a size that is read from a tensor would be that of a band.
CALL_HINTS = {
    "interpolate": "(x, scale_factor=...), or with size=(rows, columns) of the whole globe as "
    "constants, or nn.Upsample"
}


def audit(global_trace: Trace, band_trace: Trace, heights: dict[int, int]) -> None:
    """Refuse code that couples rows.

    Args:
        global_trace: the trace of the run on the whole globe.
        band_trace: the trace of the run on one band.
        heights: global height -> rows of the band.

    Raises:
        AuditError: an operation couples rows or is unknown; names the line of code.
    """
    refusals = list(_refusals(global_trace, band_trace, heights))
    if refusals:
        raise AuditError(refusals)


class AuditError(UserError):
    """Code couples rows. The message names the first line of code, `refusals` has all of them."""

    def __init__(self, refusals: list[str]) -> None:
        super().__init__(refusals[0])
        self.refusals = refusals


def _refusals(global_trace: Trace, band_trace: Trace, heights: dict[int, int]) -> Iterator[str]:
    """Yield a message for each refused operation.

    Stops when the layout after a refused operation can't be derived from the shapes of both runs.
    """
    layouts: dict[int, Layout] = {}  # by number of the tensor, which is the same in both runs
    location = ""
    for global_step, band_step in zip(global_trace.steps, band_trace.steps, strict=False):
        location = global_step.location or location
        if global_step.op is not band_step.op:
            yield refusal_message(location, CONTROL_FLOW_DIFFERS)
            return
        try:
            _check_step(global_step, band_step, heights, layouts)
        except RowCouplingError as error:
            yield refusal_message(global_step.location, str(error), _operation_label(global_step))
            if len(global_step.outputs) != len(band_step.outputs):
                return
            try:
                for ref, band_ref in zip(global_step.outputs, band_step.outputs, strict=True):
                    layouts[ref.number] = _layout_from_shapes(ref, band_ref, heights)
            except RowCouplingError:
                return
    if len(global_trace.steps) != len(band_trace.steps):
        yield refusal_message(location, CONTROL_FLOW_DIFFERS)


def refusal_message(location: str, reason: str, operation: str = "") -> str:
    """Return the error message: the line of code, the operation, the reason and the fix."""
    alternative = next(
        (name for part, name in FUNCTIONAL_ALTERNATIVES.items() if part in operation), None
    )
    hint = CALL_HINTS.get(alternative or "", "")
    call = f"credit_dp.domain_parallel.functional.{alternative}{hint}"
    fix = f"Use {call}, or put" if alternative else "Put"
    colon = ": " if operation else ""
    return f"{location}: {operation}{colon}{reason}. {fix} this into its own module. {NAME_RULE}."


def _operation_label(step: TraceStep) -> str:
    label = step.arguments.get("label", "output")
    return step.name or (label if isinstance(label, str) else "a module from custom_converters")


def _check_step(
    global_step: TraceStep,
    band_step: TraceStep,
    heights: dict[int, int],
    layouts: dict[int, Layout],
) -> None:
    input_layouts = [layouts.get(ref.number) for ref in global_step.inputs]
    operands, band_operands = (
        [(ref.number, ref.value) for ref in step.inputs] for step in (global_step, band_step)
    )
    if operands != band_operands:
        raise RowCouplingError("its operands depend on the number of rows")
    if len(global_step.outputs) != len(band_step.outputs):
        raise RowCouplingError("its number of results depends on the number of rows")
    if global_step.op is None:
        _check_layer(global_step, band_step, heights, layouts, input_layouts)
        return
    if _comparable_settings(global_step) != _comparable_settings(band_step):
        raise RowCouplingError("an argument depends on the number of rows")
    # New tensors, and constants that are expanded to a field's size, have rows without an operand
    # that has them: only the shapes show it.
    if global_step.name in FACTORIES or (global_step.name in RESHAPES and not any(input_layouts)):
        from_shapes = [
            _layout_from_shapes(ref, band_ref, heights)
            for ref, band_ref in zip(global_step.outputs, band_step.outputs, strict=True)
        ]
        output_layouts = [
            layout and (layout_of_new_tensor(global_step, input_layouts) or layout)
            for layout in from_shapes
        ]
    else:
        layout = layout_after(global_step, input_layouts) if any(input_layouts) else None
        # Beside its result an operation may return tensors without rows, such as random states.
        output_layouts = [
            None if 0 in ref.shape or (index > 0 and ref.shape == band_ref.shape) else layout
            for index, (ref, band_ref) in enumerate(
                zip(global_step.outputs, band_step.outputs, strict=True)
            )
        ]
    # Noise on rows is independent anyway; noise without rows must be equal on all ranks.
    if global_step.name in RANDOM_OPERATIONS and not any(output_layouts):
        raise RowCouplingError("draws random numbers that differ between the ranks of a globe")
    for ref, band_ref, layout in zip(
        global_step.outputs, band_step.outputs, output_layouts, strict=True
    ):
        _check_shapes(ref, band_ref, layout, heights)
        layouts[ref.number] = layout


def _check_layer(
    global_step: TraceStep,
    band_step: TraceStep,
    heights: dict[int, int],
    layouts: dict[int, Layout],
    input_layouts: list[Layout],
) -> None:
    """Check a boundary: rows are where the plan has them, or in the last dimension but one."""
    # A layer of a band adds what its edges lack in place: versions of its results differ.
    global_settings = {**global_step.settings, "version": None}
    if global_settings != {**band_step.settings, "version": None}:
        raise RowCouplingError(CONTROL_FLOW_DIFFERS)
    planned_inputs = global_step.arguments.get("input_layouts")
    for index, (ref, layout) in enumerate(zip(global_step.inputs, input_layouts, strict=True)):
        if planned_inputs is not None and (layout and layout.alignment) != (
            planned_inputs[index] and planned_inputs[index].alignment
        ):
            raise RowCouplingError("gets rows in another dimension than the plan expects")
        if planned_inputs is None and layout and layout.alignment[:2] != (len(ref.shape) - 2, 1):
            raise RowCouplingError("rows are no longer in the last dimension but one")
    outputs = global_step.outputs
    planned_outputs = global_step.arguments.get("output_layouts") or [None] * len(outputs)
    for ref, band_ref, layout in zip(outputs, band_step.outputs, planned_outputs, strict=True):
        if planned_inputs is None:  # the input of the model or a trusted module
            layout = _layout_from_shapes(ref, band_ref, heights)
        _check_shapes(ref, band_ref, layout, heights)
        layouts[ref.number] = layout


def _comparable_settings(step: TraceStep) -> dict[str, object]:
    """Return the arguments that must be equal in both runs: not tensors, not sizes of results."""
    settings = step.settings
    if step.name == "aten.slice":
        is_identity = step.inputs[0].shape == step.outputs[0].shape and settings.get("step", 1) == 1
        return {} if is_identity else settings
    sized = step.name in RESHAPES | FACTORIES | RESIZES
    return {key: value for key, value in settings.items() if not (sized and key in SIZE_ARGUMENTS)}


def _layout_from_shapes(ref: TensorRef, band_ref: TensorRef, heights: dict[int, int]) -> Layout:
    """Return the layout with rows in the one dimension in which the runs' shapes differ."""
    if len(ref.shape) != len(band_ref.shape):
        raise RowCouplingError(f"has shape {ref.shape} on the globe and {band_ref.shape} on a band")
    differing = [
        d for d, (a, b) in enumerate(zip(ref.shape, band_ref.shape, strict=True)) if a != b
    ]
    if not differing:
        return None
    dim = differing[0]
    size, local = ref.shape[dim], band_ref.shape[dim]
    # Heights may shrink by the same ratio; the largest one has the fewest entries in a row.
    for height in sorted(heights, reverse=True):
        if len(differing) == 1 and size * heights[height] == local * height and size % height == 0:
            return RowLayout(dim, 1, size // height, height)
    raise RowCouplingError(f"has shape {ref.shape} on the globe and {band_ref.shape} on a band")


def _check_shapes(
    ref: TensorRef, band_ref: TensorRef, layout: Layout, heights: dict[int, int]
) -> None:
    """Check the predicted layout against the shapes of both runs."""
    expected = list(ref.shape)
    if layout is not None:
        expected[layout.dim] = layout.outer * heights[layout.height] * layout.inner
        if ref.shape[layout.dim] != layout.outer * layout.height * layout.inner:
            raise RowCouplingError("changes the number of rows")
    if tuple(expected) != band_ref.shape:
        raise RowCouplingError(f"has shape {ref.shape} on the globe and {band_ref.shape} on a band")
