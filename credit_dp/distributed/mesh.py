"""From the config to what a rank works with: its place on the mesh and its device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from credit_dp.config import Config, ParallelConfig
from credit_dp.distributed import RankInfo
from credit_dp.distributed.placement import gpu_index, spread_warning
from credit_dp.errors import UserError

if TYPE_CHECKING:
    import torch

    from credit_dp.domain_parallel import DomainParallelManager


logger = logging.getLogger(__name__)


def build_manager(parallel: ParallelConfig, ranks: RankInfo) -> DomainParallelManager:
    """The pipeline x data x domain mesh, domain innermost so that neighbours share a node.

    Collective: every rank calls it, after the process group is there. Rank 0 warns of domain groups
    that reach over several nodes.

    Raises:
        UserError: the number of ranks is not pipeline x data x domain.
    """
    from credit_dp.domain_parallel import DomainParallelManager

    per_model = parallel.pipeline * parallel.domain
    data = parallel.data or ranks.world_size // per_model
    if per_model * data != ranks.world_size:
        raise UserError(
            f"parallel.domain: pipeline {parallel.pipeline} x data {data} x domain "
            f"{parallel.domain} makes {per_model * data} ranks, {ranks.world_size} are running. "
            "Change parallel.pipeline, parallel.data or parallel.domain."
        )
    manager = DomainParallelManager(
        ranks.world_size, parallel.domain, pipeline_parallel_size=parallel.pipeline
    )
    if ranks.local_world_size < ranks.world_size:
        line = spread_warning(nodes_of_ranks(ranks), parallel.domain)
        if line is not None and ranks.rank == 0:
            logger.warning(line)
    return manager


def nodes_of_ranks(ranks: RankInfo) -> list[int]:
    """On which node each rank runs, in rank order; collective."""
    import torch
    from torch import distributed

    device = "cuda" if "nccl" in distributed.get_backend() else "cpu"
    own = torch.tensor(ranks.node, device=device)
    found = [torch.empty_like(own) for _ in range(ranks.world_size)]
    distributed.all_gather(found, own)
    return [int(node) for node in found]


def rank_device(config: Config, ranks: RankInfo) -> torch.device:
    """Where this rank computes: its own GPU, or the CPU. `auto` takes GPUs if there are any."""
    import torch

    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", gpu_index(config.parallel, ranks))
    return torch.device("cpu")
