"""Follows a converted model on fake tensors: heights of its layers, bands that line up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from math import lcm
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM, BandTable
from credit_dp.domain_parallel.planning.audit import (
    FACTORIES,
    Layout,
    RowCouplingError,
    RowLayout,
    layout_after,
    layout_of_new_tensor,
    narrow_to_band,
    refusal_message,
)
from credit_dp.domain_parallel.planning.trace import (
    ModelSnapshot,
    ShapeMemo,
    TensorRef,
    Trace,
    TraceStep,
    current_autograd_function,
)
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.layers.base import RowLayer


# Operations, beside pointwise ones, whose operands must all have the same rows.
JOINS = {"aten.cat", "aten.stack", "aten.copy_"}


class RowCandidate(NamedTuple):
    """`height` rows with `inner` entries each, in one dimension."""

    height: int
    inner: int


@final
class RowProvenance:
    """Follows the tensors of the model through the run of the whole globe.

    `candidates`: for a tensor of the model, by identity, what it may have in one dimension
    because it, or what is made of it, meets a field with as many rows; the likeliest first.
    """

    def __init__(self) -> None:
        self.candidates: dict[int, list[RowCandidate]] = {}
        self._sources_by_number: dict[int, frozenset[int]] = {}

    def record(self, step: TraceStep, given: list[Layout]) -> None:
        """Note a step; `given` are the layouts of its tensors, as far as they are known."""
        unknown = [ref for ref, layout in zip(step.inputs, given, strict=True) if layout is None]
        sources = frozenset[int]().union(*map(self._sources, unknown))
        if step.op is None or not sources:
            return
        if not any(given):
            self._sources_by_number.update({ref.number: sources for ref in step.outputs})
        elif torch.Tag.pointwise in step.op.tags or step.name in JOINS:
            for ref, rows in zip(step.inputs, given, strict=True):
                if rows is not None and rows.outer == 1:
                    self._add_candidates(unknown, ref.shape, rows)

    def _add_candidates(
        self, unknown: list[TensorRef], shape: tuple[int, ...], rows: RowLayout
    ) -> None:
        """Note which tensors are as long as a field of this shape where it has its rows."""
        dim = rows.dim - len(shape)
        # Columns may follow the rows in one dimension of a tensor that is unfolded before.
        inner = [*accumulate(shape[rows.dim + 1 :], mul, initial=rows.inner), 1]
        for ref in unknown:
            if len(ref.shape) >= -dim and ref.shape[dim] == shape[dim]:
                for source in self._sources(ref):
                    known = self.candidates.setdefault(source, [])
                    known += [RowCandidate(rows.height, i) for i in inner]

    def _sources(self, ref: TensorRef) -> frozenset[int]:
        if ref.number < 0:  # the model's own
            return frozenset([-ref.number])
        return self._sources_by_number.get(ref.number, frozenset())


_active: ContextVar[Planner | None] = ContextVar("active planner", default=None)


def active_planner() -> Planner | None:
    """Return the planner that follows the model right now, if one does."""
    return _active.get()


class LayerCall(NamedTuple):
    """One call of a layer in the run of the whole globe.

    `dim` is the negative dimension where rows meet; None if the layer acts on rows apart there,
    and so as it would without bands. `in_height` are the rows of its first input, `shapes` of its
    inputs, and `outputs` what it returned.
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
    """Where a layer found rows, how many of the globe went in and how many came out."""

    dim: int
    in_height: int
    out_height: int


@final
class Planner:
    """Follows two kinds of runs on fake tensors.

    The run of the whole globe calls the wrapped layers and notes where their rows are. The run of a
    band checks that each layer gets the rows that its height gives that rank, and only makes
    shapes. Trusted modules, and layers where rows meet, leave no operations in the trace.
    """

    def __init__(self, model: nn.Module, names: dict[RowLayer, str], bands: BandTable) -> None:
        self.model = model
        self.names = names
        self.bands = bands
        self.layer_rows: dict[RowLayer, set[LayerRows]] = defaultdict(set)
        self.rowwise_layers: set[RowLayer] = set()
        self.tied_heights: dict[int, int] = {}
        self.layer_calls: list[LayerCall] = []
        self.batch_sizes = (1, 1)  # the size that stands for any batch, and the one planned for
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
        """Undo what a run leaves in the model; between runs nothing else may change it."""
        self._snapshot = self._snapshot or ModelSnapshot(self.model)
        try:
            yield
        finally:
            self._snapshot.restore()

    @contextmanager
    def trace_run(self, rank: int | None) -> Iterator[Trace]:
        """Make this planner the active one, for a run of the whole globe or of a rank's band."""
        self._rank = rank
        self._call_index = 0
        if rank is None:
            self.layer_calls = []
            self.first_coupling = None  # the first operation of the globe's run that mixes rows
            self._layouts = {}
        self._trace = Trace(self.model, self._record_layouts if rank is None else None, self._memo)
        token = _active.set(self)
        try:
            with self._trace:
                yield self._trace
        finally:
            _active.reset(token)

    def _record_layouts(self, step: TraceStep) -> None:
        """Note where the rows of what a step made are: the audit checks it afterwards."""
        given = [self._layouts.get(ref.number) for ref in step.inputs]
        function = current_autograd_function() if step.op is not None and any(given) else None
        if function is not None:
            reason = "nobody audits the backward of an autograd.Function"
            raise UserError(refusal_message(step.location, reason, function.__name__))
        self.provenance.record(step, given)
        if step.op is None:
            makes = step.arguments.get("output_layouts") or [
                self._guess_layout(ref) for ref in step.outputs
            ]
        elif step.name in FACTORIES:
            makes = [
                layout_of_new_tensor(step, given) or self._guess_layout(ref) for ref in step.outputs
            ]
        elif any(given):
            try:
                makes = [layout_after(step, given)] * len(step.outputs)
            except RowCouplingError as error:
                self.first_coupling = self.first_coupling or (step, error)
                makes = [self._guess_layout(ref) for ref in step.outputs]
        else:
            makes = [None] * len(step.outputs)
        for ref, layout in zip(step.outputs, makes, strict=True):
            self._layouts[ref.number] = layout

    def _guess_layout(self, ref: TensorRef) -> Layout:
        is_field = len(ref.shape) >= FIELD_DIMS and ref.shape[ROW_DIM] in self._field_heights
        return RowLayout(len(ref.shape) + ROW_DIM, 1, 1, ref.shape[ROW_DIM]) if is_field else None

    def add_field_heights(self, heights: Iterable[int]) -> None:
        """Take tensors of these heights, of which nothing else is known, for fields."""
        self._field_heights.update(heights)

    def call_layer(self, layer: RowLayer, x: Tensor, *others: Tensor) -> Any:
        """Stand in for a layer's forward."""
        name = self.names.setdefault(layer, type(layer).__name__)
        if self._rank is None:
            visit = self._call_on_globe(layer, name, x, *others)
            self.layer_calls.append(visit)
            made = visit.outputs
        else:
            visit = self._next_planned_call(name)
            if visit.dim is None:
                made = layer.global_forward(x, *others)
            else:
                made = self._band_outputs(visit, visit.dim, x, self._rank)
        if visit.dim is not None:
            leaves = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            settings = {
                "input_layouts": visit.input_layouts,
                "output_layouts": visit.output_layouts,
                "label": name,
            }
            self._trace.record_boundary((x, *others), leaves, **settings)
        return made

    def _call_on_globe(self, layer: RowLayer, name: str, x: Tensor, *others: Tensor) -> LayerCall:
        takes = tuple(self._layouts.get(self._trace.ref(t).number) for t in (x, *others))
        shapes = tuple(tuple(t.shape) for t in (x, *others))
        rows = takes[0]
        try:
            meet = rows is not None and layer.couples_rows(rows.dim - x.ndim, x.ndim)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        if rows is None or not meet:
            self.rowwise_layers.add(layer)
            return LayerCall(
                name, None, 0, shapes, layer.global_forward(x, *others), takes, (), layer
            )
        with self._trace.paused():  # what is returned as it came counts as new, as of a band
            made = tree_map_only(Tensor, lambda t: t.view_as(t), layer.global_forward(x, *others))
        dim, taken = rows.dim - x.ndim, x.shape[rows.dim]
        if rows.outer > 1:
            raise UserError(
                f"{name}: the rows of several samples or channels follow each other in dimension "
                f"{rows.dim}. Keep rows in a dimension of their own before this layer."
            )
        if rows.inner > 1:
            self.tied_heights[taken] = rows.height
        leaves = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        makes = tuple(self._output_layout(layer, rows, dim, leaf) for leaf in leaves)
        self.layer_rows[layer].add(
            LayerRows(dim, taken, leaves[0].shape[dim] if makes[0] else taken)
        )
        self._field_heights.update(layout.height for layout in makes if layout)
        return LayerCall(name, dim, taken, shapes, made, takes, makes, layer)

    def _output_layout(self, layer: RowLayer, rows: RowLayout, dim: int, made: Tensor) -> Layout:
        if not layer.output_is_banded:
            return None
        place = made.ndim + dim
        if made.shape[dim] == rows.height * rows.inner:
            return rows._replace(dim=place)
        return RowLayout(place, 1, 1, made.shape[dim])

    def _next_planned_call(self, name: str) -> LayerCall:
        if (
            self._call_index >= len(self.layer_calls)
            or self.layer_calls[self._call_index].name != name
        ):
            what = "control flow or, where the whole globe's is needed, a size"
            fix = " Use a scale_factor, the whole globe's size as constants, or nn.Upsample."
            raise UserError(
                f"{self._trace.location}: {what if '(' in name else 'control flow'} depends on the "
                f"number of rows; {name} is called for a band and not for the globe."
                f"{fix if name.startswith('functional.interpolate') else ''}"
            )
        self._call_index += 1
        return self.layer_calls[self._call_index - 1]

    def _band_outputs(self, visit: LayerCall, dim: int, x: Tensor, rank: int) -> Any:
        """Make tensors of the shapes that a rank's band of the layer's output has."""
        expected = self.bands[visit.in_height].sizes[rank]
        if x.shape[dim] != expected:
            raise UserError(
                f"{visit.name}: rank {rank} of {self.bands.ranks} has {x.shape[dim]} "
                f"rows where its band of {visit.in_height} rows has {expected}. The code "
                "before this "
                "layer changes rows; put that into a module and name it in custom_converters."
            )
        layouts = iter(visit.output_layouts)

        def band(made: Tensor) -> Tensor:
            shape = list(made.shape)
            if next(layouts) is not None:
                shape[dim] = self.bands[shape[dim]].sizes[rank]
            return x.new_empty(shape, dtype=made.dtype)

        with self._trace.paused():
            return tree_map_only(Tensor, band, visit.outputs)

    def band_of_parameter(self, whole: Tensor, rows: RowLayout, path: str) -> Tensor:
        """Return a band of a parameter or buffer that has a row for each of the globe's."""
        height = rows.height
        band = slice(0, height) if self._rank is None else self.bands[height].rows(self._rank)
        with self._trace.paused():
            mine = narrow_to_band(whole, rows, band)
        self._trace.read_only_storages[mine.untyped_storage()._cdata] = path
        self._trace.record_boundary(
            (), [mine], input_layouts=(), output_layouts=(rows,), label=path
        )
        return mine

    @property
    def is_global_run(self) -> bool:
        """Whether this is the run of the whole globe."""
        return self._rank is None

    @property
    def running_modules(self) -> list[str]:
        """The module whose code runs now, or failed."""
        return self._trace.running_modules[-1:]

    @contextmanager
    def record_module_names(self) -> Iterator[None]:
        """Tell the traces which module's code runs."""
        hooks = []
        for path, module in self.model.named_modules():
            name = f"{path or 'model'} ({type(module.__dict__.get('wrapped', module)).__name__})"
            hooks += [
                module.register_forward_pre_hook(
                    lambda *_, name=name: self._trace.running_modules.append(name)
                ),
                # Not after an error: then the innermost one tells where that was.
                module.register_forward_hook(lambda *_: self._trace.running_modules.pop() and None),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def exclude_from_trace(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Keep what these modules do inside out of the traces."""
        hooks = [
            hook
            for module in modules
            for hook in (
                module.register_forward_pre_hook(lambda *_: self._trace.pause()),
                module.register_forward_hook(self._end_excluded_call),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _end_excluded_call(self, module: nn.Module, args: Any, made: Any) -> None:
        self._trace.resume()
        taken, given = ([x for x in tree_leaves(t) if isinstance(x, Tensor)] for t in (args, made))
        self._trace.record_boundary(taken, given, label=id(module))

    def heights(self) -> set[int]:
        """Return every global height that a layer takes or makes."""
        return {h for calls in self.layer_rows.values() for call in calls for h in call[1:]}

    def row_multiples(self) -> dict[int, int]:
        """Return of how many rows each band of a height should be a multiple, if of any."""
        units = dict.fromkeys(self.heights(), 1)
        for layer, calls in self.layer_rows.items():
            for call in calls:
                units[call.in_height] = lcm(
                    units[call.in_height], layer.row_multiple(call.in_height)
                )
        return units

    def layer_plan(self, layer: RowLayer) -> tuple[int, dict[int, int]]:
        """Return one layer's row dimension and heights: taken -> made.

        Raises:
            UserError: some rank could not tell two of the calls apart by its rows.
        """
        calls, name = self.layer_rows[layer], self.names.get(layer, type(layer).__name__)
        dims = {call.dim for call in calls}
        if len(dims) > 1 or layer in self.rowwise_layers:
            raise UserError(
                f"{name}: is used on tensors with rows in different places, or with and without. "
                "Use one layer for each."
            )
        planned = {call.in_height: call.out_height for call in calls}
        if len(planned) < len(calls):
            raise UserError(f"{name}: makes two heights of the same rows.")
        for rank in range(self.bands.ranks):
            sizes = [self.bands[height].sizes[rank] for height in planned]
            if len(set(sizes)) < len(sizes):
                raise UserError(
                    f"{name}: is used at the heights {sorted(planned)}, and rank "
                    f"{rank} has the same rows of two of them. Change parallel.domain."
                )
        return dims.pop(), planned
