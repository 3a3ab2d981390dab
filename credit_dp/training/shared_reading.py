"""Whether the ranks of a domain share their reading, and how they meet for it."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Event
from typing import final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.data.channels import Channel
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.sources.base import Fields
from credit_dp.data.sources.shared import (
    SHARING_THRESHOLD,
    ExchangeStoppedError,
    unshared_amplification,
)
from credit_dp.data.store import Store
from credit_dp.domain_parallel import DomainParallelManager

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 1000  # bytes of a problem that others are told
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.0002, 0.005  # seconds between two looks at what is under way
# Ranks wait for each other as long as training does: through evaluations and checkpoints.
GROUP_TIMEOUT = timedelta(days=1)


def build_chunk_exchange(
    store: Store, manager: DomainParallelManager
) -> "GroupChunkExchange | None":
    """How this rank shares the reading of `store` with its domain; None where that saves nothing.

    Decided from the store's chunks and everybody's bands alone. Collective: every rank of the mesh
    calls it. Rank 0 says what reading without sharing would cost, and the remedy.
    """
    bounds = manager.partition(store.grid[0]).bounds
    if manager.domain_group is None or manager.domain_world_size == 1:
        return None
    forcings = (Channel(name) for name in store.channels.forcing if name not in COMPUTED_FORCINGS)
    stored = (*store.channels.output_channels, *forcings)
    excess = [_amplification(store, channel, bounds) for channel in stored]
    if max(excess) <= SHARING_THRESHOLD:
        return None
    ranks = manager.domain_world_size
    if manager.rank == 0:
        logger.warning(
            "%s: chunks span the bands of several ranks: reading band by band would decode %.1f "
            "times the fields. The %d ranks of a domain share the reading instead, and send each "
            "other bands. To spare them that: "
            "credit-dp data prepare store=%s 'domains=[%d]' out=NEW",
            *(store.source.where, sum(excess) / len(excess), ranks, store.source.where, ranks),
        )
    return GroupChunkExchange(_new_domain_group(manager), bounds)


def _amplification(store: Store, channel: Channel, bounds: Sequence[int]) -> float:
    return unshared_amplification(store.grid[0], store.source.chunk_shape(channel)[2], bounds)


def _new_domain_group(manager: DomainParallelManager) -> dist.ProcessGroup:
    """The domain's ranks once more, for the thread that reads: training uses the other group."""
    size = manager.domain_world_size
    own: dist.ProcessGroup | None = None
    for first in range(0, manager.world_size, size):
        members = list(range(first, first + size))
        group = dist.new_group(members, timeout=GROUP_TIMEOUT, backend="gloo")
        own = group if manager.rank in members else own
    if own is None:
        raise RuntimeError(f"rank {manager.rank} is in no domain")
    return own


@final
class GroupChunkExchange:
    """The ranks of a process group meet; see `ChunkExchange`. One thread at a time.

    Nobody waits inside the back end, so that a thread that waits for a rank that is gone can end.
    """

    def __init__(self, group: dist.ProcessGroup, bounds: Sequence[int]) -> None:
        self.rank = dist.get_rank(group)
        self.bounds = tuple(bounds)
        self._group = group
        self._stopped = Event()

    def gather_problems(self, problem: str) -> list[str]:
        """See `ChunkExchange`; what is long is cut."""
        text = problem.encode()[:MESSAGE_BYTES]
        own = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        told = [torch.empty_like(own) for _ in self.bounds[1:]]
        self._poll_until_done(dist.all_gather(told, own, group=self._group, async_op=True))
        return [_decode_text(found) for found in told]

    def all_to_all(
        self, parcels: Fields, sizes: Sequence[int], coming: Sequence[int]
    ) -> list[Fields]:
        """See `ChunkExchange`."""
        received = torch.empty(sum(coming), dtype=torch.float32)
        work = dist.all_to_all_single(
            received,
            torch.from_numpy(parcels),
            list(coming),
            list(sizes),
            group=self._group,
            async_op=True,
        )
        self._poll_until_done(work)
        return np.split(received.numpy(), np.cumsum(coming)[:-1])

    def stop(self) -> None:
        """See `ChunkExchange`."""
        self._stopped.set()

    def _poll_until_done(self, work: dist.Work) -> None:
        nap = MIN_POLL_SECONDS
        while not work.is_completed():
            if self._stopped.is_set():
                raise ExchangeStoppedError
            time.sleep(nap)
            nap = min(2 * nap, MAX_POLL_SECONDS)
        work.wait()  # for its error


def _decode_text(told: Tensor) -> str:
    return bytes(told.tolist()).rstrip(b"\0").decode(errors="ignore")
