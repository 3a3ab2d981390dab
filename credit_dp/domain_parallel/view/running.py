"""Where a model of the view runs: random numbers, and modules that are called from elsewhere.

While a forward runs, a mode sees every function of torch. It makes random tensors that no field
takes part in the same on all ranks of the domain, and shows hooks of tensors whole gradients.
Activation checkpointing, hooks and functions of the user's that run in the backward pass start the
mode again by `run_in`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from credit_dp.domain_parallel.partition import FIELD_DIMS
from credit_dp.domain_parallel.planning.trace import run_uncompiled
from credit_dp.domain_parallel.rules import RULES
from credit_dp.domain_parallel.transport import message_device
from credit_dp.domain_parallel.view.filling import CREATORS, note_created
from credit_dp.domain_parallel.view.function_rules import (
    RANDOM,
    is_custom_operator,
    read_values,
)
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    check_no_transform,
    global_tensors,
    running_views,
    same_random_numbers,
    whole,
    with_whole_gradients,
    wrap,
)
from credit_dp.errors import UserError
from credit_dp.random_streams import python_random_state, set_python_random_state
from credit_dp.torch_private import (
    SET_GRAD_ENABLED,
    FakeTensor,
    has_old_backward_hooks,
    tree_leaves,
)

# Functions that make random tensors without a field.
FACTORIES = frozenset(
    getattr(torch, name) for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli")
)
DRAWING = FACTORIES | RANDOM
BACKWARD_PASSES = (torch.autograd.backward, Tensor.backward)
PLAIN = (Tensor, nn.Parameter, FakeTensor)
# Where ranks compute the same bits; the last bits of what they compute on GPUs may differ.
SAME_BITS = ("cpu", "meta")
VIEW_ATTRIBUTE = "_global_view"  # of a model, holds its view
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@final
class FunctionBackward:
    """The backward of a user's function, where everything is whole, gradients too.

    It may begin another backward pass, whose gradients of parameters have to be shares.

    Attributes:
        view: that of the model.
        parameters: to which backward passes lead that have begun in it.
    """

    def __init__(self, view: GlobalView) -> None:
        self.view = view
        self.parameters: set[nn.Parameter] = set()

    def begin_pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward pass, which may begin others."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        new = _parameters_below([x for x in tensors if x.requires_grad]) - self.parameters
        self.parameters |= new
        share = self.view.loss_factor / self.view.ranks
        hooks = [
            parameter.register_hook(lambda grad: grad * share)  # type: ignore[no-untyped-call]
            for parameter in new
        ]
        # The mode is off: what needs it in the pass turns it on again.
        token = running_views.set(())
        try:
            return func(*args, **kwargs)
        finally:
            running_views.reset(token)
            self.parameters -= new
            for hook in hooks:
                hook.remove()


def _parameters_below(tensors: Sequence[Tensor]) -> set[nn.Parameter]:
    """Return the parameters to which a backward pass from these tensors leads."""
    nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(x).node for x in tensors]
    seen: set[Any] = set()
    found = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            found.add(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found


running_backward: ContextVar[FunctionBackward | None] = ContextVar("user's backward", default=None)

# Wraps what the mode does with a hook of a plain tensor; set by `autograd`, which needs this file.
RegisterHook = Callable[[GlobalView, Tensor, Any], Any]


@final
class RunningMode(TorchFunctionMode):
    """Sees every function of torch while a model runs."""

    register_hook: RegisterHook | None = None
    gradients: Callable[..., Any] | None = None  # for `autograd.grad`, set like it

    def __init__(self, view: GlobalView) -> None:
        super().__init__()
        self.view = view

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = running_views.get()
        if not views or views[-1] is not self.view:  # another model runs inside of this one
            return func(*args, **kwargs)
        if GlobalTensor in types:
            # Rules call functions of local tensors without this mode.
            check_no_transform()
            result = GlobalTensor.call_function(func, args, kwargs)
            if func in CREATORS:
                note_created(func, args, kwargs, result, self.view)
            return result
        if func is SET_GRAD_ENABLED:
            self.view.has_gradients = args[0]
        if func in DRAWING and not global_tensors((args, kwargs)):
            device = _device_of_call(args, kwargs)
            with same_random_numbers(self.view, device, kwargs.get("generator")):
                return func(*args, **kwargs)
        if is_custom_operator(func) and running_backward.get() is None:
            return with_whole_gradients(func, self.view)(*args, **kwargs)
        if RULES.get(func) is read_values and args and _may_differ(args[0]):
            # As for fields: all ranks read the values of the first.
            shown = (wrap(x, None, self.view) if type(x) in PLAIN else x for x in args)
            return read_values(func, tuple(shown), kwargs)
        if func == SET_DATA and type(args[1]) is GlobalTensor:
            return func(args[0], whole(args[1]))
        running = running_backward.get()
        if func in BACKWARD_PASSES and running is not None:
            return running.begin_pass(func, args, kwargs)
        is_hook = func is Tensor.register_hook and running is None
        if is_hook and RunningMode.register_hook is not None:
            return RunningMode.register_hook(self.view, *args, **kwargs)
        is_grad = func is torch.autograd.grad and running is None
        if is_grad and all(isinstance(x, Tensor) for x in (*args[0], *args[1])):
            assert RunningMode.gradients is not None
            return RunningMode.gradients(self.view, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in CREATORS or len(self.view.created):
            note_created(func, args, kwargs, result, self.view)
        return result


def _may_differ(x: Any) -> bool:
    """Return whether a tensor that is no field may have other last bits on each rank."""
    return type(x) in PLAIN and x.device.type not in SAME_BITS


def _device_of_call(args: Any, kwargs: Any) -> torch.device:
    """Return on which device a function draws: of its tensors, as it says, or torch's default."""
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, Tensor):
            return x.device
    device = kwargs.get("device")
    return torch.get_default_device() if device is None else torch.device(device)


def running_view() -> GlobalView | None:
    """Return the view whose model runs in this thread, if there is one."""
    views = running_views.get()
    return views[-1] if views else None


@contextmanager
def run_in(view: GlobalView) -> Iterator[None]:
    """Run a part of a view's model: functions of torch are seen inside of the context."""
    views = running_views.get()
    token = running_views.set((*views, view))
    try:
        with keep_gradient_mode(view):
            view.has_gradients = torch.is_grad_enabled()
            if view in views:  # its mode is on
                yield
            else:
                with run_uncompiled(), RunningMode(view):
                    yield
    finally:
        running_views.reset(token)


@contextmanager
def keep_gradient_mode(view: GlobalView) -> Iterator[None]:
    """Restore `has_gradients` after code in which torch turns gradients off past the mode."""
    had_gradients = view.has_gradients
    try:
        yield
    finally:
        view.has_gradients = had_gradients


# ---------------------------------------------------------------- modules called from elsewhere


def check_call(module: nn.Module, args: Any) -> None:
    """Check a call of a module in a model of the view, as a hook before its forward.

    Other models may have the module, too, as a default argument `nn.ReLU()` is that of all. Theirs
    is a call that no such model is part of, and so is one of the module by itself.

    Raises:
        UserError: a method of the model calls it past the model's forward, where bands are plain
            tensors, or it has a hook that would be shown gradients of bands.
    """
    if torch.compiler.is_compiling():  # another model: one in the view is not compiled
        return
    if running_views.get():
        if has_old_backward_hooks(module):
            raise UserError(
                f"{type(module).__name__}: register_backward_hook shows gradients of bands. Use "
                "register_full_backward_hook."
            )
        return
    # Without rows, as an embedding of a date, everything is as on one process.
    if not any(isinstance(x, Tensor) and x.ndim >= FIELD_DIMS for x in tree_leaves(args)):
        return
    model = _calling_model()
    if model is not None and model is not module:
        path = next(path for path, each in model.named_modules() if each is module)
        raise UserError(
            f"{path}: called by {type(model).__name__} outside of its forward, where its input "
            "would be a band that it takes for the globe. Call the model, and let its forward call "
            "this."
        )


def _calling_model() -> nn.Module | None:
    """Return the model in the view whose code runs, if only modules of it are called."""
    callers = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            callers.append(module)
            if VIEW_ATTRIBUTE in module.__dict__:
                return module if set(callers) <= set(module.modules()) else None
        frame = frame.f_back
    return None


# ---------------------------------------------------------------- Python's and NumPy's numbers


def is_captured(device: torch.device) -> bool:
    """Return whether work on a device is captured in a CUDA graph now, not carried out."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def same_python_numbers(view: GlobalView, error: UserError | None = None) -> Iterator[None]:
    """Draw from Python's and NumPy's generators what the first rank draws; a collective.

    Args:
        view: of the ranks.
        error: why this rank can't go on.

    Raises:
        UserError: that of this rank, or one that names another rank with an error.
    """
    group = view.manager.domain_group
    # Ranks that are threads have one generator, a dry run has one rank, and a step that draws from
    # these generators can't become a CUDA graph.
    if group is None or is_captured(message_device(group)):
        if error is not None:
            raise error
        yield
        return
    state = python_random_state()
    # An error of one rank travels along: the others would wait for it in the forward.
    words = torch.from_numpy(np.append(state, error is not None)).to(message_device(group))
    everyone = view.manager.transport.all_gather(words)
    failed = everyone[:, -1].nonzero().flatten().tolist()
    if failed:
        raise error or UserError(f"rank {failed[0]} of the domain can't run: see its message.")
    if view.rank:
        set_python_random_state(everyone[0, :-1].cpu().numpy())
    try:
        yield
    finally:
        # The other ranks continue from where they were.
        if view.rank:
            set_python_random_state(state)
