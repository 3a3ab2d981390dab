"""The manager of one rank: its position in the mesh, its process groups and the table of bands."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from credit_dp.distributed.process_groups import new_mesh
from credit_dp.domain_parallel.partition import BandTable, RowPartition
from credit_dp.domain_parallel.transport import (
    DetachedTransport,
    GroupTransport,
    SingleRankTransport,
    Transport,
    message_device,
    use_batch_scheduling_for_gloo,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import disable_current_modes


@final
class DomainParallelManager:
    """One rank's position in a mesh of `pipeline` x `data` x `ensemble` x `domain` ranks.

    The domain axis is innermost: ranks that share a globe have consecutive numbers, which is
    usually on one node. The ranks of an ensemble have the same samples, but other members of them.

    Args:
        world_size: number of all ranks. More than one needs `torch.distributed` to be initialised
            with as many and with the name of a back end, unless `transport` is given: `gloo`, or
            `nccl` for tensors on GPUs, after `torch.cuda.set_device`.
        domain_parallel_size: number of ranks that share one globe.
        shard_dim: the row dimension of the model's input. The manager only keeps it: the converter
            has an argument of its own.
        transport: sends messages between the ranks of the domain; by default over the domain's
            process group.
        pipeline_parallel_size: number of ranks that share one model.
        ensemble_parallel_size: number of ranks that share the members of a sample.

    Attributes:
        mesh: torch's mesh with the axes `pipeline`, `data`, `domain` and, if ranks share members,
            `ensemble` before `domain`; None for one rank or with a given `transport`.
        ensemble_transport: sends messages between the ranks of an ensemble.
        bands: the partition of every global height.

    Raises:
        UserError: the number of ranks is not a multiple of pipeline x ensemble x domain, or not the
            number of running ranks.
    """

    def __init__(
        self,
        world_size: int,
        domain_parallel_size: int,
        shard_dim: int = -2,
        *,
        transport: Transport | None = None,
        pipeline_parallel_size: int = 1,
        ensemble_parallel_size: int = 1,
    ) -> None:
        if domain_parallel_size < 1 or world_size % domain_parallel_size:
            raise UserError(
                f"parallel.domain: {world_size} ranks can't be split into domains of "
                f"{domain_parallel_size}. Choose a divisor of {world_size}."
            )
        per_model = pipeline_parallel_size * domain_parallel_size
        if pipeline_parallel_size < 1 or world_size % per_model:
            raise UserError(
                f"parallel.pipeline: {world_size} ranks can't be split into models of "
                f"{pipeline_parallel_size} x {domain_parallel_size} ranks. "
                f"Their product has to divide {world_size}: change parallel.pipeline."
            )
        per_model *= ensemble_parallel_size
        if ensemble_parallel_size < 1 or world_size % per_model:
            raise UserError(
                f"parallel.ensemble: {world_size} ranks can't be split into ensembles of "
                f"{ensemble_parallel_size} models of {pipeline_parallel_size} x "
                f"{domain_parallel_size} ranks. Their product has to divide {world_size}: change "
                "parallel.ensemble."
            )
        self.world_size = world_size
        self.domain_parallel_size = domain_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.ensemble_parallel_size = ensemble_parallel_size
        self.data_parallel_size = world_size // per_model
        self.shard_dim = shard_dim
        self.domain_group: dist.ProcessGroup | None = None
        self.data_parallel_group: dist.ProcessGroup | None = None
        self.ensemble_group: dist.ProcessGroup | None = None
        self.pipeline_group: dist.ProcessGroup | None = None
        self.mesh: DeviceMesh | None = None
        self.rank = 0
        if transport is not None:
            self.rank = transport.rank
        elif world_size > 1:
            self._join_mesh()
        self.transport = transport or _group_transport(self.domain_group)
        self.ensemble_transport = _group_transport(self.ensemble_group)
        self.bands = BandTable(domain_parallel_size)

    def _join_mesh(self) -> None:
        running = dist.get_world_size() if dist.is_initialized() else 1
        if running != self.world_size:
            raise UserError(
                f"DomainParallelManager: needs {self.world_size} ranks, {running} are running. "
                f"Start {self.world_size} and initialise torch.distributed."
            )
        self.rank = dist.get_rank()
        axes = {
            "pipeline": self.pipeline_parallel_size,
            "data": self.data_parallel_size,
            "ensemble": self.ensemble_parallel_size,
            "domain": self.domain_parallel_size,
        }
        if self.ensemble_parallel_size == 1:
            del axes["ensemble"]  # no group without use
        ranks = torch.arange(self.world_size).view(*axes.values())
        self.mesh = new_mesh(ranks, tuple(axes), urgent="domain")
        self.pipeline_group = self.mesh.get_group("pipeline")
        self.data_parallel_group = self.mesh.get_group("data")
        if self.ensemble_parallel_size > 1:
            self.ensemble_group = self.mesh.get_group("ensemble")
        self.domain_group = self.mesh.get_group("domain")
        use_batch_scheduling_for_gloo()

    @property
    def domain_rank(self) -> int:
        """Return the index of this rank's band, 0 for the northernmost."""
        return self.rank % self.domain_parallel_size

    @property
    def domain_world_size(self) -> int:
        """Return the number of ranks that share one globe."""
        return self.domain_parallel_size

    @property
    def dp_rank(self) -> int:
        """Return the index of this rank's share of the samples."""
        per_sample = self.domain_parallel_size * self.ensemble_parallel_size
        return self.rank // per_sample % self.data_parallel_size

    @property
    def dp_world_size(self) -> int:
        """Return the number of shares that the samples are split into."""
        return self.data_parallel_size

    @property
    def ensemble_rank(self) -> int:
        """Return the index of this rank's share of the members of a sample."""
        return self.rank // self.domain_parallel_size % self.ensemble_parallel_size

    @property
    def ranks_per_sample(self) -> int:
        """Return the number of ranks whose losses add up to that of their samples."""
        return self.ensemble_parallel_size * self.domain_parallel_size

    @property
    def replicas(self) -> int:
        """Return the number of ranks with the same parameters: those of a pipeline stage."""
        return self.world_size // self.pipeline_parallel_size

    @property
    def pipeline_rank(self) -> int:
        """Return the index of this rank's pipeline stage, 0 for the one that takes the input."""
        return self.rank // self.replicas

    @property
    def is_first_domain_rank(self) -> bool:
        """Return whether this rank's band ends at the north pole."""
        return self.domain_rank == 0

    @property
    def is_last_domain_rank(self) -> bool:
        """Return whether this rank's band ends at the south pole."""
        return self.domain_rank == self.domain_parallel_size - 1

    def neighbor_ranks(self) -> tuple[int | None, int | None]:
        """Return the global ranks of the bands to the north and to the south; None at a pole."""
        north = None if self.is_first_domain_rank else self.rank - 1
        south = None if self.is_last_domain_rank else self.rank + 1
        return north, south

    def partition(self, height: int) -> RowPartition:
        """Return the bands of a global height: planned ones, or balanced ones without a plan."""
        return self.bands[height]

    def rows(self, height: int) -> slice:
        """Return the rows of a global height that this rank owns."""
        return self.partition(height).rows(self.domain_rank)

    def gather_partition(self, rows: int) -> RowPartition:
        """Gather the number of rows of every rank and return the partition; a collective."""
        # Never torch's default device: on the meta device a number of rows has no value.
        group = self.domain_group
        device = torch.device("cpu") if group is None else message_device(group)
        with disable_current_modes():  # nor of a dry run, for the same reason
            local = torch.tensor(rows, device=device)
            return RowPartition.from_sizes(self.transport.all_gather(local).tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> DomainParallelManager:
        # A copy of a converted model belongs to the same rank and uses the same groups.
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Process groups can't be pickled: a copy in another process knows its position in the mesh
        # but can't exchange anything.
        transports = {
            name: transport
            if isinstance(transport, SingleRankTransport)
            else DetachedTransport(transport.rank, transport.size)
            for name, transport in vars(self).items()
            if isinstance(transport, Transport)
        }
        groups = ("domain_group", "data_parallel_group", "ensemble_group", "pipeline_group", "mesh")
        return {**vars(self), **dict.fromkeys(groups), **transports}


def _group_transport(group: dist.ProcessGroup | None) -> Transport:
    if group is None or dist.get_world_size(group) == 1:
        return SingleRankTransport()
    transport = GroupTransport(group)
    # If the first operation of an nccl group is a batch of point-to-point messages, all its ranks
    # have to take part in it. Not every rank has something to send: start with a collective.
    dist.all_reduce(torch.zeros(1, device=message_device(group)), group=group)
    return transport


_default_manager: DomainParallelManager | None = None


def initialize_domain_parallel(
    world_size: int, domain_parallel_size: int, shard_dim: int = -2
) -> DomainParallelManager:
    """Create a manager and make it the one that `get_domain_parallel_manager` returns."""
    global _default_manager
    _default_manager = DomainParallelManager(world_size, domain_parallel_size, shard_dim)
    return _default_manager


def get_domain_parallel_manager() -> DomainParallelManager:
    """Return the manager that `initialize_domain_parallel` created last."""
    if _default_manager is None:
        raise UserError(
            "get_domain_parallel_manager: there is no manager. "
            "Call initialize_domain_parallel first or pass manager=."
        )
    return _default_manager


def default_manager() -> DomainParallelManager:
    """Return the manager for code that was given none: that of `get_domain_parallel_manager`.

    Where none was initialised, a process without other ranks gets one that shards nothing.

    Raises:
        UserError: there is none, and this process may be one of several ranks.
    """
    if _default_manager is None and _has_no_other_ranks():
        return _single_rank_manager()
    return get_domain_parallel_manager()


@cache  # one for all layers: compiled code knows its transport by name
def _single_rank_manager() -> DomainParallelManager:
    return DomainParallelManager(1, 1)


def _has_no_other_ranks() -> bool:
    """Return whether this is certainly the only rank; threads may be ranks, too."""
    if threading.current_thread() is not threading.main_thread():
        return False
    running = dist.get_world_size() if dist.is_initialized() else 1
    return running == 1 and (os.environ.get("WORLD_SIZE") or "1") == "1"
