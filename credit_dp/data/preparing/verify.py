"""Compares random parts of a prepared store with what they were made from, bit for bit."""

from typing import Any

import numpy as np
import zarr

from credit_dp.data.preparing.asked import Asked
from credit_dp.data.preparing.target import Target
from credit_dp.data.sources.source import Fields
from credit_dp.errors import UserError

SAMPLES = 16


def verify(asked: Asked, target: Target, seed: int) -> int:
    """Check that all shards are there, and some rows of some times; how many of those.

    Reading them back also checks the checksums of their chunks.

    Raises:
        UserError: something is missing or not what the store holds.
    """
    missing = target.missing(0, asked.shape[0])
    if missing:
        date = asked.times[missing[0]].astype("M8[m]")
        raise UserError(f"{target.partial}: {date} is missing. Start again: it will be written.")
    array = target.fields()
    random = np.random.default_rng(seed)
    times = random.permutation(asked.shape[0])[:SAMPLES]
    for time in map(int, np.sort(times)):
        first = int(random.integers(asked.shape[2]))
        stop = int(random.integers(first, asked.shape[2])) + 1
        _compare(asked, target, array, time, slice(first, stop))
    return len(times)


def _compare(
    asked: Asked, target: Target, array: "zarr.Array[Any]", time: int, rows: slice
) -> None:
    try:
        read: Fields = np.asarray(array[time : time + 1, :, rows], dtype=np.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise _wrong(asked, target, time, rows, f"cannot be read ({error})") from error
    if not same_bits(read, asked.fields(time, time + 1, rows)):
        raise _wrong(asked, target, time, rows, "differ from what the store holds now")


def same_bits(one: Fields, other: Fields) -> bool:
    """Whether two arrays are equal, NaN and signs of zero too."""
    a, b = (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) for x in (one, other))
    return np.array_equal(a, b)


def _wrong(asked: Asked, target: Target, time: int, rows: slice, what: str) -> UserError:
    date = asked.times[time].astype("M8[m]")
    return UserError(
        f"{target.partial}: rows {rows.start} to {rows.stop - 1} at {date} {what}. "
        f"Remove {target.partial}, see to the disk and the store, and start again."
    )
