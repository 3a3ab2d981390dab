"""The launchers of sweeps: jobs share the machine, or run through SLURM.

Small programs stand in for trainings and for SLURM's commands.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from credit_dp.cli import sweep_launchers
from credit_dp.cli.sweep_launchers import may_requeue, queued_job_ids, run_job
from credit_dp.distributed.peer_monitor import process_has_ended
from credit_dp.errors import UserError
from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.read import planned_jobs
from tests.cli.invocation import answer, refusal

LOCAL = ("-m", "hydra/launcher=local", "device=cpu", "run.name=many")
# A job records when it ran, and then does what its seed says.
PROGRAM = """
import os, signal, sys, time
folder, keys = sys.argv[1], dict(k.split("=", 1) for k in sys.argv if "=" in k)
seed = int(keys.get("seed", 0))
received = []
signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
open(folder + "/config.yaml", "w").write("{}")
open(folder + "/began", "w").write(f"{time.monotonic()} {os.getpid()}")
if seed >= 8:
    os.kill(os.getppid(), {8: signal.SIGINT, 9: signal.SIGUSR1}[seed])
    while not received:
        time.sleep(0.02)
    sys.exit(75)
time.sleep(0.3)
open(folder + "/ended", "w").write(str(time.monotonic()))
if seed == 3:
    sys.exit("error: three is not allowed")
"""
SCONTROL = """\
#!/bin/sh
echo "$@" >> "$RECORD"
echo "JobId=5 JobState=$STATE Reason=None"
"""


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the jobs of a sweep run `PROGRAM`, and return the sweep's folder."""

    def command(folder: Path, texts: Sequence[str]) -> list[str]:
        return [sys.executable, "-S", "-c", PROGRAM, str(folder), *texts]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_launchers, "train_command", command)
    return tmp_path / "outputs/many"


def run(*arguments: str) -> tuple[int, str, str]:
    return answer(pytest.MonkeyPatch(), *LOCAL, "hydra.launcher.cores=2", *arguments)


def states(sweep: Path) -> list[str]:
    paths = sorted(sweep.glob("*/job.json"))
    return [str(json.loads(path.read_text())["state"]) for path in paths]


@pytest.mark.slow
def test_jobs_start_as_cores_come_free(sweep: Path) -> None:
    code, out, err = run("parallel.domain=1,2", "seed=1,2")
    assert (code, err) == (0, "")
    assert states(sweep) == ["done"] * 4
    assert "#2 started with 2 ranks: device=cpu parallel.domain=2 seed=1\n" in out
    folders = [sweep / number for number in "0123"]
    began = [float((folder / "began").read_text().split()[0]) for folder in folders]
    times = [(a, float((f / "ended").read_text())) for a, f in zip(began, folders, strict=True)]
    assert times[1][0] < times[0][1]  # two of one rank at once
    assert [job["seed"] for job in planned_jobs(sweep)] == ["1", "2"] * 2
    for large in times[2:]:  # jobs of two ranks one after the other
        assert all(end < large[0] or large[1] < begin for begin, end in times if begin != large[0])


@pytest.mark.slow
def test_a_job_that_fails_does_not_stop_the_others(sweep: Path) -> None:
    code, out, _ = run("seed=3,1,2")
    assert code == 1
    assert states(sweep) == ["failed", "done", "done"]
    assert json.loads((sweep / "0/job.json").read_text())["cause"] == "three is not allowed"
    assert "#0 ended with exit code 1 (three is not allowed)" in out
    assert "3 jobs ended, 1 of them failed" in out


@pytest.mark.slow
def test_ctrl_c_ends_all_jobs(sweep: Path) -> None:
    code, _, err = run("seed=8,1,2")
    assert (code, err) == (130, "\ninterrupted\n")
    pids = [int(path.read_text().split()[1]) for path in sweep.glob("*/began")]
    assert pids
    assert all(process_has_ended(pid) for pid in pids)
    assert not (sweep / "2/began").exists()


@pytest.mark.slow
def test_a_signal_has_all_jobs_save_and_starts_no_more(sweep: Path) -> None:
    code, _, _ = run("seed=9,1,2")
    assert code == 75
    jobs = [(job.value("seed"), job.status.state) for job in read_sweep(sweep).jobs]
    assert (jobs[0], jobs[2]) == (("9", "preempted"), ("2", "not started"))
    assert not (sweep / "2/began").exists()


@pytest.mark.slow
def test_a_signal_between_two_starts_prevents_the_second(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that starts after the signal would never get it."""

    def interrupt(text: str) -> None:
        if "started" in text:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(sweep_launchers, "print_line", interrupt)
    assert run("seed=1,2")[0] == 75
    assert len(list(sweep.glob("*/job.json"))) == 1


@pytest.mark.slow
def test_a_job_larger_than_the_machine_is_refused(sweep: Path) -> None:
    line = refusal(
        pytest.MonkeyPatch(), *LOCAL, "hydra.launcher.cores=2", "seed=1,2", "parallel.domain=3"
    )
    assert "3 ranks on one node need 3 cores, but nodes have 2" in line
    assert list(sweep.glob("*/job.json")) == []


def test_the_launchers_are_for_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "add --multirun" in refusal(monkeypatch, "hydra/launcher=local")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credit_dp.cli.sweep_launchers.PLUGIN", "hydra_plugins.not_there")
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hydra.launcher.account", "'a\nb'"),
        ("+hydra.launcher.additional_parameters.qos", "'a\nb'"),
        ("run.dir", "'a\nb'"),
    ],
)
def test_a_value_of_several_lines_reaches_no_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, value: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        line = refusal(monkeypatch, "-m", "hydra/launcher=slurm", "seed=1,2", f"{key}={value}")
    assert line.startswith(key.lstrip("+"))
    assert "needs text without line breaks or control characters, got" in line
    assert list(tmp_path.iterdir()) == []


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
