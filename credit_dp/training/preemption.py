"""Stops training on a signal: all ranks after the same step, with a checkpoint of that step."""

import contextlib
import signal
from pathlib import Path
from typing import Self, final

import torch
import torch.distributed as dist

from credit_dp.distributed.signals import handle_stop
from credit_dp.distributed.slurm import TimeLimit, job_time_limit
from credit_dp.domain_parallel import DomainParallelManager


@final
class Preemption:
    """Handles SIGTERM, SIGUSR1 and the end of a job's time.

    A SIGTERM that comes more than 2 seconds after the first ends the process.

    A signal may reach one rank only, or each rank during another step, so that ranks agree on it
    after every step. Entering the context is collective, and so is `stop_requested`.

    Args:
        manager: this rank's coordinates on the mesh.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.is_distributed = manager.mesh is not None
        self.is_rank_0 = manager.rank == 0
        # The signal that reached this rank; from the parent of local ranks always SIGUSR1.
        self.local_signal = 0
        self.agreed_signal = 0  # number of the signal that all ranks know of
        self.time_limit = TimeLimit(None)
        self.group: dist.ProcessGroup | None = None
        self.handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.is_distributed:
            # gloo: the flag stays in host memory, so that no rank waits for its GPU to read it.
            self.group = dist.new_group(backend="gloo")
        if self.is_rank_0:
            self.time_limit = job_time_limit()
        self.handlers.enter_context(handle_stop(self.record_signal))
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.handlers.close()
        if self.group is not None and error is None:  # after a failure others may never come
            dist.destroy_process_group(self.group)

    def record_signal(self, number: int) -> None:
        """Remember the number of a signal that reached this rank."""
        self.local_signal = number

    def stop_requested(self) -> bool:
        """Whether any rank has to stop; the same answer on every rank.

        Collective: every rank calls it after every step, and once more after the last checkpoint is
        written, and sends eight bytes.
        """
        time_is_up = not self.local_signal and self.time_limit.reached()
        number = torch.tensor(int(signal.SIGUSR1) if time_is_up else self.local_signal)
        if self.group is not None:
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        self.agreed_signal = int(number)
        return self.agreed_signal > 0

    def stop_message(self, step: int, checkpoint: Path) -> str:
        """Return one line on why training stopped, and how to resume it."""
        time_is_up = not self.local_signal and self.time_limit.reached()
        name = "the job's time is over" if time_is_up else signal.Signals(self.agreed_signal).name
        return (
            f"{name}: stopped after step {step}, which is saved in {checkpoint}; the same command "
            "with resume=auto continues from there"
        )
