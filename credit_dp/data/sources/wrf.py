"""Brings the output of WRF, files such as `wrfout_d01_2000-01-24_12:00:00`, to the CF conventions.

WRF has dates as texts, latitudes and longitudes that repeat at each time, and the projection in
attributes of the file. Fields on staggered dims stay as they are.

Sources: WRF's registry of variables; Skamarock et al. 2019, "A description of the Advanced Research
WRF model version 4", for the projections and the radius of the earth.
"""

import re

import numpy as np
import xarray as xr

from credit_dp.data.calendar import STANDARD, Times
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.coordinates import with_grid_mapping
from credit_dp.data.winds import ALONG_X, ALONG_Y
from credit_dp.errors import UserError

POINTS = {"latitude": ("XLAT", "degrees_north"), "longitude": ("XLONG", "degrees_east")}
# Fields that are constant, though WRF writes them at each time.
CONSTANT = ("HGT", "LANDMASK", "XLAND", "F", "E", "SINALPHA", "COSALPHA", "MAPFAC_M", "VAR")
# Components along the axes of the grid, which WRF says in no attribute.
WINDS = {"U10": ALONG_X, "V10": ALONG_Y, "U": ALONG_X, "V": ALONG_Y}
STAGGERED = "_stag"  # the end of the names of dims of cells' edges
EARTH_RADIUS = 6.37e6  # m
LAMBERT, POLAR = 1, 2  # values of MAP_PROJ


def with_cf_coordinates(dataset: xr.Dataset, where: str) -> xr.Dataset:
    """Return WRF's output with dates, latitudes, longitudes and projection as CF has them.

    Model levels are numbered from 1 at the ground. Any other dataset is returned unchanged.
    """
    if not {"XLAT", "XLONG"} <= dataset.variables.keys():
        return dataset
    where = redact_secrets(where)
    if dataset.sizes.get("Time") == 0:
        raise UserError(f"{where}: has no times. Change data.store.")
    dataset = dataset.rename({"Time": "time"} if "Time" in dataset.dims else {})
    coordinates = {}
    for standard, (name, units) in POINTS.items():
        points = dataset.variables[name]
        if "time" in points.dims:
            first, last = points.isel(time=0), points.isel(time=-1)
            if not np.array_equal(first.values, last.values):
                raise UserError(
                    f"{where}: needs the same grid at all times, but {name} changes, as in a nest "
                    "that moves. Change data.store."
                )
            points = first
        attributes = {"units": units, "standard_name": standard}
        coordinates[standard] = xr.Variable(points.dims, points.values, attributes)
    if "Times" in dataset.variables:
        coordinates["time"] = xr.Variable(
            dataset["Times"].dims[:1], _dates(dataset["Times"], where)
        )
    elif "XTIME" in dataset.variables:
        coordinates["time"] = dataset.variables["XTIME"]
    if "bottom_top" in dataset.dims:
        levels = np.arange(1, dataset.sizes["bottom_top"] + 1)
        coordinates["model_level"] = xr.Variable("bottom_top", levels)
    for name in CONSTANT:
        if name in dataset.variables and "time" in dataset[name].dims:
            dataset[name] = dataset[name].isel(time=0, drop=True)
    for name in WINDS.keys() & dataset.variables.keys():
        dataset[name].attrs.setdefault("standard_name", WINDS[name])
    replaced = re.compile("XLAT(_.)?|XLONG(_.)?|Times|XTIME")
    dataset = dataset.drop_vars([x for x in dataset.variables if replaced.fullmatch(str(x))])
    dataset = dataset.assign_coords(coordinates)
    # Not a temperature, which other stores call T: the potential temperature minus 300 K.
    dataset = dataset.rename({"T": "perturbation_potential_temperature"} if "T" in dataset else {})
    return with_grid_mapping(dataset, _grid_mapping(dataset), coordinates["latitude"].dims)


def _dates(texts: xr.DataArray, where: str) -> Times:
    values = np.ascontiguousarray(texts.values)
    if values.dtype.kind in "iu":  # a number for each letter
        values = values.astype(np.uint8).view(f"S{values.shape[-1]}")
    plain = [x.decode("latin-1") if isinstance(x, bytes) else str(x) for x in values.ravel()]
    clean = [text.strip(" \0").replace("_", "T") for text in plain]
    return np.array([STANDARD.parse(f"{where}: Times", text) for text in clean])


def _grid_mapping(dataset: xr.Dataset) -> dict[str, object]:
    """Return the attributes of CF's grid mapping; none without a projection."""
    names = ("MAP_PROJ", "TRUELAT1", "TRUELAT2", "STAND_LON", "MOAD_CEN_LAT")
    try:
        numbers = [float(np.unique(dataset.attrs.get(name, np.nan)).item()) for name in names]
    except (TypeError, ValueError):  # text, or several numbers
        return {}
    projection, true_1, true_2, meridian, latitude = numbers
    sphere: dict[str, object] = {"earth_radius": EARTH_RADIUS}
    if projection == LAMBERT and np.isfinite([true_1, true_2, meridian, latitude]).all():
        return sphere | {
            "grid_mapping_name": "lambert_conformal_conic",
            "standard_parallel": [true_1, true_2],
            "longitude_of_central_meridian": meridian,
            "latitude_of_projection_origin": latitude,
        }
    if projection == POLAR and np.isfinite([true_1, meridian]).all():
        return sphere | {
            "grid_mapping_name": "polar_stereographic",
            "standard_parallel": true_1,
            "straight_vertical_longitude_from_pole": meridian,
            "latitude_of_projection_origin": float(np.copysign(90, true_1)),
        }
    return {}  # coordinates alone: latitudes and longitudes, also Mercator's, or a rotated pole
