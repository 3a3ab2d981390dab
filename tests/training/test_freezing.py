"""Frozen parameters on any mesh, and patterns that are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from credit_dp.config import MuonConfig
from credit_dp.errors import UserError
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.model_parts import check_parameter_patterns, freeze
from tests.training.meshes import (
    HALF_WAY,
    record_trajectory,
    train_from_start,
)
from tests.training.runs import alone, built, make_config, make_store

PATTERNS = ["stem.*", "encoder.0.*", "*.norm2.weight"]


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2))


def test_what_a_pattern_matches_stays():
    layers = model()
    freeze(layers, ["0.*", "*.bias"])
    assert [n for n, p in layers.named_parameters() if p.requires_grad] == ["1.weight"]


def test_patterns_that_match_nothing_or_everything_are_refused(config):
    for patterns, said in (
        (["0.wieght"], r"'0.wieght' matches none of 4. Did you mean 0.weight\?$"),
        (["0.*", "1"], r"'1' matches none of 4. Did you mean 1\.\*\?$"),
        (["%"], r"Names are like 0.weight.$"),
        (["0.*", "1.*"], r"leaves no parameter to train, it matches all 4"),
    ):
        with pytest.raises(UserError, match=rf"^trainer.freeze: .*{said}"):
            freeze(model(), patterns)
    all_of_them = replace(config, trainer=replace(config.trainer, freeze=["0.*", "1.*"]))
    with pytest.raises(UserError, match=r"trainer.freeze: leaves no parameter to train, it .* 4"):
        check_parameter_patterns(model(), all_of_them)  # before the start


def test_the_optimizer_knows_shared_parameters_by_their_first_name(config):
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    trainer = replace(config.trainer, freeze=["1.weight"])
    both = replace(config, trainer=trainer, optimizer=MuonConfig(adamw=["0.weight"]))
    check_parameter_patterns(tied, both)
    with pytest.raises(UserError, match=r"optimizer.adamw: .*'1.weight' matches none of 3"):
        check_parameter_patterns(tied, replace(both, optimizer=MuonConfig(adamw=["1.weight"])))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("store"), 17)
    config = make_config(store, tmp_path_factory.mktemp("run"), steps=3, freeze=PATTERNS)
    optimizer = replace(config.optimizer, ema=0.9)
    data = replace(config.data, batch_size=8)
    trainer = replace(config.trainer, accumulate=2, gradient_clip=0.02)
    return replace(config, optimizer=optimizer, data=data, trainer=trainer)


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
