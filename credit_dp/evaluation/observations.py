"""Read observations at stations, from netCDF, zarr, CSV or archives, as one row for each report.

Stations may report at times of their own, or move: memory grows with the number of reports, not
with that of all times at all places.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.calendar import STANDARD, Calendar, Times, are_dates, calendar_of, decode_dates
from credit_dp.data.grid import FULL_CIRCLE, POLE, Degrees
from credit_dp.data.sources.address import is_remote, local_path, reason_of, redact_secrets
from credit_dp.data.sources.coordinates import find_coordinates
from credit_dp.data.sources.datasets import is_netcdf, open_netcdf, open_zarr_dataset
from credit_dp.data.units import canonical_unit, find_known
from credit_dp.errors import UserError
from credit_dp.evaluation.alignment import translate_error_keys
from credit_dp.evaluation.station_formats import (
    ARCHIVES,
    ASOS,
    ASOS_MISSING,
    archive_files,
    as_variables,
    asos_reports,
)

if TYPE_CHECKING:
    import pandas as pd

EMPTY = ("", "nan", "na")  # in a CSV file, also in capitals
COORDINATES = ("time", "latitude", "longitude")
# Columns of a CSV file in small letters; the first that is there.
COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    "station": ("station", "station_id", "station_name", "stid", "wmo_id", "call_sign", "id"),
    "time": ("time", "valid_time", "datetime", "date_time", "date", "timestamp", "valid"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon", "long", "lng"),
    "elevation": ("elevation", "elev", "altitude", "surface_altitude"),
}
ALTITUDES = ("surface_altitude", "altitude")  # standard names
NAME_AND_UNIT = re.compile(r"(.*\S)\s*(?:\[(.*)\]|\((.*)\))")  # `t2m [degC]`, `t2m (degC)`
Values = NDArray[np.float64]
Indices = NDArray[np.intp]


@final
@dataclass(frozen=True)
class Observations:
    """R reports of S stations; a station that moves is one at each of its places.

    Attributes:
        names, latitude, longitude: of the stations, `(S,)`; degrees north and east.
        elevation: in metres above the sea, `(S,)`; NaN or a fill value if it is not known.
        times: of the reports, `(R,)`, rising.
        station: the index of the station of each report, `(R,)`; once at each time.
        values: `(R,)` by the name of the variable; NaN where there is none.
        units: by the name of the variable; may be empty.
        notes: what was left out.

    Raises:
        UserError: a value is infinite, or a station is not on the globe.
    """

    where: str
    calendar: Calendar
    names: Sequence[str]
    latitude: Degrees
    longitude: Degrees
    elevation: Values
    times: Times
    station: Indices
    values: Mapping[str, Values]
    units: Mapping[str, str]
    notes: Sequence[str] = ()

    @classmethod
    def open(cls, where: str, missing: Sequence[str] = ()) -> "Observations":
        """Open observations in netCDF or zarr, a CSV file, or a folder of ISD-Lite or IGRA.

        A store has variables with the dims time and station, in any order, and latitudes and
        longitudes along the dim of stations, as the CF conventions write time series; or all of
        them have one dim, as of points. A CSV file has a column for each of `COLUMN_NAMES` and of
        the variables, whose names may be followed by a unit in brackets, or is one of ASOS.

        Args:
            missing: numbers and, in a CSV file, texts that stand for missing values.

        Raises:
            UserError: it can't be read, or lacks one of these.
        """
        if where.lower().endswith(".csv"):
            return _read_csv(where, missing)
        with translate_error_keys("stations"):
            archive, files = ("", []) if is_remote(where) else archive_files(local_path(where))
            if archive:
                return _read_archive(where, missing, archive, files)
            opened = open_netcdf(where)[0] if is_netcdf(where) else open_zarr_dataset(where)[0]
            with opened:  # or it is closed with the garbage, while other threads use HDF5
                try:
                    data = opened.load()
                except (OSError, RuntimeError, ValueError) as error:  # also texts not in UTF-8
                    raise UserError(
                        f"{redact_secrets(where)}: can't be read ({reason_of(error)}). Change "
                        "stations."
                    ) from error
        return _from_dataset(data, redact_secrets(where), missing)

    def __post_init__(self) -> None:
        infinite = [name for name, each in self.values.items() if np.isinf(each).any()]
        if infinite:
            raise _error(self.where, f"{infinite[0]} has infinite values")
        on_globe = (np.abs(self.latitude) <= POLE) & (np.abs(self.longitude) <= FULL_CIRCLE)
        if not on_globe.all():
            name = self.names[int((~on_globe).argmax())]
            raise _error(self.where, f"station {name} has no place on the globe")

    def at(self, time: np.datetime64) -> slice:
        """Return which reports are of a time."""
        first, end = (int(self.times.searchsorted(time, side)) for side in ("left", "right"))
        return slice(first, end)

    def describe(self, report: int) -> str:
        """Return the station and the time of a report."""
        station = self.names[self.station[report]]
        return f"station {station} at {self.calendar.text(self.times[report])}"

    def of_stations(self, kept: NDArray[np.bool_]) -> "Observations":
        """Return the reports of the stations that are kept, `(S,)`."""
        rows = kept[self.station]
        return replace(
            self,
            names=list(compress(self.names, kept)),
            latitude=self.latitude[kept],
            longitude=self.longitude[kept],
            elevation=self.elevation[kept],
            times=self.times[rows],
            station=(kept.cumsum() - 1)[self.station[rows]],
            values={name: values[rows] for name, values in self.values.items()},
        )


def nearest_reports(
    observations: Observations, dates: Times, tolerance: np.timedelta64
) -> Observations:
    """Return observations at dates: of each station and variable the nearest report.

    Reports that are further than the tolerance from all dates are left out. Of two that are as
    near, the earlier one counts.

    Args:
        dates: rising, more than twice the tolerance apart.
    """
    nearest = np.searchsorted(dates[:-1] + np.diff(dates) / 2, observations.times)
    distance = np.abs(observations.times - dates[nearest])
    stations = len(observations.names)
    slot = nearest * stations + observations.station  # of a date and a station
    within = distance <= tolerance
    order = np.lexsort((np.arange(len(slot)), distance, slot))  # the best report of a slot first
    slots = np.unique(slot[within])
    values = {}
    for name, reported in observations.values.items():
        usable = order[(within & np.isfinite(reported))[order]]
        found, first = np.unique(slot[usable], return_index=True)
        values[name] = np.full(len(slots), np.nan)
        values[name][np.searchsorted(slots, found)] = reported[usable[first]]
    return replace(
        observations, times=dates[slots // stations], station=slots % stations, values=values
    )


def _from_dataset(data: xr.Dataset, where: str, missing: Sequence[str]) -> Observations:
    found = find_coordinates(data)
    absent = [name for name in COORDINATES if name not in found]
    if absent:
        raise _error(where, f"{absent[0]} is missing")
    time, latitude, longitude = (data[found[name]] for name in COORDINATES)
    (dim,), (time_dim,) = latitude.dims, time.dims
    if longitude.dims != (dim,):
        raise _error(where, "latitude and longitude need one dim")
    if not time.size or not are_dates(time.values):
        raise _error(where, f"{time.name} has no dates")
    dims = dict.fromkeys((time_dim, dim))  # one, if each report has its own place
    series = {
        str(name): array.transpose(*dims)
        for name, array in data.data_vars.items()
        if {*array.dims} == {*dims} and array.dtype.kind in "fiu" and name not in found.values()
    }
    if not series:
        raise _error(where, f"no variable has the dims {' and '.join(map(str, dims))}")
    calendar, times = calendar_of(time.values), decode_dates(time.values)
    if np.isnat(times).any():
        raise _error(where, f"{time.name} has missing dates")
    texts = _station_names(data, str(dim), where)
    north, east = (np.asarray(x.values, np.float64) for x in (latitude, longitude))
    for array in series.values() if missing else ():
        numbers = _numbers(missing)
        if array.dtype.kind == "f":  # -999.9 is another number in float32
            with np.errstate(over="ignore"):
                numbers = numbers.astype(array.dtype)
        array.values = np.where(np.isin(array.values, numbers), np.nan, array.values)
    units = {name: str(array.attrs.get("units", "")).strip() for name, array in series.items()}
    elevation = _elevation(data, str(dim), where)
    if len(dims) == 1:
        import pandas as pd

        columns = {name: array.values.astype(np.float64) for name, array in series.items()}
        places = {"station": texts, "latitude": north, "longitude": east, "elevation": elevation}
        return _from_rows(where, calendar, times, pd.DataFrame({**columns, **places}), units)
    order = np.argsort(times, kind="stable")
    in_order = times[order]
    repeated = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(repeated):
        raise _error(where, f"{time.name} has {calendar.text(repeated[0])} twice")
    is_there = np.zeros((len(times), len(texts)), bool)
    for array in series.values():
        is_there |= ~np.isnan(array.values[order])
    if not is_there.any():
        raise _error(where, "no variable has a value")
    at, station = np.nonzero(is_there)
    return Observations(
        where=where,
        calendar=calendar,
        names=texts,
        latitude=north,
        longitude=east,
        elevation=elevation,
        times=in_order[at],
        station=station,
        values={name: x.values[order][is_there].astype(np.float64) for name, x in series.items()},
        units=units,
    )


def _elevation(data: xr.Dataset, dim: str, where: str) -> Values:
    """Return the elevations of a dataset's stations, which may be a dim of reports."""
    for name, array in data.variables.items():
        known = str(name).lower() in COLUMN_NAMES["elevation"]
        known |= array.attrs.get("standard_name") in ALTITUDES
        if known and array.dims == (dim,) and array.dtype.kind in "fiu":
            _check_elevation(where, str(name), str(array.attrs.get("units", "")))
            return np.asarray(array.values, np.float64)
    return np.full(data.sizes[dim], np.nan)


def _check_elevation(where: str, name: str, unit: str) -> None:
    if canonical_unit(unit) not in ("", "m"):
        raise UserError(f"{where}: {name} needs metres, but is in {unit}. Convert it.")


def _from_rows(
    where: str, calendar: Calendar, times: Times, table: "pd.DataFrame", units: Mapping[str, str]
) -> Observations:
    """Return the observations of a table with a row for each report.

    Args:
        table: station, latitude, longitude and elevation as texts, degrees and metres, and the
            variables of `units`.
    """
    order = np.argsort(times, kind="stable")
    times, table = times[order], table.iloc[order]
    place = ["station", "latitude", "longitude"]
    station = table.groupby(place, dropna=False).ngroup().to_numpy()
    _, first = np.unique(station, return_index=True)
    places = table[place].iloc[first]
    by_time = np.lexsort((station, times))
    again = (np.diff(station[by_time]) == 0) & (np.diff(times[by_time]) == np.timedelta64(0))
    if again.any():
        row = int(by_time[1:][again][0])
        name, time = table["station"].iloc[row], calendar.text(times[row])
        raise _error(where, f"station {name} has {time} twice")
    return Observations(
        where=where,
        calendar=calendar,
        names=places["station"].tolist(),
        latitude=places["latitude"].to_numpy(np.float64),
        longitude=places["longitude"].to_numpy(np.float64),
        elevation=table["elevation"].iloc[first].to_numpy(np.float64),
        times=times,
        station=station,
        values={name: table[name].to_numpy(np.float64) for name in units},
        units=units,
    )


def _read_csv(where: str, missing: Sequence[str]) -> Observations:
    """Return the observations of a CSV file; see `Observations.open`."""
    import pandas as pd

    texts, decimal_comma = _read_texts(where)
    headings = [_name_and_unit(heading) for heading in texts.iloc[0]]
    lower = [name.lower() for name, _ in headings]
    is_asos = "valid" in lower and bool({*lower} & {*ASOS})
    for name, known in COLUMN_NAMES.items():
        found = next((lower.index(x) for x in known if x in lower), None)
        if found is None and name == "elevation":
            continue
        if found is None:
            raise _error(where, f"the column {name} is missing, which may be {', '.join(known)}")
        if name == "elevation":
            _check_elevation(where, *headings[found])
        headings[found] = name, ""
    names = [name for name, _ in headings]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise _error(where, f"the column {repeated[0]} is there twice")
    texts = texts.iloc[1:].set_axis(names, axis=1)
    if not len(texts):
        raise _error(where, "it has no rows")
    notes: list[str] = []
    if is_asos:
        texts, notes = asos_reports(texts.rename(columns=str.lower))
        missing = (*missing, ASOS_MISSING)
    if not texts["station"].all():
        raise _error(where, "a row has no station")
    times = pd.to_datetime(texts["time"], utc=True, format="ISO8601", errors="coerce")
    wrong = texts["time"][~times.dt.year.between(1678, 2261)]  # also of texts without dates
    if len(wrong):
        raise _error(
            where,
            f"time has '{wrong.iloc[0]}', no date from 1678 to 2261 like 2001-02-11T06:00",
        )
    columns: dict[str, Any] = {"station": texts["station"], "elevation": np.nan}
    for name in texts.columns.drop(["station", "time"]):
        is_place = name in COORDINATES
        numbers, wrong = _parse_numbers(texts[name], () if is_place else missing, decimal_comma)
        if len(wrong) and numbers.isna().all() and not is_place and find_known(name) is None:
            continue  # texts, such as the names of countries
        if len(wrong):
            word = wrong.iloc[0]
            advice = "" if is_place else f" (if a value is missing there, give missing=[{word}])"
            raise _error(where, f"{name} has '{word}', which is no number{advice}")
        columns[name] = numbers
    units = {name: unit for name, unit in headings if name in columns and name not in COLUMN_NAMES}
    if is_asos:
        reported = {name: columns.pop(name).to_numpy() for name in ASOS if name in columns}
        values, units = as_variables(reported, ASOS)
        columns |= values
    dates = times.dt.tz_localize(None).to_numpy(STANDARD.dtype)
    read = _from_rows(where, STANDARD, dates, pd.DataFrame(columns, texts.index), units)
    return replace(read, notes=notes)


def _read_archive(
    where: str, missing: Sequence[str], name: str, files: Sequence[Path]
) -> Observations:
    if missing:
        raise UserError(
            f"missing: has no effect on {name}, whose missing values are known. Leave it out."
        )
    read = ARCHIVES[name][1](files)
    found = _from_rows(where, STANDARD, read.times, read.table, read.units)
    return replace(found, notes=read.notes)


def _read_texts(where: str) -> "tuple[pd.DataFrame, bool]":
    import pandas as pd

    if is_remote(where):
        raise UserError(f"{redact_secrets(where)}: CSV is read from files only. Change stations.")
    with translate_error_keys("stations"):
        path = local_path(where)
    try:
        with path.open(encoding="utf-8") as file:
            comments = 0  # such as ASOS begins with
            while (header := file.readline()).startswith("#"):
                comments += 1
        separator = max(",;\t", key=header.count)
        # Texts as they stand: stations may be called 010 or NA, and 20010211 is a date.
        table = pd.read_csv(
            path, sep=separator, header=None, dtype=str, keep_default_na=False, skiprows=comments
        )
        return table.fillna("").apply(lambda texts: texts.str.strip()), separator == ";"
    except FileNotFoundError as error:
        raise UserError(f"{where}: no such file. Change stations.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: needs text in UTF-8, but has the byte 0x{error.object[error.start]:02x}. "
            "Convert it, as `iconv -f latin1 -t utf-8` does, or change stations."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: can't be read as CSV ({reason_of(error)}). Change stations."
        ) from error


def _parse_numbers(
    texts: "pd.Series", missing: Sequence[str], decimal_comma: bool
) -> "tuple[pd.Series, pd.Series]":
    import pandas as pd

    lower = texts.str.lower()
    plain = lower.str.replace(",", ".") if decimal_comma else lower
    numbers = pd.to_numeric(plain, errors="coerce").astype(np.float64)
    is_missing = lower.isin([*EMPTY, *(text.lower() for text in missing)])
    is_missing |= numbers.isin(_numbers(missing))
    return numbers.mask(is_missing), texts[~np.isfinite(numbers) & ~is_missing]


def _numbers(texts: Sequence[str]) -> Values:
    numbers = []
    for text in texts:
        with suppress(ValueError):
            numbers.append(float(text))
    return np.array(numbers, np.float64)


def _name_and_unit(heading: str) -> tuple[str, str]:
    match = NAME_AND_UNIT.fullmatch(heading)
    return (match[1], (match[2] or match[3] or "").strip()) if match else (heading, "")


def _station_names(data: xr.Dataset, dim: str, where: str) -> list[str]:
    marked = [
        name for name, x in data.variables.items() if "cf_role" in x.attrs and dim in x.dims[:1]
    ]
    array = data[next(iter(marked), dim)]  # the numbers, if the dim has no coordinate
    texts = array.values if array.ndim == 1 else [b"".join(row) for row in array.values]
    try:
        return [(x.decode() if isinstance(x, bytes) else str(x)).strip() for x in texts]
    except UnicodeDecodeError as error:
        raise _error(
            where, f"{array.name} has a name that is not UTF-8, {error.object!r}"
        ) from error


def _error(where: str, problem: str) -> UserError:
    return UserError(
        f"{where}: needs observations with the dims time and station, and latitude and longitude "
        f"of the stations, but {problem}. Change stations."
    )
