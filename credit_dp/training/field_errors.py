"""Errors of whole fields that the loss adds to those of points: gradients, spectra on the sphere.

`build_area_means` makes the means that `loss.scales` scores besides points, and
`build_field_errors` the errors to which the config gives a weight. These take scaled fields of this
rank's rows and return what each channel adds to the loss; the ranks' parts add up to the error of
the globe. All need other ranks' rows: means fetch those within their radius, `GradientError` the
first row south of the band; `SphereError` adds up the ranks' parts of all coefficients, and sends
nothing in the backward pass.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from credit_dp.area_means import AreaMeans, NeighbourhoodSums, rows_within
from credit_dp.config import LossConfig
from credit_dp.data.grid import Grid
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import fetch_rows
from credit_dp.domain_parallel.transport import Transport
from credit_dp.sphere import Vector, associated_legendre, quadrature_weights

# (forecast, target), both scaled and 0 where there are no values, `(B, C, h, W)` -> `(C,)`.
FieldError = Callable[[Tensor, Tensor], Tensor]

# Added to the power of a wavenumber: the square root has no gradient at 0. With it the amplitude of
# a wavenumber that is absent has gradient 0, and no gradient is above 1.
FLOOR = 1e-8


def build_field_errors(
    config: LossConfig,
    grid: Grid,
    weights: Vector,
    channels: Tensor,
    manager: DomainParallelManager,
    points: ValidPoints | None,
) -> list[FieldError]:
    """Return the errors of fields that have a weight in the config; collective with points.

    Args:
        grid: of all ranks together.
        weights: of all rows of the grid, `(H,)`, or of all points, `(H, W)`, with mean 1.
        channels: weight of each channel, `(C,)`, with the loss's device and dtype.

    Raises:
        UserError: the rows have no quadrature, which spectra on the sphere need.
    """
    errors: list[FieldError] = []
    if config.gradient:
        areas = torch.as_tensor(weights).to(channels)
        by_channel = config.gradient * channels
        errors.append(GradientError(areas, by_channel, manager, points, circular=grid.is_periodic))
    if config.sphere_spectrum:
        rows = manager.rows(grid[0])
        table = SphereTable(grid.latitude, rows, manager.transport, channels)
        shares = config.sphere_spectrum * channels / manager.domain_world_size
        errors.append(SphereError(table, shares, coherence=config.sphere_error == "amse"))
    return errors


def build_area_means(
    radius: float,
    grid: Grid,
    manager: DomainParallelManager,
    points: ValidPoints | None,
    like: Tensor,
) -> Callable[[Tensor, slice], Tensor]:
    """Return the means of bands over all points within `radius` km; collective with points.

    With a radius of 0 they are the fields themselves. They take fields of this rank's rows, 0 where
    there are no values, and which of all channels these are: `(..., C_own, h, W)` -> the same.
    Ranks of a domain call them together.
    """
    if not radius:
        return lambda fields, channels: fields
    partition = manager.partition(grid[0])
    bands = (partition.rows(rank) for rank in range(partition.ranks))
    near = (rows_within(grid.latitude, slice(band.start, band.stop), radius) for band in bands)
    needed = tuple((RowRange(rows.start, rows.stop),) for rows in near)
    exchange = RowExchange(partition, needed, manager.domain_rank)

    def fetch(band: Tensor) -> Tensor:
        return fetch_band(band, exchange, manager.transport)

    rows = manager.rows(grid[0])
    sums = NeighbourhoodSums(grid.latitude, grid.weights, rows, grid[1], radius, like)
    # The mask of fetched rows is their owners'.
    valid = None if points is None else fetch(points.valid.to(like.dtype)) > 0
    means = AreaMeans(sums, valid)

    def average(fields: Tensor, channels: slice) -> Tensor:
        # A rank that shares members with more ranks than there are channels may have none.
        return means(fetch(fields), channels) if fields.shape[-3] else fields

    return average


def fetch_band(band: Tensor, exchange: RowExchange, transport: Transport) -> Tensor:
    """Return the rows of an exchange; collective. One rank that has all rows gets them as is."""
    if exchange.is_identity:
        return band
    return fetch_rows(band.contiguous(), exchange, transport)


@final
class GradientError:
    """The squared error of the differences between neighbouring points, east and south.

    The sum over both directions of `(d(next) - d)^2`, with `d` the forecast minus the truth,
    weighted by area and divided by the number of points. A difference along latitude has the mean
    weight of its two rows. Differences to points without values, or beyond the last column of a
    region, do not count.

    Args:
        rows: weights of all rows of the grid, `(H,)`, or of all points, `(H, W)`, with mean 1.
        points: the points of this rank with values; None: all.
        circular: whether the first column is east of the last.
    """

    def __init__(
        self,
        rows: Tensor,
        channels: Tensor,
        manager: DomainParallelManager,
        points: ValidPoints | None,
        *,
        circular: bool,
    ) -> None:
        height = len(rows)
        partition = manager.partition(height)
        bounds = partition.bounds
        # The band and one row south of it; nothing is south of the last band.
        needed = tuple(
            (RowRange(bounds[rank], min(bounds[rank + 1] + 1, height)),)
            for rank in range(partition.ranks)
        )
        self._transport = manager.transport
        self._exchange = RowExchange(partition, needed, manager.domain_rank)
        own = needed[manager.domain_rank][0]
        weights = rows[own.start : own.stop].reshape(len(range(own.start, own.stop)), -1)
        band = partition.rows(manager.domain_rank)
        self._own_rows = band.stop - band.start
        scale = channels[:, None, None] / height
        east = weights[: self._own_rows] * scale  # (C, h, 1 or W)
        south = (weights[1:] + weights[:-1]) / 2 * scale  # (C, h or h - 1, 1 or W)
        if points is not None:
            # The mask of the row south of the band is its owner's.
            valid = self._fetch(points.valid.to(rows.dtype))
            own_valid = valid[:, : self._own_rows]
            east = east * own_valid * own_valid.roll(-1, -1)
            south = south * valid[:, 1:] * valid[:, :-1]
        self._east, self._south = east, south
        self._circular = circular

    def __call__(self, forecast: Tensor, target: Tensor) -> Tensor:
        """Return what each channel adds to the loss, `(C,)`; collective."""
        error = self._fetch(forecast - target)
        own = error[..., : self._own_rows, :]
        east = (own.roll(-1, -1) - own).square() * self._east
        if not self._circular:
            east = east[..., :-1]
        south = (error[..., 1:, :] - error[..., :-1, :]).square() * self._south
        batch, _, _, width = error.shape
        return (east.sum((0, 2, 3)) + south.sum((0, 2, 3))) / (batch * width)

    def _fetch(self, band: Tensor) -> Tensor:
        return fetch_band(band, self._exchange, self._transport)


def loss_quadrature(sine: Vector) -> Vector:
    """Return the weights of rows, `(H,)`, by which `loss.sphere_spectrum` integrates.

    Raises:
        UserError: the rows have none.
    """
    remedy = "Set loss.sphere_spectrum=0, or use loss.spectrum, which needs no such rows."
    return quadrature_weights(sine, "loss.sphere_spectrum", remedy)


@final
class SphereTable:
    """Computes spherical harmonic coefficients of fields whose rows are shared by the ranks.

    Degrees go up to half the number of rows or columns, for which sums over rows are exact
    integrals of the products of two harmonics.

    Args:
        latitude: of all rows of the globe, in degrees.
        transport: to the ranks that share the globe.
    """

    def __init__(self, latitude: Vector, rows: slice, transport: Transport, like: Tensor) -> None:
        sine = np.sin(np.deg2rad(latitude))
        self._transport = transport
        self._degrees = (len(latitude) - 1) // 2 + 1
        functions = associated_legendre(sine[rows], self._degrees)
        self._functions = torch.from_numpy(functions * loss_quadrature(sine)[rows]).to(like)

    def coefficients(self, fields: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the coefficients of the globe, with the degree and the power of each; collective.

        Degree and power are `(N,)`: a coefficient of order m > 0 stands for that of -m, too, and
        has power 2.

        Shapes:
            `(..., h, W)` -> `(..., N, 2)`, real and imaginary parts.
        """
        # A row distinguishes orders up to less than half its columns.
        orders = min(self._degrees, (fields.shape[-1] + 1) // 2)
        waves = torch.view_as_real(torch.fft.rfft(fields, norm="forward")[..., :orders])
        functions = self._functions[:orders, :orders]
        parts = torch.einsum("mlh,...hmr->...mlr", functions, waves)
        # Only degrees of at least the order: half of the products are 0, and are not sent.
        order, degree = np.triu_indices(orders)
        packed = parts[..., torch.from_numpy(order), torch.from_numpy(degree), :]
        power = torch.where(torch.from_numpy(order) > 0, 2.0, 1.0)
        summed = _SumOverBandsForLoss.apply(packed, self._transport)  # type: ignore[no-untyped-call]
        return summed, torch.from_numpy(degree).to(fields.device), power.to(fields)


@final
class _SumOverBandsForLoss(torch.autograd.Function):
    """All-reduce of what a loss is computed from that all ranks compute alike, each for its share.

    The loss of the globe is the same on all D ranks, which take a share of 1 / D of it. So the
    gradient of the whole loss is D times that of the share, and no rank has to send it.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, transport: Transport) -> Tensor:
        ctx.ranks = transport.size
        return transport.all_reduce(part.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


@final
class SphereError:
    """The error of spectra on the sphere, summed over degrees.

    With `A_l` the root of the power of degree l, it is `(A_l of f - A_l of t)^2`, and with
    `coherence` also `2 max(A_l of f, A_l of t)^2 (1 - coherence_l)`: the coherence is the
    correlation of the coefficients of degree l. The powers of all degrees add up to the mean square
    of a field over the globe, as far as the degrees resolve it.

    Args:
        table: of the band of this rank.
        channels: weight of each channel, `(C,)`, divided by the number of ranks.
        coherence: whether differences of phase count.

    Source: Subich et al. 2025 (arXiv:2501.19374), the two terms of their loss.
    """

    def __init__(self, table: SphereTable, channels: Tensor, *, coherence: bool) -> None:
        self._table = table
        self._channels = channels
        self._coherence = coherence

    def __call__(self, forecast: Tensor, target: Tensor) -> Tensor:
        """Return what each channel adds to the loss, `(C,)`; collective."""
        # Both in one message.
        both, degree, power = self._table.coefficients(torch.stack([forecast, target]))
        f, t = both * power[:, None].sqrt()
        errors = self._error(*(self._by_degree(x, degree) for x in (f * f, t * t, f * t)))
        return errors.sum(-1).mean(0) * self._channels

    def _error(self, forecast: Tensor, target: Tensor, product: Tensor) -> Tensor:
        forecast, target = forecast + FLOOR, target + FLOOR
        f, t = forecast.sqrt(), target.sqrt()
        error = (f - t).square()
        if self._coherence:
            coherence = (product + FLOOR) / (f * t)
            error = error + 2 * torch.maximum(forecast, target) * (1 - coherence)
        return error

    @staticmethod
    def _by_degree(products: Tensor, degree: Tensor) -> Tensor:
        """Sum over the orders of each degree: `(B, C, N, 2)` -> `(B, C, L)`."""
        values = products.sum(-1)
        sums = values.new_zeros(*values.shape[:-1], int(degree[-1]) + 1)
        return sums.index_add(-1, degree, values)
