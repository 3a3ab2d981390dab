"""GRIB files with the fields of datasets."""

from itertools import product

import numpy as np

from credit_dp.data.sources.grib_file import SCANNING_KEYS, load_eccodes
from credit_dp.data.units import GRAVITY
from tests.data import region_grids

# Name of the store -> short name, type of level, level (None: those of the store), and factor.
ECMWF = {
    "geopotential": ("z", "isobaricInhPa", None, 1.0),
    "temperature": ("t", "isobaricInhPa", None, 1.0),
    "2m_temperature": ("2t", "heightAboveGround", 2, 1.0),
}
# NCEP's files have heights, and pressures in their edition of GRIB 1 and 2.
NCEP = ECMWF | {"geopotential": ("gh", "isobaricInhPa", None, 1 / GRAVITY)}
EARTH_OF_GRIB1 = 6367470.0  # m, its radius
SAMPLES = {1: "regular_ll_pl_grib1", 2: "regular_ll_pl_grib2"}


def write_grib(path, state, table=ECMWF, edition=2, **keys):
    """Append the fields of a dataset of one time to a GRIB file; `keys` are set last."""
    eccodes = load_eccodes("init_file")
    time = state["time"].values.astype("M8[h]").item()
    latitude, longitude = state["latitude"].values, state["longitude"].values
    grid = {
        **{"Ni": len(longitude), "Nj": len(latitude)},
        "latitudeOfFirstGridPointInDegrees": latitude[0],
        "latitudeOfLastGridPointInDegrees": latitude[-1],
        "longitudeOfFirstGridPointInDegrees": longitude[0],
        "longitudeOfLastGridPointInDegrees": longitude[-1],
        "iDirectionIncrementInDegrees": 360 / len(longitude),
        "jDirectionIncrementInDegrees": abs(latitude[1] - latitude[0]),
        "jScansPositively": int(latitude[0] < latitude[-1]),
    }
    with path.open("ab") as file:
        for name, (short, level_type, level, factor) in table.items():
            levels = state["level"].values.tolist() if level is None else [level]
            for one in levels:
                field = state[name].sel(level=one) if level is None else state[name]
                handle = eccodes.codes_grib_new_from_samples(SAMPLES[edition])
                settings = {
                    **grid,
                    **{"dataDate": int(f"{time:%Y%m%d}"), "dataTime": time.hour * 100},
                    **{"typeOfLevel": level_type, "level": one, "shortName": short},
                    **{"bitsPerValue": 24, **keys},
                }
                for key, value in settings.items():
                    eccodes.codes_set(handle, key, value)
                values = field.values.astype(float) * factor
                eccodes.codes_set_values(handle, np.nan_to_num(values, nan=1e20).ravel())
                file.write(eccodes.codes_get_message(handle))
                eccodes.codes_release(handle)
    return path


SCANNING = {
    "westward": {"iScansNegatively": 1},
    "northward": {"jScansPositively": 1},
    "by column": {"jPointsAreConsecutive": 1},
    "zigzag": {"alternativeRowScanning": 1},
    "zigzag from the south, by column": {
        **{"jScansPositively": 1, "jPointsAreConsecutive": 1, "alternativeRowScanning": 1}
    },
}


def scanned_points(flags, rows, columns):
    """Yield row from the north and column eastward of each point of a message.

    Source: WMO Manual on Codes, FM 92 GRIB, flag table 3.4.
    """
    across, down = list(range(columns)), list(range(rows))
    across = across[::-1] if flags.get("iScansNegatively") else across
    down = down[::-1] if flags.get("jScansPositively") else down
    by_column = flags.get("jPointsAreConsecutive")
    outer, inner = (across, down) if by_column else (down, across)
    for count, line in enumerate(outer):
        turned = count % 2 and flags.get("alternativeRowScanning")
        for point in inner[::-1] if turned else inner:
            yield (point, line) if by_column else (line, point)


def write_scanned(path, scanned, flags):
    """Copy a GRIB file whose rows begin in the northwest, with the points in another order."""
    eccodes = load_eccodes("init_file")
    with path.open("rb") as file, scanned.open("wb") as to:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            rows, columns = (eccodes.codes_get_long(handle, key) for key in ("Nj", "Ni"))
            field = eccodes.codes_get_values(handle).reshape(rows, columns)
            for key, value in flags.items():
                eccodes.codes_set(handle, key, value)
            for key, axis in (("iScansNegatively", "longitude"), ("jScansPositively", "latitude")):
                if flags.get(key):
                    ends = [f"{axis}Of{end}GridPointInDegrees" for end in ("First", "Last")]
                    values = [eccodes.codes_get_double(handle, end) for end in ends]
                    for end, value in zip(ends, values[::-1], strict=True):
                        eccodes.codes_set(handle, end, value)
            values = [field[point] for point in scanned_points(flags, rows, columns)]
            eccodes.codes_set_values(handle, np.array(values))
            to.write(eccodes.codes_get_message(handle))
            eccodes.codes_release(handle)
    return scanned


WINDS = {f"10m_{x}_component_of_wind": (f"10{x}", "heightAboveGround", 10, 1.0) for x in ("u", "v")}


def write_lambert(path, state, along, **keys):
    """Append winds on `wind_stores`' Lambert grid, and before them a field with another flag."""
    keys |= projected("lambert")[0]
    # Of lines, as the helper needs them; the keys replace them.
    state = state.assign_coords(latitude=90 - 15.0 * np.arange(13), longitude=22.5 * np.arange(16))
    other = {"10m_u_component_of_wind": ("2t", "heightAboveGround", 2, 1.0)}
    write_grib(path, state, other, **keys, uvRelativeToGrid=int(not along))
    return write_grib(path, state, WINDS, **keys, uvRelativeToGrid=int(along))


def write_message(path, sample, values=None, **keys):
    """Append one of ecCodes' messages, of 2000 and with keys set, to a GRIB file."""
    eccodes = load_eccodes("init_file")
    handle = eccodes.codes_grib_new_from_samples(sample)
    for key, value in {"dataDate": 20000101, "dataTime": 0, **keys}.items():
        eccodes.codes_set(handle, key, value)
    if values is not None:
        eccodes.codes_set_values(handle, values)
    with path.open("ab") as file:
        file.write(eccodes.codes_get_message(handle))
    eccodes.codes_release(handle)
    return path


ORDERS = [dict(zip(SCANNING_KEYS, flags, strict=True)) for flags in product((0, 1), repeat=4)]


def write_projected(path, field, kind, flags, edition=2):
    """Write a temperature `(13, 16)` on a projection, its points in an order; return their places.

    Latitudes, longitudes and the field have rows from the north of the plane.
    """
    keys, latitude, longitude = projected(kind)
    if kind == "rotated_ll":
        for key, ends in (("iScansNegatively", (351, 6)), ("jScansPositively", (6, -6))):
            axis = "longitude" if key.startswith("i") else "latitude"
            for end, value in zip(("First", "Last"), ends[:: -1 if flags[key] else 1], strict=True):
                keys[f"{axis}Of{end}GridPointInDegrees"] = value
    else:
        latitude, longitude = latitude[::-1], longitude[::-1]
    points = list(scanned_points(flags, 13, 16))
    if kind != "rotated_ll":
        keys["latitudeOfFirstGridPointInDegrees"] = latitude[points[0]]
        keys["longitudeOfFirstGridPointInDegrees"] = longitude[points[0]] % 360
    if edition == 1:
        # Its earth is smaller, and its polar plane is as long as the earth at 60 N.
        size = 120_000 * EARTH_OF_GRIB1 / region_grids.RADIUS
        size *= (1 + np.sin(np.pi / 3)) / 2 if kind == "polar_stereographic" else 1
        keys |= dict.fromkeys(("DxInMetres", "DyInMetres"), round(size))
        for key in ("shapeOfTheEarth", "numberOfDataPoints", "LaDInDegrees"):
            keys.pop(key, None)
        if kind == "rotated_ll":
            del keys["DxInMetres"], keys["DyInMetres"]
        flags = {x: y for x, y in flags.items() if x != "alternativeRowScanning"}
    about = {"typeOfLevel": "heightAboveGround", "level": 2, "shortName": "2t", "bitsPerValue": 24}
    values = np.array([field[point] for point in points])
    write_message(path, SAMPLES[edition], values, **keys | about | flags)
    return latitude, longitude


def projected(kind):
    """The keys of GRIB of a grid on a projection, and its latitudes and longitudes `(13, 16)`."""
    y, x = (1.2e5 * (np.arange(n) - n / 2) for n in (13, 16))
    keys = {"gridType": kind, "Nx": 16, "Ny": 13, "DxInMetres": 120_000, "DyInMetres": 120_000}
    if kind == "lambert":  # from the south, as HRRR's
        latitude, longitude = region_grids.Lambert().coordinates(y, x)
        keys |= {"LaDInDegrees": 38.5, "LoVInDegrees": 262.5, "jScansPositively": 1}
        keys |= {"Latin1InDegrees": 38.5, "Latin2InDegrees": 38.5}
    elif kind == "polar_stereographic":
        latitude, longitude, _ = region_grids.polar_stereographic(y - 2e6, x)
        keys |= {"LaDInDegrees": 90, "orientationOfTheGridInDegrees": 0, "jScansPositively": 1}
    else:
        rlat, rlon = 6 - 1.0 * np.arange(13), 1.0 * np.arange(16) - 9
        latitude, longitude = region_grids.rotated(rlat, rlon, (39.25, -162.0))
        keys = {
            **{"gridType": kind, "Ni": 16, "Nj": 13},
            **{"iDirectionIncrementInDegrees": 1, "jDirectionIncrementInDegrees": 1},
            **{"latitudeOfLastGridPointInDegrees": -6, "longitudeOfLastGridPointInDegrees": 6},
            **{"latitudeOfSouthernPoleInDegrees": -39.25, "longitudeOfSouthernPoleInDegrees": 18},
        }
    first = (6, 351) if kind == "rotated_ll" else (latitude[0, 0], longitude[0, 0] % 360)
    ends = ("latitudeOfFirstGridPointInDegrees", "longitudeOfFirstGridPointInDegrees")
    keys |= {
        "shapeOfTheEarth": 6,
        "numberOfDataPoints": 13 * 16,
        **dict(zip(ends, first, strict=True)),
    }
    return keys, latitude, longitude
