"""Each feature of training gives on ranks what it gives on one process, and resumes exactly.

What a feature does is tested in the module of its name, here only that ranks change nothing. Every
feature meets every axis of the mesh and both modes of its data axis.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credit_dp.config import (
    Config,
    DiffusionConfig,
    LionConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    StandardLossConfig,
)
from credit_dp.data.grid import Grid
from credit_dp.domain_parallel import DomainParallelManager
from tests.data import stores
from tests.physics.atmospheres import atmosphere_config
from tests.tier_cases import tiers
from tests.training.masked_stores import sea_config
from tests.training.meshes import (
    CLIP,
    HALF_WAY,
    ONE,
    Mesh,
    Trajectory,
    assert_same_trajectory,
    full_arrays,
    record_trajectory,
    run_on_mesh,
    train_from_checkpoint,
)
from tests.training.runs import (
    built,
    make_config,
    make_store,
    tiny_crossformer,
    tiny_pangu,
    tiny_unet,
)

ROWS, RIM, STEPS = 13, 5, 3  # rows: no multiple of 2 or 3
CRPS = StandardLossConfig(name="crps", alpha=0.9, scales=[0, 5000], level_weight=True, spectrum=0.1)
# No absolute errors: their gradient jumps where an error is 0, and near such a point a change of
# the last digit of any weight changes later steps by 1e-10.
OF_FIELDS = StandardLossConfig(
    spectrum=0.3,
    sphere_spectrum=0.7,
    sphere_error="amse",
    gradient=0.4,
    variable_error={"temperature": "huber"},
)


def on_globe(folder: Path, model: ModelConfig, **trainer: Any) -> Config:
    """Return a run of a model on random fields of the globe."""
    path = folder / f"{ROWS}x16.zarr"
    store = path if path.exists() else make_store(folder, ROWS)
    return make_config(store, folder / "run", model, **{"steps": STEPS, **trainer})


def members(folder: Path, model: ModelConfig, **trainer: Any) -> Config:
    """Return a run of ensembles of four members."""
    config = on_globe(folder, tiny_unet(), accumulate=2, **trainer)
    trainer_config = replace(config.trainer, members=4)
    return replace(config, model=model, loss=CRPS, trainer=trainer_config)


def diffusion(folder: Path, *patterns: str, **options: Any) -> Config:
    """Return a run of a diffusion model, with frozen weights."""
    keys = {"channels": [8, 16], "blocks": 1, "groups": 4, "noise": 6, "sampling_steps": 3}
    return frozen(folder, DiffusionConfig(**{**keys, **options}), *patterns)


def augmented(folder: Path, channels_last: bool = False) -> Config:
    """Return a run whose samples are turned, mirrored and made noisy; weights in channels last."""
    given = {
        "forcing": ["day_of_year_sin", "hour_of_day_sin", "insolation"],
        "static": ["geopotential_at_surface", "latitude_sin", "latitude_cos"],
    }
    config = atmosphere_config(folder, "pressure", [], steps=STEPS, **given)
    trainer = replace(config.trainer, shift_longitude=True, mirror=0.5, input_noise=0.1)
    trainer = replace(trainer, channels_last=channels_last)
    return replace(config, trainer=trainer, model=tiny_unet(frames=2))


def sea(folder: Path, model: ModelConfig, **trainer: Any) -> Config:
    """Return a run with diagnostic variables, points without values, and errors of fields."""
    config = sea_config(folder, model, steps=STEPS)
    return replace(config, loss=OF_FIELDS, trainer=replace(config.trainer, **trainer))


def frozen(folder: Path, model: ModelConfig, *patterns: str) -> Config:
    """Return a run with frozen weights, an average of weights, and clipped gradients."""
    config = on_globe(folder, model, freeze=[*patterns], accumulate=2, gradient_clip=CLIP)
    return replace(config, optimizer=replace(config.optimizer, ema=0.9))


def optimised(folder: Path, optimizer: OptimizerConfig) -> Config:
    """Return a run with another optimizer, whose early layers learn more slowly."""
    config = on_globe(folder, tiny_unet())
    return replace(config, optimizer=replace(optimizer, warmup_steps=3, layer_decay=0.8))


def rim(folder: Path) -> Config:
    """Return a run in a box whose rim is given: of three bands the outer ones are all rim."""
    path = folder / "box.zarr"
    if not path.exists():
        box = Grid(np.linspace(66, 30, ROWS), np.arange(16) * 2.0)
        data = stores.dataset(ROWS, 16, 20)
        stores.write(data.assign_coords(latitude=box.latitude, longitude=box.longitude), path)
    config = make_config(path, folder / "run", steps=STEPS, rollout={0: 1, 2: 2})
    return replace(config, data=replace(config.data, boundary=RIM))


FEATURES: dict[str, Callable[[Path], Config]] = {
    "members": lambda folder: members(
        folder,
        tiny_unet(noise=5, stochastic_depth=0.4, activation_checkpointing=True),
        rollout={0: 1, 2: 2},
    ),
    "members in a pipeline": lambda folder: members(folder, tiny_pangu(noise=5, patch=[2, 3, 4])),
    "diffusion": lambda folder: diffusion(
        folder, "stem.*", "encoder.0.*", activation_checkpointing=True, frames=2
    ),
    "augmented": augmented,
    "augmented, channels last": lambda folder: augmented(folder, channels_last=True),
    "sea": lambda folder: sea(folder, tiny_unet(frames=2)),
    "rim": rim,
    "rollout": lambda folder: on_globe(
        folder,
        tiny_unet(stochastic_depth=0.4, activation_checkpointing=True),
        rollout={0: 1, 2: 2},
        accumulate=2,
        gradient_clip=CLIP,
        checkpoint_activations="blocks",
    ),
    # FSDP2 gathers its matrices; a pipeline has some of the parameters on each rank.
    "muon": lambda folder: optimised(folder, MuonConfig(lr=1e-2, adamw=["stem.*", "head.*"])),
}
FAST = [  # what exchanges most
    ("members", Mesh(1, 1, 2, "fsdp2", ensemble=2)),
]
SLOW = [  # what each has not met there
    ("members", Mesh(1, 2, 1, ensemble=2)),
    ("members in a pipeline", Mesh(2, 1, 1, "fsdp2", ensemble=2)),
    ("members in a pipeline", Mesh(2, 1, 2)),
    ("diffusion", Mesh(2, 1, 2)),
    ("diffusion", Mesh(1, 2, 2, "fsdp2")),
    ("sea", Mesh(1, 1, 3)),
    ("augmented", Mesh(1, 2, 2, "fsdp2")),
    ("augmented", Mesh(2, 1, 2)),
    ("augmented, channels last", Mesh(1, 2, 2)),
    ("augmented, channels last", Mesh(2, 1, 1)),
    ("sea", Mesh(2, 2, 1, "fsdp2", "interleaved")),
    ("rim", Mesh(1, 1, 3)),
    ("rim", Mesh(1, 2, 1, "fsdp2")),
    ("rollout", Mesh(1, 2, 2, "fsdp2")),
    ("rollout", Mesh(1, 1, 3)),
    ("muon", Mesh(2, 1, 2, "fsdp2")),
    ("muon", Mesh(1, 2, 1)),
]
# Other models and keys of the same features, in the widest tier only.
OTHERS: dict[str, Callable[[Path], Config]] = {
    "members, depthwise": lambda folder: members(
        folder, tiny_unet(noise=5, block="global_depthwise", kernel=[5, 5]), rollout={0: 2}
    ),
    "members, crossformer": lambda folder: members(
        folder, tiny_crossformer(noise=5), rollout={0: 1, 2: 2}
    ),
    "diffusion, next state": lambda folder: diffusion(folder, residual=False, sigma_data=0.7),
    "sea, pangu": lambda folder: sea(folder, tiny_pangu(patch=[2, 2, 2], frames=2)),
    "sea, crossformer": lambda folder: sea(
        folder, tiny_crossformer(frames=2), rollout={0: 2}, checkpoint_activations="step"
    ),
    "rollout, crossformer": lambda folder: on_globe(
        folder, tiny_crossformer(), rollout={0: 1, 2: 3}, checkpoint_activations="step"
    ),
    "lion": lambda folder: optimised(folder, LionConfig(lr=1e-3)),
    "frozen": lambda folder: frozen(folder, tiny_unet(), "*.norm2.weight"),
    "frozen crossformer": lambda folder: frozen(folder, tiny_crossformer(), "levels.0.*"),
    "channels last, crossformer": lambda folder: on_globe(
        folder, tiny_crossformer(), channels_last=True
    ),
    "channels last, pangu": lambda folder: on_globe(
        folder, tiny_pangu(patch=[2, 3, 4]), channels_last=True
    ),
}
# A pipeline trains on no rollouts.
ROLLOUTS = {
    *("members", "members, depthwise", "members, crossformer", "sea, crossformer", "rim"),
    *("rollout", "rollout, crossformer"),
}
EXHAUSTIVE = [
    (feature, mesh)
    for feature, mesh in product(
        [*FEATURES, *OTHERS],
        [
            Mesh(1, 1, 4),
            Mesh(1, 1, 3, "fsdp2"),
            Mesh(1, 2, 2),
            Mesh(2, 1, 1),
            Mesh(2, 1, 2, "fsdp2", "interleaved"),
            Mesh(1, 1, 1, ensemble=4),
            Mesh(1, 1, 2, ensemble=2),
        ],
    )
    if (feature, mesh) not in FAST + SLOW
    and (mesh.pipeline == 1 or feature not in ROLLOUTS)
    and (mesh.mode == "ddp" or "channels last" not in feature)
    and (mesh.ensemble == 1 or "members" in feature)
]


def train(manager: DomainParallelManager, config: Config, save_to: Path | None) -> Trajectory:
    """Train, and return the trajectory, with the averages of weights if the run has some."""
    training = built(config, manager)
    numbers, weights = record_trajectory(training, save_to)
    if config.optimizer.ema is not None:
        with training.trainer.state.eval_mode():
            averages = full_arrays(training.trainer.state.parameters)
        weights |= {f"average of {name}": value for name, value in averages.items()}
    return numbers, weights


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return a feature's run, its trajectory on one process, and a checkpoint of half way."""
    folder = tmp_path_factory.mktemp("features")

    @cache
    def get(feature: str) -> tuple[Config, Trajectory, Path]:
        config = {**FEATURES, **OTHERS}[feature](folder)
        half_way = folder / feature
        return config, run_on_mesh(ONE, train, config, half_way), half_way

    return get


@pytest.mark.parametrize(("feature", "mesh"), tiers(FAST, SLOW, EXHAUSTIVE))
def test_a_feature_trains_as_on_one_process(reference, feature, mesh):
    config, wanted, _ = reference(feature)
    assert_same_trajectory(run_on_mesh(mesh, train, config, None), wanted)


def test_each_feature_meets_every_axis_and_both_modes():
    """Members share the data axis with the ranks of an ensemble."""
    for feature in FEATURES:
        found = set()
        for mesh in (mesh for name, mesh in FAST + SLOW if name == feature):
            sizes = {"pipeline": mesh.pipeline, "domain": mesh.domain}
            sizes["data"] = mesh.data * mesh.ensemble
            found |= {mesh.mode, *(axis for axis, size in sizes.items() if size > 1)}
        refused = {"pipeline"} if feature in ROLLOUTS else set()
        refused |= {"fsdp2"} if "channels last" in feature else set()
        assert found >= {"pipeline", "data", "domain", "ddp", "fsdp2"} - refused, feature


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        [*dict.fromkeys(feature for feature, _ in FAST + SLOW)],
        pytest.param([*FEATURES, *OTHERS], marks=pytest.mark.exhaustive),
    ],
    ids=["often", "all"],
)
def test_resuming_changes_no_bit(reference, features):
    for feature in features:
        config, (numbers, trained), half_way = reference(feature)
        assert len({loss for loss, _ in numbers}) == STEPS, feature
        again_numbers, again = run_on_mesh(ONE, train_from_checkpoint, config, half_way)
        assert again_numbers == numbers[HALF_WAY:], feature
        assert all(np.array_equal(weight, trained[name]) for name, weight in again.items()), feature


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "first", "second"),
    [
        ("members", Mesh(1, 1, 1, ensemble=2), Mesh(1, 1, 1, "fsdp2", ensemble=4)),
        ("diffusion", Mesh(1, 1, 2), Mesh(2, 1, 1)),
    ],
    ids=str,
)
def test_a_run_continues_on_another_mesh(reference, tmp_path, feature, first, second):
    config, (numbers, trained), _ = reference(feature)
    run_on_mesh(first, train, config, tmp_path)
    found = run_on_mesh(second, train_from_checkpoint, config, tmp_path)
    weights = {name: trained[name] for name in found[1]}  # without averages
    assert_same_trajectory(found, (numbers[HALF_WAY:], weights))
