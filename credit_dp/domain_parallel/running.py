"""Which converted model runs right now: what its own code calls has to know its ranks."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final
from weakref import WeakSet

import torch
from torch import nn

from credit_dp.domain_parallel.manager import DomainParallelManager

if TYPE_CHECKING:
    from credit_dp.domain_parallel.layers.row_layer import RowLayer

_stack: ContextVar[tuple[Running, ...]] = ContextVar("converted models that run", default=())
_alive: WeakSet[Running] = WeakSet()


@final
class Running:
    """One converted model, as the code of its modules finds it.

    `layers` are those that `functional` made for its calls, by call; `planned` says whether these
    are all there may be.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.layers: dict[tuple[str, int], RowLayer] = {}
        self.planned = False


def running() -> Running | None:
    """Return the converted model whose code runs in this thread, the innermost one."""
    stack = _stack.get()
    return stack[-1] if stack else None


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, and so maybe a recomputation."""
    return torch._C._current_graph_task_id() != -1


def any_converted() -> bool:
    """Return whether this process has run a converted model that is still there."""
    return bool(_alive)


def recomputed() -> nn.Module | None:
    """Return the module whose code a backward pass computes again, as far as its calls tell.

    A checkpointed function, unlike a module, runs none of the hooks that `running` relies on.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "_engine_run_backward":
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and is_own(module):
            return module
        frame = frame.f_back
    return None


class _Hook:
    def __init__(self, model: Running) -> None:
        self.model = model


@final
class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _alive.add(self.model)
        _stack.set((*_stack.get(), self.model))


@final
class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        _stack.set(_stack.get()[:-1])


def is_own(module: nn.Module) -> bool:
    """Return whether a module has code that is neither torch's nor a sharded layer's."""
    return not type(module).__module__.startswith(("torch.", f"{__package__}.layers."))


def announce(model: nn.Module, current: Running) -> None:
    """Make `running()` return `current` while any module of the model with code of its own runs.

    Every such module says so itself, because a checkpointed one is run again without the model.
    """
    for module in model.modules():
        if is_own(module) and not announced(module, inside=False):
            module.register_forward_pre_hook(_Enter(current), prepend=True)
            module.register_forward_hook(_Leave(current), always_call=True)


def announced(model: nn.Module, inside: bool = True) -> list[Running]:
    """Return what `announce` has put on a module, and on those inside."""
    hooks: list[Any] = [
        hook
        for module in (model.modules() if inside else [model])
        for hook in module._forward_pre_hooks.values()
    ]
    return list(dict.fromkeys(hook.model for hook in hooks if isinstance(hook, _Enter)))


def withdraw(model: nn.Module, current: Running) -> None:
    """Undo `announce`."""
    for module in model.modules():
        holders: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
        for hooks in holders:
            for key, hook in list(hooks.items()):
                if isinstance(hook, _Hook) and hook.model is current:
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)
