"""What the package uses of torch beyond its documented interface: all of it, and nothing else.

A new release of torch may change any of it without notice. `tests/test_torch_private.py` uses each
and says in its name what would break.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._compile import _disable_dynamo as run_uncompiled
from torch._ops import OpOverload
from torch._subclasses.fake_impls import _like_tensor_constructors as LIKE_CONSTRUCTORS
from torch._subclasses.fake_impls import op_implementations_dict as FAKE_IMPLEMENTATIONS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim.lr_scheduler import LambdaLR

__all__ = [
    "DataDependentOutputException",
    "DropoutNd",
    "DynamicOutputShapeException",
    "FAKE_IMPLEMENTATIONS",
    "FakeTensor",
    "FakeTensorMode",
    "LIKE_CONSTRUCTORS",
    "OpOverload",
    "UnsupportedOperatorException",
    "disable_current_modes",
    "run_uncompiled",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# ---------------------------------------------------------------- modes


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of this thread, without the import of torch's compiler at the first."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeModeOfThread(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors in a thread that may end before the process does.

    On a machine without a GPU, builds of torch for GPUs replace the driver by an object that ends
    with the thread that has entered a mode. What asks the driver later, as the first backward pass
    does, would crash. So the driver stays, which only fake tensors on a GPU would call.
    """

    @property
    def avoid_device_init(self) -> bool:
        return False


def new_fake_mode(**settings: Any) -> FakeTensorMode:
    """Return a mode of fake tensors for this thread, with torch's settings."""
    is_main = threading.current_thread() is threading.main_thread()
    kind = FakeTensorMode if is_main or torch.cuda.is_available() else FakeModeOfThread
    return kind(**settings)


def disable_torch_dispatch() -> AbstractContextManager[None]:
    """Return a context in which no mode and no subclass sees operations, `FakeTensor` included."""
    return torch._C._DisableTorchDispatch()


def disable_torch_function() -> AbstractContextManager[None]:
    """Return a context in which no mode and no subclass sees calls of torch's functions."""
    return torch._C.DisableTorchFunction()


def is_dispatch_mode_active() -> bool:
    """Return whether a dispatch mode sees the operations of this thread."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_function_mode_active() -> bool:
    """Return whether a `TorchFunctionMode` sees the functions that this thread calls."""
    return bool(torch._C._len_torch_function_stack())


def is_fake_mode_active() -> bool:
    """Return whether a `FakeTensorMode` sees the operations of this thread."""
    key = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(key) is not None


# Whether a transform of `torch.func` runs.
is_transform_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_forward_gradient_active() -> bool:
    """Return whether gradients are computed in forward mode, as by `torch.func.jvp`."""
    return torch.autograd.forward_ad._current_level >= 0


# ---------------------------------------------------------------- tensors

# Whether two tensors share a storage; those without one do not.
is_alias: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def version_of(x: Tensor) -> int:
    """Return how often a tensor and those that share its memory were written to."""
    return x._version


def is_view(x: Tensor) -> bool:
    """Return whether autograd takes a tensor for a view of another one."""
    return x._is_view()


def gradient_hooks(x: Tensor) -> dict[int, Any]:
    """Return the hooks of a tensor's gradient, in the order in which they run."""
    return x._backward_hooks or {}


# Returns a tensor of a subclass that has a shape, but no memory.
new_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
# `__torch_function__` of a subclass that torch's functions take for any tensor.
DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


def change_own_shape(func: Any, args: Any, kwargs: Any) -> None:
    """Let a wrapper's shape and strides change as an operator in place says, with no memory."""
    # As `return_and_correct_aliasing` of torch does it.
    in_meta = torch._C._meta_in_tls_dispatch_include()
    with no_dispatch(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Meta, False):
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(in_meta)


def new_fake(data: Tensor, device: torch.device, attributes: dict[str, Any]) -> FakeTensor:
    """Return the fake tensor of a meta tensor, with the attributes of another one."""
    # What the constructor of `FakeTensor` does, which computes the attributes each time.
    fake = Tensor._make_subclass(
        FakeTensor, data, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(attributes)
    return fake


def show_as_parameter(fake: Tensor) -> None:
    """Let `isinstance` take a tensor for an `nn.Parameter`."""
    fake._is_param = True


FAKE_LOGGER = "torch._subclasses.fake_tensor"  # logs a traceback of what fake tensors can't do


# ---------------------------------------------------------------- operators


def is_composite(func: Any) -> bool:
    """Return whether torch computes an operator by others, also where autograd is off."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def schema_of(func: Any) -> Any:
    """Return the arguments and results of an operator; None if this is none."""
    return getattr(func, "_schema", None)


def operator_of(func: Any) -> Any:
    """Return the operator of what `torch.library.custom_op` returns; others as they are."""
    return getattr(func, "_opoverload", func)


def check_convolution(*args: Any) -> None:
    """Check sizes of a convolution on the meta device, whose kernel does not."""
    torch._C._select_conv_backend(*args)


# On lists of tensors, in one kernel.
foreach_add_: Any = torch._foreach_add_
foreach_lerp: Any = torch._foreach_lerp
foreach_lerp_: Any = torch._foreach_lerp_
foreach_mul_: Any = torch._foreach_mul_
foreach_sign_: Any = torch._foreach_sign_


# ---------------------------------------------------------------- modules

# All that a module holds in dictionaries: a module that has another one's is it, by another class.
MODULE_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's own parameters by name; what is put there is one, whatever its type."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's own buffers by name; what is put there is one, whatever its type."""
    return module._buffers


def replace_flat_weights(
    module: nn.RNNBase, replacements: Mapping[int, Tensor]
) -> Callable[[], None]:
    """Replace weights where a recurrent layer keeps them a second time; return what undoes it.

    Otherwise it would find that its weights have changed, and copy them anew at each call.
    """
    names = ("_flat_weights", "_flat_weight_refs")
    before = {name: module.__dict__[name] for name in names}
    weights = [replacements.get(id(x), x) for x in module._flat_weights]
    refs = [None if x is None else weakref.ref(x) for x in weights]
    module.__dict__.update(zip(names, (weights, refs), strict=True))
    return lambda: module.__dict__.update(before)


def children_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's children by name; the same one may have several."""
    return module._modules


def all_modules(module: nn.Module) -> list[nn.Module]:
    """Return a module and all in it, in the order of `modules`, which takes longer."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting += [child for child in reversed(each._modules.values()) if child is not None]
    return list(found)


def forward_hooks(module: nn.Module) -> OrderedDict[int, Any]:
    """Return the hooks after a module's forward, in the order in which they run."""
    return cast("OrderedDict[int, Any]", module._forward_hooks)


def forward_pre_hooks(module: nn.Module) -> OrderedDict[int, Any]:
    """Return the hooks before a module's forward, in the order in which they run."""
    return cast("OrderedDict[int, Any]", module._forward_pre_hooks)


def takes_kwargs(module: nn.Module, key: int) -> bool:
    """Return whether a hook before a module's forward gets keyword arguments, and returns them."""
    return key in module._forward_pre_hooks_with_kwargs


def takes_kwargs_after(module: nn.Module, key: int) -> bool:
    """Return whether a hook after a module's forward gets keyword arguments."""
    return key in module._forward_hooks_with_kwargs


def remove_hooks(
    module: nn.Module, is_removed: Callable[[Any], bool], at_most: int | None = None
) -> None:
    """Remove hooks before and after a module's forward, the first ones of each if not all."""
    # Not by their handles: those of a copied model would be the original's.
    holders: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
    for hooks in holders:
        for key in [key for key, hook in hooks.items() if is_removed(hook)][:at_most]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that its call runs."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks that see gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def share_kind_of_backward_hooks(module: nn.Module, other: nn.Module) -> None:
    """Let a module with the hooks of another one call them as that one does."""
    module._is_full_backward_hook = other._is_full_backward_hook


def padding_widths(conv: Any) -> tuple[int, ...]:
    """Return the padding of a convolution in the order of `F.pad`: west, east, north, south, ..."""
    return tuple(conv._reversed_padding_repeated_twice)


def apply_to_tensors(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> None:
    """Put what a function makes of each parameter and buffer in its place, as `to` does."""
    module._apply(function, recurse)  # type: ignore[no-untyped-call]


class MovedModule(nn.Module):
    """A module that decides what `to`, `half` and the like do to it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.move(lambda: super(MovedModule, self)._apply(fn, recurse))  # type: ignore[no-untyped-call]
        return self

    def move(self, apply: Callable[[], object]) -> None:
        """Move or cast the module, which `apply` does as for any other one."""
        apply()


CALL_ATTRIBUTE = "_call_impl"  # of a module: what its `__call__` calls, hooks and forward


def call_with_hooks(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the forward and the hooks of a module whose `CALL_ATTRIBUTE` is set."""
    return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- autograd


def backward_pass() -> int:
    """Return the number of the backward pass that this thread runs; -1 if it runs none."""
    return torch._C._current_graph_task_id()


def are_saved_tensors_seen() -> bool:
    """Return whether `torch.autograd.graph.saved_tensors_hooks` see what is saved for backward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass ends that this thread runs; if it fails, drop it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def next_node_number() -> int:
    """Return the number that the next node of the graph gets in this thread."""
    return torch._C._autograd._get_sequence_nr()


def running_node_number() -> int:
    """Return the number of the node whose backward this thread runs; -1 if it runs none."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def is_profiling() -> bool:
    """Return whether a profiler of torch records."""
    return torch.autograd.profiler._is_profiler_enabled


# ---------------------------------------------------------------- compiler

COMPILER = "torch._dynamo"  # the module, which takes seconds to import


def is_compiler_imported() -> bool:
    """Return whether something may be compiled in this process: only then torch has imported it."""
    return COMPILER in sys.modules


def never_compile(function: _Function) -> _Function:
    """Return a function that torch's compiler does not trace, nor those that it calls."""
    # What `torch.compiler.disable` does, without its import, and without its cost in each call.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def constant_when_compiled(method: _Function) -> _Function:
    """Let torch's compiler call a method while it traces, and take the result for a constant.

    The result is None, a number or a string. Compiled code is used again as long as the arguments
    are the same, and does not see what else the method depends on.
    """
    # What `torch.compiler.assume_constant_result` does; to import that takes a second.
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def compile_backward_without_autocast() -> None:
    """Let compiled backward passes compute in the dtypes of an uncompiled step."""
    from torch._functorch import config

    config.backward_pass_autocast = "off"


# ---------------------------------------------------------------- distributed


def cpu_backend(group: ProcessGroup) -> Any:
    """Return what sends messages between CPUs in a process group."""
    return group._get_backend(torch.device("cpu"))


def timeout_of(group: ProcessGroup) -> float:
    """Return the seconds that messages between CPUs may take in a process group."""
    return float(cpu_backend(group).options._timeout.total_seconds())


def gloo_options(group: ProcessGroup, timeout: timedelta) -> Any:
    """Return options of gloo with the sockets of another group; None if torch has none of these."""
    devices = getattr(getattr(cpu_backend(group), "options", None), "_devices", None)
    if not devices:
        return None
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = devices
    options._timeout = timeout
    return options


def never_measure(model: nn.parallel.DistributedDataParallel) -> None:
    """Let DDP not measure forward passes, as it does once in a hundred."""
    model._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- optimization


def set_schedule(schedule: LambdaLR, step: int, rates: Sequence[float]) -> None:
    """Set a schedule of learning rates to a step at which it has these rates."""
    position = {"last_epoch": step, "_step_count": step + 1, "_last_lr": list(rates)}
    schedule.load_state_dict({**schedule.state_dict(), **position})
