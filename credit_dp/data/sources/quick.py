"""Faster readers of prepared stores than zarr, for which many small chunks are costly.

They read files by themselves, past the stores that count and check. So what they read is counted
here, from each shard's index, and where something is amiss they give way to zarr, whose errors say
which file. Checksums are verified by all.
"""

from importlib.util import find_spec
from typing import Protocol, final

import numpy as np
import zarr
from zarr.storage import LocalStore

from credit_dp.data.disk import CountingStore
from credit_dp.data.sources.address import is_remote, local_path
from credit_dp.data.sources.plain import PlainArray, is_plain
from credit_dp.data.sources.shards import Shards
from credit_dp.data.sources.source import Fields

# Of all readers of an array: threads that decode, and files that are read at once.
DECODING, READING = 4, 8


class QuickArray(Protocol):
    """One array of shards in a folder on this machine, of which slices are read."""

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
        """The values, float32; None if a file is missing or is not as it should be."""


@final
class DecodedArray:
    """What tensorstore decodes, where it is installed."""

    def __init__(self, shards: Shards, disk: CountingStore) -> None:
        import tensorstore

        self._shards, self._disk = shards, disk
        context = {
            "cache_pool": {"total_bytes_limit": 0},  # each chunk is wanted once
            "data_copy_concurrency": {"limit": DECODING},
            "file_io_concurrency": {"limit": READING},
        }
        self._quick = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{shards.folder}/"}},
            context=tensorstore.Context(context),
            read=True,
        ).result()

    def read(self, selection: tuple[slice, ...]) -> Fields | None:
        """See `QuickArray`."""
        try:
            sizes = self._sizes(self._shards.spans(selection))
            fields = np.asarray(self._quick[selection].read().result(), dtype=np.float32)
        except Exception:  # noqa: BLE001 - whatever it was, zarr will meet it again and name it
            return None
        self._disk.add(sum(sizes), len(sizes))
        return fields

    def _sizes(self, spans: list[tuple[int, int]]) -> list[int]:
        """Bytes of the chunks that have some of it."""
        sizes = []
        for path, shard in self._shards.files(spans):
            with path.open("rb") as file:
                sizes += [part.size for part in self._shards.parts(file, shard, spans)]
        return sizes


def quick_array(address: str, name: str, disk: CountingStore) -> QuickArray | None:
    """Another reader than zarr of an array; None if there is none for it here.

    At addresses elsewhere zarr waits for the network, not for the processor.
    """
    if is_remote(address):
        return None
    try:
        folder = local_path(address)
        array = zarr.open_array(LocalStore(folder, read_only=True), path=name, mode="r")
        shards = Shards(folder / name, array)
        if is_plain(array):
            return PlainArray(shards, disk)
        return DecodedArray(shards, disk) if find_spec("tensorstore") is not None else None
    except Exception:  # noqa: BLE001 - zarr reads it, or says why it can't be read
        return None
