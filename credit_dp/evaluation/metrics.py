"""Scores as WeatherBench 2 defines them: errors, bias, anomalies, ensembles and spectra."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.grid import row_weights
from credit_dp.data.store import Store
from credit_dp.data.units import KNOWN_VARIABLES, KnownVariable
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.variable_names import canonical_name


def sum_over_one_rank(sums: Tensor) -> Tensor:
    """The globe's sums where one rank has all rows."""
    return sums


@final
class ValidPoints:
    """Those of the rank's own rows, channel by channel; the same at all times.

    Args:
        valid: `(C, h, W)`, true where there are values.
        over_globe: sums a tensor over the ranks that share the globe; collective.
    """

    def __init__(
        self, valid: Tensor, over_globe: Callable[[Tensor], Tensor] = sum_over_one_rank
    ) -> None:
        self.valid, self.missing = valid, ~valid
        self.columns = valid.shape[-1]
        self._sum_over_globe = over_globe

    @classmethod
    def of(
        cls,
        valid: NDArray[np.bool_] | None,
        like: Tensor,
        over_globe: Callable[[Tensor], Tensor] = sum_over_one_rank,
    ) -> "ValidPoints | None":
        """Those of a store's mask, on the device of `like`; None where all points have values."""
        return None if valid is None else cls(torch.from_numpy(valid).to(like.device), over_globe)

    def weight(self, rows: Tensor) -> Tensor:
        """Each channel's sum of `rows`, `(h,)`, over its points with values: `(C,)`, float64."""
        return self.valid.sum(dim=-1).double() @ rows.double()

    def globe_weight(self, rows: Tensor) -> Tensor:
        """`weight`, summed over all rows of the globe; collective."""
        return self._sum_over_globe(self.weight(rows))

    def zero_invalid(self, values: Tensor) -> Tensor:
        """`(..., C, h, W)` with 0, and no gradient, where there are no values."""
        return values.masked_fill(self.missing, 0)

    def fill_invalid(self, values: Tensor, fills: Tensor) -> Tensor:
        """`(B, C, h, W)` with the channel's fill, of `(C, 1, 1)`, where there are no values."""
        return torch.where(self.valid, values, fills)


Index = tuple[int | slice, ...]  # a place, or several, of what is kept apart


@final
class AreaMean:
    """Collects values of own rows and samples; `result` joins all ranks.

    All scores take fields `(B, ..., C, h, W)`: of B samples, which are added up, with whatever else
    is kept apart behind `index`, for instance lead times.

    Args:
        shape: what values are kept apart, for instance (sources, leads, channels).
        rows: area weight of each own row, `(h,)`; only their ratios matter.
        points: those with values, if not all have them; only they count.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self.rows = rows.double()
        self.points = points
        self.sums = torch.zeros(shape, dtype=torch.float64, device=rows.device)
        self.weights = torch.zeros_like(self.sums)

    def add(self, index: Index, values: Tensor) -> None:
        """Add values `(B, ..., C, h, W)` of all channels to the place `index`."""
        self.sums[index] += weighted_sums(values, self.rows, self.points).sum(dim=0)
        if self.points is None:
            self.weights[index] += len(values) * values.shape[-1] * self.rows.sum()
        else:
            self.weights[index] += len(values) * self.points.weight(self.rows)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The means of the whole globe over all samples, of `shape`, on every rank.

        Collective: every rank calls it, also one that had no samples.
        """
        sums = sum_over_ranks(torch.stack([self.sums, self.weights]), manager)
        return sums[0] / sums[1]


def weighted_sums(values: Tensor, rows: Tensor, points: ValidPoints | None) -> Tensor:
    """`(..., C, h, W)` times the weights `(h,)` of its rows, summed: `(..., C)`, float64."""
    if points is not None:
        values = points.zero_invalid(values)
    return values.double().sum(dim=-1) @ rows


def sum_over_ranks(tensor: Tensor, manager: DomainParallelManager) -> Tensor:
    """The sum of a detached tensor over the domain and the data axis; a collective."""
    return sum_over_data_ranks(manager.transport.sum(tensor.detach()), manager)


def sum_over_data_ranks(tensor: Tensor, manager: DomainParallelManager) -> Tensor:
    """The sum of a tensor, which is changed, over the data axis alone; a collective."""
    if manager.data_parallel_size > 1:
        dist.all_reduce(tensor, group=manager.data_parallel_group)
    return tensor


@final
class RootMeanSquare:
    """Collects squared errors of own rows and samples; `result` joins all ranks.

    Args:
        shape: what errors are kept apart, for instance (sources, leads, channels).
        rows: area weight of each own row, `(h,)`; only their ratios matter.
        points: those with values, if not all have them; only they count.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._squares = AreaMean(shape, rows, points)

    def add(self, index: Index, error: Tensor) -> None:
        """Add errors `(B, ..., C, h, W)` of all channels to the place `index`."""
        self._squares.add(index, error.double().square())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The errors of the whole globe over all samples, of `shape`, on every rank.

        Collective: every rank calls it, also one that had no samples.
        """
        return self._squares.result(manager).sqrt()


@final
class Bias:
    """Collects errors of own rows and samples; the arguments are those of `AreaMean`."""

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._errors = AreaMean(shape, rows, points)

    def add(self, index: Index, forecast: Tensor, truth: Tensor) -> None:
        """Add fields `(B, ..., C, h, W)` of all channels to the place `index`."""
        self._errors.add(index, forecast.double() - truth.double())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The mean errors of the whole globe, of `shape`, on every rank; collective."""
        return self._errors.result(manager)


@final
class AnomalyCorrelation:
    """Collects, for each initial time, products of anomalies; `result` joins all ranks.

    The coefficient is one of the globe at one time, then averaged over the initial times. Three
    sums per initial time are kept, so that no rank needs another before the end; `fold` makes
    room for as many other initial times.

    Args:
        shape: what is kept apart, for instance (sources, leads, channels).
        samples: how many initial times there are on all ranks together, before `fold` or the end.
        rows: area weight of each own row, `(h,)`; only their ratios matter.
        points: those with values, if not all have them; only they count.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        samples: int,
        rows: Tensor,
        points: ValidPoints | None = None,
    ) -> None:
        self.rows = rows.double()
        self.points = points
        sizes = (3, *shape, samples)
        self.sums = torch.zeros(sizes, dtype=torch.float64, device=rows.device)
        self.folded = torch.zeros(shape, dtype=torch.float64, device=rows.device)
        self.folds = torch.zeros(shape, dtype=torch.float64, device=rows.device)

    def add(self, index: Index, samples: Sequence[int], forecast: Tensor, truth: Tensor) -> None:
        """Add anomalies `(B, ..., C, h, W)` to the place `index`.

        `samples` says which of all initial times the `B` are, each of which comes once.
        """
        one, two = forecast.double(), truth.double()
        for kind, product in enumerate((one * two, one.square(), two.square())):
            found = weighted_sums(product, self.rows, self.points)
            self.sums[(kind, *index)][..., list(samples)] += found.movedim(0, -1)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The mean coefficients, of `shape`, on every rank; NaN where an anomaly is zero.

        Collective: every rank calls it, also one that had no samples.
        """
        if not self.folds.any():
            return _mean(self.sums, manager)
        return self.folded / self.folds

    def fold(self, manager: DomainParallelManager, index: Index = ()) -> None:
        """Keep the mean of all `samples`, which have come, and begin anew with others.

        After it nothing but whole folds counts in `result`. Collective, as `result` is.

        Args:
            index: where in `shape` they have come, for instance at some lead times; everywhere.
        """
        sums = self.sums[(slice(None), *index)]
        self.folded[index] += _mean(sums.contiguous(), manager)
        self.folds[index] += 1
        sums.zero_()


def _mean(sums: Tensor, manager: DomainParallelManager) -> Tensor:
    """Return the mean coefficient over samples, from their three sums; collective."""
    both, one, two = sum_over_ranks(sums, manager)
    mean: Tensor = (both / (one.sqrt() * two.sqrt())).mean(dim=-1)
    return mean


@final
class Activity:
    """Collects squared anomalies of own rows and samples; see `RootMeanSquare`.

    Less than the truth's says that a forecast is too smooth.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._squares = RootMeanSquare(shape, rows, points)

    def add(self, index: Index, anomaly: Tensor) -> None:
        """Add anomalies `(B, ..., C, h, W)` of all channels to the place `index`."""
        self._squares.add(index, anomaly.double())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The standard deviations about the climatology, of `shape`, on every rank; collective."""
        return self._squares.result(manager)


MEMBER_DIM = 1  # the dim of an ensemble's members: (B, M, ..., C, h, W)


@final
class FairCRPS:
    """Collects the continuous ranked probability score; the arguments are those of `AreaMean`.

    `E|X - Y| - E|X - X'| / 2`, with X and X' two different members: its expectation does not depend
    on how many members there are. Of one member it is the mean absolute error.
    """

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._scores = AreaMean(shape, rows, points)

    def add(self, index: Index, members: Tensor, truth: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` and truth without M to the place `index`."""
        # Away from the truth they are small numbers, of which sums lose less.
        away = members.double() - truth.double().unsqueeze(MEMBER_DIM)
        self._scores.add(index, away.abs().mean(dim=MEMBER_DIM) - half_pairwise_distance(away))

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The scores of the whole globe, of `shape`, on every rank; collective."""
        return self._scores.result(manager)


def half_pairwise_distance(members: Tensor) -> Tensor:
    """Half the mean distance of two different members: `(B, M, ...)` -> `(B, ...)`.

    Sorted, member i (from 1) is above i - 1 others and below M - i.
    """
    count = members.shape[MEMBER_DIM]
    if count == 1:
        return torch.zeros_like(members[:, 0])
    above = 2 * torch.arange(1, count + 1, dtype=members.dtype, device=members.device) - count - 1
    ordered = members.sort(dim=MEMBER_DIM).values
    return torch.einsum("m,bm...->b...", above, ordered) / (count * (count - 1))


@final
class EnsembleSpread:
    """Collects the unbiased variance of the members; the arguments are those of `AreaMean`."""

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._variances = AreaMean(shape, rows, points)

    def add(self, index: Index, members: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` to the place `index`."""
        several = members.double()
        if several.shape[MEMBER_DIM] > 1:
            variance = several.var(dim=MEMBER_DIM, correction=1)
        else:
            variance = torch.zeros_like(several[:, 0])
        self._variances.add(index, variance)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The root of the mean variance, of `shape`, on every rank; collective. 0 of one member."""
        return self._variances.result(manager).sqrt()


@final
class EnsembleMeanRMSE:
    """Collects squared errors of the ensemble's mean; see `RootMeanSquare`."""

    def __init__(
        self, shape: tuple[int, ...], rows: Tensor, points: ValidPoints | None = None
    ) -> None:
        self._errors = RootMeanSquare(shape, rows, points)

    def add(self, index: Index, members: Tensor, truth: Tensor) -> None:
        """Add members `(B, M, ..., C, h, W)` and truth without M to the place `index`."""
        self._errors.add(index, members.double().mean(dim=MEMBER_DIM) - truth.double())

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The root-mean-square errors, of `shape`, on every rank; collective."""
        return self._errors.result(manager)


EARTH_RADIUS = 6_367_500.0  # m, the mean of the polar and the equatorial one, as in WeatherBench 2
# From and to which latitude, in degrees north.
LATITUDE_BANDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"30N to 60N": (30.0, 60.0), "20S to 20N": (-20.0, 20.0), "60S to 30S": (-60.0, -30.0)}
)


def latitude_band_weights(
    latitude: NDArray[np.float64], bands: Mapping[str, tuple[float, float]] = LATITUDE_BANDS
) -> Tensor:
    """Area weights of all rows, zero outside of each band: `(H,)` -> `(K, H)`, float64."""
    weights = row_weights(latitude)
    inside = [(latitude >= south) & (latitude <= north) for south, north in bands.values()]
    return torch.from_numpy(np.stack(inside) * weights)


@final
class ZonalSpectra:
    """Collects power spectra of own rows and samples; `result` joins all ranks.

    A row with a point without values has no spectrum and is left out.

    Args:
        shape: what spectra are kept apart, for instance (sources, leads, channels).
        bands: weight of each own row in each band, `(K, h)`; only ratios within a band matter.
        latitude: of own rows, `(h,)`, in degrees.
        columns: of the globe, W.
        points: those with values, if not all have them.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        bands: Tensor,
        latitude: Tensor,
        columns: int,
        points: ValidPoints | None = None,
    ) -> None:
        self.bands = bands.double()
        whole = None if points is None else points.valid.all(dim=-1)
        self._complete_rows = whole  # (C, h)
        circles = 2 * torch.pi * EARTH_RADIUS * torch.deg2rad(latitude.double()).cos().abs()
        times = torch.full((columns // 2 + 1,), 2.0, dtype=torch.float64, device=bands.device)
        times[0] = 1.0
        self._lengths = circles[:, None] * times
        sizes = (*shape, len(bands), columns // 2 + 1)
        self.sums = torch.zeros(sizes, dtype=torch.float64, device=bands.device)
        self.weights = torch.zeros(sizes[:-1], dtype=torch.float64, device=bands.device)

    def add(self, index: Index, fields: Tensor) -> None:
        """Add the spectra of fields `(B, ..., C, h, W)` of all channels to the place `index`."""
        channels, height = fields.shape[-3:-1]
        rows = self.bands.expand(channels, -1, height)
        if self._complete_rows is not None:
            rows = rows * self._complete_rows[:, None]
            fields = fields.masked_fill(~self._complete_rows[:, :, None], 0)
        waves = torch.fft.rfft(fields.double(), norm="forward")
        # Part by part: to sum pairs of numbers takes torch fifteen times as long.
        power = (waves.real.square() + waves.imag.square()).sum(dim=0) * self._lengths
        self.sums[index] += rows @ power
        self.weights[index] += len(fields) * rows.sum(dim=-1)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The mean spectra, of `shape + (K, W // 2 + 1)`, on every rank; NaN where no row is.

        Collective: every rank calls it, also one that had no samples.

        Units:
            Those of the fields squared, times metres.
        """
        sums = sum_over_ranks(self.sums, manager)
        return sums / sum_over_ranks(self.weights, manager)[..., None]


Field = NDArray[np.float64]
Fields = NDArray[np.float32]


@final
@dataclass(frozen=True)
class ErrorMap:
    """The errors of one channel at one lead time.

    Shapes:
        rmse and bias `(H, W)`, in the channel's unit; NaN where there are no values.
    """

    channel: int
    hours: int
    rmse: Field
    bias: Field


@final
class ErrorMapAccumulator:
    """Sums errors of a few channels, so that memory does not grow with the forecasts.

    Args:
        channels: their places among all.
        lead: the place of the lead time.
    """

    def __init__(self, channels: Sequence[int], lead: int, hours: int, grid: tuple[int, int]):
        self._lead, self._hours = lead, hours
        self._count = 0
        self._errors = {channel: np.zeros(grid) for channel in channels}
        self._squares = {channel: np.zeros(grid) for channel in channels}

    def add(self, leads: slice, first: int, forecast: Fields, truth: Fields) -> None:
        """Add the errors at the lead time, if it is among these.

        The first channel's forecasts are the ones that are counted.

        Args:
            leads: indices of the lead times.
            first: the index of the first of the channels.
            forecast: `(leads, M, C, H, W)`, of whose members the mean is taken.
            truth: `(leads, C, H, W)`.
        """
        if not leads.start <= self._lead < leads.stop:
            return
        self._count += first == 0
        lead = self._lead - leads.start
        for channel in self._errors:
            if first <= channel < first + truth.shape[1]:
                mean = forecast[lead, :, channel - first].mean(axis=0, dtype=np.float64)
                error = mean - truth[lead, channel - first]
                self._errors[channel] += error
                self._squares[channel] += error**2

    def result(self) -> list[ErrorMap]:
        """One map for each channel."""
        return [
            ErrorMap(c, self._hours, np.sqrt(self._squares[c] / self._count), total / self._count)
            for c, total in self._errors.items()
        ]


# Of which fields there is each score. A climatology has no anomaly; that of the truth is what a
# forecast's activity is compared with.
SCORE_SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rmse": ("forecast", "persistence", "climatology"),
        "acc": ("forecast", "persistence"),
        "bias": ("forecast", "persistence", "climatology"),
        "activity": ("forecast", "truth"),
        "crps": ("forecast", "persistence", "climatology"),
        "spread": ("forecast",),
    }
)
ENSEMBLE_SCORES = ("crps", "spread")
SPECTRA_SOURCES = ("forecast", "truth")


@final
@dataclass(frozen=True)
class GridGeometry:
    """The rows that fields have, and what they weigh.

    Shapes:
        rows `(h,)`; bands `(K, h)`; latitude `(h,)` degrees; columns is W.
    """

    rows: Tensor
    bands: Tensor
    latitude: Tensor
    columns: int


@final
class VariableScores:
    """Collects the scores of the C levels of a variable.

    Of an ensemble, the deterministic scores are those of its mean and the spectra those of its
    members, as in WeatherBench 2. What is kept does not grow with the number of initial times.

    Args:
        sizes: lead times and channels.
        members: of the forecast; 1 for none.
        points: those with values, if not all have them.
    """

    def __init__(
        self, sizes: tuple[int, int], members: int, globe: GridGeometry, points: ValidPoints | None
    ) -> None:
        leads, channels = sizes
        shapes = {name: (len(of), leads, channels) for name, of in SCORE_SOURCES.items()}
        self._rmse = RootMeanSquare(shapes["rmse"], globe.rows, points)
        self._acc = AnomalyCorrelation(shapes["acc"], 1, globe.rows, points)
        self._bias = Bias(shapes["bias"], globe.rows, points)
        self._activity = Activity(shapes["activity"], globe.rows, points)
        self._crps = FairCRPS(shapes["crps"], globe.rows, points)
        self._spread = EnsembleSpread(shapes["spread"], globe.rows, points)
        self._spectra = ZonalSpectra(
            (len(SPECTRA_SOURCES), leads, channels),
            globe.bands,
            globe.latitude,
            globe.columns,
            points,
        )
        self._ensemble = members > 1

    def add(
        self, leads: slice, members: Tensor, truth: Tensor, guesses: tuple[Tensor, Tensor]
    ) -> None:
        """Add the forecasts from the initial time that is not yet ended, at some lead times.

        Args:
            members: `(M, leads, C, h, W)`, M = 1 without an ensemble.
            truth: `(leads, C, h, W)`.
            guesses: persistence, `(1, C, h, W)`, and climatology, `(leads, C, h, W)`.
        """
        members, truth = members.double(), truth.double()
        persistence, normal = (guess.double() for guess in guesses)
        mean = members.mean(dim=0)
        for source, field in enumerate((mean, persistence, normal)):
            self._rmse.add((source, leads), (field - truth)[None])
            self._bias.add((source, leads), field[None], truth[None])
        for source, field in enumerate((mean, persistence)):
            self._acc.add((source, leads), [0], (field - normal)[None], (truth - normal)[None])
        for source, field in enumerate((mean, truth)):
            self._activity.add((source, leads), (field - normal)[None])
        for source, fields in enumerate((members, truth[None])):
            self._spectra.add((source, leads), fields)
        if self._ensemble:
            constant = persistence.expand_as(truth)
            for source, several in enumerate((members, constant[None], normal[None])):
                self._crps.add((source, leads), several[None], truth[None])
            self._spread.add((0, leads), members[None])

    def end_initial_time(self, leads: slice, manager: DomainParallelManager) -> None:
        """Say that these lead times from one initial time have been added; collective."""
        self._acc.fold(manager, (slice(None), leads))

    def result(self, manager: DomainParallelManager) -> tuple[dict[str, Tensor], Tensor]:
        """Scores by name, `(sources, leads, C)` each, and spectra, `(2, leads, C, K, W // 2 + 1)`.

        Collective.
        """
        found = {
            "rmse": self._rmse.result(manager),
            "acc": self._acc.result(manager),
            "bias": self._bias.result(manager),
            "activity": self._activity.result(manager),
        }
        if self._ensemble:
            found |= {"crps": self._crps.result(manager), "spread": self._spread.result(manager)}
        return found, self._spectra.result(manager)


def unit_of(store: Store, variable: str) -> str:
    """What the store says, else the unit of the variable; nothing where neither is known."""
    known = KNOWN_VARIABLES.get(variable) or KNOWN_VARIABLES.get(
        canonical_name(variable), KnownVariable("")
    )
    return store.units(variable).strip() or known.unit
