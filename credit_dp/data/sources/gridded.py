"""Stores with one array per variable over time, level, latitude and longitude, in any order."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.disk import CountingStore, open_dataset, stamp
from credit_dp.data.layout import check_coordinates, with_standard_names
from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import Fields, Places, Source, Times, Variable, as_slice
from credit_dp.errors import UserError

ORDER = ("time", "level", "latitude", "longitude")
NEEDED = "it needs latitude and longitude, and no others but time and level"


@final
class GriddedSource(Source):
    """One dataset in the form of WeatherBench 2."""

    def __init__(self, dataset: xr.Dataset, disk: CountingStore, where: str) -> None:
        check_coordinates(dataset, where)
        self.where = where
        self.times: Times = dataset["time"].values.astype("datetime64[ns]")
        latitude = dataset["latitude"].values.astype(np.float64)
        self._flipped = bool(latitude[0] < latitude[-1])
        self.latitude: NDArray[np.float64] = latitude[::-1] if self._flipped else latitude
        self.longitude: NDArray[np.float64] = dataset["longitude"].values.astype(np.float64)
        self.variables: Mapping[str, Variable] = _variables(dataset, where)
        self._dataset = dataset
        self._disk = disk
        disk.reset()

    @classmethod
    def open(cls, where: str) -> "GriddedSource":
        """Open the zarr store at a path.

        Raises:
            UserError: there is none, or its coordinates are not as needed.
        """
        dataset, disk = open_dataset(Path(where).expanduser())
        return cls(with_standard_names(dataset), disk, where)

    @property
    def bytes_read(self) -> int:
        """See `Source`."""
        return self._disk.data_bytes

    @property
    def chunk_reads(self) -> int:
        """See `Source`."""
        return self._disk.chunk_reads

    def read(self, channels: Sequence[Channel], places: Places, rows: slice) -> Fields:
        """See `Source`: variable by variable."""
        parts = []
        for name, of_name in groupby(channels, lambda channel: channel.variable):
            levels = [channel.level for channel in of_name if channel.level is not None]
            parts.append(self._block(name, levels, places, rows))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def together(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`: the levels of a variable."""
        return [list(group) for _, group in groupby(channels, lambda channel: channel.variable)]

    def times_together(self, channel: Channel) -> int:
        """See `Source`."""
        array = self._dataset[channel.variable]
        chunks = array.encoding.get("shards") or array.encoding.get("chunks") or array.shape
        return int(chunks[array.dims.index("time")])

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`."""
        path = Path(self.where).expanduser().resolve()
        described: list[object] = [str(path), stamp(path)]
        described += [self.latitude.tolist(), self.longitude.tolist()]
        for name in variables:
            array = self._dataset[name]
            described.append(
                [name, list(map(str, array.dims)), list(array.shape), str(array.dtype)]
            )
        return described

    def _block(self, name: str, levels: list[int], places: Places, rows: slice) -> Fields:
        """`(T, levels, rows, W)`; one level or one time if the variable has no such dim."""
        height = self.grid[0]
        north, south, _ = rows.indices(height)
        stored = slice(height - south, height - north) if self._flipped else slice(north, south)
        array = self._dataset[name].variable
        selection: dict[str, object] = {"latitude": stored}
        if "time" in array.dims:
            selection["time"] = places
        if "level" in array.dims:
            present = self.variables[name].levels
            selection["level"] = as_slice(np.array([present.index(level) for level in levels]))
        # The dims change place after reading, never while it: the disk sees the store's own order.
        values = array.isel(selection).values
        missing = [dim for dim in ("time", "level") if dim not in array.dims]
        dims = [*missing, *map(str, array.dims)]
        values = values.reshape((1,) * len(missing) + values.shape)
        values = values.transpose([dims.index(dim) for dim in ORDER])
        fields = np.asarray(values, dtype=np.float32)
        return fields[:, :, ::-1] if self._flipped else fields


def _variables(dataset: xr.Dataset, where: str) -> dict[str, Variable]:
    """All variables, also those that can't be read."""
    levels = _levels(dataset, where)
    found = {}
    for name, array in dataset.data_vars.items():
        dims = list(map(str, array.dims))
        on_grid = {"latitude", "longitude"} <= set(dims) <= set(ORDER)
        found[str(name)] = Variable(
            timed="time" in dims,
            levels=levels if "level" in dims else (),
            units=str(array.attrs.get("units", "")).strip(),
            standard_name=str(array.attrs.get("standard_name", "")),
            problem="" if on_grid else f"has the dims {', '.join(dims) or 'none'}: {NEEDED}",
        )
    return found


def _levels(dataset: xr.Dataset, where: str) -> tuple[int, ...]:
    """The levels in the store's order.

    Raises:
        UserError: they have no values, or are not whole numbers.
    """
    if "level" not in dataset.dims:
        return ()
    if "level" not in dataset.coords:
        raise UserError(f"{where}: has a dim level, but no values for it. Change data.store.")
    values = dataset["level"].values
    if not np.issubdtype(values.dtype, np.number) or (values != values.astype(int)).any():
        raise UserError(
            f"{where}: levels must be whole numbers, but are {values.tolist()}. Change data.store."
        )
    return tuple(int(level) for level in values)
