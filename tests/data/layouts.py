"""Small stores with exactly the dims, order, types, chunks and attributes of public ones.

Sources: the data pages of WeatherBench 2 and ARCO-ERA5, and files as the Climate Data Store
(cds.climate.copernicus.eu) hands them out.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import xarray as xr
import zarr

LEVELS_13 = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
LEVELS_37 = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, *range(100, 251, 25), *range(300, 751, 50))
LEVELS_37 += (*range(775, 1001, 25),)
CANONICAL = ("time", "level", "latitude", "longitude")
SHORT = {
    "geopotential": "z",
    "temperature": "t",
    "2m_temperature": "t2m",
    "geopotential_at_surface": "zs",
}
UNITS = {
    "geopotential": "m**2 s**-2",
    "temperature": "K",
    "2m_temperature": "K",
    "geopotential_at_surface": "m**2 s**-2",
    "sea_surface_temperature": "K",
}


@dataclass(frozen=True)
class Layout:
    """The differences of a public store from the canonical dataset.

    Attributes:
        order: of the dims, by their standard names.
        renamed: standard name of a dim or variable -> the store's.
        chunks: by standard dim; whole if not given.
        coordinates: others that the store has besides the dims.
    """

    rows: int
    columns: int
    levels: tuple[int, ...]
    order: tuple[str, ...] = CANONICAL
    rising: bool = False
    poles: bool = True
    renamed: Mapping[str, str] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=lambda: {"time": 1})
    level_type: str = "int64"
    time_units: str = "hours since 1900-01-01"
    netcdf: str = ""
    zarr_format: int = 2
    consolidated: bool = True
    packed: bool = False
    coordinates: Callable[[xr.Dataset], dict[str, Any]] = lambda data: {}

    @property
    def suffix(self) -> str:
        return ".nc" if self.netcdf else ".zarr"

    def canonical(self, steps: int = 3, start: str = "2020-02-28T18") -> xr.Dataset:
        """Return fields: row 0 north, dims (time, level, latitude, longitude), with a leap day."""
        random = np.random.default_rng(len(start) + self.rows)
        half = 0 if self.poles else 90 / self.rows
        coords = {
            "time": np.datetime64(start, "ns") + np.arange(steps) * np.timedelta64(6, "h"),
            "level": np.array(self.levels),
            "latitude": np.linspace(90 - half, half - 90, self.rows).astype("f4"),
            "longitude": (np.arange(self.columns) * 360 / self.columns).astype("f4"),
        }
        sizes = {name: len(values) for name, values in coords.items()}
        dims = {
            "geopotential": CANONICAL,
            "temperature": CANONICAL,
            "2m_temperature": ("time", "latitude", "longitude"),
            "sea_surface_temperature": ("time", "latitude", "longitude"),
            "geopotential_at_surface": ("latitude", "longitude"),
        }
        variables = {
            name: (of, random.normal(270, 9, [sizes[dim] for dim in of]).astype("f4"))
            for name, of in dims.items()
        }
        land = random.random((self.rows, self.columns)) < 0.3
        variables["sea_surface_temperature"][1][:, land] = np.nan
        if not self.packed:  # into a type that holds temperatures only
            heights = 7e4 * np.log(1013 / np.array(self.levels))  # as in the standard atmosphere
            variables["geopotential"][1][...] += heights[:, None, None].astype("f4")
        return xr.Dataset(variables, coords)

    def stored(self, data: xr.Dataset) -> xr.Dataset:
        """Return the canonical dataset in this layout."""
        others = self.coordinates(data)
        data = data.transpose(*self.order).sortby("latitude", ascending=self.rising)
        data = data.assign_coords(level=data["level"].astype(self.level_type))
        data = data.assign_coords({name: values for name, values in others.items()})
        for name in data.data_vars:
            units = UNITS[str(name)]
            data[name].attrs = {"units": units, "long_name": str(name), "standard_name": "unknown"}
        data["latitude"].attrs = {"units": "degrees_north", "standard_name": "latitude"}
        data["longitude"].attrs = {"units": "degrees_east", "standard_name": "longitude"}
        known = {name: other for name, other in self.renamed.items() if name in data.variables}
        return data.rename(known)

    def write(self, data: xr.Dataset, path: Path) -> Path:
        stored = self.stored(data)
        encoding = {}
        for name, array in data.transpose(*self.order).data_vars.items():
            sizes = tuple(self.chunks.get(str(dim), array.sizes[dim]) for dim in array.dims)
            encoding[self.renamed.get(str(name), str(name))] = self._encoding(sizes)
        encoding[self.renamed.get("time", "time")] = {"units": self.time_units, "dtype": "int64"}
        if self.netcdf:
            stored.to_netcdf(path, format=self.netcdf, engine="netcdf4", encoding=encoding)
        else:
            form = self.zarr_format
            stored.to_zarr(path, zarr_format=form, consolidated=False, encoding=encoding)
            if self.consolidated:
                consolidate(path)
        return path

    def _encoding(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        packing: dict[str, Any] = {}
        if self.packed:
            packing = {"dtype": "int16", "scale_factor": 0.002, "add_offset": 270.0}
            packing |= {"_FillValue": -32767, "missing_value": -32767}
        if self.netcdf == "NETCDF4":
            return packing | {"chunksizes": sizes, "zlib": True, "complevel": 1, "shuffle": True}
        if self.netcdf:
            return packing
        if self.zarr_format == 2:
            return packing | {"chunks": sizes, "compressors": [numcodecs.Blosc("lz4", 5)]}
        return packing | {"chunks": sizes}


def consolidate(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Consolidated metadata")
        zarr.consolidate_metadata(str(path))


def _cds_extras(data: xr.Dataset) -> dict[str, Any]:
    return {"number": 0, "expver": ("time", np.array(["0001"] * data.sizes["time"]))}


def _grib_extras(data: xr.Dataset) -> dict[str, Any]:
    step = np.timedelta64(0, "ns")
    return {"number": 0, "step": step, "surface": 0.0, "valid_time": ("time", data["time"].values)}


ROUND = ("time", "level", "longitude", "latitude")
LAYOUTS = {
    "weatherbench2 64x32": Layout(
        32, 64, LEVELS_13, ROUND, rising=True, poles=False, chunks={"time": 100}
    ),
    "weatherbench2 240x121": Layout(121, 240, LEVELS_13[:3], ROUND, rising=True),
    "weatherbench2 1440x721": Layout(721, 8, LEVELS_13, time_units="hours since 1959-01-01"),
    "arco pressure": Layout(721, 4, LEVELS_37),
    "arco hybrid": Layout(
        9, 8, tuple(range(1, 138)), renamed={"level": "hybrid"}, level_type="float64"
    ),
    "graphcast": Layout(
        19, 36, LEVELS_37, rising=True, renamed={"latitude": "lat", "longitude": "lon"}
    ),
    "climate data store": Layout(
        19,
        36,
        LEVELS_13[::-1],
        renamed={"time": "valid_time", "level": "pressure_level", **SHORT},
        level_type="float64",
        time_units="seconds since 1970-01-01",
        netcdf="NETCDF4",
        coordinates=_cds_extras,
    ),
    "climate data store, before 2024": Layout(
        19,
        36,
        LEVELS_13,
        renamed=SHORT,
        level_type="int32",
        netcdf="NETCDF3_64BIT",
        packed=True,
    ),
    "grib": Layout(
        19,
        36,
        LEVELS_13[::-1],
        renamed={"level": "isobaricInhPa", **SHORT},
        level_type="float64",
        zarr_format=3,
        consolidated=False,
        coordinates=_grib_extras,
    ),
    "packed zarr": Layout(19, 36, LEVELS_13, packed=True, zarr_format=3),
}
