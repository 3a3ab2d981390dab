"""What is to be scored against what: the stores, and which of their forecasts."""

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

# Keys of a run's config, and those that stand for them here.
MESSAGE_REPLACEMENTS = {
    "data.prognostic": "variables",
    "data.levels": "levels",
    "data.limits": "limits",
    "no list of the data config has a variable": "what is scored has no variable",
    "Change limits, or add it to a list": "Change limits or variables",
    "data.dates.train": "climatology_dates",
    "data.cache": "the environment variable CREDIT_DP_CACHE",
}
FILL_HINT = re.compile(r"set data\.variables\.(\w+)\.fill=mean, or to a number")
CONVERT_HINT = re.compile(r"set data\.variables\.\S+\.convert='[^']*'")
FILL_CLAUSE = re.compile(r", which data\.variables\.\w+\.fill goes by")


@final
@dataclass(frozen=True)
class ScoreRequest:
    """A forecast store, the truth, and what of them is scored; what is empty is all there is.

    Attributes:
        truth: its stores, as those of `data.store`.
        dates: first and last initial time, in ISO format.
        hours: lead times.
        climatology: a store by hour and day of the year.
        climatology_dates: those of the truth that a climatology is fitted to, without such a store.
        limits: `[low, high]` of a variable's values, or None for any; see `DataConfig`.
        masked: variables that have no values on some points at any time, as over land.
        cache: folder for a climatology that is fitted.
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
    """Errors of the data in terms of the request: `store` is the key that gave the store.

    Raises:
        UserError: as raised inside, with the request's keys.
    """
    try:
        yield
    except UserError as error:
        text = FILL_CLAUSE.sub("", FILL_HINT.sub(r"give masked=[\1]", str(error)))
        text = CONVERT_HINT.sub("convert it, or leave it out of variables=", text)
        for old, new in {"data.store": store, **MESSAGE_REPLACEMENTS}.items():
            text = text.replace(old, new)
        raise UserError(text) from error


HOUR = np.timedelta64(1, "h")
HOURS_PER_DAY = 24


def initial_time_indices(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
    """The places of the initial times.

    Raises:
        UserError: there are none between the dates.
    """
    times = forecast.initial_times
    if not request.dates:
        return np.arange(len(times))
    first, last = date_interval(request.dates[0])[0], date_interval(request.dates[1])[1]
    found = np.flatnonzero((times >= first) & (times <= last))
    if not len(found):
        raise UserError(
            f"{forecast.where}: no initial time from {request.dates[0]} to {request.dates[1]}: it "
            f"has {times[0].astype('M8[m]')} to {times[-1].astype('M8[m]')}. Change dates."
        )
    return found


def lead_time_indices(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
    """The places of the lead times.

    Raises:
        UserError: one that is asked for is not there.
    """
    hours = forecast.leads / HOUR
    for wanted in request.hours:
        if wanted not in hours:
            there = ", ".join(f"{hour:g}" for hour in hours)
            raise UserError(
                f"{forecast.where}: no lead time of {wanted} hours. There are: {there}. "
                "Change hours."
            )
    return np.flatnonzero(np.isin(hours, request.hours or hours))


def common_step_hours(
    forecast: ForecastStore, times: NDArray[np.datetime64], leads: NDArray[np.generic]
) -> int:
    """The hours that all initial and lead times are multiples of, a day at most.

    Sums, such as the truth's precipitation, are over this span.

    Raises:
        UserError: one of them is no whole hour.
    """
    spans = [*(times - np.datetime64(0, "ns")), *leads]
    uneven = next((span for span in spans if span % HOUR), None)
    if uneven is not None:
        raise UserError(
            f"{forecast.where}: initial and lead times need to be whole hours, but one is "
            f"{uneven.astype('m8[m]')} off. Change forecast."
        )
    return math.gcd(HOURS_PER_DAY, *(int(span / HOUR) for span in spans))


def scored_variables(request: ScoreRequest, forecast: ForecastStore) -> list[str]:
    """The variables.

    Raises:
        UserError: one that is asked for is not there, or there are none.
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
            "longitude, and no others but level and number. Change forecast."
        )
    return list(request.variables or forecast.variables)
