"""Finds out whether torchrun, srun or submitit started this process, and as which rank."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class RankInfo:
    """The place of one process in its run; `local_*` counts those on the same machine, the
    `node`-th of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0


FIRST_PORT, PORT_COUNT = 20_000, 20_000  # below the range that Linux hands out on its own
STEPS_PER_JOB = 8  # of a job, that have ports of their own


@final
@dataclass(frozen=True)
class Launcher:
    """Who started the ranks, which of them this is, and where they meet."""

    name: str
    ranks: RankInfo
    address: str
    port: int


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """The launcher that this process runs under; None if it has to start its own ranks.

    Raises:
        UserError: a variable that the launcher sets is missing or not a number.
    """
    try:
        return _from_torchrun(environment) or _from_srun(environment) or _from_submitit(environment)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the environment is that of a launcher, but one of its variables is unusable ({error})"
        ) from error


def _from_torchrun(env: Mapping[str, str]) -> Launcher | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    per_node = int(env.get("LOCAL_WORLD_SIZE", world))
    ranks = RankInfo(
        rank=rank,
        world_size=world,
        local_rank=int(env.get("LOCAL_RANK", rank)),
        local_world_size=per_node,
        node=int(env.get("GROUP_RANK", rank // per_node)),
    )
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return Launcher("torchrun", ranks, address, int(env.get("MASTER_PORT", 29500)))


def _from_srun(env: Mapping[str, str]) -> Launcher | None:
    # sbatch and salloc set SLURM_NTASKS too, for a script that is no task of any step; and one task
    # alone (an interactive shell, a batch step) is no launcher: it starts its own ranks.
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", 1)))
    if "SLURM_STEP_ID" not in env or tasks == 1:
        return None
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(tasks)))
    node = int(env.get("SLURM_NODEID", 0))
    ranks = RankInfo(
        rank=int(env["SLURM_PROCID"]),
        world_size=tasks,
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=expand_counts(per_node)[node],
        node=node,
    )
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    alone = ranks.local_world_size == tasks
    address = "127.0.0.1" if alone else first_host(nodes)
    # The jobs of an array have numbers in a row, so that those on one node never share a port.
    step = (
        int(env.get("SLURM_JOB_ID", 0)) * STEPS_PER_JOB + int(env["SLURM_STEP_ID"]) % STEPS_PER_JOB
    )
    return Launcher("srun", ranks, env.get("MASTER_ADDR", address), _port(env, step))


def _from_submitit(env: Mapping[str, str]) -> Launcher | None:
    tasks = int(env.get("SUBMITIT_LOCAL_NTASKS", 1))
    if tasks == 1:
        return None
    ranks = RankInfo(
        rank=int(env["SUBMITIT_LOCAL_GLOBALRANK"]),
        world_size=tasks,
        local_rank=int(env["SUBMITIT_LOCAL_LOCALID"]),
        local_world_size=tasks,
    )
    port = _port(env, zlib.crc32(env.get("SUBMITIT_LOCAL_JOB_ID", "").encode()))
    return Launcher("submitit", ranks, "127.0.0.1", port)


def _port(env: Mapping[str, str], job: int) -> int:
    """A port that all ranks of a job work out alike; MASTER_PORT if the user gave one."""
    return int(env.get("MASTER_PORT", FIRST_PORT + job % PORT_COUNT))


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `gpu[003-005,9],login1` -> `gpu003`."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if found is None:
        raise ValueError(f"node list {nodes!r}")
    prefix, number, suffix = found.groups(default="")
    return f"{prefix}{number}{suffix}"


def expand_counts(per_node: str) -> list[int]:
    """Tasks of each node from SLURM's short form: `2(x3),1` -> `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in per_node.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts
