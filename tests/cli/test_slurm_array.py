"""A sweep as a job array of SLURM, whose commands are small programs here."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from credit_dp.cli import sweep
from credit_dp.cli.slurm_array import may_requeue, queued_job_ids, run_job
from credit_dp.errors import UserError
from tests.cli.invocation import assert_refused, refusal

SCONTROL = """\
#!/bin/sh
echo "$@" >> "$RECORD"
echo "JobId=5 JobState=$STATE Reason=None"
"""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "find_spec", lambda name: find_spec(f"{name}_not_there"))
        line = refusal(monkeypatch, "-m", "hydra/launcher=slurm", "seed=1,2")
    assert "pip install '.[slurm]' in the folder that credit_dp was cloned into" in line


@pytest.mark.slow
def test_without_slurm_nothing_is_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PATH", os.path.dirname(sys.executable))
        line = refusal(monkeypatch, "-m", "hydra/launcher=slurm", "seed=1,2")
    assert "needs sbatch, which is not here" in line
    assert list(tmp_path.iterdir()) == []


def test_a_value_of_several_lines_reaches_no_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = ".*needs text without line breaks or control characters, got"
    keys = ("hydra.launcher.additional_parameters.qos", "run.dir")
    table = {f"-m {'+' * ('qos' in key)}{key}=\"'a\nb'\"": f"^{key}{line}" for key in keys}
    monkeypatch.chdir(tmp_path)
    assert_refused(table, "train", "hydra/launcher=slurm", "seed=1,2")
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_was_stopped_is_queued_again_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the last job of an array, `SLURM_JOB_ID` is the number of the array."""
    record = tmp_path / "record"
    array = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    for key, value in {**array, "RECORD": str(record), "PATH": f"{tmp_path}:/usr/bin:/bin"}.items():
        monkeypatch.setenv(key, value)
    for code, state, restarts, again in (
        (75, "RUNNING", 0, True),
        (75, "CANCELLED", 0, False),
        (75, "RUNNING", 2, False),
        (1, "RUNNING", 0, False),
    ):
        for name, text in (("srun", f"#!/bin/sh\nexit {code}\n"), ("scontrol", SCONTROL)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        record.write_text("")
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        monkeypatch.setenv("STATE", state)
        with pytest.raises(SystemExit) as ended:
            run_job(str(tmp_path), ["srun"], requeues=2)
        assert ended.value.code == code
        commands = record.read_text().splitlines()
        assert ("requeue 5_2" in commands) == again, (code, state, restarts)
        assert [line.split()[-1] for line in commands] == ["5_2"] * len(commands)


def test_a_job_is_not_queued_again_if_slurm_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not may_requeue("5_2", 1)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho JobState=RUNNING >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert not may_requeue("5_2", 1)


def test_a_queue_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error:\nno' >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError) as refused:
        queued_job_ids()
    assert str(refused.value) == ("hydra/launcher=slurm: squeue fails (slurm_load_jobs error: no)")
