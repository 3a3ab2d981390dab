"""Build this rank's mesh and choose its device from the config."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from credit_dp.config import Config, ParallelConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.placement import (
    gpu_index,
    mesh_text,
    ranks_per_model,
    spread_warning,
)
from credit_dp.errors import UserError

if TYPE_CHECKING:
    import torch

    from credit_dp.domain_parallel import DomainParallelManager


logger = logging.getLogger(__name__)


def build_manager(parallel: ParallelConfig, ranks: RankInfo) -> DomainParallelManager:
    """Return the manager of the pipeline x data x ensemble x domain mesh; collective.

    The domain axis is innermost, so that ranks of neighbouring bands share a node. The process
    group has to be initialised. Rank 0 warns of domain groups that span several nodes.

    Raises:
        UserError: the number of ranks is not pipeline x data x ensemble x domain.
    """
    from credit_dp.domain_parallel import DomainParallelManager

    per_model = ranks_per_model(parallel)
    data = parallel.data or ranks.world_size // per_model
    if per_model * data != ranks.world_size:
        raise UserError(
            f"parallel.domain: {mesh_text(parallel, data)} needs {per_model * data} ranks, but "
            f"{ranks.world_size} are running. Change parallel.pipeline, parallel.data or "
            "parallel.domain."
        )
    manager = DomainParallelManager(
        ranks.world_size,
        parallel.domain,
        pipeline_parallel_size=parallel.pipeline,
        ensemble_parallel_size=parallel.ensemble,
    )
    if ranks.on_several_nodes:
        line = spread_warning(rank_nodes(ranks), parallel.domain)
        if line is not None and ranks.rank == 0:
            logger.warning(line)
    return manager


def rank_nodes(ranks: RankInfo) -> list[int]:
    """Return the number of each rank's node, in rank order; collective."""
    import torch

    from credit_dp.distributed.collectives import all_gather_tensor

    nodes: list[int] = all_gather_tensor(torch.tensor(ranks.node)).tolist()
    return nodes


def rank_device(config: Config, ranks: RankInfo) -> torch.device:
    """Return the GPU of this rank, or the CPU; `device=auto` uses GPUs if torch sees any."""
    import torch

    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", gpu_index(config.parallel, ranks))
    return torch.device("cpu")
