"""Strong and weak scaling of a sweep's runs: speed-up and efficiency by the number of ranks.

Runs that differ only in the ranks of one axis form a series, in which each is compared with the run
on the fewest ranks. A run in its series is a row: a line of the table, and a point of the figure.
"""

import json
import math
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from credit_dp.errors import UserError
from credit_dp.process import usable_cores
from credit_dp.sweeps.read import (
    AXES,
    Job,
    Sweep,
    after_warm_up,
    as_mapping,
    column,
    get_nested,
    get_nested_int,
)
from credit_dp.sweeps.tables import Row, mesh_text

# No weak scaling of pipelines: more stages would need a larger model for the same work per rank.
SERIES_KINDS = (
    *(("strong", axis) for axis in reversed(AXES)),
    *(("weak", axis) for axis in ("domain", "data")),
)
MIN_TIMED_STEPS = 3  # logged steps after the warm-up, to take a median of
# Keys that scaling varies, or that do not change the work of a step: runs may differ in them.
VARYING_KEYS = (
    *(f"parallel.{axis}" for axis in AXES),
    *("parallel.threads", "data.grid", "data.batch_size", "data.cache", "data.statistics"),
    *("trainer.steps", "trainer.log_every"),
    *("run", "seed", "logger", "resume", "init_from"),
)


def find_series(sweep: Sweep) -> list[list[Row]]:
    """Return all series among the runs of a sweep, each with its rows by rising ranks.

    A row has the columns of `timing_of`, `speed_up` and `efficiency`, and of its series the title
    (`series`), the `axis` whose ranks differ, and the `kind`: `strong` with the same grid and
    batch, `weak` with the same rows or samples of each rank.

    Raises:
        UserError: no series has at least two numbers of ranks.
    """
    timed = [(job, timing) for job in sweep.jobs if (timing := timing_of(job)) is not None]
    series: list[list[Row]] = []
    for kind, axis in SERIES_KINDS:
        groups: dict[str, dict[int, list[tuple[Job, Row]]]] = defaultdict(lambda: defaultdict(list))
        for job, timing in timed:
            groups[series_key(job, timing, kind, axis)][timing["ranks"]].append((job, timing))
        for group in groups.values():
            if len(group) > 1:
                # The run and not the median of times: its other numbers have to belong to it.
                runs = [
                    sorted(repeats, key=lambda run: float(run[1]["seconds"]))[len(repeats) // 2]
                    for _, repeats in sorted(group.items())
                ]
                title = series_title(*runs[0], kind, axis, sweep.keys)
                shared = {"kind": kind, "axis": axis, "series": title}
                first = runs[0][1]
                series.append([shared | compare(timing, first, kind) for _, timing in runs])
    if not series:
        raise UserError(
            f"{sweep.folder}: needs runs on at least two numbers of ranks that are otherwise the "
            f"same, with {MIN_TIMED_STEPS} or more logged steps after the warm-up; {len(timed)} "
            f"of {len(sweep.jobs)} runs could be timed. Sweep parallel.domain=1,2,4 with "
            "experiment=scaling."
        )
    return series


def compare(timing: Row, first: Row, kind: str) -> dict[str, Any]:
    """Return the columns of a run, also its comparison with the run on the fewest ranks."""
    growth = timing["ranks"] / first["ranks"]
    # In weak scaling the work of a step grows with the ranks.
    speed_up = (growth if kind == "weak" else 1.0) * first["seconds"] / timing["seconds"]
    return {**timing, "speed_up": speed_up, "efficiency": speed_up / growth}


def timing_of(job: Job) -> dict[str, Any] | None:
    """Return the columns of a run; None if it has too few logged steps after the warm-up.

    Seconds, waiting for data, and bytes between ranks are medians over steps, memory is that of the
    rank with the most, and what is not known is None.
    """
    rows = after_warm_up(job.rows())
    mesh = job.mesh
    batch = get_nested_int(job.config, "data.batch_size")
    seconds = column(rows, "seconds")
    # Medians need several steps: single ones may wait for the disk or for other jobs.
    if mesh is None or not batch or len(seconds) < MIN_TIMED_STEPS or min(seconds) <= 0:
        return None
    ranks = math.prod(mesh.values())
    sent = column(rows, "sent_bytes")
    return {
        "job": job.name,
        "mesh": mesh_text(job),
        "ranks": ranks,
        "grid": get_nested(job.config, "data.grid"),
        "batch": batch,
        "steps": len(seconds),
        "seconds": median(seconds),
        "waited": median(column(rows, "wait_seconds") or [0.0]),
        "samples_per_second": batch / median(seconds),
        "peak_memory_bytes": job.numbers.get("peak_memory_bytes"),
        "sent_bytes": median(sent) if sent else None,
        "more_ranks_than_cores": is_oversubscribed(job, ranks),
    }


def is_oversubscribed(job: Job, ranks: int) -> bool | None:
    """Whether there were more ranks than cores; None if the run was on another machine."""
    if job.config.get("device") != "cpu" or ranks == 1:
        return False
    if job.hosts != {socket.gethostname()}:
        return None  # this machine's cores say nothing about those
    return ranks > usable_cores()


def series_key(job: Job, timing: Row, kind: str, axis: str) -> str:
    """Return a text that is the same for all runs of a series."""
    mesh = dict(job.mesh or {})
    size = mesh.pop(axis)
    grid, batch = timing["grid"], timing["batch"]
    # Weak scaling compares what each rank has, strong scaling what all have together.
    if kind == "weak" and axis == "domain":
        grid = f"not known, of {size}" if grid is None else rows_per_rank(grid, size)
    if kind == "weak" and axis == "data":
        batch = batch / size
    return json.dumps([mesh, grid, batch, fixed_config(job.config)], sort_keys=True, default=str)


def rows_per_rank(grid: str, ranks: int) -> tuple[str, str]:
    """Return rows per rank, possibly a fraction, and columns."""
    rows, _, columns = grid.partition("x")
    return str(int(rows) / ranks) if rows.isdecimal() else rows, columns


def fixed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys in which the runs of a series may differ."""
    fixed: dict[str, Any] = {}
    for group, values in config.items():
        if group not in VARYING_KEYS:
            entries = as_mapping(values)
            kept = {k: v for k, v in entries.items() if f"{group}.{k}" not in VARYING_KEYS}
            fixed[group] = kept if entries else values
    return fixed


def series_title(job: Job, timing: Row, kind: str, axis: str, keys: Sequence[str]) -> str:
    """Return a title that tells a series from others of the same sweep.

    Args:
        job: the run on the fewest ranks.
        timing: its columns.
        kind: of scaling.
        axis: whose ranks differ.
        keys: the swept keys.
    """
    size = (job.mesh or {})[axis]
    grid, batch = timing["grid"] or "the store's grid", f"batch {timing['batch']}"
    if kind == "weak" and axis == "domain":
        rows, columns = rows_per_rank(grid, size)
        grid = f"{float(rows):g}x{columns} of each rank"
    elif kind == "weak":
        batch = f"batch {timing['batch'] / size:g} of each rank"
    others = [f"{key}={job.value(key)}" for key in keys if not key.startswith(VARYING_KEYS)]
    return ", ".join([grid, batch, *others])
