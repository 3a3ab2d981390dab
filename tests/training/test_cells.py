"""Runs on reduced Gaussian grids and HEALPix, as rows or regridded, from inspection to scores."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from tests.data import cell_stores, stores
from tests.data.cell_stores import NAMES, Cells
from tests.training.command_runs import CommandRuns

KEYS = (
    "data=zarr", f"data.prognostic=[{','.join(NAMES)}]", "data.static=[]", "data.levels=null",
    "data.forcing=[day_of_year_sin]", "data.batch_size=4", "model.channels=[8,16]",
    "model.groups=4", "trainer.evaluate_hours=[6]", "trainer.dtype=float64", "device=cpu",
    "data.dates.train=[2000-01-01,2000-01-07]", "data.dates.valid=[2000-01-08,2000-01-08]",
    "data.dates.test=[2000-01-09,2000-01-10]",
)  # fmt: skip


def columns(folder: Path, cells: Cells) -> Path:
    """Write a zarr store of rows and columns."""
    shape = {"latitude": cells.latitude, "longitude": cells.longitudes[: cells.lengths[0]]}
    flat = cell_stores.waves(cells).drop_vars(["latitude", "longitude"])
    order = pd.MultiIndex.from_product(shape.values(), names=list(shape))
    data = flat.assign_coords(xr.Coordinates.from_pandas_multiindex(order, "values"))
    return stores.write(data.unstack("values"), folder / "columns.zarr")


REGULAR = Cells(np.linspace(84, -84, 15), (30,) * 15, np.full(15, 0.5))
# The grid is a size, or None for rows.
CASES: dict[str, tuple[Callable[[Path, Cells], Path], Cells, tuple[int, int] | None]] = {
    "O16 anemoi": (cell_stores.anemoi, cell_stores.octahedral(16), None),
    "O16 netCDF": (cell_stores.netcdf, cell_stores.octahedral(16), None),
    "HEALPix zarr": (cell_stores.zarr, cell_stores.healpix(8), None),
    "O16 on 17x16": (cell_stores.anemoi, cell_stores.octahedral(16), (17, 16)),
    "regular on 12x24": (columns, REGULAR, (12, 24)),
}
PARAMETERS = [
    pytest.param(case, marks=() if case in ("O16 anemoi", "O16 on 17x16") else pytest.mark.slow)
    for case in CASES
]
ON_CELLS = [x for x in PARAMETERS if x.values[0] != "regular on 12x24"]
ON_GRID = [x for x in PARAMETERS if CASES[x.values[0]][2] is not None]


@dataclass(frozen=True)
class Run(CommandRuns):
    """A folder with the store, runs on one and two ranks, and a forecast."""

    cells: Cells
    grid: tuple[int, int] | None

    @property
    def on_grid(self) -> str:
        return self.keys[-1]

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

    def rows(self, name: str) -> np.ndarray:
        """Return a variable at all times on rows, by numpy's interpolation, or on the grid."""
        fields = cell_stores.waves(self.cells)[name].values
        if self.grid is not None:
            on_grid = cell_stores.means_over_areas(self.cells, fields.astype(float), self.grid)
            return on_grid.astype("f4").astype(float)
        return np.stack([self.cells.on_rows(field) for field in fields]).astype("f4").astype(float)

    def areas(self) -> np.ndarray:
        """Return the part of the sphere that each row covers."""
        edges = self.cells.edges if self.grid is None else cell_stores.bounds(self.latitude)
        return -np.diff(edges) / 2


@pytest.fixture(scope="module", params=PARAMETERS)
def trained(request, tmp_path_factory) -> Run:
    write, cells, grid = CASES[request.param]
    folder = tmp_path_factory.mktemp("cells")
    on_grid = f"data.grid={grid[0]}x{grid[1]}" if grid else "data.regrid=rows"
    made = Run(folder, write(folder, cells), (*KEYS, on_grid), cells, grid)
    made.train_on_one_and_two_ranks()
    words = ("checkpoint=run2", "init=2000-01-08/2000-01-09/12h", "lead=24h", "parallel.domain=2")
    made.command("credit-dp", "forecast", *words, "out=forecast.zarr")
    return made


def test_inspection_and_check_have_the_grid_of_rows(trained):
    height, width = trained.shape
    words = (f"store={trained.store}", trained.on_grid)
    text = trained.command("credit-dp", "data", "inspect", *words)
    poles = "with" if trained.latitude[0] == 90 else "without"
    assert f"grid    {height} x {width} {poles} rows on the poles" in text
    text = trained.command(*trained.training, "--check")
    assert f"{height}" in text
    assert f"{width}" in text


def test_two_ranks_have_the_log_of_one(trained):
    trained.check_log_on(ranks=2)


@pytest.mark.slow
def test_three_ranks_have_the_log_of_one(trained):
    trained.check_log_on(ranks=3)


def test_statistics_are_those_of_the_rows(trained):
    [state] = sorted(trained.folder.glob("run1/**/state.json"))[-1:]
    found = json.loads(state.read_text())["data"]["statistics"]
    for index, name in enumerate(NAMES):
        fields = trained.rows(name)[:28]  # seven days of training
        mean = np.average(fields.mean(axis=(0, 2)), weights=trained.areas())
        square = np.average(((fields - mean) ** 2).mean(axis=(0, 2)), weights=trained.areas())
        assert found["mean"][index] == pytest.approx(mean, rel=1e-6)
        assert found["std"][index] == pytest.approx(np.sqrt(square), rel=1e-5)


def test_a_run_resumes_on_another_mesh(trained):
    trained.check_resuming()


def test_scores_are_those_of_numpy(trained):
    # Of the grid of the forecast, or as it is.
    keys = ("out=scores",) if trained.grid else (f"truth={trained.store}", "out=scores")
    trained.command("credit-dp", "evaluate", "forecast=forecast.zarr", *keys)
    scores = json.loads((trained.folder / "scores/scores.json").read_text())["scores"]
    if trained.grid:
        words = (f"truth={trained.store}", f"grid={trained.grid[0]}x{trained.grid[1]}", "out=named")
        trained.command("credit-dp", "evaluate", "forecast=forecast.zarr", *words)
        assert json.loads((trained.folder / "named/scores.json").read_text())["scores"] == scores
    forecast = xr.open_zarr(trained.folder / "forecast.zarr", decode_timedelta=True)
    np.testing.assert_allclose(forecast["latitude"], trained.latitude, rtol=1e-15)
    assert forecast.sizes["longitude"] == trained.shape[1]
    day = np.timedelta64(24, "h")
    valid = np.searchsorted(stores.times(cell_stores.STEPS), forecast["time"].values + day)
    for name in NAMES:
        fields = forecast[name].sel(prediction_timedelta=day)
        fields = fields.transpose("time", "latitude", "longitude").values.astype(float)
        square = ((fields - trained.rows(name)[valid]) ** 2).mean(axis=(0, 2))
        rmse = np.sqrt(np.average(square, weights=trained.areas()))
        assert scores[name]["rmse"]["24h"]["forecast"] == pytest.approx(rmse, rel=1e-5)


@pytest.mark.parametrize("trained", ON_CELLS, indirect=True)
def test_forecasts_go_back_to_the_cells(trained):
    """By numpy: first along the rows around a cell, then between them."""
    words = ("checkpoint=run2", "init=2000-01-08/2000-01-09/12h", "lead=24h", "grid=source")
    for ranks in (1, 3):
        keys = (*words, f"parallel.domain={ranks}", f"out=cells{ranks}.zarr")
        trained.command("credit-dp", "forecast", *keys)
    on_grid, one, three = (
        xr.open_zarr(trained.folder / f"{name}.zarr", decode_timedelta=True)
        for name in ("forecast", "cells1", "cells3")
    )
    latitudes, longitudes = trained.cells.latitudes, trained.cells.longitudes
    for found in (one, three):
        np.testing.assert_allclose(found["latitude"], latitudes, atol=1e-5)
        np.testing.assert_allclose(found["longitude"], longitudes, atol=1e-5)
    height, width = trained.shape
    south = np.clip(np.searchsorted(-trained.latitude, -latitudes), 1, height - 1)
    pair = trained.latitude[[south - 1, south]]
    share = np.clip((pair[0] - latitudes) / (pair[0] - pair[1]), 0, 1)
    columns = np.arange(width) * 360 / width
    for name in NAMES:
        assert one[name].dims == ("time", "prediction_timedelta", "cell")
        np.testing.assert_allclose(three[name], one[name], rtol=1e-6)
        for time, lead in ((0, 0), (2, 3)):
            rows = on_grid[name].isel(time=time, prediction_timedelta=lead).values.astype(float)
            along = np.array([np.interp(longitudes, columns, row, period=360) for row in rows])
            at = np.arange(len(latitudes))
            wanted = (1 - share) * along[south - 1, at] + share * along[south, at]
            found = one[name].isel(time=time, prediction_timedelta=lead)
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert "complete" in trained.command("credit-dp", "forecast", "check", "cells3.zarr")


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["HEALPix zarr"], indirect=True)
def test_healpix_is_not_written_as_grib(trained):
    words = ("checkpoint=run2", "init=2000-01-09", "lead=12h", "grid=source", "format=grib")
    line = trained.refusal("credit-dp", "forecast", *words, "out=cells.grib")
    assert "format: GRIB is written on reduced Gaussian grids from longitude 0" in line


@pytest.mark.parametrize("trained", ["O16 anemoi"], indirect=True)
def test_forecasts_on_cells_are_grib_of_their_grid(trained):
    words = ("checkpoint=run2", "init=2000-01-09", "lead=12h", "grid=source")
    trained.command("credit-dp", "forecast", *words, "format=grib", "out=cells.grib")
    trained.command("credit-dp", "forecast", *words, "out=same.zarr")
    assert "complete" in trained.command("credit-dp", "forecast", "check", "cells.grib")
    same = xr.open_zarr(trained.folder / "same.zarr", decode_timedelta=True)
    for short, name in (("t2m", "2m_temperature"), ("msl", "mean_sea_level_pressure")):
        keys = {"filter_by_keys": {"cfVarName": short}, "indexpath": ""}
        found = xr.open_dataset(trained.folder / "cells.grib", engine="cfgrib", backend_kwargs=keys)
        assert found[short].attrs["GRIB_gridType"] == "reduced_gg"
        np.testing.assert_allclose(found["latitude"], trained.cells.latitudes, atol=1e-3)
        np.testing.assert_allclose(found["longitude"], trained.cells.longitudes, atol=1e-3)
        fields = same[name].isel(time=0).values
        np.testing.assert_allclose(found[short], fields, atol=np.ptp(fields) / 2**15)


def test_a_forecast_starts_from_a_file_of_cells(trained):
    state = cell_stores.waves(trained.cells).sel(time=slice("2000-01-09T00", "2000-01-09T00"))
    state.to_netcdf(trained.folder / "state.nc")
    words = ("checkpoint=run2", "init_file=state.nc", "lead=24h", "out=from_file.zarr")
    trained.command("credit-dp", "forecast", *words)
    of_store, of_file = (
        xr.open_zarr(trained.folder / name, decode_timedelta=True)
        for name in ("forecast.zarr", "from_file.zarr")
    )
    for name in NAMES:
        np.testing.assert_allclose(of_file[name], of_store[name].isel(time=[-1]), rtol=1e-6)


def test_other_cells_are_one_line(trained, tmp_path):
    store = cell_stores.anemoi(tmp_path, cell_stores.octahedral(17))
    line = trained.refusal(*trained.training, f"data.store={store}", "run.dir=other", "resume=run1")
    if trained.grid is None:
        shape = "x".join(map(str, trained.shape))
        assert f"resume: the checkpoint was trained with data.grid={shape}" in line
    else:
        assert "resume: the checkpoint was trained with another mean of the fields" in line


@pytest.mark.parametrize("trained", ON_GRID, indirect=True)
def test_another_grid_or_way_is_one_line(trained):
    height, width = trained.grid
    cases = {
        f"data.grid={height + 1}x{width}": f"was trained with data.grid={height}x{width}",
        "data.regrid=bilinear": "was trained with another mean of the fields",
        "data.grid=null": f"was trained with data.grid={height}x{width}",
    }
    for key, expected in cases.items():
        line = trained.refusal(*trained.training, key, "run.dir=other", "resume=run1")
        assert expected in line


@pytest.mark.parametrize("trained", ON_GRID, indirect=True)
def test_a_prepared_copy_trains_as_the_store_does(trained):
    grid = trained.on_grid.removeprefix("data.")
    names = f"data.prognostic=[{','.join(NAMES)}]"
    keys = (grid, "out=copy.zarr", names, "data.static=[]", "data.levels=null")
    trained.command("credit-dp", "data", "prepare", f"store={trained.store}", *keys)
    train, _, *others = trained.training[1:]
    keys = ("data=prepared", "data.store=copy.zarr", "data.grid=null", "run.dir=copied")
    trained.command("python", train, *others[1:], *keys, "trainer.steps=4")
    assert trained.log("copied") == trained.log("run1")
