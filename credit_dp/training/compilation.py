"""Compiles a model with `torch.compile`, or says why it runs uncompiled."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

from credit_dp.config import ModelConfig
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.layers.resample import InterpolationLayer
from credit_dp.errors import UserError
from credit_dp.torch_private import compile_backward_without_autocast
from credit_dp.training.parameter_shards import is_fsdp_module


def obstacle_to_compilation(model: nn.Module, model_config: ModelConfig) -> str:
    """Return why a model runs uncompiled, the same on all ranks; empty if nothing stands against.

    torch 2.13 fails at operators that keep their order in a compiled function that computes parts
    of itself again. A complete compiled step can be computed again: its operators receive what the
    transport has kept.
    """
    if attached_domain(model) is not None:
        return (
            "this model computes on tensors of the globe, whose functions can't be compiled. It "
            "runs uncompiled. On a GPU set compile=false and trainer.cuda_graph=true instead."
        )
    layers = _converted_layers(model)
    if layers and torch.__version__ < "2.12":
        return (
            f"torch {torch.__version__} computes wrong gradients of compiled sharded layers. The "
            "model runs uncompiled. Install torch 2.12 or newer to compile it."
        )
    by_key = bool(getattr(model_config, "activation_checkpointing", False))
    if layers and (by_key or any(layer.is_recomputed for layer in layers)):
        return (
            "a sharded model that recomputes blocks can't be compiled. It runs uncompiled. To "
            "compile it set model.activation_checkpointing=false, or remove torch.utils.checkpoint "
            "from its code; trainer.checkpoint_activations=step saves memory, too."
        )
    return ""


def _converted_layers(model: nn.Module) -> list[RowLayer]:
    return [module for module in model.modules() if isinstance(module, RowLayer)]


VERSIONS_OF_MODULE = 8  # of compiled code that a module may have


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Compile a model at its first call, in place; names of parameters stay.

    With FSDP2 its blocks are compiled instead, without the hooks around them, which gather and free
    parameters and would cut the model's graph.

    Args:
        model: converted, and sharded if it is to be.

    Raises:
        UserError: code for the CPU needs a C++ compiler, and none is installed.
    """
    if device.type == "cpu":
        # Torch's compiler looks for g++ or clang++ in the same way, but fails at the first step.
        name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(name) is None:
            raise UserError(
                f"compile: needs a C++ compiler on the CPU, but {name} is not found. Install one, "
                "name it in the environment variable CXX, or set compile=false."
            )
    from torch.compiler import config as limits

    # Blocks are called under the autocast of the model. By default torch compiles their backward
    # pass for it, too, and rounds gradients in it that an uncompiled step keeps in float32.
    compile_backward_without_autocast()
    units = [module for module in model.modules() if is_fsdp_module(module)]
    # Each shape has code of its own. By default torch compiles code for any shape when it sees the
    # second one, also of another block. A step that is computed again could then find this code for
    # a block that has run other code before, which keeps other tensors.
    copies = 1
    if not units:
        model.compile(dynamic=False)
        if _converted_layers(model):
            copies = _most_copies_of_code(model)
    else:
        # The model itself is a unit, too: the first one, and the only one without blocks.
        blocks: list[Any] = units[1:] or units
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        copies = len(blocks)
    # Modules of a class share code. Torch compiles 8 versions of it, and runs others uncompiled: a
    # module has several by itself, for training, validation and scores.
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(limits, limit, max(getattr(limits, limit), VERSIONS_OF_MODULE * copies))


def _most_copies_of_code(model: nn.Module) -> int:
    """Return how many modules of a sharded model share code, at most.

    They share what is compiled, too, unless the model's graph is cut within them: then each has a
    version of its own, as its layers have plans of their own.
    """
    copies = Counter(type(module) for module in model.modules() if _is_user_module(module))
    interpolations = sum(isinstance(module, InterpolationLayer) for module in model.modules())
    return max(interpolations, *copies.values())


def _is_user_module(module: nn.Module) -> bool:
    """Return whether a module's code is neither torch's nor a converted layer's."""
    return not (type(module).__module__.startswith("torch.") or isinstance(module, RowLayer))
