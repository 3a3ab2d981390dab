"""A local folder's store reads what zarr's own reads."""

import asyncio
import itertools
import os

import pytest
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

from credit_dp.data.sources.storage import SMALL_RANGE, FolderStore
from tests.tables import each

SIZE = 2 * SMALL_RANGE
RANGES = [
    None,
    OffsetByteRequest(7),
    RangeByteRequest(0, 10),
    RangeByteRequest(5, SMALL_RANGE + 5),
    RangeByteRequest(5, SMALL_RANGE + 6),
    RangeByteRequest(SIZE - 3, SIZE + 9),  # beyond the end
    RangeByteRequest(SIZE + 1, SIZE + 2),
    SuffixByteRequest(12),
    SuffixByteRequest(SMALL_RANGE),
    SuffixByteRequest(SMALL_RANGE + 1),
]


@each(
    "key, byte_range",
    itertools.product(["long", "folder/short", "folder", "none", "long/none"], RANGES),
)
def test_any_range_is_what_zarr_reads(tmp_path, key, byte_range):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/short").write_bytes(b"short")
    (tmp_path / "long").write_bytes(bytes(range(256)) * (SIZE // 256))
    found, wanted = (
        asyncio.run(kind(tmp_path, read_only=True).get(key, default_buffer_prototype(), byte_range))
        for kind in (FolderStore, LocalStore)
    )
    assert (found is None) == (wanted is None) == (key not in ("long", "folder/short"))
    if wanted is not None:
        assert found.to_bytes() == wanted.to_bytes()


def test_a_small_range_is_read_without_another_thread(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(SIZE))
    store = FolderStore(tmp_path, read_only=True)
    threads = []
    monkeypatch.setattr(asyncio, "to_thread", lambda *args, **_: threads.append(args) or _nothing())
    for byte_range, handed in ((RangeByteRequest(0, SMALL_RANGE), False), (None, True)):
        asyncio.run(store.get("file", default_buffer_prototype(), byte_range))
        assert bool(threads) == handed


async def _nothing():
    return None


@each("byte_range", [None, RangeByteRequest(0, 1), SuffixByteRequest(4)])
def test_a_pipe_in_a_store_is_an_error(tmp_path, byte_range):
    """Opening it would never end."""
    os.mkfifo(tmp_path / "c")
    store = FolderStore(tmp_path, read_only=True)
    with pytest.raises(OSError, match="is a pipe, a socket or a device"):
        asyncio.run(store.get("c", default_buffer_prototype(), byte_range))
