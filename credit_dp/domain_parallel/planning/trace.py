"""Runs a model on fake tensors and records the operations of its own code."""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from types import FrameType
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from credit_dp.errors import UserError

# Torch's own operations: their results depend on nothing but the operands.
TORCH_NAMESPACES = ("aten", "prims")
# But for one, whose view may reach beyond its operand.
UNBOUNDED_VIEW = torch.ops.aten.as_strided.default


class _UncacheableError(Exception):
    """More than its key says may matter of an operand."""


class _TensorSpec(NamedTuple):
    """One tensor that an operation makes: on the meta device, or a fake one of another device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    mode: FakeTensorMode | None

    def create(self, memory: torch.UntypedStorage | None = None) -> Tensor:
        """Make it anew, or as a view of this memory."""
        if self.mode is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        with torch._C._DisableTorchDispatch():
            if memory is None:
                made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                made = torch.empty(0, dtype=self.dtype, device="meta")
                made.set_(memory, self.offset, self.shape, self.stride)
        return FakeTensor(self.mode, made, self.device)


class _CachedResult(NamedTuple):
    """All that an operation makes; `container` is what holds them, if something does.

    `is_view`: they lie in the memory of the first operand.
    """

    outputs: tuple[_TensorSpec | None, ...]
    container: type | None
    is_view: bool


@final
class ShapeMemo:
    """Runs torch's operations on tensors without data, those on equal operands only once.

    What changes an operand, returns one, or makes anything but whole tensors and views of a fake
    one is run every time. Views on the meta device are too: torch makes these as fast. One memo
    serves one `FakeTensorMode`.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, _CachedResult | None] = {}
        self._is_pure: dict[Any, bool] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` makes of its operands."""
        first: Any = args[0] if args else None
        kind = func, type(first) is FakeTensor
        if kind not in self._is_pure:
            self._is_pure[kind] = _is_pure(*kind)
        if not self._is_pure[kind]:
            return func(*args, **kwargs)
        try:
            key = (
                func,
                torch.get_default_dtype(),
                _cache_key(args),
                _cache_key((*kwargs.items(),)),
            )
            known = self._results.get(key)
        except (_UncacheableError, TypeError):  # the latter of what has no hash
            return func(*args, **kwargs)
        if known is None:
            made = func(*args, **kwargs)
            if key not in self._results:
                self._results[key] = _cacheable_result(made, args, kwargs)
            return made
        memory = first.untyped_storage() if known.is_view else None
        tensors = [one and one.create(memory) for one in known.outputs]
        return tensors[0] if known.container is None else known.container(tensors)


def tensors_in(operands: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among operands of an operation, and in lists of these."""
    for operand in operands:
        if isinstance(operand, Tensor):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from tensors_in(operand)


def _is_pure(func: Any, of_fake: bool) -> bool:
    """Return whether an operation leaves operands alone: makes new tensors, or views of fakes."""
    schema = func._schema
    is_view = any(returned.alias_info is not None for returned in schema.returns)
    can_be_made = (of_fake and func is not UNBOUNDED_VIEW) or not is_view
    return func.namespace in TORCH_NAMESPACES and not schema.is_mutable and can_be_made


def _cache_key(value: Any) -> Hashable:
    """Return all of an operand that a result can depend on.

    Raises:
        _UnclearError: it is a tensor with data, or of a kind with rules of its own.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple(map(_cache_key, value))
    if not isinstance(value, Tensor):
        return kind, value  # 1, 1.0 and True are equal
    if not _is_dataless(value):
        raise _UncacheableError
    # A fake one asked for its device would ask all that is under way.
    device = value.fake_device if isinstance(value, FakeTensor) else value.device
    return value.shape, value.stride(), value.storage_offset(), value.dtype, device


def _is_dataless(x: Any) -> bool:
    """Return whether this is a dense tensor, fake or on the meta device."""
    kind = type(x)
    if kind is FakeTensor:
        return x.constant is None and x.layout is torch.strided
    return kind in (Tensor, nn.Parameter) and x.is_meta and x.layout is torch.strided


def _cacheable_result(
    made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _CachedResult | None:
    """Return what to make again for equal operands; None if it has to be run."""
    several = type(made) if isinstance(made, tuple | list) else None
    leaves = [made] if several is None else list(made)
    new = [leaf for leaf in leaves if leaf is not None]
    given = [*tensors_in(args), *tensors_in(kwargs.values())]
    if not new or not all(map(_is_describable, new)) or any(x is y for x in new for y in given):
        return None
    memories, own = ({x.untyped_storage()._cdata for x in of} for of in (new, given))
    is_view = memories == {given[0].untyped_storage()._cdata} if given else False
    if is_view and not (given[0] is args[0] and type(given[0]) is FakeTensor):
        return None
    if not is_view and (len(memories - own) < len(new) or not all(map(_fills_storage, new))):
        return None  # some share their memory
    described = tuple(leaf if leaf is None else _spec_of(leaf) for leaf in leaves)
    return _CachedResult(described, several, is_view)


def _spec_of(x: Tensor) -> _TensorSpec:
    mode = x.fake_mode if isinstance(x, FakeTensor) else None
    return _TensorSpec(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, x.device, mode)


def _is_describable(x: Any) -> bool:
    """Return whether this is a tensor without data, as its numbers are."""
    return _is_dataless(x) and not x.is_conj() and not x.is_neg()


def _fills_storage(x: Tensor) -> bool:
    """Return whether this tensor fills its memory."""
    size: int = x.untyped_storage().nbytes()
    return x.storage_offset() == 0 and size == _spec_of(x).create().untyped_storage().nbytes()


# Frames of torch and of this package are not the user's code.
LIBRARY_FOLDERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
)


# A reshape copies or not, depending on strides, which a band of one row has others of. So copies
# count as the tensor itself, and both ways of reshaping as one.
AS_VIEW: dict[Any, Any] = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}

# Operations that ask or tell something about a tensor and change nothing. Any other is recorded:
# of one that is not torch's own, nobody knows what it does.
QUERY_NAMESPACES = ("prim", "profiler")


class TensorRef(NamedTuple):
    """A tensor of a trace and its shape then.

    `number` is its order of appearance, or its identity if it belongs to the model; `value` are the
    entries of a constant, as text.
    """

    number: int
    shape: tuple[int, ...]
    value: str = ""


@dataclass(frozen=True)
class TraceStep:
    """One operation, or (`op` is None) a layer or an end of the model, whose rows are known."""

    op: torch._ops.OpOverload | None
    arguments: dict[str, Any]
    outputs: tuple[TensorRef, ...]
    location: str  # the module that runs and the line of its code

    @property
    def name(self) -> str:
        """The operation without its overload, e.g. `aten.sum`."""
        return "" if self.op is None else str(self.op.overloadpacket)

    @cached_property
    def inputs(self) -> list[TensorRef]:
        """The tensors given, in order."""
        return list(_refs_in(self.arguments.values()))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What is given beside tensors."""
        return {key: value for key, value in self.arguments.items() if not any(_refs_in([value]))}


def _refs_in(values: Iterable[Any]) -> Iterator[TensorRef]:
    for value in values:
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, list | tuple):
            yield from _refs_in(value)


@final
class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of one run, in order. Two runs of the same code number tensors alike.

    Args:
        model: whose parameters and buffers are known by identity.
        follow: called with every step as soon as it is recorded.
        memo: of runs with the same fake mode.
    """

    def __init__(
        self,
        model: nn.Module,
        follow: Callable[[TraceStep], None] | None = None,
        memo: ShapeMemo | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = (memo or ShapeMemo()).run
        self.steps: list[TraceStep] = []
        self._on_step = follow
        self._model_tensor_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._numbers: dict[int, int] = {}
        self._next_number = count()
        self._alive: list[Tensor] = []  # ids of collected tensors would be given out again
        self._paused = 0
        self.running_modules: list[str] = []  # the modules that run now, outermost first
        self.read_only_storages: dict[
            int, str
        ] = {}  # storages that may not change -> whose they are

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while planning: spare every operation torch's check of that."""
        return False

    @property
    def location(self) -> str:
        """The module whose code runs now, and its line."""
        return ", ".join([*self.running_modules[-1:], current_user_line()])

    def pause(self) -> None:
        """Record nothing until as many calls of `resume`."""
        self._paused += 1

    def resume(self) -> None:
        """Undo one `pause`."""
        self._paused -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def record_boundary(
        self, taken: Sequence[Tensor], made: Sequence[Tensor], **settings: Any
    ) -> None:
        """Note what takes bands and makes bands: a layer, a trusted module or an end.

        `settings` must be the same in two runs. Of a layer: `input_layouts` and `output_layouts`
        say where its rows are, one entry per tensor.
        """
        if not self._paused:
            given = {"inputs": [self.ref(tensor) for tensor in taken], **settings}
            self._record(TraceStep(None, given, tuple(map(self.ref, made)), self.location))

    def _record(self, step: TraceStep) -> None:
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)

    def ref(self, tensor: Tensor) -> TensorRef:
        """Name a tensor in a way that two runs can be compared by."""
        shape = tuple(tensor.shape)
        if id(tensor) in self._model_tensor_ids:
            return TensorRef(-id(tensor), shape)
        if id(tensor) not in self._numbers:
            self._set_number(tensor, next(self._next_number))
        number = self._numbers[id(tensor)]
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return TensorRef(number, shape)
        with _disable_current_modes():
            return TensorRef(number, shape, str(tensor.tolist()))

    def _as_refs(self, operand: Any) -> Any:
        """Put refs in the place of tensors."""
        if isinstance(operand, Tensor):
            return self.ref(operand)
        if type(operand) in (list, tuple):
            return type(operand)(map(self._as_refs, operand))
        return operand

    def _set_number(self, tensor: Tensor, number: int) -> None:
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note it."""
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # the most frequent question, by far
        kwargs = kwargs or {}
        if self._paused or func.namespace in QUERY_NAMESPACES:
            return self._run(func, args, kwargs)
        if func is torch.ops.aten.clone.default and current_autograd_function() is None:
            copied = self._run(func, args, kwargs)
            self._set_number(copied, self.ref(args[0]).number)
            return copied
        if self.read_only_storages and func._schema.is_mutable:
            self._check_read_only(args[0])
        names = (argument.name for argument in func._schema.arguments)
        operands = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: self._as_refs(operand) for name, operand in operands.items()}
        result = self._run(func, args, kwargs)
        made = tuple(map(self.ref, tensors_in([result])))
        self._record(TraceStep(AS_VIEW.get(func, func), given, made, self.location))
        return result

    def _check_read_only(self, changed: Any) -> None:
        key = changed.untyped_storage()._cdata if isinstance(changed, Tensor) else None
        if key in self.read_only_storages:
            raise UserError(
                f"{self.location}: {self.read_only_storages[key]} is changed in place, but "
                "each rank would change "
                "its own rows only. Change it outside of the model's forward."
            )


def current_user_line() -> str:
    """The innermost line of code that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def current_autograd_function() -> type | None:
    """Return the `autograd.Function` that runs now, unless it is torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.Function.apply.__func__.__code__:  # type: ignore[attr-defined]
            kind: type = frame.f_locals["cls"]
            if not kind.__module__.startswith("torch."):
                return kind
        frame = frame.f_back
    return None


# What a run raises that decides by what a tensor holds.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
# What an attribute of a module may be and a run may change.
CONTAINERS = (dict, list, set)


@final
class ModelSnapshot:
    """A model as it is now: modes, attributes, what these hold, and which buffers there are."""

    def __init__(self, model: nn.Module) -> None:
        modules = [m for module in model.modules() for m in (module, vars(module).get("wrapped"))]
        attributes = [m.__dict__ for m in modules if m is not None]
        held = [v for of in attributes for v in of.values() if isinstance(v, CONTAINERS)]
        self._saved = [(container, _shallow_copy(container)) for container in (*attributes, *held)]

    def restore(self) -> None:
        """Undo what runs have left in the model since."""
        for container, before in self._saved:
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Undo what a run leaves in the model."""
    before = ModelSnapshot(model)
    try:
        yield
    finally:
        before.restore()


def _shallow_copy(container: Any) -> dict[Any, Any] | list[Any] | set[Any]:
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, list) else set(container)


@contextmanager
def use_fake_tensors(model: nn.Module) -> Iterator[None]:
    """Run on fake tensors, without gradients or autocast; restore values and random state."""
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    plain = torch.autocast(dtype_and_device(model)[1].type, enabled=False)
    loud = logging.getLogger("torch._subclasses.fake_tensor")
    level = loud.level
    loud.setLevel(logging.CRITICAL)  # it logs a traceback for what is told in one line below
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with (
            fake,
            plain,
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            _replace_by_fakes(model),
        ):
            yield
    except DATA_DEPENDENT_ERRORS as error:
        raise UserError(
            f"{user_line_of(error)}: control flow or shapes that depend on data can't be planned. "
            "Decide from shapes or configuration instead."
        ) from None
    finally:
        loud.setLevel(level)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


@contextmanager
def _replace_by_fakes(model: nn.Module) -> Iterator[None]:
    """Put fake tensors in the place of a model's own; those on the meta device are of the CPU then.

    Real ones would be faked again by every operation. A model's own constants are on the CPU, and
    could not be joined with tensors on meta.
    """
    made: dict[Tensor, Tensor] = {}  # one for all places where a tensor is used
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in holders:
                for name, tensor in held.items():
                    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                        continue
                    if tensor not in made:
                        made[tensor] = _fake_like(tensor)
                    replaced.append((held, name, tensor))
        for held, name, tensor in replaced:
            held[name] = made[tensor]
        yield
    finally:
        for held, name, tensor in replaced:
            held[name] = tensor


def _fake_like(tensor: Tensor) -> Tensor:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def user_line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARY_FOLDERS)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "model"


def dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return those of a model's parameters; the CPU where they are on the meta device."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            on_meta = parameter.device.type == "meta"
            return parameter.dtype, torch.device("cpu") if on_meta else parameter.device
    return torch.get_default_dtype(), torch.device("cpu")


Model = TypeVar("Model", bound=nn.Module)


def copy_model(model: Model) -> Model:
    """Return a deep copy.

    `copy.deepcopy` alone refuses tensors with a gradient function, which hooks such as
    `weight_norm` leave in their modules until the next forward.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    made = [x for x in attributes if isinstance(x, Tensor) and x.grad_fn is not None]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in made})
