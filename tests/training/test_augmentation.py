"""Samples are turned, mirrored and made noisy as defined, in the same way on every mesh."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credit_dp.config import Config, VariableConfig
from credit_dp.data.grid import Grid
from credit_dp.data.loader import Batch
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import TrainingData, prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.augmentation import _check_signs, build_augmentation, changes_sign
from tests.physics import atmospheres as air
from tests.ranks import on_threads
from tests.training.runs import alone, built, tiny_unet, train_on

FORCING = ["day_of_year_sin", "hour_of_day_sin", "insolation"]
STATIC = ["geopotential_at_surface", "latitude_sin", "latitude_cos"]
SAMPLES, FRAMES, STEPS = range(4, 10), 2, 2
LIKE = torch.zeros((), dtype=torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("augmented")


def config_of(folder: Path, augment: dict[str, Any], **changes: Any) -> Config:
    """Return a run with `augment` of the trainer's keys."""
    config = air.atmosphere_config(
        folder, "pressure", [], **{"forcing": FORCING, "static": STATIC, **changes}
    )
    trainer = replace(config.trainer, **augment)
    return replace(config, trainer=trainer, model=tiny_unet(frames=FRAMES))


@pytest.fixture(scope="module")
def data(folder):
    return prepare_training_data(config_of(folder, {}).data)


def batch_of(data: TrainingData, rows: slice) -> Batch:
    """Return random fields of a band, normalised."""
    channels = data.store.channels
    draw = torch.Generator().manual_seed(1)
    counts = {
        "state": FRAMES * channels.num_states,
        "forcing": STEPS * len(channels.forcing),
        "static": len(channels.static),
        "target": STEPS * channels.num_outputs,
    }
    parts = {
        name: torch.randn(
            len(SAMPLES), count, air.ROWS, air.COLUMNS, dtype=torch.float64, generator=draw
        )[:, :, rows]
        for name, count in counts.items()
    }
    return Batch(**parts, times=np.zeros(len(SAMPLES), "M8[ns]"))


def augmented(
    manager: DomainParallelManager, config: Config, data: TrainingData, step: int = 3
) -> tuple[Batch, Batch]:
    """Return a batch of this rank's rows, before and after."""
    batch = batch_of(data, manager.rows(air.ROWS))
    augmentation = build_augmentation(config, data, manager, LIKE)
    assert augmentation is not None
    return batch, augmentation(batch, step, SAMPLES)


def parts(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: getattr(batch, name) for name in ("state", "forcing", "static", "target")}


@pytest.mark.slow
def test_a_turned_sample_has_all_fields_some_columns_further(folder, data):
    """On the globe and in a band of latitudes."""
    for north in (90, 30):
        there = on_grid(data, Grid(data.store.latitude * north / 90, data.store.longitude))
        before, after = augmented(alone(), config_of(folder, {"shift_longitude": True}), there)
        found = set()
        for sample in range(len(SAMPLES)):
            shifts = [
                shift
                for shift in range(air.COLUMNS)
                if all(
                    torch.equal(field[sample].roll(shift, -1), getattr(after, name)[sample])
                    for name, field in parts(before).items()
                )
            ]
            assert len(shifts) == 1, north
            found.update(shifts)
        assert len(found) > 2, north


def in_units(data: TrainingData, part: str, fields: torch.Tensor) -> np.ndarray:
    """Return fields of a part of a batch in units, without the inverse of logarithms."""
    shift, scale = Normaliser.of(data, torch.float64).shift_and_scale(part)
    count = fields.shape[1] // {"state": FRAMES, "static": 1}.get(part, STEPS)
    times = fields.shape[1] // count
    values = fields * scale[:count].repeat(times, 1, 1) + shift[:count].repeat(times, 1, 1)
    return values.unflatten(1, (times, count)).numpy()


def test_a_mirrored_sample_is_the_other_hemisphere(folder, data):
    before, after = augmented(alone(), config_of(folder, {"mirror": 1.0}), data)
    outputs = [channel.variable for channel in data.store.channels.output_channels]
    names = {
        "state": outputs[: data.store.channels.num_states],
        "forcing": FORCING,
        "static": STATIC,
        "target": outputs,
    }
    odd = {"v_component_of_wind", "day_of_year_sin", "latitude_sin"}
    for part, of_part in names.items():
        signs = np.array([-1 if name in odd else 1 for name in of_part])[:, None, None]
        wanted = signs * in_units(data, part, getattr(before, part))[..., ::-1, :]
        found = in_units(data, part, getattr(after, part))
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12 * np.abs(wanted).max())
        assert any(name in odd for name in of_part)


SIGNS = {
    True: "v v_500 v10 10m_v_component_of_neutral_wind v10n V10N v_component_stokes_drift "
    "relative_vorticity absolute_vorticity pv meridional_wind nsss viwvn latitude "
    "northward_turbulent_surface_stress sin_latitude streamfunction coriolis_parameter "
    "sin_julian_day cos_julian_day solar_declination vas va VGRD10m V500 VAR_10V",
    False: "u10 t divergence cos_latitude longitude vertical_velocity wind_speed viwve "
    "sin_local_time insolation tsi uas vapour_pressure lsm U500",
}


def test_the_sign_of_variables_by_their_names():
    for odd, names in SIGNS.items():
        for name in names.split():
            assert changes_sign(name, VariableConfig()) == odd, name
            assert changes_sign(name, VariableConfig(sign_changes=not odd)) != odd, name


def test_directions_can_not_be_mirrored(folder, data):
    config = config_of(folder, {"mirror": 0.5})
    renamed = with_config(data.store, data.store.config)
    renamed.channels = replace(renamed.channels, static=("mean_wave_direction",))
    other = replace(data, store=renamed)
    with pytest.raises(UserError, match=r"^trainer.mirror: mean_wave_direction is a direction"):
        build_augmentation(config, other, alone(), LIKE)
    given = {"mean_wave_direction": VariableConfig(sign_changes=False)}
    renamed.config = replace(renamed.config, variables=given)
    _check_signs(renamed)


def test_a_share_of_the_samples_is_mirrored(folder, data):
    config = config_of(folder, {"mirror": 0.4})
    changed = []
    for step in range(20):
        before, after = augmented(alone(), config, data, step)
        changed += [not torch.equal(a, b) for a, b in zip(before.target, after.target, strict=True)]
    assert 0.3 < np.mean(changed) < 0.5


def test_noise_has_the_asked_size_and_changes_inputs_only(folder, data):
    config = config_of(folder, {"input_noise": 0.2})
    before, after = augmented(alone(), config, data)
    noise = after.state - before.state
    per_channel = noise.std((0, 2, 3)) / Normaliser.of(data, torch.float64).std.flatten()[
        : data.store.channels.num_states
    ].repeat(FRAMES)
    assert per_channel.numpy() == pytest.approx(0.2, rel=0.12)
    assert abs(float(noise.mean())) < 0.01
    for name in ("forcing", "static", "target"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    newest = replace(before, state=before.state[:, data.store.channels.num_states :])
    augmentation = build_augmentation(config, data, alone(), LIKE)
    assert augmentation is not None
    # A stage of a pipeline that has the newest state only gives it the same noise.
    alike = augmentation(newest, 3, SAMPLES).state
    assert torch.equal(alike, after.state[:, data.store.channels.num_states :])
    for samples in ((0, 1), (2, 5)):  # samples and rows have noise of their own
        assert not torch.allclose(noise[samples[0]], noise[samples[1]])
    assert not torch.allclose(noise[:, :, 0], noise[:, :, 1])
    _, other = augmented(alone(), config, data, step=4)
    assert not torch.allclose(other.state, after.state)


ALL = {"shift_longitude": True, "mirror": 0.5, "input_noise": 0.1}


def test_bands_are_those_of_the_globe(folder, data):
    config = config_of(folder, ALL)
    _, wanted = augmented(alone(), config, data)
    found = [after for _, after in on_threads(3, augmented, config, data)]
    for name, whole in parts(wanted).items():
        assert torch.equal(torch.cat([getattr(part, name) for part in found], dim=2), whole)


@pytest.mark.slow
def test_points_without_values_get_no_noise(folder):
    filled = {"surface_pressure": VariableConfig(fill=1e5)}
    config = config_of(folder, {"input_noise": 0.1}, variables=filled)
    data = prepare_training_data(config.data)
    index = data.store.channels.slice_of("surface_pressure").start
    augmentation = build_augmentation(config, data, alone(), LIKE)
    assert augmentation is not None
    assert augmentation._valid is not None
    augmentation._valid[index, 3, 4] = False
    batch = batch_of(data, slice(None))
    noise = augmentation(batch, 0, SAMPLES).state - batch.state
    points = noise.unflatten(1, (FRAMES, -1))[:, :, index] == 0
    assert points[:, :, 3, 4].all()
    assert points.sum() == len(SAMPLES) * FRAMES


def test_training_augments_its_samples(folder):
    losses = []
    for augment in ({}, ALL):
        training = built(config_of(folder, {**augment, "steps": 1}), alone())
        losses.append(train_on(training)[0])
    assert losses[0] != losses[1]


def test_what_can_not_be_turned_is_refused(folder, data):
    cases: list[tuple[dict[str, Any], dict[str, VariableConfig], str]] = [
        ({"mirror": 0.5}, {"surface_pressure": VariableConfig(fill="mean")}, "has a fill. Leave"),
        (
            {"shift_longitude": True},
            {"surface_pressure": VariableConfig(fill="mean")},
            "trainer.shift_longitude: needs values on all points",
        ),
        (
            {"mirror": 0.5},
            {air.RAIN: VariableConfig(normalise="log1p(1e-3)", sign_changes=True)},
            "total_precipitation_6hr changes sign, and can't be normalised by log1p",
        ),
        (
            {"mirror": 0.5},
            {air.RAIN: VariableConfig(normalise="sqrt", sign_changes=True)},
            "total_precipitation_6hr changes sign, and can't be normalised by sqrt",
        ),
    ]
    for augment, variables, said in cases:
        config = config_of(folder, augment)
        store = data.store
        changed = replace(store.config, variables=variables)
        other = replace(data, store=with_config(store, changed))
        with pytest.raises(UserError) as error:
            build_augmentation(config, other, alone(), LIKE)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    latitude, longitude = data.store.latitude, data.store.longitude
    for key, value, grid, said in (
        ("mirror", 0.5, Grid(latitude - 1.0, longitude), "needs latitudes that are the same in"),
        ("mirror", 0.5, Grid(latitude[:-1], longitude), "needs latitudes that are the same in"),
        ("shift_longitude", True, Grid(latitude, longitude / 2), "a global grid is needed here"),
    ):
        with pytest.raises(UserError, match=f"trainer.{key}: {said}"):
            build_augmentation(config_of(folder, {key: value}), on_grid(data, grid), alone(), LIKE)


def on_grid(data: TrainingData, grid: Grid) -> TrainingData:
    """Return the data of another grid."""
    store = with_config(data.store, data.store.config)
    store.grid = grid
    return replace(data, store=store)


def with_config(store: Any, config: Any) -> Any:
    """Return a store with another config."""
    changed = store.with_masks({})
    changed.config = config
    return changed
