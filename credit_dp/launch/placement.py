"""Places the ranks of a mesh on the nodes of a cluster, before anything is asked of its queue."""

from dataclasses import dataclass
from typing import final

from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.launch.layout import per_model


@final
@dataclass(frozen=True)
class Nodes:
    """What a cluster has: its nodes, and the cores and GPUs of each; None if that is not known."""

    count: int | None = None
    cores: int | None = None
    gpus: int | None = None


@final
@dataclass(frozen=True)
class Wish:
    """What the user decides about the placement; None leaves it to the mesh.

    `spread` lets a domain group reach over several nodes; messages say `how_to_spread`.
    """

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    spread: bool = False
    how_to_spread: str = "spread=true"


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


def place(config: Config, has: Nodes, wish: Wish) -> Placement:
    """The fewest nodes that hold the mesh, or as many as are wished for.

    A domain group is kept on one node: its ranks exchange rows in every layer that mixes them.

    Raises:
        UserError: the ranks don't fit on the nodes that there are.
    """
    parallel = config.parallel
    gpus_each = parallel.gpus_of_rank if uses_gpus(config, has) else 0
    cpus = wish.cpus_per_task or cpus_of_rank(config, has, gpus_each)
    room = ranks_that_fit(has, cpus, gpus_each)
    unit = 1 if wish.spread else parallel.domain
    if room is not None and unit > room:
        raise UserError(too_small(config, has, wish, unit, cpus, gpus_each))
    ranks = ranks_of(config, wish, unit, room if gpus_each else None)
    tasks = tasks_per_node(ranks, wish, unit, room)
    if room is not None and tasks > room:
        raise UserError(too_small(config, has, wish, tasks, cpus, gpus_each))
    nodes = ranks // tasks
    if has.count is not None and nodes > has.count:
        raise UserError(
            f"nodes: {ranks} ranks need {nodes} nodes with {tasks} ranks on each, but the "
            f"partition has {has.count} of that size. Lower parallel.data, parallel.domain or "
            "parallel.pipeline."
        )
    return Placement(nodes, tasks, cpus, tasks * gpus_each, ranks // per_model(parallel))


def uses_gpus(config: Config, has: Nodes) -> bool:
    """Whether ranks compute on GPUs; where nodes are not known, `device=auto` takes them to."""
    return config.device == "cuda" or (config.device == "auto" and has.gpus != 0)


def cpus_of_rank(config: Config, has: Nodes, gpus_each: int) -> int:
    """Cores of one rank: its threads, or beside a GPU its share of the node or its readers."""
    if config.parallel.threads is not None:
        return config.parallel.threads
    if not gpus_each:
        return 1
    if has.cores and has.gpus:
        return max(1, has.cores // has.gpus * gpus_each)
    return config.data.workers + 1


def ranks_that_fit(has: Nodes, cpus: int, gpus_each: int) -> int | None:
    """How many ranks a node has room for; None if that is not known."""
    rooms = []
    if has.cores is not None:
        rooms.append(has.cores // cpus)
    if gpus_each and has.gpus is not None:
        rooms.append(has.gpus // gpus_each)
    return min(rooms) if rooms else None


def ranks_of(config: Config, wish: Wish, unit: int, room: int | None) -> int:
    """All ranks: of the mesh, or with `parallel.data=null` as many globes as the nodes hold."""
    parallel = config.parallel
    if parallel.data is not None:
        return per_model(parallel) * parallel.data
    if wish.nodes is None:
        return per_model(parallel)
    each = wish.tasks_per_node or (unit if room is None else room // unit * unit)
    return per_model(parallel) * max(1, wish.nodes * each // per_model(parallel))


def tasks_per_node(ranks: int, wish: Wish, unit: int, room: int | None) -> int:
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
            f"with {wish.how_to_spread}."
        )
    return tasks


def too_small(config: Config, has: Nodes, wish: Wish, tasks: int, cpus: int, gpus_each: int) -> str:
    """Why a node can't hold so many ranks."""
    few_gpus = gpus_each and has.gpus is not None and tasks * gpus_each > has.gpus
    needed, there, what = tasks * cpus, has.cores, "cores"
    if few_gpus:
        needed, there, what = tasks * gpus_each, has.gpus, "GPUs"
    domain = config.parallel.domain
    of = ""
    if tasks == domain > 1:
        of = f" (a domain group stays on one node, unless {wish.how_to_spread} is given)"
    return (
        f"parallel.domain: {tasks} ranks on one node need {needed} {what}, but nodes have {there}"
        f"{of}. Lower parallel.domain, or take more nodes."
    )
