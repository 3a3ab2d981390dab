"""The boundary of a model in the view: bands go in and come out, inside are fields of the globe.

Hooks of the root do it, around the user's hooks: these see the globe's fields as they would on one
process. Hooks of torch's data parallelism stay outside, where tensors are plain.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, final

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.domain_parallel.planning.model_plan import is_banded
from credit_dp.domain_parallel.view.autograd import Shown, is_of_library
from credit_dp.domain_parallel.view.running import run_in, running_view, same_python_numbers
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    global_tensors,
    is_same_memory,
    whole,
    with_layout,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    buffers_of,
    forward_hooks,
    run_uncompiled,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

# The models whose forwards run in this thread, with what ends then: None inside of another model.
_running_forwards: ContextVar[tuple[tuple[nn.Module, ExitStack | None], ...]] = ContextVar(
    "forwards", default=()
)


@final
class ShowInputs:
    """Starts a forward, and shows the inputs of the model through the view.

    An input is a band if it is one of the shapes of the global inputs but for samples and rows.

    Args:
        view: that of the model.
        shapes: of the global inputs.
        of_stage: whether the model is a stage of a pipeline. Its inputs are then as `TakeOutputs`
            of the stage before has left them, and each has the shape at its position.
    """

    def __init__(
        self, view: GlobalView, shapes: Sequence[Sequence[int]], of_stage: bool = False
    ) -> None:
        self.view = view
        self.of_stage = of_stage
        self.shapes = [tuple(shape) for shape in shapes if of_stage or is_banded(tuple(shape))]
        self.whole_shapes = [tuple(shape) for shape in shapes if not is_banded(tuple(shape))]

    @run_uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of the forward, inside of the view."""
        if running_view() is not None and not self._gets_bands((args, kwargs)):
            # Inside of another model everything is shown already.
            _running_forwards.set((*_running_forwards.get(), (module, None)))
            return None
        _order_hooks(module)
        ending = ExitStack()
        _running_forwards.set((*_running_forwards.get(), (module, ending)))
        ending.enter_context(run_in(self.view))
        self.view.inputs = []
        self.view.created.clear()
        shown, error = None, None
        try:
            if self.of_stage:
                pairs = zip(args, self.shapes, strict=True)
                shown = tuple(self._show_state(x, shape) for x, shape in pairs), kwargs
            else:
                shown = map_tensors(self._show, (tuple(args), kwargs))
                self._check_fields()
        except UserError as caught:
            error = caught
        ending.enter_context(same_python_numbers(self.view, error))
        return shown

    def _gets_bands(self, values: Any) -> bool:
        """Return whether the model gets bands that are not shown, from a hook of another model."""
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
        return not global_tensors(tensors) and any(
            is_same_field(tuple(x.shape), shape)
            and x.shape[ROW_DIM]
            == self.view.manager.partition(shape[ROW_DIM]).sizes[self.view.rank]
            for x in tensors
            for shape in self.shapes
        )

    def _show(self, x: Tensor) -> Tensor:
        if type(x) is GlobalTensor:
            return x
        heights = [shape[ROW_DIM] for shape in self.shapes if is_same_field(tuple(x.shape), shape)]
        for height in heights:
            partition = self.view.manager.partition(height)
            if x.shape[ROW_DIM] == partition.sizes[self.view.rank]:
                return self._field(x, Layout(x.ndim + ROW_DIM, 1, partition))
        if heights:
            raise UserError(
                f"rank {self.view.rank}: got {x.shape[ROW_DIM]} rows, planned are the bands of "
                f"{', '.join(map(str, heights))} rows. Convert with the input_shape of this call."
            )
        return self._field(x, None)

    def _check_fields(self) -> None:
        """Refuse a band that is no planned field.

        Beside a planned field it has to have the columns of one, too: others may be whole, as those
        of a single row are that were planned.

        Raises:
            UserError: its channels or columns are others.
        """
        is_planned = any(shown.rows is not None for shown, _ in self.view.inputs)
        for shown, x in self.view.inputs:
            is_row = x.ndim >= FIELD_DIMS and x.shape[ROW_DIM] == 1
            if is_row and any(is_same_field(tuple(x.shape), shape) for shape in self.whole_shapes):
                continue
            for shape in self.shapes:
                rows = self.view.manager.partition(shape[ROW_DIM]).sizes[self.view.rank]
                is_band = x.ndim == len(shape) and x.shape[ROW_DIM] == rows
                has_columns = is_band and x.shape[-1] == shape[-1]
                if shown.rows is None and (has_columns if is_planned else is_band):
                    raise UserError(
                        f"rank {self.view.rank}: got a band of shape {tuple(x.shape)}, planned are "
                        f"bands of fields of shape {shape}. Convert with the input_shape of this "
                        "call."
                    )

    def _field(self, x: Tensor, layout: Layout | None) -> GlobalTensor:
        shown = GlobalTensor(x, layout, self.view)
        self.view.inputs.append((shown, x))
        return shown

    def _show_state(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        layout = layout_outside(shape, self.view)
        rows = layout.partition.sizes[self.view.rank] if layout else 0
        if layout is not None and x.shape[ROW_DIM] != rows:
            raise UserError(
                f"rank {self.view.rank}: got {x.shape[ROW_DIM]} rows, planned is a band of {rows}. "
                "Build the pipeline with the input_shape of this call."
            )
        return self._field(x, layout)


def layout_outside(shape: Sequence[int], view: GlobalView) -> Layout | None:
    """Return how ranks hold an output of this global shape outside of the view; None: whole."""
    if len(shape) < FIELD_DIMS:
        return None
    partition = view.partition(shape[ROW_DIM])
    return None if partition is None else Layout(len(shape) + ROW_DIM, 1, partition)


def is_same_field(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes of fields differ in samples and rows only."""
    if len(shape) != len(other):
        return False
    free = {0, len(shape) + ROW_DIM} if len(shape) > FIELD_DIMS else {len(shape) + ROW_DIM}
    return all(d in free or a == b for d, (a, b) in enumerate(zip(shape, other, strict=True)))


def _order_hooks(module: nn.Module) -> None:
    """Run the user's forward hooks first, then `TakeOutputs` and `LeaveModel`, then torch's."""
    hooks = forward_hooks(module)
    ours = [key for key, hook in hooks.items() if isinstance(hook, (TakeOutputs, LeaveModel))]
    outside = [key for key, hook in hooks.items() if key not in ours and is_of_library(hook)]
    for key in (*ours, *outside):
        hooks.move_to_end(key)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested values with a function's result in place of each tensor, dataclasses too.

    Raises:
        UserError: an object that is none of these holds bands, which would not be converted.
    """
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(function, value)
    leaves, spec = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return tree_unflatten([map_tensors(function, leaf) for leaf in leaves], spec)
    if isinstance(value, dict):  # of a type that torch does not know
        result = _shallow_copy(value)
        _map_entries(function, result, value)
        return result
    if type(value) is SimpleNamespace:
        return SimpleNamespace(**{k: map_tensors(function, x) for k, x in vars(value).items()})
    _check_object(function, value)
    return value


def _map_dataclass(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a copy of a dataclass, which may be a mapping as well."""
    result = _shallow_copy(value)
    if isinstance(value, dict):
        _map_entries(function, result, value)
    for each in dataclasses.fields(value):
        if not hasattr(value, each.name):
            continue
        old = getattr(value, each.name)
        is_entry = isinstance(value, dict) and value.get(each.name) is old and old is not None
        mapped = result[each.name] if is_entry else map_tensors(function, old)
        # Past `__setattr__`, which a frozen dataclass forbids.
        object.__setattr__(result, each.name, mapped)
    return result


def _shallow_copy(value: Any) -> Any:
    """Return a copy of a dataclass or mapping, also if `copy.copy` can't make one."""
    try:
        return copy.copy(value)
    except TypeError:  # its class needs arguments, or forbids to set entries
        kind: Any = type(value)
        result = kind.__new__(kind)
        vars(result).update(vars(value))
        return result


def _map_entries(function: Callable[[Tensor], Any], result: Any, value: dict[Any, Any]) -> None:
    """Set the entries of a copied mapping, past methods that may forbid it."""
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    for key, entry in dict.items(value):
        base.__setitem__(result, key, map_tensors(function, entry))


def _check_object(function: Callable[[Tensor], Any], value: Any) -> None:
    """Refuse an object of an unknown type that holds bands."""
    if isinstance(value, (nn.Module, type)):
        return
    for x in tree_leaves(list(getattr(value, "__dict__", {}).values())):
        if not isinstance(x, Tensor):
            continue
        shown = x if type(x) is GlobalTensor else function(x)
        if type(shown) is GlobalTensor and (type(x) is GlobalTensor or shown.rows is not None):
            raise UserError(
                f"{type(value).__name__}: fields in an object of this type can't enter or leave "
                "the model. Use tensors, mappings, sequences or dataclasses."
            )


@final
class TakeOutputs:
    """Takes the outputs of the model out of the view: rows of fields as bands, the rest whole.

    Args:
        view: that of the model.
        of_stage: whether the model is a stage of a pipeline, whose outputs are sent: messages need
            contiguous tensors.
    """

    def __init__(self, view: GlobalView, of_stage: bool = False) -> None:
        self.view = view
        self.of_stage = of_stage

    @run_uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the output of the forward, outside of the view."""
        forwards = _running_forwards.get()
        if not forwards or forwards[-1][1] is None:
            return None
        self.view.outputs = WeakIdKeyDictionary()
        taken: dict[int, Tensor] = {}

        def take(x: Tensor) -> Tensor:
            # The same tensor at two positions stays one.
            if id(x) not in taken:
                taken[id(x)] = self._take(x)
            return taken[id(x)]

        result = map_tensors(take, output)
        self._take_buffers(module)
        inputs, self.view.inputs = self.view.inputs, []
        for shown, x in inputs:
            # The model may have written to it, or to a view of it.
            if shown.memory is not None and not is_same_memory(shown.local, x):
                x.copy_(shown.local)
        return result

    def _take(self, x: Tensor) -> Tensor:
        layout = layout_outside(x.shape, self.view)
        local: Tensor = whole(x) if layout is None else with_layout(x, layout, self.view)
        if self.of_stage:
            local = local.contiguous()
        self.view.outputs[local] = Shown(layout, self.view, False)
        return local

    def _take_buffers(self, module: nn.Module) -> None:
        """Keep buffers that the forward replaced as whole tensors, as on one process."""
        for each in module.modules():
            for name, buffer in buffers_of(each).items():
                if type(buffer) is GlobalTensor:
                    buffers_of(each)[name] = whole(buffer)


@final
class LeaveModel:
    """Ends what `ShowInputs` of the same call has started, even if the forward fails."""

    def __init__(self, view: GlobalView) -> None:
        self.view = view

    @run_uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward that `ShowInputs` has started."""
        forwards = _running_forwards.get()
        if not forwards or forwards[-1][0] is not module:  # a hook failed before `ShowInputs`
            return
        _running_forwards.set(forwards[:-1])
        ending = forwards[-1][1]
        if ending is not None:
            self.view.inputs = []
            self.view.created.clear()
            ending.close()
