"""Commands in interpreters that have imported nothing before: plain, of torchrun, and of srun.

Other tests fork commands and ranks from a process that has imported the whole package.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.distributed.processes import ROOT, TORCHRUN, ends, free_port
from tests.tier_cases import tiers

RANKS = 2
UNMATCHED = """
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import distributed

from credit_dp.config import OwnCallbackConfig
from credit_dp.distributed.process_groups import new_background_group


@dataclass
class UnmatchedConfig(OwnCallbackConfig):
    name: str = "unmatched"

    def on_end(self, run, scores):
        group = new_background_group([[0, 1]])
        own, all_ranks = torch.zeros(1), torch.zeros(2)
        distributed.all_gather_into_tensor(all_ranks, own, group=group)  # it is connected
        if run.rank == 0:
            work = distributed.all_gather_into_tensor(all_ranks, own, group=group, async_op=True)
            kept = SimpleNamespace(group=group, work=work)
            kept.itself = kept  # Python frees it when it exits
"""
SMALL = ["model.channels=[4,8]", "model.groups=4"]
TRAIN = [str(ROOT / "train.py"), "experiment=fast", *SMALL, "trainer.steps=2"]


def begin(
    words: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CREDIT_DP_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(launcher: str, words: list[str], folder: Path) -> None:
    """Run a command as a launcher starts it, and check that all its processes succeed."""
    sharded = [*words, f"parallel.domain={RANKS}"]
    if launcher == "torchrun":
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        agent = [*TORCHRUN, "--nproc-per-node", str(RANKS), *meeting]
        programs = [begin([*agent, *sharded], folder)]
    elif launcher == "srun":
        programs = [begin(sharded, folder, of_srun(rank)) for rank in range(RANKS)]
    else:
        programs = [begin(words, folder)]
    results = ends(programs, 600)
    assert {code for code, _ in results} == {0}, "\n".join(text for _, text in results)


def of_srun(rank: int) -> dict[str, str]:
    """Return the environment of a task of srun on this machine."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(RANKS),
        "SLURM_STEP_NUM_TASKS": str(RANKS),
        "SLURM_STEP_TASKS_PER_NODE": str(RANKS),
        "SLURM_STEP_NODELIST": "localhost",
    }


@pytest.mark.parametrize("launcher", tiers([], [("torchrun",)], [("python",), ("srun",)]))
def test_a_model_trains_and_forecasts(launcher: str, tmp_path: Path) -> None:
    compiling = [f"compile={str(launcher == 'python').lower()}"]  # it takes a minute a process
    run(launcher, [*TRAIN, *compiling, "run.dir=run"], tmp_path)
    forecast = ["-m", "credit_dp", "forecast", "checkpoint=run", "init=2001-02-10", "lead=12h"]
    run(launcher, forecast, tmp_path)
    assert (tmp_path / "run/forecast.zarr/zarr.json").exists()


@pytest.mark.slow
def test_ranks_end_though_one_waits_for_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that one rank reads ahead, the other does not begin to read."""
    (tmp_path / "unmatched.py").write_text(UNMATCHED)
    monkeypatch.setenv("CREDIT_DP_PLUGINS", "unmatched.py")
    run(
        "torchrun",
        [*TRAIN, "compile=false", "run.dir=run", "trainer.callbacks.unmatched={}"],
        tmp_path,
    )
    assert (tmp_path / "run/metrics.json").exists()
