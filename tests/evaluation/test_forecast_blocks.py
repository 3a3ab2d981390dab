"""Scoring reads every chunk of a store once, whatever the chunks, in bounded memory."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from credit_dp.data.calendar import Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray, Grid
from credit_dp.errors import UserError
from credit_dp.evaluation import forecast_blocks, score
from credit_dp.evaluation.alignment import align
from credit_dp.evaluation.forecast_blocks import TimeWindow
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.score import SMALL_GRID_POINTS, limit_threads
from credit_dp.evaluation.scorecard import Scorecard
from credit_dp.evaluation.stored_climatology import StoredClimatology
from tests.data import prepared_stores, stores
from tests.evaluation import forecasts
from tests.tier_cases import tiers

STARTS, LEADS = 5, 4  # every 12 hours; every 6 hours
TIMES = 2 * (STARTS - 1) + LEADS + 1  # from the first start to the last end
FIELD_BYTES = 4 * 3 * 9 * 8  # of three levels at one time
CHUNKS = {
    "one field": {},
    "few": {"time": 3, "prediction_timedelta": 3, "hour": 2, "dayofyear": 4},
    "rows": {"time": 2, "latitude": 4, "level": 1, "dayofyear": 3},
    "all": dict.fromkeys(("time", "prediction_timedelta", "hour", "dayofyear"), 100),
}


def observed() -> xr.Dataset:
    return forecasts.truth(steps=20)


def predicted() -> xr.Dataset:
    """The truth of another time, used as a forecast."""
    data = observed()
    starts = data["time"].values[: 2 * STARTS : 2]
    leads = np.arange(1, LEADS + 1) * stores.STEP.astype("m8[ns]")
    valid = xr.DataArray(starts, dims="time") + xr.DataArray(leads, dims="prediction_timedelta")
    made = data.sel(time=valid + 2 * stores.STEP)
    return made.assign_coords(time=starts, prediction_timedelta=leads)


def write(data: xr.Dataset, path: Path, chunks: dict[str, int]) -> Path:
    every = {"time": 1, "prediction_timedelta": 1, "hour": 1, "dayofyear": 1} | chunks
    return stores.write(data, path, chunks=every)


def scored(folder: Path, chunks: dict[str, int]) -> Scorecard:
    """Return the scores of stores with these chunks."""
    data = observed()
    path = write(predicted(), folder / "forecast.zarr", chunks)
    write(data, folder / "truth.zarr", chunks)
    write(forecasts.climatology(data), folder / "climatology.zarr", chunks)
    return forecasts.scored(folder, path)


def same(one: Scorecard, other: Scorecard) -> None:
    for name, values in one.scores.items():
        rounding = 1e-9 if name == "bias" else 0  # a small difference of fields
        assert values == pytest.approx(other.scores[name], rel=1e-12, abs=rounding), name
    assert one.spectra == pytest.approx(other.spectra, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunks", tiers(fast=[("rows",)], slow=[("all",)], exhaustive=[("one field",), ("few",)])
)
def test_every_chunk_is_read_once(tmp_path: Path, reads: Counter[str], chunks: str) -> None:
    scored(tmp_path, CHUNKS[chunks])
    counts = Counter(path.split("/")[0] for path in reads)
    assert set(counts) >= {"forecast.zarr", "truth.zarr", "climatology.zarr"}
    assert set(reads.values()) == {1}
    # Of the truth, the first to the last time that is needed, of each variable.
    times = -(-TIMES // CHUNKS[chunks].get("time", 1))
    rows, levels = (3, 3) if chunks == "rows" else (1, 1)
    assert counts["truth.zarr"] == times * rows * (2 * levels + 1)


@pytest.mark.slow
def test_variables_that_share_chunks_are_read_together(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, steps=20)[list(forecasts.NAMES)]
    prepared_stores.write(data, tmp_path / "truth.zarr", static=False)
    write(forecasts.climatology(data), tmp_path / "climatology.zarr", {})
    path = write(predicted(), tmp_path / "forecast.zarr", {})
    request = forecasts.request(tmp_path, path)
    aligned = align(request, ForecastStore.open(request.forecast), lambda title, part: None)
    found = list(forecast_blocks.read_blocks(aligned, None))
    assert aligned.truth.chunk_reads == 3 * TIMES  # of four rows each
    assert [block.variable for block in found[:3]] == sorted(forecasts.NAMES)
    (tmp_path / "other").mkdir()
    same(forecasts.scored(tmp_path, path), scored(tmp_path / "other", {}))


@pytest.mark.parametrize("room", tiers(fast=[], slow=[(1,)], exhaustive=[(5,)]))
def test_little_room_changes_no_score(
    tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Lead times are scored in parts, and not all fields of a chunk stay in memory.

    Each channel is scored for itself.
    """
    (tmp_path / "wide").mkdir()
    wanted = scored(tmp_path / "wide", CHUNKS["few"])
    reads.clear()
    held: list[int] = []
    load = TimeWindow.load

    def watched(self: TimeWindow, times: Times) -> None:
        load(self, times)
        held.append(sum(field.nbytes for field in self._cache.values()))

    monkeypatch.setattr(TimeWindow, "load", watched)
    monkeypatch.setattr(forecast_blocks, "MAX_BYTES", room * FIELD_BYTES)
    monkeypatch.setattr(score, "STEP_BYTES", 1)
    (tmp_path / "narrow").mkdir()
    same(scored(tmp_path / "narrow", CHUNKS["few"]), wanted)
    assert max(reads.values()) > 1
    assert max(held) <= room * FIELD_BYTES


def window(max_times: int) -> tuple[TimeWindow, list[list[int]]]:
    """Ten times in chunks of four, and the hours that are read at once."""
    read: list[list[int]] = []

    def fields(times: Times) -> FieldArray:
        hours = times.astype("M8[h]").astype(int)
        read.append(hours.tolist())
        return np.broadcast_to(hours[:, None, None, None], (len(times), 2, 1, 1)).astype("f4")

    times = np.arange(10).astype("M8[h]").astype("M8[ns]")
    return TimeWindow(times, np.arange(10) // 4, fields, max_times), read


def hours(*numbers: int) -> Times:
    return np.array(numbers).astype("M8[h]").astype("M8[ns]")


def test_a_window_holds_what_shares_a_chunk_until_it_has_passed() -> None:
    held, read = window(max_times=100)
    held.load(hours(1, 2))
    held.load(hours(0, 3))
    assert read == [[0, 1, 2, 3]]
    assert held.select(hours(3, 1), slice(1, 2)).tolist() == [[[[3]]], [[[1]]]]
    held.drop_before(hours(5)[0])
    held.load(hours(5, 8))
    assert read[1:] == [[5, 6, 7, 8, 9]]


def test_a_window_reads_whole_chunks_for_which_there_is_room() -> None:
    """Chunks that are read together are freed together."""
    held, read = window(max_times=3)
    held.load(hours(1, 2))
    assert read == [[0, 1, 2]]
    held.drop_before(hours(2)[0])
    held.load(hours(2, 3))
    assert read[1:] == [[3]]
    held.load(hours(4, 5, 6, 7))
    assert read[2:] == [[4, 5, 6, 7]]
    held, read = window(max_times=2 * forecast_blocks.READ_PARTS)
    held.load(hours(1, 4, 8))
    assert read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    held, read = window(max_times=8 * forecast_blocks.READ_PARTS)
    held.load(hours(1, 4, 8))
    assert read == [list(range(8)), [8, 9]]


def test_a_climatology_is_read_across_the_end_of_a_year(tmp_path: Path) -> None:
    """Hours and days in another order than the store's, one of which comes every fourth year."""
    random = np.random.default_rng(2)
    values = random.normal(size=(2, 366, 3, 4)).astype("f4")
    data = xr.Dataset(
        {"2m_temperature": (("hour", "dayofyear", "latitude", "longitude"), values)},
        {
            "hour": [12, 0],
            "dayofyear": np.arange(1, 367),
            "latitude": [60.0, 0.0, -60.0],
            "longitude": [0.0, 90.0, 180.0, 270.0],
        },
    )
    path = write(data, tmp_path / "c.zarr", {"dayofyear": 30})
    grid = Grid(data["latitude"].values, data["longitude"].values)
    found = StoredClimatology(str(path), [Channel("2m_temperature")], grid)
    times = np.array(["2000-12-30T12", "2000-12-31", "2001-01-01", "2001-12-31T12"], "M8[ns]")
    assert (np.diff(found.chunk_numbers(times)) > 0).tolist() == [False, True, True]
    fields = found.fields(times, slice(0, 1), slice(1, 3))
    wanted = [values[0, 364], values[1, 365], values[1, 0], values[0, 364]]
    assert np.array_equal(fields[:, 0], np.stack(wanted)[:, 1:3])
    with pytest.raises(UserError, match="has a day 366 of the year, but years of the 360_day"):
        StoredClimatology(str(path), [Channel("2m_temperature")], grid, Calendar("360_day"))


def test_small_fields_are_computed_by_one_thread() -> None:
    before = torch.get_num_threads()
    for points, wanted in ((SMALL_GRID_POINTS, 1), (SMALL_GRID_POINTS + 1, before)):
        with limit_threads((1, points)):
            assert torch.get_num_threads() == wanted
        assert torch.get_num_threads() == before
