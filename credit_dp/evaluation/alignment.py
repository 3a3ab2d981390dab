"""A forecast store and the truth beside it, checked against each other before a field is read."""

import dataclasses
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import VariableConfig
from credit_dp.data.cache import Report, cache_folder
from credit_dp.data.setup import ranges_of
from credit_dp.data.sources.address import without_secrets
from credit_dp.data.sources.base import Source
from credit_dp.data.sources.opening import open_source
from credit_dp.data.store import Store
from credit_dp.data.units import canonical, is_accumulated
from credit_dp.errors import UserError
from credit_dp.evaluation.climatology import (
    Expected,
    FittedTo,
    GivenClimatology,
    fitted_climatology,
)
from credit_dp.evaluation.forecast_store import ForecastStore, columns_of, same_rows
from credit_dp.evaluation.request import (
    HOUR,
    ScoreRequest,
    chosen_initials,
    chosen_leads,
    chosen_variables,
    common_step,
    keys_for,
)


@final
@dataclass(frozen=True)
class Matched:
    """What a score needs, open and of one kind.

    Attributes:
        truth: its channels are those that are scored, its grid is the one of scores.
        climatology_description: what the climatology is, for the reader.
        initials, leads: places in the forecast's initial and lead times.
        columns: the forecast's column for each of the truth's.
    """

    forecast: ForecastStore
    truth: Store
    climatology: Expected
    climatology_description: str
    initials: NDArray[np.intp]
    leads: NDArray[np.intp]
    columns: NDArray[np.intp]

    @property
    def hours(self) -> tuple[int, ...]:
        """The lead times that are scored."""
        return tuple(int(lead / HOUR) for lead in self.forecast.leads[self.leads])


def match(request: ScoreRequest, forecast: ForecastStore, report: Report) -> Matched:
    """Open the truth and the climatology and check that they fit the forecast.

    Args:
        report: called with what is being made and the fraction done.

    Raises:
        UserError: a store is not as needed, or truth or climatology lack something.
    """
    initials, leads = chosen_initials(request, forecast), chosen_leads(request, forecast)
    times = forecast.initial_times[initials]
    names = chosen_variables(request, forecast)
    with keys_for("truth"):
        config = DataConfig(
            name="zarr",
            store=list(request.truth),
            cache=request.cache,
            prognostic=names,
            step=f"{step_of_truth(forecast, names, times, leads)}h",
            variables={x: VariableConfig(fill="mean") for x in request.masked if x in names},
            limits=dict(request.limits),
        )
        source = open_source(config)
        config = dataclasses.replace(config, levels=_check_variables(request, forecast, source))
        there = Store(source, config).times  # without those that lack what they are a sum of
        fitted = FittedTo(request.climatology_dates, there, times[0])
        config = dataclasses.replace(
            config, dates=DatesConfig(fitted.span, fitted.span, fitted.span)
        )
        truth = Store(source, config)
        truth = truth.with_ranges(ranges_of(truth, cache_folder(request.cache)))
    same_rows(truth.latitude, forecast.latitude, forecast.where, "forecast")
    columns = columns_of(truth.longitude, forecast.longitude, forecast.where, "forecast")
    _check_times(truth, forecast, initials, leads)
    climatology: Expected
    if request.climatology:
        description, grid = without_secrets(request.climatology), (truth.latitude, truth.longitude)
        with keys_for("climatology"):
            climatology = GivenClimatology(request.climatology, truth.channels.out, *grid)
    else:
        description = fitted.description
        with keys_for("truth"):
            climatology = fitted_climatology(truth, request.cache, report)
    return Matched(forecast, truth, climatology, description, initials, leads, columns)


def step_of_truth(
    forecast: ForecastStore,
    names: list[str],
    times: NDArray[np.datetime64],
    leads: NDArray[np.intp],
) -> int:
    """The hours between the truth's times, over which it is added up where the forecast is a sum.

    That is the span of the forecast's sums. Where it does not say one, it is that between its lead
    times, whichever of them are scored.

    Raises:
        UserError: initial and lead times are no multiples of the span.
    """
    summed = [name for name in names if is_accumulated(name, DataConfig())]
    step = common_step(forecast, times, forecast.leads if summed else forecast.leads[leads])
    said = [name for name in summed if forecast.variables[name].summed]
    if forecast.span is None or not said:
        return step
    span = int(forecast.span / HOUR)
    if len(said) < len(summed) or forecast.span % HOUR or step % span:
        unsaid = next((name for name in summed if name not in said), "")
        why = f"{unsaid} does not say over which" if unsaid else f"times are {step} hours apart"
        raise UserError(
            f"{forecast.where}: {said[0]} is a sum over {forecast.span / HOUR:g} hours, but {why}. "
            "Leave one of them out with variables=[...]."
        )
    return span


def _check_variables(
    request: ScoreRequest, forecast: ForecastStore, source: Source
) -> list[int] | None:
    """Refuse variables, levels or units that the truth has not; the levels that are scored."""
    names = chosen_variables(request, forecast)
    levels = list(request.levels) or list(
        next((v.levels for n, v in forecast.variables.items() if n in names and v.levels), ())
    )
    both = [name for name in forecast.variables if name in source.variables]
    for name in names:
        mine = forecast.variables[name]
        if name not in source.variables:
            raise UserError(
                f"{source.where}: the truth has no {name}, which {forecast.where} forecasts. "
                f"Give variables=[{','.join(both)}], or another truth."
            )
        truth = source.variables[name]
        if bool(mine.levels) != bool(truth.levels):
            with_levels, without = ("forecast", "truth") if mine.levels else ("truth", "forecast")
            raise UserError(
                f"{source.where}: {name} is on levels in the {with_levels}, but not in the "
                f"{without}. Leave it out of variables, or change truth."
            )
        if mine.levels and forecast.model_levels != truth.model_levels:
            kinds = ("pressure", "model") if truth.model_levels else ("model", "pressure")
            raise UserError(
                f"{forecast.where}: {name} is on {kinds[0]} levels, but on {kinds[1]} levels in "
                f"the truth {source.where}. Leave it out of variables, or change truth."
            )
        for where, there in ((forecast.where, mine.levels), (source.where, truth.levels)):
            lacking = [level for level in levels if there and level not in there]
            if lacking:
                raise UserError(
                    f"{where}: {name} has no level {lacking[0]}. There are: "
                    f"{', '.join(map(str, sorted(there)))}. Change levels."
                )
        one, two = canonical(mine.units), canonical(truth.units)
        if one and two and one != two:
            raise UserError(
                f"{forecast.where}: {name} is in {mine.units}, but in {truth.units} in the truth "
                f"{source.where}. Convert one of them, or leave it out of variables."
            )
    return levels if any(forecast.variables[name].levels for name in names) else None


def _check_times(
    truth: Store, forecast: ForecastStore, initials: NDArray[np.intp], leads: NDArray[np.intp]
) -> None:
    """Refuse forecasts from or for times that the truth has not."""
    times = forecast.initial_times[initials]
    valid = times[:, None] + np.append(np.timedelta64(0, "ns"), forecast.leads[leads])
    absent = ~np.isin(valid, truth.times)
    if absent.any():
        time = valid[absent].min()
        raise UserError(
            f"{truth.source.where}: the truth has no {_minute(time)}, which forecasts start from "
            f"or are for ({np.count_nonzero(absent.any(axis=1))} of {len(times)} initial times "
            f"lack some; it has {_minute(truth.times[0])} to {_minute(truth.times[-1])}). Choose "
            "initial times with dates=[first,last] or lead times with hours=[...]."
        )


def _minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))
