"""What a store says about its sums decides which of them are added up.

The right values are sums of hourly data, added up here in float64.
"""

import logging

import numpy as np
import pytest
import xarray as xr

from credit_dp.config import VariableConfig
from credit_dp.data.rechunk.copy_fields import PrepareJob, PrepareRequest
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import anemoi_stores, stores
from tests.tables import each

HOUR = np.timedelta64(1, "h")
START = np.datetime64("2000-01-01", "ns")
COUNT = 24 * 6
RAIN = "total_precipitation"
DIMS = ("time", "latitude", "longitude")
HOURLY = np.random.default_rng(0).gamma(1, 1e-3, size=(COUNT, 4, 6))


def rain(every: int, hours: int, **attributes) -> xr.Dataset:
    """Sums over some hours, kept at some of the times, with a temperature."""
    ends = np.arange(6, COUNT, every)
    sums = np.stack([HOURLY[end - hours + 1 : end + 1].sum(axis=0) for end in ends])
    return xr.Dataset(
        {
            RAIN: (DIMS, sums.astype("f4"), {"units": "m"} | attributes),
            "2m_temperature": (DIMS, (280 + HOURLY[ends]).astype("f4")),
        },
        {
            "time": START + HOUR * ends,
            "latitude": np.linspace(90, -90, 4),
            "longitude": np.arange(6) * 60.0,
        },
    )


def with_bounds(data: xr.Dataset, hours: int, starts: bool = False) -> xr.Dataset:
    """Add bounds of the times, which are the ends of the cells, or their starts."""
    ends = data["time"].values
    bounds = np.stack([ends - hours * HOUR, ends], axis=1)
    if starts:
        data = data.assign_coords(time=bounds[:, 0])
    data["time"].attrs["bounds"] = "time_bnds"
    data["time"].encoding["units"] = "hours since 1900-01-01"
    return data.assign(time_bnds=(("time", "bnds"), bounds))


def config(path, **changes):
    settings = {
        "prognostic": ["2m_temperature"],
        "diagnostic": [RAIN],
        "forcing": [],
        "static": [],
        "train": ["2000-01-01", "2000-01-03"],
        "valid": ["2000-01-04", "2000-01-04"],
        "test": ["2000-01-05", "2000-01-05"],
    }
    return stores.config(path, **(settings | changes))


def opened(folder, data, suffix=".zarr", **changes) -> Store:
    path = folder / f"rain{suffix}"
    if suffix == ".nc":
        data.to_netcdf(path)
    else:
        stores.write(data, path)
    return Store.open(config(path, **changes))


def accumulated(value):
    return {"variables": {RAIN: VariableConfig(accumulated=value)}}


def check(store: Store, hours: int = 6) -> None:
    """Compare with the sums over the hours before each time, up to the rounding of float32."""
    ends = ((store.times - START) / HOUR).astype(int)
    assert len(ends) > 8
    expected = np.stack([HOURLY[end - hours + 1 : end + 1].sum(axis=0) for end in ends])
    found = store.read_channels(store.channels.diagnostic, store.times, slice(0, 4))[:, 0]
    assert np.allclose(found, expected, rtol=1e-5)


GRIB = {"GRIB_stepType": "accum", "GRIB_stepUnits": 1}
STATED = {
    "time bounds": lambda data, hours: with_bounds(data, hours),
    "cell_methods": lambda data, hours: with_attributes(
        data, cell_methods=f"time: sum (interval: {hours} hour{'s' * (hours > 1)})"
    ),
    "GRIB steps": lambda data, hours: with_attributes(data, **GRIB, GRIB_stepRange=f"0-{hours}"),
}


def with_attributes(data, **attributes):
    data[RAIN].attrs |= attributes
    return data


@each("by, suffix", zip(STATED, [".zarr", ".nc", ".zarr"], strict=True))
def test_what_is_stated_is_used(tmp_path, caplog, by, suffix):
    caplog.set_level(logging.INFO)
    # Sums over 6 hours for every hour are not added up again, those over 3 hours are.
    check(opened(tmp_path, STATED[by](rain(1, 6), 6), suffix, diagnostic=[RAIN]))
    every, hours = {"time bounds": (1, 3), "cell_methods": (3, 3), "GRIB steps": (6, 6)}[by]
    (tmp_path / "added").mkdir()
    check(opened(tmp_path / "added", STATED[by](rain(every, hours), hours), suffix))
    assert "assumes" not in caplog.text


@each("by, every", zip(STATED, [3, 6, 6], strict=True))
def test_sums_that_leave_hours_out_are_refused_unless_the_config_says_so(tmp_path, by, every):
    data = STATED[by](rain(every, 1), 1)
    with pytest.raises(UserError) as caught:
        opened(tmp_path, data)
    message = str(caught.value)
    assert f"{RAIN} has sums over 1 hour by its {by}, and its times are {every} hours" in message
    assert f"data.variables.{RAIN}.accumulated" in message
    assert "\n" not in message
    check(Store.open(config(tmp_path / "rain.zarr", **accumulated(False))), 1)
    added = Store.open(config(tmp_path / "rain.zarr", **accumulated(True)))
    found = added.read_channels(added.channels.diagnostic, added.times, slice(0, 4))[:, 0]
    ends = ((added.times - START) / HOUR).astype(int)
    kept = [HOURLY[ends - back] for back in range(0, 6, every)]
    assert np.allclose(found, sum(kept), rtol=1e-5)


def test_times_may_be_the_start_of_their_cells(tmp_path):
    check(opened(tmp_path, with_bounds(rain(1, 1), 1, starts=True)))


@pytest.mark.slow
@each("every, hours", [(1, "1 hour"), (3, "3 hours"), (6, "6 hours")])
def test_without_a_word_the_time_since_the_one_before_is_assumed(tmp_path, caplog, every, hours):
    caplog.set_level(logging.INFO)
    check(opened(tmp_path, rain(every, every)))
    lines = [text for text in caplog.messages if "assumes" in text]
    assert len(lines) == 1
    assert f"assumes {RAIN} to be sums over {hours}, as their times are that far apart" in lines[0]
    caplog.clear()
    for value in (True, False):
        Store.open(config(tmp_path / "rain.zarr", **accumulated(value)))
    assert "assumes" not in caplog.text


def test_bounds_of_points_say_nothing(tmp_path):
    data = with_bounds(rain(1, 1), 6)
    data[RAIN].attrs["cell_methods"] = "time: point"
    check(opened(tmp_path, data))


def test_longer_sums_than_the_step_are_refused(tmp_path):
    with pytest.raises(UserError, match="sums over 24 hours by its time bounds"):
        opened(tmp_path, with_bounds(rain(6, 6), 24))


def test_a_prepared_store_says_what_its_sums_are(tmp_path, caplog):
    opened(tmp_path, rain(1, 1))
    out = str(tmp_path / "prepared.zarr")
    job = PrepareJob(PrepareRequest(config(tmp_path / "rain.zarr"), out, domains=(1, 2)))
    with job.locked():
        job.write(lambda count: None)
        job.finish()
    caplog.set_level(logging.INFO)
    caplog.clear()
    check(Store.open(config(tmp_path / "prepared.zarr")))
    check(Store.open(config(tmp_path / "prepared.zarr", step="12h")), 12)
    assert "assumes" not in caplog.text


@each("period", [[0, 6], ["0:00:00", "6h"]])
def test_a_dataset_of_anemoi_says_what_its_sums_are(tmp_path, caplog, period):
    caplog.set_level(logging.INFO)
    path = anemoi_stores.write(
        rain(1, 6),
        tmp_path / "anemoi.zarr",
        short={"2m_temperature": "2t", RAIN: "tp"},
        variables_metadata={"tp": {"process": "accumulation", "period": period}},
    )
    check(Store.open(config(path)))
    assert "assumes" not in caplog.text
