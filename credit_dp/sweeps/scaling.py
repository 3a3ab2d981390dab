"""Speed-up and efficiency over numbers of ranks, as numbers."""

import csv
import io
import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

from credit_dp.errors import UserError
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

Kind = Literal["strong", "weak"]
# A longer pipeline has no more work to do, unless the model is another one.
SERIES_KINDS: tuple[tuple[Kind, str], ...] = (
    *(("strong", axis) for axis in reversed(AXES)),
    *(("weak", axis) for axis in ("domain", "data")),
)
MIN_TIMED_STEPS = 3  # steps that a run is timed by
# Keys that scaling varies, or that change nothing about a step: runs may differ in them.
VARYING_KEYS = (
    *(f"parallel.{axis}" for axis in AXES),
    *("parallel.threads", "data.grid", "data.batch_size", "data.cache", "data.statistics"),
    *("trainer.steps", "trainer.log_every"),
    *("run", "seed", "logger", "resume", "init_from"),
)


@final
@dataclass(frozen=True)
class StepTiming:
    """One run's steps after the warm-up: medians over `steps` of them.

    Units:
        seconds and waited (for data) per step; sent in bytes per step, by all ranks between bands;
        memory in bytes, of the rank with the most.
    """

    job: Job
    mesh: tuple[int, int, int]
    grid: str | None
    batch: int
    steps: int
    seconds: float
    waited: float
    sent: float | None
    memory: float | None

    @property
    def ranks(self) -> int:
        """All ranks of the mesh."""
        pipeline, data, domain = self.mesh
        return pipeline * data * domain

    @property
    def samples_per_second(self) -> float:
        """Samples of the global batch in a second."""
        return self.batch / self.seconds


@final
@dataclass(frozen=True)
class ScalingSeries:
    """Runs that differ in the ranks of one axis alone, the fewest ranks first.

    `strong`: grid and batch stay the same. `weak`: those of each rank do.
    """

    kind: Kind
    axis: str
    title: str
    timings: tuple[StepTiming, ...]

    def speed_up(self, timing: StepTiming) -> float:
        """How many times the work of the fewest ranks is done in the same time."""
        first = self.timings[0]
        work = 1.0 if self.kind == "strong" else timing.ranks / first.ranks
        return work * first.seconds / timing.seconds

    def efficiency(self, timing: StepTiming) -> float:
        """The speed-up over that of ideal scaling; 1 for the fewest ranks."""
        return self.speed_up(timing) * self.timings[0].ranks / timing.ranks


def find_series(sweep: Sweep) -> list[ScalingSeries]:
    """All strong and weak series among the runs of a sweep.

    Raises:
        UserError: there is none with at least two numbers of ranks.
    """
    timings = [timing for job in sweep.jobs if (timing := timing_of(job)) is not None]
    found: list[ScalingSeries] = []
    for kind, axis in SERIES_KINDS:
        groups: dict[str, list[StepTiming]] = defaultdict(list)
        for timing in timings:
            groups[series_key(timing, kind, axis)].append(timing)
        members = [median_timings(group) for group in groups.values()]
        found += [build_series(kind, axis, m, sweep.keys) for m in members if len(m) > 1]
    if not found:
        raise UserError(
            f"{sweep.folder}: needs runs on at least two numbers of ranks, alike in all else, with "
            f"{MIN_TIMED_STEPS} or more logged steps after the warm-up; {len(timings)} of "
            f"{len(sweep.jobs)} runs could be timed. Sweep parallel.domain=1,2,4 with "
            "experiment=scaling."
        )
    return found


def timing_of(job: Job) -> StepTiming | None:
    """The run's steps in numbers; None if it has not taken three after the warm-up."""
    rows = after_warm_up(job.rows())
    mesh, batch = job.mesh, get_nested_int(job.config, "data.batch_size")
    seconds = column(rows, "seconds")
    if mesh is None or not batch or len(seconds) < MIN_TIMED_STEPS or min(seconds) <= 0:
        return None
    grid = get_nested(job.config, "data.grid")
    sent = column(rows, "sent_bytes")
    return StepTiming(
        job,
        (mesh["pipeline"], mesh["data"], mesh["domain"]),
        str(grid) if grid else None,
        batch,
        len(seconds),
        median(seconds),
        median(column(rows, "wait_seconds") or [0.0]),
        median(sent) if sent else None,
        job.numbers.get("peak_memory_bytes"),
    )


def series_key(timing: StepTiming, kind: Kind, axis: str) -> str:
    """Equal for runs that belong to one series."""
    mesh = dict(zip(AXES, timing.mesh, strict=True))
    size = mesh.pop(axis)
    grid: Any = timing.grid
    batch: Any = timing.batch
    if kind == "weak" and axis == "domain":
        grid = rows_per_rank(timing.grid, size) or f"not known, of {size}"
    if kind == "weak" and axis == "data":
        batch = batch / size
    return json.dumps(
        [mesh, grid, batch, fixed_config(timing.job.config)], sort_keys=True, default=str
    )


def rows_per_rank(grid: str | None, ranks: int) -> list[str] | None:
    """Rows of each rank, and columns; rows that don't divide have shares of their own."""
    if grid is None:
        return None
    rows, _, columns = grid.partition("x")
    return [str(int(rows) / ranks) if rows.isdecimal() else rows, columns]


def fixed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys that the runs of a series may differ in."""
    kept: dict[str, Any] = {}
    for group, values in config.items():
        if group in VARYING_KEYS:
            continue
        table = as_mapping(values)
        free = {key for key in table if f"{group}.{key}" in VARYING_KEYS}
        kept[group] = {k: v for k, v in table.items() if k not in free} if table else values
    return kept


def median_timings(timings: Iterable[StepTiming]) -> list[StepTiming]:
    """The run of median speed for each number of ranks: others are repeats of it."""
    by_ranks: dict[int, list[StepTiming]] = defaultdict(list)
    for timing in timings:
        by_ranks[timing.ranks].append(timing)
    groups = [sorted(by_ranks[ranks], key=lambda t: t.seconds) for ranks in sorted(by_ranks)]
    return [group[len(group) // 2] for group in groups]


def build_series(
    kind: Kind, axis: str, timings: list[StepTiming], keys: Sequence[str]
) -> ScalingSeries:
    """A series, with a title that tells it from others of the same sweep."""
    first = timings[0]
    grid = first.grid or "the store's grid"
    named = f"{grid}, batch {first.batch}"
    if kind == "weak":
        size = first.mesh[AXES.index(axis)]
        if axis == "domain":
            rows, columns = rows_per_rank(first.grid, size) or ("the store's", "")
            named = f"{float(rows):g}x{columns} of each rank, batch {first.batch}"
        else:
            named = f"{grid}, batch {first.batch / size:g} of each rank"
    others = [f"{key}={first.job.value(key)}" for key in keys if not key.startswith(VARYING_KEYS)]
    return ScalingSeries(kind, axis, ", ".join([named, *others]), tuple(timings))


ROW_NAMES = (
    *("kind", "axis", "series", "job", "mesh", "ranks", "grid", "batch", "steps", "seconds"),
    *("waited", "samples_per_second", "speed_up", "efficiency", "peak_memory_bytes"),
    *("sent_bytes", "more_ranks_than_cores"),
)


def table_rows(found: Sequence[ScalingSeries]) -> list[dict[str, Any]]:
    """All numbers by name; None where one is not known."""
    return [table_row(series, timing) for series in found for timing in series.timings]


def table_row(series: ScalingSeries, timing: StepTiming) -> dict[str, Any]:
    """The numbers of one run in its series."""
    values = (
        *(series.kind, series.axis, series.title, timing.job.name),
        *("x".join(map(str, timing.mesh)), timing.ranks, timing.grid, timing.batch, timing.steps),
        *(timing.seconds, timing.waited, timing.samples_per_second),
        *(series.speed_up(timing), series.efficiency(timing), timing.memory, timing.sent),
        is_oversubscribed(timing),
    )
    return dict(zip(ROW_NAMES, values, strict=True))


def is_oversubscribed(timing: StepTiming) -> bool | None:
    """Whether ranks had to share cores; None if they ran on another machine than this."""
    if timing.job.config.get("device") != "cpu" or timing.ranks == 1:
        return False
    if timing.job.hosts != {socket.gethostname()}:
        return None
    return timing.ranks > usable_cores()


def usable_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def series_to_csv(found: Sequence[ScalingSeries]) -> str:
    """A line for each run of each series."""
    held = io.StringIO()
    writer = csv.DictWriter(held, ROW_NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table_rows(found))
    return held.getvalue()


def series_to_json(found: Sequence[ScalingSeries]) -> str:
    """The same as JSON, with how a mesh is written."""
    content = {"mesh": " x ".join(AXES), "runs": table_rows(found)}
    return json.dumps(content, indent=2) + "\n"
