"""The table of metrics, which scores, files, pages, comparisons and plots are driven by.

`METRICS` has one `Metric` for each score: its name and words, which values are better, and how it
is computed. `ScoreSums` accumulates them for a stored forecast (`score`) and for the forecasts of
a run (`held_out`); both pass their fields as `ScoredFields`. To add a metric, add an entry to
`METRICS`; a score that no accumulator of `metrics` computes needs one there. `score` computes those
without an accumulator itself: the wind vector's error from that of its components, SEEPS, and the
CRPS of area means.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.channels import Channel
from credit_dp.data.valid_points import ValidPoints
from credit_dp.data.winds import WIND_COMPONENTS
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.metrics import (
    Activity,
    AnomalyCorrelation,
    AreaMean,
    EnergyScore,
    EnsembleSpread,
    FairCRPS,
    MeanAccumulator,
    RootMeanSquare,
)
from credit_dp.variable_names import canonical_name

FORECAST, PERSISTENCE, CLIMATOLOGY, TRUTH = "forecast", "persistence", "climatology", "truth"
BASELINES = (PERSISTENCE, CLIMATOLOGY)
SOURCES = (FORECAST, *BASELINES)  # what is compared with the truth
SPECTRA_SOURCES = (FORECAST, TRUTH)
MEAN, SPREAD, ERROR = "mean", "spread", "error"
# Of an ensemble: the power of its mean, of the members about it, and of its error, too.
ENSEMBLE_SPECTRA_SOURCES = (*SPECTRA_SOURCES, MEAN, SPREAD, ERROR)
CRPS_SCALES = (500, 1000)  # km


class Better(Enum):
    """Which values of a metric are better."""

    SMALLER = "smaller"
    LARGER = "larger"
    CLOSER_TO_ZERO = "closer to zero"
    CLOSER_TO_ONE = "closer to one"
    CLOSER_TO_TRUTH = "closer to the truth's own value"
    UNDECIDED = "undecided"

    @property
    def ranks_sources(self) -> bool:
        """Whether one source of a scorecard can be the best.

        A baseline may have, for instance, a small bias without being a good forecast.
        """
        return self in (Better.SMALLER, Better.LARGER)

    def best_source(self, values: NDArray[np.float64]) -> int | None:
        """Return the index of the best source; NaN never wins. None if there is no best source."""
        if not self.ranks_sources or not np.isfinite(values).any():
            return None
        return int(np.nanargmin(values) if self is Better.SMALLER else np.nanargmax(values))

    def cost(self, scores: Mapping[str, float]) -> float | None:
        """Return a number that is smaller for better forecasts; None if none can be better."""
        value = scores[FORECAST]
        match self:
            case Better.SMALLER:
                return value
            case Better.LARGER:
                return -value
            case Better.CLOSER_TO_ZERO:
                return abs(value)
            case Better.CLOSER_TO_ONE:
                return abs(value - 1)
            case Better.CLOSER_TO_TRUTH:
                return abs(value - scores[TRUTH]) if TRUTH in scores else None
            case Better.UNDECIDED:
                return None

    @property
    def note(self) -> str:
        """Return the words of a page about the best source."""
        notes = {
            Better.SMALLER: " Smaller is better; the best of each lead time is bold.",
            Better.LARGER: " The best of each lead time is bold.",
        }
        return notes.get(self, "")


class ScoredFields(ABC):
    """Forecasts from B initial times beside the truth, persistence and climatology.

    Scores that are not of ensembles are those of the ensemble mean, as in WeatherBench 2.

    Shapes:
        `(B, ..., C, h, W)` in the channels' units, with lead times in place of the dots, if any;
        `members` is `(B, M, ..., C, h, W)`.

    Attributes:
        samples: indices of the B initial times among those of all ranks.
    """

    samples: Sequence[int]

    @property
    @abstractmethod
    def truth(self) -> Tensor:
        """Return the truth."""

    @abstractmethod
    def members(self, source: str) -> Tensor:
        """Return the members of the forecast; any other source is one member."""

    @abstractmethod
    def error(self, source: str) -> Tensor:
        """Return a source minus the truth."""

    @abstractmethod
    def anomaly(self, source: str) -> Tensor:
        """Return a source minus the climatology."""


@final
@dataclass(frozen=True)
class Extent:
    """The points and initial times that scores are averaged over.

    Attributes:
        rows: area weight of each local row, `(h,)`; only their ratios matter.
        points: points with values; None: all points have values.
        samples: number of initial times, of all ranks together, whose sums are kept at once.
    """

    rows: Tensor
    points: ValidPoints | None
    samples: int
    members: int = 1


Shape = tuple[int, ...]  # (sources, leads, channels)
AccumulatorFactory = Callable[[Shape, Extent], MeanAccumulator]


def over_area(
    create: Callable[[Shape, Tensor, ValidPoints | None], MeanAccumulator],
) -> AccumulatorFactory:
    """Return the factory of a score that sums over all initial times."""
    return lambda shape, extent: create(shape, extent.rows, extent.points)


def over_initial_times(
    create: Callable[[Shape, int, Tensor, ValidPoints | None], MeanAccumulator],
) -> AccumulatorFactory:
    """Return the factory of a score that keeps the sums of each initial time."""
    return lambda shape, extent: create(shape, extent.samples, extent.rows, extent.points)


def energy_score(shape: Shape, extent: Extent) -> MeanAccumulator:
    """Return the accumulator of the energy score, which depends on the number of members."""
    return EnergyScore(shape, extent.samples, extent.rows, extent.points, members=extent.members)


def every_channel(channel: Channel) -> bool:
    """Return true: most metrics are scores of every channel."""
    return True


def is_eastward_wind(channel: Channel) -> bool:
    """Whether a channel is the eastward component of a wind, under any known name."""
    return canonical_name(channel.variable) in WIND_COMPONENTS


def is_precipitation(channel: Channel) -> bool:
    """Whether a channel is total precipitation, of any span and under any known name."""
    return canonical_name(channel.variable).startswith("total_precipitation")


def northward_index(channel: Channel, channels: Sequence[Channel]) -> int | None:
    """Return the index of the northward component of a wind, at the same level; None without it."""
    needed = WIND_COMPONENTS.get(canonical_name(channel.variable))
    for index, other in enumerate(channels):
        if canonical_name(other.variable) == needed and other.level == channel.level:
            return index
    return None


def panel_name(metric: "Metric", name: str) -> str:
    """Return what a channel is called above a metric's curves: `wind_500` for a wind vector."""
    is_vector = metric.channels is is_eastward_wind
    return name.replace("u_component_of_", "") if is_vector else name


def wind_vector_rmse(
    channels: Sequence[Channel], rmse: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return the root-mean-square error of the wind vector, at the eastward component's channels.

    The squared error of a vector is the sum of its components', and so is their mean.

    Args:
        rmse: their root-mean-square errors, `(sources, ..., C)`.

    Returns:
        `(sources, ..., C)`, NaN at all other channels; None without both components of a wind.

    Source: Rasp et al. 2024, "WeatherBench 2", section 3.2.
    """
    errors = np.full_like(rmse, np.nan)
    for index, channel in enumerate(channels):
        if is_eastward_wind(channel):
            partner = northward_index(channel, channels)
            if partner is not None:
                errors[..., index] = np.hypot(rmse[..., index], rmse[..., partner])
    return None if np.isnan(errors).all() else errors


def channel_unit(unit: str) -> str:
    """Return the unit of a score that is in the unit of its channel."""
    return unit


def no_unit(unit: str) -> str:
    """Return the unit of a score without dimension, such as a correlation."""
    return "1"


@final
@dataclass(frozen=True)
class Metric:
    """A score: what it is called, which values are better, and how it is computed.

    Attributes:
        accumulator: factory of its accumulator: `over_area(AreaMean)` averages over the globe and
            all initial times. None: `score` computes it.
        inputs: returns what the accumulator's `add` takes, for a source.
        channels: whether it is a score of a channel.
        sources: the fields that it is computed for, the forecast first.
        root: whether it is the root of a mean over initial times.
        ensemble: whether it needs members, so that single forecasts do not have it.
        scale: radius in km of the neighbourhoods whose means are scored, on global grids only; 0:
            points are.
        may_be_undefined: whether NaN is a valid value.
        in_terminal: whether `evaluate` and `compare` print it. They write every metric to files.
        in_runs: whether it is a final score of training runs, too, and one of their validation.
        in_ensemble_runs: whether it is one of runs with several members only.
        drawn_with: other scores of the forecast in the same plot: legend labels -> metric names.
    """

    name: str
    label: str
    title: str
    explanation: str
    better: Better
    accumulator: AccumulatorFactory | None = None
    inputs: Callable[[ScoredFields, str], tuple[Any, ...]] = lambda fields, source: ()
    channels: Callable[[Channel], bool] = every_channel
    sources: tuple[str, ...] = SOURCES
    unit: Callable[[str], str] = channel_unit
    root: bool = False
    ensemble: bool = False
    scale: int = 0
    may_be_undefined: bool = False
    in_terminal: bool = False
    in_runs: bool = False
    in_ensemble_runs: bool = False
    drawn_with: Mapping[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """Return the explanation with the words about the best source."""
        return self.explanation + self.better.note


# In the order of files and pages.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="rmse",
            label="RMSE",
            title="Root-mean-square error",
            explanation="Weighted by area; the root is taken after the mean over initial times.",
            better=Better.SMALLER,
            root=True,
            accumulator=over_area(RootMeanSquare),
            inputs=lambda fields, source: (fields.error(source),),
            in_terminal=True,
            in_runs=True,
        ),
        Metric(
            name="wind_vector_rmse",
            label="wind vector RMSE",
            title="Root-mean-square error of the wind vector",
            explanation="Root of the sum of the components' mean squared errors, listed at the "
            "eastward component.",
            better=Better.SMALLER,
            root=True,
            channels=is_eastward_wind,
            may_be_undefined=True,
        ),
        Metric(
            name="seeps",
            label="SEEPS",
            title="Stable equitable error in probability space",
            explanation="Of precipitation in three classes: dry, light and heavy. Points that are "
            "dry on less than 10 % or more than 85 % of the dates are left out. 0 is perfect, "
            "1 has no skill.",
            better=Better.SMALLER,
            channels=is_precipitation,
            unit=no_unit,
            may_be_undefined=True,
        ),
        Metric(
            name="acc",
            label="ACC",
            title="Anomaly correlation",
            explanation="Correlation of forecast and true anomaly over the globe, averaged over "
            "initial times. 1 is perfect; it is undefined for climatology.",
            better=Better.LARGER,
            accumulator=over_initial_times(AnomalyCorrelation),
            inputs=lambda fields, source: (
                fields.samples,
                fields.anomaly(source),
                fields.anomaly(TRUTH),
            ),
            sources=(FORECAST, PERSISTENCE),  # the climatology has no anomaly
            unit=no_unit,
            may_be_undefined=True,
            in_terminal=True,
        ),
        Metric(
            name="bias",
            label="bias",
            title="Bias",
            explanation="Forecast minus truth.",
            better=Better.CLOSER_TO_ZERO,
            accumulator=over_area(AreaMean),
            inputs=lambda fields, source: (fields.error(source),),
        ),
        Metric(
            name="activity",
            label="activity",
            title="Activity: standard deviation of the anomaly",
            explanation="A forecast with less activity than the truth is too smooth.",
            better=Better.CLOSER_TO_TRUTH,
            root=True,
            accumulator=over_area(Activity),
            inputs=lambda fields, source: (fields.anomaly(source),),
            sources=(FORECAST, TRUTH),
        ),
        Metric(
            name="crps",
            label="CRPS",
            title="Continuous ranked probability score (fair)",
            explanation="In the unit of the variable; of a single forecast, as persistence and "
            "climatology are, the mean absolute error.",
            better=Better.SMALLER,
            accumulator=over_area(FairCRPS),
            inputs=lambda fields, source: (fields.members(source), fields.truth),
            in_ensemble_runs=True,
        ),
        *(
            Metric(
                name=f"crps_{scale}km",
                label=f"CRPS, {scale} km",
                title=f"CRPS of means over {scale} km",
                explanation=f"The fair CRPS of means over all points at most {scale} km away.",
                better=Better.SMALLER,
                ensemble=True,
                scale=scale,
            )
            for scale in CRPS_SCALES
        ),
        Metric(
            name="energy_score",
            label="energy score",
            title="Energy score",
            explanation="The CRPS of whole fields: distances are root-mean-square differences over "
            "the globe. For persistence and climatology the root-mean-square error of each "
            "initial time, averaged.",
            better=Better.SMALLER,
            accumulator=energy_score,
            inputs=lambda fields, source: (fields.samples, fields.members(source), fields.truth),
            ensemble=True,
        ),
        Metric(
            name="spread",
            label="spread",
            title="Ensemble spread",
            # Source: Fortin et al. 2014, "Why should ensemble spread match the RMSE of the
            # ensemble mean?"
            explanation="Standard deviation of the members about their mean. For a reliable "
            "ensemble, the root-mean-square error of the mean is the spread times the root of "
            "1 + 1 / members.",
            better=Better.UNDECIDED,
            root=True,
            accumulator=over_area(EnsembleSpread),
            inputs=lambda fields, source: (fields.members(source),),
            sources=(FORECAST,),
            ensemble=True,
            in_ensemble_runs=True,
            # Only meaningful next to the error of the ensemble mean.
            drawn_with={"error of the mean": "rmse"},
        ),
    )
}


def run_metrics(members: int) -> list[Metric]:
    """Return the metrics of a training run whose forecasts have this many members."""
    metrics = METRICS.values()
    return [m for m in metrics if m.in_runs or (m.in_ensemble_runs and members > 1)]


def comparison_metrics() -> list[Metric]:
    """Return the metrics in the order of comparisons: metrics that rank sources come first."""
    # False sorts before True, and equal keys keep the order of the table.
    return sorted(
        METRICS.values(),
        key=lambda metric: (not metric.better.ranks_sources, metric.better is Better.UNDECIDED),
    )


@final
class ScoreSums:
    """Accumulates metrics of C channels at all lead times, for every source of each metric.

    Args:
        sizes: number of lead times and of channels.
    """

    def __init__(self, metrics: Iterable[Metric], sizes: tuple[int, int], extent: Extent) -> None:
        self._sums = [
            (metric, metric.accumulator((len(metric.sources), *sizes), extent))
            for metric in metrics
            if metric.accumulator is not None
        ]

    def add(self, leads: int | slice, fields: ScoredFields) -> None:
        """Add forecasts at one or several lead times, without communication."""
        for metric, sums in self._sums:
            for index, source in enumerate(metric.sources):
                sums.add((index, leads), *metric.inputs(fields, source))

    def take_means(self, manager: DomainParallelManager, leads: slice) -> dict[str, Tensor]:
        """Return the means of what was added at these lead times, and begin anew; collective.

        The means are those of `finish`: by name, `(sources, leads, C)` each.
        """
        index = (slice(None), leads)
        means = {metric.name: sums.mean(manager, index) for metric, sums in self._sums}
        for _, sums in self._sums:
            sums.clear(index)
        return means

    def finish(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scores of means over all initial times."""
        return {metric.name: sums.finish(means[metric.name]) for metric, sums in self._sums}

    def result(self, manager: DomainParallelManager) -> dict[str, Tensor]:
        """Return the scores by name, `(sources, leads, C)` each, on every rank; collective."""
        return {metric.name: sums.result(manager) for metric, sums in self._sums}
