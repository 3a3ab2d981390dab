"""Checkpoints: whole or not there, refused where they do not fit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from credit_dp.config import OptimizerConfig
from credit_dp.errors import UserError
from credit_dp.training.checkpoint import (
    TrainingState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from credit_dp.training.optimisation import build_optimiser, build_schedule
from tests.training.disk import full_disk


class Position:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def state_of(
    channels: int = 4,
    seed: int = 0,
    layers: int = 2,
    config: OptimizerConfig | None = None,
    steps: int = 10,
) -> TrainingState:
    config = config or OptimizerConfig()
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Conv2d(channels, channels, 3) for _ in range(layers)))
    optimiser = build_optimiser(model, config)
    schedule = build_schedule(optimiser, config, steps)
    return TrainingState(model, optimiser, schedule, Position(), {}, seed)


def step(state: TrainingState) -> None:
    state.optimiser.zero_grad()
    state.model(torch.ones(1, 4, 8, 8)).square().sum().backward()
    state.optimiser.step()
    state.schedule.step()
    state.step += 1
    state.sampler.value += 3


def test_everything_comes_back_bit_by_bit(tmp_path):
    saved, loaded = state_of(seed=1), state_of(seed=2)
    step(saved)
    save_checkpoint(tmp_path / "run" / "checkpoint.pt", saved, "seed: 1\n")
    load_checkpoint(tmp_path / "run" / "checkpoint.pt", loaded)
    assert (loaded.step, loaded.seed, loaded.sampler.value) == (1, 1, 3)
    step(saved)
    step(loaded)
    for a, b in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert saved.schedule.get_last_lr() == loaded.schedule.get_last_lr()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint.pt"]


def settings(state: TrainingState) -> list[dict[str, Any]]:
    groups = state.optimiser.param_groups
    return [{name: group[name] for name in group if name != "params"} for group in groups]


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (OptimizerConfig(lr=1e-5), 10),
        (OptimizerConfig(betas=(0.5, 0.6), eps=1e-4, weight_decay=0.5), 10),
        (OptimizerConfig(warmup_steps=1, final_lr=1e-4), 10),
        (OptimizerConfig(warmup_steps=1), 40),
    ],
)
def test_settings_of_the_config_win_over_those_saved(tmp_path, config, steps):
    saved = state_of(config=OptimizerConfig(warmup_steps=1))
    wanted = state_of(config=config, steps=steps)  # has these settings from the start
    for _ in range(3):
        step(saved)
        step(wanted)
    save_checkpoint(tmp_path / "checkpoint.pt", saved, "")
    resumed = state_of(config=config, steps=steps)
    load_checkpoint(tmp_path / "checkpoint.pt", resumed)
    assert settings(resumed) != settings(saved)
    moments = saved.optimiser.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(resumed.optimiser.state_dict()["state"][0]["exp_avg"], moments)
    for _ in range(2):  # now, and once the schedule has moved on
        assert settings(resumed) == settings(wanted)
        assert resumed.schedule.get_last_lr() == wanted.schedule.get_last_lr()
        step(resumed)
        step(wanted)


def test_leftovers_of_killed_writes_do_not_pile_up(tmp_path):
    path, state = tmp_path / "checkpoint.pt", state_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", killed)
        for process in (1, 2):
            patch.setattr(os, "getpid", lambda number=process: number)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(path, state, "")
            assert len(list(tmp_path.iterdir())) == 1
    save_checkpoint(path, state, "")
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def killed(source: Path, target: Path) -> None:
    raise KeyboardInterrupt


def test_the_file_needs_no_pickle_and_carries_the_config(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, state_of(), "seed: 0\n")
    content = torch.load(path, weights_only=True)
    assert content["config"] == "seed: 0\n"
    assert set(content["model"]) == set(state_of().model.state_dict())


@pytest.mark.parametrize("limit", [100, 5000])
def test_full_disk_keeps_the_previous_checkpoint(tmp_path, limit):
    path, state = tmp_path / "checkpoint.pt", state_of()
    save_checkpoint(path, state, "")
    before = path.read_bytes()
    step(state)
    with full_disk(limit), pytest.raises(UserError, match="step 1 could not be written") as error:
        save_checkpoint(path, state, "")
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_auto_takes_what_is_there(tmp_path):
    own = tmp_path / "checkpoint.pt"
    assert find_checkpoint("auto", own) is None
    save_checkpoint(own, state_of(), "")
    assert find_checkpoint("auto", own) == own
    assert find_checkpoint(None, own) is None


def test_a_path_may_be_the_file_or_the_folder_and_has_to_exist(tmp_path):
    own, other = tmp_path / "a" / "checkpoint.pt", tmp_path / "b" / "checkpoint.pt"
    save_checkpoint(other, state_of(), "")
    assert find_checkpoint(str(other), own) == other
    assert find_checkpoint(str(other.parent), own) == other
    with pytest.raises(UserError, match=r"resume: .*does not exist"):
        find_checkpoint(str(tmp_path / "c"), own)


@pytest.mark.parametrize(
    ("channels", "layers", "message"),
    [
        (5, 2, r"0\.weight is \(4, 4, 3, 3\) in the model and \(5, 5, 3, 3\)"),
        (4, 1, r"has no 1\.weight, which the model has"),
        (4, 3, r"has 2\.weight, which the model does not have"),
    ],
)
def test_another_model_is_refused_by_the_first_difference(tmp_path, channels, layers, message):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, state_of(channels, layers=layers), "")
    with pytest.raises(UserError, match=message) as error:
        load_checkpoint(path, state_of())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04"])
def test_what_is_not_a_checkpoint_is_refused(tmp_path, content):
    path = Path(tmp_path / "checkpoint.pt")
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a readable checkpoint") as error:
        load_checkpoint(path, state_of())
    assert "\n" not in str(error.value)


def test_tensors_saved_by_something_else_are_refused(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(UserError, match="not a checkpoint of this program"):
        load_checkpoint(path, state_of())
