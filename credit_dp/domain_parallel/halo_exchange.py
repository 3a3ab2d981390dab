"""Functions for users' code: halo rows of a band, and bands of global tensors and back.

`HaloExchange` is for code that pads by itself, `shard_tensor` and `shard_batch` return bands of
global fields, `gather_tensor` joins bands. Converted layers exchange their rows, and gradients in
backward, in `exchange.py`; `HaloExchange.fetch` only passes their `RowExchange` on to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import (
    RowExchange,
    RowRange,
    rows_with_poles,
    start_fetching,
)
from credit_dp.domain_parallel.manager import DomainParallelManager, default_manager
from credit_dp.domain_parallel.partition import FIELD_DIMS
from credit_dp.domain_parallel.planning.planner import active_planner
from credit_dp.errors import UserError


@final
class HaloExchange(nn.Module):
    """Adds `halo_width` rows of each neighbour to a band, and zeros beyond the poles.

    Args:
        halo_width: rows to add on each side.
        dim: the row dimension.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, W)` -> `(..., H_local + 2 * halo_width, W)` for `dim=-2`.

    Raises:
        UserError: a band has fewer rows than the halo; raised on all ranks.
    """

    def __init__(
        self, halo_width: int, dim: int = -2, *, manager: DomainParallelManager | None = None
    ) -> None:
        super().__init__()
        self.halo_width = halo_width
        self.dim = dim
        self._manager = manager

    @property
    def manager(self) -> DomainParallelManager:
        """Return the given manager, or the default one."""
        if self._manager is not None:
            return self._manager
        manager = default_manager()
        if manager.world_size > 1:  # else a manager of several ranks may be initialised later
            self._manager = manager
        return manager

    def adopt_manager(self, manager: DomainParallelManager) -> None:
        """Use this manager if none was given."""
        self._manager = self._manager or manager

    def forward(self, x: Tensor) -> Tensor:
        """Return the band with its halos, after gathering every rank's number of rows."""
        if active_planner() is not None:  # planning needs the shape only, and must not send
            return F.pad(x.movedim(self.dim, -1), (self.halo_width,) * 2).movedim(-1, self.dim)
        return self.fetch(x, _halo_row_exchange(x.shape[self.dim], self.halo_width, self.manager))

    def fetch(self, x: Tensor, exchange: RowExchange) -> Tensor:
        """Return the rows that this rank needs according to `exchange`."""
        dim = self.dim if self.dim < 0 else self.dim - x.ndim
        return exchange.apply(x, self.manager.transport, dim)

    @staticmethod
    def trim(x: Tensor, halo_before: int, halo_after: int, dim: int = -2) -> Tensor:
        """Return `x` without its first `halo_before` and last `halo_after` rows."""
        return x.narrow(dim, halo_before, x.shape[dim] - halo_before - halo_after)


def _halo_row_exchange(rows: int, width: int, manager: DomainParallelManager) -> RowExchange:
    """Return the exchange for a band of `rows` rows; a collective."""
    partition = manager.gather_partition(rows)
    # All ranks see all sizes, so that they raise together and none waits for another's rows.
    if partition.ranks > 1 and min(partition.sizes) < width:
        raise UserError(
            f"HaloExchange: halo_width {width} needs as many rows in every band, but "
            f"the bands have {partition.sizes}. Lower halo_width or parallel.domain."
        )
    bounds = partition.bounds
    required_rows = tuple(
        rows_with_poles(bounds[r] - width, bounds[r + 1] + width, partition.height, "zeros")
        for r in range(partition.ranks)
    )
    return RowExchange(partition, required_rows, manager.domain_rank)


@final
class _HaloExchangeFunction(torch.autograd.Function):
    """`HaloExchange` as a function, for code that calls `apply(x, halo_width, dim, manager)`.

    Compatibility: nothing in this package calls it. The exchanges of converted layers are in
    `credit_dp.domain_parallel.exchange`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, halo_width: int, dim: int, manager: DomainParallelManager
    ) -> Tensor:
        ctx.dim = dim % x.ndim - x.ndim  # negative, as exchanges need it
        ctx.transport = manager.transport
        ctx.exchange = _halo_row_exchange(x.shape[dim], halo_width, manager)
        return start_fetching(x, ctx.exchange, ctx.transport, ctx.dim)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        return ctx.exchange.add_to_owners(grad, ctx.transport, ctx.dim), None, None, None


def shard_tensor(x: Tensor, dim: int = -2, manager: DomainParallelManager | None = None) -> Tensor:
    """Return this rank's band of a tensor that every rank holds completely; on one rank, itself.

    Shapes:
        `(..., H_global, W)` -> `(..., H_local, W)` for `dim=-2`.

    Raises:
        UserError: fewer rows than ranks.
    """
    manager = manager or default_manager()
    if manager.domain_parallel_size == 1:
        return x
    height = x.shape[dim]
    if height < manager.domain_parallel_size:
        raise UserError(
            f"shard_tensor: {height} rows can't be shared by {manager.domain_parallel_size} ranks. "
            f"Lower parallel.domain to {height} or less."
        )
    rows = manager.rows(height)
    return x.narrow(dim, rows.start, rows.stop - rows.start).contiguous()


def gather_tensor(x: Tensor, dim: int = -2, manager: DomainParallelManager | None = None) -> Tensor:
    """Return the global tensor on every rank, from any bands; called by all ranks together.

    Differentiable: the gradient of a band is the sum of all ranks' gradients of its rows.

    Shapes:
        `(..., H_local, W)` -> `(..., H_global, W)` for `dim=-2`.
    """
    manager = manager or default_manager()
    if manager.domain_parallel_size == 1:
        return x
    # The bands need not be those of the plan: ask all ranks.
    partition = manager.gather_partition(x.shape[dim])
    global_rows = (RowRange(0, partition.height),)
    exchange = RowExchange(partition, (global_rows,) * partition.ranks, manager.domain_rank)
    return exchange.apply(x, manager.transport, dim if dim < 0 else dim - x.ndim)


def shard_batch(batch: Any, dim: int = -2, manager: DomainParallelManager | None = None) -> Any:
    """Return the batch with this rank's band of every field.

    A field is a tensor with at least three dimensions and more than one row. Fields are found in
    mappings (which become dicts), lists and tuples; anything else is returned unchanged.
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
