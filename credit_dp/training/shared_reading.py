"""Decides whether the ranks of a domain share the reading of a store, and connects them for it.

If chunks span the bands of several ranks, each chunk is decoded once and its bands are sent; see
`data.sources.shared`. Messages go through a gloo group of the reading threads.
"""

import logging
import time
from collections.abc import Sequence
from threading import Event
from typing import final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.bands import unshared_amplification
from credit_dp.data.channels import Channel
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.shared import SHARING_THRESHOLD, ExchangeStoppedError
from credit_dp.data.store import Store
from credit_dp.distributed.process_groups import new_background_group
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import all_gather_single

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 1000  # longer error messages are cut
# Seconds between two tests whether a collective is done.
MIN_POLL_SECONDS = 0.0002
MAX_POLL_SECONDS = 0.005


def build_chunk_exchange(
    store: Store, manager: DomainParallelManager
) -> "GroupChunkExchange | None":
    """Return the exchange by which this rank's domain shares reading; None if that saves nothing.

    The decision depends only on the chunks of the store and the bands of all ranks, so that it is
    the same on all ranks. Collective: all ranks of the mesh call it. Rank 0 logs what reading
    without sharing would cost, and how to avoid both, which the run shows as a note.
    """
    bounds = manager.partition(store.grid[0]).bounds
    if manager.domain_group is None or manager.domain_world_size == 1:
        return None
    forcings = (Channel(name) for name in store.channels.forcing if name not in COMPUTED_FORCINGS)
    stored = (*store.channels.output_channels, *forcings)
    chunk_rows = (store.source.chunk_shape(channel)[2] for channel in stored)
    excess = [unshared_amplification(store.grid[0], rows, bounds) for rows in chunk_rows]
    if max(excess) <= SHARING_THRESHOLD:
        return None
    ranks = manager.domain_world_size
    # Of the quickstart, whose small fields are whole chunks, nobody needs a faster copy.
    if manager.rank == 0 and store.config.name != "quickstart":
        logger.info(
            "chunks span the bands of several ranks, which share the reading: band by band they "
            "would decode %.1f times the fields. For the fastest reading: "
            "credit-dp data prepare store=%s 'domains=[%d]' out=NEW",
            *(sum(excess) / len(excess), store.source.where, ranks),
        )
    domains = torch.arange(manager.world_size).view(-1, ranks).tolist()
    return GroupChunkExchange(new_background_group(domains), bounds)


@final
class GroupChunkExchange:
    """A `ChunkExchange` over a process group, for one thread at a time.

    It polls instead of waiting inside the back end, so that `stop` can end a thread that waits for
    a rank that is gone.
    """

    def __init__(self, group: dist.ProcessGroup, bounds: Sequence[int]) -> None:
        self.rank = dist.get_rank(group)
        self.bounds = tuple(bounds)
        self._group = group
        self._stopped = Event()

    def gather_problems(self, problem: str) -> list[str]:
        """See `ChunkExchange`; long messages are cut."""
        text = problem.encode()[:MESSAGE_BYTES]
        # Gathered as bytes of a fixed size: gathering objects can't be polled.
        local = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        local[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        messages = local.new_empty((len(self.bounds) - 1, MESSAGE_BYTES))
        self._poll_until_done(all_gather_single(messages, local, group=self._group, async_op=True))
        return [_decode_text(message) for message in messages]

    def all_to_all(
        self, send: FieldArray, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[FieldArray]:
        """See `ChunkExchange`."""
        received = torch.empty(sum(receive_sizes), dtype=torch.float32)
        work = dist.all_to_all_single(
            received,
            torch.from_numpy(send),
            list(receive_sizes),
            list(send_sizes),
            group=self._group,
            async_op=True,
        )
        self._poll_until_done(work)
        return np.split(received.numpy(), np.cumsum(receive_sizes)[:-1])

    def stop(self) -> None:
        """See `ChunkExchange`."""
        self._stopped.set()

    def _poll_until_done(self, work: dist.Work | None) -> None:
        if work is None:
            return
        interval = MIN_POLL_SECONDS
        while not work.is_completed():
            if self._stopped.is_set():
                raise ExchangeStoppedError
            time.sleep(interval)
            interval = min(2 * interval, MAX_POLL_SECONDS)
        work.wait()  # raises an error of the collective


def _decode_text(message: Tensor) -> str:
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="ignore")
