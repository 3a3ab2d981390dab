"""Runs of a model on fake tensors.

`use_fake_tensors` replaces parameters and buffers by tensors without data, so that a model of any
size runs in seconds. `ModelSnapshot` undoes what runs leave behind in the model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import sys
import threading
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import unwrap
from types import FrameType
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.band_tensor.tensor import tensors_in
from credit_dp.domain_parallel.planning.shape_memo import TensorSpec
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
    at_end_of_backward,
    buffers_of,
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
    contextlib.__file__,
)


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


def user_functions() -> dict[Any, Any]:
    """Return the `autograd.Function` types of users by the code of their `forward`."""
    found: list[Any] = []
    bases: list[Any] = [torch.autograd.Function]
    while bases:
        derived = bases.pop().__subclasses__()
        bases += derived
        found += [x for x in derived if not x.__module__.startswith(("torch.", "credit_dp."))]
    return {getattr(unwrap(x.forward), "__code__", None): x for x in found}


def running_function(functions: Mapping[Any, Any]) -> str:
    """Return the name of the `autograd.Function` that runs now; empty if there is none.

    Args:
        functions: by the code of their `forward`, which alone tells where torch calls it from C.
    """
    frame: FrameType | None = sys._getframe(1) if functions else None
    while frame is not None:
        if frame.f_code in functions:
            return str(functions[frame.f_code].__name__)
        frame = frame.f_back
    return ""


# Errors of fake tensors if code decides by the values of a tensor.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def reads_values(error: BaseException) -> bool:
    """Return whether code has read values of a tensor, which fake tensors don't have."""
    # `numpy` and `tolist` raise this error for any subclass of torch's tensor.
    is_about_subclass = "is not supported for tensor subclasses" in str(error)
    return isinstance(error, DATA_DEPENDENT_ERRORS) or is_about_subclass


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
        # Its import takes seconds, and is done where something is compiled.
        """Run compiled functions uncompiled inside of the context."""
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
