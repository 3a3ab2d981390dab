"""Open what a `ScoreRequest` names and check that it fits together, before a field is read.

In this order: the forecast's times and variables are selected, then the truth is opened with just
these variables, and last the climatology on the truth's grid.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import VariableConfig
from credit_dp.data.cache import ProgressCallback, cache_folder
from credit_dp.data.calendar import GREGORIAN
from credit_dp.data.channels import suggest_names
from credit_dp.data.dates import date_interval, time_spacing
from credit_dp.data.masks import find_presence, with_masks
from credit_dp.data.selection import hint_at_hpa
from credit_dp.data.setup import load_or_fit_climatology
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.source import Source, describe_members
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates
from credit_dp.data.units import CONVERSIONS, canonical_unit, is_accumulated
from credit_dp.data.winds import lies_along_grid
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.forecast_store import ForecastStore, column_order
from credit_dp.evaluation.stored_climatology import (
    ClimatologyPeriod,
    ClimatologySource,
    StoredClimatology,
)

HOUR = np.timedelta64(1, "h")
HOURS_PER_DAY = 24

# Errors of the data package name keys of a run's config; here they are keys of `ScoreRequest`.
MESSAGE_REPLACEMENTS = {
    "data.boundary": "boundary",
    "data.prognostic": "variables",
    "data.levels": "levels",
    "data.limits": "limits",
    "data.grid": "grid",
    "data.regrid": "regrid",
    "no list of the data config has a variable": "there is no scored variable",
    "Change limits, or add it to a list": "Change limits or variables",
    "Change data.step": "Change dates or hours",
    " of data.step": " between the forecast's times",
    "data.dates.train": "climatology_dates",
    "at all training dates": "at all dates",
    "data.cache": "the environment variable CREDIT_DP_CACHE",
}
# Advice to set keys that a request lacks: by `missing_value_error` in `credit_dp/data/limits.py`
# (FILL), by `ValueLimits` there (CONVERT), and in `credit_dp/data/selection.py` (STEP) and
# `credit_dp/data/store.py` (SUMS).
FILL_HINT = re.compile(r"set data\.variables\.(\w+)\.fill=mean, or to a number")
CONVERT_HINT = re.compile(r"set data\.variables\.\S+\.convert='[^']*'")
STEP_HINT = re.compile(r"Set data\.step to a multiple of \d+h")
SUMS_HINT = re.compile(r"set data\.variables\.\S+\.accumulated to false(?:, to take.* before)?")
FILL_CLAUSE = re.compile(r", so that data\.variables\.\w+\.fill does not fill them")


@final
@dataclass(frozen=True)
class ScoreRequest:
    """A forecast store, its truth, and the part to score; empty selections select everything.

    Attributes:
        truth: paths or addresses, as in `data.store`.
        grid, regrid: what the truth is regridded to and how; see `DataConfig`.
        dates: first and last initial time, in ISO format.
        climatology: a store by hour and day of the year.
        climatology_dates: first and last date of the truth to fit a climatology to; only used
            without such a store.
        masked: variables with points that never have values, such as the sea's temperature
            on land.
        limits: `[low, high]` of a variable's values, or None for no limits; see `DataConfig`.
        boundary: rows and columns at each edge of a region that are not scored.
        events: of variables, see `events.parse_events`.
        fss: distances of the fractions skill score of events, in km.
        regions: names in `credit_dp.data.grid.REGIONS` to score as well; the globe is always.
    """

    forecast: str
    truth: tuple[str, ...]
    cache: str
    variables: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    dates: tuple[str, ...] = ()
    hours: tuple[int, ...] = ()
    climatology: str = ""
    climatology_dates: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    events: Mapping[str, Any] = field(default_factory=dict)
    fss: tuple[float, ...] = ()
    grid: str | None = None
    regrid: str | None = None
    boundary: int | None = None

    def with_origin(self, settings: Mapping[str, Any], boundary: int, where: str) -> "ScoreRequest":
        """Return a request with the stores, grid and rim that the forecasts started from.

        These are defaults. The stores have later times as well. Other stores are not regridded.

        Args:
            settings: of the forecasts, as `credit-dp forecast` writes them.
            where: the forecasts, for messages.

        Raises:
            UserError: there is no truth, and the forecasts do not name their stores.
        """
        request = self
        stores = self.truth or tuple(settings.get("stores", ()))
        if not stores:
            raise UserError(
                "truth: needs the store to compare forecasts with, like truth=era5.zarr, because "
                f"{where} does not say what it started from."
            )
        if self.grid is None and not self.truth:
            request = dataclasses.replace(
                request, grid=settings.get("grid"), regrid=settings.get("regrid")
            )
        if self.boundary is None:
            request = dataclasses.replace(request, boundary=boundary)
        return dataclasses.replace(request, truth=stores)


@contextmanager
def translate_error_keys(store: str) -> Iterator[None]:
    """Replace config keys in errors raised inside by the request's keys.

    Args:
        store: the request's key for the store: truth, forecast or climatology.

    Raises:
        UserError: as raised inside, with the request's keys.
    """
    try:
        yield
    except UserError as error:
        text = FILL_CLAUSE.sub("", FILL_HINT.sub(r"give masked=[\1]", str(error)))
        text = STEP_HINT.sub("Change truth, or dates or hours", text)
        text = SUMS_HINT.sub("leave it out of variables", text)
        text = CONVERT_HINT.sub("convert it, or leave it out of variables", text)
        for old, new in {"data.store": store, **MESSAGE_REPLACEMENTS}.items():
            text = text.replace(old, new)
        raise UserError(text) from error


def initial_time_indices(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
    """Return the indices of the selected initial times."""
    times = forecast.initial_times
    if not request.dates:
        return np.arange(len(times))
    # A date without a time is an interval: the last day is included.
    calendar = forecast.calendar
    first = date_interval("dates", request.dates[0], calendar)[0]
    last = date_interval("dates", request.dates[1], calendar)[1]
    indices = np.flatnonzero((times >= first) & (times <= last))
    if not len(indices):
        raise UserError(
            f"{forecast.where}: no initial time from {request.dates[0]} to {request.dates[1]}: it "
            f"has {calendar.text(times[0])} to {calendar.text(times[-1])}. Change dates."
        )
    return indices


def lead_time_indices(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
    """Return the indices of the selected lead times."""
    hours = forecast.lead_times / HOUR
    for hour in request.hours:
        if hour not in hours:
            available = ", ".join(f"{hour:g}" for hour in hours)
            raise UserError(
                f"{forecast.where}: no lead time of {counted(hour, 'hour')}. Available: "
                f"{available}. Change hours."
            )
    return np.flatnonzero(np.isin(hours, request.hours or hours))


def common_step_hours(
    forecast: ForecastStore, times: NDArray[np.datetime64], leads: NDArray[np.generic]
) -> int:
    """Return the largest step that divides all lead times and the time between initial times."""
    spans = {"lead times need": leads, "initial times need steps of": times - times[0]}
    for needed, durations in spans.items():
        uneven = durations[durations % HOUR != 0 * HOUR]
        if len(uneven):
            raise UserError(
                f"{forecast.where}: {needed} whole hours, but one is "
                f"{uneven[0] / HOUR:g} hours. Select others in the store, or give another one as "
                "forecast."
            )
    return int(np.gcd.reduce((np.concatenate([*spans.values()]) // HOUR).astype(np.int64)))


def scored_variables(request: ScoreRequest, forecast: ForecastStore) -> list[str]:
    """Return the names of the variables to score."""
    for name in (*request.variables, *request.masked):
        if name not in forecast.variables:
            key = "variables" if name in request.variables else "masked"
            raise UserError(
                f"{forecast.where}: no forecast of {name}. "
                f"{suggest_names(name, forecast.variables)}. Change {key}."
            )
    if not forecast.variables:
        raise UserError(
            f"{forecast.where}: no variable has the dims time, prediction_timedelta, latitude and "
            "longitude, with no other dims than level and number. Rename the dims of its "
            "variables, or give another store as forecast."
        )
    return list(request.variables or forecast.variables)


@final
@dataclass(frozen=True)
class AlignedForecast:
    """A forecast with its truth and climatology, all open and on one grid.

    Attributes:
        truth: its channels are the scored ones; scores are computed on its grid.
        climatology_description: the climatology in words, for the scorecard.
        initial_indices, lead_indices: the scored times, as indices into the forecast's
            `initial_times` and `lead_times`.
        columns: for each column of the truth, the index of the forecast's column.
    """

    forecast: ForecastStore
    truth: Store
    climatology: ClimatologySource
    climatology_description: str
    initial_indices: NDArray[np.intp]
    lead_indices: NDArray[np.intp]
    columns: NDArray[np.intp]

    @property
    def hours(self) -> tuple[int, ...]:
        """Return the scored lead times, in hours."""
        return tuple(int(lead / HOUR) for lead in self.forecast.lead_times[self.lead_indices])


def align(
    request: ScoreRequest, forecast: ForecastStore, report: ProgressCallback
) -> AlignedForecast:
    """Open the truth and the climatology and check that they fit the forecast.

    Args:
        report: called with a title and the fraction done while a climatology is fitted.

    Raises:
        UserError: a store is invalid, or truth or climatology lack a variable, level or time.
    """
    initials = initial_time_indices(request, forecast)
    leads = lead_time_indices(request, forecast)
    times = forecast.initial_times[initials]
    names = scored_variables(request, forecast)
    common_step_hours(forecast, times, forecast.lead_times[leads])  # before the truth is opened
    with translate_error_keys("truth"):
        config = DataConfig(
            name="zarr",
            store=list(request.truth),
            cache=request.cache,
            grid=request.grid,
            regrid=request.regrid,
            prognostic=names,
            # A fill declares the variable as masked: its missing points are not refused.
            variables={x: VariableConfig(fill="mean") for x in request.masked if x in names},
            limits=dict(request.limits),
            boundary=request.boundary or 0,
        )
        source = open_source(config)
        config = dataclasses.replace(config, variables=_variable_configs(config, forecast, source))
        if forecast.calendar.is_standard and source.calendar.name in GREGORIAN:
            forecast.set_calendar(source.calendar)
            times = forecast.initial_times[initials]
        if source.calendar != forecast.calendar:
            raise UserError(
                f"{forecast.where}: has dates of the {forecast.calendar.name} calendar, but the "
                f"truth {source.where} of the {source.calendar.name} calendar. Change forecast or "
                "truth."
            )
        config = dataclasses.replace(
            config,
            levels=_validated_levels(request, forecast, source),
            step=f"{truth_step_hours(forecast, names, times, leads, source.times)}h",
        )
        # `Store.times` leaves out times whose accumulated variables can't be summed, which the
        # source's own times still contain.
        truth = Store(source, config, origin=times[0])
        if truth.num_members > 1:
            raise UserError(
                f"{source.where}: has {describe_members(source.members)}, but the truth needs to "
                "be one. Write it, with `credit-dp data prepare` and data.member="
                f"{source.members[0]}, or as with xarray's ds.mean('number'), and change "
                "data.store."
            )
        period = ClimatologyPeriod(
            request.climatology_dates, truth.times, times[0], source.calendar
        )
        # The store's training dates are what a climatology is fitted to.
        config = dataclasses.replace(
            config, dates=DatesConfig(period.span, period.span, period.span)
        )
        truth = Store(source, config, origin=times[0])
        folder = cache_folder(request.cache)
    if not truth.grid.is_global and forecast.grid.difference(truth.grid):
        forecast.interpolate_to(truth.grid)
    for name in names:
        standard_name = source.variables[name].standard_name
        forecast.turn_wind(name, to_grid=lies_along_grid(standard_name, truth.grid))
    # Rows have one order, north first, but columns may begin at any longitude.
    columns = column_order(truth.grid, forecast.grid, forecast.where, "forecast")
    # Lead time 0 stands for the initial time itself, which persistence needs.
    valid_times = times[:, None] + np.append(np.timedelta64(0, "s"), forecast.lead_times[leads])
    _check_times(truth, valid_times)
    if truth.filled_channels:
        # Points that have values at all scored dates, and at those that a climatology is fitted to.
        with translate_error_keys("truth"):
            fitted = {} if request.climatology else with_masks(truth, folder, report).masks
            scored = TrainingDates.at(truth.time_indices(np.unique(valid_times)))
            masks = find_presence(truth, scored, report).masks()
            truth = truth.with_masks(
                {channel: mask & fitted.get(channel, True) for channel, mask in masks.items()}
            )
    climatology: ClimatologySource
    if request.climatology:
        description = redact_secrets(request.climatology)
        with translate_error_keys("climatology"):
            climatology = StoredClimatology(
                request.climatology,
                truth.channels.output_channels,
                truth.grid,
                truth.calendar,
            )
            units = {name: forecast.variables[name].units for name in names}
            climatology.check_fields(source, units)
    else:
        description = period.description
        with translate_error_keys("truth"):
            climatology = load_or_fit_climatology(truth, folder, 1, report)
    return AlignedForecast(forecast, truth, climatology, description, initials, leads, columns)


def truth_step_hours(
    forecast: ForecastStore,
    names: list[str],
    times: NDArray[np.datetime64],
    leads: NDArray[np.intp],
    truth_times: NDArray[np.datetime64],
) -> int:
    """Return the step of the truth in hours, over which its accumulated variables are summed.

    The forecast's sums and the truth's have to cover the same span. If the forecast states no span,
    the step is the one between all of its lead times, not only the scored ones. It is at most 24
    hours, so that a climatology is fitted to all of these days, unless the truth has longer steps.
    """
    summed = [name for name in names if is_accumulated(name, DataConfig())]
    step = common_step_hours(
        forecast, times, forecast.lead_times if summed else forecast.lead_times[leads]
    )
    stated = [name for name in summed if forecast.variables[name].summed]
    if forecast.span is None or not stated:
        shorter = math.gcd(HOURS_PER_DAY, step)
        spacing = time_spacing(truth_times)
        fits = not spacing or not shorter * HOUR % spacing
        # Times that are several steps apart are on the step, too, but sums over it are not there.
        fits |= not summed and not spacing % (shorter * HOUR)
        return shorter if fits or not step else step
    span = int(forecast.span / HOUR)
    if len(stated) < len(summed) or forecast.span % HOUR or step % span:
        unstated = next((name for name in summed if name not in stated), "")
        apart = f"times are {counted(step, 'hour')} apart"
        why = f"{unstated} does not state its span" if unstated else apart
        raise UserError(
            f"{forecast.where}: {stated[0]} is a sum over "
            f"{counted(forecast.span / HOUR, 'hour')}, but {why}. Leave one of them out with "
            "variables=[...]."
        )
    return span


def _variable_configs(
    config: DataConfig, forecast: ForecastStore, truth: Source
) -> dict[str, VariableConfig]:
    configs = dict(config.variables)
    for name in config.prognostic:
        if name in truth.variables:
            units = tuple(canonical_unit(x.variables[name].units) for x in (truth, forecast))
            if units in CONVERSIONS:
                convert = "->".join(units)
                configs[name] = dataclasses.replace(config.variable_config(name), convert=convert)
    return configs


def _validated_levels(
    request: ScoreRequest, forecast: ForecastStore, source: Source
) -> list[int] | None:
    """Return the scored levels, after checking variables, levels and units against the truth.

    Returns None if no scored variable is on levels.
    """
    names = scored_variables(request, forecast)
    levels = list(request.levels) or list(
        next((v.levels for n, v in forecast.variables.items() if n in names and v.levels), ())
    )
    shared = [name for name in forecast.variables if name in source.variables]
    for name in names:
        predicted = forecast.variables[name]
        if name not in source.variables:
            raise UserError(
                f"{source.where}: the truth has no {name}, which {forecast.where} forecasts. "
                f"Set variables=[{','.join(shared)}], or change truth."
            )
        truth = source.variables[name]
        if bool(predicted.levels) != bool(truth.levels):
            with_levels, without = "forecast", "truth"
            if not predicted.levels:
                with_levels, without = without, with_levels
            raise UserError(
                f"{source.where}: {name} is on levels in the {with_levels}, but not in the "
                f"{without}. Leave it out of variables, or change truth."
            )
        # A truth whose levels can be either, such as 10 to 130, is trusted to have the forecast's.
        if predicted.levels and truth.model_levels not in (None, bool(forecast.model_levels)):
            kinds = ("pressure", "model") if truth.model_levels else ("model", "pressure")
            raise UserError(
                f"{forecast.where}: {name} is on {kinds[0]} levels, but on {kinds[1]} levels in "
                f"the truth {source.where}. Leave it out of variables, or change truth."
            )
        for where, available in ((forecast.where, predicted.levels), (source.where, truth.levels)):
            missing = [level for level in levels if available and level not in available]
            if missing:
                raise UserError(
                    f"{where}: {name} has no level {missing[0]}. Available: "
                    f"{', '.join(map(str, sorted(available)))}. Change levels."
                    f"{hint_at_hpa('levels', levels, available)}"
                )
        forecast_unit = canonical_unit(predicted.units)
        truth_unit = canonical_unit(truth.units)
        # A store without units can't be checked: its values are used as they are.
        fits = forecast_unit == truth_unit or (truth_unit, forecast_unit) in CONVERSIONS
        if forecast_unit and truth_unit and not fits:
            raise UserError(
                f"{forecast.where}: {name} is in {predicted.units}, but in {truth.units} in the "
                f"truth {source.where}. Convert one of them, or leave it out of variables."
            )
    return levels if any(forecast.variables[name].levels for name in names) else None


def _check_times(truth: Store, valid: NDArray[np.datetime64]) -> None:
    missing = ~np.isin(valid, truth.times)
    if missing.any():
        text = truth.calendar.text
        lacking = np.count_nonzero(missing.any(axis=1))
        remedy = "Choose initial times with dates=[first,last] or lead times with hours=[...]."
        if missing[:, 0].all():
            remedy = "Change truth or forecast: it has none of the initial times."
        raise UserError(
            f"{truth.source.where}: the truth has no {text(valid[missing].min())}, a time that is "
            f"needed by {lacking} of {counted(len(valid), 'initial time')} "
            f"(the truth has {text(truth.times[0])} to {text(truth.times[-1])}). {remedy}"
        )
