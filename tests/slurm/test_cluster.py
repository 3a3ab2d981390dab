"""Sweeps and scripts on a real SLURM of two nodes: what is submitted, stopped, resumed, cancelled.

Runs are shared: a sweep of four on two meshes, of which one fails at first; and a job of the script
on two nodes, stopped by a signal and resumed. Jobs that come to their time limit, which is a minute
at least, are exhaustive.
"""

import csv
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.tables import sweep_table
from tests.cli.invocation import answer, forget_plugins
from tests.slurm.cluster import CORES

STEPS = 20
KEYS = (
    "experiment=fast", "device=cpu", "trainer.evaluate_hours=[6]", "trainer.checkpoint_every=100",
)  # fmt: skip
RUN = (*KEYS, f"trainer.steps={STEPS}")
SWEEP = ("-m", *RUN, "parallel.domain=2,1", "seed=1,2")
ENDLESS = ("trainer.steps=100000", "loss=waiting")
# A loss that leaves the cores to other tests, for runs that only have to last.
PLUGIN = """
import time
from dataclasses import dataclass

from credit_dp.config import OwnLossConfig


@dataclass
class WaitingConfig(OwnLossConfig):
    name: str = "waiting"

    def build(self):
        def error(forecast, truth):
            time.sleep(0.2)
            return (forecast - truth) ** 2

        return error
"""
SLURM = "hydra/launcher=slurm"
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks/4_reading_a_sweep.ipynb"
LONG = 600.0


@dataclass(frozen=True)
class Cluster:
    """A folder to work in, and the environment that jobs and commands get."""

    folder: Path
    environment: dict[str, str]

    def ask(self, *command: str) -> str:
        """Return the output of a SLURM command."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=True
        ).stdout

    def command(self, *arguments: str) -> str:
        """Return the output of `credit-dp ARGUMENTS`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            code, out, err = answer(pytest.MonkeyPatch(), *arguments, program="credit-dp")
        assert (code, err) == (0, "")
        return out

    def train(self, *arguments: str) -> tuple[int, str, str]:
        """`python train.py ARGUMENTS` in this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for key, value in self.environment.items():
                patch.setenv(key, value)
            return answer(pytest.MonkeyPatch(), *arguments)

    def job(self, number: str) -> dict[str, str]:
        """Return SLURM's description of a job."""
        words = self.ask("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.fixture(scope="module")
def cluster(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("work")
    cache = str(folder / "cache")
    environment = {"CREDIT_DP_CACHE": cache, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["CREDIT_DP_PLUGINS"] = str(folder / "waiting.py")
    (folder / "waiting.py").write_text(PLUGIN)
    with forget_plugins():
        yield Cluster(folder, {**slurm, **environment})


def until(done: Callable[[], object], what: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def record(folder: Path) -> dict[str, object]:
    """A job's record; empty if there is none yet."""
    path = folder / "job.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def steps(folder: Path) -> int:
    """Steps that a run has logged."""
    path = folder / "metrics.csv"
    if not path.exists():
        return 0
    with path.open() as file:
        return sum(bool(row["seconds"]) for row in csv.DictReader(file))


def ended(folder: Path, count: int) -> Callable[[], bool]:
    """Whether so many jobs of a sweep have ended."""
    states = ("done", "failed")
    return lambda: (
        sum(record(folder / str(n)).get("state") in states for n in range(count)) == count
    )


@pytest.fixture(scope="module")
def first(cluster: Cluster) -> Path:
    """A sweep of four, of which the third can't write its scores."""
    code, out, err = cluster.train(*SWEEP, SLURM, "run.name=sweep")
    assert (code, err) == (0, "")
    assert "submitted 4 jobs as " in out
    folder = cluster.folder / "outputs/sweep"
    (folder / "2/metrics.json").mkdir()  # so that the job can't write its scores
    return folder


@pytest.fixture(scope="module")
def overrunning(cluster: Cluster, first: Path) -> Iterator[Path]:
    """A job that takes longer than its minute."""
    code, _, err = cluster.train(
        "-m", *KEYS, *ENDLESS, SLURM, "run.name=long",
        "hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=1",
    )  # fmt: skip
    assert (code, err) == (0, "")
    folder = cluster.folder / "outputs/long/0"
    yield folder
    cluster.ask("scancel", "--me")


@pytest.fixture(scope="module")
def bare(cluster: Cluster, first: Path) -> str:
    """The number of a job without any signal, which also takes longer than its minute."""
    keys = shlex.join((*KEYS, *ENDLESS, "run.name=bare"))
    program = f"srun {sys.executable} -m credit_dp train {keys}"
    options = ["--parsable", "--ntasks=1", "--time=1", "--output=bare.log", f"--wrap={program}"]
    return cluster.ask("sbatch", *options).strip()


@pytest.fixture(scope="module")
def scripted(cluster: Cluster, first: Path) -> tuple[str, Path]:
    """The number and the folder of a job of the script, on two nodes, stopped after some steps."""
    keys = ["nodes=2", "tasks_per_node=1", "spread=true", "time=00:30:00", "run.name=script"]
    # The cache of the tests is filled by whichever job comes first.
    done = cluster.command(
        "slurm", "script", *RUN, "parallel.domain=2", "seed=1", "data.fit_in_job=true", *keys
    )
    (cluster.folder / "job.sh").write_text(done)
    number = cluster.ask("sbatch", "--parsable", "job.sh").strip()
    folder = cluster.folder / "outputs/script"
    until(lambda: steps(folder) > 1, "a step")
    cluster.ask("scancel", "--batch", "--signal=USR1", number)
    return number, folder


def number_of(folder: Path) -> str:
    """Return the command with which a job was submitted."""
    return str(json.loads((folder / "submitted.json").read_text())["slurm_job"])


@pytest.mark.slow
def test_a_sweep_is_one_array_and_only_the_broken_job_fails(
    cluster: Cluster, first: Path, scripted: tuple[str, Path]
) -> None:
    numbers = [number_of(first / str(n)) for n in range(4)]
    assert numbers == [f"{numbers[0].partition('_')[0]}_{n}" for n in range(4)]
    until(ended(first, 4), "the sweep")
    records = [record(first / str(n)) for n in range(4)]
    assert [record["state"] for record in records] == ["done", "done", "failed", "done"], records
    assert "metrics.json: could not be written" in str(records[2]["cause"])
    assert cluster.job(numbers[2])["ExitCode"] == f"{records[2]['exit_code']}:0"
    sweep = read_sweep(first)
    assert sweep.keys == ("parallel.domain", "seed")
    states = [(job.state, job.cause) for job in sweep.jobs]
    assert states == [(each["state"], each["cause"] or "") for each in records]


@pytest.mark.slow
def test_jobs_of_an_array_on_one_node_at_once_do_not_collide(cluster: Cluster, first: Path) -> None:
    """Two jobs of two ranks each are separate, complete runs."""
    until(ended(first, 2), "the first two jobs")
    jobs = [cluster.job(number_of(first / n)) for n in "01"]
    assert jobs[0]["NodeList"] == jobs[1]["NodeList"]
    assert jobs[0]["EndTime"] > jobs[1]["StartTime"]
    assert [steps(first / n) for n in "01"] == [STEPS, STEPS]
    assert weights(first / "0") != weights(first / "1")
    text = (first / "0/job.log").read_text()
    assert f"training {STEPS}/{STEPS}  loss" in text  # a line, and no bar
    assert "\x1b" not in text


@pytest.mark.slow
def test_a_second_start_repeats_the_broken_job_alone(cluster: Cluster, first: Path) -> None:
    until(ended(first, 4), "the sweep")
    before = [record(first / n) for n in "013"]
    (first / "2/metrics.json").rmdir()
    code, out, err = cluster.train(*SWEEP, SLURM, "run.name=sweep")
    assert (code, err) == (0, "")
    assert "done already: 3 of 4 jobs" in out
    assert "submitted 1 job as " in out
    assert [job.name for job in read_sweep(first).jobs] == list("0123")
    assert "in the queue already: 1 job\n" in cluster.train(*SWEEP, SLURM, "run.name=sweep")[1]
    until(lambda: record(first / "2")["state"] == "done", "the repeated job")
    assert [record(first / n) for n in "013"] == before
    assert f"resumed after step {STEPS}" in (first / "2/job.log").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_reads_the_sweep(
    cluster: Cluster, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    until(ended(first, 4), "the sweep")
    for key, value in {**cluster.environment, "CREDIT_DP_SWEEP": str(first)}.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=LONG, kernel_name="python3", resources=place).execute()
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    best = sweep_table(read_sweep(first), "relative_rmse").rows[0]["job"]
    assert f": run {best}\n" in cells[4][0]["text"]
    assert "seed=" in cells[4][0]["text"]
    assert cells[1][0]["data"]["text/plain"].count("done") >= 3  # one step may be repeated
    assert ["image/png" in cells[n][-1]["data"] for n in (2, 3, 5)] == [True] * 3


@pytest.mark.slow
def test_a_job_of_an_array_is_queued_again_alone(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM's number of the last job of an array is the number of the array."""
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\n[ "$SLURM_ARRAY_TASK_ID$SLURM_RESTART_COUNT" != 1 ] || exit 75\n'
    )
    program.chmod(0o755)
    (tmp_path / "job.sh").write_text(cluster.command("slurm", "script", *RUN, "seed=1,2"))
    path = f"PATH={tmp_path}{os.pathsep}{cluster.environment['PATH']}"
    options = ["--parsable", f"--export=ALL,{path}", f"--output={tmp_path}/log"]
    number = cluster.ask("sbatch", *options, str(tmp_path / "job.sh")).strip()
    jobs = [f"{number}_{n}" for n in range(2)]
    until(lambda: cluster.job(jobs[1]).get("Restarts") == "1", "the second life")
    ends = ("COMPLETED", "FAILED")
    until(lambda: all(cluster.job(job)["JobState"] in ends for job in jobs), "the end")
    states = [(cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) for job in jobs]
    assert states == [("COMPLETED", "0"), ("COMPLETED", "1")]


@pytest.mark.slow
def test_a_changed_config_is_not_taken_for_finished(cluster: Cluster, first: Path) -> None:
    until(lambda: record(first / "0").get("state") == "done", "the first job")
    (cluster.folder / "conf/optimizer").mkdir(parents=True)
    text = (ROOT / "conf/optimizer/adamw.yaml").read_text()
    (cluster.folder / "conf/optimizer/adamw.yaml").write_text(f"{text}ema: 0.9\n")
    code, _, err = cluster.train(*SWEEP, SLURM, "run.name=sweep")
    (cluster.folder / "conf/optimizer/adamw.yaml").unlink()
    assert code == 2
    assert "outputs/sweep/0 was run with these overrides, but with another config" in err
    assert "optimizer.ema: None, now 0.9" in err


@pytest.mark.slow
def test_a_job_on_two_nodes_is_stopped_by_a_signal_and_ends_as_if_it_had_not_been(
    cluster: Cluster, first: Path, scripted: tuple[str, Path]
) -> None:
    number, folder = scripted
    assert cluster.job(number)["NumNodes"] == "2"
    until(lambda: cluster.job(number)["JobState"] in ("COMPLETED", "FAILED"), "the job")
    log = (cluster.folder / f"slurm-{number}.log").read_text()
    assert cluster.job(number)["Restarts"] == "1", log
    assert cluster.job(number)["JobState"] == "COMPLETED", log
    assert "SIGUSR1: stopped after step " in log
    assert "resumed after step " in log
    line = "1 of 1 domain groups span several nodes, the first is ranks 0 to 1 on nodes 0 and"
    assert line in log
    until(lambda: record(first / "0").get("state") == "done", "the undisturbed run")
    assert weights(folder) == weights(first / "0")
    scores = [(run / "metrics.json").read_text() for run in (folder, first / "0")]
    assert scores[0] == scores[1]


def weights(folder: Path) -> dict[str, bytes]:
    """The bytes of all tensors in a run's last checkpoint."""
    found = {}
    for path in folder.glob(f"checkpoint/step-{STEPS:08}/*.safetensors"):
        with safe_open(path, "np") as file:
            found |= {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    assert found
    return found


@pytest.mark.exhaustive
def test_a_job_saves_before_its_time_is_over_and_goes_on_until_it_is_cancelled(
    cluster: Cluster, overrunning: Path
) -> None:
    """A cancelled job saves, too, and is not requeued."""
    number, log = number_of(overrunning), overrunning / "job.log"
    until(lambda: log.exists() and "resumed after step " in log.read_text(), "the second life")
    assert ": stopped after step " in log.read_text().partition("resumed after step ")[0]
    cluster.ask("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    # On a slow machine this start may have ended by now; the next one has enough time.
    until(lambda: read_sweep(overrunning.parent).job("0").state == "running", "a run")
    before = steps(overrunning)
    until(lambda: steps(overrunning) > before + 2, "steps of a life with enough time")
    cluster.ask("scancel", number)
    until(lambda: cluster.job(number)["JobState"] == "CANCELLED", "the end")
    until(lambda: record(overrunning)["state"] != "running", "the record")
    assert read_sweep(overrunning.parent).job("0").state == "preempted"
    assert "SIGTERM: stopped after step " in log.read_text().rpartition("resumed after step ")[2]
    assert number not in cluster.ask("squeue", "--noheader", "--format", "%i").split()


@pytest.mark.exhaustive
def test_a_run_knows_when_its_job_ends(cluster: Cluster, bare: str) -> None:
    until(lambda: cluster.job(bare)["JobState"] == "FAILED", "the time limit")
    assert cluster.job(bare)["ExitCode"] == "75:0"
    assert (
        "the job's time is over: stopped after step " in (cluster.folder / "bare.log").read_text()
    )
    assert list((cluster.folder / "outputs/bare/checkpoint").glob("step-*"))


@pytest.mark.slow
def test_what_fits_on_no_node_is_refused_before_it_is_submitted(cluster: Cluster) -> None:
    before = cluster.ask("squeue", "--noheader", "--format", "%i")
    line = cluster.train(*SWEEP[:-2], "parallel.domain=8", SLURM, "run.name=large")[2]
    assert f"8 ranks on one node need 8 cores, but nodes have {CORES}" in line
    line = cluster.train("-m", *KEYS, "parallel.data=12", "data.batch_size=12", SLURM)[2]
    assert "12 ranks need 3 nodes with 4 ranks on each, but the partition has 2" in line
    after = cluster.ask("squeue", "--noheader", "--format", "%i")
    assert {*after.split()} <= {*before.split()}
    assert not (cluster.folder / "outputs/large/0").exists()
