"""Stops training on a signal: all ranks after the same step, with a checkpoint of that step.

A signal may reach one rank only, or each rank during another step. Ranks agree on it within the
message by which every step checks its loss (`training.non_finite`), so that it costs no message of
its own: a rank puts `signal_marks` into that message, and `agreed_signal` reads the sum.
"""

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.distributed.signals import STOP_SIGNALS, handle_stop, signal_name
from credit_dp.distributed.slurm import TimeLimit, job_time_limit
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import message_device


def signal_marks(number: int, like: Tensor) -> Tensor:
    """Return a 1 for the signal that reached this rank, and zeros for all other stop signals.

    Args:
        number: of the signal; 0: none.
        like: has the device and dtype.

    Shapes:
        -> `(stop signals,)`.
    """
    marks = like.new_zeros(len(STOP_SIGNALS))
    if number:
        marks[STOP_SIGNALS.index(signal.Signals(number))] = 1
    return marks


def agreed_signal(marks: Sequence[float]) -> int:
    """Return the largest signal that is marked in the sum of all ranks' marks; 0: none."""
    return max(
        (int(number) for number, mark in zip(STOP_SIGNALS, marks, strict=True) if mark), default=0
    )


@final
class Preemption:
    """Handles SIGTERM, SIGUSR1, SIGHUP and the end of a job's time.

    A SIGTERM that comes more than 2 seconds after the first ends the process.

    Args:
        manager: this rank's coordinates on the mesh.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.is_distributed = manager.mesh is not None
        self.is_rank_0 = manager.rank == 0
        # The signal that reached this rank; from the parent of local ranks always SIGUSR1.
        self.local_signal = 0
        self.time_limit = TimeLimit(None)
        self.handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.is_rank_0:
            self.time_limit = job_time_limit()
        self.handlers.enter_context(handle_stop(self.record_signal))
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.handlers.close()

    def record_signal(self, number: int) -> None:
        """Remember the number of a signal that reached this rank."""
        self.local_signal = number

    def pending_signal(self) -> int:
        """Return the signal for which this rank has to stop, or 0; not collective.

        The end of the job's time, which rank 0 watches, counts as SIGUSR1.
        """
        if not self.local_signal and self.time_limit.reached():
            return int(signal.SIGUSR1)
        return self.local_signal

    def agree_on_signal(self) -> int:
        """Return the signal for which all ranks have to stop, or 0; the same on every rank.

        Collective. For use outside of the steps, whose check agrees on it as well.
        """
        device = message_device() if self.is_distributed else torch.device("cpu")
        marks = signal_marks(self.pending_signal(), torch.zeros(0, device=device))
        if self.is_distributed:
            dist.all_reduce(marks)
        return agreed_signal(marks.tolist())

    def stop_message(self, number: int, step: int, checkpoint: Path, keys: str) -> str:
        """Return one line on why training stopped, and how to resume it.

        Args:
            number: the signal that all ranks agreed on.
            step: the last one that was taken.
            checkpoint: the folder of checkpoints.
            keys: of the config, with which the same command continues the run.
        """
        time_is_up = not self.local_signal and self.time_limit.reached()
        name = "the job's time is over" if time_is_up else signal_name(number)
        return (
            f"{name}: stopped after step {step}, which is saved in {checkpoint}; the same command "
            f"with {keys} continues from there"
        )
