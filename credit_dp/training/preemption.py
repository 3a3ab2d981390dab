"""Stopping when a signal asks for it: all ranks after the same step, with a checkpoint of it."""

import contextlib
import signal
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch
import torch.distributed as dist

from credit_dp.distributed.signals import TimeLimit, handle_stop, job_time_limit
from credit_dp.domain_parallel import DomainParallelManager


@final
class Preemption:
    """Heeds SIGTERM, SIGUSR1 and the end of a job; a second SIGTERM ends the process as ever.

    A signal may reach one rank only, or each of them in another step: they ask each other.
    Opening it is a collective of all ranks, and so is `asked`.

    Args:
        manager: this rank's place in the mesh.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.is_distributed = manager.mesh is not None
        self.is_rank_0 = manager.rank == 0
        self.local_signal = 0  # the signal that reached this rank
        self.agreed_signal = 0  # the one that all ranks know of
        self.time_limit = TimeLimit(None)
        self.group: dist.ProcessGroup | None = None
        self.handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.is_distributed:
            # In the host's memory, so that no rank waits for its GPU to know.
            self.group = dist.new_group(backend="gloo")
        if self.is_rank_0:
            self.time_limit = job_time_limit()
        self.handlers.enter_context(handle_stop(self.record_signal))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.handlers.close()
        if self.group is not None and error is None:  # after a failure others may never come
            dist.destroy_process_group(self.group)

    def record_signal(self, number: int) -> None:
        """Remember a signal that reached this rank."""
        self.local_signal = number

    def stop_requested(self) -> bool:
        """Whether any rank has been asked to stop; the same answer on every rank.

        Collective: every rank asks after every step, with eight bytes of each.
        """
        late = 0 if self.local_signal or not self.time_limit.reached() else int(signal.SIGUSR1)
        number = torch.tensor(self.local_signal or late)
        if self.group is not None:
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        self.agreed_signal = int(number)
        return self.agreed_signal > 0

    def stop_message(self, step: int, checkpoint: Path) -> str:
        """One line on why training has stopped, and how it goes on."""
        late = not self.local_signal and self.time_limit.reached()
        name = "the job's time is over" if late else signal.Signals(self.agreed_signal).name
        return (
            f"{name}: stopped after step {step}, which is saved in {checkpoint}; the same command "
            "with resume=auto goes on from there"
        )
