"""The evaluate command: `credit-dp evaluate forecast=STORE truth=STORE out=FOLDER` scores it."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.command.plain_keys import listed, numbers, read_plain_keys, texts
from credit_dp.command.tables import table
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.evaluation.score_request import ScoreRequest
    from credit_dp.evaluation.scorecard import Scorecard

HELP = """\
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

KEYS: Mapping[str, Any] = {
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
NEEDED = {
    "forecast": "the store of forecasts, like forecast=forecast.zarr",
    "out": "the folder to write, like out=scores",
}
SCORES_SHOWN = ("rmse", "acc")


def evaluate(arguments: Sequence[str], program: str) -> int:
    """Score a forecast store; the exit code.

    Raises:
        UserError: a key or a store is not as needed.
    """
    keys = read_plain_keys(arguments, program, HELP, KEYS)
    if keys is None:
        return 0
    request = request_of(keys)
    # Here, for torch takes seconds: not for --help.
    from rich.console import Console

    from credit_dp.evaluation.score_files import ScoreFolder
    from credit_dp.evaluation.scoring import score
    from credit_dp.training.screen import Screen, data_notes

    screen = Screen(Console(file=sys.stdout))
    forecast = opened(request.forecast)
    request = replace(request, truth=request.truth or truth_of(forecast))
    folder = ScoreFolder(checks.home_replaced("out", keys["out"]))
    with folder.held():
        with screen.report() as report, data_notes() as notes:
            card = score(request, forecast, report)
        folder.write(card)
    notes = [f"note: {note}" for note in notes]
    sys.stdout.write("\n".join([*notes, *summary(card), f"{folder.out / 'scorecard.html'}", ""]))
    return 0


def opened(where: str) -> "ForecastStore":
    """The forecasts at a path or address; bands in files of their own are joined.

    Raises:
        UserError: there are none, or they are not of the form of forecasts.
    """
    from credit_dp.data.sources.address import is_remote, local_path
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.evaluation.score_request import keys_for
    from credit_dp.forecast import open_sharded

    with keys_for("forecast"):
        path = local_path(where)
        if not is_remote(where) and (has_magic(where) or any(path.glob("*.nc"))):
            return ForecastStore(open_sharded(path), where)
        return ForecastStore.open(where)


def truth_of(forecast: "ForecastStore") -> tuple[str, ...]:
    """The stores that forecasts start from, which have what becomes of them as well.

    Raises:
        UserError: they do not say which these are.
    """
    from credit_dp.forecast.writer import stores_of_origin

    stores = stores_of_origin(forecast.attributes)
    if not stores:
        raise UserError(
            "truth: needs the store that forecasts are compared with, like truth=era5.zarr, for "
            f"{forecast.where} does not say what it started from."
        )
    return stores


def request_of(keys: Mapping[str, Any]) -> "ScoreRequest":
    """What the keys ask for.

    Raises:
        UserError: a key is missing, or of another kind.
    """
    from credit_dp.evaluation.score_request import ScoreRequest

    for key, what in NEEDED.items():
        if not keys[key]:
            raise UserError(f"{key}: needs {what}.")
    dates = {key: texts(key, keys[key]) for key in ("dates", "climatology_dates")}
    for key, span in dates.items():
        if span:
            checks.span(key, span)
    if keys["climatology"] and dates["climatology_dates"]:
        raise UserError("climatology_dates: has no use beside climatology=. Leave one out.")
    for name, limits in keys["limits"].items():
        checks.limits(f"limits.{name}", limits)
    home = os.environ.get("HOME", ".")
    return ScoreRequest(
        forecast=keys["forecast"],
        truth=stores_of(keys["truth"]),
        cache=os.environ.get("CREDIT_DP_CACHE", f"{home}/.cache/credit_dp"),
        variables=texts("variables", keys["variables"]),
        levels=numbers("levels", keys["levels"]),
        hours=numbers("hours", keys["hours"]),
        climatology=keys["climatology"],
        masked=texts("masked", keys["masked"]),
        limits=keys["limits"],
        **dates,
    )


def stores_of(text: str) -> tuple[str, ...]:
    """The stores of a key, of which several are in brackets; none if it is empty.

    Raises:
        UserError: they can't be read.
    """
    if text.startswith("["):
        return texts("truth", listed("truth", text))
    return (text,) if text else ()


def summary(card: "Scorecard") -> list[str]:
    """The scores that matter most, a table for each lead time that is shown."""
    from credit_dp.evaluation.score_page import table_leads
    from credit_dp.evaluation.table import three_digits
    from credit_dp.evaluation.variable_scores import SOURCES

    lines = [
        f"{card.forecast}: {len(card.initial_times)} initial times"
        + (f", {card.members} members" if card.members > 1 else ""),
        f"climatology: {card.climatology}",
    ]
    of_scores = [(name, of) for name in SCORES_SHOWN for of in range(len(SOURCES[name]))]
    short = {"forecast": "", "persistence": " persist.", "climatology": " climat."}
    names = [f"{name.upper()}{short[SOURCES[name][of]]}" for name, of in of_scores]
    for lead in table_leads(card.hours):
        rows = [
            (
                channel.name,
                card.units[c] or "-",
                *(three_digits(float(card.scores[name][of, lead, c])) for name, of in of_scores),
            )
            for c, channel in enumerate(card.channels)
        ]
        lines += ["", *table((f"{card.hours[lead]} h", "unit", *names), rows, left=2)]
    return [*lines, "", *(f"warning: {line}" for line in card.warnings())]
