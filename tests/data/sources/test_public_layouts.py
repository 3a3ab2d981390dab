import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_dp.data.channels import Channel
from credit_dp.data.sources import address
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.source import Source
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.data.layouts import LAYOUTS, Layout, consolidate
from tests.tables import each


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Opens the store of a layout, written once, with the dataset that it was written from."""

    @cache
    def of(name: str) -> tuple[Source, xr.Dataset, Layout]:
        layout = LAYOUTS[name]
        folder = tmp_path_factory.mktemp("layout")
        data = layout.canonical()
        path = layout.write(data, folder / f"store{layout.suffix}")
        return (opened(path), data, layout)

    return of


def opened(*where: Path | str) -> Source:
    return open_source(replace(stores.config(where[0]), store=list(map(str, where))))


def refusal(*where: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        opened(*where)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def channels_of(data: xr.Dataset, name: str) -> list[Channel]:
    if "level" in data[name].dims:
        return [Channel(name, int(level)) for level in data["level"].values]
    return [Channel(name)]


def fields_of(data: xr.Dataset, name: str) -> np.ndarray:
    """`(T, levels, H, W)`, from a dataset in canonical order."""
    array = data[name]
    for dim in ("level", "time"):
        if dim not in array.dims:
            array = array.expand_dims(dim)
    return array.transpose("time", "level", "latitude", "longitude").values


@pytest.mark.slow
@each("name", LAYOUTS)
@settings(deadline=None, max_examples=3)
@given(data=st.data())
def test_any_band_is_that_of_the_dataset(written, name, data):
    source, canonical, layout = written(name)
    height = layout.rows
    north = data.draw(st.integers(0, height - 1))
    rows = slice(north, data.draw(st.integers(north + 1, height)))
    variable = data.draw(st.sampled_from(sorted(map(str, canonical.data_vars))))
    stored = layout.renamed.get(variable, variable)
    times = slice(0, 1)
    if "time" in canonical[variable].dims:
        times = data.draw(st.sampled_from([slice(0, 3), np.array([2, 0]), slice(1, 2)]))
    channels = [Channel(stored, c.level) for c in channels_of(canonical, variable)]
    chosen = data.draw(st.permutations(range(len(channels))))[:5]
    read = source.read([channels[place] for place in chosen], times, rows)
    wanted = fields_of(canonical, variable)[times][:, chosen][:, :, rows]
    assert read.dtype == np.float32
    if layout.packed:
        assert np.array_equal(np.isnan(read), np.isnan(wanted))
        assert np.nanmax(np.abs(read - wanted)) < 0.0011
    else:
        assert np.array_equal(read, wanted, equal_nan=True)


@pytest.mark.slow
@each("name", LAYOUTS)
def test_coordinates_and_samples_of_a_run_are_bit_identical(written, name):
    """Reads the leap day with everything that a run uses to read."""
    source, canonical, layout = written(name)
    assert np.array_equal(source.latitude, canonical["latitude"].values)
    assert np.array_equal(source.longitude, canonical["longitude"].values)
    assert np.array_equal(source.times, canonical["time"].values)
    variable = source.variables[layout.renamed.get("geopotential", "geopotential")]
    assert variable.levels == layout.levels
    assert variable.units == "m**2 s**-2"
    assert not any(variable.problem for variable in source.variables.values())
    if layout.packed:
        return
    names = [layout.renamed.get(n, n) for n in ("temperature", "2m_temperature", "geopotential")]
    static = layout.renamed.get("geopotential_at_surface", "geopotential_at_surface")
    spans = {split: ["2020-02-28", "2020-02-29"] for split in ("train", "valid", "test")}
    lists = {"prognostic": names, "forcing": [], "static": [static]}
    levels = [layout.levels[1], layout.levels[0]]
    config = stores.config(Path(source.where), levels=levels, **lists, **spans)
    store = Store.open(config)
    renamed = canonical.rename({n: layout.renamed.get(n, n) for n in map(str, canonical.data_vars)})
    time = np.datetime64("2020-02-29T06", "ns")
    whole = stores.expected(renamed, config, time)
    cut = layout.rows // 3
    bands = [
        store.read_states([time], rows)[0] for rows in (slice(0, cut), slice(cut, layout.rows))
    ]
    assert np.array_equal(np.concatenate(bands, axis=1), whole)
    bands = [store.read_static(rows) for rows in (slice(0, cut), slice(cut, layout.rows))]
    assert np.array_equal(np.concatenate(bands, axis=1)[0], renamed[static].values)


@each("kind", ["f2", "i2"])
def test_other_types_are_read_as_numbers(tmp_path, kind):
    data = stores.dataset()
    values = (data["temperature"].values % 100).astype(kind)
    data["temperature"] = (stores.DIMS, values)
    path = stores.write(data, tmp_path / "s.zarr")
    channels = channels_of(data, "temperature")
    read = opened(path).read(channels, slice(0, 12), slice(0, 12))
    assert np.array_equal(read, values.astype("f4"))


@pytest.mark.slow
def test_a_variable_of_dates_is_refused_when_selected(tmp_path):
    data = stores.dataset()
    data["solar"] = data["time"].broadcast_like(data["solar"])
    source = opened(stores.write(data, tmp_path / "s.zarr"))
    assert "not numbers" in source.variables["solar"].problem


def yearly(folder: Path, suffix: str, years=(2019, 2020, 2021), version: int = 3) -> xr.Dataset:
    """One file per year, the last written first; returns all of them joined."""
    parts = []
    for year in years:
        start = np.datetime64(f"{year}-12-30", "ns")
        data = stores.dataset(steps=5, seed=year)
        data = data.assign_coords(time=start + stores.STEP * np.arange(5))
        data["land_sea_mask"].values[:] = 0.5
        parts.append(data)
    for year, data in reversed(list(zip(years, parts, strict=True))):
        if suffix == "nc":
            data.to_netcdf(folder / f"era5_{year}.nc")
        else:
            stores.write(data, folder / f"era5_{year}.zarr", zarr_format=version)
    return xr.concat(parts, "time", data_vars="minimal", coords="minimal", compat="override")


@each("suffix", ["zarr", "nc"])
def test_yearly_files_by_pattern_are_one_store(tmp_path, suffix):
    whole = yearly(tmp_path, suffix)
    source = opened(tmp_path / f"era5_*.{suffix}")
    assert np.array_equal(source.times, whole["time"].values)
    channels = channels_of(whole, "temperature")
    for times in (slice(0, 15), slice(3, 12, 2), np.array([14, 0, 7, 7]), slice(6, 8)):
        read = source.read(channels, times, slice(2, 9))
        assert np.array_equal(read, whole["temperature"].values[times][:, :, 2:9])
    assert np.all(source.read([Channel("land_sea_mask")], slice(0, 1), slice(0, 12)) == 0.5)


def test_files_that_overlap_are_refused(tmp_path):
    yearly(tmp_path, "zarr")
    data = stores.dataset(steps=2)
    data = data.assign_coords(time=np.datetime64("2020-12-31", "ns") + stores.STEP * np.arange(2))
    stores.write(data, tmp_path / "era5_again.zarr")
    message = refusal(tmp_path / "era5_*.zarr")
    assert "era5_again.zarr" in message
    assert "overlap" in message
    assert "2020-12-31T00:00" in message


@each("dim", ["latitude", "longitude"])
def test_files_of_other_coordinates_are_refused(tmp_path, dim):
    yearly(tmp_path, "zarr", years=(2019,))
    data = stores.dataset(steps=2)
    moved = data[dim].values.copy()
    moved[2] += 1e-6
    stores.write(data.assign_coords({dim: moved}), tmp_path / "era5_2000.zarr")
    message = refusal(tmp_path / "era5_*.zarr")
    assert "era5_2019.zarr" in message
    assert f"its {dim}" in message
    assert "exactly" in message


def test_a_variable_that_a_file_lacks_or_has_otherwise_is_refused_when_selected(tmp_path):
    yearly(tmp_path, "zarr", years=(2019,))
    data = stores.dataset(steps=2).drop_vars("solar").isel(level=[0, 1])
    data["2m_temperature"].attrs["units"] = "degC"
    stores.write(data, tmp_path / "era5_2000.zarr")
    source = opened(tmp_path / "era5_*.zarr")
    assert "is not in " in source.variables["solar"].problem
    assert "era5_2000.zarr" in source.variables["solar"].problem
    assert "other levels" in source.variables["temperature"].problem
    assert "other units" in source.variables["2m_temperature"].problem
    assert source.variables["land_sea_mask"].problem == ""


def test_one_bad_file_of_many_is_named(tmp_path):
    yearly(tmp_path, "nc")
    with (tmp_path / "era5_2020.nc").open("r+b") as file:
        file.truncate(100)
    message = refusal(tmp_path / "era5_*.nc")
    assert "era5_2020.nc: not a netCDF file" in message


@pytest.mark.slow
@each("suffix", ["zarr", "nc"])
def test_threads_read_the_same_and_are_counted(tmp_path, suffix):
    whole = yearly(tmp_path, suffix)
    source = opened(tmp_path / f"era5_*.{suffix}")
    channels = channels_of(whole, "geopotential")

    def right(place: int) -> bool:
        read = source.read(channels, slice(place % 15, place % 15 + 1), slice(0, 12))
        return np.array_equal(read[0], whole["geopotential"].values[place % 15])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(right, range(30)))
    assert source.bytes_read == 30 * 3 * 12 * 8 * 4
    assert source.chunk_reads == 30


@pytest.fixture
def server(tmp_path):
    """An http server of the folder, at its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def assert_reads(source: Source, data: xr.Dataset) -> None:
    channels = channels_of(data, "temperature")
    read = source.read(channels, slice(4, 6), slice(3, 8))
    assert np.array_equal(read, data["temperature"].values[4:6, :, 3:8])
    assert source.bytes_read == 2 * 3 * 12 * 8 * 4
    assert source.chunk_reads == 2


@pytest.mark.slow
@each("version", [2, 3])
def test_a_store_at_an_http_address(tmp_path, server, version):
    data = stores.dataset()
    path = stores.write(data, tmp_path / "s.zarr", zarr_format=version)
    consolidate(path)
    where = f"{server}/{tmp_path.name}/s.zarr"
    source = opened(where)
    assert_reads(source, data)
    again = opened(where)
    assert source.description(["temperature"]) == again.description(["temperature"])


@each("version", [2, 3])
def test_a_store_in_memory_or_at_a_file_address(tmp_path, version):
    data = stores.dataset()
    path = stores.write(data, tmp_path / "s.zarr", zarr_format=version)
    memory = fsspec.filesystem("memory")
    memory.put(str(path), "/tests/s.zarr", recursive=True)
    try:
        assert_reads(opened("memory://tests/s.zarr"), data)
        assert_reads(opened("memory://tests/s*.zarr"), data)
    finally:
        memory.rm("/tests", recursive=True)
    assert_reads(opened(f"file://{path}"), data)
    assert_reads(opened(f"simplecache::file://{path}"), data)


@each("attributes", [{}, {"units": "Pa"}])
def test_levels_in_pascals(tmp_path, attributes):
    data = stores.dataset()
    pascals = data.assign_coords(level=("level", 100 * data["level"].values, attributes))
    assert_reads(opened(stores.write(pascals, tmp_path / "s.zarr")), data)


BAD_ADDRESSES = {
    "/no/era5_*.zarr": "no store fits",
    "memory://nowhere/s.zarr": "not a zarr group",
    "memory://nowhere/s*.zarr": "no store fits",
    "swallow://bucket/s.zarr": "data.store",
    "ftp://127.0.0.1:9/s.zarr": "can't be reached from here",
    "ftp://127.0.0.1:9/*.zarr": "can't be reached from here",
    "zip::file://nowhere.zip": "not an address that can be read",
    "https://there.org/s.nc": "a path of this machine",
    "https://me:hush@there.org/s.zarr": "environment",
    "https://there.org/s.zarr?signature=hush": "environment",
    **dict.fromkeys(["a\nb.zarr", "s3://bucket/\n", "a\0", "x" * 300, "x/" * 3000], ""),
}


@each("where", BAD_ADDRESSES)
def test_addresses_without_a_store_are_one_line(where):
    line = refusal(where)
    assert BAD_ADDRESSES[where] in line
    assert "hush" not in line  # credentials are not shown


def test_nothing_at_an_http_address(server):
    assert "not a zarr group" in refusal(f"{server}/s.zarr")


def test_a_missing_package_says_what_to_install(monkeypatch):
    def missing(*args, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    message = refusal("s3://bucket/s.zarr")
    assert "pip install '.[remote]' in the folder that credit_dp was cloned into" in message
    assert "s3fs" in message


@each(
    "where, variables, expected",
    [
        ("s3://bucket/s.zarr", {}, {"s3": {"anon": True}}),
        ("s3://bucket/s.zarr", {"AWS_PROFILE": "mine"}, {"s3": {"anon": False}}),
        ("s3://bucket/s.zarr", {"AWS_ACCESS_KEY_ID": "key"}, {"s3": {"anon": False}}),
        ("gs://bucket/s.zarr", {}, {"gs": {"token": "anon"}}),
        ("gcs://bucket/s.zarr", {}, {"gcs": {"token": "anon"}}),
        ("gs://bucket/s.zarr", {"GOOGLE_APPLICATION_CREDENTIALS": "/key.json"}, {}),
        ("simplecache::s3://bucket/s.zarr", {}, {"s3": {"anon": True}}),
        ("https://there.org/s.zarr", {}, {}),
    ],
)
def test_access_is_anonymous_unless_the_environment_says_otherwise(
    monkeypatch, where, variables, expected
):
    for name in (*address.GOOGLE, *address.AMAZON):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert address.storage_options(where) == expected


def test_keys_of_the_environment_are_never_shown(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush/hush")
    error = OSError("signed with hush/hush at https://me:hush@there.org/x?token=hush\nmore")
    assert address.reason_of(error) == (
        "signed with $AWS_SECRET_ACCESS_KEY at https://...@there.org/x?..."
    )
