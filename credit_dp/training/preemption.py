"""Stops training on a signal: all ranks after the same step, with a checkpoint of that step.

A signal may reach one rank only, or each rank during another step: all ranks agree on it in each
step (`training.step_agreement`).
"""

import contextlib
import signal
from pathlib import Path
from typing import Self, final

from credit_dp.distributed.signals import handle_stop, signal_name
from credit_dp.distributed.slurm import TimeLimit, job_time_limit
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.step_agreement import agree_on_signal


@final
class Preemption:
    """Handles SIGTERM, SIGUSR1, SIGHUP and the end of a job's time.

    A SIGTERM that comes more than 2 seconds after the first ends the process.

    Args:
        manager: this rank's coordinates on the mesh.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        # The signal that reached this rank, or the parent of local ranks.
        self.local_signal = 0
        self.time_limit = TimeLimit(None)
        self.handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.manager.rank == 0:
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

        Collective. For use outside of steps, which agree on it themselves.
        """
        return agree_on_signal(self.pending_signal(), self.manager)

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
