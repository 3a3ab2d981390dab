"""Runs a model on fake tensors and records the operations of code outside sharded layers.

`use_fake_tensors` replaces parameters and buffers by tensors without data, so that a model of any
size runs in seconds. `Trace` records every torch operation that a run dispatches, with its line of
user code; sharded layers appear as a single boundary. `ShapeMemo` reuses results of equal
operations, which the many runs of a plan have in common. `ModelSnapshot` undoes what runs leave
behind in the model.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from types import FrameType
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import _like_tensor_constructors, op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from credit_dp.errors import UserError
from credit_dp.process import no_garbage_collection
from credit_dp.random_streams import python_random_state, set_python_random_state

# Stack frames of torch and of `credit_dp.domain_parallel` are not user code.
LIBRARY_FOLDERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
)


# `reshape` returns a copy or a view depending on strides, and those of a band with one row can
# differ from the globe's. The trace therefore treats both forms of a view as the same operation,
# and a clone as the tensor that it copies.
AS_VIEW: dict[Any, Any] = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}


# Operations that only query a tensor. All others are recorded, also those of unknown namespaces:
# the audit then refuses them.
QUERY_NAMESPACES = ("prim", "profiler")


class TensorRef(NamedTuple):
    """A tensor in a trace, with the shape that it had there.

    `number` counts tensors in order of appearance; it is minus the `id` of a parameter or buffer.
    `value` has the entries of a constant, as text.
    """

    number: int
    shape: tuple[int, ...]
    value: str = ""


@dataclass(frozen=True)
class TraceStep:
    """An operation; or, if `op` is None, a boundary: a layer or the model's input or output."""

    op: torch._ops.OpOverload | None
    arguments: dict[str, Any]
    outputs: tuple[TensorRef, ...]
    location: str  # the module that runs and the line of its code

    @property
    def name(self) -> str:
        """The name of the operation without its overload, e.g. `aten.sum`."""
        return "" if self.op is None else str(self.op.overloadpacket)

    @cached_property
    def inputs(self) -> list[TensorRef]:
        """The tensor arguments, in order."""
        return list(_refs_in(self.arguments.values()))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The arguments that are not tensors."""
        return {key: value for key, value in self.arguments.items() if not any(_refs_in([value]))}


def _refs_in(values: Iterable[Any]) -> Iterator[TensorRef]:
    for value in values:
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, list | tuple):
            yield from _refs_in(value)


class PlanningMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a run that plans."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled while planning, so torch need not check for it."""
        return False


@final
class Trace(PlanningMode):
    """The operations of one run, in order. Two runs of the same code number tensors alike.

    Args:
        model: the model that runs; its parameters and buffers are identified by `id`.
        on_step: called with each step as soon as it is recorded.
        cache: results of other runs under the same `FakeTensorMode`.
    """

    def __init__(
        self,
        model: nn.Module,
        on_step: Callable[[TraceStep], None] | None = None,
        cache: ShapeMemo | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = (cache or ShapeMemo()).run
        self.steps: list[TraceStep] = []
        self._on_step = on_step
        self._model_tensor_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._numbers: dict[int, int] = {}
        self._next_number = count()
        self._alive: list[Tensor] = []  # Python reuses the id of a freed tensor
        self._paused = 0
        self.running_modules: list[str] = []  # outermost first
        # Storages that no operation may write to -> the parameter or buffer that they belong to.
        self.read_only_storages: dict[int, str] = {}
        self._writes: dict[int, list[str]] = {}  # where each storage was written to
        # Inputs of layers with their versions, and how often their storages had been written to.
        self._reads: list[tuple[Tensor, int, int]] = []

    @property
    def location(self) -> str:
        """The module whose code runs now and its current line."""
        return ", ".join([*self.running_modules[-1:], current_user_line()])

    def pause(self) -> None:
        """Stop recording until `resume` has been called as often."""
        self._paused += 1

    def resume(self) -> None:
        """Undo one `pause`."""
        self._paused -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop recording inside the context."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def record_boundary(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **settings: Any
    ) -> None:
        """Record a layer, a trusted module, or the input or output of the model as one step.

        `settings` must be the same in two runs. A layer passes `input_layouts` and
        `output_layouts`, one `RowLayout` or None for each tensor.
        """
        if not self._paused:
            arguments = {"inputs": [self.ref(tensor) for tensor in inputs], **settings}
            for x in inputs:
                if not x.is_inference():
                    self._reads.append((x, x._version, len(self._writes_to(x))))
            self._record(TraceStep(None, arguments, tuple(map(self.ref, outputs)), self.location))

    def _record(self, step: TraceStep) -> None:
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)

    def ref(self, tensor: Tensor) -> TensorRef:
        """Return a reference to a tensor that is comparable between runs."""
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
        """Return an operand with tensors replaced by references."""
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
        """Run and record an operation."""
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # the most frequent call by far: answered without dispatch
        kwargs = kwargs or {}
        if _changes_values_of_first(func) and isinstance(args[0], Tensor):
            self._writes_to(args[0]).append(self.location)
        if self._paused or func.namespace in QUERY_NAMESPACES:
            return self._run(func, args, kwargs)
        if func is torch.ops.aten.clone.default and current_autograd_function() is None:
            clone = self._run(func, args, kwargs)
            self._set_number(clone, self.ref(args[0]).number)
            return clone
        if self.read_only_storages and func._schema.is_mutable:
            self._check_read_only(args[0])
        names = (argument.name for argument in func._schema.arguments)
        operands = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = {name: self._as_refs(operand) for name, operand in operands.items()}
        result = self._run(func, args, kwargs)
        outputs = tuple(map(self.ref, tensors_in([result])))
        self._record(TraceStep(AS_VIEW.get(func, func), arguments, outputs, self.location))
        return result

    def _writes_to(self, x: Tensor) -> list[str]:
        return self._writes.setdefault(x.untyped_storage()._cdata, [])

    def check_changes_are_counted(self) -> None:
        """Check that what layers have read was not changed through `data` afterwards.

        Such changes are not counted by the tensor's version: layers that share rows would not fetch
        them again, and in backward a band would have new values and its halo old ones.

        Raises:
            UserError: names the line of code.
        """
        for x, version, count_before in self._reads:
            writes = self._writes_to(x)[count_before:]
            if writes and x._version == version:
                raise UserError(
                    f"{writes[0]}: data of a tensor is changed in place after a layer has read it, "
                    "but rows on other ranks stay. Change the tensor without data."
                )

    def _check_read_only(self, operand: Any) -> None:
        key = operand.untyped_storage()._cdata if isinstance(operand, Tensor) else None
        if key in self.read_only_storages:
            raise UserError(
                f"{self.location}: {self.read_only_storages[key]} is changed in place, but each "
                "rank would change its own rows only. Change it outside of the model's forward."
            )


@lru_cache(None)
def _changes_values_of_first(func: Any) -> bool:
    """Return whether an operation writes to its first operand; not whether it changes its shape."""
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and first.is_write and torch.Tag.inplace_view not in func.tags


def current_user_line() -> str:
    """Return the innermost line of user code that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_line_of(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(LIBRARY_FOLDERS)]
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else "model"


def is_in_checkpoint() -> bool:
    """Return whether `torch.utils.checkpoint` calls the code that runs, to call it in backward."""
    # Without gradients, as plans run, it only calls the function: no hook tells.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def current_autograd_function() -> type | None:
    """Return the `autograd.Function` of the user that runs now, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.Function.apply.__func__.__code__:  # type: ignore[attr-defined]
            function: type = frame.f_locals["cls"]
            if not function.__module__.startswith("torch."):
                return function
        frame = frame.f_back
    return None


# Errors of fake tensors if code decides by the values of a tensor.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def use_fake_tensors(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Run on fake tensors, without gradients or autocast; restore buffers and random states.

    The value of the context is their mode.
    """
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # Not replaced by fake tensors: an operation in place on nothing else, as `n += 1`, is carried
    # out. Others stay untouched, as autograd may have saved some.
    plain = [(x, x._version, x.detach().clone()) for x in plain_tensors(model)]
    no_autocast = torch.autocast(dtype_and_device(model)[1].type, enabled=False)
    fake_logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = fake_logger.level
    numbers = python_random_state()
    fake_logger.setLevel(
        logging.CRITICAL
    )  # it logs a traceback of the error that is raised in one line below
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with (
            fake,
            # A run makes many small objects, of which few are left. A collection for them walks
            # over all objects of the process, which takes longer than the run.
            no_garbage_collection(),
            no_autocast,
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            _replace_by_fakes(model, fake),
        ):
            yield fake
    except DATA_DEPENDENT_ERRORS as error:
        raise UserError(
            f"{user_line_of(error)}: control flow or shapes that depend on data can't be planned. "
            "Decide from shapes or configuration instead."
        ) from None
    finally:
        fake_logger.setLevel(level)
        if not np.array_equal(python_random_state(), numbers):
            set_python_random_state(numbers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
            for x, version, value in plain:
                if x._version != version:
                    x.copy_(value)


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that modules have as attributes, or in lists and dictionaries of these."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for value in vars(module).values():
            for x in value.values() if isinstance(value, dict) else [value]:
                found |= {id(y): y for y in tensors_in([x]) if type(y) is Tensor}
    known = {id(x) for x in model.buffers()}
    return [x for key, x in found.items() if key not in known and not x.is_inference()]


@contextmanager
def _replace_by_fakes(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Replace parameters and buffers by fake tensors; those on the meta device become CPU ones.

    Every operation would convert real tensors again. Constants in a model's code are on the CPU and
    can't be combined with tensors on the meta device.
    """
    fakes: dict[Tensor, Tensor] = {}  # shared tensors stay shared
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for holder in holders:
                for name, tensor in holder.items():
                    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                        continue
                    if tensor not in fakes:
                        fakes[tensor] = _fake_like(tensor, mode)
                    replaced.append((holder, name, tensor))
        for holder, name, tensor in replaced:
            holder[name] = fakes[tensor]
        yield
    finally:
        for holder, name, tensor in replaced:
            holder[name] = tensor


def _fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    spec = _TensorSpec(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype, device, True)
    fake = FakeTensor(mode, spec.create(), device)
    if isinstance(tensor, nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = True  # so it is an instance of `nn.Parameter`
    return fake


def dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return dtype and device of the first floating-point parameter; CPU instead of meta."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            on_meta = parameter.device.type == "meta"
            return parameter.dtype, torch.device("cpu") if on_meta else parameter.device
    return torch.get_default_dtype(), torch.device("cpu")


# Attributes of modules of these types are saved with their contents, as a run may change them.
CONTAINERS = (dict, list, set)


@final
class ModelSnapshot:
    """A snapshot of a model: modes, attributes, contents of containers, registered buffers.

    Values of tensors are not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [m for module in model.modules() for m in (module, vars(module).get("wrapped"))]
        attributes = [m.__dict__ for m in modules if m is not None]
        containers = [
            v for names in attributes for v in names.values() if isinstance(v, CONTAINERS)
        ]
        self._saved = [
            (container, _shallow_copy(container)) for container in (*attributes, *containers)
        ]

    def restore(self) -> None:
        """Restore the model to the snapshot."""
        for container, before in self._saved:
            if not container and not before:
                continue  # most are dictionaries of hooks, without any
            # Past methods of subclasses, which may forbid changes, as configurations do.
            if isinstance(container, list):
                list.__setitem__(container, slice(None), before)
            elif isinstance(container, set):
                set.clear(container)
                set.update(container, before)
            elif isinstance(before, dict):
                # An ordered dictionary keeps its order beside what it has as a dictionary.
                base = OrderedDict if isinstance(container, OrderedDict) else dict
                base.clear(container)
                if base is dict:
                    dict.update(container, before)
                    continue
                for key, value in before.items():
                    base.__setitem__(container, key, value)


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore the model after the context."""
    snapshot = ModelSnapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


def _shallow_copy(container: Any) -> dict[Any, Any] | list[Any] | set[Any]:
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, list) else set(container)


Model = TypeVar("Model", bound=nn.Module)


def copy_model(model: Model) -> Model:
    """Return a deep copy of a model.

    `copy.deepcopy` alone refuses tensors with a gradient function, which hooks such as
    `weight_norm` leave in their modules until the next forward.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = [x for x in attributes if isinstance(x, Tensor) and x.grad_fn is not None]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in computed})


# Torch's own operations: their results depend on the operands only, so they may be cached.
TORCH_NAMESPACES = ("aten", "prims")
# Except this one: its view may reach beyond the operand.
UNBOUNDED_VIEW = torch.ops.aten.as_strided.default
META = torch.device("meta")


@final
class ShapeMemo:
    """Runs torch operations on tensors without data, only once for equal operands.

    Results are reused only if they are new tensors, views of a fake first operand, or that operand,
    changed in place. Other operations run every time, and so do views and changes on the meta
    device, which are as fast as the cache.

    Attributes:
        mode: that of the fake tensors that run now. A run under another one sets it first; results
            of the runs before are then reused as tensors of this mode.
    """

    def __init__(self) -> None:
        self.mode: FakeTensorMode | None = None
        self._results: dict[Hashable, _CachedResult | None] = {}
        self._changes: set[Hashable] = set()
        self._properties: dict[Any, _Properties] = {}
        self._attributes_of_fakes: dict[Hashable, dict[str, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        first: Any = args[0] if args else None
        signature = func, type(first) is FakeTensor
        properties = self._properties.get(signature)
        if properties is None:
            properties = self._properties[signature] = _properties_of(*signature)
        if not (properties.is_pure or properties.changes_first):
            return func(*args, **kwargs)
        if self.mode is not None and type(first) is not FakeTensor and not _is_fake_mode_active():
            return func(*args, **kwargs)  # values are computed in the middle of a trial run
        try:
            key = (
                func,
                torch.get_default_dtype(),
                _cache_key(args),
                _cache_key((*kwargs.items(),)),
            )
            cached = self._results.get(key)
        except (_UncacheableError, TypeError):  # TypeError: an operand has no hash
            return func(*args, **kwargs)
        if properties.changes_first:
            # It has no data to change. Autograd counts versions of tensors before it gets here.
            if key in self._changes:
                return first
            if properties.runs_on_meta and self._run_on_meta(func, args, kwargs) is not None:
                self._changes.add(key)
                return first
            result = func(*args, **kwargs)
            if result is first:
                self._changes.add(key)
            return result
        if cached is None:
            result = self._run_on_meta(func, args, kwargs) if properties.runs_on_meta else None
            if result is None:
                result = func(*args, **kwargs)
            if key not in self._results:
                self._results[key] = _cacheable_result(result, args, kwargs)
                modes = filter(None, map(_mode_of, tensors_in([result])))
                self.mode = next(modes, self.mode)
            return result
        storage = first.untyped_storage() if cached.is_view else None
        tensors = [spec and self._create(spec, storage) for spec in cached.outputs]
        return tensors[0] if cached.container is None else cached.container(tensors)

    def _create(self, spec: _TensorSpec, storage: torch.UntypedStorage | None) -> Tensor:
        """Return a new tensor, or a view of a storage."""
        data = spec.create(storage)
        return self._fake(self.mode, data, spec.device) if spec.is_fake else data

    def _fake(self, mode: FakeTensorMode | None, data: Tensor, device: torch.device) -> Tensor:
        """Return the fake tensor of a tensor on the meta device.

        All that the constructor of `FakeTensor` computes is the same for all tensors of a mode and
        a device: it does so once, and the others get what it has found.
        """
        attributes = self._attributes_of_fakes.get((mode, device))
        if attributes is None:
            fake = FakeTensor(mode, data, device)
            self._attributes_of_fakes[mode, device] = dict(fake.__dict__)
            return fake
        fake = Tensor._make_subclass(
            FakeTensor, data, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)
        return fake

    def _run_on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors of one device by its meta kernel; None if that can't be.

        A fake tensor finds the kernel, the device and the strides of a result in Python, and takes
        an operation apart that has no kernel of its own: milliseconds instead of microseconds.
        """
        operands: list[Any] = [*tensors_in(args), *tensors_in(kwargs.values())]
        if not all(type(x) is FakeTensor and _is_describable(x) for x in operands):
            return None
        fits = FITS_META_KERNEL.get(func)
        if fits is not None and not all(map(fits, operands)):
            return None
        mode = operands[0].fake_mode if operands else self.mode
        devices = {x.fake_device for x in operands}
        if kwargs.get("device") is not None:
            devices.add(kwargs["device"])
            kwargs = {**kwargs, "device": META}
        elif not operands:
            devices.add(torch.device("cpu"))
            kwargs = {**kwargs, "device": META}
        if mode is None or len(devices) != 1 or META in devices:
            return None
        with torch._C._DisableTorchDispatch():
            try:
                args = tuple(map(_on_meta, args))
                if func is torch.ops.aten.convolution.default:
                    torch._C._select_conv_backend(*args)  # checks sizes; the kernel does not
                result = func(*args, **{k: _on_meta(x) for k, x in kwargs.items()})
            except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
                return None  # with fake operands it works, or fails with a better message
            container = type(result) if isinstance(result, tuple | list) else None
            leaves = [result] if container is None else result
            if not all(x is None or (isinstance(x, Tensor) and _is_describable(x)) for x in leaves):
                return None
        device = devices.pop()
        fakes = [x if x is None else self._fake(mode, x, device) for x in leaves]
        return fakes[0] if container is None else container(fakes)


class _Properties(NamedTuple):
    """What is known of an operation, on a fake or another first operand.

    Attributes:
        is_pure: it only creates new tensors, or views of fake tensors.
        changes_first: it only changes values of its first operand, a fake tensor, and returns it.
        runs_on_meta: its kernel for the meta device alone gives the shapes of fake results.
    """

    is_pure: bool
    changes_first: bool
    runs_on_meta: bool


def _properties_of(func: Any, on_fake: bool) -> _Properties:
    schema = func._schema
    results = [x.alias_info for x in schema.returns]
    is_view = any(alias is not None for alias in results)
    is_torch = func.namespace in TORCH_NAMESPACES
    is_reproducible = (on_fake and func is not UNBOUNDED_VIEW) or not is_view
    is_pure = is_torch and not schema.is_mutable and is_reproducible
    changed = [x.alias_info is not None and x.alias_info.is_write for x in schema.arguments]
    changes_first = (
        is_torch
        and on_fake
        and len(results) == 1
        and is_view
        and changed == [True] + [False] * (len(changed) - 1)
        and torch.Tag.inplace_view not in func.tags  # its strides change
    )
    depends_on_data = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    is_special = func in op_implementations_dict and not is_view
    runs_on_meta = (
        (is_pure or changes_first)
        and not depends_on_data.intersection(func.tags)
        and (not is_special or func in _like_tensor_constructors or func in FITS_META_KERNEL)
    )
    return _Properties(is_pure, changes_first, runs_on_meta)


def _on_meta(value: Any) -> Any:
    """Return an operand with its fake tensors as tensors of the meta device with their storage."""
    if type(value) is FakeTensor:
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        return meta.set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )
    if isinstance(value, list | tuple):
        return type(value)(map(_on_meta, value))
    return value


def _is_fake_mode_active() -> bool:
    key = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(key) is not None


def _is_channels_first(x: Tensor) -> bool:
    """Return whether torch surely does not take the memory of a tensor for `channels_last`."""
    # In that format the last dimension has at least the entries of the channels in between.
    return x.ndim < 3 or x.stride(-1) < x.stride(1) * x.shape[1]


# Operations whose kernel for the meta device gives the results of fake tensors only for some
# operands. The memory format of a convolution's result is that of the device's kernel, which is
# `channels_last` only if that of an operand is. Statistics of a layer norm in half precision have
# another dtype on CPUs. Some that move entries forget `channels_last`, or return a view.
FITS_META_KERNEL: dict[Any, Callable[[Tensor], bool]] = {
    torch.ops.aten.convolution.default: _is_channels_first,
    torch.ops.aten.convolution_backward.default: _is_channels_first,
    torch.ops.aten.native_layer_norm.default: lambda x: x.dtype in (torch.float32, torch.float64),
    torch.ops.aten._unsafe_view.default: lambda x: True,
    torch.ops.aten.reflection_pad2d.default: _is_channels_first,
    torch.ops.aten.replication_pad2d.default: _is_channels_first,
    torch.ops.aten.pixel_shuffle.default: _is_channels_first,
    torch.ops.aten.channel_shuffle.default: lambda x: False,
}


class _UncacheableError(Exception):
    """The result may depend on more of an operand than a cache key contains."""


class _TensorSpec(NamedTuple):
    """An output tensor of an operation: on the meta device, or fake with another device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_fake: bool

    def create(self, storage: torch.UntypedStorage | None = None) -> Tensor:
        """Return a new tensor on the meta device, or a view of `storage`."""
        with torch._C._DisableTorchDispatch():
            if storage is None:
                return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
            data = torch.empty(0, dtype=self.dtype, device=META)
            return data.set_(storage, self.offset, self.shape, self.stride)


class _CachedResult(NamedTuple):
    """The outputs of an operation, in a list or tuple (`container`) unless it returns one tensor.

    `is_view`: the outputs share the storage of the first operand.
    """

    outputs: tuple[_TensorSpec | None, ...]
    container: type | None
    is_view: bool


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in any nested arguments or outputs."""
    if isinstance(tree, Tensor):  # as most are; torch's trees take longer than the layer
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return any nested outputs with a function's result in place of each tensor."""
    return function(tree) if isinstance(tree, Tensor) else tree_map_only(Tensor, function, tree)


def named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what nested outputs hold, by position: `[1]`, `['u']`, or `.u` in a dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # some are dicts, too
        parts = {
            f".{field.name}": getattr(value, field.name, None)
            for field in dataclasses.fields(value)
        }
    elif isinstance(value, Mapping):
        parts = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = {f".{key}": item for key, item in zip(value._fields, value, strict=True)}
    else:
        leaves = tree_leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            yield name, value
            return
        items = value if isinstance(value, (list, tuple)) else leaves
        parts = {f"[{i}]": item for i, item in enumerate(items)}
    for key, part in parts.items():
        yield from named_leaves(part, name + key)


def tensors_in(operands: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the operands of an operation, also those in lists and tuples."""
    for operand in operands:
        if isinstance(operand, Tensor):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from tensors_in(operand)


def _cache_key(value: Any) -> Hashable:
    """Return everything that the shape of a result can depend on.

    Raises:
        _UncacheableError: an operand is a tensor with data or a subclass of `Tensor`.
    """
    value_type = type(value)
    if value_type is tuple or value_type is list:
        return tuple(map(_cache_key, value))
    if not isinstance(value, Tensor):
        return value_type, value  # with the type, as 1, 1.0 and True are equal
    if not _is_dataless(value):
        raise _UncacheableError
    # `.device` of a fake tensor would dispatch to all active modes; `.fake_device` does not.
    device = value.fake_device if isinstance(value, FakeTensor) else value.device
    return value.shape, value.stride(), value.storage_offset(), value.dtype, device


def _is_dataless(x: Any) -> bool:
    """Return whether this is a dense tensor without data: fake or on the meta device."""
    tensor_type = type(x)
    if tensor_type is FakeTensor:
        return x.constant is None and x.layout is torch.strided
    return tensor_type in (Tensor, nn.Parameter) and x.is_meta and x.layout is torch.strided


def _cacheable_result(
    result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _CachedResult | None:
    """Return the cache entry of a result; None if the operation has to run every time."""
    container = type(result) if isinstance(result, tuple | list) else None
    leaves = [result] if container is None else list(result)
    new = [leaf for leaf in leaves if leaf is not None]
    operands = [*tensors_in(args), *tensors_in(kwargs.values())]
    if not new or not all(map(_is_describable, new)) or any(x is y for x in new for y in operands):
        return None
    storages, operand_storages = (
        {x.untyped_storage()._cdata for x in tensors} for tensors in (new, operands)
    )
    is_view = storages == {operands[0].untyped_storage()._cdata} if operands else False
    if is_view and not (operands[0] is args[0] and type(operands[0]) is FakeTensor):
        return None
    if not is_view and (
        len(storages - operand_storages) < len(new) or not all(map(_fills_storage, new))
    ):
        return None  # outputs share storages with each other or an operand
    specs = tuple(leaf if leaf is None else _spec_of(leaf) for leaf in leaves)
    return _CachedResult(specs, container, is_view)


def _mode_of(x: Tensor) -> FakeTensorMode | None:
    mode: FakeTensorMode | None = x.fake_mode if isinstance(x, FakeTensor) else None
    return mode


def _spec_of(x: Tensor) -> _TensorSpec:
    offset, is_fake = int(x.storage_offset()), isinstance(x, FakeTensor)
    return _TensorSpec(tuple(x.shape), x.stride(), offset, x.dtype, x.device, is_fake)


def _is_describable(x: Any) -> bool:
    """Return whether `_TensorSpec` describes this completely."""
    return _is_dataless(x) and not x.is_conj() and not x.is_neg()


def _fills_storage(x: Tensor) -> bool:
    """Return whether this tensor covers its storage."""
    size: int = x.untyped_storage().nbytes()
    return x.storage_offset() == 0 and size == _spec_of(x).create().untyped_storage().nbytes()
