"""GRIB files as `data.store`.

The right sums are those of hourly fields, added up here in float64.
"""

import itertools
import logging
import pickle

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.sources.grib_file import with_checksum
from credit_dp.data.sources.opening import open_source
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.data.proj import project
from tests.forecast.grib_files import (
    ECMWF,
    ORDERS,
    SCANNING,
    projected,
    write_grib,
    write_message,
    write_projected,
    write_scanned,
)
from tests.tables import each
from tests.tier_cases import every, tiers

HOUR = np.timedelta64(1, "h")
RAIN = "total_precipitation"
RAIN_TABLE = {RAIN: ("tp", "surface", 0, 1.0)}
UPPER_TABLE = {"temperature": ECMWF["temperature"]}
SURFACE_TABLE = {"2m_temperature": ECMWF["2m_temperature"]}


def config(where, cache):
    return stores.config(where, cache=str(cache), static=[], forcing=[])


@each("edition", [1, 2])
def test_fields_of_a_pattern_of_grib_files_are_read(edition, tmp_path):
    data = stores.dataset(steps=6)
    for index, time in enumerate(data["time"].values):
        write_grib(tmp_path / f"part{index // 3}.grib", data.sel(time=time), edition=edition)
    files = sorted(tmp_path.iterdir())
    source = open_source(config(tmp_path / "part*.grib", tmp_path / "cache"))
    np.testing.assert_array_equal(source.times, data["time"].values)
    channels = [Channel("temperature", 850), Channel("temperature", 500)]
    fields = source.read(channels, slice(1, 5), slice(2, 7))
    wanted = data["temperature"].sel(level=[850, 500]).isel(time=slice(1, 5))
    wanted = wanted.transpose("time", "level", "latitude", "longitude").values[:, :, 2:7]
    np.testing.assert_allclose(fields, wanted, rtol=1e-6)
    surface = source.read([Channel("2m_temperature")], slice(0, 6), slice(None))[:, 0]
    np.testing.assert_allclose(surface, data["2m_temperature"].values, rtol=1e-6)
    assert source.chunk_shape(channels[0]) == (1, 1, 12, 8)
    assert [x for x in sorted(tmp_path.iterdir()) if x.is_file()] == files


@each("order, west", zip(SCANNING, itertools.cycle([0.0, 90.0, -180.0]), strict=False))
def test_points_may_be_in_any_order(order, west, tmp_path):
    state = stores.dataset().isel(time=0)[["2m_temperature"]]
    state = state.assign_coords(longitude=state["longitude"] + west)
    path = write_grib(tmp_path / "a.grib", state, SURFACE_TABLE)
    path = write_scanned(path, tmp_path / "b.grib", SCANNING[order])
    options = {"engine": "cfgrib", "backend_kwargs": {"indexpath": ""}, "decode_timedelta": True}
    xr.open_dataset(path, **options).close()  # cfgrib remembers the grid
    source = open_source(config(path, tmp_path / "cache"))
    field = source.read([Channel("2m_temperature")], slice(0, 1), slice(None))[0, 0]
    columns = [
        int(np.argmin(np.abs((source.longitude - longitude + 180) % 360 - 180)))
        for longitude in state["longitude"].values
    ]
    assert sorted(columns) == list(range(len(columns)))
    np.testing.assert_allclose(field[:, columns], state["2m_temperature"].values, rtol=1e-6)


@pytest.mark.slow
@each("kind", ["lambert", "polar_stereographic", "rotated_ll"])
def test_projections_have_the_coordinates_of_their_points(kind, tmp_path):
    keys, latitude, longitude = projected(kind)
    data = stores.dataset(13, 16, 3)[["2m_temperature"]]
    for time in data["time"].values:
        write_grib(tmp_path / "a.grib", data.sel(time=time), SURFACE_TABLE, **keys)
    source = open_source(config(tmp_path / "a.grib", tmp_path / "cache"))
    order = slice(None, None, -1 if source.latitude[0, 0] != pytest.approx(latitude[0, 0]) else 1)
    assert source.latitude.mean(1)[0] > source.latitude.mean(1)[-1]
    np.testing.assert_allclose(source.latitude, latitude[order], atol=1e-5)
    east = (source.longitude - longitude[order] + 180) % 360 - 180
    np.testing.assert_allclose(east, 0, atol=1e-5)
    mapping = dict(source.grid.projection.attributes)
    x, y = project(mapping, source.longitude, source.latitude)
    if kind == "rotated_ll":
        x, y = np.rad2deg(x), np.rad2deg(y)
        rows, columns = (axis.values for axis in source.grid.projection[2:])
        np.testing.assert_allclose(y - rows[:, None], 0, atol=1e-5)
        np.testing.assert_allclose(x - columns, 0, atol=1e-5)
    else:
        for step in (-np.diff(y, axis=0), np.diff(x, axis=1)):
            np.testing.assert_allclose(step, 120_000, atol=1)
    channel = Channel("2m_temperature")
    assert source.chunk_shape(channel) == (1, 1, 13, 16)
    field = source.read([channel], slice(1, 3), slice(2, 7))[:, 0]
    wanted = data["2m_temperature"].values[1:3, order][:, 2:7]
    np.testing.assert_allclose(field, wanted, rtol=1e-6)


KINDS = ("lambert", "polar_stereographic", "rotated_ll")


@pytest.mark.parametrize(
    ("kind", "edition", "step"),
    tiers(
        [("lambert", 2, 3), ("polar_stereographic", 1, 3)],
        [("rotated_ll", 2, 3)],
        itertools.product(KINDS, [1, 2], [1]),
    ),
)
def test_points_of_a_projection_may_be_in_any_order(kind, edition, step, tmp_path):
    """Every third order is enough to have each flag."""
    field = 250 + np.random.default_rng(0).random((13, 16))
    tolerance = {1: 2e-3, 2: 1e-5}[edition]  # GRIB 1 has thousandths of degrees
    orders = [x for x in ORDERS if edition == 2 or not [*x.values()][3]][::step]
    for number, flags in enumerate(orders):
        path = tmp_path / f"{number}.grib"
        latitude, longitude = write_projected(path, field, kind, flags, edition)
        source = open_source(config(path, tmp_path / "cache"))
        np.testing.assert_allclose(source.latitude, latitude, atol=tolerance, err_msg=str(flags))
        east = (source.longitude - longitude + 180) % 360 - 180
        np.testing.assert_allclose(east, 0, atol=10 * tolerance, err_msg=str(flags))
        found = source.read([Channel("2m_temperature")], slice(0, 1), slice(None))[0, 0]
        np.testing.assert_allclose(found, field, rtol=1e-6, err_msg=str(flags))


SOUTHWARD = {"gridType": "lambert", "Nx": 16, "Ny": 13, "DxInMetres": 120_000} | {
    **{"DyInMetres": 120_000, "jScansPositively": 0, "longitudeOfFirstGridPointInDegrees": 250},
    **{"latitudeOfFirstGridPointInDegrees": -20, "LoVInDegrees": 262.5},
    **{"Latin1InDegrees": -33, "Latin2InDegrees": -45},
}
POLAR = {x: y for x, y in SOUTHWARD.items() if not x.startswith(("Lo", "Latin"))} | {
    "gridType": "polar_stereographic",
    **{"orientationOfTheGridInDegrees": 350, "projectionCentreFlag": 128},
}
WGS84 = "+ellps=WGS84"
# Edition, keys, and PROJ's text.
EARTHS = {
    "a cone, GRIB 1": (1, SOUTHWARD, "+proj=lcc +lat_1=-33 +lat_2=-45 +lon_0=262.5 +R=6367470"),
    "an ellipsoid in GRIB 1": (
        *(1, SOUTHWARD | {"earthIsOblate": 1}),
        "+proj=lcc +lat_1=-33 +lat_2=-45 +lon_0=262.5 +a=6378160 +b=6356775",
    ),
    "an ellipsoid": (
        *(2, SOUTHWARD | {"LaDInDegrees": -33, "shapeOfTheEarth": 5}),
        f"+proj=lcc +lat_1=-33 +lat_2=-45 +lon_0=262.5 {WGS84}",
    ),
    "the south pole in GRIB 1": (
        *(1, POLAR),
        "+proj=stere +lat_0=-90 +lat_ts=-60 +lon_0=350 +R=6367470",
    ),
    "a pole of an ellipsoid": (
        *(2, POLAR | {"LaDInDegrees": -71, "shapeOfTheEarth": 5}),
        f"+proj=stere +lat_0=-90 +lat_ts=-71 +lon_0=350 {WGS84}",
    ),
    "a plane that touches an ellipsoid": (
        *(2, POLAR | {"LaDInDegrees": -90, "shapeOfTheEarth": 5}),
        f"+proj=stere +lat_0=-90 +lat_ts=-90 +lon_0=350 {WGS84}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", every(3, EARTHS))
def test_points_of_a_projection_are_where_proj_has_them(case, tmp_path):
    edition, keys, crs = EARTHS[case]
    state = stores.dataset(13, 16, 1)[["2m_temperature"]].isel(time=0)
    keys = keys | ({"numberOfDataPoints": 13 * 16} if edition == 2 else {})
    write_grib(tmp_path / "a.grib", state, SURFACE_TABLE, edition, **keys)
    source = open_source(config(tmp_path / "a.grib", tmp_path / "cache"))
    x, y = project(crs, np.array([250.0]), np.array([-20.0]))
    rows, columns = np.meshgrid(-120_000 * np.arange(13), 120_000 * np.arange(16), indexing="ij")
    longitude, latitude = project(crs, x + columns, y + rows, "inverse")
    order = slice(None, None, -1 if latitude.mean(1)[0] < latitude.mean(1)[-1] else 1)
    np.testing.assert_allclose(source.latitude, latitude[order], atol=1e-6)
    east = (source.longitude - longitude[order] + 180) % 360 - 180
    np.testing.assert_allclose(east, 0, atol=1e-6)


@each(
    "kind, edition, converted",
    [("regular_ll", 1, True), ("rotated_ll", 1, False), ("regular_ll", 2, False)],
)
def test_steps_may_be_less_than_the_unit_of_grib(kind, edition, converted, tmp_path):
    """0.0625 degrees are 62 thousandths in GRIB 1, and stay so if it is converted to GRIB 2."""
    rows, columns = 161, 33
    keys = {"Ni": columns, "Nj": rows, "shortName": "t", "typeOfLevel": "isobaricInhPa"} | {
        **{"level": 500, "iDirectionIncrementInDegrees": 0.0625},
        **{"jDirectionIncrementInDegrees": 0.0625, "longitudeOfFirstGridPointInDegrees": 0},
        **{"latitudeOfFirstGridPointInDegrees": 10, "latitudeOfLastGridPointInDegrees": 0},
        **{"longitudeOfLastGridPointInDegrees": 2, **({"edition": 2} if converted else {})},
    }
    if kind == "rotated_ll":
        keys |= {"latitudeOfSouthernPoleInDegrees": -90, "longitudeOfSouthernPoleInDegrees": 0}
    path = tmp_path / "a.grib"
    values = np.arange(float(rows * columns))
    write_message(path, f"{kind}_pl_grib{edition}", values, **keys)
    source = open_source(config(path, tmp_path / "cache"))
    latitude, longitude = source.grid.points
    np.testing.assert_allclose(latitude[:, 0], 10 - 0.0625 * np.arange(rows), atol=1e-9)
    east = (longitude[0] + 180) % 360 - 180
    np.testing.assert_allclose(east, 0.0625 * np.arange(columns), atol=1e-9)


@pytest.mark.slow
def test_longitudes_of_grib_1_go_round_the_globe(tmp_path):
    """The last of 1/64 degree is 359.984 there, whose distance from 360 is 2 % too long."""
    keys = {"Ni": 360 * 64, "Nj": 2, "iDirectionIncrementInDegrees": 1 / 64} | {
        **{"latitudeOfFirstGridPointInDegrees": 1, "latitudeOfLastGridPointInDegrees": 0},
        **{"jDirectionIncrementInDegrees": 1, "longitudeOfFirstGridPointInDegrees": 0},
        **{"longitudeOfLastGridPointInDegrees": 360 - 1 / 64},
    }
    path = write_message(tmp_path / "a.grib", "regular_ll_pl_grib1", np.zeros(2 * 360 * 64), **keys)
    longitude = open_source(config(path, tmp_path / "cache")).longitude
    np.testing.assert_allclose(longitude, np.arange(360 * 64) / 64, atol=1e-9)


def test_steps_that_do_not_fit_the_points_are_refused(tmp_path):
    state = stores.dataset().isel(time=0)[["2m_temperature"]]
    path = tmp_path / "a.grib"
    write_grib(path, state, SURFACE_TABLE, jDirectionIncrementInDegrees=12)
    with pytest.raises(UserError, match=r"rows over .* do not fit its steps of 12 degrees"):
        open_source(config(path, tmp_path / "cache"))


REFUSED_GRIDS = {
    "staggered": ("lambert", {"scanningMode": 0b01001000}, "has rows or columns that are stagg"),
    "turned": ("rotated_ll", {"angleOfRotationInDegrees": 10}, "rotated grid that is turned about"),
    "rotated": (
        "rotated_gg",
        {"latitudeOfSouthernPoleInDegrees": -40},
        r"grid \(rotated_gg\), whose",
    ),
    "westward cells": ("reduced", {"iScansNegatively": 1}, "whose points are not eastward, row"),
    "cells by column": ("reduced", {"jPointsAreConsecutive": 1}, "whose points are not eastw.*cdo"),
    "zigzag cells": (
        "reduced",
        {"alternativeRowScanning": 1},
        "whose points are not eastward, row",
    ),
}


@each("how", REFUSED_GRIDS)
def test_points_that_lie_otherwise_are_refused(how, tmp_path):
    kind, changes, line = REFUSED_GRIDS[how]
    samples = {"reduced": "reduced_gg_pl_32_grib2", "rotated_gg": "rotated_gg_pl_grib2"}
    if kind in samples:
        write_message(tmp_path / "a.grib", samples[kind], **changes)
    else:
        state = stores.dataset(13, 16, 1)[["2m_temperature"]].isel(time=0)
        write_grib(tmp_path / "a.grib", state, SURFACE_TABLE, **projected(kind)[0], **changes)
    with pytest.raises(UserError, match=line):
        open_source(config(tmp_path / "a.grib", tmp_path / "cache"))


@pytest.mark.slow
def test_the_earth_may_be_an_ellipsoid(tmp_path):
    keys = projected("lambert")[0] | {"shapeOfTheEarth": 5}  # WGS 84
    state = stores.dataset(13, 16, 1)[["2m_temperature"]].isel(time=0)
    write_grib(tmp_path / "a.grib", state, SURFACE_TABLE, **keys)
    mapping = open_source(
        config(tmp_path / "a.grib", tmp_path / "cache")
    ).grid.projection.attributes
    assert (mapping["semi_major_axis"], mapping["semi_minor_axis"]) == (6378137, 6356752.314)
    assert "earth_radius" not in mapping


def test_damage_is_found(tmp_path):
    """In a value, and in the length of a section, after which ecCodes finds no more messages."""
    path = tmp_path / "a.grib"
    for level in (500, 850):
        state = stores.dataset().isel(time=0).sel(level=[level])
        write_grib(path, state, UPPER_TABLE, centre=255)  # whose section 2 ecCodes does not know
    length = path.stat().st_size // 2
    messages = [with_checksum(path.read_bytes()[x : x + length]) for x in (0, length)]
    path.write_bytes(b"".join(messages))
    read = [Channel("temperature", 850)], slice(0, 1), slice(None)
    assert open_source(config(path, tmp_path / "cache")).read(*read).shape == (1, 1, 12, 8)
    for position, line in ((-9, "checksum.* is wrong"), (16 + 21 + 3, "after 1 message")):
        damaged = bytearray(messages[1])
        damaged[position] ^= 4
        path.write_bytes(messages[0] + damaged)
        with pytest.raises(UserError, match=line):
            open_source(config(path, tmp_path / "cache")).read(*read)


FIRST = [Channel("2m_temperature")], slice(0, 1), slice(None)
# Edition, section, its octets from 1 with what damage puts there, and what is said.
MANY = b"\xff\xf0"
HUGE = {
    "a grid of edition 1": (1, 2, {7: MANY, 9: MANY, 17: b"\0"}, "4292870400 points are too many"),
    "a grid": (2, 3, {31: b"\0\0" + MANY, 35: b"\0\0" + MANY}, "4292870400 points are too many"),
    "a smaller grid": (2, 3, {32: b"\1"}, "points are too many for .* bytes|96 values on 786528 p"),
    "values": (2, 5, {6: MANY + MANY}, "has 4293984240 values on 96 points"),
}


def damage(path, edition, section, octets):
    """Write octets into a section of a message; they are counted from 1."""
    content = bytearray(path.read_bytes())
    start = 16 if edition == 2 else 8 + int.from_bytes(content[8:11])
    while edition == 2 and content[start + 4] != section:
        start += int.from_bytes(content[start : start + 4])
    for octet, those_there in octets.items():
        first = start + octet - 1
        content[first : first + len(those_there)] = those_there
    path.write_bytes(content)


def test_a_damaged_number_of_gaussian_rows_takes_no_memory(tmp_path):
    path = write_message(tmp_path / "a.grib", "regular_gg_pl_grib2")
    damage(path, 2, 3, {68: MANY})
    with pytest.raises(UserError, match=r"its 64 rows do not fit N4293918752"):
        open_source(config(path, tmp_path / "cache"))


@each(
    "how, bits, bitmap",
    [
        ("a grid of edition 1", 24, 0),
        ("a grid", 24, 1),
        ("a smaller grid", 0, 0),
        ("values", 24, 0),
        ("values", 0, 0),
    ],
)
def test_damaged_numbers_of_points_take_no_memory(how, bits, bitmap, tmp_path):
    edition, section, octets, line = HUGE[how]
    state = stores.dataset().isel(time=0)[["2m_temperature"]]
    state = state if bits else (0 * state + 280).assign_coords(time=state["time"])
    keys = {"bitsPerValue": bits, "bitmapPresent": bitmap}
    path = write_grib(tmp_path / "a.grib", state, SURFACE_TABLE, edition, **keys)
    damage(path, edition, section, octets)
    with pytest.raises(UserError, match=line):
        open_source(config(path, tmp_path / "cache")).read(*FIRST)


def test_two_forecasts_for_one_time_are_refused(tmp_path):
    data = stores.dataset(steps=2)
    path = tmp_path / "twice.grib"
    write_grib(path, data.isel(time=0), stepUnits=1, forecastTime=6)
    write_grib(path, data.isel(time=1))
    with pytest.raises(UserError, match=r"at 2000-01-01T06:00 more than once \(steps of 6 and 0 h"):
        open_source(config(path, tmp_path / "cache"))


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    path = write_grib(tmp_path / "cut.grib", stores.dataset().isel(time=0))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"read after 6 messages: .*change data.store"):
        open_source(config(path, tmp_path / "cache"))


def rain(hours: int = 72) -> xr.DataArray:
    """Sums over the hour before each time."""
    data = stores.dataset(rows=4, columns=6, steps=1).drop_dims(["time", "level"])
    values = np.random.default_rng(0).gamma(1, 1e-3, size=(hours, 4, 6))
    times = np.datetime64("2000-01-01", "ns") + HOUR * np.arange(1, hours + 1)
    return xr.DataArray(
        values,
        {"time": times, "latitude": data["latitude"], "longitude": data["longitude"]},
        ("time", "latitude", "longitude"),
    )


def write_rain(path, hourly, ranges, edition, forecasts):
    """Write sums between steps of forecasts that start every so many hours, and a temperature."""
    start = hourly["time"].values[0] - HOUR
    for first in range(0, len(hourly), forecasts):
        for begin, end in ranges:
            values = hourly[first + begin : first + end].sum("time")
            state = xr.Dataset({RAIN: values}, {"time": start + HOUR * first})
            keys = {"stepType": "accum"} if edition == 1 else {}
            keys |= {"stepRange": f"{begin}-{end}"}
            write_grib(path, state, RAIN_TABLE, edition, **keys)
            if begin == end:
                continue
            state = xr.Dataset({"2m_temperature": 280 + 0 * values})
            state = state.assign_coords(time=start + HOUR * (first + end))
            write_grib(path, state, SURFACE_TABLE, edition)
    return path


def rain_config(path, tmp_path, **changes):
    return stores.config(
        path,
        prognostic=["2m_temperature"],
        diagnostic=[RAIN],
        cache=str(tmp_path / "cache"),
        static=[],
        forcing=[],
        train=["2000-01-01", "2000-01-01"],
        valid=["2000-01-02", "2000-01-02"],
        test=["2000-01-03", "2000-01-03"],
        **changes,
    )


# Begin and end of the steps, and the hours between starts of forecasts.
SUMS = {
    "since a start every 6 hours": ([(0, 3), (0, 6)], 6),
    "with an empty one": ([(0, 0), (0, 3), (3, 6)], 6),
}


@each(
    "kind, edition",
    [("since a start every 6 hours", 1), ("with an empty one", 2)],
)
def test_the_steps_of_sums_are_followed(kind, edition, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    hourly = rain()
    path = write_rain(tmp_path / "rain.grib", hourly, SUMS[kind][0], edition, SUMS[kind][1])
    store = Store.open(rain_config(path, tmp_path))
    assert len(store.times) >= 11
    ends = ((store.times - hourly["time"].values[0]) / HOUR).astype(int) + 1
    wanted = np.stack([hourly.values[end - 6 : end].sum(axis=0) for end in ends])
    found = store.read_channels(store.channels.diagnostic, store.times, slice(0, 4))[:, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert "assumes" not in caplog.text


@each(
    "steps, begins, expected",
    [
        ([6, 12, 18, 24], 0, "has sums over 6 to 24 hours by its GRIB steps"),
        ([6, 12], 1, "has sums over 1 hour by its GRIB steps, and its times"),
    ],
)
def test_sums_that_do_not_fill_the_step_are_refused(steps, begins, expected, tmp_path):
    """They are sums since the start of long forecasts, or over one hour of six."""
    ranges = [(end - 1 if begins else 0, end) for end in steps]
    path = write_rain(tmp_path / "a.grib", rain(), ranges, 1 + begins, max(steps))
    with pytest.raises(UserError) as caught:
        Store.open(rain_config(path, tmp_path))
    message = str(caught.value)
    assert f"{RAIN} {expected}" in message
    assert "\n" not in message
    assert message.count(str(path)) == 1
    assert begins or "do not fill the 6h of data.step" in message


def test_no_pickle_is_read_or_written(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a pickle is used")

    path = write_grib(tmp_path / "a.grib", stores.dataset().isel(time=0))
    for name in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(pickle, name, refuse)
    source = open_source(config(path, tmp_path / "cache"))
    source.read([Channel("2m_temperature")], slice(0, 1), slice(None))
    assert list(tmp_path.iterdir()) == [path]
    assert source.where == str(path)


@each("joined", [True, False])
def test_a_netcdf_file_of_forecasts_is_refused_with_its_step(joined, tmp_path):
    data = stores.dataset(steps=6)
    upper, surface = tmp_path / "upper.nc", tmp_path / "surface.nc"
    data[["temperature"]].to_netcdf(upper)
    steps = data["2m_temperature"].rename("t2m").expand_dims(step=[0, 6]).to_dataset()
    steps["step"] = ("step", np.array([0, 6], "m8[h]").astype("m8[ns]"))
    steps.assign_coords(valid_time=steps["time"] + steps["step"]).to_netcdf(surface)
    settings = config(f"[{upper},{surface}]" if joined else surface, tmp_path / "cache")
    settings.store = [str(upper), str(surface)] if joined else str(surface)
    settings.prognostic = ["2m_temperature"]
    with pytest.raises(UserError, match=r"2m_temperature has the dims step, time") as caught:
        Store.open(settings)
    message = str(caught.value)
    assert "dataset.isel(step=0)" in message
    assert "time_dims=['valid_time']" in message
    assert "\n" not in message
