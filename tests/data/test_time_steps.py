"""Steps longer than the store's spacing: selected times, and sums over each step."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import DataConfig, VariableConfig
from credit_dp.data.channels import Channel
from credit_dp.data.dates import indices_on_step, sum_windows, time_spacing
from credit_dp.data.selection import data_step_indices
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

HOUR = np.timedelta64(1, "h")
ROWS, COLUMNS = 4, 6


def hourly(count=60, start="2000-02-28T01", absent=(), every=1):
    """Temperature, rain and radiation, numbered by time so that sums are known."""
    times = np.datetime64(start, "ns") + every * HOUR * np.arange(count)
    random = np.random.default_rng(0)
    dims = ("time", "latitude", "longitude")
    fields = random.normal(size=(3, count, ROWS, COLUMNS)).astype("f4")
    data = xr.Dataset(
        {
            "2m_temperature": (dims, 280 + fields[0]),
            "total_precipitation": (dims, np.abs(fields[1]) / 128),
            "surface_solar_radiation_downwards": (dims, np.abs(fields[2])),
        },
        {
            "time": times,
            "latitude": np.linspace(90, -90, ROWS),
            "longitude": np.arange(COLUMNS) * 360 / COLUMNS,
        },
    )
    return data.isel(time=[i for i in range(count) if i not in absent])


def config_of(path, **changes):
    span = ["2000-02-28", "2000-02-29"]
    settings = {
        "prognostic": ["2m_temperature"],
        "diagnostic": ["total_precipitation"],
        "forcing": ["surface_solar_radiation_downwards"],
        "static": [],
    }
    return stores.config(path, train=span, valid=span, test=span, **(settings | changes))


def accumulation_keys(**accumulated):
    return {name: VariableConfig(accumulated=value) for name, value in accumulated.items()}


def opened(tmp_path, data, chunk=1, **changes):
    path = tmp_path / "s.zarr"
    stores.write(data, path, chunks={"time": chunk})
    return Store.open(config_of(path, **changes))


def sums(data, name, time, hours):
    values = data[name].sel(time=slice(time - (hours - 1) * HOUR, time)).values
    return values.astype("f8").sum(axis=0)


def test_a_six_hourly_run_has_the_main_hours_and_the_leap_day(tmp_path):
    store = opened(tmp_path, hourly(), diagnostic=[], forcing=[])
    expected = np.datetime64("2000-02-28T06") + 6 * HOUR * np.arange(10)
    assert np.array_equal(store.times, expected.astype("M8[ns]"))
    assert np.datetime64("2000-02-29T12") in store.times
    assert store.num_skipped == 0


@pytest.mark.slow
def test_without_main_hours_steps_count_from_the_first_time(tmp_path):
    data = hourly(count=9, start="2000-02-28T03", every=6)
    store = opened(tmp_path, data, diagnostic=[], forcing=[], step="12h")
    assert np.array_equal(store.times, data["time"].values[::2])


@each("chunk", [1, 4, 48])
def test_accumulated_variables_are_added_up_over_the_step(tmp_path, chunk):
    data = hourly()
    store = opened(tmp_path, data, chunk)
    times = store.times[[4, 1, 2]]
    rows = slice(1, 3)
    found = store.read_outputs(times, rows)
    channels = store.channels.prognostic
    fields = store.read_channels([*channels, *store.stored_forcing], times, rows)
    states, forcings = fields[:, : len(channels)], fields[:, len(channels) :]
    for place, time in enumerate(times):
        temperature = data["2m_temperature"].sel(time=time).values[rows]
        assert np.array_equal(found[place, 0], temperature)
        assert np.array_equal(states[place, 0], temperature)
        rain = sums(data, "total_precipitation", time, 6)[rows]
        assert np.allclose(found[place, 1], rain, rtol=1e-6)
        radiation = sums(data, "surface_solar_radiation_downwards", time, 6)[rows]
        assert np.allclose(forcings[place, 0], radiation, rtol=1e-6)
    assert np.array_equal(store.read_forcing(times, rows), forcings)
    assert np.array_equal(store.read_states(times, rows), states)


def test_a_sum_that_lacks_an_hour_is_no_date_of_the_run(tmp_path):
    # Without the hours 03 of the 28th and 18 of the 29th.
    store = opened(tmp_path, hourly(absent=(2, 41)))
    absent = {np.datetime64("2000-02-28T06", "ns"), np.datetime64("2000-02-29T18", "ns")}
    assert not absent & set(store.times)
    assert len(store.times) == 8
    # The second is not a date of the store.
    assert store.num_skipped == 1


def test_a_store_that_begins_on_a_step_has_no_sum_there(tmp_path):
    store = opened(tmp_path, hourly(start="2000-02-28T00"))
    assert store.times[0] == np.datetime64("2000-02-28T06")
    assert store.num_skipped == 1


def test_the_config_says_what_is_accumulated(tmp_path):
    data = hourly()
    variables = accumulation_keys(total_precipitation=False)
    store = opened(tmp_path, data, variables=variables, forcing=[])
    plain = data["total_precipitation"].sel(time=store.times[3]).values
    assert np.array_equal(store.read_outputs(store.times[3:4], slice(0, ROWS))[0, 1], plain)
    variables = {"2m_temperature": VariableConfig(accumulated=True)}
    again = Store.open(config_of(tmp_path / "s.zarr", variables=variables, forcing=[]))
    total = sums(data, "2m_temperature", again.times[3], 6)
    assert np.allclose(again.read_states(again.times[3:4], slice(0, ROWS))[0, 0], total)


@pytest.mark.slow
def test_short_names_are_added_up_too(tmp_path):
    data = hourly().rename(total_precipitation="tp", surface_solar_radiation_downwards="ssrd")
    store = opened(tmp_path, data, diagnostic=["tp"], forcing=["ssrd"])
    rain = sums(data, "tp", store.times[3], 6)
    found = store.read_outputs(store.times[3:4], slice(0, ROWS))
    assert np.allclose(found[0, 1], rain, rtol=1e-6)
    radiation = sums(data, "ssrd", store.times[3], 6)
    assert np.allclose(
        store.read_forcing(store.times[3:4], slice(0, ROWS))[0, 0], radiation, rtol=1e-6
    )


@pytest.mark.slow
def test_sums_over_a_named_time_are_not_added_up(tmp_path):
    data = hourly().rename(total_precipitation="total_precipitation_6hr")
    store = opened(tmp_path, data, diagnostic=["total_precipitation_6hr"], forcing=[])
    plain = data["total_precipitation_6hr"].sel(time=store.times[3]).values
    assert np.array_equal(store.read_outputs(store.times[3:4], slice(0, ROWS))[0, 1], plain)


def test_a_store_at_the_step_is_read_as_it_is(tmp_path):
    data = hourly(count=10, start="2000-02-28T00", every=6)
    store = opened(tmp_path, data)
    assert len(store.times) == 10
    plain = data["total_precipitation"].values[:, None]
    assert np.array_equal(store.read_outputs(store.times, slice(0, ROWS))[:, 1:], plain)


def test_no_complete_sum_at_all(tmp_path):
    data = hourly(count=3, start="2000-02-28T04")
    with pytest.raises(UserError, match=r"total_precipitation|surface_solar.*data\.step") as caught:
        opened(tmp_path, data)
    assert "\n" not in str(caught.value)


@each(
    "chunk, block_bytes, summed",
    [(1, 1, True), (4, 300, True), (24, 10**6, True), (4, 1, False), (24, 300, False)],
)
def test_blocks_at_a_longer_step_cover_the_span_in_order(
    tmp_path, monkeypatch, chunk, block_bytes, summed
):
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", block_bytes)
    store = opened(tmp_path, hourly(), chunk)
    channel = Channel("total_precipitation" if summed else "2m_temperature")
    blocks = list(store.blocks([channel], slice(1, 9), slice(0, ROWS)))
    starts = [start for start, _ in blocks]
    ends = [start + len(block) for start, block in blocks]
    assert (starts[0], ends[-1]) == (1, 9)
    assert starts[1:] == ends[:-1]
    whole = store.read_outputs(store.times[1:9], slice(0, ROWS))[:, [int(summed)]]
    assert np.array_equal(np.concatenate([block for _, block in blocks]), whole)


@pytest.mark.slow
def test_what_is_done_to_values_is_part_of_what_results_depend_on(tmp_path):
    names = ["total_precipitation"]
    summed = opened(tmp_path, hourly()).description(names)
    other = config_of(tmp_path / "s.zarr", variables=accumulation_keys(total_precipitation=False))
    assert Store.open(other).description(names) != summed


@given(
    present=st.lists(st.integers(0, 60), min_size=12, unique=True).map(sorted),
    step=st.integers(1, 12),
)
def test_windows_are_the_times_of_the_step_before(present, step):
    times = np.datetime64("2000-01-01", "ns") + HOUR * np.array(present)
    places = indices_on_step(times, step * HOUR)
    distance = int(time_spacing(times) / HOUR)
    bounds = np.stack([times - distance * HOUR, times], axis=1)
    found = sum_windows(bounds, times[places], step * HOUR)
    for place, window, complete in zip(places, found.indices, found.complete, strict=True):
        wanted = [present[place] - back for back in range(0, step, distance)][::-1]
        assert complete == (step % distance == 0 and set(wanted) <= set(present))
        if complete:
            assert [present[i] for i in window] == wanted


@each(
    "minutes, count, remedy",
    [
        (43830, 5, "Set data.step to a multiple of 1461h."),  # a twelfth of a year
        (90, 5, "Set data.step to a multiple of 3h."),
        (43830, 2, "Change data.store to one whose times are whole hours apart."),
    ],
)
def test_the_remedy_is_a_step_in_whole_hours(minutes, count, remedy):
    times = np.datetime64("2000-01-01", "ns") + minutes * np.timedelta64(1, "m") * np.arange(count)
    with pytest.raises(UserError, match=r"s.zarr: its times are [\d.]+ hours apart") as caught:
        data_step_indices(times, DataConfig(name="zarr", store="s.zarr", step="4h"), "s.zarr")
    assert str(caught.value).endswith(remedy)


@each("step", ["730.5h", "90min", "0h"])
def test_steps_are_whole_hours(step):
    with pytest.raises(UserError, match=r"^data.step: needs whole hours or days, like 6h or 1d"):
        DataConfig(name="zarr", store="s.zarr", step=step)
