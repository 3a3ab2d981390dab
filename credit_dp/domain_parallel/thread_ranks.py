"""Ranks that are threads of this process: for comparing models, without a process group."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar, final

from credit_dp.domain_parallel.transport import ThreadWorld
from credit_dp.errors import UserError

Result = TypeVar("Result")


class RankError(UserError):
    """A rank raised an error or did not finish."""


@final
class ThreadRanks(Generic[Result]):
    """Runs a function once per rank, each in a thread.

    Args:
        world: the mailboxes that the ranks' transports share.
        timeout: seconds until ranks that have not finished are given up.
    """

    def __init__(self, world: ThreadWorld, timeout: float) -> None:
        self.world = world
        self.timeout = timeout
        self._results: dict[int, Result] = {}
        self._errors: list[tuple[int, Exception]] = []

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Return what `work(rank)` returns, in rank order.

        Raises:
            RankError: some rank failed, and the first that did says why; or one is stuck.
        """
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
        self.world.fail()  # wakes the ranks that wait for a message
        if self._errors:
            rank, error = self._errors[0]
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RankError(f"rank {rank} of {self.world.size}: {reason}") from error
        if stuck:
            places = "; ".join(f"rank {rank} is at {place}" for rank, place in stuck.items())
            raise RankError(f"not finished after {self.timeout:g} s: {places}")
        return [self._results[rank] for rank in range(self.world.size)]

    def _run_rank(self, work: Callable[[int], Result], rank: int) -> None:
        try:
            self._results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            self._errors.append((rank, error))
            self.world.fail()


def current_line(thread: threading.Thread) -> str:
    """The line that a thread is at, as `file:line (function)`."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "its end"
    line = traceback.extract_stack(frame, limit=None)[-1]
    return f"{line.filename}:{line.lineno} ({line.name})"
