"""Variables without values on land or sea: masks, refusals, bands without any value."""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from credit_dp.config import VariableConfig
from credit_dp.data.masks import with_masks
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

ROWS, COLUMNS, STEPS = 12, 8, 12
DIMS = ("time", "latitude", "longitude")
FILLED = ("sea_surface_temperature", "soil", "sea_ice_cover", "lake_depth")


def land():
    """The four southernmost rows, and a continent."""
    found = np.zeros((ROWS, COLUMNS), dtype=bool)
    found[8:] = True
    found[2:5, 3:6] = True
    return found


def masked_dataset():
    data = stores.dataset(ROWS, COLUMNS, STEPS)
    random = np.random.default_rng(1)
    everywhere = random.normal(size=(3, STEPS, ROWS, COLUMNS)).astype("f4")
    data["sea_surface_temperature"] = (DIMS, np.where(land(), np.nan, 290 + everywhere[0]))
    data["soil"] = (DIMS, np.where(land(), everywhere[1], np.nan))
    data["sea_ice_cover"] = (DIMS, np.where(land(), np.nan, np.abs(everywhere[2]) / 4))
    data["lake_depth"] = (DIMS[1:], np.where(land(), 5.0, np.nan))
    for name in FILLED:
        data[name] = data[name].astype("f4")
    return data


def config_of(path, fill="mean", **changes):
    settings = {
        "prognostic": ["geopotential", "sea_surface_temperature"],
        "diagnostic": ["soil", "2m_temperature"],
        "forcing": ["day_of_year_sin", "sea_ice_cover", "solar"],
        "static": ["latitude_sin", "lake_depth", "land_sea_mask"],
        "variables": {name: VariableConfig(fill=fill) for name in FILLED},
    }
    return stores.config(path, **(settings | changes))


def opened(tmp_path, data, **changes):
    """Open a store as a run does: with the masks of its training dates."""
    path = stores.write(data, tmp_path / "s.zarr", chunks={"time": 1, "latitude": 4})
    store = Store.open(config_of(path, **changes))
    return with_masks(store, tmp_path, lambda title, part: None)


def read_all(store, places):
    rows = slice(0, ROWS)
    store.read_outputs(store.times[places], rows)
    store.read_forcing(store.times[places], rows)
    store.read_static(rows)


@each(
    "rows, rising",
    [(slice(3, 9), True), (slice(8, 12), False)],
)
def test_masks_are_where_there_are_values(tmp_path, rows, rising):
    data = masked_dataset()
    store = opened(tmp_path, data.sortby("latitude", ascending=rising))
    masks = store.valid_mask(rows)
    assert masks.dtype == bool
    assert masks[:3].all()
    assert masks[5].all()
    assert np.array_equal(masks[3], ~land()[rows])
    assert np.array_equal(masks[4], land()[rows])
    fields = store.read_outputs(store.times[4:6], rows)
    assert np.array_equal(~np.isnan(fields), np.broadcast_to(masks, fields.shape))
    sst = data["sea_surface_temperature"].values[4:6, rows]
    assert np.array_equal(fields[:, 3], sst, equal_nan=True)
    states = store.read_states(store.times[4:6], rows)
    forcing = store.read_forcing(store.times[4:6], rows)
    assert np.array_equal(states, fields[:, :4], equal_nan=True)
    assert np.array_equal(forcing[:, 1], data["sea_ice_cover"].values[4:6, rows], equal_nan=True)
    assert np.array_equal(forcing[:, 2], data["solar"].values[4:6, rows])
    static = store.read_static(rows)
    assert np.array_equal(static[1], data["lake_depth"].values[rows], equal_nan=True)
    assert np.array_equal(static[2], data["land_sea_mask"].values[rows])
    assert store.valid_mask(slice(0, 2))[3].all()  # a mask, even where all points have values


def test_a_band_without_any_value(tmp_path):
    store = opened(tmp_path, masked_dataset())
    band = slice(9, 12)
    assert not store.valid_mask(band)[3].any()
    assert np.isnan(store.read_states(store.times[:2], band)[:, 3]).all()
    assert np.isnan(store.read_forcing(store.times[:2], band)[:, 1]).all()


def test_without_a_fill_there_are_no_masks(tmp_path):
    changes = {"prognostic": ["geopotential"], "diagnostic": [], "static": []}
    ice = {"sea_ice_cover": VariableConfig(fill=0)}
    assert (
        opened(tmp_path, masked_dataset(), variables=ice, **changes).valid_mask(slice(0, 3)) is None
    )


def test_values_that_come_and_go_inside_the_mask_are_left_out(tmp_path):
    data = masked_dataset()
    data["sea_surface_temperature"].values[3:, 9] = 271
    store = opened(tmp_path, data)
    assert np.isnan(store.read_states([store.times[5]], slice(8, 12))[0][3]).all()


@each("date", [5, 7])
def test_the_mask_is_that_of_all_training_dates(tmp_path, date, caplog):
    """Dates 0 to 5 are training dates; of them one lacks a row of soil."""
    data = masked_dataset()
    data["soil"].values[date, 10] = np.nan
    with caplog.at_level(logging.INFO, "credit_dp.data"):
        store = opened(tmp_path, data, train=["2000-01-01", "2000-01-02T06"])
    wanted = land()
    wanted[10] = date == 7
    assert np.array_equal(store.valid_mask(slice(None))[4], wanted)
    assert np.array_equal(store.valid_mask(slice(8, 12))[4], wanted[8:])
    notes = [record.getMessage() for record in caplog.records]
    lines = [] if date == 7 else [f"soil: {COLUMNS} of {ROWS * COLUMNS} points have"]
    assert [note.partition(" values at some training")[0] for note in notes] == lines
    # All values are there at the last date, but not those outside the mask.
    fields = store.read_outputs(store.times[[11]], slice(0, ROWS))[0, 4]
    assert np.array_equal(np.isnan(fields), ~wanted)


@pytest.mark.slow
def test_the_mask_of_rows_that_are_read_apart_is_the_same(tmp_path, monkeypatch):
    data = masked_dataset()
    data["soil"].values[3, 10] = np.nan
    wanted = opened(tmp_path, data).valid_mask(slice(None))
    monkeypatch.setattr("credit_dp.data.streaming.TIME_BYTES", 500)
    (tmp_path / "again").mkdir()
    found = opened(tmp_path / "again", data).valid_mask(slice(None))
    assert np.array_equal(found, wanted)
    assert not wanted[4, 10].any()


@pytest.mark.parametrize(
    ("splits", "date"), [(True, 3), pytest.param(False, 0, marks=pytest.mark.slow)]
)
def test_a_date_without_any_value_is_named_with_what_helps(tmp_path, monkeypatch, date, splits):
    if splits:
        monkeypatch.setattr("credit_dp.data.streaming.TIME_BYTES", 500)
    data = masked_dataset()
    data["soil"].values[date] = np.nan
    with pytest.raises(UserError, match="soil has no value at all at ") as caught:
        opened(tmp_path, data)
    moment = str(data["time"].values[date].astype("M8[m]"))
    assert f"ds.drop_sel(time='{moment}')" in str(caught.value)
    assert "\n" not in str(caught.value)
    without = data.drop_sel(time=moment)
    (tmp_path / "without").mkdir()
    store = opened(tmp_path / "without", without)
    assert np.array_equal(store.valid_mask(slice(None))[4], land())


@each("dates, value, line", [
    (1, np.where(land(), np.nan, 0.3), "soil has at no point values at all dates"),
    (slice(None), np.nan, "soil has no value"),
])  # fmt: skip
def test_what_leaves_no_mask_is_refused(tmp_path, dates, value, line):
    data = masked_dataset()
    data["soil"].values[dates] = value
    with pytest.raises(UserError, match=line):
        opened(tmp_path, data)


def test_damaged_masks_are_found_again(tmp_path):
    wanted = opened(tmp_path, masked_dataset()).valid_mask(slice(None))
    (path,) = tmp_path.glob("masks-*.npz")
    path.write_bytes(path.read_bytes()[:100])
    store = Store.open(config_of(tmp_path / "s.zarr"))
    found = with_masks(store, tmp_path, lambda title, part: None)
    assert np.array_equal(found.valid_mask(slice(None)), wanted)


ROLE = {"sea_surface_temperature": "prognostic", "soil": "diagnostic", "sea_ice_cover": "forcing"}


def place_of(name):
    return (9, 2) if name == "soil" else (6, 2)


@each("name", ["soil", "sea_ice_cover"])
def test_nan_inside_the_mask_is_refused(tmp_path, name):
    data = masked_dataset()
    data[name].values[7][place_of(name)] = np.nan
    store = opened(tmp_path, data, train=["2000-01-01", "2000-01-02T06"])
    with pytest.raises(UserError, match=name) as caught:
        read_all(store, slice(5, 9))
    message = str(caught.value)
    for part in ("s.zarr", "2000-01-02T18:00", "on 1 point ", f"data.{ROLE[name]}", ".fill"):
        assert part in message
    assert "\n" not in message


@each("name", ["soil", "lake_depth"])
def test_without_a_fill_nan_is_refused_by_its_key(tmp_path, name):
    variables = {other: VariableConfig(fill=0) for other in FILLED if other != name}
    store = opened(tmp_path, masked_dataset(), variables=variables)
    with pytest.raises(UserError, match=rf"data\.variables\.{name}\.fill=mean") as caught:
        read_all(store, slice(5, 6))
    assert ("2000-01-02T06:00" in str(caught.value)) == (name != "lake_depth")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@each("name", ["sea_surface_temperature", "lake_depth"])
def test_infinite_values_are_refused_whatever_the_fill(tmp_path, name):
    data = masked_dataset()
    data[name].values[..., 3, 4] = np.inf
    store = opened(tmp_path, data)
    with pytest.raises(UserError, match=f"{name} has infinite values"):
        read_all(store, slice(5, 6))


def test_masks_are_not_read_with_fields(tmp_path):
    store = opened(tmp_path, masked_dataset())
    rows = slice(4, 8)
    before = store.bytes_read

    def read(place):
        return store.read_outputs(store.times[place : place + 1], rows), store.valid_mask(rows)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(read, range(8)))
    row_bytes = 4 * COLUMNS * 4
    # Six channels at eight times; masks are read before.
    assert store.bytes_read - before == row_bytes * 6 * 8
    assert all(np.array_equal(masks, found[0][1]) for _, masks in found)


def test_levels_have_masks_of_their_own(tmp_path):
    data = masked_dataset()
    data["temperature"].values[:, 2, 5] = np.nan
    changes = {"prognostic": ["temperature"], "diagnostic": [], "forcing": [], "static": []}
    store = opened(tmp_path, data, variables={"temperature": VariableConfig(fill=0)}, **changes)
    masks = store.valid_mask(slice(4, 7))
    assert masks[:2].all()
    assert not masks[2, 1].any()
    assert masks[2, [0, 2]].all()


def test_units_are_converted_once_however_often_a_field_is_read(tmp_path):
    data = masked_dataset()
    data["sea_surface_temperature"] = data["sea_surface_temperature"] - np.float32(273.15)
    data["sea_surface_temperature"].attrs["units"] = "degC"
    data["land_sea_mask"] = data["land_sea_mask"] * 100
    variables = {name: VariableConfig(fill="mean") for name in FILLED}
    variables["sea_surface_temperature"].convert = "degC->K"
    variables["land_sea_mask"] = VariableConfig(convert="%->1")
    store = opened(tmp_path, data, variables=variables)
    expected = masked_dataset()["sea_surface_temperature"].values[4]
    for _ in range(2):
        found = store.read_states([store.times[4]], slice(0, 12))[0][3]
        assert np.allclose(found, expected, atol=1e-4, equal_nan=True)
        static = store.read_static(slice(0, 12))[2]
        assert np.allclose(static, masked_dataset()["land_sea_mask"].values, rtol=1e-6)
    assert store.units("sea_surface_temperature") == "K"
    assert found.dtype == np.float32
