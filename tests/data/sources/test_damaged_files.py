"""What goes wrong with files while they are read: read right, or one line with file, variable and
date."""

import asyncio
import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr
from xarray.backends.file_manager import FILE_CACHE
from zarr.storage import LocalStore

from credit_dp.data.channels import Channel
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.opening import open_single_source
from credit_dp.data.sources.storage import READS_BETWEEN_CHECKS, CountingStore
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

TEMPERATURE = [Channel("temperature", level) for level in stores.LEVELS]
WHOLE = slice(0, 12)
BAD = 5  # the time whose chunk is damaged
DATE = "2000-01-02T06:00"
CRC = zarr.codecs.Crc32cCodec()


def written(folder: Path, version: int = 3, compressors=None, rows=12, **changes) -> Path:
    """`stores.dataset` in chunks of one time, or with some variables changed.

    Fill values are 0 in version 3, NaN in version 2.
    """
    data = stores.dataset().assign(changes)
    sizes = {"time": 1, "latitude": rows}
    encoding = {
        name: {
            "chunks": tuple(sizes.get(dim, array.sizes[dim]) for dim in array.dims),
            "compressors": compressors,
            **({"fill_value": 0, "_FillValue": None} if version == 3 else {}),
        }
        for name, array in data.data_vars.items()
    }
    path = folder / "store.zarr"
    data.to_zarr(path, zarr_format=version, consolidated=version == 2, encoding=encoding)
    return path


def chunk(path: Path, name: str = "temperature", time: int = BAD) -> Path:
    v3 = (path / "zarr.json").exists()
    rest = 3 if name == "temperature" else 2
    keys = [str(time), *["0"] * rest] if name not in ("land_sea_mask",) else ["0"] * 2
    return path / name / ("/".join(["c", *keys]) if v3 else ".".join(keys))


def refusal(source: GriddedSource, *names: str, times=slice(3, 8)) -> str:
    channels = [Channel(name) for name in names] or TEMPERATURE
    with pytest.raises(UserError) as caught:
        source.read(channels, times, WHOLE)
    message = str(caught.value)
    assert "\n" not in message
    assert source.where in message
    return message


def assert_names_it(message: str) -> None:
    assert "temperature" in message
    assert DATE in message
    assert "data.dates" in message


def opened(path: Path) -> GriddedSource:
    return GriddedSource.open(str(path))


@each(
    "version, compressors",
    [(2, None), (3, "auto"), (2, [numcodecs.Blosc("lz4", 5)]), (3, (CRC,))],
)
def test_truncated_chunk(tmp_path, version, compressors):
    path = written(tmp_path, version, compressors)
    raw = chunk(path).read_bytes()
    source = opened(path)
    for length in (0, 10, len(raw) - 1):
        chunk(path).write_bytes(raw[:length])
        assert_names_it(refusal(source))
        assert_names_it(refusal(source, times=np.array([7, 5])))
        assert source.read(TEMPERATURE, slice(6, 8), WHOLE).shape == (2, 3, 12, 8)
    chunk(path).write_bytes(raw)
    assert np.isfinite(source.read(TEMPERATURE, slice(3, 8), WHOLE)).all()


@each("keep", [None, 0, 0.3, 0.99])
def test_truncated_or_missing_shard(tmp_path, keep):
    shards = {"time": 2}
    path = stores.write(
        stores.dataset(), tmp_path / "s.zarr", chunks={"time": 1, "latitude": 4}, shards=shards
    )
    shard = path / "temperature" / "c" / "2" / "0" / "0" / "0"
    if keep is None:
        shard.unlink()
        expected = "temperature/c/2/0/0/0 is missing"
    else:
        shard.write_bytes(shard.read_bytes()[: int(keep * shard.stat().st_size)])
        expected = r"temperature at 2000-01-02T0[06]:00 can't be read"
    with pytest.raises(UserError, match=expected):
        opened(path).read(TEMPERATURE, slice(3, 8), slice(0, 4))


@each("keep", [0.2, 0.6])
def test_range_of_a_shard_that_ends_early_is_no_fill_value(tmp_path, keep):
    """If the index comes first, chunks at the end of the shard are missing."""
    path = written(tmp_path)
    shutil.rmtree(path / "temperature")
    sharding = zarr.codecs.ShardingCodec(chunk_shape=(1, 3, 4, 8), index_location="start")
    array = zarr.open_group(path).create_array(
        "temperature",
        shape=(12, 3, 12, 8),
        dtype="f4",
        chunks=(1, 3, 12, 8),
        dimension_names=stores.DIMS,
        compressors=None,
        serializer=sharding,
    )
    array[:] = stores.dataset()["temperature"].values
    chunk(path).write_bytes(chunk(path).read_bytes()[: int(keep * chunk(path).stat().st_size)])
    source = opened(path)
    with pytest.raises(UserError) as caught:
        source.read(TEMPERATURE, slice(BAD, BAD + 1), slice(8, 12))
    assert_names_it(str(caught.value))
    assert "cut short" in str(caught.value)


@each("version", [2, 3])
def test_missing_chunk_is_neither_zeros_nor_nan(tmp_path, version):
    path = written(tmp_path, version)
    chunk(path).unlink()
    message = refusal(opened(path))
    assert_names_it(message)
    assert f"{chunk(path).relative_to(path)} is missing" in message


def test_missing_chunk_of_a_part_of_the_globe(tmp_path):
    """The fill value decides: if it is NaN, the chunk may be land in a field of the sea."""
    for version in (2, 3):
        (tmp_path / f"{version}").mkdir()
        path = written(tmp_path / f"{version}", version, rows=4)
        chunk(path).unlink()
        if version == 2:
            read = opened(path).read(TEMPERATURE, slice(BAD, BAD + 1), WHOLE)
            assert np.isnan(read[:, :, :4]).all()
            assert np.isfinite(read[:, :, 4:]).all()
        else:
            assert_names_it(refusal(opened(path)))


def test_missing_chunk_of_packed_integers(tmp_path):
    packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 270.0, "_FillValue": -32768}
    encoding = {"temperature": packing | {"chunks": (1, 3, 12, 8)}}
    data = stores.dataset()
    for version in (2, 3):
        path = tmp_path / f"v{version}.zarr"
        data.to_zarr(path, zarr_format=version, consolidated=False, encoding=encoding)
        chunk(path).unlink()
        assert_names_it(refusal(opened(path)))


@each("name", ["TP", "convective_available_potential_energy"])
def test_a_chunk_of_zeros_may_be_left_out_where_zero_is_usual(tmp_path, name):
    """zarr leaves out chunks of zeros by default, such as sunlight at night."""
    dark = stores.dataset()["solar"].copy()
    dark[BAD] = 0
    path = written(tmp_path, **{name: dark}, rows=6)
    assert not chunk(path, name).exists()
    assert np.all(opened(path).read([Channel(name)], slice(BAD, BAD + 1), WHOLE) == 0)


@each("name", ["land_sea_mask", "geopotential_at_surface"])
def test_missing_static_field(tmp_path, name):
    path = written(tmp_path)
    shutil.rmtree(path / name / "c")
    message = refusal(opened(path), name, times=slice(0, 1))
    assert name in message
    assert "is missing" in message
    assert "dates" not in message


def test_land_mask_may_lack_a_chunk_of_sea(tmp_path):
    data = stores.dataset()
    data["land_sea_mask"][:4] = 0
    path = written(tmp_path, rows=4, land_sea_mask=data["land_sea_mask"])
    assert not chunk(path, "land_sea_mask").exists()
    read = opened(path).read([Channel("land_sea_mask")], slice(0, 1), WHOLE)[0, 0]
    assert np.array_equal(read, data["land_sea_mask"].values)


def test_wrong_checksum(tmp_path):
    path = written(tmp_path, compressors=(CRC,))
    raw = bytearray(chunk(path).read_bytes())
    raw[100] ^= 1
    chunk(path).write_bytes(raw)
    message = refusal(opened(path))
    assert_names_it(message)
    assert "checksum" in message


def test_unreadable_file(tmp_path, monkeypatch):
    path = written(tmp_path)
    source = opened(path)
    refuse_access(monkeypatch)
    message = refusal(source)
    assert_names_it(message)
    assert "Permission denied" in message


def refuse_access(monkeypatch) -> None:
    """Deny access to the file of the bad time; chmod would not stop root."""
    get = LocalStore.get

    async def refused(self, key, *args, **options):
        if key.endswith("temperature/c/5/0/0/0"):
            raise PermissionError(13, "Permission denied", key)
        return await get(self, key, *args, **options)

    monkeypatch.setattr(LocalStore, "get", refused)


@pytest.mark.slow
def test_slow_store_is_read_right_by_several_threads(tmp_path, monkeypatch):
    data = stores.dataset()
    path = written(tmp_path)
    get = CountingStore.get

    async def slow(self, *args, **options):
        await asyncio.sleep(0.05)
        return await get(self, *args, **options)

    monkeypatch.setattr(CountingStore, "get", slow)
    source = opened(path)
    with ThreadPoolExecutor(4) as pool:
        read = pool.map(
            lambda time: source.read(TEMPERATURE, slice(time, time + 1), WHOLE), range(8)
        )
        for time, fields in enumerate(read):
            assert np.array_equal(fields[0], data["temperature"].values[time])
    assert source.bytes_read == 8 * 3 * 12 * 8 * 4


def test_a_failure_that_passes_is_read_again(tmp_path, monkeypatch):
    data = stores.dataset()
    path = written(tmp_path)
    source = opened(path)
    get, failures = LocalStore.get, [1]

    async def failing(self, *args, **options):
        if failures and failures.pop():
            raise ConnectionError("reset by peer")
        return await get(self, *args, **options)

    monkeypatch.setattr(LocalStore, "get", failing)
    for times in (slice(3, 6), np.array([5, 1])):
        failures.append(1)
        read = source.read(TEMPERATURE, times, WHOLE)
        assert np.array_equal(read, data["temperature"].values[times])


@pytest.mark.slow
@each("version", [2, 3])
def test_store_written_anew_while_it_is_read(tmp_path, version):
    path = written(tmp_path, version)
    source = opened(path)
    source.read(TEMPERATURE, slice(0, 1), WHOLE)
    shutil.rmtree(path)
    written(tmp_path, version)
    with pytest.raises(UserError, match="has changed since it was opened"):
        read_often(source)


def resize(path):
    zarr.open_group(path)["temperature"].resize((3, 3, 12, 8))


@each("change", [resize, shutil.rmtree])
def test_store_changed_while_it_is_read(tmp_path, change):
    path = written(tmp_path)
    source = opened(path)
    change(path)
    assert "has changed since it was opened" in refusal(source, times=slice(5, 6))


def read_often(source: GriddedSource) -> None:
    for _ in range(READS_BETWEEN_CHECKS):
        source.read(TEMPERATURE, slice(0, 1), WHOLE)


@each("length", [100, "half"])
def test_truncated_netcdf(tmp_path, length):
    path = tmp_path / "s.nc"
    encoding = {"temperature": {"zlib": True, "chunksizes": (1, 3, 12, 8)}}
    stores.dataset().to_netcdf(path, encoding=encoding)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2 if length == "half" else length)
    with pytest.raises(UserError, match=r"s\.nc: not a netCDF file") as caught:
        opened(path)
    assert "\n" not in str(caught.value)


def test_damaged_netcdf_chunk(tmp_path):
    path = tmp_path / "s.nc"
    encoding = {"temperature": {"fletcher32": True, "chunksizes": (1, 3, 12, 8)}}
    data = stores.dataset()
    data.to_netcdf(path, encoding=encoding)
    raw = path.read_bytes()
    at = raw.index(data["temperature"].values[BAD].tobytes()[:64])
    path.write_bytes(raw[:at] + b"\0" * 8 + raw[at + 8 :])
    source = opened(path)
    assert_names_it(refusal(source))
    assert source.read(TEMPERATURE, slice(0, 5), WHOLE).shape == (5, 3, 12, 8)


def test_netcdf_file_replaced_while_it_is_read(tmp_path):
    path = tmp_path / "s.nc"
    stores.dataset().to_netcdf(path)
    source = opened(path)
    stores.dataset(seed=1).to_netcdf(tmp_path / "new.nc")
    (tmp_path / "new.nc").rename(path)
    with pytest.raises(UserError, match="has changed since it was opened"):
        read_often(source)


@pytest.mark.slow
def test_a_netcdf_file_has_one_handle(tmp_path):
    """With a second handle, closed meanwhile, HDF5 crashed at a file with a variable of text."""

    def handles():
        return sum(file.filepath() == str(path) for file in FILE_CACHE.values())

    path, link = tmp_path / "s.nc", tmp_path / "link.nc"
    data = stores.dataset().assign(note="a text")
    data.to_netcdf(path)
    link.symlink_to(path)
    first = opened(path)
    for again in (path, link):
        second = opened(again)
        values = second.read(TEMPERATURE, slice(BAD, BAD + 1), WHOLE)
        np.testing.assert_array_equal(values[0], data["temperature"].values[BAD])
        assert handles() == 1
        del second
        gc.collect()
    values = first.read(TEMPERATURE, slice(0, 1), WHOLE)
    np.testing.assert_array_equal(values[0], data["temperature"].values[0])
    assert handles() == 1
    del first
    gc.collect()
    assert handles() == 0


def test_a_replaced_netcdf_file_has_another_handle(tmp_path):
    path = tmp_path / "s.nc"
    for seed in range(2):
        data = stores.dataset(seed=seed)
        data.to_netcdf(tmp_path / "new.nc")
        (tmp_path / "new.nc").rename(path)
        values = opened(path).read(TEMPERATURE, slice(0, 1), WHOLE)
        np.testing.assert_array_equal(values[0], data["temperature"].values[0])


def test_a_file_that_is_neither(tmp_path):
    (tmp_path / "s.grib").write_bytes(b"GRIB")
    with pytest.raises(UserError, match="neither GRIB nor netCDF"):
        open_single_source(str(tmp_path / "s.grib"))


@pytest.mark.slow
def test_no_file_is_closed_while_one_is_opened(tmp_path, monkeypatch):
    """The collector may close a file in another thread, which crashes the netCDF library."""
    seen = []

    def watched(*args, **options):
        seen.append(gc.isenabled())
        raise OSError("damaged")

    stores.dataset().to_netcdf(tmp_path / "s.nc")
    monkeypatch.setattr(xr, "open_dataset", watched)
    with pytest.raises(UserError, match="damaged"):
        open_single_source(str(tmp_path / "s.nc"))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
