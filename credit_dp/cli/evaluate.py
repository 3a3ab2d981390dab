"""The evaluate and compare commands score stored forecasts and put scores beside each other."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import (
    common_parser,
    parse_arguments,
    parse_list,
    read_keys,
    to_texts,
    to_whole_numbers,
)
from credit_dp.cli.output import format_table
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.evaluation.comparison import Comparison
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.evaluation.request import ScoreRequest
    from credit_dp.evaluation.scorecard import Scorecard


EVALUATE_HELP = """\
{program} forecast=STORE [truth=STORE] out=FOLDER: scores forecasts, whoever made them.

A forecast store is in the form of WeatherBench 2, zarr or netCDF: dims time (initial time),
prediction_timedelta, latitude, longitude, and level and number (members of an ensemble) where there
are. A folder of netCDF files, or a pattern of them, is joined where each has a band of rows. The
truth is in any form that data.store= takes, several stores in brackets; without it a forecast of
`credit-dp forecast` is compared with what it started from. Persistence and climatology are scored
beside it. FOLDER gets scores.csv, scores.json, spectra.csv and scorecard.html, one page that needs
no other file.

  climatology=STORE          by hour and dayofyear, as WeatherBench 2 has it
  climatology_dates=[A,B]    fit one to these dates of the truth; without either key, to those
                             before the first forecast, or to all if that is less than a year
  dates=[A,B]                initial times from A to B; all without it
  hours=[24,72,120]          lead times; all without it
  variables=[NAME,...]       all of the forecast's without it
  levels=[500,850]           all of the forecast's without it
  masked=[NAME,...]          variables without values on some points at any time, as over land
  limits={{NAME:[LOW,HIGH]}}   range of values, in place of the physical one; null: any value

  --help, -h    this text

Exit code: 0 if it is scored, 2 if a key or a store is not as needed; then nothing is written.
"""

EVALUATE_KEYS: Mapping[str, Any] = {
    "forecast": "",
    "truth": "",
    "out": "",
    "climatology": "",
    "climatology_dates": [],
    "dates": [],
    "hours": [],
    "variables": [],
    "levels": [],
    "masked": [],
    "limits": {},
}
REQUIRED_KEYS = {
    "forecast": "the store of forecasts, like forecast=forecast.zarr",
    "out": "the folder to write, like out=scores",
}
SCORES_SHOWN = ("rmse", "acc")


def evaluate(arguments: Sequence[str], program: str) -> int:
    """Score a forecast store; the exit code.

    Raises:
        UserError: a key or a store is not as needed.
    """
    keys = read_keys(arguments, program, EVALUATE_HELP, EVALUATE_KEYS)
    if keys is None:
        return 0
    request = build_request(keys)
    # Here, for torch takes seconds: not for --help.
    from rich.console import Console

    from credit_dp.evaluation.report import ScoreFolder
    from credit_dp.evaluation.score import score
    from credit_dp.training.console import Screen, collect_data_notes

    screen = Screen(Console(file=sys.stdout))
    forecast = open_forecast(request.forecast)
    request = replace(request, truth=request.truth or truth_stores(forecast))
    folder = ScoreFolder(checks.expand_home("out", keys["out"]))
    with folder.cleanup_on_failure():
        with screen.report() as report, collect_data_notes() as notes:
            card = score(request, forecast, report)
        folder.write(card)
    notes = [f"note: {note}" for note in notes]
    sys.stdout.write(
        "\n".join([*notes, *summary_lines(card), f"{folder.out / 'scorecard.html'}", ""])
    )
    return 0


def open_forecast(where: str) -> "ForecastStore":
    """The forecasts at a path or address; bands in files of their own are joined.

    Raises:
        UserError: there are none, or they are not of the form of forecasts.
    """
    from credit_dp.data.sources.address import is_remote, local_path
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.evaluation.request import translate_error_keys
    from credit_dp.forecast import open_sharded

    with translate_error_keys("forecast"):
        path = local_path(where)
        if not is_remote(where) and (has_magic(where) or any(path.glob("*.nc"))):
            return ForecastStore(open_sharded(path), where)
        return ForecastStore.open(where)


def truth_stores(forecast: "ForecastStore") -> tuple[str, ...]:
    """The stores that forecasts start from, which have what becomes of them as well.

    Raises:
        UserError: they do not say which these are.
    """
    from credit_dp.forecast.writer import source_stores

    stores = source_stores(forecast.attributes)
    if not stores:
        raise UserError(
            "truth: needs the store that forecasts are compared with, like truth=era5.zarr, for "
            f"{forecast.where} does not say what it started from."
        )
    return stores


def build_request(keys: Mapping[str, Any]) -> "ScoreRequest":
    """What the keys ask for.

    Raises:
        UserError: a key is missing, or of another kind.
    """
    from credit_dp.evaluation.request import ScoreRequest

    for key, what in REQUIRED_KEYS.items():
        if not keys[key]:
            raise UserError(f"{key}: needs {what}.")
    dates = {key: to_texts(key, keys[key]) for key in ("dates", "climatology_dates")}
    for key, span in dates.items():
        if span:
            checks.date_range(key, span)
    if keys["climatology"] and dates["climatology_dates"]:
        raise UserError("climatology_dates: has no use beside climatology=. Leave one out.")
    for name, limits in keys["limits"].items():
        checks.limits(f"limits.{name}", limits)
    home = os.environ.get("HOME", ".")
    return ScoreRequest(
        forecast=keys["forecast"],
        truth=parse_stores(keys["truth"]),
        cache=os.environ.get("CREDIT_DP_CACHE", f"{home}/.cache/credit_dp"),
        variables=to_texts("variables", keys["variables"]),
        levels=to_whole_numbers("levels", keys["levels"]),
        hours=to_whole_numbers("hours", keys["hours"]),
        climatology=keys["climatology"],
        masked=to_texts("masked", keys["masked"]),
        limits=keys["limits"],
        **dates,
    )


def parse_stores(text: str) -> tuple[str, ...]:
    """The stores of a key, of which several are in brackets; none if it is empty.

    Raises:
        UserError: they can't be read.
    """
    if text.startswith("["):
        return to_texts("truth", parse_list("truth", text))
    return (text,) if text else ()


def summary_lines(card: "Scorecard") -> list[str]:
    """The scores that matter most, a table for each lead time that is shown."""
    from credit_dp.evaluation.metrics import SCORE_SOURCES
    from credit_dp.evaluation.report import table_lead_indices
    from credit_dp.evaluation.scorecard import three_digits

    lines = [
        f"{card.forecast}: {len(card.initial_times)} initial times"
        + (f", {card.members} members" if card.members > 1 else ""),
        f"climatology: {card.climatology}",
    ]
    of_scores = [(name, of) for name in SCORES_SHOWN for of in range(len(SCORE_SOURCES[name]))]
    short = {"forecast": "", "persistence": " persist.", "climatology": " climat."}
    names = [f"{name.upper()}{short[SCORE_SOURCES[name][of]]}" for name, of in of_scores]
    for lead in table_lead_indices(card.hours):
        rows = [
            (
                channel.name,
                card.units[c] or "-",
                *(three_digits(float(card.scores[name][of, lead, c])) for name, of in of_scores),
            )
            for c, channel in enumerate(card.channels)
        ]
        lines += ["", *format_table((f"{card.hours[lead]} h", "unit", *names), rows, left=2)]
    return [*lines, "", *(f"warning: {line}" for line in card.warnings())]


COMPARE_HELP = """\
{program} RUN RUN [RUN ...] [out=FOLDER]: puts the scores of runs beside each other.

RUN is the folder of a finished training run, or one that credit-dp evaluate wrote. Shown are the
keys in which the runs' configs differ, and each score of the same channel and lead time with its
difference from the first in percent, and which is better. A line says what makes scores not
comparable: other dates, other data, another grid.

  out=FOLDER    gets comparison.csv, comparison.json and comparison.html, with curves of all

  --help, -h    this text

Exit code: 0 if they are compared, 2 if one can't be.
"""


def compare_runs(arguments: Sequence[str], program: str) -> int:
    """Compare runs or scorecards; the exit code.

    Raises:
        UserError: one is no run, has not finished, or they have no score in common.
    """
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(COMPARE_HELP.format(program=program))
        return 0
    folders, out = split_arguments(args.overrides, program)
    from credit_dp.evaluation.comparison import compare, read_result

    names = distinct_names(folders)
    found = compare([read_result(*pair) for pair in zip(folders, names, strict=True)])
    lines = comparison_lines(found)
    if out:
        lines += ["", str(write_comparison(found, out))]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def split_arguments(given: Sequence[str], program: str) -> tuple[list[Path], str]:
    """The folders, and where to write.

    Raises:
        UserError: there are less than two, one comes twice, or a key does not exist.
    """
    folders, out = [], ""
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            folders.append(checks.expand_home("RUN", text))
        elif key == "out" and value:
            out = value
        else:
            raise UserError(
                f"{program}: needs the folders of runs, and perhaps out=FOLDER, got {text!r}."
                f"{did_you_mean(key, ['out'])}"
            )
    if len(folders) < 2:
        raise UserError(f"{program}: needs the folders of two runs or more, got {len(folders)}.")
    whole = [folder.absolute() for folder in folders]
    twice = next((folder for n, folder in enumerate(folders) if whole[n] in whole[:n]), None)
    if twice is not None:
        raise UserError(f"{program}: {twice} comes twice. Give each run once.")
    return folders, out


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them from each other."""
    parts = [folder.absolute().parts[1:] for folder in folders]
    for count in range(1, max(map(len, parts)) + 2):  # the root has no parts
        names = ["/".join(of[-count:]) for of in parts]
        if len(set(names)) == len(names):
            break
    return names


def write_comparison(found: "Comparison", out: str) -> Path:
    """Write all files of a comparison; where the page is.

    Raises:
        UserError: the folder is there already, or can't be written.
    """
    from credit_dp.evaluation.comparison import comparison_page
    from credit_dp.evaluation.report import ScoreFolder

    folder = ScoreFolder(checks.expand_home("out", out))
    with folder.cleanup_on_failure():
        folder.write_files(
            {
                "comparison.csv": found.to_csv(),
                "comparison.json": found.to_json(),
                "comparison.html": comparison_page(found),
            }
        )
    return folder.out / "comparison.html"


def comparison_lines(found: "Comparison") -> list[str]:
    """What matters most: what differs, and the scores of a few lead times."""
    from credit_dp.evaluation.comparison import (
        describe_wins,
        difference_headings,
        percent,
        rows_for_table,
    )
    from credit_dp.evaluation.scorecard import three_digits

    lines = list(found.warnings)
    if found.config:
        rows = [(key, *values) for key, values in found.config.items()]
        lines += ["", *format_table(("config", *found.names), rows, left=1 + len(found.names))]
    for score in (name for name in SCORES_SHOWN if name in found.scores):
        cells = [
            (
                row.key.channel,
                row.unit or "-",
                str(row.key.hours),
                *map(three_digits, row.values),
                *map(percent, row.percent[1:]),
                "-" if row.best_index is None else found.names[row.best_index],
            )
            for row in rows_for_table(found, score)
        ]
        heads = (
            score.upper(),
            "unit",
            "hours",
            *found.names,
            *difference_headings(found),
            "better",
        )
        lines += ["", *format_table(heads, cells, left=2), describe_wins(found, score)]
    return lines[1:] if lines[:1] == [""] else lines
