"""Archives of station reports as they are: ISD-Lite, IGRA's radiosondes, ASOS of Iowa's Mesonet.

Sources: NOAA, "ISD-Lite format documentation", 2006, and the station list `isd-history.csv`
beside it; NOAA, "Format Description of IGRA 2 Sounding Data Files"; Iowa Environmental Mesonet,
"ASOS-AWOS-METAR data download".
"""

import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.calendar import STANDARD, Times
from credit_dp.data.sources.address import reason_of
from credit_dp.errors import UserError, counted
from credit_dp.physics.columns import PASCALS

if TYPE_CHECKING:
    import pandas as pd

Values = NDArray[np.float64]
Variables = tuple[dict[str, Values], dict[str, str]]  # values and units by name
SPEED, DIRECTION = "10m_wind_speed", "wind_from_direction"
SPEED_ON_LEVEL = "wind_speed"
HOUR_OF_RAIN = "total_precipitation_1hr"


@final
class Quantity(NamedTuple):
    """What a column is: `scale` times its numbers are values of a variable in a unit."""

    variable: str
    unit: str
    scale: float = 1.0


ASOS: Mapping[str, Quantity] = {
    "tmpf": Quantity("2m_temperature", "degF"),
    "dwpf": Quantity("2m_dewpoint_temperature", "degF"),
    "mslp": Quantity("mean_sea_level_pressure", "hPa"),
    "drct": Quantity(DIRECTION, "degree"),
    "sknt": Quantity(SPEED, "kt"),
    "p01i": Quantity(HOUR_OF_RAIN, "mm", 25.4),
    "p01m": Quantity(HOUR_OF_RAIN, "mm"),
}
ASOS_RAIN = ("p01i", "p01m")
TRACE_OF_ASOS = "T"
ASOS_MISSING = "M"
# The columns after year, month, day and hour.
ISD_LITE: Mapping[str, Quantity] = {
    "temperature": Quantity("2m_temperature", "degC", 0.1),
    "dew point": Quantity("2m_dewpoint_temperature", "degC", 0.1),
    "pressure": Quantity("mean_sea_level_pressure", "hPa", 0.1),
    "direction": Quantity(DIRECTION, "degree"),
    "speed": Quantity(SPEED, "m s-1", 0.1),
    "sky": Quantity("", ""),  # a code
    "rain of 1 hour": Quantity(HOUR_OF_RAIN, "mm", 0.1),
    "rain of 6 hours": Quantity("total_precipitation_6hr", "mm", 0.1),
}
ISD_DATE = ("year", "month", "day", "hour")
ISD_MISSING, ISD_TRACE = -9999, -1
ISD_HISTORY = "isd-history.csv"
HISTORY_COLUMNS = ("USAF", "WBAN", "LAT", "LON", "ELEV(M)")
ISD_FILE = re.compile(r"([A-Z0-9]{6}-\d{5})-\d{4}(?:\.gz)?")
# By IGRA's names of columns.
IGRA: Mapping[str, Quantity] = {
    "GPH": Quantity("geopotential", "m"),
    "TEMP": Quantity("temperature", "degC", 0.1),
    "RH": Quantity("relative_humidity", "%", 0.1),
    "WDIR": Quantity(DIRECTION, "degree"),
    "WSPD": Quantity(SPEED_ON_LEVEL, "m s-1", 0.1),
}
# Where they are in a line: from a character up to, but not including, another; pressure is in Pa.
IGRA_LEVEL = {
    **{"PRESS": slice(9, 15), "GPH": slice(16, 21), "TEMP": slice(22, 27), "RH": slice(28, 33)},
    **{"WDIR": slice(40, 45), "WSPD": slice(46, 51)},
}
IGRA_DATE = {"year": slice(13, 17), "month": slice(18, 20), "day": slice(21, 23)}
IGRA_HEADER = {**IGRA_DATE, "hour": slice(24, 26), "LAT": slice(55, 62), "LON": slice(63, 71)}
IGRA_STATION = slice(1, 12)
HEADER, STANDARD_LEVEL = b"#", b"1"  # how lines begin
IGRA_MISSING = (-9999, -8888)  # the latter was removed by IGRA's checks
SOUNDING = ("station", "latitude", "longitude", "time")
# What reading a file of an archive raises; a RuntimeError if it has a password, or is compressed in
# another way.
UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
IGRA_FILE = re.compile(r"[A-Z]{2}[A-Z0-9]{9}-data(?:-beg\d{4})?\.txt(?:\.zip)?")


def as_variables(columns: Mapping[str, Values], quantities: Mapping[str, Quantity]) -> Variables:
    """Return the variables of an archive's columns; winds as components to east and north, too.

    A calm has no direction, and components of zero; a wind of unknown direction has none.
    """
    values, units = {}, {}
    for column, numbers in columns.items():
        name, unit, scale = quantities[column]
        if name:
            values[name], units[name] = numbers * scale, unit
    direction = values.pop(DIRECTION, None)
    units.pop(DIRECTION, None)
    speed_name = next((name for name in (SPEED, SPEED_ON_LEVEL) if name in values), None)
    if direction is not None and speed_name is not None:
        speed = values[speed_name]
        height = speed_name.removesuffix(SPEED_ON_LEVEL)
        towards = np.deg2rad(np.where(speed == 0, 0.0, direction)) + np.pi
        for name, share in (("u", np.sin(towards)), ("v", np.cos(towards))):
            values[f"{height}{name}_component_of_wind"] = speed * share
            units[f"{height}{name}_component_of_wind"] = units[speed_name]
    return values, units


def asos_reports(texts: "pd.DataFrame") -> "tuple[pd.DataFrame, list[str]]":
    """Return the last report of each station and time, with a note of how many others there are.

    Other columns, such as codes of clouds, are left out. Traces of rain are none.

    Args:
        texts: with the columns station, time, latitude, longitude, and those of `ASOS`.
    """
    places = ("station", "time", "latitude", "longitude", "elevation")
    known = texts[[name for name in texts.columns if name in places or name in ASOS]]
    last = known.drop_duplicates(["station", "time"], keep="last")
    rain = {name: {TRACE_OF_ASOS: "0"} for name in ASOS_RAIN if name in last}
    replaced = len(known) - len(last)
    notes = [f"{counted(replaced, 'report')} corrected by a later row of the same station and time"]
    return last.replace(rain), notes if replaced else []


@final
class Archive(NamedTuple):
    """The reports in files of an archive.

    Attributes:
        table: a row for each report: its station, with its place, and the variables of `units`.
        notes: which files are left out, and why.
    """

    times: Times
    table: "pd.DataFrame"
    units: Mapping[str, str]
    notes: list[str]


def read_isd_lite(files: Sequence[Path]) -> Archive:
    """Read files of ISD-Lite, with the places of the stations in `ISD_HISTORY` beside them.

    Raises:
        UserError: one can't be read, or no station has a place.
    """
    import pandas as pd

    places_file = files[0].parent / ISD_HISTORY
    history = _read_history(places_file)
    tables = []
    for path in files:
        station = path.name[:12]
        if station in history.index:
            tables.append(_read_isd_file(path).assign(station=station))
    if not tables:
        raise UserError(
            f"{places_file}: needs latitude and longitude of the stations of the files "
            f"beside it, such as {files[0].name[:12]}, but has those of none. Change stations."
        )
    table = pd.concat(tables, ignore_index=True)
    columns = {name: table[name].to_numpy(np.float64) for name in ISD_LITE}
    values, units = as_variables(columns, ISD_LITE)
    places = history.loc[table["station"]].reset_index(drop=True)
    placeless = len(files) - len(tables)
    return Archive(
        pd.to_datetime(table[[*ISD_DATE]]).to_numpy(STANDARD.dtype),
        pd.concat([table["station"], places, pd.DataFrame(values)], axis=1),
        units,
        [f"{counted(placeless, 'file')} of stations without a place in {ISD_HISTORY} left out"]
        if placeless
        else [],
    )


def _read_history(path: Path) -> "pd.DataFrame":
    """Return latitude, longitude and elevation by station; those without a place are left out."""
    import pandas as pd

    try:
        texts = pd.read_csv(path, dtype=str, encoding="latin-1", keep_default_na=False)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file, which says where the stations of ISD-Lite are. Put it beside "
            "their files, or change stations."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read ({reason_of(error)}). Change stations.") from error
    absent = [name for name in HISTORY_COLUMNS if name not in texts.columns]
    if absent:
        raise UserError(
            f"{path}: needs the columns {', '.join(HISTORY_COLUMNS)}, but {absent[0]} is missing. "
            "Change stations."
        )
    numbers = texts[["LAT", "LON", "ELEV(M)"]].apply(pd.to_numeric, errors="coerce")
    numbers = numbers.astype(np.float64)
    numbers = numbers.set_axis(["latitude", "longitude", "elevation"], axis=1)
    numbers.index = pd.Index(texts["USAF"] + "-" + texts["WBAN"].str.zfill(5))
    # At 0 N, 0 E are those whose place is not known.
    has_place = numbers["latitude"].abs().le(90) & numbers["longitude"].abs().le(360)
    has_place &= (numbers["latitude"] != 0) | (numbers["longitude"] != 0)
    found = numbers[has_place]
    return found[~found.index.duplicated(keep="last")]


def _read_isd_file(path: Path) -> "pd.DataFrame":
    import pandas as pd

    names = [*ISD_DATE, *ISD_LITE]
    try:
        table = pd.read_csv(path, sep=r"\s+", header=None, dtype=np.int64)
        if len(table.columns) != len(names):
            raise ValueError(f"{len(table.columns)} columns")
        table = table.set_axis(names, axis=1)
        pd.to_datetime(table[[*ISD_DATE]])  # refuses dates that there are not
    except UNREADABLE as error:
        raise UserError(
            f"{path}: needs rows of {len(names)} whole numbers, as ISD-Lite has, but it can't be "
            f"read ({reason_of(error)}). Remove it, or change stations."
        ) from error
    values = table[[*ISD_LITE]].astype(np.float64)
    values = values.mask(values == ISD_MISSING)
    rain = ["rain of 1 hour", "rain of 6 hours"]
    values[rain] = values[rain].replace(ISD_TRACE, 0)
    return pd.concat([table[[*ISD_DATE]], values], axis=1)[values.notna().any(axis=1)]


def read_igra(files: Sequence[Path]) -> Archive:
    """Read the standard pressure levels of soundings in files of IGRA.

    They are at the nominal hour. A variable on 500 hPa is called `temperature_500`. Elevations are
    left out, as no variable on a level is corrected for them.

    Raises:
        UserError: one can't be read, or no sounding has an hour, a place and a value.
    """
    import pandas as pd

    tables, units, left_out = zip(*map(_read_igra_file, files), strict=True)
    table = pd.concat(tables, ignore_index=True)
    if table.empty:
        raise UserError(
            f"{files[0]}: needs soundings with an hour, a place and values on standard pressure "
            "levels, but there is none. Change stations."
        )
    unknown = sum(left_out)
    return Archive(
        table.pop("time").to_numpy(STANDARD.dtype),
        table,
        {name: unit for each in units for name, unit in each.items()},
        [f"{counted(unknown, 'sounding')} without an hour or a place left out"] if unknown else [],
    )


def _read_igra_file(path: Path) -> "tuple[pd.DataFrame, dict[str, str], int]":
    """Return a row for each sounding, units, and how many without an hour or a place there are."""
    import pandas as pd

    try:
        is_zip = path.suffix == ".zip"
        with zipfile.ZipFile(path).open(path.stem) if is_zip else path.open("rb") as file:
            lines = [line for line in file if line[:1] in (HEADER, STANDARD_LEVEL)]
        is_header = np.array([line[:1] == HEADER for line in lines], bool)
        headers = list(compress(lines, is_header))
        soundings = _fixed_columns(headers, IGRA_HEADER)
        soundings["time"] = pd.to_datetime(soundings[[*IGRA_DATE]])  # refuses dates there are not
        soundings["time"] += pd.to_timedelta(soundings["hour"], unit="h")
        soundings["station"] = [header[IGRA_STATION].decode() for header in headers]
        soundings[["latitude", "longitude"]] = soundings[["LAT", "LON"]] / 1e4
        is_known = soundings["hour"].lt(24) & soundings["latitude"].abs().le(90)
        is_known &= soundings["longitude"].abs().le(180)
        levels = _fixed_columns(list(compress(lines, ~is_header)), IGRA_LEVEL)
        of_level = (is_header.cumsum() - 1)[~is_header]
        if (of_level < 0).any():
            raise ValueError("no header before the first level")
        numbers = levels[[*IGRA]].astype(np.float64)
        numbers = numbers.mask(numbers.isin(IGRA_MISSING))
        values, units = as_variables({name: numbers[name].to_numpy() for name in IGRA}, IGRA)
        rows = soundings[[*SOUNDING]].iloc[of_level].reset_index(drop=True)
        rows = rows.assign(level=(levels["PRESS"] / PASCALS).astype(int), **values)
        rows = rows[is_known.to_numpy()[of_level] & numbers.notna().any(axis=1)]
        twice = rows[rows.duplicated([*SOUNDING, "level"])]
        if len(twice):
            row = twice.iloc[0]
            raise ValueError(f"{row['station']} has {row['level']} hPa twice at {row['time']}")
        table = rows.set_index([*SOUNDING, "level"]).unstack("level")
    except UNREADABLE as error:
        raise UserError(
            f"{path}: needs soundings in IGRA's format, but it can't be read "
            f"({reason_of(error)}). Remove it, or change stations."
        ) from error
    table = table.dropna(axis="columns", how="all")
    names = {f"{name}_{level}": units[name] for name, level in table.columns}
    table = table.set_axis([*names], axis="columns").reset_index().assign(elevation=np.nan)
    return table, names, int((~is_known).sum())


def _fixed_columns(lines: Sequence[bytes], columns: Mapping[str, slice]) -> "pd.DataFrame":
    import pandas as pd

    texts = {name: np.array([x[part] for x in lines], bytes) for name, part in columns.items()}
    return pd.DataFrame({name: column.astype(np.int64) for name, column in texts.items()})


# How the files of an archive are called, and what reads them.
ARCHIVES: Mapping[str, tuple[re.Pattern[str], Callable[[Sequence[Path]], Archive]]] = {
    "ISD-Lite": (ISD_FILE, read_isd_lite),
    "IGRA": (IGRA_FILE, read_igra),
}


def archive_files(path: Path) -> tuple[str, list[Path]]:
    """Return the name of the archive whose file a path is, or has in its folder, and these files.

    Empty if there are none.
    """
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    for name, (pattern, _) in ARCHIVES.items():
        files = [file for file in paths if pattern.fullmatch(file.name)]
        if files:
            return name, files
    return "", []
