"""Training is the same on every mesh of pipeline x data x domain ranks, and resumes on any."""

import re
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from credit_dp.config import Config, ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build import Training
from credit_dp.training.checkpoint import load_checkpoint, save_checkpoint
from tests.ranks import on_processes
from tests.training.own import LogCoshConfig, TorchOptimizerConfig
from tests.training.runs import alone, built, make_config, make_store, step_records, tiny_unet
from tests.training.test_trajectory import TINY_MODELS

ROWS = 33  # no multiple of 2 or 3
STEPS, HALF_WAY = 5, 2
CLIP = 0.02  # of norms above: every step is clipped

MODELS = {
    "unet": tiny_unet(global_conditioning=True, squeeze_excite=True),
    "crossformer": replace(TINY_MODELS["crossformer"], stochastic_depth=0.0),
    "depth": tiny_unet(stochastic_depth=0.4, activation_checkpointing=True),
    "pangu": TINY_MODELS["pangu"],
    "plug-ins": tiny_unet(),  # with a loss and an optimizer of the user's own
}

Numbers = list[tuple[float, float]]  # loss and gradient norm of each step
Weights = dict[str, np.ndarray]
Trajectory = tuple[Numbers, Weights]


class Mesh(NamedTuple):
    """Ranks along each axis, and how the axes work."""

    pipeline: int
    data: int
    domain: int
    mode: str = "ddp"
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.domain

    def __str__(self) -> str:
        schedule = f"-{self.schedule}" if self.pipeline > 1 else ""
        return f"{self.pipeline}x{self.data}x{self.domain}-{self.mode}{schedule}"


ONE = Mesh(1, 1, 1)
SHAPES = [
    shape for shape in product((1, 2), (1, 2), (1, 2, 3)) if 1 < shape[0] * shape[1] * shape[2] <= 8
]
SCHEDULES = ("1f1b", "gpipe", "interleaved")
# Every two of pipeline, data, domain, mode, schedule and model meet in one of these.
COVERING = [
    ("unet", Mesh(1, 2, 1, "ddp")),
    ("unet", Mesh(1, 1, 2, "fsdp2")),
    ("crossformer", Mesh(2, 1, 1, "ddp", "gpipe")),
    ("crossformer", Mesh(1, 2, 2, "fsdp2")),
    ("unet", Mesh(2, 2, 1, "ddp", "interleaved")),
    ("crossformer", Mesh(2, 2, 1, "fsdp2", "gpipe")),
    ("depth", Mesh(2, 2, 1, "fsdp2", "1f1b")),
    ("unet", Mesh(2, 1, 2, "ddp", "1f1b")),
    ("unet", Mesh(2, 1, 2, "ddp", "gpipe")),
    ("crossformer", Mesh(2, 1, 2, "fsdp2", "interleaved")),
    ("crossformer", Mesh(1, 2, 3, "ddp")),
    ("crossformer", Mesh(2, 1, 3, "fsdp2", "1f1b")),
    ("unet", Mesh(2, 1, 3, "ddp", "gpipe")),
    ("unet", Mesh(2, 1, 3, "fsdp2", "interleaved")),
]
PLUGINS = ("plug-ins", Mesh(1, 2, 2, "fsdp2"))
BESIDES = [
    PLUGINS,
    ("plug-ins", Mesh(2, 1, 3, "ddp", "1f1b")),
    ("unet", Mesh(2, 2, 2, "ddp", "1f1b")),
    ("pangu", Mesh(2, 2, 2, "fsdp2", "1f1b")),
    ("pangu", Mesh(2, 1, 2, "ddp", "interleaved")),
    ("depth", Mesh(2, 1, 2, "ddp", "interleaved")),
]
QUICK = [("unet", Mesh(2, 1, 2, "ddp", "1f1b"))]
CASES = [
    pytest.param(model, mesh, id=f"{model}-{mesh}", marks=marks)
    for model, mesh in (*COVERING, *BESIDES)
    for marks in ([] if (model, mesh) in QUICK else [pytest.mark.slow],)
]


def on_mesh(config: Config, mesh: Mesh) -> Config:
    """The run on a mesh."""
    parallel = ParallelConfig(
        pipeline=mesh.pipeline,
        data=mesh.data,
        domain=mesh.domain,
        data_mode=mesh.mode,
        schedule=mesh.schedule,
    )
    return replace(config, parallel=parallel)


def run(mesh: Mesh, fn: Any, config: Config, *args: Any) -> Trajectory:
    """What `fn` makes on all ranks, the numbers checked to be alike, the weights put together."""
    config = on_mesh(config, mesh)
    if mesh.ranks == 1:
        return fn(alone(), config, *args)
    found = on_processes(mesh.ranks, fn, config, *args, domain=mesh.domain, pipeline=mesh.pipeline)
    weights: Weights = {}
    for numbers, part in found:
        assert numbers == found[0][0]
        for name, value in part.items():
            assert name not in weights or np.array_equal(weights[name], value)
            weights[name] = value
    return found[0][0], weights


def train(training: Training, save_to: Path | None = None) -> Trajectory:
    """Train to the end; with `save_to` leave a checkpoint half way."""
    trainer, numbers = training.trainer, []
    with training.loader:
        for record in step_records(training):
            numbers.append((record.loss, record.grad_norm))
            if save_to is not None and record.step == HALF_WAY:
                save_checkpoint(save_to, trainer.state, "")
    weights = {}
    for name, parameter in trainer.state.parameters.items():
        value = parameter.detach()
        weights[name] = (value.full_tensor() if isinstance(value, DTensor) else value).numpy()
    return numbers, weights


def whole(manager: DomainParallelManager, config: Config, save_to: Path | None) -> Trajectory:
    return train(built(config, manager), save_to)


def rest(manager: DomainParallelManager, config: Config, path: Path) -> Trajectory:
    training = built(config, manager)
    load_checkpoint(path, training.trainer.state)
    assert training.trainer.state.step == HALF_WAY
    return train(training)


def assert_same(found: Trajectory, wanted: Trajectory) -> None:
    assert np.array(found[0]) == pytest.approx(np.array(wanted[0]), rel=1e-10, abs=0)
    assert found[1].keys() == wanted[1].keys()
    a, b = (np.concatenate([w[name].ravel() for name in sorted(w)]) for w in (found[1], wanted[1]))
    assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run of each model on one process, which also accumulates, and its trajectory."""
    store = make_store(tmp_path_factory.mktemp("store"), ROWS)
    made: dict[str, tuple[Config, Trajectory]] = {}

    def get(model: str) -> tuple[Config, Trajectory]:
        if model not in made:
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
            made[model] = config, run(ONE, whole, config, None)
        return made[model]

    return get


@pytest.fixture(scope="module")
def trained(reference, tmp_path_factory):
    """The trajectory of a model on a mesh, and where it left a checkpoint half way."""
    made: dict[tuple[str, Mesh], tuple[Trajectory, Path]] = {}

    def get(model: str, mesh: Mesh) -> tuple[Trajectory, Path]:
        if (model, mesh) not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[model, mesh] = run(mesh, whole, reference(model)[0], folder), folder
        return made[model, mesh]

    return get


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_five_steps_are_those_of_one_process(reference, trained, model, mesh):
    _, wanted = reference(model)
    assert min(norm for _, norm in wanted[0]) > CLIP
    assert_same(trained(model, mesh)[0], wanted)


def settings(model: str, mesh: Mesh) -> set[tuple[str, Any]]:
    """Of a run, by name; without a pipeline there is no schedule. `depth` is a U-Net."""
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
    train(built(config, manager))
    return torch.initial_seed()


@pytest.mark.slow
def test_ranks_draw_different_dropout(reference):
    config, _ = reference("unet")
    mesh = Mesh(2, 1, 2)
    found = on_processes(4, seed_of_last_step, on_mesh(config, mesh), domain=2, pipeline=2)
    assert len(set(found)) == 4
    train(built(config, alone()))
    assert found[0] == torch.initial_seed()


def told_of_waiting(manager: DomainParallelManager, config: Config) -> str:
    training = built(config, manager)
    train(training)
    return training.trainer.forward_backward.bubble_message()


@pytest.mark.slow
def test_a_pipeline_says_how_long_its_ranks_waited(reference):
    config, _ = reference("unet")
    assert told_of_waiting(alone(), config) == ""
    mesh = on_mesh(config, Mesh(2, 1, 1, schedule="interleaved"))
    first, second = on_processes(2, told_of_waiting, mesh, domain=1, pipeline=2)
    assert first == second
    # Two ranks with two stages each, and four micro-batches: 1 / (2 * 4 + 1).
    found = re.fullmatch(r"pipeline: ranks waited (\S+)% of .*, 11\.1% in theory", first)
    assert found is not None
    assert 0 < float(found[1]) < 100


# Each mesh's checkpoint is gone on from by the next one, and the last one's by one process.
CHAIN = [
    ONE,
    Mesh(1, 1, 2, "fsdp2"),
    Mesh(2, 2, 1, "ddp", "interleaved"),
    Mesh(2, 1, 3, "fsdp2", "interleaved"),
    Mesh(1, 2, 1, "ddp"),
    Mesh(2, 1, 2, "ddp", "1f1b"),
    ONE,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        *(pytest.param("unet", a, b, id=f"{a} to {b}") for a, b in pairwise(CHAIN)),
        pytest.param(*PLUGINS, ONE, id="plug-ins"),
    ],
)
def test_a_checkpoint_is_gone_on_from_on_another_mesh(reference, trained, model, first, second):
    config, (numbers, weights) = reference(model)
    _, checkpoint = trained(model, first)
    assert_same(run(second, rest, config, checkpoint), (numbers[HALF_WAY:], weights))
