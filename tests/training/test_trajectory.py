"""Training is the same on every mesh, and after every interruption."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_dp.config import Config
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.checkpoint import load_checkpoint
from tests.checkpoints import save_checkpoint
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.runs import (
    TINY_MODELS,
    alone,
    built,
    make_config,
    make_store,
    step_records,
    train_on,
    weights,
)

Trajectory = tuple[list[tuple[float, float]], torch.Tensor]  # (loss, gradient norm), weights


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    """Return a config and the trajectory on one process, with one store for each height."""
    paths: dict[int, Path] = {}

    @cache
    def get(rows: int, model: str = "unet") -> tuple[Config, Trajectory]:
        if rows not in paths:
            paths[rows] = make_store(tmp_path_factory.mktemp(f"rows{rows}"), rows)
        run = paths[rows].parent / "run"
        config = make_config(paths[rows], run, TINY_MODELS[model])
        return config, train_all(alone(), config)

    return get


def train_all(manager: DomainParallelManager, config: Config) -> Trajectory:
    training = built(config, manager)
    return train_on(training), weights(training)


def go_on(manager: DomainParallelManager, config: Config, path: Path) -> Trajectory:
    training = built(config, manager)
    load_checkpoint(path, training.trainer.state)
    return train_on(training), weights(training)


def assert_same(found: list[Trajectory], wanted: Trajectory) -> None:
    for numbers, vector in found:
        # The norm tells a wrong scale of the gradient, which AdamW itself hardly feels.
        assert np.array(numbers) == pytest.approx(np.array(wanted[0]), rel=1e-10, abs=0)
        assert (vector - wanted[1]).norm() <= 1e-10 * wanted[1].norm()
        assert torch.equal(vector, found[0][1])


@pytest.mark.parametrize(("domain", "rows"), tiers([], [(3, 32)], [(4, 33), (2, 61)]))
def test_ten_steps_are_the_same_on_any_number_of_bands(stores, rows, domain):
    config, wanted = stores(rows)
    assert_same(on_processes(domain, train_all, config), wanted)


# Each number of ranks; `tests/models` has each model's gradients on each of them, and more heights.
CASES = tiers(
    fast=(),
    slow=[("pangu", 3, 33), ("swin", 3, 33), ("sfno", 3, 33)],
    exhaustive=[
        ("crossformer", 4, 33),
        ("crossformer", 2, 33),
        ("several frames", 3, 33),
        ("stochastic depth", 2, 32),
        ("next state", 2, 33),
    ],
)


@pytest.mark.parametrize(("model", "domain", "rows"), CASES)
def test_ten_steps_of_any_model_are_the_same_on_bands(stores, model, domain, rows):
    config, wanted = stores(rows, model)
    assert_same(on_processes(domain, train_all, config), wanted)


@pytest.mark.parametrize("domain", tiers([], [(1,)], [(2,)]))
def test_a_sample_loses_the_same_branches_on_any_data_rank(stores, domain):
    config, wanted = stores(32, "stochastic depth")
    assert_same(on_processes(2 * domain, train_all, config, domain=domain), wanted)


@pytest.mark.slow
def test_stochastic_depth_drops(stores):
    _, (dropping, _) = stores(32, "stochastic depth")
    _, (numbers, _) = stores(32)
    assert dropping != numbers


@pytest.mark.slow
def test_losses_fall_and_weights_move(stores):
    config, (numbers, vector) = stores(32)
    losses = [loss for loss, _ in numbers]
    assert len(losses) == 10
    assert min(losses[5:]) < losses[0]
    start = weights(built(config, alone()))
    assert (vector != start).float().mean() > 0.99
    # AdamW moves no weight much further than the sum of the learning rates.
    assert 0 < (vector - start).abs().max() < 20 * config.optimizer.lr


def half_way(config: Config, path: Path) -> None:
    """Save a checkpoint after 5 of the 10 steps."""
    training = built(config, alone())
    with training.loader:
        for record in step_records(training):
            if record.step == 5:
                save_checkpoint(path, training.trainer.state, "")
                return


def test_five_and_five_steps_are_ten_steps_bit_by_bit(stores, tmp_path):
    config, (numbers, vector) = stores(32)
    half_way(config, tmp_path / "checkpoint.pt")
    rest, end = go_on(alone(), config, tmp_path / "checkpoint.pt")
    assert rest == numbers[5:]
    assert torch.equal(end, vector)
