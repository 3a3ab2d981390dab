"""Which layer is swapped for what: the converter's table of rules by exact type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from credit_dp.domain_parallel.layers import (
    DomainParallelConv2d,
    DomainParallelConvTranspose2d,
    DomainParallelGroupNorm,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError

Rule = Callable[[Any, int, DomainParallelManager], nn.Module]


def _needs_halo_conv2d(conv: nn.Conv2d) -> bool:
    """Return whether output rows depend on more than the input row of the same index."""
    return conv.kernel_size[0] > 1


def _needs_halo_conv_transpose2d(conv: nn.ConvTranspose2d) -> bool:
    """Return whether output rows of one input row overlap those of the next."""
    return conv.kernel_size[0] > conv.stride[0]


def _shard_conv2d(conv: nn.Conv2d, dim: int, manager: DomainParallelManager) -> nn.Module:
    unpadded = isinstance(conv.padding, str) or conv.padding[0] == 0
    if not _needs_halo_conv2d(conv) and conv.stride[0] == 1 and unpadded:
        return conv
    return DomainParallelConv2d(conv, dim, manager=manager)


def _shard_conv_transpose2d(
    conv: nn.ConvTranspose2d, dim: int, manager: DomainParallelManager
) -> nn.Module:
    # Kernel = stride sends nothing where bands line up; the wrapper makes them line up elsewhere.
    return DomainParallelConvTranspose2d(conv, dim, manager=manager)


def _shard_group_norm(norm: nn.GroupNorm, dim: int, manager: DomainParallelManager) -> nn.Module:
    return DomainParallelGroupNorm(norm, manager=manager)


def _keep(module: nn.Module, dim: int, manager: DomainParallelManager) -> nn.Module:
    return module


def _keep_if_rows_are_apart(
    norm: nn.LayerNorm, dim: int, manager: DomainParallelManager
) -> nn.Module:
    if len(norm.normalized_shape) > 1:
        raise UserError(f"LayerNorm over {norm.normalized_shape} mixes rows and has no rule")
    return norm


# Exact types only: a subclass may have a forward of its own.
RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: _shard_conv2d,  # fetches rows when its kernel reaches over the band's edge
    nn.ConvTranspose2d: _shard_conv_transpose2d,
    nn.GroupNorm: _shard_group_norm,  # statistics over all bands
    nn.LayerNorm: _keep_if_rows_are_apart,  # over the last dimension
    **dict.fromkeys(  # act on channels or single values: rows never meet
        (
            nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardswish, nn.Hardtanh, nn.Identity,
            nn.LeakyReLU, nn.Linear, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
            nn.Sigmoid, nn.Softplus, nn.Tanh,
        ),
        _keep,
    ),
    **dict.fromkeys(  # the audit sees whether rows meet in them
        (
            nn.Flatten, nn.GLU, nn.LogSoftmax, nn.PixelShuffle, nn.PixelUnshuffle, nn.Softmax,
            nn.Unflatten,
        ),
        _keep,
    ),
}  # fmt: skip
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
