"""What a date's fields are on average: by hour of day and season, fitted to the training dates.

Each hour of the day has its own mean and annual harmonics per grid point. That is a smooth version
of WeatherBench 2's climatology, the mean for each hour and day of the year over a window of 61 days
(Rasp et al. 2024, section 2.4): two harmonics let through what that window does, the year and the
half year, and are also determined where there are few years.

Coefficients lie on disk in chunks of a few rows, so that a rank reads its own rows alone.
"""

from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.cache import fingerprint
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.forcings import year_fraction
from credit_dp.data.sources.base import Times
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates, Window, split_rows

VERSION = 2  # of the definitions below: a new one makes old files unused
HARMONICS = 2
WORST_VARIANCE = 20.0
ROW_CHUNKS = 64  # at least this many chunks from pole to pole, as far as there are rows
MOST_HOURS = 8  # of the day, with a fit of their own
HOURS = "hours"  # the attribute that says which these are
SUM_BYTES = 4 * 2**30  # of sums in memory while fitting
HELD_BYTES = 2**30  # of coefficients in memory while they are used, or those of one hour

Matrix = NDArray[np.float64]


@final
class Climatology:
    """The expected field on any date, from a fit that lies on disk.

    Holds the coefficients of the rows and channels that were read last. Without arrays, it is that
    of no variables.
    """

    def __init__(self, arrays: list[zarr.Array[Any]], hours: list[int]) -> None:
        self._arrays = arrays
        self.hours = hours
        self.harmonics = (arrays[0].shape[2] - 1) // 2 if arrays else HARMONICS
        self._selected: tuple[slice, slice] | None = None
        self._cached: dict[int, NDArray[np.float32]] = {}

    @classmethod
    def load(cls, path: Path, channels: Channels) -> "Climatology | None":
        """Open what a `ClimatologyFit` wrote; None if it is absent or damaged."""
        try:
            group = zarr.open_group(path, mode="r")
            said: Any = group.attrs[HOURS]
            hours = [int(hour) for hour in said]
            names = output_variables(channels)
            return cls([zarr.open_array(path / name, mode="r") for name in names], hours)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def field(
        self, time: np.datetime64, rows: slice, channels: slice = slice(None)
    ) -> NDArray[np.float32]:
        """The channels that come out, as expected, in the store's units: `(C, rows, W)`.

        NaN where there are no values. Between the hours that have a fit it is interpolated.
        """
        if self._selected != (rows, channels):
            self._selected, self._cached = (rows, channels), {}
        basis = seasonal_basis(np.array([time]), self.harmonics)[0].astype(np.float32)
        before, after, part = bracketing_hours(self.hours, float(hour_of_day(np.array([time]))[0]))
        found = np.einsum("k,ckhw->chw", basis, self._coefficients(before, rows, channels))
        if part:
            later = np.einsum("k,ckhw->chw", basis, self._coefficients(after, rows, channels))
            found += np.float32(part) * (later - found)
        return np.asarray(found)

    def fields(self, times: Times, channels: slice, rows: slice) -> NDArray[np.float32]:
        """Some of the channels that come out, at several times: `(T, C, rows, W)`; see `field`."""
        return np.stack([self.field(time, rows, channels) for time in times])

    def chunk_numbers(self, times: Times) -> NDArray[np.intp]:
        """Return a number for each time: each field is computed for itself."""
        return np.arange(len(times))

    def _coefficients(self, slot: int, rows: slice, channels: slice) -> NDArray[np.float32]:
        if slot not in self._cached:
            fields = self._read(slot, rows, channels)
            while self._cached and (len(self._cached) + 1) * fields.nbytes > HELD_BYTES:
                self._cached.pop(next(iter(self._cached)))
            self._cached[slot] = fields
        return self._cached[slot]

    def _read(self, slot: int, rows: slice, channels: slice) -> NDArray[np.float32]:
        """Read the coefficients of an hour of the day: `(C, K, rows, W)`."""
        levels = [array.shape[1] for array in self._arrays]
        wanted = range(sum(levels))[channels]
        parts, first = [], 0
        for array, count in zip(self._arrays, levels, strict=True):
            own = slice(max(wanted.start - first, 0), min(wanted.stop - first, count))
            if own.start < own.stop:
                parts.append(np.asarray(array[slot, own, :, rows], dtype=np.float32))
            first += count
        return np.concatenate(parts)


def output_variables(channels: Channels) -> list[str]:
    """The variables that come out, each once, in order."""
    return list(dict.fromkeys(channel.variable for channel in channels.output_channels))


def seasonal_basis(times: Times, harmonics: int) -> Matrix:
    """`(T,)` -> `(T, 1 + 2 harmonics)`: one, then cosine and sine of each multiple of the year."""
    angle = 2 * np.pi * year_fraction(times)
    columns = [np.ones_like(angle)]
    for multiple in range(1, harmonics + 1):
        columns += [np.cos(multiple * angle), np.sin(multiple * angle)]
    return np.stack(columns, axis=1)


def hour_of_day(times: Times) -> NDArray[np.float64]:
    """The hours since midnight UTC: `(T,)`, 0 to 24."""
    passed = times - times.astype("datetime64[D]")
    return np.asarray(passed / np.timedelta64(1, "h"))


def fitted_hours(times: Times) -> list[int]:
    """The hours of the day that get a fit: those of the dates or, of many, each third hour."""
    present = np.unique(hour_of_day(times).astype(int)).tolist()
    third = [hour for hour in present if hour % 3 == 0]
    return third if len(present) > MOST_HOURS and third else present


def bracketing_hours(hours: list[int], hour: float) -> tuple[int, int, float]:
    """Between which places of `hours` an hour of the day lies, and how far on the way.

    The day goes round: after the last comes the first.
    """
    after = int(np.searchsorted(hours, hour, side="right")) % len(hours)
    before = (after - 1) % len(hours)
    length = (hours[after] - hours[before]) % 24 or 24
    part = ((hour - hours[before]) % 24) / length
    return before, after, part if len(hours) > 1 else 0.0


def choose_harmonics(times: Times) -> int:
    """How many harmonics the dates determine: fewer than two where they leave out seasons.

    The variance of the fitted field, on the day on which it is greatest, is 5 times the residual
    variance over the number of dates if these cover whole years, 15 with 300 days and 34 with 270:
    the fit swings freely in the seasons that no date covers. Above a limit a harmonic is left out.
    """
    year = np.datetime64("2001-01-01T00", "h") + np.arange(0, 365 * 24, 24)
    for harmonics in range(HARMONICS, 0, -1):
        basis = seasonal_basis(times, harmonics)
        if np.linalg.matrix_rank(basis) < basis.shape[1]:
            continue
        days = seasonal_basis(year, harmonics)
        inverse = np.linalg.inv(basis.T @ basis / len(times))
        if np.einsum("tj,jk,tk->t", days, inverse, days).max() <= WORST_VARIANCE:
            return harmonics
    return 0


def climatology_path(store: Store, folder: Path, every: int = 1) -> Path:
    """Where the climatology of this store, these variables and dates lies."""
    times = store.times[TrainingDates.of(store, every).indices]
    description = store.description(output_variables(store.channels))
    name = fingerprint(VERSION, description, [str(time) for time in times])
    return folder / f"climatology-{name}.zarr"


@final
class ClimatologyFit:
    """Least squares for all grid points at once, during a pass over the training dates.

    The points of one hour share one small matrix; the right-hand sides of one group of channels and
    one band of rows are in memory: for each hour 40 bytes per point and channel.
    """

    def __init__(self, store: Store, dates: TrainingDates, path: Path) -> None:
        self._store = store
        times = store.times[dates.indices]
        hours = fitted_hours(times)
        hour = hour_of_day(times).astype(int)
        # Each date's place among the hours that get a fit; -1 if it has none.
        self._slots = np.array([hours.index(h) if h in hours else -1 for h in hour])
        of_slot = [times[self._slots == slot] for slot in range(len(hours))]
        harmonics = min(choose_harmonics(some) for some in of_slot)
        self._basis = seasonal_basis(times, harmonics)
        self._inverse = [
            np.linalg.inv(b.T @ b) for b in (seasonal_basis(t, harmonics) for t in of_slot)
        ]
        self._arrays = self._create(path, hours)
        self._channels: list[tuple[int, Channel]] = []
        self._rows = slice(0, 0)
        self._sums: Matrix = np.empty((0, 0, 0, 0))

    def bands(self, channels: tuple[Channel, ...]) -> list[slice]:
        """The rows that can be fitted at once."""
        per_point = 8 * len(self._inverse) * self._basis.shape[1]
        return split_rows(self._store, channels, SUM_BYTES, per_point)

    def begin(self, channels: tuple[Channel, ...], rows: slice) -> None:
        """Expect other channels or rows."""
        out = set(self._store.channels.output_channels)
        self._channels = [(place, c) for place, c in enumerate(channels) if c in out]
        self._rows = rows
        points = (rows.stop - rows.start) * self._store.grid[1]
        shape = (len(self._inverse), len(self._channels), self._basis.shape[1], points)
        self._sums = np.zeros(shape)

    def add(self, window: Window) -> None:
        """Take in the dates of a window that come for the first time."""
        slots = self._slots[window.dates]
        for slot in range(len(self._inverse)):
            dates, fresh = window.dates[slots == slot], window.fresh[slots == slot]
            if not len(dates):
                continue
            basis = self._basis[dates]
            for index, (place, _) in enumerate(self._channels):
                values = window.fields[fresh, place].reshape(len(fresh), -1).astype(np.float64)
                self._sums[slot, index] += basis.T @ values

    def end(self) -> None:
        """Solve for the coefficients and write them."""
        rows, columns = self._rows.stop - self._rows.start, self._store.grid[1]
        channels = self._store.channels
        for slot, inverse in enumerate(self._inverse):
            for index, (_, channel) in enumerate(self._channels):
                fitted = (inverse @ self._sums[slot, index]).reshape(-1, rows, columns)
                level = (
                    channels.output_channels.index(channel) - channels.of(channel.variable).start
                )
                array = self._arrays[channel.variable]
                array[slot, level, :, self._rows] = fitted.astype(np.float32)
        self._sums = np.empty((0, 0, 0, 0))

    def _create(self, path: Path, hours: list[int]) -> dict[str, zarr.Array[Any]]:
        """One array per variable: `(hours, levels, K, H, W)`."""
        group = zarr.open_group(path, mode="w", attributes={HOURS: hours})
        height, width = self._store.grid
        count = self._basis.shape[1]
        arrays = {}
        for variable in output_variables(self._store.channels):
            span = self._store.channels.of(variable)
            levels = span.stop - span.start
            arrays[variable] = group.create_array(
                variable,
                shape=(len(hours), levels, count, height, width),
                chunks=(1, levels, count, max(1, height // ROW_CHUNKS), width),
                dtype="float32",
                fill_value=np.nan,
                dimension_names=("hour", "level", "coefficient", "latitude", "longitude"),
            )
        return arrays
