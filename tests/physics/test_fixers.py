"""Fixers close the budgets of the globe, in their order, on every mesh as on one process."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from credit_dp.config import UNetConfig, has_variable
from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid, row_weights
from credit_dp.data.statistics import Statistics
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.recomputation import SavedTensors
from credit_dp.domain_parallel.transport import SingleRankTransport
from credit_dp.errors import UserError
from credit_dp.physics.columns import PhysicalChannels
from credit_dp.physics.fixers import Fixers, build_fixers, count_fixer_memory, fixers_of_run
from credit_dp.training.forecast_step import ForecastStep
from tests.physics import atmospheres as air
from tests.ranks import on_threads
from tests.tier_cases import tiers
from tests.training.runs import alone

ALL = ("nonnegative", "dry_air", "water", "energy")
G = 9.80665
Array = NDArray[np.float64]


def built(kind: str, names: tuple[str, ...], **options: Any) -> Fixers:
    """Return fixers of the whole globe."""
    config = UNetConfig(fixers=list(names), bounds=options.pop("bounds", {}))
    mean = air.global_mean(alone(), slice(0, air.ROWS))
    found = build_fixers(config, air.physical(kind, **options), mean, 6)
    assert found is not None
    return found


def in_units(kind: str, fields: torch.Tensor) -> dict[str, Array]:
    """Return normalised fields by variable in their units, levels from the top, by numpy alone."""
    named: dict[str, Array] = {}
    channels = air.channels(kind)[: fields.shape[1]]
    for name in dict.fromkeys(channel.variable for channel in channels):
        own = sorted((c.level or 0, i) for i, c in enumerate(channels) if c.variable == name)
        values = []
        for _, index in own:
            mean, std = air.mean_and_std(channels[index], kind)
            field = fields[:, index].detach().double().numpy()
            if name == air.RAIN:
                values.append(np.expm1(field * 0.5 + 2.0) * 1e-4)
            else:
                values.append(field * std + mean)
        named[name] = np.stack(values, axis=1)
    return named


def thickness(kind: str, pressure: Array) -> Array:
    """Return the thickness of layers by definition: between interfaces, above the ground."""
    if kind == "model":
        a, b = (np.array(air.HYBRID[name])[:, None, None] for name in "ab")
        return np.diff(a + b * pressure, axis=1)
    middle = [100.0 * (p + q) / 2 for p, q in pairwise(air.PRESSURE)]
    edges = [0.0, *middle, np.inf]
    parts = [
        np.minimum(pressure, below) - np.minimum(pressure, above)
        for above, below in pairwise(edges)
    ]
    return np.concatenate(parts, axis=1)


def globe(field: Array) -> Array:
    """Return the mean over the globe of `(B, 1, H, W)`: `(B,)`."""
    weights = row_weights(air.latitude())[:, None]
    return (field * weights).sum((1, 2, 3)) / weights.sum() / field.shape[-1]


def columns(kind: str, fields: torch.Tensor) -> dict[str, Array]:
    """Return the dry air of columns in Pa, water in m, and energy in J m-2, by definition."""
    x = in_units(kind, fields)
    layers = thickness(kind, x["surface_pressure"])
    vapour, temperature = x["specific_humidity"], x["temperature"]
    water = vapour + x["specific_cloud_liquid_water_content"]
    wind = x["u_component_of_wind"] ** 2 + x["v_component_of_wind"] ** 2
    heat = 1004.709 * (1 - vapour) + 1846.1 * vapour
    energy = heat * temperature + 2.5008e6 * vapour + air.ground().numpy() + wind / 2
    return {
        "dry_air": ((1 - water) * layers).sum(1, keepdims=True),
        "water": (water * layers).sum(1, keepdims=True) / G / 1000,
        "energy": (energy * layers).sum(1, keepdims=True) / G,
    }


def budgets(kind: str, fields: torch.Tensor) -> dict[str, Array]:
    """Return the means of `columns` over the globe."""
    return {name: globe(values) for name, values in columns(kind, fields).items()}


def gains(kind: str, fields: torch.Tensor) -> dict[str, Array]:
    """Return what the fluxes of a step add to each budget."""
    x = in_units(kind, fields)
    net = sum(globe(x[name]) for name in air.TOP) - sum(globe(x[name]) for name in air.BOTTOM)
    return {
        "dry_air": np.zeros(len(fields)),
        "water": -globe(x[air.RAIN]) - globe(x[air.EVAPORATION]),
        "energy": np.asarray(net),
    }


def errors(kind: str, fields: torch.Tensor, last: torch.Tensor) -> dict[str, float]:
    """Return how far each budget is from closed, relative to what it is a budget of."""
    now, before, added = budgets(kind, fields), budgets(kind, last), gains(kind, fields)
    return {
        name: float(np.abs((now[name] - before[name] - added[name]) / before[name]).max())
        for name in now
    }


def test_budgets_are_closed():
    for kind in air.KINDS:
        last = air.fields(kind, seed=1)[:, : air.states()]
        fields = air.fields(kind)
        found = built(kind, ALL)(fields, last)
        open_before, closed = errors(kind, fields, last), errors(kind, found, last)
        assert min(open_before.values()) > 1e-6, kind
        assert max(closed.values()) < 1e-13, kind


@pytest.mark.parametrize("kind", ["pressure", pytest.param("model", marks=pytest.mark.exhaustive)])
def test_budgets_stay_closed_over_forty_steps_in_single_precision(kind):
    shape = (1, len(air.channels(kind)), air.ROWS, air.COLUMNS)
    draw = torch.Generator().manual_seed(3)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    step = ForecastStep(model, torch.full((air.states(), 1, 1), 0.05), fixers=built(kind, ALL))
    start = air.fields(kind, 1, seed=5)[:, : air.states()].float()
    empty = start[:, :0]
    last, first, added = start, budgets(kind, start), dict.fromkeys(ALL[1:], np.zeros(1))
    for fields in step.rollout(start, [empty] * 40, empty):
        assert fields.dtype == torch.float32
        added = {name: added[name] + more for name, more in gains(kind, fields).items()}
        assert max(errors(kind, fields, last).values()) < 1e-6
        last = fields[:, : air.states()]
    drift = budgets(kind, last)
    for name, total in added.items():
        assert abs(drift[name] - first[name] - total) < 1e-6 * abs(first[name]), name


def test_only_what_a_fixer_corrects_changes():
    last, fields = air.fields("model", seed=1)[:, : air.states()], air.fields("model")
    changed = {
        "dry_air": {"surface_pressure"},
        "water": {air.RAIN, air.EVAPORATION},
        "energy": {"temperature"},
    }
    for name, variables in changed.items():
        found = built("model", (name,))(fields, last)
        for index, channel in enumerate(air.channels("model")):
            same = torch.equal(found[:, index], fields[:, index])
            # Rain takes all that is missing: evaporation changes in its last digit at most.
            assert same or channel.variable in variables


def test_dry_air_has_the_same_pressure_everywhere_more():
    last, fields = air.fields("model", seed=1)[:, : air.states()], air.fields("model")
    found = built("model", ("dry_air",))(fields, last)

    def dry(x: dict[str, Array]) -> Array:
        water = x["specific_humidity"] + x["specific_cloud_liquid_water_content"]
        return ((1 - water) * thickness("model", x["surface_pressure"])).sum(1)

    more = dry(in_units("model", found)) - dry(in_units("model", fields))
    assert np.ptp(more, axis=(1, 2)) == pytest.approx(0, abs=1e-9)


def test_rain_is_scaled_by_one_number_and_the_rest_evaporates():
    last, fields = air.fields("model", seed=1)[:, : air.states()], air.fields("model")
    found = built("model", ("water",))(fields, last)
    ratio = in_units("model", found)[air.RAIN] / in_units("model", fields)[air.RAIN].clip(0)
    needed = ratio[:, 0, 0, 0] > 0  # a sample that becomes moister than it evaporates has no rain
    assert np.ptp(ratio, axis=(1, 2, 3)) == pytest.approx(0, abs=1e-12)
    shift = in_units("model", found)[air.EVAPORATION] - in_units("model", fields)[air.EVAPORATION]
    assert np.ptp(shift, axis=(1, 2, 3)) == pytest.approx(0, abs=1e-15)
    assert (np.abs(shift[needed]) < 1e-15).all()
    wet = fields.clone()
    wet[:, : 2 * len(air.MODEL)] += 6  # more water than can have evaporated
    found = built("model", ("water",))(wet, last)
    assert in_units("model", found)[air.RAIN] == pytest.approx(0, abs=1e-18)
    assert errors("model", found, last)["water"] < 1e-13


def test_energy_of_all_layers_changes_by_one_factor():
    last, fields = air.fields("pressure", seed=1)[:, : air.states()], air.fields("pressure")
    found = built("pressure", ("energy",))(fields, last)

    def energy(x: dict[str, Array]) -> Array:
        vapour = x["specific_humidity"]
        wind = x["u_component_of_wind"] ** 2 + x["v_component_of_wind"] ** 2
        heat = 1004.709 * (1 - vapour) + 1846.1 * vapour
        return heat * x["temperature"] + 2.5008e6 * vapour + air.ground().numpy() + wind / 2

    ratio = energy(in_units("pressure", found)) / energy(in_units("pressure", fields))
    assert np.ptp(ratio, axis=(1, 2, 3)) == pytest.approx(0, abs=1e-12)


def test_fixers_act_in_the_order_of_the_config():
    last, fields = air.fields("pressure", seed=1)[:, : air.states()], air.fields("pressure")
    by_hand = fields
    for name in ("energy", "dry_air"):
        by_hand = built("pressure", (name,))(by_hand, last)
    found = built("pressure", ("energy", "dry_air"))(fields, last)
    assert torch.equal(found, by_hand)
    # The mass of air, which changes last, opens the budget of energy again.
    assert errors("pressure", found, last)["energy"] > 1e-6
    swapped = built("pressure", ("dry_air", "energy"))(fields, last)
    assert max(errors("pressure", swapped, last)[name] for name in ("dry_air", "energy")) < 1e-13


def test_tracers_are_not_negative_and_values_are_within_bounds():
    fields = 3 * air.fields("pressure")
    last = fields[:, : air.states()]
    bounds = {"temperature": [220.0, 300.0], "u_component_of_wind_500": [-1.0, float("inf")]}
    found = in_units(
        "pressure", built("pressure", ("nonnegative", "bounds"), bounds=bounds)(fields, last)
    )
    given = in_units("pressure", fields)
    for name in (*air.WATER, air.RAIN, air.TOP[0], air.BOTTOM[0]):
        assert given[name].min() < 0
        assert found[name] == pytest.approx(given[name].clip(min=0), abs=1e-12 * given[name].max())
    assert found["temperature"] == pytest.approx(given["temperature"].clip(220, 300), rel=1e-13)
    wind = given["u_component_of_wind"]
    wind[:, 1] = wind[:, 1].clip(min=-1)
    assert found["u_component_of_wind"] == pytest.approx(wind, rel=1e-12)
    assert np.array_equal(found["surface_pressure"], given["surface_pressure"])


def masses(kind: str, fields: torch.Tensor) -> dict[str, Array]:
    """Return what corrections are of: dry air and energy of columns, water through the surface."""
    air_of, x = columns(kind, fields), in_units(kind, fields)
    water = 1000 * (x[air.RAIN] + x[air.EVAPORATION])
    return {"dry_air": air_of["dry_air"] / G, "water": water, "energy": air_of["energy"]}


@pytest.mark.parametrize("kind", air.KINDS)
def test_corrections_are_what_each_column_gains(kind):
    last, fields = air.fields(kind, seed=1)[:, : air.states()], air.fields(kind)
    sizes = {"dry_air": 1e4, "water": 1e3, "energy": 1e9}
    for fixer in ALL[1:]:
        found, [correction] = built(kind, (fixer,)).fields_and_corrections(fields, last)
        assert torch.equal(found, built(kind, (fixer,))(fields, last))
        gained = masses(kind, found)[fixer] - masses(kind, fields)[fixer]
        assert np.abs(gained).mean() > 1e-6 * sizes[fixer]
        assert correction.numpy() == pytest.approx(gained, abs=1e-13 * sizes[fixer])


def corrections_on_band(manager: DomainParallelManager, kind: str) -> list[torch.Tensor]:
    rows = manager.rows(air.ROWS)
    config = UNetConfig(fixers=list(ALL))
    fixers = build_fixers(config, air.physical(kind, rows), air.global_mean(manager, rows), 6)
    assert fixers is not None
    fields, last = (air.fields(kind, seed=seed)[:, :, rows] for seed in (0, 1))
    return fixers.fields_and_corrections(fields, last[:, : air.states()])[1]


def test_corrections_of_bands_equal_those_of_the_globe():
    wanted = corrections_on_band(alone(), "model")
    parts = on_threads(3, corrections_on_band, "model")
    for index, whole in enumerate(wanted):
        found = torch.cat([part[index] for part in parts], dim=2)
        assert ((found - whole) / whole.abs().max()).abs().max() < 1e-11
    assert len(wanted) == 3


def test_a_rollout_ends_with_corrections_which_are_no_weather():
    """They are neither filled, nor inputs of the next step."""
    fixers, shape = built("model", ALL), (1, len(air.channels("model")), air.ROWS, air.COLUMNS)
    calls = []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)

    def fill(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == shape
        return torch.cat([x[:, :-1], torch.full_like(x[:, -1:], 7.0)], dim=1)

    scale = torch.full((air.states(), 1, 1), 0.05, dtype=torch.float64)
    step = ForecastStep(model, scale, fill=fill, fixers=fixers)
    start = air.fields("model", 1, seed=5)[:, : air.states()]
    empty = start[:, :0]
    plain = [*step.rollout(start, [empty] * 3, empty)]
    shown = [*step.with_corrections().rollout(start, [empty] * 3, empty)]
    raw = step.without_fixers()(start, empty, empty)
    for fields, both in zip(plain, shown, strict=True):
        assert torch.equal(both[:, :-3], fields)
        assert both.shape[1] == fields.shape[1] + 3
    _, wanted = fixers.fields_and_corrections(raw, start)
    assert torch.equal(shown[0][:, -3:], torch.cat(wanted, dim=1))
    assert {x.shape[1] for x in calls} == {air.states()}


def gradients(
    fixers: Fixers, fields: torch.Tensor, last: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the corrected fields, and the gradients of a sum of them."""
    fields, last = fields.clone().requires_grad_(), last.clone().requires_grad_()
    found = fixers(fields, last)
    return (found.detach(), *torch.autograd.grad((found * weight).sum(), (fields, last)))


def on_band(manager: DomainParallelManager, kind: str, names: tuple[str, ...]) -> Any:
    rows = manager.rows(air.ROWS)
    config = UNetConfig(fixers=list(names))
    fixers = build_fixers(config, air.physical(kind, rows), air.global_mean(manager, rows), 6)
    assert fixers is not None
    fields, last, weight = (air.fields(kind, seed=seed)[:, :, rows] for seed in (0, 1, 2))
    return gradients(fixers, fields, last[:, : air.states()], weight)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    tiers(
        fast=[(3, "pressure"), (3, "model")],
        slow=[],
        exhaustive=[(2, "pressure"), (4, "model")],
    ),
)
def test_bands_equal_the_globe(ranks, kind):
    fields, last, weight = (air.fields(kind, seed=seed) for seed in (0, 1, 2))
    with air.NoCumulativeSums():
        wanted = gradients(built(kind, ALL), fields, last[:, : air.states()], weight)
    parts = on_threads(ranks, on_band, kind, ALL)
    for index, whole in enumerate(wanted):
        found = torch.cat([part[index] for part in parts], dim=2)
        channels = whole.abs().amax((0, 2, 3), keepdim=True).clamp(min=1e-3 * whole.abs().max())
        assert ((found - whole) / channels).abs().max() < 1e-12


def test_variables_are_read_and_written_through_quantiles_of_each_level():
    physical = air.physical("pressure", rain="quantile")
    fields = air.fields("pressure").double()
    values = physical.read(fields, "temperature")
    assert torch.allclose(physical.write(fields, "temperature", values), fields, atol=1e-12)
    channels = [c for c in air.channels("pressure") if c.variable == "temperature"]
    start = air.channels("pressure").index(channels[0])
    for level, channel in enumerate(sorted(channels, key=lambda channel: channel.level)):
        mean, std = air.mean_and_std(channel, "pressure")
        score = fields[:, start + channels.index(channel)]
        wanted = mean + std * torch.where(score > 0, 2 * score, score)
        assert torch.allclose(values[:, level], wanted, rtol=1e-12)
    mean, std = air.mean_and_std(channels[0], "pressure")
    assert physical.normalised_bound(start, mean + 2 * std) == pytest.approx(1)


@pytest.mark.parametrize(("kind", "rain"), [("pressure", "log1p(1e-4)"), ("model", "quantile")])
def test_backward_computes_fixers_again(kind, rain):
    fixers = built(kind, ALL, rain=rain)
    fields, last = air.fields(kind, 1).float().requires_grad_(), air.fields(kind, 1, 1).float()
    last = last[:, : air.states()]
    config = UNetConfig(fixers=list(ALL))
    shape = (1, air.ROWS, air.COLUMNS)
    physical = air.physical(kind, rain=rain)
    memory = count_fixer_memory(config, physical, 6, shape, air.states(), torch.float32)
    means = 8 * (1 + 2 + 2)  # dry air, water and energy; of one sample, in float64
    assert memory.kept == fields.nbytes + means
    saved = SavedTensors([fields, last, *fixers.buffers()])
    fixers.eval()  # keeps everything
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x):
        fixers(fields, last)
    assert memory.recomputed == saved.bytes > 3 * fields.nbytes


def test_computing_fixers_again_sends_nothing(monkeypatch):
    sums = []
    reduce = SingleRankTransport._all_gather

    def counted(transport, x):
        sums.append(x.numel())
        return reduce(transport, x)

    monkeypatch.setattr(SingleRankTransport, "_all_gather", counted)
    last = air.fields("model", 1, 1)[:, : air.states()]
    gradients(built("model", ALL), air.fields("model", 1), last, air.fields("model", 1, 2))
    assert sorted(sums) == [1, 1, 2, 2, 2, 2]  # forward, and its adjoint


@pytest.mark.parametrize("kind", [pytest.param("pressure", marks=pytest.mark.exhaustive), "model"])
def test_the_gradient_is_that_of_small_changes(kind):
    fixers = built(kind, ALL[1:])
    fields, last, weight = (air.fields(kind, 1, seed=seed) for seed in (0, 1, 2))
    last = last[:, : air.states()]
    _, *slopes = gradients(fixers, fields, last, weight)
    ways = [air.fields(kind, 1, seed=seed)[:, : x.shape[1]] for seed, x in ((6, fields), (7, last))]
    small = 1e-6
    up, down = (
        float((fixers(fields + s * ways[0], last + s * ways[1]) * weight).sum())
        for s in (small, -small)
    )
    slope = float(sum((a * b).sum() for a, b in zip(slopes, ways, strict=True)))
    assert (up - down) / (2 * small) == pytest.approx(slope, rel=1e-6)


def test_surface_pressure_follows_from_mass():
    for kind in air.KINDS:
        layers = air.physical(kind).layers()
        draw = torch.Generator().manual_seed(1)
        pressure = 1e4 * (3 + 8 * torch.rand(1, 1, 5, 6, dtype=torch.float64, generator=draw))
        share = 0.5 + torch.rand(1, 4, 5, 6, dtype=torch.float64, generator=draw)
        mass = (share * layers.thickness(pressure)).sum(1, keepdim=True)
        assert torch.allclose(layers.surface_pressure(mass, share), pressure, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", [pytest.param("pressure", marks=pytest.mark.exhaustive), "model"])
def test_total_water_stands_for_vapour_and_condensates(kind):
    names = [c for c in air.channels(kind) if c.variable != air.WATER[1]]
    kept = [i for i, c in enumerate(air.channels(kind)) if c in names]
    mean, std = air.statistics(kind).mean[kept], air.statistics(kind).std[kept]
    none = np.empty(0)
    moments = Statistics(mean, std, 0.05 * std, none, none, none, none)
    states = air.states() - len(air.levels(kind))
    last = air.fields(kind, seed=1)[:, kept][:, :states]
    fields = air.fields(kind)[:, kept]

    def corrected(vapour: str) -> torch.Tensor:
        renamed = [Channel(vapour, c.level) if c.variable == air.WATER[0] else c for c in names]
        hybrid = air.HYBRID if kind == "model" else {}
        channels = PhysicalChannels(renamed, {}, moments, hybrid, air.ground())
        mean = air.global_mean(alone(), slice(0, air.ROWS))
        fixers = build_fixers(UNetConfig(fixers=list(ALL[-3:])), channels, mean, 6)
        assert fixers is not None
        return fixers(fields, last)

    found = corrected("specific_total_water")
    assert torch.equal(found, corrected(air.WATER[0]))
    assert not torch.equal(found, fields)
    assert has_variable(["specific_total_water"], "specific_humidity", 6)


@pytest.mark.parametrize("name", ["dry_air", pytest.param("water", marks=pytest.mark.exhaustive)])
def test_condensates_that_are_no_state_do_not_count(name):
    fields = air.fields("model")
    order = [i for i in range(fields.shape[1]) if not 4 <= i < 8]  # the state has no liquid water
    states = air.states() - len(air.MODEL)
    physical = air.physical("model", rain="standard")
    moved = [*order[:states], *range(4, 8), *order[states:]]
    physical.channels = tuple(physical.channels[i] for i in moved)
    physical.shift, physical.scale = physical.shift[moved], physical.scale[moved]
    mean = air.global_mean(alone(), slice(0, air.ROWS))
    fixers = build_fixers(UNetConfig(fixers=[name]), physical, mean, 6)
    assert fixers is not None
    last = air.fields("model", seed=1)[:, order[:states]]
    found = fixers(fields[:, moved], last)
    other = fields[:, moved].clone()
    other[:, states : states + 4] += 1
    others = fixers(other, last)
    others[:, states : states + 4] -= 1
    assert torch.allclose(found, others, rtol=1e-12, atol=1e-12)
    assert not torch.equal(found, fields[:, moved])


def test_numbers_stay_in_double_precision_if_a_model_is_cast():
    last, fields = air.fields("model", seed=1)[:, : air.states()], air.fields("model")
    fixers = built("model", (*ALL, "bounds"), bounds={"temperature": [200.0, 300.0]})
    wanted, before = fixers(fields, last), dict(fixers.named_buffers())
    assert torch.equal(fixers.float()(fields, last), wanted)
    fixers.bfloat16()
    assert all(torch.equal(x, before[name]) for name, x in fixers.named_buffers())

    def without_doubles(x: torch.Tensor) -> torch.Tensor:
        raise TypeError("no float64")

    with pytest.raises(UserError, match=r"^model.fixers: need float64, which this device doesn't"):
        fixers._apply(without_doubles)


def test_unknown_bounds_and_budgets_of_a_region_are_refused():
    with pytest.raises(UserError, match=r"model.bounds.wind: is no variable"):
        built("model", ("bounds",), bounds={"wind": [0, 1]})
    grid = Grid(np.linspace(60, 40, 5), np.arange(8.0))
    data = SimpleNamespace(store=SimpleNamespace(grid=grid))
    config = UNetConfig(fixers=["dry_air"])
    with pytest.raises(UserError, match=r"^model\.fixers: a global .*Leave the fixers"):
        fixers_of_run(config, data, alone(), torch.device("cpu"))
