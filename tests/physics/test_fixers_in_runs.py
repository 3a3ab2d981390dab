"""Runs with fixers: training on every mesh, forecasts, exported models, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import credit_dp
from credit_dp.cli.check_run import open_data
from credit_dp.cli.export import checkpoint
from credit_dp.config import Config, StandardLossConfig, VariableConfig
from credit_dp.config.data import ROLES
from credit_dp.data.channels import Channel
from credit_dp.data.grid import row_weights
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.gridded import hybrid_coefficients
from credit_dp.data.store import Store
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOutData
from credit_dp.forecast.format import describe_difference, settings_of
from credit_dp.physics.columns import NamedChannels, hybrid_of, pressures_of
from credit_dp.physics.fixers import check_signs
from credit_dp.training.loss import channel_weights
from credit_dp.training.monitoring import Validation
from credit_dp.training.start_checks import check_start
from tests.data.rechunk.requests import prepared
from tests.forecast.runs import forecast, forecast_config, leave_checkpoint
from tests.physics import atmospheres as air
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.meshes import (
    ONE,
    Mesh,
    assert_same_trajectory,
    run_on_mesh,
    train_from_start,
)
from tests.training.runs import alone, built, tiny_unet

ALL = ["nonnegative", "dry_air", "water", "energy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("air")


@pytest.fixture(scope="module")
def run(folder):
    """A trained run with fixers on model levels, and its training."""
    config = air.atmosphere_config(folder, "model", ALL, steps=2, dtype="float32")
    return config, leave_checkpoint(config)


@pytest.mark.parametrize(
    ("kind", "mesh", "rollout", "residual"),
    tiers(
        fast=[],
        # In a pipeline, a model of next states gets the state before for its fixers.
        slow=[("pressure", Mesh(1, 1, 3), {0: 2}, True), ("model", Mesh(2, 1, 2), {0: 1}, False)],
        exhaustive=[
            ("model", Mesh(2, 1, 2), {0: 1}, True),
            ("model", Mesh(1, 2, 2), {0: 2}, True),
            ("model", Mesh(1, 2, 2, "fsdp2"), {0: 2}, True),
        ],
    ),
)
def test_training_is_the_same_on_every_mesh(folder, kind, mesh, rollout, residual):
    config = air.atmosphere_config(folder, kind, ALL, steps=3, rollout=rollout)
    config = replace(config, model=replace(config.model, residual=residual))
    wanted = run_on_mesh(ONE, train_from_start, config, None)
    assert_same_trajectory(run_on_mesh(mesh, train_from_start, config, None), wanted)
    without = replace(config, model=replace(config.model, fixers=[]))
    other = run_on_mesh(ONE, train_from_start, without, None)
    assert other[0] != wanted[0]


@pytest.mark.slow
def test_plans_count_the_memory_of_fixers(folder):
    from credit_dp.costs.budget import plan_step, training_memory

    kind = "pressure"
    config = air.atmosphere_config(folder, kind, ALL, steps=2, dtype="float32", rollout={0: 3})
    config = replace(config, parallel=replace(config.parallel, domain=3))
    (held,) = (budget.held for budget in plan_step(config).budgets if budget.mode == "ddp")
    rows = -(-air.ROWS // 3)
    fields = 4 * config.data.batch_size * len(air.channels(kind)) * rows * air.COLUMNS
    assert fields < held["fixers"] < 1.05 * fields
    assert held["fixers again"] > 3 * fields
    memory = training_memory(held, config)
    assert memory["fixers"] == 3 * held["fixers"]
    assert memory["fixers again"] == held["fixers again"]
    one_step = replace(config.trainer, rollout={0: 1})
    parallel = replace(config.parallel, pipeline=2, schedule="gpipe")
    cut = replace(config, parallel=parallel, trainer=one_step)
    first, last = (b.held for b in plan_step(cut).budgets if b.mode == "ddp")
    assert first["fixers"] == 0
    assert last["fixers"] == pytest.approx(held["fixers"], rel=0.01)  # in four micro-batches
    without = replace(config, model=tiny_unet())
    assert "fixers" in held
    assert plan_step(without).budgets[0].held["fixers"] == 0


def dry_air(data: xr.Dataset) -> np.ndarray:
    """Return the globe's dry air of fields on model levels, in Pa."""
    water = sum(data[name].values.astype(float) for name in air.WATER)
    a, b = (np.diff(np.array(air.HYBRID[name]))[:, None, None] for name in "ab")
    pressure = data["surface_pressure"].values.astype(float)[..., None, :, :]
    dry = ((1 - water) * (a + b * pressure)).sum(-3)
    weights = row_weights(data["latitude"].values)[:, None]
    return (dry * weights).mean((-1, -2))


@pytest.mark.slow
def test_forecasts_keep_the_mass_of_dry_air_on_every_mesh(folder, run, tmp_path):
    """Diagnostics are the same on every mesh, too."""
    config, _ = run
    corrections = "water_correction,energy_correction"  # not in the order of the fixers
    names = f"[z,msl,{corrections},dry_air_correction,tcw]"
    keys = {"init": "2000-01-04", "lead": "12h", "diagnostics": names}
    one = forecast(forecast_config(config, tmp_path / "one.zarr", **keys))
    with xr.open_zarr(one) as data:
        mass = dry_air(data)  # (time, lead)
        with xr.open_zarr(config.data.store, consolidated=False) as store:
            start = dry_air(store.sel(time=data["time"].values))
        assert np.abs(mass / start[:, None] - 1).max() < 1e-6
        three = forecast(forecast_config(config, tmp_path / "three.zarr", **keys), ranks=3)
        with xr.open_zarr(three) as bands:
            written = {"geopotential", "mean_sea_level_pressure", *corrections.split(",")}
            assert written <= {*data.data_vars}
            assert bands["energy_correction"].attrs["units"] == "J m-2"
            assert bands["water_correction"].attrs["cell_methods"] == "prediction_timedelta: sum"
            for name in data.data_vars:
                scale = float(data[name].std())
                if name.endswith("_correction"):  # one of them is the same everywhere
                    scale = float(np.abs(data[name]).max())
                assert float(np.abs(data[name] - bands[name]).max()) < 1e-3 * scale
    keys |= {"diagnostics": "", "lead": "6h"}
    free = replace(config, model=tiny_unet())
    free_path = forecast(forecast_config(free, tmp_path / "free.zarr", **keys))
    keys |= {"diagnostics": "dry_air_correction"}
    dry = replace(config, model=tiny_unet(fixers=["dry_air"]))
    dry_path = forecast(forecast_config(dry, tmp_path / "dry.zarr", **keys))
    with xr.open_zarr(free_path) as without, xr.open_zarr(dry_path) as data:
        assert np.abs(dry_air(without) / start[:, None] - 1).max() > 1e-5
        gained = (dry_air(data) - dry_air(without)) / 9.80665  # of the first step
        found = data["dry_air_correction"].values
        assert np.ptp(found) == 0
        assert found.mean((2, 3)) == pytest.approx(gained, rel=1e-2)


def validated(manager: DomainParallelManager, config: Config) -> dict[str, float]:
    """Return the scores of untrained weights."""
    training = built(config, manager)
    training.loader.close()
    return dict(Validation(config, prepare_training_data(config.data), training, manager)())


def test_validations_log_corrections_on_every_mesh(folder):
    """They are means over the globe and all steps of what fixers add."""
    config = air.atmosphere_config(folder, "model", ["dry_air"])
    dates = replace(config.data.dates, valid=["2000-01-03", "2000-01-04"])
    config = replace(
        config,
        data=replace(config.data, dates=dates),
        trainer=replace(config.trainer, evaluate_hours=[12]),
    )
    found = validated(alone(), config)["validation_dry_air_correction"]

    training = built(config, alone())
    training.loader.close()
    ready = prepare_training_data(config.data)
    dates = Validation(config, ready, training, alone()).dates[""]
    step = training.forecast_step

    def mass(fields: torch.Tensor) -> np.ndarray:
        """Return the globe's dry air of normalised fields, in kg m-2."""
        mean, std = (x[:, None, None] for x in (ready.statistics.mean, ready.statistics.std))
        values = fields.detach().numpy() * std + mean
        order = [channel.variable for channel in ready.store.channels.output_channels]
        dims = ("sample", "level", "latitude", "longitude")
        data = xr.Dataset({"latitude": air.latitude()})
        for name in air.WATER:
            data[name] = dims, values[:, [i for i, x in enumerate(order) if x == name]]
        name = "surface_pressure"
        data[name] = ("sample", *dims[2:]), values[:, order.index(name)]
        return dry_air(data) / 9.80665

    gained = []
    for time in dates.initial_times:
        times = np.array([time])
        state = dates.initial_states(times)
        for lead in range(2):
            inputs = state, dates.forcing(times + lead * dates.step), dates.static(1)
            fixed = step(*inputs)
            gained.append(mass(fixed) - mass(step.without_fixers()(*inputs)))
            state = fixed[:, : step.states]
    assert len(gained) >= 4
    assert np.abs(gained).max() > 1e-3
    assert found == pytest.approx(np.mean(gained), rel=1e-6)
    for scores in on_processes(3, validated, config):
        assert scores["validation_dry_air_correction"] == pytest.approx(found, rel=1e-9)


def test_a_forecast_does_not_continue_with_other_fixers(run, tmp_path):
    config, _ = run
    asked = forecast_config(config, tmp_path / "one.zarr")

    class Form:  # all that settings need of a format
        pass

    def settings(names: list[str]) -> dict[str, Any]:
        changed = replace(asked, model=tiny_unet(fixers=names))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("credit_dp.forecast.format.format_to_json", lambda form: {})
            return settings_of(changed, Form(), "", [])  # type: ignore[arg-type]

    difference = describe_difference(settings(ALL), settings(["dry_air"]))
    assert difference == f"model.fixers={ALL}, not ['dry_air']"


def test_an_exported_model_has_its_fixers(run, tmp_path):
    config, training = run
    out = tmp_path / "model.safetensors"
    path = Path(config.run.dir)
    assert checkpoint(["export", str(path), "--output", str(out)], "credit-dp checkpoint") == 0
    prepared = prepare_training_data(config.data)
    dates = HeldOutData(config, prepared, slice(None), training.like)
    times = dates.initial_times[:2]
    for parts in training.trainer.state.parts:
        parts.eval()
    with torch.no_grad():
        wanted = training.forecast_step(
            dates.initial_states(times), dates.forcing(times), dates.static(2)
        )
        fields = torch.from_numpy(prepared.store.read_states(times, slice(None)))
        for source in (out, path):
            model = credit_dp.load(str(source))
            assert model.fixers is not None
            found = model(fields, times)
            expected = dates.normaliser.denormalise(wanted)
            scale = expected.abs().amax((0, 2, 3), keepdim=True)
            assert ((found - expected) / scale).abs().max() < 1e-6
            found = model.float()(fields, times)
            assert ((found - expected) / scale).abs().max() < 1e-6


def opened(config: Config) -> Store:
    return Store.open(config.data)


def test_coefficients_come_from_the_config_or_the_store(folder):
    config = air.atmosphere_config(folder, "model", ["dry_air"])
    assert hybrid_of(opened(config)) == air.HYBRID
    some = air.atmosphere_config(folder, "model", ["dry_air"], levels=[4, 3])
    assert hybrid_of(opened(some)) == {x: air.HYBRID[x][2:5] for x in "ab"}
    some.data.hybrid = {"a": [0.0, 5000.0, 0.0], "b": [0.0, 0.0, 1.0]}
    assert hybrid_of(opened(some)) == some.data.hybrid
    assert hybrid_of(opened(air.atmosphere_config(folder, "pressure", ["dry_air"]))) == {}


@pytest.mark.slow
def test_coefficients_come_from_a_prepared_copy(folder):
    config = air.atmosphere_config(folder, "model", ["dry_air"])
    roles = {name: getattr(config.data, name) for name in ROLES} | {"variables": {}}
    copied = prepared(Path(config.data.store), folder / "copy.zarr", data=roles)
    config.data.name, config.data.store = "prepared", str(copied)
    assert hybrid_of(opened(config)) == air.HYBRID


def as_written_by_others(folder: Path) -> Path:
    """Return a store of model levels whose dim is called `level`, without the coefficients."""
    path = folder / "called level.zarr"
    if not path.exists():
        data = air.dataset("model").drop_vars(["hyai", "hybi"]).rename(hybrid="level")
        # As every n-th of many model levels: nothing but `data.hybrid` says what they are.
        data = data.assign_coords(level=[10, 60, 100, 137])
        air.stores.write(data, path, chunks={"time": 1, "latitude": 4})
    return path


@pytest.mark.slow
def test_coefficients_make_a_dim_called_level_one_of_model_levels(folder, tmp_path):
    config = air.atmosphere_config(
        folder,
        "model",
        ["nonnegative", "dry_air"],
        steps=2,
        dtype="float32",
        store=str(as_written_by_others(folder)),
        hybrid=air.HYBRID,
    )
    leave_checkpoint(config)
    written = forecast(
        forecast_config(config, tmp_path / "f.zarr", lead="24h", diagnostics="[tcwv]")
    )
    with xr.open_zarr(written) as data:
        assert data["level"].attrs["standard_name"] == "model_level_number"
        mass = dry_air(data)
        with xr.open_zarr(config.data.store, consolidated=False) as store:
            start = dry_air(store.sel(time=data["time"].values))
        np.testing.assert_allclose(mass, np.broadcast_to(start[:, None], mass.shape), rtol=2e-7)
        # Column vapour in kg m-2 by hand: the layers' thickness in Pa over gravity.
        a, b = (np.diff(np.array(air.HYBRID[name]))[:, None, None] for name in "ab")
        surface = data["surface_pressure"].values.astype(float)[..., None, :, :]
        humidity = data["specific_humidity"].values.astype(float)
        column = (humidity * (a + b * surface)).sum(-3) / 9.80665
        found = data["total_column_water_vapour"].values
        np.testing.assert_allclose(found, column, rtol=1e-5)


@pytest.mark.slow
def test_a_dim_called_level_needs_its_coefficients(folder):
    store = str(as_written_by_others(folder))
    for levels, said in (
        (None, "has levels of 10 to 137, which are no pressures in hPa down to the ground. If"),
        ([10, 60], "has levels of 10 to 60, which are no pressures in hPa down to the ground"),
    ):
        config = air.atmosphere_config(folder, "model", ["dry_air"], store=store, levels=levels)
        with pytest.raises(UserError, match=said):
            check_start(config, open_data(config).times, 1)
    # Without fixers, too.
    config = air.atmosphere_config(
        folder, "model", [], store=store, hybrid={"a": [0.0, 0.0], "b": [0.0, 1.0]}
    )
    with pytest.raises(UserError, match="at the 5 interfaces of 4 levels, got 2"):
        check_start(config, open_data(config).times, 1)


def test_levels_of_a_variable_do_not_include_its_fields_on_pressure_levels():
    """As `T500` beside temperature on model levels."""
    upper = [Channel(name, level) for name in ("temperature", "u") for level in (1, 2)]
    named = NamedChannels([*upper, Channel("T500"), Channel("surface_pressure")], {}, None)
    assert named.select("temperature") == slice(0, 2)
    assert [named.name(channel) for channel in named.channels[-2:]] == ["T500", "surface_pressure"]


def test_the_loss_weighs_model_levels_by_their_pressure(folder):
    store = str(as_written_by_others(folder))
    config = air.atmosphere_config(folder, "model", [], store=store, hybrid=air.HYBRID)
    # By hand from the coefficients over 1000 hPa: interfaces 0, 50, 350, 780 and 1000 hPa.
    assert pressures_of(opened(config)) == pytest.approx({10: 25, 60: 200, 100: 565, 137: 890})
    of_store = air.atmosphere_config(folder, "model", [], levels=[4, 2])
    assert pressures_of(opened(of_store)) == pytest.approx({2: 200, 4: 890})
    assert pressures_of(opened(air.atmosphere_config(folder, "pressure", []))) is None
    pressures = {10: 25.0, 137: 75.0}
    channels = (Channel("temperature", 10), Channel("temperature", 137))
    found = channel_weights(StandardLossConfig(level_weight=True), channels, pressures)
    assert found.tolist() == [0.5, 1.5]


def test_coefficients_of_cam_and_others_have_their_unit_and_begin_at_the_top():
    """Those of CAM are multiples of its reference pressure."""
    data = xr.Dataset({"hyai": ("ilev", [0.0, 0.1, 0.0]), "hybi": ("ilev", [0.0, 0.2, 1.0])})
    for changes, wanted in (({}, 1e4), ({"P0": 9e4}, 9e3)):
        found = hybrid_coefficients(data.assign(changes))
        assert found is not None
        assert found[0].tolist() == pytest.approx([0, wanted, 0])
        assert found[1].tolist() == [0, 0.2, 1]
    assert hybrid_coefficients(data.drop_vars("hybi")) is None
    data = air.dataset("model")[["hyai", "hybi", "hybrid"]]

    def found(data: xr.Dataset, unit: str, scale: float = 1.0) -> Any:
        with_unit = (scale * data["hyai"]).assign_attrs(units=unit)
        stored = hybrid_coefficients(data.assign(hyai=with_unit))
        return None if stored is None else [x.tolist() for x in stored]

    wanted = [pytest.approx(air.HYBRID[name]) for name in "ab"]
    for unit, scale in (("Pa", 1), ("", 1), ("hPa", 1e-2), ("millibars", 1e-2), ("1", 1e-5)):
        assert found(data, unit, scale) == wanted
    assert found(data, "m") is None
    turned = data.isel(nhyi=slice(None, None, -1))
    assert found(turned.isel(hybrid=slice(None, None, -1)), "Pa") == wanted
    assert found(turned, "Pa") is None  # level 1 is the lowest
    assert found(data.isel(nhyi=[0, 2, 1, 3, 4]), "Pa") is None


@pytest.mark.slow
def test_fluxes_with_the_other_sign_are_refused(folder):
    """As evaporation of most climate models, which is positive upwards."""
    data, path = air.dataset("model"), folder / "upward.zarr"
    upward = {name: -data[name] for name in (air.EVAPORATION, air.TOP[1])}
    air.stores.write(data.assign(upward), path, chunks={"time": 1})
    config = air.atmosphere_config(folder, "model", [], store=str(path))
    read = prepare_training_data(config.data)
    check_signs(replace(config.model, fixers=["dry_air"]), read.store, read.statistics)
    for fixer, name in (("water", air.EVAPORATION), ("energy", air.TOP[1])):
        with pytest.raises(UserError, match=f"model.fixers: {fixer} needs {name} positive down"):
            check_signs(replace(config.model, fixers=[fixer]), read.store, read.statistics)


@pytest.mark.slow
def test_data_that_do_not_fit_are_refused(folder):
    path = folder / "bare.zarr"
    bare = air.dataset("model").drop_vars(["hyai", "hybi"])
    air.stores.write(bare, path, chunks={"time": 1})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"levels": [1, 3]}, "data.levels has 2 of 1 to 3. Choose levels without a gap"),
        ({"hybrid": {"a": [0, 1], "b": [0, 1]}}, "data.hybrid: needs a and b at the 5 interfaces"),
        (
            {"levels": [3, 2]},
            "data.levels ends at level 3: needs the ground, with a=0 and b=1, as the last "
            "interface, got a=8000 and b=0.7. Add the levels down to 4 to data.levels",
        ),
        (
            {"levels": [1, 3], "hybrid": {"a": [0, 9e3, 8e3], "b": [0, 0, 0.7]}},
            "data.hybrid: needs the ground, with a=0 and b=1, as the last interface, got a=8000",
        ),
        (
            {"variables": {air.WATER[1]: VariableConfig(fill=0.0)}},
            "model.fixers: dry_air needs specific_cloud_liquid_water_content everywhere, but",
        ),
        ({"store": str(path)}, "from the top) nor data.hybrid has them"),
        (
            {"variables": {air.EVAPORATION: VariableConfig(accumulated=False)}},
            "model.fixers: water needs sums over a step of evaporation",
        ),
        (
            {"variables": {"surface_pressure": VariableConfig(fill="mean")}},
            "model.fixers: dry_air needs surface_pressure everywhere, but it has a fill",
        ),
    ]
    for changes, said in cases:
        config = air.atmosphere_config(folder, "model", ["dry_air", "water"], **changes)
        with pytest.raises(UserError) as error:
            check_start(config, open_data(config).times, 1)  # as `--check` does
        assert said in str(error.value)
        assert "\n" not in str(error.value)
