import numpy as np
import pytest
import xarray as xr
import zarr

from credit_dp.data.channels import Channel
from credit_dp.data.sampling import sample_times
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.opening import open_single_source
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores


def refusal(path, **changes):
    with pytest.raises(UserError) as caught:
        Store.open(stores.config(path, **changes))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return stores.write(stores.dataset(), tmp_path_factory.mktemp("good") / "store.zarr")


def changed(tmp_path, change):
    return stores.write(change(stores.dataset()), tmp_path / "store.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_without_names_of_its_dims(tmp_path, version):
    data = stores.dataset().drop_vars("solar")
    path = stores.write(data, tmp_path / "store.zarr", zarr_format=version)
    group = zarr.open_group(path, mode="r+", zarr_format=version)
    group.create_array("spare", shape=(3,), dtype="f4")
    expected = "store.zarr: needs names of the dims of each array, but spare has none."
    assert expected in refusal(path)


def test_missing_store(tmp_path):
    message = refusal(tmp_path / "nowhere.zarr")
    assert str(tmp_path / "nowhere.zarr") in message
    assert "data.store" in message


def test_a_file_that_the_system_does_not_read():
    assert "/proc/self/mem: can't be read (Input/output error)" in refusal("/proc/self/mem")


@pytest.mark.parametrize("content", ["", "not json", "{}"])
def test_folder_that_is_no_store(tmp_path, content):
    (tmp_path / "zarr.json").write_text(content)
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "data.store" in message


def test_no_store_given():
    assert "data.store" in refusal("")


def test_all_missing_variables_are_named_at_once(good):
    message = refusal(good, prognostic=["temprature", "wind"], static=["soil"])
    assert "no variable temprature. Nearest: temperature" in message
    assert message.endswith(" Also missing: wind of data.prognostic, soil of data.static.")


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        ("prognostic", "geopotental", "geopotential"),
        ("forcing", "day_of_yaer_sin", "day_of_year_sin"),
        ("forcing", "solr", "solar"),
        ("static", "land_see_mask", "land_sea_mask"),
    ],
)
def test_missing_variable_offers_the_nearest(good, kind, name, near):
    message = refusal(good, **{kind: [name]})
    assert str(good) in message
    assert name in message
    assert near in message.replace(name, "")
    assert f"data.{kind}" in message


def test_variable_in_two_lists(good):
    assert "data.forcing: solar" in refusal(good, forcing=["solar"], prognostic=["solar"])


def test_extra_dim(tmp_path):
    path = changed(tmp_path, lambda data: data.expand_dims(quantile=2))
    message = refusal(path)
    assert "quantile" in message
    assert "geopotential" in message
    assert "data.store" in message


@pytest.mark.parametrize("dim", ["time", "latitude", "longitude"])
def test_missing_dim(tmp_path, dim):
    path = changed(tmp_path, lambda data: data.isel({dim: 0}, drop=True))
    message = refusal(path)
    assert f"{dim} is missing" in message
    assert "data.store" in message


def test_dim_without_coordinates(tmp_path):
    path = changed(tmp_path, lambda data: data.drop_vars("latitude"))
    assert "latitude has no values" in refusal(path)


@pytest.mark.parametrize(
    ("kind", "name", "advice"),
    [
        ("static", "solar", "data.forcing"),
        ("forcing", "land_sea_mask", "data.static"),
        ("forcing", "geopotential", "level"),
        ("prognostic", "land_sea_mask", "has no time"),
    ],
)
def test_variable_of_another_kind(good, kind, name, advice):
    lists = {"prognostic": ["temperature"], "forcing": [], "static": []}
    message = refusal(good, **(lists | {kind: [name]}))
    assert name in message
    assert advice in message


def test_missing_level(good):
    message = refusal(good, levels=[500, 700])
    assert "no level 700" in message
    assert "500, 850, 1000" in message
    assert "data.levels" in message
    assert "hPa" not in message
    hint = "Levels are in hPa: did you mean data.levels=[500,850]?"
    assert refusal(good, levels=[50000, 85000]).endswith(hint)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("dates", [["1999-12-30", "2000-01-02"], ["2000-01-02", "2000-01-04"]])
def test_dates_outside_the_store(good, split, dates):
    message = refusal(good, **{split: dates})
    assert f"data.dates.{split}" in message
    assert "2000-01-01T00:00 to 2000-01-03T18:00" in message


def test_dates_between_two_times(good):
    message = refusal(good, train=["2000-01-01T01", "2000-01-01T02"])
    assert "data.dates.train" in message


@pytest.mark.parametrize(
    ("coordinate", "values", "expected"),
    [
        (
            "latitude",
            np.r_[90, 80, 85, np.linspace(60, -90, 9)],
            "latitude must increase or decrease",
        ),
        ("latitude", np.linspace(100, -90, 12), "within -90 to 90"),
        ("latitude", np.r_[90:70:6j, -70:-90:6j], "in roughly equal steps"),
        ("level", np.array([0.1, 0.5, 500]), "levels must be whole numbers"),
        ("longitude", np.linspace(0, 360, 8), "equal steps"),
        ("longitude", np.array([0, 45, 90, 135, 180, 225, 271, 315.0]), "equal steps"),
        ("time", stores.times(12)[::-1], "time must increase"),
        (
            "time",
            stores.times(12)[[0, *range(11)]],
            "time must increase throughout, but 2000-01-01T00:00 follows 2000-01-01T00:00",
        ),
        ("level", np.array([500, 850, 500]), "a level comes twice"),
        ("time", np.arange(12), "time has numbers without a unit, not dates: its attribute units"),
    ],
)
def test_coordinates_on_which_numbers_would_lie(tmp_path, coordinate, values, expected):
    path = changed(tmp_path, lambda data: data.assign_coords({coordinate: values}))
    assert expected in refusal(path)


@pytest.mark.parametrize(
    ("units", "calendar", "scale", "problem"),
    [
        ("months since 2000-01-01", "standard", 1, "the units 'months since 2000-01-01'"),
        ("hour since 0000-01-01", "standard", 1, "the units 'hour since 0000-01-01'"),
        ("days since 1000000000-01-01", "standard", 1, "the units 'days since 1000000000-01-01'"),
        ("days since 1000000000-01-01", "noleap", 1, "the units 'days since 1000000000-01-01'"),
        ("days since 2000-01-01", "martian", 1, "the calendar 'martian'"),
        ("days since 2000-01-01", "noleap", 10**13, "values up to 2e+13 with the units 'days"),
    ],
)
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_units_of_time_that_are_no_dates(tmp_path, units, calendar, scale, problem, suffix):
    data = stores.dataset(rows=9, columns=8, steps=3)
    attrs = {"units": units, "calendar": calendar}
    data = data.assign_coords(time=("time", scale * np.arange(3), attrs))
    path = tmp_path / f"in{suffix}"
    if suffix == ".nc":
        data.to_netcdf(path)
    else:
        stores.write(data, path)
    line = refusal(path)
    assert f"{path.name}: time has {problem}" in line
    assert ", which xarray can't decode to dates" in line
    assert "decode_times" not in line
    recipe = line.split("as with xarray's dataset")[1].split(", and write")[0]
    assert recipe.startswith(".assign_coords(time=pandas.date_range(")


@pytest.mark.parametrize(
    ("first", "years"), [("0000-12-31", "0 to 1"), ("9999-12-31", "9999 to 10000")]
)
def test_years_that_texts_of_dates_lack(tmp_path, first, years):
    attrs = {"units": f"days since {first}", "calendar": "noleap"}
    data = stores.dataset(steps=3).assign_coords(time=("time", np.arange(3), attrs))
    path = stores.write(data, tmp_path / "store.zarr")
    assert f"store.zarr: time has the years {years}, but texts of dates have 1" in refusal(path)


@pytest.mark.parametrize("place", [0, 1, 11])
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("calendar", ["standard", "noleap"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_missing_time(tmp_path, calendar, suffix, place, value):
    hours = 6 * np.arange(12.0)
    attrs = {"units": "hours since 2000-01-01", "calendar": calendar}
    path = tmp_path / f"in{suffix}"

    def write():
        data = stores.dataset().assign_coords(time=("time", hours, attrs))
        data.to_netcdf(path) if suffix == ".nc" else stores.write(data, path)

    write()  # with a first time that is not missing, but the one that the units count from
    store = Store.open(stores.config(path))
    assert store.read_states(store.times, slice(None)).shape[0] == 12
    path = tmp_path / f"missing{suffix}"
    hours = hours + 100
    hours[place] = value
    write()
    assert f"missing{suffix}: time has missing " in refusal(path)


@pytest.mark.parametrize("several", ["pattern", "list"])
def test_one_file_of_many_in_another_calendar(tmp_path, several):
    paths = []
    for year, calendar in ((2000, "standard"), (2001, "noleap"), (2002, "proleptic_gregorian")):
        dates = xr.date_range(f"{year}", periods=12, freq="6h", calendar=calendar, use_cftime=True)
        data = stores.dataset().assign_coords(time=dates)
        paths.append(stores.write(data, tmp_path / f"era5_{year}.zarr"))
    where = tmp_path / "era5_*.zarr"
    changes = {"store": list(map(str, paths))} if several == "list" else {}
    message = refusal(where, **changes)
    assert "era5_2001.zarr: has dates of the noleap calendar, but " in message
    assert "era5_2000.zarr of the standard calendar" in message


def in_cells(data, dim="values"):
    """The cells of the grid in a row, as reduced Gaussian grids have them."""
    return data.stack({dim: ("latitude", "longitude")}).reset_index(dim)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda data: in_cells(data, "cell").drop_vars(["latitude", "longitude"]),
            "reduced Gaussian or unstructured grid (cells along cell), but needs rows and columns, "
            "or the latitude and the longitude of each cell",
        ),
        (
            lambda data: (
                data.rename(latitude="y", longitude="x")
                .drop_vars(["y", "x"])
                .assign_coords(
                    latitude=(("y", "x"), np.zeros((12, 8))),
                    longitude=(("y", "x"), np.zeros((12, 8))),
                )
            ),
            "latitude must increase or decrease throughout",
        ),
    ],
)
def test_grids_of_other_kinds_are_refused_by_name(tmp_path, change, expected):
    assert expected in refusal(changed(tmp_path, change))


@pytest.mark.parametrize(
    "change",
    [
        in_cells,
        lambda data: in_cells(data, "x").rename(latitude="lat", longitude="lon"),
        lambda data: in_cells(data).assign(
            solar=in_cells(data)["solar"].assign_attrs(GRIB_gridType="reduced_gg")
        ),
    ],
)
def test_cells_of_a_regular_grid_are_read_like_it(tmp_path, change):
    """Rows and columns that are one dim, as reduced Gaussian grids have it."""
    plain = changed(tmp_path / "plain", lambda data: data)
    channels = [Channel("temperature", 850), Channel("temperature", 500)]
    wanted, found = (
        open_single_source(str(path)).read(channels, slice(1, 3), slice(2, 9))
        for path in (plain, changed(tmp_path, change))
    )
    assert found.shape == (2, 2, 7, 8)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("coordinate", "values"),
    [
        ("latitude", np.linspace(60, 20, 12)),
        ("latitude", np.linspace(90, -30, 12)),
        ("longitude", np.linspace(0, 180, 8)),
    ],
)
def test_regions_are_opened(tmp_path, coordinate, values):
    path = changed(tmp_path, lambda data: data.assign_coords({coordinate: values}))
    store = Store.open(stores.config(path))
    assert not store.grid.is_global
    assert np.array_equal(getattr(store, coordinate), values)


def test_rows_next_to_the_poles_may_lack_the_poles(tmp_path):
    latitude = np.linspace(90 - 7.5, -90 + 7.5, 12)
    path = changed(tmp_path, lambda data: data.assign_coords(latitude=latitude))
    assert np.array_equal(Store.open(stores.config(path)).latitude, latitude)


def test_missing_time(tmp_path):
    times = stores.times(12)
    times[4] = "NaT"
    path = changed(tmp_path, lambda data: data.assign_coords(time=times))
    assert "time" in refusal(path)


def test_levels_without_values(tmp_path):
    path = changed(tmp_path, lambda data: data.drop_vars("level"))
    assert "has a dim level, but no values" in refusal(path)


@pytest.mark.parametrize("start", [0.0, -180.0, 200.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_longitude_may_start_anywhere_and_go_either_way(tmp_path, start, sign):
    longitude = (start + 180 + sign * np.arange(8) * 45.0) % 360 - 180
    path = changed(tmp_path, lambda data: data.assign_coords(longitude=longitude))
    assert np.array_equal(Store.open(stores.config(path)).longitude, longitude)


def test_ways_of_regridding_that_do_not_fit(good):
    assert "data.regrid: needs one of rows, conservative, bilinear" in refusal(good, regrid="bi")
    assert "data.regrid: bilinear needs a grid, but data.grid is null" in refusal(
        good, regrid="bilinear"
    )
    rows = refusal(good, regrid="rows", grid="9x8")
    assert "rows keeps the latitudes of the cells, but data.grid is 9x8. Leave data.grid" in rows
    assert "data.regrid=rows is for cells in rows of different lengths" in refusal(
        good, regrid="rows"
    )
    assert "data.grid: needs ROWSxCOLUMNS" in refusal(good, grid="nonsense")
    assert "data.grid: needs at least two rows" in refusal(good, grid="1x8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "place", "where"),
    [
        ("temperature", "prognostic", (5, 1, 3, 2), "2000-01-02T06:00 on level 850"),
        ("2m_temperature", "prognostic", (5, 3, 2), "2000-01-02T06:00"),
        ("solar", "forcing", (0, 3, 2), "2000-01-01T00:00"),
        ("land_sea_mask", "static", (3, 2), ""),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(tmp_path, name, kind, place, where, value):
    data = stores.dataset()
    data[name].values[place] = value
    config = stores.config(stores.write(data, tmp_path / "store.zarr"))
    with pytest.raises(UserError) as caught:
        prepare_training_data(config)
    message = str(caught.value)
    assert name in message
    assert where in message
    assert f"data.{kind}" in message
    assert "\n" not in message


def test_time_that_the_store_lacks(good):
    store = Store.open(stores.config(good))
    with pytest.raises(UserError, match="no time 2000-01-01T03:00"):
        store.read_states([stores.START + np.timedelta64(3, "h")], slice(0, 2))


def test_step_that_the_store_does_not_have(good):
    with pytest.raises(UserError, match=r"data\.step"):
        prepare_training_data(stores.config(good, step="5h"))


@pytest.mark.slow
def test_split_without_two_times_a_step_apart(good):
    config = stores.config(good, valid=["2000-01-03T00", "2000-01-03T00"])
    with pytest.raises(UserError, match=r"data\.dates\.valid"):
        sample_times(prepare_training_data(config).store, "valid")


@pytest.mark.slow
def test_channel_that_never_changes(tmp_path):
    data = stores.dataset()
    data["temperature"].values[:, 1] = 250.1
    config = stores.config(stores.write(data, tmp_path / "store.zarr"))
    with pytest.raises(UserError, match="temperature_850 is constant"):
        prepare_training_data(config)


def test_cache_that_cannot_be_created(good, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache"):
        prepare_training_data(stores.config(good, cache=str(tmp_path / "file" / "cache")))
