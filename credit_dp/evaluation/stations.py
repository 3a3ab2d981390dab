"""Score forecasts against observations at stations, beside the persistence of each observation.

Forecasts are interpolated bilinearly to the stations, and compared with the observations of the
same time. Each observation counts the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.cache import ProgressCallback
from credit_dp.data.calendar import Calendar, Times, are_dates, calendar_of, decode_dates
from credit_dp.data.channels import suggest_names
from credit_dp.data.grid import FULL_CIRCLE, GLOBAL, POLE, REGIONS, Degrees, Grid, check_regions
from credit_dp.data.regrid import PointInterpolation, outside_columns, outside_rows
from credit_dp.data.sources.address import is_remote, local_path, reason_of, redact_secrets
from credit_dp.data.sources.coordinates import find_coordinates
from credit_dp.data.sources.gridded import is_netcdf, open_netcdf, open_zarr_dataset
from credit_dp.data.units import find_conversion
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.alignment import (
    HOUR,
    ScoreRequest,
    common_step_hours,
    initial_time_indices,
    lead_time_indices,
    translate_error_keys,
)
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.metric_table import FORECAST, PERSISTENCE
from credit_dp.evaluation.scorecard import CSV_COLUMNS, csv_text
from credit_dp.variable_names import canonical_name

MAX_BYTES = 2**28  # of forecasts that are read at once
STATION_COLUMNS = (
    *("station", "latitude", "longitude", "variable", "unit", "lead_hours", "of"),
    *("observations", "rmse", "bias", "crps"),
)
SOURCES = (FORECAST, PERSISTENCE)
MISSING = ("", "nan", "na")  # in a CSV file, also in capitals
COORDINATES = ("time", "latitude", "longitude")
Values = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Observations:
    """Observations of T times at S stations.

    Attributes:
        where: their address, for messages.
        calendar: of the times.
        times: `(T,)`, rising.
        names, latitude, longitude: of the stations, `(S,)`; degrees north and east.
        values: `(T, S)` by the name of the variable; NaN where there is none.
        units: by the name of the variable; may be empty.
    """

    where: str
    calendar: Calendar
    times: Times
    names: Sequence[str]
    latitude: Degrees
    longitude: Degrees
    values: Mapping[str, Values]
    units: Mapping[str, str]

    @classmethod
    def open(cls, where: str) -> "Observations":
        """Open observations in netCDF or zarr, or a CSV file.

        A store has variables with the dims time and station, in any order, and latitudes and
        longitudes along the dim of stations, as the CF conventions write time series. A CSV file
        has the columns station, time, latitude, longitude, and one for each variable.

        Raises:
            UserError: it can't be read, or lacks one of these.
        """
        with translate_error_keys("stations"):
            if where.lower().endswith(".csv"):
                data = _read_csv(where)
            else:
                opened = open_netcdf(where)[0] if is_netcdf(where) else open_zarr_dataset(where)[0]
                with opened:  # or it is closed with the garbage, while other threads use HDF5
                    data = opened.load()
        where = redact_secrets(where)
        found = find_coordinates(data)
        missing = [name for name in COORDINATES if name not in found]
        if missing:
            raise _error(where, f"{missing[0]} is missing")
        time, latitude, longitude = (data[found[name]] for name in COORDINATES)
        (dim,) = latitude.dims
        if longitude.dims != (dim,) or time.dims == (dim,):
            raise _error(where, "latitude and longitude need one dim, without time")
        if not time.size or not are_dates(time.values):
            raise _error(where, f"{time.name} has no dates")
        (time_dim,) = time.dims
        series = {
            str(name): array.transpose(time_dim, dim)
            for name, array in data.data_vars.items()
            if set(array.dims) == {time_dim, dim} and array.dtype.kind in "fiu"
        }
        if not series:
            raise _error(where, f"no variable has the dims {time_dim} and {dim}")
        calendar, times = calendar_of(time.values), decode_dates(time.values)
        order = np.argsort(times, kind="stable")
        in_order = times[order]
        if np.isnat(in_order).any():
            raise _error(where, f"{time.name} has missing dates")
        repeated = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(repeated):
            again = calendar.text(repeated[0])
            raise _error(where, f"{time.name} has {again} twice")
        values = {name: array.values[order].astype(np.float64) for name, array in series.items()}
        infinite = [name for name, each in values.items() if np.isinf(each).any()]
        if infinite:
            raise _error(where, f"{infinite[0]} has infinite values")
        north, east = (np.asarray(x.values, np.float64) for x in (latitude, longitude))
        outside = ~((np.abs(north) <= POLE) & (np.abs(east) <= FULL_CIRCLE))
        names = _station_names(data, str(dim))
        if outside.any():
            raise _error(where, f"station {names[int(outside.argmax())]} has no place on the globe")
        return cls(
            where,
            calendar,
            times[order],
            names,
            north,
            east,
            values,
            {name: str(array.attrs.get("units", "")).strip() for name, array in series.items()},
        )

    def at(self, name: str, times: Times) -> Values:
        """Return the observations of a variable at `(L,)` times: `(L, S)`, NaN without one."""
        index = np.searchsorted(self.times, times).clip(max=len(self.times) - 1)
        is_there = self.times[index] == times
        return np.where(is_there[:, None], self.values[name][index], np.nan)


def _read_csv(where: str) -> xr.Dataset:
    """Return a CSV file as the dataset of `Observations`."""
    import pandas as pd

    if is_remote(where):
        raise UserError(f"{redact_secrets(where)}: CSV is read from files only. Change stations.")
    try:
        # Texts as they stand: stations may be called 010 or NA, and 20010211 is a date.
        table = pd.read_csv(local_path(where), header=None, dtype=str, keep_default_na=False)
        table = table.fillna("").apply(lambda texts: texts.str.strip())
        header, table = table.iloc[0], table.iloc[1:].set_axis(table.iloc[0], axis=1)
        if header.duplicated().any():
            raise _error(where, f"the column {header[header.duplicated()].iloc[0]} is there twice")
        missing = {"station", *COORDINATES}.difference(table.columns)
        if missing:
            raise _error(where, f"the column {min(missing)} is missing")
        if not len(table):
            raise _error(where, "it has no rows")
        if not table["station"].all():
            raise _error(where, "a row has no station")
        times = pd.to_datetime(table["time"], utc=True, format="ISO8601", errors="coerce")
        wrong = table["time"][~times.dt.year.between(1678, 2261)]  # also of texts without dates
        if len(wrong):
            raise _error(
                where,
                f"time has '{wrong.iloc[0]}', no date from 1678 to 2261 like 2001-02-11T06:00",
            )
        table["time"] = times.dt.tz_localize(None)
        for name in table.columns.drop(["station", "time"]):
            numbers = pd.to_numeric(table[name], errors="coerce").astype(np.float64)
            wrong = table[name][~np.isfinite(numbers) & ~table[name].str.lower().isin(MISSING)]
            if len(wrong):
                raise _error(where, f"{name} has '{wrong.iloc[0]}', which is no number")
            table[name] = numbers
        places = table.groupby("station")[["latitude", "longitude"]].agg(["min", "max"])
        moved = places[(places.xs("max", 1, 1) > places.xs("min", 1, 1)).any(axis=1)]
        if len(moved):
            raise _error(where, f"station {moved.index[0]} has several places")
        rows = table.set_index(["time", "station"])
        if not rows.index.is_unique:
            time, station = rows.index[rows.index.duplicated()][0]
            raise _error(where, f"station {station} has {time.isoformat()} twice")
        data: xr.Dataset = rows.drop(columns=["latitude", "longitude"]).to_xarray()
        place = table.groupby("station")[["latitude", "longitude"]].first().loc[data["station"]]
        return data.assign_coords({name: ("station", place[name].values) for name in place})
    except FileNotFoundError as error:
        raise UserError(f"{where}: no such file. Change stations.") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: can't be read as CSV ({reason_of(error)}). Change stations."
        ) from error


def _station_names(data: xr.Dataset, dim: str) -> list[str]:
    """Return the names of stations: as CF marks them, of the dim's coordinate, or their numbers."""
    marked = [
        name for name, x in data.variables.items() if "cf_role" in x.attrs and dim in x.dims[:1]
    ]
    array = data[next(iter(marked), dim)]  # the numbers, if the dim has no coordinate
    texts = array.values if array.ndim == 1 else [b"".join(row) for row in array.values]
    return [(x.decode() if isinstance(x, bytes) else str(x)).strip() for x in texts]


def _error(where: str, problem: str) -> UserError:
    return UserError(
        f"{where}: needs observations with the dims time and station, and latitude and longitude "
        f"of the stations, but {problem}. Change stations."
    )


@final
class StationSums:
    """The sums of one variable's scores at each station, by source and lead time, `(2, L, S)`."""

    def __init__(self, leads: int, stations: int) -> None:
        shape = (len(SOURCES), leads, stations)
        # Of observations, squared errors, errors, distances (see `crps`) and variances.
        self._all = [np.zeros(shape) for _ in range(5)]

    def add(self, source: int, leads: slice, members: Values, observed: Values) -> None:
        """Add the members `(M, l, S)` of one initial time at some lead times."""
        number = len(members)
        mean = members.mean(axis=0)
        error = mean - observed
        distance = np.abs(members - observed).mean(axis=0)
        variance = np.zeros_like(error)
        if number > 1:
            # The sum over all pairs, from the members in order; fair: of different members.
            ranks = 2 * np.arange(1, number + 1) - number - 1
            pairs = np.tensordot(ranks, np.sort(members, axis=0), 1)
            distance -= pairs / (number * (number - 1))
            variance = members.var(axis=0, ddof=1)
        scored = np.isfinite(error)
        values = (scored, error**2, error, distance, variance)
        for sums, each in zip(self._all, values, strict=True):
            sums[source, leads] += np.where(scored, each, 0)

    def means(self, stations: NDArray[np.bool_]) -> dict[str, Values]:
        """Return the scores over some stations, `(2, L)`; NaN without observations."""
        return self._scores(*(sums[..., stations].sum(axis=-1) for sums in self._all))

    def of_stations(self) -> dict[str, Values]:
        """Return the scores of each station, `(2, L, S)`; NaN without observations."""
        return self._scores(*self._all)

    @staticmethod
    def _scores(
        count: Values, squares: Values, errors: Values, crps: Values, variances: Values
    ) -> dict[str, Values]:
        some = np.where(count > 0, count, np.nan)
        return {
            "observations": count,
            "rmse": np.sqrt(squares / some),
            "bias": errors / some,
            "crps": crps / some,
            "spread": np.sqrt(variances / some),
        }


@final
@dataclass(frozen=True)
class StationScores:
    """Scores at the stations that a forecast covers.

    Attributes:
        observations: of these stations.
        members: of the forecast.
        hours: lead times.
        units: of the variables, as the forecast has them.
        sums: of each variable.
        regions: names of the globe and of the regions in the request.
        notes: what was left out.
    """

    observations: Observations
    members: int
    hours: Sequence[int]
    units: Mapping[str, str]
    sums: Mapping[str, StationSums]
    regions: Sequence[str]
    notes: Sequence[str]

    def of_region(self, variable: str, region: str) -> dict[str, Values]:
        """Return the scores of a variable over the stations of a region, `(2, L)`."""
        seen = self.observations
        return self.sums[variable].means(REGIONS[region].holds(seen.latitude, seen.longitude))

    def to_csv(self) -> str:
        """Return the scores over all stations, and those of regions, as CSV."""
        rows: list[Sequence[object]] = []
        for region in self.regions:
            for variable in self.sums:
                for score, values in self.of_region(variable, region).items():
                    if score == "spread" and self.members == 1:
                        continue
                    unit = "" if score == "observations" else self.units[variable]
                    rows += [
                        (variable, "", unit, hours, score, source, _number(values[s, x]), region)
                        for x, hours in enumerate(self.hours)
                        for s, source in enumerate(SOURCES[: 1 if score == "spread" else 2])
                    ]
        return csv_text(CSV_COLUMNS, rows)

    def stations_csv(self) -> str:
        """Return the scores of each station as CSV, of those with observations."""
        seen, rows = self.observations, []
        for variable, sums in self.sums.items():
            scores = sums.of_stations()
            for s, x, station in np.argwhere(scores["observations"] > 0):
                place = seen.names[station], seen.latitude[station], seen.longitude[station]
                values = (_number(scores[name][s, x, station]) for name in STATION_COLUMNS[-4:])
                rows.append(
                    (*place, variable, self.units[variable], self.hours[x], SOURCES[s], *values)
                )
        return csv_text(STATION_COLUMNS, rows)


def _number(value: np.float64) -> str:
    if not np.isfinite(value):
        return ""
    return repr(int(value) if value == int(value) else float(value))


def score_stations(
    request: ScoreRequest, forecast: ForecastStore, where: str, report: ProgressCallback
) -> StationScores:
    """Score a forecast store against the observations at an address.

    Args:
        report: called with a title and the fraction done.

    Raises:
        UserError: a store is invalid, nothing can be compared, or a forecast has NaN.
    """
    check_regions(request.regions)
    inits = initial_time_indices(request, forecast)
    leads = lead_time_indices(request, forecast)
    times = forecast.initial_times[inits]
    common_step_hours(forecast, times, forecast.lead_times[leads])  # refuses parts of hours
    observations = Observations.open(where)
    if observations.calendar != forecast.calendar:
        raise UserError(
            f"{observations.where}: has dates of the {observations.calendar.name} calendar, the "
            f"forecast of the {forecast.calendar.name} one. Change stations."
        )
    if forecast.grid.is_projected:
        raise UserError(
            f"{forecast.where}: is on a projection, but interpolation to stations needs rows of "
            "latitudes. Change forecast."
        )
    pairs = _variables(request, forecast, observations)
    observations, notes = _covered(observations, forecast.grid)
    interpolation = PointInterpolation(forecast.grid, observations.latitude, observations.longitude)
    sums = {name: StationSums(len(leads), len(observations.names)) for name in pairs}
    for done, (name, other) in enumerate(pairs.items()):
        scale, offset = _conversion(forecast, name, observations, other)
        for block in _blocks(forecast, name, len(inits), len(leads)):
            fields = forecast.read(name, (), inits[block[0]], leads[block[1]])
            at_stations = interpolation(fields.astype(np.float64))[..., 0, :]
            members = np.moveaxis(at_stations, 2, 1)
            if name not in request.masked and not np.isfinite(members).all():
                raise UserError(
                    f"{forecast.where}: {name} has NaN or infinite values near stations. If it has "
                    f"no values at some points, such as over land, give masked=[{name}], or leave "
                    "it out of variables."
                )
            for start, of_init in zip(times[block[0]], members, strict=True):
                valid = start + forecast.lead_times[leads[block[1]]]
                observed = observations.at(other, valid) * scale + offset
                persistent = observations.at(other, start[None]) * scale + offset
                sums[name].add(0, block[1], of_init, observed)
                sums[name].add(1, block[1], persistent[None] + 0 * observed, observed)
        report("scoring", (done + 1) / len(pairs))
        if not sums[name].of_stations()["observations"][0].any():
            text = forecast.calendar.text
            raise UserError(
                f"{observations.where}: has no observation of {other} at a time of the forecasts, "
                f"{text(times[0])} to {text(times[-1] + forecast.lead_times[leads[-1]])}; it has "
                f"{text(observations.times[0])} to {text(observations.times[-1])}. Change stations "
                "or dates, or leave it out of variables."
            )
    return StationScores(
        observations,
        forecast.members,
        [int(x / HOUR) for x in forecast.lead_times[leads]],
        {name: forecast.variables[name].units for name in pairs},
        sums,
        tuple(dict.fromkeys([GLOBAL, *request.regions])),
        notes,
    )


def _variables(
    request: ScoreRequest, forecast: ForecastStore, observations: Observations
) -> dict[str, str]:
    """Return the observed variable of each scored one; names of ECMWF and of ERA5 are the same.

    Raises:
        UserError: a variable is not among the forecasts or observations, or is twice among these,
            or none is in both.
    """
    observed: dict[str, str] = {}
    for name in observations.values:
        first = observed.setdefault(canonical_name(name), name)
        if first != name:
            raise UserError(
                f"{observations.where}: {first} and {name} are two names of one variable. Leave "
                "one out."
            )
    at_surface = [name for name, variable in forecast.variables.items() if not variable.levels]
    for name in request.variables:
        if name not in at_surface or canonical_name(name) not in observed:
            places = forecast.where, at_surface
            if name in at_surface:
                places = observations.where, list(observations.values)
            raise UserError(
                f"{places[0]}: no {name} without levels. {suggest_names(name, places[1])}. Change "
                "variables."
            )
    names = request.variables or at_surface
    pairs = {name: observed[x] for name in names if (x := canonical_name(name)) in observed}
    if not pairs:
        raise UserError(
            f"{observations.where}: none of its variables {', '.join(observations.values)} is "
            f"among the forecast's without levels: {', '.join(at_surface) or 'none'}. Rename the "
            "variables, or change stations."
        )
    return pairs


def _conversion(
    forecast: ForecastStore, name: str, observations: Observations, other: str
) -> tuple[float, float]:
    """Return `(scale, offset)` from the unit of the observations to that of the forecast.

    Raises:
        UserError: the units can't be converted.
    """
    new, old = forecast.variables[name].units, observations.units[other]
    conversion = find_conversion(old, new)
    if conversion is None:
        raise UserError(
            f"{observations.where}: {other} is in {old}, which can't be converted to the "
            f"forecast's {new}. Convert it, or leave it out of variables."
        )
    return conversion


def _covered(observations: Observations, grid: Grid) -> tuple[Observations, list[str]]:
    """Return the observations of the stations that a grid covers, and what is left out.

    Raises:
        UserError: it covers none.
    """
    inside = ~outside_rows(grid, observations.latitude)
    inside &= ~outside_columns(grid, observations.longitude)
    if inside.all():
        return observations, []
    left_out = int((~inside).sum())
    if not inside.any():
        raise UserError(
            f"{observations.where}: none of its {counted(left_out, 'station')} is in the "
            "forecast's region. Change stations or forecast."
        )
    kept = replace(
        observations,
        names=list(compress(observations.names, inside)),
        latitude=observations.latitude[inside],
        longitude=observations.longitude[inside],
        values={name: values[:, inside] for name, values in observations.values.items()},
    )
    return kept, [f"{counted(left_out, 'station')} outside of the forecast's region not scored"]


def _blocks(
    forecast: ForecastStore, name: str, inits: int, leads: int
) -> Iterator[tuple[slice, slice]]:
    """Yield parts of initial and lead times that are read at once, whole chunks if they fit."""
    height, width = forecast.grid
    fields = max(1, MAX_BYTES // (4 * forecast.members * height * width))
    lead_count = min(leads, fields)
    init_count = min(max(1, fields // leads), forecast.initial_times_per_chunk(name), inits)
    for init in range(0, inits, init_count):
        for lead in range(0, leads, lead_count):
            yield slice(init, init + init_count), slice(lead, min(lead + lead_count, leads))
