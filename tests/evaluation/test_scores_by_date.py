"""Scores of each initial time, and tests of differences that know autocorrelation."""

import os
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from credit_dp.data.calendar import Calendar
from credit_dp.errors import UserError
from credit_dp.evaluation import metrics
from credit_dp.evaluation.metric_table import METRICS, Extent
from credit_dp.evaluation.scorecard import Scorecard
from credit_dp.evaluation.scores_by_date import (
    DateFile,
    compare_by_date,
    compare_events_by_date,
    jackknife_series,
    paired_test,
    read_scores_by_date,
    scores_by_date,
    t_test,
    temporary_file,
    write_scores_by_date,
)
from tests.evaluation import forecasts
from tests.evaluation.forecasts import scored


def of_one_time(folder: Path, path: Path, time: np.datetime64) -> Scorecard:
    date = str(time)[:16]
    return scored(folder, path, dates=(date, date), regions=("tropics",))


def test_each_initial_time_has_the_scores_of_a_forecast_of_its_own(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=3)
    path = forecasts.write(made, folder / "by_date.zarr")
    card = scored(folder, path, regions=("tropics",))
    write_scores_by_date(card, folder)
    by_date = xr.open_zarr(folder / "scores_by_date.zarr", decode_timedelta=True)
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
    card = scored(folder, forecasts.write(made, folder / "means.zarr"))
    [dates] = card.by_date()
    by_date = scores_by_date(card, dates)
    valid = made["time"] + made["prediction_timedelta"]
    truth = observed["2m_temperature"].sel(time=valid).assign_coords(time=made["time"])
    latitude = made["latitude"].values
    edges = np.concatenate([[90.0], (latitude[1:] + latitude[:-1]) / 2, [-90.0]])
    area = xr.DataArray(
        abs(np.diff(np.sin(np.deg2rad(edges)))), {"latitude": latitude}, ("latitude",)
    )
    squares = (made["2m_temperature"].astype("f8") - truth.astype("f8")) ** 2
    wanted = (
        squares.weighted(area)
        .mean(["latitude", "longitude"])
        .transpose("time", "prediction_timedelta")
    )
    found = by_date["rmse"].sel(channel="2m_temperature", source="forecast", region="global")
    assert found.values == pytest.approx(wanted.values, rel=1e-12)


def test_memory_has_no_room_for_all_dates(folder: Path, tmp_path: Path, monkeypatch) -> None:
    made = forecasts.forecast(forecasts.truth(), members=3)
    path = forecasts.write(made, folder / "blocks.zarr")
    events = {"2m_temperature": [">280"], "temperature": [">265", "<280"]}
    keys = {"regions": ("tropics",), "fss": (3000.0,), "events": events}
    together = scored(folder, path, **keys)
    write_scores_by_date(together, tmp_path / "together")
    monkeypatch.setattr("credit_dp.evaluation.scores_by_date.READ_BYTES", 1)
    monkeypatch.setattr("credit_dp.evaluation.score.STEP_BYTES", 1)  # a channel at once
    one_by_one = scored(folder, path, **keys)
    assert len([*one_by_one.by_date()]) == made.sizes["time"] > 1
    write_scores_by_date(one_by_one, tmp_path / "one-by-one")
    for name, values in together.scores.items():
        assert one_by_one.scores[name] == pytest.approx(values, rel=1e-12, nan_ok=True)
    for one, other in zip(one_by_one.events, together.events, strict=True):
        np.testing.assert_allclose(one.counts["tropics"], other.counts["tropics"], rtol=1e-14)
    stores = [
        xr.open_zarr(tmp_path / name / "scores_by_date.zarr", decode_timedelta=True).load()
        for name in ("together", "one-by-one")
    ]
    xr.testing.assert_allclose(*stores, rtol=1e-12, atol=1e-12)
    assert {"rmse", "event_counts", "event_fractions"} < {*stores[0].data_vars}


def test_a_full_disk_is_one_line() -> None:
    dates = DateFile((1, 2, 3), lambda: FileIO("/dev/full", "r+"))
    with pytest.raises(UserError, match=r"^out: can't be .*No space left.* change out\.$"):
        dates.write(0, slice(0, 2), 0, np.zeros((2, 3)))


def test_a_date_without_all_scores_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite  # a disk may have room for some bytes only, at first
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:5], at))
    dates = DateFile((1, 2, 3), temporary_file)
    dates.write(0, slice(0, 2), 0, np.ones((2, 2)))
    with pytest.raises(RuntimeError, match="lacks a score"):
        next(dates.read())
    dates.write(0, slice(0, 2), 2, np.full((2, 1), 2.0))
    [(times, values)] = dates.read()
    assert times == slice(0, 1)
    assert values.tolist() == [[[1, 1, 2], [1, 1, 2]]]


def test_values_of_several_files_are_read_where_they_lie() -> None:
    one, other = temporary_file(), temporary_file()
    one.write(np.arange(3.0).tobytes())
    other.write(np.arange(10.0, 16.0).tobytes())
    dates = DateFile((1, 2, 3), temporary_file)
    with pytest.raises(ValueError, match="ends early"):
        dates.add(one, np.array([[False, True]]))
    dates.add(one, np.array([[True, False]]))
    dates.add(other, np.array([[False, True]]))
    [(_, values)] = dates.read()
    assert values.tolist() == [[[0, 1, 2], [13, 14, 15]]]


def test_times_of_other_calendars_are_written_as_dates_of_theirs(folder: Path, tmp_path) -> None:
    made = forecasts.forecast(forecasts.truth())
    card = scored(folder, forecasts.write(made, folder / "calendar.zarr"))
    times = np.array(["2000-02-28T12", "2000-03-01"], "M8[s]")
    write_scores_by_date(replace(card, times=times, calendar=Calendar("noleap")), tmp_path)
    found = read_scores_by_date(tmp_path, ["rmse"])
    assert found is not None
    assert {*found.data_vars} == {"rmse"}
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
        test = paired_test(autoregressive(phi, count))
        rejected = 100 * (test.p < 0.05).mean()
        assert 3 < rejected < 7, (phi, count, rejected)
        # Source of the expected number: the mean of an autoregressive process of first order.
        wanted = count * (1 - phi) / (1 + phi)
        assert np.median(test.independent) == pytest.approx(wanted, rel=0.12), phi


def test_a_difference_is_found_and_its_error_is_that_of_the_mean() -> None:
    series = autoregressive(0.5, 200)
    test = paired_test(series + 1.0)
    assert (test.p < 0.05).mean() > 0.95
    assert np.median(test.error) == pytest.approx(series.mean(axis=0).std(), rel=0.1)


def test_series_without_variance() -> None:
    test = paired_test(np.stack([np.zeros(20), np.full(20, 0.1), np.arange(20.0)], 1))
    assert test.p[0] == 1
    assert test.p[1] == 0
    assert 0 < test.p[2] < 1


def autoregressive_of_second_order(phi1: float, phi2: float, count: int) -> np.ndarray:
    random = np.random.default_rng(5)
    noise = random.normal(size=(count + 300, 2000))
    values = np.zeros_like(noise)
    for step in range(2, len(noise)):
        values[step] = phi1 * values[step - 1] + phi2 * values[step - 2] + noise[step]
    return values[300:]


def test_oscillations_and_alternations_reject_no_more() -> None:
    for phi1, phi2 in ((1.5, -0.7), (1.8, -0.85), (0.5, -0.3)):
        test = paired_test(autoregressive_of_second_order(phi1, phi2, 120))
        assert (test.p < 0.05).mean() < 0.07, (phi1, phi2)
    # Starts at 00 and 12 UTC, of which one is always worse.
    noise = np.random.default_rng(6).normal(scale=0.05, size=(60, 500))
    test = paired_test(0.5 + (-1.0) ** np.arange(60)[:, None] + noise)
    assert (test.p < 1e-3).all()
    assert (test.independent == 60).all()


def test_dates_that_are_not_evenly_spaced_are_no_more_independent() -> None:
    daily = autoregressive(0.9, 700)
    weekdays = daily[np.arange(700) % 7 % 3 == 0][:200]  # two or three times a week
    two_hours = autoregressive(0.9, 1200)[np.arange(1200) % 4 < 2][:300]  # 00 and 06 UTC
    for series in (weekdays, two_hours):
        assert (paired_test(series).p < 0.05).mean() < 0.09


def with_dates(values: np.ndarray) -> xr.Dataset:
    """Squared errors of one channel, region and lead time by date, as they are read."""
    times = np.datetime64("2001-01-01", "ns") + np.arange(len(values)) * np.timedelta64(12, "h")
    dims = ("time", "region", "prediction_timedelta", "channel")
    coords = {
        "region": ["global"],
        "time": times,
        "prediction_timedelta": np.array([24], "m8[h]").astype("m8[ns]"),
        "channel": ["t2m"],
    }
    return xr.Dataset({"rmse": (dims, values[:, None, None, None])}, coords)


def test_forecasts_are_compared_at_their_common_dates() -> None:
    place = ("global", 24, "t2m")
    noise = autoregressive(0.4, 60, 1)[:, 0]
    first = with_dates(10 + noise)
    again = compare_by_date(first, first, "rmse")
    assert again[place].p == 1
    rounded = compare_by_date(with_dates((10 + noise) * (1 + 1e-15)), first, "rmse")
    assert rounded[place].p == 1
    # Better at each common date, though not over all dates of both.
    easy = np.concatenate([1 + 0 * noise[:30], 10 + noise[30:]])
    better = compare_by_date(
        with_dates(9 + 0.9 * noise).isel(time=slice(30, None)), with_dates(easy), "rmse"
    )
    assert better[place].difference < 0
    assert better[place].p < 1e-3
    assert compare_by_date(first, first.isel(time=slice(29)), "rmse") == {}
    assert compare_by_date(first, first, "acc") == {}
    undefined = first.where(first["time"] > first["time"][0])
    assert compare_by_date(undefined, first, "rmse") == {}
    # Of one season there are too few independent cases.
    slow = with_dates(10 + np.sin(np.arange(60) / 20))
    assert compare_by_date(slow, with_dates(np.full(60, 10.0)), "rmse") == {}


def with_counts(counts: np.ndarray, fractions: np.ndarray | None = None) -> xr.Dataset:
    """Counts of events, `(T, E, M + 1, 2)`, of one region and lead time, as they are read."""
    lead = np.array([24], "m8[h]").astype("m8[ns]")
    dims = ("region", "source", "prediction_timedelta", "time", "event")
    coords = {
        "region": ["global"],
        "source": ["forecast"],
        "prediction_timedelta": lead,
        "time": np.datetime64("2001-01-01", "ns") + np.arange(len(counts)) * np.timedelta64(1, "D"),
        "event": [f"t2m >{number}" for number in range(counts.shape[1])],
    }
    found = {"event_counts": ((*dims, "members", "observed"), counts[None, None, None])}
    if fractions is not None:
        found["event_fractions"] = ((*dims, "distance", "term"), fractions[None, None, None])
        coords |= {"distance": [50.0], "term": ["errors", "squares"]}
    return xr.Dataset(found, coords)


def forecasts_of_events(seeds: tuple[int, int], skill: float = 0.0) -> xr.Dataset:
    """Counts of 1000 forecasts on 120 dates, whose event and skill vary slowly."""

    def share(mean: float, seed: int) -> np.ndarray:
        noise = np.random.default_rng(seed).normal(size=(150, 1000))
        for step in range(1, len(noise)):
            noise[step] = 0.5 * noise[step - 1] + noise[step]
        return 1 / (1 + np.exp(-mean - noise[30:]))

    occurs, hit, false = share(-3, 0), share(skill, seeds[0]), share(-4 - skill, seeds[1])
    yes = [(1 - occurs) * false, occurs * hit]
    no = [(1 - occurs) * (1 - false), occurs * (1 - hit)]
    return with_counts(np.stack([np.stack(no, -1), np.stack(yes, -1)], -2))


def test_scores_of_events_have_the_error_of_a_ratio_of_sums() -> None:
    first, other = forecasts_of_events((1, 2)), forecasts_of_events((3, 4))
    tests = compare_events_by_date(other, first)
    assert {"csi", "ets", "sedi", "hit_rate"} <= {*tests}
    assert "frequency_bias" not in tests  # neither smaller nor larger is better
    one, two = (x["event_counts"].sum("time").values[0, 0, 0] for x in (other, first))
    csi = [x[:, 1, 1] / (x.sum(axis=(1, 2)) - x[:, 0, 0]) for x in (one, two)]
    difference = csi[0] - csi[1]
    found = [tests["csi"]["global", 24, f"t2m >{number}"].difference for number in range(1000)]
    np.testing.assert_allclose(found, difference, rtol=1e-9, atol=1e-12)
    series = jackknife_series(other.sel(source="forecast"))["csi"]
    series = series - jackknife_series(first.sel(source="forecast"))["csi"]
    error = paired_test(series.values).error
    assert np.median(error) == pytest.approx(difference.std(), rel=0.1)
    for name, by_place in tests.items():
        rejected = 100 * np.mean([test.p < 0.05 for test in by_place.values()])
        assert 3 < rejected < 8, (name, rejected)
    better = compare_events_by_date(forecasts_of_events((3, 4), skill=1), first)
    for name, sign in {"csi": 1, "sedi": 1, "false_alarm_ratio": -1}.items():
        assert all(sign * test.difference > 0 for test in better[name].values()), name
        assert np.mean([test.p < 0.05 for test in better[name].values()]) > 0.9, name
    itself = compare_events_by_date(first, first)
    assert all(test.p == 1 for by_place in itself.values() for test in by_place.values())
    assert compare_events_by_date(other, first.isel(time=slice(29))) == {}


def test_the_series_of_a_mean_over_dates_is_that_of_the_dates() -> None:
    random = np.random.default_rng(7)
    counts = random.random((40, 3, 5, 2))
    counts /= counts.sum(axis=(2, 3), keepdims=True)
    fractions = random.random((40, 3, 1, 2))
    fractions[..., 1] = 2.0
    series = jackknife_series(with_counts(counts, fractions).sel(source="forecast"))
    squares = (np.linspace(0, 1, 5)[:, None] - [0, 1]) ** 2
    brier = (counts * squares).sum(axis=(2, 3))
    np.testing.assert_allclose(series["brier"].values[:, 0, 0], brier, rtol=1e-10)
    fss = 1 - fractions[..., 0, 0] / 2
    np.testing.assert_allclose(series["fss_50km"].values[:, 0, 0], fss, rtol=1e-10)


def test_only_dates_with_an_event_are_independent_cases() -> None:
    """Others have nothing to say: with them, chance rejected in 14 % of events on 3 of 60 dates."""
    random = np.random.default_rng(4)
    for dates, is_tested in ((9, False), (10, True)):
        forecasts = []
        for _ in range(2):
            counts = np.zeros((60, 1000, 2, 2))
            counts[..., 0, 0] = 1
            counts[:dates] = random.dirichlet([1, 2, 3, 5], (dates, 1000)).reshape(-1, 1000, 2, 2)
            forecasts.append(with_counts(counts))
        for name, by_place in compare_events_by_date(*forecasts).items():
            assert (by_place != {}) == is_tested, name
            assert all(test.independent <= dates for test in by_place.values()), name
            rejected = [test.p < 0.05 for test in by_place.values()]
            assert not is_tested or np.mean(rejected) < 0.08, name


def test_events_that_hang_on_one_date_are_not_tested() -> None:
    counts = np.zeros((40, 1, 2, 2))
    counts[:, 0, 0, 0] = 1
    counts[3, 0] = [[0.5, 0.1], [0.2, 0.2]]
    series = jackknife_series(with_counts(counts).sel(source="forecast"))
    assert series["csi"].isnull().all()
    assert compare_events_by_date(with_counts(counts), with_counts(counts))["csi"] == {}
