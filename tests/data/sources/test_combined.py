import logging

import numpy as np
import pytest

from credit_dp.data.channels import Channel
from credit_dp.data.sources.anemoi import AnemoiSource
from credit_dp.data.sources.combined import FilesSource, JoinedSource
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import anemoi_stores, prepared_stores, stores
from tests.tables import each

DATA = stores.dataset(rows=11)
UPPER = ["geopotential", "temperature", "land_sea_mask"]
SURFACE = ["2m_temperature", "solar", "geopotential_at_surface"]
CHANNELS = prepared_stores.channels_of(DATA)
FIELDS = prepared_stores.stacked(DATA, CHANNELS)
STATICS = [Channel("geopotential_at_surface"), Channel("land_sea_mask")]


def written(data, path):
    return GriddedSource.open(str(stores.write(data, path)))


@pytest.fixture
def pair(tmp_path):
    """Write upper air without the first two times, the surface without the fifth and the last."""
    surface = DATA[SURFACE].isel(time=[0, 1, 2, 3, 5, 6, 7, 8, 9, 10]).sortby("latitude")
    return [
        written(DATA[UPPER].isel(time=slice(2, None)), tmp_path / "upper.zarr"),
        written(surface, tmp_path / "surface.zarr"),
    ]


KEPT = [2, 3, 5, 6, 7, 8, 9, 10]


@each("order", [list(range(8)), [6, 0, 7, 4, 3], [1, 2], [7]])
def test_fields_of_both_in_the_requested_order(pair, order):
    source = JoinedSource(pair)
    assert np.array_equal(source.times, DATA["time"].values)
    common = source.has_times("temperature") & source.has_times("solar")
    assert np.flatnonzero(common).tolist() == KEPT
    channels = [CHANNELS[place] for place in order]
    for times in (np.array(KEPT), slice(5, 10, 2), np.array([9, 5])):
        fields = source.read(channels, times, slice(3, 9))
        assert fields.dtype == np.float32
        assert np.array_equal(fields, FIELDS[times][:, order, 3:9])


def rolled(data):
    """The same fields from longitude -180 on."""
    half = data.sizes["longitude"] // 2
    west = (data["longitude"].values + 180) % 360 - 180
    return data.assign_coords(longitude=west).roll(longitude=half, roll_coords=True)


def test_columns_may_begin_at_another_meridian(tmp_path):
    surface = written(rolled(DATA[SURFACE]).sortby("latitude"), tmp_path / "surface.zarr")
    assert surface.longitude[0] == -180
    source = JoinedSource([written(DATA[UPPER], tmp_path / "upper.zarr"), surface])
    fields = source.read(CHANNELS, slice(2, 5), slice(3, 9))
    assert np.array_equal(fields, FIELDS[2:5, :, 3:9])
    assert np.array_equal(source.longitude, DATA["longitude"].values)
    channel = Channel("2m_temperature")
    width = len(source.longitude)
    assert surface.location(channel, 0, 0, width // 2) == source.location(channel, 0, 0, 0)
    assert "rolled" in str(source.description(["2m_temperature"]))


def test_columns_of_files_may_begin_at_another_meridian(tmp_path):
    parts = [DATA.isel(time=slice(0, 4)), rolled(DATA.isel(time=slice(4, None)))]
    files = [written(part, tmp_path / f"{number}.zarr") for number, part in enumerate(parts)]
    fields = FilesSource(files, "both").read(CHANNELS, slice(0, 8), slice(None))
    assert np.array_equal(fields, FIELDS[:8])
    later = FilesSource(files[::-1], "both").longitude
    assert np.array_equal(later, DATA["longitude"].values)


@pytest.mark.slow
def test_columns_of_a_region_stay_where_they_are(tmp_path):
    upper = DATA[UPPER].isel(longitude=slice(0, 4))
    surface = DATA[SURFACE].isel(longitude=slice(1, 5))
    pair = [written(upper, tmp_path / "upper.zarr"), written(surface, tmp_path / "surface.zarr")]
    with pytest.raises(UserError, match="is not on the grid of"):
        JoinedSource(pair)


def test_a_time_that_a_store_lacks_is_never_read_from_it(pair):
    source = JoinedSource(pair)
    surface, upper = [Channel("solar")], [Channel("temperature", 500)]
    assert np.array_equal(
        source.read(surface, slice(0, 4), slice(0, 11))[:, 0], DATA["solar"].values[:4]
    )
    for times in (slice(0, 4), np.array([1]), np.array([2, 0])):
        with pytest.raises(IndexError, match="lacks times of temperature"):
            source.read(upper, times, slice(0, 11))


def test_statics_of_both(pair):
    fields = JoinedSource(pair).read(STATICS, slice(0, 1), slice(0, 11))
    assert np.array_equal(fields[0], [DATA[channel.variable].values for channel in STATICS])


def test_levels_that_differ_are_refused_unless_some_are_chosen(tmp_path):
    names = ["geopotential", "temperature"]
    paths = [
        str(stores.write(DATA[[name]].sel(level=levels), tmp_path / f"{name}.zarr"))
        for name, levels in zip(names, ([500, 850], [850, 1000]), strict=True)
    ]
    options = {"store": paths, "prognostic": names, "forcing": [], "static": []}
    with pytest.raises(UserError) as refused:
        Store.open(stores.config(tmp_path, **options))
    assert "temperature has the levels 850, 1000, but geopotential has 500, 850. " in str(
        refused.value
    )
    assert str(refused.value).endswith(". Levels of all variables: 'data.levels=[850]'")
    store = Store.open(stores.config(tmp_path, **options, levels=[850]))
    assert store.channels.prognostic == (Channel("geopotential", 850), Channel("temperature", 850))
    alone = Store.open(stores.config(tmp_path, **(options | {"prognostic": names[1:]})))
    assert alone.levels == [850, 1000]
    paths[0] = str(stores.write(DATA[["geopotential"]].sel(level=[500]), tmp_path / "500.zarr"))
    with pytest.raises(UserError, match="No level is common to geopotential, temperature"):
        Store.open(stores.config(tmp_path, **options))


def test_groups_bytes_and_descriptions_are_those_of_both(pair):
    source = JoinedSource(pair)
    order = [CHANNELS[place] for place in (0, 1, 6, 3, 4)]
    groups = source.group_by_chunk(order)
    assert groups == [order[:2], order[2:3], order[3:]]
    assert source.times_per_file(CHANNELS[0]) == 1
    described = source.description(["solar", "temperature"])
    assert described == [pair[0].description(["temperature"]), pair[1].description(["solar"])]
    source.read([Channel("solar"), Channel("temperature", 500)], slice(2, 3), slice(0, 11))
    assert (source.bytes_read, source.chunk_reads) == ((3 + 1) * 11 * 8 * 4, 2)
    assert source.chunk_shape(CHANNELS[0]) == pair[0].chunk_shape(CHANNELS[0])


def test_the_first_store_that_has_a_variable_wins(tmp_path):
    other = DATA.copy(deep=True)
    other["2m_temperature"] += 1
    other["solar"] = DATA["solar"].isel(longitude=0, drop=True)
    first = written(other.drop_vars(["geopotential"]), tmp_path / "first.zarr")
    source = JoinedSource([first, written(DATA, tmp_path / "second.zarr")])
    assert set(source.variables) == set(DATA.data_vars)
    # The first store's `solar` can't be read: it has no longitude.
    assert first.variables["solar"].problem
    assert not source.variables["solar"].problem
    wanted = ["2m_temperature", "solar"]
    channels = [*map(Channel, wanted), Channel("geopotential", 850)]
    fields = source.read(channels, slice(4, 5), slice(0, 11))[0]
    assert np.array_equal(fields[0], other["2m_temperature"].values[4])
    assert np.array_equal(fields[1], DATA["solar"].values[4])
    assert np.array_equal(fields[2], DATA["geopotential"].sel(level=850).values[4])


@each("along_time", [False, True])
def test_a_datasets_own_names_are_found_among_others(tmp_path, along_time):
    halves = [DATA.isel(time=slice(0, 6)), DATA.isel(time=slice(6, 12))]
    parts = halves if along_time else [DATA]
    paths = [tmp_path / f"{number}.zarr" for number in range(len(parts))]
    sources = [
        AnemoiSource.open(str(anemoi_stores.write(part, path)))
        for part, path in zip(parts, paths, strict=True)
    ]
    if along_time:
        source = FilesSource(sources, "*.zarr")
    else:
        source = JoinedSource([*sources, written(DATA[["solar"]], tmp_path / "solar.zarr")])
    assert "z_500" not in list(source.variables)
    channels = [Channel("z_500"), Channel("geopotential", 500)]
    fields = source.read(channels, slice(4, 8), slice(0, 11))
    assert np.array_equal(fields[:, 0], DATA["geopotential"].sel(level=500).values[4:8])
    assert np.array_equal(fields[:, 1], fields[:, 0])


def test_equal_times_say_nothing_and_others_how_many(pair, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    JoinedSource([pair[0], pair[0]])
    assert caplog.messages == []
    JoinedSource(pair)
    assert [message.split(": ")[1].split(" times")[0] for message in caplog.messages] == [
        "8 of its 10",
        "8 of its 10",
    ]


@each(
    "change, expected",
    [
        (lambda data: data.isel(latitude=slice(0, 10)), "its grid of 10x8 is not 11x8"),
        (
            lambda data: data.assign_coords(longitude=data.longitude + 1e-4),
            "its longitude 0.0001 at index 0 is not 0",
        ),
    ],
)
def test_other_grids_are_refused(tmp_path, change, expected):
    first = written(DATA[UPPER], tmp_path / "first.zarr")
    data = change(stores.dataset(rows=11)[SURFACE])
    if data.sizes["latitude"] == 10:
        data = data.assign_coords(latitude=np.linspace(90, -72, 10))
    other = written(data, tmp_path / "other.zarr")
    with pytest.raises(UserError) as caught:
        JoinedSource([first, other])
    message = str(caught.value)
    assert message.startswith(f"{other.where}: is not on the grid of {first.where}: {expected}")
    assert message.endswith("change data.store, or regrid one with `credit-dp data prepare`.")


@pytest.mark.slow
def test_regions_side_by_side_are_refused_with_the_cure(tmp_path):
    west, east = (
        written(DATA[UPPER].isel(longitude=columns), tmp_path / f"{columns.start}.zarr")
        for columns in (slice(0, 3), slice(3, 6))
    )
    for joined in (JoinedSource, lambda sources: JoinedSource(sources[::-1])):
        with pytest.raises(UserError) as caught:
            joined([west, east])
        cure = "or write regions that lie side by side as one, with xarray's concat."
        assert str(caught.value).endswith(cure)


@each("offset", [1e-9, 2e-5])  # float64's and float32's
def test_grids_that_differ_by_rounding_are_joined(tmp_path, offset):
    first = written(DATA[UPPER], tmp_path / "first.zarr")
    data = DATA[SURFACE].assign_coords(longitude=DATA.longitude + offset)
    assert JoinedSource([first, written(data, tmp_path / "other.zarr")]).grid == (11, 8)


@pytest.mark.slow
def test_no_times_in_common(tmp_path):
    parts = [
        written(DATA[UPPER].isel(time=slice(0, 6)), tmp_path / "first.zarr"),
        written(DATA[SURFACE].isel(time=slice(6, 12)), tmp_path / "other.zarr"),
    ]
    with pytest.raises(UserError) as caught:
        JoinedSource(parts)
    assert "2000-01-02T06:00" in str(caught.value)
    assert str(caught.value).endswith("Change data.store.")


FORMS = {
    "prepared": lambda folder: [prepared_stores.write(DATA, folder / "a.zarr")],
    "anemoi": lambda folder: [anemoi_stores.write(DATA, folder / "a.zarr")],
    "gridded and anemoi": lambda folder: [
        stores.write(DATA[UPPER], folder / "a.zarr"),
        anemoi_stores.write(DATA, folder / "b.zarr"),
    ],
}


@each("form", FORMS)
def test_a_run_sees_the_same_whatever_the_form(tmp_path, form):
    entries = [str(path) for path in FORMS[form](tmp_path)]
    settings = stores.config(tmp_path / "none", store=entries if len(entries) > 1 else entries[0])
    store = Store.open(settings)
    first = Store.open(stores.config(stores.write(DATA, tmp_path / "gridded.zarr")))
    assert store.channels == first.channels
    when = DATA["time"].values[[3, 4]]
    for rows in (slice(0, 4), slice(4, 11)):
        assert np.array_equal(store.read_states(when, rows), first.read_states(when, rows))
        assert np.array_equal(store.read_forcing(when, rows), first.read_forcing(when, rows))
        assert np.array_equal(store.read_static(rows), first.read_static(rows))


def test_chunks_are_numbered_across_files_and_stores(tmp_path):
    """No chunk spans two files or two stores."""
    spans = slice(0, 5), slice(5, 12)
    files = [
        GriddedSource.open(
            str(stores.write(DATA.isel(time=span), tmp_path / f"{n}.zarr", chunks={"time": 3}))
        )
        for n, span in enumerate(spans)
    ]
    source, channel = FilesSource(files, "*.zarr"), Channel("temperature", 500)
    numbers = source.chunk_numbers(channel, np.arange(12))
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert source.chunk_numbers(channel, np.array([4, 5])).tolist() == [1, 2]
    later = stores.write(DATA[SURFACE].isel(time=slice(2, None)), tmp_path / "later.zarr")
    joined = JoinedSource([GriddedSource.open(str(later)), source])
    assert joined.chunk_numbers(channel, np.arange(12)).tolist() == numbers.tolist()
    of_first = joined.chunk_numbers(Channel("solar"), np.arange(2, 12))
    assert of_first.tolist() == list(range(10))
