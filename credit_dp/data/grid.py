"""The grid of a globe: its text in a config, its rows, what two grids have in common, regions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.errors import UserError

POLE = 90.0  # degrees
FULL_CIRCLE = 360.0  # degrees


def parse_grid(text: str) -> tuple[int, int]:
    """Parse `"121x240"` into `(121, 240)`: latitude rows and longitude columns.

    Raises:
        UserError: the text is not of that form.
    """
    checks.grid("data.grid", text)
    rows, columns = text.split("x")
    return int(rows), int(columns)


def row_edges(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of rows in degrees: halfway between them, and at the poles.

    Shapes:
        `(H,)`, strictly falling or strictly rising -> `(H + 1,)` in the same order.
    """
    middle = (latitude[1:] + latitude[:-1]) / 2
    first = POLE if latitude[0] >= latitude[-1] else -POLE
    return np.asarray(np.concatenate([[first], middle, [-first]]), dtype=np.float64)


def row_weights(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the area of each latitude row divided by the mean area.

    A row extends from midpoint to midpoint, and the outermost rows extend to the poles. A row on a
    pole therefore has the area of its half cell, where cos(latitude) would give it zero weight.

    Shapes:
        `(H,)` degrees, strictly falling or strictly rising -> `(H,)` with mean 1.

    Source: WeatherBench 2 (Rasp et al. 2024), section 3.2.
    """
    area = np.abs(np.diff(np.sin(np.deg2rad(row_edges(latitude)))))
    return np.asarray(area / area.mean(), dtype=np.float64)


COORDINATE_TOLERANCE = 1e-3  # degrees: stores have coordinates in float32, or rounded


@final
@dataclass(frozen=True, eq=False)
class Grid:
    """Rows and columns that cover the globe: beyond the outermost rows are the poles.

    Attributes:
        latitude: `(H,)` degrees, strictly falling or strictly rising.
        longitude: `(W,)` degrees, once round the globe in equal steps, from anywhere.
    """

    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""
        return len(self.latitude), len(self.longitude)

    def difference(
        self, other: "Grid", tolerance: float = COORDINATE_TOLERANCE
    ) -> tuple[str, str] | None:
        """Return texts of what this grid has and what `other` has instead; None if they are one.

        Longitudes 360 degrees apart are the same, but columns have to begin at the same one.
        """
        if self.shape != other.shape:
            shapes = ["x".join(map(str, grid.shape)) for grid in (self, other)]
            return f"a grid of {shapes[0]}", shapes[1]
        for name, period in (("latitude", np.inf), ("longitude", FULL_CIRCLE)):
            values, others = getattr(self, name), getattr(other, name)
            distance = np.abs(values - others)
            # `not <=` instead of `>`: NaN compares as False and has to differ, too.
            far = np.flatnonzero(~(np.minimum(distance, np.abs(period - distance)) <= tolerance))
            if len(far):
                index = int(far[0])
                return f"{name} {values[index]:.9g} at index {index}", f"{others[index]:.9g}"
        return None

    def check_global(self, where: str) -> None:
        """Refuse what area weights, and padding across poles and round circles, can't use.

        Raises:
            UserError: latitude is not monotonic or does not reach the poles in roughly equal steps,
                or longitude does not go round the globe once in equal steps.
        """
        problem = self._problem_of_rows() or self._problem_of_columns()
        if problem:
            raise UserError(f"{where}: {problem}. Change data.store.")

    def _problem_of_rows(self) -> str:
        steps = np.diff(self.latitude)
        first, last = self.latitude[[0, -1]]
        if not (np.all(steps > 0) or np.all(steps < 0)):
            return "latitude must increase or decrease throughout"
        if np.abs(self.latitude).max() > POLE:
            return "latitude must lie within -90 to 90 degrees"
        if len(steps) == 0:
            return "needs at least two rows of latitude, has one"
        narrowest, widest = np.abs(steps).min(), np.abs(steps).max()
        gap = POLE - min(abs(first), abs(last))  # between the outermost row and its pole
        if first * last >= 0 or gap > 1.5 * widest or widest > 2 * narrowest:
            return (
                "latitude must cover the globe from pole to pole in roughly equal steps, but goes "
                f"from {first:g} to {last:g} in steps of {narrowest:g} to {widest:g} degrees; a "
                "regional grid can't be used"
            )
        return ""

    def _problem_of_columns(self) -> str:
        columns, (first, last) = len(self.longitude), self.longitude[[0, -1]]
        steps = np.diff(np.append(self.longitude, first)) % FULL_CIRCLE
        # Columns may go east or west, but all of them the same way.
        signed = np.where(steps > FULL_CIRCLE / 2, steps - FULL_CIRCLE, steps)
        step = FULL_CIRCLE / columns
        is_even = np.all(np.abs(np.abs(signed) - step) < 1e-2 * step)
        if columns > 2 and not (is_even and len(set(np.sign(signed))) == 1):
            return (
                f"longitude must go once round the globe in {columns} equal steps, without "
                f"repeating its first column, but goes from {first:g} to {last:g}; a regional grid "
                "can't be used"
            )
        return ""


GLOBAL = "global"
Spans = Sequence[tuple[float, float]]  # from, to, in degrees; both ends belong to it
EVERYWHERE: Spans = ((-np.inf, np.inf),)


@final
@dataclass(frozen=True)
class Region:
    """All points in some spans of latitude and some of longitude, in degrees.

    Attributes:
        latitude: from south to north.
        longitude: from west to east, 0 to 360.
    """

    latitude: Spans = EVERYWHERE
    longitude: Spans = EVERYWHERE

    def rows(self, latitude: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return the indices of the rows inside: `(H,)` degrees -> `(h,)`."""
        return _indices_within(latitude, self.latitude)

    def columns(self, longitude: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return the indices of the columns inside: `(W,)` degrees, from 0 or -180 -> `(w,)`."""
        return _indices_within(longitude % FULL_CIRCLE, self.longitude)


def _indices_within(degrees: NDArray[np.float64], spans: Spans) -> NDArray[np.intp]:
    inside = [(degrees >= first) & (degrees <= last) for first, last in spans]
    return np.flatnonzero(np.any(inside, axis=0))


# Source: WeatherBench 2, names and boxes of its evaluation script.
REGIONS: Mapping[str, Region] = MappingProxyType(
    {
        GLOBAL: Region(),
        "tropics": Region([(-20, 20)]),
        "extra-tropics": Region([(-90, -20), (20, 90)]),
        "northern-hemisphere": Region([(20, 90)]),
        "southern-hemisphere": Region([(-90, -20)]),
        "europe": Region([(35, 75)], [(347.5, 360), (0, 42.5)]),
        "north-america": Region([(25, 60)], [(240, 285)]),
        "north-atlantic": Region([(25, 65)], [(290, 350)]),
        "north-pacific": Region([(25, 60)], [(145, 230)]),
        "east-asia": Region([(25, 60)], [(102.5, 150)]),
        "ausnz": Region([(-45, -12.5)], [(120, 175)]),
        "arctic": Region([(60, 90)]),
        "antarctic": Region([(-90, -60)]),
    }
)


def check_regions(names: Sequence[str]) -> None:
    """Refuse a name that is not in `REGIONS`, or that occurs twice."""
    for name in names:
        checks.one_of("regions", name, tuple(REGIONS))
    repeated = next((name for name in names if list(names).count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"regions: names {repeated} twice. Name each region once.")
