"""The grid of the globe or a region: its text in a config, its coordinates and the areas of cells.

`Grid` is what readers, models and scores ask; `Region` selects points of it for scores.
"""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.errors import UserError

POLE = 90.0  # degrees
FULL_CIRCLE = 360.0  # degrees
COORDINATE_TOLERANCE = 1e-3  # degrees: stores have coordinates in float32, or rounded

Degrees = NDArray[np.float64]
Array = NDArray[np.float64]
FieldArray = NDArray[np.float32]  # fields as they are read from stores


def parse_grid(text: str) -> tuple[int, int]:
    """Parse `"121x240"` into `(121, 240)`: latitude rows and longitude columns."""
    checks.grid("data.grid", text)
    rows, columns = text.split("x")
    return int(rows), int(columns)


def row_edges(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of rows in degrees: halfway between them, and at the poles.

    The rows of HEALPix have the area of their cells, which are all equally large.

    Shapes:
        `(H,)`, strictly falling or strictly rising -> `(H + 1,)` in the same order.
    """
    lengths = _healpix_lengths(latitude)
    if lengths is not None:
        sines = 1 - 2 * np.append(0, np.cumsum(lengths)) / lengths.sum()
        edges = np.rad2deg(np.arcsin(sines if latitude[0] >= latitude[-1] else -sines))
        return np.asarray(edges, dtype=np.float64)
    middle = (latitude[1:] + latitude[:-1]) / 2
    first = POLE if latitude[0] >= latitude[-1] else -POLE
    return np.asarray(np.concatenate([[first], middle, [-first]]), dtype=np.float64)


def _healpix_lengths(latitude: NDArray[np.float64]) -> NDArray[np.intp] | None:
    nside = (len(latitude) + 1) // 4
    if 4 * nside != len(latitude) + 1:
        return None
    falling, lengths = healpix_rows(nside)
    from_north = latitude if latitude[0] >= latitude[-1] else latitude[::-1]
    return lengths if np.abs(from_north - falling).max() < COORDINATE_TOLERANCE else None


def healpix_rows(nside: int) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the latitudes of the rows of HEALPix, falling, and their numbers of cells.

    Source: Gorski et al. 2005, equations 4 to 8.
    """
    row = np.arange(1, 2 * nside + 1)
    sine = np.where(row < nside, 1 - row**2 / (3 * nside**2), (4 - 2 * row / nside) / 3)
    sine, lengths = np.append(sine, -sine[-2::-1]), 4 * np.minimum(row, nside)
    return np.rad2deg(np.arcsin(sine)), np.append(lengths, lengths[-2::-1])


def row_weights(latitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the area of each latitude row divided by the mean area.

    A row extends from edge to edge, see `row_edges`. A row on a
    pole therefore has the area of its half cell, where cos(latitude) would give it zero weight.

    Shapes:
        `(H,)` degrees, strictly falling or strictly rising -> `(H,)` with mean 1.

    Source: WeatherBench 2 (Rasp et al. 2024), section 3.2.
    """
    return area_weights(row_edges(latitude))


def area_weights(edges: Degrees) -> Array:
    """Return the areas between circles of latitude divided by their mean: `(H + 1,)` -> `(H,)`."""
    area = np.abs(np.diff(np.sin(np.deg2rad(edges))))
    return np.asarray(area / area.mean(), dtype=np.float64)


def cell_areas(latitude: NDArray[np.float64], longitude: NDArray[np.float64]) -> Array:
    """Return the areas of the cells of a grid with two-dimensional coordinates, divided by R^2.

    A cell is the spherical quadrilateral between four corners. A corner is the mean of the four
    centres around it; beyond the outermost rows and columns, centres are continued by parabolas in
    space. On conformal projections areas are right to 1e-9 inside and 1e-5 at the edges, where
    centres are 50 km apart, and to 1e-8 where they are 3 km apart; coordinates that are rounded to
    float32 have more effect.

    Needs three rows and three columns.

    Shapes:
        `(H, W)` degrees each -> `(H, W)`.

    Source: Eriksson 1990, "On the measure of solid angles", for the areas of triangles.
    """
    centres = unit_vectors(latitude, longitude)
    for axis in (1, 2):
        edges = np.take(centres, [0, 1, 2, -1, -2, -3], axis)
        one, two, three, last, second, third = np.split(edges, 6, axis)
        beyond = 3 * (one - two) + three, 3 * (last - second) + third
        centres = np.concatenate([beyond[0], centres, beyond[1]], axis)
    corners = centres[:, 1:, 1:] + centres[:, 1:, :-1] + centres[:, :-1, 1:] + centres[:, :-1, :-1]
    corners /= np.linalg.norm(corners, axis=0)
    return np.abs(_quadrilateral_areas(corners))


def unit_vectors(latitude: Degrees, longitude: Degrees) -> Array:
    """Return points of a sphere of radius 1: degrees, broadcast to `(...)`, -> `(3, ...)`."""
    phi, lam = np.deg2rad(latitude), np.deg2rad(longitude)
    radius = np.cos(phi)
    return np.stack(np.broadcast_arrays(radius * np.cos(lam), radius * np.sin(lam), np.sin(phi)))


def _quadrilateral_areas(corners: Array) -> Array:
    """Return signed areas between neighbouring points: `(3, H, W)` -> `(H - 1, W - 1)`."""
    north_west, north_east = corners[:, :-1, :-1], corners[:, :-1, 1:]
    south_west, south_east = corners[:, 1:, :-1], corners[:, 1:, 1:]
    halves = [(north_west, north_east, south_east), (north_west, south_east, south_west)]
    return np.asarray(sum(_triangle_area(*half) for half in halves), dtype=np.float64)


def _triangle_area(a: Array, b: Array, c: Array) -> Array:
    """Return the signed areas of spherical triangles between unit vectors `(3, ...)`."""
    # Differences of vectors instead of the vectors: cells of few kilometres keep their digits.
    volume = (a * np.cross(b - a, c - a, axis=0)).sum(axis=0)
    products = (a * b).sum(axis=0) + (b * c).sum(axis=0) + (c * a).sum(axis=0)
    return np.asarray(2 * np.arctan2(volume, 1 + products), dtype=np.float64)


class Axis(NamedTuple):
    """A dim of rows or columns on a projection: its name, coordinate and attributes.

    `values` are empty if the file has none.
    """

    name: str
    values: NDArray[np.float64]
    attributes: Mapping[str, Any]


class Projection(NamedTuple):
    """What a file says of the projection on which rows and columns are in equal steps.

    Attributes:
        name: of the CF variable `grid_mapping`; empty if the file has none.
        attributes: of that variable.
        rows, columns: the dims.
    """

    name: str
    attributes: Mapping[str, Any]
    rows: Axis
    columns: Axis

    def flipped(self) -> "Projection":
        """Return the projection with its rows in the opposite order."""
        return self._replace(rows=self.rows._replace(values=self.rows.values[::-1]))


UNKNOWN_PROJECTION = Projection("", {}, Axis("y", np.empty(0), {}), Axis("x", np.empty(0), {}))
ROUNDING = 5e-5  # degrees, of steps between longitudes in float32
UNEVEN = 1.6  # of a step and the next: a missing row makes 2, ModelE has 1.5 at the poles
COORDINATES = "latitude longitude"  # CF's attribute of fields without these dims
SMALLEST_PLANE = 3  # rows and columns, of which corners beyond the edges are extrapolated


@final
class Grid(tuple[int, int]):
    """Rows and columns of cells; as a tuple, their numbers.

    It covers the globe or a region. Beyond the outermost rows of the globe are the poles, beyond
    those of a region is nothing; columns may go round in a circle, see `is_periodic`.

    Attributes:
        latitude: `(H,)` degrees, strictly falling or strictly rising, or `(H, W)` on a projection.
        longitude: `(W,)` degrees in equal steps, from anywhere, or `(H, W)`.
        projection: of a grid with two-dimensional coordinates; `UNKNOWN_PROJECTION` of others.
    """

    latitude: Degrees
    longitude: Degrees
    projection: Projection

    def __new__(
        cls, latitude: Degrees, longitude: Degrees, projection: Projection = UNKNOWN_PROJECTION
    ) -> Self:
        """Return the grid of coordinates."""
        grid = super().__new__(cls, (len(latitude), longitude.shape[-1]))
        grid.latitude, grid.longitude = latitude, longitude
        grid.projection = projection
        return grid

    def __getnewargs__(self) -> tuple[Degrees, Degrees, Projection]:
        return self.latitude, self.longitude, self.projection

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns, as a plain tuple."""
        return self[0], self[1]

    @property
    def is_projected(self) -> bool:
        """Whether coordinates are two-dimensional."""
        return self.latitude.ndim == 2

    @property
    def dims(self) -> tuple[str, str]:
        """The names of the dims of rows and of columns in files."""
        if not self.is_projected:
            return "latitude", "longitude"
        return self.projection.rows.name, self.projection.columns.name

    @property
    def field_attributes(self) -> dict[str, Any]:
        """The attributes of a field by which CF finds the coordinates and the projection."""
        if not self.is_projected:
            return {}
        mapping = self.projection.name
        return {"coordinates": COORDINATES} | ({"grid_mapping": mapping} if mapping else {})

    def description(self) -> list[object]:
        """Return what a cached result depends on, as JSON for a fingerprint."""
        description: list[object] = [self.latitude.tolist(), self.longitude.tolist()]
        if not self.is_projected and _healpix_lengths(self.latitude) is not None:
            description.append("areas of HEALPix")  # older results have edges halfway between rows
        return description

    def coordinates(self, rows: slice) -> tuple[Degrees, Degrees]:
        """Return latitudes and longitudes of a band: `(h,)` and `(W,)`, or both `(h, W)`."""
        return self.latitude[rows], self.longitude[rows] if self.is_projected else self.longitude

    @cached_property
    def is_global(self) -> bool:
        """Whether the grid reaches from pole to pole and once round the globe."""
        return self.is_periodic and self._goes_from_pole_to_pole()

    @property
    def is_periodic(self) -> bool:
        """Whether columns go once round the globe: the globe's, or those of a band of latitudes."""
        return not self.is_projected and self._goes_round()

    @cached_property
    def weights(self) -> Array:
        """The areas of the cells divided by their mean: `(H,)`, or `(H, W)` on a projection.

        The outermost rows of a region extend as far outward as inward; for projections see
        `cell_areas`.
        """
        if self.is_projected:
            area = cell_areas(self.latitude, self.longitude)
            return np.asarray(area / area.mean(), dtype=np.float64)
        return area_weights(self.row_edges)

    @property
    def row_edges(self) -> Degrees:
        """The edges of rows of latitude, `(H + 1,)` degrees in the order of the rows."""
        edges = row_edges(self.latitude)
        if not self.is_global:
            half = (self.latitude[1] - self.latitude[0]) / 2, np.diff(self.latitude[-2:])[0] / 2
            edges[[0, -1]] = self.latitude[0] - half[0], self.latitude[-1] + half[1]
        return np.clip(edges, -POLE, POLE)

    @property
    def points(self) -> tuple[Degrees, Degrees]:
        """The latitude and the longitude of each point, `(H, W)` each."""
        if self.is_projected:
            return self.latitude, self.longitude
        longitude, latitude = np.meshgrid(self.longitude, self.latitude)
        return latitude, longitude

    @property
    def rises(self) -> bool:
        """Whether rows go from south to north."""
        return bool(self.latitude[0].mean() < self.latitude[-1].mean())

    def flipped(self) -> "Grid":
        """Return the grid with its rows in the opposite order."""
        longitude = self.longitude[::-1] if self.is_projected else self.longitude
        return Grid(self.latitude[::-1], longitude, self.projection.flipped())

    def difference(
        self, other: "Grid", tolerance: float = COORDINATE_TOLERANCE
    ) -> tuple[str, str] | None:
        """Return texts of what this grid has and what `other` has instead; None if they are one.

        Longitudes 360 degrees apart are the same, but columns have to begin at the same one; see
        `columns_east`.
        """
        if self != other or self.is_projected != other.is_projected:
            texts = [
                f"{'x'.join(map(str, grid))}{' of 2-D coordinates' if grid.is_projected else ''}"
                for grid in (self, other)
            ]
            return f"a grid of {texts[0]}", texts[1]
        for name, period in (("latitude", np.inf), ("longitude", FULL_CIRCLE)):
            values, others = getattr(self, name), getattr(other, name)
            distance = np.abs(values - others)
            # `not <=` instead of `>`: NaN compares as False and has to differ, too.
            far = np.argwhere(~(np.minimum(distance, np.abs(period - distance)) <= tolerance))
            if len(far):
                index = tuple(far[0].tolist())
                shown = index if self.is_projected else index[0]
                return f"{name} {values[index]:.9g} at index {shown}", f"{others[index]:.9g}"
        return None

    def columns_east(self, other: "Grid", tolerance: float) -> int:
        """Return how many columns further east another grid begins, on the same meridians.

        Rolled westward by so many, fields of this grid have the columns of `other`. 0 if they have
        them already, or if the grids differ in more than the first column.
        """
        if self[1] != other[1] or not (self.is_periodic and other.is_periodic):
            return 0
        east = int(np.abs(degrees_east(self.longitude, other.longitude[0])).argmin())
        apart = degrees_east(np.roll(self.longitude, -east), other.longitude)
        return east if np.abs(apart).max() <= tolerance else 0

    def to_json(self) -> dict[str, Any]:
        """Return the grid as JSON; coordinates on a projection as text, as they are many."""
        if not self.is_projected:
            return {"latitude": self.latitude.tolist(), "longitude": self.longitude.tolist()}
        name, attributes, *axes = self.projection
        return {
            "latitude": _to_text(self.latitude),
            "longitude": _to_text(self.longitude),
            "shape": [*self],
            "projection": [name, attributes],
            "axes": [[axis.name, axis.values.tolist(), axis.attributes] for axis in axes],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the grid that `to_json` returned, perhaps among other fields.

        Raises:
            KeyError, TypeError, ValueError: the fields are damaged.
        """
        names = "latitude", "longitude"
        if "shape" not in fields:
            latitude, longitude = (np.array(fields[name], float) for name in names)
            return cls(latitude, longitude)
        latitude, longitude = (_from_text(fields[x], fields["shape"]) for x in names)
        name, attributes = fields["projection"]
        rows, columns = (Axis(x, np.array(y, float), z) for x, y, z in fields["axes"])
        return cls(latitude, longitude, Projection(name, attributes, rows, columns))

    def check(self, where: str) -> None:
        """Refuse coordinates that don't make a grid of rows and columns.

        Raises:
            UserError: rows cross, or are not in roughly equal steps; columns are not in equal steps
                or go round the globe more than once; a coordinate is missing.
        """
        if self.is_projected:
            problem = self._problem_of_plane()
        else:
            problem = self._problem_of_rows() or self._problem_of_columns()
        if problem:
            raise UserError(f"{where}: {problem}. Change data.store.")

    def check_global(self, where: str, remedy: str = "Change data.store.") -> None:
        """Refuse a region where poles and whole circles of latitude are needed."""
        if not self.is_global:
            raise UserError(f"{where}: a global grid is needed here, but this is {self}. {remedy}")

    def __str__(self) -> str:
        size = "x".join(map(str, self))
        if self.is_global:
            return size
        (north, south), (west, east) = self.extent
        return (
            f"a region of {size}, latitude {north:g} to {south:g}, longitude {west:g} to {east:g}"
        )

    @property
    def extent(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """First and last latitude and longitude; on a projection, the largest and smallest."""
        latitude, longitude = self.latitude, self.longitude
        if not self.is_projected:
            return (
                (float(latitude[0]), float(latitude[-1])),
                (float(longitude[0]), float(longitude[-1])),
            )
        middle = longitude[self[0] // 2, self[1] // 2]
        around = degrees_east(longitude, middle) + middle
        return (
            (float(latitude.max()), float(latitude.min())),
            (float(around.min()), float(around.max())),
        )

    def _goes_from_pole_to_pole(self) -> bool:
        """Whether rows, which are checked, leave no more than 1.2 steps at the poles.

        Rows at equal steps leave none, a half or, if those on the poles were dropped, one; Gaussian
        rows 0.78 at most, and HEALPix 1.16.
        """
        first, last = self.latitude[[0, -1]]
        gap = POLE - min(abs(first), abs(last))  # between the outermost row and its pole
        return bool(first * last < 0 and gap <= 1.2 * np.abs(np.diff(self.latitude)).max())

    def _goes_round(self) -> bool:
        """Whether columns, which are checked, go once round the globe."""
        steps = turns(np.append(self.longitude, self.longitude[0]))
        step = FULL_CIRCLE / self[1]
        is_even = np.all(np.abs(np.abs(steps) - step) < 1e-2 * step)
        is_one_way = self[1] == 2 or len(set(np.sign(steps))) == 1  # two are half a circle apart
        return self[1] == 1 or bool(is_even and is_one_way)

    def _problem_of_rows(self) -> str:
        steps = np.diff(self.latitude)
        if not (np.all(steps > 0) or np.all(steps < 0)):
            return "latitude must increase or decrease throughout"
        if np.abs(self.latitude).max() > POLE:
            return "latitude must lie within -90 to 90 degrees"
        if len(steps) == 0:
            return "needs at least two rows of latitude, has one"
        narrowest, widest = np.abs(steps).min(), np.abs(steps).max()
        if widest > 2 * narrowest or _jumps(steps).any():
            first, last = self.latitude[[0, -1]]
            return (
                f"latitude must go in roughly equal steps, but goes from {first:g} to {last:g} in "
                f"steps of {narrowest:g} to {widest:g} degrees"
            )
        return ""

    def _problem_of_columns(self) -> str:
        if self._goes_round() or _are_in_a_row(self.longitude):
            return ""
        steps = turns(self.longitude)
        size = np.abs(steps)
        first, last = self.longitude[[0, -1]]
        problem = (
            "longitude must go in equal steps, at most once round the globe and without "
            f"repeating its first column, but goes from {first:g} to {last:g} in {self[1]} "
            f"columns with steps of {size.min():g} to {size.max():g} degrees"
        )
        beyond = len(steps) - int(np.abs(steps - np.median(steps)).argmax())
        if not _are_in_a_row(np.roll(self.longitude, beyond)):
            return problem
        return (
            f"{problem}; write it again from its western edge, as xarray's "
            f"dataset.roll(longitude={beyond}, roll_coords=True)"
        )

    def _problem_of_plane(self) -> str:
        if min(self) < SMALLEST_PLANE:
            size = "x".join(map(str, self))
            return f"a projection needs at least {SMALLEST_PLANE} rows and columns, has {size}"
        for name in ("latitude", "longitude"):
            missing = np.argwhere(~np.isfinite(getattr(self, name)))
            if len(missing):
                row, column = missing[0]
                return f"{name} is missing at row {row} and column {column} of the file"
        if np.abs(self.latitude).max() > POLE:
            return "latitude must lie within -90 to 90 degrees"
        centres = unit_vectors(self.latitude, self.longitude)
        areas = _quadrilateral_areas(centres)
        wrong = np.argwhere(~(areas * np.sign(np.median(areas)) > 0))
        if len(wrong):
            row, column = wrong[0]
            return (
                "rows and columns must not cross or repeat, but they do between rows "
                f"{row} and {row + 1}, columns {column} and {column + 1} of the file"
            )
        across = np.linalg.norm(centres[:, :, 0] - centres[:, :, -1], axis=0)
        step = np.linalg.norm(centres[:, :, 1] - centres[:, :, 0], axis=0)
        if np.median(across / step) < 2:
            return (
                "a curvilinear grid that goes round the globe can't be used: regrid it to one with "
                "a row for each latitude and a column for each longitude first"
            )
        for axis, name in ((1, "rows"), (2, "columns")):
            # As scales of projections change from place to place, each step and the next.
            apart = np.linalg.norm(np.diff(centres, axis=axis), axis=0)
            steps = np.degrees(np.median(apart, axis=2 - axis))
            uneven = np.flatnonzero(_jumps(steps))
            if len(uneven):
                at = int(uneven[0])
                return (
                    f"{name} must go in roughly equal steps, but {name} {at}, {at + 1} and {at + 2}"
                    f" of the file are {steps[at]:.4g} and {steps[at + 1]:.4g} degrees apart"
                )
        return ""


def _to_text(values: Array) -> str:
    """Return values in the smaller type that has all their digits, compressed, as text."""
    kind = "<f4" if np.array_equal(values.astype("<f4"), values) else "<f8"
    return kind + base64.b64encode(zlib.compress(values.astype(kind).tobytes())).decode()


def _from_text(text: str, shape: Sequence[int]) -> Array:
    kind = np.dtype(text[:3])
    size = kind.itemsize * math.prod(shape)
    try:
        # One byte more than needed, so that longer contents fail instead of filling the memory.
        content = zlib.decompressobj().decompress(
            base64.b64decode(text[3:], validate=True), size + 1
        )
    except (zlib.error, OverflowError) as error:
        raise ValueError(f"coordinates can't be decompressed: {error}") from error
    return np.frombuffer(content, kind).reshape(shape).astype(np.float64)


def _jumps(steps: Degrees) -> NDArray[np.bool_]:
    """Return where a step and the next differ: `(N,)` of one sign -> `(N - 1,)`."""
    ratio = steps[1:] / steps[:-1]
    return np.maximum(ratio, 1 / ratio) > UNEVEN


def _are_in_a_row(longitude: Degrees) -> bool:
    """Whether columns go in equal steps one way, less than once round the globe."""
    steps = turns(longitude)
    size = np.abs(steps)
    is_even = np.ptp(size) < 1e-2 * size.mean() + ROUNDING
    is_one_way = abs(np.sign(steps).sum()) == len(steps)
    return bool(is_even and is_one_way and size.sum() <= FULL_CIRCLE - size.mean() / 2)


def turns(longitude: Degrees) -> Degrees:
    """Return the steps from column to column along the circle, -180 to 180."""
    return degrees_east(longitude[..., 1:], longitude[..., :-1])


def degrees_east(longitude: Degrees, of: Degrees | float) -> Degrees:
    """Return how far longitudes are east of others along the circle, -180 to 180."""
    half = FULL_CIRCLE / 2
    return np.asarray(half - (half - (longitude - of)) % FULL_CIRCLE, dtype=np.float64)


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

    def holds(self, latitude: Degrees, longitude: Degrees) -> NDArray[np.bool_]:
        """Return which points are inside: `(H, W)` degrees each, from 0 or -180 -> `(H, W)`."""
        return _is_within(latitude, self.latitude) & _is_within(
            longitude % FULL_CIRCLE, self.longitude
        )


def _is_within(degrees: Degrees, spans: Spans) -> NDArray[np.bool_]:
    inside = [(degrees >= first) & (degrees <= last) for first, last in spans]
    return np.asarray(np.any(inside, axis=0))


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
