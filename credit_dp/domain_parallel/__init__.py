"""Sharding a model by latitude: every rank holds a band of rows of each field."""

from credit_dp.domain_parallel.convert import (
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    replan,
)
from credit_dp.domain_parallel.costs.report import PlanReport, plan_report
from credit_dp.domain_parallel.halo_exchange import (
    HaloExchange,
    gather_tensor,
    shard_batch,
    shard_tensor,
)
from credit_dp.domain_parallel.layers import (
    DomainParallelBatchNorm,
    DomainParallelConv1d,
    DomainParallelConv2d,
    DomainParallelConv3d,
    DomainParallelConvTranspose1d,
    DomainParallelConvTranspose2d,
    DomainParallelConvTranspose3d,
    DomainParallelGroupNorm,
    DomainParallelInstanceNorm,
    DomainParallelInterpolate,
    DomainParallelLayerNorm,
    DomainParallelPeriodicConv2d,
    DomainParallelRMSNorm,
    DomainParallelSoftmax,
)
from credit_dp.domain_parallel.manager import (
    DomainParallelManager,
    get_domain_parallel_manager,
    initialize_domain_parallel,
)
from credit_dp.domain_parallel.partition import RowPartition, validate_sharding_constraints
from credit_dp.domain_parallel.verify import VerifyReport, verify_domain_parallel

__all__ = [
    "DomainParallelBatchNorm",
    "DomainParallelConv1d",
    "DomainParallelConv2d",
    "DomainParallelConv3d",
    "DomainParallelConvTranspose1d",
    "DomainParallelConvTranspose2d",
    "DomainParallelConvTranspose3d",
    "DomainParallelGroupNorm",
    "DomainParallelInstanceNorm",
    "DomainParallelInterpolate",
    "DomainParallelLayerNorm",
    "DomainParallelManager",
    "DomainParallelPeriodicConv2d",
    "DomainParallelRMSNorm",
    "DomainParallelSoftmax",
    "HaloExchange",
    "PlanReport",
    "RowPartition",
    "VerifyReport",
    "convert_from_domain_parallel",
    "convert_to_domain_parallel",
    "gather_tensor",
    "get_domain_parallel_manager",
    "initialize_domain_parallel",
    "plan_report",
    "replan",
    "shard_batch",
    "shard_tensor",
    "validate_sharding_constraints",
    "verify_domain_parallel",
]
