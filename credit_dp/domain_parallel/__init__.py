"""Sharding a model by latitude: every rank holds a band of rows of each field."""

from credit_dp.domain_parallel.constraints import validate_sharding_constraints
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.halo_exchange import HaloExchange
from credit_dp.domain_parallel.layers import (
    DomainParallelConv2d,
    DomainParallelConvTranspose2d,
    DomainParallelGroupNorm,
    DomainParallelPeriodicConv2d,
)
from credit_dp.domain_parallel.manager import (
    DomainParallelManager,
    get_domain_parallel_manager,
    initialize_domain_parallel,
)
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.sharding import gather_tensor, shard_batch, shard_tensor

__all__ = [
    "DomainParallelConv2d",
    "DomainParallelConvTranspose2d",
    "DomainParallelGroupNorm",
    "DomainParallelManager",
    "DomainParallelPeriodicConv2d",
    "HaloExchange",
    "RowPartition",
    "convert_to_domain_parallel",
    "gather_tensor",
    "get_domain_parallel_manager",
    "initialize_domain_parallel",
    "shard_batch",
    "shard_tensor",
    "validate_sharding_constraints",
]
