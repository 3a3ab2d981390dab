"""Parameter groups of the optimiser, the learning-rate schedule, and the seeds of steps."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from credit_dp.config import AdamWConfig
from credit_dp.errors import UserError
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.optim import (
    build_optimizer,
    build_schedule,
    can_fuse,
    seed_step,
)
from credit_dp.training.state import TrainingState
from tests.checkpoints import save_checkpoint
from tests.training.states import small_state, take_step


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 1))


def test_only_weights_of_layers_decay_and_frozen_ones_are_left_out():
    model = small_model()
    decaying, kept = build_optimizer(
        dict(model.named_parameters()), AdamWConfig(weight_decay=0.3)
    ).param_groups
    assert decaying["weight_decay"] == 0.3
    assert kept["weight_decay"] == 0
    assert {p.ndim for p in decaying["params"]} == {4}
    assert len(decaying["params"]) == 2
    assert len(kept["params"]) == 4
    model[0].requires_grad_(False)  # frozen parameters are in no group
    groups = build_optimizer(dict(model.named_parameters()), AdamWConfig()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 3]


def test_weights_are_updated_by_one_kernel(monkeypatch, tmp_path):
    def trained(steps: int, resume: bool = False) -> TrainingState:
        state = small_state(seed=1)
        if resume:
            load_checkpoint(tmp_path, state)
        for _ in range(steps):
            take_step(state)
        return state

    with monkeypatch.context() as patch:
        patch.setattr("credit_dp.training.optim.FUSED_DEVICES", set())
        plain = trained(4)
    assert not any(group["fused"] for group in plain.optimizer.param_groups)
    fused = trained(2)
    assert all(group["fused"] for group in fused.optimizer.param_groups)
    save_checkpoint(tmp_path, fused, "")
    for found in (trained(4), trained(2, resume=True)):
        for name, tensor in found.tensors().items():
            torch.testing.assert_close(tensor, plain.tensors()[name], rtol=1e-5, atol=1e-7)


def test_counters_of_a_resumed_update_are_where_it_reads_them():
    """A fused update reads the counter of steps on the device, another one on the host."""
    for fused in (False, True):
        with torch.device("meta"):
            state = small_state()
        for group in state.optimizer.param_groups:
            group["fused"] = fused
        saved = {f"optimiser.0.weight.{key}": () for key in ("step", "product")}
        state.allocate_tensors(saved, lambda name: torch.float64)
        found = state.optimizer.state[state.parameters["0.weight"]]
        assert found["step"].is_meta is fused
        assert found["product"].is_meta
        assert found["product"].dtype == torch.float64


def test_only_real_weights_without_gaps_are_fused(monkeypatch):
    monkeypatch.setattr("credit_dp.training.optim.FUSED_DEVICES", {"meta"})
    with torch.device("meta"):
        parameters = dict(small_model().named_parameters())
    assert can_fuse(parameters.values())
    assert not can_fuse([*parameters.values(), nn.Parameter(torch.zeros(2))])
    assert not can_fuse([])
    complex_weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64, device="meta"))
    assert not can_fuse([*parameters.values(), complex_weight])  # torch refuses to fuse it


def test_a_weight_is_updated_whatever_its_strides_are():
    # Every other column of a larger tensor: torch's fused update would change the others.
    larger = torch.randn(3, 8, dtype=torch.float64)
    dense = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    weights = {
        "dense": dense,
        "channels_last": dense.to(memory_format=torch.channels_last),
        "with_gaps": larger[:, ::2],
    }
    for names in (["dense", "channels_last"], ["channels_last", "with_gaps"]):
        found = {name: nn.Parameter(weights[name].detach()) for name in names}
        wanted = [nn.Parameter(weights[name].clone()) for name in names]
        optimizer = build_optimizer(found, AdamWConfig())
        assert bool(optimizer.param_groups[0]["fused"]) == ("with_gaps" not in names)
        by_hand = torch.optim.AdamW(wanted, AdamWConfig().lr, AdamWConfig().betas)
        by_hand.param_groups[0]["weight_decay"] = AdamWConfig().weight_decay
        for _ in range(3):
            for parameters, step in ((found.values(), optimizer.step), (wanted, by_hand.step)):
                torch.stack([(p.square() * p).sum() for p in parameters]).sum().backward()
                step()
        for parameter, other in zip(found.values(), wanted, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)
    with pytest.raises(UserError, match="gaps in memory, but with_gaps"):
        build_optimizer(found, AdamWConfig(), skips_on_device=True)


def test_learning_rate_warms_up_then_falls_to_the_final_one():
    config = AdamWConfig(lr=0.1, final_lr=0.001, warmup_steps=4)
    optimiser = build_optimizer(dict(small_model().named_parameters()), config)
    schedule = build_schedule(optimiser, config, steps=20)
    rates = []
    for _ in range(20):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert optimiser.param_groups[0]["lr"] == pytest.approx(0.001)
    config = AdamWConfig(lr=0.1, warmup_steps=0)
    optimiser = build_optimizer(dict(small_model().named_parameters()), config)
    build_schedule(optimiser, config, steps=10)
    assert optimiser.param_groups[0]["lr"] == pytest.approx(0.1)


def test_every_step_and_rank_draws_its_own_numbers_again_and_again():
    def draw(*key: int) -> tuple[float, ...]:
        seed_step(*key)
        return tuple(torch.rand(3).tolist())

    keys = [(s, t, d, r) for s in (0, 1) for t in (0, 1) for d in (0, 1) for r in (0, 1)]
    first = [draw(*key) for key in keys]
    assert len(set(first)) == len(keys)
    assert [draw(*key) for key in keys] == first
