"""What every domain-parallel layer is: a wrapper that keeps names and knows its bands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import RowExchange, Run
from credit_dp.domain_parallel.halo_exchange import HaloExchange
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.planner import active_planner
from credit_dp.errors import UserError

# Shared with the wrapped module by identity: conversion then keeps the names in state_dict() and
# named_parameters(), and assignment, casting, copying and hooks reach both.
SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Bands(NamedTuple):
    """A layer's input and output partitions for one global height."""

    taken: RowPartition
    made: RowPartition


class RowLayer(nn.Module, ABC):
    """A layer whose output rows depend on rows of other bands.

    Args:
        wrapped: the layer to shard; it keeps its parameters.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
        halo_width: rows that a band's edge reaches over, for the record.
        ndim: dimensions of the input.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        shard_dim: int,
        manager: DomainParallelManager | None,
        *,
        halo_width: int = 0,
        ndim: int = 4,
    ) -> None:
        super().__init__()
        for name in SHARED:
            self.__dict__[name] = wrapped.__dict__[name]
        self._is_full_backward_hook = wrapped._is_full_backward_hook
        self.training = wrapped.training
        self.shard_dim = shard_dim
        self.dim = shard_dim if shard_dim < 0 else shard_dim - ndim
        if self.dim != ROW_DIM:
            raise UserError(
                f"{type(self).__name__}: only latitude rows, the last dimension but one, can be "
                f"sharded, got shard_dim={shard_dim}. Use shard_dim=-2."
            )
        # Neither may become a child: the names of parameters would change.
        self.__dict__["wrapped"] = wrapped
        self.__dict__["halo_exchange"] = HaloExchange(halo_width, self.dim, manager=manager)
        self._planned: dict[int, int] = {}
        self._exchanges: dict[Bands, RowExchange] = {}

    @property
    def manager(self) -> DomainParallelManager:
        """The manager given, or the module-level one."""
        exchange: HaloExchange = self.__dict__["halo_exchange"]
        return exchange.manager

    def adopt_manager(self, manager: DomainParallelManager) -> None:
        """Use this manager unless one was given."""
        halo: HaloExchange = self.__dict__["halo_exchange"]
        halo.adopt_manager(manager)

    def train(self, mode: bool = True) -> RowLayer:
        """Set the mode of this layer and of the one it wraps."""
        self.__dict__["wrapped"].train(mode)
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        """Describe the layer as the wrapped one does."""
        return str(self.__dict__["wrapped"].extra_repr())

    def set_heights(self, planned: dict[int, int]) -> None:
        """Adopt the global heights of the plan: input height -> output height."""
        self._planned = planned
        self._exchanges = {}

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return this rank's rows of what the wrapped layer makes of the whole globe."""
        planner = active_planner()
        if planner is not None:
            return planner.visit(self, x, *others)
        return self.compute(x, self.bands(x, *others))

    def bands(self, x: Tensor, *others: Tensor) -> Bands:
        """Return the partitions of this input: from the plan, else gathered from all ranks."""
        rows = x.shape[self.dim]
        table, rank = self.manager.bands, self.manager.domain_rank
        if self._planned:
            for height, out_height in self._planned.items():
                if table[height].sizes[rank] == rows:
                    return Bands(table[height], table[out_height])
            expected = {h: table[h].sizes[rank] for h in self._planned}
            raise UserError(
                f"{type(self).__name__}: rank {rank} got {rows} rows, the plan has "
                f"{expected} (globe: band). Convert with the input_shape that is used."
            )
        taken = table.adopt(self.manager.gathered_partition(rows))
        made = table.follow(self.out_height(taken.height, *others), taken)
        if min(taken.sizes + made.sizes) < 1:
            raise UserError(
                f"{type(self).__name__}: every rank needs a row, the bands are {taken.sizes} going "
                f"in and {made.sizes} coming out. Lower parallel.domain or cut with shard_tensor."
            )
        return Bands(taken, made)

    def fetch(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the input rows that this rank's output rows need, poles included."""
        exchange = self._exchanges.get(bands)
        if exchange is None:
            needs = tuple(
                self.needs(bands.made.rows(r), bands.taken.height) for r in range(bands.made.ranks)
            )
            exchange = RowExchange(bands.taken, needs, self.manager.domain_rank)
            self._exchanges[bands] = exchange
        halo: HaloExchange = self.__dict__["halo_exchange"]
        return halo.fetch(x, exchange)

    @abstractmethod
    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global rows that come out of `height` global rows."""

    @abstractmethod
    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the input rows that the output rows `out` are made of."""

    @abstractmethod
    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""

    def __getattr__(self, name: str) -> Any:
        # What the wrapped layer has (kernel_size, num_groups, eps, ...) is read from it.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how Python copies and compares is the wrapper's own
                raise
            return getattr(self.__dict__["wrapped"], name)
