"""The compare command: `credit-dp compare RUN RUN ...` puts scores beside each other."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from credit_dp import checks
from credit_dp.checks import nearest
from credit_dp.command.arguments import parse, parser
from credit_dp.command.tables import table
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.evaluation.comparison import Comparison

HELP = """\
{program} RUN RUN [RUN ...] [out=FOLDER]: puts the scores of runs beside each other.

RUN is the folder of a finished training run, or one that credit-dp evaluate wrote. Shown are the
keys in which the runs' configs differ, and each score of the same channel and lead time with its
difference from the first in percent, and which is better. A line says what makes scores not
comparable: other dates, other data, another grid.

  out=FOLDER    gets comparison.csv, comparison.json and comparison.html, with curves of all

  --help, -h    this text

Exit code: 0 if they are compared, 2 if one can't be.
"""
SCORES_SHOWN = ("rmse", "acc")


def compare_runs(arguments: Sequence[str], program: str) -> int:
    """Compare runs or scorecards; the exit code.

    Raises:
        UserError: one is no run, has not finished, or they have no score in common.
    """
    args = parse(parser(), arguments)
    if args.help:
        sys.stdout.write(HELP.format(program=program))
        return 0
    folders, out = split(args.overrides, program)
    from credit_dp.evaluation.compared_result import read_result
    from credit_dp.evaluation.comparison import compare

    names = names_of(folders)
    found = compare([read_result(*pair) for pair in zip(folders, names, strict=True)])
    lines = told(found)
    if out:
        lines += ["", str(written(found, out))]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def split(given: Sequence[str], program: str) -> tuple[list[Path], str]:
    """The folders, and where to write.

    Raises:
        UserError: there are less than two, one comes twice, or a key does not exist.
    """
    folders, out = [], ""
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            folders.append(checks.home_replaced("RUN", text))
        elif key == "out" and value:
            out = value
        else:
            raise UserError(
                f"{program}: needs the folders of runs, and perhaps out=FOLDER, got {text!r}."
                f"{nearest(key, ['out'])}"
            )
    if len(folders) < 2:
        raise UserError(f"{program}: needs the folders of two runs or more, got {len(folders)}.")
    whole = [folder.absolute() for folder in folders]
    twice = next((folder for n, folder in enumerate(folders) if whole[n] in whole[:n]), None)
    if twice is not None:
        raise UserError(f"{program}: {twice} comes twice. Give each run once.")
    return folders, out


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them from each other."""
    parts = [folder.absolute().parts[1:] for folder in folders]
    for count in range(1, max(map(len, parts)) + 2):  # the root has no parts
        names = ["/".join(of[-count:]) for of in parts]
        if len(set(names)) == len(names):
            break
    return names


def written(found: "Comparison", out: str) -> Path:
    """Write all files of a comparison; where the page is.

    Raises:
        UserError: the folder is there already, or can't be written.
    """
    from credit_dp.evaluation.comparison_page import comparison_page
    from credit_dp.evaluation.score_files import ScoreFolder

    folder = ScoreFolder(checks.home_replaced("out", out))
    with folder.held():
        folder.write_files(
            {
                "comparison.csv": found.csv(),
                "comparison.json": found.json(),
                "comparison.html": comparison_page(found),
            }
        )
    return folder.out / "comparison.html"


def told(found: "Comparison") -> list[str]:
    """What matters most: what differs, and the scores of a few lead times."""
    from credit_dp.evaluation.comparison_page import percent, share_names, shown_rows, wins_told
    from credit_dp.evaluation.table import three_digits

    lines = list(found.warnings)
    if found.config:
        rows = [(key, *values) for key, values in found.config.items()]
        lines += ["", *table(("config", *found.names), rows, left=1 + len(found.names))]
    for score in (name for name in SCORES_SHOWN if name in found.scores):
        cells = [
            (
                row.place.channel,
                row.unit or "-",
                str(row.place.hours),
                *map(three_digits, row.values),
                *map(percent, row.percent[1:]),
                "-" if row.best is None else found.names[row.best],
            )
            for row in shown_rows(found, score)
        ]
        heads = (score.upper(), "unit", "hours", *found.names, *share_names(found), "better")
        lines += ["", *table(heads, cells, left=2), wins_told(found, score)]
    return lines[1:] if lines[:1] == [""] else lines
