"""Calendars, against cftime's own dates and against straight formulas."""

import itertools
from dataclasses import replace
from datetime import timedelta

import cftime
import numpy as np
import pytest
import xarray as xr

from credit_dp.data.calendar import STANDARD, Calendar, are_dates, calendar_of, decode_dates
from credit_dp.data.dates import split_slice
from credit_dp.data.sources.opening import open_single_source, open_source
from credit_dp.data.sources.sums import read_time_bounds
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

OTHERS = ["noleap", "all_leap", "360_day", "julian", "proleptic_gregorian"]
YEAR_LENGTHS = {"noleap": 365, "all_leap": 366, "360_day": 360}


def dates_in(calendar: str, start: str = "0001-01-01", periods: int = 4000):
    """Dates every 30 hours, more than thirteen years of them."""
    index = xr.date_range(start, periods=periods, freq="30h", calendar=calendar, use_cftime=True)
    return np.array(index)


@each("name, start", zip(OTHERS, itertools.cycle(["0001-01-01", "1895-02-27"]), strict=False))
def test_labels_are_those_of_cftime(name, start):
    dates = dates_in(name, start)
    calendar, times = calendar_of(dates), decode_dates(dates)
    assert calendar.name == name
    assert times.dtype == calendar.dtype == "M8[s]"
    assert (np.diff(times) == np.timedelta64(30, "h")).all()
    assert calendar.years(times).astype(int).tolist() == [date.year - 1970 for date in dates]
    assert (calendar.months(times).astype(int) % 12 + 1).tolist() == [x.month for x in dates]
    assert calendar.days_of_year(times).tolist() == [date.dayofyr for date in dates]
    some = slice(None, None, 97)
    texts = [calendar.text(time, "s") for time in times[some]]
    assert texts == [date.isoformat() for date in dates[some]]
    assert (np.array([calendar.parse("init", text) for text in texts]) == times[some]).all()


@each("name", YEAR_LENGTHS)
def test_times_count_from_1970_in_years_of_one_length(name):
    calendar = Calendar(name)
    days = YEAR_LENGTHS[name] * (1850 - 1970)
    assert calendar.parse("init", "1850-01-01").astype("M8[D]").astype(int) == days
    years = np.array([1850, 1970, 2300], int) - 1970
    starts = calendar.starts(years.astype("M8[Y]")).astype("M8[D]").astype(int)
    assert starts.tolist() == (YEAR_LENGTHS[name] * years).tolist()


@pytest.mark.slow
def test_julian_years_have_a_leap_day_every_four_years():
    calendar = Calendar("julian")
    starts = calendar.starts(np.arange(-800, 300).astype("M8[Y]"))
    lengths = np.diff(starts).astype("m8[D]").astype(int)
    assert lengths.tolist() == [366 if year % 4 == 0 else 365 for year in range(1170, 2269)]


@pytest.mark.slow
def test_months_of_a_calendar_start_on_their_first_day():
    times = decode_dates(dates_in("360_day"))
    calendar = Calendar("360_day")
    days = times.astype("M8[D]").astype(int)
    starts = calendar.starts(calendar.months(times)).astype("M8[D]").astype(int)
    assert (days - starts == days % 30).all()
    assert calendar.starts(calendar.months(times[0])) == times[0]  # also of one time


def test_the_standard_calendar_is_that_of_numpy():
    times = np.arange("1899-12-25T06", "1904-03-02", 30, dtype="M8[h]").astype("M8[ns]")
    assert calendar_of(times) == STANDARD
    assert decode_dates(times).dtype == "M8[ns]"
    assert (decode_dates(times) == times).all()
    dates = xr.CFTimeIndex(
        cftime.num2date(times.astype("M8[h]").astype(int), "hours since 1970-01-01", "standard")
    )
    assert STANDARD.days_of_year(times).tolist() == dates.dayofyear.tolist()
    assert (STANDARD.months(times).astype(int) % 12 + 1).tolist() == dates.month.tolist()
    assert STANDARD.text(times[0]) == "1899-12-25T06:00"
    assert STANDARD.parse("init", "1899-12-25T07:00+01:00") == times[0]


@pytest.mark.slow
def test_dates_beyond_nanoseconds_stay_in_their_calendar():
    for name, expected in (("standard", "gregorian"), ("proleptic_gregorian",) * 2):
        dates = dates_in(name, "0850-02-27", periods=10)
        assert calendar_of(dates).name == expected
        assert calendar_of(dates).text(decode_dates(dates)[0]) == "0850-02-27T00:00"


@pytest.mark.slow
def test_fractions_of_days_are_rounded_to_seconds():
    days = np.arange(100) / 144  # ten minutes, which floating-point numbers of days do not hit
    dates = cftime.num2date(days + 700000.0, "days since 0001-01-01", "noleap")
    seconds = decode_dates(dates).astype(int)
    assert (seconds == np.arange(100) * 600 + (700000 - 1969 * 365) * 86400).all()


@each(
    "name, text",
    [
        ("noleap", "2004-02-29"),
        ("360_day", "2001-01-31"),
        ("all_leap", "2001-02-30"),
        ("standard", "2001-02-29"),
        ("standard", "1677-12-31"),
        ("standard", "2300-01-01"),
        ("360_day", "2001-W01-1"),
        ("julian", "2001-01-01T06Z"),
    ],
)
def test_dates_that_a_calendar_lacks_are_refused(name, text):
    years = " from 1678 to 2261" if name == "standard" else ""
    expected = f"data.dates.train: needs a date of the {name} calendar{years}, like .*, got {text}$"
    with pytest.raises(UserError, match=expected):
        Calendar(name).parse("data.dates.train", text)


@each("minutes, unit", [(0, "hours"), (30, "minutes")])
def test_written_times_are_those_of_cftime(minutes, unit):
    calendar = Calendar("noleap")
    dates = dates_in("noleap", "1896-02-27", periods=500) + timedelta(minutes=minutes)
    expected = cftime.date2num(dates, f"{unit} since 1900-01-01", "noleap")
    numbers, units = calendar.encode(decode_dates(dates))
    assert units == f"{unit} since 1900-01-01"
    assert (numbers == expected).all()
    assert (calendar.decode(numbers, units) == decode_dates(dates)).all()
    assert (calendar.dates(decode_dates(dates)) == dates).all()


def test_bounds_of_times_are_in_their_calendar():
    """CESM dates a mean of six hours at its end."""
    units = {"units": "days since 0001-01-01", "calendar": "noleap"}
    ends = np.array([58.75, 59.0, 59.25])
    bounds = (("time", "nbnd"), np.stack([ends - 0.25, ends], axis=1))
    data = xr.Dataset(
        {"time_bnds": bounds}, {"time": ("time", ends, {**units, "bounds": "time_bnds"})}
    )
    found = read_time_bounds(xr.decode_cf(data))
    calendar = Calendar("noleap")
    texts = [[calendar.text(time) for time in pair] for pair in found]
    assert texts == [
        ["0001-02-28T12:00", "0001-02-28T18:00"],
        ["0001-02-28T18:00", "0001-03-01T00:00"],
        ["0001-03-01T00:00", "0001-03-01T06:00"],
    ]


def test_missing_and_other_values_are_no_dates():
    dates = dates_in("noleap", periods=3).astype(object)
    assert are_dates(dates)
    assert are_dates(np.array(["2000"], "M8[D]"))
    dates[1] = np.nan
    assert not any(map(are_dates, (dates, np.arange(3.0), np.array("x"))))


@each(
    "name, suffix",
    [
        ("noleap", "zarr"),
        ("360_day", "nc"),
        ("standard", "nc"),
    ],
)
def test_fields_are_found_by_the_dates_of_the_calendar(tmp_path, name, suffix):
    """Twelve times from 27 February of the year 4, in a store as xarray writes it."""
    dates = xr.date_range("0004-02-27", periods=12, freq="6h", calendar=name, use_cftime=True)
    data = stores.dataset().assign_coords(time=dates)
    data["time"].encoding["units"] = "days since 0001-01-01"
    path = tmp_path / f"store.{suffix}"
    if suffix == "nc":
        data.to_netcdf(path)
    else:
        stores.write(data, path)
    texts = [date.isoformat()[:16] for date in dates]
    spans = {split: [texts[4], texts[-1]] for split in ("train", "valid", "test")}
    store = Store.open(stores.config(path, **spans))
    assert store.calendar.name == {"standard": "gregorian"}.get(name, name)
    assert [store.calendar.text(time) for time in store.times] == texts
    assert split_slice(store.config, "train", store.times, store.calendar) == slice(4, 12)
    found = store.read_states(store.times[[7]], slice(0, 12))[0]
    wanted = [data[x].isel(time=7).values for x in ("geopotential", "2m_temperature")]
    assert np.array_equal(found[:3], wanted[0])
    assert np.array_equal(found[3], wanted[1])
    absent = (dates[-1] + timedelta(hours=9)).isoformat()[:16]
    line = f"{path.name}: has no time {absent} on step 6h"
    with pytest.raises(UserError, match=line):
        store.read_states(store.times[[-1]] + np.timedelta64(9, "h"), slice(0, 12))


def test_times_that_fall_are_named_in_the_calendar(tmp_path):
    dates = xr.date_range("0004-02-30", periods=2, calendar="360_day", use_cftime=True)[[1, 0]]
    path = stores.write(stores.dataset(steps=2).assign_coords(time=dates), tmp_path / "s.zarr")
    line = "time must increase throughout, but 0004-02-30T00:00 follows 0004-03-01T00:00"
    with pytest.raises(UserError, match=line):
        Store.open(stores.config(path))


@each(
    "calendar, grid, files_before",
    [
        ("standard", None, [slice(0, 6)]),
        ("proleptic_gregorian", "6x8", [slice(0, 3), slice(3, 6)]),
    ],
)
def test_dates_on_both_sides_of_2262_are_joined(tmp_path, calendar, grid, files_before):
    """Up to 2262-04-11 xarray decodes datetime64, later dates as objects of cftime."""
    first = np.datetime64("2262-04-10T12", "h")
    hours = (first - np.datetime64("2000-01-01", "h")).astype(int) + 6 * np.arange(12)
    units = {"units": "hours since 2000-01-01", "calendar": calendar}
    data = stores.dataset().rename(solar="total_precipitation")
    data["total_precipitation"] = abs(data["total_precipitation"]) / 1000  # in m
    data = data.assign_coords(time=("time", hours, units))
    for number, part in enumerate(files_before):
        before = stores.write(data.isel(time=part), tmp_path / f"before{number}.zarr")
    assert open_single_source(str(before)).calendar.is_standard
    after = stores.write(data.isel(time=slice(6, 12)), tmp_path / "after.zarr")
    config = stores.config(
        tmp_path, store=[f"{tmp_path}/before*.zarr", str(after)], step="12h", grid=grid, static=[],
        prognostic=["2m_temperature"], diagnostic=["total_precipitation"], forcing=[],
    )  # fmt: skip
    store = Store(open_source(config), config)
    alone = stores.write(data.assign_coords(time=stores.times(12)), tmp_path / "alone.zarr")
    same = Store(open_source(replace(config, store=str(alone))), replace(config, store=str(alone)))
    # Sums of the six hours before each time fill twelve from the second time on.
    dates = first + np.arange(0, 72, 12).astype("m8[h]")
    texts = [str(date.astype("M8[m]")) for date in dates]
    assert [store.calendar.text(time) for time in store.times] == texts[-len(store.times) :]
    assert len(store.times) >= 5
    rows = slice(2, 5)
    wanted = same.read_outputs(same.times[-len(store.times) :], rows)
    np.testing.assert_array_equal(store.read_outputs(store.times, rows), wanted)
