"""The doctor starts ranks, compares results with known answers, and reports as text or JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from credit_dp.costs import sharding_checks
from credit_dp.distributed import RankInfo
from credit_dp.domain_parallel import DomainParallelManager
from tests.distributed.launch_program import small_config
from tests.ranks import on_processes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_ranks_agree_with_the_known_answers() -> None:
    program = "import credit_dp.cli as c; c.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", "parallel.domain=2", "device=cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [check["name"] for check in report["checks"]] == [
        "exchange",
        "reduction",
        "converted step",
    ]
    assert all(check["passed"] for check in report["checks"])
    assert (report["facts"]["ranks"], report["facts"]["backend"]) == ("2", "gloo")


@pytest.mark.slow
def test_all_axes_of_a_mesh_agree_with_the_known_answers() -> None:
    lines = on_processes(4, axes, domain=1, pipeline=2)
    assert lines == [(0.0, 0.0)] * 4


def axes(manager: DomainParallelManager) -> tuple[float, float]:
    cpu = torch.device("cpu")
    return sharding_checks.data_error(manager, cpu), sharding_checks.pipeline_error(manager, cpu)


def test_a_wrong_answer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sharding_checks, "exchange_error", lambda manager, device: 1e-3)
    assert sharding_checks.check(small_config(""), RankInfo()) == 1
    out = capsys.readouterr().out
    assert "exchange          FAILED" in out
    assert "converted step    ok" in out


def test_a_nan_is_no_pass() -> None:
    assert not sharding_checks.Check("exchange", float("nan"), 1.0, 0.0).passed
