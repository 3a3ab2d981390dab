"""Work out how many ranks a run has, and place them on devices and on the nodes of a cluster.

`resolve_ranks` settles the device and the number of data ranks when a run starts. `place_ranks`
deals the ranks to nodes before a job is submitted. A domain group, whose ranks exchange rows in
every layer that couples them, is kept on one node unless the user allows more.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from credit_dp.config import Config, ParallelConfig, microbatches_per_step
from credit_dp.distributed.launcher import Launcher, RankInfo
from credit_dp.distributed.slurm import run_slurm_command
from credit_dp.errors import UserError
from credit_dp.process import usable_cores

# Device files of NVIDIA's driver, of the same under WSL, and of AMD's: without any of them Linux
# has no GPU, and torch need not be imported to count them.
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


# The ranks and devices of a run that starts


def resolve_ranks(config: Config, launcher: Launcher | None) -> Config:
    """Return the config with definite values of `device` and `parallel.data`.

    Raises:
        UserError: the ranks or GPUs do not fit the mesh, or the data ranks do not divide the batch.
    """
    gpus = count_visible_gpus() if config.device != "cpu" else 0
    if config.device == "cuda" and gpus == 0:
        raise UserError("device: needs a GPU for cuda, but torch sees none here. Use device=cpu.")
    device = "cuda" if gpus else "cpu"
    gpus_per_rank = config.parallel.gpus_per_rank
    if launcher is None:
        data = data_ranks_on_gpus(config.parallel, gpus // gpus_per_rank)
        local_ranks = data * ranks_per_model(config.parallel)
    else:
        data = data_ranks_of_launcher(config.parallel, launcher)
        local_ranks = launcher.ranks.local_world_size
    # A launcher may show each rank only its own GPUs (srun --gpus-per-task=1).
    own_gpus_only = launcher is not None and gpus == gpus_per_rank
    if device == "cuda" and local_ranks * gpus_per_rank > gpus and not own_gpus_only:
        raise UserError(too_few_gpus_message(config.parallel, launcher, local_ranks, gpus))
    check_batch(config, data)
    check_fsdp(config.parallel, data)
    return replace(config, device=device, parallel=replace(config.parallel, data=data))


def too_few_gpus_message(
    parallel: ParallelConfig, launcher: Launcher | None, local_ranks: int, gpus: int
) -> str:
    """Return the error line for more ranks on this machine than its GPUs allow."""
    gpus_per_rank = parallel.gpus_per_rank
    if gpus_per_rank > 1:
        return (
            f"parallel.layout: counts {gpus_per_rank} GPUs for each rank and needs "
            f"{local_ranks * gpus_per_rank} on this machine, but torch sees {gpus}. Name fewer "
            "GPUs in parallel.layout, or start fewer ranks."
        )
    axes = ["domain", "data", *(["ensemble"] if parallel.ensemble > 1 else []), "pipeline"]
    names = [f"parallel.{axis}" for axis in axes]
    advice = f"Lower {', '.join(names[:-1])} or {names[-1]}"
    if launcher is not None:
        advice = (
            f"Let {launcher.name} start at most {gpus} ranks on a machine, or show each rank one "
            "GPU (srun --gpus-per-task=1)"
        )
    return (
        f"parallel.domain: {local_ranks} ranks on this machine need {local_ranks} GPUs, but "
        f"torch sees {gpus}. {advice}, or use device=cpu."
    )


def check_batch(config: Config, data: int) -> None:
    """Refuse a batch size that the data ranks and their micro-batches do not divide."""
    size = config.data.batch_size
    parts = microbatches_per_step(config)
    if size % data:
        raise UserError(
            f"data.batch_size: needs a multiple of the {data} data ranks, "
            f"got {size}. Change it or parallel.data."
        )
    if size // data % parts:
        raise UserError(
            f"data.batch_size: each of {data} data ranks splits its {size // data} samples into "
            f"{parts} micro-batches, so it needs a multiple of {data * parts}, got {size}. "
            "Change it, trainer.accumulate or parallel.microbatches."
        )


def check_fsdp(parallel: ParallelConfig, data: int) -> None:
    """Refuse settings of FSDP2 on a mesh with a single replica of the parameters."""
    keys = ("param_dtype", "reduce_dtype", "cpu_offload")
    key = next((key for key in keys if getattr(parallel, key)), None)
    if key is not None and data * parallel.ensemble * parallel.domain == 1:
        raise UserError(
            f"parallel.{key}: needs at least two data or domain ranks, got one. Raise "
            f"parallel.data or parallel.domain, or leave parallel.{key} out."
        )


def gpu_index(parallel: ParallelConfig, ranks: RankInfo) -> int:
    """Return torch's index of a rank's GPU; of the first one, if the rank drives several.

    If a rank sees its own GPUs only, the index is 0 on all ranks.
    """
    if count_visible_gpus() == parallel.gpus_per_rank:
        return 0
    return ranks.local_rank * parallel.gpus_per_rank


def ranks_per_model(parallel: ParallelConfig) -> int:
    """Return the ranks that compute the same samples: pipeline x ensemble x domain."""
    return parallel.pipeline * parallel.ensemble * parallel.domain


def mesh_text(parallel: ParallelConfig, data: int | None = None) -> str:
    """Return the sizes of the axes: `pipeline 1 x data 2 x domain 4`.

    Args:
        data: size of the data axis; by default that of the config, or 1.
    """
    axes = {
        "pipeline": parallel.pipeline,
        "data": data or parallel.data or 1,
        "ensemble": parallel.ensemble,
        "domain": parallel.domain,
    }
    return " x ".join(
        f"{name} {size}" for name, size in axes.items() if size > 1 or name != "ensemble"
    )


def data_ranks_on_gpus(parallel: ParallelConfig, gpus: int) -> int:
    """Return the number of data ranks of a run that starts its own ranks on this machine."""
    return parallel.data or max(1, gpus // ranks_per_model(parallel))


def data_ranks_of_launcher(parallel: ParallelConfig, launcher: Launcher) -> int:
    """Return the number of data ranks among the launcher's ranks, all of which have to be used.

    Raises:
        UserError: the ranks are no multiple of pipeline x ensemble x domain, or not as many as the
            mesh has.
    """
    world = launcher.ranks.world_size
    needed = ranks_per_model(parallel)
    members = f"parallel.ensemble={parallel.ensemble} x " if parallel.ensemble > 1 else ""
    if world % needed:
        fewer, more = world // needed * needed, (world // needed + 1) * needed
        counts = f"{fewer} or {more}" if fewer else f"{more}"
        raise UserError(
            f"parallel.domain: {launcher.name} started {world} ranks, but parallel.pipeline="
            f"{parallel.pipeline} x {members}parallel.domain={parallel.domain} needs a multiple of "
            f"{needed}. Start {counts} ranks, or choose parallel.pipeline x "
            f"{'parallel.ensemble x ' if members else ''}parallel.domain to divide {world}."
        )
    data = world // needed
    if parallel.data not in (None, data):
        raise UserError(
            f"parallel.data: {launcher.name} started {world} ranks, but parallel.pipeline="
            f"{parallel.pipeline} x parallel.data={parallel.data} x {members}parallel.domain="
            f"{parallel.domain} needs {needed * parallel.data}. Set parallel.data to null (then it "
            f"is {data}), or start {needed * parallel.data} ranks."
        )
    return data


def count_visible_gpus() -> int:
    """Return the number of GPUs that torch sees, without creating a CUDA context."""
    if sys.platform == "linux" and not any(map(os.path.exists, GPU_FILES)):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count()


def threads_per_rank(
    parallel: ParallelConfig, ranks: RankInfo, environment: Mapping[str, str]
) -> int:
    """Return the CPU threads of one rank.

    The first of these: `parallel.threads`, OMP_NUM_THREADS, SLURM's CPUs of the task, an equal
    share of the cores that this process may use.
    """
    if parallel.threads is not None:
        return parallel.threads
    # torchrun sets OMP_NUM_THREADS=1 if the user did not: under it the variable says nothing.
    omp_threads = environment.get("OMP_NUM_THREADS", "")
    if omp_threads.isdigit() and int(omp_threads) > 0 and "TORCHELASTIC_RUN_ID" not in environment:
        return int(omp_threads)
    # srun pins each task to its own cores: they are not shared with other ranks.
    if environment.get("SLURM_CPUS_PER_TASK", "").isdigit() and "SLURM_STEP_ID" in environment:
        return int(environment["SLURM_CPUS_PER_TASK"])
    return max(1, usable_cores() // ranks.local_world_size)


# The nodes of a job


@final
@dataclass(frozen=True)
class ClusterNodes:
    """The nodes of a cluster, all alike."""

    count: int | None = None
    cores: int | None = None
    gpus: int | None = None


@final
@dataclass(frozen=True)
class PlacementRequest:
    """The user's choices for the placement; what is None follows from the mesh.

    Attributes:
        spread: whether a domain group may span several nodes.
    """

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    spread: bool = False
    spread_hint: str = "spread=true"


@final
@dataclass(frozen=True)
class Placement:
    """The placement of the ranks of a run: in rank order, the same number on each node."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    data: int

    @property
    def ranks(self) -> int:
        """Number of ranks of the run."""
        return self.nodes * self.tasks_per_node


def place_ranks(config: Config, available: ClusterNodes, request: PlacementRequest) -> Placement:
    """Return the placement on the fewest nodes that hold the mesh, or on as many as requested.

    Raises:
        UserError: the ranks do not fit on the available nodes.
    """
    parallel = config.parallel
    # With device=auto, unless nodes are known to have no GPU.
    on_gpus = config.device == "cuda" or (config.device == "auto" and available.gpus != 0)
    gpus = parallel.gpus_per_rank if on_gpus else 0
    cpus = request.cpus_per_task or cpus_per_rank(config, available, gpus)
    sizes = [(available.cores, cpus), *([(available.gpus, gpus)] if gpus else [])]
    capacity = min((size // each for size, each in sizes if size is not None), default=None)
    # Ranks that have to be on one node: a domain group, unless it may span nodes.
    unit = 1 if request.spread else parallel.domain
    if capacity is not None and unit > capacity:
        raise UserError(too_small_message(available, request, unit, cpus, gpus, parallel.domain))
    ranks = ranks_per_model(parallel) * (parallel.data or 1)
    if parallel.data is None and request.nodes is not None:  # as many as fit
        whole_units = capacity // unit * unit if gpus and capacity is not None else unit
        fitting = request.nodes * (request.tasks_per_node or whole_units)
        ranks *= max(1, fitting // ranks)
    tasks = tasks_per_node(ranks, request, unit, capacity)
    if capacity is not None and tasks > capacity:
        raise UserError(too_small_message(available, request, tasks, cpus, gpus, parallel.domain))
    nodes = ranks // tasks
    if available.count is not None and nodes > available.count:
        raise UserError(
            f"nodes: {ranks} ranks need {nodes} nodes with {tasks} ranks on each, but the "
            f"partition has {available.count} nodes of that size. Lower parallel.data, "
            "parallel.domain or parallel.pipeline."
        )
    return Placement(
        nodes=nodes,
        tasks_per_node=tasks,
        cpus_per_task=cpus,
        gpus_per_node=tasks * gpus,
        data=ranks // ranks_per_model(parallel),
    )


def cpus_per_rank(config: Config, available: ClusterNodes, gpus_per_rank: int) -> int:
    """Return the cores of one rank: `parallel.threads` if set.

    Otherwise one on CPUs; beside GPUs the share of the node's cores that belongs to the rank's
    GPUs, or on unknown nodes one for each reading thread and one for the rank.
    """
    if config.parallel.threads is not None:
        return config.parallel.threads
    if not gpus_per_rank:
        return 1
    if available.cores and available.gpus:
        return max(1, available.cores // available.gpus * gpus_per_rank)
    return config.data.workers + 1


def tasks_per_node(ranks: int, request: PlacementRequest, unit: int, capacity: int | None) -> int:
    """Return the number of ranks on each node, a multiple of `unit`.

    Raises:
        UserError: the requested nodes do not divide the ranks, or would split domain groups.
    """
    if request.tasks_per_node is None and request.nodes is None:
        # As many complete units as fit on a node and divide the ranks.
        most = ranks if capacity is None else min(capacity, ranks)
        return next(tasks for tasks in range(most // unit * unit, 0, -unit) if ranks % tasks == 0)
    nodes = request.nodes or max(1, ranks // (request.tasks_per_node or 1))
    tasks = request.tasks_per_node or max(1, ranks // nodes)
    if nodes * tasks != ranks:
        raise UserError(
            f"nodes: {ranks} ranks can't be divided among {nodes} nodes with {tasks} on each. Give "
            f"a number of nodes that divides {ranks}, or another mesh."
        )
    if tasks % unit:
        raise UserError(
            f"nodes: {tasks} ranks on each of {nodes} nodes would split domain groups of {unit} "
            f"ranks. Use {max(1, ranks // unit)} nodes or fewer, or let groups span nodes with "
            f"{request.spread_hint}."
        )
    return tasks


def too_small_message(
    available: ClusterNodes,
    request: PlacementRequest,
    tasks: int,
    cpus: int,
    gpus: int,
    domain: int,
) -> str:
    """Return the error line for a node that can't hold `tasks` ranks with these CPUs and GPUs."""
    needed = f"{tasks * cpus} cores, but nodes have {available.cores}"
    if gpus and available.gpus is not None and tasks * gpus > available.gpus:
        needed = f"{tasks * gpus} GPUs, but nodes have {available.gpus}"
    remedy = ". Lower parallel.domain, or use more nodes"
    if tasks == domain > 1:  # more nodes don't help
        remedy = (
            " (a domain group stays on one node). Lower parallel.domain, or let groups span nodes "
            f"with {request.spread_hint}"
        )
    return f"parallel.domain: {tasks} ranks on one node need {needed}{remedy}."


def spread_warning(nodes: Sequence[int], domain: int) -> str | None:
    """Return a warning about domain groups that span several nodes; None if there are none.

    It is no error: such a mesh computes the same, and a globe may be too large for one node, or the
    network between nodes fast.

    Args:
        nodes: the number of each rank's node, in rank order.
    """
    groups = [nodes[first : first + domain] for first in range(0, len(nodes), domain)]
    spread = [index for index, group in enumerate(groups) if len(set(group)) > 1]
    if not spread:
        return None
    first = spread[0]
    names = " and ".join(map(str, dict.fromkeys(groups[first])))
    return (
        f"parallel.domain: {len(spread)} of {len(groups)} domain groups span several nodes, the "
        f"first is ranks {first * domain} to {(first + 1) * domain - 1} on nodes {names}: it "
        "exchanges rows over the network. If that is too slow, lower parallel.domain, or start a "
        f"multiple of {domain} ranks on every node and number them node by node "
        "(srun --distribution=block)."
    )


def spans_nodes(config: Config) -> bool:
    """Whether the mesh is known to need more than one node.

    Nodes are taken to have as many GPUs as this machine, or those of SLURM's default partition; if
    neither is known, one node is enough.
    """
    gpus = count_visible_gpus() if config.device != "cpu" else 0
    available = ClusterNodes(gpus=gpus) if gpus else slurm_nodes(None)
    try:
        return place_ranks(config, available, PlacementRequest(spread=True)).nodes > 1
    except UserError:
        return True


def slurm_nodes(partition: str | None) -> ClusterNodes:
    """Return the largest nodes of a SLURM partition; without SLURM their size is unknown."""
    if shutil.which("sinfo") is None:
        return ClusterNodes()
    command = ["sinfo", "--noheader", "--Node", "--format", "%P|%c|%G"]
    command += ["--partition", partition] if partition else []
    try:
        return largest_nodes(run_slurm_command(command), partition is not None)
    except UserError:
        return ClusterNodes()


def largest_nodes(output: str, is_one_partition: bool) -> ClusterNodes:
    """Return the nodes with the most GPUs, among these with the most cores, and how many there are.

    Args:
        output: lines `PARTITION|CORES|GRES` of sinfo, one for each node.
    """
    sizes: list[tuple[int, int]] = []
    for line in output.splitlines():
        name, cores, gres = line.split("|", 2)
        if is_one_partition or name.endswith("*"):  # a star marks the default partition
            sizes.append((count_gpus(gres), int(cores.rstrip("+"))))
    if not sizes:
        return ClusterNodes()
    gpus, cores_per_node = max(sizes)
    return ClusterNodes(sizes.count((gpus, cores_per_node)), cores_per_node, gpus)


def count_gpus(gres: str) -> int:
    """Return the GPUs in a node's GRES: `gpu:a100:4(S:0-1),nvme:1` -> 4."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))
