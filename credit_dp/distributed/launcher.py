"""Read from the environment whether torchrun, srun or submitit started this process.

Each launcher sets its own variables: the rank, the number of ranks, and, except for submitit's
local executor, where rank 0 runs. All ranks of a job have to work out the same address and port.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, as torchrun counts.

    Attributes:
        rank: of this process, among all processes of the run.
        world_size: processes of the run.
        local_rank: of this process, among those on its node.
        local_world_size: processes on its node.
        node: number of its node, counted from 0.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0


# Ports below those that Linux gives to outgoing connections (32768 and above), of which any may be
# in use. The scripts of `credit_dp.cli.slurm` calculate them in the same way.
FIRST_PORT = 20_000
PORT_COUNT = 12_000
STEPS_PER_JOB = 8  # consecutive steps of one SLURM job that get different ports


@final
@dataclass(frozen=True)
class Launcher:
    """The program that started the ranks, and how its ranks reach rank 0.

    Attributes:
        name: torchrun, srun or submitit.
        ranks: of this process.
        address: host of rank 0.
        port: on which rank 0 listens.
    """

    name: str
    ranks: RankInfo
    address: str
    port: int


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process; None if the process starts its own ranks.

    Raises:
        UserError: a variable that the launcher sets is missing or not a number.
    """
    try:
        return _from_torchrun(environment) or _from_srun(environment) or _from_submitit(environment)
    except (KeyError, ValueError) as error:
        raise UserError(
            "environment: a launcher started this process, but one of its variables is missing or "
            f"malformed ({error}). Start the ranks by torchrun, srun or submitit."
        ) from error


def _from_torchrun(env: Mapping[str, str]) -> Launcher | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank = int(env["RANK"])
    world_size = int(env["WORLD_SIZE"])
    per_node = int(env.get("LOCAL_WORLD_SIZE", world_size))
    ranks = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", rank)),
        local_world_size=per_node,
        node=int(env.get("GROUP_RANK", rank // per_node)),
    )
    address = env.get("MASTER_ADDR", "127.0.0.1")
    return Launcher("torchrun", ranks, address, int(env.get("MASTER_PORT", 29500)))


def _from_srun(env: Mapping[str, str]) -> Launcher | None:
    # sbatch and salloc also set SLURM_NTASKS, for a script that belongs to no step. A step with a
    # single task (an interactive shell, a batch step) starts its own ranks.
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
    single_node = ranks.local_world_size == tasks
    address = "127.0.0.1" if single_node else first_host(nodes)
    # Jobs of an array have consecutive ids and often share a node: each id gets its own ports.
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
    """Return the same port on all ranks of a job; MASTER_PORT if the user set it."""
    return int(env.get("MASTER_PORT", FIRST_PORT + job % PORT_COUNT))


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[003-005,9],login1` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"node list {nodes!r}")
    prefix, number, suffix = match.groups(default="")
    return f"{prefix}{number}{suffix}"


def expand_counts(per_node: str) -> list[int]:
    """Return the tasks of each node from SLURM's short form: `2(x3),1` -> `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in per_node.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts
