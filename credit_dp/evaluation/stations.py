"""Score forecasts against observations at stations, beside the persistence of each observation.

Forecasts are interpolated to the stations, and compared with the observations of the same time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.cache import ProgressCallback
from credit_dp.data.channels import Channel, suggest_names
from credit_dp.data.grid import GLOBAL, REGIONS, Degrees, check_regions, unit_vectors
from credit_dp.data.limits import (
    HUGE,
    are_fill_values,
    is_implausible,
    likely_unit,
    physical_range,
)
from credit_dp.data.regrid import PointInterpolation, outside_points
from credit_dp.data.sources.opening import open_single_source
from credit_dp.data.sources.source import VariableInfo
from credit_dp.data.units import (
    GRAVITY,
    ValueRange,
    canonical_unit,
    find_conversion,
    usual_unit,
)
from credit_dp.data.winds import lies_along_grid, other_component
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
from credit_dp.evaluation.maps import EARTH, MapGrid
from credit_dp.evaluation.observations import Observations, Values, nearest_reports
from credit_dp.evaluation.station_scores import StationScores, StationSums
from credit_dp.sphere import EARTH_RADIUS
from credit_dp.variable_names import UPPER_AIR_NAMES, canonical_name, long_name

MAX_BYTES = 2**28  # of forecasts that are read at once
TEMPERATURE, GROUND = "2m_temperature", "geopotential_at_surface"
HEIGHT = "geopotential_height"
SHOWN = 12  # names in a message
LOWEST, HIGHEST = -500.0, 9000.0  # metres, of elevations that are no fill values
NEIGHBOUR_KM = 75.0
STATIONS_AT_ONCE = 1000
DAY = np.timedelta64(24, "h")


@final
@dataclass(frozen=True)
class StationOptions:
    """How observations are read, and forecasts compared with them.

    Attributes:
        missing: numbers and texts that stand for missing values.
        tolerance: from a date of the forecast up to which an observation counts as one of that
            date, the nearest one of each station; None: at the date alone.
        nearest: whether forecasts are taken from the nearest row and column, not interpolated.
        orography: a store with the height of the model's ground; empty: no correction for height.
        lapse_rate: by which 2 m temperature is corrected, K km-1.
        by_density: whether stations count less where there are many, see `density_weights`.
        planet: whose coasts the maps of the errors have, see `MapGrid`.
    """

    missing: Sequence[str] = ()
    tolerance: np.timedelta64 | None = None
    nearest: bool = False
    orography: str = ""
    lapse_rate: float = 6.5
    by_density: bool = False
    planet: str = EARTH


def score_stations(
    request: ScoreRequest,
    forecast: ForecastStore,
    where: str,
    report: ProgressCallback,
    options: StationOptions,
) -> StationScores:
    """Score a forecast store against the observations at an address.

    Raises:
        UserError: a store is invalid, nothing can be compared, or a forecast has NaN.
    """
    check_regions(request.regions)
    inits = initial_time_indices(request, forecast)
    leads = lead_time_indices(request, forecast)
    times = forecast.initial_times[inits]
    spans = forecast.lead_times[leads]
    common_step_hours(forecast, times, spans)  # refuses parts of hours
    stored = Observations.open(where, options.missing)
    if stored.calendar != forecast.calendar:
        raise UserError(
            f"{stored.where}: has dates of the {stored.calendar.name} calendar, the "
            f"forecast of the {forecast.calendar.name} one. Change stations."
        )
    given, tolerance = stored, options.tolerance
    valid = np.unique(times[:, None] + spans)
    if tolerance is not None:
        dates = np.union1d(valid, times)  # persistence needs the initial times, too
        if len(dates) > 1 and 2 * tolerance >= np.diff(dates).min():
            minutes = np.diff(dates).min() / np.timedelta64(2, "m")
            raise UserError(
                f"tolerance: needs less than {minutes:g}min, half the time between dates of the "
                f"forecast, got {tolerance / np.timedelta64(1, 'm'):g}min."
            )
        stored = nearest_reports(given, dates, tolerance)
    observed = _observed_channels(request, forecast, stored)
    pairs = {channel.name: other for channel, other in observed.items()}
    variables = list(dict.fromkeys(channel.variable for channel in observed))
    for name in request.limits:
        if name not in variables:
            raise UserError(
                f"limits.{name}: there is no scored variable {name}. "
                f"{suggest_names(name, variables)}. Change limits or variables."
            )
    _turn_winds(forecast, variables)
    columns = [_Column.read(request, forecast, stored, *pair) for pair in observed.items()]
    in_region = _covered(stored, forecast)
    observations = replace(
        stored,
        values={column.name: column.values for column in columns},
        units={column.name: column.unit for column in columns},
    ).of_stations(in_region)
    places = observations.latitude, observations.longitude
    interpolation = PointInterpolation(
        forecast.grid, *places, projected=True, nearest=options.nearest
    )
    regions = tuple(dict.fromkeys([GLOBAL, *request.regions]))
    inside = np.stack([REGIONS[region].holds(*places) for region in regions])
    shifts, height_notes = _height_shifts(options, forecast, observations, interpolation)
    sums = {
        name: StationSums(
            len(leads), forecast.members, inside, _weights(options, observations, name, valid)
        )
        for name in pairs
    }
    is_scored = {name: np.zeros(len(observations.times), bool) for name in pairs}

    def unobserved(what: str, cure: str) -> UserError:
        text = forecast.calendar.text
        return UserError(
            f"{stored.where}: has no observation of {what} at a time of the forecasts, "
            f"{text(times[0])} to {text(times[-1] + spans[-1])}; it has reports from "
            f"{text(given.times[0])} to {text(given.times[-1])}. Change stations, dates, "
            f"tolerance, {cure}."
        )

    for done, column in enumerate(columns):
        name, values = column.name, observations.values[column.name]
        variable, level = column.channel.variable, column.channel.level
        levels = () if level is None else (level,)
        for block in _blocks(forecast, variable, len(inits), len(leads)):
            fields = forecast.read(variable, levels, inits[block[0]], leads[block[1]])
            fields = fields[..., 0, :, :]
            for i, x in np.ndindex(fields.shape[:2]):
                init, lead = block[0].start + i, block[1].start + x
                time = times[init] + spans[lead]
                rows = observations.at(time)
                if rows.start == rows.stop:
                    continue
                stations = observations.station[rows]
                band = fields[i, x][:, interpolation.source_rows(stations)].astype(np.float64)
                members = np.asarray(interpolation(band, stations), np.float64)
                column.check_forecast(request, forecast, members, inits[init], leads[lead])
                if name in shifts:
                    members += shifts[name][stations]
                hour = int((time - time.astype("M8[D]")) / HOUR)
                persistent = _at_initial_time(observations, name, times[init])[stations]
                scored = sums[name].add(0, lead, hour, stations, members, values[rows])
                sums[name].add(1, lead, hour, stations, persistent[None], values[rows])
                is_scored[name][rows] |= scored
        report("scoring", (done + 1) / len(pairs))
        # Few balloons reach the highest levels, which may be scored without any observation.
        if not is_scored[name].any() and _meaning(variable, level)[1] is None:
            raise unobserved(column.stored_name, "or leave it out of variables")
    if not any(rows.any() for rows in is_scored.values()):
        raise unobserved("what is scored", "levels or variables")
    coverage, notes = _describe_coverage(
        given, stored, observations, pairs, is_scored, valid, tolerance
    )
    return StationScores(
        forecast.where,
        MapGrid(forecast.grid, options.planet),
        observations,
        forecast.members,
        [int(x / HOUR) for x in spans],
        {channel.name: channel for channel in observed},
        {column.name: column.unit for column in columns},
        sums,
        regions,
        coverage,
        [
            *given.notes,
            *notes,
            *(note for column in columns for note in column.notes),
            *height_notes,
        ],
    )


def _height_shifts(
    options: StationOptions,
    forecast: ForecastStore,
    observations: Observations,
    interpolation: PointInterpolation,
) -> tuple[dict[str, Values], list[str]]:
    """Return what corrects forecasts for the height of stations, `(S,)`, by variable, and notes.

    Temperature falls by the lapse rate from the model's ground up to the station; it stays as it
    is at a station whose elevation is not known.
    """
    names = [name for name in observations.values if canonical_name(name) == TEMPERATURE]
    if not names and options.orography:
        raise UserError(
            f"orography: has an effect on {TEMPERATURE} only, which is not scored. Leave it out."
        )
    if not names:
        return {}, []
    has_elevation = (observations.elevation > LOWEST) & (observations.elevation < HIGHEST)
    if not options.orography:
        return {}, [f"{names[0]} is not corrected for height, as orography= is not given"]
    ground = interpolation(_model_heights(options.orography, forecast))
    has_elevation &= np.isfinite(ground)
    if not has_elevation.any():
        return {}, [f"{names[0]} is not corrected for height, as no station has an elevation"]
    above = np.where(has_elevation, observations.elevation - ground, 0.0)
    in_kelvin = -options.lapse_rate / 1000 * above
    note = (
        f"{names[0]} is corrected for height by {options.lapse_rate:g} K/km at "
        f"{has_elevation.sum():,} of {counted(len(above), 'station')}"
    )
    scales = {name: _conversion_between("K", observations.units[name]) for name in names}
    return {name: scale * in_kelvin for name, scale in scales.items()}, [note]


def _conversion_between(unit: str, other: str) -> float:
    conversion = find_conversion(unit, other)
    return 1.0 if conversion is None else conversion[0]


def _model_heights(where: str, forecast: ForecastStore) -> Values:
    """Return the height of the forecast model's ground in metres, `(H, W)`."""
    with translate_error_keys("orography"):
        source = open_single_source(where, (GROUND,))
    variable = source.variables.get(GROUND)
    if variable is None:
        raise UserError(
            f"{source.where}: no {GROUND}. {suggest_names(GROUND, source.variables)}. Change "
            "orography."
        )
    differing = source.grid.difference(forecast.grid)
    if differing:
        raise UserError(
            f"{source.where}: needs the forecast's grid, but has {differing[0]}, where the "
            f"forecast has {differing[1]}. Change orography."
        )
    conversion = find_conversion(variable.units, "m2 s-2")
    if not variable.units or conversion is None:
        raise UserError(
            f"{source.where}: {GROUND} needs units of m2 s-2 or m, got '{variable.units}'. Set its "
            "attribute units, or change orography."
        )
    with translate_error_keys("orography"):
        field = source.read([Channel(GROUND)], slice(0, 1), slice(0, source.grid[0]))[0, 0]
    limits = physical_range(GROUND, variable, None, variable.units)
    if limits is not None and limits.outside(field).any():
        raise UserError(
            f"{source.where}: {GROUND} is {np.nanmin(field):g} to {np.nanmax(field):g} "
            f"{variable.units}, but its limits are {limits.low:g} to {limits.high:g}. Set its "
            "attribute units, or change orography."
        )
    heights: Values = (field.astype(np.float64) * conversion[0] + conversion[1]) / GRAVITY
    return heights


def _weights(
    options: StationOptions,
    observations: Observations,
    name: str,
    valid: NDArray[np.datetime64],
) -> Values:
    """Return the weights of stations in the scores of a variable, `(S,)`."""
    weights = np.ones(len(observations.names))
    if options.by_density:
        counts = np.isfinite(observations.values[name]) & np.isin(observations.times, valid)
        reporting = np.unique(observations.station[counts])
        places = observations.latitude[reporting], observations.longitude[reporting]
        weights[reporting] = density_weights(*places)
    return weights


def density_weights(latitude: Degrees, longitude: Degrees) -> Values:
    """Return one over the number of stations within `NEIGHBOUR_KM`, itself included, `(S,)`."""
    order = np.argsort(latitude)
    rising, points = latitude[order], unit_vectors(latitude[order], longitude[order])
    angle = 1000 * NEIGHBOUR_KM / EARTH_RADIUS
    weights = np.empty(len(order))
    for first in range(0, len(order), STATIONS_AT_ONCE):
        some = slice(first, first + STATIONS_AT_ONCE)
        south, north = rising[some][[0, -1]] + np.degrees(angle) * np.array([-1.01, 1.01])
        near = slice(*rising.searchsorted([south, north]))
        is_near = points[:, some].T @ points[:, near] >= np.cos(angle)
        weights[order[some]] = 1 / is_near.sum(axis=1)
    return weights


def _at_initial_time(observations: Observations, name: str, time: np.datetime64) -> Values:
    rows = observations.at(time)
    values = np.full(len(observations.names), np.nan)
    values[observations.station[rows]] = observations.values[name][rows]
    return values


def _describe_coverage(
    stored: Observations,
    near: Observations,
    observations: Observations,
    pairs: Mapping[str, str],
    is_scored: Mapping[str, NDArray[np.bool_]],
    valid: NDArray[np.datetime64],
    tolerance: np.timedelta64 | None,
) -> tuple[str, list[str]]:
    """Return how many stations and observations count, and why others do not.

    Args:
        near: those of `stored` that are near a date of the forecast, if there is a tolerance.
        observations: those in the forecast's region and within the limits.
        pairs: the observed variable of each scored one.
        is_scored: which of `observations` are compared with a forecast.
    """
    given = sum(int(np.isfinite(stored.values[other]).sum()) for other in pairs.values())
    is_there = {name: np.isfinite(observations.values[name]) for name in pairs}
    has_date = np.isin(observations.times, valid)
    counts = {
        "no observation at a date of the forecast": [x & has_date for x in is_there.values()],
        "the forecast has no values there": list(is_scored.values()),
    }
    total, left = len(stored.names), len(observations.names)
    reasons = [("outside of the forecast's region", total - left)]
    for reason, reports in counts.items():
        remaining = len(np.unique(observations.station[np.logical_or.reduce(reports)]))
        reasons.append((reason, left - remaining))
        left = remaining
    notes = [
        f"{count:,} of {counted(total, 'station')} left out: {reason}"
        for reason, count in reasons
        if count
    ]
    repeated = sum(number > 1 for number in Counter(stored.names).values())
    if repeated:
        notes.append(
            f"{counted(repeated, 'name')} of stations at several places, each of which is counted "
            "as a station"
        )
    dated = sum(int(np.isfinite(near.values[other]).sum()) for other in pairs.values())
    undated = given - dated + sum(int((x & ~has_date).sum()) for x in is_there.values())
    if undated:
        reason = "not at a date of the forecast"
        if tolerance is not None:
            minutes = tolerance / np.timedelta64(1, "m")
            reason += f", nor the nearest of a station within {minutes:g} minutes"
        notes.append(f"{undated:,} of {counted(given, 'observation')} left out: {reason}")
    scored = sum(int(x.sum()) for x in is_scored.values())
    return (
        f"{left:,} of {counted(total, 'station')} and {scored:,} of "
        f"{counted(given, 'observation')} count"
    ), notes


@final
@dataclass(frozen=True)
class _Column:
    """The observations of one channel.

    Attributes:
        unit: of the values, that of the forecast; empty if unknown.
        values: `(R,)`, NaN where they are missing or outside the limits.
        limits: physical or given ones; None without.
        notes: what was left out or assumed.
    """

    channel: Channel
    stored_name: str
    unit: str
    values: Values
    limits: ValueRange | None
    notes: Sequence[str]

    @property
    def name(self) -> str:
        return self.channel.name

    @classmethod
    def read(
        cls,
        request: ScoreRequest,
        forecast: ForecastStore,
        observations: Observations,
        channel: Channel,
        other: str,
    ) -> "_Column":
        """Return the observations in the forecast's unit, without those outside the limits."""
        stored, name = observations.values[other], channel.variable
        unit = forecast.variables[name].units or usual_unit(name)
        scale, offset = _conversion(forecast, observations, other, unit)
        with np.errstate(over="ignore"):
            values = stored * scale + offset
        notes = []
        if not observations.units[other]:
            notes.append(
                f"{other} is taken for {unit}, as no unit is given"
                if unit
                else f"the unit of {other} is not known"
            )
        limits = known = _limits(request, forecast, channel, unit)
        if name not in request.limits and known is None:
            limits = _range_without_fill(values)
        if limits is not None and (outside := limits.outside(values)).any():
            row = int(outside.argmax())
            given = counted(int(np.isfinite(stored).sum()), "observation")
            span = f"{limits.low:g} to {limits.high:g} {unit}".rstrip()
            problem = (
                f"{outside.sum():,} of {given} of {other} are outside the limits {span}, such as "
                f"{stored[row]:g} of {observations.describe(row)}"
            )
            cure = _cure(stored, outside, limits, unit, scale == 1 and offset == 0)
            if cure:
                text = cure.format(name=name, other=other)
                raise UserError(f"{observations.where}: {problem}. {text}")
            notes.append(f"{problem}, left out")
            values[outside] = np.nan
        return cls(channel, other, unit, values, known, notes)

    def check_forecast(
        self,
        request: ScoreRequest,
        forecast: ForecastStore,
        members: Values,
        init: np.intp,
        lead: np.intp,
    ) -> None:
        name, limits = self.channel.variable, self.limits
        if name not in request.masked and not np.isfinite(members).all():
            raise UserError(
                f"{forecast.where}: {self.name} has NaN or infinite values near stations. If it "
                f"has no values at some points, such as over land, give masked=[{name}], or leave "
                "it out of variables."
            )
        if limits is not None and is_implausible(members, limits):
            low, high = np.nanmin(members), np.nanmax(members)
            raise UserError(
                f"{forecast.where}: {self.name} {forecast.describe(init, lead)} is {low:g} to "
                f"{high:g} at stations, but its limits are {limits.low:g} to {limits.high:g}. If "
                f"the values are right, give 'limits={{{name}:[LOW,HIGH]}}'."
            )


def _limits(
    request: ScoreRequest, forecast: ForecastStore, channel: Channel, unit: str
) -> ValueRange | None:
    name = channel.variable
    if name in request.limits:
        given = request.limits[name]
        return None if given is None else ValueRange(*map(float, given))
    known = physical_range(name, VariableInfo(True), channel.level, unit)
    variable = forecast.variables[name]
    if known is None or not variable.summed or forecast.span is None:
        return known
    days = max(1.0, float(forecast.span / DAY))
    return ValueRange(known.low * days, known.high * days)


def _range_without_fill(values: Values) -> ValueRange | None:
    """Return the range of all values but fill values, wider by its length on both sides."""
    others = values[np.isfinite(values) & ~are_fill_values(values) & (np.abs(values) < HUGE)]
    if not len(others):
        return None
    low, high = float(others.min()), float(others.max())
    return ValueRange(2 * low - high, 2 * high - low)


def _cure(
    stored: Values, outside: NDArray[np.bool_], limits: ValueRange, unit: str, is_plain: bool
) -> str:
    """Return what helps if a column is implausible; empty if only some of its values are.

    Args:
        stored: as they were read.
        limits: of the values in `unit`.
        is_plain: whether they are taken to be in this unit already.
    """
    are_most = outside.sum() > np.isfinite(stored).sum() / 2
    values, counts = np.unique(stored[outside], return_counts=True)
    are_fill = are_fill_values(values)
    if counts[are_fill].sum() > outside.sum() / 2:
        fill = values[are_fill][counts[are_fill].argmax()]
        return f"It looks like a fill value: give missing=[{fill:g}]." if are_most else ""
    rest = stored[np.isfinite(stored) & ~np.isin(stored, values[are_fill])]
    likely = ""
    if is_plain:
        likely = likely_unit(rest, limits, canonical_unit(unit))
    elif are_most and np.mean((rest >= limits.low) & (rest <= limits.high)) > 0.99:
        likely = unit
    if likely:
        return (
            f"They look like {likely}: name the column '{{other}} [{likely}]' in CSV, or set its "
            "attribute units in netCDF and zarr."
        )
    if are_most:
        return (
            "Convert it, leave it out of variables, or if the values are right, give "
            "'limits={{{name}:[LOW,HIGH]}}'."
        )
    return ""


def _turn_winds(forecast: ForecastStore, names: Iterable[str]) -> None:
    """Read winds eastward and northward, as they are at stations."""
    for name in names:
        stated = forecast.variables[name].standard_name
        if other_component(name) and lies_along_grid(stated, forecast.grid) is None:
            raise UserError(
                f"{forecast.where}: {name} is on a projection, and nothing says whether it lies "
                "along rows and columns. Set its attribute standard_name to x_wind or y_wind, or "
                "to eastward_wind or northward_wind, or leave it out of variables."
            )
        forecast.turn_wind(name, to_grid=False)


def _observed_channels(
    request: ScoreRequest, forecast: ForecastStore, observations: Observations
) -> dict[Channel, str]:
    """Return the observed variable of each scored channel; names of ECMWF and ERA5 are the same.

    On pressure levels it is one like `temperature_500`.
    """
    observed: dict[tuple[str, int | None], str] = {}
    for name in observations.values:
        first = observed.setdefault(_meaning(name), name)
        if first != name:
            raise UserError(
                f"{observations.where}: {first} and {name} are two names of one variable. Leave "
                "one out."
            )
    channels = [
        Channel(name, level)
        for name, variable in forecast.variables.items()
        if not (variable.levels and forecast.model_levels)
        for level in variable.levels or (None,)
    ]
    pairs = {}
    for channel in channels:
        # Heights of levels in m are converted to geopotential, and need no names of their own.
        is_height = forecast.variables[channel.variable].standard_name == HEIGHT
        variable = HEIGHT if is_height else channel.variable
        meanings = (channel.name, None), _meaning(variable, channel.level)
        other = next((observed[x] for x in meanings if x in observed), None)
        is_wanted = not request.variables or channel.variable in request.variables
        is_wanted &= not request.levels or channel.level in (None, *request.levels)
        if is_wanted and other is not None:
            pairs[channel] = other
    there, seen = [channel.name for channel in channels], list(observations.values)
    for name in request.variables:
        if name not in {channel.variable for channel in pairs}:
            place = forecast.where, {channel.variable for channel in channels}
            place = (observations.where, {*seen}) if name in place[1] else place
            raise UserError(
                f"{place[0]}: no {name} at the surface or on pressure levels. "
                f"{suggest_names(name, place[1])}. Change variables."
            )
    for level in request.levels:
        if level not in {channel.level for channel in pairs}:
            is_there = level in {channel.level for channel in channels}
            where, names = (observations.where, seen) if is_there else (forecast.where, there)
            raise UserError(
                f"{where}: no scored variable on level {level}, among {_some(names)}. Change "
                "levels."
            )
    for name, count in Counter(channel.name for channel in pairs).items():
        if count > 1:
            raise UserError(
                f"{forecast.where}: has two fields called {name}, with and without a dim of "
                "levels. Select one with variables."
            )
    if not pairs:
        raise UserError(
            f"{observations.where}: none of its variables {_some(seen)} is among the forecast's "
            f"at the surface or on pressure levels: {_some(there)}. Rename the variables, or "
            "change stations."
        )
    return pairs


def _meaning(name: str, level: int | None = None) -> tuple[str, int | None]:
    """Return the long name and the level of a variable; heights are geopotential in m."""
    long, level = long_name(name.replace(HEIGHT, "geopotential"), level)
    return UPPER_AIR_NAMES.get(long, long), level


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, as text for messages."""
    return ", ".join([*names[:SHOWN], *["..."] * (len(names) > SHOWN)]) or "none"


def _conversion(
    forecast: ForecastStore, observations: Observations, other: str, unit: str
) -> tuple[float, float]:
    """Return `(scale, offset)` from the unit of the observations to that of the forecast."""
    conversion = find_conversion(observations.units[other], unit)
    if conversion is None:
        raise UserError(
            f"{observations.where}: {other} is in {observations.units[other]}, which can't be "
            f"converted to the forecast's {unit}. Convert it, or leave it out of variables."
        )
    return conversion


def _covered(observations: Observations, forecast: ForecastStore) -> NDArray[np.bool_]:
    """Return which stations the forecast's grid covers."""
    inside = ~outside_points(forecast.grid, observations.latitude, observations.longitude)
    if not inside.any():
        raise UserError(
            f"{observations.where}: none of its {counted(len(inside), 'station')} is in the "
            "forecast's region. Change stations or forecast."
        )
    return inside


def _blocks(
    forecast: ForecastStore, name: str, inits: int, leads: int
) -> Iterator[tuple[slice, slice]]:
    height, width = forecast.grid
    fields = max(1, MAX_BYTES // (4 * forecast.members * height * width))
    lead_count = min(leads, fields)
    init_count = min(max(1, fields // leads), forecast.initial_times_per_chunk(name), inits)
    for init in range(0, inits, init_count):
        for lead in range(0, leads, lead_count):
            yield slice(init, init + init_count), slice(lead, min(lead + lead_count, leads))
