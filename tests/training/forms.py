"""Stores in the forms of their makers, what numpy and xarray know of each."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from tests.data import cell_stores, region_stores, stores, virtual_stores, wrf_files
from tests.data.cell_stores import Cells, bounds
from tests.data.proj import project

KEYS = (
    "data=zarr", "data.levels=null", "data.static=[]", "data.forcing=[day_of_year_sin]",
    "data.batch_size=4", "model.channels=[8,16]", "model.groups=4", "trainer.evaluate_hours=[6]",
    "trainer.dtype=float64", "trainer.log_every=1", "device=cpu",
)  # fmt: skip


class Form:
    """A store, and what is known of it by other means than the package's.

    Attributes:
        names: of the variables, in the order of channels.
        keys: of the config.
        first, last: the initial times of forecasts, every 12 hours.
        train_times: how many of the store's times train.
        on_grid: a key of commands on the store, if the model sees another grid.
        shown, checked: what `data inspect` and `--check` say.
        areas: of cells, `(H, 1)` or `(H, W)` from the north, in any unit.
        tolerance: of scores, as areas are those of other formulas.
        write: writes the store into a folder and returns its address.
    """

    names: tuple[str, ...] = ("2m_temperature", "mean_sea_level_pressure")
    keys: tuple[str, ...]
    on_grid: tuple[str, ...] = ()
    first: str
    last: str
    train_times: int
    shown: tuple[str, ...]
    checked = ""
    areas: np.ndarray
    tolerance = 1e-5
    write: Callable[[Path], Path | str]

    @cached_property
    def data(self) -> xr.Dataset:
        """The fields as they are stored."""
        raise NotImplementedError

    def rows(self, name: str) -> np.ndarray:
        """Return a variable at all times as the model sees it, `(T, H, W)` from the north."""
        raise NotImplementedError

    @property
    def init(self) -> str:
        return f"init={self.first}/{self.last}/12h"

    def mean(self, fields: np.ndarray) -> float:
        """Return the mean of `(..., H, W)` over all of it, by areas."""
        areas = np.broadcast_to(self.areas, fields.shape[-2:])
        return float((fields * (areas / areas.mean())).mean())


def keys(names: tuple[str, ...], *dates: str) -> tuple[str, ...]:
    """Return keys for the variables, and for the dates of training, validation and test."""
    splits = zip(("train", "valid", "test"), dates, strict=True)
    return (*KEYS, f"data.prognostic=[{','.join(names)}]", *(
        f"data.dates.{split}=[{span}]" for split, span in splits
    ))  # fmt: skip


class OnCells(Form):
    """Reduced Gaussian grids and HEALPix, as rows or on a grid of a size; and regular grids."""

    def __init__(
        self,
        write: Callable[..., Path],
        cells: Callable[[], Cells],
        grid: tuple[int, int] | None = None,
        more: tuple[str, ...] = (),
        days: int = 10,
    ) -> None:
        self._write, self._cells, self.grid, self.days = write, cells, grid, days
        self.on_grid = (f"grid={grid[0]}x{grid[1]}",) if grid else ()
        seen = f"data.{self.on_grid[0]}" if grid else "data.regrid=rows"
        train, valid, test = (f"2000-01-{day:02}" for day in (days - 3, days - 2, days - 1))
        dates = (f"2000-01-01,{train}", f"{valid},{valid}", f"{test},2000-01-{days:02}")
        self.keys = (*keys(self.names, *dates), seen, *more)
        self.first, self.last = f"{valid}T00", f"{test}T00"
        self.train_times = 4 * (days - 3)

    @cached_property
    def cells(self) -> Cells:
        return self._cells()

    def write(self, folder: Path) -> Path:
        return self._write(folder, self.cells, 4 * self.days)

    @cached_property
    def data(self) -> xr.Dataset:
        return cell_stores.waves(self.cells, 4 * self.days)

    @property
    def latitude(self) -> np.ndarray:
        if self.grid is None:
            return self.cells.latitude
        height = self.grid[0]
        without_poles = 90 - (np.arange(height) + 0.5) * 180 / height
        return np.linspace(90, -90, height) if height % 2 else without_poles

    @property
    def shape(self) -> tuple[int, int]:
        return self.grid or (len(self.latitude), max(self.cells.lengths))

    @property
    def shown(self) -> tuple[str, ...]:
        height, width = self.shape
        poles = "with" if self.latitude[0] == 90 else "without"
        return (f"grid    {height} x {width} {poles} rows on the poles",)

    @cached_property
    def areas(self) -> np.ndarray:
        edges = self.cells.edges if self.grid is None else bounds(self.latitude)
        return -np.diff(edges)[:, None]

    def rows(self, name: str) -> np.ndarray:
        """By numpy's interpolation along rows, or by areas that are shared."""
        fields = self.data[name].values.astype(float)
        if self.grid is not None:
            made = cell_stores.means_over_areas(self.cells, fields, self.grid)
        else:
            made = np.stack([self.cells.on_rows(field) for field in fields])
        return made.astype("f4").astype(float)


def columns(folder: Path, cells: Cells, steps: int) -> Path:
    """Write a zarr store of rows and columns."""
    shape = {"latitude": cells.latitude, "longitude": cells.longitudes[: cells.lengths[0]]}
    flat = cell_stores.waves(cells, steps).drop_vars(["latitude", "longitude"])
    order = pd.MultiIndex.from_product(shape.values(), names=list(shape))
    data = flat.assign_coords(xr.Coordinates.from_pandas_multiindex(order, "values"))
    return stores.write(data.unstack("values"), folder / "columns.zarr")


class InRegion(Form):
    """Boxes and projections, with static fields and forcings at each point."""

    names = ("mean_sea_level_pressure", "2m_temperature")
    first, last = "2020-01-05T00", "2020-01-05T12"
    train_times = 28
    tolerance = 2e-4  # areas from the map factor differ by the square of cells' width

    def __init__(self, kind: str, suffix: str, shown: str) -> None:
        self.kind, self.suffix, self.shown = kind, suffix, (shown,)
        dates = ("2019-12-28,2020-01-03", "2020-01-04,2020-01-04", "2020-01-05,2020-01-06")
        self.keys = (
            *keys(self.names, *dates), "data.static=[land_sea_mask,latitude_sin]",
            "data.forcing=[insolation,hour_of_day_sin]", "loss.gradient=0.5",
        )  # fmt: skip

    def write(self, folder: Path) -> Path:
        return region_stores.write(self.kind, folder, self.suffix)

    @cached_property
    def data(self) -> xr.Dataset:
        return region_stores.dataset(self.kind)

    @property
    def northern(self) -> xr.Dataset:
        """The data with rows from the north."""
        order = -1 if self.kind == "lambert" else 1
        return self.data.isel({self.data["2m_temperature"].dims[1]: slice(None, None, order)})

    @cached_property
    def areas(self) -> np.ndarray:
        return region_stores.areas(self.kind)

    def rows(self, name: str) -> np.ndarray:
        return self.northern[name].values.astype(float)


class OfWrf(InRegion):
    """Files of WRF, one for each day, on its Lambert cone."""

    names = ("surface_pressure", "2m_temperature")

    def write(self, folder: Path) -> str:
        data = wrf_files.dataset("lambert")
        for first in range(0, data.sizes["Time"], 4):
            wrf_files.write(data.isel(Time=slice(first, first + 4)), folder)
        return f"{folder}/wrfout_d01_*"

    @cached_property
    def data(self) -> xr.Dataset:
        """As CF has them."""
        stored = wrf_files.dataset("lambert")
        names = {"PSFC": "surface_pressure", "T2": "2m_temperature", "LANDMASK": "land_sea_mask"}
        stored = stored.rename(Time="time", **names)
        points = {"latitude": stored["XLAT"][0].variable, "longitude": stored["XLONG"][0].variable}
        times = region_stores.START + region_stores.STEP * np.arange(stored.sizes["time"])
        data = stored[[*names.values()]].assign_coords(time=times, **points)
        for name in points:
            data[name].attrs = {"standard_name": name}
        return data.assign(land_sea_mask=data["land_sea_mask"][0])

    @cached_property
    def areas(self) -> np.ndarray:
        """By PROJ."""
        points = (self.northern[name].values for name in ("longitude", "latitude"))
        return 1 / project(wrf_files.text("lambert"), *points, "areal_scale")


class InCalendar(Form):
    """Climate models in years of 365 days, or of twelve months of 30."""

    names = ("TREFHT", "PSL")
    ROWS, COLUMNS, STEPS = 13, 16, 240  # sixty days, six-hourly

    def __init__(
        self, calendar: str, year: str, ends: tuple[str, ...], days: int, units: str, name: str
    ) -> None:
        self.calendar, self.year, self.units, self.name = calendar, year, units, name
        self.last_of_february, last = (f"{year}-{end}" for end in ends[:2])
        self.first, self.last = f"{year}-{ends[2]}", f"{year}-03-02T00"
        dates = (
            f"{year}-01-20,{self.last_of_february}", f"{year}-03-01,{year}-03-09",
            f"{year}-03-10,{last}",
        )  # fmt: skip
        self.keys = (*keys(self.names, *dates), "data.forcing=[day_of_year_sin,insolation]")
        self.train_times = 4 * days
        self.checked = f"{self.last_of_february}T18:00"
        self.shown = (
            f"dates   240, from {year}-01-20T00:00 to ",
            f"every 6 hours, no gaps, {calendar} calendar",
        )

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        return stores.write(self.data, path) if path.suffix == ".zarr" else netcdf(self.data, path)

    @cached_property
    def data(self) -> xr.Dataset:
        """Six-hourly waves on an annual cycle of the calendar; times have no bounds."""
        options = {"freq": "6h", "calendar": self.calendar, "use_cftime": True}
        times = xr.date_range(f"{self.year}-01-20", periods=self.STEPS, **options)
        latitude = np.linspace(-90, 90, self.ROWS)
        longitude = np.arange(self.COLUMNS) * 360 / self.COLUMNS
        days = np.array([time.dayofyr + time.hour / 24 for time in times])[:, None, None]
        phi, wave = np.deg2rad(latitude)[:, None], np.deg2rad(longitude) - 0.3 * days
        noise = np.random.default_rng(0).normal(size=(self.STEPS, self.ROWS, self.COLUMNS))
        season = np.sin(2 * np.pi * days / 365) * np.sin(phi)
        fields = {
            "TREFHT": 285 + 20 * np.cos(phi) + 5 * np.cos(phi) * np.sin(2 * wave) + 8 * season,
            "PSL": 101000 + 900 * np.cos(phi) ** 2 * np.cos(3 * wave) - 200 * season,
        }
        sizes, about = {"TREFHT": 0.3, "PSL": 30}, {"TREFHT": "K", "PSL": "Pa"}
        dims = ("time", "lat", "lon")
        data = xr.Dataset(
            {
                name: (dims, (field + sizes[name] * noise).astype("f4"), {"units": about[name]})
                for name, field in fields.items()
            },
            {"time": times, "lat": latitude, "lon": longitude},
        )
        data["lat"].attrs |= {"units": "degrees_north", "long_name": "latitude"}
        data["lon"].attrs |= {"units": "degrees_east", "long_name": "longitude"}
        data["time"].encoding |= {"units": self.units, "dtype": "float64"}
        return data

    @cached_property
    def areas(self) -> np.ndarray:
        return -np.diff(bounds(self.data["lat"].values[::-1]))[:, None]

    def rows(self, name: str) -> np.ndarray:
        return self.data[name].values[:, ::-1].astype(float)


def netcdf(data: xr.Dataset, path: Path) -> Path:
    data.to_netcdf(path)
    return path


class InOtherFiles(Form):
    """Icechunk repositories, and references to chunks of other files."""

    names = ("2m_temperature", "solar")
    first, last = "2000-01-05T00", "2000-01-05T12"
    train_times = 16
    shown = ("24, from 2000-01-01T00:00",)

    def __init__(self, write: Callable[[xr.Dataset, Path], Path | str]) -> None:
        self._write = write
        dates = ("2000-01-01,2000-01-04", "2000-01-05,2000-01-05", "2000-01-06,2000-01-06")
        self.keys = keys(self.names, *dates)

    def write(self, folder: Path) -> Path | str:
        return self._write(self.data, folder)

    @cached_property
    def data(self) -> xr.Dataset:
        return stores.dataset(16, 32, steps=24)

    @cached_property
    def areas(self) -> np.ndarray:
        return -np.diff(bounds(self.data["latitude"].values))[:, None]

    def rows(self, name: str) -> np.ndarray:
        return self.data[name].values.astype(float)


SMALL = ("data.batch_size=1", "model.channels=[4,8]", "model.blocks=1")
FORMS: dict[str, Form] = {
    "O16 anemoi": OnCells(cell_stores.anemoi, lambda: cell_stores.octahedral(16)),
    "O16 netCDF": OnCells(cell_stores.netcdf, lambda: cell_stores.octahedral(16)),
    "O96 anemoi": OnCells(cell_stores.anemoi, lambda: cell_stores.octahedral(96), more=SMALL),
    "N320 anemoi": OnCells(
        cell_stores.anemoi, lambda: cell_stores.classic(320), more=SMALL, days=4
    ),
    "N32 GRIB": OnCells(cell_stores.grib, lambda: cell_stores.classic(32)),
    "HEALPix GRIB": OnCells(cell_stores.grib, lambda: cell_stores.healpix(8)),
    "HEALPix zarr": OnCells(cell_stores.zarr, lambda: cell_stores.healpix(8)),
    "O16 on 17x16": OnCells(cell_stores.anemoi, lambda: cell_stores.octahedral(16), (17, 16)),
    "regular on 12x24": OnCells(
        columns, lambda: Cells(np.linspace(84, -84, 15), (30,) * 15, np.full(15, 0.5)), (12, 24)
    ),
    "box": InRegion("box", ".zarr", "13 x 16 region, 1.5 x 1.5 degrees, latitude 60 to 42"),
    "Lambert netCDF": InRegion("lambert", ".nc", "13 x 16 region on lambert_conformal_conic, 120"),
    "Lambert zarr": InRegion("lambert", ".zarr", "13 x 16 region on lambert_conformal_conic, 120"),
    "rotated netCDF": InRegion("rotated", ".nc", "13 x 16 region on rotated_latitude_longitude"),
    "WRF": OfWrf("lambert", "", "13 x 16 region on lambert_conformal_conic, 92.83 x 92.77 km"),
    # Years are numbered from the start of the run.
    "noleap zarr": InCalendar(
        "noleap", "0001", ("02-28", "03-20", "02-27T00"), 40, "days since 0001-01-01 00:00:00",
        "cesm.zarr",
    ),
    "360_day netCDF": InCalendar(
        "360_day", "2000", ("02-30", "03-19", "02-29T00"), 41, "days since 1859-12-01",
        "hadgem.nc",
    ),
    "icechunk": InOtherFiles(virtual_stores.write_tag),
    "icechunk, virtual": InOtherFiles(virtual_stores.write_icechunk),
    "kerchunk": InOtherFiles(virtual_stores.write_json),
    "kerchunk, parquet": InOtherFiles(virtual_stores.write_parquet),
}  # fmt: skip
