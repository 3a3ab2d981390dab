"""Weather models in plain single-device torch; `build_model` builds the one that a config names.

How a model is sharded is not part of it: see `credit_dp.domain_parallel` for its rows and
`credit_dp.pipeline_parallel` for its layers.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from credit_dp.config.model import (
    CrossFormerConfig,
    ModelConfig,
    OwnModelConfig,
    PanguConfig,
    UNetConfig,
)
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models.crossformer import CrossFormer
from credit_dp.models.pangu import Pangu
from credit_dp.models.unet import UNet
from credit_dp.plugins import report_plugin_errors

logger = logging.getLogger(__name__)

# A U-Net with fewer channels at its finest level is meant for grids with fewer rows: a larger grid
# gets a warning.
TINY_CHANNELS = 64
TINY_ROWS = 200


def build_model(config: ModelConfig, fields: Fields, grid: tuple[int, int]) -> nn.Module:
    """Return the model of a config for these channels and a grid of (rows, columns).

    Shapes:
        the model maps `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: the grid has too few rows or columns for the model's levels, the model needs
            other fields, or a plug-in's `build` fails.
    """
    if isinstance(config, UNetConfig):
        return _build_unet(config, fields, grid)
    if isinstance(config, PanguConfig):
        return Pangu(config, fields, grid)
    if isinstance(config, CrossFormerConfig):
        return CrossFormer(config, fields, grid)
    model = (
        _build_plugin_model(config, fields, grid) if isinstance(config, OwnModelConfig) else None
    )
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model: {type(config).__name__}.build has to return a torch.nn.Module, got "
            f"{type(model).__name__}. Derive the config from credit_dp.config.OwnModelConfig."
        )
    return model


def _build_plugin_model(config: OwnModelConfig, fields: Fields, grid: tuple[int, int]) -> object:
    """Return what the user's `build` returns; its errors become a `UserError` of one line."""
    config_type = type(config)
    if config_type.build is OwnModelConfig.build:
        raise UserError(
            f"model: {config_type.__name__} has no build. It needs a method "
            "build(self, in_channels, out_channels, grid) that returns the model."
        )
    # On the meta device the error passes unchanged: the caller may try again on a real device.
    if torch.get_default_device().type == "meta":
        return config.build(fields.inputs, fields.outputs, grid)
    with report_plugin_errors(f"model: {config_type.__name__}.build"):
        return config.build(fields.inputs, fields.outputs, grid)


def _build_unet(config: UNetConfig, fields: Fields, grid: tuple[int, int]) -> nn.Module:
    rows, columns = grid
    factor = 2 ** (len(config.channels) - 1)
    coarsest = -(-min(rows, columns) // factor)
    if coarsest < 2:
        raise UserError(
            f"model.channels: {len(config.channels)} levels need at least {factor + 1} rows and "
            f"columns, but the grid has {rows}x{columns}. Give fewer entries in model.channels, or "
            "a finer data.grid."
        )
    if config.channels[0] < TINY_CHANNELS and rows > TINY_ROWS:
        logger.warning(
            "model=%s with %d channels is meant for small grids, but this one has %d rows; "
            "model=unet_base is meant for 721x1440",
            config.name,
            config.channels[0],
            rows,
        )
    return UNet(config, fields.inputs, fields.outputs)
