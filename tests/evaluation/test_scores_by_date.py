"""Scores of each initial time, and tests of differences that know autocorrelation."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from credit_dp.data.calendar import Calendar
from credit_dp.evaluation import metrics
from credit_dp.evaluation.metric_table import METRICS, Extent
from credit_dp.evaluation.scorecard import Scorecard
from credit_dp.evaluation.scores_by_date import (
    compare_by_date,
    paired_test,
    read_scores_by_date,
    scores_by_date,
    t_test,
    write_scores_by_date,
)
from tests.evaluation import forecasts
from tests.evaluation.forecasts import scored
from tests.evaluation.test_score import GRID


def of_one_time(folder: Path, path: Path, time: np.datetime64) -> Scorecard:
    date = str(time)[:16]
    return scored(folder, path, dates=(date, date), regions=("tropics",))


def test_each_initial_time_has_the_scores_of_a_forecast_of_its_own(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=3)
    path = forecasts.write(made, folder / "by_date.zarr")
    card = scored(folder, path, regions=("tropics",))
    write_scores_by_date(card, folder)
    by_date = read_scores_by_date(folder)
    assert by_date is not None
    assert {*by_date.data_vars} == {*card.scores}
    assert by_date["time"].values.tolist() == made["time"].values.tolist()
    for time in made["time"].values:
        alone = of_one_time(folder, path, time)
        for name in alone.scores:
            for region, scores in {
                "global": alone.scores,
                "tropics": alone.regions["tropics"],
            }.items():
                found = by_date[name].sel(time=time, region=region)
                found = found.sel(source=list(METRICS[name].sources)).values
                found = np.sqrt(found) if by_date[name].attrs["root"] else found
                assert found == pytest.approx(scores[name], rel=1e-12, abs=1e-9, nan_ok=True), name


def test_means_over_dates_are_those_of_their_definition(folder: Path) -> None:
    observed = forecasts.truth()
    made = forecasts.forecast(observed)
    by_date = scores_by_date(scored(folder, forecasts.write(made, folder / "means.zarr")))
    valid = made["time"] + made["prediction_timedelta"]
    truth = observed["2m_temperature"].sel(time=valid).assign_coords(time=made["time"])
    latitude = made["latitude"].values
    edges = np.concatenate([[90.0], (latitude[1:] + latitude[:-1]) / 2, [-90.0]])
    area = xr.DataArray(
        abs(np.diff(np.sin(np.deg2rad(edges)))), {"latitude": latitude}, ("latitude",)
    )
    squares = (made["2m_temperature"].astype("f8") - truth.astype("f8")) ** 2
    wanted = squares.weighted(area).mean(GRID).transpose("time", "prediction_timedelta")
    found = by_date["rmse"].sel(channel="2m_temperature", source="forecast", region="global")
    assert found.values == pytest.approx(wanted.values, rel=1e-12)


def test_times_of_other_calendars_are_written_as_dates_of_theirs(folder: Path, tmp_path) -> None:
    made = forecasts.forecast(forecasts.truth())
    card = scored(folder, forecasts.write(made, folder / "calendar.zarr"))
    times = np.array(["2000-02-28T12", "2000-03-01"], "M8[s]")
    write_scores_by_date(replace(card, times=times, calendar=Calendar("noleap")), tmp_path)
    found = read_scores_by_date(tmp_path)
    assert found is not None
    assert [date.calendar for date in found["time"].values] == ["noleap"] * 2


def test_the_table_says_of_which_metrics_the_root_is_taken() -> None:
    for metric in METRICS.values():
        if metric.accumulator is not None:
            extent = Extent(torch.ones(3, dtype=torch.float64), None, samples=1, members=2)
            sums = metric.accumulator((1, 1, 1), extent)
            assert metric.root == isinstance(sums, metrics.RootMeanOfPoints), metric.name


# Two-sided probabilities from tables of Student's t.
@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(12.706, 1, 0.05), (2.571, 5, 0.05), (3.169, 10, 0.01), (1.96, 1e6, 0.05), (0, 7, 1)],
)
def test_probabilities_of_students_t(t: float, freedom: float, p: float) -> None:
    assert t_test(np.array(t), np.array(freedom)) == pytest.approx(p, rel=2e-3)


def autoregressive(phi: float, count: int, series: int = 2000) -> np.ndarray:
    random = np.random.default_rng(4)
    noise = random.normal(size=(count + 200, series))
    values = np.zeros_like(noise)
    for step in range(1, len(noise)):
        values[step] = phi * values[step - 1] + noise[step]
    return values[200:]


def test_without_a_difference_one_test_in_twenty_rejects() -> None:
    for phi, count in ((0, 120), (0.3, 120), (0.5, 200), (0.7, 365)):
        test = paired_test(autoregressive(phi, count), np.arange(count))
        rejected = 100 * (test.p < 0.05).mean()
        assert 3 < rejected < 7, (phi, count, rejected)
        # Source of the expected number: the mean of an autoregressive process of first order.
        wanted = count * (1 - phi) / (1 + phi)
        assert np.median(test.independent) == pytest.approx(wanted, rel=0.12), phi


def test_a_difference_is_found_and_its_error_is_that_of_the_mean() -> None:
    series = autoregressive(0.5, 200)
    test = paired_test(series + 1.0, np.arange(200))
    assert (test.p < 0.05).mean() > 0.95
    assert np.median(test.error) == pytest.approx(series.mean(axis=0).std(), rel=0.1)


def test_series_without_variance() -> None:
    test = paired_test(
        np.stack([np.zeros(20), np.full(20, 0.1), np.arange(20.0)], 1), np.arange(20)
    )
    assert test.p[0] == 1
    assert test.p[1] == 0
    assert 0 < test.p[2] < 1


def test_gaps_between_dates_are_no_neighbours() -> None:
    series = autoregressive(0.7, 120)
    pairs = np.sort(np.concatenate([np.arange(0, 120, 6), np.arange(1, 120, 6)]))
    test = paired_test(series[pairs], pairs)
    assert 20 < np.median(test.independent) < 40


def with_dates(values: np.ndarray, source: str = "forecast") -> xr.Dataset:
    """Squared errors of one channel, region and lead time by date."""
    times = np.datetime64("2001-01-01", "ns") + np.arange(len(values)) * np.timedelta64(12, "h")
    dims = ("region", "source", "time", "prediction_timedelta", "channel")
    coords = {
        "region": ["global"],
        "source": [source],
        "time": times,
        "prediction_timedelta": np.array([24], "m8[h]").astype("m8[ns]"),
        "channel": ["t2m"],
    }
    return xr.Dataset({"rmse": (dims, values[None, None, :, None, None])}, coords)


def test_forecasts_are_compared_at_their_common_dates() -> None:
    noise = autoregressive(0.4, 60, 1)[:, 0]
    first = with_dates(10 + noise)
    again = compare_by_date(first, first, "rmse")
    assert again is not None
    assert again["p"].item() == 1
    better = compare_by_date(with_dates(9 + 0.9 * noise), first.isel(time=slice(5, None)), "rmse")
    assert better is not None
    assert better["p"].item() < 1e-3
    assert compare_by_date(first, first.isel(time=slice(9)), "rmse") is None
    assert compare_by_date(first, first, "acc") is None
    assert math.isfinite(better["independent"].item())
