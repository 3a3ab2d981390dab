"""The commands `credit-dp sweep show` and `sweep scaling`, which read the folder of a sweep."""

import io
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from credit_dp.cli.arguments import Command, read_folders_and_keys, run_subcommand
from credit_dp.cli.output import format_bytes, format_table, print_lines
from credit_dp.distributed.failure_report import report_error
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.drawing import draw_or_warn
from credit_dp.files import write_bytes_atomic
from credit_dp.sweeps.read import AXES, Sweep, read_sweep
from credit_dp.sweeps.scaling import find_series
from credit_dp.sweeps.tables import Row, SweepTable, rows_to_csv, sweep_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
class Report(NamedTuple):
    """What a sweep command shows: lines to print, and a table and its figure to write.

    Attributes:
        lines: to print.
        name: of the table's files.
        content: of the JSON file.
        rows: of the CSV file.
        figure: name of the figure's file.
        draw: returns the figure; None if there is nothing to draw.
    """

    lines: Sequence[str]
    name: str
    content: Mapping[str, Any]
    rows: Sequence[Row]
    figure: str
    draw: "Callable[[], Figure | None]"

    def write(self, out: str | Path) -> None:
        """Write table and figure into a folder, over earlier ones, and print their paths."""
        folder = Path(os.path.expanduser(out))
        text = json.dumps(self.content, indent=2) + "\n"
        files = {
            f"{self.name}.csv": rows_to_csv(self.rows).encode(),
            f"{self.name}.json": text.encode(),
        }
        png = draw_or_warn(self.figure, draw_png, self.draw)
        if png is not None:
            files[self.figure] = png
        sys.stdout.write("\n")
        for file, data in files.items():
            path = folder / file
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_bytes_atomic(path, data, unique=True)
            except OSError as error:
                raise UserError(
                    f"out: cannot write {path} ({error.strerror}). Give another folder, or free "
                    "some space."
                ) from error
            sys.stdout.write(f"{path}\n")


def draw_png(draw: "Callable[[], Figure | None]") -> bytes | None:
    """Return a figure as the content of a PNG file; None if there is nothing to draw."""
    from credit_dp.evaluation.figure_style import figure_style  # matplotlib: not for --help

    figure = draw()
    if figure is None:
        return None
    buffer = io.BytesIO()
    with figure_style():
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def report(
    make: Callable[[Sweep, Mapping[str, Any]], Report],
    help_text: str,
    defaults: Mapping[str, Any],
    arguments: Sequence[str],
    program: str,
) -> int:
    """Read a sweep, print what a command makes of it, and write it if `out=` is given."""
    parsed = read_folders_and_keys(arguments, program, help_text, defaults, "DIR")
    if parsed is None:
        return 0
    folders, keys = parsed
    if len(folders) != 1:
        raise UserError(
            f"{program}: needs the folder of one sweep, like multirun/NAME, got "
            f"{' '.join(map(str, folders)) or 'none'}."
        )
    made = make(read_sweep(folders[0]), keys)
    print_lines(*made.lines)
    if keys["out"]:
        made.write(keys["out"])
    return 0


def report_scaling(folder: Path) -> None:
    """Show the scaling of a sweep that has ended, and write it to the sweep's folder."""
    try:
        made = scaling(read_sweep(folder))
        print_lines("", *made.lines)
        made.write(folder)
    except UserError as error:
        report_error(str(error))


SHOW_HELP = """\
{program} DIR [KEY=VALUE ...]: shows the runs of a sweep, the best first.

DIR is the folder that --multirun made, or any folder of runs; they may still run, or have failed.
For each run: the swept keys, its state, its mesh as pipeline x data x domain (with four numbers,
ensemble before domain), the metric, steps, and the medians of seconds per step and samples per
second. Then the causes of failures.

  metric=NAME   the metric to compare runs by: relative_rmse (final RMSE over that of persistence at
                the longest lead time, mean over all fields), a score like
                rmse/geopotential_500/24h, or a column of metrics.csv, like validation_rmse (its
                lowest value) or loss (its last). Without it: relative_rmse, else validation_rmse,
                else loss
  sort=NAME     metric (the default), job, state, steps, seconds, samples_per_second, or a swept
                key; -NAME for the largest first
  out=FOLDER    write sweep.csv, sweep.json, and metric.png: the metric against the swept keys

  --help, -h    this text

Exit code: 0 if it is shown, 2 if there is no sweep or no such column.
"""

ABSENT = "-"
MAX_CAUSE_LENGTH = 160  # characters: two lines of a terminal
SHOW_HEADINGS = {"seconds": "s/step", "samples_per_second": "samples/s"}
SHOW_KEYS: Mapping[str, str] = {"metric": "", "sort": "metric", "out": ""}


def show(sweep: Sweep, keys: Mapping[str, Any]) -> Report:
    """Return the runs of a sweep, the best first."""
    table = sweep_table(sweep, keys["metric"], keys["sort"])

    def draw() -> "Figure | None":
        from credit_dp.sweeps.plots import draw_metric  # matplotlib: not for --help

        return draw_metric(table)

    content = {
        "sweep": str(table.folder),
        "swept": table.keys,
        "metric": table.metric,
        "jobs": table.rows,
    }
    return Report(table_lines(table), "sweep", content, table.rows, "metric.png", draw)


def table_lines(table: SweepTable) -> list[str]:
    """Return the table, the number of runs in each state, and the causes of failures."""
    names = ("job", *table.keys, "state", "mesh")
    timings = [name for name in SHOW_HEADINGS if name != table.metric]
    rows = []
    for row in table.rows:
        steps = f"{row['steps']}/{row['all_steps'] or '?'}" if row["mesh"] else ABSENT
        values = (row[name] for name in (table.metric, *timings))
        numbers = [ABSENT if value is None else f"{value:.4g}" for value in values]
        rows.append(
            (*(str(row[name] or ABSENT) for name in names), numbers[0], steps, *numbers[1:])
        )
    headings = (*names, table.metric, "steps", *(SHOW_HEADINGS[name] for name in timings))
    states = Counter(row["state"] for row in table.rows)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    causes = [
        f"{row['job']}: {textwrap.shorten(row['cause'], MAX_CAUSE_LENGTH, placeholder=' ...')}"
        for row in table.rows
        if row["cause"]
    ]
    return [
        *format_table(headings, rows, left=len(names)),
        "",
        f"{counted(len(rows), 'run')}: {counts}",
        *causes,
    ]


SCALING_HELP = """\
{program} DIR [KEY=VALUE]: shows speed-up and efficiency over numbers of ranks.

DIR is the folder of a sweep over parallel.domain or another axis of the mesh, such as --multirun
experiment=scaling makes. Runs that differ only in the ranks of one axis form a series: strong
scaling if grid and batch stay the same, weak scaling if the rows (or samples) of each rank do.
Times are medians of steps after a warm-up of ten steps, or a third of all if that is less;
start-up, validation and checkpoints are not included.

  out=FOLDER    write scaling.csv, scaling.json and scaling.png, with ideal lines

  --help, -h    this text

Exit code: 0 if there is a series, 2 if not.
"""

SCALING_KEYS: Mapping[str, str] = {"out": ""}
SCALING_HEADINGS = (
    *("job", "mesh", "grid", "batch", "s/step", "waiting", "samples/s", "speed-up", "efficiency"),
    *("memory", "sent/step"),
)
LEGEND = (
    "mesh: pipeline x data x domain, of four numbers with ensemble before domain",
    "s/step: median after the warm-up; waiting: for data; memory: peak of the rank with the most",
    "sent/step: rows between bands, members between ranks that share them, by all ranks together",
)
MARK = "*: more ranks than this machine has cores; if they ran here, they shared them"


def scaling(sweep: Sweep, keys: Mapping[str, Any] = SCALING_KEYS) -> Report:
    """Return the series of a sweep over numbers of ranks."""
    series = find_series(sweep)
    rows = [row for one in series for row in one]

    def draw() -> "Figure":
        from credit_dp.sweeps.plots import draw_scaling  # matplotlib: not for --help

        return draw_scaling(series)

    content = {"mesh": " x ".join(AXES), "runs": rows}
    return Report(scaling_lines(series), "scaling", content, rows, "scaling.png", draw)


def scaling_lines(series: Sequence[Sequence[Row]]) -> list[str]:
    """Return a table for each series, and the legend of its columns."""
    lines: list[str] = []
    for rows in series:
        first = rows[0]
        lines += [f"{first['kind']} scaling over {first['axis']} ranks: {first['series']}"]
        lines += [*format_table(SCALING_HEADINGS, [scaling_cells(row) for row in rows]), ""]
    is_marked = any(row["more_ranks_than_cores"] for rows in series for row in rows)
    return [*lines, *LEGEND, *([MARK] if is_marked else [])]


def scaling_cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, with a mark on its mesh if ranks may have shared cores."""
    sizes = (row["peak_memory_bytes"], row["sent_bytes"])
    return (
        row["job"],
        f"{row['mesh']} *" if row["more_ranks_than_cores"] else row["mesh"],
        row["grid"] or ABSENT,
        str(row["batch"]),
        f"{row['seconds']:.4g}",
        f"{row['waited'] / row['seconds']:.0%}",
        f"{row['samples_per_second']:.4g}",
        f"{row['speed_up']:.2f}",
        f"{row['efficiency']:.0%}",
        *(ABSENT if size is None else format_bytes(size) for size in sizes),
    )


SWEEP_HELP = """\
credit-dp sweep reads the folder of a sweep (`credit-dp train --multirun ...`), even while it runs.

  credit-dp sweep show DIR       compare the runs: swept keys, state, metric and speed
  credit-dp sweep scaling DIR    show speed-up and efficiency over numbers of ranks

`credit-dp sweep COMMAND --help` says more.
"""

COMMANDS: Mapping[str, Command] = {
    "show": partial(report, show, SHOW_HELP, SHOW_KEYS),
    "scaling": partial(report, scaling, SCALING_HELP, SCALING_KEYS),
}


def sweeps(arguments: Sequence[str], program: str) -> int:
    """Run the sweep command named by the first argument; return the exit code."""
    return run_subcommand(COMMANDS, arguments, program, SWEEP_HELP)
