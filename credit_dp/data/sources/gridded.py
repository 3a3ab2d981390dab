"""Reads stores with one array per variable: zarr groups and netCDF files.

The form is that of WeatherBench 2, ARCO-ERA5 or the CDS. xarray opens the store and decodes its
values (`open_zarr_dataset`, `open_netcdf`), without dask; `GriddedSource` reads it.
"""

import logging
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, final

import cftime
import fsspec
import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from xarray.backends import CachingFileManager, NetCDF4DataStore
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK
from zarr.abc.store import Store

from credit_dp.data.calendar import Times, calendar_of, decode_dates
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray, Grid
from credit_dp.data.sources.address import (
    first_bytes,
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
    zarr_open_error,
)
from credit_dp.data.sources.coordinates import (
    HORIZONTAL,
    MEMBER,
    MEMBER_DIMS,
    NAMES,
    check_coordinates,
    find_coordinates,
    grid_of_lines,
    has_model_levels,
    in_dim_order,
    number_members,
    projected_grid,
    scalar_level,
    squeeze_other_dims,
    standardise_dims,
    whole_number_levels,
    with_points,
)
from credit_dp.data.sources.grib_file import is_grib, open_grib
from credit_dp.data.sources.names import StoredNames
from credit_dp.data.sources.rows import CellRows
from credit_dp.data.sources.source import (
    TIME_BOUNDS,
    Indexer,
    ReadCounter,
    Source,
    VariableInfo,
    as_slice,
)
from credit_dp.data.sources.storage import (
    CompleteStore,
    CountingStore,
    IntactStore,
    StoreChangeDetector,
    open_current_group,
    open_zarr_store,
    resolved_address,
    unreadable_error,
    version_stamp,
)
from credit_dp.data.sources.sums import GRIB_STEPS, read_time_bounds, stated_sums
from credit_dp.data.sources.virtual import (
    ReferenceStore,
    chunk_files,
    has_chunks_in_files,
    is_icechunk,
    is_reference,
)
from credit_dp.data.sources.wrf import STAGGERED, with_cf_coordinates
from credit_dp.data.units import CONVERSIONS, UNSPECIFIED_UNITS, canonical_unit
from credit_dp.data.winds import stated_name
from credit_dp.errors import UserError
from credit_dp.process import no_garbage_collection
from credit_dp.variable_names import all_names_of, canonical_name

TIMES = {*NAMES["time"]}
VERTICAL = {*NAMES["level"]}
# Words in the names of fields that can be zero throughout a chunk: at night, over land, in dry air.
# zarr may leave such a chunk out when it writes, so that its absence is no sign of damage.
ZERO = re.compile(
    r"(^|_)(precipitation|rain|snow|snowfall|snowmelt|hail|ice|cloud|radiation|solar|insolation|"
    r"runoff|evaporation|mask|cover|fraction|vegetation|lake|depth|reservoir|tp|cp|lsp|sf|sd|"
    r"siconc|lsm|tcc|lcc|mcc|hcc|clwc|ciwc|crwc|cswc|cc|ssrd|ssr|tsr|tisr|fdir|cape)(_|$)"
)
YEAR_OF_UNITS = re.compile(r" since \D*(\d+)-")
PACKING = ("scale_factor", "add_offset")
COMPARED_FILES = 256  # whose chunks an array has: opening them takes seconds
NAMES_OF_DIMS = "_ARRAY_DIMENSIONS"  # attribute of arrays of format 2

_compared: set[tuple[str, str]] = set()  # stores, which workers open again and again


def open_zarr_dataset(where: str) -> tuple[xr.Dataset, CountingStore]:
    """Open a zarr store of format 2 or 3, consolidated or not, with a counter of its reads."""
    counting_store = open_zarr_store(where)
    consolidated = False
    undated = partial(xr.open_zarr, counting_store, chunks=None)
    try:
        group = open_current_group(counting_store, where)
        # Passed to xarray, which would try both otherwise, and warn.
        consolidated = group.metadata.consolidated_metadata is not None
        undated = partial(undated, consolidated=consolidated)
        arrays = dict(group.arrays())
        nameless = next((name for name, array in arrays.items() if _lacks_names(array)), None)
        if nameless is not None:
            raise UserError(
                f"{redact_secrets(where)}: needs names of the dims of each array, but {nameless} "
                "has none. Write it again from xarray, or change data.store."
            )
        required = [name for name, array in arrays.items() if _must_be_complete(name, array)]
        store = CompleteStore(IntactStore(counting_store, arrays), required)
        # Without dask: it would add milliseconds to each read.
        # decode_timedelta: durations, such as sunshine in seconds, have to stay numbers.
        with all_dates():
            dataset = xr.open_zarr(
                store, chunks=None, consolidated=consolidated, decode_timedelta=False
            )
        check_dates(where, dataset, undated)
        if is_reference(where) or is_icechunk(where):
            _check_chunk_files(where, counting_store._store, arrays)
    except UserError:
        raise
    except Exception as error:
        raise dates_error(where, undated) or zarr_open_error(where, error) from error
    return with_points(dataset, where), counting_store


def _check_chunk_files(where: str, store: Store, arrays: Mapping[str, zarr.Array[Any]]) -> None:
    """Refuse chunks of files that store a variable in different ways, as an array has only one.

    Local netCDF files are compared, evenly spaced ones of many. Messages of GRIB need no check:
    each says how it is packed.
    """
    version = where, version_stamp(where)
    if version in _compared:
        return
    addresses, are_all = chunk_files(store, COMPARED_FILES)
    names = [name for name, array in arrays.items() if array.ndim > 1]
    # Times of several files, unless they were joined in the store itself.
    lines = [x for x, array in arrays.items() if array.ndim == 1 and array.nchunks > 1]
    names += [x for x in lines if addresses and has_chunks_in_files(store, x)]
    first: dict[str, tuple[str, dict[str, str]]] = {}
    checked = 0
    for address in addresses if len(addresses) > 1 else []:
        if is_remote(address) or (isinstance(store, ReferenceStore) and not store.allows(address)):
            continue
        path = Path(fsspec.url_to_fs(address)[1])  # as fsspec finds the file
        if not path.is_file() or not begins_as_netcdf(path):
            checked += path.is_file() and is_grib(path)
            continue
        try:
            variables = open_shared_netcdf(path, cache=False, decode_cf=False).variables
        except OSError:  # who reads it reports what is wrong
            continue
        found = {name: _storage_form(variables[name]) for name in names if name in variables}
        checked += bool(found)
        for name, form in found.items():
            other, expected = first.setdefault(name, (address, form))
            for key, value in form.items():
                if value != expected.get(key):
                    raise UserError(
                        f"{redact_secrets(where)}: {name} needs the same {key} in all files that "
                        f"its chunks are in, but has {expected.get(key, 'none')} in {other} and "
                        f"{value} in {address}. Set data.store to the files themselves."
                    )
    is_packed = any({*PACKING} & {*arrays[name].attrs} for name in names)
    are_all = are_all and (len(addresses) <= 1 or checked == len(addresses))
    if is_packed and not are_all:
        logger.warning(
            "%s: compared the packing (%s) of %d of the files that its chunks are in, not of all; "
            "values of others are wrong if theirs differs",
            redact_secrets(where),
            " and ".join(PACKING),
            checked,
        )
    _compared.add(version)


def _storage_form(variable: xr.Variable) -> dict[str, str]:
    """Return what says which numbers the bytes of a variable, opened without decoding, are."""

    def numbers(*keys: str, default: float | None = None) -> str:
        given = {float(x) for key in keys for x in np.ravel(variable.attrs.get(key, []))}
        values = sorted(x for x in given if x == x) or ([] if default is None else [default])
        return " and ".join(map(str, values)) or "none"

    unit = canonical_unit(str(variable.attrs.get("units", "")))
    calendar = str(variable.attrs.get("calendar", "none"))
    others = {"dtype": str(variable.dtype), "units": unit or "none", "calendar": calendar}
    if variable.dtype.kind not in "iuf":
        return others
    return others | {
        "scale_factor": numbers("scale_factor", default=1.0),
        "add_offset": numbers("add_offset", default=0.0),
        "_FillValue": numbers("_FillValue", "missing_value"),
    }


@contextmanager
def all_dates() -> Iterator[None]:
    """Ignore xarray's warning of dates that numpy does not have with nanoseconds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unable to decode time axis", xr.SerializationWarning)
        yield


def check_dates(where: str, dataset: xr.Dataset, open_dataset: Callable[..., xr.Dataset]) -> None:
    """Refuse numbers that xarray takes for other dates without an error.

    One that is missing or infinite becomes the date that the units count from. Years in units are
    read right only if they have four digits.
    """
    for name, array in dataset.variables.items():
        year = YEAR_OF_UNITS.search(str(array.encoding.get("units", "")))
        if array.dtype.kind not in "OM" or array.ndim != 1 or not array.size or year is None:
            continue
        units, dates = array.encoding["units"], array.values
        if int(year[1]) > 9999:
            raise _undecodable(where, name, f"the units '{units}'")
        if array.dtype.kind == "M" and np.dtype(array.encoding.get("dtype", int)).kind != "f":
            continue  # a missing number is no date here, and no integer is infinite
        attributes = {"units": units, "calendar": array.encoding.get("calendar", "standard")}
        with all_dates():
            zero = xr.conventions.decode_cf_variable(name, xr.Variable("x", [0], attributes)).values
        if zero.dtype != dates.dtype or zero[0] not in dates:
            continue
        numbers = open_dataset(decode_times=False)  # not closed: others may have the same handle
        if not np.isfinite(numbers[name].values).all():
            raise UserError(
                f"{redact_secrets(where)}: {name} has missing or infinite values. Change "
                "data.store."
            )


def dates_error(where: str, open_dataset: Callable[..., xr.Dataset]) -> UserError | None:
    """Return an error that names the variable whose units can't be decoded to dates, if any."""
    try:
        dataset = open_dataset(decode_times=False)
    except Exception:  # noqa: BLE001 - the first failure says why
        return None
    with dataset:
        for name, variable in dataset.variables.items():
            units = str(variable.attrs.get("units", ""))
            if " since " not in units:
                continue
            calendar = str(variable.attrs.get("calendar", "standard"))
            try:
                xr.decode_cf(xr.Dataset({name: variable}), decode_timedelta=False)
            except (ValueError, OverflowError):
                problem = f"the units '{units}'"
                if not _are_decodable("days since 2000-01-01", calendar):
                    problem = f"the calendar '{calendar}'"
                elif _are_decodable(units, calendar):
                    largest = np.nanmax(np.abs(variable.values.astype(float)))
                    problem = f"values up to {largest:g} with the units '{units}'"
                return _undecodable(where, name, problem)
    return None


def _are_decodable(units: str, calendar: str) -> bool:
    try:
        cftime.num2date(0, units, calendar)
    except (ValueError, OverflowError):
        return False
    return True


def _undecodable(where: str, name: Hashable, problem: str) -> UserError:
    return UserError(
        f"{redact_secrets(where)}: {name} has {problem}, which xarray can't decode to dates. Give "
        f"it dates, as with xarray's dataset.assign_coords({name}=pandas.date_range('2000-01-01', "
        "periods=1460, freq='6h')), and write the store again."
    )


def _must_be_complete(name: str, array: zarr.Array[Any]) -> bool:
    """Whether a missing chunk of an array means damage: no writer would have left it out."""
    if array.ndim < 2:  # coordinates are checked by their values
        return False
    fill_value = array.metadata.fill_value
    masks = [array.attrs.get(key) for key in ("_FillValue", "missing_value")]
    # xarray masks the fill value of format 2; of format 3 it masks only what these attributes say.
    masked = fill_value is not None and (array.metadata.zarr_format == 2 or fill_value in masks)
    if masked or fill_value != fill_value:  # NaN
        return _stores_global_fields(array)
    fills_with_zero = not fill_value and not array.attrs.get("add_offset")
    is_static_in_one_chunk = not TIMES & set(_dims(array)) and array.nchunks == 1
    names = (name, *all_names_of(canonical_name(name)))
    return is_static_in_one_chunk or not (fills_with_zero and any(map(ZERO.search, names)))


def _stores_global_fields(array: zarr.Array[Any]) -> bool:
    """Whether each file holds global fields, so that a missing file loses a complete field."""
    sizes = zip(_dims(array), array.shards or array.chunks, array.shape, strict=False)
    others = {*TIMES, *VERTICAL, *MEMBER_DIMS}
    return all(chunk >= size for dim, chunk, size in sizes if dim not in others)


def _dims(array: zarr.Array[Any]) -> list[str]:
    names = getattr(array.metadata, "dimension_names", None)
    return list(names or array.attrs.get(NAMES_OF_DIMS, ()))  # type: ignore[arg-type]


def _lacks_names(array: zarr.Array[Any]) -> bool:
    """Whether an array has no names of its dims; xarray needs an empty list of scalars, too."""
    in_attributes = array.metadata.zarr_format == 2
    return len(_dims(array)) < array.ndim or (in_attributes and NAMES_OF_DIMS not in array.attrs)


logger = logging.getLogger(__name__)

NETCDF_SUFFIXES = (".nc", ".nc4", ".netcdf", ".cdf")
NETCDF_SIGNATURES = (b"CDF", b"\x89HDF")


@final
class RequestedBytesCounter:
    """Counts the bytes of requested values, in the type that they are stored in.

    The netCDF library reads complete chunks for them, but does not report how many.
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


def is_netcdf(where: str) -> bool:
    """Whether a path is named like a netCDF file, or is a file that begins as one, as WRF's."""
    path = local_path(where)
    if where.lower().endswith(NETCDF_SUFFIXES):
        return not path.is_dir()
    return not is_remote(where) and path.is_file() and begins_as_netcdf(path)


def begins_as_netcdf(path: Path) -> bool:
    """Whether a file begins as netCDF or HDF5."""
    return first_bytes(path, 4).startswith(NETCDF_SIGNATURES)


def open_netcdf(where: str) -> tuple[xr.Dataset, RequestedBytesCounter]:
    """Open a local netCDF file, with a counter of its reads.

    The netCDF library is not thread-safe: xarray holds one lock of the process while it works.
    """
    if is_remote(where):
        raise UserError(
            f"{redact_secrets(where)}: a netCDF file is read from a path of this machine only. "
            "Copy it, or set data.store to a zarr store."
        )
    path = local_path(where)
    if not path.exists():
        raise UserError(f"{path.absolute()}: no such file. Set data.store to one that exists.")
    undated = partial(open_shared_netcdf, path, cache=False)
    try:
        with all_dates():
            dataset = open_shared_netcdf(path, cache=False, decode_timedelta=False)
        check_dates(where, dataset, undated)
    except UserError:
        raise
    except Exception as error:
        raise dates_error(where, undated) or UserError(
            f"{where}: not a netCDF file that can be read ({reason_of(error)}). "
            "Set data.store to one."
        ) from error
    return with_points(with_cf_coordinates(dataset, where), where), RequestedBytesCounter()


def open_shared_netcdf(path: Path, **options: Any) -> xr.Dataset:
    """Open a netCDF file with xarray, with one handle for all who read it in this process.

    By default each opening has a handle of its own. HDF5 shares what it knows of a file's variables
    between handles, and a fill value that is a text can still refer to one that was closed: the
    next opening then crashes in the library.
    """
    import netCDF4  # not needed for zarr

    opener: Any = netCDF4.Dataset
    status = path.stat()
    # A file that was replaced is another one: those who read the old one keep its handle.
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    # xarray reads a file's metadata without holding its lock. The collector may close unused files
    # in any thread, such as zarr's, and the netCDF library crashes if one thread closes a file
    # while another one reads.
    with no_garbage_collection():
        manager: Any = CachingFileManager(
            opener,
            str(path.resolve()),
            mode="r",
            lock=NETCDF4_PYTHON_LOCK,
            manager_id=identity,
        )
        store: Any = NetCDF4DataStore(manager)  # type: ignore[no-untyped-call]
        return xr.open_dataset(store, **options)


ORDER = ("time", "level", "latitude", "longitude")
EXPVER = "expver"  # the dim of ERA5 and ERA5T, of which each time has values of one
STEP_ADVICE = (
    "its fields at the hours of forecasts (step) need a single dim of time. Select one, as in "
    "dataset.isel(step=0), convert the GRIB file with cfgrib's time_dims=['valid_time'], or set "
    "data.store to the GRIB file"
)
STAGGERED_ADVICE = "fields on edges of cells can't be used: average them to the centres first"
NEEDED = "it needs latitude and longitude, and no others but time, level and member"


class DatasetCounter(ReadCounter, Protocol):
    """Counts the reads of a dataset."""

    absent_chunks: int

    def reset(self) -> None:
        """Start counting from zero."""

    def count_requested(self, size: int) -> None:
        """Count `size` bytes of requested values, in the type that they are stored in."""


HYBRID_NAMES = ("hyai", "hybi")
REFERENCE_PRESSURE = 1e5  # Pa


def hybrid_coefficients(
    dataset: xr.Dataset,
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return a, in Pa, and b at the interfaces of model levels, from the top: `hyai` and `hybi`.

    ECMWF's files have a in Pa; those of CAM have it as a multiple of P0. Without a unit, numbers up
    to 1 are multiples. None if there are no coefficients, or none that can be used: a in another
    unit, pressures that don't rise, or levels that are numbered from the ground.

    Call this before `standardise_dims` renames the dims.
    """
    if not all(name in dataset.variables and dataset[name].ndim == 1 for name in HYBRID_NAMES):
        return None
    a, b = (np.asarray(dataset[name].values, np.float64) for name in HYBRID_NAMES)
    if a.shape != b.shape or not np.isfinite([a, b]).all():
        return None
    unit = canonical_unit(str(dataset[HYBRID_NAMES[0]].attrs.get("units", "")))
    if unit in UNSPECIFIED_UNITS:
        unit = "Pa" if np.abs(a).max(initial=0) > 1 else "1"
    if unit == "1":
        a = a * (float(dataset["P0"]) if "P0" in dataset.variables else REFERENCE_PRESSURE)
    elif unit != "Pa":
        if (unit, "Pa") not in CONVERSIONS:
            return None
        a = a * CONVERSIONS[unit, "Pa"][0]
    steps = np.diff(a + REFERENCE_PRESSURE * b)
    level = find_coordinates(dataset).get("level")
    if len(steps) and (steps < 0).all():
        a, b, steps = a[::-1], b[::-1], -steps[::-1]
        # Level 1 is the uppermost, so the numbers fall with the coefficients.
        if level is not None and (np.diff(dataset[level].values) > 0).any():
            return None
    return (a, b) if len(steps) and (steps > 0).all() else None


@final
class GriddedSource(Source):
    """A source that reads one zarr or netCDF dataset with one array per variable.

    A dataset without a time axis has no times; it can only be combined with others.
    """

    def __init__(
        self,
        dataset: xr.Dataset,
        counter: DatasetCounter,
        where: str,
        static: Collection[str] = (),
    ) -> None:
        self.where = redact_secrets(where)
        # Before the dims are renamed: the names say which levels they are.
        model_levels = has_model_levels(dataset)
        only_level = scalar_level(dataset)
        self.hybrid = hybrid_coefficients(dataset)
        self.time_bounds = read_time_bounds(dataset)
        sums_by = GRIB_STEPS if GRIB_STEPS in dataset.coords else TIME_BOUNDS
        stored = dataset
        dataset = squeeze_other_dims(dataset)
        grid = projected_grid(dataset)
        dataset, self._members = number_members(standardise_dims(dataset, self.where), stored)
        self.members = self._members
        timed = "time" in dataset.dims
        if "latitude" in dataset.dims and "longitude" in dataset.coords.keys() - dataset.dims:
            latitudes, longitudes = (dataset[x].values.astype(np.float64) for x in HORIZONTAL)
            self.cells = CellRows(latitudes, longitudes, self.where)
            grid = self.cells.grid
        check_coordinates(dataset, self.where, timed, grid)
        dates = dataset["time"].values if timed else np.empty(0, "M8[ns]")
        self.calendar = calendar_of(dates)
        self.times: Times = decode_dates(dates)
        grid = grid or grid_of_lines(dataset)
        self._flipped = grid.rises
        self.grid = grid.flipped() if self._flipped else grid
        bounds_by = "" if self.time_bounds is None else sums_by
        stored_variables = _variables(dataset, self.where, model_levels, bounds_by, grid)
        for name in _bounds_of_cells(stored) & stored_variables.keys():
            if stored_variables[name].problem:
                del stored_variables[name]
        self._names = StoredNames.of(stored_variables, static, only_level)
        self.variables: Mapping[str, VariableInfo] = self._names.variables
        if EXPVER in dataset.dims:
            if EXPVER in dataset.coords:
                dataset = dataset.sortby(EXPVER)  # 1 is ERA5, 5 is ERA5T
            logger.info(
                "%s: combines the versions along expver: ERA5 where it has values, otherwise ERA5T",
                self.where,
            )
        self._dataset = dataset
        self._counter = counter
        self.counters = [counter]
        self._address = where
        self.title = str(dataset.attrs.get("title", ""))
        self._change_detector = StoreChangeDetector(where, list(self.variables))
        counter.reset()

    @classmethod
    def open(cls, where: str, static: Collection[str] = ()) -> "GriddedSource":
        """Open the zarr store at a path or address, or the netCDF file at a path."""
        dataset: xr.Dataset
        counter: DatasetCounter
        dataset, counter = open_netcdf(where) if is_netcdf(where) else open_zarr_dataset(where)
        return cls(dataset, counter, where, static)

    @classmethod
    def open_grib(cls, where: str, static: Collection[str] = ()) -> "list[GriddedSource]":
        """Open the GRIB file at a path: a source for each variable and kind of level."""
        datasets = open_grib(local_path(where))
        return [cls(dataset, RequestedBytesCounter(), where, static) for dataset in datasets]

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read variable by variable."""
        if self.cells is not None:
            return self.cells.fields(self.read_values(channels, times, rows), rows)
        return self._read(channels, times, rows)

    def read_values(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        fields = self._read(channels, times, rows)
        values = fields.reshape(*fields.shape[:2], -1)
        return values if self.cells is None else self.cells.in_order(values, rows)

    def _read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read rows and columns `(T, C, rows, W)`, or cells `(T, C, n, 1)` as they are stored."""
        parts = []
        # Adjacent channels of one variable are one read, with several levels.
        stored_channels = map(self._names.stored_channel, channels)
        for name, run in groupby(stored_channels, lambda channel: channel.variable):
            levels = [channel.level for channel in run if channel.level is not None]
            parts.append(self._read_variable(name, levels, times, rows))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """The levels of a variable share chunks."""
        return [list(group) for _, group in groupby(channels, self._stored_variable)]

    def times_per_file(self, channel: Channel) -> int:
        array = self._dataset[self._stored_variable(channel)]
        encoding = array.encoding
        chunks = encoding.get("shards") or encoding.get("chunks") or encoding.get("chunksizes")
        # A netCDF variable that is not chunked can be read at any time without the others.
        return int(chunks[array.dims.index("time")]) if chunks else 1

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        array = self._dataset[self._stored_variable(channel)]
        chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
        sizes = dict(zip(map(str, array.dims), map(int, chunks or ()), strict=bool(chunks)))
        time, level, rows, columns = (sizes.get(dim, 1) for dim in ORDER)
        if self.cells is not None:
            rows, columns = self.cells.rows_touched(rows), self.grid[1]
        return time, level, rows, columns

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        """A netCDF file without chunks is named alone."""
        stored_channel = self._names.stored_channel(channel)
        name, level = stored_channel.variable, stored_channel.level
        array = self._dataset[name]
        levels = self.variables[name].levels
        indices = {
            "time": time,
            "level": 0 if level is None else levels.index(level),
            "latitude": self.grid[0] - 1 - row if self._flipped else row,
            "longitude": column,
            MEMBER: self._member,
        }
        if self.cells is not None:
            indices["latitude"] = self.cells.cell(row, column)
        encoding = array.encoding
        sizes = encoding.get("shards") or encoding.get("chunks") or encoding.get("chunksizes")
        if not sizes:
            return self.where
        pairs = zip(array.dims, sizes, strict=True)
        chunk = tuple(indices[str(dim)] // int(size) for dim, size in pairs)
        if isinstance(self._counter, CountingStore):
            array_on_disk = zarr.open_array(self._counter, path=name, mode="r")
            remaining = list(zip(array.shape, chunk, strict=True))
            # squeeze_other_dims() dropped dims of length 1: the file's key has them, with a 0.
            full_chunk = [
                remaining.pop(0)[1] if remaining and remaining[0][0] == length else 0
                for length in array_on_disk.shape
            ]
            key = array_on_disk.metadata.encode_chunk_key(tuple(full_chunk))
            return f"{self.where}, chunk {name}/{key}"
        return f"{self.where}, chunk {chunk}"

    def description(self, variables: Sequence[str]) -> list[object]:
        stored = [x for name in variables for x in self._names.stored_variables(name)]
        description: list[object] = [
            resolved_address(self._address),
            version_stamp(self._address, stored),
        ]
        description += self.grid.description()
        if self.members:
            description.append(list(self.members))
        for name in variables:
            for stored_name in self._names.stored_variables(name):
                array = self._dataset[stored_name]
                layout = [list(map(str, array.dims)), list(array.shape), str(array.dtype)]
                description.append(
                    [name, *layout] if stored_name == name else [name, stored_name, *layout]
                )
        return description

    @property
    def _member(self) -> int:
        several = self.members and len(self._members) > 1
        return self._members.index(self.members[0]) if several else 0

    def _stored_variable(self, channel: Channel) -> str:
        return self._names.stored_channel(channel).variable

    def _read_variable(
        self, name: str, levels: list[int], times: Indexer, rows: slice
    ) -> FieldArray:
        height = self.grid[0]
        north, south, _ = rows.indices(height)
        stored_rows = (
            slice(height - south, height - north) if self._flipped else slice(north, south)
        )
        if self.cells is not None:
            stored_rows = self.cells.cells(rows)
        array = self._dataset.variables[name]
        selection: dict[str, Indexer] = {"latitude": stored_rows}
        if "time" in array.dims:
            selection["time"] = times
        if "level" in array.dims:
            levels_in_store = self.variables[name].levels
            selection["level"] = as_slice(
                np.array([levels_in_store.index(level) for level in levels])
            )
        if MEMBER in array.dims:
            selection[MEMBER] = slice(self._member, self._member + 1)
        # The store is read in its own order of dims; they are reordered in memory, after the read.
        values = self._read_selection(array, selection, name)
        dims = list(map(str, array.dims))
        if EXPVER in dims:
            values = _combine_versions(values, dims.index(EXPVER))
            dims.remove(EXPVER)
        if MEMBER in dims:
            values = values.squeeze(dims.index(MEMBER))
            dims.remove(MEMBER)
        values = in_dim_order(values, dims, ORDER)
        fields = np.asarray(values, dtype=np.float32)
        return fields[:, :, ::-1] if self._flipped and self.cells is None else fields

    def _read_selection(
        self, array: xr.Variable, selection: dict[str, Indexer], name: str
    ) -> NDArray[np.generic]:
        """Read a selection, in the store's order of dims and in its type."""
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
        # Chunks that are suddenly absent are a sign of a store that is being rewritten.
        self._change_detector.after_read(self._counter.absent_chunks > absent)
        return values

    def _read_time_by_time(
        self, array: xr.Variable, selection: dict[str, Indexer], name: str
    ) -> NDArray[np.generic]:
        """Read each time by itself, to name the one that fails, or to succeed after all."""
        fields = []
        for time in np.arange(len(self.times))[selection["time"]].tolist():
            try:
                selected_time = selection | {"time": slice(time, time + 1)}
                fields.append(self._read_counted(array, selected_time))
            except Exception as error:
                raise unreadable_error(
                    self.where, name, self.calendar.text(self.times[time]), error
                ) from error
        return np.concatenate(fields, axis=array.dims.index("time"))

    def _read_counted(
        self, array: xr.Variable, selection: dict[str, Indexer]
    ) -> NDArray[np.generic]:
        selected = array.isel(selection)
        values: NDArray[np.generic] = selected.values
        dtype = array.encoding.get("dtype") or array.dtype
        self._counter.count_requested(selected.size * np.dtype(dtype).itemsize)
        return values


def _combine_versions(values: NDArray[Any], axis: int) -> NDArray[Any]:
    versions = np.moveaxis(values, axis, 0)
    combined: NDArray[Any] = versions[0]
    for other in versions[1:]:
        combined = np.where(np.isnan(combined), other, combined)
    return combined


def _bounds_of_cells(dataset: xr.Dataset) -> set[str]:
    """Return the names of all that has edges of cells: CF conventions, sections 7.1 and 7.4."""
    attributes = (x for array in dataset.variables.values() for x in (array.attrs, array.encoding))
    named = {str(x[key]) for x in attributes for key in ("bounds", "climatology") if key in x}
    return named | {str(name) for name in dataset if str(name).endswith(("_bnds", "_bounds"))}


def _variables(
    dataset: xr.Dataset, where: str, model_levels: bool | None, bounds_by: str, grid: Grid
) -> dict[str, VariableInfo]:
    """Return the metadata of all variables; if one can't be read, its `problem` says why."""
    levels = whole_number_levels(dataset, where, "data.store")
    horizontal = [name for name in HORIZONTAL if name in dataset.dims]
    variables = {}
    for name, array in dataset.data_vars.items():
        dims = list(map(str, array.dims))
        sums = stated_sums(array, bounds_by)
        variables[str(name)] = VariableInfo(
            has_time="time" in dims,
            levels=levels if "level" in dims else (),
            units=str(array.attrs.get("units", "")).strip(),
            standard_name=stated_name(str(name), array.attrs, grid),
            problem=_problem(array, dims, horizontal),
            model_levels=model_levels if "level" in dims else False,
            sums_stated_by=sums.by,
            sum_hours=sums.hours,
            has_members=MEMBER in dims,
        )
    return variables


def _problem(array: xr.DataArray, dims: list[str], horizontal: Sequence[str]) -> str:
    if not set(horizontal) <= set(dims) <= {*ORDER, EXPVER, MEMBER}:
        if "step" in dims:
            return f"has the dims {', '.join(dims)}: {STEP_ADVICE}"
        if any(dim.endswith(STAGGERED) for dim in dims):
            return f"has the dims {', '.join(dims)}: {STAGGERED_ADVICE}"
        return f"has the dims {', '.join(dims) or 'none'}: {NEEDED}"
    if array.dtype.kind not in "fiub":
        return f"holds values of the type {array.dtype}, not numbers"
    return ""
