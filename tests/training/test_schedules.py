"""Learning-rate schedules, resuming them, and the parameters that weight decay acts on."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from credit_dp.config import AdamWConfig, OwnScheduleConfig
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.training import optim
from credit_dp.training.optim import (
    build_optimizer,
    build_schedule,
    has_weight_decay,
    restore_schedule,
)
from tests.training.meshes import MODELS
from tests.training.refusals import assert_refused

CONFIG = AdamWConfig(lr=0.1, final_lr=0.02, warmup_steps=2, decay_every=3, decay_factor=0.5)
STEPS = 10
WARM_UP = [0.05, 0.1]
# Eight steps after the warm-up, from 0.1 down to 0.02 at the ninth.
COSINE = [0.02 + 0.04 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
CURVES = {
    "cosine": [*WARM_UP, *COSINE, 0.02, 0.02],
    "constant": [*WARM_UP, *[0.1] * 10],
    "step": [*WARM_UP, *[0.1] * 3, *[0.05] * 3, *[0.025] * 3, 0.0125],
}


def rates(schedule: str, start: int = 0, count: int = 12, steps: int = STEPS) -> list[float]:
    """Return the rates of steps from `start` on; another optimiser takes the earlier ones."""
    config = replace(CONFIG, schedule=schedule)
    optimiser = build_optimizer({"w": nn.Parameter(torch.ones(1))}, config)
    curve = build_schedule(optimiser, config, STEPS)
    for _ in range(start):
        optimiser.step()
        curve.step()
    if start:
        saved = curve.state_dict()
        optimiser = build_optimizer({"w": nn.Parameter(torch.ones(1))}, config)
        curve = build_schedule(optimiser, config, steps)
        restore_schedule(optimiser, curve, saved)
    found = []
    for _ in range(start, count):
        found.append(optimiser.param_groups[0]["lr"])
        assert curve.get_last_lr()[0] == found[-1]
        optimiser.step()
        curve.step()
    return found


def test_rates_are_those_of_the_formula_also_when_resumed():
    for schedule, curve in CURVES.items():
        found = rates(schedule)
        assert found == pytest.approx(curve, rel=1e-12), schedule
        for start in (1, 2, 6):  # in the warm-up, at its end, and later
            assert rates(schedule, start) == found[start:], (schedule, start)


def test_a_resumed_cosine_ends_at_the_steps_of_the_config():
    longer = rates("cosine", start=6, steps=18, count=19)
    assert longer[0] == pytest.approx(0.02 + 0.04 * (1 + math.cos(math.pi * 4 / 16)), rel=1e-12)
    assert longer[-1] == pytest.approx(0.02, rel=1e-12)


def test_biases_norms_and_tables_do_not_decay():
    fields = Fields(((0, 1), (2, 3)), (4,), 2)
    for model in ("unet", "crossformer", "pangu", "swin", "sfno"):
        built = build_model(MODELS[model], fields, (16, 16))
        norms = {
            f"{path}.{name}"
            for path, module in built.named_modules()
            if isinstance(module, nn.GroupNorm | nn.LayerNorm | nn.InstanceNorm2d)
            for name, _ in module.named_parameters()
        }
        parameters = dict(built.named_parameters())
        kept = {name for name, p in parameters.items() if not has_weight_decay(name, p)}
        tables = {name for name in parameters if name.endswith((".bias", "table", ".log_scale"))}
        assert kept == norms | tables, model
        assert any(name.endswith(".table") for name in kept) is (model == "pangu")
        assert {parameters[name].ndim for name in parameters.keys() - kept} <= {2, 3, 4, 5}, model


@dataclass
class Own(OwnScheduleConfig):
    """A schedule of one function."""

    name: str = "own"
    function: Any = None

    def factor(self, step: int, steps: int) -> float:
        return self.function(step, steps)


def scheduled(monkeypatch: pytest.MonkeyPatch, own: OwnScheduleConfig, steps: int = 12) -> LambdaLR:
    monkeypatch.setattr(optim, "plugin_schedule", lambda config: own)
    optimiser = build_optimizer({"a": nn.Parameter(torch.ones(2))}, CONFIG)
    return build_schedule(optimiser, CONFIG, steps)


def test_a_users_schedule_begins_after_the_warm_up(monkeypatch):
    schedule = scheduled(monkeypatch, Own(function=lambda step, steps: 1 - step / steps))
    found = []
    for _ in range(14):
        found.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    wanted = [0.05, 0.1, *(0.1 * (1 - step / 10) for step in range(11)), 0.0]
    assert found == pytest.approx(wanted, abs=1e-15)


FAILING = [
    (Own(function=lambda step, steps: -0.1), r"a finite number of at least 0, got -0\.1 for st"),
    (Own(function=lambda step, steps: math.nan), r"at least 0, got nan for step 0 of 10\."),
    (Own(function=lambda step, steps: True), r"at least 0, got True"),
    (Own(function=lambda step, steps: 1 / (5 - step) ** 2), r"fails at .*ZeroDivisionError"),
    (OwnScheduleConfig("own"), r"factor is missing\. It needs a method factor\(self, step, ste"),
]


def test_a_schedule_that_fails_at_some_step_is_refused_at_once(monkeypatch):
    assert_refused(
        (partial(scheduled, monkeypatch, own), r"optimizer\.schedule: .*" + expected)
        for own, expected in FAILING
    )
