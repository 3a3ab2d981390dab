"""Grids of cells along one dim, as ECMWF and HEALPix number them, and stores on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xarray as xr
from numpy.polynomial.legendre import leggauss

from tests.data import anemoi_stores, stores

STEPS = 40
NAMES = ("2m_temperature", "mean_sea_level_pressure")
SHORT = {"2m_temperature": "2t", "mean_sea_level_pressure": "msl"}


class Cells(NamedTuple):
    """Rows of cells: a latitude, the number of cells and the first longitude of each."""

    latitude: np.ndarray
    lengths: tuple[int, ...]
    firsts: np.ndarray

    @property
    def latitudes(self) -> np.ndarray:
        return np.repeat(self.latitude, self.lengths)

    @property
    def longitudes(self) -> np.ndarray:
        rows = zip(self.firsts, self.lengths, strict=True)
        return np.concatenate([first + np.arange(n) * 360 / n for first, n in rows])

    @property
    def edges(self) -> np.ndarray:
        """Edges of rows in sin(latitude): those of HEALPix have the area of their cells."""
        if self.lengths[0] == 4:
            return 1 - 2 * np.append(0, np.cumsum(self.lengths)) / sum(self.lengths)
        return bounds(self.latitude)

    @property
    def positions(self) -> np.ndarray:
        """Unit vectors, `(N, 3)`."""
        phi, lam = np.deg2rad(self.latitudes), np.deg2rad(self.longitudes)
        return np.stack([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)], -1)

    def on_rows(self, values: np.ndarray) -> np.ndarray:
        """Return `(N,)` as `(H, W)`: each row by numpy's interpolation along a circle."""
        width = max(self.lengths)
        columns = np.arange(width) * 360 / width
        rows = np.split(values.astype(float), np.cumsum(self.lengths)[:-1])
        return np.stack(
            [
                np.interp(columns, first + np.arange(n) * 360 / n, row, period=360)
                for first, n, row in zip(self.firsts, self.lengths, rows, strict=True)
            ]
        )


def bounds(latitude: np.ndarray) -> np.ndarray:
    """Edges of rows in sin(latitude): halfway between latitudes, and at the poles."""
    return np.sin(np.deg2rad([90, *((latitude[1:] + latitude[:-1]) / 2), -90]))


def means_over_areas(cells: Cells, values: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the means over the valid part of each cell of a grid, `(..., N)` -> `(..., H, W)`.

    The area of each cell within each new one is measured, cell by cell. Columns begin at longitude
    0; an odd number of rows has rows on the poles.
    """
    height, width = grid
    latitude = 90 - (np.arange(height) + 0.5) * 180 / height
    new_edges = bounds(np.linspace(90, -90, height) if height % 2 else latitude)
    result = np.full((*values.shape[:-1], height, width), np.nan)
    for row, column in np.ndindex(grid):
        west, east = ((column + side) * 360 / width for side in (-0.5, 0.5))
        areas = []
        for number, (count, first) in enumerate(zip(cells.lengths, cells.firsts, strict=True)):
            north = min(new_edges[row], cells.edges[number])
            overlap = max(0.0, north - max(new_edges[row + 1], cells.edges[number + 1]))
            for cell in range(count if overlap > 1e-12 else 0):
                middle, half = first + cell * 360 / count, 180 / count
                spans = [(middle - half + turn, middle + half + turn) for turn in (-360, 0, 360)]
                shared = (min(east, end) - max(west, begin) for begin, end in spans)
                areas.append(overlap * sum(max(0.0, degrees) for degrees in shared))
            areas += [] if overlap > 1e-12 else [0.0] * count
        weights = np.where(np.isnan(values), 0, np.where(np.array(areas) > 1e-12, areas, 0))
        total, covered = (np.nan_to_num(values) * weights).sum(axis=-1), weights.sum(axis=-1)
        np.divide(total, covered, out=result[..., row, column], where=covered > 0)
    return result


def gaussian(lengths: Sequence[int]) -> Cells:
    """A reduced Gaussian grid: its latitudes are the zeros of a Legendre polynomial."""
    latitude = np.degrees(np.arcsin(leggauss(len(lengths))[0]))[::-1]
    return Cells(latitude, tuple(lengths), np.zeros(len(lengths)))


def octahedral(number: int) -> Cells:
    """ECMWF's ON: 20 cells next to the pole, and 4 more in each row towards the equator."""
    north = [20 + 4 * row for row in range(number)]
    return gaussian(north + north[::-1])


def classic(number: int) -> Cells:
    """ECMWF's NN, with the row lengths of the samples that come with ecCodes."""
    eccodes = pytest.importorskip("eccodes")
    handle = eccodes.codes_grib_new_from_samples(f"reduced_gg_pl_{number}_grib2")
    lengths = eccodes.codes_get_array(handle, "pl")
    eccodes.codes_release(handle)
    return gaussian([int(length) for length in lengths])


def healpix(nside: int) -> Cells:
    """HEALPix in RING order. Source: Gorski et al. 2005, equations 4 to 9."""
    sines, lengths, firsts = [], [], []
    for ring in range(1, 2 * nside + 1):
        cap = ring < nside
        sines.append(1 - ring**2 / (3 * nside**2) if cap else 4 / 3 - 2 * ring / (3 * nside))
        lengths.append(4 * min(ring, nside))
        shift = 1 if cap or (ring - nside) % 2 == 0 else 0
        firsts.append(shift * 180 / lengths[-1])
    latitude = np.degrees(np.arcsin([*sines, *(-sine for sine in sines[-2::-1])]))
    return Cells(latitude, (*lengths, *lengths[-2::-1]), np.array([*firsts, *firsts[-2::-1]]))


def nested(nside: int) -> np.ndarray:
    """Return which cell of RING order each one of HEALPix in NESTED order is.

    The four cells of the next finer grid within a cell follow each other: south, east, west, north.
    """
    if nside == 1:
        return np.arange(12)
    coarse, fine = healpix(nside // 2), healpix(nside)
    parents, order = nested(nside // 2), []
    nearest = (fine.positions @ coarse.positions[parents].T).argmax(axis=1)
    for number, longitude in enumerate(coarse.longitudes[parents]):
        within = np.flatnonzero(nearest == number)
        south, *middle, north = within[np.argsort(fine.latitudes[within])]
        west, east = sorted(middle, key=lambda x: (fine.longitudes[x] - longitude + 180) % 360)
        order += [south, east, west, north]
    return np.array(order)


def waves(cells: Cells, steps: int = STEPS) -> xr.Dataset:
    """A temperature and a pressure every six hours, by default for ten days: `(time, values)`."""
    phi, wave = np.deg2rad(cells.latitudes), np.deg2rad(cells.longitudes)
    days = np.arange(steps)[:, None] / 4
    noise = np.random.default_rng(0).normal(size=(2, steps, len(phi)))
    fields = (
        285 + 20 * np.cos(phi) + 5 * np.cos(phi) * np.sin(2 * wave - 0.6 * days) + 0.3 * noise[0],
        101000 + 900 * np.cos(phi) ** 2 * np.cos(3 * wave - 0.9 * days) + 30 * noise[1],
    )
    units = ("K", "Pa")
    return xr.Dataset(
        {
            name: (("time", "values"), field.astype("f4"), {"units": unit})
            for name, field, unit in zip(NAMES, fields, units, strict=True)
        },
        {
            "time": stores.times(steps),
            "latitude": ("values", cells.latitudes, {"units": "degrees_north"}),
            "longitude": ("values", cells.longitudes, {"units": "degrees_east"}),
        },
    )


def anemoi(folder: Path, cells: Cells, steps: int = STEPS, **attributes: Any) -> Path:
    """Write a dataset of anemoi, one chunk for each time."""
    data = waves(cells, steps)
    # A grid of one row, as far as the writer is concerned; the coordinates say what it is.
    flat = data.drop_vars(["latitude", "longitude"]).rename(values="longitude")
    flat = flat.expand_dims("latitude", axis=1).assign_coords(
        latitude=[0.0], longitude=np.arange(len(cells.latitudes))
    )
    about = {SHORT[name]: {"units": data[name].attrs["units"]} for name in NAMES}
    name = f"{'o' if cells.lengths[0] == 20 else 'n'}{len(cells.lengths) // 2}"
    changes = {"field_shape": [len(cells.latitudes)], "variables_metadata": about}
    changes |= {"resolution": name, **attributes}
    arrays = {"latitudes": cells.latitudes, "longitudes": cells.longitudes}
    return anemoi_stores.write(flat, folder / "anemoi.zarr", None, arrays, SHORT, **changes)


def netcdf(folder: Path, cells: Cells, steps: int = STEPS) -> Path:
    """Write a netCDF file with the dims time and values."""
    path = folder / "cells.nc"
    waves(cells, steps).to_netcdf(path)
    return path


def zarr(folder: Path, cells: Cells, steps: int = STEPS) -> Path:
    """Write a zarr store with the dims time and cell, as for HEALPix."""
    data = waves(cells, steps).rename(values="cell", latitude="lat", longitude="lon")
    return stores.write(data, folder / "cells.zarr")


def grib(folder: Path, cells: Cells, steps: int = STEPS, order: str = "nested") -> Path:
    """Write a GRIB file of an NN, or of HEALPix in an order, as ecCodes makes messages of them."""
    eccodes = pytest.importorskip("eccodes")
    path, data = folder / "cells.grib", waves(cells, steps)
    nside = len(cells.lengths) // 4 + 1
    keys = {"bitsPerValue": 24}
    sample = f"reduced_gg_pl_{len(cells.lengths) // 2}_grib2"
    if cells.lengths[0] == 4:
        keys |= {"gridType": "healpix", "Nside": nside, "longitudeOfFirstGridPoint": 45_000_000}
        keys |= {"orderingConvention": order}
        sample = "GRIB2"
        data = data if order == "ring" else data.isel(values=nested(nside))
    levels = {"2t": ("heightAboveGround", 2), "msl": ("meanSea", 0)}
    with path.open("wb") as file:
        for step, name in np.ndindex(steps, len(NAMES)):
            short = SHORT[NAMES[name]]
            kind, level = levels[short]
            time = data["time"].values[step].astype("M8[h]").item()
            handle = eccodes.codes_grib_new_from_samples(sample)
            about = {"typeOfLevel": kind, "level": level, "shortName": short}
            about |= {"dataDate": int(f"{time:%Y%m%d}"), "dataTime": 100 * time.hour}
            for key, value in (keys | about).items():
                eccodes.codes_set(handle, key, value)
            eccodes.codes_set_values(handle, data[NAMES[name]].values[step].astype(float))
            file.write(eccodes.codes_get_message(handle))
            eccodes.codes_release(handle)
    return path
