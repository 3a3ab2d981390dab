"""Which forecasts of a store are scored: what was asked for, or all there are."""

import math

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.dates import whole
from credit_dp.data.schema import suggestions
from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.score_request import ScoreRequest

HOUR = np.timedelta64(1, "h")
DAY = 24


def chosen_initials(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
    """The places of the initial times.

    Raises:
        UserError: there are none between the dates.
    """
    times = forecast.initial_times
    if not request.dates:
        return np.arange(len(times))
    first, last = whole(request.dates[0])[0], whole(request.dates[1])[1]
    found = np.flatnonzero((times >= first) & (times <= last))
    if not len(found):
        raise UserError(
            f"{forecast.where}: no initial time from {request.dates[0]} to {request.dates[1]}: it "
            f"has {times[0].astype('M8[m]')} to {times[-1].astype('M8[m]')}. Change dates."
        )
    return found


def chosen_leads(request: ScoreRequest, forecast: ForecastStore) -> NDArray[np.intp]:
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


def common_step(
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
    return math.gcd(DAY, *(int(span / HOUR) for span in spans))


def chosen_variables(request: ScoreRequest, forecast: ForecastStore) -> list[str]:
    """The variables.

    Raises:
        UserError: one that is asked for is not there, or there are none.
    """
    for name in (*request.variables, *request.masked):
        if name not in forecast.variables:
            key = "variables" if name in request.variables else "masked"
            raise UserError(
                f"{forecast.where}: no forecast of {name}. "
                f"{suggestions(name, forecast.variables)}. Change {key}."
            )
    if not forecast.variables:
        raise UserError(
            f"{forecast.where}: no variable has the dims time, prediction_timedelta, latitude and "
            "longitude, and no others but level and number. Change forecast."
        )
    return list(request.variables or forecast.variables)
