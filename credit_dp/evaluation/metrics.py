"""Scores as WeatherBench 2 defines them: errors, bias, anomalies, ensembles and spectra.

Every score is an `Accumulator`: `add` sums fields of this rank's rows and samples, without any
communication; `result` is collective and returns the same on every rank. `metric_table` says which
of them are the metrics of scorecards and runs. `ErrorMapAccumulator` is none: it sums whole globes
in one process.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.grid import FieldArray, Grid, unit_vectors
from credit_dp.data.valid_points import ValidPoints, weighted_sum
from credit_dp.distributed.collectives import sum_over_ranks
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.sphere import EARTH_RADIUS

Index = tuple[int | slice, ...]  # index or slices into the leading dims of an accumulator's sums


class Accumulator(ABC):
    """Sums fields of this rank's rows and samples; `result` joins the sums of all ranks."""

    @abstractmethod
    def add(self, index: Index, *args: Any) -> None:
        """Add fields to the sums at `index`, without communication."""

    @abstractmethod
    def result(self, manager: DomainParallelManager) -> Tensor:
        """Return the score over the globe and all samples, the same on every rank; collective."""


class MeanAccumulator(Accumulator):
    """Accumulates a mean over the globe and all samples; the score is that mean, or its root."""

    @abstractmethod
    def mean(self, manager: DomainParallelManager, index: Index = ()) -> Tensor:
        """Return the mean of what was added at `index`, by default everywhere; collective.

        All ranks call it, also those without samples.
        """

    @abstractmethod
    def clear(self, index: Index = ()) -> None:
        """Forget what was added at `index`."""

    def finish(self, mean: Tensor) -> Tensor:
        """Return the score of a mean over all samples."""
        return mean

    def result(self, manager: DomainParallelManager) -> Tensor:
        """Return the score over the globe and all samples, the same on every rank; collective."""
        return self.finish(self.mean(manager))


@final
class AreaMean(MeanAccumulator):
    """Accumulates the area-weighted mean of fields over the globe and all samples.

    All scores take fields `(B, ..., C, h, W)`, those of ensembles also members
    `(B, M, ..., C, h, W)`: the B samples are summed; further dims, for instance lead times, have to
    fit the sums that `index` selects.

    Args:
        shape: dims of the sums, for instance (sources, leads, channels).
        rows: area weight of each local row, `(h,)`, or point, `(h, W)`; only ratios matter.
        points: points with values; None: all points have values.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self.rows = rows.double()
        self.points = points
        # float64 whatever the model's dtype: float32 would lose digits over many samples.
        self.sums = torch.zeros(shape, dtype=torch.float64, device=rows.device)
        self.weights = torch.zeros_like(self.sums)

    def add(self, index: Index, values: Tensor) -> None:
        """Add values `(B, ..., C, h, W)` of all channels to the sums at `index`."""
        self.sums[index] += weighted_sums(values, self.rows, self.points).sum(dim=0)
        if self.points is None:
            self.weights[index] += len(values) * values.shape[-1] * row_sum(self.rows)
        else:
            self.weights[index] += len(values) * self.points.weight(self.rows)

    def mean(self, manager: DomainParallelManager, index: Index = ()) -> Tensor:
        """Return the means over the globe and the samples; see `MeanAccumulator`."""
        # Sums and weights travel together: one collective instead of two.
        sums = sum_over_ranks(torch.stack([self.sums[index], self.weights[index]]), manager)
        return sums[0] / sums[1]

    def clear(self, index: Index = ()) -> None:
        """Forget what was added at `index`."""
        self.sums[index] = 0
        self.weights[index] = 0


def weighted_sums(values: Tensor, rows: Tensor, points: ValidPoints | None) -> Tensor:
    """Return the sum of `(..., C, h, W)` weighted with `(h,)` or `(h, W)`: `(..., C)`, float64."""
    if points is not None:
        values = points.zero_invalid(values)
    return weighted_sum(values.double(), rows)


def row_sum(weights: Tensor) -> Tensor:
    """Return the sum of weights of rows, `(h,)`, or of the means of rows of points, `(h, W)`."""
    return weights.sum() / (weights.shape[1] if weights.ndim == 2 else 1)


class MeanOfPoints(MeanAccumulator):
    """Accumulates the mean of a score that each point has; arguments as for `AreaMean`."""

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._mean = AreaMean(shape, rows, points)

    @abstractmethod
    def at_points(self, *fields: Tensor) -> Tensor:
        """Return the score of each point, `(B, ..., C, h, W)` in float64, from what `add` gets."""

    def add(self, index: Index, *fields: Tensor) -> None:
        """Add the scores of fields of all channels to the sums at `index`."""
        self._mean.add(index, self.at_points(*fields))

    def mean(self, manager: DomainParallelManager, index: Index = ()) -> Tensor:
        """Return the means over the globe and the samples; see `MeanAccumulator`."""
        return self._mean.mean(manager, index)

    def clear(self, index: Index = ()) -> None:
        """Forget what was added at `index`."""
        self._mean.clear(index)


class RootMeanOfPoints(MeanOfPoints):
    """Accumulates the root of such a mean, taken after all samples, as WeatherBench 2 does."""

    def finish(self, mean: Tensor) -> Tensor:
        """Return the root of the mean."""
        return mean.sqrt()


@final
class RootMeanSquare(RootMeanOfPoints):
    """Accumulates the root of the mean squared error."""

    def at_points(self, error: Tensor) -> Tensor:  # type: ignore[override]
        """Return the squares of errors `(B, ..., C, h, W)`."""
        return error.double().square()


@final
class Bias(MeanOfPoints):
    """Accumulates the mean error, forecast minus truth.

    For use in Python: the table of metrics takes `AreaMean` of the errors.
    """

    def at_points(self, forecast: Tensor, truth: Tensor) -> Tensor:  # type: ignore[override]
        """Return the differences of fields `(B, ..., C, h, W)`."""
        return forecast.double() - truth.double()


class MeanOverInitialTimes(MeanAccumulator):
    """Accumulates a score of each initial time that needs its sums over the whole globe.

    The sums are kept for each initial time, so that ranks communicate only in `mean`.

    Args:
        kinds: number of sums per initial time.
        shape: dims of the result, for instance (sources, leads, channels).
        samples: number of initial times of all ranks together, until `clear`.
        rows: area weight of each local row, `(h,)`, or point, `(h, W)`; only ratios matter.
        points: points with values; None: all points have values.
    """

    def __init__(
        self,
        kinds: int,
        shape: tuple[int, ...],
        samples: int,
        rows: Tensor,
        points: ValidPoints | None,
    ) -> None:
        self.rows = rows.double()
        self.points = points
        sizes = (kinds, *shape, samples)
        self.sums = torch.zeros(sizes, dtype=torch.float64, device=rows.device)

    @abstractmethod
    def scores(self, sums: Tensor, manager: DomainParallelManager) -> Tensor:
        """Return scores from the sums over the globe: `(kinds, ..., C, N)` -> `(..., C, N)`.

        Collective.
        """

    def add_sums(self, kind: int, index: Index, samples: Sequence[int], values: Tensor) -> None:
        """Add one kind of values, `(B, ..., C, h, W)`, to the sums at `index`.

        `samples` are the indices of the B initial times among those of all ranks; add each once.
        """
        sums = weighted_sums(values, self.rows, self.points)
        self.sums[(kind, *index)][..., list(samples)] += sums.movedim(0, -1)

    def mean(self, manager: DomainParallelManager, index: Index = ()) -> Tensor:
        """Return the mean scores over all `samples`, which must have been added."""
        sums = self.sums[(slice(None), *index)].contiguous()
        # Rows and samples of other ranks are zero here, so that one sum completes every score.
        return self.scores(sum_over_ranks(sums, manager), manager).mean(dim=-1)

    def clear(self, index: Index = ()) -> None:
        """Forget what was added at `index`."""
        self.sums[(slice(None), *index)] = 0


@final
class AnomalyCorrelation(MeanOverInitialTimes):
    """Accumulates the anomaly correlation: one coefficient per initial time, then their mean.

    Arguments as for `MeanOverInitialTimes`. NaN where an anomaly is zero everywhere.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        samples: int,
        rows: Tensor,
        points: ValidPoints | None = None,
    ) -> None:
        # Of each initial time: the product of both anomalies, and the squares of each.
        super().__init__(3, shape, samples, rows, points)

    def add(self, index: Index, samples: Sequence[int], forecast: Tensor, truth: Tensor) -> None:
        """Add anomalies `(B, ..., C, h, W)` to the sums at `index`; see `add_sums`."""
        forecast = forecast.double()
        truth = truth.double()
        products = (forecast * truth, forecast.square(), truth.square())
        for kind, product in enumerate(products):
            self.add_sums(kind, index, samples, product)

    def scores(self, sums: Tensor, manager: DomainParallelManager) -> Tensor:
        """Return the coefficients; see `MeanOverInitialTimes`."""
        products, forecast_squares, truth_squares = sums
        coefficients: Tensor = products / (forecast_squares.sqrt() * truth_squares.sqrt())
        return coefficients


@final
class Activity(RootMeanOfPoints):
    """Accumulates the standard deviation of anomalies about the climatology.

    A forecast with less activity than the truth is too smooth.
    """

    def at_points(self, anomaly: Tensor) -> Tensor:  # type: ignore[override]
        """Return the squares of anomalies `(B, ..., C, h, W)`."""
        return anomaly.double().square()


MEMBER_DIM = 1  # the dim of an ensemble's members: (B, M, ..., C, h, W)


@final
class FairCRPS(MeanOfPoints):
    """Accumulates the fair continuous ranked probability score.

    `E|X - Y| - E|X - X'| / 2`, with X and X' two different members: its expectation does not depend
    on the number of members. For one member it is the mean absolute error.
    """

    def at_points(self, members: Tensor, truth: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores of members `(B, M, ..., C, h, W)`, given the truth without M."""
        # Distances are the same after subtracting the truth, and small numbers round less.
        error = members.double() - truth.double().unsqueeze(MEMBER_DIM)
        return error.abs().mean(dim=MEMBER_DIM) - half_pairwise_distance(error)


def half_pairwise_distance(members: Tensor) -> Tensor:
    """Return half the mean distance of two different members: `(B, M, ...)` -> `(B, ...)`."""
    count = members.shape[MEMBER_DIM]
    if count == 1:
        return torch.zeros_like(members[:, 0])
    # In sorted order, member i (from 1) is above i - 1 others and below M - i, so that the sum of
    # all distances is a weighted sum: M log M operations instead of M squared.
    weights = 2 * torch.arange(1, count + 1, dtype=members.dtype, device=members.device) - count - 1
    ordered = members.sort(dim=MEMBER_DIM).values
    return torch.einsum("m,bm...->b...", weights, ordered) / (count * (count - 1))


@final
class EnsembleSpread(RootMeanOfPoints):
    """Accumulates the root of the members' mean unbiased variance, 0 for one member."""

    def at_points(self, members: Tensor) -> Tensor:  # type: ignore[override]
        """Return the variances of members `(B, M, ..., C, h, W)`."""
        members = members.double()
        if members.shape[MEMBER_DIM] > 1:
            return members.var(dim=MEMBER_DIM, correction=1)
        return torch.zeros_like(members[:, 0])


@final
class EnsembleMeanRMSE(RootMeanOfPoints):
    """Accumulates the root-mean-square error of the ensemble mean.

    For use in Python: the table of metrics takes `RootMeanSquare` of the ensemble mean's errors.
    """

    def at_points(self, members: Tensor, truth: Tensor) -> Tensor:  # type: ignore[override]
        """Return the squared errors of the mean of `(B, M, ..., C, h, W)`; the truth has no M."""
        return (members.double().mean(dim=MEMBER_DIM) - truth.double()).square()


@final
class EnergyScore(MeanOverInitialTimes):
    """Accumulates the energy score of each initial time, then their mean.

    `E||X - Y|| - E||X - X'|| / 2` with the root of the mean square over the globe as the norm. The
    second mean is over pairs of adjacent members, as in WeatherBench 2. For one member it is the
    root-mean-square error of each initial time.

    Source: Gneiting & Raftery 2007, eq. 22.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        samples: int,
        rows: Tensor,
        points: ValidPoints | None = None,
        *,
        members: int,
    ) -> None:
        # The squares of each member's error, then of the differences between neighbours.
        super().__init__(2 * members - 1, shape, samples, rows, points)
        self._members = members

    def add(self, index: Index, samples: Sequence[int], members: Tensor, truth: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` and truth without M to the sums at `index`.

        One member, as of a baseline, stands for an ensemble of equal members. See `add_sums`.
        """
        # Differences are the same after subtracting the truth, and small numbers round less.
        error = members.double() - truth.double().unsqueeze(MEMBER_DIM)
        error = error.expand(-1, self._members, *error.shape[2:])
        columns = truth.shape[-1]
        for member in range(self._members):
            self.add_sums(member, index, samples, error[:, member].square() / columns)
        if members.shape[MEMBER_DIM] > 1:
            for pair in range(self._members - 1):
                square = (error[:, pair + 1] - error[:, pair]).square()
                self.add_sums(self._members + pair, index, samples, square / columns)

    def scores(self, sums: Tensor, manager: DomainParallelManager) -> Tensor:
        """Return the scores; see `MeanOverInitialTimes`."""
        # `add` divides by the number of columns, which a rank without samples would not know.
        if self.points is None:
            weight = row_sum(self.rows).reshape(1)
        else:
            weight = self.points.weight(self.rows) / self.points.columns
        weight = manager.transport.all_reduce(weight)
        norms = (sums / weight[:, None]).sqrt()
        skill = norms[: self._members].mean(dim=0)
        if self._members == 1:
            return skill
        return skill - norms[self._members :].mean(dim=0) / 2


@final
class RankHistogram(Accumulator):
    """Accumulates how often the truth has each rank among the members, weighted by area.

    The rank is the number of smaller members. WeatherBench 2 gives a truth that equals k members
    one of their k + 1 ranks at random; here each of these ranks gets an equal share, which is the
    expectation of that and the same in every run.

    Source: Hamill 2001, "Interpretation of rank histograms for verifying ensemble forecasts".
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        members: int,
        rows: Tensor,
        points: ValidPoints | None = None,
    ) -> None:
        self._rows = rows.double()
        self._points = points
        self.sums = torch.zeros((*shape, members + 1), dtype=torch.float64, device=rows.device)

    def add(self, index: Index, members: Tensor, truth: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` and truth without M to the sums at `index`."""
        truth = truth.unsqueeze(MEMBER_DIM)
        lowest = (members < truth).sum(dim=MEMBER_DIM)
        ties = (members == truth).sum(dim=MEMBER_DIM)
        share = 1 / (ties + 1).double()
        if self._points is not None:
            share = self._points.zero_invalid(share)
        rows = self._rows
        if rows.ndim == 2:
            share, rows = share * rows, torch.ones_like(rows[:, 0])
        # Along the columns first: `(B, ..., C, h, M + 1)` counts.
        counts = share.new_zeros(*share.shape[:-1], self.sums.shape[-1])
        for tie in range(int(ties.max()) + 1):
            part = torch.where(ties >= tie, share, 0)
            counts.scatter_add_(-1, (lowest + tie).clamp(max=self.sums.shape[-1] - 1), part)
        self.sums[index] += torch.einsum("b...hr,h->...r", counts, rows)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """Return the frequency of each rank, `shape + (M + 1,)`, which sum to 1; collective."""
        sums = sum_over_ranks(self.sums, manager)
        return sums / sums.sum(dim=-1, keepdim=True)


# Southern and northern edge, in degrees north.
LATITUDE_BANDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"30N to 60N": (30.0, 60.0), "20S to 20N": (-20.0, 20.0), "60S to 30S": (-60.0, -30.0)}
)


def latitude_band_weights(grid: Grid) -> Tensor:
    """Return area weights of all rows, zero outside each of the K `LATITUDE_BANDS`, in float64.

    Shapes:
        -> `(K, H)`.
    """
    latitude, weights = grid.latitude, grid.weights
    inside = [(latitude >= south) & (latitude <= north) for south, north in LATITUDE_BANDS.values()]
    return torch.from_numpy(np.stack(inside) * weights)


def has_spectra(grid: Grid) -> bool:
    """Return whether a grid is a region, or has rows round the globe in any `LATITUDE_BANDS`."""
    return not grid.is_periodic or bool(latitude_band_weights(grid).any())


class PowerSpectra(Accumulator):
    """Accumulates power spectra, averaged over samples.

    Args:
        sizes: dims of the sums, of which the last two are K bands and N wavenumbers.
    """

    def __init__(self, sizes: tuple[int, ...], device: torch.device | None) -> None:
        self.sums = torch.zeros(sizes, dtype=torch.float64, device=device)
        self.weights = torch.zeros(sizes[:-1], dtype=torch.float64, device=device)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """Return the mean spectra, `shape + (K, N)`; NaN for bands without any.

        Collective: ranks without samples must call it, too.
        """
        sums = sum_over_ranks(self.sums, manager)
        return sums / sum_over_ranks(self.weights, manager)[..., None]


@final
class ZonalSpectra(PowerSpectra):
    """Accumulates zonal power spectra, averaged over latitude bands and samples: N = W // 2 + 1.

    Rows with missing values have no spectrum and are left out.

    Args:
        shape: leading dims of the sums, for instance (sources, leads, channels).
        grid: with columns round the globe; others have `RegionSpectra`.
        points: points with values; None: all points have values.

    Units:
        The field's unit squared, times metres.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        grid: Grid,
        rows: slice,
        points: ValidPoints | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.bands = latitude_band_weights(grid)[:, rows].to(device)
        self._complete_rows = None if points is None else points.valid.all(dim=-1)  # (C, h)
        latitude = grid.latitude[rows]
        degrees = torch.tensor(latitude.reshape(len(latitude), -1)[:, 0].copy(), device=device)
        circles = 2 * torch.pi * EARTH_RADIUS * torch.deg2rad(degrees).cos().abs()
        # `rfft` returns each wavenumber but 0 once for a pair of conjugates: its power is doubled.
        factors = torch.full((grid[1] // 2 + 1,), 2.0, dtype=torch.float64, device=device)
        factors[0] = 1.0
        self._lengths = circles[:, None] * factors
        super().__init__((*shape, len(self.bands), len(factors)), device)

    def add(self, index: Index, fields: Tensor) -> None:
        """Add the spectra of fields `(B, ..., C, h, W)` of all channels to the sums at `index`."""
        channels, height = fields.shape[-3:-1]
        rows = self.bands.expand(channels, -1, height)
        if self._complete_rows is not None:
            # Weight 0 is not enough: NaN times 0 is NaN.
            rows = rows * self._complete_rows[:, None]
            fields = fields.masked_fill(~self._complete_rows[:, :, None], 0)
        waves = torch.fft.rfft(fields.double(), norm="forward")
        # Separate sums of real and imaginary parts: to sum over a dim of 2 takes torch 15 times
        # as long.
        power = (waves.real.square() + waves.imag.square()).sum(dim=0) * self._lengths
        self.sums[index] += rows @ power
        self.weights[index] += len(fields) * rows.sum(dim=-1)


REGION_BAND = "region"  # the name of a region's spectra, in place of those of latitude bands
SAME_STEPS = 1.2  # means of equal steps on a projection differ by less, where scales change


def region_wavenumbers(grid: Grid, boundary: int = 0) -> tuple[NDArray[np.intp], float]:
    """Return the wavenumber of each cosine on a region's interior, and the wavelength of 1.

    Cosines with m half waves along h rows, dy apart, and n along w columns, dx apart, have the
    wavelength `2 / sqrt((m / (h dy))^2 + (n / (w dx))^2)`. Those of wavenumber k are longer than
    `L / (k + 1)` and not than `L / k`, where L is twice the shorter side. Longer ones than L belong
    to 1, too; 0 is the mean.

    Args:
        grid: of the region. dy and dx are its mean distances on the sphere; on a projection, where
            most have equal steps, their mean, unless they differ by more than `SAME_STEPS`.
        boundary: rows and columns at each edge outside the interior.

    Shapes:
        -> `(h, w)`.

    Units:
        L in metres.

    Source: Denis et al. 2002, "Spectral decomposition of two-dimensional atmospheric fields on
    limited-area domains using the discrete cosine transform".
    """
    centres = unit_vectors(*grid.points)
    chords = [np.linalg.norm(np.diff(centres, axis=axis), axis=0) for axis in (1, 2)]
    steps = [EARTH_RADIUS * float(2 * np.arcsin(chord / 2).mean()) for chord in chords]
    if grid.is_projected and max(steps) < SAME_STEPS * min(steps):
        steps = [sum(steps) / 2] * 2
    sizes = [size - 2 * boundary for size in grid]
    sides = [size * step for size, step in zip(sizes, steps, strict=True)]
    m, n = (np.arange(size) * min(sides) / side for size, side in zip(sizes, sides, strict=True))
    # Rounding must not move a whole number down.
    waves = np.floor(np.hypot(m[:, None], n) + 1e-9).astype(np.intp).clip(min=1)
    waves[0, 0] = 0
    return waves, 2 * min(sides)


def region_wavelength(grid: Grid, boundary: int) -> float | None:
    """Return the wavelength of wavenumber 1 in metres; None if columns go round the globe."""
    return None if grid.is_periodic else region_wavenumbers(grid, boundary)[1]


def cosine_transform(x: Tensor) -> Tensor:
    """Return the DCT-II along the last dim, scaled to have the mean of the squares as their sum.

    Shapes:
        `(..., N)` -> `(..., N)`.
    """
    size = x.shape[-1]
    waves = torch.arange(size, dtype=x.dtype, device=x.device)
    # The Fourier transform of x and its mirror image would be real if they began half a step later.
    fourier = torch.fft.rfft(torch.cat([x, x.flip(-1)], dim=-1), norm="forward")[..., :size]
    shift = torch.pi / (2 * size) * waves
    cosines = fourier.real * shift.cos() + fourier.imag * shift.sin()
    return torch.cat([cosines[..., :1], 2**0.5 * cosines[..., 1:]], dim=-1)


@final
class RegionSpectra(PowerSpectra):
    """Accumulates power spectra of a region's interior by `region_wavenumbers`: K = 1.

    The power of a wavenumber is the sum of the squares of its coefficients of the discrete cosine
    transform; from 1 on they sum to the variance of the points. Fields with missing values in the
    interior have no spectrum and are left out.

    Args:
        shape: leading dims of the sums, for instance (sources, leads, channels).
        boundary: rows and columns at each edge outside the interior.
        points: points with values; None: those that are not NaN.

    Units:
        The field's unit squared.

    Source: Denis et al. 2002, as for `region_wavenumbers`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        grid: Grid,
        boundary: int = 0,
        points: ValidPoints | None = None,
        device: torch.device | None = None,
    ) -> None:
        waves, _ = region_wavenumbers(grid, boundary)
        super().__init__((*shape, 1, int(waves.max()) + 1), device)
        self._waves = torch.from_numpy(waves.flatten()).to(device)
        rows, columns = (slice(boundary, size - boundary) for size in grid)
        self._interior = (..., rows, columns)
        self._missing = None if points is None else points.missing[self._interior]

    def add(self, index: Index, fields: Tensor) -> None:
        """Add the spectra of fields `(B, ..., C, H, W)`, with all rows, to the sums at `index`."""
        fields = fields[self._interior].double()
        if self._missing is not None:
            fields = fields.masked_fill(self._missing, torch.nan)
        complete = fields.isfinite().all(dim=-1).all(dim=-1)
        fields = fields.masked_fill(~complete[..., None, None], 0)
        power = cosine_transform(cosine_transform(fields).mT).mT.square().flatten(-2)
        spectra = power.new_zeros(*power.shape[:-1], self.sums.shape[-1])
        spectra.scatter_add_(-1, self._waves.expand_as(power), power)
        self.sums[index] += spectra.sum(dim=0)[..., None, :]
        self.weights[index] += complete.sum(dim=0)[..., None]


@final
@dataclass(frozen=True)
class ErrorMap:
    """The errors of one channel at one lead time.

    Shapes:
        rmse and bias `(H, W)`, in the channel's unit; NaN where there are no values.
    """

    channel: int
    hours: int
    rmse: NDArray[np.float64]
    bias: NDArray[np.float64]


@final
class ErrorMapAccumulator:
    """Accumulates the errors of a few channels on each grid point, at one lead time.

    Args:
        lead: index among the scored lead times.
        rim: the points that are not scored, `(H, W)`; None: all are.
    """

    def __init__(
        self,
        channels: Sequence[int],
        lead: int,
        hours: int,
        grid: tuple[int, int],
        rim: NDArray[np.bool_] | None = None,
    ) -> None:
        self._lead = lead
        self._hours = hours
        self._count = np.zeros(())
        start = np.zeros(grid) if rim is None else np.where(rim, np.nan, 0.0)
        self._errors = {channel: start.copy() for channel in channels}
        self._squares = {channel: start.copy() for channel in channels}

    def add(self, leads: slice, first: int, forecast: FieldArray, truth: FieldArray) -> None:
        """Add the errors of the ensemble mean, if the map's lead time is among `leads`.

        Args:
            forecast: `(leads, M, C, H, W)`.
            truth: `(leads, C, H, W)`.
        """
        if not leads.start <= self._lead < leads.stop:
            return
        # The channels of one forecast come in several calls: only the first one is counted.
        self._count += first == 0
        lead = self._lead - leads.start
        for channel in self._errors:
            if first <= channel < first + truth.shape[1]:
                mean = forecast[lead, :, channel - first].mean(axis=0, dtype=np.float64)
                error = mean - truth[lead, channel - first]
                self._errors[channel] += error
                self._squares[channel] += error**2

    def sums(self) -> list[NDArray[np.float64]]:
        """Return the arrays that `add` adds to."""
        return [self._count, *self._errors.values(), *self._squares.values()]

    def result(self) -> list[ErrorMap]:
        """Return one map per channel."""
        return [
            ErrorMap(c, self._hours, np.sqrt(self._squares[c] / self._count), total / self._count)
            for c, total in self._errors.items()
        ]
