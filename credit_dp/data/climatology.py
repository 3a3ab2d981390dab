"""The climatology by hour of day and season, fitted to the training dates.

Each hour of the day has a mean and annual harmonics at each grid point. This is a smooth version of
WeatherBench 2's climatology, the mean for each hour and day of the year over a window of 61 days
(Rasp et al. 2024, section 2.4). Two harmonics keep the same periods as that window, one year
and half a year, and can also be fitted to a few years of data.

`ClimatologyFit` writes the coefficients during a pass over the dates, in chunks of a few rows, so
that a rank reads only those of its band. `Climatology` evaluates them.
"""

from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.cache import fingerprint
from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.dates import time_spacing
from credit_dp.data.forcings import year_fraction
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates, Window, split_rows

VERSION = 3  # change with the definitions below: old files are ignored
HARMONICS = 2
MAX_VARIANCE = 20.0  # see `choose_harmonics`
ROW_CHUNKS = 64  # at least so many chunks from pole to pole, if there are as many rows
MINUTES_PER_DAY = 24 * 60
MAX_HOURS = 8  # hours of the day with their own fit
HOURS = "hours"  # attribute of the store with these hours
SUM_BYTES = 4 * 2**30  # memory for sums while fitting
CACHE_BYTES = 2**30  # memory for coefficients; those of one hour are kept even if larger

Matrix = NDArray[np.float64]


@final
class Climatology:
    """The expected field on any date, evaluated from coefficients on disk.

    The coefficients of the last rows and channels are cached.

    Attributes:
        hours: of the day, with a fit.
        harmonics: number of annual harmonics.
    """

    def __init__(
        self, arrays: list[zarr.Array[Any]], hours: list[float], calendar: Calendar = STANDARD
    ) -> None:
        self._arrays = arrays
        self._calendar = calendar
        self.hours = hours
        self.harmonics = (arrays[0].shape[2] - 1) // 2 if arrays else HARMONICS
        self._selected: tuple[slice, slice] | None = None
        self._cached: dict[int, NDArray[np.float32]] = {}

    @classmethod
    def load(
        cls, path: Path, channels: Channels, calendar: Calendar = STANDARD
    ) -> "Climatology | None":
        """Open the result of a `ClimatologyFit`; None if it is absent or damaged."""
        try:
            group = zarr.open_group(path, mode="r")
            stored_hours: Any = group.attrs[HOURS]
            hours = [float(hour) for hour in stored_hours]
            names = output_variables(channels)
            arrays = [zarr.open_array(path / name, mode="r") for name in names]
            return cls(arrays, hours, calendar)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def field(
        self, time: np.datetime64, rows: slice, channels: slice = slice(None)
    ) -> NDArray[np.float32]:
        """Return the expected output channels in the store's units, `(C, rows, W)`.

        NaN where there are no values. Between fitted hours it is interpolated linearly.
        """
        if self._selected != (rows, channels):
            self._selected = (rows, channels)
            self._cached = {}
        basis = seasonal_basis(np.array([time]), self.harmonics, self._calendar)[0].astype(
            np.float32
        )
        previous_slot, next_slot, weight = bracketing_hours(
            self.hours, float(hour_of_day(np.array([time]))[0])
        )
        field = np.einsum("k,ckhw->chw", basis, self._coefficients(previous_slot, rows, channels))
        # At a fitted hour, the coefficients of the next one need not be read.
        if weight:
            next_field = np.einsum(
                "k,ckhw->chw", basis, self._coefficients(next_slot, rows, channels)
            )
            field += np.float32(weight) * (next_field - field)
        return np.asarray(field)

    def fields(self, times: Times, channels: slice, rows: slice) -> NDArray[np.float32]:
        """Return the expected output channels at several times, `(T, C, rows, W)`; see `field`."""
        return np.stack([self.field(time, rows, channels) for time in times])

    def chunk_numbers(self, times: Times) -> NDArray[np.intp]:
        """Return a different number for each time, as no two fields share a read; see `Source`."""
        return np.arange(len(times))

    def _coefficients(self, slot: int, rows: slice, channels: slice) -> NDArray[np.float32]:
        if slot not in self._cached:
            fields = self._read(slot, rows, channels)
            # Drop the oldest hours until the new one fits.
            while self._cached and (len(self._cached) + 1) * fields.nbytes > CACHE_BYTES:
                self._cached.pop(next(iter(self._cached)))
            self._cached[slot] = fields
        return self._cached[slot]

    def _read(self, slot: int, rows: slice, channels: slice) -> NDArray[np.float32]:
        """Read the coefficients of an hour of the day: `(C, K, rows, W)`."""
        levels = [array.shape[1] for array in self._arrays]
        requested = range(sum(levels))[channels]
        parts = []
        first = 0
        for array, count in zip(self._arrays, levels, strict=True):
            in_array = slice(max(requested.start - first, 0), min(requested.stop - first, count))
            if in_array.start < in_array.stop:
                parts.append(np.asarray(array[slot, in_array, :, rows], dtype=np.float32))
            first += count
        return np.concatenate(parts)


def output_variables(channels: Channels) -> list[str]:
    """Return the output variables in order, each once."""
    return list(dict.fromkeys(channel.variable for channel in channels.output_channels))


def seasonal_basis(times: Times, harmonics: int, calendar: Calendar = STANDARD) -> Matrix:
    """Return one, then cosine and sine of each harmonic: `(T,)` -> `(T, 1 + 2 harmonics)`."""
    angle = 2 * np.pi * year_fraction(times, calendar)
    columns = [np.ones_like(angle)]
    for multiple in range(1, harmonics + 1):
        columns += [np.cos(multiple * angle), np.sin(multiple * angle)]
    return np.stack(columns, axis=1)


def hour_of_day(times: Times) -> NDArray[np.float64]:
    """Return the hours since midnight UTC, `(T,)`, 0 to 24, to the minute."""
    minutes = (times - times.astype("datetime64[D]")) / np.timedelta64(1, "m")
    return np.asarray(np.rint(minutes) % MINUTES_PER_DAY / 60)


def fitted_hours(times: Times) -> list[float]:
    """Return the hours of the day to fit: those of the dates, or of many, every third hour."""
    present: list[float] = np.unique(hour_of_day(times)).tolist()
    if len(present) <= MAX_HOURS:
        return present
    first = 0 if any(hour % 3 == 0 for hour in present) else present[0]
    return [hour for hour in present if (hour - first) % 3 == 0]


def bracketing_hours(hours: list[float], hour: float) -> tuple[int, int, float]:
    """Return the indices of `hours` before and after an hour of the day, and the second's weight.

    Hours are cyclic: the first follows the last.
    """
    after = int(np.searchsorted(hours, hour, side="right")) % len(hours)
    before = (after - 1) % len(hours)
    length = (hours[after] - hours[before]) % 24 or 24
    weight = ((hour - hours[before]) % 24) / length
    return before, after, weight if len(hours) > 1 else 0.0


def choose_harmonics(times: Times, calendar: Calendar = STANDARD) -> int:
    """Return how many harmonics the dates determine, fewer than two if they lack seasons.

    In seasons without dates the fit is free to oscillate. A measure is the largest variance of the
    fitted field over the year, in units of the residual variance divided by the number of dates. It
    is 5 if the dates cover complete years, 15 with 300 days and 34 with 270 days. Harmonics are
    left out until it is at most `MAX_VARIANCE`.
    """
    year = np.datetime64("2001-01-01T00", "h") + np.arange(0, 365 * 24, 24)
    for harmonics in range(HARMONICS, 0, -1):
        basis = seasonal_basis(times, harmonics, calendar)
        # A basis without full rank, as with few dates, has no unique fit.
        if np.linalg.matrix_rank(basis) < basis.shape[1]:
            continue
        days = seasonal_basis(year, harmonics)
        inverse = np.linalg.inv(basis.T @ basis / len(times))
        if np.einsum("tj,jk,tk->t", days, inverse, days).max() <= MAX_VARIANCE:
            return harmonics
    return 0


def climatology_path(store: Store, folder: Path, every: int = 1) -> Path:
    """Return the cache path of the climatology of this store, these variables and dates."""
    times = store.times[TrainingDates.of(store, every).indices]
    description = store.description(output_variables(store.channels))
    name = fingerprint(VERSION, description, [str(time) for time in times])
    return folder / f"climatology-{name}.zarr"


@final
class ClimatologyFit:
    """Least-squares fit at all grid points at once, during one pass over the training dates.

    For each band and group of channels, call `begin`, then `add` for every window, then `end`. The
    normal equations of one hour have the same small matrix at all points. Only their right-hand
    sides are in memory, 40 bytes per hour, point and channel. Members of an ensemble have the same
    matrix: the fit to all of them is that to their mean.
    """

    def __init__(self, store: Store, dates: TrainingDates, path: Path) -> None:
        self._store = store
        times = store.times[dates.indices]
        calendar = store.calendar
        hours = fitted_hours(times)
        hour_of_date = hour_of_day(times)
        # The index of each date's hour among the fitted hours; -1 if that hour is not fitted.
        self._slots = np.array([hours.index(h) if h in hours else -1 for h in hour_of_date])
        times_of_slot = [times[self._slots == slot] for slot in range(len(hours))]
        # The same number for all hours: that of the hour with the fewest seasons.
        harmonics = min(choose_harmonics(slot_times, calendar) for slot_times in times_of_slot)
        together = choose_harmonics(times, calendar)
        if harmonics < together and time_spacing(store.times) > np.timedelta64(1, "D"):
            # Steps of 1461 hours, for one, reach an hour of the day in few seasons: one fit for all
            # hours, as such fields have no daily cycle.
            hours, times_of_slot, harmonics = hours[:1], [times], together
            self._slots = np.zeros(len(times), int)
        self._basis = seasonal_basis(times, harmonics, calendar)
        # Explicit inverses of matrices of at most 5 x 5: each is applied to all grid points.
        self._inverse = [
            np.linalg.inv(b.T @ b)
            for b in (seasonal_basis(t, harmonics, calendar) for t in times_of_slot)
        ]
        self._arrays = self._create(path, hours)
        self._channels: list[tuple[int, Channel]] = []
        self._rows = slice(0, 0)
        self._sums: Matrix = np.empty((0, 0, 0, 0))

    def bands(self, channels: tuple[Channel, ...]) -> list[slice]:
        """Return the bands of rows that fit into memory one at a time."""
        per_point = 8 * len(self._inverse) * self._basis.shape[1]
        return split_rows(self._store, channels, SUM_BYTES, per_point)

    def begin(self, channels: tuple[Channel, ...], rows: slice) -> None:
        """Begin the fit of some channels on a band of rows."""
        outputs = set(self._store.channels.output_channels)
        # Stored forcings are in the groups of channels, too, but have no climatology.
        self._channels = [(position, c) for position, c in enumerate(channels) if c in outputs]
        self._rows = rows
        points = (rows.stop - rows.start) * self._store.grid[1]
        shape = (len(self._inverse), len(self._channels), self._basis.shape[1], points)
        self._sums = np.zeros(shape)

    def add(self, window: Window) -> None:
        """Add the dates of a window that were in no window before."""
        slots = self._slots[window.dates]
        for slot in range(len(self._inverse)):
            dates = window.dates[slots == slot]
            fresh = window.fresh[slots == slot]
            if not len(dates):
                continue
            basis = self._basis[dates]
            for index, (position, _) in enumerate(self._channels):
                values = window.fields[fresh, position].reshape(len(fresh), -1).astype(np.float64)
                self._sums[slot, index] += basis.T @ values

    def end(self) -> None:
        """Solve for the coefficients of the band and write them."""
        rows = self._rows.stop - self._rows.start
        columns = self._store.grid[1]
        channels = self._store.channels
        for slot, inverse in enumerate(self._inverse):
            for index, (_, channel) in enumerate(self._channels):
                sums = self._sums[slot, index] / self._store.num_members
                fitted = (inverse @ sums).reshape(-1, rows, columns)
                level = (
                    channels.output_channels.index(channel)
                    - channels.slice_of(channel.variable).start
                )
                array = self._arrays[channel.variable]
                array[slot, level, :, self._rows] = fitted.astype(np.float32)
        self._sums = np.empty((0, 0, 0, 0))

    def _create(self, path: Path, hours: list[float]) -> dict[str, zarr.Array[Any]]:
        group = zarr.open_group(path, mode="w", attributes={HOURS: hours})
        height, width = self._store.grid
        count = self._basis.shape[1]
        arrays = {}
        for variable in output_variables(self._store.channels):
            level_slice = self._store.channels.slice_of(variable)
            levels = level_slice.stop - level_slice.start
            arrays[variable] = group.create_array(
                variable,
                shape=(len(hours), levels, count, height, width),
                # Cut along latitude, so that a rank decodes little more than its band.
                chunks=(1, levels, count, max(1, height // ROW_CHUNKS), width),
                dtype="float32",
                fill_value=np.nan,
                dimension_names=("hour", "level", "coefficient", "latitude", "longitude"),
            )
        return arrays
