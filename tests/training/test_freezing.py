"""Frozen parameters on any mesh, and patterns that are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from credit_dp.config import MuonConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.model_parameters import check_parameter_patterns, freeze
from tests.training.meshes import (
    HALF_WAY,
    ONE,
    Mesh,
    assert_same_trajectory,
    full_arrays,
    record_trajectory,
    run_on_mesh,
    train_from_checkpoint,
    train_from_start,
)
from tests.training.runs import alone, built, make_config, make_store, tiny_crossformer

PATTERNS = ["stem.*", "encoder.0.*", "*.norm2.weight"]
MESHES = [
    Mesh(1, 1, 2, "ddp"),
    Mesh(1, 2, 1, "ddp"),
    Mesh(1, 2, 2, "fsdp2"),
    Mesh(2, 1, 1, "ddp"),
    Mesh(2, 1, 2, "fsdp2", "interleaved"),
]


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2))


def test_what_a_pattern_matches_stays():
    layers = model()
    freeze(layers, ["0.*", "*.bias"])
    assert [n for n, p in layers.named_parameters() if p.requires_grad] == ["1.weight"]


@pytest.mark.parametrize(
    ("patterns", "pattern"),
    [
        (["0.wieght"], r"trainer.freeze: .*'0.wieght' matches none of 4. Did you mean 0.weight\?$"),
        (["0.*", "1"], r"trainer.freeze: .*'1' matches none of 4. Did you mean 1\.\*\?$"),
        (["%"], r"trainer.freeze: .* Names are like 0.weight.$"),
        (["0.*", "1.*"], r"trainer.freeze: leaves no parameter to train, it matches all 4"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(patterns, pattern):
    with pytest.raises(UserError, match=pattern):
        freeze(model(), patterns)


def test_the_optimizer_knows_shared_parameters_by_their_first_name(config):
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    trainer = replace(config.trainer, freeze=["1.weight"])
    both = replace(config, trainer=trainer, optimizer=MuonConfig(adamw=["0.weight"]))
    check_parameter_patterns(tied, both)
    with pytest.raises(UserError, match=r"optimizer.adamw: .*'1.weight' matches none of 3"):
        check_parameter_patterns(tied, replace(both, optimizer=MuonConfig(adamw=["1.weight"])))


def test_patterns_that_match_everything_are_refused_before_the_start(config):
    trainer = replace(config.trainer, freeze=["0.*", "1.*"])
    with pytest.raises(UserError, match=r"trainer.freeze: leaves no parameter to train, it .* 4"):
        check_parameter_patterns(model(), replace(config, trainer=trainer))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("store"), 17)
    config = make_config(store, tmp_path_factory.mktemp("run"), steps=5, freeze=PATTERNS)
    optimizer = replace(config.optimizer, ema=0.9)
    data = replace(config.data, batch_size=8)
    trainer = replace(config.trainer, accumulate=2, gradient_clip=0.02)
    return replace(config, optimizer=optimizer, data=data, trainer=trainer)


def averaged(manager: DomainParallelManager, config):
    """Return the trajectory, with the averages of the weights at its end."""
    training = built(config, manager)
    numbers, _ = record_trajectory(training)
    with training.trainer.state.eval_mode():
        return numbers, full_arrays(training.trainer.state.parameters)


@pytest.fixture(scope="module")
def alone_averaged(config):
    return run_on_mesh(ONE, averaged, config)


@pytest.mark.slow
def test_frozen_weights_stay_and_others_do_not(config):
    training = built(config, alone())
    parameters = training.trainer.state.parameters
    before = {name: p.detach().clone() for name, p in parameters.items()}
    record_trajectory(training)
    stayed = {name for name, p in parameters.items() if torch.equal(p, before[name])}
    frozen = {name for name, p in parameters.items() if not p.requires_grad}
    assert stayed == frozen
    assert {name.split(".")[0] for name in frozen} == {"stem", "encoder", "decoder"}
    assert not any(".exp_avg" in n and "stem" in n for n in training.trainer.state.tensors())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_averages_and_frozen_weights_are_those_of_one_process(config, alone_averaged, mesh):
    assert_same_trajectory(run_on_mesh(mesh, averaged, config), alone_averaged)


@pytest.mark.slow
def test_a_frozen_crossformer_trains_the_same(config):
    other = replace(
        config,
        model=tiny_crossformer(),
        trainer=replace(config.trainer, freeze=["levels.0.*"]),
    )
    wanted = run_on_mesh(ONE, averaged, other)
    assert_same_trajectory(run_on_mesh(Mesh(1, 1, 2, "fsdp2"), averaged, other), wanted)


@pytest.mark.slow
def test_what_was_trained_before_may_be_frozen_on_resume_and_the_other_way_round(config, tmp_path):
    free = replace(config, trainer=replace(config.trainer, freeze=[]))
    for first, second in ((free, config), (config, free)):
        folder = tmp_path / str(len(first.trainer.freeze))
        train_from_start(alone(), first, folder)
        training = built(second, alone())
        load_checkpoint(folder, training.trainer.state)
        names = {n for n in training.trainer.state.tensors() if n.endswith(".exp_avg")}
        assert ("optimiser.stem.conv.weight.exp_avg" in names) is False
        numbers, _ = record_trajectory(training)
        assert np.isfinite(numbers).all()
        assert len(numbers) == config.trainer.steps - HALF_WAY


@pytest.mark.slow
def test_a_frozen_run_resumes_bit_for_bit(config, tmp_path):
    numbers, weights = train_from_start(alone(), config, tmp_path)
    again, found = train_from_checkpoint(alone(), config, tmp_path)
    assert again == numbers[HALF_WAY:]
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
