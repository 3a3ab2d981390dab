"""One config reads the same fields from every usual form of store."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.data.channels import Channel
from credit_dp.data.sources.opening import open_source
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data.sources import store_forms as forms
from tests.tables import each

DATA = forms.dataset()
LONG = {
    "prognostic": [*forms.ON_LEVELS, "2m_temperature", "mean_sea_level_pressure"],
    "diagnostic": ["total_precipitation"],
    "static": [*forms.STATICS],
}


def config(entries: list[str], **changes: object) -> DataConfig:
    dates = DatesConfig(*[["2019-12-28", "2020-01-02"]] * 3)
    settings = {"name": "zarr", "levels": [850, 500], "dates": dates} | LONG
    return DataConfig(store=entries, **(settings | changes))


def expected(data: xr.Dataset) -> np.ndarray:
    """The output channels of `config`, `(T, C, H, W)`."""
    upper = [data[name].sel(level=level) for name in forms.ON_LEVELS for level in (850, 500)]
    return np.stack([*upper, *(data[name] for name in forms.AT_SURFACE)], axis=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The entries of `data.store` of a form, written once."""
    found: dict[str, list[str]] = {}

    def of(form: str) -> list[str]:
        if form not in found:
            found[form] = forms.FORMS[form](DATA, tmp_path_factory.mktemp("form"))
        return found[form]

    return of


@each("form", forms.FORMS)
def test_one_config_reads_them_all(written, form, caplog):
    caplog.set_level(logging.INFO, "credit_dp")
    store = Store.open(config(written(form)))
    assert np.array_equal(store.times, DATA["time"].values)
    places, wanted = [0, 15, 16, 23], expected(DATA).swapaxes(0, 1)
    for rows in (slice(0, 5), slice(5, 13)):
        read = store.read_outputs(store.times[places], rows)
        pairs = [*zip(read.swapaxes(0, 1), wanted[:, places][:, :, rows], strict=True)]
        statics = [DATA[name].values[rows] for name in forms.STATICS]
        pairs += zip(store.read_static(rows), statics, strict=True)
        names = [*np.repeat(forms.ON_LEVELS, 2), *forms.AT_SURFACE, *forms.STATICS]
        for name, (mine, theirs) in zip(names, pairs, strict=True):
            packed = float(np.ptp(DATA[name].values)) / 60000 if form in forms.PACKED else 0
            assert np.abs(mine - theirs).max() <= packed, name
    said = [message for message in caplog.messages if "reads " in message]
    assert len(said) == (0 if form in forms.WITH_NAMES_OF_ERA5 else 1)
    if form == "cds":
        assert "reads geopotential from z, temperature from t, 2m_temperature from t2m" in said[0]


SHORT = {
    "ECMWF": ["z", "t", "2t", "msl", "tp", "z", "lsm"],
    "netCDF": ["z", "t", "t2m", "msl", "tp", "z", "lsm"],
    "miles-credit": ["Z", "T", "t2m", "MSL", "tp", "Z_GDS4_SFC", "LSM"],
    "NCAR": ["Z", "T", "VAR_2T", "MSL", "TP", "geopotential_at_surface", "LSM"],
}


# Where `z` is the store's own name of a field without levels, it is that one.
@each(
    "form, names",
    [
        *zip(["weatherbench2", "cds", "credit", "prepared"], SHORT, strict=True),
        ("cds", "NCAR"),
        ("anemoi", "miles-credit"),
        ("without levels", "NCAR"),
    ],
)
def test_a_config_of_short_names_reads_them_too(written, form, names):
    short = SHORT[names]
    static = ["geopotential_at_surface" if short[5] == "z" else short[5], short[6]]
    lists = {"prognostic": short[:4], "diagnostic": short[4:5], "static": static}
    store = Store.open(config(written(form), **lists))
    assert store.channels.prognostic[0].name == f"{short[0]}_850"  # as the config calls it
    assert np.array_equal(store.read_outputs(store.times[:2], slice(0, 13)), expected(DATA)[:2])
    assert np.array_equal(store.read_static(slice(0, 13))[1], DATA["land_sea_mask"].values)


@each("form", ["weatherbench2", "cds", "anemoi", "without levels", "prepared"])
def test_single_levels_are_found_by_name(written, form):
    lists = {"prognostic": ["z_500", "T850"], "diagnostic": [], "static": [], "levels": None}
    store = Store.open(config(written(form), **lists))
    wanted = np.stack([DATA["geopotential"].sel(level=500), DATA["temperature"].sel(level=850)], 1)
    assert np.array_equal(store.read_states(store.times[3:5], slice(2, 9)), wanted[3:5, :, 2:9])


def netcdf(data: xr.Dataset, path: Path) -> str:
    data.to_netcdf(path, engine="netcdf4")
    return str(path)


def test_the_exact_name_wins(tmp_path):
    data = DATA[["2m_temperature"]].assign(t2m=DATA["2m_temperature"] + 1)
    whole = netcdf(data, tmp_path / "whole.nc")
    lists = {"diagnostic": [], "static": [], "levels": None}
    parts = [netcdf(data[[name]], tmp_path / f"{name}.nc") for name in ("t2m", "2m_temperature")]
    for entries in ([whole], parts, parts[::-1]):
        for name in ("t2m", "2m_temperature"):
            store = Store.open(config(entries, prognostic=[name], **lists))
            read = store.read_states([store.times[3]], slice(0, 13))[0]
            assert np.array_equal(read[0], data[name].values[3])
        other = Store.open(config(entries, prognostic=["2t"], **lists))
        assert other.read_states([other.times[3]], slice(0, 13))[0].shape == (1, 13, 12)


def test_a_missing_variable_is_answered_with_possible_names(written):
    for name, near in (
        ("total_precipitation_6hr", "tp (total_precipitation)"),
        ("2m_dewpoint_temperature", "t2m (2m_temperature)"),
        ("vorticity", "msl (mean_sea_level_pressure)"),
    ):
        with pytest.raises(UserError) as caught:
            Store.open(config(written("cds before 2024"), diagnostic=[name]))
        assert f"no variable {name}. " in str(caught.value)
        assert near in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@each(
    "at, place",
    [(None, 0), ("2019-12-30", 1), ("1979-01-01", 2), ("scalar", 1), ("day", 0), (None, 2)],
)
def test_static_fields_of_a_file_of_their_own_shorten_nothing(tmp_path, at, place):
    """At any date and position in the list; nothing else is read from this store."""
    static = DATA[[*forms.STATICS]]
    if at == "scalar":
        static = static.assign_coords(valid_time=forms.START)
    elif at == "day":  # four times of what is constant
        static = static.expand_dims(valid_time=forms.START + forms.STEP * np.arange(4))
    elif at is not None:
        static = static.expand_dims(valid_time=[np.datetime64(at, "ns")])
        static["2m_temperature"] = static["land_sea_mask"] + 250
    entries = [
        netcdf(DATA[[*forms.ON_LEVELS]], tmp_path / "upper.nc"),
        netcdf(DATA[[*forms.AT_SURFACE]].isel(time=slice(1, None)), tmp_path / "surface.nc"),
    ]
    entries.insert(place, netcdf(static, tmp_path / "static.nc"))
    store = Store.open(config(entries, dates=DatesConfig(*[["2019-12-29", "2020-01-02"]] * 3)))
    assert np.array_equal(store.times, DATA["time"].values[1:])
    read = store.read_outputs(store.times[:3], slice(0, 13))
    assert np.array_equal(read, expected(DATA)[1:4])
    statics = np.stack([DATA[name].values for name in forms.STATICS])
    assert np.array_equal(store.read_static(slice(0, 13)), statics)


@pytest.mark.slow
def test_what_only_a_file_of_one_time_has_is_no_field_in_time(tmp_path):
    once = DATA[["2m_temperature"]].isel(time=[3])
    entries = [netcdf(DATA[[*forms.ON_LEVELS]], tmp_path / "upper.nc")]
    entries.append(netcdf(once, tmp_path / "surface.nc"))
    lists = {"prognostic": ["geopotential", "2m_temperature"], "diagnostic": [], "static": []}
    with pytest.raises(UserError, match=r"2m_temperature has no time: it belongs to data\.static"):
        Store.open(config(entries, **lists))


def test_a_file_of_one_time_continues_where_others_end(tmp_path):
    parts = {"first": slice(0, 23), "last": slice(23, 24), "copy": slice(4, 5)}
    lists = {"diagnostic": [], "static": []}
    path = {
        name: netcdf(DATA[[*LONG["prognostic"]]].isel(time=span), tmp_path / f"{name}.nc")
        for name, span in parts.items()
    }
    source = open_source(config([path["first"], path["last"]], **lists))
    assert np.array_equal(source.times, DATA["time"].values)
    source = open_source(config([path["copy"], path["first"]], **lists))
    assert np.array_equal(source.times, DATA["time"].values[:23])
    assert source.variables["2m_temperature"].has_time


def test_a_static_field_is_taken_where_it_does_not_change(tmp_path):
    """Not from the store of the surface, which comes first and has the field at all times."""
    half = DATA["land_sea_mask"].broadcast_like(DATA["2m_temperature"]) * 0 + 0.5
    surface = DATA[[*forms.AT_SURFACE]].assign(land_sea_mask=half)
    names = {"prognostic": ["2m_temperature"], "diagnostic": [], "static": ["land_sea_mask"]}
    entries = [netcdf(surface, tmp_path / "surface.nc")]
    alone = Store.open(config(entries, **names, levels=None))
    assert np.all(alone.read_static(slice(0, 13)) == 0.5)  # the first of all times
    entries.append(netcdf(DATA[["land_sea_mask"]], tmp_path / "static.nc"))
    store = Store.open(config(entries, **names, levels=None))
    assert np.array_equal(store.read_static(slice(0, 13))[0], DATA["land_sea_mask"].values)
    changing = config(entries, **(names | {"static": ["total_precipitation"]}), levels=None)
    with pytest.raises(UserError, match="total_precipitation changes in time"):
        Store.open(changing)


def test_static_fields_alone_are_no_store(tmp_path):
    path = netcdf(DATA[[*forms.STATICS]], tmp_path / "static.nc")
    netcdf(DATA[[*forms.STATICS]], tmp_path / "static_2.nc")
    for entry in (path, str(tmp_path / "static*.nc")):
        with pytest.raises(UserError, match=r"time is missing.*add a store with times"):
            Store.open(config([entry]))


@each("name", ["date", "Time"])
def test_times_of_another_name_have_to_be_dates(tmp_path, name):
    data = DATA[["2m_temperature"]].rename(time=name)
    path = netcdf(data, tmp_path / "fields.nc")
    lists = {"prognostic": ["2m_temperature"], "diagnostic": [], "static": [], "levels": None}
    assert np.array_equal(open_source(config([path], **lists)).times, DATA["time"].values)
    data[name] = np.arange(data.sizes[name])
    path = netcdf(data, tmp_path / "numbers.nc")
    with pytest.raises(UserError, match=rf"numbers\.nc: {name} has no dates: give the dim"):
        Store.open(config([path]))


@pytest.mark.slow
def test_times_without_values_are_refused(tmp_path):
    path = netcdf(DATA[["2m_temperature"]].drop_vars("time"), tmp_path / "fields.nc")
    with pytest.raises(UserError, match="has time, latitude, longitude; time has no values"):
        Store.open(config([path]))


def test_a_static_file_on_another_grid_is_refused(tmp_path):
    entries = [
        netcdf(DATA[[*LONG["prognostic"], "total_precipitation"]], tmp_path / "era5.nc"),
        netcdf(DATA[[*forms.STATICS]].isel(longitude=slice(None, None, 2)), tmp_path / "static.nc"),
    ]
    with pytest.raises(UserError, match=r"static\.nc: is not on the grid of .*era5\.nc"):
        Store.open(config(entries))


def test_a_list_of_files_by_year_and_kind_is_joined(tmp_path):
    entries = []
    for year, part in DATA[[*forms.ON_LEVELS, *forms.AT_SURFACE]].groupby("time.year"):
        for names in (forms.ON_LEVELS, forms.AT_SURFACE):
            entries.append(netcdf(part[[*names]], tmp_path / f"{year}_{len(names)}.nc"))
    store = Store.open(config(entries, static=[]))
    assert np.array_equal(store.times, DATA["time"].values)
    read = store.read_outputs(store.times[[0, 23]], slice(0, 13))
    assert np.array_equal(read, expected(DATA)[[0, 23]])


@each(
    "third, why",
    [
        (lambda data: data[["t2m", "d2m"]], "both have t2m"),
        (
            lambda data: data[["d2m"]].assign_coords(time=data["time"] + 1000 * forms.STEP),
            "no time",
        ),
    ],
)
def test_ambiguous_kinds_of_files_are_refused(tmp_path, third, why):
    short = {name: forms.CDS[name] for name in (*forms.ON_LEVELS, *forms.AT_SURFACE)}
    data = DATA[[*short]].rename(short).assign(d2m=DATA["2m_temperature"] - 5)
    netcdf(data[["t2m", "msl", "tp"]], tmp_path / "era5_sfc_1.nc")
    netcdf(data[["z", "t"]], tmp_path / "era5_pl_1.nc")
    netcdf(third(data), tmp_path / "era5_sfc_2.nc")
    with pytest.raises(UserError) as caught:
        Store.open(config([str(tmp_path / "era5_*.nc")], static=[]))
    message = str(caught.value)
    assert f"{tmp_path}/era5_*.nc: matches stores with different variables" in message
    assert why in message
    assert message.endswith("as in 'data.store=[era5_pl_*.nc,era5_sfc_*.nc]'.")
    assert "\n" not in message


@pytest.mark.slow
def test_a_level_that_is_only_a_coordinate_counts(tmp_path):
    """A file with a single level has no dim for it."""
    one = DATA[[*forms.ON_LEVELS]].sel(level=500).rename(geopotential="z", temperature="t")
    one = one.rename(level="isobaricInhPa")
    entries = [netcdf(one, tmp_path / "one.nc")]
    lists = {"prognostic": [*forms.ON_LEVELS], "diagnostic": [], "static": [], "levels": None}
    store = Store.open(config(entries, **lists))
    assert [channel.name for channel in store.channels.output_channels] == [
        "geopotential_500",
        "temperature_500",
    ]
    assert np.array_equal(
        store.read_states([store.times[2]], slice(0, 13))[0][0], one["z"].values[2]
    )
    with pytest.raises(UserError, match="no variable geopotential_at_surface"):
        Store.open(config(entries, **(lists | {"static": ["geopotential_at_surface"]})))


def test_a_description_depends_on_what_a_name_stands_for(written):
    source = open_source(config(written("without levels")))
    assert source.description(["geopotential"]) != source.description(["temperature"])
    assert len(str(source.description(["geopotential"])).split("'z500'")) == 2
    again = open_source(replace(config(written("without levels")), static=[]))
    assert source.description(["t2m"]) == again.description(["t2m"])


@each("form", ["weatherbench2", "cds", "cfgrib", "credit", "anemoi", "prepared", "icechunk"])
def test_a_value_out_of_range_is_located_in_its_file(written, form):
    """The message names the file, for zarr the chunk, with the store's name of the variable."""
    names = ("2m_temperature", "temperature", "land_sea_mask")
    store = Store.open(config(written(form), limits={name: [900, 901] for name in names}))
    times, rows = store.times[20:21], slice(3, 9)
    reads = (
        lambda: store.read_channels([Channel("2m_temperature")], times, rows),
        lambda: store.read_channels([Channel("temperature", 850)], times, rows),
        lambda: store.read_static(rows),
    )
    for name, read in zip(names, reads, strict=True):
        with pytest.raises(UserError) as caught:
            read()
        message = str(caught.value)
        level = " on level 850" if name == "temperature" else ""
        where, found, _ = message.partition(f": {name}{level} is ")
        assert found, message
        file, _, chunk = where.partition(", chunk ")
        if form in forms.VERSIONED:  # its chunks have no files of their own
            assert file == written(form)[0]
            continue
        assert Path(file).exists()
        if chunk and not chunk.startswith("("):
            assert (Path(file) / chunk).is_file(), message
        assert 3 <= int(re.search(r"row (\d+)", message)[1]) < 9


@pytest.mark.slow
def test_a_value_out_of_range_of_a_file_without_time(tmp_path):
    odd = DATA[["land_sea_mask"]].rename(land_sea_mask="my_mask")
    files = [netcdf(DATA, tmp_path / "era5.nc"), netcdf(odd, tmp_path / "odd.nc")]
    store = Store.open(config(files, static=["my_mask"], limits={"my_mask": [5, 6]}))
    with pytest.raises(UserError, match=r"odd\.nc.*: my_mask is 0"):
        store.read_static(slice(0, 13))


@each(
    "lists",
    [
        {"prognostic": ["2m_temperature", "t2m"], "diagnostic": []},
        {"prognostic": ["2m_temperature"], "diagnostic": ["2t"]},
        {"prognostic": ["geopotential", "z"], "diagnostic": []},
        {"prognostic": ["temperature", "t_850"], "diagnostic": []},
        {"prognostic": ["temperature"], "diagnostic": [], "forcing": ["t500"]},
    ],
)
def test_one_field_has_one_name_in_a_config(written, lists):
    with pytest.raises(UserError, match=r"are one field\. Take .* out of its list\.$"):
        Store.open(config(written("weatherbench2"), **lists))
