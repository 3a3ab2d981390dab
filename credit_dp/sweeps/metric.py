"""The number that the runs of a sweep are compared by."""

import math
from collections.abc import Iterable, Sequence

from credit_dp.checks import nearest
from credit_dp.errors import UserError
from credit_dp.sweeps.files import as_table, at
from credit_dp.sweeps.job import Job

RELATIVE = "relative_rmse"
# The first of these that any run has is taken if none is asked for.
DEFAULTS = (RELATIVE, "validation_rmse", "loss")
LARGER_IS_BETTER = ("samples_per_second",)


def choose_metric(jobs: Sequence[Job], asked: str) -> str:
    """The metric that was asked for, else the best that there is.

    Raises:
        UserError: no run has it.
    """
    names = known(jobs)
    if not asked:
        return next((name for name in DEFAULTS if name in names), RELATIVE)
    if asked not in names:
        there = [name for name in names if not name.startswith(("rmse/", "loss/"))]
        if any(name.startswith("rmse/") for name in names):
            there.append("rmse/VARIABLE/HOURSh")
        raise UserError(
            f"metric: no run of this sweep has {asked!r} yet, but "
            f"{', '.join(there) or 'nothing'}.{nearest(asked, names)}"
        )
    return asked


def known(jobs: Iterable[Job]) -> list[str]:
    """The metrics that at least one run has."""
    names: dict[str, None] = {}
    for job in jobs:
        if relative_rmse(job) is not None:
            names[RELATIVE] = None
        names |= dict.fromkeys(job.numbers)
        names |= dict.fromkeys(
            f"rmse/{channel}/{lead}"
            for channel, leads in as_table(job.scores.get("rmse")).items()
            for lead in as_table(leads)
        )
    return [name for name in names if name != "step"]


def metric_of(job: Job, name: str) -> float | None:
    """The value of a metric; None if the run has none yet."""
    if name == RELATIVE:
        return relative_rmse(job)
    if name in job.numbers:
        return job.numbers[name]
    kind, _, rest = name.partition("/")
    channel, _, lead = rest.rpartition("/")
    found = as_table(at(job.scores, "rmse")).get(channel) if kind == "rmse" else None
    return positive(as_table(as_table(found).get(lead)).get("model"))


def relative_rmse(job: Job) -> float | None:
    """The final RMSE over that of persistence, at the longest lead time, mean over all fields."""
    ratios = []
    for leads in as_table(job.scores.get("rmse")).values():
        of = as_table(leads)
        hours = [lead for lead in of if lead.removesuffix("h").isdecimal()]
        if not hours:
            continue
        last = as_table(of[max(hours, key=lambda lead: int(lead.removesuffix("h")))])
        model, persistence = positive(last.get("model")), positive(last.get("persistence"))
        if model is not None and persistence:
            ratios.append(model / persistence)
    return sum(ratios) / len(ratios) if ratios else None


def positive(value: object) -> float | None:
    """A finite number of at least 0; None for anything else."""
    good = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return float(value) if good else None  # type: ignore[arg-type]


def best(jobs: Sequence[Job], metric: str) -> Job | None:
    """The run that does best; None if none has the metric."""
    scored = [(value, job) for job in jobs if (value := metric_of(job, metric)) is not None]
    if not scored:
        return None
    pick = max if metric in LARGER_IS_BETTER else min
    return pick(scored, key=lambda pair: pair[0])[1]
