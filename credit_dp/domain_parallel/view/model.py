"""Run a model through the global view: bands go in, bands come out.

`attach_view` puts hooks on a model. Those of the root show the inputs through the view and take the
outputs out of it, see `boundary`. Those of all other modules refuse calls from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from credit_dp.domain_parallel.view.running import VIEW_ATTRIBUTE, RequireRunningModel
from credit_dp.domain_parallel.view.tensor import GlobalView

__all__ = ["attach_view", "attached_view", "detach_view"]

# Where modules keep which of their hooks have which option.
HOOK_OPTIONS = (
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


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
        # Parametrizations compute weights, whenever these are read.
        computes_weights = "parametrizations" in path.split(".")
        if path and not computes_weights and not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(RequireRunningModel(view, path), prepend=True)
    # Before and after the user's hooks: see `boundary`.
    inputs = ShowInputs(view, input_shapes, of_stage)
    model.register_forward_pre_hook(inputs, prepend=True, with_kwargs=True)
    model.register_forward_hook(TakeOutputs(view, of_stage), with_kwargs=True)
    model.register_forward_hook(LeaveModel(view), always_call=True)
    model.__dict__[VIEW_ATTRIBUTE] = view
    return view


def attached_view(model: nn.Module) -> GlobalView | None:
    """Return the view through which a model computes, if there is one."""
    return model.__dict__.get(VIEW_ATTRIBUTE)


def detach_view(model: nn.Module) -> None:
    """Undo `attach_view`."""
    view = model.__dict__.pop(VIEW_ATTRIBUTE, None)
    if view is None:
        return
    kinds = (RequireRunningModel, ShowInputs, TakeOutputs, LeaveModel)
    for module in model.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks: dict[int, Any] = getattr(module, name)
            for key, hook in list(hooks.items()):
                if isinstance(hook, kinds) and hook.view is view:
                    del hooks[key]
                    for options in HOOK_OPTIONS:
                        getattr(module, options).pop(key, None)
