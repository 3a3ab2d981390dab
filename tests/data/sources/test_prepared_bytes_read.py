"""Counts the bytes that ranks of a domain read of a prepared quarter-degree sample."""

from itertools import pairwise
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from credit_dp.bands import balanced_bounds
from credit_dp.data.channels import Channel
from credit_dp.data.loader import Loader
from credit_dp.data.rechunk.copy_fields import choose_chunk_rows
from credit_dp.data.sampling import SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources import prepared as sources_prepared
from credit_dp.data.sources.prepared import PreparedSource
from credit_dp.data.sources.stacked import TensorStoreReader
from credit_dp.errors import UserError
from tests.data import prepared_stores, stores
from tests.tables import each
from tests.tier_cases import tiers

HEIGHT, WIDTH = 721, 1440
DOMAINS = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    data = stores.dataset(HEIGHT, WIDTH, steps=3).sel(level=[500])
    data = data[["temperature", "2m_temperature"]]
    path = tmp_path_factory.mktemp("bytes") / "store.zarr"
    return prepared_stores.write(data, path, choose_chunk_rows(HEIGHT, DOMAINS), static=False)


def prepared(path):
    hours = ["2000-01-01T00", "2000-01-01T12"]
    config = stores.config(
        path,
        prognostic=["temperature", "2m_temperature"],
        forcing=["day_of_year_sin"],
        static=[],
        train=hours,
        valid=hours,
        test=hours,
    )
    return prepare_training_data(config)


@pytest.fixture(params=["zarr", "tensorstore"])
def reader(request, monkeypatch):
    """Use only one of the two readers."""
    if request.param == "zarr":
        monkeypatch.setattr(sources_prepared, "open_shard_reader", lambda *_, **__: None)
        return
    read = TensorStoreReader.read

    def read_all(*args):
        found = read(*args)
        assert found is not None
        return found

    monkeypatch.setattr(TensorStoreReader, "read", read_all)


@pytest.fixture
def ready(stored, reader):
    return prepared(stored)


@pytest.mark.parametrize("ranks", tiers([], [(8,)], [(1,), (2,), (4,)]))
def test_a_rank_of_n_reads_an_nth_of_a_prepared_sample(ready, ranks):
    sample = 2 * 2 * HEIGHT * WIDTH * 4  # two channels at two times, in float32
    for first, stop in pairwise(balanced_bounds(HEIGHT, ranks)):
        sequence = SampleSequence(2, 1)
        before, from_disk = ready.store.bytes_read, bytes_of_process()
        with Loader(ready, "train", slice(first, stop), sequence, prefetch=0) as loader:
            next(loader)
        read = ready.store.bytes_read - before
        assert sample * (stop - first) / HEIGHT <= read <= 1.05 / ranks * sample
        # As the system counts it: with the indices of shards, and Python's buffers.
        assert read <= bytes_of_process() - from_disk <= 1.1 * read + 2**17


def bytes_of_process():
    """Return the bytes that this process has read from files so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    raise AssertionError("no rchar")


@each("damage", ["missing", "short", "changed", "index"])
def test_what_tensorstore_cannot_read_is_named(tmp_path, damage):
    path = prepared_stores.write(stores.dataset(), tmp_path / "store.zarr")
    file = path / "fields" / "c.1.0.0.0"
    content = bytearray(file.read_bytes())
    source = PreparedSource.open(str(path))
    channel = [Channel("2m_temperature")]
    assert (
        source._fields.fast_reader.read((slice(1, 2), slice(0, 1), slice(0, 4), slice(0, 8)))
        is not None
    )
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(content[:-50])
    else:
        content[11 if damage == "changed" else -11] ^= 1
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"c\.1\.0\.0\.0"):
        source.read(channel, slice(0, 3), slice(0, 12))


def test_tensorstore_gives_what_zarr_does(tmp_path):
    path = prepared_stores.write(stores.dataset(), tmp_path / "store.zarr")
    source = PreparedSource.open(str(path))
    one = source._fields
    for selection, shards in (
        ((slice(0, 1), slice(0, 8), slice(0, 12), slice(0, 8)), 1),
        ((slice(2, 9), slice(3, 5), slice(5, 6), slice(None)), 7),
        ((slice(1, 8, 3), slice(7, 8), slice(3, 9), slice(None)), 3),
    ):
        before, chunks = source.bytes_read, source.chunk_reads
        slow = np.asarray(one.array[selection])
        between, chunks_between = source.bytes_read, source.chunk_reads
        assert np.array_equal(one.fast_reader.read(selection), slow)
        if selection[0].step is None:
            read = source.bytes_read - between
            # zarr counts no index of a shard, and reads a shard at once if all of it is wanted.
            assert between - before <= read <= between - before + 52 * shards
            assert source.chunk_reads - chunks_between >= chunks_between - chunks


def test_a_missing_chunk_of_a_shard_is_named(tmp_path):
    """Not read as values that are filled in."""
    path = prepared_stores.write(stores.dataset(), tmp_path / "store.zarr")
    file = path / "fields" / "c.1.0.0.0"
    content = bytearray(file.read_bytes())
    content[-20:-4] = b"\xff" * 16  # the index: no chunk here
    content[-4:] = google_crc32c.value(bytes(content[-20:-4])).to_bytes(4, "little")
    file.write_bytes(content)
    source = PreparedSource.open(str(path))
    assert source._fields.fast_reader.read((slice(1, 2), *[slice(None)] * 3)) is None
