"""Diagnostics of forecasts equal their definitions, column by column, on any band of rows."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray

from credit_dp.config.model import CORRECTIONS
from credit_dp.data.channels import Channel
from credit_dp.errors import UserError
from credit_dp.forecast.check import check_forecast
from credit_dp.forecast.request import DIAGNOSTICS, ForecastRequest
from credit_dp.physics.columns import (
    HybridLayers,
    Layers,
    NamedChannels,
    PressureLayers,
    build_layers,
)
from credit_dp.physics.diagnostics import (
    NEEDS,
    Surface,
    WrittenFields,
    check_written,
    geopotential_below,
    hydrostatic_geopotential,
    interpolate_to_pressure,
    level_pressures,
    sea_level_pressure,
    surface_of,
    temperature_below,
)
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.physics import atmospheres as air

R, G, LAPSE = 287.0597, 9.80665, 0.0065
Array = NDArray[np.float64]


def pressures(rows: int = 3) -> torch.Tensor:
    """Return surface pressures from high mountains to the sea, `(2, 1, rows, 4)`."""
    return 5e4 + 5.5e4 * numbers(2, 1, rows, 4, seed=2)


def numbers(*shape: int, seed: int = 5) -> torch.Tensor:
    """Return numbers from 0 to 1."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(shape, dtype=torch.float64, generator=draw)


def layers_of(kind: str) -> Layers:
    return build_layers(air.levels(kind), air.HYBRID if kind == "model" else {})


def geopotential_of_column(kind: str, surface: float, warmth: Array, ground: float) -> list[float]:
    """Integrate one column upwards, layer by layer."""
    if kind == "model":
        edges = [a + b * surface for a, b in zip(air.HYBRID["a"], air.HYBRID["b"], strict=True)]
        found, base = [0.0] * 4, ground
        for k in reversed(range(4)):
            upper, lower = edges[k], edges[k + 1]
            alpha = math.log(2)
            if upper > 0:
                alpha = 1 - upper / (lower - upper) * math.log(lower / upper)
            found[k] = base + alpha * R * warmth[k]
            base += R * warmth[k] * (math.log(lower / upper) if upper > 0 else 0)
        return found
    levels = [100.0 * level for level in air.PRESSURE]
    edges = [1e-300, *(math.sqrt(p * q) for p, q in pairwise(levels)), 1e300]

    def between(low: float, high: float) -> float:
        """Return the integral of R T dlnp from pressure `low` to `high`, above it."""
        total = 0.0
        for k in range(4):
            top, bottom = max(low, edges[k]), min(high, edges[k + 1])
            total += R * warmth[k] * math.log(bottom / top) if bottom > top else 0.0
        return total

    return [ground + (between(p, surface) if p < surface else -between(surface, p)) for p in levels]


def test_geopotential_is_the_integral_over_each_column():
    surface = pressures()
    warmth = 200 + 100 * numbers(2, 4, 3, 4)
    ground = 1e4 * numbers(3, 4, seed=6)
    for kind in air.KINDS:
        found = hydrostatic_geopotential(layers_of(kind), surface, warmth, ground)
        for b, i, j in np.ndindex(2, 3, 4):
            column = warmth[b, :, i, j].numpy()
            pressure, height = float(surface[b, 0, i, j]), float(ground[i, j])
            wanted = geopotential_of_column(kind, pressure, column, height)
            assert found[b, :, i, j].tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-8), kind


def test_geopotential_of_fine_layers_is_that_of_the_standard_atmosphere():
    surface = torch.full((1, 1, 1, 1), 101325.0, dtype=torch.float64)
    b = np.linspace(0.25, 1, 151).tolist()
    for layers in (
        PressureLayers(range(300, 1011, 5)),
        HybridLayers(range(1, 151), [0.0] * 151, b),
    ):
        levels = level_pressures(layers, surface)
        warmth = 288.15 * (levels / surface) ** (R * LAPSE / G)
        found = hydrostatic_geopotential(layers, surface, warmth, torch.zeros(1, 1))
        wanted = G * (288.15 - warmth) / LAPSE
        assert (found - wanted).abs().max() < 2e-4 * wanted.max(), layers


WEATHERBENCH = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)


def test_geopotential_of_thirteen_levels_is_that_of_the_standard_atmosphere():
    surface = torch.full((1, 1, 1, 1), 101325.0, dtype=torch.float64)
    layers = PressureLayers(WEATHERBENCH)
    levels = level_pressures(layers, surface)
    warmth = (288.15 * (levels / surface) ** (R * LAPSE / G)).clamp(min=216.65)
    found = hydrostatic_geopotential(layers, surface, warmth, torch.zeros(1, 1)) / G
    error = (found - (288.15 - warmth) / LAPSE)[0, WEATHERBENCH.index(250) :].flatten()
    assert error.abs().max() < 1.5  # m, below the tropopause
    assert error[3:].abs().max() < 0.5  # from 500 hPa down


def sea_pressure_of_column(pressure: float, ground: float, star: float) -> float:
    """Reduce one surface pressure to sea level, by the cases of the IFS documentation."""
    if abs(ground) < 0.001:
        return pressure
    alpha, sea = LAPSE * R / G, star + LAPSE * ground / G
    if star <= 290.5 < sea:
        alpha = R * (290.5 - star) / ground
    elif star > 290.5 and sea > 290.5:
        alpha, star = 0.0, 0.5 * (290.5 + star)
    elif star < 255:
        star = 0.5 * (255 + star)
    x = ground / (R * star)
    return pressure * math.exp(x * (1 - alpha * x / 2 + (alpha * x) ** 2 / 3))


CASES = {  # pressure, geopotential and temperature of the surface
    "sea": (1.01e5, 0.0, 300.0),
    "hill": (9.5e4, 5e3, 280.0),
    "warm below": (9e4, 9e3, 288.0),
    "warm": (9e4, 9e3, 300.0),
    "cold": (9e4, 9e3, 230.0),
    "cold plateau": (5e4, 6e4, 253.0),
    "plateau": (6e4, 4.5e4, 275.0),
    "half a plateau": (7.6e4, 2.2e4, 292.0),
    "below the sea": (1.06e5, -4e3, 300.0),
}


def surface_at(*values: float) -> Surface:
    return Surface(*(torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in values))


def test_sea_level_pressure_is_that_of_each_case():
    for case, values in CASES.items():
        found = float(sea_level_pressure(surface_at(*values)))
        assert found == pytest.approx(sea_pressure_of_column(*values), rel=1e-13), case


def test_temperature_and_geopotential_below_the_ground():
    for case, (pressure, ground, star) in CASES.items():
        at, height = 1.1 * pressure, ground / G
        sea, alpha = star + LAPSE * height, LAPSE * R / G
        if height > 2000:
            limit = min(sea, 298.0)
            if height < 2500:
                limit = 0.002 * ((2500 - height) * sea + (height - 2000) * limit)
            alpha = max(0.0, R * (limit - star) / ground)
        y = alpha * math.log(1.1)
        surface = surface_at(pressure, ground, star)
        found = float(temperature_below(surface, torch.full((1, 1, 1, 1), at).double()))
        assert found == pytest.approx(star * (1 + y + y**2 / 2 + y**3 / 6), rel=1e-12), case
        # Down to the reduced pressure it is the geopotential of the sea.
        depth = float(geopotential_below(surface, sea_level_pressure(surface)))
        assert abs(depth) < 0.01 * abs(ground) + 1e-9, case


def test_the_lowest_level_above_the_ground_tells_the_temperature_of_the_surface():
    levels = level_pressures(layers_of("pressure"), pressures())
    temperature = 200 + 100 * numbers(2, 4, 3, 4)
    found = surface_of(pressures(), torch.zeros(3, 4).double(), temperature, levels)
    for b, i, j in np.ndindex(2, 3, 4):
        pressure = float(pressures()[b, 0, i, j])
        k = max(k for k, level in enumerate(air.PRESSURE) if 100 * level <= pressure)
        lowest = 100 * air.PRESSURE[k]
        wanted = float(temperature[b, k, i, j]) * (1 + LAPSE * R / G * (pressure / lowest - 1))
        assert float(found.temperature[b, 0, i, j]) == pytest.approx(wanted, rel=1e-13)


def test_interpolation_is_linear_in_the_logarithm_of_pressure():
    levels = level_pressures(layers_of("model"), pressures())
    values = numbers(2, 4, 3, 4)
    for pressure in (1e3, 3e4, 5.5e4, 8e4, 1.2e5):
        found = interpolate_to_pressure(values, levels, pressure)
        for b, i, j in np.ndindex(2, 3, 4):
            column = levels[b, :, i, j].log().numpy()
            wanted = np.interp(math.log(pressure), column, values[b, :, i, j].numpy())
            assert float(found[b, 0, i, j]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_geopotential_between_levels_is_that_of_the_temperature():
    """In an atmosphere of constant lapse rate, on 18 levels as of miles-credit's data."""
    count, ground, bottom = 18, 2000.0, 9.9e4
    b = np.linspace(0, 1, count + 1) ** 1.2
    hybrid = {"a": (3000 * (1 - b)).tolist(), "b": b.tolist()}
    upper = [Channel(n, k) for n in ("geopotential", "temperature") for k in range(1, count + 1)]
    named = NamedChannels([*upper, Channel("surface_pressure")], hybrid, torch.full((1, 1), ground))
    wanted_at = (300, 500, 700, 850)
    levels = level_pressures(
        build_layers(range(1, count + 1), hybrid), torch.full((1, 1, 1, 1), bottom).double()
    )

    def column(pressure: Array) -> tuple[Array, Array]:
        """Return geopotential and temperature by the hydrostatic equation, 5.5 K a kilometre."""
        lapse = 0.0055
        warmth = 295.0 * (pressure / bottom) ** (R * lapse / G)
        return ground + G * (295.0 - warmth) / lapse, warmth

    heights, warmth = column(levels.numpy())
    fields = np.concatenate([heights, warmth, np.full((1, 1, 1, 1), bottom)], axis=1)
    to_write = WrittenFields(named, [], wanted_at)
    found = dict(zip(to_write.channels, to_write(torch.from_numpy(fields))[0], strict=True))
    straight_errors = []
    for level in wanted_at:
        height, _ = column(np.array(100.0 * level))
        straight = np.interp(
            math.log(100 * level), levels.log().flatten().numpy(), heights.flatten()
        )
        error = abs(float(found[Channel("geopotential", level)]) - height) / G
        assert error < 0.5  # m
        straight_errors.append(abs(straight - height) / G)
    assert max(straight_errors) > 2


def written(kind: str, rows: slice, levels: tuple[int, ...] = ()) -> WrittenFields:
    hybrid = air.HYBRID if kind == "model" else {}
    named = NamedChannels(air.channels(kind), hybrid, air.ground()[rows])
    return WrittenFields(named, list(NEEDS), levels)


def physical(kind: str) -> torch.Tensor:
    """Return fields in units, `(1, C, ROWS, COLUMNS)`."""
    moments = torch.tensor([air.mean_and_std(channel, kind) for channel in air.channels(kind)])
    fields = air.fields(kind, 1).clamp(-2, 2)
    fields = fields * moments[:, 1, None, None] + moments[:, 0, None, None]
    return torch.where(fields.abs() < 0.1, fields.abs(), fields)  # no negative water


def test_any_band_computes_its_own_columns():
    for kind, levels in (("pressure", ()), ("model", ()), ("model", (950, 100))):
        fields = physical(kind)
        whole = written(kind, slice(None), levels)
        with air.NoCumulativeSums():
            found = whole(fields)
        assert found.shape[1] == len(whole.channels)
        for rows in (slice(0, 1), slice(1, 6), slice(6, 13)):
            part = written(kind, rows, levels)(fields[:, :, rows])
            assert torch.allclose(part, found[:, :, rows], rtol=1e-13, atol=0), (kind, levels)
        assert found.isfinite().all()


@pytest.mark.parametrize("kind", [pytest.param("pressure", marks=pytest.mark.exhaustive), "model"])
def test_what_is_written_beside_the_fields(kind):
    fields = physical(kind)
    fields_to_write = written(kind, slice(None))
    found = dict(zip(fields_to_write.channels, fields_to_write(fields)[0], strict=True))
    given = dict(zip(air.channels(kind), fields[0], strict=True))
    assert all(torch.equal(found[channel], given[channel]) for channel in given)
    by_level = {
        name: np.stack([given[air.Channel(name, k)].numpy() for k in sorted(air.levels(kind))])
        for name in air.UPPER
    }
    surface = given[air.Channel("surface_pressure")]
    layers = layers_of(kind)
    thickness = layers.thickness(surface[None, None])[0].numpy()
    water = (sum(by_level[name] for name in air.WATER) * thickness).sum(0) / G
    vapour = (by_level[air.WATER[0]] * thickness).sum(0) / G
    assert found[air.Channel("total_column_water")].numpy() == pytest.approx(water, rel=1e-12)
    only = found[air.Channel("total_column_water_vapour")].numpy()
    assert only == pytest.approx(vapour, rel=1e-12)
    warmth = by_level["temperature"] * (1 + (461.525 / R - 1) * by_level[air.WATER[0]])
    for i, j in ((0, 0), (5, 7), (12, 11)):
        column = geopotential_of_column(
            kind, float(surface[i, j]), warmth[:, i, j], float(air.ground()[i, j])
        )
        for k, wanted in zip(sorted(air.levels(kind)), column, strict=True):
            height = float(found[air.Channel("geopotential", k)][i, j])
            assert height == pytest.approx(wanted, rel=1e-12, abs=1e-8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("diagnosed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", air.KINDS)
def test_a_forecast_has_them_on_any_mesh(folder, tmp_path, kind):
    config = air.atmosphere_config(folder / kind, kind, [], steps=2)
    leave_checkpoint(config)
    asked = {"diagnostics": "[z,msl,tcw,tcwv]", "lead": "6h", "init": "2000-01-04"}
    if kind == "model":
        asked["pressure_levels"] = "[850,500]"
    else:
        refused = forecast_config(config, tmp_path / "f.zarr", pressure_levels="500")
        with pytest.raises(UserError, match="pressure_levels: needs a model on model levels, but"):
            forecast(refused)
        assert not list(tmp_path.iterdir())
    one = forecast(forecast_config(config, tmp_path / "one.zarr", **asked))
    assert check_forecast(str(one)).complete
    bands = forecast(forecast_config(config, tmp_path / "three.zarr", **asked), ranks=3)
    with xr.open_zarr(one) as data, xr.open_zarr(bands) as other:
        for name in data.data_vars:
            scale = float(np.abs(data[name]).max())
            assert float(np.abs(data[name] - other[name]).max()) <= 1e-6 * scale
        assert data["level"].attrs["units"] == "hPa"
        assert data["mean_sea_level_pressure"].attrs["units"] == "Pa"
        assert data["total_column_water"].attrs["units"] == "kg m-2"
        assert data["geopotential"].dims == data["temperature"].dims
        levels = [850, 500] if kind == "model" else list(air.PRESSURE)
        assert sorted(data["level"].values) == sorted(levels)


def test_what_is_missing_is_named():
    names, static = [*air.UPPER, "sp"], ["z"]
    check_written(names, static, list(DIAGNOSTICS.values()), [500], list(CORRECTIONS.values()))
    with pytest.raises(UserError, match=r"water_correction needs water in model\.fixers"):
        check_written(names, static, ["water_correction"], [], ["dry_air_correction"])
    with pytest.raises(UserError, match="total_column_water needs specific_humidity among the"):
        check_written(["sp", "t"], static, ["total_column_water"], [])
    with pytest.raises(UserError, match=r"pressure needs geopotential_at_surface in data.static"):
        check_written(names, [], ["mean_sea_level_pressure"], [])
    with pytest.raises(UserError, match=r"interpolation needs surface_pressure among .* and temp"):
        check_written(["q"], static, [], [500])
    with pytest.raises(UserError, match="diagnostics: geopotential is an output of the model"):
        check_written(["z", *names], static, ["geopotential"], [])


def test_keys_that_are_refused():
    keys = {"checkpoint": "run", "init": "2000-01-01", "lead": "24h", "out": "f"}
    for key, value, line in (
        ("diagnostics", "[z,mslp]", r"diagnostics: needs one of z, .*Did you mean msl\?"),
        ("diagnostics", "[z,geopotential]", "diagnostics: needs each entry once, got geop"),
        ("diagnostics", "[z,]", "diagnostics: needs one of z, .*got ''"),
        ("pressure_levels", "[500,x]", r"pressure_levels: needs whole numbers .*got 'x'"),
        ("pressure_levels", "[500,500]", "pressure_levels: needs each entry once"),
    ):
        with pytest.raises(UserError, match=line):
            ForecastRequest(**keys, **{key: value}).check(6)
    for none in ("", "[]", "[ ]"):
        request = ForecastRequest(**keys, diagnostics=none, pressure_levels=none)
        request.check(6)
        assert request.diagnostic_names() == request.levels_in_hpa() == ()
