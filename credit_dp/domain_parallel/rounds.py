"""Noting who sends what to whom in each exchange of a step, without sending anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor

from credit_dp.domain_parallel.exchange import RowExchange
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.tally import Tally, routes_of
from credit_dp.domain_parallel.transport import Parcel, Transport


class Message(NamedTuple):
    """Bytes from one rank of a domain to another one."""

    sender: int
    receiver: int
    bytes: int


@final
class Rounds(Transport):
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
        self.exchanges: Counter[tuple[Message, ...]] = Counter()
        self.collectives: Counter[int] = Counter()
        self._answers = Tally(rank, size, partitions)

    def announce(self, exchange: RowExchange, row_bytes: int, back: bool) -> None:
        """Note every rank's messages of an exchange, or of its way back."""
        messages = []
        for receiver, routes in enumerate(routes_of(exchange.partition, exchange.needs)):
            for owner, rows in routes:
                way = (receiver, owner) if back else (owner, receiver)
                messages.append(Message(*way, rows * row_bytes))
        self._note(messages)

    def announce_parcels(self, sizes: Sequence[Sequence[int]]) -> None:
        """Note every rank's parcels."""
        self._note(
            [
                Message(sender, receiver, size)
                for sender, parcels in enumerate(sizes)
                for receiver, size in enumerate(parcels)
                if size > 0 and sender != receiver
            ]
        )

    def _note(self, messages: Sequence[Message]) -> None:
        if messages:
            self.exchanges[tuple(messages)] += 1

    def _start(self, send: Sequence[Parcel], receive: Sequence[Parcel]) -> Callable[[], None]:
        return lambda: None

    def _gather(self, x: Tensor) -> Any:
        self.collectives[(self.size - 1) * x.nbytes] += 1
        return self._answers.gather(x)

    def _sum(self, x: Tensor) -> Tensor:
        self.collectives[2 * (self.size - 1) * x.nbytes // self.size] += 1
        return self._answers.sum(x)
