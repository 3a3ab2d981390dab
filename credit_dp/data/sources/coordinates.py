"""The coordinates of gridded datasets: how they are found, and what is refused.

Times, levels, latitudes and longitudes come under many names. `standardise_dims` brings them to one
form, `squeeze_other_dims` drops dims of length 1, and `check_coordinates` refuses coordinates with
which row, column or time indices would mean something else.
"""

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.calendar import are_dates, calendar_of, decode_dates, is_time
from credit_dp.data.grid import Axis, Grid, Projection
from credit_dp.data.projections import Cone, unrotated
from credit_dp.data.sources.address import reason_of
from credit_dp.data.units import canonical_unit
from credit_dp.errors import UserError

PRESSURE_LEVELS = ("pressure_level", "isobaricInhPa", "plev")  # names of dims
MODEL_LEVELS = ("hybrid", "model_level", "model_level_number")  # names of dims
MODEL_LEVEL_NAMES = (  # CF standard names of the coordinate
    "model_level_number",
    "atmosphere_hybrid_sigma_pressure_coordinate",
    "atmosphere_hybrid_height_coordinate",
)
# What a coordinate is called in cf-xarray, the surest first, and names that it does not know.
CF_KEYS: Mapping[str, tuple[str, ...]] = {
    "time": ("time", "T"),
    "latitude": ("latitude", "Y"),
    "longitude": ("longitude", "X"),
    "level": ("vertical", "Z"),
}
NAMES: Mapping[str, tuple[str, ...]] = {
    "time": ("time", "valid_time"),
    "latitude": ("latitude",),
    "longitude": ("longitude",),
    "level": ("level", *PRESSURE_LEVELS, *MODEL_LEVELS),
}
# Standard names of coordinates that are not used: heights, rotated grids, starts of forecasts.
OTHER_AXES = re.compile("height|depth|altitude|grid_l|projection|forecast_reference_time")
NAMES_OF_TIME = ("time", "times", "date", "dates", "datetime")  # of dims that have to have dates
PRESSURES = {"hPa": 1.0, "Pa": 0.01, "kPa": 10.0}  # factors to hPa
LARGEST_HPA = 2000  # levels beyond it are in Pa if the store gives no unit
LARGEST_MODEL_LEVEL = 200  # numbers beyond it are pressures: no weather model has so many levels
LENGTHS = ("m", "km", "cm")  # units of heights and depths
METRES = {"m": 1.0, "km": 1e3}  # in the units of the axes of projections
WGS_84 = 6378137.0, 6356752.314  # m, axes of the earth; those of GRS 80 differ by 0.1 mm
HORIZONTAL = ("latitude", "longitude")
GRID_MAPPING = "crs"  # the variable for one that a file has in another form
MEMBER = "member"  # the dim of an ensemble's members, which stores have under these names
MEMBER_DIMS = (MEMBER, "number", "realization", "ensemble", "member_id")
# In forecasts and prepared stores: a projection of theirs has other names.
TAKEN_NAMES = frozenset(
    [*HORIZONTAL, MEMBER, "time", "prediction_timedelta", "level", "channel", "fields", "static"]
)
GRID_TYPES = {  # GRIB's names of grids that are not rows and columns
    "reduced_gg": "reduced Gaussian",
    "rotated_ll": "rotated regional",
    "lambert": "Lambert regional",
    "polar_stereographic": "polar stereographic regional",
    "healpix": "HEALPix",
}
CHUNKS = ("chunks", "shards", "chunksizes")  # keys in the encoding of a variable
# Names of the one dim that unstructured grids have in place of latitude and longitude.
CELLS = ("values", "cell", "cells", "ncells", "nCells", "grid_index")


def find_coordinates(dataset: xr.Dataset, ndim: int = 1) -> dict[str, str]:
    """Return the name of the coordinate of time, level, latitude and longitude, if there is one.

    A coordinate is found as the CF conventions say, by its `standard_name`, `units` or `axis`, then
    by its name; the one along whose dim most variables lie comes first.

    Args:
        ndim: number of dims of the coordinates: 2 on curvilinear grids.
    """
    import cf_xarray  # noqa: F401 (registers `.cf`; only needed when a store is opened)

    arrays = {name: array for name, array in dataset.variables.items() if array.ndim == ndim}
    coordinates = xr.Dataset(coords=xr.Coordinates(arrays, indexes={}))  # indexes take time
    by_key = coordinates.cf.coordinates | coordinates.cf.axes
    found = {}
    for standard, keys in CF_KEYS.items():
        # In the order of preference.
        candidates = [name for key in keys for name in by_key.get(key, ())]
        candidates += [name for name in NAMES[standard] if name in arrays]
        if standard == "time" and ndim == 1:
            candidates += [name for name, array in arrays.items() if is_time(array)]
        candidates = [name for name in candidates if _fits(arrays[name], standard)]
        if not candidates and standard in HORIZONTAL:
            guessed = coordinates.cf.guess_coord_axis().cf.coordinates.get(standard, [])
            candidates = [name for name in guessed if _fits(arrays[name], standard)]
        if candidates:
            found[standard] = str(max(candidates, key=lambda name: _importance(dataset, name)))
    return found


def _fits(array: xr.Variable, standard: str) -> bool:
    """Whether a coordinate on the axis of a standard one can be that one."""
    if standard != "time" and canonical_unit(str(array.attrs.get("units", ""))) in LENGTHS:
        return False
    return not OTHER_AXES.search(str(array.attrs.get("standard_name", "")))


def _importance(dataset: xr.Dataset, name: Hashable) -> int:
    dims = set(dataset.variables[name].dims)
    return sum(dims <= set(array.dims) for array in dataset.variables.values())


def projected_grid(dataset: xr.Dataset) -> Grid | None:
    """Return the grid of two-dimensional coordinates in the stored order of rows.

    Call this before `standardise_dims` renames the dims. None if the dataset has no such
    coordinates, or has one-dimensional ones.
    """
    plane = _plane_coordinates(dataset)
    if not plane:
        return None
    dims = _plane_dims(dataset, plane)
    latitude, longitude = (dataset[plane[x]].transpose(*dims).values for x in HORIZONTAL)
    are_lines = _are_equal(latitude, latitude[:, :1]) and _are_equal(longitude, longitude[:1])
    latitude, longitude = latitude.astype(np.float64), longitude.astype(np.float64)
    if are_lines:
        return Grid(latitude[:, 0], longitude[0])  # the same as one-dimensional ones
    rows, columns = (_axis(dataset, dim) for dim in dims)
    mapping = _grid_mapping(dataset)
    attributes = dataset.variables[mapping].attrs if mapping else {}
    projection = Projection(mapping, _plain(attributes), rows, columns)
    return Grid(latitude, longitude, _with_free_names(projection))


def with_points(dataset: xr.Dataset, where: str) -> xr.Dataset:
    """Return a dataset on a projection with latitudes and longitudes of its points.

    Those that repeat at each time, as xarray's `open_mfdataset` joins them, become constant. If
    there are none, they are computed from the grid mapping and the coordinates of its axes. Any
    other dataset is returned unchanged.
    """
    repeated = _repeated_points(dataset)
    for name in repeated:
        points = dataset.variables[name]
        first, last = (points.isel({points.dims[0]: at}) for at in (0, -1))
        if not np.array_equal(first.values, last.values):
            raise _store_error(where, f"needs the same grid at all times, but {name} changes")
        dataset = dataset.drop_vars(name).assign_coords({name: first})
    if repeated or not _is_on_projection(dataset) or _plane_coordinates(dataset):
        return dataset
    axes = [_axis_name(dataset, letter) for letter in "YX"]
    if "" in axes or any(_is_degree_of_earth(x) for x in dataset.variables.values()):
        return dataset
    mapping = dataset.variables[_grid_mapping(dataset)].attrs
    try:
        degrees = _points(_plain(mapping), *(dataset.variables[axis] for axis in axes))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise _store_error(
            where,
            f"has no latitudes and longitudes of its points along {axes[0]} and {axes[1]}, and "
            f"they can't be computed from its grid mapping {mapping['grid_mapping_name']} "
            f"({reason}): add them, for example with pyproj",
        ) from error
    units = "degrees_north", "degrees_east"
    return dataset.assign_coords(
        {x: (axes, y, {"units": z}) for x, y, z in zip(HORIZONTAL, degrees, units, strict=True)}
    )


def _repeated_points(dataset: xr.Dataset) -> list[str]:
    """Return the names of latitudes and longitudes that have a time; none with constant ones."""
    names = [
        str(name)
        for name, array in dataset.variables.items()
        if array.ndim == 3 and array.dims[0] in NAMES["time"] and _is_degree_of_earth(array)
    ]
    # To look for constant ones takes time.
    return [] if not names or {*HORIZONTAL} & find_coordinates(dataset, 2).keys() else names


def _is_degree_of_earth(array: xr.Variable) -> bool:
    """Whether a variable says that it is a latitude or longitude, not one of a rotated grid."""
    name, units = (str(array.attrs.get(x, "")) for x in ("standard_name", "units"))
    in_degrees = re.fullmatch("degrees?_?([NE]|north|east)", units) is not None
    return name in HORIZONTAL or (in_degrees and not OTHER_AXES.search(name))


def _axis_name(dataset: xr.Dataset, letter: str) -> str:
    """Return the name of the one-dimensional coordinate of an axis, X or Y; "" without one."""
    lines = {x: y for x, y in dataset.variables.items() if y.dims == (x,) and y.dtype.kind in "iuf"}
    coordinates = xr.Dataset(coords=xr.Coordinates(lines, indexes={}))
    names = coordinates.cf.axes.get(letter) or coordinates.cf.guess_coord_axis().cf.axes.get(letter)
    return str(names[0]) if names else ""


def _points(
    mapping: Mapping[str, Any], rows: xr.Variable, columns: xr.Variable
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return latitudes and longitudes `(H, W)` of points on a projection.

    Raises:
        KeyError, TypeError, ValueError: an attribute is missing or wrong, or it is another one.

    Source: CF conventions 1.11, appendix F.
    """
    kind = mapping["grid_mapping_name"]
    y, x = (axis.values.astype(np.float64) for axis in (rows, columns))
    if kind == "rotated_latitude_longitude":
        pole = -mapping["grid_north_pole_latitude"], mapping["grid_north_pole_longitude"] + 180
        return unrotated(y[:, None], x - mapping.get("north_pole_grid_longitude", 0), pole)
    if kind not in ("lambert_conformal_conic", "polar_stereographic"):
        raise ValueError("not Lambert, polar stereographic or rotated")
    cone = Cone.of({**mapping, **_earth(mapping)})
    origin = 0.0
    if kind == "lambert_conformal_conic":
        origin = float(cone.forward(mapping["latitude_of_projection_origin"], cone.meridian)[1])
    elif "standard_parallel" not in mapping:
        scale = mapping.get("scale_factor_at_projection_origin", 1)
        cone = cone._replace(scale=cone.scale * scale)
    units = [canonical_unit(str(axis.attrs.get("units", ""))) or "m" for axis in (rows, columns)]
    if not {*units} <= METRES.keys():
        raise ValueError(f"its axes are in {units[0]} and {units[1]}, not in m or km")
    north = origin + (y - mapping.get("false_northing", 0)) * METRES[units[0]]
    east = (x - mapping.get("false_easting", 0)) * METRES[units[1]]
    return cone.inverse(east, north[:, None])


def _earth(mapping: Mapping[str, Any]) -> dict[str, float]:
    """Return the radius or the axes of the earth, also if only its name or PROJ's text has them.

    Raises:
        KeyError: they are not stated.
    """
    text = " ".join(str(mapping.get(x, "")) for x in ("proj4", "proj4text", "ellipsoid"))
    proj = {key: float(value) for key, value in re.findall(r"\+([Rab])=([\d.e+]+)", text)}
    major = mapping.get(
        "earth_radius", mapping.get("semi_major_axis", proj.get("R", proj.get("a")))
    )
    if major is None and re.search(r"WGS *_?84|GRS *_?80", text):
        return {"semi_major_axis": WGS_84[0], "semi_minor_axis": WGS_84[1]}
    if major is None:
        raise KeyError("earth_radius")
    minor = mapping.get("semi_minor_axis", proj.get("b", major))
    if mapping.get("inverse_flattening"):
        minor = major * (1 - 1 / mapping["inverse_flattening"])
    return {"semi_major_axis": float(major), "semi_minor_axis": float(minor)}


def _are_equal(values: NDArray[Any], others: NDArray[Any]) -> bool:
    """Whether degrees differ by less than 1e-6 or, with fewer digits, by rounding alone."""
    rounding = 180 * np.finfo(np.result_type(values, np.float32)).eps
    return bool((np.abs(values - others) <= max(1e-6, rounding)).all())


def grid_of_lines(dataset: xr.Dataset) -> Grid:
    """Return the grid of the one-dimensional coordinates of a dataset with standard dims."""
    latitude, longitude = (dataset[dim].values.astype(np.float64) for dim in HORIZONTAL)
    return Grid(latitude, longitude)


def _plane_coordinates(dataset: xr.Dataset) -> dict[str, str]:
    """Return the names of two-dimensional latitudes and longitudes that fields lie along."""
    lines = find_coordinates(dataset)
    are_degrees = any(
        "degree" in str(dataset[lines[x]].attrs.get("units")) for x in HORIZONTAL if x in lines
    )
    if are_degrees and not _is_on_projection(dataset):  # or they may be those of a rotated pole
        return {}
    plane = {x: name for x, name in find_coordinates(dataset, ndim=2).items() if x in HORIZONTAL}
    dims = [set(dataset[name].dims) for name in plane.values()]
    return plane if len(dims) == 2 and dims[0] == dims[1] else {}


def _is_on_projection(dataset: xr.Dataset) -> bool:
    mapping = _grid_mapping(dataset)
    name = dataset.variables[mapping].attrs.get("grid_mapping_name", "") if mapping else ""
    return name not in ("", "latitude_longitude")


def _plane_dims(dataset: xr.Dataset, plane: Mapping[str, str]) -> tuple[str, str]:
    """Return the dims of rows and of columns: those of latitude, or in the opposite order."""
    rows, columns = map(str, dataset[plane["latitude"]].dims)
    attributes = dataset[rows].attrs if rows in dataset.variables else {}
    of_columns = attributes.get("axis") == "X" or str(attributes.get("standard_name")) in (
        *("projection_x_coordinate", "grid_longitude"),
    )
    return (columns, rows) if of_columns else (rows, columns)


def _axis(dataset: xr.Dataset, dim: str) -> Axis:
    """Return a dim of a projection with its coordinate, if that has numbers."""
    axis = dataset.variables.get(dim)
    if axis is None or axis.dtype.kind not in "iuf":
        return Axis(dim, np.empty(0), {})
    attributes = {name: value for name, value in axis.attrs.items() if name != "bounds"}
    return Axis(dim, axis.values.astype(np.float64), _plain(attributes))


def _with_free_names(projection: Projection) -> Projection:
    """Return a projection without the names that the package's files have for something else."""
    name, attributes, *axes = projection
    rows, columns = (
        axis._replace(name=usual) if axis.name in TAKEN_NAMES else axis
        for axis, usual in zip(axes, ("y", "x"), strict=True)
    )
    return Projection("crs" if name in TAKEN_NAMES else name, attributes, rows, columns)


def _plain(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): np.asarray(value).tolist() for name, value in attributes.items()}


def _grid_mapping(dataset: xr.Dataset) -> str:
    names = (
        str(array.attrs.get("grid_mapping") or array.encoding.get("grid_mapping") or "")
        for array in dataset.variables.values()
    )
    # CF also allows `crs: x y`.
    named = (name.split()[0].rstrip(":") for name in names if name)
    return next((name for name in named if name in dataset.variables), "")


def with_grid_mapping(
    dataset: xr.Dataset, attributes: Mapping[str, Any], dims: Collection[Hashable]
) -> xr.Dataset:
    """Return a dataset whose fields along some dims have a grid mapping.

    Args:
        attributes: of the mapping, as the CF conventions have them; without any, it stays so.
    """
    if not attributes:
        return dataset
    dataset = dataset.assign({GRID_MAPPING: ((), 0, attributes)})
    for array in dataset.data_vars.values():
        if {*dims} <= {*array.dims}:
            array.attrs["grid_mapping"] = GRID_MAPPING
    return dataset


def standardise_dims(dataset: xr.Dataset, where: str) -> xr.Dataset:
    """Rename the dims to time, level, latitude and longitude; their order stays.

    If latitude and longitude have one dim, that of cells, it becomes latitude. If they have two,
    these get the names latitude and longitude, without coordinates; see `projected_grid`.

    Coordinates that are not dims, such as the number of an ensemble member, are dropped.
    """
    valid = dataset.coords.get("valid_time")
    time_dim = None if valid is None or valid.ndim != 1 else str(valid.dims[0])
    if valid is not None and time_dim in ("time", "step"):
        # valid_time is the time of the fields; GRIB's `time` is when the analysis or forecast
        # started, and would repeat if the dim were `step`.
        dataset = dataset.drop_vars([x for x in ("time", time_dim) if x in dataset.coords])
        dataset = dataset.rename({time_dim: "time"} if time_dim != "time" else {})
        dataset = dataset.assign_coords(time=("time", valid.values))
    found = find_coordinates(dataset)
    plane = _plane_coordinates(dataset)
    if plane:
        found = {standard: name for standard, name in found.items() if standard not in HORIZONTAL}
        mapping = _grid_mapping(dataset)
        dataset = dataset.drop_vars([mapping] if mapping else [])
    else:
        _check_grid(dataset, found, where)
    values = {standard: dataset.variables[name] for standard, name in found.items()}
    # By names those that have no coordinate, for the messages about them.
    dims = {x: next((y for y in names if y in dataset.dims), x) for x, names in NAMES.items()}
    dims |= {standard: str(array.dims[0]) for standard, array in values.items()}
    if plane:
        dims |= zip(HORIZONTAL, _plane_dims(dataset, plane), strict=True)
    are_cells = dims["latitude"] == dims["longitude"]
    if are_cells:
        del dims["longitude"]
    others = [name for name in dataset.coords if name not in dataset.dims]
    dataset = dataset.drop_vars(
        {*others, *found.values(), *found, *plane.values()} & {*dataset.variables}
    )
    for standard, dim in dims.items():
        if dim != standard and standard not in dataset.dims:
            dataset = dataset.drop_vars(dim, errors="ignore").rename({dim: standard})
        if standard in dataset.dims and standard in values:
            array = values[standard]
            dataset = dataset.assign_coords({standard: (standard, array.values, array.attrs)})
    if are_cells:
        dataset = dataset.assign_coords(longitude=("latitude", values["longitude"].values))
    if "level" in dataset.coords:
        scale = _in_hpa(dataset["level"])
        if scale != 1:
            # Rounded because 70 hPa are 7.0 kPa, whose tenfold is not quite a whole number.
            dataset = dataset.assign_coords(level=(dataset["level"].values * scale).round(9))
    return dataset


def _in_hpa(level: xr.DataArray) -> float:
    """Return the factor to hPa, by the unit or, without one, by the size of the numbers."""
    unit = _unit(level)
    if unit in PRESSURES:
        return PRESSURES[unit]
    is_number = level.size > 0 and np.issubdtype(level.dtype, np.number)
    return PRESSURES["Pa" if not unit and is_number and level.max() > LARGEST_HPA else "hPa"]


def _unit(level: xr.DataArray) -> str:
    return canonical_unit(str(level.attrs.get("units", "")))


def squeeze_other_dims(dataset: xr.Dataset) -> xr.Dataset:
    """Drop dims of length 1 such as GRIB's `number`, `step` or `surface`."""
    known = {name for names in NAMES.values() for name in names}
    known |= {str(dim) for name in find_coordinates(dataset).values() for dim in dataset[name].dims}
    single = [dim for dim, size in dataset.sizes.items() if size == 1 and dim not in known]
    squeezed = dataset.isel(dict.fromkeys(single, 0))
    for name, array in dataset.variables.items():
        # isel() keeps the encoding as it was: chunk shapes have to lose the same dims.
        kept = [axis for axis, dim in enumerate(array.dims) if dim not in single]
        for key in CHUNKS:
            if len(kept) < array.ndim and array.encoding.get(key):
                sizes = array.encoding[key]
                squeezed[name].encoding[key] = tuple(sizes[axis] for axis in kept)
    return squeezed


def number_members(dataset: xr.Dataset, stored: xr.Dataset) -> tuple[xr.Dataset, tuple[int, ...]]:
    """Rename the dim of an ensemble's members to member, and return their numbers, too.

    They are those of the store or, if it has no whole numbers from 0 on, counted from 0. Without
    such a dim there are none.

    Args:
        stored: with them: a store of a single member has its number.
    """
    variables = stored.data_vars.values()
    dims = [dim for dim in MEMBER_DIMS if any(dim in array.dims for array in variables)]
    if not dims:
        return dataset, ()
    dim = max(dims, key=lambda name: stored.sizes[name])
    numbers = np.arange(stored.sizes[dim])
    values = stored.coords.get(dim)
    is_whole = values is not None and values.dtype.kind in "iu" and values.min() >= 0
    if values is not None and is_whole and values.to_index().is_unique:
        numbers = values.values
    if dim in dataset.dims:
        dataset = dataset.drop_vars(dim, errors="ignore").rename({dim: MEMBER})
    return dataset, tuple(numbers.tolist())


def scalar_level(dataset: xr.Dataset) -> int | None:
    """Return the pressure level in hPa of a dataset without a level dim; None if unknown."""
    for name, level in dataset.coords.items():
        is_pressure = name in ("level", *PRESSURE_LEVELS) or _unit(level) in PRESSURES
        if is_pressure and not level.ndim and np.issubdtype(level.dtype, np.number):
            return round(float(level) * _in_hpa(level))
    return None


def has_model_levels(dataset: xr.Dataset) -> bool | None:
    """Whether the levels are numbers of model levels; None if nothing says what they are.

    Their names and attributes say so, or numbers that can't be pressures, such as 1 to 137, or
    can't be model levels, such as 500, 850 and 1000.

    Call this before `standardise_dims` renames the dims.
    """
    name = find_coordinates(dataset).get("level")
    if name is None:
        return None
    if name in MODEL_LEVELS:
        return True
    level = dataset[name]
    long_name = str(level.attrs.get("long_name", "")).lower()
    standard_name = level.attrs.get("standard_name", "")
    if standard_name in MODEL_LEVEL_NAMES or "model level" in long_name:
        return True
    if name in PRESSURE_LEVELS or standard_name == "air_pressure" or _unit(level) in PRESSURES:
        return False
    is_number = level.ndim == 1 and level.dtype.kind in "iuf"
    if is_number and are_consecutive(level.values.tolist()):
        return True
    return False if is_number and level.size and level.max() > LARGEST_MODEL_LEVEL else None


def are_consecutive(levels: Sequence[float]) -> bool:
    """Whether levels are four or more numbers that follow each other, as no pressures do."""
    return len(levels) > 3 and bool((np.abs(np.diff(levels)) == 1).all())


def whole_number_levels(dataset: xr.Dataset, where: str, key: str) -> tuple[int, ...]:
    """Return the levels in the store's order; empty if it has no level dim."""
    if "level" not in dataset.dims:
        return ()
    if "level" not in dataset.coords:
        raise UserError(f"{where}: has a dim level, but no values for it. Change {key}.")
    values = dataset["level"].values
    is_numeric = np.issubdtype(values.dtype, np.number) and np.isfinite(values).all()
    if not is_numeric or (values != values.astype(int)).any():
        raise UserError(
            f"{where}: levels must be whole numbers, but are {values.tolist()}. Change {key}."
        )
    if len(set(values.tolist())) < len(values):
        raise UserError(f"{where}: a level comes twice: {values.tolist()}. Change {key}.")
    return tuple(int(level) for level in values)


def chunk_length(array: xr.DataArray, dim: str) -> int:
    """Return the length of an array's chunks along a dim; 1 for an array without chunks."""
    # xarray has the chunks of zarr and of netCDF under different names.
    chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
    return int(chunks[array.dims.index(dim)]) if chunks else 1


def in_dim_order(values: NDArray[Any], dims: Sequence[str], order: Sequence[str]) -> NDArray[Any]:
    """Return values with their dims in this order; dims that they lack have the length 1."""
    missing = [dim for dim in order if dim not in dims]
    all_dims = [*missing, *dims]
    values = values.reshape((1,) * len(missing) + values.shape)
    return values.transpose([all_dims.index(dim) for dim in order])


def _check_grid(dataset: xr.Dataset, found: Mapping[str, str], where: str) -> None:
    grid_types = {str(array.attrs.get("GRIB_gridType", "")) for array in dataset.variables.values()}
    grid_name = next(
        (GRID_TYPES[grid_type] for grid_type in sorted(grid_types) if grid_type in GRID_TYPES), None
    )
    of_lines = {dataset[found[standard]].dims for standard in HORIZONTAL if standard in found}
    dims = []
    if len(of_lines) == 1 and set(HORIZONTAL) <= found.keys():
        return  # cells, whose rows are found when they are read
    if len(of_lines) < 2:
        dims = [str(dim) for dim in dataset.dims if dim in CELLS]
        flat = find_coordinates(dataset, ndim=2)
        dims += [", ".join(map(str, dataset[flat[x]].dims)) for x in HORIZONTAL if x in flat]
    if grid_name is None and not dims:
        return
    if grid_name is None:
        grid_name = (
            "curvilinear or regional" if "," in dims[-1] else "reduced Gaussian or unstructured"
        )
    raise _store_error(
        where,
        f"has a {grid_name} grid{f' (cells along {dims[-1]})' if dims else ''}, but needs rows and "
        "columns, or the latitude and the longitude of each cell: add these, or regrid it first",
    )


def check_coordinates(
    dataset: xr.Dataset, where: str, timed: bool = True, grid: Grid | None = None
) -> None:
    """Refuse coordinates with which row, column or time indices would mean something else.

    Args:
        grid: with None, that of the dataset's one-dimensional coordinates.
    """
    needed = [*(["time"] if timed else []), *(HORIZONTAL if grid is None else ())]
    for dim in needed:
        if dim not in dataset.dims or dim not in dataset.coords:
            raise _store_error(
                where,
                "needs one-dimensional coordinates time, latitude (or lat) and longitude (or lon), "
                f"but has {', '.join(map(str, dataset.dims))}; {dim} "
                + ("has no values" if dim in dataset.dims else "is missing"),
            )
    if timed:
        _check_time(dataset, where)
    else:
        _refuse_times_without_dates(dataset, where)
    (grid or grid_of_lines(dataset)).check(where)


def _refuse_times_without_dates(dataset: xr.Dataset, where: str) -> None:
    """Refuse times that are no dates, whose variables would count as static fields."""
    for dim in map(str, dataset.dims):
        if dim.lower() in NAMES_OF_TIME:
            raise _store_error(
                where,
                f"{dim} has no dates: give the dim a coordinate with an attribute units like "
                "'hours since 1900-01-01'",
            )


def _check_time(dataset: xr.Dataset, where: str) -> None:
    times = dataset["time"].values
    if np.issubdtype(times.dtype, np.number) or times.dtype.kind in "SU":
        kind = "texts" if times.dtype.kind in "SU" else "numbers without a unit"
        raise _store_error(
            where,
            f"time has {kind}, not dates: its attribute units has to be like "
            "'hours since 1900-01-01'",
        )
    if len(times) == 0:
        raise _store_error(where, "has no times")
    if not are_dates(times) or (times.dtype.kind == "M" and np.isnat(times).any()):
        raise _store_error(where, "time has missing values")
    calendar, times = calendar_of(times), decode_dates(times)
    wrong = np.flatnonzero(np.diff(times) <= np.timedelta64(0, "D"))
    if len(wrong):
        earlier, later = map(calendar.text, times[wrong[0] : wrong[0] + 2])
        raise _store_error(
            where,
            f"time must increase throughout, but {later} follows {earlier}; write it again from "
            "xarray, as dataset.sortby('time').drop_duplicates('time')",
        )
    first, last = calendar.years(times[[0, -1]]).astype(int) + 1970
    if first < 1 or last > 9999:
        raise _store_error(
            where,
            f"time has the years {first} to {last}, but texts of dates have 1 to 9999; select "
            "these, as with xarray's dataset.sel(time=slice('0001', '9999'))",
        )


def decode_durations(
    variable: xr.Variable, name: str, where: str, key: str
) -> NDArray[np.timedelta64]:
    """Return lead times; netCDF and older zarr stores have numbers with a unit."""
    decoded = variable
    if variable.dtype.kind != "m":
        try:
            decoded = xr.conventions.decode_cf_variable(name, variable, decode_timedelta=True)
            decoded.load()
        except (ValueError, TypeError, OverflowError) as error:
            reason = reason_of(error)
            raise UserError(f"{where}: {name} can't be read ({reason}). Change {key}.") from error
    durations: NDArray[np.timedelta64] = decoded.values
    if durations.dtype.kind != "m":
        raise UserError(
            f"{where}: {name} must be timedeltas or numbers with units like hours, but is "
            f"{variable.dtype} with units {variable.attrs.get('units', 'unknown')}. Write numbers "
            f"with the attribute units='hours', or change {key}."
        )
    if np.isnat(durations).any():
        raise UserError(
            f"{where}: {name} has missing values. Select the others, as with xarray's isel, and "
            f"write the store again, or change {key}."
        )
    return durations


def _store_error(where: str, problem: str) -> UserError:
    return UserError(f"{where}: {problem}. Change data.store.")
