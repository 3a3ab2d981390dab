"""GRIB files, which cfgrib reads: their messages one at a time, or as datasets of xarray.

What cfgrib and ecCodes lack is here. They take points that are listed by columns, or from the east,
for rows from the west, and longitudes that begin east of 0 for others; points on a projection are
where ecCodes has them only if they begin in the southwest, on a sphere (`GribField`). cfgrib stops
at a file that is cut off, and knows no checksums.

The messages of a file are listed once, in memory. cfgrib's own index is a pickle, which can run any
code when it is loaded, and could be replaced by others where it is kept.
"""

import atexit
import os
import sys
import zlib
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.grid import COORDINATE_TOLERANCE, FULL_CIRCLE, Degrees
from credit_dp.data.projections import Cone, unrotated
from credit_dp.data.sources.address import first_bytes, reason_of
from credit_dp.data.sources.coordinates import GRID_TYPES, with_grid_mapping
from credit_dp.data.sources.grib_names import (
    MODEL,
    PRESSURE,
    SINGLE,
    SINGLE_LEVEL_TYPES,
    message_name,
)
from credit_dp.data.sources.sums import GRIB_HOURS, GRIB_STEPS
from credit_dp.data.winds import GRIB_FLAG
from credit_dp.errors import UserError, counted, install_extra

# ecCodes from PyPI may be built without its own locks, and threads read and write here.
LIBRARY_LOCK = Lock()
# GRIB has no checksums, and any bytes decode to some field. Messages that are written here have one
# in section 2, which is for local use and which other programs skip.
CHECKSUM_MARK: Final = b"credit_dp crc32 "
HEADER_LENGTH = 16  # bytes of section 0, which end with the length of the message
GAUSSIAN = "regular_gg"
GRIDS = ("regular_ll", GAUSSIAN)  # rows of equally many points
REDUCED = "reduced_gg"  # rows of fewer points near the poles
ROTATED = "rotated_ll"
PROJECTIONS = ("lambert", "polar_stereographic", ROTATED)
ADVICE = (
    "Request it on a regular grid of latitudes and longitudes, or convert it, for example with "
    "`cdo -setgridtype,regular` (reduced grids) or `cdo -sp2gpl` (spectral fields)"
)
# The order of points: westward, northward, by columns, and every second line backwards.
SCANNING_KEYS = (
    *("iScansNegatively", "jScansPositively"),
    *("jPointsAreConsecutive", "alternativeRowScanning"),
)
# Bits of edition 2's scanning mode: every second line begins half a step further, or the like.
STAGGERED = 0b1111
LARGEST_GRID = 10**9  # points; the globe at steps of 0.01 degrees has 648 million
UNCOMPRESSED = ("grid_simple", "grid_ieee")  # packings with equally many bits for each value
# Keys that are read when a file is opened: cfgrib's, and
TIME_KEYS = ("time", "valid_time", "validityDate", "validityTime")
# sums, means and extremes cover the hours between these steps of a forecast;
STEP_KEYS = ("startStep:int", "endStep:int", "stepUnits:int")
# cfgrib needs a dataset for each of their values;
COMMON_KEYS = (
    *("paramId", "typeOfLevel", "stepType", "dataType", "gridType", "md5GridSection"),
    *("numberOfPoints", "uvRelativeToGrid", "edition", "centre", "subCentre"),
)
# they tell the fields of such a dataset apart;
FIELD_KEYS = ("valid_time", "level:float", "number", "directionNumber", "frequencyNumber")
NAME_KEYS = ["shortName", "units"]
# Flag table 3.3 says how winds lie; not all grids of edition 2 have ecCodes' uvRelativeToGrid.
COMPONENT_FLAGS, ALONG_GRID = "resolutionAndComponentFlags", 8
UNKNOWN = "undef"  # what cfgrib's index has for a key that a message lacks

Header = Mapping[str, Any]
GridOfFields = tuple[Degrees, Degrees, Sequence[int]]


@cache
def load_eccodes(key: str) -> Any:
    """Return the package that codes GRIB."""
    # Each brings its own copy of PROJ's C library: pyproj fails, and Python crashes at its end, if
    # it is imported after ecCodes, which xarray loads with cfgrib. Nothing here needs pyproj.
    if "eccodes" not in sys.modules:
        with suppress(ImportError):
            import pyproj  # noqa: F401
    try:
        import cfgrib  # noqa: F401 (with ecCodes)
        import eccodes
    except (ImportError, RuntimeError) as error:  # RuntimeError: without its C library
        raise UserError(
            f"{key}: GRIB needs ecCodes and cfgrib, which can't be loaded ({error}). "
            f"{install_extra('grib')}."
        ) from error
    # It would print its own lines; the errors that it raises have the same reason. The C library
    # keeps using the file.
    log = open(os.devnull, "w")  # noqa: SIM115
    atexit.register(log.close)
    eccodes.codes_context_set_logging(log)
    return eccodes


def is_grib(path: Path) -> bool:
    """Whether a file begins as GRIB; a bulletin's header may come first."""
    return b"GRIB" in first_bytes(path, 128)


def with_checksum(message: bytes) -> bytes:
    """Return a message of edition 2 with the checksum of its sections in a section for local use.

    Args:
        message: without a section for local use.
    """
    end = HEADER_LENGTH + int.from_bytes(message[HEADER_LENGTH : HEADER_LENGTH + 4])  # of section 1
    checksum = zlib.crc32(message[HEADER_LENGTH:]).to_bytes(4)
    content = b"\x02" + CHECKSUM_MARK + checksum
    section = (4 + len(content)).to_bytes(4) + content
    length = (len(message) + len(section)).to_bytes(8)
    return message[:8] + length + message[HEADER_LENGTH:end] + section + message[end:]


def _check_sum(message: bytes) -> None:
    """Compare a message with its checksum, if it has one.

    Raises:
        ValueError: they differ.
    """
    end = HEADER_LENGTH + int.from_bytes(message[HEADER_LENGTH : HEADER_LENGTH + 4])
    mark = end + 5  # after the length and the number of section 2
    start = mark + len(CHECKSUM_MARK) + 4
    if message[7] != 2 or message[mark : start - 4] != CHECKSUM_MARK:
        return
    checksum = zlib.crc32(message[start:], zlib.crc32(message[HEADER_LENGTH:end]))
    if checksum != int.from_bytes(message[start - 4 : start]):
        raise ValueError("its checksum is wrong")


def _check_size(eccodes: Any, message: Any) -> None:
    """Refuse numbers of points that other parts of a message contradict.

    Check them before anything is decoded: ecCodes takes memory for as many, and ends the process if
    there is none.

    Raises:
        ValueError: says which numbers don't fit.
    """
    grid, length = message["gridType"], message["totalLength"]
    with_rows = grid in {*GRIDS, *PROJECTIONS}
    points = message["Ni"] * message["Nj"] if with_rows else message["numberOfDataPoints"]
    bits = message["bitsPerValue"] if message["packingType"] in UNCOMPRESSED else 0
    bits = 1 if message["bitmapPresent"] else bits
    if points > LARGEST_GRID or points * bits > 8 * length:
        raise ValueError(f"{points} points are too many for {length} bytes")
    count = eccodes.codes_get_size(message.codes_id, "values")
    coded = message["numberOfValues"]  # fewer with a bitmap
    if count != points or coded > points:
        raise ValueError(f"it has {max(count, coded)} values on {points} points")
    if grid in (GAUSSIAN, REDUCED):
        first, last = (message[f"latitudeOf{x}GridPointInDegrees"] for x in ("First", "Last"))
        steps, rows = abs(first - last) / 90 * message["N"], message["Nj"]
        if rows > 1 and not 0.8 < steps / (rows - 1) < 1.25:
            raise ValueError(f"its {rows} rows do not fit N{message['N']}")


def _check_points(message: Any, where: str) -> None:
    """Refuse points that `GribField` would have elsewhere."""
    grid, problem = message["gridType"], ""
    has_mode = message["edition"] == 2 and grid in {*GRIDS, *PROJECTIONS}
    if grid == REDUCED and any(message[key] for key in SCANNING_KEYS):
        problem = "a reduced Gaussian grid whose points are not eastward, row by row from the north"
    elif grid == ROTATED and message["angleOfRotationInDegrees"]:
        problem = "a rotated grid that is turned about its pole (angleOfRotation)"
    elif has_mode and message["scanningMode"] & STAGGERED:
        problem = "rows or columns that are staggered"
    elif grid != ROTATED and ("rotated" in grid or "stretched" in grid):
        problem = f"a rotated or stretched grid ({grid}), whose points ecCodes does not compute"
    if problem:
        raise UserError(f"{where} has {problem}. {ADVICE}.")


@final
class GribField(Mapping[str, Any]):
    """The keys of a message whose points are rows from the north, eastward.

    Those of a projection are rows from the upper edge of its plane, rightward.
    """

    def __init__(self, message: Any) -> None:
        self._message = message
        self._is_projected = message["gridType"] in PROJECTIONS
        self._has_rows = self._is_projected or message["gridType"] in GRIDS

    def __getitem__(self, key: str) -> Any:
        if self._has_rows:
            if key == "values":
                return self._values()
            if key == "distinctLatitudes" and self._message["gridType"] == GAUSSIAN:
                return np.sort(self._message[key])[::-1]
            if key == "distinctLatitudes":
                return _rows(self._message)
            if key == "distinctLongitudes":
                return _columns(self._message)
            if key == "alternativeRowScanning":
                return 0
        if self._is_projected and key in ("latitudes", "longitudes"):
            return self._points[key == "longitudes"]
        return self._message[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._message)

    def __len__(self) -> int:
        return len(self._message)

    def _values(self) -> NDArray[np.float64]:
        westward, northward, by_columns, zigzag = (self._message[key] for key in SCANNING_KEYS)
        shape = self._message["Nj"], self._message["Ni"]
        field: NDArray[np.float64] = self._message["values"]
        field = field.reshape(shape[::-1] if by_columns else shape)
        if zigzag:
            field[1::2] = field[1::2, ::-1].copy()
        field = field.T if by_columns else field
        return field[:: -1 if northward else 1, :: -1 if westward else 1]

    @cached_property
    def _points(self) -> tuple[Degrees, Degrees]:
        """The latitudes and longitudes of points on a projection, `(H, W)`."""
        message = self._message
        if message["gridType"] == ROTATED:
            pole = [message[f"{axis}OfSouthernPoleInDegrees"] for axis in ("latitude", "longitude")]
            rows, columns = _rows(message), _columns(message)
            latitude, longitude = unrotated(rows[:, None], columns, (pole[0], pole[1]))
        else:
            cone = Cone.of(_grid_mapping(self))
            first = (
                message[f"{axis}OfFirstGridPointInDegrees"] for axis in ("latitude", "longitude")
            )
            x, y = cone.forward(*first)
            westward, northward = (message[key] for key in SCANNING_KEYS[:2])
            right, down = message["DxInMetres"], message["DyInMetres"]
            columns = x + right * (np.arange(message["Nx"]) - westward * (message["Nx"] - 1))
            rows = y - down * (np.arange(message["Ny"]) - northward * (message["Ny"] - 1))
            latitude, longitude = cone.inverse(columns, rows[:, None])
        return latitude, longitude % FULL_CIRCLE


def _rows(message: Any) -> Degrees:
    """Return latitudes at equal steps, from the north; on a rotated grid its own."""
    north, south = (message[f"latitudeOf{x}GridPointInDegrees"] for x in _ends(message, "j"))
    _check_step(message, "j", north - south)
    return np.linspace(north, south, message["Nj"])


def _columns(message: Any) -> Degrees:
    """Return longitudes at equal steps, eastward; on a rotated grid its own."""
    west, east = (message[f"longitudeOf{x}GridPointInDegrees"] for x in _ends(message, "i"))
    columns = message["Ni"]
    width = (east - west) % FULL_CIRCLE or FULL_CIRCLE
    _check_step(message, "i", width)
    step = width / max(columns - 1, 1)
    if abs(columns * step - FULL_CIRCLE) <= COORDINATE_TOLERANCE:  # GRIB 1 has 357.188 for 357.1875
        step = FULL_CIRCLE / columns
    longitude: Degrees = west + step * np.arange(columns)
    return longitude - FULL_CIRCLE if longitude[-1] >= FULL_CIRCLE else longitude


def _ends(message: Any, axis: str) -> list[str]:
    """Return which point is northernmost or westernmost, and which is at the other end."""
    backwards = message["iScansNegatively" if axis == "i" else "jScansPositively"]
    return ["Last", "First"] if backwards else ["First", "Last"]


def _check_step(message: Any, axis: str, distance: float) -> None:
    """Compare the distance of the outermost points with the step that a message gives, if any.

    Steps and outermost points are whole thousandths of degrees in GRIB 1, and in messages that were
    converted from it.

    Raises:
        ValueError: they don't fit.
    """
    count, step = message[f"N{axis}"], message[f"{axis}DirectionIncrementInDegrees"]
    tolerance = COORDINATE_TOLERANCE * count / max(count - 1, 1)
    if count > 1 and step > 0 and abs(distance / (count - 1) - step) > tolerance:
        lines = "rows" if axis == "j" else "columns"
        raise ValueError(
            f"{count} {lines} over {distance:g} degrees do not fit its steps of {step:g} degrees"
        )


class Message(NamedTuple):
    """The header of a field.

    Attributes:
        kind: `PRESSURE`, `MODEL` or `SINGLE`.
        name: ecCodes' short name; see `message_name`.
        level: in hPa or the number of a model level; 0 on other levels.
        member: of an ensemble; 0 without.
        initial: when the forecast started; the time of an analysis.
        hours: lead time; half an hour is 0.5.
        valid: the time of the field.
        unit: of the values.
        offset: in the file; of fields that share a message with their number.
    """

    kind: str
    name: str
    level: int
    member: int
    initial: np.datetime64
    hours: float
    valid: np.datetime64
    unit: str
    offset: Any


@final
class GribFile(Mapping[Any, Any]):
    """The fields of a GRIB file of edition 1 or 2 by their offset, in the form that cfgrib indexes.

    `items` gives keys that have been read, so that the file is not read again for each dataset.

    Args:
        headers: the keys of each field; fields of equal keys follow each other.
        complete: whether the file ends after the last field; False if it is cut off or damaged.
    """

    def __init__(
        self, path: Path, key: str, headers: Mapping[Any, Header], complete: bool = True
    ) -> None:
        self.path = path
        self.key = key
        self.headers = headers
        self.complete = complete
        self._along_grid: dict[str, bool] = {}  # by grid, whose section has the flag

    @classmethod
    def open(cls, path: Path, key: str, named: bool = True, cut_off: bool = False) -> "GribFile":
        """List the fields of a file, of which several may share a message.

        Args:
            named: whether `messages` will be called; short names and units take long to find.
            cut_off: whether a file that is cut off after some messages is opened, too.
        """
        eccodes = load_eccodes(key)
        import cfgrib

        keys = [*{*cfgrib.compute_index_keys(TIME_KEYS), *COMMON_KEYS, *STEP_KEYS}]
        keys += NAME_KEYS if named else []
        problem = ""

        def messages() -> Iterator[Any]:
            nonlocal problem
            grid, end = None, 0
            try:
                for offset, message in cfgrib.FileStream(str(path), errors="raise").items():
                    # Damage in other sections is found when the field is read.
                    previous, grid = grid, message.get("md5GridSection")
                    if grid != previous:
                        _check_sum(eccodes.codes_get_message(message.codes_id))
                        _check_points(message, f"{key}: {path}")
                    for time in ("time", "valid_time"):
                        cfgrib.COMPUTED_KEYS[time][0](message)  # a ValueError without such a date
                    end = message["offset:int"] + message["totalLength"]
                    yield offset, message
                with path.open("rb") as file:
                    file.seek(end)
                    if b"GRIB" in file.read():
                        # For ecCodes a message whose sections it can't find is the end of the file.
                        raise ValueError("more messages follow, which can't be read")
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - of damaged bytes, of any kind
                problem = reason_of(error)

        with LIBRARY_LOCK:
            index = cfgrib.FieldsetIndex.from_fieldset_and_iteritems(
                None, messages(), keys, cfgrib.COMPUTED_KEYS
            )
        headers = {
            offset: dict(zip(keys, values, strict=True))
            for values, offsets in index.iter_index()
            for offset in offsets
        }
        if problem and not (cut_off and headers):
            raise UserError(
                f"{key}: {path} can't be read after {counted(len(headers), 'message')}: "
                f"{problem.rstrip('.')}. Fetch it again if it is cut off or damaged, or change "
                f"{key}."
            )
        return cls(path, key, headers, complete=not problem)

    def __getitem__(self, offset: Any) -> GribField:
        """Return a field, read from the file.

        Raises:
            ValueError: its checksum is wrong, or so are its numbers of points.
        """
        eccodes = load_eccodes(self.key)
        import cfgrib

        with self.path.open("rb") as file:
            message = cfgrib.Message.from_file(file, offset, errors="ignore")
        _check_sum(eccodes.codes_get_message(message.codes_id))
        _check_size(eccodes, message)
        return GribField(message)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    def items(self) -> ItemsView[Any, Any]:
        """Return the keys of each field."""
        return self.headers.items()

    def select(self, offsets: Sequence[Any]) -> "GribFile":
        """Return some of the fields."""
        return GribFile(self.path, self.key, {offset: self.headers[offset] for offset in offsets})

    def period(self, message: Message) -> int:
        """Return how many seconds a field covers; 0 at an instant."""
        return _period(self.headers[message.offset])

    def messages(self, *step_types: str) -> list[Message]:
        """Return the headers of fields of some types, on levels that a variable can be on."""
        fields = (x for x in self.headers.items() if x[1]["stepType"] in step_types)
        return [message for x in fields if (message := _message(*x)) is not None]

    def read_grid(self, reduced: bool = False, projected: bool = False) -> GridOfFields:
        """Return the grid of the fields: its latitudes, longitudes and row lengths.

        Latitudes, `(H,)`, fall; longitudes, `(W,)`, rise from the first; in degrees. Only a reduced
        grid has row lengths, `(H,)`; its longitudes are those of the longest row. On a projection
        both are of all points, `(H, W)`, and rows may rise.

        Args:
            reduced: whether it may be a reduced Gaussian grid, whose rows differ in length.
            projected: whether it may be on a projection.
        """
        where = f"{self.key}: {self.path}"
        # Sections of one grid differ in the order of points, or in the flag of winds.
        sections: dict[str, Any] = {}
        for offset, header in self.headers.items():
            sections.setdefault(header["md5GridSection"], offset)
        try:
            with LIBRARY_LOCK:
                grids = (
                    self._read_grid(self[offset], where, reduced, projected)
                    for offset in sections.values()
                )
                grid = next(grids)
                is_one = all(_are_one_grid(grid, other) for other in grids)
        except UserError:
            raise
        except Exception as error:  # of damaged bytes, of any kind
            raise UserError(
                f"{where}: its grid can't be read ({reason_of(error)}). Fetch the file again, or "
                f"change {self.key}."
            ) from error
        if not is_one:
            raise UserError(
                f"{where} has messages on more than one grid, or is damaged. Split it, for example "
                f"with `grib_copy`, fetch it again, or change {self.key}."
            )
        return grid

    @staticmethod
    def _read_grid(field: GribField, where: str, reduced: bool, projected: bool) -> GridOfFields:
        grid = field["gridType"]
        if grid in GRIDS:
            return field["distinctLatitudes"], field["distinctLongitudes"], ()
        if projected and grid in PROJECTIONS:
            return field["latitudes"], field["longitudes"], ()
        if not reduced or grid != REDUCED:
            name = "spectral" if grid == "sh" else GRID_TYPES.get(grid, grid)
            raise UserError(f"{where} has a {name} grid ({grid}). {ADVICE}.")
        lengths = [int(length) for length in field["pl"]]
        latitude = np.sort(field["distinctLatitudes"])[::-1]
        is_global = len(lengths) == len(latitude) and sum(lengths) == field["numberOfDataPoints"]
        if min(lengths) < 1 or not is_global:
            raise UserError(f"{where} has a reduced Gaussian grid that is not global. {ADVICE}.")
        longest = max(lengths)
        west = field["longitudeOfFirstGridPointInDegrees"]
        return latitude, west + FULL_CIRCLE / longest * np.arange(longest), lengths

    def has_winds_along_grid(self, message: Message) -> bool:
        """Whether winds on the grid of a message are along its axes."""
        section = self.headers[message.offset]["md5GridSection"]
        if section not in self._along_grid:
            with LIBRARY_LOCK:
                self._along_grid[section] = _has_winds_along_grid(self[message.offset])
        return self._along_grid[section]

    def read(self, message: Message) -> NDArray[np.float32]:
        """Decode one message: `(H, W)`, from north to south and eastward, NaN where missing.

        For a reduced grid these are the points of all rows, `(N,)`, in the same order; on a
        projection rows are those of `read_grid`.
        """
        try:
            with LIBRARY_LOCK:
                return _decode(self[message.offset])
        except Exception as error:
            raise UserError(
                f"{self.key}: {self.path}: {message.name} at {message.valid.astype('M8[m]')} can't "
                f"be decoded ({reason_of(error)}). Fetch the file again."
            ) from error


def _are_one_grid(first: GridOfFields, second: GridOfFields) -> bool:
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(first, second, strict=True)]
    return all(
        x.shape == y.shape and np.allclose(x, y, rtol=0, atol=COORDINATE_TOLERANCE)
        for x, y in pairs
    )


def _has_winds_along_grid(field: GribField) -> bool:
    return bool(field.get(COMPONENT_FLAGS, 0) & ALONG_GRID)


def _decode(field: GribField) -> NDArray[np.float32]:
    values = field["values"]
    return np.where(values == field["missingValue"], np.nan, values).astype(np.float32)


def _message(offset: Any, header: Header) -> Message | None:
    """Return the header of a field; None if it is on levels that no variable is on."""
    kind = level_type = header["typeOfLevel"]
    level = header["level:float"]
    if level_type == "isobaricInPa":
        kind, level = PRESSURE, level / 100
    if kind not in (PRESSURE, MODEL):
        kind = SINGLE
        if level_type not in SINGLE_LEVEL_TYPES:
            return None
    elif level != int(level):  # of the stratosphere, between whole hPa; no config has these
        return None
    member, hours = (0 if x == UNKNOWN else x for x in (header["number"], header["endStep"]))
    return Message(
        kind=kind,
        name=message_name(header["shortName"], kind, level_type, int(level)),
        level=0 if kind == SINGLE else int(level),
        member=int(member),
        initial=np.datetime64(header["time"], "s").astype("M8[ns]"),
        hours=float(hours),
        valid=np.datetime64(header["valid_time"], "s").astype("M8[ns]"),
        unit=header["units"],
        offset=offset,
    )


def open_grib(path: Path) -> list[xr.Dataset]:
    """Open a GRIB file: a dataset for each variable and kind of level.

    Fields are ordered by their valid time, whether they are analyses or forecasts. The times have
    bounds, by the steps of the messages.
    """
    fields = GribFile.open(path, "data.store", named=False)
    groups: dict[tuple[str, ...], list[Any]] = {}
    for offset, header in fields.items():
        groups.setdefault(tuple(str(header[key]) for key in COMMON_KEYS), []).append(offset)
    datasets = []
    for group in sorted(groups):
        # A sum over no time, as at the start of a forecast, says nothing of the time before.
        periods = [x for x in groups[group] if _period(fields.headers[x])]
        part = fields.select(periods or groups[group])
        try:
            with LIBRARY_LOCK:
                datasets.append(_open_fields(part))
        except Exception as error:
            raise UserError(
                f"{path}: not a GRIB file that can be read ({reason_of(error)}). Set data.store to "
                "one."
            ) from error
        _refuse_repeated_fields(part, min(map(str, datasets[-1].data_vars)), path)
    return datasets


def _open_fields(fields: GribFile) -> xr.Dataset:
    mapping: Any = fields  # of the types that xarray knows only those of files have a hint
    dataset = xr.open_dataset(
        mapping,
        engine="cfgrib",
        cache=False,
        cache_geo_coords=False,  # which has cfgrib's own if a file of this grid was opened before
        decode_timedelta=False,
        time_dims=("valid_time",),
        squeeze=False,
        errors="raise",
        lock=LIBRARY_LOCK,
    )
    for variable, array in dataset.data_vars.items():
        # A message, one field of the whole grid, is decoded at once.
        sizes = [
            size if dim in ("latitude", "longitude", "values", "y", "x") else 1
            for dim, size in array.sizes.items()
        ]
        dataset[variable].encoding["chunksizes"] = tuple(sizes)
    periods = {header["valid_time"]: _period(header) for header in fields.headers.values()}
    ends = dataset["valid_time"].values
    seconds = [periods[int(end)] for end in ends.astype("M8[s]").astype(int)]
    bounds = np.stack([ends - np.array(seconds, "m8[s]"), ends], axis=1)
    dataset["valid_time"].attrs["bounds"] = GRIB_STEPS
    dataset = dataset.assign_coords({GRIB_STEPS: (("valid_time", "bounds"), bounds)})
    for array in dataset.data_vars.values():
        array.attrs[GRIB_FLAG] = int(_has_winds_along_grid(fields[next(iter(fields))]))
    return with_projection(dataset, fields)


def with_projection(dataset: xr.Dataset, fields: GribFile) -> xr.Dataset:
    """Return a dataset with the projection of its dims y and x."""
    field = fields[next(iter(fields))]
    if field["gridType"] == ROTATED:
        axes = zip("yx", ("latitude", "longitude"), (_rows(field), _columns(field)), strict=True)
        dataset = dataset.assign_coords(
            {
                dim: (dim, axis, {"standard_name": f"grid_{name}", "units": "degrees"})
                for dim, name, axis in axes
            }
        )
    return with_grid_mapping(dataset, _grid_mapping(field), ("y", "x"))


def _grid_mapping(field: GribField) -> dict[str, Any]:
    """Return the attributes of CF's grid mapping; none without a projection.

    Source: CF conventions 1.11, appendix F; GRIB 2, templates 3.1, 3.20 and 3.30.
    """
    grid = field["gridType"]
    if grid not in PROJECTIONS:
        return {}
    of_earth = {"semi_major_axis": "earthMajorAxis", "semi_minor_axis": "earthMinorAxis"}
    if "earthMajorAxisInMetres" not in field:
        of_earth = {"earth_radius": "radius"}
    earth = {name: field[f"{key}InMetres"] for name, key in of_earth.items()}
    if grid == "lambert":
        return {
            "grid_mapping_name": "lambert_conformal_conic",
            "standard_parallel": [field[f"Latin{n}InDegrees"] for n in (1, 2)],
            "longitude_of_central_meridian": field["LoVInDegrees"],
            "latitude_of_projection_origin": field["LaDInDegrees"],
            **earth,
        }
    if grid == "polar_stereographic":
        pole = -90.0 if field["southPoleOnProjectionPlane"] else 90.0
        return {
            "grid_mapping_name": "polar_stereographic",
            # GRIB 1 has 60 at both poles.
            "standard_parallel": float(np.copysign(field["LaDInDegrees"], pole)),
            "straight_vertical_longitude_from_pole": field["orientationOfTheGridInDegrees"],
            "latitude_of_projection_origin": pole,
            **earth,
        }
    return {
        "grid_mapping_name": "rotated_latitude_longitude",
        "grid_north_pole_latitude": -field["latitudeOfSouthernPoleInDegrees"],
        "grid_north_pole_longitude": field["longitudeOfSouthernPoleInDegrees"] - 180,
        **earth,
    }


def _period(header: Mapping[str, Any]) -> int:
    """Return how many seconds a field covers; 0 at an instant, or if its steps are unknown."""
    start, end, unit = (header[key] for key in STEP_KEYS)
    known = unit in GRIB_HOURS and "undef" not in (start, end)
    if header["stepType"] == "instant" or not known:
        return 0
    return round(3600 * GRIB_HOURS[unit] * int(end - start))


def _refuse_repeated_fields(fields: GribFile, variable: str, path: Path) -> None:
    """Refuse two messages for one field at one time, of which cfgrib would read one."""
    seen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for header in fields.headers.values():
        key = tuple(header[key] for key in FIELD_KEYS)
        if key in seen:
            steps = [x["endStep"] for x in (seen[key], header)]
            time = np.datetime64(header["valid_time"], "s").astype("M8[m]")
            raise UserError(
                f"{path}: has {variable} at {time} more than once (steps of {steps[0]:g} and "
                f"{steps[1]:g} hours), as forecasts that overlap do. Select one field for each "
                "time, for example with `grib_copy -w`, or change data.store."
            )
        seen[key] = header
