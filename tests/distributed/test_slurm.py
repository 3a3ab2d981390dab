"""Commands of SLURM that answer, fail, hang, or are not installed; small programs stand in."""

from pathlib import Path

import pytest

from credit_dp.distributed import slurm
from credit_dp.distributed.placement import ClusterNodes, slurm_nodes
from credit_dp.distributed.slurm import run_slurm_command, seconds_left
from credit_dp.errors import UserError


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs are found before the machine's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "SLURM_TIMEOUT", 0.3)
    return tmp_path


def write_program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_the_output_is_returned(programs: Path) -> None:
    write_program(programs, "squeue", 'echo "$@"; echo ignored >&2')
    assert run_slurm_command(["squeue", "--me", "a b"]) == "--me a b\n"


def test_a_failure_is_one_line_and_no_limit(programs: Path) -> None:
    for body, reason in {
        "echo 'error: no\n controller' >&2; exit 1": "squeue fails (error: no controller)",
        "exit 3": "squeue fails (exit code 3)",
        "echo early >&2; exec sleep 30": "squeue fails (no answer within 0.3 s)",
    }.items():
        write_program(programs, "squeue", body)
        with pytest.raises(UserError) as refused:
            run_slurm_command(["squeue"])
        assert str(refused.value) == reason
        assert seconds_left({"SLURM_JOB_ID": "1"}) is None


def test_a_missing_command_is_one_line(programs: Path) -> None:
    with pytest.raises(UserError, match=r"^sabsent fails \(.*No such file.*sabsent"):
        run_slurm_command(["sabsent"])


def test_the_time_left_is_that_of_the_queue(programs: Path) -> None:
    write_program(programs, "squeue", "echo 1-02:03:04")
    assert seconds_left({"SLURM_JOB_ID": "1"}) == 93784


def test_a_script_tells_when_its_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm.time, "time", lambda: 1_000.0)
    assert seconds_left({"CREDIT_DP_JOB_END": "1500", "PBS_JOBID": "1.server"}) == 500
    assert seconds_left({"CREDIT_DP_JOB_END": "900"}) == 0
    assert seconds_left({"PBS_JOBID": "1.server"}) is None


def test_nodes_are_unknown_if_slurm_does_not_answer(programs: Path) -> None:
    write_program(programs, "sinfo", "exec sleep 30")
    assert slurm_nodes(None) == ClusterNodes()
    write_program(programs, "sinfo", "echo 'main*|64|gpu:a100:4'; echo 'main*|64|gpu:a100:4'")
    assert slurm_nodes(None) == ClusterNodes(2, 64, 4)
