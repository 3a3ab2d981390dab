"""Ranks that are threads of this process, to try and compare models without a process group.

`run_on_threads` runs a function on every rank of one globe. `ThreadRanks` is for ranks that share a
`ThreadWorld` already.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar, final

import torch

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError

Result = TypeVar("Result")


class RankError(UserError):
    """A rank raised an error or did not finish."""


def run_on_threads(
    ranks: int, work: Callable[[DomainParallelManager], Result], timeout: float = 60.0
) -> list[Result]:
    """Return the results of `work(manager)` on ranks that share one globe, in rank order.

    Args:
        timeout: seconds after which ranks that have not finished count as stuck.

    Raises:
        RankError: a rank failed (the error is that of the first) or is stuck.
    """
    # The world waits longer: `ThreadRanks` names the rank that is stuck, while a rank that waits
    # for a message only knows that none came.
    world = ThreadWorld(ranks, timeout=2 * timeout)

    def run_rank(rank: int) -> Result:
        transport = ThreadTransport(world, rank)
        return work(DomainParallelManager(ranks, ranks, transport=transport))

    return ThreadRanks[Result](world, timeout).run(run_rank)


@final
class ThreadRanks(Generic[Result]):
    """Runs a function once per rank, each in a thread."""

    def __init__(self, world: ThreadWorld, timeout: float) -> None:
        self.world = world
        self.timeout = timeout
        self._results: dict[int, Result] = {}
        self._errors: list[tuple[int, BaseException]] = []

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Return the results of `work(rank)`, in rank order."""
        threads = [
            threading.Thread(target=self._run_rank, args=(work, rank), daemon=True)
            for rank in range(self.world.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self.timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = {rank: current_line(t) for rank, t in enumerate(threads) if t.is_alive()}
        if stuck:  # only now, as it changes the lines that they are at
            self.world.fail()  # the ranks that wait for a message raise an error and end
        if self._errors:
            rank, error = self._errors[0]
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RankError(f"rank {rank} of {self.world.size}: {reason}") from error
        if stuck:
            lines = "; ".join(f"rank {rank} is at {line}" for rank, line in stuck.items())
            raise RankError(f"not finished after {self.timeout:g} s: {lines}")
        return [self._results[rank] for rank in range(self.world.size)]

    def _run_rank(self, work: Callable[[int], Result], rank: int) -> None:
        try:
            # torch runs the backward passes of all threads in one thread for each GPU, where a rank
            # that waits for another would wait forever.
            with torch.autograd.set_multithreading_enabled(False):
                self._results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - `run` raises it in the caller's thread
            self._errors.append((rank, error))
            self.world.fail()


def current_line(thread: threading.Thread) -> str:
    """Return the line that a thread is at, as `file:line (function)`."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "its end"
    line = traceback.extract_stack(frame, limit=None)[-1]
    return f"{line.filename}:{line.lineno} ({line.name})"
