"""How the components of winds lie on a projection: along its axes, or eastward and northward.

A variable's standard name says it, in stores, in prepared ones and in forecasts: `x_wind` and
`y_wind` lie along the axes, all others are eastward and northward. So do stresses, currents and
other vectors, such as `surface_downward_x_stress`. On rows of latitudes the two are the same.
Components stay as they are stored until two sources meet that have them otherwise: then
`turn_of` turns one component with the help of the other.

    eastward = x cos(a) - y sin(a),   northward = y cos(a) + x sin(a)

where a is the angle from the east to the x axis, counterclockwise (WRF's COSALPHA and SINALPHA).
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import Array, Grid, unit_vectors
from credit_dp.errors import UserError
from credit_dp.variable_names import canonical_name, long_name

# Eastward -> northward component, with the names of WeatherBench 2, and WRF's.
WIND_COMPONENTS: Mapping[str, str] = MappingProxyType(
    {
        "u_component_of_wind": "v_component_of_wind",
        "10m_u_component_of_wind": "10m_v_component_of_wind",
        "100m_u_component_of_wind": "100m_v_component_of_wind",
        "u_component_of_geostrophic_wind": "v_component_of_geostrophic_wind",
        "u_component_of_ageostrophic_wind": "v_component_of_ageostrophic_wind",
        "U10": "V10",
    }
)
# What tells a first component, along x or eastward, from the second, in names and standard names.
COMPONENTS = (
    *(("u_component", "v_component"), ("eastward", "northward"), ("_x_", "_y_")),
    *(("x_wind", "y_wind"), ("U10", "V10"), ("tauu", "tauv")),
)
ALONG_X, ALONG_Y = "x_wind", "y_wind"  # standard names
# In standard names of vectors: along an axis, or the direction in any form.
ALONG_AXIS = re.compile(r"(?<![a-z])[xy]_")
DIRECTION = re.compile(r"(?<![a-z])(?:[xy]|eastward|northward|[uv]_component(?:_of)?)(?=_)")
HEIGHT = re.compile(r"^\d+m_")
# Names by which files call components along the grid; the first are CF's older ones.
ALONG_GRID: Mapping[str, str] = MappingProxyType(
    {"grid_eastward_wind": ALONG_X, "grid_northward_wind": ALONG_Y}
)
GRIB_FLAG = "GRIB_uvRelativeToGrid"  # cfgrib's attribute
LARGEST_SKEW = np.radians(1.0)  # of axes that should be at right angles


def stated_name(name: str, attributes: Mapping[Any, Any], grid: Grid) -> str:
    """Return the standard name of a variable; of a wind along the axes of a projection CF's.

    GRIB's flag comes first: cfgrib names all winds eastward and northward, if it names them.
    """
    stated = str(attributes.get("standard_name", ""))
    stated = ALONG_GRID.get(stated, stated)
    component = _component(name) or _component(stated)
    if not grid.is_projected or GRIB_FLAG not in attributes or component is None:
        return stated
    if not DIRECTION.search(stated):
        stated = HEIGHT.sub("", canonical_name(name))
    directions = ("x", "y") if attributes[GRIB_FLAG] == 1 else ("eastward", "northward")
    return DIRECTION.sub(directions[not component.is_first], stated, count=1)


def lies_along_grid(standard_name: str, grid: Grid) -> bool | None:
    """Whether a variable is a component of wind along the axes of a projection.

    None without a standard name: it is trusted to lie as in the source that it meets.
    """
    if grid.is_projected and not standard_name:
        return None
    return grid.is_projected and ALONG_AXIS.search(standard_name) is not None


def wind_difference(first: bool | None, second: bool | None) -> tuple[str, str] | None:
    """Return two answers of `lies_along_grid` in words; None if they are not known to differ."""
    if first is None or second is None or first == second:
        return None
    return describe_winds(first), describe_winds(second)


def describe_winds(along_grid: bool | None) -> str:
    """Return an answer of `lies_along_grid` in words."""
    return "along the grid" if along_grid else "eastward or northward"


@final
class _Component(NamedTuple):
    """Whether a name is that of a first component, and the long name of the other one."""

    is_first: bool
    other: str


def _component(name: str) -> _Component | None:
    long = canonical_name(name)
    for first, second in COMPONENTS:
        for word, other in ((first, second), (second, first)):
            if word in long:  # as in AROME's x_wind_10m
                return _Component(word == first, long.replace(word, other))
    return None


def other_component(name: str) -> str | None:
    """Return the long name of the other component of a wind; None if it is not known as one."""
    component = _component(name)
    return None if component is None else component.other


def find_other_component(name: str, names: Iterable[str]) -> str | None:
    """Return the first of some names that is the other component of a wind, on the same level."""
    wanted = other_component(name), long_name(name)[1]
    return next((x for x in names if (canonical_name(x), long_name(x)[1]) == wanted), None)


@final
class Turn(NamedTuple):
    """Turns one component of a wind on a grid: its own share and the other component's, `(H, W)`.

    Shapes:
        both components `(..., H, W)`, or on a part of the grid -> the same.
    """

    own: Array
    other: Array

    def __call__(
        self, component: NDArray[np.floating], other: NDArray[np.floating]
    ) -> NDArray[np.floating]:
        """Return the turned component, computed in float64, of its own type."""
        return np.asarray(self.own * component + self.other * other, dtype=component.dtype)


def turn_of(name: str, grid: Grid, where: str, to_grid: bool) -> Turn:
    """Return what turns a component of wind on a projection.

    Args:
        where: what has the winds, with its key, for a message.
        to_grid: whether to turn from eastward and northward to the axes, not back.
    """
    angle = angle_of_axes(grid)
    skew = np.abs(np.sin(_angle_from_east(grid, axis=1) - angle - np.pi / 2))
    if skew.max() > np.sin(LARGEST_SKEW):
        raise UserError(
            f"{where}: winds along its rows and columns can't be turned to eastward and northward "
            f"ones, as these are up to {np.degrees(skew.max()):.2g} degrees from right angles. "
            f"Turn them first, or leave {name} out."
        )
    component = _component(name)
    is_first = component is not None and component.is_first
    return Turn(np.cos(angle), np.sin(angle) * (-1 if is_first != to_grid else 1))


def angle_of_axes(grid: Grid) -> Array:
    """Return the angle from the east to the x axis of a projection, counterclockwise: `(H, W)`.

    In radians, by the coordinates of neighbouring points: exact to the second order of a step's
    share of the radius. The y axis is 90 degrees further, wherever rows begin.
    """
    angle = _angle_from_east(grid, axis=2)
    steps = np.diff(grid.projection.columns.values)
    # The median: degrees of a rotated pole may go on from 359 to 0.
    return angle + np.pi if len(steps) and np.median(steps) < 0 else angle


def _angle_from_east(grid: Grid, axis: int) -> Array:
    """Return the direction to the next row (axis 1) or column (2), counterclockwise from east."""
    x, y, z = np.gradient(unit_vectors(grid.latitude, grid.longitude), axis=axis, edge_order=2)
    phi, lam = np.deg2rad(grid.latitude), np.deg2rad(grid.longitude)
    east = y * np.cos(lam) - x * np.sin(lam)
    north = z * np.cos(phi) - (x * np.cos(lam) + y * np.sin(lam)) * np.sin(phi)
    return np.asarray(np.arctan2(north, east), dtype=np.float64)
