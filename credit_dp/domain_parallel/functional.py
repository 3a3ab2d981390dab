"""Torch's functions that mix rows, for a model's own code: they act on the whole globe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.layers.pad import DomainParallelPad, DomainParallelRoll
from credit_dp.domain_parallel.layers.reduce import DomainParallelMean
from credit_dp.domain_parallel.layers.resample import (
    DomainParallelInterpolate,
    DomainParallelUpsample,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.domain_parallel.planning.planner import active_planner
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.layers.base import RowLayer

__all__ = ["interpolate", "mean", "pad", "roll"]


_context_stack: ContextVar[tuple[ShardingContext, ...]] = ContextVar(
    "converted models that run", default=()
)
_live_contexts: WeakSet[ShardingContext] = WeakSet()


@final
class ShardingContext:
    """One converted model, as the code of its modules finds it.

    `layers` are those that `functional` made for its calls, by call; `planned` says whether these
    are all there may be.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.layers: dict[tuple[str, int], RowLayer] = {}
        self.planned = False


def active_context() -> ShardingContext | None:
    """Return the converted model whose code runs in this thread, the innermost one."""
    stack = _context_stack.get()
    return stack[-1] if stack else None


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, and so maybe a recomputation."""
    return torch._C._current_graph_task_id() != -1


def has_live_contexts() -> bool:
    """Return whether this process has run a converted model that is still there."""
    return bool(_live_contexts)


def recomputing_module() -> nn.Module | None:
    """Return the module whose code a backward pass computes again, as far as its calls tell.

    A checkpointed function, unlike a module, runs none of the hooks that `running` relies on.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "_engine_run_backward":
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and is_user_module(module):
            return module
        frame = frame.f_back
    return None


class _ContextHook:
    def __init__(self, model: ShardingContext) -> None:
        self.context = model


@final
class _EnterContext(_ContextHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _live_contexts.add(self.context)
        _context_stack.set((*_context_stack.get(), self.context))


@final
class _LeaveContext(_ContextHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        _context_stack.set(_context_stack.get()[:-1])


def is_user_module(module: nn.Module) -> bool:
    """Return whether a module has code that is neither torch's nor a sharded layer's."""
    return not type(module).__module__.startswith(("torch.", f"{__package__}.layers."))


def attach_context(model: nn.Module, current: ShardingContext) -> None:
    """Make `running()` return `current` while any module of the model with code of its own runs.

    Every such module says so itself, because a checkpointed one is run again without the model.
    """
    for module in model.modules():
        if is_user_module(module) and not attached_contexts(module, inside=False):
            module.register_forward_pre_hook(_EnterContext(current), prepend=True)
            module.register_forward_hook(_LeaveContext(current), always_call=True)


def attached_contexts(model: nn.Module, inside: bool = True) -> list[ShardingContext]:
    """Return what `announce` has put on a module, and on those inside."""
    hooks: list[Any] = [
        hook
        for module in (model.modules() if inside else [model])
        for hook in module._forward_pre_hooks.values()
    ]
    return list(dict.fromkeys(hook.context for hook in hooks if isinstance(hook, _EnterContext)))


def detach_context(model: nn.Module, current: ShardingContext) -> None:
    """Undo `announce`."""
    for module in model.modules():
        holders: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
        for hooks in holders:
            for key, hook in list(hooks.items()):
                if isinstance(hook, _ContextHook) and hook.context is current:
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)


LayerFactory = Callable[[DomainParallelManager], RowLayer]


def mean(
    x: Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return `torch.mean` of the whole globe, the same on every rank if rows are among `dim`.

    Args:
        x: `(..., H_local, W)`.
        dim: dimensions to reduce; all by default.
        keepdim: whether they stay, with one entry each.
        manager: only needed where no module of a converted model runs.
    """
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelMean(dims, keepdim, manager=manager)

    layer = _layer_for_call(f"functional.mean(dim={dim}, keepdim={keepdim})", x, make, manager)
    made: Tensor = torch.mean(x, dims, keepdim) if layer is None else layer(x)
    return made


def interpolate(
    x: Tensor,
    size: int | tuple[int, ...] | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `F.interpolate` of the whole globe.

    Args:
        x: `(B, C, H_local, W)`, also `(B, C, D, H_local, W)`.
        size: of the whole globe's result.
        scale_factor: instead of `size`.
        mode: as in torch, without antialias.
        align_corners: as in torch.
        manager: only needed where no module of a converted model runs.
    """

    def make(manager: DomainParallelManager) -> RowLayer:
        if _is_planned():  # then the audit has seen that `size` is not a band's
            upsample = nn.Upsample(size, scale_factor, mode, align_corners)
            return DomainParallelUpsample(upsample, manager=manager)
        return DomainParallelInterpolate(
            size, mode, scale_factor=scale_factor, align_corners=align_corners, manager=manager
        )

    settings = f"size={size}, scale_factor={scale_factor}, mode={mode}, align={align_corners}"
    layer = _layer_for_call(f"functional.interpolate({settings})", x, make, manager)
    if layer is None:
        return F.interpolate(x, size, scale_factor, mode, align_corners)
    made: Tensor = layer(x)
    return made


def pad(
    x: Tensor,
    pad: tuple[int, ...],
    mode: str = "constant",
    value: float | None = None,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `F.pad` of the whole globe; negative widths crop.

    Args:
        x: `(..., H_local, W)`.
        pad: widths in torch's order: west, east, north, south, ...
        mode: as in torch.
        value: as in torch.
        manager: only needed where no module of a converted model runs.
    """
    widths = tuple(pad)

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelPad(widths, mode, value, manager=manager)

    layer = _layer_for_call(
        f"functional.pad(pad={widths}, mode={mode}, value={value})", x, make, manager
    )
    made: Tensor = F.pad(x, widths, mode, value) if layer is None else layer(x)
    return made


def roll(
    x: Tensor,
    shifts: int | tuple[int, ...],
    dims: int | tuple[int, ...],
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `torch.roll` of the whole globe.

    Args:
        x: `(..., H_local, W)`.
        shifts: places to move by, one for each of `dims`.
        dims: dimensions to roll.
        manager: only needed where no module of a converted model runs.
    """

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelRoll(shifts, dims, manager=manager)

    layer = _layer_for_call(f"functional.roll(shifts={shifts}, dims={dims})", x, make, manager)
    made: Tensor = torch.roll(x, shifts, dims) if layer is None else layer(x)
    return made


def _is_planned() -> bool:
    current = active_context()
    return active_planner() is not None or (current is not None and current.planned)


def _layer_for_call(
    call: str, x: Tensor, make: LayerFactory, manager: DomainParallelManager | None
) -> RowLayer | None:
    """Return the layer that does a call; None where it is torch's own."""
    current, planner = active_context(), active_planner()
    if current is None and manager is None and in_backward() and has_live_contexts():
        current = _recomputing_context(call)
    if current is not None and manager in (None, current.manager):
        key = (call, x.ndim)
        if key not in current.layers:
            if planner is None and current.planned:
                raise UserError(
                    f"{call}: the plan has not seen this call. Convert with inputs that lead to it."
                )
            current.layers[key] = make(current.manager)
        layer = current.layers[key]
    elif manager is not None:
        if manager.domain_parallel_size == 1:
            return None
        layer = make(manager)
    else:
        return None
    if planner is not None:
        planner.names[layer] = call
    elif not layer.is_planned and (x.ndim < FIELD_DIMS or not layer.couples_rows(ROW_DIM, x.ndim)):
        layer.set_rowwise()
    return layer


def _recomputing_context(call: str) -> ShardingContext | None:
    """Return the converted model whose code is computed again in backward; None for a plain one."""
    module = recomputing_module()
    if module is None:
        raise UserError(
            f"{call}: is computed again in a backward pass, where it can't be known whether its "
            "model is sharded. Pass manager=, or checkpoint a module instead of a function."
        )
    return next(iter(attached_contexts(module, inside=False)), None)
