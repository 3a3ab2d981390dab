"""Stores with one array per variable: zarr groups and netCDF files."""

import gc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from threading import Lock
from typing import Any, Protocol, final

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.sources.address import (
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
    zarr_open_error,
)
from credit_dp.data.sources.base import (
    DIM_ALIASES,
    HORIZONTAL,
    Fields,
    Indexer,
    ReadCounter,
    Source,
    Times,
    VariableInfo,
    as_slice,
    check_coordinates,
    has_model_levels,
    scalar_level,
    squeeze_other_dims,
    standardise_dims,
)
from credit_dp.data.sources.storage import (
    CompleteStore,
    CountingStore,
    IntactStore,
    StoreChangeDetector,
    open_zarr_store,
    resolved_address,
    unreadable_error,
    version_stamp,
)
from credit_dp.data.sources.stored_names import StoredNames
from credit_dp.errors import UserError
from credit_dp.variable_names import all_names_of, canonical_name

TIMES = {"time", *DIM_ALIASES["time"]}
GLOBE = {name for dim in HORIZONTAL for name in (dim, *DIM_ALIASES[dim])}
# Words of names of fields, one of several, that can be zero all over a chunk: at night, over land,
# in the dry.
ZERO = re.compile(
    r"(^|_)(precipitation|rain|snow|snowfall|snowmelt|hail|ice|cloud|radiation|solar|insolation|"
    r"runoff|evaporation|mask|cover|fraction|vegetation|lake|depth|reservoir|tp|cp|lsp|sf|sd|"
    r"siconc|lsm|tcc|lcc|mcc|hcc|clwc|ciwc|crwc|cswc|cc|ssrd|ssr|tsr|tisr|fdir|cape)(_|$)"
)


def open_zarr_dataset(where: str) -> tuple[xr.Dataset, CountingStore]:
    """The store at a path or address, version 2 or 3, consolidated or not, and its counter.

    Raises:
        UserError: there is nothing, or nothing that zarr can read.
    """
    disk = open_zarr_store(where)
    try:
        group = zarr.open_group(disk, mode="r")
        consolidated = group.metadata.consolidated_metadata is not None
        arrays = dict(group.arrays())
        blosc = [name for name, array in arrays.items() if _is_blosc(array)]
        whole = [name for name, array in arrays.items() if _must_be_complete(name, array)]
        store = CompleteStore(IntactStore(disk, blosc), whole)
        # Without dask: it would add milliseconds to each read.
        dataset = xr.open_zarr(
            store, chunks=None, consolidated=consolidated, decode_timedelta=False
        )
    except Exception as error:
        raise zarr_open_error(where, error) from error
    return dataset, disk


def _is_blosc(array: zarr.Array[Any]) -> bool:
    """Whether a chunk's file is a Blosc buffer."""
    codecs = array.compressors
    return array.shards is None and bool(codecs) and "Blosc" in type(codecs[-1]).__name__


def _must_be_complete(name: str, array: zarr.Array[Any]) -> bool:
    """Whether a missing chunk of an array can't have been left out on purpose."""
    if array.ndim < 2:  # coordinates are checked by their values
        return False
    fill = array.metadata.fill_value
    masks = [array.attrs.get(key) for key in ("_FillValue", "missing_value")]
    masked = fill is not None and (array.metadata.zarr_format == 2 or fill in masks)
    if masked or fill != fill:
        return _stores_global_fields(array)
    zero = not fill and not array.attrs.get("add_offset")
    static_in_one = not TIMES & set(_dims(array)) and array.nchunks == 1
    names = (name, *all_names_of(canonical_name(name)))
    return static_in_one or not (zero and any(map(ZERO.search, names)))


def _stores_global_fields(array: zarr.Array[Any]) -> bool:
    """Whether a file of the array holds whole fields: where one is missing, so is a whole field."""
    sizes = zip(_dims(array), array.shards or array.chunks, array.shape, strict=False)
    return all(chunk >= size for dim, chunk, size in sizes if dim in GLOBE)


def _dims(array: zarr.Array[Any]) -> list[str]:
    named = getattr(array.metadata, "dimension_names", None)
    return list(named or array.attrs.get("_ARRAY_DIMENSIONS", ()))  # type: ignore[arg-type]


ENDINGS = (".nc", ".nc4", ".netcdf", ".cdf")


@final
class RequestedBytesCounter:
    """Adds up the bytes of the values that are asked for, as they are stored.

    What the netCDF library reads for them, whole chunks, it does not say.
    """

    absent_chunks = 0

    def __init__(self) -> None:
        self._lock = Lock()
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.data_bytes = 0
        self.chunk_reads = 0

    def count_requested(self, size: int) -> None:
        """Count one read of `size` bytes."""
        with self._lock:
            self.data_bytes += size
            self.chunk_reads += 1


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No file that nobody uses any more is closed meanwhile, by whatever thread.

    xarray reads what a file says of its variables without holding its lock. The collector may run
    in another thread, such as zarr's, and the netCDF library crashes where one thread closes a
    file while another reads.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def is_netcdf(where: str) -> bool:
    """Whether this is the name of a netCDF file, not of a zarr store."""
    return where.lower().endswith(ENDINGS) and not local_path(where).is_dir()


def open_netcdf(where: str) -> tuple[xr.Dataset, RequestedBytesCounter]:
    """The file at a path of this machine, and its counter.

    xarray holds one lock of the whole process while the netCDF library works, which is not safe
    among threads.

    Raises:
        UserError: there is none, or none that can be read.
    """
    if is_remote(where):
        raise UserError(
            f"{redact_secrets(where)}: a netCDF file is read from a path of this machine only. "
            "Copy it, or set data.store to a zarr store."
        )
    path = local_path(where)
    if not path.exists():
        raise UserError(f"{where}: no such file. Set data.store to one that exists.")
    try:
        with no_garbage_collection():
            dataset = xr.open_dataset(path, engine="netcdf4", cache=False, decode_timedelta=False)
    except Exception as error:
        raise UserError(
            f"{where}: not a netCDF file that can be read ({reason_of(error)}). "
            "Set data.store to one."
        ) from error
    return dataset, RequestedBytesCounter()


ORDER = ("time", "level", "latitude", "longitude")
NEEDED = "it needs latitude and longitude, and no others but time and level"


class DatasetCounter(ReadCounter, Protocol):
    """What counts the reads of a dataset."""

    absent_chunks: int

    def reset(self) -> None:
        """Start counting from zero."""

    def count_requested(self, size: int) -> None:
        """So many bytes of values were asked for, as they are stored."""


@final
class GriddedSource(Source):
    """One dataset, zarr or netCDF, in the form of WeatherBench 2, ARCO-ERA5 or the CDS.

    One without a time axis has no times, and can only be a part of others.
    """

    def __init__(
        self,
        dataset: xr.Dataset,
        counter: DatasetCounter,
        where: str,
        static: Collection[str] = (),
    ) -> None:
        self.where = redact_secrets(where)
        model_levels, only_level = has_model_levels(dataset), scalar_level(dataset)
        dataset = standardise_dims(squeeze_other_dims(dataset), self.where)
        timed = "time" in dataset.dims
        check_coordinates(dataset, self.where, timed)
        times = dataset["time"].values if timed else np.empty(0)
        self.times: Times = times.astype("datetime64[ns]")
        latitude = dataset["latitude"].values.astype(np.float64)
        self._flipped = bool(latitude[0] < latitude[-1])
        self.latitude: NDArray[np.float64] = latitude[::-1] if self._flipped else latitude
        self.longitude: NDArray[np.float64] = dataset["longitude"].values.astype(np.float64)
        own = _variables(dataset, self.where, model_levels)
        self._names = StoredNames.of(own, static, only_level)
        self.variables: Mapping[str, VariableInfo] = self._names.variables
        self._dataset = dataset
        self._counter, self.counters = counter, [counter]
        self._address = where
        self.title = str(dataset.attrs.get("title", ""))
        self._change_detector = StoreChangeDetector(where, list(self.variables))
        counter.reset()

    @classmethod
    def open(cls, where: str, static: Collection[str] = ()) -> "GriddedSource":
        """Open the zarr store at a path or address, or the netCDF file at a path.

        Args:
            where: the path or address.
            static: names that are wanted as static fields, see `StoredNames.of`.

        Raises:
            UserError: there is none, or its coordinates are not as needed.
        """
        dataset: xr.Dataset
        counter: DatasetCounter
        dataset, counter = open_netcdf(where) if is_netcdf(where) else open_zarr_dataset(where)
        return cls(dataset, counter, where, static)

    def read(self, channels: Sequence[Channel], places: Indexer, rows: slice) -> Fields:
        """See `Source`: variable by variable."""
        parts = []
        stored = map(self._names.stored, channels)
        for name, of_name in groupby(stored, lambda channel: channel.variable):
            levels = [channel.level for channel in of_name if channel.level is not None]
            parts.append(self._read_variable(name, levels, places, rows))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`: the levels of a variable."""
        return [list(group) for _, group in groupby(channels, self._stored_variable)]

    def times_together(self, channel: Channel) -> int:
        """See `Source`."""
        array = self._dataset[self._stored_variable(channel)]
        given = array.encoding
        chunks = given.get("shards") or given.get("chunks") or given.get("chunksizes")
        # A netCDF variable that is not chunked can be read at any time without the others.
        return int(chunks[array.dims.index("time")]) if chunks else 1

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """See `Source`."""
        array = self._dataset[self._stored_variable(channel)]
        chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
        sizes = dict(zip(map(str, array.dims), map(int, chunks or ()), strict=bool(chunks)))
        time, level, rows, columns = (sizes.get(dim, 1) for dim in ORDER)
        return time, level, rows, columns

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """See `Source`; a netCDF file that is not chunked is named alone."""
        found = self._names.stored(channel)
        name, level = found.variable, found.level
        array = self._dataset[name]
        levels = self.variables[name].levels
        at = {
            "time": place,
            "level": 0 if level is None else levels.index(level),
            "latitude": self.grid[0] - 1 - row if self._flipped else row,
            "longitude": column,
        }
        given = array.encoding
        sizes = given.get("shards") or given.get("chunks") or given.get("chunksizes")
        if not sizes:
            return self.where
        pairs = zip(array.dims, sizes, strict=True)
        chunk = tuple(at[str(dim)] // int(size) for dim, size in pairs)
        if isinstance(self._counter, CountingStore):
            stored = zarr.open_array(self._counter, path=name, mode="r")
            left = list(zip(array.shape, chunk, strict=True))
            # Dims of length 1 have been left out.
            whole = [left.pop(0)[1] if left and left[0][0] == n else 0 for n in stored.shape]
            return f"{self.where}, chunk {name}/{stored.metadata.encode_chunk_key(tuple(whole))}"
        return f"{self.where}, chunk {chunk}"

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`."""
        described: list[object] = [resolved_address(self._address), version_stamp(self._address)]
        described += [self.latitude.tolist(), self.longitude.tolist()]
        for name in variables:
            for stored in self._names.stored_variables(name):
                array = self._dataset[stored]
                form = [list(map(str, array.dims)), list(array.shape), str(array.dtype)]
                described.append([name, *form] if stored == name else [name, stored, *form])
        return described

    def _stored_variable(self, channel: Channel) -> str:
        return self._names.stored(channel).variable

    def _read_variable(self, name: str, levels: list[int], places: Indexer, rows: slice) -> Fields:
        """`(T, levels, rows, W)`; one level or one time if the variable has no such dim."""
        height = self.grid[0]
        north, south, _ = rows.indices(height)
        stored = slice(height - south, height - north) if self._flipped else slice(north, south)
        array = self._dataset[name].variable
        selection: dict[str, Indexer] = {"latitude": stored}
        if "time" in array.dims:
            selection["time"] = places
        if "level" in array.dims:
            present = self.variables[name].levels
            selection["level"] = as_slice(np.array([present.index(level) for level in levels]))
        # The dims change place after reading, never while it: the disk sees the store's own order.
        values = self._read_selection(array, selection, name)
        missing = [dim for dim in ("time", "level") if dim not in array.dims]
        dims = [*missing, *map(str, array.dims)]
        values = values.reshape((1,) * len(missing) + values.shape)
        values = values.transpose([dims.index(dim) for dim in ORDER])
        fields = np.asarray(values, dtype=np.float32)
        return fields[:, :, ::-1] if self._flipped else fields

    def _read_selection(
        self, array: xr.Variable, selection: dict[str, Indexer], name: str
    ) -> NDArray[np.generic]:
        """What is selected, in the store's order of dims and type.

        Raises:
            UserError: it can't be read, or the store has changed.
        """
        absent = self._counter.absent_chunks
        try:
            values = self._read_counted(array, selection)
        except MemoryError:
            raise
        except Exception as error:
            self._change_detector.check()
            if "time" not in array.dims:
                raise unreadable_error(self.where, name, None, error) from error
            return self._read_time_by_time(array, selection, name)
        self._change_detector.after_read(self._counter.absent_chunks > absent)
        return values

    def _read_time_by_time(
        self, array: xr.Variable, selection: dict[str, Indexer], name: str
    ) -> NDArray[np.generic]:
        """Time by time, to find the one that can't be read, or to read all at a second attempt."""
        fields = []
        for time in np.arange(len(self.times))[selection["time"]].tolist():
            try:
                one = selection | {"time": slice(time, time + 1)}
                fields.append(self._read_counted(array, one))
            except Exception as error:
                raise unreadable_error(self.where, name, self.times[time], error) from error
        return np.concatenate(fields, axis=array.dims.index("time"))

    def _read_counted(
        self, array: xr.Variable, selection: dict[str, Indexer]
    ) -> NDArray[np.generic]:
        selected = array.isel(selection)
        values: NDArray[np.generic] = selected.values
        stored = array.encoding.get("dtype") or array.dtype
        self._counter.count_requested(selected.size * np.dtype(stored).itemsize)
        return values


def _variables(dataset: xr.Dataset, where: str, model_levels: bool) -> dict[str, VariableInfo]:
    """All variables, also those that can't be read."""
    levels = _levels(dataset, where)
    found = {}
    for name, array in dataset.data_vars.items():
        dims = list(map(str, array.dims))
        found[str(name)] = VariableInfo(
            timed="time" in dims,
            levels=levels if "level" in dims else (),
            units=str(array.attrs.get("units", "")).strip(),
            standard_name=str(array.attrs.get("standard_name", "")),
            problem=_problem(array, dims),
            model_levels=model_levels and "level" in dims,
        )
    return found


def _problem(array: xr.DataArray, dims: list[str]) -> str:
    if not {"latitude", "longitude"} <= set(dims) <= set(ORDER):
        return f"has the dims {', '.join(dims) or 'none'}: {NEEDED}"
    if array.dtype.kind not in "fiub":
        return f"holds values of the type {array.dtype}, not numbers"
    return ""


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
    numbers = np.issubdtype(values.dtype, np.number) and np.isfinite(values).all()
    if not numbers or (values != values.astype(int)).any():
        raise UserError(
            f"{where}: levels must be whole numbers, but are {values.tolist()}. Change data.store."
        )
    if len(set(values.tolist())) < len(values):
        raise UserError(f"{where}: a level comes twice: {values.tolist()}. Change data.store.")
    return tuple(int(level) for level in values)
