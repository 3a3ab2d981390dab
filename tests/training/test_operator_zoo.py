"""A model of another package, made of every kind of layer, trains the same on uneven bands."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

from credit_dp import plugins
from credit_dp.config import OwnModelConfig
from credit_dp.export.file import read_trained
from tests import commands
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import TIMEOUT, on_threads
from tests.tier_cases import tiers

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "tests/zoo"
GRID = (25, 12)


def _zoo():
    sys.path.insert(0, str(ZOO))
    try:
        from operator_zoo import OperatorZooConfig

        return OperatorZooConfig("operator_zoo").build(3, 2, GRID)
    finally:
        sys.path.remove(str(ZOO))


@pytest.mark.parametrize("ranks", tiers([], [(3,)], [(2,), (4,)]))
def test_the_zoo_equals_itself_on_the_whole_globe(ranks):
    on_threads(ranks, assert_same_as_whole_globe, _zoo, (), (2, 3, *GRID), MODEL)


def _train(tmp_path, *overrides):
    folder = tmp_path / "-".join(overrides).replace("=", "")
    command = ["python", "train.py", "model=operator_zoo", *overrides]
    command += ["experiment=zoo", f"--config-dir={ZOO / 'conf'}", f"run.dir={folder}"]
    path = os.pathsep.join([str(ZOO), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "disabled"}
    done = commands.run(command, ROOT, environment, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = read_trained(str(folder)).weights
    return {name: value.double() for name, value in weights.items()}


@pytest.mark.exhaustive
def test_train_py_with_the_zoo_is_exact_on_three_uneven_ranks(tmp_path):
    alone = _train(tmp_path, "parallel.domain=1")
    sharded = _train(tmp_path, "parallel.domain=3")
    assert list(alone) == list(sharded)
    wanted, found = (torch.cat([v.flatten() for v in s.values()]) for s in (alone, sharded))
    assert (found - wanted).norm() <= 1e-10 * wanted.norm()
    assert "branches.0.layers.0.weight_orig" in alone


def test_what_is_no_model_is_reported_and_skipped(monkeypatch, caplog):
    values = ("no_such_package:Config", "tests.ranks:RankError")
    entries = [EntryPoint(f"mine{i}", value, "credit_dp.models") for i, value in enumerate(values)]
    monkeypatch.setattr(plugins, "entry_points", lambda: EntryPoints(entries))
    assert plugins.find_plugins(OwnModelConfig, ()) == {}
    assert "no_such_package:Config can't be imported" in caplog.text
    assert "tests.ranks:RankError is not a subclass of OwnModelConfig" in caplog.text
