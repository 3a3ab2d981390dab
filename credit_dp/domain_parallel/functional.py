"""Torch functions that couple rows, for the code of users' models: they act on the global field.

In an ordinary model `mean`, `interpolate`, `pad` and `roll` are torch's. In a converted model a
domain-parallel layer does the work of each call. This is how a call finds its layer:

1. `attach_context` puts a pair of hooks on every module of a converted model that has code of the
   user's. They push its `ShardingContext` on a stack when the module is called, and pop it.
2. A call takes the innermost context and looks up its layer there, by function and arguments. The
   plan creates these layers; afterwards a call that the plan has not seen is an error.
3. In a backward pass, activation checkpointing may compute a function again without calling any
   module. The module is then looked for on the Python stack (`recomputing_module`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, final
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.layers.pad import DomainParallelPad, DomainParallelRoll
from credit_dp.domain_parallel.layers.reduce import DomainParallelMean
from credit_dp.domain_parallel.layers.resample import (
    AntialiasedUpsample,
    DomainParallelInterpolate,
    DomainParallelUpsample,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    BACKWARD_FRAME,
    backward_pass,
    forward_pre_hooks,
    remove_hooks,
    run_uncompiled,
)

__all__ = ["interpolate", "mean", "pad", "roll"]


LayerFactory = Callable[[DomainParallelManager], RowLayer]


def mean(
    x: Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return `torch.mean` of the global field, the same on every rank if rows are among `dim`.

    Args:
        x: `(..., H_local, W)`.
        dim: dimensions to reduce; all by default.
        keepdim: whether they stay, with one entry each.
        manager: only needed outside of a converted model's modules.
    """
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelMean(dims, keepdim, manager=manager)

    layer = _layer_for_call(f"functional.mean(dim={dim}, keepdim={keepdim})", x, make, manager)
    output: Tensor = torch.mean(x, dims, keepdim) if layer is None else layer(x)
    return output


def interpolate(
    x: Tensor,
    size: int | tuple[int, ...] | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    *,
    antialias: bool = False,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `F.interpolate` of the global field.

    Args:
        x: `(B, C, H_local, W)`, also `(B, C, D, H_local, W)`.
        size: rows and columns of the global result.
        scale_factor: instead of `size`.
        mode: as in torch.
        align_corners: as in torch.
        antialias: as in torch, in the modes `bilinear` and `bicubic`.
        manager: only needed outside of a converted model's modules.
    """

    def make(manager: DomainParallelManager) -> RowLayer:
        # The audit refuses a `size` that is computed from a band's rows. Without a plan the layer
        # itself refuses a `size` that looks like one.
        context = active_context()
        if active_planner() is not None or (context is not None and context.is_planned):
            kind = AntialiasedUpsample if antialias else nn.Upsample
            upsample = kind(size, scale_factor, mode, align_corners)
            return DomainParallelUpsample(upsample, manager=manager)
        return DomainParallelInterpolate(
            size,
            mode,
            scale_factor=scale_factor,
            align_corners=align_corners,
            antialias=antialias,
            manager=manager,
        )

    settings = (
        f"size={size}, scale_factor={scale_factor}, mode={mode}, align={align_corners}, "
        f"antialias={antialias}"
    )
    layer = _layer_for_call(f"functional.interpolate({settings})", x, make, manager)
    if layer is None:
        return F.interpolate(x, size, scale_factor, mode, align_corners, antialias=antialias)
    output: Tensor = layer(x)
    return output


def pad(
    x: Tensor,
    pad: tuple[int, ...],
    mode: str = "constant",
    value: float | None = None,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `F.pad` of the global field; negative widths crop.

    Args:
        x: `(..., H_local, W)`.
        pad: widths in torch's order: west, east, north, south, ...
        mode: as in torch.
        value: as in torch.
        manager: only needed outside of a converted model's modules.
    """
    widths = tuple(pad)

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelPad(widths, mode, value, manager=manager)

    layer = _layer_for_call(
        f"functional.pad(pad={widths}, mode={mode}, value={value})", x, make, manager
    )
    output: Tensor = F.pad(x, widths, mode, value) if layer is None else layer(x)
    return output


def roll(
    x: Tensor,
    shifts: int | tuple[int, ...],
    dims: int | tuple[int, ...],
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `torch.roll` of the global field.

    Args:
        x: `(..., H_local, W)`.
        shifts: number of entries to shift by, one for each of `dims`.
        dims: dimensions to roll.
        manager: only needed outside of a converted model's modules.
    """

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelRoll(shifts, dims, manager=manager)

    layer = _layer_for_call(f"functional.roll(shifts={shifts}, dims={dims})", x, make, manager)
    output: Tensor = torch.roll(x, shifts, dims) if layer is None else layer(x)
    return output


def _layer_for_call(
    call: str, x: Tensor, make: LayerFactory, manager: DomainParallelManager | None
) -> RowLayer | None:
    """Return the layer that does the work of a call; None if torch's function does it."""
    context = active_context()
    planner = active_planner()
    if context is None and manager is None and in_backward() and _live_contexts:
        context = _recomputing_context(call)
    if context is not None and manager in (None, context.manager):
        key = (call, x.ndim)
        if key not in context.layers:
            if planner is None and context.is_planned:
                raise UserError(
                    f"{call}: the plan has not seen this call. Convert with inputs that lead to it."
                )
            context.layers[key] = make(context.manager)
        layer = context.layers[key]
    elif manager is not None:
        if manager.domain_parallel_size == 1:
            return None
        layer = make(manager)
    else:
        return None
    if planner is not None:
        planner.names[layer] = call
    # Without a plan the layer has not heard yet whether it is called on rows.
    elif not layer.is_planned and (x.ndim < FIELD_DIMS or not layer.couples_rows(ROW_DIM, x.ndim)):
        layer.set_rowwise()
    return layer


def _recomputing_context(call: str) -> ShardingContext | None:
    """Return the context of the model that a backward pass recomputes; None for an ordinary one."""
    module = recomputing_module()
    if module is None:
        raise UserError(
            f"{call}: this call is recomputed in a backward pass, by a function that belongs to no "
            "module, so whether its model is sharded is unknown. Pass manager=, or checkpoint a "
            "module instead of a function."
        )
    return next(iter(attached_contexts(module, recursive=False)), None)


# A context variable and not a global: the ranks may be threads of one process.
_context_stack: ContextVar[tuple[ShardingContext, ...]] = ContextVar(
    "sharding contexts of the running models", default=()
)
# Those of compiled code: torch's compiler knows lists but no context variables. Compiled code
# leaves the list empty, as it leaves every context that it enters. In between it may call functions
# that run uncompiled: these find its context here.
_traced_contexts: list[ShardingContext] = []
# Of converted models that this process has run. Weak, so that one that is gone no longer counts.
_live_contexts: WeakSet[ShardingContext] = WeakSet()


@final
class ShardingContext:
    """The state that all calls in the code of one converted model share.

    Attributes:
        manager: the manager that the model was converted with.
        layers: the layers that do the work of its calls, by call and number of dimensions.
        is_planned: whether a plan has seen every call that there may be.
        has_row_tensors: whether a parameter or buffer reads as this rank's rows.
        is_recomputed: whether the model's own code lets backward compute layers again.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.layers: dict[tuple[str, int], RowLayer] = {}
        self.is_planned = False
        self.has_row_tensors = False
        self.is_recomputed = False

    @property
    def is_read(self) -> bool:
        """Whether anything in the model's code asks for its context."""
        return self.has_row_tensors or bool(self.layers)


def active_context() -> ShardingContext | None:
    """Return the context of the innermost converted model whose code runs in this thread."""
    if torch.compiler.is_dynamo_compiling():
        # If there is none, hooks may have run uncompiled before this part of the model.
        return _traced_contexts[-1] if _traced_contexts else _untraced_context()
    stack = _context_stack.get() or _traced_contexts
    return stack[-1] if stack else None


@run_uncompiled
def _untraced_context() -> ShardingContext | None:
    return active_context()


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, and so perhaps a recomputation."""
    # The autograd engine numbers its passes; -1 stands for none.
    return backward_pass() != -1


def recomputing_module() -> nn.Module | None:
    """Return the module whose code a backward pass recomputes; None if the stack has no module.

    A checkpointed function, unlike a module, does not run the hooks that `active_context` needs.
    """
    # Frames beyond torch's entry into the engine belong to the caller of backward(), who may be in
    # another module.
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != BACKWARD_FRAME:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and is_user_module(module):
            return module
        frame = frame.f_back
    return None


class _ContextHook:
    """A hook that knows its context; as a closure it would be shared by copies of the model."""

    def __init__(self, context: ShardingContext) -> None:
        self.context = context


@final
class _EnterContext(_ContextHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_dynamo_compiling():
            if self.context.is_read:
                _traced_contexts.append(self.context)
            return
        _live_contexts.add(self.context)
        _context_stack.set((*_context_stack.get(), self.context))


@final
class _LeaveContext(_ContextHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            if self.context.is_read:
                _traced_contexts.pop()
            return
        _context_stack.set(_context_stack.get()[:-1])


def is_user_module(module: nn.Module) -> bool:
    """Return whether a module's code is neither torch's nor a domain-parallel layer's."""
    return not type(module).__module__.startswith(("torch.", f"{__package__}.layers."))


def attach_context(model: nn.Module, context: ShardingContext) -> None:
    """Make `active_context()` return `context` while any of the model's user modules runs.

    Every user module gets the hooks, not only the outermost: checkpointing recomputes a module
    without calling those around it.
    """
    for module in model.modules():
        if is_user_module(module) and not attached_contexts(module, recursive=False):
            # Entered before the module's other hooks, and left even if its forward fails.
            module.register_forward_pre_hook(_EnterContext(context), prepend=True)
            module.register_forward_hook(_LeaveContext(context), always_call=True)


def attached_contexts(model: nn.Module, recursive: bool = True) -> list[ShardingContext]:
    """Return the contexts that `attach_context` has put on a module and on its submodules."""
    hooks: list[Any] = [
        hook
        for module in (model.modules() if recursive else [model])
        for hook in forward_pre_hooks(module).values()
    ]
    return list(dict.fromkeys(hook.context for hook in hooks if isinstance(hook, _EnterContext)))


def detach_context(model: nn.Module, context: ShardingContext) -> None:
    """Undo `attach_context`."""
    for module in model.modules():
        remove_hooks(module, lambda x: isinstance(x, _ContextHook) and x.context is context)


def leave_context(context: ShardingContext) -> None:
    """End a context whose hooks were detached while its model runs."""
    if active_context() is context:
        _context_stack.set(_context_stack.get()[:-1])
