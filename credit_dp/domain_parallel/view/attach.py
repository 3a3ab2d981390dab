"""Run a model through the global view: bands go in, bands come out.

`attach_view` puts hooks on a model. Those of the root show the inputs through the view and take the
outputs out of it, see `boundary`. Those of all other modules, which other models may have as well,
know nothing of the view: they refuse calls past the root, see `check_call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from credit_dp.domain_parallel.manager import DomainParallelManager

# Rules are registered when their modules are imported.
from credit_dp.domain_parallel.view import (  # noqa: F401
    attention,
    composites,
    indexing,
    joins,
    layers,
    norms,
    pointwise,
    products,
    reductions,
    shapes,
    spectral,
    windows,
)
from credit_dp.domain_parallel.view.autograd import patch_torch
from credit_dp.domain_parallel.view.boundary import LeaveModel, ShowInputs, TakeOutputs
from credit_dp.domain_parallel.view.running import VIEW_ATTRIBUTE, check_call
from credit_dp.domain_parallel.view.tensor import GlobalView
from credit_dp.torch_private import CALL_ATTRIBUTE, call_with_hooks, remove_hooks, run_uncompiled

__all__ = ["attach_view", "attached_view", "detach_view"]


@final
class UncompiledCall:
    """Calls a model with its hooks, none of which `torch.compile` around the model traces.

    Without it torch would compile what is called between the hooks, on fields of the view.

    Args:
        model: in the view.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @run_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        return call_with_hooks(self.model, args, kwargs)


def attach_view(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shapes: Sequence[Sequence[int]],
    *,
    of_stage: bool = False,
) -> GlobalView:
    """Make a model compute through the global view, in place; its parameters keep their names.

    Args:
        model: any model; none of its layers is replaced.
        manager: this rank's position in the mesh.
        input_shapes: the shapes of its global inputs.
        of_stage: whether the model is a stage of a pipeline, see `ShowInputs`.
    """
    view = GlobalView(manager)
    view.has_model = True
    patch_torch()
    for path, module in model.named_modules():
        if _has_check(path, module):
            module.register_forward_pre_hook(check_call, prepend=True)
    # Before and after the user's hooks: see `boundary`.
    inputs = ShowInputs(view, input_shapes, of_stage)
    model.register_forward_pre_hook(inputs, prepend=True, with_kwargs=True)
    model.register_forward_hook(TakeOutputs(view, of_stage), with_kwargs=True)
    model.register_forward_hook(LeaveModel(view), always_call=True)
    model.__dict__[VIEW_ATTRIBUTE] = view
    model.__dict__[CALL_ATTRIBUTE] = UncompiledCall(model)
    return view


def attached_view(model: nn.Module) -> GlobalView | None:
    """Return the view through which a model computes, if there is one."""
    return model.__dict__.get(VIEW_ATTRIBUTE)


def detach_view(model: nn.Module) -> None:
    """Undo `attach_view`."""
    view = model.__dict__.pop(VIEW_ATTRIBUTE, None)
    if view is None:
        return
    model.__dict__.pop(CALL_ATTRIBUTE, None)
    of_view = (ShowInputs, TakeOutputs, LeaveModel)
    for path, module in model.named_modules():
        remove_hooks(module, lambda hook: isinstance(hook, of_view) and hook.view is view)
        if _has_check(path, module):  # one for each model in the view that has the module
            remove_hooks(module, lambda hook: hook is check_call, at_most=1)


def _has_check(path: str, module: nn.Module) -> bool:
    """Whether a module of a model gets the hook `check_call`."""
    # Parametrizations compute weights, whenever these are read.
    computes_weights = "parametrizations" in path.split(".")
    return bool(path) and not computes_weights and not isinstance(module, torch.jit.ScriptModule)
