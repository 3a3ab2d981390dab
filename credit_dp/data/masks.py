"""The points on which variables with a `fill` have values: those that do at all training dates.

`with_masks` gives a store these masks, from the cache or after a pass over the training dates of
these variables. Statistics and climatology follow, which leave out the other points.
"""

import logging
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, final
from zipfile import BadZipFile

import numpy as np

from credit_dp.data.cache import ProgressCallback, fingerprint, load_or_create
from credit_dp.data.calendar import Times
from credit_dp.data.channels import Channel
from credit_dp.data.dates import split_slice
from credit_dp.data.limits import no_value_error
from credit_dp.data.store import Masks, Store
from credit_dp.data.streaming import Piece, TrainingDates, Window, all_pieces, stream_windows
from credit_dp.errors import UserError

TITLE = "points without values"
VERSION = "credit_dp masks 1"  # change with the definitions below: old files are ignored
NEVER, SOMETIMES, ALWAYS = 0, 1, 2  # at how many dates a point has values, in files

logger = logging.getLogger(__name__)


def with_masks(
    store: Store, folder: Path, progress: ProgressCallback, *, compute: bool = True
) -> Store:
    """Return a store with the masks of its training dates, for all channels with a fill.

    The log says how many points have values at some of these dates only.

    Raises:
        NotComputedError: the cache has no masks, and `compute` is False.
    """
    if not store.filled_channels:
        return store
    train = split_slice(store.config, "train", store.times, store.calendar)
    dates = TrainingDates.at(np.arange(train.start, train.stop))
    names = list(dict.fromkeys(channel.variable for channel in store.filled_channels))
    channels = [channel.name for channel in store.filled_channels]
    times = [str(time) for time in store.times[train]]
    name = fingerprint(VERSION, store.description(names), channels, times)
    path = folder / f"masks-{name}.npz"
    saved = load_or_create(
        path,
        lambda file: load_masks(file, store),
        lambda file: find_presence(store, dates, progress).save(file),
        "points without values",
        compute,
    )
    points = store.grid[0] * store.grid[1]
    for channel, count in saved.partial.items():
        logger.info(
            "%s: %s of %s points have values at some training dates only, and count as points "
            "without values at all dates",
            *(channel.name, count, points),
        )
    return store.with_masks(saved.masks)


class SavedMasks(NamedTuple):
    """The masks of all channels with a fill.

    Attributes:
        masks: where there are values at all dates.
        partial: the number of points with values at some dates only, of channels that have any.
    """

    masks: Masks
    partial: Mapping[Channel, int]


def load_masks(path: Path, store: Store) -> SavedMasks | None:
    """Read a file of `Presence.save`; None if it is absent or damaged."""
    masks, partial = {}, {}
    try:
        # From memory: numpy leaves a damaged file open.
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            for channel in store.filled_channels:
                presence = arrays[channel.name]
                if presence.shape != store.grid:
                    return None
                masks[channel] = presence == ALWAYS
                count = int((presence == SOMETIMES).sum())
                if count:
                    partial[channel] = count
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error):
        return None
    return SavedMasks(masks, partial)


def find_presence(store: Store, dates: TrainingDates, progress: ProgressCallback) -> "Presence":
    """Read the channels with a fill at all dates, and return where they have values."""
    presence = Presence(store, store.times[dates.indices])
    groups = [tuple(group) for group in store.source.group_by_chunk(store.filled_channels)]
    pieces = all_pieces(store, dates, groups=groups)
    for number, piece in enumerate(pieces, start=1):
        for window in stream_windows(store, dates, piece, checked=False):
            presence.add(piece, window)
        progress(TITLE, number / len(pieces))
    return presence


@final
class Presence:
    """Where the channels with a fill have values: at all dates, at some, at none."""

    def __init__(self, store: Store, times: Times) -> None:
        self._store = store
        self._times = times
        channels = store.filled_channels
        self._always = {channel: np.ones(store.grid, dtype=bool) for channel in channels}
        self._ever = {channel: np.zeros(store.grid, dtype=bool) for channel in channels}
        # The number of values of each channel at each date.
        self._counts = {channel: np.zeros(len(times), dtype=np.int64) for channel in channels}

    def add(self, piece: Piece, window: Window) -> None:
        """Add the dates of a window that were in no window before."""
        for position, channel in enumerate(piece.channels):
            valid = ~np.isnan(window.fields[window.fresh, position])
            self._always[channel][piece.rows] &= valid.all(axis=0)
            self._ever[channel][piece.rows] |= valid.any(axis=0)
            self._counts[channel][window.dates] += valid.sum(axis=(1, 2))

    def masks(self) -> Masks:
        """Return where each channel has values at all dates.

        Raises:
            UserError: a channel has no value at a date, or at no point values at all dates.
        """
        where = self._store.source.where
        for channel, counts in self._counts.items():
            role = self._store.role_of(channel)
            first, last = (self._store.calendar.text(time) for time in self._times[[0, -1]])
            if not counts.any():
                raise UserError(
                    f"{where}: {channel.name} has no value at any date from {first} to {last}. "
                    f"Leave {channel.variable} out of data.{role}, or choose other dates."
                )
            if not counts.all():
                time = self._times[int((counts == 0).argmax())]
                raise no_value_error(where, channel, role, self._store.calendar.text(time))
            if not self._always[channel].any():
                raise UserError(
                    f"{where}: {channel.name} has at no point values at all dates from {first} "
                    f"to {last}, so that data.variables.{channel.variable}.fill would replace the "
                    "whole field. "
                    "Fill its missing values in the store, for instance by xarray's fillna, or "
                    f"leave {channel.variable} out of data.{role}."
                )
        return self._always

    def save(self, path: Path) -> None:
        """Write the file that `load_masks` reads."""
        arrays: dict[str, Any] = {}
        for channel, always in self.masks().items():
            some = np.where(self._ever[channel], SOMETIMES, NEVER)
            arrays[channel.name] = np.where(always, ALWAYS, some).astype(np.uint8)
        with path.open("wb") as file:  # to a path without the suffix numpy would add it
            np.savez_compressed(file, **arrays)
