"""Speed-up and efficiency over numbers of ranks, from the runs of a sweep."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

from credit_dp.errors import UserError
from credit_dp.sweeps.files import as_table, at, count_at
from credit_dp.sweeps.job import AXES, Job
from credit_dp.sweeps.run_log import column, settled
from credit_dp.sweeps.sweep import Sweep

Kind = Literal["strong", "weak"]
# A longer pipeline has no more work to do, unless the model is another one.
SERIES: tuple[tuple[Kind, str], ...] = (
    *(("strong", axis) for axis in reversed(AXES)),
    *(("weak", axis) for axis in ("domain", "data")),
)
FEWEST = 3  # steps that a run is timed by
# Keys that scaling varies, or that change nothing about a step: runs may differ in them.
FREE = (
    *(f"parallel.{axis}" for axis in AXES),
    *("parallel.threads", "data.grid", "data.batch_size", "data.cache", "data.statistics"),
    *("trainer.steps", "trainer.log_every"),
    *("run", "seed", "logger", "resume", "init_from"),
)


@final
@dataclass(frozen=True)
class Timing:
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
class Series:
    """Runs that differ in the ranks of one axis alone, the fewest ranks first.

    `strong`: grid and batch stay the same. `weak`: those of each rank do.
    """

    kind: Kind
    axis: str
    title: str
    timings: tuple[Timing, ...]

    def speed_up(self, timing: Timing) -> float:
        """How many times the work of the fewest ranks is done in the same time."""
        first = self.timings[0]
        work = 1.0 if self.kind == "strong" else timing.ranks / first.ranks
        return work * first.seconds / timing.seconds

    def efficiency(self, timing: Timing) -> float:
        """The speed-up over that of ideal scaling; 1 for the fewest ranks."""
        return self.speed_up(timing) * self.timings[0].ranks / timing.ranks


def find_series(sweep: Sweep) -> list[Series]:
    """All strong and weak series among the runs of a sweep.

    Raises:
        UserError: there is none with at least two numbers of ranks.
    """
    timings = [timing for job in sweep.jobs if (timing := timing_of(job)) is not None]
    found: list[Series] = []
    for kind, axis in SERIES:
        groups: dict[str, list[Timing]] = defaultdict(list)
        for timing in timings:
            groups[sameness(timing, kind, axis)].append(timing)
        members = [one_for_each(group) for group in groups.values()]
        found += [series_of(kind, axis, m, sweep.keys) for m in members if len(m) > 1]
    if not found:
        raise UserError(
            f"{sweep.folder}: needs runs on at least two numbers of ranks, alike in all else, with "
            f"{FEWEST} or more logged steps after the warm-up; {len(timings)} of "
            f"{len(sweep.jobs)} runs could be timed. Sweep parallel.domain=1,2,4 with "
            "experiment=scaling."
        )
    return found


def timing_of(job: Job) -> Timing | None:
    """The run's steps in numbers; None if it has not taken three after the warm-up."""
    rows = settled(job.rows())
    mesh, batch = job.mesh, count_at(job.config, "data.batch_size")
    seconds = column(rows, "seconds")
    if mesh is None or not batch or len(seconds) < FEWEST or min(seconds) <= 0:
        return None
    grid = at(job.config, "data.grid")
    sent = column(rows, "sent_bytes")
    return Timing(
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


def sameness(timing: Timing, kind: Kind, axis: str) -> str:
    """Equal for runs that belong to one series."""
    mesh = dict(zip(AXES, timing.mesh, strict=True))
    size = mesh.pop(axis)
    grid: Any = timing.grid
    batch: Any = timing.batch
    if kind == "weak" and axis == "domain":
        grid = share_of_rows(timing.grid, size) or f"not known, of {size}"
    if kind == "weak" and axis == "data":
        batch = batch / size
    return json.dumps([mesh, grid, batch, fixed(timing.job.config)], sort_keys=True, default=str)


def share_of_rows(grid: str | None, ranks: int) -> list[str] | None:
    """Rows of each rank, and columns; rows that don't divide have shares of their own."""
    if grid is None:
        return None
    rows, _, columns = grid.partition("x")
    return [str(int(rows) / ranks) if rows.isdecimal() else rows, columns]


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys that the runs of a series may differ in."""
    kept: dict[str, Any] = {}
    for group, values in config.items():
        if group in FREE:
            continue
        table = as_table(values)
        free = {key for key in table if f"{group}.{key}" in FREE}
        kept[group] = {k: v for k, v in table.items() if k not in free} if table else values
    return kept


def one_for_each(timings: Iterable[Timing]) -> list[Timing]:
    """The run of median speed for each number of ranks: others are repeats of it."""
    by_ranks: dict[int, list[Timing]] = defaultdict(list)
    for timing in timings:
        by_ranks[timing.ranks].append(timing)
    groups = [sorted(by_ranks[ranks], key=lambda t: t.seconds) for ranks in sorted(by_ranks)]
    return [group[len(group) // 2] for group in groups]


def series_of(kind: Kind, axis: str, timings: list[Timing], keys: Sequence[str]) -> Series:
    """A series, with a title that tells it from others of the same sweep."""
    first = timings[0]
    grid = first.grid or "the store's grid"
    named = f"{grid}, batch {first.batch}"
    if kind == "weak":
        size = first.mesh[AXES.index(axis)]
        if axis == "domain":
            rows, columns = share_of_rows(first.grid, size) or ("the store's", "")
            named = f"{float(rows):g}x{columns} of each rank, batch {first.batch}"
        else:
            named = f"{grid}, batch {first.batch / size:g} of each rank"
    others = [f"{key}={first.job.value(key)}" for key in keys if not key.startswith(FREE)]
    return Series(kind, axis, ", ".join([named, *others]), tuple(timings))
