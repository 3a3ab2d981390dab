"""Stopping when a signal asks for it: all ranks after the same step, with a checkpoint of it."""

import contextlib
import signal
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch
import torch.distributed as dist

from credit_dp.distributed.signals import TimeLimit, heeding, time_limit
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
        self.together = manager.mesh is not None
        self.first = manager.rank == 0
        self.own = 0  # the signal that reached this rank
        self.number = 0  # the one that all ranks know of
        self.limit = TimeLimit(None)
        self.group: dist.ProcessGroup | None = None
        self.heeding = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.together:
            # In the host's memory, so that no rank waits for its GPU to know.
            self.group = dist.new_group(backend="gloo")
        if self.first:
            self.limit = time_limit()
        self.heeding.enter_context(heeding(self.note))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.heeding.close()
        if self.group is not None and error is None:  # after a failure others may never come
            dist.destroy_process_group(self.group)

    def note(self, number: int) -> None:
        """Remember a signal that reached this rank."""
        self.own = number

    def asked(self) -> bool:
        """Whether any rank has been asked to stop; the same answer on every rank.

        Collective: every rank asks after every step, with eight bytes of each.
        """
        late = 0 if self.own or not self.limit.reached() else int(signal.SIGUSR1)
        number = torch.tensor(self.own or late)
        if self.group is not None:
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        self.number = int(number)
        return self.number > 0

    def words(self, step: int, checkpoint: Path) -> str:
        """One line on why training has stopped, and how it goes on."""
        late = not self.own and self.limit.reached()
        name = "the job's time is over" if late else signal.Signals(self.number).name
        return (
            f"{name}: stopped after step {step}, which is saved in {checkpoint}; the same command "
            "with resume=auto goes on from there"
        )
