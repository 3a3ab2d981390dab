"""Proof that a model with converted layers computes on plain bands what it does on the globe.

The model runs twice as one rank, without data: on tensors of the globe, where `band_tensor` says
what each operator does with rows, and on plain bands, as it will in training. In both runs a
converted layer answers with the shapes that it returns. Outside of layers, the runs have to compute
the same on what the rank holds: what layers get, what is written in place and what the model
returns come from the same operators with the same numbers. On tensors of the globe none of them may
need another rank. So the code between the layers may run on plain bands: it computes what it
computes on the globe, and so do its gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from math import lcm
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.band_tensor.boundary import Inputs, rows_outside
from credit_dp.domain_parallel.band_tensor.moving import refresh
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Rows,
    is_running,
    local_of,
    tensors_in,
)
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.domain_parallel.planned_run import run_planner
from credit_dp.domain_parallel.planning.shape_memo import TORCH_NAMESPACES, ShapeMemo
from credit_dp.domain_parallel.planning.trace import (
    ModelSnapshot,
    PlanningMode,
    current_user_line,
    is_in_checkpoint,
    map_tensors,
    named_leaves,
    plain_tensors,
    running_function,
    tensor_leaves,
    user_functions,
    user_line_of,
)
from credit_dp.errors import UserError, first_line
from credit_dp.torch_private import (
    FakeTensor,
    children_of,
    disable_current_modes,
    disable_torch_function,
    has_backward_hooks,
    schema_of,
    version_of,
)

# Namespaces of questions to torch, such as for a tensor's device.
QUERY_NAMESPACES = ("prim", "profiler")
OWN_NAMESPACES = (*QUERY_NAMESPACES, *TORCH_NAMESPACES)
# What `reshape` does, depending on strides.
COPIES = {torch.ops.aten.clone.default, torch.ops.aten.contiguous.default}
AS_VIEW: dict[Any, Any] = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}
# Their result's shape says more than their argument, where -1 stands for a size.
SHAPED = {torch.ops.aten.view.default, torch.ops.aten.expand.default, *AS_VIEW}


class LayerRows(NamedTuple):
    """The row dimension of a layer's call, and the global heights of its input and output."""

    dim: int
    in_height: int
    out_height: int


class LayerCall(NamedTuple):
    """A call of a converted layer or of a trusted module in the run on the globe.

    Attributes:
        outputs: what it returns on the globe, without data; None if a layer couples no rows here.
        rows: how ranks hold each tensor of `outputs`.
    """

    name: str
    outputs: Any = None
    rows: tuple[Rows, ...] = ()


class LayerRead(NamedTuple):
    """What a layer was called with in the run on a band: a tensor, and how often it was written."""

    name: str
    tensor: int
    version: int


class Expressions:
    """Numbers for what tensors are computed from: equal ones have one number in all runs."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __contains__(self, expression: Hashable) -> bool:
        return expression in self._numbers

    def number(self, expression: Hashable) -> int:
        """Return the number of an expression."""
        return self._numbers.setdefault(expression, len(self._numbers))


@final
class Run(PlanningMode):
    """A run of the model as one rank, which answers the calls of its layers.

    Args:
        globe: the run on tensors of the globe that this one on a band is compared with.

    Attributes:
        events: what both runs have to do alike, in order.
    """

    def __init__(self, planner: Planner, rank: int, globe: Run | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.planner = planner
        self.globe = globe
        manager = planner.manager
        self.manager = DomainParallelManager(
            manager.domain_parallel_size,
            manager.domain_parallel_size,
            transport=CountingTransport(rank, manager.domain_parallel_size),
        )
        for partition in manager.bands.planned_partitions:
            self.manager.bands.register(partition)
        self.domain = Domain(self.manager)
        self.calls: list[LayerCall] = []
        self.reads: list[LayerRead] = []
        self.events: list[Hashable] = []
        self.running_modules: list[str] = []  # outermost first
        self._refusal: UserError | None = None
        self._functions = user_functions()
        self._writes = 0
        # What is first in each memory, and how many memories had the same before.
        self._memories: dict[int, tuple[int, int]] = {}
        self._counts: Counter[int] = Counter()
        self._copied: set[int] = set()
        self._paused = self._layers = 0
        self._first_difference = ""
        self._numbers = dict(planner.numbers)
        self._alive: list[Tensor] = []  # Python reuses the id of a freed tensor

    # ---------------------------------------------------------------- the planner of layers

    def call_layer(self, layer: RowLayer, x: Tensor, *others: Tensor) -> Any:
        """Return the output of a converted layer: replaces its forward."""
        planner = self.planner
        name = planner.names.get(layer) or type(layer).__name__
        if is_in_checkpoint():
            planner.recomputed_layers.add(layer)
        if planner.settings_of(layer) != planner.settings.get(layer):
            raise self.refuse(f"{name}: its settings change in the forward.")
        if self.globe is None:
            if not self._paused:
                self._check_backward()
            return self._call_on_globe(layer, name, x, *others)
        call = self._next_call(name)
        if call.outputs is None:
            return self._call_rowwise(layer, name, x, *others)
        self.reads.append(LayerRead(name, id(x), 0 if x.is_inference() else version_of(x)))
        return self._answer(call, (x, *others))

    def _call_on_globe(self, layer: RowLayer, name: str, x: Tensor, *others: Tensor) -> Any:
        rows = self._rows_of(x)
        try:
            couples = isinstance(rows, Band) and layer.couples_rows(rows.dim, x.ndim)
        except UserError as error:
            raise self.refuse(f"{name}: {error}") from None
        if not isinstance(rows, Band) or not couples:
            self.planner.rowwise_layers.add(layer)
            self.calls.append(LayerCall(name))
            return self._call_rowwise(layer, name, x, *others)
        if rows.outer > 1 or rows.bounds != self.domain.bounds(rows.height):
            raise self.refuse(
                f"{name}: dimension {rows.dim + x.ndim} holds more than rows. Keep rows in a "
                "separate dimension before this layer."
            )
        shapes = tuple((each.shape, each.dtype) for each in (x, *others))
        key = layer, layer.training, shapes
        if key not in self.planner.outputs:
            with self._within_layer():
                made = self._outputs_on_globe(layer.global_forward, (x, *others))
            self.planner.outputs[key] = made
        outputs = self.planner.outputs[key]
        leaves = tensor_leaves(outputs)
        dim, height = rows.dim, rows.height
        is_banded = layer.output_is_banded
        out_height = leaves[0].shape[dim] if is_banded else height
        self.planner.layer_rows[layer].add(LayerRows(dim, height, out_height))
        held = [
            Band(dim, 1, self.domain.bounds(y.shape[dim])) if is_banded else WHOLE for y in leaves
        ]
        self.calls.append(LayerCall(name, outputs, tuple(held)))
        return self._answer(self.calls[-1], (x, *others))

    def _call_rowwise(self, layer: RowLayer, name: str, x: Tensor, *others: Tensor) -> Any:
        rows = self._rows_of(x)
        inputs = [local_of(each) for each in (x, *others)]
        if self._paused or rows is PARTIAL:
            with self._within_layer():
                return layer.global_forward(x, *others)
        with self._alone(), self._within_layer():
            outputs = layer.global_forward(*inputs)
        leaves = tensor_leaves(outputs)
        if isinstance(rows, Band):
            kept = {(y.ndim, y.shape[rows.dim]) for y in leaves}
            if kept != {(x.ndim, inputs[0].shape[rows.dim])}:
                raise self.refuse(f"{name}: changes the number of rows, which it does not combine.")
        index, numbers = len(self.events), count()
        self._note("call", name, *map(self._number_of, inputs))

        def answer(y: Tensor) -> Tensor:
            self._set_number(y, "output", index, next(numbers))
            return BandTensor(y, rows, self.domain) if type(x) is BandTensor else y

        return map_tensors(answer, outputs)

    def _rows_of(self, x: Tensor) -> Rows:
        if type(x) is BandTensor:
            refresh(x)
            return x.rows
        is_field = x.ndim >= FIELD_DIMS and x.shape[ROW_DIM] in self.planner.heights
        # A trusted module is called with tensors of the globe's shape.
        return self._rows_of_height(x) if self._paused and is_field else WHOLE

    def _rows_of_height(self, x: Tensor) -> Band:
        return Band(ROW_DIM, 1, self.domain.bounds(x.shape[ROW_DIM]))

    def _outputs_on_globe(self, function: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        def without_data(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)

        with self._alone():
            args, kwargs = map_tensors(
                lambda x: without_data(x) if type(x) is BandTensor else x, (args, kwargs or {})
            )
            return function(*args, **kwargs)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._paused += 1
        try:
            with disable_torch_function():
                yield
        finally:
            self._paused -= 1

    @contextmanager
    def _within_layer(self) -> Iterator[None]:
        self._layers += 1
        try:
            yield
        finally:
            self._layers -= 1

    def call_wrapped(
        self, layer: RowLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of a module that a layer wraps, as the model calls it on the globe."""
        if self._layers:
            return forward(*args, **kwargs)
        return layer.forward(*args, **kwargs)

    def _next_call(self, name: str) -> LayerCall:
        assert self.globe is not None
        calls = self.globe.calls
        if len(self.calls) >= len(calls) or calls[len(self.calls)].name != name:
            raise self.refuse(
                f"{self.location}: control flow depends on the number of rows; {name} is called on "
                "a band, but not on the globe."
            )
        self.calls.append(calls[len(self.calls)])
        return self.calls[-1]

    def _answer(self, call: LayerCall, inputs: Sequence[Tensor]) -> Any:
        held = iter(call.rows)
        index = len(self.events)

        def local_output(y: Tensor) -> tuple[Tensor, Rows]:
            rows, shape = next(held), list(y.shape)
            if isinstance(rows, Band):
                shape[rows.dim] = rows.sizes(self.manager.domain_rank)
            return torch.empty(shape, dtype=y.dtype, device=y.device), rows

        if self._paused:  # within a trusted module, which has the globe's tensors in the first run
            if self.globe is None:
                return call.outputs
            return map_tensors(lambda y: local_output(y)[0], call.outputs)
        self._note("call", call.name, *[self._number_of(local_of(x)) for x in inputs])
        numbers = count()

        def answer(y: Tensor) -> Tensor:
            local, rows = local_output(y)
            self._set_number(local, "output", index, next(numbers))
            return BandTensor(local, rows, self.domain) if self.globe is None else local

        with self._alone():
            return map_tensors(answer, call.outputs)

    def call_trusted(
        self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of a module whose code is not compared."""
        if self._paused:
            return forward(*args, **kwargs)
        inputs = tensor_leaves((args, kwargs))
        if self.globe is None:
            for x in inputs:
                self._rows_of(x)
            outputs = self._outputs_on_globe(forward, args, kwargs)
            held = tuple(
                self._rows_of_height(y)
                if y.ndim >= FIELD_DIMS and y.shape[ROW_DIM] in self.planner.heights
                else WHOLE
                for y in tensor_leaves(outputs)
            )
            self.calls.append(LayerCall(name, outputs, held))
            return self._answer(self.calls[-1], inputs)
        with self._alone():
            outputs = forward(*args, **kwargs)
        answer = self._answer(self._next_call(name), inputs)
        shapes = [[tuple(y.shape) for y in tensor_leaves(each)] for each in (outputs, answer)]
        if shapes[0] != shapes[1]:
            raise self.refuse(
                f"{name}: returns tensors of shapes {shapes[0]} on a band, and {shapes[1]} are "
                "those of the globe's."
            )
        return answer

    def call_linear(
        self, layer: nn.Linear, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of a linear layer as that of one operator.

        Which operators torch takes for it depends on strides, and so on the number of rows.
        """
        rows, local = self._held(args)
        has_rows_last = isinstance(rows, Band) and rows.dim == -1
        if local is None or has_rows_last or local.shape[-1] != layer.in_features:
            return forward(*args, **kwargs)
        operands = local, layer.weight, layer.bias
        numbers = [None if each is None else self._number_of(each) for each in operands]
        with self._alone():
            result = forward(local)
        self._set_number(result, "linear", *numbers, self._writes)
        return BandTensor(result, rows, self.domain) if type(args[0]) is BandTensor else result

    def call_dropout(
        self, layer: nn.Dropout, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of a dropout; on plain bands each rank draws for its own rows."""
        rows, local = self._held(args)
        is_drawn = layer.training and layer.p and not layer.inplace
        has_no_rows = self.globe is None and not isinstance(rows, Band)
        if local is None or has_no_rows or not is_drawn:
            return forward(*args, **kwargs)
        index = len(self.events)
        self._note("dropout", layer.p, self._number_of(local))
        with self._alone():
            result = forward(local)
        self._set_number(result, "dropped", index)
        return BandTensor(result, rows, self.domain) if type(args[0]) is BandTensor else result

    def _held(self, args: tuple[Any, ...]) -> tuple[Rows, Tensor | None]:
        if self._paused or len(args) != 1 or type(args[0]) not in (BandTensor, FakeTensor):
            return WHOLE, None
        if self.globe is None:
            self._check_backward()
        rows = self._rows_of(args[0])
        return rows, None if rows is PARTIAL else local_of(args[0])

    # ---------------------------------------------------------------- operators

    @property
    def location(self) -> str:
        """The module whose code runs now and its current line."""
        return ", ".join([*self.running_modules[-1:], current_user_line()])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.globe is None and not self._paused:
            self._check_backward("" if func.namespace in OWN_NAMESPACES else func.overloadpacket)
        if BandTensor in types:
            return self._run_on_globe(func, types, args, kwargs)
        run = self.planner.memo.run
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # the most frequent call by far: answered without dispatch
        if self._paused or func.namespace in QUERY_NAMESPACES:
            return run(func, args, kwargs)
        operands = self._operands(func, args, kwargs)
        has_chance = torch.Tag.nondeterministic_seeded in func.tags
        # A function that may draw a dropout, as attention does, is called without.
        drops_none = "dropout_p" in _defaults_of(func) and "dropout_p" not in dict(operands)
        if has_chance and not drops_none:
            raise self.refuse(f"{self.location}: {func.overloadpacket} draws random numbers.")
        is_written = schema_of(func).is_mutable
        if is_written:
            written = [*tensors_in([args, list(kwargs.values())])]
            self._note("writes", func, operands, *map(self._memory_of, written))
            self._writes += 1
            if any(id(x.untyped_storage()) in self._copied for x in written):
                raise self.refuse(
                    f"{self.location}: {func.overloadpacket} writes to a tensor that was copied."
                )
        result = run(func, args, kwargs)
        if func in COPIES:
            # Whether torch makes a copy depends on strides, and so on the number of rows.
            self._numbers[id(result)] = self._number_of(args[0])
            self._alive.append(result)
            if result is not args[0]:
                self._copied |= {id(x.untyped_storage()) for x in (result, args[0])}
            return result
        if func in SHAPED:
            operands = operands[0], ("shape", tuple(result.shape))
        expression = AS_VIEW.get(func, func), operands, self._writes
        is_compared = self.globe is not None and not self._first_difference
        if is_compared and not is_written and (*expression, 0) not in self.planner.expressions:
            self._first_difference = f"{self.location}: {func.overloadpacket}"
        for index, y in enumerate(tensors_in([result])):
            if id(y) not in self._numbers:
                self._set_number(y, *expression, index)
        return result

    def _run_on_globe(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self:
            result = BandTensor.__torch_dispatch__(func, types, args, kwargs)
        results = [x for x in tensors_in([result]) if type(x) is BandTensor]
        self._check_messages(func.overloadpacket, any(x.rows is PARTIAL for x in results))
        given = {bounds_of(x) for x in tensors_in([args, list(kwargs.values())])}
        if not all(_are_shares(bounds_of(x), given) for x in results):
            raise self.refuse(f"{self.location}: {func.overloadpacket} changes the bands of ranks.")
        return result

    def _check_backward(self, operator: Any = "") -> None:
        # Their backward is code that no run sees; wrapped in a module, the user vouches for it.
        name = operator or running_function(self._functions)
        if name:
            raise self.refuse(f"{self.location}: the backward of {name} is not known.")

    def _check_messages(self, what: Any, is_part: bool = False) -> None:
        transport = self.manager.transport
        assert isinstance(transport, CountingTransport)
        if is_part or any(sent.messages or sent.collectives for sent in transport.sent):
            raise self.refuse(f"{self.location}: {what} needs rows of other ranks.")

    def _set_number(self, x: Tensor, *expression: Hashable) -> None:
        self._numbers[id(x)] = self.planner.expressions.number(expression)
        self._alive.append(x)
        self._memory_of(x)

    def _memory_of(self, x: Tensor) -> tuple[int, int]:
        key = id(x.untyped_storage())
        if key not in self._memories:
            number = self._number_of(x)
            self._memories[key] = number, self._counts[number]
            self._counts[number] += 1
        return self._memories[key]

    def _number_of(self, x: Tensor) -> int:
        if id(x) not in self._numbers:
            if isinstance(x, FakeTensor) or x.is_meta:  # of nothing that was seen: equals no other
                self._set_number(x, "unknown", self.globe is None, len(self._alive))
            else:
                with disable_current_modes():
                    self._set_number(x, "constant", x.dtype, tuple(x.shape), str(x.tolist()))
        return self._numbers[id(x)]

    def _operands(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[str, Hashable], ...]:
        defaults = _defaults_of(func)
        named = [*zip(defaults, args, strict=False), *kwargs.items()]
        operands = [(name, self._key(x)) for name, x in named]
        return tuple([(name, key) for name, key in operands if key != defaults[name]])

    def _key(self, operand: Any) -> Hashable:
        if isinstance(operand, Tensor):
            return "tensor", self._number_of(operand)
        if isinstance(operand, list | tuple):
            return tuple([self._key(each) for each in operand])
        return _key_of_number(operand)

    def _note(self, *event: Hashable) -> None:
        if self.globe is not None:
            expected = self.globe.events
            if len(self.events) >= len(expected) or expected[len(self.events)] != event:
                raise self.difference()
        self.events.append(event)

    def difference(self, error: Exception | None = None) -> UserError:
        """Return the error for code that does something else on a band than on the globe.

        Args:
            error: that it raised; None if the model runs, or has returned.
        """
        where = self._first_difference
        if not where and error is not None:
            where = ", ".join([*self.running_modules[-1:], user_line_of(error)])
        elif not where:
            where = self.location if self.running_modules else "output"
        reason = "" if error is None else f": {first_line(error)}"
        return self.refuse(f"{where}: is called otherwise on a band than on the globe{reason}.")

    def refuse(self, reason: str) -> UserError:
        """Return the error that ends this run, even if the model's code handles it."""
        error = UserError(reason)
        self._refusal = self._refusal or error
        return error

    # ---------------------------------------------------------------- the run

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any) -> None:
        """Run the model."""
        model = self.planner.model
        with ExitStack() as stack:
            if self.globe is None:
                entered = Inputs(self.domain, shapes, False).enter(tuple(args), dict(kwargs))
                args, kwargs = entered[:2]
                token = is_running.set(True)
                stack.callback(is_running.reset, token)
                self.planner.put_originals(stack)
            for index, x in enumerate(tensor_leaves((args, kwargs))):
                self._set_number(local_of(x), "input", index, tuple(local_of(x).shape), x.dtype)
            self.planner.run = self
            planner_token = run_planner.set(self)
            stack.callback(run_planner.reset, planner_token)
            try:
                with self:
                    self._note_outputs(model(*args, **kwargs))
            finally:
                if self._refusal is not None:
                    raise self._refusal from None
        if self.globe is None and self.domain.uncounted:
            raise self.refuse(
                f"{type(model).__name__}: reads or writes data of tensors past torch's count."
            )
        if self.globe is not None and len(self.events) != len(self.globe.events):
            raise self.difference()
        if self.globe is None:
            self._check_messages("the output")

    def _note_outputs(self, outputs: Any) -> None:
        names, values = [], []
        for name, value in named_leaves(outputs):
            names.append(name)
            if not isinstance(value, Tensor):
                values.append(self._key(value))
                continue
            if type(value) is BandTensor:
                refresh(value)
                if value.rows != rows_outside(value.shape, self.domain):
                    raise self.refuse("output: is not in bands, or has its rows elsewhere.")
            values.append(self._key(local_of(value)))
        self._note("outputs", *names, *values)


def bounds_of(x: Tensor) -> tuple[int, ...]:
    """Return the bands of a tensor of the globe; none if it has no rows."""
    return x.rows.bounds if type(x) is BandTensor and isinstance(x.rows, Band) else ()


def _are_shares(bounds: tuple[int, ...], given: set[tuple[int, ...]]) -> bool:
    """Return whether bands are the same shares of the globe as some of those given."""
    return (
        not bounds
        or bounds in given
        or any(
            len(other) == len(bounds)
            and all(a * other[-1] == b * bounds[-1] for a, b in zip(bounds, other, strict=True))
            for other in given
        )
    )


def _key_of_number(x: Any) -> Hashable:
    # 1, 1.0 and True are equal, but not to torch; and NaN equals nothing.
    return type(x), repr(x) if isinstance(x, float) else x


@cache
def _defaults_of(func: Any) -> dict[str, Hashable]:
    return {
        argument.name: _key_of_number(argument.default_value)
        if argument.has_default_value()
        else ()
        for argument in schema_of(func).arguments
    }


@final
class Unsharded:
    """The planner of a run of the model as it is on one process."""

    def call_layer(self, layer: RowLayer, x: Tensor, *others: Tensor) -> Any:
        """Return the output of the layer that a converted one wraps."""
        return layer.global_forward(x, *others)


# Modules that are called as one operator.
CALLS: dict[type[nn.Module], Any] = {nn.Linear: Run.call_linear, nn.Dropout: Run.call_dropout}
SETTINGS = (bool, int, float, str, tuple, list)  # types of layers' settings


@final
class Planner:
    """What the runs of a model have shown of its layers.

    Args:
        trusted: modules whose code is not compared.

    Attributes:
        layer_rows: how layers were called that couple rows.
        rowwise_layers: layers that were called where they couple none.
        recomputed_layers: that `torch.utils.checkpoint` calls.
        settings: of the layers, before the runs.
        outputs: of layers on the globe, without data, by the layer's mode and its inputs' shapes.
    """

    def __init__(
        self, model: nn.Module, manager: DomainParallelManager, trusted: Iterable[nn.Module]
    ) -> None:
        self.model = model
        self.manager = manager
        self.trusted = [module for module in trusted if not isinstance(module, RowLayer)]
        self.names = {
            layer: name or type(layer).__name__
            for name, layer in model.named_modules()
            if isinstance(layer, RowLayer)
        }
        self.layer_rows: dict[RowLayer, set[LayerRows]] = defaultdict(set)
        self.rowwise_layers: set[RowLayer] = set()
        self.recomputed_layers: set[RowLayer] = set()
        self.input_heights: set[int] = set()
        self.run: Run | None = None
        self.outputs: dict[Hashable, Any] = {}
        self.expressions = Expressions()
        self.memo = ShapeMemo()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the model, whose tensors are fake in this context, in all runs."""
        model = self.model
        tensors: list[tuple[Hashable, Tensor]] = [
            *model.named_parameters(), *model.named_buffers(), *enumerate(plain_tensors(model)),
        ]  # fmt: skip
        self.numbers = {id(x): self.expressions.number(("model", name)) for name, x in tensors}
        self.settings = {layer: self.settings_of(layer) for layer in self.names}
        with ExitStack() as stack:
            for path, module in model.named_modules():
                self._follow_module(stack, path, module)
            for index, module in enumerate(self.trusted):
                self._replace_call(stack, module, Run.call_trusted, f"trusted {index}")
            self.snapshot = ModelSnapshot(model)
            yield

    def _follow_module(self, stack: ExitStack, path: str, module: nn.Module) -> None:
        """Record when a module's code runs; linear layers and dropouts are one operator."""
        kind = type(module.__dict__.get("wrapped", module)).__name__
        name = f"{path or 'model'} ({kind})"
        if has_backward_hooks(module) and not isinstance(module, RowLayer):
            raise UserError(f"{name}: its backward hook may need gradients of the globe.")

        def begin(*_: Any) -> None:
            assert self.run is not None
            self.run.running_modules.append(name)

        def end(*_: Any) -> None:  # not called after an error: the failed module stays innermost
            assert self.run is not None
            self.run.running_modules.pop()

        stack.enter_context(module.register_forward_pre_hook(begin))
        stack.enter_context(module.register_forward_hook(end))
        call = CALLS.get(type(module))
        if call is not None and "forward" not in vars(module):
            self._replace_call(stack, module, call, module)

    def put_originals(self, stack: ExitStack) -> None:
        """Let the model have the modules that its layers wrap, and these call their layers.

        So its code sees what it does without layers, as their types.
        """
        for parent in list(self.model.modules()):
            for name, layer in children_of(parent).items():
                if isinstance(layer, RowLayer):
                    stack.callback(children_of(parent).__setitem__, name, layer)
                    children_of(parent)[name] = vars(layer)["wrapped"]
        for layer in self.names:
            self._replace_call(stack, vars(layer)["wrapped"], Run.call_wrapped, layer)

    def _replace_call(
        self, stack: ExitStack, module: nn.Module, call: Callable[..., Any], first: Any
    ) -> None:
        own, forward = vars(module).get("forward"), module.forward

        def restore() -> None:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own

        vars(module)["forward"] = lambda *args, **kwargs: call(
            self.run, first, forward, *args, **kwargs
        )
        stack.callback(restore)

    @property
    def heights(self) -> set[int]:
        """Return the global heights of all inputs, and of inputs and outputs of layers."""
        heights = {h for calls in self.layer_rows.values() for call in calls for h in call[1:]}
        return heights | self.input_heights

    def settings_of(self, layer: RowLayer) -> list[tuple[str, Any]]:
        """Return the settings of a layer, which its plan is for."""
        modules = [layer, *vars(layer)["wrapped"].modules()]
        return [
            (name, value)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, SETTINGS) and name != "training"
        ]

    def first_uses(self) -> dict[int, str]:
        """Return the heights, with the path of the first layer that has each."""
        first_use = dict.fromkeys(self.input_heights, "input")
        for layer, calls in self.layer_rows.items():
            for height in (h for call in sorted(calls) for h in call[1:]):
                first_use.setdefault(height, self.names.get(layer, type(layer).__name__))
        return first_use

    def row_multiples(self) -> dict[int, int]:
        """Return, for each height, the number of rows of which a band should be a multiple."""
        multiples = dict.fromkeys(self.heights, 1)
        for layer, calls in self.layer_rows.items():
            for _, height, _ in calls:
                multiples[height] = lcm(multiples[height], layer.row_multiple(height))
        return multiples

    def layer_plan(self, layer: RowLayer) -> tuple[int, dict[int, int]]:
        """Return the row dimension of a layer and its global heights: input -> output."""
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
        bands = self.manager.bands
        for rank in range(bands.ranks):
            sizes = [bands[height].sizes[rank] for height in heights]
            if len(set(sizes)) < len(sizes):
                raise UserError(
                    f"{name}: is called at the heights {sorted(heights)}, and rank {rank} has the "
                    "same number of rows at two of them. Use a separate layer for each height, or "
                    "change parallel.domain."
                )
        return dims.pop(), heights
