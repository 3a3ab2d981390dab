"""The command `credit-dp sweep show DIR`: how the runs of a sweep stand, and which does best."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from credit_dp.command.sweep_files import png, write_files
from credit_dp.command.sweep_words import read_words
from credit_dp.command.tables import table
from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.metric import choose_metric
from credit_dp.sweeps.sweep_table import SweepTable, sorted_jobs

HELP = """\
{program} DIR [KEY=VALUE ...]: the runs of a sweep, the best first.

DIR is the folder that --multirun made, or any folder of runs; they may be under way, or have
failed. For each run: what was swept, how it stands, its mesh as pipeline x data x domain, the
metric, steps, and the medians of seconds per step and samples per second. Then why runs failed.

  metric=NAME   what runs are compared by: relative_rmse (final RMSE over that of persistence at
                the longest lead time, mean over all fields), rmse/geopotential_500/24h and the
                like, or a column of metrics.csv, as validation_rmse (its lowest) or loss (its
                last). Without it: relative_rmse, else validation_rmse, else loss
  sort=NAME     metric (the default), job, state, steps, seconds, samples_per_second, or a swept
                key; -NAME for the largest first
  out=FOLDER    write sweep.csv, sweep.json, and metric.png: the metric against what was swept

  --help, -h    this text

Exit code: 0 if it is shown, 2 if there is no sweep or no such column.
"""

ABSENT = "-"
LONGEST = 160  # characters
HEADINGS = {"seconds": "s/step", "samples_per_second": "samples/s"}
KEYS: Mapping[str, str] = {"metric": "", "sort": "metric", "out": ""}


def show(arguments: Sequence[str], program: str) -> int:
    """Show a sweep's runs; the exit code.

    Raises:
        UserError: there is no sweep, no such metric or column, or nothing can be written.
    """
    words = read_words(arguments, program, HELP, KEYS)
    if words is None:
        return 0
    folder, keys = words
    sweep = read_sweep(folder)
    metric = choose_metric(sweep.jobs, keys["metric"])
    shown = SweepTable(sweep, metric, sorted_jobs(sweep, metric, keys["sort"]))
    sys.stdout.write("\n".join([*lines(shown), ""]))
    if keys["out"]:
        from credit_dp.sweeps.swept_plot import draw_metric  # matplotlib: not for --help

        files = {"sweep.csv": shown.csv().encode(), "sweep.json": shown.json().encode()}
        figure = draw_metric(shown)
        if figure is not None:
            files["metric.png"] = png(figure)
        written = write_files(Path(os.path.expanduser(keys["out"])), files)
        sys.stdout.write("\n".join(["", *map(str, written), ""]))
    return 0


def lines(shown: SweepTable) -> list[str]:
    """The table, how many runs are in which state, and why runs failed."""
    keys = shown.sweep.keys
    numbers = [name for name in HEADINGS if name != shown.metric]
    headings = ("job", *keys, "state", "mesh", shown.metric, "steps")
    rows = []
    for row in map(shown.row, shown.jobs):
        steps = f"{row['steps']}/{row['all_steps'] or '?'}" if row["mesh"] else ABSENT
        texts = [str(row[name] or ABSENT) for name in ("job", *keys, "state", "mesh")]
        rows.append(
            (*texts, digits(row[shown.metric]), steps, *(digits(row[name]) for name in numbers))
        )
    states = Counter(job.standing.state for job in shown.jobs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    causes = [f"{job.name}: {cut(job.standing.cause)}" for job in shown.jobs if job.standing.cause]
    names = (*headings, *(HEADINGS[name] for name in numbers))
    return [*table(names, rows, left=len(keys) + 3), "", f"{len(rows)} runs: {counts}", *causes]


def cut(cause: str) -> str:
    """As much of a cause as two lines of a screen hold; the files have all of it."""
    return cause if len(cause) <= LONGEST else f"{cause[: LONGEST - 4]} ..."


def digits(value: float | None) -> str:
    """A number to four significant digits."""
    return ABSENT if value is None else f"{value:.4g}"
