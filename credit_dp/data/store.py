"""The fields that a run needs of its store, only the rows that are asked for."""

from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from credit_dp.config import DataConfig
from credit_dp.data.dates import split_span
from credit_dp.data.forcings import COMPUTED
from credit_dp.data.schema import Channel, Channels
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.source import Fields, Places, Source, Times, as_slice
from credit_dp.data.wanted import ROLES, wanted_channels
from credit_dp.data_config import SPLITS
from credit_dp.errors import UserError

BLOCK_BYTES = 8 * 2**20  # of fields read at once in a pass: more leaves the processor's cache


@final
class Store:
    """An open store: fields as float32, row 0 northernmost, columns as the store has them.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        times: `(T,)` datetime64[ns], rising, perhaps with gaps.
        latitude: `(H,)` degrees, falling.
        longitude: `(W,)` degrees, in the store's order.
        levels: of the variables that have levels, in channel order.
    """

    def __init__(self, source: Source, config: DataConfig) -> None:
        self.config = config
        self.source = source
        self.channels = wanted_channels(source, config)
        self.levels = _levels(self.channels)
        self.times: Times = source.times
        self.latitude, self.longitude = source.latitude, source.longitude
        self.grid = source.grid

    @classmethod
    def open(cls, config: DataConfig) -> "Store":
        """Open `config.store` and check everything that can be checked without reading fields.

        Raises:
            UserError: store, variable, dims, coordinates, levels or dates are not as needed.
        """
        store = cls(open_source(config), config)
        for split in SPLITS:
            split_span(config, split, store.times)
        return store

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read from disk since opening, without metadata and shard indices."""
        return self.source.bytes_read

    @property
    def chunk_reads(self) -> int:
        """Chunks, or inner chunks of shards, read from disk since opening."""
        return self.source.chunk_reads

    def read(self, time: np.datetime64, rows: slice) -> Fields:
        """The prognostic channels at one time: `(C, rows, W)`.

        Raises:
            UserError: the time is not in the store, or a value is not finite.
        """
        fields: Fields = self.read_times(np.array([time]), rows)[0]
        return fields

    def read_times(self, times: Times, rows: slice) -> Fields:
        """The prognostic channels at several times: `(T, C, rows, W)`.

        A chunk that holds several of the times is read once.
        """
        places = self._places(times)
        fields = self.source.read(self.channels.prognostic, places, rows)
        self._refuse_gaps(self.channels.prognostic, fields, places)
        return fields

    def forcing(self, time: np.datetime64, rows: slice) -> Fields:
        """The forcing channels at one time, computed ones included: `(F, rows, W)`."""
        fields: Fields = self.forcing_times(np.array([time]), rows)[0]
        return fields

    def forcing_times(self, times: Times, rows: slice) -> Fields:
        """The forcing channels at several times: `(T, F, rows, W)`."""
        north, south, _ = rows.indices(self.grid[0])
        names = self.channels.forcing
        fields = np.empty((len(times), len(names), south - north, self.grid[1]), dtype=np.float32)
        for channel, name in enumerate(names):
            if name in COMPUTED:
                fields[:, channel] = COMPUTED[name](times)[:, None, None]
            else:
                fields[:, channel] = self._read(Channel(name), self._places(times), rows)[:, 0]
        return fields

    def static(self, rows: slice) -> Fields:
        """The static channels: `(S, rows, W)`."""
        north, south, _ = rows.indices(self.grid[0])
        names = self.channels.static
        fields = np.empty((len(names), south - north, self.grid[1]), dtype=np.float32)
        for channel, name in enumerate(names):
            fields[channel] = self._read(Channel(name), slice(0, 1), rows)[0, 0]
        return fields

    def blocks(
        self, channels: Sequence[Channel], span: slice, rows: slice
    ) -> Iterator[tuple[int, Fields]]:
        """All times of `span` in turn, as `(place of the first time, (T, C, rows, W))`.

        Blocks are of bounded size and end on the store's own chunk edges where they can.
        """
        north, south, _ = rows.indices(self.grid[0])
        chunk = self.source.times_together(channels[0])
        length = max(1, BLOCK_BYTES // max(1, 4 * len(channels) * (south - north) * self.grid[1]))
        length = -(-length // chunk) * chunk
        for start in range(span.start - span.start % length, span.stop, length):
            first, stop = max(start, span.start), min(start + length, span.stop)
            places = slice(first, stop)
            fields = self.source.read(channels, places, rows)
            self._refuse_gaps(channels, fields, places)
            yield first, fields

    def units(self, variable: str) -> str:
        """The unit as the store gives it; empty if it gives none."""
        return self.source.variables[variable].units

    def description(self, variables: list[str]) -> list[object]:
        """What a cached result depends on, as JSON: the source, and the levels."""
        return [*self.source.description(variables), list(self.levels)]

    def _read(self, channel: Channel, places: Places, rows: slice) -> Fields:
        fields = self.source.read([channel], places, rows)
        self._refuse_gaps([channel], fields, places)
        return fields

    def _refuse_gaps(self, channels: Sequence[Channel], fields: Fields, places: Places) -> None:
        # One sum is several times faster than isfinite, and is finite only if all values are,
        # unless it overflows: then the slow check decides.
        if np.isfinite(fields.sum(dtype=np.float64)):
            return
        bad = ~np.isfinite(fields)
        if not bad.any():
            return
        time, place = (int(index) for index in np.argwhere(bad)[0][:2])
        channel = channels[place]
        kind = self._kind(channel.variable)
        where = "" if kind == "static" else f" at {self.times[places][time].astype('M8[m]')}"
        if channel.level is not None:
            where += f" on level {channel.level}"
        advice = "" if kind == "static" else ", or choose other dates"
        raise UserError(
            f"{self.source.where}: {channel.variable} has values that are NaN or infinite{where}. "
            f"Leave it out of data.{kind}{advice}."
        )

    def _kind(self, variable: str) -> str:
        return next(role for role in ROLES if variable in getattr(self.config, role))

    def _places(self, times: Times) -> Places:
        """Where the times lie on the time axis: a slice where possible, which zarr reads faster."""
        wanted = np.asarray(times, dtype="datetime64[ns]")
        places = np.minimum(np.searchsorted(self.times, wanted), len(self.times) - 1)
        absent = wanted[self.times[places] != wanted]
        if len(absent):
            raise UserError(
                f"{self.source.where}: has no time {absent[0].astype('M8[m]')}. "
                f"Choose dates within the store: data.dates.train, .valid and .test."
            )
        return as_slice(places)


def _levels(channels: Channels) -> list[int]:
    """The levels in channel order."""
    found = (channel.level for channel in (*channels.prognostic, *channels.diagnostic))
    return list(dict.fromkeys(level for level in found if level is not None))
