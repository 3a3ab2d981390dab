"""Strong and weak scaling of a sweep's runs: speed-up and efficiency by the number of ranks.

Runs that differ only in the ranks of one axis form a series, in which each is compared with the run
on the fewest ranks. A run in its series is a row: a line of the table, and a point of the figure.
"""

import json
import math
from collections import defaultdict
from statistics import median
from typing import Any

from credit_dp.config import by_dotted_key
from credit_dp.errors import UserError
from credit_dp.process import usable_cores
from credit_dp.sweeps.read import AXES, Job, Sweep, after_warm_up, column, get_nested
from credit_dp.sweeps.tables import Row

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
    *("trainer.steps", "trainer.log_every", "seed", "resume", "init_from"),
)


def find_series(sweep: Sweep) -> list[list[Row]]:
    """Return all series among the runs of a sweep, each with its rows by rising ranks.

    A row has the columns of `measure_timing`, `speed_up` and `efficiency`. It also has those of its
    series: the title (`series`), the `axis` whose ranks differ, and the `kind`, which is `strong`
    with the same grid and batch, and `weak` with the same rows or samples of each rank.
    """
    timed = [(job, timing) for job in sweep.jobs if (timing := measure_timing(job)) is not None]
    series: list[list[Row]] = []
    for kind, axis in SERIES_KINDS:
        groups: dict[str, dict[int, list[tuple[Job, Row]]]] = defaultdict(lambda: defaultdict(list))
        for job, timing in timed:
            key = json.dumps(shared_work(job, timing, kind, axis), sort_keys=True, default=str)
            groups[key][timing["ranks"]].append((job, timing))
        for group in groups.values():
            if len(group) > 1:
                # The run and not the median of times: its other numbers have to belong to it.
                runs = [
                    sorted(repeats, key=lambda run: float(run[1]["seconds"]))[len(repeats) // 2]
                    for _, repeats in sorted(group.items())
                ]
                job, first = runs[0]
                grid, batch, *_ = shared_work(job, first, kind, axis)
                others = [f"{k}={job.value(k)}" for k in sweep.keys if not is_varying(k)]
                shared = {
                    "kind": kind,
                    "axis": axis,
                    "series": ", ".join([grid or "the store's grid", batch, *others]),
                }
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


def measure_timing(job: Job) -> dict[str, Any] | None:
    """Return the columns of a run; None if it has too few logged steps after the warm-up.

    Seconds, waiting for data, and bytes between ranks are medians over steps, memory is that of the
    rank with the most, and what is not known is None.
    """
    rows = after_warm_up(job.rows())
    seconds = column(rows, "seconds")
    # Medians need several steps: single ones may wait for the disk or for other jobs.
    if job.mesh is None or len(seconds) < MIN_TIMED_STEPS or min(seconds) <= 0:
        return None
    ranks = math.prod(job.mesh.values())
    batch = get_nested(job.config, "data.batch_size")
    sent = column(rows, "sent_bytes")
    on_cpus = job.config.get("device") == "cpu"
    return {
        "job": job.name,
        "mesh": job.mesh_text,
        "ranks": ranks,
        "grid": get_nested(job.config, "data.grid"),
        "batch": batch,
        "steps": len(seconds),
        "seconds": median(seconds),
        "waited": median(column(rows, "wait_seconds") or [0.0]),
        "samples_per_second": batch / median(seconds),
        "peak_memory_bytes": job.numbers.get("peak_memory_bytes"),
        "sent_bytes": median(sent) if sent else None,
        "more_ranks_than_cores": on_cpus and 1 < ranks > usable_cores(),
    }


def shared_work(job: Job, timing: Row, kind: str, axis: str) -> tuple[str | None, str, Any, Any]:
    """Return what all runs of a series share: grid, batch, the other axes and the other keys.

    Weak scaling compares what each rank has, strong scaling what all have together.
    """
    mesh = dict(job.mesh or {})
    size = mesh.pop(axis)
    grid, batch = timing["grid"], f"batch {timing['batch']}"
    if kind == "weak" and axis == "domain":
        # A grid that the config does not have is the store's: the same in all runs.
        rows, _, columns = (grid or "").partition("x")
        grid = f"{int(rows) / size:g}x{columns} of each rank" if grid else f"a {size}th of the rows"
    elif kind == "weak":
        batch = f"batch {timing['batch'] / size:g} of each rank"
    fixed = {k: v for k, v in by_dotted_key(job.config).items() if not is_varying(k)}
    return grid, batch, mesh, fixed


def is_varying(key: str) -> bool:
    """Whether the runs of a series may differ in a key."""
    return key in VARYING_KEYS or key.startswith(("run.", "logger."))
