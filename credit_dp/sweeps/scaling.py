"""Strong and weak scaling of a sweep's runs: speed-up and efficiency as tables.

Each run becomes a `StepTiming`; runs that differ only in the ranks of one axis form a
`ScalingSeries`, which is compared with its run on the fewest ranks.
"""

import csv
import io
import json
import math
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

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
from credit_dp.sweeps.tables import mesh_text

Kind = Literal["strong", "weak"]
# No weak scaling of pipelines: more stages would need a larger model for the same work per rank.
SERIES_KINDS: tuple[tuple[Kind, str], ...] = (
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


@final
@dataclass(frozen=True)
class StepTiming:
    """The timing of one run: medians of its logged steps after the warm-up.

    Attributes:
        mesh: ranks of each of the `AXES`.
        grid: rows and columns as text; None: the grid of the store.
        batch: global batch size.
        steps: number of logged steps in the medians.
        seconds: per step.
        waited: seconds per step spent waiting for data.
        sent: bytes per step that all ranks sent between bands; None if unknown.
        memory: peak bytes of the rank with the most; None if unknown.
    """

    job: Job
    mesh: Mapping[str, int]
    grid: str | None
    batch: int
    steps: int
    seconds: float
    waited: float
    sent: float | None
    memory: float | None

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def samples_per_second(self) -> float:
        """Return the samples per second of all ranks together."""
        return self.batch / self.seconds


@final
@dataclass(frozen=True)
class ScalingSeries:
    """Runs that differ only in the ranks of one axis, the fewest ranks first.

    Attributes:
        kind: `strong`: the same grid and batch; `weak`: the same rows or samples of each rank.
        axis: one of the `AXES`.
        title: tells the series from others of the same sweep.
    """

    kind: Kind
    axis: str
    title: str
    timings: tuple[StepTiming, ...]

    def speed_up(self, timing: StepTiming) -> float:
        """Return the work per time relative to that of the fewest ranks."""
        first = self.timings[0]
        # In weak scaling the work of a step grows with the ranks.
        work = 1.0 if self.kind == "strong" else timing.ranks / first.ranks
        return work * first.seconds / timing.seconds

    def efficiency(self, timing: StepTiming) -> float:
        """Return the speed-up relative to ideal scaling; 1 for the fewest ranks."""
        return self.speed_up(timing) * self.timings[0].ranks / timing.ranks


def find_series(sweep: Sweep) -> list[ScalingSeries]:
    """Return all strong and weak series among the runs of a sweep.

    Raises:
        UserError: no series has at least two numbers of ranks.
    """
    timings = [timing for job in sweep.jobs if (timing := timing_of(job)) is not None]
    series: list[ScalingSeries] = []
    for kind, axis in SERIES_KINDS:
        groups: dict[str, list[StepTiming]] = defaultdict(list)
        for timing in timings:
            groups[series_key(timing, kind, axis)].append(timing)
        members = [median_timings(group) for group in groups.values()]
        series += [build_series(kind, axis, m, sweep.keys) for m in members if len(m) > 1]
    if not series:
        raise UserError(
            f"{sweep.folder}: needs runs on at least two numbers of ranks that are otherwise the "
            f"same, with {MIN_TIMED_STEPS} or more logged steps after the warm-up; {len(timings)} "
            f"of {len(sweep.jobs)} runs could be timed. Sweep parallel.domain=1,2,4 with "
            "experiment=scaling."
        )
    return series


def timing_of(job: Job) -> StepTiming | None:
    """Return the timing of a run; None if it has too few logged steps after the warm-up."""
    rows = after_warm_up(job.rows())
    mesh = job.mesh
    batch = get_nested_int(job.config, "data.batch_size")
    seconds = column(rows, "seconds")
    # Medians need several steps: single ones may wait for the disk or for other jobs.
    if mesh is None or not batch or len(seconds) < MIN_TIMED_STEPS or min(seconds) <= 0:
        return None
    grid = get_nested(job.config, "data.grid")
    sent = column(rows, "sent_bytes")
    return StepTiming(
        job=job,
        mesh=mesh,
        grid=str(grid) if grid else None,
        batch=batch,
        steps=len(seconds),
        seconds=median(seconds),
        waited=median(column(rows, "wait_seconds") or [0.0]),
        sent=median(sent) if sent else None,
        memory=job.numbers.get("peak_memory_bytes"),
    )


def series_key(timing: StepTiming, kind: Kind, axis: str) -> str:
    """Return a text that is the same for all runs of a series."""
    mesh = dict(timing.mesh)
    size = mesh.pop(axis)
    grid: Any = timing.grid
    batch: Any = timing.batch
    # Weak scaling compares what each rank has, strong scaling what all have together.
    if kind == "weak" and axis == "domain":
        grid = rows_per_rank(timing.grid, size) or f"not known, of {size}"
    if kind == "weak" and axis == "data":
        batch = batch / size
    return json.dumps(
        [mesh, grid, batch, fixed_config(timing.job.config)], sort_keys=True, default=str
    )


def rows_per_rank(grid: str | None, ranks: int) -> list[str] | None:
    """Return rows per rank, possibly a fraction, and columns; None if the grid is unknown."""
    if grid is None:
        return None
    rows, _, columns = grid.partition("x")
    return [str(int(rows) / ranks) if rows.isdecimal() else rows, columns]


def fixed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys in which the runs of a series may differ."""
    fixed: dict[str, Any] = {}
    for group, values in config.items():
        if group in VARYING_KEYS:
            continue
        entries = as_mapping(values)
        if not entries:
            fixed[group] = values
            continue
        fixed[group] = {
            key: value for key, value in entries.items() if f"{group}.{key}" not in VARYING_KEYS
        }
    return fixed


def median_timings(timings: Iterable[StepTiming]) -> list[StepTiming]:
    """Return one run for each number of ranks, of several repeats the one with median speed."""
    by_ranks: dict[int, list[StepTiming]] = defaultdict(list)
    for timing in timings:
        by_ranks[timing.ranks].append(timing)
    # A run and not the median of times: its other numbers have to belong to the same run.
    groups = [sorted(by_ranks[ranks], key=lambda t: t.seconds) for ranks in sorted(by_ranks)]
    return [group[len(group) // 2] for group in groups]


def build_series(
    kind: Kind, axis: str, timings: list[StepTiming], keys: Sequence[str]
) -> ScalingSeries:
    """Return a series, with a title that tells it from others of the same sweep.

    Args:
        keys: the swept keys.
    """
    first = timings[0]
    grid = first.grid or "the store's grid"
    size_text = f"{grid}, batch {first.batch}"
    if kind == "weak":
        size = first.mesh[axis]
        if axis == "domain":
            rows, columns = rows_per_rank(first.grid, size) or ("the store's", "")
            size_text = f"{float(rows):g}x{columns} of each rank, batch {first.batch}"
        else:
            size_text = f"{grid}, batch {first.batch / size:g} of each rank"
    others = [f"{key}={first.job.value(key)}" for key in keys if not key.startswith(VARYING_KEYS)]
    return ScalingSeries(kind, axis, ", ".join([size_text, *others]), tuple(timings))


ROW_NAMES = (
    *("kind", "axis", "series", "job", "mesh", "ranks", "grid", "batch", "steps", "seconds"),
    *("waited", "samples_per_second", "speed_up", "efficiency", "peak_memory_bytes"),
    *("sent_bytes", "more_ranks_than_cores"),
)


def table_rows(all_series: Sequence[ScalingSeries]) -> list[dict[str, Any]]:
    """Return a row by `ROW_NAMES` for each run of each series; unknown numbers are None."""
    return [table_row(series, timing) for series in all_series for timing in series.timings]


def table_row(series: ScalingSeries, timing: StepTiming) -> dict[str, Any]:
    """Return the row of one run in its series."""
    values = (
        *(series.kind, series.axis, series.title, timing.job.name),
        *(mesh_text(timing.job), timing.ranks, timing.grid, timing.batch, timing.steps),
        *(timing.seconds, timing.waited, timing.samples_per_second),
        *(series.speed_up(timing), series.efficiency(timing), timing.memory, timing.sent),
        is_oversubscribed(timing),
    )
    return dict(zip(ROW_NAMES, values, strict=True))


def is_oversubscribed(timing: StepTiming) -> bool | None:
    """Whether there were more ranks than cores; None if the run was on another machine."""
    if timing.job.config.get("device") != "cpu" or timing.ranks == 1:
        return False
    if timing.job.hosts != {socket.gethostname()}:
        return None  # this machine's cores say nothing about those
    return timing.ranks > usable_cores()


def series_to_csv(all_series: Sequence[ScalingSeries]) -> str:
    """Return CSV with a line for each run of each series."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ROW_NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table_rows(all_series))
    return buffer.getvalue()


def series_to_json(all_series: Sequence[ScalingSeries]) -> str:
    """Return the same as JSON, with the order of axes in a mesh; ensemble only if it is above 1."""
    content = {"mesh": " x ".join(AXES), "runs": table_rows(all_series)}
    return json.dumps(content, indent=2) + "\n"
