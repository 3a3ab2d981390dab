"""How process groups are made: who takes part, their time-outs, streams, files and traces.

Every group after the first is one of several that divide the ranks of the run, such as the domains.
Over nccl all ranks make these in one call, by splitting the communicator of all ranks. Otherwise
the ranks of each group make theirs, without waiting for other ranks.

Groups over gloo cost each rank a connection to every other member, and four files: two ends of a
pipe, a queue of events and a socket that listens. So a group of one rank has those of all ranks'
group (`new_group_alone`), threads beside training exchange messages in that group, too
(`join_background_group`), and ranks over nccl have no gloo group of all ranks, except one that
connects two ranks when they first exchange something (`new_background_group`).
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from credit_dp.config import ParallelConfig
from credit_dp.distributed.launcher import RankInfo, agent_serves_store
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Seconds that a rank waits for the others in a collective. Reading, compiling and writing take
# less, and a rank that hangs must not use up the time of the job.
GROUP_TIMEOUT = timedelta(seconds=600)
# The same for a thread beside training. One rank may start to read or write long after another, for
# instance while the others evaluate, and disks differ: only the collectives of training itself find
# out that a rank hangs.
BACKGROUND_TIMEOUT = timedelta(hours=24)
# By which gloo tells the messages of such a thread from those of training, whose tag is 0.
BACKGROUND_TAG = 1
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
GLOO_ALONE = "credit_dp_gloo_alone"  # a back end of torch, see `new_group_alone`
# A process that may open no more saves files.
FEW_FILES = 255
# What a rank has open at once beside its connections to other ranks. Counted on CPUs: 20 in
# training, of them 4 of gloo's group of all ranks, and 9 where a domain shares the reading.
OWN_FILES = 32
# More where it does not save files: sockets to 14 ranks of a domain, as many of an ensemble, and
# files that zarr's threads read.
MORE_FILES = 40
GLOO_FILES = 4  # of a group: both ends of a pipe, a queue of events, and a socket that listens
STORE_FILES = 9  # of the process that serves the store, beside its connections: counted


def raise_file_limit(ranks: RankInfo) -> None:
    """Let this process open as many files and connections as the system allows.

    Usual limits are 1,024 and, on request, many more. Ranks on CPUs are connected to each other.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ranks.rank == 0 and agent_serves_store(os.environ):
        needed = agent_files(ranks)
        if 0 <= soft < needed:
            raise UserError(
                f"ulimit -n: torchrun on {socket.gethostname()} serves the store of "
                f"{ranks.world_size} ranks and needs {needed} open files and connections, but may "
                f"have {soft}. Run `ulimit -n $(ulimit -Hn)` before torchrun."
            )
    with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if may_open_few_files():
        # zarr opens a file in each of its threads, beside those of a rank. Its variable of the
        # environment would come too late where a module has imported it already.
        import zarr

        if zarr.config.get("threading.max_workers") is None:
            zarr.config.set({"threading.max_workers": 1})


def may_open_few_files() -> bool:
    """Return whether this process may open `FEW_FILES` or fewer."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and limit <= FEW_FILES


def count_nodes(ranks: RankInfo) -> int:
    """Return the number of nodes, if all have as many ranks as this one."""
    return math.ceil(ranks.world_size / ranks.local_world_size)


def store_connections(ranks: RankInfo) -> int:
    """Return the connections of the process that serves the store: torch's, `PeerMonitor`'s."""
    return 2 * ranks.world_size


def agent_files(ranks: RankInfo) -> int:
    """Return how many files and connections torchrun's agent needs that serves the store."""
    return OWN_FILES + store_connections(ranks) + count_nodes(ranks)  # one of each agent


def files_needed(parallel: ParallelConfig, ranks: RankInfo, gloo: bool, launched: bool) -> int:
    """Return how many files and connections this rank opens, at most, on `FEW_FILES`.

    Args:
        gloo: whether the groups of the mesh are over gloo; what nccl opens is not counted.
    """
    needed = OWN_FILES
    if gloo:
        axes = [parallel.pipeline, parallel.data or 1, parallel.ensemble, parallel.domain]
        # Ranks with the same parameters, and the axes that fsdp2 makes of them.
        replicas = ranks.world_size // parallel.pipeline
        axes += [parallel.pipeline, replicas] if parallel.data_mode == "fsdp2" else [replicas]
        groups = [size for size in axes if 1 < size < ranks.world_size]
        needed += ranks.world_size - 1 + sum(size - 1 + GLOO_FILES for size in groups)
    if launched:
        needed += 2  # to the store
        if ranks.rank == 0 and not agent_serves_store(os.environ):
            needed += STORE_FILES + store_connections(ranks)
    return needed


def check_file_limit(parallel: ParallelConfig, ranks: RankInfo, gloo: bool, launched: bool) -> None:
    """Refuse a run in which this rank would open more files than it may, before the ranks meet."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(parallel, ranks, gloo, launched)
    if not may_open_few_files():
        needed += MORE_FILES
    if 0 <= limit < needed:
        raise UserError(
            f"ulimit -n: rank {ranks.rank} of {ranks.world_size} on {socket.gethostname()} needs "
            f"{needed} open files and connections, but may have {limit}. Raise the hard limit "
            "(ulimit -Hn) on that node, or start fewer ranks."
        )


def trace_collectives(folder: Path) -> None:
    """Make nccl write its last collectives into a folder when one takes too long.

    Call it before the first group is made. Variables that the user has set stay. torch's
    flight-recorder tools read the files.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the former name, which torch reads, too
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
        # torch appends the number of the rank.
        trace = folder.absolute() / "nccl_trace_rank_"
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(trace))


def new_mesh(ranks: Tensor, names: tuple[str, ...], urgent: str = "") -> DeviceMesh:
    """Return torch's mesh of all ranks, with a process group along each axis; collective.

    Args:
        urgent: the axis whose messages go before those of others on a GPU; none by default.

    Shapes:
        `ranks`: a dimension for each axis.
    """
    from torch.distributed import get_backend
    from torch.distributed.device_mesh import DeviceMesh

    ranks = ranks.contiguous()  # torch derives the positions from the strides
    groups: dict[tuple[tuple[int, ...], ...], ProcessGroup] = {}
    axis_groups = []
    for axis, name in enumerate(names):
        parts = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        # Axes of one rank share their groups.
        key = tuple(map(tuple, parts))
        if key not in groups:
            groups[key] = new_group_of(parts, urgent=name == urgent)
        axis_groups.append(groups[key])
    wait_until_connected()
    kind = "cuda" if "nccl" in get_backend() else "cpu"
    return DeviceMesh.from_group(axis_groups, kind, ranks, mesh_dim_names=names)


def wait_until_connected() -> None:
    """Wait until all ranks have made their groups over gloo; collective of all ranks.

    Where a rank ends while another still connects to it, gloo writes an error of its own to stderr,
    beside the one line that says why the rank ended.
    """
    from torch import distributed

    if distributed.get_backend() == "gloo":
        distributed.barrier()


def new_group_of(parts: Sequence[Sequence[int]], urgent: bool = False) -> ProcessGroup:
    """Return a process group of this rank's part; collective of all ranks.

    Args:
        parts: divide the ranks of the run.
    """
    from torch import distributed

    world = distributed.group.WORLD
    if world is None:
        raise RuntimeError("there is no process group of all ranks")
    rank = distributed.get_rank()
    own = next(list(part) for part in parts if rank in part)
    uses_nccl = "nccl" in distributed.get_backend()
    if len(parts) == 1 and not (uses_nccl and urgent and len(own) > 1):
        return world
    if len(own) == 1 and is_plain_gloo(world):
        return new_group_alone(world)
    options = nccl_options(urgent) if uses_nccl else None
    if uses_nccl and world.bound_device_id is not None:
        # One call of all ranks for all parts: nccl splits the communicator of all ranks, and every
        # rank of it has to take part.
        split = [list(part) for part in parts]
        group = distributed.split_group(None, split, GROUP_TIMEOUT, options)
    else:
        # Only the members take part: of 1,024 ranks in domains of 8, all others would wait for 127
        # other groups as well. torch names a group by its members and the number of the groups that
        # they are in, which is the same on all of them.
        group = distributed.new_group(
            own, timeout=GROUP_TIMEOUT, pg_options=options, use_local_synchronization=True
        )
    return cast("ProcessGroup", group)  # every rank is in one of the parts


def is_plain_gloo(world: ProcessGroup) -> bool:
    """Whether all ranks' group is over gloo alone, and torch does not check its messages.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps it, and expects as many messages of each rank.
    """
    from torch import distributed

    from credit_dp.torch_private import cpu_backend

    if distributed.get_backend() != "gloo":
        return False
    return isinstance(cpu_backend(world), distributed.ProcessGroupGloo)


def new_group_alone(world: ProcessGroup) -> ProcessGroup:
    """Return a gloo group of this rank alone, which opens no files if torch lets it share them.

    It has the pipe, the queue, the socket and the thread of another group, and sends nothing.
    torch passes gloo no options, unless through a back end of another name.
    """
    from torch import distributed
    from torch.distributed import Backend

    from credit_dp.torch_private import gloo_options

    options = gloo_options(world, GROUP_TIMEOUT)
    if options is None:
        alone = distributed.new_group(
            [distributed.get_rank()], timeout=GROUP_TIMEOUT, use_local_synchronization=True
        )
        return cast("ProcessGroup", alone)
    # Again for each group, which changes nothing: torch has one table for the process.
    Backend.register_backend(GLOO_ALONE, _create_gloo, extended_api=True, devices=["cpu"])
    group = distributed.new_group(
        [distributed.get_rank()],
        timeout=GROUP_TIMEOUT,
        backend=GLOO_ALONE,
        pg_options=options,
        use_local_synchronization=True,
    )
    return cast("ProcessGroup", group)


def _create_gloo(group: Any, options: Any) -> Any:
    """Return gloo with options; torch calls it with what it knows of the group."""
    from torch import distributed

    gloo: Any = distributed.ProcessGroupGloo
    return gloo(group.store, group.group_rank, group.group_size, options)


def nccl_options(urgent: bool) -> object:
    """Return the options of an nccl group of some ranks.

    Args:
        urgent: whether its kernels go before others that wait for the same GPU. Rows that a layer
            waits for would queue behind reductions of gradients, which nothing waits for yet.
    """
    from torch import distributed

    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = GROUP_TIMEOUT  # torch would take its default, not that of all ranks' group
    return options


def join_background_group() -> ProcessGroup:
    """Return the gloo group in which threads beside training exchange messages; collective.

    For `run_on_rank_0` and `gather_on_rank_0` of one thread. Over gloo it is the group of all
    ranks, in which their messages have a tag of their own: a second group of all ranks would cost
    rank 0 four files and a connection for each doubling of the ranks. Its other messages are those
    of training: a collective of another thread could meet it in another order on each rank.
    """
    from torch import distributed

    world = distributed.group.WORLD
    if world is not None and is_plain_gloo(world):
        return world
    return new_background_group([range(distributed.get_world_size())])


def new_background_group(parts: Sequence[Sequence[int]]) -> ProcessGroup:
    """Create a gloo group for a thread beside training; collective of its ranks.

    In the group of training, the collectives of the two threads could run in another order on each
    rank.
    """
    from torch import distributed

    own = next(list(part) for part in parts if distributed.get_rank() in part)
    with _connecting_late():
        group: ProcessGroup = distributed.new_group(
            own, timeout=BACKGROUND_TIMEOUT, backend="gloo", use_local_synchronization=True
        )
    return group


@contextlib.contextmanager
def _connecting_late() -> Iterator[None]:
    """Let gloo groups that are made meanwhile connect two ranks at their first message.

    Only in background groups: a rank that first connects to one that has just died may wait until
    its time is up. Then the threads of training notice the death, and end the process.
    """
    before = os.environ.get(LAZY_GLOO)
    os.environ[LAZY_GLOO] = "1"  # torch has no argument for it
    try:
        yield
    finally:
        if before is None:
            del os.environ[LAZY_GLOO]
        else:
            os.environ[LAZY_GLOO] = before
