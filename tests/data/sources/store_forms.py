"""One small dataset with plausible values, written in the forms that researchers have.

Every form has the same fields under the names, dims and attributes of its makers. Sources: the data
pages of WeatherBench 2, ARCO-ERA5, the Climate Data Store and NCAR's miles-credit, and what cfgrib
makes of ECMWF's GRIB files.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tests.data import anemoi_stores, prepared_stores, virtual_stores

START = np.datetime64("2019-12-28", "ns")
STEP = np.timedelta64(6, "h")
ROUND = ("latitude", "longitude")
# Geopotential and temperature of the standard atmosphere by level.
LEVELS = {500: (54600.0, 252.0), 850: (14300.0, 279.0), 1000: (1080.0, 287.0)}
UNITS = {
    "geopotential": "m**2 s**-2",
    "temperature": "K",
    "2m_temperature": "K",
    "mean_sea_level_pressure": "Pa",
    "total_precipitation": "m",
    "geopotential_at_surface": "m**2 s**-2",
    "land_sea_mask": "(0 - 1)",
}
ON_LEVELS = ("geopotential", "temperature")
AT_SURFACE = ("2m_temperature", "mean_sea_level_pressure", "total_precipitation")
STATICS = ("geopotential_at_surface", "land_sea_mask")
CDS = {
    "geopotential": "z",
    "temperature": "t",
    "2m_temperature": "t2m",
    "mean_sea_level_pressure": "msl",
    "total_precipitation": "tp",
    "geopotential_at_surface": "z",
    "land_sea_mask": "lsm",
}
CREDIT = CDS | {
    "geopotential": "Z",
    "temperature": "T",
    "mean_sea_level_pressure": "MSL",
    "geopotential_at_surface": "Z_GDS4_SFC",
    "land_sea_mask": "LSM",
}


def dataset(rows: int = 13, columns: int = 12, steps: int = 24, seed: int = 0) -> xr.Dataset:
    """Six-hourly fields over new year, latitude falling from pole to pole."""
    random = np.random.default_rng(seed)
    coords = {
        "time": START + STEP * np.arange(steps),
        "level": np.array(list(LEVELS)),
        "latitude": np.linspace(90, -90, rows),
        "longitude": np.arange(columns) * 360 / columns,
    }
    flat = (steps, rows, columns)
    means = {name: [LEVELS[x][place] for x in LEVELS] for place, name in enumerate(ON_LEVELS)}
    fields: dict[str, Any] = {}
    for name, spread in zip(ON_LEVELS, (300, 4), strict=True):
        noise = spread * random.normal(size=(steps, len(LEVELS), rows, columns))
        fields[name] = (("time", "level", *ROUND), noise + np.array(means[name])[:, None, None])
    fields["2m_temperature"] = (("time", *ROUND), 285 + 5 * random.normal(size=flat))
    fields["mean_sea_level_pressure"] = (("time", *ROUND), 101e3 + 600 * random.normal(size=flat))
    rain = np.maximum(random.normal(size=flat), 0) * 1e-3
    fields["total_precipitation"] = (("time", *ROUND), rain)
    fields["geopotential_at_surface"] = (ROUND, 9e3 * random.uniform(size=flat[1:]))
    fields["land_sea_mask"] = (ROUND, random.uniform(size=flat[1:]))
    data = xr.Dataset(fields, coords).astype("f4")
    for name, unit in UNITS.items():
        data[name].attrs["units"] = unit
    return data


def _short(data: xr.Dataset, names: tuple[str, ...], table: Mapping[str, str]) -> xr.Dataset:
    return data[list(names)].rename({name: table[name] for name in names})


def _at_one_time(data: xr.Dataset, time: str = "1979-01-01") -> xr.Dataset:
    return data.expand_dims(time=[np.datetime64(time, "ns")])


def _zarr(data: xr.Dataset, path: Path) -> str:
    sizes = {
        name: {"chunks": tuple(1 if dim == "time" else array.sizes[dim] for dim in array.dims)}
        for name, array in data.data_vars.items()
    }
    data.to_zarr(path, zarr_format=2, consolidated=True, encoding=sizes)
    return str(path)


def _years(data: xr.Dataset) -> list[tuple[int, xr.Dataset]]:
    return [(int(year), part) for year, part in data.groupby("time.year")]


def _weatherbench(data: xr.Dataset, folder: Path) -> list[str]:
    order = ("time", "level", "longitude", "latitude")
    data = data.transpose(*order).sortby("latitude")
    return [_zarr(data, folder / "era5.zarr")]


def _arco(data: xr.Dataset, folder: Path) -> list[str]:
    return [_zarr(data, folder / "arco.zarr")]


def _cds(data: xr.Dataset, folder: Path) -> list[str]:
    """Pressure levels and the surface by year, and the constant fields, as one pattern."""
    upper = _short(data, ON_LEVELS, CDS).sortby("level", ascending=False)
    upper = upper.assign_coords(level=upper["level"].astype("f8"))
    surface = _short(data, AT_SURFACE, CDS)
    constant = _at_one_time(_short(data, STATICS, CDS))
    for kind, whole in (("pl", upper), ("sfc", surface)):
        for year, part in _years(whole):
            _cds_file(part, folder / f"era5_{kind}_{year}.nc")
    _cds_file(constant, folder / "era5_constant.nc")
    return [str(folder / "era5_*.nc")]


def _cds_file(data: xr.Dataset, path: Path) -> None:
    count = data.sizes["time"]
    data = data.assign_coords(number=0, expver=("time", np.array(["0001"] * count)))
    data = data.rename({"time": "valid_time"})
    data = data.rename({"level": "pressure_level"} if "level" in data.dims else {})
    data.to_netcdf(path, engine="netcdf4")


def _cds_before(data: xr.Dataset, folder: Path) -> list[str]:
    """Packed, in the classic format; the surface has the constant fields at every time."""
    upper, surface = _short(data, ON_LEVELS, CDS), _short(data, (*AT_SURFACE, *STATICS), CDS)
    surface["z"] = surface["z"].broadcast_like(surface["t2m"])
    surface["lsm"] = surface["lsm"].broadcast_like(surface["t2m"])
    entries = []
    for name, part in (("upper", upper), ("surface", surface)):
        encoding = {x: _packing(part[x]) for x in map(str, part.data_vars)}
        encoding["time"] = {"units": "hours since 1900-01-01", "dtype": "int32"}
        path = folder / f"{name}.nc"
        part.to_netcdf(path, format="NETCDF3_64BIT", engine="netcdf4", encoding=encoding)
        entries.append(str(path))
    return entries


def _packing(array: xr.DataArray) -> dict[str, Any]:
    low, high = float(array.min()), float(array.max())
    return {
        "dtype": "int16",
        "scale_factor": (high - low) / 65000,
        "add_offset": (high + low) / 2,
        "_FillValue": -32767,
    }


def _cfgrib(data: xr.Dataset, folder: Path) -> list[str]:
    """One file for each type of level, with GRIB's scalar coordinates."""
    zero = np.timedelta64(0, "ns")
    parts = {
        "isobaricInhPa": _short(data, ON_LEVELS, CDS).rename({"level": "isobaricInhPa"}),
        "heightAboveGround": _short(data, ("2m_temperature",), CDS),
        "meanSea": _short(data, ("mean_sea_level_pressure",), CDS),
        "surface": _short(data, ("total_precipitation", *STATICS), CDS),
    }
    parts["surface"]["z"] = parts["surface"]["z"].broadcast_like(parts["surface"]["tp"])
    entries = []
    for kind, part in parts.items():
        times = part["time"].values
        part = part.assign_coords(number=0, step=zero, valid_time=("time", times))
        if kind != "isobaricInhPa":
            part = part.assign_coords({kind: 2.0 if kind == "heightAboveGround" else 0.0})
        path = folder / f"{kind}.nc"
        part.to_netcdf(path, engine="netcdf4")
        entries.append(str(path))
    return entries


def _cfgrib_dims(data: xr.Dataset, folder: Path) -> list[str]:
    """GRIB's member and step as dims of one, to zarr; valid times apart from the analyses'."""
    short = _short(data, (*ON_LEVELS, *AT_SURFACE), CDS).rename({"level": "isobaricInhPa"})
    times = short["time"].values
    short = short.assign_coords(time=times - STEP).expand_dims(["number", "step"], [1, 2])
    short = short.assign_coords(
        number=[0], step=[STEP], valid_time=(("time", "step"), times[:, None])
    )
    _short(data, STATICS, CDS).assign_coords(valid_time=START).to_netcdf(folder / "constant.nc")
    return [_zarr(short, folder / "grib.zarr"), str(folder / "constant.nc")]


def _credit(data: xr.Dataset, folder: Path) -> list[str]:
    for year, part in _years(_short(data, (*ON_LEVELS, *AT_SURFACE), CREDIT)):
        _zarr(part, folder / f"SixHourly_{year}.zarr")
    static = _short(data, STATICS, CREDIT).assign_coords(latitude=data["latitude"].astype("f4"))
    static.to_netcdf(folder / "LSM_static.nc")
    return [str(folder / "SixHourly_*.zarr"), str(folder / "LSM_static.nc")]


def _flat(data: xr.Dataset, folder: Path) -> list[str]:
    """Without a dim of levels: `z500`, `t850`."""
    flat = _short(data, (*AT_SURFACE, *STATICS), CDS).drop_vars("level", errors="ignore")
    for name in ON_LEVELS:
        for level in LEVELS:
            flat[f"{CDS[name]}{level}"] = data[name].sel(level=level, drop=True)
    return [_zarr(flat, folder / "flat.zarr")]


def _anemoi(data: xr.Dataset, folder: Path) -> list[str]:
    short = {name: CDS[name] for name in (*ON_LEVELS, *STATICS)}
    short |= {"2m_temperature": "2t", "mean_sea_level_pressure": "msl", "total_precipitation": "tp"}
    return [str(anemoi_stores.write(data, folder / "anemoi.zarr", short=short))]


def _prepared(data: xr.Dataset, folder: Path) -> list[str]:
    return [str(prepared_stores.write(data, folder / "prepared.zarr"))]


def _icechunk(data: xr.Dataset, folder: Path) -> list[str]:
    """Its own chunks, committed in two steps to a branch that is not the default one."""
    repository = virtual_stores.repository(folder / "era5")
    repository.create_branch("analysis", repository.lookup_branch("main"))
    for part, options in ((slice(0, 15), {}), (slice(15, None), {"append_dim": "time"})):
        session = repository.writable_session("analysis")
        times = data.isel(time=part)
        times = times.drop_vars(STATICS) if options else times
        times.to_zarr(session.store, consolidated=False, **options)
        session.commit("More times")
    return [f"{folder}/era5@branch.analysis"]


def _kerchunk(data: xr.Dataset, folder: Path) -> list[str]:
    return [str(virtual_stores.write_json(data, folder))]


def _kerchunk_parquet(data: xr.Dataset, folder: Path) -> list[str]:
    return [str(virtual_stores.write_parquet(data, folder))]


def _virtual_icechunk(data: xr.Dataset, folder: Path) -> list[str]:
    return [str(virtual_stores.write_icechunk(data, folder))]


FORMS: Mapping[str, Callable[[xr.Dataset, Path], list[str]]] = {
    "weatherbench2": _weatherbench,
    "arco": _arco,
    "cds": _cds,
    "cds before 2024": _cds_before,
    "cfgrib": _cfgrib,
    "cfgrib, dims of one": _cfgrib_dims,
    "credit": _credit,
    "without levels": _flat,
    "anemoi": _anemoi,
    "prepared": _prepared,
    "icechunk": _icechunk,
    "kerchunk": _kerchunk,
    "kerchunk, parquet": _kerchunk_parquet,
    "icechunk, virtual": _virtual_icechunk,
}
PACKED = ("cds before 2024",)
VERSIONED = ("icechunk", "icechunk, virtual", "kerchunk", "kerchunk, parquet")
WITH_NAMES_OF_ERA5 = ("weatherbench2", "arco", "anemoi", "prepared", *VERSIONED)
