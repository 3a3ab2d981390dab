"""A transport that counts the messages of all ranks, without sending anything.

One rank's step on tensors without data is enough: a `RowExchange` holds the rows that all ranks
need, so that the transport of one rank knows the messages of all (`received_row_counts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, sub
from typing import NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import row_bytes
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import PeerTensor, Transport
from credit_dp.errors import UserError
from credit_dp.torch_private import FakeTensor


@final
@dataclass(frozen=True)
class RankTraffic:
    """The messages and bytes that one rank sends; a collective counts its payload once."""

    messages: int = 0
    bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0

    def __add__(self, other: RankTraffic) -> RankTraffic:
        return RankTraffic(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: RankTraffic) -> RankTraffic:
        return RankTraffic(*map(sub, vars(self).values(), vars(other).values()))


class MessageSize(NamedTuple):
    """The bytes of one message from a rank of a domain to another one."""

    sender: int
    receiver: int
    bytes: int


@final
class CountingTransport(Transport):
    """Counts the messages that all ranks would send, and sends nothing.

    Args:
        partitions: the plan's bands, from which gathered numbers of rows are looked up.

    Attributes:
        exchanges: the messages that are under way at the same time -> number of such exchanges.
        row_bytes: the bands of what is exchanged -> bytes of rows that all ranks send.
    """

    def __init__(self, rank: int, size: int, partitions: Sequence[RowPartition] = ()) -> None:
        super().__init__(rank, size)
        self.partitions = partitions
        self.exchanges: Counter[tuple[MessageSize, ...]] = Counter()
        self.row_bytes: Counter[RowPartition] = Counter()

    def announce_exchange(self, exchange: RowExchange, x: Tensor, dim: int, backward: bool) -> None:
        """Count the messages of all ranks in an exchange, or in its backward pass."""
        messages = []
        size = row_bytes(x, dim)
        received = received_row_counts(exchange.partition, exchange.required_rows)
        for receiver, row_counts in enumerate(received):
            for owner, rows in row_counts:
                # In the backward pass gradients travel from the receiver to the owner.
                ends = (receiver, owner) if backward else (owner, receiver)
                messages.append(MessageSize(*ends, rows * size))
        self._count(messages)
        if messages:
            self.row_bytes[exchange.partition] += sum(m.bytes for m in messages)

    def announce_sizes(
        self, sizes: Sequence[Sequence[int]], partition: RowPartition | None = None
    ) -> None:
        """Count the messages of all ranks, given their bytes."""
        messages = [
            MessageSize(sender, receiver, size)
            for sender, sizes_by_receiver in enumerate(sizes)
            for receiver, size in enumerate(sizes_by_receiver)
            if size > 0 and sender != receiver
        ]
        self._count(messages)
        if messages and partition is not None:
            self.row_bytes[partition] += sum(m.bytes for m in messages)

    def _count(self, messages: Sequence[MessageSize]) -> None:
        if messages:
            self.exchanges[tuple(messages)] += 1

    @property
    def sent(self) -> tuple[RankTraffic, ...]:
        """Return what each rank has sent so far."""
        numbers = [0] * self.size
        sizes = [0] * self.size
        for messages, times in self.exchanges.items():
            for message in messages:
                numbers[message.sender] += times
                sizes[message.sender] += times * message.bytes
        # Collectives are counted for the rank that runs: all ranks call the same ones.
        collectives = (self.traffic.collectives, self.traffic.collective_bytes)
        return tuple(
            RankTraffic(number, size, *collectives)
            for number, size in zip(numbers, sizes, strict=True)
        )

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        return lambda: None

    def _all_gather(self, x: Tensor) -> Tensor:
        if x.is_meta or isinstance(x, FakeTensor):
            return x.new_empty((self.size, *x.shape))
        if x.ndim:  # the state of random numbers: any other rank's would do
            return x.expand(self.size, *x.shape)
        # A tensor with a value is the number of rows of a band: the plan has those of other ranks.
        # Of several heights with such a band the finest is taken.
        matches = [p for p in self.partitions if p.sizes[self.rank] == x.item()]
        if not matches:
            raise UserError(
                f"a layer gathers the bands of a field with {x.item()} rows on rank {self.rank}, "
                "but the plan has no such band, so the messages can't be counted."
            )
        return torch.tensor(max(matches, key=lambda p: p.height).sizes)

    def _all_reduce(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


@cache
def received_row_counts(
    partition: RowPartition, required_rows: tuple[tuple[RowRange, ...], ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for every rank the senders of its messages and their numbers of rows."""
    exchanges = (RowExchange(partition, required_rows, rank) for rank in range(partition.ranks))
    return tuple(
        tuple((message.peer, message.length) for message in exchange.receives)
        for exchange in exchanges
    )
