"""Jobs of a sweep side by side on this machine; small programs stand in for trainings."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from credit_dp.cli import sweep as sweep_module
from credit_dp.cli.compose import Composer
from credit_dp.cli.entry import run_command
from credit_dp.cli.sweep_jobs import Job, result_line
from credit_dp.cli.train import train
from credit_dp.distributed.peer_monitor import process_has_ended
from credit_dp.distributed.signals import EXIT_PREEMPTED
from credit_dp.process import OUTPUT_VARIABLE
from credit_dp.sweeps import read_sweep
from tests.cli.invocation import answer, refusal
from tests.data import stores
from tests.sweeps.folders import write_done

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


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the jobs of a sweep run `PROGRAM`, and return the sweep's folder."""

    def command(job: Job) -> list[str]:
        return [sys.executable, "-S", "-c", PROGRAM, str(job.folder), *job.overrides]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Job, "command", property(command))
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
    assert [job.value("seed") for job in read_sweep(sweep).jobs] == ["1", "2"] * 2
    for large in times[2:]:  # jobs of two ranks one after the other
        assert all(end < large[0] or large[1] < begin for begin, end in times if begin != large[0])


@pytest.mark.slow
def test_a_job_that_fails_does_not_stop_the_others(sweep: Path) -> None:
    code, out, err = run("seed=3,1,2")
    assert code == 1
    assert states(sweep) == ["failed", "done", "done"]
    assert json.loads((sweep / "0/job.json").read_text())["cause"] == "three is not allowed"
    assert re.search(
        r"^#0 seed=3: failed with exit code 1, .* s \(three is not allowed\)$", out, re.M
    )
    assert re.search(r"^#1 seed=1: [\d.]+ s$", out, re.M)  # it has no scores
    assert "--multirun: 1 of 3 runs failed: 0. See `credit-dp sweep show " in err


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
    jobs = [(job.value("seed"), job.state) for job in read_sweep(sweep).jobs]
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

    monkeypatch.setattr(sweep_module, "print_lines", interrupt)
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
    assert "Add --multirun" in refusal(monkeypatch, "hydra/launcher=local")


def test_a_file_of_the_user_adds_to_a_launcher(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "conf/hydra/launcher").mkdir(parents=True)
    for name, base in (("mine", "local"), ("other", "basic")):
        path = tmp_path / f"conf/hydra/launcher/{name}.yaml"
        path.write_text(f"defaults: [{base}, _self_]\n" + "cores: 1\n" * (name == "mine"))
    keys = ("-m", "device=cpu", "run.name=many", "seed=1,2")
    assert answer(pytest.MonkeyPatch(), *keys, "hydra/launcher=mine")[0] == 0
    ends = [float((sweep / number / "ended").read_text()) for number in "01"]
    begins = [float((sweep / number / "began").read_text().split()[0]) for number in "01"]
    assert begins[1] > ends[0]  # one at a time
    line = refusal(pytest.MonkeyPatch(), *keys, "hydra/launcher=other")
    assert line.startswith("hydra/launcher: needs basic, local, slurm, or a file of yours")


def test_values_of_a_launcher_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    line = refusal(monkeypatch, *LOCAL, "hydra.launcher.cores=-1", "seed=1,2")
    assert line == "hydra.launcher.cores: needs an integer of at least 0, got -1"
    slurm = ("-m", "hydra/launcher=slurm", "seed=1,2")
    line = refusal(monkeypatch, *slurm, "hydra.launcher.timeout_min=3")
    assert "hydra.launcher.signal_delay_s: 120 s before the end of a job is too early" in line
    line = refusal(monkeypatch, *slurm, "hydra.launcher.timeout_mins=3")
    assert "timeout_mins" in line


def test_a_run_of_a_sweep_has_one_line(tmp_path: Path) -> None:
    """What sets it apart, its last loss, the ratio of its errors, and its time."""
    config = Composer("train").compose_config([])
    jobs, codes = [], []
    for number, code in enumerate((0, 2, EXIT_PREEMPTED)):
        write_done(tmp_path / str(number), model=3.0)
        overrides = ("model=unet", f"++seed={number}")
        jobs.append(Job(tmp_path / str(number), overrides, config, is_finished=False))
        codes.append(code)
    assert [result_line(job, jobs, code, 75.0) for job, code in zip(jobs, codes, strict=True)] == [
        "#0 seed=0: loss 0.03333, RMSE 0.30 of persistence's, 75 s",
        "#1 seed=1: failed with exit code 2, 75 s",
        "#2 seed=2: stopped, 75 s",
    ]
    assert result_line(jobs[0], jobs[:1], 0, 75.0).startswith("#0 model=unet seed=0: loss")


@pytest.mark.slow
def test_runs_of_a_sweep_in_this_process_write_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = stores.write(stores.dataset(24, 32, 60), tmp_path / "s.zarr")
    monkeypatch.chdir(tmp_path)
    keys = ("experiment=fast", "data=zarr", f"data.store={store}", "run.name=many", "device=cpu")
    fields = ("data.prognostic=[temperature]", f"data.cache={tmp_path}/cache")
    ranks = ("parallel.domain=1,2", "trainer.gradient_clip=1", "trainer.evaluate_hours=[6]")
    code = run_command(train, ["-m", *keys, *fields, *ranks], "train")
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    folder = tmp_path / "outputs/many"
    head, *lines = out.splitlines()
    assert head == "2 runs in outputs/many, the output of each in its job.log"
    pattern = r"#{} parallel.domain={}: loss [\d.]+, RMSE [\d.]+ of persistence's, .* s"
    for number, line in enumerate(lines):
        assert re.fullmatch(pattern.format(number, number + 1), line), line
        log = (folder / str(number) / "job.log").read_text()
        assert "RMSE on held-out dates" in log
        assert "training 5/5  loss " in log
    assert len(lines) == 2
    assert OUTPUT_VARIABLE not in os.environ
