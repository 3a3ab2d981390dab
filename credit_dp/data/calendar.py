"""Calendars: the standard one, and those of climate models, such as noleap and 360_day.

Inside the package a time is a datetime64 that counts the time since 1970-01-01 of its store's
calendar, so that differences, steps and the order of times are right in every calendar. Texts,
years, months and days of times come from their `Calendar`: in the standard one they are numpy's own
reading of a datetime64, in any other cftime's.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, final

import cftime
import numpy as np
from numpy.typing import NDArray

from credit_dp.errors import UserError

if TYPE_CHECKING:
    import xarray as xr

Times = NDArray[np.datetime64]

# Days of a year; years of the calendars that are not here are those of the sun.
YEAR_LENGTHS = {"noleap": 365, "all_leap": 366, "360_day": 360, "julian": 365.25}
EPOCH_UNITS = "seconds since 1970-01-01"
TIME_UNITS = {"h": "hours since 1900-01-01", "m": "minutes since 1900-01-01"}  # of written times
TEXT_LENGTHS = {"D": 10, "h": 13, "m": 16, "s": 19}  # of 2001-02-28T06:00:00, up to each unit
DATE = re.compile(r"(\d{4,})-(\d\d)-(\d\d)(?:[T ](\d\d)(?::(\d\d)(?::(\d\d))?)?)?")


@final
@dataclass(frozen=True)
class Calendar:
    """A calendar of the CF conventions.

    Attributes:
        name: as in the attribute `calendar` of a time. `standard` stands for all dates that numpy
            has with nanoseconds, 1678 to 2262; beyond them, stores of the standard calendar have
            `gregorian` or `proleptic_gregorian`.
    """

    name: str = "standard"

    @property
    def is_standard(self) -> bool:
        """Whether a datetime64 is read as numpy reads it."""
        return self.name == "standard"

    @property
    def dtype(self) -> "np.dtype[np.datetime64]":
        """Return the type of times; in seconds there is room for the year 1."""
        return np.dtype("M8[ns]" if self.is_standard else "M8[s]")

    @property
    def instant(self) -> np.timedelta64:
        """Return the distance of neighbouring times."""
        return np.timedelta64(1, "ns") if self.is_standard else np.timedelta64(1, "s")

    def text(self, time: np.datetime64, unit: str = "m") -> str:
        """Return a time as ISO text down to a unit, `D`, `h`, `m` or `s`: `2000-02-30T06:00`."""
        if self.is_standard:
            return str(time.astype(f"M8[{unit}]"))
        date = self.dates(time).item()
        day = f"{date.year:04}-{date.month:02}-{date.day:02}"
        text = f"{day}T{date.hour:02}:{date.minute:02}:{date.second:02}"
        return text[: TEXT_LENGTHS[unit]]

    def short_text(self, time: np.datetime64) -> str:
        """Return a time as ISO text without the minutes or seconds that are zero."""
        units = ("h", "m", "s")
        return self.text(time, next((x for x in units if time == time.astype(f"M8[{x}]")), "s"))

    def parse(self, key: str, text: str) -> np.datetime64:
        """Return the time of an ISO text."""
        try:
            if self.is_standard:
                date = datetime.fromisoformat(text)
                if date.tzinfo is not None:
                    date = date.astimezone(UTC).replace(tzinfo=None)
                if not 1678 <= date.year <= 2261:
                    raise ValueError(text)  # NumPy would take it for another date
                return np.datetime64(date, "ns")
            match = DATE.fullmatch(text)
            if match is None:
                raise ValueError(text)
            return self._number(
                cftime.datetime(*(int(x or 0) for x in match.groups()), calendar=self.name)
            )
        except ValueError:
            years = " from 1678 to 2261" if self.is_standard else ""
            raise UserError(
                f"{key}: needs a date of the {self.name} calendar{years}, like 2001-02-28 or "
                f"2001-02-28T06, got {text}"
            ) from None

    @property
    def cf_name(self) -> str:
        """Return the attribute `calendar` of times that are written."""
        return "proleptic_gregorian" if self.is_standard else self.name

    def encode(self, times: Times) -> tuple[NDArray[np.int64], str]:
        """Return times as whole hours or, if they are none, whole minutes, with their units."""
        unit = "h" if (times == times.astype("M8[h]")).all() else "m"
        numbers = times.astype(f"M8[{unit}]") - self.parse("time", "1900-01-01").astype("M8[h]")
        return numbers.astype(np.int64), TIME_UNITS[unit]

    def decode(self, numbers: NDArray[np.integer[Any]], units: str) -> Times:
        """Return the times that `encode` returned as numbers with units."""
        unit = "m" if units == TIME_UNITS["m"] else "h"
        times = self.parse("time", "1900-01-01").astype("M8[h]") + numbers.astype(f"m8[{unit}]")
        return np.asarray(times.astype(self.dtype))

    def years(self, times: Times) -> Times:
        """Return the calendar years of times, as datetime64[Y]."""
        return self.months(times).astype("M8[Y]")

    def months(self, times: Times) -> Times:
        """Return the calendar months of times, as datetime64[M]."""
        if self.is_standard:
            return times.astype("M8[M]")
        days, inverse = np.unique(times.astype("M8[D]"), return_inverse=True)
        months = [12 * (date.year - 1970) + date.month - 1 for date in self.dates(days)]
        return np.array(months, np.int64).astype("M8[M]")[inverse].reshape(np.shape(times))

    def starts(self, periods: Times) -> Times:
        """Return the first times of calendar years or months, datetime64[Y] or datetime64[M]."""
        if self.is_standard:
            return periods.astype(self.dtype)
        months, inverse = np.unique(periods.astype("M8[M]"), return_inverse=True)
        dates = [divmod(int(month), 12) for month in months.astype(np.int64)]
        starts = [
            self._number(cftime.datetime(1970 + year, month + 1, 1, calendar=self.name))
            for year, month in dates
        ]
        return np.array(starts, self.dtype)[inverse].reshape(np.shape(periods))

    def days_of_year(self, times: Times) -> NDArray[np.int64]:
        """Return the days of the year, from 1."""
        first = self.starts(self.years(times)).astype("M8[D]")
        days: NDArray[np.int64] = (times.astype("M8[D]") - first).astype(np.int64) + 1
        return days

    def dates(self, times: Times | np.datetime64) -> NDArray[Any]:
        """Return times as xarray has them: objects of cftime, except in the standard calendar."""
        if self.is_standard:
            return np.asarray(times)
        seconds = np.asarray(times).astype("M8[s]").astype(np.int64)
        return np.asarray(cftime.num2date(seconds, EPOCH_UNITS, self.name))

    def _number(self, date: cftime.datetime) -> np.datetime64:
        return np.datetime64(round(cftime.date2num(date, EPOCH_UNITS, self.name)), "s")


STANDARD = Calendar()
# Which of these a time has in xarray depends on the years of its store; from 1582 on it counts the
# same in all of them.
GREGORIAN = (STANDARD.name, "gregorian", "proleptic_gregorian")


def is_time(array: "xr.Variable | xr.DataArray") -> bool:
    """Whether an array has dates of any calendar."""
    return array.dtype.kind == "M" or (array.dtype.kind == "O" and are_dates(array.values))


def are_dates(values: NDArray[Any]) -> bool:
    """Whether values, as xarray decodes them, are dates of any calendar; none may be missing."""
    if values.dtype.kind == "O":
        return all(isinstance(date, cftime.datetime) for date in values.flat)
    return values.dtype.kind == "M"


def calendar_of(dates: NDArray[Any]) -> Calendar:
    """Return the calendar of dates, as xarray decodes them: datetime64, or objects of cftime."""
    if dates.dtype.kind == "M" or not dates.size:
        return STANDARD
    name = dates.flat[0].calendar
    # cftime's standard calendar has the dates that numpy's datetime64[ns] does not have.
    return Calendar("gregorian" if name == "standard" else name)


def decode_dates(dates: NDArray[Any]) -> Times:
    """Return dates, as xarray decodes them, as times of their calendar, rounded to seconds.

    Dates of the standard calendar keep their nanoseconds.
    """
    calendar = calendar_of(dates)
    if calendar.is_standard:
        return np.asarray(dates.astype(calendar.dtype))
    numbers = np.asarray(cftime.date2num(dates, EPOCH_UNITS, calendar.name))
    times: Times = np.rint(numbers).astype(np.int64).astype(calendar.dtype)
    return times
