"""Runs a model on fake tensors and records the operations of code outside sharded layers.

`use_fake_tensors` replaces parameters and buffers by tensors without data, so that a model of any
size runs in seconds. `Trace` records every torch operation that a run dispatches, with its line of
user code; sharded layers appear as a single boundary. `ModelSnapshot` undoes what runs leave behind
in the model.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import sys
import threading
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from inspect import unwrap
from itertools import count
from types import FrameType
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.planning.shape_memo import ShapeMemo, TensorSpec, tensors_in
from credit_dp.errors import UserError
from credit_dp.process import no_garbage_collection
from credit_dp.random_streams import python_random_state, set_python_random_state
from credit_dp.torch_private import (
    FAKE_LOGGER,
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    at_end_of_backward,
    buffers_of,
    disable_current_modes,
    is_compiler_imported,
    new_fake_mode,
    parameters_of,
    schema_of,
    show_as_parameter,
    tree_leaves,
    tree_map_only,
    version_of,
)
from credit_dp.torch_private import run_uncompiled as disable_compiler

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

    op: OpOverload | None
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


class PlanningMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a run that plans."""


# Operations that allocate memory without touching it; like views, they start no kernel.
ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}
# Reads of one number, which has been computed.
NUMBERS = {
    torch.ops.aten.item,
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.is_nonzero,
}
# Views that their schema does not declare as such.
UNDECLARED_VIEWS = {torch.ops.aten._unsafe_view}
HOST_NAMESPACES = ("prim", "profiler")  # of questions to torch, such as for a tensor's device


@cache
def launches_kernel(func: Any) -> bool:
    """Return whether an operation starts a kernel: it is no view, allocation or read of a number.

    One of another package counts as one kernel, however many it starts.
    """
    if func.namespace in HOST_NAMESPACES or torch.Tag.inplace_view in func.tags:
        return False
    if func.overloadpacket in ALLOCATIONS | UNDECLARED_VIEWS | NUMBERS:
        return False
    aliases = [result.alias_info for result in schema_of(func).returns]
    return all(alias is None or alias.is_write for alias in aliases)


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
                    self._reads.append((x, version_of(x), len(self._writes_to(x))))
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
        with disable_current_modes():
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
        if self.read_only_storages and schema_of(func).is_mutable:
            self._check_read_only(args[0])
        names = (argument.name for argument in schema_of(func).arguments)
        operands = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = {name: self._as_refs(operand) for name, operand in operands.items()}
        result = self._run(func, args, kwargs)
        outputs = tuple(map(self.ref, tensors_in([result])))
        self._record(TraceStep(AS_VIEW.get(func, func), arguments, outputs, self.location))
        return result

    def _writes_to(self, x: Tensor) -> list[str]:
        return self._writes.setdefault(id(x.untyped_storage()), [])

    def check_changes_are_counted(self) -> None:
        """Check that what layers have read was not changed through `data` afterwards.

        Such changes are not counted by the tensor's version: layers that share rows would not fetch
        them again, and in backward a band would have new values and its halo old ones.

        Raises:
            UserError: names the line of code.
        """
        for x, version, count_before in self._reads:
            writes = self._writes_to(x)[count_before:]
            if writes and version_of(x) == version:
                raise UserError(
                    f"{writes[0]}: data of a tensor is changed in place after a layer has read it, "
                    "but rows on other ranks stay. Change the tensor without data."
                )

    def _check_read_only(self, operand: Any) -> None:
        key = id(operand.untyped_storage()) if isinstance(operand, Tensor) else None
        if key in self.read_only_storages:
            raise UserError(
                f"{self.location}: {self.read_only_storages[key]} is changed in place, but each "
                "rank would change its own rows only. Change it outside of the model's forward."
            )


@lru_cache(None)
def _changes_values_of_first(func: Any) -> bool:
    """Return whether an operation writes to its first operand; not whether it changes its shape."""
    first = schema_of(func).arguments[0].alias_info if schema_of(func).arguments else None
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


def functions_of_users() -> list[Any]:
    """Return every `autograd.Function` that is defined in this process, except for torch's own."""
    found: list[Any] = []
    bases: list[Any] = [torch.autograd.Function]
    while bases:
        derived = bases.pop().__subclasses__()
        bases += derived
        found += [function for function in derived if not function.__module__.startswith("torch.")]
    return found


def current_autograd_function() -> type | None:
    """Return the `autograd.Function` of the user that runs now, if any."""
    # Where torch calls `forward` from C, its code alone tells.
    functions = {getattr(unwrap(x.forward), "__code__", None): x for x in functions_of_users()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in functions:
            function: type = functions[frame.f_code]
            return function
        frame = frame.f_back
    return None


# Errors of fake tensors if code decides by the values of a tensor.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def reads_values(error: BaseException) -> bool:
    """Return whether code has read values of a tensor, which fake tensors don't have."""
    # `numpy` and `tolist` raise this error for any subclass of torch's tensor.
    is_of_subclass = "is not supported for tensor subclasses" in str(error)
    return isinstance(error, DATA_DEPENDENT_ERRORS) or is_of_subclass


@disable_compiler  # torch changes its stance in no step that is compiled, as backward may be
def _close(running: ExitStack) -> None:
    running.close()


@final
class UncompiledRuns:
    """Runs what `torch.compile` has compiled as it is written, while any thread needs that.

    torch has one stance for all threads of a process: the first one sets it, the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._stance = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run compiled functions uncompiled inside of the context."""
        # Its import takes seconds, and is done where something is compiled.
        if not is_compiler_imported():
            yield
            return
        with self._lock:
            if not self._threads:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._stance.close()

    def until_backward_ends(self) -> None:
        """Run compiled functions uncompiled until the backward pass of this thread ends or fails.

        It may compute a part of the model again, with functions that the model has compiled.
        """
        if is_compiler_imported():
            self._until_backward_ends()

    @disable_compiler
    def _until_backward_ends(self) -> None:
        running = ExitStack()
        running.enter_context(self())
        end = partial(_close, running)
        weakref.finalize(end, _close, running)  # a pass that fails only drops it
        at_end_of_backward(end)


run_uncompiled = UncompiledRuns()


@contextmanager
def use_fake_tensors(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Run on fake tensors, without gradients or autocast; restore buffers and random states.

    The value of the context is their mode.
    """
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # Not replaced by fake tensors: an operation in place on nothing else, as `n += 1`, is carried
    # out. Others stay untouched, as autograd may have saved some.
    plain = [(x, version_of(x), x.detach().clone()) for x in plain_tensors(model)]
    no_autocast = torch.autocast(dtype_and_device(model)[1].type, enabled=False)
    fake_logger = logging.getLogger(FAKE_LOGGER)
    level = fake_logger.level
    numbers = python_random_state()
    # It logs a traceback of an error that is raised in one line below.
    fake_logger.setLevel(logging.CRITICAL)
    try:
        fake = new_fake_mode(allow_non_fake_inputs=True)
        with (
            run_uncompiled(),
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
    except Exception as error:  # user code may raise anything
        if not reads_values(error):
            raise
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
                if version_of(x) != version:
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
            holders: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
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
    spec = TensorSpec(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype, device, True)
    fake = FakeTensor(mode, spec.create(), device)
    if isinstance(tensor, nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
        show_as_parameter(fake)
    return fake


def dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return the real dtype and the device of the first float or complex parameter.

    The device is the CPU instead of meta.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            on_meta = parameter.device.type == "meta"
            device = torch.device("cpu") if on_meta else parameter.device
            return parameter.dtype.to_real(), device
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
