"""Scores of each initial time: their file, and whether two forecasts differ in more than chance.

`scores_by_date.zarr` has what each initial time contributes to every score, before any root is
taken: any later mean over dates, a season or a test needs the forecasts no more.

Scores of neighbouring initial times are alike, as the weather is: a test that takes them for
independent finds differences where there are none. `paired_test` is that of Geer (2016), a paired
t-test with the standard error of a second-order autoregressive process. A bootstrap of blocks, the
other usual one, needs a length of blocks and random numbers.

Source: Geer 2016, "Significance of changes in medium-range forecast scores", Tellus A 68, 30229.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.grid import GLOBAL
from credit_dp.evaluation.metric_table import FORECAST, METRICS, SOURCES, TRUTH
from credit_dp.evaluation.scorecard import Array, Scorecard

NAME = "scores_by_date.zarr"
DIMS = ("region", "source", "time", "prediction_timedelta", "channel")
ALL_SOURCES = (*SOURCES, TRUTH)


def scores_by_date(card: Scorecard) -> xr.Dataset:
    """Return what each initial time has to the scores, a variable for each metric.

    Those with `root` in their attributes are means of squares, of which the root is taken after
    the mean over initial times. A source without a metric is NaN.
    """
    times = np.asarray(card.times)
    names = [channel.name for channel in card.channels]
    shape = (len(card.means), len(ALL_SOURCES), len(times), len(card.hours), len(names))
    variables = {}
    for name in card.means[GLOBAL]:
        values = np.full(shape, np.nan)
        for region, means in enumerate(card.means.values()):
            for source, field in zip(METRICS[name].sources, means[name], strict=True):
                values[region, ALL_SOURCES.index(source)] = field
        attributes = {"long_name": METRICS[name].title, "root": int(METRICS[name].root)}
        variables[name] = (DIMS, values, attributes)
    coordinates = {
        "region": ("region", np.array([*card.means], object)),
        "source": ("source", np.array(ALL_SOURCES, object)),
        "time": ("time", card.calendar.dates(times)),
        "prediction_timedelta": (
            "prediction_timedelta",
            np.array(card.hours, "m8[h]").astype("m8[ns]"),
        ),
        "channel": ("channel", np.array(names, object)),
        "units": ("channel", np.array(card.units, object)),
    }
    return xr.Dataset(variables, coordinates)


def write_scores_by_date(card: Scorecard, folder: Path) -> None:
    """Write the file into a folder.

    Raises:
        OSError: it can't be written.
    """
    scores_by_date(card).to_zarr(folder / NAME, mode="w", zarr_format=2, consolidated=True)


def read_scores_by_date(folder: Path) -> xr.Dataset | None:
    """Read the file of a folder; None if it has none, as those of earlier versions."""
    if not (folder / NAME).is_dir():
        return None
    with xr.open_zarr(folder / NAME, decode_timedelta=True) as scores:
        loaded: xr.Dataset = scores.load()
        return loaded


class PairedTest(NamedTuple):
    """The test of a mean difference; arrays have the shape of the series without their times.

    Attributes:
        difference: its mean.
        error: the standard error of that mean.
        independent: number of independent cases that have the same standard error.
        p: probability of a difference of this size or more, on either side, if there is none.
    """

    difference: Array
    error: Array
    independent: Array
    p: Array


MIN_TIMES = 10  # below them autocorrelations say nothing
MAX_CORRELATION = 0.99


def paired_test(differences: Array, positions: NDArray[np.int64]) -> PairedTest:
    """Test whether the mean of a series of differences is zero.

    Args:
        differences: `(T, ...)`.
        positions: of their times on an evenly spaced axis, in ascending order; some may be missing.
    """
    count = len(differences)
    mean = differences.mean(axis=0)
    anomaly = differences - mean
    variance = (anomaly**2).mean(axis=0)
    # Rounding leaves a variance a little above zero where all differences are the same.
    is_constant = variance <= (1e-12 * np.abs(differences).max(axis=0)) ** 2
    variance = np.where(is_constant, np.nan, variance)
    first, second = (autocovariance(anomaly, positions, lag) / variance for lag in (1, 2))
    # Estimates from a short series are too small. Source: Kendall 1954, "Note on bias in the
    # estimation of autocorrelation".
    first = np.minimum(first + (1 + 3 * first) / count, MAX_CORRELATION)
    second = np.clip(second + (1 + first + 3 * second) / count, -MAX_CORRELATION, MAX_CORRELATION)
    independent = count / np.maximum(1, inflation(first, second))
    error = np.sqrt(variance * count / (count - 1) / independent)
    p = t_test(np.abs(mean) / error, np.maximum(independent - 1, 1))
    # A difference that is always the same is no chance, and none is none.
    error, independent = np.where(is_constant, 0, error), np.where(is_constant, count, independent)
    return PairedTest(mean, error, independent, np.where(is_constant, mean == 0, p))


def autocovariance(anomaly: Array, positions: NDArray[np.int64], lag: int) -> Array:
    """Return the autocovariance of a series `(T, ...)`; zero if no two times have this lag."""
    later = np.searchsorted(positions, positions + lag)
    has_later = np.flatnonzero(later < len(positions))
    has_later = has_later[positions[later[has_later]] == positions[has_later] + lag]
    total: Array = (anomaly[has_later] * anomaly[later[has_later]]).sum(axis=0) / len(positions)
    return total


def inflation(first: Array, second: Array) -> Array:
    """Return how much larger the variance of a mean is than that of a mean of independent values.

    Args:
        first, second: autocorrelations of a second-order autoregressive process.

    Source: Geer 2016, and Wilks 2019, "Statistical Methods in the Atmospheric Sciences".
    """
    phi1 = first * (1 - second) / (1 - first**2)
    phi2 = (second - first**2) / (1 - first**2)
    factor: Array = (1 - first * phi1 - second * phi2) / np.maximum(1 - phi1 - phi2, 1e-6) ** 2
    return factor


QUADRATURE = np.polynomial.legendre.leggauss(64)
TAIL_WIDTH = 12  # standard deviations, beyond which a normal distribution has no weight


def t_test(t: Array, freedom: Array) -> Array:
    """Return the probability that Student's t is not between -t and t."""
    # With t = sqrt(freedom) tan(angle) the density is a power of the angle's cosine.
    nodes, weights = QUADRATURE

    def weight(start: Array) -> Array:
        stop = np.minimum(np.pi / 2, start + TAIL_WIDTH / np.sqrt(freedom))
        angles = start[..., None] + (stop - start)[..., None] * (nodes + 1) / 2
        total: Array = np.cos(angles) ** (freedom - 1)[..., None] @ weights * (stop - start) / 2
        return total

    return weight(np.arctan(t / np.sqrt(freedom))) / weight(np.zeros_like(t))


def compare_by_date(other: xr.Dataset, first: xr.Dataset, score: str) -> xr.Dataset | None:
    """Test where a score of two forecasts differs, at their common initial times.

    Returns:
        `p` and `independent` of the `PairedTest`, by region, lead time and channel. None if they
        have not `MIN_TIMES` initial times in common, or this score.
    """
    if score not in other or score not in first:
        return None
    one, two = xr.align(
        other[score].sel(source=FORECAST), first[score].sel(source=FORECAST), join="inner"
    )
    times = one.get_index("time")
    if len(times) < MIN_TIMES:
        return None
    elapsed = np.array((times - times[0]).values, "m8[s]").astype(np.int64)
    positions = elapsed // np.gcd.reduce(elapsed)
    ordered = [array.transpose("time", *DIMS[:1], *DIMS[3:]) for array in (one, two)]
    # Scores that are undefined in one forecast are so in the test.
    test = paired_test(ordered[0].values - ordered[1].values, positions)
    result = ordered[0].isel(time=0, drop=True)
    return xr.Dataset(
        {"p": result.copy(data=test.p), "independent": result.copy(data=test.independent)}
    )
