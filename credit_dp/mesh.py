"""From the config to what a rank works with: its place on the mesh and its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from credit_dp.config import ParallelConfig
from credit_dp.errors import UserError
from credit_dp.launch import Ranks

if TYPE_CHECKING:
    import torch

    from credit_dp.domain_parallel import DomainParallelManager


def build_manager(parallel: ParallelConfig, ranks: Ranks) -> DomainParallelManager:
    """The data x domain mesh, domain innermost so that neighbours share a machine.

    Collective: every rank calls it, after the process group is there.

    Raises:
        UserError: the number of ranks is not data x domain.
    """
    from credit_dp.domain_parallel import DomainParallelManager

    world = parallel.domain * (parallel.data or ranks.world_size // parallel.domain)
    if world != ranks.world_size:
        raise UserError(
            f"parallel.domain: {ranks.world_size} ranks are not a whole number of globes of "
            f"{parallel.domain} bands each. Change parallel.domain or parallel.data."
        )
    return DomainParallelManager(ranks.world_size, parallel.domain)


def device_of(device: str, ranks: Ranks) -> torch.device:
    """Where this rank computes: its own GPU, or the CPU. `auto` takes GPUs if there are any."""
    import torch

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu")
