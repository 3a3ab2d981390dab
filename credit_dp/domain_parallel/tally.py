"""Counting what every rank would send, on one rank and without sending anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange, Run
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import Parcel, Transport
from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class Sent:
    """What one rank sends; a collective counts its payload once."""

    messages: int = 0
    bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.collectives + other.collectives,
            self.collective_bytes + other.collective_bytes,
        )

    def __sub__(self, other: Sent) -> Sent:
        return Sent(
            self.messages - other.messages,
            self.bytes - other.bytes,
            self.collectives - other.collectives,
            self.collective_bytes - other.collective_bytes,
        )


@final
class Tally(Transport):
    """Sends nothing, and counts what every rank would send: exchanges know all ranks' needs.

    Args:
        rank: whose step is run.
        size: number of ranks.
        partitions: the plan's, for layers that ask for the row counts of all ranks.
    """

    def __init__(self, rank: int, size: int, partitions: Sequence[RowPartition] = ()) -> None:
        super().__init__(rank, size)
        self.partitions = partitions
        self._moved = [[0, 0] for _ in range(size)]

    def announce(self, exchange: RowExchange, row_bytes: int, back: bool) -> None:
        """Count every rank's messages of an exchange, or of its way back."""
        for receiver, routes in enumerate(routes_of(exchange.partition, exchange.needs)):
            for owner, rows in routes:
                moved = self._moved[receiver if back else owner]
                moved[0] += 1
                moved[1] += rows * row_bytes

    def announce_parcels(self, sizes: Sequence[Sequence[int]]) -> None:
        """Count every rank's parcels."""
        for moved, parcels in zip(self._moved, sizes, strict=True):
            moved[0] += sum(size > 0 for size in parcels)
            moved[1] += sum(parcels)

    @property
    def sent(self) -> tuple[Sent, ...]:
        """What each rank has sent; all reach the same collectives."""
        together = (self.traffic.collectives, self.traffic.collective_bytes)
        return tuple(Sent(messages, size, *together) for messages, size in self._moved)

    def _start(self, send: Sequence[Parcel], receive: Sequence[Parcel]) -> Any:
        return lambda: None

    def _gather(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x.new_empty((self.size, *x.shape))
        alike = [p for p in self.partitions if p.sizes[self.rank] == x.item()]
        if not alike:
            raise UserError(
                f"a layer asks for all bands of a field with {x.item()} rows on rank {self.rank}, "
                "which the plan has not seen: what is sent can't be counted."
            )
        return torch.tensor(max(alike, key=lambda p: p.height).sizes)

    def _sum(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


@cache
def routes_of(
    partition: RowPartition, needs: tuple[tuple[Run, ...], ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every rank, from whom it gets how many rows."""
    return tuple(
        tuple((route.peer, route.length) for route in RowExchange(partition, needs, rank).receives)
        for rank in range(partition.ranks)
    )
