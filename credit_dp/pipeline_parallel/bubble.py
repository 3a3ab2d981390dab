"""How long the ranks of a pipeline wait for each other: measured, and in theory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast, final

import torch


def theoretical_bubble(pipeline: int, microbatches: int, virtual: int = 1) -> float:
    """Return the share of a step in which a rank waits, if all stages cost the same.

    The same for GPipe and for 1F1B.

    Args:
        pipeline: ranks.
        microbatches: of a step.
        virtual: stages of each rank.

    Source: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    return (pipeline - 1) / (virtual * microbatches + pipeline - 1)


@final
class Stopwatch:
    """Which share of a span of time was not spent in its busy stretches.

    On a GPU times are those of its own stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total: tuple[_Mark, _Mark] | None = None
        self._busy: list[tuple[_Mark, _Mark]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure a new span; what was measured before is forgotten."""
        self._busy, self._total = [], None
        start = self._mark()
        yield
        self._total = start, self._mark()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count as busy."""
        start = self._mark()
        yield
        self._busy.append((start, self._mark()))

    def idle(self) -> float:
        """Return the idle share of the last span; 0 before the first one."""
        if self._total is None:
            return 0.0
        return 1 - sum(_seconds(*pair) for pair in self._busy) / _seconds(*self._total)

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


_Mark = float | torch.cuda.Event


def _seconds(start: _Mark, end: _Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    return cast(float, end) - cast(float, start)
