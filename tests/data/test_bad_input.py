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
from tests.tables import each


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
    return stores.write(change(stores.dataset()), tmp_path / "in.zarr")


def write(data, folder, suffix):
    path = folder / f"in.{suffix}"
    data.to_netcdf(path) if suffix == "nc" else stores.write(data, path)
    return path


def in_cells(data, dim="values"):
    """The cells of the grid in a row, as reduced Gaussian grids have them."""
    return data.stack({dim: ("latitude", "longitude")}).reset_index(dim)


ABSENT = "2000-01-01T00:00 to 2000-01-03T18:00"
# Changes of a config, and what the line of its refusal has.
CONFIGS = [
    ({"store": ""}, ["data.store"]),
    ({"store": "/no/store.zarr"}, ["/no/store.zarr", "data.store"]),
    ({"store": "/proc/self/mem"}, ["/proc/self/mem: can't be read (Input/output error)"]),
    (
        {"prognostic": ["temprature", "wind"], "static": ["soil"]},
        [
            "no variable temprature. Nearest: temperature",
            " Also missing: wind of data.prognostic, soil of data.static. Change data.prognostic "
            "and data.static.",
        ],
    ),
    ({"prognostic": ["geopotental"]}, ["no variable geopotental", "geopotential", "data.prog"]),
    ({"forcing": ["day_of_yaer_sin"]}, ["day_of_yaer_sin", "day_of_year_sin", "data.forcing"]),
    (
        {"static": ["land_see_mask"]},
        ["land_sea_mask", "Correct it, or leave it out: 'data.static=[]'"],
    ),
    (
        {"diagnostic": ["solar", "rain"], "forcing": ["day_of_year_sin"], "static": ["soil"]},
        ["Correct the names, or leave them out: 'data.diagnostic=[solar]' 'data.static=[]'"],
    ),
    ({"forcing": ["solar"], "prognostic": ["solar"]}, ["data.forcing: solar"]),
    (
        {"static": ["solar"], "forcing": ["day_of_year_sin"]},
        [
            "solar changes in time",
            "Move it: 'data.static=[]' 'data.forcing=[day_of_year_sin,solar]'",
        ],
    ),
    (
        {"forcing": ["land_sea_mask"], "static": []},
        ["has no time", "Move it: 'data.forcing=[]' 'data.static=[land_sea_mask]'"],
    ),
    (
        {"forcing": ["solar", "geopotential"], "prognostic": ["temperature"]},
        ["geopotential has levels", "Leave it out: 'data.forcing=[solar]'"],
    ),
    (
        {"prognostic": ["land_sea_mask"], "static": []},
        ["land_sea_mask has no time", "Change data.prognostic or data.store."],
    ),
    (
        {"levels": [500, 700]},
        ["has no level 700. Levels of all variables: 'data.levels=[500,850,1000]'"],
    ),
    (
        {"levels": [500, 700], "prognostic": ["temperature"]},
        ["has no level 700. Its levels: 'data.levels=[500,850,1000]'"],
    ),
    ({"levels": [50000, 85000]}, ["Levels are in hPa: did you mean data.levels=[500,850]?"]),
    ({"train": ["1999-12-30", "2000-01-02"]}, ["data.dates.train", ABSENT]),
    ({"valid": ["2000-01-02", "2000-01-04"]}, ["data.dates.valid", ABSENT]),
    ({"test": ["1999-12-30", "2000-01-02"]}, ["data.dates.test", ABSENT]),
    ({"train": ["2000-01-01T01", "2000-01-01T02"]}, ["data.dates.train"]),
    ({"regrid": "bi"}, ["data.regrid: needs one of rows, conservative, bilinear"]),
    ({"regrid": "bilinear"}, ["data.regrid: bilinear needs a grid, but data.grid is null"]),
    (
        {"regrid": "rows", "grid": "9x8"},
        ["rows keeps the latitudes of the cells, but data.grid is 9x8. Leave data.grid"],
    ),
    ({"regrid": "rows"}, ["data.regrid=rows is for cells in rows of different lengths"]),
    ({"grid": "nonsense"}, ["data.grid: needs ROWSxCOLUMNS"]),
    ({"grid": "1x8"}, ["data.grid: needs at least two rows"]),
]


@each("changes, expected", CONFIGS)
def test_configs_that_do_not_fit_the_store(good, changes, expected):
    message = refusal(changes.get("store", good), **changes)
    for words in expected:
        assert words in message
    assert "hPa" not in message or changes == {"levels": [50000, 85000]}


def test_a_store_without_levels(tmp_path):
    path = stores.write(stores.dataset()[["2m_temperature"]], tmp_path / "surface.zarr")
    lists = {"prognostic": ["2m_temperature"], "forcing": [], "static": []}
    assert refusal(path, levels=[500], **lists) == f"{path}: has no levels. Set data.levels=null."


def at(**coordinates):
    return lambda data: data.assign_coords(coordinates)


def without_rows_and_columns(data):
    data = data.rename(latitude="y", longitude="x").drop_vars(["y", "x"])
    points = {name: (("y", "x"), np.zeros((12, 8))) for name in ("latitude", "longitude")}
    return data.assign_coords(points)


def days_since(first):
    attrs = {"units": f"days since {first}", "calendar": "noleap"}
    return lambda data: data.assign_coords(time=("time", np.arange(12), attrs))


NUMBERS = "time has numbers without a unit, not dates: its attribute units"
TWICE = "time must increase throughout, but 2000-01-01T00:00 follows 2000-01-01T00:00"
# Changes of a dataset, and what the line of the refusal of its store has.
STORES = [
    (lambda data: data.expand_dims(quantile=2), "quantile"),
    *((lambda x, dim=dim: x.isel({dim: 0}, drop=True), f"{dim} is missing")
      for dim in ("time", "latitude", "longitude")),
    (lambda data: data.drop_vars("latitude"), "latitude has no values"),
    (lambda data: data.drop_vars("level"), "has a dim level, but no values"),
    (at(latitude=np.r_[90, 80, 85, 60:-90:9j]), "latitude must increase or decrease"),
    (at(latitude=np.linspace(100, -90, 12)), "within -90 to 90"),
    (at(latitude=np.r_[90:70:6j, -70:-90:6j]), "in roughly equal steps"),
    (at(level=np.array([0.1, 0.5, 500])), "levels must be whole numbers"),
    (at(level=np.array([500, 850, 500])), "a level comes twice"),
    (at(longitude=np.linspace(0, 360, 8)), "equal steps"),
    (at(longitude=np.array([0, 45, 90, 135, 180, 225, 271, 315.0])), "equal steps"),
    (at(time=stores.times(12)[::-1]), "time must increase"),
    (at(time=stores.times(12)[[0, *range(11)]]), TWICE),
    (at(time=np.arange(12)), NUMBERS),
    (at(time=np.where(np.arange(12) == 4, np.datetime64("NaT"), stores.times(12))), "time"),
    (days_since("0000-12-31"), "in.nc: time has the years 0 to 1, but texts of dates have 1"),
    (days_since("9999-12-31"), "time has the years 9999 to 10000, but texts of dates have 1"),
    (
        lambda data: in_cells(data, "cell").drop_vars(["latitude", "longitude"]),
        "reduced Gaussian or unstructured grid (cells along cell), but needs rows and columns, "
        "or the latitude and the longitude of each cell",
    ),
    (without_rows_and_columns, "latitude must increase or decrease throughout"),
]  # fmt: skip


@each("change, expected", STORES)
def test_stores_that_hold_no_fields_on_a_grid_in_time(tmp_path, change, expected):
    change(stores.dataset()).to_netcdf(tmp_path / "in.nc")
    message = refusal(tmp_path / "in.nc")
    assert expected in message
    assert "data.store" in message


@each("version", [2, 3])
def test_an_array_without_names_of_its_dims(tmp_path, version):
    data = stores.dataset().drop_vars("solar")
    path = stores.write(data, tmp_path / "store.zarr", zarr_format=version)
    group = zarr.open_group(path, mode="r+", zarr_format=version)
    group.create_array("spare", shape=(3,), dtype="f4")
    expected = "store.zarr: needs names of the dims of each array, but spare has none."
    assert expected in refusal(path)


@each("content", ["", "not json", "{}"])
def test_folder_that_is_no_store(tmp_path, content):
    (tmp_path / "zarr.json").write_text(content)
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "data.store" in message


@each(
    "units, calendar, scale, problem, suffix",
    [
        ("months since 2000-01-01", "standard", 1, "the units 'months since 2000-01-01'", "nc"),
        ("hour since 0000-01-01", "standard", 1, "the units 'hour since 0000-01-01'", "zarr"),
        ("days since 1000000000-01-01", "noleap", 1, "the units 'days since 100000000", "zarr"),
        ("days since 2000-01-01", "martian", 1, "the calendar 'martian'", "nc"),
        ("days since 2000-01-01", "noleap", 10**13, "values up to 2e+13 with the units 'd", "zarr"),
    ],
)
def test_units_of_time_that_are_no_dates(tmp_path, units, calendar, scale, problem, suffix):
    data = stores.dataset(rows=9, columns=8, steps=3)
    attrs = {"units": units, "calendar": calendar}
    path = write(data.assign_coords(time=("time", scale * np.arange(3), attrs)), tmp_path, suffix)
    line = refusal(path)
    assert f"{path.name}: time has {problem}" in line
    assert ", which xarray can't decode to dates" in line
    assert "decode_times" not in line
    recipe = line.split("as with xarray's dataset")[1].split(", and write")[0]
    assert recipe.startswith(".assign_coords(time=pandas.date_range(")


@each(
    "calendar, suffix, place, value",
    [
        ("standard", "nc", 0, np.nan),
        ("standard", "zarr", 1, np.inf),
        ("noleap", "zarr", 11, np.nan),
        ("noleap", "nc", 1, np.nan),
        ("standard", "zarr", 0, np.nan),
    ],
)
def test_a_missing_time(tmp_path, calendar, suffix, place, value):
    hours = 6 * np.arange(12.0) + 100
    hours[place] = value
    attrs = {"units": "hours since 2000-01-01", "calendar": calendar}
    data = stores.dataset(rows=9).assign_coords(time=("time", hours, attrs))
    assert f"in.{suffix}: time has missing " in refusal(write(data, tmp_path, suffix))


def test_the_time_that_units_count_from_is_not_missing(good):
    store = Store.open(stores.config(good))
    assert store.times[0] == stores.START
    assert store.read_states(store.times, slice(None)).shape[0] == 12


@pytest.mark.slow
@each("several", ["pattern", "list"])
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


@pytest.mark.slow
@each(
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


@each(
    "coordinate, values",
    [
        ("latitude", np.linspace(90 - 7.5, -90 + 7.5, 12)),
        ("latitude", np.linspace(60, 20, 12)),
        ("latitude", np.linspace(90, -30, 12)),
        ("longitude", np.linspace(0, 180, 8)),
    ],
)
def test_regions_and_globes_without_poles_are_opened(tmp_path, coordinate, values):
    path = changed(tmp_path, lambda data: data.assign_coords({coordinate: values}))
    store = Store.open(stores.config(path))
    assert store.grid.is_global == (values[0] == 82.5)
    assert np.array_equal(getattr(store, coordinate), values)


@each("start, sign", [(0.0, -1), (-180.0, 1), (200.0, -1)])
def test_longitude_may_start_anywhere_and_go_either_way(tmp_path, start, sign):
    longitude = (start + 180 + sign * np.arange(8) * 45.0) % 360 - 180
    path = changed(tmp_path, lambda data: data.assign_coords(longitude=longitude))
    assert np.array_equal(Store.open(stores.config(path)).longitude, longitude)


@pytest.mark.slow
@each(
    "name, kind, place, where, value",
    [
        ("temperature", "prognostic", (5, 1, 3, 2), "2000-01-02T06:00 on level 850", np.nan),
        ("2m_temperature", "prognostic", (5, 3, 2), "2000-01-02T06:00", np.inf),
        ("solar", "forcing", (0, 3, 2), "2000-01-01T00:00", np.nan),
        ("land_sea_mask", "static", (3, 2), "", np.inf),
    ],
)
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
