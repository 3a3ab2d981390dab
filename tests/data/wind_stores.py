"""Winds on HRRR's kind of Lambert grid and on a box around it, along the grid or to the east.

They are linear in latitude and longitude, so that interpolation is exact, and change in time.
"""

from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tests.data import region_grids, stores

NAMES = ("10m_u_component_of_wind", "10m_v_component_of_wind")
STANDARD_NAMES = {True: ("x_wind", "y_wind"), False: ("eastward_wind", "northward_wind")}
AXES = tuple(1.2e5 * (np.arange(n) - n / 2) for n in (13, 16))  # metres, from the south
LATITUDE, LONGITUDE = region_grids.Lambert().coordinates(*AXES)
UNITS = {"units": "m s-1"}
Winds = tuple[NDArray[Any], NDArray[Any]]


def eastward(latitude: Any, longitude: Any, steps: int = 20) -> Winds:
    """Eastward and northward components, `(T, H, W)`."""
    hours = np.arange(steps)[:, None, None]
    east = 9 + 0.3 * (latitude - 38) + 0.1 * hours
    return east, -6 + 0.2 * (longitude % 360 - 262.5) - 0.2 * hours


def along_grid(east: Any, north: Any) -> Winds:
    """Components along the axes of the Lambert grid, by its cone."""
    angle = np.radians(-region_grids.Lambert().n * (LONGITUDE % 360 - 262.5))
    return (
        east * np.cos(angle) + north * np.sin(angle),
        north * np.cos(angle) - east * np.sin(angle),
    )


def lambert(along: bool, names: Any = NAMES, **attributes: Any) -> xr.Dataset:
    """Winds on the Lambert grid; `attributes` are those of the components."""
    winds = eastward(LATITUDE, LONGITUDE)
    dims = ("y", "x")
    axes = zip(dims, AXES, strict=True)
    coords = {d: (d, x, {"standard_name": f"projection_{d}_coordinate"}) for d, x in axes}
    degrees = {"latitude": (dims, LATITUDE), "longitude": (dims, LONGITUDE)}
    data = _dataset(along_grid(*winds) if along else winds, dims, names, coords | degrees)
    for name, standard_name in zip(names, STANDARD_NAMES[along], strict=True):
        data[name].attrs |= attributes or {"standard_name": standard_name}
        data[name].attrs["grid_mapping"] = "crs"
    return data.assign(crs=((), 0, dict(region_grids.LAMBERT)))


def box(names: Any = NAMES) -> xr.Dataset:
    """Eastward and northward winds on rows of latitudes."""
    latitude, longitude = np.arange(55.0, 20, -1), np.arange(240.0, 290)
    winds = eastward(latitude[:, None], longitude)
    coords = {"latitude": latitude, "longitude": longitude}
    return _dataset(winds, ("latitude", "longitude"), names, coords)


def _dataset(winds: Winds, dims: Any, names: Any, coords: Any) -> xr.Dataset:
    times = stores.times(len(winds[0]))
    shape = (len(times), *(len(coords[d][1]) if d in "yx" else len(coords[d]) for d in dims))
    fields = {
        name: (("time", *dims), np.broadcast_to(wind, shape).astype("f4"), dict(UNITS))
        for name, wind in zip(names, winds, strict=True)
    }
    return xr.Dataset(fields, {"time": times, **coords})
