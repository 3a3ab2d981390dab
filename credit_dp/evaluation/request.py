"""The request to score a forecast store: the stores, and the selected times and variables.

`score` goes through `ScoreRequest`, then the functions here turn it into indices of the store.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import suggest_names
from credit_dp.data.dates import date_interval
from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import ForecastStore

# Errors of the data package name keys of a run's config; here they are keys of `ScoreRequest`.
MESSAGE_REPLACEMENTS = {
    "data.prognostic": "variables",
    "data.levels": "levels",
    "data.limits": "limits",
    "no list of the data config has a variable": "there is no scored variable",
    "Change limits, or add it to a list": "Change limits or variables",
    "data.dates.train": "climatology_dates",
    "data.cache": "the environment variable CREDIT_DP_CACHE",
}
# Advice to set keys that a request lacks: by `missing_value_error` in `credit_dp/data/store.py`
# (FILL), and by `ValueLimits` in `credit_dp/data/limits.py` (CONVERT).
FILL_HINT = re.compile(r"set data\.variables\.(\w+)\.fill=mean, or to a number")
CONVERT_HINT = re.compile(r"set data\.variables\.\S+\.convert='[^']*'")
FILL_CLAUSE = re.compile(r", whose missing points data\.variables\.\w+\.fill fills")


@final
@dataclass(frozen=True)
class ScoreRequest:
    """A forecast store, its truth, and the part to score; empty selections select everything.

    Attributes:
        truth: paths or addresses, as in `data.store`.
        cache: folder for a fitted climatology.
        dates: first and last initial time, in ISO format.
        hours: lead times in hours.
        climatology: a store by hour and day of the year.
        climatology_dates: first and last date of the truth to fit a climatology to; only used
            without such a store.
        masked: variables with points that never have values, such as the sea's temperature
            on land.
        limits: `[low, high]` of a variable's values, or None for no limits; see `DataConfig`.
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
        text = CONVERT_HINT.sub("convert it, or leave it out of variables", text)
        for old, new in {"data.store": store, **MESSAGE_REPLACEMENTS}.items():
            text = text.replace(old, new)
        raise UserError(text) from error


HOUR = np.timedelta64(1, "h")
HOURS_PER_DAY = 24


def initial_time_indices(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
    """Return the indices of the selected initial times.

    Raises:
        UserError: there are none between the dates.
    """
    times = forecast.initial_times
    if not request.dates:
        return np.arange(len(times))
    # A date without a time is an interval: the last day is included.
    first = date_interval(request.dates[0])[0]
    last = date_interval(request.dates[1])[1]
    indices = np.flatnonzero((times >= first) & (times <= last))
    if not len(indices):
        raise UserError(
            f"{forecast.where}: no initial time from {request.dates[0]} to {request.dates[1]}: it "
            f"has {times[0].astype('M8[m]')} to {times[-1].astype('M8[m]')}. Change dates."
        )
    return indices


def lead_time_indices(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
    """Return the indices of the selected lead times.

    Raises:
        UserError: a requested lead time is missing.
    """
    hours = forecast.lead_times / HOUR
    for hour in request.hours:
        if hour not in hours:
            available = ", ".join(f"{hour:g}" for hour in hours)
            raise UserError(
                f"{forecast.where}: no lead time of {hour} hours. Available: {available}. "
                "Change hours."
            )
    return np.flatnonzero(np.isin(hours, request.hours or hours))


def common_step_hours(
    forecast: ForecastStore, times: NDArray[np.datetime64], leads: NDArray[np.generic]
) -> int:
    """Return the largest step, at most 24 hours, that divides all initial and lead times.

    Accumulated variables of the truth, such as precipitation, are summed over this step.

    Raises:
        UserError: a time is not a whole hour.
    """
    spans = [*(times - np.datetime64(0, "ns")), *leads]
    # Initial times count from midnight 1970-01-01, as the times of a run do.
    uneven = next((span for span in spans if span % HOUR), None)
    if uneven is not None:
        raise UserError(
            f"{forecast.where}: initial and lead times must be whole hours, but one is "
            f"{(uneven % HOUR).astype('m8[s]')} past the hour. Change forecast."
        )
    return math.gcd(HOURS_PER_DAY, *(int(span / HOUR) for span in spans))


def scored_variables(request: ScoreRequest, forecast: ForecastStore) -> list[str]:
    """Return the names of the variables to score.

    Raises:
        UserError: a requested variable is missing, or the store has no forecast variables.
    """
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
            "longitude, with no other dims than level and number. Change forecast."
        )
    return list(request.variables or forecast.variables)
