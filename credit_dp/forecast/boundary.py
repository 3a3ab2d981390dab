"""The rim of a region after each step of a forecast: the truth's, or that of a driving model.

A driver is interpolated bilinearly in longitude and latitude, and linearly in time. It has
analyses, or one forecast, or forecasts from several initial times, of which each forecast takes the
one from its own.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from credit_dp.config.data import BILINEAR
from credit_dp.data.calendar import Times
from credit_dp.data.grid import FieldArray
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.forecast.initial_file import KEY as FILES_KEY
from credit_dp.forecast.initial_file import InitialFiles
from credit_dp.forecast.request import ForecastRequest

KEY = "boundary"
FILES_KEY_IN_TEXT = re.compile(rf"(?<![\w/.-]){FILES_KEY}(?![\w/-])")  # not in a path
TRUTH = "truth"  # the run's own store
LONGEST_SPACING = np.timedelta64(24, "h")  # that is interpolated: more would be no weather


@contextmanager
def _errors_of_driver() -> Iterator[None]:
    """Name the key of the driver in errors of the files that are read as initial states are."""
    try:
        yield
    except UserError as error:
        raise UserError(FILES_KEY_IN_TEXT.sub(KEY, str(error))) from error


@final
class DrivingStates:
    """The states of a driver at the valid times of one forecast's steps, on the grid of a region.

    Args:
        text: `PATH` or `[PATH,...]` of the driver.

    Attributes:
        stamps: see `InitialFiles`.
        spacing: the longest time between two states that are interpolated; 0 if none are.

    Raises:
        UserError: the driver does not cover the region, the times, the variables or the levels.
    """

    def __init__(self, text: str, store: Store, init: np.datetime64, times: Times) -> None:
        self.times = times
        with _errors_of_driver():
            files = InitialFiles.open(text, init)
            self.stamps = files.stamps
            self._times = _times_around(files, store, init, times)
            self._stored = self._times[np.isin(self._times, files.times)]
            self._reader = files.reader(store, self._stored, BILINEAR)
        self.spacing = np.timedelta64(0, "h")
        if not np.isin(times, self._times).all():
            self.spacing = np.diff(self._times).max()

    def states(
        self, rows: slice, initial: Callable[[Times, slice], FieldArray]
    ) -> Iterator[FieldArray]:
        """Yield the state after each step on a band of rows, `(1, C, rows, W)`.

        Args:
            initial: reads the initial state, from which the rim goes on to the driver's first time.
        """
        fields: dict[np.datetime64, FieldArray] = {}
        for time in self.times:
            after = int(np.searchsorted(self._times, time))
            exact = self._times[after] == time
            around = self._times[after if exact else after - 1 : after + 1]
            fields = {x: fields[x] if x in fields else self._read(x, rows, initial) for x in around}
            if exact:
                yield fields[around[0]]
                continue
            share = (time - around[0]) / (around[1] - around[0])
            first, second = (fields[x].astype(np.float64) for x in around)
            yield (first + share * (second - first)).astype(np.float32)

    def _read(
        self, time: np.datetime64, rows: slice, initial: Callable[[Times, slice], FieldArray]
    ) -> FieldArray:
        if time not in self._stored:
            return initial(np.array([time]), rows)
        with _errors_of_driver():
            return self._reader.read_states(np.array([time]), rows)


def _times_around(files: InitialFiles, store: Store, init: np.datetime64, times: Times) -> Times:
    """Return the driver's times that a forecast needs, and perhaps its initial time before them.

    Raises:
        UserError: they do not cover the steps of the forecast, or have a gap.
    """
    stored = known = files.times
    if len(stored) > 1 and init < stored[0] <= init + (stored[1] - stored[0]):
        known = np.append(init, stored)
    if not len(known) or known[0] > times[0] or known[-1] < times[-1]:
        text = store.calendar.text
        span = f"{text(stored[0])} to {text(stored[-1])}" if len(stored) else "no times"
        raise UserError(
            f"{KEY}: the forecast from {text(init)} needs the rim from {text(times[0])} to "
            f"{text(times[-1])}, but {', '.join(files.addresses)} has {span}. Change {KEY}, init "
            "or lead."
        )
    first = int(np.searchsorted(known, times[0], side="right")) - 1
    last = int(np.searchsorted(known, times[-1]))
    around = known[first : last + 1]
    gap = int(np.argmax(np.diff(around))) if len(around) > 1 else 0
    begin, end = around[[gap, min(gap + 1, len(around) - 1)]]
    if end - begin > LONGEST_SPACING:
        raise UserError(
            f"{KEY}: {', '.join(files.addresses)} has no time between {store.calendar.text(begin)} "
            f"and {store.calendar.text(end)}, but times may be at most 24h apart. Change {KEY}."
        )
    return around


def check_boundary_key(request: ForecastRequest, width: int) -> None:
    """Check that a forecast of a region whose rim has a width, and no other, says what gives it."""
    if width and not request.boundary:
        raise UserError(
            f"{KEY}: the model was trained with data.boundary={width}, rows and columns at the rim "
            f"that have to be given. Give {KEY}=PATH of a driving model's forecast or analysis, or "
            f"{KEY}={TRUTH} for that of data.store."
        )
    if request.boundary and not width:
        raise UserError(
            f"{KEY}: the model predicts all points: it was trained with data.boundary=0. Leave "
            f"{KEY} out."
        )


def open_driver(
    request: ForecastRequest, store: Store, init: np.datetime64
) -> DrivingStates | None:
    """Open the driver of the forecast from an initial time; None with `boundary=truth`.

    Raises:
        UserError: see `DrivingStates`.
    """
    if request.boundary == TRUTH:
        return None
    times = init + request.steps(store.config.step_hours)
    return DrivingStates(request.boundary, store, init, times)


def settings_of_boundary(request: ForecastRequest, store: Store) -> dict[str, Any]:
    """Return what the rim of a forecast depends on, for its attributes; see `settings_of`.

    Raises:
        UserError: see `check_boundary_key` and `DrivingStates`, of any initial time.
    """
    width = store.config.boundary
    check_boundary_key(request, width)
    if not width:
        return {}
    settings: dict[str, Any] = {"boundary": width, "boundary_from": TRUTH}
    spacing = np.timedelta64(0, "h")
    # One after the other: each has the weights of all points.
    for init in request.initial_times():
        driver = open_driver(request, store, init)
        if driver is not None:
            settings["boundary_from"] = driver.stamps
            spacing = max(spacing, driver.spacing)
    if request.boundary != TRUTH:
        hours = spacing / np.timedelta64(1, "h")
        in_time = f"linear between times up to {hours:g}h apart" if hours else "at its own times"
        settings["boundary_interpolation"] = f"bilinear in longitude and latitude, {in_time}"
    return settings


def describe_boundary(request: ForecastRequest, settings: Mapping[str, Any]) -> str:
    """Return what gives the rim, for the screen, from its settings."""
    if request.boundary == TRUTH:
        return "the rim is the truth of data.store at each step"
    return f"{request.boundary}, {settings['boundary_interpolation']}"
