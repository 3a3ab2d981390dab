"""The command `credit-dp sweep scaling DIR`, and the same at the end of a scaling sweep."""

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from credit_dp.command.sweep_files import png, write_files
from credit_dp.command.sweep_words import read_words
from credit_dp.command.tables import amount, table
from credit_dp.errors import UserError
from credit_dp.launch.report import report_refusal
from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.scaling import Series, find_series
from credit_dp.sweeps.scaling_table import as_csv, as_json, rows_of

HELP = """\
{program} DIR [KEY=VALUE]: what more ranks bring, from the runs of a sweep.

DIR is the folder of a sweep over parallel.domain or another axis of the mesh, as --multirun
experiment=scaling makes one. Runs that differ in the ranks of one axis alone make a series: strong
if grid and batch stay the same, weak if each rank's rows (or its samples) do. Times are medians of
steps after a warm-up: ten steps, or a third of all if that is less; starting, validation and
checkpoints are not in them.

  out=FOLDER    write scaling.csv, scaling.json and scaling.png, with ideal lines

  --help, -h    this text

Exit code: 0 if there is a series, 2 if not.
"""

KEYS: Mapping[str, str] = {"out": ""}
HEADINGS = (
    *("job", "mesh", "grid", "batch", "s/step", "waiting", "samples/s", "speed-up", "efficiency"),
    *("memory", "sent/step"),
)
LEGEND = (
    "mesh: pipeline x data x domain; s/step: median after the warm-up; waiting: for data",
    "memory: peak of the rank with the most; sent/step: rows between bands, by all ranks together",
)
CROWDED = "*: more ranks than cores, so that ranks waited for each other's computing"
UNKNOWN = "?: ran on another machine; whether each rank had a core of its own is not known"


def scaling(arguments: Sequence[str], program: str) -> int:
    """Show the scaling of a sweep's runs; the exit code.

    Raises:
        UserError: there is no sweep or no series in it, or nothing can be written.
    """
    words = read_words(arguments, program, HELP, KEYS)
    if words is None:
        return 0
    folder, keys = words
    found = find_series(read_sweep(folder))
    sys.stdout.write("\n".join([*lines(found), ""]))
    if keys["out"]:
        write(Path(os.path.expanduser(keys["out"])), found)
    return 0


def show_at_the_end(folder: Path) -> None:
    """Show the scaling of a sweep that has ended, and write it into the sweep's folder."""
    try:
        found = find_series(read_sweep(folder))
        sys.stdout.write("\n".join(["", *lines(found), ""]))
        write(folder, found)
    except UserError as error:
        report_refusal(str(error))


def write(folder: Path, found: Sequence[Series]) -> None:
    """Write the numbers and the picture, and say where.

    Raises:
        UserError: nothing can be written there.
    """
    from credit_dp.sweeps.scaling_plot import draw_scaling  # matplotlib: not for --help

    files = {
        "scaling.csv": as_csv(found).encode(),
        "scaling.json": as_json(found).encode(),
        "scaling.png": png(draw_scaling(found)),
    }
    sys.stdout.write("\n".join(["", *map(str, write_files(folder, files)), ""]))


def lines(found: Sequence[Series]) -> list[str]:
    """A table for each series, and what its columns are."""
    told: list[str] = []
    rows = rows_of(found)
    for (kind, axis, title), members in groupby(
        rows, lambda row: (row["kind"], row["axis"], row["series"])
    ):
        told += [f"{kind} scaling over {axis} ranks: {title}"]
        told += [*table(HEADINGS, [cells(row) for row in members]), ""]
    marks = {row["more_ranks_than_cores"] for row in rows}
    notes = [*([CROWDED] if True in marks else []), *([UNKNOWN] if None in marks else [])]
    return [*told, *LEGEND, *notes]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as texts, its mesh marked where ranks may have shared cores."""
    mark = {True: " *", None: " ?", False: ""}[row["more_ranks_than_cores"]]
    memory, sent = row["peak_memory_bytes"], row["sent_bytes"]
    return (
        *(row["job"], row["mesh"] + mark, row["grid"] or "-", str(row["batch"])),
        *(f"{row['seconds']:.4g}", f"{row['waited'] / row['seconds']:.0%}"),
        *(f"{row['samples_per_second']:.4g}", f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}"),
        *("-" if value is None else amount(value) for value in (memory, sent)),
    )
