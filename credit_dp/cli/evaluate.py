"""The evaluate and compare commands: score stored forecasts, and compare the scores of runs."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.cli.arguments import (
    common_parser,
    parse_arguments,
    parse_list,
    read_folders_and_keys,
    read_keys,
    split_keys,
    to_texts,
    to_whole_numbers,
)
from credit_dp.cli.forecast import TrainedRun, check_overrides, forecast_config
from credit_dp.cli.forecast_plot import planet_of_forecast
from credit_dp.cli.output import format_table, print_lines
from credit_dp.errors import UserError, counted
from credit_dp.plain_text import superscript

if TYPE_CHECKING:
    import numpy as np

    from credit_dp.config import Config
    from credit_dp.distributed.launcher import RankInfo
    from credit_dp.evaluation.alignment import ScoreRequest
    from credit_dp.evaluation.comparison import Comparison
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.evaluation.scorecard import Scorecard
    from credit_dp.evaluation.station_scores import StationScores
    from credit_dp.evaluation.stations import StationOptions


EVALUATE_HELP = """\
{program} forecast=STORE [truth=STORE] out=FOLDER: scores forecasts, of this or any other program.
{program} forecast=STORE stations=FILE out=FOLDER: scores them against observations at stations.
{program} checkpoint=RUN [truth=STORE] out=FOLDER: scores forecasts while a model makes them.

A forecast store has the form of WeatherBench 2, in zarr or netCDF: dims time (initial time),
prediction_timedelta, latitude, longitude, and, if it has them, level and number (ensemble members).
A folder or pattern of netCDF files with a band of rows each is joined. STORE may also be a GRIB
file, or the folder of a run that has one forecast. The truth has any form that
data.store= accepts, several stores in brackets; without it a forecast of `credit-dp forecast` is
compared with the stores that it started from. If the truth is a region, a forecast on another grid
that covers it is interpolated bilinearly. Persistence and climatology are scored as well.
FOLDER gets scores.csv, scores.json, scorecard.html, a single self-contained page, of most grids
spectra.csv, of ensembles rank_histograms.csv, and scores_by_date.zarr with what each initial time
has to the scores.

With checkpoint=RUN, the folder of a run or of a checkpoint, forecasts are not written. All keys of
`credit-dp forecast` for its config, such as parallel.domain=2, parallel.data=2 and device=cpu, can
be given, and members=, perturb= and perturb_seed=. The rim of a region is that of the run's data.
If it is killed, the same command continues where it stopped.

  dates=[A,B]                initial times from A to B every 12 hours; dates=[A,B,24h] every 24; by
                             default those of the run's data.dates.test
  hours=[24,72,120]          lead times; by default the run's trainer.evaluate_hours

Observations are in netCDF or zarr, with the dims time and station and the latitudes and longitudes
of the stations, or in CSV with the columns station, time, latitude, longitude and one of numbers
for each variable, like t2m, 't2m [degC]' or on a level temperature_500, or as in the archive of
ASOS. FILE may also be a folder of ISD-Lite, with isd-history.csv in it, or of radiosondes in IGRA's
format. Forecasts are interpolated. FOLDER gets stations.html, a page with maps of errors,
scores.csv, stations.csv with the scores of each station, hours.csv with those of each hour of the
day and, of ensembles, rank_histograms.csv. Of the keys below, those down to weights and dates,
hours, variables, levels, regions, masked and limits have an effect.

  missing=[-9999,M]          values that mean missing at stations, beside what is empty
  tolerance=15min            time from a date of the forecast up to which the nearest observation of
                             a station counts as one of that date; without it only those at the date
  interpolate=nearest        to stations from the nearest row and column; without it bilinearly
  orography=STORE            has geopotential_at_surface on the forecast's grid: corrects
                             2m_temperature for the elevation of stations, by lapse_rate=6.5 K/km
  weights=density            stations count one over the number of stations within 75 km
  grid=121x240               regrid the truth to this many rows and columns while it is read, with
                             regrid=conservative or bilinear; without truth= as for the forecast
  climatology=STORE          by hour and dayofyear, as in WeatherBench 2
  climatology_dates=[A,B]    compute it from these dates of the truth; without either key, from
                             dates before the first forecast, or all if that is less than a year
  dates=[A,B]                initial times from A to B; all without it
  hours=[24,72,120]          lead times; all without it
  variables=[NAME,...]       all variables of the forecast without it
  levels=[500,850]           all levels of the forecast without it
  regions=[tropics,europe]   regions of WeatherBench 2 to score besides the globe
  events={{NAME:[">1 mm"]}}    events to score: above (>) or below (<) a value, in the unit of the
                             truth or another, or a quantile of date and place, like ">95%"
  fss=[100,300]              distances in km of the fractions skill score of events
  boundary=3                 rows and columns at each edge of a region to leave out; without it
                             those that a forecast of `credit-dp forecast` was given
  masked=[NAME,...]          variables that have no values at some points, such as over land
  limits={{NAME:[LOW,HIGH]}}   range of values, in place of the physical one; null: any value

  --help, -h    this text

Exit code: 0 if it is scored, 2 if a key or a store is wrong; then nothing is written.
"""

# With checkpoint=; the others are those of forecasts.
KEYS_OF_CHECKPOINTS: Mapping[str, Any] = {"members": 0, "perturb": 0.0, "perturb_seed": 0}
LONGEST_DISTANCE = 20_000  # km, half round the globe
DEFAULT_STRIDE = "12h"  # between initial times, as in WeatherBench 2

EVALUATE_KEYS: Mapping[str, Any] = {
    "forecast": "",
    "checkpoint": "",
    "truth": "",
    "stations": "",
    "missing": [],
    "tolerance": "",
    "interpolate": "",
    "orography": "",
    "lapse_rate": None,
    "weights": "",
    "out": "",
    "grid": None,
    "regrid": None,
    "climatology": "",
    "climatology_dates": [],
    "dates": [],
    "hours": [],
    "variables": [],
    "levels": [],
    "regions": [],
    "events": {},
    "fss": [],
    "boundary": None,
    "masked": [],
    "limits": {},
    **KEYS_OF_CHECKPOINTS,
}
# With stations= there are no fields to compare with.
KEYS_OF_FIELDS = (
    *("truth", "grid", "regrid", "climatology", "climatology_dates"),
    *("boundary", "events", "fss"),
)
KEYS_OF_STATIONS = ("missing", "tolerance", "interpolate", "orography", "lapse_rate", "weights")
# Of columns in the terminal, after the score's name.
SOURCE_LABELS = {
    "forecast": "",
    "persistence": " persist.",
    "climatology": " climat.",
    "truth": " truth",
}


def evaluate(arguments: Sequence[str], program: str) -> int:
    """Score a forecast store; return the exit code."""
    if any(text.startswith("checkpoint=") for text in arguments):
        return evaluate_checkpoint(arguments, program)
    keys = read_keys(arguments, program, EVALUATE_HELP, EVALUATE_KEYS)
    if keys is None:
        return 0
    for key, default in KEYS_OF_CHECKPOINTS.items():
        if keys[key] != default:
            raise UserError(f"{key}: has an effect with checkpoint= only. Leave it out.")
    request = build_request(keys)
    # Imported here because torch takes seconds, which --help does not need.
    from rich.console import Console

    from credit_dp.evaluation.score import score
    from credit_dp.evaluation.score_folder import ScoreFolder
    from credit_dp.evaluation.station_page import station_page
    from credit_dp.evaluation.stations import score_stations
    from credit_dp.training.console import Screen, collect_data_notes

    screen = Screen(Console(file=sys.stdout))
    forecast = open_forecast(request.forecast)
    if not keys["out"]:  # after a forecast that does not exist, which is the first key
        raise UserError("out: needs the folder to write, like out=scores.")
    if not keys["stations"]:
        from credit_dp.forecast.format import given_width, read_settings_attribute

        settings = read_settings_attribute(forecast.attributes)
        width = given_width(forecast.attributes)
        request = request.with_origin(settings, width, forecast.where)
    # Made before scoring, so that a folder that can't be written is refused at once.
    folder = ScoreFolder(checks.expand_home("out", keys["out"]))
    with folder.cleanup_on_failure():
        if keys["stations"]:
            with screen.report() as report:
                options = replace(station_options(keys), planet=planet_of_forecast(forecast))
                at_stations = score_stations(request, forecast, keys["stations"], report, options)
            page = {"stations.html": station_page(at_stations)}
            folder.write_files(at_stations.tables() | page)
            lines = [*station_lines(at_stations), "", f"{folder.out / 'stations.html'}"]
        else:
            with screen.report() as report, collect_data_notes() as notes:
                card = score(request, forecast, report, folder.temporary)
            folder.write(card)
            lines = [f"note: {note}" for note in notes]
            lines += [*summary_lines(card), f"{folder.out / 'scorecard.html'}"]
    print_lines(*lines)
    return 0


def evaluate_checkpoint(arguments: Sequence[str], program: str) -> int:
    """Score the forecasts of a trained model while it makes them; return the exit code."""
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(EVALUATE_HELP.format(program=program))
        return 0
    keys, overrides = split_keys(args.overrides, EVALUATE_KEYS)
    check_overrides(overrides, EVALUATE_KEYS, program)
    for key in ("forecast", "stations", *KEYS_OF_STATIONS):
        if keys[key] != EVALUATE_KEYS[key]:
            raise UserError(f"{key}: has no effect together with checkpoint=. Leave one out.")
    if not keys["out"]:
        raise UserError("out: needs the folder to write, like out=scores.")
    stride = DEFAULT_STRIDE
    if len(keys["dates"]) == 3:
        *keys["dates"], stride = keys["dates"]
    request = build_request(keys | {"forecast": keys["checkpoint"]})
    from credit_dp.distributed.launch import launch
    from credit_dp.forecast.boundary import TRUTH
    from credit_dp.forecast.request import FORECAST_KEYS
    from credit_dp.forecast.score_forecasts import ScoredForecastConfig, words_of_scores

    run = TrainedRun(keys["checkpoint"], overrides, program.rpartition(" ")[2])
    hours = request.hours or tuple(run.config.trainer.evaluate_hours)
    with words_of_scores():
        config = forecast_config(
            run,
            {
                **FORECAST_KEYS,
                **{key: keys[key] for key in KEYS_OF_CHECKPOINTS},
                "init": initial_times(request.dates, run, max(hours), str(stride)),
                "lead": f"{max(hours)}h",
                "out": keys["out"],
                "boundary": TRUTH if run.config.data.boundary else "",
            },
        )
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    # All initial times of the forecasts are scored.
    scored = replace(request, dates=(), hours=hours)
    config = ScoredForecastConfig(**values, score=scored)
    return launch(config, "credit_dp.cli.evaluate:score_on_rank")


def initial_times(dates: Sequence[str], run: "TrainedRun", longest: int, stride: str) -> str:
    """Return initial times in the words of `credit-dp forecast`.

    By default they are those of the run's test dates, at which all lead times are test dates, too.
    """
    import numpy as np

    from credit_dp.data.dates import date_interval

    calendar, test = run.calendar, run.config.data.dates.test
    key, given = ("dates", dates) if dates else ("data.dates.test", test)
    if not given:
        raise UserError("dates: needs initial times, like dates=[2020-01-01,2020-12-31].")
    first, last = (
        date_interval(key, given[0], calendar)[0],
        date_interval(key, given[1], calendar)[1],
    )
    if not dates:
        last = last - np.timedelta64(longest, "h")
    return f"{calendar.text(first)}/{calendar.text(last)}/{stride}"


def score_on_rank(config: "Config", ranks: "RankInfo") -> int:
    """Score the forecasts of a `ScoredForecastConfig`, and return the exit code; collective."""
    from credit_dp.distributed.mesh import build_manager, rank_device
    from credit_dp.forecast.score_forecasts import ScoredForecastConfig, score_forecasts
    from credit_dp.training.console import screen_for

    if not isinstance(config, ScoredForecastConfig):
        raise TypeError(f"needs a ScoredForecastConfig, got {type(config).__name__}")
    manager = build_manager(config.parallel, ranks)
    screen = screen_for(ranks.rank)
    card = score_forecasts(config, manager, rank_device(config, ranks), screen)
    if card is not None:
        print_lines(*summary_lines(card), str(config.request.target / "scorecard.html"))
    return 0


def open_forecast(where: str) -> "ForecastStore":
    """Open the forecasts at a path or address, or in a run's folder.

    Files with a band of rows each are joined.
    """
    from credit_dp.data.sources.address import is_remote, local_path
    from credit_dp.evaluation.alignment import translate_error_keys
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.forecast import open_sharded
    from credit_dp.training.run_folder import RunFolder

    with translate_error_keys("forecast"):
        path = local_path(where)
        if not is_remote(where) and RunFolder(path).config.is_file():
            path = forecast_of_run(path)
            where = str(path)
        if not is_remote(where) and (has_magic(where) or path.is_dir()):
            refuse_grib_files(path, where)
            if has_magic(where) or any(path.glob("*.nc")):
                return ForecastStore(open_sharded(path), where)
        return ForecastStore.open(where)


def refuse_grib_files(path: Path, where: str) -> None:
    """Refuse a folder or pattern of GRIB files."""
    from credit_dp.data.sources.grib_file import is_grib

    files = path.glob("*") if path.is_dir() else path.parent.glob(path.name)
    grib = next((x for x in files if x.is_file() and is_grib(x)), None)
    if grib is not None:
        several = path / f"*{grib.suffix}" if path.is_dir() else path
        raise UserError(
            f"forecast: forecasts in GRIB are read from one file, but {where} has several. Join "
            f"them, as with `cat {several} > all.grib`, and give forecast=all.grib."
        )


def forecast_of_run(run: Path) -> Path:
    """Return the forecast that `credit-dp forecast` has written into a run's folder.

    Raises:
        UserError: there is none, or there are several.
    """
    from credit_dp.cli.forecast import FILE_NAMES

    names = FILE_NAMES.values()
    found = [name for name in names if (run / name).exists()]
    if len(found) == 1:
        return run / found[0]
    if found:
        raise UserError(
            f"forecast: {run} has several forecasts, {', '.join(found)}. Set it to one of them, "
            f"like forecast={run / found[0]}."
        )
    raise UserError(
        f"forecast: {run} is the folder of a run without a forecast ({', '.join(names)}). Make one "
        "with `credit-dp forecast`, or set forecast to one elsewhere."
    )


def build_request(keys: Mapping[str, Any]) -> "ScoreRequest":
    """Return the request that the keys describe.

    Raises:
        UserError: a key is missing, or its value has the wrong type.
    """
    from credit_dp.data.grid import check_regions
    from credit_dp.evaluation.alignment import ScoreRequest

    if not keys["forecast"]:
        raise UserError("forecast: needs the store of forecasts, like forecast=forecast.zarr.")
    dates = {key: to_texts(key, keys[key]) for key in ("dates", "climatology_dates")}
    for key, date_range in dates.items():
        if date_range:
            checks.date_range(key, date_range)
    if keys["climatology"] and dates["climatology_dates"]:
        raise UserError(
            "climatology_dates: has no effect together with climatology=. Leave one out."
        )
    regions = to_texts("regions", keys["regions"])
    check_regions(regions)
    for name, limits in keys["limits"].items():
        checks.limits(f"limits.{name}", limits)
    if keys["boundary"] is not None:
        to_whole_numbers("boundary", [keys["boundary"]])
    if keys["stations"]:
        unused = next((key for key in KEYS_OF_FIELDS if keys[key] != EVALUATE_KEYS[key]), None)
        if unused is not None:
            raise UserError(f"{unused}: has no effect together with stations=. Leave one out.")
    else:
        for key in KEYS_OF_STATIONS:
            if keys[key] != EVALUATE_KEYS[key]:
                raise UserError(f"{key}: has an effect on stations= only. Leave it out.")
    station_options(keys)
    home = os.environ.get("HOME", ".")
    return ScoreRequest(
        forecast=keys["forecast"],
        truth=parse_stores(keys["truth"]),
        cache=os.environ.get("CREDIT_DP_CACHE", f"{home}/.cache/credit_dp"),
        variables=to_texts("variables", keys["variables"]),
        levels=to_whole_numbers("levels", keys["levels"]),
        hours=to_whole_numbers("hours", keys["hours"]),
        grid=keys["grid"],
        regrid=keys["regrid"],
        climatology=keys["climatology"],
        masked=to_texts("masked", keys["masked"]),
        limits=keys["limits"],
        regions=regions,
        events=keys["events"],
        fss=to_distances(keys["fss"], keys["events"]),
        boundary=keys["boundary"],
        **dates,
    )


def to_distances(distances: Sequence[Any], events: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the distances of the key `fss`.

    Raises:
        UserError: a distance is not above 0, or there are no events.
    """
    for distance in distances:
        is_number = isinstance(distance, int | float) and not isinstance(distance, bool)
        if not is_number or not 0 < distance <= LONGEST_DISTANCE:
            raise UserError(
                f"fss: needs distances in km above 0 and up to {LONGEST_DISTANCE}, like [100,300], "
                f"got {distance}."
            )
    checks.no_repeats("fss", distances)
    if distances and not events:
        raise UserError("fss: has an effect on events= only. Leave it out, or give events=.")
    return tuple(map(float, distances))


def station_options(keys: Mapping[str, Any]) -> "StationOptions":
    """Return what the keys for stations say.

    Raises:
        UserError: one has a value that it can't have, or no effect.
    """
    from credit_dp.evaluation.stations import StationOptions

    for key, choices in {"interpolate": ("bilinear", "nearest"), "weights": ("density",)}.items():
        if keys[key] and keys[key] not in choices:
            raise UserError(f"{key}: needs {' or '.join(choices)}, got {keys[key]}.")
    rate = keys["lapse_rate"]
    if rate is not None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate):
            raise UserError(f"lapse_rate: needs a number in K/km, like 6.5, got {rate}.")
        if not keys["orography"]:
            raise UserError("lapse_rate: has an effect with orography= only. Leave it out.")
    options = StationOptions(
        missing=to_texts("missing", keys["missing"]),
        tolerance=parse_tolerance(keys["tolerance"]),
        nearest=keys["interpolate"] == "nearest",
        orography=keys["orography"],
        by_density=keys["weights"] == "density",
    )
    return options if rate is None else replace(options, lapse_rate=float(rate))


def parse_tolerance(text: str) -> "np.timedelta64 | None":
    """Return the time of the key `tolerance`; None without one.

    Raises:
        UserError: it is none in hours or minutes.
    """
    match = re.fullmatch(r"(\d{1,4}) ?(min|h)", str(text))
    if match is None and text:
        raise UserError(f"tolerance: needs minutes or hours, like 15min or 1h, got {text}.")
    import numpy as np

    minutes = 0 if match is None else int(match[1]) * (60 if match[2] == "h" else 1)
    return None if match is None else np.timedelta64(minutes, "m")


def station_lines(scores: "StationScores") -> list[str]:
    """Return what the terminal shows of scores at stations, for a few lead times."""
    from credit_dp.evaluation.station_page import HEADINGS, station_tables

    lines = [f"{scores.observations.where}: {scores.coverage}"]
    lines += [f"note: {note}" for note in scores.notes]
    for title, rows in station_tables(scores):
        lines += ["", *format_table((title, *HEADINGS), rows, left=2)]
    return lines


def parse_stores(text: str) -> tuple[str, ...]:
    """Return the stores of the key `truth`: several if it has brackets, none if it is empty."""
    if text.startswith("["):
        return to_texts("truth", parse_list("truth", text))
    return (text,) if text else ()


def summary_lines(card: "Scorecard") -> list[str]:
    """Return the most important scores: a table for each of a few lead times."""
    from credit_dp.evaluation.metric_table import METRICS
    from credit_dp.evaluation.score_folder import table_lead_indices
    from credit_dp.evaluation.scorecard import three_digits

    lines = [
        f"{card.forecast}: {counted(len(card.initial_times), 'initial time')}"
        + (f", {card.members} members" if card.members > 1 else "")
        + (f", without {card.boundary} rows and columns at each edge" if card.boundary else ""),
        f"climatology: {card.climatology}",
    ]
    columns = [
        (name, index, source)
        for name in card.scores
        if METRICS[name].in_terminal
        for index, source in enumerate(METRICS[name].sources)
    ]
    headings = [f"{name.upper()}{SOURCE_LABELS[source]}" for name, _, source in columns]
    for region, scores in {"": card.scores, **card.regions}.items():
        for lead in table_lead_indices(card.hours):
            rows = [
                (
                    channel.name,
                    superscript(card.units[c]) or "-",
                    *(
                        three_digits(float(scores[name][source, lead, c]))
                        for name, source, _ in columns
                    ),
                )
                for c, channel in enumerate(card.channels)
            ]
            title = f"{card.hours[lead]} h, {region}".removesuffix(", ")
            lines += ["", *format_table((title, "unit", *headings), rows, left=2)]
    return [*lines, "", *(f"warning: {line}" for line in card.warnings())]


COMPARE_HELP = """\
{program} RUN RUN [RUN ...] [out=FOLDER]: compares the scores of runs.

RUN is the folder of a finished training run, or one that credit-dp evaluate wrote. Shows the keys
in which the runs' configs differ, and each score of the same field or event and lead time, with its
difference from the first run in percent, and the best run. Warns if scores are not comparable,
because of other dates, other data or another grid.

  out=FOLDER    gets comparison.csv, comparison.json and comparison.html, with curves of all scores

  --help, -h    this text

Exit code: 0 if the runs are compared, 2 if one can't be.
"""


def compare_runs(arguments: Sequence[str], program: str) -> int:
    """Compare runs or scorecards; return the exit code.

    Raises:
        UserError: there are less than two folders, one is given twice, or one has no scores.
    """
    parsed = read_folders_and_keys(arguments, program, COMPARE_HELP, {"out": ""}, "RUN")
    if parsed is None:
        return 0
    folders, keys = parsed
    if len(folders) < 2:
        raise UserError(f"{program}: needs the folders of at least two runs, got {len(folders)}.")
    absolute = [folder.absolute() for folder in folders]
    for index, folder in enumerate(folders):
        if absolute[index] in absolute[:index]:
            raise UserError(f"{program}: {folder} is given twice. Give each run once.")
    from credit_dp.evaluation.comparison import compare, read_result

    names = distinct_names(folders)
    comparison = compare([read_result(*pair) for pair in zip(folders, names, strict=True)])
    lines = comparison_lines(comparison)
    if keys["out"]:
        lines += ["", str(write_comparison(comparison, keys["out"]))]
    print_lines(*lines)
    return 0


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as are needed to tell them apart."""
    paths = [folder.absolute().parts[1:] for folder in folders]
    # Ends with the break: with all their parts, the paths of different folders differ.
    for count in range(1, max(map(len, paths)) + 2):  # the root has no parts
        names = ["/".join(names_above[-count:]) for names_above in paths]
        if len(set(names)) == len(names):
            break
    return names


def write_comparison(comparison: "Comparison", out: str) -> Path:
    """Write all files of a comparison; return the path of the page."""
    from credit_dp.evaluation.comparison import comparison_page
    from credit_dp.evaluation.score_folder import ScoreFolder

    folder = ScoreFolder(checks.expand_home("out", out))
    with folder.cleanup_on_failure():
        folder.write_files(
            {
                "comparison.csv": comparison.to_csv(),
                "comparison.json": comparison.to_json(),
                "comparison.html": comparison_page(comparison),
            }
        )
    return folder.out / "comparison.html"


def comparison_lines(comparison: "Comparison") -> list[str]:
    """Return warnings, the keys that differ, and the scores of a few lead times."""
    from credit_dp.evaluation.comparison import (
        compared_metric,
        describe_wins,
        difference_headings,
        format_percent,
        rows_for_table,
    )
    from credit_dp.evaluation.scorecard import three_digits

    lines = list(comparison.warnings)
    if comparison.config:
        rows = [(key, *values) for key, values in comparison.config.items()]
        lines += [
            "",
            *format_table(("config", *comparison.names), rows, left=1 + len(comparison.names)),
        ]
    for score in (name for name in comparison.scores if compared_metric(name).in_terminal):
        cells = [
            (
                row.key.channel,
                superscript(row.unit) or "-",
                str(row.key.hours),
                *map(three_digits, row.values),
                *map(format_percent, row.percent[1:]),
                "-" if row.best_index is None else comparison.names[row.best_index],
            )
            for row in rows_for_table(comparison, score)
        ]
        headings = (
            compared_metric(score).label,
            "unit",
            "hours",
            *comparison.names,
            *difference_headings(comparison),
            "better",
        )
        lines += ["", *format_table(headings, cells, left=2), describe_wins(comparison, score)]
    return lines[1:] if lines[:1] == [""] else lines
