"""Reading fields from a zarr store in WeatherBench2-like form, only the rows that are asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.dates import SPLITS, split_span
from credit_dp.data.disk import CountingStore, open_dataset, stamp
from credit_dp.data.forcings import COMPUTED
from credit_dp.data.layout import (
    check_coordinates,
    check_variables,
    wanted_levels,
    with_standard_names,
)
from credit_dp.data.schema import Channels, expand
from credit_dp.errors import UserError

BLOCK_BYTES = 8 * 2**20  # of one variable read at once in a pass: more leaves the processor's cache
ORDER = ("time", "level", "latitude", "longitude")

Fields = NDArray[np.float32]
Times = NDArray[np.datetime64]


@final
class Store:
    """An open store: fields as float32, row 0 northernmost, columns as the store has them.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        times: `(T,)` datetime64[ns], rising, perhaps with gaps.
        latitude: `(H,)` degrees, falling.
        longitude: `(W,)` degrees, in the store's order.
        levels: of the prognostic variables that have levels, in channel order.
    """

    def __init__(self, dataset: xr.Dataset, disk: CountingStore, config: DataConfig) -> None:
        self.config = config
        self.levels = wanted_levels(dataset, config)
        self.channels = _channels(dataset, config, self.levels)
        self.times: Times = dataset["time"].values.astype("datetime64[ns]")
        latitude = dataset["latitude"].values.astype(np.float64)
        self._flipped = bool(latitude[0] < latitude[-1])
        self.latitude: NDArray[np.float64] = latitude[::-1] if self._flipped else latitude
        self.longitude: NDArray[np.float64] = dataset["longitude"].values.astype(np.float64)
        self.grid = (len(self.latitude), len(self.longitude))
        self._dataset = dataset
        self._disk = disk
        self._level_places = _level_places(dataset, self.levels)
        disk.reset()

    @classmethod
    def open(cls, config: DataConfig) -> "Store":
        """Open `config.store` and check everything that can be checked without reading fields.

        Raises:
            UserError: store, variable, dims, coordinates, levels or dates are not as needed.
        """
        if not config.store:
            raise UserError("data.store: needs the path of a zarr store, but is empty. Set it.")
        dataset, disk = open_dataset(Path(config.store).expanduser())
        dataset = with_standard_names(dataset)
        check_coordinates(dataset, config)
        check_variables(dataset, config)
        store = cls(dataset, disk, config)
        for split in SPLITS:
            split_span(config, split, store.times)
        return store

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read from disk since opening, without metadata and shard indices."""
        return self._disk.data_bytes

    @property
    def chunk_reads(self) -> int:
        """Chunks, or inner chunks of shards, read from disk since opening."""
        return self._disk.chunk_reads

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
        north, south, _ = rows.indices(self.grid[0])
        shape = (len(times), self.channels.outputs, south - north, self.grid[1])
        fields = np.empty(shape, dtype=np.float32)
        for variable in self.channels.variables:
            fields[:, self.channels.of(variable)] = self._block(variable, places, rows)
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
                fields[:, channel] = self._block(name, self._places(times), rows)[:, 0]
        return fields

    def static(self, rows: slice) -> Fields:
        """The static channels: `(S, rows, W)`."""
        north, south, _ = rows.indices(self.grid[0])
        names = self.channels.static
        fields = np.empty((len(names), south - north, self.grid[1]), dtype=np.float32)
        for channel, name in enumerate(names):
            fields[channel] = self._block(name, slice(0, 1), rows)[0, 0]
        return fields

    def blocks(
        self, variable: str, span: slice, rows: slice, levels: int
    ) -> Iterator[tuple[int, Fields]]:
        """All times of `span` in turn, as `(place of the first time, (T, levels, rows, W))`.

        Blocks are of bounded size and end on the store's own chunk edges where they can.
        """
        north, south, _ = rows.indices(self.grid[0])
        chunk = self._times_together(variable)
        length = max(1, BLOCK_BYTES // max(1, 4 * levels * (south - north) * self.grid[1]))
        length = -(-length // chunk) * chunk
        for start in range(span.start - span.start % length, span.stop, length):
            first, stop = max(start, span.start), min(start + length, span.stop)
            yield first, self._block(variable, slice(first, stop), rows)

    def units(self, variable: str) -> str:
        """The unit as the store gives it; empty if it gives none."""
        return str(self._dataset[variable].attrs.get("units", ""))

    def description(self, variables: list[str]) -> list[object]:
        """What a cached result depends on, as JSON: where, how old, coordinates, variables."""
        path = Path(str(self.config.store)).expanduser().resolve()
        described: list[object] = [str(path), stamp(path), self.levels]
        described += [self.latitude.tolist(), self.longitude.tolist()]
        for name in variables:
            array = self._dataset[name]
            described.append(
                [name, list(map(str, array.dims)), list(array.shape), str(array.dtype)]
            )
        return described

    def _block(self, variable: str, places: slice | NDArray[np.intp], rows: slice) -> Fields:
        """`(T, levels, rows, W)`; one level or one time if the variable has no such dim."""
        north, south, _ = rows.indices(self.grid[0])
        height = self.grid[0]
        stored = slice(height - south, height - north) if self._flipped else slice(north, south)
        array = self._dataset[variable].variable
        selection: dict[str, object] = {"latitude": stored}
        if "time" in array.dims:
            selection["time"] = places
        if "level" in array.dims:
            selection["level"] = self._level_places
        # The dims change place after reading, never while it: the disk sees the store's own order.
        values = array.isel(selection).values
        missing = [dim for dim in ("time", "level") if dim not in array.dims]
        dims = [*missing, *map(str, array.dims)]
        values = values.reshape((1,) * len(missing) + values.shape)
        values = values.transpose([dims.index(dim) for dim in ORDER])
        fields = np.asarray(values, dtype=np.float32)
        if self._flipped:
            fields = fields[:, :, ::-1]
        self._refuse_gaps(variable, fields, places)
        return fields

    def _refuse_gaps(self, variable: str, fields: Fields, places: slice | NDArray[np.intp]) -> None:
        # One sum is several times faster than isfinite, and is finite only if all values are,
        # unless it overflows: then the slow check decides.
        if np.isfinite(fields.sum(dtype=np.float64)):
            return
        bad = ~np.isfinite(fields)
        if not bad.any():
            return
        kind = self._kind(variable)
        time, level = (int(place) for place in np.argwhere(bad)[0][:2])
        where = "" if kind == "static" else f" at {self.times[places][time].astype('M8[m]')}"
        if fields.shape[1] > 1:
            where += f" on level {self.levels[level]}"
        advice = "" if kind == "static" else ", or choose other dates"
        raise UserError(
            f"{self.config.store}: {variable} has values that are NaN or infinite{where}. "
            f"Leave it out of data.{kind}{advice}."
        )

    def _kind(self, variable: str) -> str:
        if variable in self.channels.static:
            return "static"
        return "forcing" if variable in self.channels.forcing else "prognostic"

    def _places(self, times: Times) -> slice | NDArray[np.intp]:
        """Where the times lie on the time axis: a slice where possible, which zarr reads faster."""
        wanted = np.asarray(times, dtype="datetime64[ns]")
        places = np.minimum(np.searchsorted(self.times, wanted), len(self.times) - 1)
        absent = wanted[self.times[places] != wanted]
        if len(absent):
            raise UserError(
                f"{self.config.store}: has no time {absent[0].astype('M8[m]')}. "
                f"Choose dates within the store (data.train, data.valid, data.test)."
            )
        return _as_slice(places)

    def _times_together(self, variable: str) -> int:
        """Times that lie in one shard or, without shards, in one chunk."""
        array = self._dataset[variable]
        chunks = array.encoding.get("shards") or array.encoding.get("chunks") or array.shape
        return int(chunks[array.dims.index("time")])


def _channels(dataset: xr.Dataset, config: DataConfig, levels: list[int]) -> Channels:
    on_levels = {name for name in config.prognostic if "level" in dataset[name].dims}
    return Channels(
        prognostic=tuple(expand(config.prognostic, on_levels, levels)),
        forcing=tuple(config.forcing),
        static=tuple(config.static),
    )


def _level_places(dataset: xr.Dataset, levels: list[int]) -> slice | NDArray[np.intp]:
    if not levels:
        return slice(None)
    present = [int(level) for level in dataset["level"].values]
    return _as_slice(np.array([present.index(level) for level in levels]))


def _as_slice(places: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """The same places as a slice if they rise evenly, else unchanged."""
    steps = np.diff(places)
    step = int(steps[0]) if len(steps) else 1
    if len(places) == 0 or step < 1 or np.any(steps != step):
        return places
    return slice(int(places[0]), int(places[-1]) + 1, step)
