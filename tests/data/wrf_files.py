"""Files as WRF writes them, with coordinates from PROJ."""

from functools import cache
from pathlib import Path

import numpy as np
import xarray as xr

from tests.data import region_stores
from tests.data.proj import project

ROWS, COLUMNS, LEVELS, SPACING = region_stores.ROWS, region_stores.COLUMNS, 3, 9e4
# MAP_PROJ and other attributes, and PROJ's own text of the same projection.
PROJECTIONS: dict[str, tuple[dict[str, float], str]] = {
    "lambert": (
        {"MAP_PROJ": 1, "TRUELAT1": 30.0, "TRUELAT2": 60.0, "STAND_LON": -98.0},
        "+proj=lcc +lat_1=30 +lat_2=60 +lat_0=40 +lon_0=-98",
    ),
    "polar": (
        {"MAP_PROJ": 2, "TRUELAT1": 71.0, "TRUELAT2": 91.0, "STAND_LON": -98.0},
        "+proj=stere +lat_0=90 +lat_ts=71 +lon_0=-98",
    ),
    "mercator": (
        {"MAP_PROJ": 3, "TRUELAT1": 30.0, "TRUELAT2": 0.0, "STAND_LON": -98.0},
        "+proj=merc +lat_ts=30 +lon_0=-98",
    ),
}
CENTRE = 40.0, -97.0


def axes(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the metres of rows from the south and of columns."""
    x, y = project(text(kind), np.array(CENTRE[1]), np.array(CENTRE[0]))
    return tuple(
        middle + SPACING * (np.arange(size) - (size - 1) / 2)
        for middle, size in ((y, ROWS), (x, COLUMNS))
    )


def text(kind: str) -> str:
    """Return PROJ's text of a projection."""
    return f"{PROJECTIONS[kind][1]} +R=6370000"


@cache
def points(kind: str) -> np.ndarray:
    """Return longitudes and latitudes `(2, H, W)`."""
    y, x = axes(kind)
    return project(text(kind), *np.meshgrid(x, y), "inverse")


def dataset(kind: str, steps: int = 40) -> xr.Dataset:
    """The variables of a file, with the names, dims and types that WRF gives them."""
    if kind == "lat-lon":
        lines = 36 + 0.9 * np.arange(ROWS), -102 + 0.9 * np.arange(COLUMNS)
        latitude, longitude = np.meshgrid(*lines, indexing="ij")
        attributes = {"MAP_PROJ": 6, "TRUELAT1": 1e20, "TRUELAT2": 1e20, "STAND_LON": 0.0}
        attributes["POLE_LAT"] = 90.0
    else:
        longitude, latitude = points(kind)
        attributes = PROJECTIONS[kind][0]
    fields = region_stores.fields(latitude, longitude, steps)
    plane = ("Time", "south_north", "west_east")
    times = region_stores.START + region_stores.STEP * np.arange(steps)
    texts = [str(time.astype("M8[s]")).replace("T", "_") for time in times]
    minutes = (times - times[0]) / np.timedelta64(1, "m")
    where = {
        "FieldType": 104,
        "MemoryOrder": "XY ",
        "stagger": "",
        "coordinates": "XLONG XLAT XTIME",
    }

    def repeated(field: np.ndarray) -> np.ndarray:
        return np.broadcast_to(field, (steps, *field.shape)).astype("f4")

    air = np.stack([fields["t2m"] - 290 + 10 * level for level in range(LEVELS)], axis=1)
    columns = np.append(longitude[0], longitude[0, -1] + 1)
    data = xr.Dataset(
        {
            "Times": ("Time", np.array(texts, "S19")),
            "XLAT": (plane, repeated(latitude), {"units": "degree_north"}),
            "XLONG": (plane, repeated(longitude), {"units": "degree_east"}),
            "XTIME": ("Time", minutes.astype("f4"), {"units": f"minutes since {texts[0]}"}),
            "XLAT_U": (
                (*plane[:2], "west_east_stag"),
                repeated(np.append(latitude, latitude[:, -1:], axis=1)),
                {"units": "degree_north"},
            ),
            "XLONG_U": (
                (*plane[:2], "west_east_stag"),
                repeated(np.broadcast_to(columns, (ROWS, COLUMNS + 1))),
                {"units": "degree_east"},
            ),
            "T2": (plane, fields["t2m"], {**where, "units": "K"}),
            "PSFC": (plane, fields["msl"], {**where, "units": "Pa"}),
            "LANDMASK": (plane, repeated(fields["lsm"]), {**where, "units": ""}),
            "HGT": (plane, repeated(90 * fields["lsm"]), {**where, "units": "m"}),
            "T": (("Time", "bottom_top", *plane[1:]), air, {**where, "units": "K"}),
            "U": (
                ("Time", "bottom_top", "south_north", "west_east_stag"),
                np.zeros((steps, LEVELS, ROWS, COLUMNS + 1), "f4"),
                {"units": "m s-1", "stagger": "X"},
            ),
        },
        attrs={
            "TITLE": " OUTPUT FROM WRF V4.5 MODEL", "DX": SPACING, "DY": SPACING,
            "CEN_LAT": CENTRE[0], "CEN_LON": CENTRE[1], "MOAD_CEN_LAT": CENTRE[0], **attributes,
        },
    )  # fmt: skip
    data["XTIME"].attrs["units"] = f"minutes since {texts[0].replace('_', ' ')}"
    return data


def write(data: xr.Dataset, folder: Path) -> Path:
    """Write a file under the name that WRF gives it, which has no suffix."""
    [first] = data["Times"].values[:1].astype(str)
    path = folder / f"wrfout_d01_{first}"
    data.to_netcdf(path, unlimited_dims=["Time"])
    return path
