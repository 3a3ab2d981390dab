"""Callbacks of users, and the end of a run whose validation error has stopped falling."""

import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from credit_dp.config import Config, OwnCallbackConfig, TrainerConfig
from credit_dp.config import training as training_config
from credit_dp.distributed.launcher import RankInfo
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.monitoring import CallbackRun, Validation
from credit_dp.training.run import run
from credit_dp.training.state import ValidationHistory
from tests.commands import run_line
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.refusals import assert_refused, refusal
from tests.training.runs import alone, make_config, make_store

ROOT = Path(__file__).parents[2]
ERRORS = (3.0, 2.0, 2.5, math.nan, 1.0)  # of the validations: two without a lower one end at step 4


@dataclass
class RecorderConfig(OwnCallbackConfig):
    """Writes down its calls, and draws a random number in each."""

    name: str = "recorder"
    fails_in: str = ""
    calls: list[Any] = field(default_factory=list)

    def on_start(self, run: CallbackRun) -> None:
        self._record("start", run)

    def on_step(self, run: CallbackRun, metrics: dict[str, float]) -> None:
        assert all(p.grad is not None for p in run.parameters.values())
        self._record("step", run, sorted(metrics))

    def on_validation(self, run: CallbackRun, scores: dict[str, float]) -> None:
        self._record("validation", run, scores["validation_rmse"])

    def on_end(self, run: CallbackRun, scores: dict[str, float]) -> None:
        assert (run.folder / "metrics.json").exists()
        self._record("end", run, bool(scores))

    def _record(self, method: str, run: CallbackRun, *more: Any) -> None:
        torch.rand(())
        scale = next(iter(run.parameters.values())) * 2
        assert not scale.requires_grad
        if run.rank == run.manager.world_size - 1 and method == self.fails_in:
            raise ValueError("a\nproblem")
        CALLS.append((method, run.step, *more))


CALLS: list[tuple[Any, ...]] = []


def find_recorder(base: object, reserved: object) -> dict[str, type[OwnCallbackConfig]]:
    return {"recorder": RecorderConfig}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Register the callback here; `train` does so on other ranks."""
    monkeypatch.setattr(training_config, "find_plugins", find_recorder)


def train(
    manager: DomainParallelManager, config: Config, errors: Sequence[float] = ERRORS
) -> list[tuple[Any, ...]]:
    """Train a run on these ranks with the validation errors of a list; return the calls."""
    parallel = replace(config.parallel, domain=manager.domain_world_size)
    CALLS.clear()

    def validated(self: Validation) -> dict[str, float]:
        return {"validation_rmse": errors[self.state.step // self.every - 1]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_config, "find_plugins", find_recorder)
        patch.setattr(Validation, "__call__", validated)
        ranks = RankInfo(manager.rank, manager.world_size, manager.rank, manager.world_size)
        assert run(replace(config, parallel=parallel), ranks) == 0
    return list(CALLS)


@pytest.fixture
def config(tmp_path):
    store = make_store(tmp_path, 12)
    return make_config(store, tmp_path / "run", steps=5, log_every=10, validate_every=1)


def with_trainer(config: Config, **keys: Any) -> Config:
    """Change keys of the trainer."""
    return replace(config, trainer=replace(config.trainer, **keys))


def state_of(config: Config, step: int) -> dict[str, Any]:
    path = Path(config.run.dir) / "checkpoint" / f"step-{step:08}" / "state.json"
    return dict(json.loads(path.read_text()))


def tensors_of(config: Config, step: int) -> dict[str, torch.Tensor]:
    [file] = (Path(config.run.dir) / "checkpoint" / f"step-{step:08}").glob("*.safetensors")
    return load_file(file)


RECORDER = {"recorder": {}}


def test_calls_come_in_order(config):
    config = with_trainer(config, steps=4, validate_every=2, callbacks=RECORDER)
    calls = train(alone(), config)
    logged = calls[1][2]
    assert {"loss", "lr", "grad_norm"} <= {*logged}
    validated = sorted([*logged, "validation_rmse"])
    assert calls == [
        ("start", 0),
        ("step", 1, logged),
        ("step", 2, validated),
        ("validation", 2, 3.0),
        ("step", 3, []),
        ("step", 4, validated),
        ("validation", 4, 2.0),
        ("end", 4, True),
    ]


@pytest.mark.slow
def test_training_does_not_notice_them(config, tmp_path):
    without = replace(config, run=replace(config.run, dir=str(tmp_path / "without")))
    config = with_trainer(config, callbacks=RECORDER)
    assert len(train(alone(), config)) == 12
    assert train(alone(), without) == []
    with_it, alike = (tensors_of(each, 5) for each in (config, without))
    assert len(with_it) > 100  # the state of random numbers among them
    assert with_it.keys() == alike.keys()
    assert all(torch.equal(with_it[name], alike[name]) for name in alike)


@pytest.mark.slow
def test_a_resumed_run_calls_from_its_step_on(config):
    config = with_trainer(config, callbacks=RECORDER, steps=2, validate_every=2)
    assert train(alone(), config)[-1] == ("end", 2, True)
    found = train(alone(), replace(with_trainer(config, steps=3), resume="auto"))
    assert [call[:2] for call in found] == [("start", 2), ("step", 3), ("end", 3)]


@pytest.mark.slow
def test_all_ranks_are_called(config):
    two = with_trainer(config, steps=2, callbacks=RECORDER)
    first, second = on_processes(2, train, two)
    assert first == second
    assert len(first) == 6


@pytest.mark.parametrize(
    ("method", "step"), tiers([("validation", 2)], [("start", None), ("end", 5)])
)
def test_an_error_is_one_line_and_the_checkpoint_before_it_stays(config, method, step):
    keys = {"callbacks": {"recorder": {"fails_in": method}}}
    config = with_trainer(config, validate_every=2, checkpoint_every=2, **keys)
    line = refusal(train, alone(), config)
    assert line.startswith(f"trainer.callbacks.recorder: RecorderConfig.on_{method} fails at ")
    assert f"{__file__}:" in line
    assert line.endswith("(ValueError: a problem).")
    assert step is None or state_of(config, step)["step"] == step


def stops(config: Config, manager: DomainParallelManager | None = None) -> tuple[int, Any]:
    """Train, and return the step of the scores, and what is known of the validations then."""
    train(manager or alone(), config)
    step = json.loads((Path(config.run.dir) / "metrics.json").read_text())["step"]
    return step, state_of(config, step)["validations"]


END = (4, {"lowest": 2.0, "without_lower": 2})
LINE = "trainer.patience: 2 validations without a lower error than 2.0000"


def test_the_run_ends_when_patience_does(config, capsys):
    assert stops(with_trainer(config, patience=2, checkpoint_every=50)) == END
    assert f"{LINE}; stopped after step 4" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_resumed_run_counts_on(config, capsys):
    config = with_trainer(config, patience=2, checkpoint_every=50)
    assert stops(with_trainer(config, steps=3)) == (3, {"lowest": 2.0, "without_lower": 1})
    config = replace(config, resume="auto")
    assert stops(config) == END
    capsys.readouterr()
    assert stops(config) == END
    said = " ".join(capsys.readouterr().out.split())
    assert f"nothing to train: the checkpoint is of step 4 and {LINE}; evaluating only" in said
    assert stops(with_trainer(config, patience=3)) == (5, {"lowest": 1.0, "without_lower": 0})


@pytest.mark.slow
def test_errors_of_other_scores_are_forgotten(config):
    config = with_trainer(config, patience=2, checkpoint_every=50)
    assert stops(with_trainer(config, steps=3)) == (3, {"lowest": 2.0, "without_lower": 1})
    config = with_trainer(config, validation_scores={"rmse": 1.0})
    found = stops(replace(config, resume="auto"))
    assert found == (5, {"lowest": 1.0, "without_lower": 0})  # not END, as with the same scores


def stops_on(manager: DomainParallelManager, config: Config) -> tuple[int, Any]:
    return stops(config, manager)


@pytest.mark.slow
def test_all_ranks_end_at_the_same_step(config):
    config = with_trainer(config, patience=1, keep_best=True)
    assert on_processes(2, stops_on, config) == [(3, {"lowest": 2.0, "without_lower": 1})] * 2
    best = (Path(config.run.dir) / "checkpoint/best").resolve()
    assert best.name == "step-00000002"


def test_the_first_lowest_error_counts():
    history = ValidationHistory()
    counts = []
    for error in (math.nan, 2.0, 2.0, math.inf, 1.5):
        history.add(error)
        counts.append((history.lowest, history.without_lower))
    assert counts == [(None, 1), (2.0, 0), (2.0, 1), (2.0, 2), (1.5, 0)]


def test_keys_are_checked(monkeypatch):
    found = {"recorder": RecorderConfig}
    monkeypatch.setattr(training_config, "find_plugins", lambda base, reserved: found)
    table = [
        (
            {"patience": 2, "validate_every": 0},
            r"^trainer\.patience: needs trainer\.validate_every above 0, got 0",
        ),
        (
            {"validation_scores": {"rmse": 1.0}, "validate_every": 0},
            r"^trainer\.validation_scores: needs trainer\.validate_every above 0, got 0",
        ),
        (
            {"validation_scores": {"rmse": 0.0}, "validate_every": 1},
            r"^trainer\.validation_scores\.rmse: needs a number above 0, got 0",
        ),
        (
            {"validation_dates": {"may": ["2000-05-01"]}, "validate_every": 1},
            r"^trainer\.validation_dates\.may: needs \[first, last\].* got 1 dates",
        ),
        ({"patience": 0, "validate_every": 1}, r"^trainer\.patience: needs .* at least 1, got 0"),
        (
            {"callbacks": {"recordr": {}}},
            r"^trainer\.callbacks: needs one of recorder, got 'recordr'\. Did you mean recorder\?",
        ),
        (
            {"callbacks": {"recorder": {"evry": 1}}},
            r"^trainer\.callbacks\.recorder\.evry: recorder has no such key\..*Allowed: fails_in",
        ),
        ({"callbacks": {"recorder": None}}, r"^trainer\.callbacks\.recorder: .* keys, or \{\}"),
    ]
    assert_refused((partial(TrainerConfig, **keys), words) for keys, words in table)
    found.clear()
    line = refusal(TrainerConfig, callbacks={"own": {}})
    assert "needs a callback of a plug-in, got 'own'" in line
    assert "set CREDIT_DP_PLUGINS to its file, like CREDIT_DP_PLUGINS=my_callback.py" in line


@pytest.mark.slow
def test_the_callback_of_the_reference_page_writes_its_file(tmp_path):
    page = (ROOT / "docs/reference/plugins.md").read_text()
    [code] = re.findall(r"^```python\n(# norms.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [line] = re.findall(r"^CREDIT_DP_PLUGINS=norms.py python train.py .*$", page, re.MULTILINE)
    (tmp_path / "norms.py").write_text(code)
    shutil.copy(ROOT / "train.py", tmp_path)
    small = "experiment=fast trainer.evaluate_stride_hours=2000 logger=csv parallel.domain=2"
    environment = {**os.environ, "CREDIT_DP_CACHE": str(tmp_path / "cache")}
    done = run_line(f"{line} {small} trainer.steps=3 run.dir=run", tmp_path, environment)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "run/norms.csv").read_text().splitlines()
    assert rows[0] == "step,parameter,norm"
    steps = [row.split(",")[0] for row in rows[1:]]
    assert set(steps) == {"1", "2", "3"}
    assert len(steps) == 3 * steps.count("1")
