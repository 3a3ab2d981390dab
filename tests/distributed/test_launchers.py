"""Ranks that torchrun or srun starts: read from the environment, joined, in one folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from credit_dp.distributed import RankInfo
from credit_dp.distributed.launcher import Launcher, expand_counts, find_launcher, first_host
from credit_dp.distributed.worker import broadcast_run_folder
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from tests.distributed.launch_program import small_config
from tests.ranks import on_processes

ROOT = Path(__file__).parents[2]
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def launcher_of(environment: dict[str, str]) -> Launcher:
    launcher = find_launcher(environment)
    assert launcher is not None
    return launcher


def test_no_launcher() -> None:
    assert find_launcher({}) is None


def test_torchrun() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    launcher = launcher_of({**env, "MASTER_ADDR": "node1", "MASTER_PORT": "4000"})
    assert launcher == Launcher("torchrun", RankInfo(5, 8, 1, 4, node=1), "node1", 4000)


def test_srun_on_two_nodes() -> None:
    launcher = launcher_of(SRUN)
    assert (launcher.name, launcher.ranks) == ("srun", RankInfo(3, 4, 1, 2, node=1))
    assert launcher.address == "gpu003"
    assert launcher.port == launcher_of({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port
    assert launcher.port != launcher_of({**SRUN, "SLURM_JOB_ID": "8"}).port


@pytest.mark.parametrize("step", [0, 7, 8])
@pytest.mark.parametrize("job", [1, 1_499, 1_500, 2_499, 4_294_967_295])
def test_ports_of_jobs_are_not_those_of_outgoing_connections(job: int, step: int) -> None:
    port = launcher_of({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
    assert 20_000 <= port < 32_768


def test_srun_on_one_node_meets_on_loopback() -> None:
    one = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "laptop"}
    assert launcher_of({**SRUN, **one}).address == "127.0.0.1"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"SLURM_STEP_ID": None}, id="inside sbatch or salloc, no step"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "1"}, id="an interactive shell"),
    ],
)
def test_slurm_without_srun_tasks_is_no_launcher(change: dict[str, str | None]) -> None:
    env = {k: v for k, v in {**SRUN, **change}.items() if v is not None}
    assert find_launcher(env) is None


def test_submitit_on_this_machine() -> None:
    env = {
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALRANK": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
        "SUBMITIT_LOCAL_JOB_ID": "11",
    }
    assert launcher_of(env).ranks == RankInfo(1, 2, 1, 2)


def test_a_broken_environment_is_one_line() -> None:
    with pytest.raises(UserError, match="SLURM_PROCID"):
        find_launcher({k: v for k, v in SRUN.items() if k != "SLURM_PROCID"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("gpu[003-005,9],x", "gpu003"),
        ("n[7]", "n7"),
        ("r[1-2]-ib,z", "r1-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_expand_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def under_torchrun(ranks: int, function: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a function of `rank_functions` on ranks of torchrun, in bands of two."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.distributed.launch_program", function, "2", "0", "1", str(folder)]
    return subprocess.run(
        [sys.executable, *command, *program],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SEEN": str(folder / "seen"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """Two ranks join; each was given another folder, and both use that of rank 0."""
    (tmp_path / "seen").mkdir()
    done = under_torchrun(2, "share_folder", tmp_path)
    assert done.returncode == 0, done.stderr
    seen = {path.read_text() for path in (tmp_path / "seen").iterdir()}
    assert seen == {str(tmp_path / "of-rank-0")}
    assert len(list((tmp_path / "seen").iterdir())) == 2


def folder_of_rank_0(manager: DomainParallelManager, folder: str) -> str:
    config = small_config(folder if manager.rank == 0 else "other")
    return broadcast_run_folder(config).run.dir


@pytest.mark.parametrize("length", [0, 10, 10_000])
def test_all_ranks_get_the_run_folder_of_rank_0(length: int) -> None:
    folder = "é" * length
    assert on_processes(3, folder_of_rank_0, folder) == [folder] * 3


@pytest.mark.slow
@pytest.mark.parametrize("function", ["refuse", "refuse_everywhere"])
def test_one_rank_speaks_for_all(tmp_path: Path, function: str) -> None:
    """Rank 0 reports if it has failed too, otherwise the rank that has."""
    done = under_torchrun(2, function, tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: data.store: needs a store, got none\n") == 1, done.stderr
