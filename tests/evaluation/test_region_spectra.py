"""Power spectra of regions against the definition of Denis et al. 2002."""

import csv
from fractions import Fraction
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from credit_dp.data.grid import Grid
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager, gather_tensor
from credit_dp.evaluation.metrics import (
    RegionSpectra,
    cosine_transform,
    region_wavelength,
)
from credit_dp.evaluation.score_folder import scorecard_page
from credit_dp.evaluation.score_plots import draw_spectrum
from credit_dp.sphere import EARTH_RADIUS
from tests.data import region_grids
from tests.evaluation import forecasts
from tests.ranks import on_threads

Array = NDArray[np.float64]
ALONE = DomainParallelManager(1, 1)
STEP = 1.2e5  # m, on the map
LATITUDE, LONGITUDE = 60 - 1.5 * np.arange(9), 350 + 2.0 * np.arange(12)
BOX = Grid(LATITUDE, LONGITUDE)


def lambert(rows: int = 12, columns: int = 17) -> Grid:
    y, x = (STEP * (np.arange(n) - n / 2) for n in (rows, columns))
    return Grid(*region_grids.Lambert().coordinates(y[::-1], x))


def cosines(size: int) -> Array:
    """Orthonormal cosines by their definition: `(waves, points)`."""
    waves, points = np.ogrid[:size, :size]
    factors = np.where(waves == 0, 1.0, 2.0)
    return np.asarray(np.sqrt(factors / size) * np.cos(np.pi * waves * (points + 0.5) / size))


def spectrum(field: Array, sides: tuple[Fraction, Fraction]) -> Array:
    """Add up the variance of each coefficient by the square of its wavenumber, exactly."""
    rows, columns = field.shape
    variance = (cosines(rows) @ field @ cosines(columns).T) ** 2 / field.size
    power = np.zeros(2 * max(field.shape))
    for m, n in np.ndindex(field.shape):
        square = (m * min(sides) / sides[0]) ** 2 + (n * min(sides) / sides[1]) ** 2
        power[max(isqrt(int(square)), 1 if m or n else 0)] += variance[m, n]
    return np.asarray(np.trim_zeros(power, "b"))


def sides_of(grid: Grid, boundary: int = 0) -> tuple[Fraction, Fraction]:
    """The sides of the interior: in steps on a projection, in metres of a box."""
    rows, columns = (size - 2 * boundary for size in grid)
    if grid.is_projected:
        return Fraction(rows), Fraction(columns)
    north_south = np.radians(abs(grid.latitude[1] - grid.latitude[0]))
    half = np.radians(grid.longitude[1] - grid.longitude[0]) / 2
    east_west = (2 * np.arcsin(np.cos(np.radians(grid.latitude)) * np.sin(half))).mean()
    steps = (EARTH_RADIUS * step for step in (north_south, east_west))
    return tuple(n * Fraction(step) for n, step in zip((rows, columns), steps, strict=True))


def fields(grid: Grid, *sizes: int) -> Array:
    """Fields with a mean and a slope: `(*sizes, H, W)`."""
    slope = np.linspace(0, 30, grid[0])[:, None]
    return 280 + slope + np.random.default_rng(3).normal(size=(*sizes, *grid))


def test_power_is_the_variance_of_cosines() -> None:
    for name, grid, boundary in (
        ("wide", lambert(), 2),
        ("high", lambert(17, 12), 0),
        ("square", lambert(11, 11), 2),
        ("strip", lambert(40, 9), 0),
        ("box", BOX, 0),
        ("interior of a box", BOX, 2),
    ):
        samples = fields(grid, 3, 2)
        found = RegionSpectra((2, 2), grid, boundary)
        for sample in samples:
            found.add((1,), torch.from_numpy(sample[None]))
        power = found.result(ALONE)[1, :, 0].numpy()
        inside = samples[..., boundary : grid[0] - boundary, boundary : grid[1] - boundary]
        for channel in (0, 1):
            of_times = [spectrum(field, sides_of(grid, boundary)) for field in inside[:, channel]]
            assert power[channel] == pytest.approx(np.mean(of_times, axis=0), rel=1e-9), name
        variance = inside.var(axis=(2, 3)).mean(axis=0)
        assert power[:, 1:].sum(axis=1) == pytest.approx(variance, rel=1e-9), name
        mean = (inside.mean(axis=(2, 3)) ** 2).mean(axis=0)
        assert power[:, 0] == pytest.approx(mean, rel=1e-12), name


def test_the_transform_is_that_of_cosines() -> None:
    for size in (1, 2, 3, 8, 13):
        x = np.random.default_rng(size).normal(size=(4, size))
        found = cosine_transform(torch.from_numpy(x)).numpy()
        wanted = x @ cosines(size).T / np.sqrt(size)
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-14), size


def test_wavelengths_are_on_the_sphere() -> None:
    """Of wavenumber 1: twice the shorter side, whose steps the projection stretches."""
    scale = region_grids.Lambert().scale(lambert().latitude)
    step = STEP * EARTH_RADIUS / region_grids.RADIUS * (1 / scale).mean()
    assert region_wavelength(lambert(), 0) == pytest.approx(2 * 12 * step, rel=1e-3)
    assert region_wavelength(lambert(), 3) == pytest.approx(2 * 6 * step, rel=1e-3)
    assert region_wavelength(BOX, 0) == pytest.approx(float(2 * min(sides_of(BOX))), rel=1e-12)
    assert region_wavelength(Grid(LATITUDE, np.arange(8) * 45.0), 0) is None


def test_a_wave_has_its_power_at_its_length() -> None:
    """Four wavelengths of 600 km along 20 columns of 120 km."""
    grid = lambert(20, 20)
    wave = np.cos(2 * np.pi * (np.arange(20) + 0.5) / 5) * np.ones((20, 1))
    for field in (wave, wave.T):
        found = RegionSpectra((1,), grid)
        found.add((), torch.from_numpy(field.copy())[None, None])
        power = found.result(ALONE)[0, 0].numpy()
        assert int(power.argmax()) == 8
        assert power[8] == pytest.approx(0.5, rel=1e-12)
        assert np.delete(power, 8).max() < 1e-25
    length = region_wavelength(grid, 0)
    assert length is not None
    assert length / 8 == pytest.approx(600e3, rel=0.02)


def test_steps_of_a_projection_may_differ() -> None:
    """Waves of ten steps, whose length is that of the direction that they go in."""
    wave = np.cos(2 * np.pi * (np.arange(40) + 0.5) / 10) * np.ones((40, 1))
    for ratio in (3, 1 / 3):
        y, x = STEP / 10 * (np.arange(40) - 20), ratio * STEP / 10 * (np.arange(40) - 20)
        grid = Grid(*region_grids.Lambert().coordinates(y[::-1], x))
        longest = region_wavelength(grid, 0)
        assert longest is not None
        for field, wanted in ((wave, ratio * STEP), (wave.T, STEP)):
            found = RegionSpectra((1,), grid)
            found.add((), torch.from_numpy(field.copy())[None, None])
            wavenumber = int(found.result(ALONE)[0, 0].argmax())
            assert longest / (wavenumber + 1) < wanted < 1.02 * longest / wavenumber, ratio


def test_fields_with_missing_values_are_left_out() -> None:
    grid = lambert()
    samples = fields(grid, 3, 3)
    holes = samples.copy()
    holes[1, 0, 5, 6] = np.nan  # a sample of the first channel
    holes[:, 1, 0, :] = np.nan  # the rim of the second, which is outside the interior
    holes[:, 2, 4, 4] = np.nan  # all samples of the third
    found = RegionSpectra((3,), grid, 1)
    found.add((), torch.from_numpy(holes))
    power = found.result(ALONE)[:, 0].numpy()
    wanted = [
        np.mean([spectrum(field[1:-1, 1:-1], sides_of(grid, 1)) for field in chosen], axis=0)
        for chosen in (samples[[0, 2], 0], samples[:, 1])
    ]
    assert power[:2] == pytest.approx(np.stack(wanted), rel=1e-9)
    assert np.isnan(power[2]).all()
    # A forecast that has values where the truth has none has no spectrum, either.
    masked = RegionSpectra((3,), grid, 1, ValidPoints(torch.from_numpy(~np.isnan(holes[0]))))
    masked.add((), torch.from_numpy(samples))
    power = masked.result(ALONE)[:, 0].numpy()
    assert np.isnan(power).all(axis=1).tolist() == [False, False, True]


def of_bands(manager: DomainParallelManager, rows: tuple[int, ...]) -> torch.Tensor:
    """Gather bands of these heights and add them."""
    stop = sum(rows[: manager.domain_rank + 1])
    band = slice(stop - rows[manager.domain_rank], stop)
    local = torch.from_numpy(fields(lambert(), 3, 2)[..., band, :].copy())
    found = RegionSpectra((2,), lambert(), 2)
    found.add((), gather_tensor(local, manager=manager))
    return found.result(manager)


def test_bands_have_the_spectra_of_the_region() -> None:
    wanted = of_bands(ALONE, (12,)).numpy()
    for rows in ((1, 10, 1), (6, 1, 5)):
        for found in on_threads(3, of_bands, rows):
            assert found.numpy() == pytest.approx(wanted, rel=1e-14), rows


@pytest.mark.slow
@pytest.mark.parametrize("boundary", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_scorecards_of_a_region_have_spectra(tmp_path: Path, boundary: int) -> None:
    observed = forecasts.truth(rows=9, columns=12)
    observed = observed.assign_coords(latitude=LATITUDE, longitude=LONGITUDE % 360)
    made = forecasts.forecast(observed, members=2)
    forecasts.write(observed, tmp_path / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), tmp_path / "climatology.zarr")
    path = forecasts.write(made, tmp_path / "forecast.zarr")
    card = forecasts.scored(tmp_path, path, variables=("2m_temperature",), boundary=boundary)
    name, lead = "2m_temperature", 24 * np.timedelta64(1, "h")
    day = made[name].sel(prediction_timedelta=lead)
    now = observed[name].sel(time=day["time"] + lead)
    inside = slice(boundary, 9 - boundary), slice(boundary, 12 - boundary)
    rows = [row for row in csv.DictReader(card.spectra_csv().splitlines())]
    assert {row["band"] for row in rows} == {"region"}
    rows = [row for row in rows if row["lead_hours"] == "24"]
    for source, of_source in (("forecast", day), ("truth", now)):
        whole = of_source.values.astype(float).reshape(-1, 9, 12)
        wanted = [spectrum(field[inside], sides_of(BOX, boundary)) for field in whole]
        found = [float(row[source]) for row in rows]
        assert found == pytest.approx(np.mean(wanted, axis=0), rel=1e-9)
    assert [row["wavenumber"] for row in rows] == [str(k) for k in range(len(rows))]
    longest = float(2 * min(sides_of(BOX, boundary))) / 1000
    assert rows[0]["wavelength_km"] == ""
    assert float(rows[3]["wavelength_km"]) == pytest.approx(longest / 3, rel=1e-12)
    page = scorecard_page(card)
    assert '<h2 id="spectra">Power spectra at 24 h</h2>' in page
    assert '<h3>region</h3>\n<div class="wide"><img src="data:image/svg' in page


def test_a_region_is_drawn_by_wavelength() -> None:
    axes = Figure().subplots()
    powers = {source: np.array([9.0, 4.0, 2.0, 1.0]) for source in ("forecast", "truth")}
    draw_spectrum(axes, powers, "x", "K", 1.2e6)
    assert axes.lines[0].get_xdata() == pytest.approx([1200, 600, 400])
    assert axes.get_xlabel() == "wavelength (km)"
    assert axes.get_ylabel() == "power (K²)"
    assert axes.xaxis_inverted()
