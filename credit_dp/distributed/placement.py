"""How many ranks a run has, on which devices, and on which nodes of a cluster."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from credit_dp.config import Config, ParallelConfig, microbatches_per_step
from credit_dp.distributed.launcher import Launcher, RankInfo
from credit_dp.errors import UserError

# Without any of these Linux has no GPU: of NVIDIA's driver, the same under WSL, and of AMD's.
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def resolve_ranks(config: Config, launcher: Launcher | None) -> Config:
    """The config with `device` and `parallel.data` made definite.

    Raises:
        UserError: the ranks or GPUs that there are do not make up this mesh, or the batch cannot
            be dealt to its data ranks.
    """
    gpus = count_visible_gpus() if config.device != "cpu" else 0
    if config.device == "cuda" and gpus == 0:
        raise UserError("device: needs a GPU for cuda, but torch sees none here. Use device=cpu.")
    device = "cuda" if gpus else "cpu"
    each = config.parallel.gpus_per_rank
    if launcher is None:
        data = data_ranks_on_gpus(config.parallel, gpus // each)
        here = data * ranks_per_model(config.parallel)
    else:
        data = data_ranks_of_launcher(config.parallel, launcher)
        here = launcher.ranks.local_world_size
    if device == "cuda" and here * each > gpus and each > 1:
        raise UserError(
            f"parallel.layout: counts {each} GPUs for each rank, which makes {here * each} on this "
            f"machine, but torch sees {gpus}. Name fewer, or start fewer ranks."
        )
    if device == "cuda" and here > gpus:
        raise UserError(
            f"parallel.domain: {here} ranks on this machine need {here} GPUs, but torch "
            f"sees {gpus}. Lower parallel.domain, parallel.data or parallel.pipeline, or use "
            "device=cpu."
        )
    check_batch(config, data)
    check_fsdp(config.parallel, data)
    return replace(config, device=device, parallel=replace(config.parallel, data=data))


def check_batch(config: Config, data: int) -> None:
    """Refuse a batch that is no whole number of samples for each data rank and micro-batch."""
    size, parts = config.data.batch_size, microbatches_per_step(config)
    if size % data:
        raise UserError(
            f"data.batch_size: needs a multiple of the {data} data ranks, "
            f"got {size}. Change it or parallel.data."
        )
    if size // data % parts:
        raise UserError(
            f"data.batch_size: each of {data} data ranks cuts its {size // data} samples into "
            f"{parts} micro-batches, so it needs a multiple of {data * parts}, got {size}. "
            "Change it, trainer.accumulate or parallel.microbatches."
        )


def check_fsdp(parallel: ParallelConfig, data: int) -> None:
    """Refuse settings of fsdp2 on a mesh on which there is nobody to share parameters with."""
    keys = ("param_dtype", "reduce_dtype", "cpu_offload")
    key = next((key for key in keys if getattr(parallel, key)), None)
    if key is not None and data * parallel.domain == 1:
        raise UserError(
            f"parallel.{key}: needs at least two data or domain ranks, got one. Raise "
            "parallel.data or parallel.domain, or leave it out."
        )


def gpu_index(parallel: ParallelConfig, ranks: RankInfo) -> int:
    """The number of the GPU that a rank computes on, the first one if it drives several."""
    return ranks.local_rank * parallel.gpus_per_rank


def ranks_per_model(parallel: ParallelConfig) -> int:
    """Ranks that one copy of the model takes."""
    return parallel.pipeline * parallel.domain


def data_ranks_on_gpus(parallel: ParallelConfig, gpus: int) -> int:
    """How many globes are trained on at once when this process starts the ranks itself."""
    return parallel.data or max(1, gpus // ranks_per_model(parallel))


def data_ranks_of_launcher(parallel: ParallelConfig, launcher: Launcher) -> int:
    """How many globes the launcher's ranks can hold; all ranks must be used."""
    world, needed = launcher.ranks.world_size, ranks_per_model(parallel)
    if world % needed:
        fewer, more = world // needed * needed, (world // needed + 1) * needed
        counts = f"{fewer} or {more}" if fewer else f"{more}"
        raise UserError(
            f"parallel.domain: {launcher.name} started {world} ranks, but parallel.pipeline="
            f"{parallel.pipeline} x parallel.domain={parallel.domain} needs a multiple of "
            f"{needed}. Start {counts} ranks, or let parallel.pipeline x parallel.domain divide "
            f"{world}."
        )
    data = world // needed
    if parallel.data not in (None, data):
        raise UserError(
            f"parallel.data: {launcher.name} started {world} ranks, but parallel.pipeline="
            f"{parallel.pipeline} x parallel.data={parallel.data} x parallel.domain="
            f"{parallel.domain} is {needed * parallel.data}. Leave parallel.data null (that makes "
            f"it {data}), or start {needed * parallel.data} ranks."
        )
    return data


def count_visible_gpus() -> int:
    """GPUs that torch sees; looking starts no CUDA context."""
    if sys.platform == "linux" and not any(map(os.path.exists, GPU_FILES)):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count()


def threads_per_rank(
    parallel: ParallelConfig, ranks: RankInfo, environment: Mapping[str, str]
) -> int:
    """CPU threads of one rank: the config's, else the user's, else this machine's shared out."""
    if parallel.threads is not None:
        return parallel.threads
    # torchrun sets OMP_NUM_THREADS=1 on its own when the user did not.
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0 and "TORCHELASTIC_RUN_ID" not in environment:
        return int(given)
    # srun pins each task to its own cores, so there is nothing left to share.
    if environment.get("SLURM_CPUS_PER_TASK", "").isdigit() and "SLURM_STEP_ID" in environment:
        return int(environment["SLURM_CPUS_PER_TASK"])
    return max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size)


@final
@dataclass(frozen=True)
class ClusterNodes:
    """What a cluster has: its nodes, and the cores and GPUs of each; None if that is not known."""

    count: int | None = None
    cores: int | None = None
    gpus: int | None = None


@final
@dataclass(frozen=True)
class PlacementRequest:
    """What the user decides about the placement; None leaves it to the mesh.

    `spread` lets a domain group reach over several nodes; messages say `spread_hint`.
    """

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    spread: bool = False
    spread_hint: str = "spread=true"


@final
@dataclass(frozen=True)
class Placement:
    """Where the ranks of a run go: each node has as many, in the order of their numbers."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    data: int

    @property
    def ranks(self) -> int:
        """All ranks of the run."""
        return self.nodes * self.tasks_per_node


def place_ranks(config: Config, has: ClusterNodes, wish: PlacementRequest) -> Placement:
    """The fewest nodes that hold the mesh, or as many as are wished for.

    A domain group is kept on one node: its ranks exchange rows in every layer that mixes them.

    Raises:
        UserError: the ranks don't fit on the nodes that there are.
    """
    parallel = config.parallel
    gpus_each = parallel.gpus_per_rank if uses_gpus(config, has) else 0
    cpus = wish.cpus_per_task or cpus_per_rank(config, has, gpus_each)
    room = rank_capacity(has, cpus, gpus_each)
    unit = 1 if wish.spread else parallel.domain
    if room is not None and unit > room:
        raise UserError(too_small_message(config, has, wish, unit, cpus, gpus_each))
    ranks = total_ranks(config, wish, unit, room if gpus_each else None)
    tasks = tasks_per_node(ranks, wish, unit, room)
    if room is not None and tasks > room:
        raise UserError(too_small_message(config, has, wish, tasks, cpus, gpus_each))
    nodes = ranks // tasks
    if has.count is not None and nodes > has.count:
        raise UserError(
            f"nodes: {ranks} ranks need {nodes} nodes with {tasks} ranks on each, but the "
            f"partition has {has.count} of that size. Lower parallel.data, parallel.domain or "
            "parallel.pipeline."
        )
    return Placement(nodes, tasks, cpus, tasks * gpus_each, ranks // ranks_per_model(parallel))


def uses_gpus(config: Config, has: ClusterNodes) -> bool:
    """Whether ranks compute on GPUs; where nodes are not known, `device=auto` takes them to."""
    return config.device == "cuda" or (config.device == "auto" and has.gpus != 0)


def cpus_per_rank(config: Config, has: ClusterNodes, gpus_each: int) -> int:
    """Cores of one rank: its threads, or beside a GPU its share of the node or its readers."""
    if config.parallel.threads is not None:
        return config.parallel.threads
    if not gpus_each:
        return 1
    if has.cores and has.gpus:
        return max(1, has.cores // has.gpus * gpus_each)
    return config.data.workers + 1


def rank_capacity(has: ClusterNodes, cpus: int, gpus_each: int) -> int | None:
    """How many ranks a node has room for; None if that is not known."""
    rooms = []
    if has.cores is not None:
        rooms.append(has.cores // cpus)
    if gpus_each and has.gpus is not None:
        rooms.append(has.gpus // gpus_each)
    return min(rooms) if rooms else None


def total_ranks(config: Config, wish: PlacementRequest, unit: int, room: int | None) -> int:
    """All ranks: of the mesh, or with `parallel.data=null` as many globes as the nodes hold."""
    parallel = config.parallel
    if parallel.data is not None:
        return ranks_per_model(parallel) * parallel.data
    if wish.nodes is None:
        return ranks_per_model(parallel)
    each = wish.tasks_per_node or (unit if room is None else room // unit * unit)
    return ranks_per_model(parallel) * max(1, wish.nodes * each // ranks_per_model(parallel))


def tasks_per_node(ranks: int, wish: PlacementRequest, unit: int, room: int | None) -> int:
    """The same number for each node, whole domain groups.

    Raises:
        UserError: the ranks can't be dealt to the nodes like this.
    """
    if wish.tasks_per_node is None and wish.nodes is None:
        most = ranks if room is None else min(room, ranks)
        return next(tasks for tasks in range(most // unit * unit, 0, -unit) if ranks % tasks == 0)
    nodes = wish.nodes or max(1, ranks // (wish.tasks_per_node or 1))
    tasks = wish.tasks_per_node or max(1, ranks // nodes)
    if nodes * tasks != ranks:
        raise UserError(
            f"nodes: {ranks} ranks can't be dealt to {nodes} nodes as {tasks} on each. Give a "
            f"number of nodes that divides {ranks}, or another mesh."
        )
    if tasks % unit:
        raise UserError(
            f"nodes: {tasks} ranks on each of {nodes} nodes would part domain groups of {unit} "
            f"ranks. Take {max(1, ranks // unit)} nodes or fewer, or let them reach over nodes "
            f"with {wish.spread_hint}."
        )
    return tasks


def too_small_message(
    config: Config, has: ClusterNodes, wish: PlacementRequest, tasks: int, cpus: int, gpus_each: int
) -> str:
    """Why a node can't hold so many ranks."""
    few_gpus = gpus_each and has.gpus is not None and tasks * gpus_each > has.gpus
    needed, there, what = tasks * cpus, has.cores, "cores"
    if few_gpus:
        needed, there, what = tasks * gpus_each, has.gpus, "GPUs"
    domain = config.parallel.domain
    of = ""
    if tasks == domain > 1:
        of = f" (a domain group stays on one node, unless {wish.spread_hint} is given)"
    return (
        f"parallel.domain: {tasks} ranks on one node need {needed} {what}, but nodes have {there}"
        f"{of}. Lower parallel.domain, or take more nodes."
    )


def spread_warning(nodes: Sequence[int], domain: int) -> str | None:
    """One line on domain groups that no single node holds; None if there are none.

    `nodes` tells of every rank on which node it runs. Such a mesh computes the same and may be what
    is wanted (a globe too large for a node, nodes that share a fast network), so it is no error.
    """
    groups = [range(first, first + domain) for first in range(0, len(nodes), domain)]
    spread = [group for group in groups if len({nodes[rank] for rank in group}) > 1]
    if not spread:
        return None
    group = spread[0]
    edges = sum(nodes[one] != nodes[other] for one, other in pairwise(group))
    sizes = sorted({nodes.count(node) for node in set(nodes)})
    return (
        f"parallel.domain: {len(spread)} of {len(groups)} domain groups reach over several nodes, "
        f"the first is ranks {group[0]} to {group[-1]} on nodes {join_node_names(nodes, group)}: "
        f"{edges} of the {domain - 1} edges between its bands cross the network at every exchange "
        f"of rows. {spread_advice(nodes, domain, sizes)}"
    )


def join_node_names(nodes: Sequence[int], group: Sequence[int]) -> str:
    """The nodes of a group, each once: `0, 1 and 2`."""
    names = [str(node) for node in dict.fromkeys(nodes[rank] for rank in group)]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def spread_advice(nodes: Sequence[int], domain: int, sizes: Sequence[int]) -> str:
    """What keeps each group on one node, as far as anything does."""
    per_node = " or ".join(map(str, sizes))
    if sum(one != other for one, other in pairwise(nodes)) >= len(set(nodes)):
        return (
            "Ranks that follow each other are on different nodes: number them node by node "
            "(srun --distribution=block)."
        )
    fit = [n for n in range(2, domain) if all(size % n == 0 for size in sizes)]
    smaller = f"set parallel.domain to {' or '.join(map(str, fit))}, or " if fit else ""
    return (
        f"Nodes have {per_node} ranks. If that is too slow, {smaller}start a multiple of {domain} "
        "ranks on every node."
    )


SLURM_TIMEOUT = 30.0  # seconds for a command of SLURM's


def slurm_nodes(partition: str | None) -> ClusterNodes:
    """The largest nodes of a partition, by default of the default one; unknown without SLURM."""
    if shutil.which("sinfo") is None:
        return ClusterNodes()
    command = ["sinfo", "--noheader", "--Node", "--format", "%P|%c|%G"]
    command += ["--partition", partition] if partition else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SLURM_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ClusterNodes()
    return largest_nodes(done.stdout, partition is not None)


def largest_nodes(told: str, of_partition: bool) -> ClusterNodes:
    """The size of the nodes with most GPUs, then most cores, and how many there are."""
    sizes: list[tuple[int, int]] = []
    for line in told.splitlines():
        name, cores, gres = line.split("|", 2)
        if of_partition or name.endswith("*"):  # a star marks the default partition
            sizes.append((count_gpus(gres), int(cores.rstrip("+"))))
    if not sizes:
        return ClusterNodes()
    gpus, cores_each = max(sizes)
    return ClusterNodes(sizes.count((gpus, cores_each)), cores_each, gpus)


def count_gpus(gres: str) -> int:
    """GPUs of a node: `gpu:a100:4(S:0-1),nvme:1` -> 4."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))
