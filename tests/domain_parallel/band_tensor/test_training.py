"""Training of models on tensors of the globe: on every mesh as on one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.config import OwnModelConfig
from credit_dp.models.segments import Segment, SegmentedModel
from tests.domain_parallel.equality import Clip
from tests.ranks import on_processes
from tests.tier_cases import every, tiers
from tests.training.meshes import (
    HALF_WAY,
    ONE,
    Mesh,
    assert_same_trajectory,
    on_mesh,
    record_trajectory,
    run_on_mesh,
    train_from_checkpoint,
    train_from_start,
)
from tests.training.runs import alone, built, make_config, make_store

ROWS = 13  # no multiple of 2 or 3
WIDTH = 8


class _Attention(nn.Module):
    """Attention over all tokens, with positions that are a parameter of each row."""

    def __init__(self, rows):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(1, WIDTH, rows, 1))

    def forward(self, x):
        y = (x + self.positions).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(y)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(x.shape)


class _Spectral(nn.Module):
    """A filter of wave numbers, over rows too."""

    def __init__(self, of_batch):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH, 1, 1))
        self.norm = nn.BatchNorm2d(WIDTH) if of_batch else nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        waves = torch.fft.rfft2(x, norm="ortho") * self.filter
        return x + self.norm(torch.fft.irfft2(waves, s=x.shape[-2:], norm="ortho"))


class UserModel(nn.Module):
    """A model as another package may have it, which nobody wrote for bands.

    Args:
        in_channels: of the input.
        out_channels: of the output.
        rows: of the globe.
        recompute: how activations are checkpointed: `saved`, `reentrant`, or not at all.
        of_batch: whether it has what depends on the samples of a rank, also with plain torch:
            BatchNorm, another buffer, and a gradient that is clipped.
    """

    def __init__(self, in_channels, out_channels, rows, recompute, of_batch):
        super().__init__()
        self.stem = nn.utils.parametrizations.weight_norm(
            nn.Conv2d(in_channels, WIDTH, 3, padding=1)
        )
        self.attention = _Attention(rows)
        self.spectral = _Spectral(of_batch)
        self.again = nn.Conv2d(WIDTH, WIDTH, 1)
        self.tied = nn.Conv2d(WIDTH, WIDTH, 1)
        self.tied.weight = self.again.weight
        self.scale = nn.Parameter(torch.ones(WIDTH, 1, 1))
        self.head = nn.Conv2d(WIDTH, out_channels, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.recompute = recompute
        self.of_batch = of_batch

    def forward(self, x):
        x = self.stem(x)
        if self.training and self.of_batch:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        x = x - self.mean[:, None, None]
        for part in (self.attention, self.spectral):
            if self.recompute:
                x = checkpoint(part, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = part(x)
        scale = Clip.apply(self.scale) if self.of_batch else self.scale
        x = self.tied(F.gelu(self.again(x))) * scale
        return self.head(x)


@dataclass
class UserConfig(OwnModelConfig):
    name: str = "of_user"
    recompute: str = ""
    of_batch: bool = True

    def build(self, in_channels, out_channels, grid):
        return UserModel(in_channels, out_channels, grid[0], self.recompute, self.of_batch)


class InSegments(SegmentedModel):
    """A model of the user's that a pipeline may cut, though its layers are not converted."""

    def __init__(self, in_channels, out_channels, rows):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, WIDTH, 3, padding=1)
        self.attention = _Attention(rows)
        self.spectral = _Spectral(of_batch=False)
        self.head = nn.Conv2d(WIDTH, out_channels, 1)

    def segments(self):
        return [
            Segment("stem", lambda state: (self.stem(state[0]),), ("stem",)),
            Segment("attention", lambda state: (self.attention(state[0]),), ("attention",)),
            Segment("spectral", self._filter, ("spectral",)),
            Segment("head", self._end, ("head",)),
        ]

    def _filter(self, state):
        y = self.spectral(state[0])
        return y, y.square().mean((2, 3))  # the same on all ranks

    def _end(self, state):
        y, power = state
        # A gradient that is clipped: what a rank contributes to it won't do.
        return (self.head(y * Clip.apply(power)[:, :, None, None]),)


@dataclass
class InSegmentsConfig(OwnModelConfig):
    name: str = "in_segments"

    def build(self, in_channels, out_channels, grid):
        return InSegments(in_channels, out_channels, grid[0])


class Complex(nn.Module):
    """A model whose filter of wave numbers is complex, as those of Fourier neural operators."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, WIDTH, 1)
        self.filter = nn.Parameter(torch.randn(WIDTH, 1, 1, dtype=torch.complex64))
        self.head = nn.Conv2d(WIDTH, out_channels, 1)

    def forward(self, x):
        waves = torch.fft.rfft2(self.stem(x), norm="ortho") * self.filter
        return self.head(torch.fft.irfft2(waves, s=x.shape[-2:], norm="ortho"))


@dataclass
class ComplexConfig(OwnModelConfig):
    name: str = "complex"

    def build(self, in_channels, out_channels, grid):
        return Complex(in_channels, out_channels)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("store"), ROWS)


@pytest.fixture(scope="module")
def reference(store, tmp_path_factory):
    """Return a config, and its trajectory on one process."""
    trajectories = {}

    def get(recompute="", of_batch=True, **trainer):
        key = (recompute, of_batch, *((name, str(value)) for name, value in trainer.items()))
        if key not in trajectories:
            # A forward that changes buffers can't be recomputed.
            recomputes = recompute or "checkpoint_activations" in trainer
            model = UserConfig(recompute=recompute, of_batch=of_batch and not recomputes)
            config = make_config(store, tmp_path_factory.mktemp("run"), model, **trainer)
            trajectories[key] = config, run_on_mesh(ONE, train_from_start, config, None)
        return trajectories[key]

    return get


def gathering(manager, config, function, *args):
    """Call a function of the mesh's run, which may gather rows."""
    config = replace(config, parallel=replace(config.parallel, whole_ops="allow"))
    return function(manager, config, *args)


def trained(mesh, config, save_to=None):
    return run_on_mesh(mesh, _train, config, save_to)


def _train(manager, config, save_to):
    return gathering(manager, config, train_from_start, save_to)


def _resume(manager, config, path):
    return gathering(manager, config, train_from_checkpoint, path)


MESHES = tiers(
    [],
    [(Mesh(1, 1, 3),), (Mesh(1, 2, 2, "fsdp2"),)],
    [(Mesh(1, 1, 2),), (Mesh(1, 2, 2),), (Mesh(1, 1, 2, "fsdp2"),)],
)


@pytest.mark.parametrize("mesh", MESHES)
def test_ten_steps_are_those_of_one_process(reference, mesh):
    config, expected = reference(of_batch=mesh.data == 1)
    assert_same_trajectory(trained(mesh, config), expected)


@pytest.mark.parametrize("mesh", tiers([], [(Mesh(2, 1, 2),)], [(Mesh(2, 1, 2, "fsdp2"),)]))
def test_pipelines_train_as_one_process(store, tmp_path, mesh):
    config = make_config(store, tmp_path, InSegmentsConfig(), steps=3)
    # A pipeline of two ranks has two micro-batches, on which the clipped gradient depends.
    same_parts = replace(config, trainer=replace(config.trainer, accumulate=2))
    expected = run_on_mesh(ONE, train_from_start, same_parts, None)
    assert_same_trajectory(trained(mesh, config), expected)


@pytest.mark.slow
def test_complex_parameters_train_with_their_imaginary_parts(store, tmp_path):
    config = make_config(store, tmp_path, ComplexConfig(), steps=3)
    expected = run_on_mesh(ONE, train_from_start, config, None)
    assert np.iscomplexobj(expected[1]["filter"])
    torch.manual_seed(config.seed)
    # On the default device, as the run draws: a GPU draws other numbers.
    start = Complex(expected[1]["stem.weight"].shape[1], 1).filter.detach().cpu()
    moved = expected[1]["filter"] - start.numpy()
    assert 1e-4 < np.abs(moved.imag).max() < 0.1
    assert_same_trajectory(trained(Mesh(1, 1, 3), config), expected)


CHANGES = {
    "recomputed model": {"checkpoint_activations": True, "rollout": {0: 2}, "steps": 3},
    "accumulation": {"accumulate": 2, "steps": 3},
    "rollout": {"rollout": {0: 2}, "steps": 3},
    "recomputed reentrantly": {"recompute": "reentrant", "steps": 3},
    "recomputed children": {"checkpoint_activations": "blocks", "rollout": {0: 2}, "steps": 3},
    "recomputed blocks": {"recompute": "saved", "steps": 3},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", every(3, CHANGES, pytest.mark.exhaustive))
def test_options_of_the_trainer(reference, name):
    config, expected = reference(**CHANGES[name])
    assert_same_trajectory(trained(Mesh(1, 1, 2), config), expected)


@pytest.mark.exhaustive
def test_the_average_of_weights(reference):
    config, _ = reference()
    optimizer = replace(config.optimizer, ema=0.9)
    config = replace(config, optimizer=optimizer, trainer=replace(config.trainer, steps=3))
    expected = run_on_mesh(ONE, train_from_start, config, None)
    assert_same_trajectory(trained(Mesh(1, 1, 2), config), expected)


@pytest.mark.parametrize("mesh", tiers([], [(Mesh(1, 1, 3),)], [(ONE,)]))
def test_resumes_on_other_ranks(reference, mesh, tmp_path):
    config, (numbers, weights) = reference()
    trained(Mesh(1, 1, 2), config, tmp_path)
    resumed = run_on_mesh(mesh, _resume, config, tmp_path)
    assert_same_trajectory(resumed, (numbers[HALF_WAY:], weights))


def _losses(manager, config):
    return gathering(manager, config, lambda *args: record_trajectory(built(*args[::-1]))[0])


@pytest.mark.slow
def test_autocast_errs_as_on_one_process(reference):
    config, (exact, _) = reference(steps=3)
    config = replace(config, trainer=replace(config.trainer, autocast="bfloat16", dtype="float32"))
    expected = _losses(alone(), config)
    sharded = on_processes(2, _losses, on_mesh(config, Mesh(1, 1, 2)), domain=2)[0]
    for numbers in (expected, sharded):
        np.testing.assert_allclose([n[0] for n in numbers], [n[0] for n in exact], rtol=0.03)


def _uncompiled(manager, config, save_to):
    with mock.patch("credit_dp.training.model_parts.logger.warning") as warning:
        trajectory = gathering(manager, config, train_from_start, save_to)
    lines = [call.args[1] for call in warning.call_args_list]
    instead = "set compile=false and trainer.cuda_graph=true instead."
    assert [instead in line for line in lines] == [True] * (manager.rank == 0)
    return trajectory


@pytest.mark.slow
def test_runs_uncompiled_and_says_so(reference):
    config, expected = reference(steps=3)
    config = replace(config, compile=True)
    assert_same_trajectory(run_on_mesh(Mesh(1, 1, 2), _uncompiled, config, None), expected)
