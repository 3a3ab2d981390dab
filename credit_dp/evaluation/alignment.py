"""A forecast store and the truth beside it, checked against each other before a field is read."""

import dataclasses
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import VariableConfig
from credit_dp.data.cache import ProgressCallback, cache_folder
from credit_dp.data.setup import load_or_sample_ranges
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.base import Source
from credit_dp.data.sources.opening import open_source
from credit_dp.data.store import Store
from credit_dp.data.units import canonical_unit, is_accumulated
from credit_dp.errors import UserError
from credit_dp.evaluation.climatology import (
    ClimatologyPeriod,
    ClimatologySource,
    StoredClimatology,
    load_or_fit_climatology,
)
from credit_dp.evaluation.forecast_store import ForecastStore, check_same_rows, column_indices
from credit_dp.evaluation.request import (
    HOUR,
    ScoreRequest,
    common_step_hours,
    initial_time_indices,
    lead_time_indices,
    scored_variables,
    translate_error_keys,
)


@final
@dataclass(frozen=True)
class AlignedForecast:
    """What a score needs, open and of one kind.

    Attributes:
        truth: its channels are those that are scored, its grid is the one of scores.
        climatology_description: what the climatology is, for the reader.
        initials, leads: places in the forecast's initial and lead times.
        columns: the forecast's column for each of the truth's.
    """

    forecast: ForecastStore
    truth: Store
    climatology: ClimatologySource
    climatology_description: str
    initial_indices: NDArray[np.intp]
    leads: NDArray[np.intp]
    columns: NDArray[np.intp]

    @property
    def hours(self) -> tuple[int, ...]:
        """The lead times that are scored."""
        return tuple(int(lead / HOUR) for lead in self.forecast.leads[self.leads])


def align(
    request: ScoreRequest, forecast: ForecastStore, report: ProgressCallback
) -> AlignedForecast:
    """Open the truth and the climatology and check that they fit the forecast.

    Args:
        report: called with what is being made and the fraction done.

    Raises:
        UserError: a store is not as needed, or truth or climatology lack something.
    """
    initials, leads = initial_time_indices(request, forecast), lead_time_indices(request, forecast)
    times = forecast.initial_times[initials]
    names = scored_variables(request, forecast)
    with translate_error_keys("truth"):
        config = DataConfig(
            name="zarr",
            store=list(request.truth),
            cache=request.cache,
            prognostic=names,
            step=f"{truth_step_hours(forecast, names, times, leads)}h",
            variables={x: VariableConfig(fill="mean") for x in request.masked if x in names},
            limits=dict(request.limits),
        )
        source = open_source(config)
        config = dataclasses.replace(config, levels=_validated_levels(request, forecast, source))
        there = Store(source, config).times  # without those that lack what they are a sum of
        fitted = ClimatologyPeriod(request.climatology_dates, there, times[0])
        config = dataclasses.replace(
            config, dates=DatesConfig(fitted.span, fitted.span, fitted.span)
        )
        truth = Store(source, config)
        truth = truth.with_ranges(load_or_sample_ranges(truth, cache_folder(request.cache)))
    check_same_rows(truth.latitude, forecast.latitude, forecast.where, "forecast")
    columns = column_indices(truth.longitude, forecast.longitude, forecast.where, "forecast")
    _check_times(truth, forecast, initials, leads)
    climatology: ClimatologySource
    if request.climatology:
        description, grid = redact_secrets(request.climatology), (truth.latitude, truth.longitude)
        with translate_error_keys("climatology"):
            climatology = StoredClimatology(
                request.climatology, truth.channels.output_channels, *grid
            )
    else:
        description = fitted.description
        with translate_error_keys("truth"):
            climatology = load_or_fit_climatology(truth, request.cache, report)
    return AlignedForecast(forecast, truth, climatology, description, initials, leads, columns)


def truth_step_hours(
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
    step = common_step_hours(forecast, times, forecast.leads if summed else forecast.leads[leads])
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


def _validated_levels(
    request: ScoreRequest, forecast: ForecastStore, source: Source
) -> list[int] | None:
    """Refuse variables, levels or units that the truth has not; the levels that are scored."""
    names = scored_variables(request, forecast)
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
        one, two = canonical_unit(mine.units), canonical_unit(truth.units)
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
            f"{truth.source.where}: the truth has no {_format_minute(time)}, which forecasts "
            "start from "
            f"or are for ({np.count_nonzero(absent.any(axis=1))} of {len(times)} initial times "
            f"lack some; it has {_format_minute(truth.times[0])} to "
            f"{_format_minute(truth.times[-1])}). Choose "
            "initial times with dates=[first,last] or lead times with hours=[...]."
        )


def _format_minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))
