"""The Spherical Fourier Neural Operator: weights for spherical harmonics instead of for points.

First the transform between a grid and harmonics, then the layers of a block, and at the end `SFNO`.
Its forward, in segments: encoder and truncation to a coarser grid; blocks; return and decoder.
"""

from __future__ import annotations

import math
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from credit_dp.config.model import SFNOConfig
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models.blocks import (
    NoiseModulation,
    run_block,
    stochastic_depth_or_identity,
    stochastic_depth_rates,
)
from credit_dp.models.segments import Segment, SegmentedModel, SegmentState
from credit_dp.sphere import Vector, associated_legendre, quadrature_weights, usual_latitude


@final
class HarmonicTransform(nn.Module):
    """Changes fields on a grid to coefficients of spherical harmonics, and back.

    Coefficients are pairs of real and imaginary parts of the orders m >= 0; those of m > l are 0.
    Fields of degrees below `degrees` come back as they were.

    All of it computes in float32 at least, under autocast as well: a coefficient sums over all
    points, and there is no Fourier transform of bfloat16.

    Args:
        weights: of the rows, with sum 1, see `quadrature_weights`.
        degrees: of the harmonics; weights have to integrate products of two of these exactly.
        orders: of the harmonics, at most half of the columns, rounded up.

    Shapes:
        `(B, C, H, W)` <-> `(B, C, degrees, orders, 2)`.
    """

    functions: Tensor
    weights: Tensor

    def __init__(
        self, sine: Vector, weights: Vector, columns: int, degrees: int, orders: int
    ) -> None:
        super().__init__()
        self.columns = columns
        # In float64, until the model is converted to its dtype: a model in float64 is exact then.
        functions = associated_legendre(sine, degrees)[:orders].copy()
        self.register_buffer("functions", torch.as_tensor(functions), persistent=False)
        self.register_buffer("weights", torch.as_tensor(weights[:, None, None]), persistent=False)

    def analyse(self, x: Tensor) -> Tensor:
        """Return the coefficients of fields."""
        dtype = _dtype_of_sums(x)
        with torch.autocast(x.device.type, enabled=False):
            waves = torch.fft.rfft(x.to(dtype), norm="forward")[..., : len(self.functions)]
            parts = torch.view_as_real(waves) * self.weights.to(dtype)
            return torch.einsum("mlh,bchmr->bclmr", self.functions.to(dtype), parts)

    def synthesise(self, coefficients: Tensor) -> Tensor:
        """Return the fields of coefficients."""
        dtype = coefficients.dtype
        with torch.autocast(coefficients.device.type, enabled=False):
            parts = torch.einsum("mlh,bclmr->bchmr", self.functions.to(dtype), coefficients)
            parts[..., :1, 1] = 0  # as on a CPU; libraries of GPUs may use it
            waves = torch.view_as_complex(parts.contiguous())
            fields: Tensor = torch.fft.irfft(waves, self.columns, norm="forward")
            return fields


def _dtype_of_sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@final
class DegreeFilter(nn.Module):
    """Mixes the channels of harmonics by a complex matrix for each degree, the same for all orders.

    Real matrices commute with all rotations of the sphere. Imaginary parts shift the waves along
    circles of latitude by a quarter of their length, and commute with rotations about the poles.

    Shapes:
        `(B, channels, degrees, orders, 2)` -> the same.

    Source: Bonev et al. 2023, after the convolutions of Driscoll & Healy 1994.
    """

    def __init__(self, channels: int, degrees: int) -> None:
        super().__init__()
        # Real and imaginary parts apart: not all of distributed training takes complex numbers.
        self.weight = nn.Parameter(torch.empty(degrees, 2, channels, channels))
        # The sum of all products then has the variance of the input.
        nn.init.normal_(self.weight, std=1 / math.sqrt(2 * channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixed coefficients."""
        with torch.autocast(x.device.type, enabled=False):
            real, imaginary = self.weight.to(x.dtype).unbind(1)
            # (a + ib)(x + iy) = (ax - by) + i(bx + ay): a real matrix of twice the size, from parts
            # r to parts s.
            matrix = torch.stack(
                [torch.stack([real, imaginary], -1), torch.stack([-imaginary, real], -1)], 2
            )
            return torch.einsum("bilmr,lirjt->bjlmt", x, matrix)


@final
class SphericalBlock(nn.Module):
    """A residual block: a filter of harmonics beside a pointwise path, then an MLP.

    Args:
        transform: of the block's grid, the same module for all blocks.

    Shapes:
        `(B, config.channels, H, W)` -> the same.

    Source: Bonev et al. 2023.
    """

    def __init__(
        self, config: SFNOConfig, degrees: int, transform: HarmonicTransform, rate: float
    ) -> None:
        super().__init__()
        width, hidden = config.channels, config.mlp_ratio * config.channels
        self.transform = transform
        self.norm1 = nn.InstanceNorm2d(width, affine=True)
        self.filter = DegreeFilter(width, degrees)
        self.skip = nn.Conv2d(width, width, 1)
        self.norm2 = nn.InstanceNorm2d(width, affine=True)
        self.mlp = nn.Sequential(
            nn.Conv2d(width, hidden, 1),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Conv2d(hidden, width, 1),
            nn.Dropout(config.dropout),
            stochastic_depth_or_identity(rate),
        )
        self.noise1 = NoiseModulation(config.noise, width) if config.noise else nn.Identity()
        self.noise2 = NoiseModulation(config.noise, width) if config.noise else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the block adds."""
        y = self.noise1(self.norm1(x))
        filtered = self.transform.synthesise(self.filter(self.transform.analyse(y)))
        y = nn.functional.gelu(filtered + self.skip(y))
        return x + self.mlp(self.noise2(self.norm2(y)))  # type: ignore[no-any-return]


@final
class PositionTable(nn.Module):
    """Adds a learned vector of each row, and one of each column, to a field.

    Shapes:
        `(B, channels, H, W)` -> the same.
    """

    def __init__(self, channels: int, rows: int, columns: int) -> None:
        super().__init__()
        self.row_table = nn.Parameter(torch.zeros(channels, rows, 1))
        self.column_table = nn.Parameter(torch.zeros(channels, 1, columns))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + self.row_table + self.column_table


@final
class SFNO(SegmentedModel):
    """Predicts a state, or its tendency over one step, by filters of spherical harmonics.

    In the paper the first and the last block change between the grid and a coarser one. Here a
    truncation of the encoder's fields does, so that no block computes on the fine grid, and its
    inverse. The paper's position embedding has a vector of each point, here it is a sum of two
    vectors.

    Args:
        grid: rows and columns, and latitudes if they are not the usual ones.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: the grid is a region, is too small, or has rows without quadrature.

    Source: Bonev et al. 2023 (arXiv 2306.03838), with the linear filter.
    """

    def __init__(self, config: SFNOConfig, fields: Fields, grid: GridShape) -> None:
        super().__init__()
        self.checkpointing = config.activation_checkpointing
        width = config.channels
        self.outer, self.inner = _build_transforms(config, grid)
        degrees = self.inner.functions.shape[1]
        rates = stochastic_depth_rates(config.stochastic_depth, config.blocks)
        self.encoder = _build_mlp(fields.inputs, width, width)
        self.position = PositionTable(width, *grid)
        self.blocks = nn.ModuleList(
            SphericalBlock(config, degrees, self.inner, rate) for rate in rates
        )
        self.decoder = _build_mlp(width + fields.inputs, width, fields.outputs)

    def segments(self) -> list[Segment]:
        """Return the encoder, every block and the decoder.

        The state is the field and the model's input.
        """
        ends = ("outer", "inner")
        blocks = [
            Segment(f"blocks.{i}", partial(self._block, i), (f"blocks.{i}",), is_recomputed=True)
            for i in range(len(self.blocks))
        ]
        return [
            Segment("encoder", self._encode, ("encoder", "position", *ends)),
            *blocks,
            Segment("decoder", self._decode, ("decoder", *ends)),
        ]

    def _encode(self, state: SegmentState) -> SegmentState:
        x = self.position(self.encoder(state[0]))
        return self.inner.synthesise(self.outer.analyse(x)), state[0]

    def _block(self, block: int, state: SegmentState) -> SegmentState:
        x, skip = state
        return run_block(self.blocks[block], x, self.checkpointing), skip

    def _decode(self, state: SegmentState) -> SegmentState:
        x, skip = state
        x = self.outer.synthesise(self.inner.analyse(x))
        return (self.decoder(torch.cat([x, skip], 1)),)


def _build_mlp(in_channels: int, hidden: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, hidden, 1), nn.GELU(), nn.Conv2d(hidden, out_channels, 1)
    )


def _build_transforms(
    config: SFNOConfig, grid: GridShape
) -> tuple[HarmonicTransform, HarmonicTransform]:
    """Return the transforms of the grid and of the coarser one, with the same harmonics.

    The coarser grid is Gaussian: with it, as many degrees as rows are exact.
    """
    if not grid.is_global:
        raise UserError(
            "model: sfno needs the globe, as spherical harmonics do, but the grid is a region. Use "
            "another model, such as model=unet."
        )
    rows, columns = (-(-size // config.scale) for size in grid)
    # Products of two harmonics are integrated exactly up to this degree.
    degrees = min((grid[0] + 1) // 2, rows)
    # A row of points tells apart orders of less than half its columns.
    orders = min(degrees, (columns + 1) // 2)
    if min(degrees, orders) < 2:
        raise UserError(
            f"model.scale: {config.scale} leaves {rows}x{columns} points of the grid of "
            f"{grid[0]}x{grid[1]}, needs at least 2 rows and 3 columns. Use a smaller model.scale"
            f"{grid.or_finer}."
        )
    latitude = usual_latitude(grid[0]) if grid.latitude is None else np.asarray(grid.latitude)
    sine = np.sin(np.deg2rad(latitude))
    weights = quadrature_weights(sine, "model", "Set data.grid, or use another model.")
    gaussian, gaussian_weights = np.polynomial.legendre.leggauss(rows)
    return (
        HarmonicTransform(sine, weights, grid[1], degrees, orders),
        # From north to south; the weights of a latitude and its opposite are the same.
        HarmonicTransform(-gaussian, gaussian_weights / 2, columns, degrees, orders),
    )
