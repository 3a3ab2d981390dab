"""Measures training steps: time, memory, and the bytes and messages sent between ranks."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor

from credit_dp.data.loader import Batch
from credit_dp.distributed.collectives import all_gather_tensor
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.process import DATA, profile_region


@final
class ThroughputMeter:
    """Measures the steps since `metrics` was last called.

    The time between `metrics` and the next batch is left out: validation and checkpoints are not
    part of a step.

    Args:
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(
        self, manager: DomainParallelManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.manager = manager
        self.clock = clock
        self._device = torch.device("cpu")
        self._steps = self._samples = self._bytes = self._messages = 0
        self._waited = 0.0
        self._start = clock()

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, and add the time that this rank waited for it."""
        if not self._steps:
            self._reset()
        start = self.clock()
        with profile_region(DATA):
            batch = next(batches)
        self._waited += self.clock() - start
        self._steps += 1
        self._samples += len(batch.times) * self.manager.dp_world_size
        self._device = batch.state.device
        return batch

    def metrics(self) -> dict[str, float]:
        """Return the measurements by name, per step; collective, the same on every rank.

        `seconds`: of a step, on the slowest rank. `wait_seconds`: for data, on the rank that waited
        longest. `samples_per_second`: of the global batch. `sent_bytes`, `sent_messages`: rows and
        tokens sent between the bands of all globes, and members between ranks that share them, as
        `credit-dp plan` counts them; reductions and messages between replicas or stages are not
        included. `peak_memory_bytes`: since the process
        started, on the rank with the most.
        """
        sent_bytes, sent_messages = self._sent()
        steps = max(self._steps, 1)
        own = (
            self._waited / steps,
            self.clock() - self._start,
            peak_memory(self._device),
            sent_bytes - self._bytes,
            sent_messages - self._messages,
        )
        found = self._gather(torch.tensor(own, dtype=torch.float64))
        waited, seconds, memory = found[:, :3].amax(0).tolist()
        sent, messages = (found[:, 3:].sum(0) / steps).tolist()
        samples, self._steps = self._samples, 0
        return {
            "seconds": seconds / steps,
            "wait_seconds": waited,
            "samples_per_second": samples / max(seconds, 1e-9),
            "sent_bytes": sent,
            "sent_messages": messages,
            "peak_memory_bytes": memory,
        }

    def _reset(self) -> None:
        self._start = self.clock()
        self._steps, self._samples, self._waited = 0, 0, 0.0
        self._bytes, self._messages = self._sent()

    def _sent(self) -> tuple[int, int]:
        manager = self.manager
        traffic = [manager.transport.traffic, manager.ensemble_transport.traffic]
        return sum(t.bytes for t in traffic), sum(t.messages for t in traffic)

    def _gather(self, own: Tensor) -> Tensor:
        """Return the numbers of all ranks: `(ranks, numbers)`."""
        if self.manager.mesh is None:
            return self.manager.transport.all_gather(own)
        return all_gather_tensor(own)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of one GPU, or of the host."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
