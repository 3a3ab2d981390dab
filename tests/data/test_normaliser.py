"""Each variable's normalisation and its inverse."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import VariableConfig
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.statistics import Statistics
from credit_dp.data.transforms import (
    QUANTILE_SCORES,
    QuantileMap,
    apply_transform,
    apply_transform_tensor,
    invert_transform,
    weighted_quantiles,
)
from credit_dp.data.units import is_nonnegative
from credit_dp.errors import UserError
from tests.tables import each

EPS = 1e-3
CHANNELS = Channels(
    prognostic=(Channel("geopotential", 500), Channel("geopotential", 850), Channel("sst")),
    forcing=("insolation", "solar"),
    static=("latitude_sin", "lake_depth"),
    diagnostic=(Channel("total_precipitation"), Channel("cloud")),
)


def statistics(**changes):
    vectors = {
        "mean": [5e4, 1e4, 290.0, 0.7, 0.4],
        "std": [1e3, 500.0, 8.0, 0.2, 0.3],
        "tendency_std": [100.0, 40.0, 0.5, 0.1, 0.1],
        "minimum": [4e4, 8e3, 271.0, 0.0, 0.0],
        "maximum": [6e4, 2e4, 310.0, 4.0, 1.0],
        "forcing_mean": [0.0, 200.0],
        "forcing_std": [1.0, 50.0],
        "forcing_minimum": [0.0, 0.0],
        "forcing_maximum": [1.0, 1000.0],
        "static_mean": [0.0, 10.0],
        "static_std": [1.0, 5.0],
        "static_minimum": [0.0, 0.0],
        "static_maximum": [1.0, 100.0],
    }
    return Statistics(**{name: np.array(values) for name, values in (vectors | changes).items()})


def normaliser(dtype=torch.float64, found=None, **variables):
    configs = {name: VariableConfig(**settings) for name, settings in variables.items()}
    return Normaliser(found or statistics(), CHANNELS, configs, dtype)


def outputs(seed=0):
    """In the store's units: `(3, 5, 4, 6)`."""
    random = np.random.default_rng(seed)
    table = statistics()
    fields = random.normal(size=(3, 5, 4, 6)) * table.std[:, None, None]
    fields += table.mean[:, None, None]
    fields[:, 3] = random.exponential(2e-3, size=(3, 4, 6)) * (random.random((3, 4, 6)) < 0.5)
    fields[:, 4] = random.random((3, 4, 6))
    return fields.astype("f4")


@each(
    "normalise, shift, scale",
    [("standard", 290, 8), ("std", 0, 8), ("minmax", 271, 39), ("none", 0, 1)],
)
def test_each_way_is_its_formula(normalise, shift, scale):
    fields = outputs()
    of_all = normaliser(sst={"normalise": normalise})
    found = of_all.normalise_outputs(fields).numpy()
    sst = fields[:, 2].astype("f8")
    assert np.allclose(found[:, 2], (sst - shift) / scale, rtol=1e-12)
    assert np.allclose(found[:, 1], (fields[:, 1].astype("f8") - 1e4) / 500, rtol=1e-12)
    assert of_all.tendency_scale.flatten().tolist() == pytest.approx(
        [0.1, 0.08, 0.5 / scale, 0.5, 1 / 3]
    )
    assert torch.equal(of_all.normalise_outputs(fields[:, :3]), torch.from_numpy(found[:, :3]))


@each("way, transform", [("sqrt", np.sqrt), (f"log1p({EPS})", lambda x: np.log(1 + x / EPS))])
def test_transforms_are_their_formulas_and_then_standardised(way, transform):
    fields = outputs()
    scaled = normaliser(total_precipitation={"normalise": way})
    found = scaled.normalise_outputs(fields)
    rain = fields[:, 3].astype("f8")
    assert np.allclose(found[:, 3], (transform(rain) - 0.7) / 0.2, rtol=1e-12)
    found[:, 3] = -4.0  # a root, or a logarithm, below zero
    assert not scaled.denormalise(found)[:, 3].any()


@each("way", ["sqrt", f"log1p({EPS})"])
def test_a_packed_rainless_point_is_as_none(way):
    fields = outputs()
    fields[0, 3, 0, :2] = [-2 * EPS, 0]
    of_all = normaliser(total_precipitation={"normalise": way})
    normalised = of_all.normalise_outputs(fields)
    assert normalised[0, 3, 0, 0] == normalised[0, 3, 0, 1]
    assert of_all.normalise_outputs(fields).isfinite().all()
    assert apply_transform(fields[0, 3, 0, :1], VariableConfig(normalise=way))[0] == 0


@given(
    ways=st.lists(st.sampled_from(["standard", "std", "minmax", "none"]), min_size=3, max_size=3),
    rain=st.sampled_from(["standard", "none", "sqrt", f"log1p({EPS})"]),
    single=st.booleans(),
)
def test_physical_is_the_inverse(ways, rain, single):
    names, ways = ("geopotential", "sst", "cloud", "total_precipitation"), [*ways, rain]
    dtype = torch.float32 if single else torch.float64
    of_all = normaliser(
        dtype, **{name: {"normalise": way} for name, way in zip(names, ways, strict=True)}
    )
    fields = outputs()
    back = of_all.denormalise(of_all.normalise_outputs(fields))
    assert back.dtype == dtype
    size = np.abs(fields).max(axis=(0, 2, 3))[:, None, None]
    tolerance = 3e-5 if single else 1e-11
    assert (np.abs(back.numpy() - fields) <= tolerance * size).all()
    states = of_all.denormalise(of_all.normalise_outputs(fields[:, :3]))
    assert torch.equal(states, back[:, :3])


@each(
    "normalise, mean, zero",
    [
        ("standard", 0.0, -0.7 / 0.2),
        ("std", 0.7 / 0.2, 0.0),
        ("minmax", 0.7 / 4, 0.0),
        ("none", 0.7, 0.0),
        ("sqrt", 0.0, -0.7 / 0.2),
        (f"log1p({EPS})", 0.0, -0.7 / 0.2),
    ],
)
def test_fills_stand_for_nan_after_normalising(normalise, mean, zero):
    fields = outputs()
    fields[:, 3, 1:3] = np.nan
    two_eps = 2 * EPS
    of_two = {"sqrt": np.sqrt(two_eps), f"log1p({EPS})": np.log(3)}.get(normalise, two_eps)
    shift, scale = {"standard": (0.7, 0.2), "std": (0, 0.2), "minmax": (0, 4), "none": (0, 1)}.get(
        normalise, (0.7, 0.2)
    )
    for fill, expected in (("mean", mean), (0, zero), (two_eps, (of_two - shift) / scale)):
        of_all = normaliser(total_precipitation={"normalise": normalise, "fill": fill})
        found = of_all.normalise_outputs(fields)
        assert np.allclose(found[:, 3, 1:3], expected, atol=1e-12)
        assert found.isfinite().all()
        assert of_all.fills.flatten().tolist() == pytest.approx([0, 0, 0, expected, 0])


def test_forcings_and_statics_are_filled_and_computed_ones_stay():
    fields = np.random.default_rng(0).random((2, 2, 4, 6)).astype("f4")
    fields[:, 1, 0] = np.nan
    of_all = normaliser(
        solar={"normalise": "minmax", "fill": 500}, lake_depth={"normalise": "std", "fill": "mean"}
    )
    forcing, static = of_all.normalise_forcing(fields), of_all.normalise_static(fields)
    for found in (forcing, static):
        assert np.array_equal(found[:, 0], fields[:, 0].astype("f8"))
    assert np.allclose(forcing[:, 1, 0], 0.5)
    assert np.allclose(forcing[:, 1, 1:], fields[:, 1, 1:] / 1000)
    assert np.allclose(static[:, 1, 0], 2)
    assert np.allclose(static[:, 1, 1:], fields[:, 1, 1:] / 5)


def test_computed_fields_are_not_normalised():
    found = statistics(forcing_mean=[0.3, 200.0], static_std=[0.7, 5.0])
    fields = np.random.default_rng(0).random((2, 2, 4, 6)).astype("f4")
    assert np.array_equal(normaliser(found=found).normalise_forcing(fields)[:, 0], fields[:, 0])
    assert np.array_equal(normaliser(found=found).normalise_static(fields)[:, 0], fields[:, 0])


def test_what_cannot_be_negative_is_clamped_in_forecasts_only():
    of_all = normaliser(cloud={"nonnegative": True}, sst={"normalise": "none"})
    state = torch.full((2, 5, 4, 6), -100.0, dtype=torch.float64)
    physical = of_all.denormalise(state)
    assert (physical[:, 3:] == 0).all()
    assert (physical[:, :3] < 0).all()
    assert (state == -100).all()
    allowed = normaliser(total_precipitation={"nonnegative": False}).denormalise(state)
    assert (allowed[:, 3:] < 0).all()


def test_masked_points_become_nan():
    fields = outputs()
    mask = np.ones((5, 4, 6), dtype=bool)
    mask[2, 1:3] = False
    fields[:, ~mask] = np.nan
    of_all = normaliser(sst={"fill": "mean"})
    normalised = of_all.normalise_outputs(fields)
    assert normalised.isfinite().all()
    physical = of_all.denormalise(normalised, torch.from_numpy(mask))
    assert np.allclose(physical.numpy(), fields, equal_nan=True)
    states = of_all.denormalise(normalised[:, :3], torch.from_numpy(mask))
    assert np.allclose(states.numpy(), fields[:, :3], equal_nan=True)
    assert of_all.denormalise(normalised).isfinite().all()


def test_physical_has_gradients():
    of_all = normaliser(total_precipitation={"normalise": f"log1p({EPS})"}, sst={"fill": 0})
    state = torch.rand(1, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False]).expand(5, 2, 2)
    assert torch.autograd.gradcheck(lambda x: of_all.denormalise(x).clamp(max=1e6), (state,))
    of_all.denormalise(state, mask).nansum().backward()
    assert state.grad.isfinite().all()


@each("form", ["flipped", "read-only", "strided"])
def test_any_layout_of_memory_is_read_and_left_alone(form):
    fields = outputs()
    expected = normaliser().normalise_outputs(fields.copy())
    given = {
        "flipped": fields[:, :, ::-1].copy()[:, :, ::-1],
        "read-only": fields.copy(),
        "strided": np.repeat(fields, 2, axis=3)[..., ::2],
    }[form]
    given.flags.writeable = form != "read-only"
    found = normaliser(total_precipitation={"fill": 0}).normalise_outputs(given)
    assert torch.equal(found, expected)
    assert np.array_equal(given, fields)


def test_normalised_fields_are_written_to_a_given_tensor():
    fields = outputs()
    of_all = normaliser(torch.float32, total_precipitation={"normalise": f"log1p({EPS})"})
    room = torch.empty(2, 3, 5, 4, 6)
    assert of_all.normalise_outputs(fields, room[1]).data_ptr() == room[1].data_ptr()
    assert torch.equal(room[1], of_all.normalise_outputs(fields))


def test_an_unknown_range():
    found = statistics(minimum=[], maximum=[])
    normaliser(found=found)
    with pytest.raises(UserError, match=r"data\.variables\.sst\.normalise.*data\.statistics"):
        normaliser(found=found, sst={"normalise": "minmax"})


@each(
    "name, known",
    [
        ("specific_humidity", True),
        ("total_precipitation", True),
        ("total_precipitation_6hr", True),
        ("total_cloud_cover", True),
        ("total_column_water_vapour", True),
        ("volumetric_soil_water_layer_1", True),
        ("surface_solar_radiation_downwards", True),
        ("top_net_thermal_radiation", False),
        ("surface_latent_heat_flux", False),
        ("evaporation", False),
        ("temperature", False),
        ("u_component_of_wind", False),
        ("10m_wind_speed", True),
        ("tp", True),
        ("q_500", True),
        ("q", True),
        ("t_500", False),
        ("str", False),
    ],
)
def test_names_that_cannot_be_negative(name, known):
    assert is_nonnegative(name, VariableConfig()) == known
    assert is_nonnegative(name, VariableConfig(nonnegative=not known)) != known
    assert is_nonnegative(name, VariableConfig(normalise="log1p(1e-3)"))
    assert is_nonnegative(name, VariableConfig(normalise="sqrt"))
    assert is_nonnegative(name, VariableConfig(normalise="quantile")) == known


def test_the_root_of_what_is_not_positive_has_gradient_0():
    values = torch.tensor([-1.0, 0.0, 4.0], requires_grad=True)
    roots = apply_transform_tensor(values, VariableConfig(normalise="sqrt"))
    (gradient,) = torch.autograd.grad(roots.sum(), values)
    assert roots.tolist() == [0, 0, 2]
    assert gradient.tolist() == [0, 0, 0.25]


@given(
    values=st.lists(st.floats(0, 100), min_size=1),
    way=st.sampled_from(["sqrt", *(f"log1p({scale})" for scale in (1e-5, 1e-3, 1.0, 10.0))]),
)
def test_what_is_transformed_is_restored(values, way):
    config = VariableConfig(normalise=way)
    there = apply_transform(np.array(values), config)
    back = invert_transform(torch.from_numpy(there), config)
    assert np.allclose(back, values, rtol=1e-9, atol=1e-12)


def amounts(zeros=0.0, ones=0.0, size=5000, seed=0):
    """Return amounts, some of them exactly 0 or 1: `(1, size)`."""
    random = np.random.default_rng(seed)
    which = random.random(size)
    values = np.minimum(random.exponential(0.2, size), 0.9)
    return np.where(which < zeros, 0, np.where(which > 1 - ones, 1, values)).astype("f4")[None]


def test_quantiles_are_those_of_their_definition():
    values = amounts()
    found = weighted_quantiles(values, np.ones(1))
    levels = torch.special.ndtr(torch.from_numpy(QUANTILE_SCORES))
    assert np.allclose(torch.special.ndtri(levels), QUANTILE_SCORES, atol=1e-9)
    assert np.allclose(found, np.quantile(values, levels.numpy(), method="hazen"), rtol=1e-6)
    rows = np.array([[1, 5, np.nan, 3], [2, 4, 8, np.nan]])
    centres = np.cumsum([3, 1, 3, 1, 3, 1]) - np.array([3, 1, 3, 1, 3, 1]) / 2
    weighted = weighted_quantiles(rows, np.array([3.0, 1.0]))
    assert np.allclose(weighted, np.interp(12 * levels, centres, [1, 2, 3, 4, 5, 8]), rtol=1e-6)
    assert (weighted_quantiles(np.full((1, 3), np.nan), np.ones(1)) == QUANTILE_SCORES).all()


@pytest.mark.slow
def test_the_map_is_linear_between_quantiles():
    values = np.random.default_rng(0).gamma(2, size=(1, 5000))
    quantiles = weighted_quantiles(values, np.ones(1))
    inside = np.clip(values, quantiles[0], quantiles[-1])
    wanted = np.interp(inside, quantiles, QUANTILE_SCORES)
    scores = QuantileMap(quantiles)(torch.from_numpy(inside))
    assert np.allclose(scores, wanted, atol=1e-12, rtol=0)
    assert abs(scores.mean()) < 0.01
    assert abs(scores.std() - 1) < 0.01


def test_equal_quantiles_are_one_knot_and_tails_are_not_steep():
    quantiles = weighted_quantiles(amounts(zeros=0.5, ones=0.2), np.ones(1))
    of_amounts = QuantileMap(quantiles)
    low, high = (of_amounts(torch.tensor(x, dtype=torch.float64)).item() for x in (0, 1))
    assert low == QUANTILE_SCORES[quantiles == 0].max()
    assert abs(low) <= 1 / 16
    assert high == pytest.approx(QUANTILE_SCORES[quantiles >= 1 - 1e-6].min())
    slope = (high - low) / 1.0
    outside = of_amounts(torch.tensor([-2.0, 3.0], dtype=torch.float64))
    assert outside[0] == pytest.approx(low - 2 * slope)  # not that of the least rain
    assert high < outside[1] < high + 2 * slope
    middle = np.concatenate([np.linspace(-1, -0.1, 40), np.zeros(49), np.linspace(0.1, 1, 40)])
    assert abs(QuantileMap(middle)(torch.zeros(()))) < 1e-12
    assert QuantileMap(np.full(129, 7.0))(torch.tensor(9.0)) == 2  # constant: only shifted
    for wrong in (middle[1:], -middle, middle * np.nan):
        with pytest.raises(ValueError, match="quantiles need"):
            QuantileMap(wrong)


@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    zeros=st.sampled_from([0, 0.3, 0.999]),
    ones=st.sampled_from([0, 0.2]),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-8, 1.0, 1e5]),
)
def test_quantiles_are_undone_in_tails_and_at_ties_too(dtype, zeros, ones, seed, scale):
    values = amounts(zeros, ones, 300, seed) * np.float32(scale)
    quantiles = weighted_quantiles(values, np.ones(1))
    of_values = QuantileMap(quantiles).to(dtype)
    size = max(np.ptp(quantiles), 1e-30)
    edges = scale * torch.linspace(-1, 2, 40, dtype=dtype)
    x = torch.cat([torch.from_numpy(values[0]).to(dtype), edges]).sort().values
    scores = of_values(x)
    assert (scores.diff() >= 0).all()
    tolerance = 2e-6 if dtype == torch.float32 else 1e-10
    spread = max(size, scale)
    assert (of_values.invert(scores) - x).abs().max() <= tolerance * spread
    if dtype == torch.float64:
        z = torch.linspace(-8, 8, 200, dtype=dtype)
        assert (of_values(of_values.invert(z)) - z).abs().max() <= 1e-8
    assert of_values(torch.tensor([np.nan], dtype=dtype)).isnan().all()


@pytest.mark.slow
def test_quantiles_have_the_gradient_of_the_map():
    quantiles = weighted_quantiles(amounts(zeros=0.5), np.ones(1))
    of_amounts = QuantileMap(quantiles)
    x = torch.tensor([-0.1, 0.013, 0.2, 0.57, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(of_amounts, x, eps=1e-9, atol=1e-5)
    assert torch.autograd.gradcheck(of_amounts.invert, of_amounts(x).detach().requires_grad_())


@each("dtype", [torch.float32, torch.float64])
def test_a_channel_is_mapped_by_its_quantiles_and_then_standardised(dtype):
    fields = outputs()
    fields[0, 3, 0, 0] = np.nan
    rows = np.full((5, 129), np.nan)
    rows[3] = weighted_quantiles(fields[:, 3].reshape(1, -1), np.ones(1))
    settings = {"normalise": "quantile", "fill": 2**-10}
    of_all = normaliser(dtype, statistics(quantiles=rows), total_precipitation=settings)
    found = of_all.normalise_outputs(fields)
    filled = torch.from_numpy(np.nan_to_num(fields[:, 3], nan=2**-10)).to(dtype)
    wanted = (QuantileMap(rows[3]).to(dtype)(filled) - 0.7) / 0.2
    assert torch.allclose(found[:, 3], wanted, rtol=1e-6, atol=1e-6)
    back = of_all.denormalise(found)[:, 3]
    assert (back - filled).abs().max() < (1e-8 if dtype == torch.float32 else 1e-15)
    assert found.dtype == back.dtype == dtype


def test_quantiles_that_nobody_has_are_refused():
    with pytest.raises(UserError, match=r"data\.variables\.cloud\.normalise: quantile needs"):
        normaliser(cloud={"normalise": "quantile"})
    with pytest.raises(UserError, match=r"normalise: .*quantile"):
        VariableConfig(normalise="quantiles").check("data.variables.cloud")
