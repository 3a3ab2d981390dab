"""`credit-dp cluster script` and `credit-dp slurm script`: scripts that fit the mesh, or none."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.invocation import answer, assert_refused

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("*/*.sh"))


def script(*keys: str) -> tuple[int, str, str]:
    return answer(pytest.MonkeyPatch(), "slurm", "script", *keys, program="credit-dp")


def cluster_script(*keys: str) -> tuple[int, str, str]:
    return answer(pytest.MonkeyPatch(), "cluster", "script", *keys, program="credit-dp")


@pytest.mark.slow
def test_the_scripts_are_what_their_second_line_makes() -> None:
    assert SCRIPTS
    for path in SCRIPTS:
        command = shlex.split(path.read_text().splitlines()[1].removeprefix("# "))
        assert command[0] == "credit-dp"
        assert command[1:3] == [{"pbs": "cluster"}.get(path.parent.name, "slurm"), "script"]
        found = answer(pytest.MonkeyPatch(), *command[1:], program="credit-dp")
        assert found == (0, path.read_text(), ""), path
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.slow
def test_slurm_gets_what_the_mesh_needs() -> None:
    for typed, needed in {
        "parallel.domain=8 nodes=4 gpus_per_node=8 cpus_per_node=96": (
            "--nodes=4 --ntasks-per-node=8 --cpus-per-task=12 --gpus-per-node=8"
        ),
        "parallel.domain=4 parallel.data=3 device=cpu cpus_per_node=8": (
            "--nodes=3 --ntasks-per-node=4 --cpus-per-task=1 --time=24:00:00"
        ),
        "parallel.domain=2 seed=1,2 device=cpu time=00:05:00 partition=a": (
            "--array=0-1 --nodes=1 --partition=a --signal=B:USR1@60"
        ),
    }.items():
        code, out, err = script(*typed.split())
        assert (code, err) == (0, ""), typed
        words = [line.split()[1] for line in out.splitlines() if line.startswith("#SBATCH ")]
        assert set(needed.split()) <= set(words), typed
        assert ("gpus" in " ".join(out.splitlines()[2:])) == ("device=cpu" not in typed)


def test_a_value_of_several_lines_is_refused() -> None:
    """A line that begins within a comment or a directive would be a command."""
    needed = "needs text without line breaks or control characters"
    texts = [f"a{character}touch here" for character in "\n\r\0\x1b\x85\u2028"]
    for scheduler, keys in {
        "slurm": ("run.dir", "partition", "account", "data.store", "time"),
        "pbs": ("run.dir", "queue", "account", "start", "nodes"),
    }.items():
        table = {
            f"'{key}={text}'": f"^{key}: {needed}.*{re.escape(repr(text))}"
            for key in keys
            for text in texts
        }
        defaults = (f"scheduler={scheduler}", "device=cpu", "cpus_per_node=8")
        assert_refused(table, "cluster script", *defaults)


KEYS_THAT_DO_NOT_FIT = {
    "nodes=many": "nodes: needs a whole number of at least 1, got 'many'",
    "start=mpirun": "start: needs one of srun, torchrun",
    "time=tomorrow": "time: needs HH:MM:SS",
    "nods=4": "nods: no such key",
    "queue=a": "queue: is for scheduler=pbs. Use partition instead.",
    "scheduler=lsf": "scheduler: needs one of slurm, pbs, got 'lsf'",
    "scheduler=pbs start=srun": "start: needs one of mpiexec, mpirun, got 'srun'",
    "scheduler=pbs partition=a": "partition: is for scheduler=slurm. Use queue instead",
    "scheduler=pbs time=tomorrow": "time: needs HH:MM:SS",
}
MESHES_THAT_DO_NOT_FIT = {
    "parallel.domain=8 gpus_per_node=4": "need 8 GPUs, but nodes have 4",
    "scheduler=pbs parallel.domain=8 gpus_per_node=4": "need 8 GPUs, but nodes have",
    "parallel.domain=4 device=cpu cpus_per_node=2": "need 4 cores, but nodes have 2",
    "parallel.domain=1,2 run.dir=here": "run.dir: the jobs of an array",
    "parallel.domain=1,2": "the jobs of a script need one mesh",
    "resume=.": "resume: each job resumes from its own checkpoint",
}


@pytest.mark.parametrize(
    "table",
    [KEYS_THAT_DO_NOT_FIT, pytest.param(MESHES_THAT_DO_NOT_FIT, marks=pytest.mark.slow)],
    ids=["keys", "meshes"],
)
def test_what_cannot_be_placed_is_refused(table: dict[str, str]) -> None:
    assert_refused(table, "cluster script")


@pytest.mark.slow
def test_slurm_is_the_default_and_its_script_the_same() -> None:
    keys = ("parallel.domain=2", "gpus_per_node=4", "partition=gpu", "start=torchrun")
    code, out, err = cluster_script("scheduler=slurm", *keys)
    assert (code, err) == (0, "")
    lines = script(*keys)[1].splitlines()
    assert out.splitlines()[2:] == lines[2:]
    assert cluster_script(*keys)[1].splitlines()[2:] == lines[2:]


@pytest.mark.slow
def test_pbs_gets_what_the_mesh_needs() -> None:
    for typed, lines in {
        "parallel.domain=8 nodes=4 gpus_per_node=8 cpus_per_node=96 queue=main": [
            "-q main",
            "-l select=4:ncpus=96:mpiprocs=8:ompthreads=12:ngpus=8",
            "-l place=scatter",
        ],
        "parallel.domain=2 device=cpu account=me time=1-02:03:04": [
            *("-A me", "-l select=1:ncpus=2:mpiprocs=2:ompthreads=1", "-l walltime=26:03:04")
        ],
        "seed=1,2,3 device=cpu time=05:00": ["-J 0-2", "-l walltime=00:05:00"],
    }.items():
        code, out, err = cluster_script("scheduler=pbs", *typed.split())
        assert (code, err) == (0, ""), typed
        found = [line for line in out.splitlines() if line.startswith("#PBS ")]
        assert [line for line in lines if f"#PBS {line}" not in found] == [], typed
        assert all(line == line.strip() and "#" not in line[1:] for line in found), typed


def run_pbs(folder: Path, text: str, code: int, **variables: str) -> tuple[int, list[str], str]:
    """Run a script as PBS does; return its exit code, and the arguments of mpiexec and of qsub."""
    for name, body in (("mpiexec", f"exit {code}"), ("qsub", "")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/{name}.txt\n{body}\n')
        program.chmod(0o755)
    (folder / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    (folder / "job.SC").write_text(text)
    (folder / "qsub.txt").write_text("")
    done = subprocess.run(
        ["bash", folder / "job.SC"],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PBS_NODEFILE": str(folder / "nodes"),
            "PBS_O_WORKDIR": str(folder),
            "PBS_JOBID": "123.server",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    started = (folder / "mpiexec.txt").read_text().splitlines()
    return done.returncode, started, (folder / "qsub.txt").read_text()


KEYS = ("scheduler=pbs", "parallel.domain=2", "parallel.data=2", "device=cpu", "nodes=2")


def test_a_pbs_job_tells_its_ranks_what_they_need_and_goes_on(tmp_path: Path) -> None:
    """Its time is over when the ranks end, so it submits itself again, with the first number."""
    text = cluster_script(*KEYS, "time=00:02:00")[1]
    code, started, submitted = run_pbs(tmp_path, text, 75)
    assert code == 75
    assert started[:5] == ["-n", "4", "-ppn", "2", "env"]
    assert started[5:9] == [
        "MASTER_ADDR=node1",
        f"MASTER_PORT={20_000 + 123 * 8}",
        "WORLD_SIZE=4",
        "OMP_NUM_THREADS=1",
    ]
    assert started[9].startswith("CREDIT_DP_JOB_END=")
    assert started[11:] == [
        *("python", "-m", "credit_dp", "train", "parallel.domain=2", "parallel.data=2"),
        *("device=cpu", "run.name=pbs-123", "resume=auto"),
    ]
    copy = tmp_path / "pbs-123.sh"
    assert submitted.splitlines() == [
        "-v",
        "CREDIT_DP_FIRST_JOB=123,CREDIT_DP_RESTARTS=1",
        str(copy),
    ]
    assert copy.read_text() == text
    next_job = {"CREDIT_DP_FIRST_JOB": "123", "PBS_JOBID": "200.server"}
    code, started, submitted = run_pbs(tmp_path, text, 75, **next_job, CREDIT_DP_RESTARTS="1")
    assert "run.name=pbs-123" in started
    assert "CREDIT_DP_RESTARTS=2" in submitted
    assert run_pbs(tmp_path, text, 75, **next_job, CREDIT_DP_RESTARTS="20")[2] == ""


@pytest.mark.slow
def test_a_pbs_job_that_ends_early_is_not_submitted_again(tmp_path: Path) -> None:
    for time, code in (("24:00:00", 75), ("00:02:00", 0)):
        text = cluster_script(*KEYS, f"time={time}")[1]
        found, _, submitted = run_pbs(tmp_path, text, code)
        assert (found, submitted) == (code, ""), time


@pytest.mark.slow
def test_a_job_of_a_pbs_array_goes_on_alone(tmp_path: Path) -> None:
    text = cluster_script(*KEYS, "time=00:02:00", "seed=5,6", "run.name=seeds")[1]
    code, started, submitted = run_pbs(
        tmp_path, text, 75, PBS_JOBID="123[1].server", PBS_ARRAY_INDEX="1"
    )
    assert code == 75
    assert f"MASTER_PORT={20_000 + 123 * 8 + 1}" in started
    assert {"seed=6", "run.name=seeds-1"} <= set(started)
    assert "CREDIT_DP_INDEX=1" in submitted
    assert submitted.endswith("/pbs-123-1.sh\n")
    assert (tmp_path / "pbs-123-1.sh").read_text() == text.replace("#PBS -J 0-1\n", "")
