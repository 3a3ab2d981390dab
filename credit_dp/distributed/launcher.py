"""Read from the environment which launcher started this process, and with which rank.

Each launcher sets its own variables: the rank, the number of ranks, and in some cases where rank 0
runs. All ranks of a job have to work out the same address and port. Launchers may be nested, as
mpirun starts its daemons by srun: the innermost one counts. One that starts a single process is
taken for none, but for torchrun, which is known by RANK and WORLD_SIZE. An environment of several
ranks that is not understood is refused, as otherwise each of them would start a run of its own.
"""

import errno
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from credit_dp.distributed.slurm import run_slurm_command
from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, as torchrun counts.

    Attributes:
        node: a number of its node, which no other node has.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0

    @property
    def on_several_nodes(self) -> bool:
        """Whether some ranks of the run are on other nodes."""
        return self.local_world_size < self.world_size


# Ports below those that Linux gives to outgoing connections (32768 and above), of which any may be
# in use. The scripts of `credit_dp/cli/templates` calculate them in the same way.
FIRST_PORT = 20_000
PORT_COUNT = 12_000
LAST_PORT = 65_535
STEPS_PER_JOB = 8  # consecutive steps of one SLURM job that get different ports


@final
@dataclass(frozen=True)
class Launcher:
    """The program that started the ranks, and how its ranks reach rank 0.

    Attributes:
        name: torchrun, srun, mpirun, mpiexec, jsrun, flux run or submitit.
        address: host of rank 0; None if the environment does not tell.
        port: on which rank 0 listens.
    """

    name: str
    ranks: RankInfo
    address: str | None
    port: int


def agent_serves_store(environment: Mapping[str, str]) -> bool:
    """Whether an agent of torchrun, not rank 0, serves the store at MASTER_ADDR and MASTER_PORT."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # as torch compares it


HOW_TO_START = (
    "Start the ranks by torchrun, srun, mpiexec, mpirun or flux run, or set RANK, WORLD_SIZE, "
    "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of them (RANK=0 and "
    "WORLD_SIZE=1 for a run of its own)."
)


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process; None if the process starts its own ranks.

    An empty variable counts as not set, unless it should tell a rank or their number.

    Raises:
        UserError: a variable that the launcher sets is missing or not a number, or there are
            several ranks of an unknown launcher.
    """
    telling = ("RANK", *RANKS, *SIZES)
    environment = {name: text for name, text in environment.items() if text or name in telling}
    try:
        launcher = (
            _from_torchrun(environment)
            or _from_flux(environment)
            or _from_mpi(environment)
            or _from_srun(environment)
            or _from_submitit(environment)
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            "environment: a launcher started this process, but one of its variables is missing or "
            f"malformed ({error}). {HOW_TO_START}"
        ) from error
    if launcher is None:
        _refuse_unknown_ranks(environment)
    return launcher


def rendezvous_host(launcher: Launcher, environment: Mapping[str, str]) -> str:
    """Return the host of rank 0, after checking that the ranks can meet there.

    Otherwise all of them would wait for minutes.
    """
    address, port = launcher.address, launcher.port
    if address is None:
        raise UserError(
            f"MASTER_ADDR: needs the host of rank 0, which {launcher.name} does not tell here. Set "
            "MASTER_ADDR to its name and MASTER_PORT to a free port, the same on all ranks."
        )
    if launcher.ranks.rank > 0 or launcher.name == "torchrun":  # whose agent may listen there
        return address
    problems = {error.errno for error in bind_problems(address, port)} - {errno.EAFNOSUPPORT}
    if errno.EADDRINUSE in problems:
        raise UserError(
            f"MASTER_PORT: port {port} of {address} is in use. Set MASTER_PORT to a free port, "
            "the same on all ranks."
        )
    # The user may have given a name that only leads to this host, as that of a service.
    if problems == {errno.EADDRNOTAVAIL} and not environment.get("MASTER_ADDR"):
        raise UserError(
            f"MASTER_ADDR: rank 0 runs on {socket.gethostname()}, not on {address}, the first "
            "host of the job. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free "
            "port, the same on all ranks."
        )
    if socket.EAI_NONAME in problems:  # torch would look it up again and again for 10 minutes
        raise UserError(
            f"MASTER_ADDR: the name {address} is unknown on {socket.gethostname()}, which runs "
            "rank 0. Set MASTER_ADDR to a name or an address of this host, the same on all ranks."
        )
    # What else may be wrong, such as no answer of the name server for now, torch says.
    return address


def bind_problems(address: str, port: int) -> list[OSError]:
    """Return why this host can't listen there, for IPv4 and IPv6; nothing if it can for one."""
    problems = []
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return [error]
    except UnicodeError as error:  # no name of a host: `a..b`
        return [socket.gaierror(socket.EAI_NONAME, str(error))]
    for family, kind, protocol, _, name in found:
        try:
            # Without listening: other ranks may try to connect already.
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(name)
        except OSError as error:
            problems.append(error)
    in_use = any(error.errno == errno.EADDRINUSE for error in problems)
    return problems if in_use or len(problems) == len(found) else []


def _from_torchrun(env: Mapping[str, str]) -> Launcher | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank = int(env["RANK"])
    world_size = int(env["WORLD_SIZE"])
    local_rank = int(env.get("LOCAL_RANK", rank))
    # Scripts that set these variables may leave out the last one, which the launcher knows.
    sizes = ("LOCAL_WORLD_SIZE", *(name for known in MPI for name in known.local_size))
    if _has_any(env, sizes):
        per_node = _read_first(env, sizes)
    elif _step_tasks(env) == world_size > 1:
        per_node = _from_srun(env).ranks.local_world_size  # type: ignore[union-attr]
    elif local_rank != rank:
        raise KeyError("LOCAL_WORLD_SIZE")
    else:
        per_node = world_size  # all on one node
    node = int(env.get("GROUP_RANK", rank // per_node))
    ranks = RankInfo(rank, world_size, local_rank, per_node, node)
    return Launcher("torchrun", ranks, _address(env, ranks), _given_port(env, 29500))


def _from_flux(env: Mapping[str, str]) -> Launcher | None:
    if "FLUX_TASK_RANK" not in env:
        return None
    tasks = int(env["FLUX_JOB_SIZE"])
    if tasks == 1:
        return None
    nodes = int(env["FLUX_JOB_NNODES"])
    local_rank = int(env["FLUX_TASK_LOCAL_ID"])
    # Flux does not tell the tasks of this node. It deals them evenly, unless a node is smaller.
    if "LOCAL_WORLD_SIZE" not in env and (tasks % nodes or local_rank >= tasks // nodes):
        raise ValueError(
            f"FLUX_JOB_SIZE={tasks} tasks are not dealt evenly to FLUX_JOB_NNODES={nodes} nodes: "
            "use --nodes and --tasks-per-node"
        )
    per_node = int(env.get("LOCAL_WORLD_SIZE", tasks // nodes))
    node = _node_of_host(tasks, per_node)
    ranks = RankInfo(int(env["FLUX_TASK_RANK"]), tasks, local_rank, per_node, node)
    return Launcher("flux run", ranks, _address(env, ranks), _port(env, _job_number(env, ranks)))


@final
@dataclass(frozen=True)
class MpiVariables:
    """Variables by which a launcher of MPI programs tells a rank; the first one counts."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# PMI is that of MPICH and Intel MPI (mpiexec.hydra: MPI_*) and of Cray (PALS: PALS_*, PMI_LOCAL_*).
# With PMIx instead of PMI, PALS does not tell the number of ranks: WORLD_SIZE has to.
PMI = MpiVariables(
    "mpiexec",
    ("PALS_RANKID", "PMI_RANK"),
    ("PMI_SIZE", "WORLD_SIZE"),
    ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK"),
    ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"),
)
OPEN_MPI, MVAPICH = (
    MpiVariables(
        command,
        (f"{prefix}_COMM_WORLD_RANK",),
        (f"{prefix}_COMM_WORLD_SIZE",),
        (f"{prefix}_COMM_WORLD_LOCAL_RANK",),
        (f"{prefix}_COMM_WORLD_LOCAL_SIZE",),
    )
    for command, prefix in (("mpirun", "OMPI"), ("mpiexec", "MV2"))
)
JSRUN = MpiVariables(
    "jsrun",
    ("JSM_NAMESPACE_RANK",),
    ("JSM_NAMESPACE_SIZE",),
    ("JSM_NAMESPACE_LOCAL_RANK",),
    ("JSM_NAMESPACE_LOCAL_SIZE",),
)
MPI = (OPEN_MPI, MVAPICH, PMI, JSRUN)


def _from_mpi(env: Mapping[str, str]) -> Launcher | None:
    """Return the ranks of mpirun or mpiexec: Open MPI, MVAPICH, MPICH, Intel MPI or Cray's PALS."""
    for variables in MPI:
        if not _has_any(env, variables.rank) or not _has_any(env, variables.size):
            continue
        rank, size = _read_first(env, variables.rank), _read_first(env, variables.size)
        # srun sets the PMI variables, too, and knows its nodes. If these differ from srun's, srun
        # started the daemons of an mpiexec.
        by_srun = (str(rank), size) == (env.get("SLURM_PROCID"), _step_tasks(env))
        if size == 1 or (variables is PMI and by_srun):
            continue
        local_rank = _read_first(env, variables.local_rank)
        per_node = _read_first(env, variables.local_size)
        node = int(env.get("PALS_NODEID", _node_of_host(size, per_node)))
        ranks = RankInfo(rank, size, local_rank, per_node, node)
        address = _address(env, ranks)
        return Launcher(variables.launcher, ranks, address, _port(env, _job_number(env, ranks)))
    return None


def _has_any(env: Mapping[str, str], names: tuple[str, ...]) -> bool:
    return any(name in env for name in names)


def _read_first(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in env:
            return int(env[name])
    raise KeyError(" or ".join(names))


def _node_of_host(size: int, local_size: int) -> int:
    """Return a number of this node, for launchers that do not tell it; 0 if there is only one.

    The numbers of the ranks do not tell it either: they may fill one node after the other, or be
    dealt to the nodes in turn.
    """
    return 0 if local_size == size else zlib.crc32(socket.gethostname().encode())


def _from_srun(env: Mapping[str, str]) -> Launcher | None:
    # sbatch and salloc also set SLURM_NTASKS, for a script that belongs to no step. A step with a
    # single task (an interactive shell, a batch step) starts its own ranks.
    tasks = _step_tasks(env)
    if tasks == 1:
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
    # Jobs of an array have consecutive ids and often share a node: each id gets its own ports.
    step = (
        int(env.get("SLURM_JOB_ID", 0)) * STEPS_PER_JOB + int(env["SLURM_STEP_ID"]) % STEPS_PER_JOB
    )
    address = _address(env, ranks, "SLURM_STEP_NODELIST")
    return Launcher("srun", ranks, address, _port(env, step))


def _step_tasks(env: Mapping[str, str]) -> int:
    if "SLURM_STEP_ID" not in env:
        return 1
    return int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", 1)))


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


# Each tells a rank, but not of how many.
LONE_RANKS = ("PMIX_RANK", "PMI_ID")
RANKS = (*(name for known in MPI for name in known.rank), *LONE_RANKS)
SIZES = (*(name for known in MPI for name in known.size), "FLUX_JOB_SIZE")


def _refuse_unknown_ranks(env: Mapping[str, str]) -> None:
    """Refuse an environment that tells a rank, unless it is that of a single process."""
    found = [f"{name}={env[name]}" for name in RANKS if name in env]
    if env.get("RANK", "0") != "0":  # 0 may be anything
        found.append(f"RANK={env['RANK']}")
    single_in_step = "SLURM_STEP_ID" in env and _step_tasks(env) == 1
    if found and not single_in_step and all(env.get(name) != "1" for name in SIZES):
        raise UserError(
            f"environment: a launcher started this process as one of several ranks "
            f"({', '.join(found)}), but does not tell how many there are. {HOW_TO_START}"
        )


def likely_rank(environment: Mapping[str, str]) -> int:
    """Return the rank that the environment tells, even if it tells nothing else; 0 if it doesn't.

    For an environment that `find_launcher` refuses.
    """
    names = ("RANK", "FLUX_TASK_RANK", *RANKS, "SLURM_PROCID")
    found = (environment.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), 0)


# Where rank 0 listens


def _address(
    env: Mapping[str, str], ranks: RankInfo, nodes: str = "SLURM_JOB_NODELIST"
) -> str | None:
    """Return the host of rank 0: MASTER_ADDR, or the first host of the job; None if unknown.

    Launchers number the ranks from the first host of a job on, by default:
    `rendezvous_host` notices this.

    Args:
        nodes: variable with a list of SLURM; that of the job comes next. The daemons of an mpirun
            are in steps of their own, which have other nodes.
    """
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"]
    if not ranks.on_several_nodes:
        return "127.0.0.1"
    if "FLUX_TASK_RANK" in env:
        return _first_host_of_flux_job(env.get("FLUX_JOB_ID", "local"))
    by_srun = nodes == "SLURM_STEP_NODELIST"
    if "PBS_NODEFILE" in env and not by_srun:
        return _first_line(Path(env["PBS_NODEFILE"]))
    hosts = env.get(nodes) or env.get("SLURM_JOB_NODELIST")
    return first_host(hosts) if hosts else None


@cache
def _first_host_of_flux_job(job: str) -> str | None:
    try:
        return run_slurm_command(["flux", "hostlist", "--nth=0", job]).strip() or None
    except UserError:
        return None


def _first_line(path: Path) -> str | None:
    try:
        return next(iter(path.read_text().split()), None)
    except OSError:  # some sites have the file on the first node only
        return None


# Variables that differ between jobs, and, the first of them, between the programs of a job.
JOB_VARIABLES = ("PALS_APID", "FLUX_JOB_ID", "PMIX_NAMESPACE", "PBS_JOBID", "SLURM_JOB_ID")


def _job_number(env: Mapping[str, str], ranks: RankInfo) -> int:
    # On one node the ranks have the same parent, the launcher or its daemon there.
    parent = "" if ranks.on_several_nodes else str(os.getppid())
    return zlib.crc32(next((env[name] for name in JOB_VARIABLES if name in env), parent).encode())


def _port(env: Mapping[str, str], job: int) -> int:
    """Return the same port on all ranks of a job; MASTER_PORT if the user set it."""
    return _given_port(env, FIRST_PORT + job % PORT_COUNT)


def _given_port(env: Mapping[str, str], default: int) -> int:
    port = int(env.get("MASTER_PORT", default))
    if not 0 < port <= LAST_PORT:
        raise ValueError(f"MASTER_PORT={port} is no port: it has to be 1 to {LAST_PORT}")
    return port


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `c[1-2]n[03-05,9],login1` -> `c1n03`."""
    # The first host is the one with the first number of each pair of brackets.
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    if match is None:
        raise ValueError(f"node list {nodes!r}")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0])


def expand_counts(per_node: str) -> list[int]:
    """Return the tasks of each node from SLURM's short form: `2(x3),1` -> `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in per_node.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts
