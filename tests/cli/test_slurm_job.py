"""A job of an array after its ranks have ended; small programs stand in for SLURM's."""

from pathlib import Path

import pytest

from credit_dp.cli.sweep_launchers import may_requeue, queued_job_ids, run_job
from credit_dp.errors import UserError

SCONTROL = """\
#!/bin/sh
echo "$@" >> "$RECORD"
echo "JobId=5 JobState=$STATE Reason=None"
"""


@pytest.mark.parametrize(
    ("code", "state", "restarts", "again"),
    [
        (75, "RUNNING", 0, True),
        (75, "CANCELLED", 0, False),
        (75, "RUNNING", 2, False),
        (1, "RUNNING", 0, False),
    ],
)
def test_a_job_that_was_stopped_is_queued_again_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, state: str, restarts: int,
    again: bool,
) -> None:  # fmt: skip
    """In the last job of an array, `SLURM_JOB_ID` is the number of the array."""
    for name, text in (("srun", f"#!/bin/sh\nexit {code}\n"), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    record = tmp_path / "record"
    record.touch()
    array = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    more = {"SLURM_RESTART_COUNT": str(restarts), "STATE": state, "RECORD": str(record)}
    for key, value in {**array, **more, "PATH": f"{tmp_path}:/usr/bin:/bin"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as ended:
        run_job(str(tmp_path / "0"), ["seed=1"], [], [], requeues=2)
    assert ended.value.code == code
    commands = record.read_text().splitlines()
    assert ("requeue 5_2" in commands) == again
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
