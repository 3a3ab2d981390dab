import numpy as np
import pytest

from credit_dp.data.channels import Channel
from credit_dp.data.sources.anemoi import AnemoiSource, AnemoiVariables
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import anemoi_stores, prepared_stores, stores
from tests.tables import each

DATA = stores.dataset(rows=11)
CHANNELS = prepared_stores.channels_of(DATA)
FIELDS = prepared_stores.stacked(DATA, CHANNELS)


def opened(path):
    return AnemoiSource.open(str(path))


@pytest.fixture
def path(tmp_path):
    return anemoi_stores.write(DATA, tmp_path / "anemoi.zarr")


@pytest.mark.slow
@each("rising, chunks", [(False, None), (True, (1, 4, 1, 20)), (True, (5, 10, 1, 88))])
def test_fields_north_first_for_any_band(tmp_path, rising, chunks):
    data = DATA.sortby("latitude") if rising else DATA
    source = opened(anemoi_stores.write(data, tmp_path / "anemoi.zarr", chunks))
    assert np.array_equal(source.latitude, DATA["latitude"].values)
    assert np.array_equal(source.longitude, DATA["longitude"].values)
    for rows in (slice(0, 11), slice(0, 1), slice(3, 8), slice(10, 11)):
        for times in (slice(2, 3), slice(1, 12, 4), np.array([4, 1])):
            for wanted in (list(range(8)), [3, 0], [6]):
                channels = [CHANNELS[place] for place in wanted]
                fields = source.read(channels, times, rows)
                assert fields.dtype == np.float32
                assert np.array_equal(fields, FIELDS[times][:, wanted, rows])


def test_own_names_and_long_ones(path):
    source = opened(path)
    assert set(source.variables) == set(DATA.data_vars)
    assert source.variables["temperature"].levels == stores.LEVELS
    assert source.variables["t_850"].levels == ()
    assert "z_500" in source.variables
    assert "z_400" not in source.variables
    own = source.read([Channel("2t"), Channel("t_850")], slice(0, 2), slice(0, 11))
    long = [Channel("2m_temperature"), Channel("temperature", 850)]
    assert np.array_equal(own, source.read(long, slice(0, 2), slice(0, 11)))


def test_constants_are_static(path):
    source = opened(path)
    names = ["geopotential_at_surface", "land_sea_mask"]
    assert [source.variables[name].has_time for name in (*names, "lsm", "z")] == [False] * 4
    assert source.variables["geopotential"].has_time
    fields = source.read([Channel(name) for name in names], slice(0, 1), slice(2, 9))
    assert np.array_equal(fields[0], [DATA[name].values[2:9] for name in names])


def test_what_the_attributes_say(tmp_path):
    about = {"2t": {"units": "degC"}, "solar": {"constant_in_time": True}}
    source = opened(anemoi_stores.write(DATA, tmp_path / "a.zarr", variables_metadata=about))
    assert source.variables["2m_temperature"].units == "degC"
    assert not source.variables["solar"].has_time
    dataset = ["cos_latitude", "insolation", "tp"]
    found = AnemoiVariables.of(dataset, {"constant_fields": ["tp"]}).variables
    assert [found[name].has_time for name in found] == [False, True, False]
    assert list(found) == ["cos_latitude", "insolation", "total_precipitation"]


def test_missing_dates_are_gaps(tmp_path):
    missing = ["2000-01-01T06:00:00", "2000-01-02T00:00:00"]
    source = opened(anemoi_stores.write(DATA, tmp_path / "a.zarr", missing_dates=missing))
    kept = [0, 2, 3, *range(5, 12)]
    assert np.array_equal(source.times, DATA["time"].values[kept])
    for times in (slice(0, 5), np.array([4, 1]), slice(1, 3)):
        fields = source.read(CHANNELS, times, slice(0, 11))
        assert np.array_equal(fields, FIELDS[kept][times])


def test_constants_where_the_first_date_is_missing(tmp_path):
    data = DATA.copy(deep=True)
    path = tmp_path / "a.zarr"
    source = opened(anemoi_stores.write(data, path, missing_dates=["2000-01-01T00:00:00"]))
    (path / "data" / "0.0.0.0").unlink()
    mask = source.read([Channel("land_sea_mask")], slice(0, 1), slice(0, 11))
    assert np.array_equal(mask[0, 0], data["land_sea_mask"].values)


def test_the_sizes_that_a_reader_plans_with(path, tmp_path):
    source = opened(path)
    assert source.times_per_file(CHANNELS[0]) == 1
    assert source.chunk_shape(CHANNELS[0]) == (1, 10, 11, 8)
    assert source.group_by_chunk(CHANNELS) == [list(CHANNELS)]
    source.read(CHANNELS, slice(0, 3), slice(2, 4))
    assert source.chunk_reads == 3
    assert source.bytes_read == sum((path / "data" / f"{n}.0.0.0").stat().st_size for n in "012")
    source = opened(anemoi_stores.write(DATA, tmp_path / "b.zarr", (2, 4, 1, 20)))
    assert source.times_per_file(CHANNELS[0]) == 2
    assert source.chunk_shape(CHANNELS[0]) == (2, 4, 4, 8)
    # Of the three chunks along the variables, the one between these two is not read.
    assert anemoi_stores.names_of(DATA).index("lsm") == 1
    assert anemoi_stores.names_of(DATA).index("z") == 9
    source.read([Channel("z"), Channel("lsm")], slice(0, 1), slice(0, 2))
    assert source.chunk_reads == 2


@each("damage", ["cut", "missing"])
def test_a_damaged_chunk_is_named(path, damage):
    file = path / "data" / "4.0.0.0"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UserError) as caught:
        opened(path).read(CHANNELS[:2], slice(0, 12), slice(0, 3))
    message = str(caught.value)
    assert message.startswith(f"{path}: data/4.0.0.0 with all variables at 2000-01-02T00:00 can't")
    assert {"missing": "is missing", "cut": "cut short"}[damage] in message


REDUCED = np.repeat([60.0, 20.0, -20.0, -60.0], [20, 24, 24, 20])
SPIRAL = np.linspace(90, -90, 88)
BAD = {
    "reduced": (
        {"arrays": {"latitudes": REDUCED}, "field_shape": [88], "resolution": "o96"},
        "the reduced Gaussian grid O96 of 88 cells, but cells are needed row by row",
    ),
    "irregular": (
        {"arrays": {"latitudes": SPIRAL}, "resolution": None},
        "is on an irregular grid of 88 cells",
    ),
    "other columns in each row": (
        {"arrays": {"longitudes": np.linspace(0, 359, 88)}},
        "not in equal steps eastward round the globe",
    ),
    "dims": ({"arrays": {"data": np.zeros((12, 10, 88), "f4")}}, "has 3 dims"),
    "names": ({"variables": ["2t"]}, "10 names"),
    "no names": ({"variables": None}, "10 names"),
    "dates": ({"arrays": {"dates": np.arange(12)}}, "dates are int64"),
    "fewer dates": ({"arrays": {"dates": np.arange(9).astype("M8[s]")}}, "shape (9,)"),
    "no cells": ({"arrays": {"latitudes": None}}, "has no array latitudes"),
    "fewer cells": ({"arrays": {"longitudes": np.zeros(80)}}, "(88,) and (80,)"),
    "all missing": (
        {"missing_dates": [str(date) for date in DATA["time"].values]},
        "has no times",
    ),
}


@each("shape", [None, [88], [8, 8], [8, 11]])
def test_rows_are_those_of_the_coordinates(tmp_path, shape):
    source = opened(anemoi_stores.write(DATA, tmp_path / "a.zarr", field_shape=shape))
    assert source.grid == (11, 8)
    assert np.array_equal(source.read(CHANNELS, slice(0, 12), slice(0, 11)), FIELDS)


@pytest.mark.slow
@each("case", BAD)
def test_what_is_refused_in_one_line(tmp_path, case):
    changes, expected = BAD[case]
    path = anemoi_stores.write(DATA, tmp_path / "a.zarr", **changes)
    with pytest.raises(UserError) as caught:
        opened(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_units_that_the_dataset_does_not_give_are_those_of_the_long_names(tmp_path):
    path = anemoi_stores.write(stores.dataset(), tmp_path / "a.zarr")
    own = {"prognostic": ["2t", "z_500"], "forcing": [], "static": ["lsm"]}
    store = Store.open(stores.config(path, **own))
    assert [store.units("2t"), store.shown_unit("2t"), store.shown_unit("z_500")] == [
        "",
        "K",
        "m2 s-2",
    ]
