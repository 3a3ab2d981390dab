import hashlib
import runpy
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import QuickstartConfig
from credit_dp.data.quickstart import build, dataset, store_name
from credit_dp.data.quickstart.dataset import GAP_DAYS, plan_runs, shard_steps
from credit_dp.data.quickstart.dynamics import (
    DRY_AIR,
    RADIUS,
    STREAM,
    GaussianGrid,
    Physics,
    QuasiGeostrophic,
    along_longitude,
    degrees_squared,
    fourier,
    initial_state,
    integrate_six_hourly,
    land_fraction,
    legendre,
    terrain,
    to_grid,
)
from credit_dp.data.quickstart.physical_fields import (
    LEVELS,
    Synthesis,
    balanced_geopotential,
    hydrostatic_temperature,
    parabola,
)
from credit_dp.errors import UserError
from tests.tables import each

TINY = QuickstartConfig(truncation=10, runs=2, run_days=3, spinup_days=2)


def noise(truncation: int, fields: int, seed: int = 0) -> np.ndarray:
    size = truncation + 1
    values = np.random.default_rng(seed).standard_normal((fields, size, 2, size))
    values *= np.tri(size).T[:, None, :]
    values[:, 0, 1] = 0
    values[..., 0] = 0
    return values


def content(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quickstart") / store_name(TINY, None)
    build(TINY, None, path)
    return path


@each("truncation", [5, 10, 21, 42])
def test_transforms_undo_each_other(truncation):
    grid = GaussianGrid.of(truncation, np.float64)
    coefficients = noise(truncation, 2)
    there = to_grid(grid.inverse, grid.waves, coefficients)
    np.testing.assert_allclose(grid.project(there), coefficients, atol=1e-12)


@pytest.mark.slow
def test_inversion_undoes_the_definition_of_potential_vorticity():
    model = QuasiGeostrophic(10, dtype=np.float64)
    psi = noise(10, 3)
    first, second = ((RADIUS / r) ** 2 for r in model.physics.deformation)
    q = -degrees_squared(11) * psi
    q[0] -= first * (psi[0] - psi[1])
    q[1] += first * (psi[0] - psi[1]) - second * (psi[1] - psi[2])
    q[2] += second * (psi[1] - psi[2])
    np.testing.assert_allclose(model.streamfunction(q), psi, atol=1e-11)


@each("truncation", [10, 21])
def test_advection_conserves_energy_and_potential_enstrophy(truncation):
    model = QuasiGeostrophic(truncation, dtype=np.float64)
    state = noise(truncation, 3)
    tendency = model.advection(state)
    share = np.where(np.arange(truncation + 1) > 0, 0.5, 1.0)[
        :, None, None
    ]  # mean square of a wave

    def inner(a: np.ndarray, b: np.ndarray) -> float:
        return float((a * b * share).sum())

    for total in (model.streamfunction(state), state + model.resting):
        assert abs(inner(total, tendency)) < 1e-11 * np.sqrt(
            inner(total, total) * inner(tendency, tendency)
        )


def test_a_lone_rossby_haurwitz_wave_drifts_at_the_exact_speed():
    """Without other layers, terrain and wind, only the planet's rotation moves the wave."""
    physics = Physics(deformation=(1e12, 1e12), depth=1e12)
    model = QuasiGeostrophic(12, physics, np.float64)
    psi = np.zeros((3, 13, 2, 13))
    psi[:, 4, 0, 6] = 0.1
    tendency = model.advection(-degrees_squared(13) * psi)
    np.testing.assert_allclose(tendency, -2 * along_longitude(psi), atol=1e-9)


@pytest.mark.slow
def test_sources_vanish_at_the_climate_relaxed_to():
    """With thicknesses at equilibrium and no wind at the ground, there is no forcing."""
    model = QuasiGeostrophic(10, dtype=np.float64)
    goal = model._equilibrium(1.0)
    goal = goal - goal[2:]  # the same thicknesses without wind at 800 hPa
    stretched = np.einsum("kj,jmrn->kmrn", model._stretching(), goal)
    state = -degrees_squared(11) * goal + stretched
    assert np.abs(model.sources(state, 1.0)).max() < 1e-10 * np.abs(state).max()
    assert np.abs(model.sources(state, -1.0)).max() > 1e-6 * np.abs(state).max()


@pytest.mark.slow
def test_a_month_stays_bounded_and_grows_waves():
    model = QuasiGeostrophic(15)
    states = integrate_six_hourly(model, initial_state(model, np.random.default_rng(0)), 0.0)
    days = list(islice(states, 0, 30 * 4 + 1, 40))
    eddies = [float(np.square(state[:, 1:]).sum()) for state in days]
    assert np.isfinite(eddies).all()
    assert max(eddies) < 100 * eddies[0]
    assert eddies[-1] > 0


def test_winds_are_the_rotational_winds_of_the_streamfunction():
    """Central differences of psi on a fine grid, away from the poles."""
    psi = noise(8, 3) * 1e-3
    made = Synthesis(8, (361, 720))
    fields = made.fields(psi[None])
    waves = fourier(8, np.radians(made.longitude))
    stream = to_grid(legendre(8, 9, np.sin(np.radians(made.latitude))), waves, psi)
    stream = stream.transpose(1, 2, 0) * STREAM
    step = np.radians(0.5)
    east = (stream[:, 2:] - stream[:, :-2]) / (2 * step * RADIUS)  # rows run southward
    north = (np.roll(stream, -1, 2) - np.roll(stream, 1, 2)) / (2 * step * RADIUS)
    north = north / np.cos(np.radians(made.latitude))[:, None]
    for name, exact in (("u", east), ("v", north[:, 1:-1])):
        found = fields[f"{name}_component_of_wind"][0, :, 1:-1]
        inner = slice(20, -20)
        error = np.abs(found[:, inner] - exact[:, inner]).max()
        assert error < 2e-3 * np.abs(found).max()


@pytest.mark.slow
def test_balance_is_the_divergence_of_f_grad_psi():
    psi = noise(9, 1)
    geopotential = balanced_geopotential(psi)
    grid = GaussianGrid.of(14, np.float64)
    padded = np.zeros((1, 15, 2, 15))
    padded[:, :10, :, :10] = psi
    f = 2 * grid.mu
    east = to_grid(grid.inverse, grid.waves, along_longitude(padded)) * f
    north = to_grid(grid.inverse_slope, grid.waves, padded) * f
    divergence = along_longitude(grid.transform(east)) - grid.transform(north, slope=True)
    laplacian = -degrees_squared(11) * geopotential
    np.testing.assert_allclose(divergence[:, :10, :, :11], laplacian, atol=1e-10)


def test_temperature_is_hydrostatic():
    """A parabola in ln p is its own interpolant: its slope is -R T."""
    x = np.log(np.array(LEVELS))
    geopotential = (5e4 - 7e4 * (x - 6) + 2e3 * (x - 6) ** 2)[None, :, None, None]
    for pressure in (320.0, 500.0, 1000.0):
        slope = -7e4 + 4e3 * (np.log(pressure) - 6)
        found = hydrostatic_temperature(geopotential.astype(np.float32), (pressure,))
        np.testing.assert_allclose(found, -slope / DRY_AIR, rtol=1e-5)
    np.testing.assert_allclose(parabola(500.0)[0], [0, 1, 0], atol=1e-12)


@pytest.mark.slow
def test_temperature_above_the_upper_layer_has_its_mean_anomaly():
    thicker = np.zeros((1, 3, 1, 1), np.float32)
    thicker[:, 0] = 1000
    warmer = hydrostatic_temperature(thicker, (200.0,)) - hydrostatic_temperature(
        0 * thicker, (200.0,)
    )
    np.testing.assert_allclose(warmer, 1000 / (DRY_AIR * np.log(500 / 200)), rtol=1e-5)


@given(rows=st.integers(4, 64), columns=st.integers(4, 64))
def test_any_grid_gives_finite_fields(rows, columns):
    fields = Synthesis(10, (rows, columns)).fields(noise(10, 3)[None] * 1e-3)
    for name, values in fields.items():
        assert values.dtype == np.float32
        assert values.shape[-2:] == (rows, columns)
        assert np.isfinite(values).all(), name


def test_a_pole_row_is_a_point():
    fields = Synthesis(10, (33, 64)).fields(noise(10, 3)[None] * 1e-3)
    for row in (0, -1):
        pole = fields["geopotential"][0, :, row]
        assert np.ptp(pole, axis=-1).max() < 1e-4 * np.abs(pole).max()
        # A vector at the pole turns once around it: a single wave in longitude.
        spectrum = np.abs(np.fft.rfft(fields["u_component_of_wind"][0, 0, row]))
        assert spectrum[1] > 1e3 * np.delete(spectrum, 1).max()


@pytest.mark.slow
def test_fields_agree_where_grids_share_points():
    psi = noise(10, 3)[None] * 1e-3
    coarse, fine = Synthesis(10, (33, 32)).fields(psi), Synthesis(10, (65, 64)).fields(psi)
    for name, values in coarse.items():
        shared = fine[name][..., ::2, ::2]
        np.testing.assert_allclose(shared, values, atol=2e-5 * np.abs(values).max(), err_msg=name)


@pytest.mark.slow
def test_the_planet_is_not_zonally_symmetric():
    longitude, latitude = np.arange(0.0, 360.0, 5), np.arange(-87.5, 90.0, 5)
    land, height = land_fraction(longitude, latitude), terrain(longitude, latitude)
    assert land.min() >= 0
    assert land.max() <= 1
    assert 0.2 < np.average(land.mean(axis=0), weights=np.cos(np.radians(latitude))) < 0.4
    assert np.ptp(height, axis=0).max() > 2000


@pytest.mark.slow
def test_store_is_like_weatherbench(tiny):
    with xr.open_zarr(tiny, chunks=None) as store:
        assert dict(store.sizes) == {"time": 24, "level": 3, "latitude": 16, "longitude": 32}
        assert store["geopotential"].dims == ("time", "level", "latitude", "longitude")
        assert store["2m_temperature"].dims == ("time", "latitude", "longitude")
        assert store["land_sea_mask"].dims == ("latitude", "longitude")
        assert store["latitude"][0] > store["latitude"][-1]
        assert list(store["level"].to_numpy()) == [200, 500, 800]
        for name, variable in store.data_vars.items():
            assert variable.dtype == np.float32, name
            assert "units" in variable.attrs, name
            assert np.isfinite(variable).all(), name
        assert 45_000 < store["geopotential"].sel(level=500).mean() < 60_000
        assert store["temperature"].min() > 150
        assert 9e4 < store["mean_sea_level_pressure"].mean() < 11e4
        times = store["time"].to_numpy()
    steps = np.unique(np.diff(times))
    gap = np.timedelta64(GAP_DAYS * 24 + 6, "h").astype("timedelta64[ns]")
    assert set(steps) == {np.timedelta64(6, "h").astype("timedelta64[ns]"), gap}


@pytest.mark.slow
def test_bands_of_two_and_four_ranks_end_on_chunk_edges_in_all_but_small_fields(tiny, tmp_path):
    group = zarr.open_group(tiny, mode="r")
    assert group["geopotential"].chunks == (1, 3, 16, 32)
    assert group.metadata.consolidated_metadata is not None
    for grid, rows in {(64, 128): 16, (32, 64): 32}.items():
        path = tmp_path / f"{grid}.zarr"
        dataset.create(path, Synthesis(10, grid), plan_runs(TINY), "")
        array = zarr.open_group(path, mode="r")["geopotential"]
        assert array.chunks == (1, 3, rows, grid[1])


@pytest.mark.slow
def test_same_bytes_whatever_the_number_of_cores(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "usable_cores", lambda: 1)
    build(TINY, None, tmp_path / "again.zarr")
    assert content(tmp_path / "again.zarr") == content(tiny)
    assert [p.name for p in tmp_path.iterdir()] == ["again.zarr"]


def test_name_tells_everything_apart():
    others = [
        store_name(QuickstartConfig(truncation=11, runs=2, run_days=3, spinup_days=2), None),
        store_name(
            QuickstartConfig(truncation=10, seed=1, runs=2, run_days=3, spinup_days=2), None
        ),
        store_name(TINY, (16, 34)),
    ]
    assert len({*others, store_name(TINY, None)}) == 4
    assert store_name(TINY, (16, 32)) == store_name(TINY, None)
    assert "=" not in store_name(TINY, None)


def test_runs_never_share_a_shard():
    for days in (1, 7, 11, 190):
        config = QuickstartConfig(run_days=days)
        for grid in ((32, 64), (721, 1440)):
            together = shard_steps(4 * days, grid)
            assert all(run.first % together == 0 for run in plan_runs(config))


@pytest.mark.slow
def test_progress_reaches_the_end(tmp_path):
    seen: list[float] = []
    build(TINY, (5, 8), tmp_path / "a.zarr", lambda _message, share: seen.append(share))
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == 1


@each(
    "config, grid, key",
    [
        (QuickstartConfig(start="soon"), None, "data.quickstart.start"),
        (QuickstartConfig(start="2001-01-01T06"), None, "data.quickstart.start"),
        (QuickstartConfig(), (2, 4), "data.grid"),
    ],
)
def test_nonsense_is_one_line_with_its_key(config, grid, key, tmp_path):
    with pytest.raises(UserError) as caught:
        build(config, grid, tmp_path / "a.zarr")
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_failing_run_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "WORKER", "credit_dp.no_such_module")
    with pytest.raises(UserError, match=r"run \d failed.*data\.cache") as caught:
        build(TINY, None, tmp_path / "a.zarr")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_worker_may_print_more_errors_than_a_pipe_holds(tmp_path, monkeypatch):
    (tmp_path / "loud_worker.py").write_text(
        "import sys\n"
        "sys.stdin.readline()\n"
        "sys.stderr.write('warning\\n' * 100_000)\n"
        "sys.exit('no more')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dataset, "WORKER", "loud_worker")
    with pytest.raises(UserError, match="no more"):
        build(TINY, None, tmp_path / "a.zarr")


@pytest.mark.slow
def test_a_worker_ends_with_its_parent():
    worker = subprocess.Popen(
        [sys.executable, "-m", dataset.WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert worker.stdin is not None
    worker.stdin.write(
        b'{"config": {"spinup_days": 90000}, "grid": [32, 64], "path": "/nowhere", "run": 0}\n'
    )
    worker.stdin.flush()
    time.sleep(1)
    assert worker.poll() is None
    worker.stdin.close()
    assert worker.wait(timeout=30) == 1


def test_default_grid_resolves_products_of_fields():
    assert QuickstartConfig(truncation=21).grid_or_default(None) == (32, 64)
    assert QuickstartConfig(truncation=42).grid_or_default(None) == (64, 128)


SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/quickstart_realism.py"))
measure_realism = SCRIPT["measure_realism"]
TRAINING = ("2001-01-01", "2003-03-01")
HELD_OUT = ("2003-03-12", "2004-04-04")


@pytest.fixture(scope="module")
def default_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("default") / "store.zarr"
    build(QuickstartConfig(), None, path)
    return path


@pytest.mark.exhaustive
def test_persistence_forgets_as_fast_as_the_real_atmosphere(default_store):
    found = measure_realism(default_store, TRAINING, HELD_OUT)
    for days, era5 in ((3, 936.0), (5, 1033.0)):
        assert found.persistence[days] / found.climatology == pytest.approx(era5 / 816, rel=0.3)


@pytest.mark.exhaustive
def test_errors_are_stationary(default_store):
    """Two disjoint years about one climatology: neither persistence nor the spread drifts."""
    whole = (TRAINING[0], HELD_OUT[1])
    early = measure_realism(default_store, whole, ("2001-01-01", "2002-02-04"))
    late = measure_realism(default_store, whole, HELD_OUT)
    assert late.climatology == pytest.approx(early.climatology, rel=0.2)
    for days in (1, 3, 5):
        assert late.persistence[days] == pytest.approx(early.persistence[days], rel=0.2)
