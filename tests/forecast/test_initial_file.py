"""Forecasts from states in files of other sources: GRIB, netCDF, other grids, names and units."""

import shutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from credit_dp.config import DatesConfig
from credit_dp.data.grid import Grid, degrees_east, row_edges, row_weights
from credit_dp.data.regrid import CellLayout, Regridder, regular_grid
from credit_dp.data.sources.grib_file import GribFile, load_eccodes
from credit_dp.data.store import Store
from credit_dp.data.units import GRAVITY
from credit_dp.errors import UserError
from credit_dp.forecast.initial_file import GribStates, InitialFiles
from tests.data import cell_stores, stores
from tests.forecast.grib_files import (
    ECMWF,
    NCEP,
    ORDERS,
    SCANNING,
    projected,
    write_grib,
    write_projected,
    write_scanned,
)
from tests.forecast.runs import INIT, forecast, forecast_config
from tests.tier_cases import tiers

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TIME = np.datetime64("2000-01-04", "ns")
EVERY_ROW = slice(None)


@pytest.fixture(scope="module")
def data(config):
    """The store that the run was trained on."""
    with xr.open_zarr(config.data.store, consolidated=False) as data:
        return data.load().drop_encoding()


@pytest.fixture(scope="module")
def store(config):
    return Store.open(config.data)


def states(path, store, times=(TIME,), rows=EVERY_ROW, regrid="conservative"):
    """Read the states at some times from files."""
    times = np.array(times, "M8[ns]")
    return InitialFiles.open(str(path)).reader(store, times, regrid).read_states(times, rows)


def close(found, wanted, of=1e-6):
    """Whether fields are equal up to a part of their largest value."""
    largest = np.abs(wanted).max((-2, -1), keepdims=True)
    return bool((np.abs(found - wanted) <= of * largest).all())


def test_fields_of_grib_are_found(data, store, tmp_path):
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    for table, edition in ((ECMWF, 1), (NCEP, 2), (ECMWF, 2)):
        path = write_grib(tmp_path / f"{edition}.grib", data.sel(time=TIME), table, edition)
        found = states(path, store)
        assert close(found, wanted), (table, edition)
        assert np.array_equal(states(path, store, rows=slice(4, 9)), found[:, :, 4:9])
        path.unlink()


@pytest.mark.parametrize(
    "kind", [pytest.param("lambert", marks=pytest.mark.exhaustive), "rotated_ll"]
)
def test_grib_on_a_projection_is_read_on_its_grid(config, tmp_path, kind):
    keys, latitude, longitude = projected(kind)
    dims = ("y", "x")
    data = stores.dataset(13, 16, 20)[["2m_temperature"]]
    on_plane = data.drop_vars(["latitude", "longitude"]).rename(latitude="y", longitude="x")
    on_plane = on_plane.assign_coords(latitude=(dims, latitude), longitude=(dims, longitude))
    on_plane.to_zarr(tmp_path / "plane.zarr", zarr_format=2)
    fields = {"prognostic": ["2m_temperature"], "forcing": [], "static": [], "levels": None}
    store = Store.open(replace(config.data, store=str(tmp_path / "plane.zarr"), **fields))
    table = {"2m_temperature": ECMWF["2m_temperature"]}
    path = write_grib(tmp_path / "a.grib", data.sel(time=TIME), table, **keys)
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    assert close(states(path, store), wanted)


def test_a_forecast_from_netcdf_has_the_bits_of_one_from_the_store(config, data, tmp_path, whole):
    path = tmp_path / "state.nc"
    data.isel(latitude=slice(None, None, -1)).to_netcdf(path)
    found = forecast(forecast_config(config, tmp_path / "f.zarr", init_file=str(path)))
    with xr.open_zarr(found) as one, xr.open_zarr(whole) as other:
        assert one.drop_attrs().identical(other.drop_attrs())


@pytest.mark.slow
def test_ranks_start_from_the_same_state(config, data, tmp_path):
    path = write_grib(tmp_path / "a.grib", _on_grid(data.sel(time=TIME), 13, 12))
    keys = {"init_file": str(path), "init": "2000-01-04", "lead": "6h"}
    one = forecast(forecast_config(config, tmp_path / "one", **keys))
    three = forecast(forecast_config(config, tmp_path / "three", **keys), ranks=3)
    with xr.open_zarr(one) as one, xr.open_zarr(three) as three:
        for name in one.data_vars:
            assert close(three[name].values, one[name].values, 1e-5)


@pytest.mark.slow
def test_a_forecast_goes_on_from_its_grib(config, tmp_path):
    keys = {"init": "2000-01-04", "lead": "12h"}
    straight = forecast(forecast_config(config, tmp_path / "f.grib", format="grib", **keys))
    keys = {"init": "2000-01-04T06", "lead": "6h", "init_file": str(straight)}
    found = forecast(forecast_config(config, tmp_path / "f.zarr", **keys))
    whole = forecast(forecast_config(config, tmp_path / "w.zarr", init="2000-01-04", lead="12h"))
    with xr.open_zarr(found) as found, xr.open_zarr(whole) as whole:
        for name in whole.data_vars:
            wanted = whole[name].isel(prediction_timedelta=[1]).values
            assert close(found[name].values, wanted, 1e-4)


def with_times(data, kind):
    """Return the fields of a time in one of the forms that datasets have."""
    one = data[["geopotential", "temperature", "2m_temperature"]].sel(time=[TIME])
    if kind == "zarr":
        return one
    if kind == "scalar time":
        return one.isel(time=0)
    if kind == "valid_time":  # as cfgrib writes a forecast
        six = np.timedelta64(6, "h")
        return one.isel(time=0, drop=True).assign_coords(time=TIME - six, step=six, valid_time=TIME)
    steps = [data.isel(time=i, drop=True) for i in (11, 12)]
    assert data["time"].values[12] == TIME
    last, start = (6, "2000-01-03T18:00") if kind == "lead times" else (1.5, "2000-01-03T22:30")
    return xr.concat(steps, "prediction_timedelta").assign_coords(
        time=np.datetime64(start, "ns"),
        prediction_timedelta=("prediction_timedelta", [0, last], {"units": "hours"}),
    )


def test_times_of_datasets(data, store, tmp_path):
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    for kind in ("scalar time", "valid_time", "lead times", "half hours", "zarr"):
        path = tmp_path / f"{kind}.{'zarr' if kind == 'zarr' else 'nc'}"
        if kind == "zarr":
            with_times(data, kind).to_zarr(path, zarr_format=3, consolidated=False)
        else:
            with_times(data, kind).to_netcdf(path)
        assert np.array_equal(states(path, store), wanted), kind


def _on_grid(state, rows, columns, west=0.0):
    """Put fields on a grid of another size, with the westernmost column at `west`."""
    old = Grid(state["latitude"].values, state["longitude"].values)
    usual = regular_grid(rows, columns)
    latitude, longitude = usual.latitude, usual.longitude
    regrid = Regridder(CellLayout.of(old), Grid(latitude, longitude + west))
    fields = {
        name: (dims, regrid(field.reshape(*field.shape[:-2], -1)))
        for name, dims, field in (
            (name, state[name].dims, state[name].values.astype(float)) for name in ECMWF
        )
    }
    coords = {"time": state["time"], "level": state["level"], "latitude": latitude}
    return xr.Dataset(fields, {**coords, "longitude": longitude + west})


@pytest.mark.parametrize(
    ("grid", "northward"),
    tiers(fast=[((12, 10), True)], slow=[], exhaustive=[((17, 16), False), ((33, 32), False)]),
)
def test_another_grid_is_regridded(data, store, tmp_path, grid, northward):
    west = 180.0 if grid == (17, 16) else 0.0  # the same points, beginning elsewhere
    state = _on_grid(data.sel(time=TIME), *grid, west)
    if northward:
        state = state.isel(latitude=slice(None, None, -1))
    if west:
        state = state.assign_coords(longitude=state["longitude"] % 360)
    path = write_grib(tmp_path / "a.grib", state)
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)[0]
    if not west:
        old = Grid(np.sort(state["latitude"].values)[::-1], state["longitude"].values)
        regrid = Regridder(CellLayout.of(old), store.grid)
        flip = slice(None, None, -1 if northward else 1)
        fields = [
            regrid(state[name].values.reshape(-1, *grid)[:, flip].reshape(-1, np.prod(grid)))
            for name in store.channels.variables
        ]
        wanted = np.concatenate(fields)
    assert close(states(path, store)[0], wanted, 1e-5)


def test_columns_from_another_meridian_keep_their_bits(config, data, tmp_path):
    """The store has the globe or a band of its rows."""
    for name, rows in (("globe", slice(None)), ("band", slice(2, -2))):
        band = data.isel(latitude=rows)
        stores.write(band, tmp_path / f"{name}.zarr")
        store = Store.open(replace(config.data, store=str(tmp_path / f"{name}.zarr")))
        state = band.sel(time=[TIME])
        west = (state["longitude"].values + 180) % 360 - 180
        turned = state.assign_coords(longitude=west)
        turned = turned.roll(longitude=state.sizes["longitude"] // 2, roll_coords=True)
        turned.to_netcdf(tmp_path / f"{name}.nc")
        wanted = store.read_states(np.array([TIME]), EVERY_ROW)
        assert np.array_equal(states(tmp_path / f"{name}.nc", store), wanted), name


def bilinear_at(
    rows: Sequence[tuple[float, np.ndarray]], west: float, lat: float, lon: float
) -> float:
    """Interpolate to one point, first along two rows from `west`, then between them; rows fall."""
    latitudes = [latitude for latitude, _ in rows]
    south = min(max(sum(latitude > lat for latitude in latitudes), 1), len(rows) - 1)
    along, weights = [], []
    for _, row in rows[south - 1 : south + 1]:
        position = (lon - west) % 360 / (360 / len(row))
        first = int(position)
        pair = row[first % len(row)], row[(first + 1) % len(row)]
        along.append(pair[0] + (position - first) * (pair[1] - pair[0]))
    top, bottom = latitudes[south - 1 : south + 1]
    weights = min(max((top - lat) / (top - bottom), 0.0), 1.0)
    return along[0] + weights * (along[1] - along[0])


def test_another_grid_is_interpolated(data, store, tmp_path):
    for west in (0.0, -170.0):
        state = _on_grid(data.sel(time=TIME), 12, 20, west)  # without rows on the poles
        path = write_grib(tmp_path / f"{west}.grib", state)
        found = states(path, store, regrid="bilinear")[0]
        channel = store.channels.slice_of("2m_temperature").start
        field = state["2m_temperature"].values
        rows = list(zip(state["latitude"].values, field, strict=True))
        wanted = [
            [bilinear_at(rows, west, lat, lon) for lon in store.longitude] for lat in store.latitude
        ]
        assert close(found[channel], np.array(wanted), 1e-5), west
        assert not close(found, states(path, store)[0], 1e-3), west


def write_reduced(path):
    """Write a temperature on a reduced Gaussian grid; return its rows with their latitudes."""
    eccodes = load_eccodes("init_file")
    handle = eccodes.codes_grib_new_from_samples("reduced_gg_pl_32_grib2")
    date = {"dataDate": 20000104, "dataTime": 0, "shortName": "2t", "bitsPerValue": 24}
    eccodes.codes_set(handle, "typeOfLevel", "heightAboveGround")
    eccodes.codes_set(handle, "level", 2)
    for key, value in date.items():
        eccodes.codes_set(handle, key, value)
    latitudes = np.sort(eccodes.codes_get_array(handle, "distinctLatitudes"))[::-1]
    rows = []
    for latitude, length in zip(latitudes, eccodes.codes_get_array(handle, "pl"), strict=True):
        lon = np.deg2rad(np.arange(length) * 360 / length)
        rows.append((latitude, 280 + 20 * np.cos(np.deg2rad(latitude)) * np.cos(lon - 1)))
    eccodes.codes_set_values(handle, np.concatenate([row for _, row in rows]))
    path.write_bytes(eccodes.codes_get_message(handle))
    eccodes.codes_release(handle)
    return rows


def test_a_reduced_gaussian_grid_is_regridded(config, tmp_path):
    rows = write_reduced(tmp_path / "a.grib")
    store = Store.open(replace(config.data, prognostic=["2m_temperature"], levels=None))
    found = states(tmp_path / "a.grib", store, regrid="bilinear")[0, 0]
    wanted = [
        [bilinear_at(rows, 0.0, lat, lon) for lon in store.longitude] for lat in store.latitude
    ]
    assert close(found, np.array(wanted), 1e-5)
    # A cell is a mean over its area, so that the mean of the globe stays.
    found = states(tmp_path / "a.grib", store, regrid="conservative")[0, 0]
    edges = row_edges(np.array([latitude for latitude, _ in rows]))
    areas = -np.diff(np.sin(np.deg2rad(edges))) / 2
    mean = sum(area * row.mean() for area, (_, row) in zip(areas, rows, strict=True))
    weights = row_weights(store.latitude)
    assert np.average(found.mean(axis=1), weights=weights) == pytest.approx(mean, rel=1e-6)
    smooth = 280 + 20 * np.cos(np.deg2rad(store.latitude))[:, None] * np.cos(
        np.deg2rad(store.longitude) - 1
    )
    assert np.abs(found - smooth).max() < 1.5


@pytest.mark.slow
def test_cells_are_the_rows_of_a_store_on_the_same_cells(config, tmp_path):
    rows = write_reduced(tmp_path / "a.grib")
    cells = cell_stores.gaussian([len(row) for _, row in rows])
    path = cell_stores.netcdf(tmp_path, cells)
    changes = {"prognostic": ["2m_temperature"], "levels": None, "forcing": [], "static": []}
    dates = DatesConfig(*[["2000-01-01", "2000-01-10"]] * 3)
    store = Store.open(replace(config.data, store=str(path), dates=dates, **changes))
    found = states(tmp_path / "a.grib", store)[0, 0]
    wanted = cells.on_rows(np.concatenate([row for _, row in rows]))
    assert close(found, wanted, 1e-6)


def test_points_may_be_in_any_order(data, store, tmp_path):
    path = write_grib(tmp_path / "a.grib", data.sel(time=TIME))
    wanted = states(path, store)
    for order, flags in SCANNING.items():
        scanned = write_scanned(path, tmp_path / "b.grib", flags)
        assert close(states(scanned, store), wanted, 1e-6), order


@pytest.mark.parametrize(
    "kind",
    tiers(fast=[("rotated_ll",)], slow=[("lambert",)], exhaustive=[("polar_stereographic",)]),
)
def test_points_of_a_projection_may_be_in_any_order(tmp_path, kind):
    field = 250 + np.random.default_rng(0).random((13, 16))
    for number, flags in enumerate(ORDERS):
        path = tmp_path / f"{number}.grib"
        latitude, longitude = write_projected(path, field, kind, flags)
        states = GribStates(path)
        assert np.abs(states.grid.latitude - latitude).max() < 1e-5, flags
        assert np.abs(degrees_east(states.grid.longitude, longitude)).max() < 1e-4, flags
        found = states.find(["2t"], None, False, states.times[0])
        assert np.abs(found.read().reshape(13, 16) - field).max() < 1e-4, flags


@pytest.mark.slow
def test_messages_may_be_packed_in_any_way(data, store, tmp_path):
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    for packing in ("grid_simple", "grid_ccsds", "grid_jpeg"):
        path = tmp_path / f"{packing}.grib"
        write_grib(path, data.sel(time=TIME), packingType=packing)
        assert close(states(path, store), wanted), packing


def test_netcdf_of_another_origin_is_converted(data, store, tmp_path):
    """Other names and units: heights in m, degrees Celsius, levels in Pa, rows from the south."""
    state = data.sel(time=[TIME]).isel(latitude=slice(None, None, -1))
    state = state[["geopotential", "temperature", "2m_temperature"]]
    state = state.assign_coords(level=("level", state["level"].values * 100, {"units": "Pa"}))
    heights = (state["geopotential"] / GRAVITY).assign_attrs(units="m")
    warmth = (state["temperature"] - 273.15).assign_attrs(units="degC")
    other = xr.Dataset(
        {"gh": heights, "t": warmth, "t2m": state["2m_temperature"].assign_attrs(units="K")}
    )
    path = tmp_path / "other.nc"
    other.rename(level="pressure_level", latitude="lat", longitude="lon").to_netcdf(path)
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    assert close(states(path, store), wanted, 1e-5)


def test_fields_come_from_several_files(data, store, tmp_path):
    surface = {"2m_temperature": ECMWF["2m_temperature"]}
    upper = {name: entry for name, entry in ECMWF.items() if name not in surface}
    state = data.sel(time=TIME)
    first = write_grib(tmp_path / "a.grib", state, upper)
    second = write_grib(tmp_path / "b.grib", _on_grid(state, 33, 32), surface)
    found = states(f"[{first},{second}]", store)
    index = store.channels.variables.index("2m_temperature")
    channel = store.channels.slice_of("2m_temperature")
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    assert index >= 0
    assert close(np.delete(found, channel, 1), np.delete(wanted, channel, 1))
    files = InitialFiles.open(f"[{first},{second}]")
    assert files.initial_time(1, 6) == "2000-01-04T00"


@pytest.mark.slow
def test_fields_that_share_a_message_are_found(data, store, tmp_path):
    """As NCEP writes winds."""
    eccodes = load_eccodes("init_file")
    single = write_grib(tmp_path / "a.grib", data.sel(time=TIME))
    together = eccodes.codes_grib_multi_new()
    with single.open("rb") as file:
        first = 0
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            # From section 4 on, all but the first field have their own.
            eccodes.codes_grib_multi_append(handle, first, together)
            eccodes.codes_release(handle)
            first = 4
    path = tmp_path / "b.grib"
    with path.open("wb") as file:
        eccodes.codes_grib_multi_write(together, file)
    eccodes.codes_grib_multi_release(together)
    assert np.array_equal(states(path, store), states(single, store))


def test_what_is_missing_is_named_in_one_line(data, store, tmp_path):
    state = data.sel(time=TIME)
    path = write_grib(
        tmp_path / "a.grib", state.sel(level=[850]), {"temperature": ECMWF["temperature"]}
    )
    with pytest.raises(UserError) as caught:
        states(path, store)
    assert str(caught.value) == (
        f"init_file: {path} lacks at 2000-01-04T00:00 geopotential on levels 500, 850, 1000, "
        "2m_temperature, temperature on levels 500, 1000. Add a file that has it to init_file."
    )


def corrupt(path, data, how):
    """Write a state with one fault."""
    eccodes = load_eccodes("init_file")
    state = data.sel(time=TIME)
    if how == "spectral":
        handle = eccodes.codes_grib_new_from_samples("sh_pl_grib2")
        path.write_bytes(eccodes.codes_get_message(handle))
        return eccodes.codes_release(handle)
    if how == "reduced":
        handle = eccodes.codes_grib_new_from_samples("reduced_gg_pl_32_grib2")
        eccodes.codes_set(handle, "iScansNegatively", 1)
        path.write_bytes(eccodes.codes_get_message(handle))
        return eccodes.codes_release(handle)
    if how == "empty":
        return path.write_bytes(b"")
    if how == "gaps":
        state = state.copy(deep=True)
        state["2m_temperature"][3, 5] = np.nan
        return write_grib(path, state, bitmapPresent=1, missingValue=1e20)
    if how == "region":
        return write_grib(path, state.isel(latitude=slice(0, 5)))
    if how == "hot":
        return write_grib(
            path, state, ECMWF | {"2m_temperature": ("2t", "heightAboveGround", 2, 9)}
        )
    if how == "unit":
        return xr.Dataset.to_netcdf(
            state.assign(temperature=state["temperature"].assign_attrs(units="m")), path
        )
    if how == "timeless":
        return state.drop_vars("time").to_netcdf(path)
    write_grib(path, state)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "date":  # section 1 has the month in octet 15, and section 0 has 16 octets
        content = path.read_bytes()
        path.write_bytes(content[:30] + b"\xff" + content[31:])
    elif how == "twice":
        write_grib(path, state, {"2m_temperature": ECMWF["2m_temperature"]})
    elif how == "grids":
        write_grib(path, _on_grid(state, 33, 32))
    return None


FAULTS = {
    "absent": r"no such file. Change init_file",
    "empty": r"is neither GRIB nor netCDF. Change init_file",
    "date": r"can't be read after 0 messages: month must be in 1.*Fetch it again if",
    "timeless": r"has no time with dates. Give it the coordinate time",
    "cut": r"can't be read after 6 messages: .*Fetch it again if it is cut off .*change init_file",
    "spectral": r"has a spectral grid \(sh\). Request it on a regular grid .*cdo",
    "reduced": r"has a reduced Gaussian grid whose points are not eastward, .*cdo",
    "region": r"a global grid is needed here, but this is a region of 5x.*Change init_file",
    "grids": r"has messages on more than one grid, or is damaged",
    "twice": r"has 2t at 2000-01-04T00:00 more than once. Select one",
    "gaps": r"2m_temperature has no value at 2000-01-04T00:00, row 3, column 5, and 1 such point",
    "hot": r"2m_temperature is 2\d+.* at 2000-01-04T00:00, row .*its limits are",
    "unit": r"temperature_\d+ is in m, which can't be converted to K",
}


def test_a_fault_of_a_file_is_one_line(data, store, tmp_path):
    for how, said in FAULTS.items():
        path = tmp_path / how
        if how != "absent":
            corrupt(path, data, how)
        with pytest.raises(UserError, match=said) as caught:
            states(path, store)
        assert str(caught.value).startswith(f"init_file: {path}"), how
        assert "\n" not in str(caught.value), how
    for text in ("gs://b/a.grib", "[]", "[a.grib,a.grib]"):
        with pytest.raises(UserError, match=r"^init_file: "):
            InitialFiles.open(text)


def test_the_time_is_that_of_the_file_if_it_is_clear(data, tmp_path):
    path = write_grib(tmp_path / "a.grib", data.sel(time=TIME))
    assert InitialFiles.open(str(path)).initial_time(1, 6) == "2000-01-04T00"
    with pytest.raises(
        UserError, match=r"2 input states 6h apart, .* has those at 2000-01-04T00:00. "
    ):
        InitialFiles.open(str(path)).initial_time(2, 6)
    write_grib(path, data.isel(time=13))
    assert InitialFiles.open(str(path)).initial_time(2, 6) == "2000-01-04T06"
    with pytest.raises(
        UserError, match=r"1 input state, .*T00:00, 2000.*init=TIME, or change init_f"
    ):
        InitialFiles.open(str(path)).initial_time(1, 6)
    path = write_grib(tmp_path / "m.grib", data.sel(time=TIME), stepUnits="m", step=90)
    assert GribStates(path).times == np.datetime64("2000-01-04T01:30")
    assert {x.hours for x in GribFile.open(path, "init_file").messages("instant")} == {1.5}


def test_another_state_is_not_resumed(config, data, tmp_path, monkeypatch):
    path = write_grib(tmp_path / "a.grib", data.sel(time=TIME))
    keys = {"init_file": str(path), "init": "2000-01-04", "lead": "6h"}
    settings = forecast_config(config, tmp_path / "f.zarr", **keys)
    shutil.move(forecast(settings), tmp_path / "f.zarr.partial")
    write_grib(path, data.isel(time=13))
    with pytest.raises(UserError, match=r"f.zarr.partial: was begun with another init_file"):
        forecast(settings)


def test_the_times_of_the_store_are_not_needed(config, tmp_path, data):
    assert INIT.startswith("2000-01-04")
    later = data.sel(time=TIME).assign_coords(time=np.datetime64("2026-01-31T12", "ns"))
    path = write_grib(tmp_path / "a.grib", later)
    keys = {"init_file": str(path), "init": "2026-01-31T12", "lead": "6h"}
    with pytest.raises(UserError, match="init: needs the forcing at 2026-01-31T12:00, but"):
        forecast(forecast_config(config, tmp_path / "f.zarr", **keys))
