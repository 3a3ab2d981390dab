"""Counts what every rank would send, and notes each message, without sending anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import PeerTensor, Transport
from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class RankTraffic:
    """What one rank sends; a collective counts its payload once."""

    messages: int = 0
    bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0

    def __add__(self, other: RankTraffic) -> RankTraffic:
        return RankTraffic(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.collectives + other.collectives,
            self.collective_bytes + other.collective_bytes,
        )

    def __sub__(self, other: RankTraffic) -> RankTraffic:
        return RankTraffic(
            self.messages - other.messages,
            self.bytes - other.bytes,
            self.collectives - other.collectives,
            self.collective_bytes - other.collective_bytes,
        )


@final
class CountingTransport(Transport):
    """Sends nothing, and counts what every rank would send: exchanges know all ranks' needs.

    Args:
        rank: whose step is run.
        size: number of ranks.
        partitions: the plan's, for layers that ask for the row counts of all ranks.
    """

    def __init__(self, rank: int, size: int, partitions: Sequence[RowPartition] = ()) -> None:
        super().__init__(rank, size)
        self.partitions = partitions
        self._sent_by_rank = [[0, 0] for _ in range(size)]

    def announce_exchange(self, exchange: RowExchange, row_bytes: int, back: bool) -> None:
        """Count every rank's messages of an exchange, or of its way back."""
        for receiver, routes in enumerate(
            received_row_counts(exchange.partition, exchange.required_rows)
        ):
            for owner, rows in routes:
                moved = self._sent_by_rank[receiver if back else owner]
                moved[0] += 1
                moved[1] += rows * row_bytes

    def announce_sizes(self, sizes: Sequence[Sequence[int]]) -> None:
        """Count every rank's parcels."""
        for moved, parcels in zip(self._sent_by_rank, sizes, strict=True):
            moved[0] += sum(size > 0 for size in parcels)
            moved[1] += sum(parcels)

    @property
    def sent(self) -> tuple[RankTraffic, ...]:
        """What each rank has sent; all reach the same collectives."""
        together = (self.traffic.collectives, self.traffic.collective_bytes)
        return tuple(
            RankTraffic(messages, size, *together) for messages, size in self._sent_by_rank
        )

    def _start(self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]) -> Any:
        return lambda: None

    def _all_gather(self, x: Tensor) -> Tensor:
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
def received_row_counts(
    partition: RowPartition, needs: tuple[tuple[RowRange, ...], ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every rank, from whom it gets how many rows."""
    return tuple(
        tuple((route.peer, route.length) for route in RowExchange(partition, needs, rank).receives)
        for rank in range(partition.ranks)
    )


class MessageSize(NamedTuple):
    """Bytes from one rank of a domain to another one."""

    sender: int
    receiver: int
    bytes: int


@final
class RecordingTransport(Transport):
    """Sends nothing, and notes the messages of all ranks that are under way at once.

    Args:
        rank: whose step is run.
        size: number of ranks.
        partitions: the plan's, for layers that ask for the row counts of all ranks.

    Attributes:
        exchanges: the messages of each exchange, and how often there was such a one.
        collectives: the bytes that each rank sends in one if it goes round in a ring, and how
            often.
    """

    def __init__(self, rank: int, size: int, partitions: Sequence[RowPartition] = ()) -> None:
        super().__init__(rank, size)
        self.exchanges: Counter[tuple[MessageSize, ...]] = Counter()
        self.collectives: Counter[int] = Counter()
        self._counting = CountingTransport(rank, size, partitions)

    def announce_exchange(self, exchange: RowExchange, row_bytes: int, back: bool) -> None:
        """Note every rank's messages of an exchange, or of its way back."""
        messages = []
        for receiver, routes in enumerate(
            received_row_counts(exchange.partition, exchange.required_rows)
        ):
            for owner, rows in routes:
                way = (receiver, owner) if back else (owner, receiver)
                messages.append(MessageSize(*way, rows * row_bytes))
        self._record(messages)

    def announce_sizes(self, sizes: Sequence[Sequence[int]]) -> None:
        """Note every rank's parcels."""
        self._record(
            [
                MessageSize(sender, receiver, size)
                for sender, parcels in enumerate(sizes)
                for receiver, size in enumerate(parcels)
                if size > 0 and sender != receiver
            ]
        )

    def _record(self, messages: Sequence[MessageSize]) -> None:
        if messages:
            self.exchanges[tuple(messages)] += 1

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        return lambda: None

    def _all_gather(self, x: Tensor) -> Any:
        self.collectives[(self.size - 1) * x.nbytes] += 1
        return self._counting.all_gather(x)

    def _sum(self, x: Tensor) -> Tensor:
        self.collectives[2 * (self.size - 1) * x.nbytes // self.size] += 1
        return self._counting.sum(x)
