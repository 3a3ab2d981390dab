"""What archives of station reports call their variables: ISD-Lite, and ASOS of Iowa's Mesonet.

Sources: NOAA, "ISD-Lite format documentation", 2006, and the station list `isd-history.csv`
beside it; Iowa Environmental Mesonet, "ASOS-AWOS-METAR data download".
"""

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.calendar import STANDARD, Times
from credit_dp.data.sources.address import reason_of
from credit_dp.errors import UserError, counted

if TYPE_CHECKING:
    import pandas as pd

Values = NDArray[np.float64]
Variables = tuple[dict[str, Values], dict[str, str]]  # values and units by name
SPEED, DIRECTION = "10m_wind_speed", "wind_from_direction"
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


def as_variables(columns: Mapping[str, Values], quantities: Mapping[str, Quantity]) -> Variables:
    """Return the variables of an archive's columns; winds as components to east and north, too.

    A calm has no direction, and components of zero; a wind of unknown direction has none.
    """
    values, units = {}, {}
    for column, numbers in columns.items():
        name, unit, scale = quantities[column]
        if name:
            values[name], units[name] = numbers * scale, unit
    direction, speed = values.pop(DIRECTION, None), values.get(SPEED)
    units.pop(DIRECTION, None)
    if direction is not None and speed is not None:
        towards = np.deg2rad(np.where(speed == 0, 0.0, direction)) + np.pi
        for name, share in (("u", np.sin(towards)), ("v", np.cos(towards))):
            values[f"10m_{name}_component_of_wind"] = speed * share
            units[f"10m_{name}_component_of_wind"] = units[SPEED]
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


def holds_isd_lite(folder: Path) -> bool:
    """Whether a folder has files of ISD-Lite."""
    return folder.is_dir() and any(ISD_FILE.fullmatch(path.name) for path in folder.iterdir())


@final
class IsdLite(NamedTuple):
    """The reports in a folder of ISD-Lite.

    Attributes:
        table: a row for each report: its station, with its place, and the variables of `units`.
        notes: which files are left out, and why.
    """

    times: Times
    table: "pd.DataFrame"
    units: Mapping[str, str]
    notes: list[str]


def read_isd_lite(folder: Path) -> IsdLite:
    """Read all files of ISD-Lite in a folder, with the places of the stations in `ISD_HISTORY`.

    Raises:
        UserError: one can't be read, or no station has a place.
    """
    import pandas as pd

    history = _read_history(folder / ISD_HISTORY)
    files = sorted(path for path in folder.iterdir() if ISD_FILE.fullmatch(path.name))
    tables = []
    for path in files:
        station = path.name[:12]
        if station in history.index:
            tables.append(_read_isd_file(path).assign(station=station))
    if not tables:
        raise UserError(
            f"{folder / ISD_HISTORY}: needs latitude and longitude of the stations of the files "
            f"beside it, such as {files[0].name[:12]}, but has those of none. Change stations."
        )
    table = pd.concat(tables, ignore_index=True)
    columns = {name: table[name].to_numpy(np.float64) for name in ISD_LITE}
    values, units = as_variables(columns, ISD_LITE)
    places = history.loc[table["station"]].reset_index(drop=True)
    placeless = len(files) - len(tables)
    return IsdLite(
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
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(
            f"{path}: needs rows of {len(names)} whole numbers, as ISD-Lite has, but it can't be "
            f"read ({reason_of(error)}). Remove it, or change stations."
        ) from error
    values = table[[*ISD_LITE]].astype(np.float64)
    values = values.mask(values == ISD_MISSING)
    rain = ["rain of 1 hour", "rain of 6 hours"]
    values[rain] = values[rain].replace(ISD_TRACE, 0)
    return pd.concat([table[[*ISD_DATE]], values], axis=1)[values.notna().any(axis=1)]
