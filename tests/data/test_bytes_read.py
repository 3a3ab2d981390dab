"""What the ranks of a domain read of a prepared sample at a quarter of a degree, counted."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from credit_dp.data.bands import balanced_bounds
from credit_dp.data.loader import Loader
from credit_dp.data.prepare import prepare
from credit_dp.data.preparing.chunks import chunk_rows
from credit_dp.data.sampling import SampleSequence
from credit_dp.data.schema import Channel
from credit_dp.data.sources.prepared import PreparedSource
from credit_dp.data.sources.quick import QuickArray
from credit_dp.errors import UserError
from tests.data import prepared_stores, stores

HEIGHT, WIDTH = 721, 1440
DOMAINS = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    data = stores.dataset(HEIGHT, WIDTH, steps=3).sel(level=[500])
    data = data[["temperature", "2m_temperature"]]
    path = tmp_path_factory.mktemp("bytes") / "store.zarr"
    prepared_stores.write(data, path, chunk_rows(HEIGHT, DOMAINS), static=False)
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
    return prepare(config)


@pytest.fixture(params=["zarr", "tensorstore"])
def reader(request, monkeypatch):
    """Reads through one of both only."""
    read = QuickArray.read

    def only_quick(*args):
        found = read(*args)
        assert found is not None
        return found

    chosen = only_quick if request.param == "tensorstore" else lambda *_: None
    monkeypatch.setattr(QuickArray, "read", chosen)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("ranks", DOMAINS)
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
    """What this process has read from files so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    raise AssertionError("no rchar")


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_what_the_quick_reader_cannot_read_is_named(tmp_path, damage):
    path = prepared_stores.write(stores.dataset(), tmp_path / "store.zarr")
    file = path / "fields" / "c.1.0.0.0"
    content = bytearray(file.read_bytes())
    source = PreparedSource.open(str(path))
    channel = [Channel("2m_temperature")]
    assert (
        source._fields.quick.read((slice(1, 2), slice(0, 1), slice(0, 4), slice(0, 8))) is not None
    )
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(content[:-50])
    else:
        content[11] ^= 1
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"c\.1\.0\.0\.0"):
        source.read(channel, slice(0, 3), slice(0, 12))


def test_both_readers_give_the_same(tmp_path):
    path = prepared_stores.write(stores.dataset(), tmp_path / "store.zarr")
    source = PreparedSource.open(str(path))
    one = source._fields
    for selection in (
        (slice(0, 1), slice(0, 8), slice(0, 12), slice(0, 8)),
        (slice(2, 9), slice(3, 5), slice(5, 6), slice(None)),
        (slice(1, 8, 3), slice(7, 8), slice(3, 9), slice(None)),
    ):
        before = source.bytes_read
        slow = np.asarray(one.array[selection])
        between = source.bytes_read
        assert np.array_equal(one.quick.read(selection), slow)
        if selection[0].step is None:
            # zarr reads a shard with its index if all of it is wanted.
            assert between - before - 52 <= source.bytes_read - between <= between - before
