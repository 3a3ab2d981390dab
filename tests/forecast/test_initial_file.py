"""Forecasts from states in files of other sources: GRIB, netCDF, other grids, names and units."""

import shutil

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.rechunk.request import Regridder, regular_grid
from credit_dp.data.sources.grib import load_eccodes
from credit_dp.data.store import Store
from credit_dp.data.units import GRAVITY
from credit_dp.errors import UserError
from credit_dp.forecast.initial_file import InitialFiles
from tests.forecast.runs import INIT, forecast, forecast_config

eccodes = load_eccodes("init_file")

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TIME = np.datetime64("2000-01-04", "ns")
EVERY_ROW = slice(None)
# Name of the store -> short name, type of level, level (None: those of the store), and factor.
ECMWF = {
    "geopotential": ("z", "isobaricInhPa", None, 1.0),
    "temperature": ("t", "isobaricInhPa", None, 1.0),
    "2m_temperature": ("2t", "heightAboveGround", 2, 1.0),
}
# NCEP's files have heights, and pressures in their edition of GRIB 1 and 2.
NCEP = ECMWF | {"geopotential": ("gh", "isobaricInhPa", None, 1 / GRAVITY)}
SAMPLES = {1: "regular_ll_pl_grib1", 2: "regular_ll_pl_grib2"}


@pytest.fixture(scope="module")
def data(config):
    """The store that the run was trained on."""
    with xr.open_zarr(config.data.store, consolidated=False) as data:
        return data.load().drop_encoding()


@pytest.fixture(scope="module")
def store(config):
    return Store.open(config.data)


def write_grib(path, state, table=ECMWF, edition=2, **keys):
    """Append the fields of a dataset of one time to a GRIB file; `keys` are set last."""
    time = state["time"].values.astype("M8[h]").item()
    latitude, longitude = state["latitude"].values, state["longitude"].values
    grid = {
        **{"Ni": len(longitude), "Nj": len(latitude)},
        "latitudeOfFirstGridPointInDegrees": latitude[0],
        "latitudeOfLastGridPointInDegrees": latitude[-1],
        "longitudeOfFirstGridPointInDegrees": longitude[0],
        "longitudeOfLastGridPointInDegrees": longitude[-1],
        "iDirectionIncrementInDegrees": 360 / len(longitude),
        "jDirectionIncrementInDegrees": abs(latitude[1] - latitude[0]),
        "jScansPositively": int(latitude[0] < latitude[-1]),
    }
    with path.open("ab") as file:
        for name, (short, level_type, level, factor) in table.items():
            levels = state["level"].values.tolist() if level is None else [level]
            for one in levels:
                field = state[name].sel(level=one) if level is None else state[name]
                handle = eccodes.codes_grib_new_from_samples(SAMPLES[edition])
                settings = {
                    **grid,
                    **{"dataDate": int(f"{time:%Y%m%d}"), "dataTime": time.hour * 100},
                    **{"typeOfLevel": level_type, "level": one, "shortName": short},
                    **{"bitsPerValue": 24, **keys},
                }
                for key, value in settings.items():
                    eccodes.codes_set(handle, key, value)
                values = field.values.astype(float) * factor
                eccodes.codes_set_values(handle, np.nan_to_num(values, nan=1e20).ravel())
                file.write(eccodes.codes_get_message(handle))
                eccodes.codes_release(handle)
    return path


def states(path, store, times=(TIME,), rows=EVERY_ROW):
    """Read the states at some times from files."""
    times = np.array(times, "M8[ns]")
    return InitialFiles.open(str(path)).reader(store, times).read_states(times, rows)


def close(found, wanted, of=1e-6):
    """Whether fields are equal up to a part of their largest value."""
    largest = np.abs(wanted).max((-2, -1), keepdims=True)
    return bool((np.abs(found - wanted) <= of * largest).all())


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("table", [ECMWF, NCEP], ids=["ECMWF", "NCEP"])
def test_fields_of_grib_are_found(data, store, tmp_path, table, edition):
    path = write_grib(tmp_path / "a.grib", data.sel(time=TIME), table, edition)
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    assert close(states(path, store), wanted)
    assert np.array_equal(states(path, store, rows=slice(4, 9)), states(path, store)[:, :, 4:9])


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


@pytest.mark.parametrize("kind", ["scalar time", "valid_time", "lead times", "zarr"])
def test_times_of_datasets(data, store, tmp_path, kind):
    one = data[["geopotential", "temperature", "2m_temperature"]].sel(time=[TIME])
    path = tmp_path / "a.nc"
    if kind == "scalar time":
        one = one.isel(time=0)
    elif kind == "valid_time":  # as cfgrib writes a forecast
        one = one.isel(time=0, drop=True).assign_coords(
            time=TIME - np.timedelta64(6, "h"), step=np.timedelta64(6, "h"), valid_time=TIME
        )
    elif kind == "lead times":
        steps = [data.isel(time=i, drop=True) for i in (11, 12)]
        one = xr.concat(steps, "prediction_timedelta").assign_coords(
            time=data["time"].values[11],
            prediction_timedelta=("prediction_timedelta", [0, 6], {"units": "hours"}),
        )
        assert data["time"].values[12] == TIME
    if kind == "zarr":
        path = tmp_path / "a.zarr"
        one.to_zarr(path, zarr_format=3, consolidated=False)
    else:
        one.to_netcdf(path)
    wanted = store.read_states(np.array([TIME]), EVERY_ROW)
    assert np.array_equal(states(path, store), wanted)


def _on_grid(state, rows, columns, west=0.0):
    """Put fields on a grid of another size, with the westernmost column at `west`."""
    old = state["latitude"].values, state["longitude"].values
    latitude, longitude = regular_grid(rows, columns)
    regrid = Regridder(*old, latitude, longitude + west)
    fields = {name: (state[name].dims, regrid(state[name].values.astype(float))) for name in ECMWF}
    coords = {"time": state["time"], "level": state["level"], "latitude": latitude}
    return xr.Dataset(fields, {**coords, "longitude": longitude + west})


@pytest.mark.parametrize("northward", [False, True])
@pytest.mark.parametrize("grid", [(17, 16), (33, 32), (12, 10)])
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
        old = np.sort(state["latitude"].values)[::-1], state["longitude"].values
        regrid = Regridder(*old, store.latitude, store.longitude)
        flip = slice(None, None, -1 if northward else 1)
        fields = [
            regrid(state[name].values.reshape(-1, *grid)[:, flip])
            for name in store.channels.variables
        ]
        wanted = np.concatenate(fields)
    assert close(states(path, store)[0], wanted, 1e-5)


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


def test_fields_that_share_a_message_are_found(data, store, tmp_path):
    """As NCEP writes winds."""
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
    state = data.sel(time=TIME)
    if how == "spectral":
        handle = eccodes.codes_grib_new_from_samples("sh_pl_grib2")
        path.write_bytes(eccodes.codes_get_message(handle))
        return eccodes.codes_release(handle)
    if how == "reduced":
        handle = eccodes.codes_grib_new_from_samples("reduced_gg_pl_32_grib2")
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
    "date": r"is cut off or damaged after 0 messages .*Fetch it again, or change init_file",
    "timeless": r"has no time of the standard calendar. Give it the coordinate time",
    "cut": r"is cut off or damaged after 6 messages .*Fetch it again, or change init_file",
    "spectral": r"has a spectral grid \(sh\). Request it on a regular grid .*cdo",
    "reduced": r"has a reduced Gaussian grid \(reduced_gg\). Request it on a regular grid",
    "region": r"latitude must cover the globe .*Change init_file",
    "grids": r"has messages on more than one grid",
    "twice": r"has 2t at 2000-01-04T00:00 more than once. Select one",
    "gaps": r"2m_temperature has no value at 2000-01-04T00:00, row 3, column 5, and 1 such point",
    "hot": r"2m_temperature is 2\d+.* at 2000-01-04T00:00, row .*its limits are",
    "unit": r"temperature_\d+ is in m, which can't be converted to K",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_of_a_file_is_one_line(data, store, tmp_path, how):
    path = tmp_path / "state"
    if how != "absent":
        corrupt(path, data, how)
    with pytest.raises(UserError, match=FAULTS[how]) as caught:
        states(path, store)
    assert str(caught.value).startswith(f"init_file: {path}")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("text", ["gs://b/a.grib", "[]", "[a.grib,a.grib]"])
def test_paths_that_can_not_be_files(text):
    with pytest.raises(UserError, match=r"^init_file: "):
        InitialFiles.open(text)


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
