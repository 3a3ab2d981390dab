"""Cutting whole-globe tensors into bands and joining them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange, Run
from credit_dp.domain_parallel.manager import DomainParallelManager, get_domain_parallel_manager
from credit_dp.domain_parallel.partition import FIELD_DIMS
from credit_dp.errors import UserError


def shard_tensor(x: Tensor, dim: int = -2, manager: DomainParallelManager | None = None) -> Tensor:
    """Return this rank's band of a tensor that every rank holds whole.

    Shapes:
        `(..., H_global, W)` -> `(..., H_local, W)` for `dim=-2`.

    Raises:
        UserError: fewer rows than ranks.
    """
    manager = manager or get_domain_parallel_manager()
    height = x.shape[dim]
    if height < manager.domain_parallel_size:
        raise UserError(
            f"shard_tensor: {height} rows can't be shared by {manager.domain_parallel_size} ranks. "
            f"Lower parallel.domain to {height} or less."
        )
    rows = manager.rows(height)
    return x.narrow(dim, rows.start, rows.stop - rows.start).contiguous()


def gather_tensor(x: Tensor, dim: int = -2, manager: DomainParallelManager | None = None) -> Tensor:
    """Return the whole globe on every rank, whatever the bands; reached by all ranks together.

    Differentiable: the cotangent of a band is the sum of all ranks' cotangents of its rows.

    Shapes:
        `(..., H_local, W)` -> `(..., H_global, W)` for `dim=-2`.
    """
    manager = manager or get_domain_parallel_manager()
    if manager.domain_parallel_size == 1:
        return x
    partition = manager.gathered_partition(x.shape[dim])
    whole = (Run(0, partition.height),)
    exchange = RowExchange(partition, (whole,) * partition.ranks, manager.domain_rank)
    return exchange.apply(x, manager.transport, dim if dim < 0 else dim - x.ndim)


def shard_batch(batch: Any, dim: int = -2, manager: DomainParallelManager | None = None) -> Any:
    """Return the batch with every field cut to this rank's band.

    A field is a tensor with at least three dimensions and more than one row. Mappings (which
    become dicts), lists and tuples are walked; anything else is returned as it is.
    """
    if isinstance(batch, Tensor):
        is_field = batch.ndim >= FIELD_DIMS and batch.shape[dim] > 1
        return shard_tensor(batch, dim, manager) if is_field else batch
    if isinstance(batch, Mapping):
        return {key: shard_batch(value, dim, manager) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(shard_batch(value, dim, manager) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(shard_batch(value, dim, manager) for value in batch)
    return batch
