"""Opens zarr groups and netCDF files with xarray, which decodes their values, without dask.

`open_zarr_dataset` and `open_netcdf` return a dataset and a counter of its reads. They refuse what
xarray would read wrongly: dates (`check_dates`) and chunks of files that are packed differently.
"""

import logging
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, final

import cftime
import fsspec
import numpy as np
import xarray as xr
import zarr
from xarray.backends import CachingFileManager, NetCDF4DataStore
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK
from zarr.abc.store import Store

from credit_dp.data.sources.address import (
    first_bytes,
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
    zarr_open_error,
)
from credit_dp.data.sources.coordinates import MEMBER_DIMS, NAMES, with_points
from credit_dp.data.sources.grib_file import is_grib
from credit_dp.data.sources.source import ReadCounter
from credit_dp.data.sources.storage import (
    CompleteStore,
    CountingStore,
    IntactStore,
    open_current_group,
    open_zarr_store,
    version_stamp,
)
from credit_dp.data.sources.virtual import (
    ReferenceStore,
    chunk_files,
    has_chunks_in_files,
    is_icechunk,
    is_reference,
)
from credit_dp.data.sources.wrf import with_cf_coordinates
from credit_dp.data.units import canonical_unit
from credit_dp.errors import UserError
from credit_dp.process import no_garbage_collection
from credit_dp.variable_names import all_names_of, canonical_name

logger = logging.getLogger(__name__)

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


NETCDF_SUFFIXES = (".nc", ".nc4", ".netcdf", ".cdf")
NETCDF_SIGNATURES = (b"CDF", b"\x89HDF")


class DatasetCounter(ReadCounter, Protocol):
    """Counts the reads of a dataset."""

    absent_chunks: int

    def reset(self) -> None:
        """Start counting from zero."""

    def count_requested(self, size: int) -> None:
        """Count `size` bytes of requested values, in the type that they are stored in."""


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
