"""What steps take and send: time, memory, bytes and messages."""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.data.loader import Batch
from credit_dp.domain_parallel import DomainParallelManager


@final
class ThroughputMeter:
    """Of the steps since the numbers were last asked for; what is done between is left out.

    Args:
        manager: this rank's place in the mesh.
        clock: seconds since any moment.
    """

    def __init__(
        self, manager: DomainParallelManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.manager = manager
        self.clock = clock
        self._device = torch.device("cpu")
        self._steps = self._samples = self._bytes = self._messages = 0
        self._waited = self._began = 0.0

    def timed_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Hand the batches on, and note how long they are waited for."""
        source = iter(batches)
        while True:
            asked = self.clock()
            if not self._steps:
                self._begin()
            batch = next(source, None)
            if batch is None:
                return
            self._waited += self.clock() - asked
            self._steps += 1
            self._samples += len(batch.times) * self.manager.dp_world_size
            self._device = batch.state.device
            yield batch

    def metrics(self) -> dict[str, float]:
        """By name, per step; collective over all ranks, which all get the same.

        `wait_seconds`: for data, of the rank that waited longest. `samples_per_second`: of the
        global batch. `sent_bytes`, `sent_messages`: between the bands of all globes, rows and
        tokens as `credit-dp plan` counts them; reductions and what goes between replicas or stages
        is not in them. `peak_memory_bytes`: since the process started, of the rank with the most.
        """
        traffic = self.manager.transport.traffic
        steps = max(self._steps, 1)
        own = (
            self._waited / steps,
            self.clock() - self._began,
            peak_memory(self._device),
            traffic.bytes - self._bytes,
            traffic.messages - self._messages,
        )
        found = self._gather(torch.tensor(own, dtype=torch.float64))
        waited, seconds, memory = found[:, :3].amax(0).tolist()
        sent, messages = (found[:, 3:].sum(0) / steps).tolist()
        samples, self._steps = self._samples, 0
        return {
            "wait_seconds": waited,
            "samples_per_second": samples / max(seconds, 1e-9),
            "sent_bytes": sent,
            "sent_messages": messages,
            "peak_memory_bytes": memory,
        }

    def _begin(self) -> None:
        traffic = self.manager.transport.traffic
        self._began = self.clock()
        self._steps, self._samples, self._waited = 0, 0, 0.0
        self._bytes, self._messages = traffic.bytes, traffic.messages

    def _gather(self, own: Tensor) -> Tensor:
        """All ranks' numbers: `(ranks, numbers)`."""
        mesh = self.manager.mesh
        if mesh is None:
            return self.manager.transport.all_gather(own)
        own = own.to(mesh.device_type)
        found = [torch.empty_like(own) for _ in range(self.manager.world_size)]
        dist.all_gather(found, own)
        return torch.stack(found).cpu()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held at once: of one GPU, or of the machine."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
