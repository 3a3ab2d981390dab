"""The planner: answers the calls of sharded layers while a model is run on fake tensors.

In the run on the whole globe it lets the wrapped layers compute and records the heights and row
dimensions of each call (`_call_on_globe`). In the run on a band it expects the same calls in the
same order, checks the number of rows that each layer gets, and returns tensors of the shapes that
the band's output has (`_band_outputs`). The audit compares the traces of both runs afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from math import lcm
from operator import mul
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM, BandTable
from credit_dp.domain_parallel.planned_run import planner_of_run
from credit_dp.domain_parallel.planning.audit import (
    FACTORIES,
    NAME_RULE,
    Layout,
    RowCouplingError,
    RowLayout,
    layout_after,
    layout_of_new_tensor,
    narrow_to_band,
    refusal_message,
)
from credit_dp.domain_parallel.planning.shape_memo import ShapeMemo
from credit_dp.domain_parallel.planning.trace import (
    ModelSnapshot,
    TensorRef,
    Trace,
    TraceStep,
    current_autograd_function,
    is_in_checkpoint,
    map_tensors,
    tensor_leaves,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import version_of

# Operations, besides pointwise ones, whose operands must have aligned rows.
JOINS = {"aten.cat", "aten.stack", "aten.copy_"}


class RowCandidate(NamedTuple):
    """A dimension that may hold `height` rows with `inner` entries each."""

    height: int
    inner: int


@final
class RowProvenance:
    """Finds parameters and buffers that may have a row for each row of the globe.

    `candidates`: for the `id` of a parameter or buffer, the rows that it may have, because it or a
    tensor computed from it is combined with a field of as many rows. The likeliest come first.
    """

    def __init__(self) -> None:
        self.candidates: dict[int, list[RowCandidate]] = {}
        self._sources_by_number: dict[int, frozenset[int]] = {}

    def record(self, step: TraceStep, layouts: list[Layout]) -> None:
        """Record a step; `layouts` are those of its operands, None where unknown."""
        unknown = [ref for ref, layout in zip(step.inputs, layouts, strict=True) if layout is None]
        sources = frozenset[int]().union(*map(self._sources, unknown))
        if step.op is None or not sources:
            return
        if not any(layouts):
            self._sources_by_number.update({ref.number: sources for ref in step.outputs})
        elif torch.Tag.pointwise in step.op.tags or step.name in JOINS:
            for ref, layout in zip(step.inputs, layouts, strict=True):
                if layout is not None and layout.outer == 1:
                    self._add_candidates(unknown, ref.shape, layout)

    def _add_candidates(
        self, unknown: list[TensorRef], shape: tuple[int, ...], rows: RowLayout
    ) -> None:
        """Record the tensors that are as long as a field of this shape in its row dimension."""
        dim = rows.dim - len(shape)
        # A parameter may be stored flat, with rows and columns in one dimension, and be viewed as a
        # field before it is used.
        inner = [*accumulate(shape[rows.dim + 1 :], mul, initial=rows.inner), 1]
        for ref in unknown:
            if len(ref.shape) >= -dim and ref.shape[dim] == shape[dim]:
                for source in self._sources(ref):
                    candidates = self.candidates.setdefault(source, [])
                    candidates += [RowCandidate(rows.height, i) for i in inner]

    def _sources(self, ref: TensorRef) -> frozenset[int]:
        if ref.number < 0:  # a parameter or buffer
            return frozenset([-ref.number])
        return self._sources_by_number.get(ref.number, frozenset())


class LayerCall(NamedTuple):
    """A call of a layer in the run on the whole globe.

    `dim` is the negative row dimension if the layer couples rows. It is None if the layer computes
    the same with and without bands. `in_height` is the global size of its first input in `dim`:
    rows, or rows times columns if they share the dimension. `shapes` are those of its inputs, and
    `outputs` is what it returned.
    """

    name: str
    dim: int | None
    in_height: int
    shapes: tuple[tuple[int, ...], ...]
    outputs: Any
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    layer: RowLayer


class LayerRows(NamedTuple):
    """The row dimension of a layer's call and the global heights of its input and output."""

    dim: int
    in_height: int
    out_height: int


@final
class Planner:
    """Replaces the forward of sharded layers in runs on fake tensors.

    Trusted modules and layers that couple rows leave no operations in the trace, only a boundary.
    """

    def __init__(self, model: nn.Module, names: dict[RowLayer, str], bands: BandTable) -> None:
        self.model = model
        self.names = names
        self.bands = bands
        self.layer_rows: dict[RowLayer, set[LayerRows]] = defaultdict(set)
        self.rowwise_layers: set[RowLayer] = set()
        self.is_recomputed = False  # whether `torch.utils.checkpoint` calls any layer
        self.tied_heights: dict[int, int] = {}
        self.layer_calls: list[LayerCall] = []
        self.provenance = RowProvenance()
        self.first_coupling: tuple[TraceStep, RowCouplingError] | None = None
        self._rank: int | None = None
        self._call_index = 0
        self._memo = ShapeMemo()
        self._trace = Trace(model)
        self._layouts: dict[int, Layout] = {}
        self._field_heights: set[int] = set()
        self._snapshot: ModelSnapshot | None = None

    @contextmanager
    def preserve_model(self) -> Iterator[None]:
        """Restore the model after the context; nothing else may change it between runs."""
        self._snapshot = self._snapshot or ModelSnapshot(self.model)
        try:
            yield
        finally:
            self._snapshot.restore()

    @contextmanager
    def trace_run(self, rank: int | None) -> Iterator[Trace]:
        """Make this planner active for a run on the whole globe (`rank` is None) or on a band."""
        self._rank = rank
        self._call_index = 0
        if rank is None:
            self.layer_calls = []
            self.first_coupling = None  # the first operation that couples rows
            self._layouts = {}
        # Layouts are needed in the run on the globe only: they tell which layers couple rows.
        self._trace = Trace(self.model, self._record_layouts if rank is None else None, self._memo)
        token = planner_of_run.set(self)
        try:
            with self._trace:
                yield self._trace
            self._trace.check_changes_are_counted()
        finally:
            planner_of_run.reset(token)

    def _record_layouts(self, step: TraceStep) -> None:
        """Record the layouts of a step's results; the audit checks them afterwards."""
        input_layouts = [self._layouts.get(ref.number) for ref in step.inputs]
        function = (
            current_autograd_function() if step.op is not None and any(input_layouts) else None
        )
        # Its backward is code that no trace sees; wrapped in a module, the user vouches for it.
        if function is not None:
            reason = "the backward of an autograd.Function can't be audited"
            raise UserError(refusal_message(step.location, reason, function.__name__))
        self.provenance.record(step, input_layouts)
        if step.op is None:
            output_layouts = step.arguments.get("output_layouts") or [
                self._guess_layout(ref) for ref in step.outputs
            ]
        elif step.name in FACTORIES:
            output_layouts = [
                layout_of_new_tensor(step, input_layouts) or self._guess_layout(ref)
                for ref in step.outputs
            ]
        elif any(input_layouts):
            try:
                output_layouts = [layout_after(step, input_layouts)] * len(step.outputs)
            except RowCouplingError as error:
                self.first_coupling = self.first_coupling or (step, error)
                output_layouts = [self._guess_layout(ref) for ref in step.outputs]
        else:
            output_layouts = [None] * len(step.outputs)
        for ref, layout in zip(step.outputs, output_layouts, strict=True):
            self._layouts[ref.number] = layout

    def _guess_layout(self, ref: TensorRef) -> Layout:
        # For tensors that no rule covers. The audit derives all layouts again, from the shapes of
        # both runs, and refuses a layer for which this guess was wrong.
        is_field = len(ref.shape) >= FIELD_DIMS and ref.shape[ROW_DIM] in self._field_heights
        return RowLayout(len(ref.shape) + ROW_DIM, 1, 1, ref.shape[ROW_DIM]) if is_field else None

    def add_field_heights(self, heights: Iterable[int]) -> None:
        """Treat tensors of these heights as fields where nothing else is known of them."""
        self._field_heights.update(heights)

    def call_layer(self, layer: RowLayer, x: Tensor, *others: Tensor) -> Any:
        """Return the output of a sharded layer in the current run: replaces its forward."""
        name = self.names.setdefault(layer, type(layer).__name__)
        self.is_recomputed = self.is_recomputed or is_in_checkpoint()
        if self._rank is None:
            call = self._call_on_globe(layer, name, x, *others)
            self.layer_calls.append(call)
            outputs = call.outputs
        else:
            call = self._next_planned_call(name)
            if call.dim is None:
                outputs = layer.global_forward(x, *others)
            else:
                outputs = self._band_outputs(call, call.dim, x, self._rank)
        if call.dim is not None:
            leaves = tensor_leaves(outputs)
            settings = {
                "input_layouts": call.input_layouts,
                "output_layouts": call.output_layouts,
                "label": name,
                # Layers share an exchange only if nothing is written to its rows in between.
                "version": None if x.is_inference() else version_of(x),
            }
            self._trace.record_boundary((x, *others), leaves, **settings)
        return outputs

    def _call_on_globe(self, layer: RowLayer, name: str, x: Tensor, *others: Tensor) -> LayerCall:
        input_layouts = tuple(self._layouts.get(self._trace.ref(t).number) for t in (x, *others))
        shapes = tuple(tuple(t.shape) for t in (x, *others))
        rows = input_layouts[0]
        try:
            couples = rows is not None and layer.couples_rows(rows.dim - x.ndim, x.ndim)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        if rows is None or not couples:
            self.rowwise_layers.add(layer)
            return LayerCall(
                name, None, 0, shapes, layer.global_forward(x, *others), input_layouts, (), layer
            )
        with self._trace.paused():
            # A layer that returns its input gets a new number in the trace, as on a band.
            outputs = map_tensors(
                lambda t: t.view_as(t) if any(t is y for y in (x, *others)) else t,
                layer.global_forward(x, *others),
            )
        dim = rows.dim - x.ndim
        in_height = x.shape[rows.dim]
        if rows.outer > 1:
            raise UserError(
                f"{name}: dimension {rows.dim} holds the rows of several samples or channels. Keep "
                "rows in a separate dimension before this layer."
            )
        # Tokens `H * W` in one dimension: a band must hold the tokens of complete rows.
        if rows.inner > 1:
            self.tied_heights[in_height] = rows.height
        leaves = tensor_leaves(outputs)
        output_layouts = tuple(self._output_layout(layer, rows, dim, leaf) for leaf in leaves)
        self.layer_rows[layer].add(
            LayerRows(dim, in_height, leaves[0].shape[dim] if output_layouts[0] else in_height)
        )
        self._field_heights.update(layout.height for layout in output_layouts if layout)
        return LayerCall(
            name, dim, in_height, shapes, outputs, input_layouts, output_layouts, layer
        )

    def _output_layout(self, layer: RowLayer, rows: RowLayout, dim: int, output: Tensor) -> Layout:
        """Return where the rows of an output are.

        A banded output has its rows in the input's row dimension, counted from the end.
        """
        if not layer.output_is_banded:
            return None
        row_dim = output.ndim + dim
        if output.shape[dim] == rows.height * rows.inner:
            return rows._replace(dim=row_dim)
        return RowLayout(row_dim, 1, 1, output.shape[dim])

    def _next_planned_call(self, name: str) -> LayerCall:
        if (
            self._call_index >= len(self.layer_calls)
            or self.layer_calls[self._call_index].name != name
        ):
            is_function = "(" in name  # of `functional`, which takes sizes
            reason = "control flow"
            if is_function:
                reason += " or, where the whole globe's is needed, a size"
            fix = " Use a scale_factor, the whole globe's size as constants, or nn.Upsample."
            raise UserError(
                f"{self._trace.location}: {reason} depends on the number of rows; {name} is called "
                "on a band, but not on the globe."
                f"{fix if name.startswith('functional.interpolate') else ''}"
            )
        self._call_index += 1
        return self.layer_calls[self._call_index - 1]

    def _band_outputs(self, call: LayerCall, dim: int, x: Tensor, rank: int) -> Any:
        """Return tensors with the shapes of a rank's band of the layer's output."""
        expected = self.bands[call.in_height].sizes[rank]
        if x.shape[dim] != expected:
            raise UserError(
                f"{call.name}: rank {rank} of {self.bands.ranks} has {x.shape[dim]} "
                f"rows, but its band of {call.in_height} rows has {expected}. The code before this "
                f"layer changes rows; put it into a module. {NAME_RULE}."
            )
        layouts = iter(call.output_layouts)

        def band(output: Tensor) -> Tensor:
            shape = list(output.shape)
            if next(layouts) is not None:
                shape[dim] = self.bands[shape[dim]].sizes[rank]
            return x.new_empty(shape, dtype=output.dtype)

        with self._trace.paused():
            return map_tensors(band, call.outputs)

    def band_of_parameter(self, parameter: Tensor, rows: RowLayout, path: str) -> Tensor:
        """Return this run's band of a parameter or buffer with a row for each row of the globe."""
        height = rows.height
        band = slice(0, height) if self._rank is None else self.bands[height].rows(self._rank)
        with self._trace.paused():
            local = narrow_to_band(parameter, rows, band)
        # An in-place change would reach one rank's rows only: the trace refuses it.
        self._trace.read_only_storages[id(local.untyped_storage())] = path
        self._trace.record_boundary(
            (), [local], input_layouts=(), output_layouts=(rows,), label=path
        )
        return local

    @property
    def is_global_run(self) -> bool:
        """Whether this is the run on the whole globe."""
        return self._rank is None

    @property
    def running_modules(self) -> list[str]:
        """The module whose code runs now or has failed, as a list of one entry or none."""
        return self._trace.running_modules[-1:]

    @contextmanager
    def record_module_names(self) -> Iterator[None]:
        """Let traces record which module's code runs."""
        with ExitStack() as hooks:
            for path, module in self.model.named_modules():
                kind = type(module.__dict__.get("wrapped", module)).__name__
                name = f"{path or 'model'} ({kind})"
                begin = module.register_forward_pre_hook(
                    lambda *_, name=name: self._trace.running_modules.append(name)
                )
                # Not called after an error, so that the failed module stays the innermost one.
                end = module.register_forward_hook(
                    lambda *_: self._trace.running_modules.pop() and None
                )
                hooks.enter_context(begin)
                hooks.enter_context(end)
            yield

    @contextmanager
    def exclude_from_trace(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Keep the operations inside these modules out of the traces."""
        with ExitStack() as hooks:
            for module in modules:
                begin = module.register_forward_pre_hook(lambda *_: self._trace.pause())
                hooks.enter_context(begin)
                hooks.enter_context(module.register_forward_hook(self._end_excluded_call))
            yield

    def _end_excluded_call(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._trace.resume()
        self._trace.record_boundary(tensor_leaves(args), tensor_leaves(outputs), label=id(module))

    def heights(self) -> set[int]:
        """Return the global heights of all inputs and outputs of layers."""
        return {h for calls in self.layer_rows.values() for call in calls for h in call[1:]}

    def row_multiples(self) -> dict[int, int]:
        """Return, for each height, the number of rows of which a band should be a multiple."""
        multiples = dict.fromkeys(self.heights(), 1)
        for layer, calls in self.layer_rows.items():
            for call in calls:
                multiples[call.in_height] = lcm(
                    multiples[call.in_height], layer.row_multiple(call.in_height)
                )
        return multiples

    def layer_plan(self, layer: RowLayer) -> tuple[int, dict[int, int]]:
        """Return the row dimension of a layer and its global heights: input -> output.

        Raises:
            UserError: a rank has the same number of rows in two calls with different heights.
        """
        calls = self.layer_rows[layer]
        name = self.names.get(layer, type(layer).__name__)
        dims = {call.dim for call in calls}
        if len(dims) > 1 or layer in self.rowwise_layers:
            raise UserError(
                f"{name}: is called on tensors with rows in different dimensions, or with and "
                "without rows. Use a separate layer for each."
            )
        heights = {call.in_height: call.out_height for call in calls}
        if len(heights) < len(calls):
            raise UserError(f"{name}: returns two different heights for the same input height.")
        # At run time a layer tells heights apart by its number of rows alone.
        for rank in range(self.bands.ranks):
            sizes = [self.bands[height].sizes[rank] for height in heights]
            if len(set(sizes)) < len(sizes):
                raise UserError(
                    f"{name}: is called at the heights {sorted(heights)}, and rank {rank} has the "
                    "same number of rows at two of them. Use a separate layer for each height, or "
                    "change parallel.domain."
                )
        return dims.pop(), heights
