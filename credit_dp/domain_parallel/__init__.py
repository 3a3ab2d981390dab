"""Domain parallelism: sharding by latitude, in which each rank holds a band of rows of every field.

The results are those of the unsharded model. A band is this rank's shard along latitude; the ranks
that share a globe are a domain. How it works, from the call to the messages:

- `decide` finds out how a model is sharded, and `convert` carries that out: `conversion` replaces
  the layers that couple rows, `rules` says by which ones, `layers` has them.
- `planning` runs the model without data, chooses the bands of all levels and compares what users'
  code computes on bands and on tensors of the globe, which `band_tensor` has.
- `gradients` has the loss of the globe and sums gradients, for training loops of users.
- `exchange` is how layers fetch rows of other bands, `transport` how messages are sent.
- `verify` compares a sharded model with the unsharded one, `dry_run` counts what is sent.
"""

from credit_dp.domain_parallel.convert import (
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    replan,
)
from credit_dp.domain_parallel.decide import Decision, plan_report
from credit_dp.domain_parallel.gradients import global_mean, sum_gradients
from credit_dp.domain_parallel.halo_exchange import (
    HaloExchange,
    gather_tensor,
    shard_batch,
    shard_tensor,
)
from credit_dp.domain_parallel.layers import (
    DomainParallelBatchNorm,
    DomainParallelConv2d,
    DomainParallelConv3d,
    DomainParallelConvTranspose2d,
    DomainParallelConvTranspose3d,
    DomainParallelGroupNorm,
    DomainParallelInstanceNorm,
    DomainParallelInterpolate,
    DomainParallelPeriodicConv2d,
)
from credit_dp.domain_parallel.manager import (
    DomainParallelManager,
    get_domain_parallel_manager,
    initialize_domain_parallel,
)
from credit_dp.domain_parallel.partition import RowPartition, validate_sharding_constraints
from credit_dp.domain_parallel.verify import VerifyReport, verify_domain_parallel

__all__ = [
    "Decision",
    "DomainParallelBatchNorm",
    "DomainParallelConv2d",
    "DomainParallelConv3d",
    "DomainParallelConvTranspose2d",
    "DomainParallelConvTranspose3d",
    "DomainParallelGroupNorm",
    "DomainParallelInstanceNorm",
    "DomainParallelInterpolate",
    "DomainParallelManager",
    "DomainParallelPeriodicConv2d",
    "HaloExchange",
    "RowPartition",
    "VerifyReport",
    "convert_from_domain_parallel",
    "convert_to_domain_parallel",
    "gather_tensor",
    "get_domain_parallel_manager",
    "global_mean",
    "initialize_domain_parallel",
    "plan_report",
    "replan",
    "shard_batch",
    "shard_tensor",
    "sum_gradients",
    "validate_sharding_constraints",
    "verify_domain_parallel",
]
