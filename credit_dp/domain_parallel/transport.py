"""How ranks of one domain exchange bytes: over a process group, between threads, or not at all.
Threads in which gloo waits for messages, and their place among those that compute."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.errors import UserError
from credit_dp.profiling import EXCHANGE, profile_region, profiled_call

if TYPE_CHECKING:
    from credit_dp.domain_parallel.exchange import RowExchange


# (rank within the domain, contiguous tensor to send or to fill)
PeerTensor = tuple[int, Tensor]


@dataclass
class Traffic:
    """What this rank has sent; a collective counts its payload once."""

    messages: int = 0
    bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0


class Transport(ABC):
    """Point-to-point messages and small reductions within one domain group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()

    def announce_exchange(self, exchange: RowExchange, row_bytes: int, back: bool) -> None:  # noqa: B027
        """Hear what all ranks are about to exchange; of use to one that only counts."""

    def announce_sizes(self, sizes: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Hear how many bytes each rank is about to send to each; no parcel where it is none."""

    def start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        """Begin an exchange; the result waits until `receive` is filled and `send` is free."""
        self.traffic.messages += len(send)
        self.traffic.bytes += sum(t.numel() * t.element_size() for _, t in send)
        with profile_region(EXCHANGE):
            return profiled_call(EXCHANGE, self._start(send, receive))

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, stacked along a new first dimension in rank order."""
        self._count_collective(x)
        with profile_region(EXCHANGE):
            return self._all_gather(x.contiguous())

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, the same bits on all ranks."""
        self._count_collective(x)
        with profile_region(EXCHANGE):
            return self._sum(x)

    def _count_collective(self, x: Tensor) -> None:
        self.traffic.collectives += 1
        self.traffic.collective_bytes += x.numel() * x.element_size()

    @abstractmethod
    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor: ...

    def _sum(self, x: Tensor) -> Tensor:
        return self._all_gather(x.contiguous()).sum(0)


@final
class SingleRankTransport(Transport):
    """One rank that owns the whole globe: nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        return lambda: None

    def _all_gather(self, x: Tensor) -> Tensor:
        return x[None]


@final
class DetachedTransport(Transport):
    """What a manager from another process has: nobody to talk to."""

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        raise self._error()

    def _all_gather(self, x: Tensor) -> Tensor:
        raise self._error()

    def _error(self) -> UserError:
        return UserError(
            f"DomainParallelManager: rank {self.rank} of {self.size} was unpickled and has no "
            "other ranks to talk to. Convert the model again with a manager of this process, after "
            "convert_from_domain_parallel."
        )


@final
class GroupTransport(Transport):
    """Messages over a `torch.distributed` process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        # Point-to-point peers are global ranks, whatever the group.
        self._global_ranks = dist.get_process_group_ranks(group)

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        transfers = [
            dist.P2POp(action, tensor, self._global_ranks[peer], self.group)
            for action, parcels in ((dist.isend, send), (dist.irecv, receive))
            for peer, tensor in parcels
        ]
        works = dist.batch_isend_irecv(transfers) if transfers else []

        def finish() -> None:
            for work in works:
                work.wait()
            transfers.clear()  # they kept alive what is sent

        return finish

    def _all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind(0)), x, group=self.group)
        return gathered

    def _sum(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total


@final
class ThreadWorld:
    """The mailboxes that the ranks of one process, a thread each, share.

    Args:
        size: number of ranks.
        timeout: seconds that a rank waits for a message before it raises `TimeoutError`.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self._mailboxes: dict[tuple[int, int], queue.SimpleQueue[Tensor | None]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }
        self.failed = threading.Event()

    def send(self, sender: int, receiver: int, message: Tensor) -> None:
        """Leave a message; the sender may change its tensor afterwards."""
        self._mailboxes[sender, receiver].put(message.detach().clone())

    def receive(self, sender: int, receiver: int) -> Tensor:
        """Wait for the next message of one sender.

        Raises:
            TimeoutError: none came.
            ConnectionError: another rank failed.
        """
        if self.failed.is_set():
            raise ConnectionError(f"rank {receiver}: another rank failed")
        try:
            message = self._mailboxes[sender, receiver].get(timeout=self.timeout)
        except queue.Empty:
            raise TimeoutError(f"rank {receiver} waits for a message of rank {sender}") from None
        if message is None:
            raise ConnectionError(f"rank {receiver}: another rank failed")
        return message

    def fail(self) -> None:
        """Wake every waiting rank with an error."""
        self.failed.set()
        for box in self._mailboxes.values():
            box.put(None)


@final
class ThreadTransport(Transport):
    """Messages between threads of one process."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(rank, world.size)
        self.world = world

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        for peer, tensor in send:
            self.world.send(self.rank, peer, tensor)

        def finish() -> None:
            for peer, tensor in receive:
                message = self.world.receive(peer, self.rank)
                if message.shape != tensor.shape:
                    raise ConnectionError(
                        f"rank {self.rank} expects {tuple(tensor.shape)} of rank {peer}, "
                        f"which sends {tuple(message.shape)}"
                    )
                tensor.copy_(message)

        return finish

    def _all_gather(self, x: Tensor) -> Tensor:
        others = [r for r in range(self.size) if r != self.rank]
        for peer in others:
            self.world.send(self.rank, peer, x)
        parts = {peer: self.world.receive(peer, self.rank) for peer in others}
        parts[self.rank] = x.detach()
        return torch.stack([parts[r] for r in range(self.size)])


TASK_FOLDER = Path("/proc/self/task")
NAME = "gloo_tcp_loop"


def use_batch_scheduling_for_gloo() -> None:
    """Keep those of this process from interrupting a thread that computes or sends; on Linux.

    Such a thread tries again and again for a lock that is held while a message is sent. If it
    interrupts the sender, for a message that comes in meanwhile, it keeps the core for a time slice
    in vain, which is many times what the message takes.

    Source: gloo's `Pair::handleEvents` (gloo/transport/tcp/pair.cc).
    """
    if not TASK_FOLDER.exists():
        return
    for task in TASK_FOLDER.iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == NAME:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
