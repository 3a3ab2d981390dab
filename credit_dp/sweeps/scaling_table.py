"""A scaling study as numbers: one row for each run of each series."""

import csv
import io
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from credit_dp.sweeps.job import AXES
from credit_dp.sweeps.scaling import Series, Timing

ROW_NAMES = (
    *("kind", "axis", "series", "job", "mesh", "ranks", "grid", "batch", "steps", "seconds"),
    *("waited", "samples_per_second", "speed_up", "efficiency", "peak_memory_bytes"),
    *("sent_bytes", "more_ranks_than_cores"),
)


def rows_of(found: Sequence[Series]) -> list[dict[str, Any]]:
    """All numbers by name; None where one is not known."""
    return [row_of(series, timing) for series in found for timing in series.timings]


def row_of(series: Series, timing: Timing) -> dict[str, Any]:
    """The numbers of one run in its series."""
    values = (
        *(series.kind, series.axis, series.title, timing.job.name),
        *("x".join(map(str, timing.mesh)), timing.ranks, timing.grid, timing.batch, timing.steps),
        *(timing.seconds, timing.waited, timing.samples_per_second),
        *(series.speed_up(timing), series.efficiency(timing), timing.memory, timing.sent),
        crowded(timing),
    )
    return dict(zip(ROW_NAMES, values, strict=True))


def crowded(timing: Timing) -> bool | None:
    """Whether ranks had to share cores; None if they ran on another machine than this."""
    if timing.job.config.get("device") != "cpu" or timing.ranks == 1:
        return False
    if timing.job.hosts != {socket.gethostname()}:
        return None
    return timing.ranks > cores()


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def as_csv(found: Sequence[Series]) -> str:
    """A line for each run of each series."""
    held = io.StringIO()
    writer = csv.DictWriter(held, ROW_NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows_of(found))
    return held.getvalue()


def as_json(found: Sequence[Series]) -> str:
    """The same as JSON, with how a mesh is written."""
    content = {"mesh": " x ".join(AXES), "runs": rows_of(found)}
    return json.dumps(content, indent=2) + "\n"
