"""`credit-dp verify` and `doctor` pass on a sound machine, and fail if something is wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credit_dp.domain_parallel.verify
from credit_dp.cli.verify import json_safe
from credit_dp.costs import sharding_checks
from credit_dp.distributed.launcher import RankInfo
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import ThreadTransport
from credit_dp.domain_parallel.verify import VerifyReport
from tests.cli.invocation import answer, assert_refused
from tests.data import region_stores
from tests.distributed.launch_program import small_config
from tests.ranks import TIMEOUT, on_processes

SMALL = ("model.channels=[4,8]", "model.groups=2")


def verify(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    return answer(monkeypatch, "verify", *arguments, program="credit-dp")


def test_the_unet_on_the_quickstart_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = verify(monkeypatch, *SMALL, "parallel.domain=3")
    assert (code, err) == (0, "")
    first, _, output, of_input, *_, others, verdict = out.splitlines()
    assert first == "unet on 3 ranks against one, input 2 x 18 x 32 x 64, float64"
    assert float(output.removeprefix("output")) < 1e-13
    assert float(of_input.removeprefix("gradient of input 0")) < 1e-13
    assert others.startswith("and ")
    assert verdict.startswith("ok: the largest error is ")


def test_a_model_of_a_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The store says that the grid is a region; its size is data.grid."""
    store = region_stores.write("box", tmp_path)
    built = []
    convert = credit_dp.domain_parallel.verify.verify_domain_parallel

    def keep(build: Callable[[], nn.Module], *args: Any, **options: Any) -> VerifyReport:
        built.append(build())
        return convert(build, *args, **options)

    monkeypatch.setattr(credit_dp.domain_parallel.verify, "verify_domain_parallel", keep)
    keys = (*region_stores.overrides(store), "data.grid=9x8", "parallel.domain=2")
    code, out, err = verify(monkeypatch, *SMALL, *keys)
    assert (code, err, out.splitlines()[-1][:3]) == (0, "", "ok:")
    assert built[0].stem.column_mode == "replicate"


@pytest.mark.slow
def test_branches_dropped_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = verify(
        monkeypatch, "model=unet_tiny", "model.stochastic_depth=0.4", "parallel.domain=2"
    )
    assert (code, out.splitlines()[-1][:3]) == (0, "ok:")


@pytest.mark.slow
def test_json_on_a_users_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = verify(monkeypatch, "--json", *SMALL, "parallel.domain=4", "data.grid=13x8")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["input_shapes"] == [[2, 18, 13, 8]]
    assert (report["ranks"], report["tolerance"], report["passed"]) == (4, 1e-11, True)
    errors = {**report["outputs"], **report["input_gradients"], **report["gradients"]}
    assert report["worst"]["error"] == max(errors.values())
    assert "stem.conv.weight" in report["gradients"]


@pytest.mark.slow
def test_a_wrong_reduction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "_all_reduce", lambda self, x: x.clone())
    code, out, err = verify(monkeypatch, *SMALL, "parallel.domain=2", "data.grid=8x8")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1].startswith("FAILED: the largest error is ")
    monkeypatch.setattr(ThreadTransport, "_all_reduce", lambda self, x: x.clone())
    words = ("--json", *SMALL, "parallel.domain=2", "data.grid=8x8")
    code, out, _ = verify(monkeypatch, *words)
    assert (code, json.loads(out)["passed"]) == (1, False)


def test_nan_is_text_in_json() -> None:
    assert json_safe({"a": {"b": float("nan"), "c": 0.5}, "d": [1]}) == {
        "a": {"b": "nan", "c": 0.5},
        "d": [1],
    }


REFUSED = {
    "parallel.domain=1": "parallel.domain: with one rank the model is not sharded",
    "parallel.domain=3 data.grid=8x16": (
        "parallel.domain: the model's coarsest level has 2 of the grid's 8 rows"
    ),
}


@pytest.mark.slow
def test_one_line() -> None:
    assert_refused(REFUSED, "verify")


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
        timeout=TIMEOUT,
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
    errors = on_processes(4, members_error, domain=2, ensemble=2)
    assert errors == [0.0] * 4


def axes(manager: DomainParallelManager) -> tuple[float, float]:
    cpu = torch.device("cpu")
    return sharding_checks.data_error(manager, cpu), sharding_checks.pipeline_error(manager, cpu)


def members_error(manager: DomainParallelManager) -> float:
    return sharding_checks.members_error(manager, torch.device("cpu"))


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
