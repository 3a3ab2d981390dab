"""Maps of the sphere: how longitude and latitude lie on paper, and fields sampled on its points.

A `MapFrame` is the paper of one map: a projection, the box of degrees that it shows, and a raster
of points on which fields are interpolated. Everything is drawn in its x and y.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import FULL_CIRCLE, POLE, Grid, degrees_east
from credit_dp.data.regrid import PointInterpolation, positions_on_plane

Array = NDArray[np.float64]
RASTER_COLUMNS = 640  # of points on which fields are interpolated
OUTLINE_POINTS = 361  # along each edge of a box
HALF_CIRCLE = FULL_CIRCLE / 2
LATITUDE_LIMIT = 89.999  # degrees: every longitude ends in the pole itself


class MapProjection(ABC):
    """A projection of the sphere of radius 1; degrees of longitude are those east of its middle."""

    @abstractmethod
    def forward(self, longitude: Array, latitude: Array) -> tuple[Array, Array]:
        """Return x and y of points in degrees, all of one shape."""

    @abstractmethod
    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return longitude and latitude of x and y; beyond 180 or 90 degrees outside the map."""


@final
class EqualEarth(MapProjection):
    """The equal-area projection Equal Earth.

    Source: Savric, Patterson & Jenny 2018, equations 3 to 7.
    """

    A = (1.340264, -0.081106, 0.000893, 0.003796)
    M = np.sqrt(3.0) / 2

    def forward(self, longitude: Array, latitude: Array) -> tuple[Array, Array]:
        """Return x and y of points in degrees."""
        theta = np.arcsin(self.M * np.sin(np.radians(latitude)))
        x = np.radians(longitude) * np.cos(theta) / (self.M * self._slope(theta))
        return x, self._height(theta)

    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return longitude and latitude, by Newton's method."""
        theta = np.asarray(y / self.A[0])
        for _ in range(8):  # quadratic: 1e-12 after six
            theta = theta - (self._height(theta) - y) / self._slope(theta)
        sine = np.sin(theta) / self.M
        # A little beyond the pole there still is a latitude: the next point is outside.
        outside = np.abs(sine) > 1
        latitude = np.degrees(np.arcsin(np.clip(sine, -1, 1)))
        longitude = np.degrees(x * self.M * self._slope(theta) / np.cos(theta))
        return longitude, np.where(outside, np.nan, latitude)

    def _height(self, theta: Array) -> Array:
        a1, a2, a3, a4 = self.A
        return np.asarray(theta * (a1 + theta**2 * (a2 + theta**4 * (a3 + theta**2 * a4))))

    def _slope(self, theta: Array) -> Array:
        a1, a2, a3, a4 = self.A
        square = theta**2
        return np.asarray(a1 + square * (3 * a2 + square**2 * (7 * a3 + square * 9 * a4)))


@final
@dataclass(frozen=True)
class LatLon(MapProjection):
    """Latitude over longitude, at true scale along one latitude in degrees."""

    true_scale: float = 0.0

    def forward(self, longitude: Array, latitude: Array) -> tuple[Array, Array]:
        """Return x and y of points in degrees."""
        return np.radians(longitude) * self._width, np.radians(latitude)

    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return longitude and latitude."""
        return np.degrees(x) / self._width, np.degrees(y)

    @property
    def _width(self) -> float:
        return float(np.cos(np.radians(self.true_scale)))


@final
@dataclass(frozen=True)
class Polar(MapProjection):
    """Lambert's azimuthal equal-area projection around a pole.

    Source: Snyder 1987, equations 24-3 to 24-17.
    """

    pole: int = 1  # -1: the south pole

    def forward(self, longitude: Array, latitude: Array) -> tuple[Array, Array]:
        """Return x and y of points in degrees."""
        radius = 2 * np.sin(np.radians(POLE - self.pole * latitude) / 2)
        angle = np.radians(longitude)
        return radius * np.sin(angle), -self.pole * radius * np.cos(angle)

    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return longitude and latitude."""
        sine = np.hypot(x, y) / 2
        colatitude = 2 * np.degrees(np.arcsin(np.clip(sine, 0, 1)))
        latitude = np.where(sine > 1, np.nan, self.pole * (POLE - colatitude))
        return np.degrees(np.arctan2(x, -self.pole * y)), latitude


@final
@dataclass(frozen=True)
class Box:
    """What a map shows, in degrees; east is above west by 360 at most."""

    south: float = -POLE
    north: float = POLE
    west: float = 0.0
    east: float = FULL_CIRCLE

    @property
    def middle(self) -> tuple[float, float]:
        """Longitude and latitude in the middle."""
        return (self.west + self.east) / 2, (self.south + self.north) / 2

    @property
    def goes_round(self) -> bool:
        """Whether it has all longitudes."""
        return self.east - self.west >= FULL_CIRCLE - 1e-6


class MapFrame(ABC):
    """The paper of a map, on which points have x and y.

    Attributes:
        x, y: of the raster, `(nx,)` and `(ny,)`, both rising.
    """

    x: Array
    y: Array

    @abstractmethod
    def place(self, longitude: Array, latitude: Array) -> Array:
        """Return x and y of lines in degrees, `(2, N)`; NaN between lines and outside the map."""

    @abstractmethod
    def sample(self, values: NDArray[np.floating]) -> Array:
        """Return a field `(H, W)` on the raster, `(ny, nx)`; NaN outside and without a value."""

    @property
    @abstractmethod
    def outline(self) -> Array:
        """The edge of the map, a closed line `(2, N)` of x and y."""

    @property
    def aspect(self) -> float:
        """Width divided by height."""
        x, y = np.ptp(self.outline, axis=1)
        return float(x / y)


@final
class SphereFrame(MapFrame):
    """A box of the sphere in a projection, for a grid with rows of latitude.

    Args:
        box: what to show; the projection's middle is the box's.
    """

    def __init__(self, cells: Grid, projection: MapProjection, box: Box) -> None:
        self.box = box
        self.projection = projection
        x, y = self.outline
        self.x = np.linspace(x.min(), x.max(), RASTER_COLUMNS)
        rows = max(2, round(RASTER_COLUMNS / self.aspect))
        self.y = np.linspace(y.min(), y.max(), rows)
        longitude, latitude = projection.inverse(*np.meshgrid(self.x, self.y))
        # Points outside the box too, by a little: colours and lines must reach the outline, which
        # clips them.
        margin = 2.0
        half = (box.east - box.west) / 2
        with np.errstate(invalid="ignore"):
            inside = (np.abs(longitude) <= half + margin) & (latitude <= box.north + margin)
            inside &= latitude >= box.south - margin
        self._inside = inside
        shown = np.clip(latitude[inside], box.south, box.north)
        limit = half if not box.goes_round else np.inf
        around = np.clip(longitude[inside], -limit, limit) + box.middle[0]
        if not cells.is_global:
            shown = np.clip(shown, cells.latitude.min(), cells.latitude.max())
            if not cells.is_periodic:
                west = cells.longitude[0] if _eastward(cells) else cells.longitude[-1]
                span = abs(_span(cells))
                east_of = degrees_east(around, west + span / 2)
                around = west + span / 2 + np.clip(east_of, -span / 2, span / 2)
        self._poles = cells.is_global and float(np.abs(cells.latitude[[0, -1]]).max()) < POLE
        if self._poles:
            ends = np.copysign(POLE, cells.latitude[[0, -1]])
            with_poles = np.concatenate([ends[:1], cells.latitude, ends[1:]])
            cells = Grid(with_poles, cells.longitude)
        self._interpolate = PointInterpolation(cells, shown, around)

    def place(self, longitude: Array, latitude: Array) -> Array:
        """Return x and y of lines in degrees; they are cut at the map's edge."""
        east = degrees_east(longitude, self.box.middle[0])
        x, y = self.projection.forward(east, latitude)
        with np.errstate(invalid="ignore"):
            jumps = np.abs(np.diff(east)) > HALF_CIRCLE
        # A line that crosses the edge goes on at the other side; around a pole there is no edge.
        jumps &= not isinstance(self.projection, Polar)
        cuts = np.flatnonzero(jumps) + 1
        x, y = (np.insert(part, cuts, np.nan) for part in (x, y))
        return np.stack([x, y])

    def sample(self, values: NDArray[np.floating]) -> Array:
        """Interpolate bilinearly, but only where the nearest point has a value.

        A pole without a row has the mean of the row beside it.
        """
        values = np.asarray(values, np.float64)
        if self._poles:
            means = (np.full_like(row, row.mean()) for row in values[[0, -1]])
            values = np.vstack([next(means), values, next(means)])
        raster = np.full(self._inside.shape, np.nan)
        raster[self._inside] = self._interpolate(values)
        valid = np.isfinite(values)
        if not valid.all():
            share = self._interpolate(valid.astype(np.float64))
            raster[self._inside] = np.where(share >= 0.5, raster[self._inside], np.nan)
        return raster

    @cached_property
    def outline(self) -> Array:
        """The edge of the box."""
        box = self.box
        half = (box.east - box.west) / 2
        along = np.linspace(0, 1, OUTLINE_POINTS)
        if isinstance(self.projection, Polar):
            edge = box.south if self.projection.pole > 0 else box.north
            if box.goes_round:
                circle = (along * 2 - 1) * HALF_CIRCLE
                return np.stack(self.projection.forward(circle, np.full_like(circle, edge)))
        up = box.south + along * (box.north - box.south)
        right = half * (along * 2 - 1)
        ones = np.ones_like(along)
        longitude = np.concatenate([-half * ones, right, half * ones, right[::-1]])
        latitude = np.concatenate([up, box.north * ones, up[::-1], box.south * ones])
        return np.stack(self.projection.forward(longitude, latitude))


@final
class PlaneFrame(MapFrame):
    """The rows and columns of a grid that is on a projection itself; y falls from row to row."""

    def __init__(self, cells: Grid) -> None:
        self._cells = cells
        self.x = np.arange(cells[1], dtype=np.float64)
        self.y = -np.arange(cells[0], dtype=np.float64)[::-1]

    def place(self, longitude: Array, latitude: Array) -> Array:
        """Return columns and falling rows of lines in degrees."""
        placed = np.full((2, len(longitude)), np.nan)
        given = np.flatnonzero(np.isfinite(longitude) & np.isfinite(latitude))
        near = given[self._near(longitude[given], latitude[given])]
        row, column = positions_on_plane(self._cells, latitude[near], longitude[near])
        placed[:, near] = column, -row
        return placed

    def _near(self, longitude: Array, latitude: Array) -> NDArray[np.bool_]:
        # The other side of the globe has the same lines through the centre.
        (north, south), (west, east) = self._cells.extent
        around = np.abs(degrees_east(longitude, (west + east) / 2)) <= (east - west) / 2 + 5
        return np.asarray(around & (latitude < north + 5) & (latitude > south - 5))

    def sample(self, values: NDArray[np.floating]) -> Array:
        """Return the field with its last row first."""
        return np.asarray(values[::-1], np.float64)

    @cached_property
    def outline(self) -> Array:
        """The edges of the outermost cells."""
        rows, columns = self._cells
        west, east, north, south = -0.5, columns - 0.5, 0.5, 0.5 - rows
        return np.array([[west, east, east, west, west], [south, south, north, north, south]])


def _eastward(cells: Grid) -> bool:
    return _span(cells) >= 0


def _span(cells: Grid) -> float:
    steps = degrees_east(cells.longitude[1:], cells.longitude[:-1])
    return float(steps.sum())


def box_of(cells: Grid) -> Box:
    """Return what a grid with rows of latitude covers, to the edges of its cells."""
    edges = cells.row_edges
    south, north = float(edges.min()), float(edges.max())
    if cells.is_periodic:
        return Box(south, north, -HALF_CIRCLE, HALF_CIRCLE)
    span = _span(cells)
    half = abs(span) / (cells[1] - 1) / 2 if cells[1] > 1 else HALF_CIRCLE
    west = float(cells.longitude[0]) + min(span, 0.0)
    return Box(south, north, west - half, west + abs(span) + half)
