"""Traces of a few steps, for chrome://tracing or https://ui.perfetto.dev."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar, final

from torch import profiler

from credit_dp.data.batch import Batch
from credit_dp.spans import DATA, span
from credit_dp.training.run_folder import unfinished, writing

T = TypeVar("T")

# The first step is apart, as much is set up in it; the second is the profiler's own first.
WAIT, WARM_UP, STEPS = 1, 1, 3


def named_data(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches, with a name for the time that is waited for them."""
    iterator = iter(batches)
    while True:
        with span(DATA):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


@final
class Trace:
    """Records the third to fifth step that a process takes, and writes them as a Chrome trace.

    Args:
        path: of the trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = False
        self._taken = 0
        self._profile = profiler.profile(
            schedule=profiler.schedule(wait=WAIT, warmup=WARM_UP, active=STEPS, repeat=1),
            on_trace_ready=self._write,
        )

    def steps(self, records: Iterable[T]) -> Iterator[T]:
        """Hand on what is told of each step; meanwhile the trace is made."""
        with self._profile:
            for record in records:
                yield record
                self._taken += 1
                self._profile.step()

    def _write(self, found: profiler.profile) -> None:
        """Write it under another name first, so that no reader meets half a trace."""
        if self._taken <= WAIT + WARM_UP:
            return
        part = unfinished(self.path)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(part))
            os.replace(part, self.path)
        self.written = True
