"""Weather models in plain single-device torch; `build_model` builds the one that a config names.

`BUILDERS` is where a model of this package is registered: one entry, its config and what builds it.
How a model is sharded is not part of it: see `credit_dp.domain_parallel` for its rows and
`credit_dp.pipeline_parallel` for its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from credit_dp.config.model import (
    CrossFormerConfig,
    DiffusionConfig,
    ModelConfig,
    OwnModelConfig,
    PanguConfig,
    SFNOConfig,
    SwinConfig,
    UNetConfig,
)
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models.crossformer import CrossFormer
from credit_dp.models.pangu import Pangu
from credit_dp.models.sfno import SFNO
from credit_dp.models.swin import Swin
from credit_dp.models.unet import build_unet
from credit_dp.plugins import report_plugin_errors
from credit_dp.torch_private import apply_to_tensors

# Called with a config of this class, the fields and the grid.
BUILDERS: dict[type[ModelConfig], Callable[[Any, Fields, GridShape], nn.Module]] = {
    UNetConfig: build_unet,
    DiffusionConfig: build_unet,
    PanguConfig: Pangu,
    CrossFormerConfig: CrossFormer,
    SwinConfig: Swin,
    SFNOConfig: SFNO,
}


def build_model(config: ModelConfig, fields: Fields, grid: tuple[int, int]) -> nn.Module:
    """Return the model of a config for these channels and a grid of (rows, columns).

    A grid with an attribute `is_global` that is false is a region; any other is the globe. The
    columns of a region go round the globe if its `is_periodic` is true. Its rows are at its
    `latitude`, in degrees; without one, at the usual latitudes.

    Shapes:
        the model maps `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: the grid has too few rows or columns for the model's levels, the model needs
            other fields, or a plug-in's `build` fails.
    """
    # Subclasses, too: a config may derive from one of this package's and keep its model.
    shape = GridShape(
        grid,
        getattr(grid, "is_global", True),
        getattr(grid, "is_periodic", None),
        getattr(grid, "latitude", None),
    )
    build = next((build for kind, build in BUILDERS.items() if isinstance(config, kind)), None)
    if build is not None:
        return build(config, fields, shape)
    if isinstance(config, OwnModelConfig):
        return _build_plugin_model(config, fields, shape)
    raise UserError(
        f"model: {type(config).__name__} can't be built. Derive the config from "
        "credit_dp.config.OwnModelConfig."
    )


def build_on_meta(config: ModelConfig, fields: Fields, grid: tuple[int, int]) -> nn.Module:
    """Return the model of a config with parameters on the meta device, which have no values."""
    try:
        with torch.device("meta"):
            return build_model(config, fields, grid)
    except Exception:  # noqa: BLE001 - of code that is carried out again
        # Some constructors read values of tensors, which meta tensors don't have. A plan needs the
        # values of buffers, such as masks.
        model = build_model(config, fields, grid)
        empty: dict[nn.Parameter, nn.Parameter] = {}  # shared parameters stay shared
        for path, parameter in [*model.named_parameters(remove_duplicate=False)]:
            if type(parameter) is nn.Parameter:
                if parameter not in empty:
                    like = torch.empty_like(parameter, device="meta", requires_grad=False)
                    empty[parameter] = nn.Parameter(like, parameter.requires_grad)
                owner, _, name = path.rpartition(".")
                setattr(model.get_submodule(owner), name, empty[parameter])
        return model


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the numbers of a model to a dtype, in place; complex ones to pairs of it.

    `nn.Module.to` drops the imaginary parts of complex parameters and buffers.
    """

    def cast(x: Tensor) -> Tensor:
        if x.is_complex():
            return x.to(dtype.to_complex())
        return x.to(dtype) if x.is_floating_point() else x

    apply_to_tensors(model, cast)
    return model


def _build_plugin_model(config: OwnModelConfig, fields: Fields, grid: GridShape) -> nn.Module:
    """Return what the user's `build` returns; its errors become a `UserError` of one line."""
    config_type = type(config)
    if config_type.build is OwnModelConfig.build:
        raise UserError(
            f"model: {config_type.__name__} has no build. It needs a method "
            "build(self, in_channels, out_channels, grid) that returns the model."
        )
    if torch.get_default_device().type == "meta":
        # The error passes unchanged: the caller may try again on a real device.
        model = config.build(fields.inputs, fields.outputs, grid)
    else:
        with report_plugin_errors(f"model: {config_type.__name__}.build"):
            model = config.build(fields.inputs, fields.outputs, grid)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model: {config_type.__name__}.build has to return a torch.nn.Module, got "
            f"{type(model).__name__}. Derive the config from credit_dp.config.OwnModelConfig."
        )
    return model
