"""GRIB: the codes of variables, and files whose messages are decoded one at a time.

`CODES` has the code of each variable that can be written, `OTHER_NAMES` what variables are called
in files; `GribFile` lists the messages of a file and decodes them. ecCodes does the coding; it is
loaded only when it is needed, because it is an optional package.

Sources: WMO Manual on Codes, FM 92 GRIB edition 2, code table 4.2; ECMWF parameter database; the
names that ecCodes gives to NCEP's messages.
"""

import atexit
import os
import sys
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import FULL_CIRCLE
from credit_dp.data.sources.coordinates import GRID_TYPES
from credit_dp.errors import UserError, counted, install_extra
from credit_dp.variable_names import UPPER_AIR_NAMES, long_name

Field = NDArray[np.float32]

PRESSURE, MODEL, SINGLE = "isobaricInhPa", "hybrid", ""  # kinds of levels; SINGLE is any other
MISSING_VALUE: Final = 1e20  # stands for NaN between ecCodes and numpy; files have a bitmap
# ecCodes from PyPI may be built without its own locks, and threads read and write here.
LIBRARY_LOCK = Lock()
# GRIB has no checksums, and any bytes decode to some field. Messages that are written here have one
# in section 2, which is for local use and which other programs skip.
CHECKSUM_MARK: Final = b"credit_dp crc32 "
HEADER_LENGTH = 16  # bytes of section 0, which end with the length of the message


class GribCode(NamedTuple):
    """The code of a variable.

    Attributes:
        discipline, category, number: of the parameter.
        unit: of its values.
        level_type: ecCodes' type of level; `SINGLE` for a variable on pressure or model levels.
        level: of that type.
    """

    discipline: int
    category: int
    number: int
    unit: str
    level_type: str = SINGLE
    level: int = 0


def _parse_codes(table: Mapping[str, str]) -> dict[str, GribCode]:
    """Parse a table of `name: "discipline category number [level_type [level]]: unit"`."""
    codes = {}
    for name, text in table.items():
        numbers, _, unit = text.partition(":")
        discipline, category, number, *level = numbers.split()
        level_type = level[0] if level else SINGLE
        height = int(level[1]) if len(level) > 1 else 0
        parameter = int(discipline), int(category), int(number)
        codes[name] = GribCode(*parameter, unit.strip(), level_type, height)
    return codes


CODES: Mapping[str, GribCode] = _parse_codes(
    {
        "geopotential": "0 3 4: m2 s-2",
        "temperature": "0 0 0: K",
        "u_component_of_wind": "0 2 2: m s-1",
        "v_component_of_wind": "0 2 3: m s-1",
        "vertical_velocity": "0 2 8: Pa s-1",
        "specific_humidity": "0 1 0: kg kg-1",
        "relative_humidity": "0 1 1: %",
        "vorticity": "0 2 12: s-1",
        "divergence": "0 2 13: s-1",
        "potential_vorticity": "0 2 14: K m2 kg-1 s-1",
        "ozone_mass_mixing_ratio": "0 14 1: kg kg-1",
        "fraction_of_cloud_cover": "0 6 32: 1",
        "specific_cloud_liquid_water_content": "0 1 83: kg kg-1",
        "specific_cloud_ice_water_content": "0 1 84: kg kg-1",
        "specific_rain_water_content": "0 1 85: kg kg-1",
        "specific_snow_water_content": "0 1 86: kg kg-1",
        "wind_speed": "0 2 1: m s-1",
        "2m_temperature": "0 0 0 heightAboveGround 2: K",
        "2m_dewpoint_temperature": "0 0 6 heightAboveGround 2: K",
        "10m_u_component_of_wind": "0 2 2 heightAboveGround 10: m s-1",
        "10m_v_component_of_wind": "0 2 3 heightAboveGround 10: m s-1",
        "100m_u_component_of_wind": "0 2 2 heightAboveGround 100: m s-1",
        "100m_v_component_of_wind": "0 2 3 heightAboveGround 100: m s-1",
        "10m_wind_speed": "0 2 1 heightAboveGround 10: m s-1",
        "instantaneous_10m_wind_gust": "0 2 22 heightAboveGround 10: m s-1",
        "mean_sea_level_pressure": "0 3 0 meanSea: Pa",
        "surface_pressure": "0 3 0 surface: Pa",
        "skin_temperature": "0 0 17 surface: K",
        "sea_surface_temperature": "10 3 0 surface: K",
        "sea_ice_cover": "10 2 0 surface: 1",
        "snow_depth": "0 1 60 surface: kg m-2",
        "snow_density": "0 1 61 surface: kg m-3",
        "total_cloud_cover": "0 6 1 entireAtmosphere: %",
        "low_cloud_cover": "0 6 3 surface: %",
        "medium_cloud_cover": "0 6 4 surface: %",
        "high_cloud_cover": "0 6 5 surface: %",
        "total_column_water": "0 1 51 entireAtmosphere: kg m-2",
        "total_column_water_vapour": "0 1 64 entireAtmosphere: kg m-2",
        "boundary_layer_height": "0 3 18 surface: m",
        "convective_available_potential_energy": "0 7 6 entireAtmosphere: J kg-1",
        **{f"soil_temperature_level_{layer}": f"2 3 18 soilLayer {layer}: K" for layer in "1234"},
        **{
            f"volumetric_soil_water_layer_{layer}": f"2 0 25 soilLayer {layer}: m3 m-3"
            for layer in "1234"
        },
        "total_precipitation": "0 1 52 surface: kg m-2",
        "large_scale_precipitation": "0 1 54 surface: kg m-2",
        "convective_precipitation": "0 1 37 surface: kg m-2",
        "snowfall": "0 1 53 surface: kg m-2",
        "toa_incident_solar_radiation": "0 4 7 nominalTop: J m-2",
        "top_net_solar_radiation": "0 4 9 nominalTop: J m-2",
        "top_net_thermal_radiation": "0 5 5 nominalTop: J m-2",
        "surface_solar_radiation_downwards": "0 4 7 surface: J m-2",
        "surface_thermal_radiation_downwards": "0 5 3 surface: J m-2",
        "surface_net_solar_radiation": "0 4 9 surface: J m-2",
        "surface_net_thermal_radiation": "0 5 5 surface: J m-2",
        "surface_sensible_heat_flux": "0 0 11 surface: J m-2",
        "surface_latent_heat_flux": "0 0 10 surface: J m-2",
    }
)

# Short names of messages besides those of ECMWF in `variable_names`, the best first: NCEP's, the
# parameters of edition 2 without a layer in their name, and heights for geopotential. Names of
# variables on levels that are on another level here carry it, see `_message_name`.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "geopotential": ("gh", "HGT"),
    "ozone_mass_mixing_ratio": ("o3mr",),
    "specific_cloud_liquid_water_content": ("clwmr",),
    "specific_cloud_ice_water_content": ("icmr",),
    "specific_rain_water_content": ("rwmr",),
    "specific_snow_water_content": ("snmr",),
    "wind_speed": ("ws",),
    "10m_wind_speed": ("10si", "ws heightAboveGround 10"),
    "100m_u_component_of_wind": ("u heightAboveGround 100",),
    "100m_v_component_of_wind": ("v heightAboveGround 100",),
    "mean_sea_level_pressure": ("prmsl", "mslet"),
    "skin_temperature": ("t surface 0",),
    "snow_depth": ("sdwe",),
    "total_column_water_vapour": ("pwat",),
    **{f"soil_temperature_level_{layer}": (f"sot soilLayer {layer}",) for layer in "1234"},
    **{f"volumetric_soil_water_layer_{layer}": (f"vsw soilLayer {layer}",) for layer in "1234"},
}
# Layers of clouds, of the ground or between heights have the names of other variables.
SINGLE_LEVEL_TYPES = frozenset(
    {
        *("surface", "meanSea", "heightAboveGround", "nominalTop", "entireAtmosphere"),
        *("atmosphere", "atmosphereSingleLayer", "lowCloudLayer", "middleCloudLayer"),
        *("highCloudLayer", "soilLayer", "depthBelowLand", "depthBelowLandLayer"),
        *("snowLayer", "seaIceLayer", "iceLayerOnWater", "oceanSurface"),
    }
)
GRIDS = ("regular_ll", "regular_gg")  # rows of equally many points
REDUCED = "reduced_gg"  # rows of fewer points near the poles
ADVICE = (
    "Request it on a regular grid of latitudes and longitudes, or convert it, for example with "
    "`cdo -setgridtype,regular` (reduced grids) or `cdo -sp2gpl` (spectral fields)"
)


@cache
def load_eccodes(key: str) -> Any:
    """Return the package that codes GRIB.

    Raises:
        UserError: it is not installed; names the key that needs it.
    """
    # Each brings its own copy of PROJ's C library: pyproj fails, and Python crashes at its end, if
    # it is imported after ecCodes, which xarray loads with cfgrib. Nothing here needs pyproj.
    if "eccodes" not in sys.modules:
        with suppress(ImportError):
            import pyproj  # noqa: F401
    try:
        import eccodes
    except (ImportError, RuntimeError) as error:  # RuntimeError: without its C library
        raise UserError(
            f"{key}: GRIB needs ecCodes, which can't be loaded ({error}). {install_extra('grib')}."
        ) from error
    # It would print its own lines; the errors that it raises have the same reason. The C library
    # keeps using the file.
    log = open(os.devnull, "w")  # noqa: SIM115
    atexit.register(log.close)
    eccodes.codes_context_set_logging(log)
    return eccodes


class Message(NamedTuple):
    """The header of one message, and where it is in its file.

    Attributes:
        kind: `PRESSURE`, `MODEL` or `SINGLE`.
        name: ecCodes' short name; see `_message_name`.
        level: in hPa or the number of a model level; 0 on other levels.
        member: of an ensemble; 0 without.
        initial: when the forecast started; the time of an analysis.
        hours: lead time.
        valid: the time of the field.
        unit: of the values.
        offset: in the file, in bytes.
        part: its number among fields that share a message, as NCEP writes winds; otherwise 0.
    """

    kind: str
    name: str
    level: int
    member: int
    initial: np.datetime64
    hours: int
    valid: np.datetime64
    unit: str
    offset: int
    part: int = 0


@final
@dataclass(frozen=True)
class GribFile:
    """The messages of a GRIB file of edition 1 or 2 on one grid of rows.

    Attributes:
        path: of the file.
        key: that has given the path, for messages.
        messages: in the file's order. Averages and extremes over time are left out, and fields on
            levels that no variable is on.
        latitude, longitude: `(H,)`, falling, and `(W,)`, eastward from the first, in degrees; of a
            reduced grid the longitudes are those of the longest row.
        complete: whether the file ends after a message; False if it is cut off.
        row_lengths: numbers of points of the rows of a reduced grid, `(H,)`; otherwise empty.
    """

    path: Path
    key: str
    messages: Sequence[Message]
    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    complete: bool = True
    row_lengths: Sequence[int] = ()

    @classmethod
    def open(
        cls,
        path: Path,
        key: str,
        sums: bool = False,
        cut_off: bool = False,
        reduced: bool = False,
    ) -> "GribFile":
        """List the messages of a file, reading their headers only.

        Args:
            path: of the file.
            key: for error messages.
            sums: whether sums over time are listed, too.
            cut_off: whether a file that is cut off after some messages is opened, too.
            reduced: whether reduced Gaussian grids are read, too, whose rows differ in length.

        Raises:
            UserError: it can't be read, is cut off, has no messages, or grids that differ.
        """
        eccodes = load_eccodes(key)
        messages: list[Message] = []
        grid: _Grid | None = None
        complete = True
        types = ("instant", "accum") if sums else ("instant",)
        try:
            with LIBRARY_LOCK, path.open("rb") as file, path.open("rb") as to_check:
                offset, part, end = -1, 0, 0
                for handle in _handles(eccodes, file):
                    last, offset = offset, int(eccodes.codes_get_message_offset(handle))
                    part = part + 1 if offset == last else 0
                    end = offset + int(eccodes.codes_get(handle, "totalLength"))
                    if grid is None:
                        _check_sum(to_check, offset)
                        grid = _read_grid(eccodes, handle, path, key, reduced)
                    if eccodes.codes_get(handle, "md5GridSection") != grid.checksum:
                        _check_sum(to_check, offset)
                        raise UserError(
                            f"{key}: {path} has messages on more than one grid, or is damaged. "
                            "Split it, for example with `grib_copy`, fetch it again, or change "
                            f"{key}."
                        )
                    message = _read_header(eccodes, handle, offset, part)
                    if message is not None and eccodes.codes_get(handle, "stepType") in types:
                        messages.append(message)
                file.seek(end)
                if grid is not None and b"GRIB" in file.read():
                    # For ecCodes a message whose sections it can't find is the end of the file.
                    raise ValueError("more messages follow, which can't be read")
        except (eccodes.CodesInternalError, ValueError) as error:  # ValueError: no such date
            if not (cut_off and messages):
                raise UserError(
                    f"{key}: {path} is cut off or damaged after "
                    f"{counted(len(messages), 'message')} ({error}). Fetch it again, or change "
                    f"{key}."
                ) from error
            complete = False
        except OSError as error:
            raise UserError(f"{key}: {path} can't be read ({error}). Change {key}.") from error
        if grid is None:
            raise UserError(f"{key}: {path} has no GRIB message. Change {key}.")
        return cls(path, key, messages, grid.latitude, grid.longitude, complete, grid.row_lengths)

    def read(self, message: Message) -> Field:
        """Decode one message: `(H, W)`, from north to south and eastward, NaN where missing.

        Of a reduced grid these are the points of all rows, `(N,)`, in the same order.

        Raises:
            UserError: it can't be decoded, or its checksum is wrong.
        """
        eccodes = load_eccodes(self.key)
        try:
            # Without a buffer, because the C library reads on where the system's file is.
            with LIBRARY_LOCK, self.path.open("rb", buffering=0) as file:
                _check_sum(file, message.offset)
                file.seek(message.offset)
                handles = _handles(eccodes, file, headers_only=False)
                with closing(handles):
                    handle = next(islice(handles, message.part, None))
                    eccodes.codes_set(handle, "missingValue", MISSING_VALUE)
                    values = eccodes.codes_get_values(handle)
                    order = _point_order(eccodes, handle)
            shape = len(self.latitude), len(self.longitude)
            field = values if self.row_lengths else _in_rows(values, shape, order)
        except (eccodes.CodesInternalError, OSError, ValueError, StopIteration) as error:
            raise UserError(
                f"{self.key}: {self.path}: {message.name} at {message.valid.astype('M8[m]')} can't "
                f"be decoded ({str(error) or 'its sections are damaged'}). Fetch the file again."
            ) from error
        return np.where(field == MISSING_VALUE, np.nan, field).astype(np.float32)


def is_grib(path: Path) -> bool:
    """Whether a file begins as GRIB; a bulletin's header may come first."""
    with path.open("rb") as file:
        return b"GRIB" in file.read(128)


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


def _check_sum(file: BinaryIO, offset: int) -> None:
    """Compare a message with its checksum, if it has one.

    Raises:
        ValueError: they differ.
    """
    file.seek(offset)
    header = file.read(HEADER_LENGTH + 4)
    if header[:4] != b"GRIB" or header[7] != 2:
        return
    end = HEADER_LENGTH + int.from_bytes(header[HEADER_LENGTH:])
    file.seek(offset + end + 5)  # after the length and the number of section 2
    if file.read(len(CHECKSUM_MARK)) != CHECKSUM_MARK:
        return
    checksum = int.from_bytes(file.read(4))
    start = end + 5 + len(CHECKSUM_MARK) + 4
    file.seek(offset + HEADER_LENGTH)
    first = zlib.crc32(file.read(end - HEADER_LENGTH))
    file.seek(offset + start)
    if zlib.crc32(file.read(int.from_bytes(header[8:16]) - start), first) != checksum:
        raise ValueError("its checksum is wrong")


def _handles(eccodes: Any, file: BinaryIO, headers_only: bool = True) -> Generator[int]:
    """Yield a handle of each field of a file, also of those in one message, and release it."""
    eccodes.codes_grib_multi_support_on()
    try:
        while (handle := eccodes.codes_grib_new_from_file(file, headers_only)) is not None:
            try:
                yield handle
            finally:
                eccodes.codes_release(handle)
    finally:
        # The library remembers an unfinished message by the file, whose address is used again.
        eccodes.codes_grib_multi_support_reset_file(file)
        eccodes.codes_grib_multi_support_off()


class _Grid(NamedTuple):
    checksum: str
    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    row_lengths: Sequence[int] = ()


def _read_grid(eccodes: Any, handle: int, path: Path, key: str, reduced: bool) -> _Grid:
    """Return the grid of a message.

    Raises:
        UserError: it has no rows, or these have different numbers of points without `reduced`.
    """
    grid = eccodes.codes_get(handle, "gridType")
    if reduced and grid == REDUCED:
        return _read_reduced_grid(eccodes, handle, path, key)
    if grid not in GRIDS:
        name = "spectral" if grid == "sh" else GRID_TYPES.get(grid, grid)
        raise UserError(f"{key}: {path} has a {name} grid ({grid}). {ADVICE}.")
    checksum: str = eccodes.codes_get(handle, "md5GridSection")
    latitude = np.sort(eccodes.codes_get_array(handle, "distinctLatitudes"))[::-1]
    ends = ["First", "Last"][:: -1 if _point_order(eccodes, handle).westward else 1]
    west, east = (
        eccodes.codes_get_double(handle, f"longitudeOf{end}GridPointInDegrees") for end in ends
    )
    columns = eccodes.codes_get_long(handle, "Ni")
    step = (east - west) % FULL_CIRCLE / max(columns - 1, 1)
    return _Grid(checksum, latitude.astype(np.float64), west + step * np.arange(columns))


def _read_reduced_grid(eccodes: Any, handle: int, path: Path, key: str) -> _Grid:
    """Return the reduced Gaussian grid of a message, its rows from the north.

    Raises:
        UserError: it covers a part of the globe, or its points are in an unusual order.
    """
    lengths = [int(length) for length in eccodes.codes_get_array(handle, "pl")]
    count = eccodes.codes_get_long(handle, "numberOfDataPoints")
    is_plain = not any(_point_order(eccodes, handle))
    latitude = np.empty(0)
    if is_plain:  # ecCodes fails for other orders
        latitude = np.sort(eccodes.codes_get_array(handle, "distinctLatitudes"))[::-1]
    if min(lengths) < 1 or len(lengths) != len(latitude) or sum(lengths) != count:
        raise UserError(
            f"{key}: {path} has a reduced Gaussian grid that is not global, or whose points are "
            f"not eastward, row by row from the north. {ADVICE}."
        )
    west = eccodes.codes_get_double(handle, "longitudeOfFirstGridPointInDegrees")
    longest = max(lengths)
    longitude = west + FULL_CIRCLE / longest * np.arange(longest)
    return _Grid(
        eccodes.codes_get(handle, "md5GridSection"),
        latitude.astype(np.float64),
        longitude,
        lengths,
    )


class _PointOrder(NamedTuple):
    westward: bool
    northward: bool
    columns_first: bool
    zigzag: bool


def _point_order(eccodes: Any, handle: int) -> _PointOrder:
    keys = ("iScansNegatively", "jScansPositively", "jPointsAreConsecutive")
    flags = [eccodes.codes_get_long(handle, key) for key in (*keys, "alternativeRowScanning")]
    return _PointOrder(*map(bool, flags))


def _in_rows(
    values: NDArray[np.float64], shape: tuple[int, int], order: _PointOrder
) -> NDArray[np.float64]:
    """Return the values of a message as rows from the north, eastward."""
    field = values.reshape(shape[::-1] if order.columns_first else shape)
    if order.zigzag:
        field = field.copy()
        field[1::2] = field[1::2, ::-1]
    field = field.T if order.columns_first else field
    return field[:: -1 if order.northward else 1, :: -1 if order.westward else 1]


def _read_header(eccodes: Any, handle: int, offset: int, part: int) -> Message | None:
    """Return the header of a field; None if it is on levels that no variable is on."""
    level_type: str = eccodes.codes_get(handle, "typeOfLevel")
    level: float = eccodes.codes_get_double(handle, "level")
    kind = level_type
    if level_type == "isobaricInPa":
        kind, level = PRESSURE, level / 100
    if kind not in (PRESSURE, MODEL):
        kind = SINGLE
        if level_type not in SINGLE_LEVEL_TYPES:
            return None
    elif level != int(level):  # of the stratosphere, between whole hPa; no config has these
        return None
    if eccodes.codes_get(handle, "edition") == 2:
        eccodes.codes_set(handle, "stepUnits", "h")
    is_member = eccodes.codes_is_defined(handle, "number")
    return Message(
        kind=kind,
        name=_message_name(eccodes.codes_get(handle, "shortName"), kind, level_type, int(level)),
        level=0 if kind == SINGLE else int(level),
        member=eccodes.codes_get_long(handle, "number") if is_member else 0,
        initial=_read_time(eccodes, handle, "data"),
        hours=eccodes.codes_get_long(handle, "endStep"),
        valid=_read_time(eccodes, handle, "validity"),
        unit=eccodes.codes_get(handle, "units"),
        offset=offset,
        part=part,
    )


def _message_name(short_name: str, kind: str, level_type: str, level: int) -> str:
    """Return the name under which a message is listed.

    Names of variables on levels say little on other ones, `t` for example at the surface: type and
    level follow.
    """
    needs_level = short_name in {*UPPER_AIR_NAMES, "ws", "sot", "vsw"}
    return f"{short_name} {level_type} {level}" if kind == SINGLE and needs_level else short_name


def _read_time(eccodes: Any, handle: int, which: str) -> np.datetime64:
    """Return the `data` or `validity` time: a date like 20260131 and a clock like 1830."""
    date, clock = (eccodes.codes_get_long(handle, f"{which}{part}") for part in ("Date", "Time"))
    text = f"{date:08d}"
    day = np.datetime64(f"{text[:-4]}-{text[-4:-2]}-{text[-2:]}")
    time: np.datetime64 = (day + np.timedelta64(clock // 100 * 60 + clock % 100, "m")).astype(
        "M8[ns]"
    )
    return time


def code_of(variable: str, level: int | None) -> GribCode | None:
    """Return the code of a field; None if there is none.

    Args:
        variable: its name in the config, any of its names.
        level: of a variable on levels.
    """
    code = CODES.get(long_name(variable, level)[0])
    on_levels = long_name(variable, level)[1] is not None
    return code if code is not None and (code.level_type == SINGLE) == on_levels else None
