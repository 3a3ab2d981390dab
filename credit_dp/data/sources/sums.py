"""What a store says about its sums: the hours before each time that an accumulated field covers.

In this order: the bounds of the times (CF conventions, section 7.1), the interval in `cell_methods`
(section 7.3), and the steps in attributes that come from GRIB. Each is used only where it can be
understood; otherwise sums are assumed to cover the time since the previous one.
"""

import re
from typing import NamedTuple

import numpy as np
import xarray as xr

from credit_dp.data.calendar import Times, calendar_of, decode_dates, is_time

TIME_METHOD = re.compile(r"\b(?:valid_)?time: (\w+)(?: \(([^)]*)\))?")
INTERVAL = re.compile(r"\binterval: ([\d.]+) ?(min|h|d)", re.IGNORECASE)
GRIB_STEPS = "GRIB steps"  # also the coordinate with the bounds that they are in a GRIB file
HOURS = {"min": 1 / 60, "h": 1.0, "d": 24.0}  # by the first letters of a unit
STEP_RANGE = re.compile(r"(\d+)-(\d+)")
GRIB_HOURS = {0: 1 / 60, 1: 1.0, 2: 24.0, 10: 3.0, 11: 6.0, 12: 12.0, 13: 1 / 3600}  # table 4.4


class StatedSums(NamedTuple):
    """What says which hours sums cover (empty: nothing), and how many, unless it is bounds."""

    by: str = ""
    hours: float = 0.0


def read_time_bounds(dataset: xr.Dataset) -> Times | None:
    """Return begin and end of the cells of the times, `(T, 2)`; None if there are none.

    Call this before `standardise_dims`, which drops the attributes of times.
    """
    for coordinate in dataset.coords.values():
        name = coordinate.attrs.get("bounds", coordinate.encoding.get("bounds"))
        if coordinate.ndim != 1 or name not in dataset.variables or not is_time(coordinate):
            continue
        dates, bound_dates = coordinate.values, dataset[name].values
        calendar = calendar_of(dates)
        is_pair = is_time(dataset[name]) and bound_dates.shape == (len(dates), 2)
        if not is_pair or calendar_of(bound_dates) != calendar:
            return None
        times, bounds = decode_dates(dates), decode_dates(bound_dates)
        if np.isnat(bounds).any():
            return None
        bounds = np.sort(bounds, axis=1)
        begins, ends = bounds.T
        # Cells without a length, or that are elsewhere, say nothing.
        usable = (begins < ends) & (begins <= times) & (times <= ends)
        return bounds if usable.all() else None
    return None


def stated_sums(array: xr.DataArray, bounds_by: str) -> StatedSums:
    """Return what a variable, or the bounds of its times, say about the hours that its sums cover.

    Args:
        array: the variable.
        bounds_by: what gives the store's bounds of the times; empty if it has none.
    """
    method = TIME_METHOD.search(str(array.attrs.get("cell_methods", "")))
    # CF: without a method, bounds are those of sums if the field is one.
    if method is None or method[1] == "sum":
        if bounds_by:
            return StatedSums(bounds_by)
        interval = INTERVAL.search(method[2] or "") if method is not None else None
        if interval is not None:
            return StatedSums("cell_methods", float(interval[1]) * HOURS[interval[2].lower()])
    return _grib_sums(array)


def _grib_sums(array: xr.DataArray) -> StatedSums:

    def number(key: str) -> int:
        text = str(array.attrs.get(f"GRIB_{key}", ""))
        return int(text) if text.isdecimal() else -1

    step_range = STEP_RANGE.fullmatch(str(array.attrs.get("GRIB_stepRange", "")))
    if step_range is not None:
        steps = int(step_range[2]) - int(step_range[1])
        hours = steps * GRIB_HOURS.get(number("stepUnits"), 1.0)
    else:
        unit = number("indicatorOfUnitForTimeRange")
        hours = number("lengthOfTimeRange") * GRIB_HOURS.get(unit, 1.0)
    return StatedSums(GRIB_STEPS, hours) if hours > 0 else StatedSums()
