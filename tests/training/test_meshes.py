"""Training is the same on every mesh of pipeline x data x domain ranks, and resumes on any."""

import re
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credit_dp.config import (
    AdamWConfig,
    Config,
    LionConfig,
    MuonConfig,
    StandardLossConfig,
    VariableConfig,
)
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.checkpoint import load_checkpoint
from tests.data import ensemble_stores, stores
from tests.ranks import on_processes
from tests.tier_cases import every, tiers
from tests.training.masked_stores import RAIN, SEA, SOIL, sea_config
from tests.training.meshes import (
    CLIP,
    HALF_WAY,
    MODELS,
    ONE,
    ROWS,
    STEPS,
    Mesh,
    Trajectory,
    assert_same_trajectory,
    full_arrays,
    on_mesh,
    record_trajectory,
    run_on_mesh,
    train_from_checkpoint,
    train_from_start,
)
from tests.training.plugins import LogCoshConfig, TorchOptimizerConfig
from tests.training.runs import alone, built, make_config, make_store, tiny_unet

SHAPES = [
    shape for shape in product((1, 2), (1, 2), (1, 2, 3)) if 1 < shape[0] * shape[1] * shape[2] <= 8
]
SCHEDULES = ("1f1b", "gpipe", "interleaved")
# Every two of pipeline, data, domain, mode, schedule and model meet in one of these.
COVERING = [
    ("unet", Mesh(1, 2, 1, "ddp")),
    ("unet", Mesh(1, 1, 2, "fsdp2")),
    ("crossformer", Mesh(2, 1, 1, "fsdp2", "gpipe")),
    ("unet", Mesh(2, 2, 1, "ddp", "interleaved")),
    ("depth", Mesh(2, 2, 1, "fsdp2", "1f1b")),
    ("unet", Mesh(2, 1, 2, "ddp", "1f1b")),
    ("crossformer", Mesh(2, 1, 2, "ddp", "interleaved")),
    ("crossformer", Mesh(1, 2, 3, "ddp")),
    ("crossformer", Mesh(2, 1, 3, "fsdp2", "1f1b")),
    ("crossformer", Mesh(2, 1, 3, "ddp", "gpipe")),
    ("unet", Mesh(2, 1, 3, "fsdp2", "interleaved")),
    ("unet", Mesh(2, 2, 2, "ddp", "gpipe")),
]
PLUGINS = ("plug-ins", Mesh(1, 2, 2, "fsdp2"))
# What the settings above leave out: the other models, in a pipeline of bands.
BESIDES = [
    PLUGINS,
    ("pangu", Mesh(2, 1, 2, "fsdp2", "interleaved")),
    ("swin", Mesh(2, 1, 2, "fsdp2", "interleaved")),
    ("sfno", Mesh(2, 1, 2, "fsdp2", "1f1b")),
    ("sfno", Mesh(1, 2, 2, "ddp")),
    ("partly used", Mesh(1, 2, 1, "ddp")),
    ("partly used", Mesh(1, 1, 3, "ddp")),
    ("deciding", Mesh(1, 1, 2, "ddp")),
    ("deciding", Mesh(1, 1, 3, "fsdp2")),
    ("partly used", Mesh(1, 2, 2, "fsdp2")),
]
# The fast tier has the first one and `RUNS`; `make test-all` has all pairs and all models.
OFTEN = [
    ("unet", Mesh(2, 1, 2, "ddp", "1f1b")),
    ("crossformer", Mesh(2, 1, 1, "fsdp2", "gpipe")),
    ("depth", Mesh(2, 2, 1, "fsdp2", "1f1b")),
    ("crossformer", Mesh(1, 2, 3, "ddp")),
    ("unet", Mesh(2, 1, 3, "fsdp2", "interleaved")),
    ("unet", Mesh(2, 2, 2, "ddp", "gpipe")),
]
CASES = tiers(
    fast=OFTEN[:1],
    slow=OFTEN[1:],
    exhaustive=[case for case in (*COVERING, *BESIDES) if case not in OFTEN],
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return a model's config with accumulation, and its trajectory on one process."""
    store = make_store(tmp_path_factory.mktemp("store"), ROWS)

    @cache
    def get(model: str) -> tuple[Config, Trajectory]:
        config = make_config(
            store,
            tmp_path_factory.mktemp(model),
            MODELS[model],
            steps=STEPS,
            accumulate=2,
            gradient_clip=CLIP,
        )
        config = replace(config, data=replace(config.data, batch_size=8))
        if model == "plug-ins":
            optimizer = TorchOptimizerConfig(lr=1e-2, warmup_steps=3)
            config = replace(config, loss=LogCoshConfig(level_weight=True), optimizer=optimizer)
        return config, run_on_mesh(ONE, train_from_start, config, None)

    return get


@pytest.fixture(scope="module")
def trained(reference, tmp_path_factory):
    """Return the trajectory of a model on a mesh, and its checkpoint of half way."""

    @cache
    def get(model: str, mesh: Mesh) -> tuple[Trajectory, Path]:
        folder = tmp_path_factory.mktemp("checkpoint")
        return (
            run_on_mesh(mesh, train_from_start, reference(model)[0], folder),
            folder,
        )

    return get


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_five_steps_are_those_of_one_process(reference, trained, model, mesh):
    _, wanted = reference(model)
    assert min(norm for _, norm in wanted[0]) > CLIP
    assert_same_trajectory(trained(model, mesh)[0], wanted)


# Runs in which several features meet, each on another mesh and with another optimizer.


def with_gaps(folder: Path) -> Config:
    """Points without values, quantiles, spectra, averages, and rollouts that grow."""
    mapped = {
        SEA: VariableConfig(fill="mean", normalise="quantile"),
        SOIL: VariableConfig(fill=0.1, nonnegative=True),
        RAIN: VariableConfig(normalise="log1p(1e-4)", nonnegative=True),
    }
    config = sea_config(folder, tiny_unet(frames=2), variables=mapped)
    trainer = replace(config.trainer, rollout={0: 1, 2: 2}, checkpoint_activations="step")
    optimizer = AdamWConfig(lr=1e-2, warmup_steps=3, layer_decay=0.8, ema=0.8)
    loss = StandardLossConfig(level_weight=True, variable_weight={SEA: 3.0}, spectrum=0.3)
    return replace(config, trainer=trainer, optimizer=optimizer, loss=loss)


def of_region(folder: Path) -> Config:
    """A region whose rim is given, dropped branches, frozen weights, and a rollout, by Lion."""
    data = stores.dataset(17, 16, 20)
    latitude, longitude = np.linspace(66, 30, 17), (350 + np.arange(16) * 2.0) % 360
    region = data.assign_coords(latitude=latitude, longitude=longitude)
    store = stores.write(region, folder / "region.zarr")
    config = make_config(store, folder, MODELS["depth"])
    config = replace(config, data=replace(config.data, boundary=3, relaxation=1))
    optimizer = LionConfig(lr=1e-3, warmup_steps=3, ema=0.8)
    trainer = replace(config.trainer, rollout={0: 2}, freeze=["head.bias"])
    loss = StandardLossConfig(name="huber", level_weight=True)
    return replace(config, trainer=trainer, optimizer=optimizer, loss=loss)


def of_members(folder: Path) -> Config:
    """All members of an ensemble, attention, micro-batches and clipping, by Muon."""
    data = ensemble_stores.dataset(rows=17, columns=16, steps=20)
    store = stores.write(data, folder / "members.zarr")
    config = make_config(store, folder, MODELS["crossformer"], accumulate=2, gradient_clip=CLIP)
    optimizer = MuonConfig(lr=1e-2, warmup_steps=3, adamw=["head.*"], ema=0.8)
    data = replace(config.data, batch_size=8)
    return replace(config, data=data, optimizer=optimizer)


def of_plugins(folder: Path) -> Config:
    """A user's model with parameters that it does not use, loss and optimizer."""
    config = make_config(make_store(folder, 17), folder, MODELS["partly used"])
    optimizer = TorchOptimizerConfig(lr=1e-2, warmup_steps=3, ema=0.8)
    return replace(config, loss=LogCoshConfig(level_weight=True), optimizer=optimizer)


RUNS = {
    with_gaps: Mesh(1, 1, 3),
    of_region: Mesh(1, 1, 3, "fsdp2"),
    of_members: Mesh(1, 2, 2, "fsdp2"),
    of_plugins: Mesh(1, 2, 2),
}


def train(
    manager: DomainParallelManager, config: Config, save_to: Path | None, resume: bool
) -> Trajectory:
    """Train all steps, or from the checkpoint half way; return averages beside the weights."""
    training = built(config, manager)
    state = training.trainer.state
    if resume:
        load_checkpoint(save_to, state)
        assert state.step == HALF_WAY
    numbers, weights = record_trajectory(training, None if resume else save_to)
    with state.eval_mode():
        averages = full_arrays(state.trainable_parameters)
    return numbers, weights | {f"average.{name}": value for name, value in averages.items()}


@pytest.mark.parametrize(
    "run",
    every(len(RUNS), RUNS),
    ids=lambda run: f"{run.__name__}-{RUNS[run]}",
)
def test_any_run_trains_as_on_one_process_and_resumes_there(tmp_path, run):
    config, mesh = run(tmp_path), RUNS[run]
    config = replace(config, trainer=replace(config.trainer, steps=STEPS, checkpoint_every=STEPS))
    numbers, weights = wanted = run_on_mesh(ONE, train, config, None, False)
    assert len(set(numbers)) >= 3
    assert_same_trajectory(run_on_mesh(mesh, train, config, tmp_path / "saved", False), wanted)
    resumed = run_on_mesh(ONE, train, config, tmp_path / "saved", True)
    assert_same_trajectory(resumed, (numbers[HALF_WAY:], weights))


def settings(model: str, mesh: Mesh) -> set[tuple[str, Any]]:
    """Return a run's settings by name; only a pipeline has a schedule. `depth` is a U-Net."""
    found = {("model", "unet" if model == "depth" else model), *mesh._asdict().items()}
    return found if mesh.pipeline > 1 else found - {("schedule", mesh.schedule)}


def test_every_two_settings_meet_in_a_run():
    models = ("unet", "crossformer")
    every = product(models, SHAPES, ("ddp", "fsdp2"), SCHEDULES)
    runs = [settings(model, Mesh(*shape, *how)) for model, shape, *how in every]
    found = [settings(*case) for case in COVERING]
    pairs = {frozenset(pair) for run in runs for pair in combinations(run, 2)}
    assert [set(pair) for pair in pairs if not any(pair <= run for run in found)] == []


def seed_of_last_step(manager: DomainParallelManager, config: Config) -> int:
    record_trajectory(built(config, manager))
    return torch.initial_seed()


@pytest.mark.slow
def test_ranks_draw_different_dropout(reference):
    config, _ = reference("unet")
    mesh = Mesh(2, 1, 2)
    found = on_processes(4, seed_of_last_step, on_mesh(config, mesh), domain=2, pipeline=2)
    assert len(set(found)) == 4
    record_trajectory(built(config, alone()))
    assert found[0] == torch.initial_seed()


def bubble_message(manager: DomainParallelManager, config: Config) -> str:
    training = built(config, manager)
    record_trajectory(training)
    return training.trainer.forward_backward.bubble_message()


@pytest.mark.exhaustive
def test_a_pipeline_says_how_long_its_ranks_waited(reference):
    config, _ = reference("unet")
    assert bubble_message(alone(), config) == ""
    mesh = on_mesh(config, Mesh(2, 1, 1, schedule="interleaved"))
    first, second = on_processes(2, bubble_message, mesh, domain=1, pipeline=2)
    assert first == second
    # Two ranks with two stages each, and four micro-batches: 1 / (2 * 4 + 1).
    found = re.fullmatch(r"pipeline: ranks waited (\S+)% of .*, 11\.1% in theory", first)
    assert found is not None
    assert 0 < float(found[1]) < 100


# Each mesh resumes from the checkpoint of the one before; the last one is a single process.
CHAIN = [
    ONE,
    Mesh(1, 1, 2, "fsdp2"),
    Mesh(2, 2, 1, "ddp", "interleaved"),
    Mesh(1, 2, 1, "ddp"),
    Mesh(2, 1, 2, "ddp", "1f1b"),
    ONE,
]
RESUMED = [("unet", a, b) for a, b in pairwise(CHAIN)]
OTHERS = [
    (*PLUGINS, ONE),
    ("partly used", Mesh(1, 1, 3, "ddp"), Mesh(1, 2, 2, "fsdp2")),
]


@pytest.mark.parametrize(
    ("model", "first", "second"), tiers([], RESUMED[1:4:2], RESUMED[::2] + OTHERS)
)
def test_a_checkpoint_resumes_on_another_mesh(reference, trained, model, first, second):
    config, (numbers, weights) = reference(model)
    _, checkpoint = trained(model, first)
    assert_same_trajectory(
        run_on_mesh(second, train_from_checkpoint, config, checkpoint),
        (numbers[HALF_WAY:], weights),
    )
