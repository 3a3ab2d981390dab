"""Compare training runs or scorecards: where their configs differ, and which scores are better.

`read_result` reads each folder, `compare` puts the common scores into rows with warnings about
what makes them incomparable, and `comparison_page` writes them as HTML. The order of metrics and
which values are better are those of `metric_table`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np
import xarray as xr
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp.config import by_dotted_key
from credit_dp.data.grid import GLOBAL
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.drawing import draw_or_warn
from credit_dp.evaluation.events import event_score
from credit_dp.evaluation.figure_style import (
    SERIES,
    SOURCE_LINES,
    escape_mathtext,
    figure_style,
    series_colour,
    title_text,
    with_unit,
)
from credit_dp.evaluation.metric_table import (
    BASELINES,
    FORECAST,
    METRICS,
    Better,
    Metric,
    comparison_metrics,
    no_unit,
    panel_name,
)
from credit_dp.evaluation.pages import (
    DifferenceTable,
    SignificanceTable,
    Triangle,
    by_variable,
    difference_table,
    lead_label,
    render_page,
    shown_lead_indices,
    triangle,
)
from credit_dp.evaluation.score_folder import figure_data_uri, table_lead_indices
from credit_dp.evaluation.score_plots import NUMBER, add_legend, create_panels, lead_axis
from credit_dp.evaluation.scorecard import MODEL, headlines, three_digits
from credit_dp.evaluation.scores_by_date import NAME as BY_DATE_FILE
from credit_dp.evaluation.scores_by_date import (
    Place,
    Significance,
    compare_by_date,
    compare_events_by_date,
    read_events_by_date,
    read_scores_by_date,
    scores_from_counts,
)
from credit_dp.plain_text import csv_text

RUN, CARD = "training run", "scorecard"
CONFIG_FILE, METRICS_FILE, SCORES_FILE = "config.yaml", "metrics.json", "scores.json"
IDENTITY_KEYS = ("run.name", "run.dir")  # keys in which runs always differ
# The setup that scores depend on besides the forecasts: config keys by the name in warnings.
RUN_SETUP_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "data": ("data.name", "data.store", "data.quickstart"),
        "dates": ("data.dates.test",),
        "grid": ("data.grid",),
    }
)
CARD_SETUP_KEYS: Mapping[str, str] = MappingProxyType(
    {"truth": "truth", "dates": "initial_times", "grid": "grid", "climatology": "climatology"}
)


class ScoreKey(NamedTuple):
    """Identifies a score: its name, channel, lead time and region."""

    score: str
    channel: str
    hours: int
    region: str = GLOBAL


@final
@dataclass(frozen=True)
class EvaluationResult:
    """The scores of one run or scorecard.

    Attributes:
        kind: `RUN` or `CARD`.
        scores: by key, then by source: `forecast`, `persistence` and so on. Scores that are
            undefined or infinite are left out; so are keys without a score of the forecast.
        setup: what scores depend on besides the forecasts.
        config: a run's config, flat, without the keys in which runs always differ.
        by_date: a scorecard's scores of each initial time, see `scores_by_date`.
        events: its counts of events of each initial time. The channel of their scores in `scores`
            is that of the event with its text: `2m_temperature >303.15`.
    """

    name: str
    kind: str
    units: Mapping[str, str]
    scores: Mapping[ScoreKey, Mapping[str, float]]
    setup: Mapping[str, object]
    config: Mapping[str, object]
    by_date: xr.Dataset | None = None
    events: xr.Dataset | None = None


def read_result(folder: Path, name: str) -> EvaluationResult:
    """Read the folder of a training run or of a scorecard.

    Raises:
        UserError: the folder is neither, the run has not finished, or a file is damaged.
    """
    if (folder / SCORES_FILE).is_file():
        return _read_scorecard(folder, name)
    if (folder / METRICS_FILE).is_file() and (folder / CONFIG_FILE).is_file():
        return _read_run(folder, name)
    if (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"{folder}: this run has not finished: it has no {METRICS_FILE}. Resume it, or leave "
            "it out."
        )
    what = f"has neither {METRICS_FILE} nor {SCORES_FILE}" if folder.is_dir() else "is not a folder"
    raise UserError(
        f"{folder}: {what}. Give the folder of a training run, which has {METRICS_FILE}, or of "
        f"credit-dp evaluate, which has {SCORES_FILE}."
    )


def _read_run(folder: Path, name: str) -> EvaluationResult:
    content = _read_json(folder / METRICS_FILE)
    config = by_dotted_key(_read_config(folder / CONFIG_FILE))
    setup = {
        aspect: [(key, config[key]) for key in config if key.startswith(keys)]
        for aspect, keys in RUN_SETUP_KEYS.items()
    }
    comparable = {key: value for key, value in config.items() if key not in IDENTITY_KEYS}
    try:
        nested: dict[str, dict[str, Any]] = {channel: {} for channel in content["rmse"]}
        # The file of a run has other keys, too, and only the metrics that runs compute.
        for metric in (key for key in METRICS if key in content):
            for channel, leads in content[metric].items():
                nested[channel][metric] = leads
        setup["dates"].append(("initial_times", content["initial_times"]))
        return EvaluationResult(
            name=name,
            kind=RUN,
            units=dict(content["units"]),
            scores=_flatten_scores(nested),
            setup=setup,
            config=comparable,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged_error(folder / METRICS_FILE, error) from error


def _read_scorecard(folder: Path, name: str) -> EvaluationResult:
    content = _read_json(folder / SCORES_FILE)
    try:
        scores = _flatten_scores(content["scores"])
        for region, nested in content.get("regions", {}).items():
            scores |= _flatten_scores(nested, region)
        by_date, events = _read_by_date(folder)
        units = dict(content["units"])
        if events is not None:
            scores |= _flatten_event_scores(events)
            channels = zip(events["event"].values, events["event_channel"].values, strict=True)
            units |= {str(event): units[channel] for event, channel in channels}
        return EvaluationResult(
            name=name,
            kind=CARD,
            units=units,
            scores=scores,
            setup={aspect: content[key] for aspect, key in CARD_SETUP_KEYS.items()},
            config={},
            by_date=by_date,
            events=events,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged_error(folder / SCORES_FILE, error) from error


def _read_by_date(folder: Path) -> tuple[xr.Dataset | None, xr.Dataset | None]:
    try:
        ranked = [name for name, metric in METRICS.items() if metric.better.ranks_sources]
        return read_scores_by_date(folder, ranked), read_events_by_date(folder)
    except Exception as error:  # whatever zarr, its codecs or xarray raise for a damaged store
        raise _damaged_error(folder / BY_DATE_FILE, error) from error


def _flatten_scores(
    nested: Mapping[str, Any], region: str = GLOBAL
) -> dict[ScoreKey, dict[str, float]]:
    flat: dict[ScoreKey, dict[str, float]] = {}
    for channel, scores in nested.items():
        for score, leads in scores.items():
            if score not in METRICS:
                continue  # of a script, or of another version
            for lead, sources in leads.items():
                # A run's metrics say "model" where a scorecard says "forecast".
                values = {
                    FORECAST if source == MODEL else source: float(value)
                    for source, value in sources.items()
                    if value is not None and math.isfinite(value)
                }
                if FORECAST in values:
                    key = ScoreKey(score, channel, int(lead.removesuffix("h")), region)
                    flat[key] = values
    return flat


def _flatten_event_scores(events: xr.Dataset) -> dict[ScoreKey, dict[str, float]]:
    flat: dict[ScoreKey, dict[str, float]] = {}
    for name, scores in scores_from_counts(events.sum("time")).data_vars.items():
        # The forecast comes first: a key without a score of the forecast is left out.
        by_place = scores.transpose("source", "region", "event", "prediction_timedelta")
        for (source, region, event, lead), value in by_place.to_series().dropna().items():
            key = ScoreKey(str(name), event, round(lead.total_seconds() / 3600), region)
            if source == FORECAST or key in flat:
                flat.setdefault(key, {})[source] = float(value)
    return flat


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged_error(path, error) from error


def _read_config(path: Path) -> dict[Any, Any]:
    try:
        config = checks.load_yaml(path)
        if not isinstance(config, dict):
            raise TypeError("it is no table of keys")
        return config
    except (OSError, TypeError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise _damaged_error(path, error) from error


def _damaged_error(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:80] or type(error).__name__
    return UserError(f"{path}: can't be read ({reason}). Create it again, or leave it out.")


BASELINE_TOLERANCE = 1e-6  # relative: baselines that differ by more have other truths or dates


class ComparisonRow(NamedTuple):
    """One score of all results.

    Attributes:
        values: the forecasts' scores, one per result.
        percent: differences from the first result, for bias of its absolute value; None where the
            first is zero.
        best_index: index of the best result; None for ties and scores without a direction.
        significance: of the differences from the first result; None where they are not tested.
    """

    key: ScoreKey
    unit: str
    values: tuple[float, ...]
    percent: tuple[float | None, ...]
    best_index: int | None
    significance: tuple[Significance | None, ...]


@final
@dataclass(frozen=True)
class Comparison:
    """Several results with their common scores.

    Attributes:
        warnings: why scores can't be compared as they are, one line each.
        config: keys in which runs differ, with the value of each run.
        rows: every score that all results have, ordered by score, then as in the first result.
    """

    results: tuple[EvaluationResult, ...]
    warnings: tuple[str, ...]
    config: Mapping[str, tuple[str, ...]]
    rows: tuple[ComparisonRow, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the results."""
        return tuple(result.name for result in self.results)

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of the scores that all results have."""
        return tuple(dict.fromkeys(row.key.score for row in self.rows))

    def global_rows(self, score: str) -> list[ComparisonRow]:
        """Return the rows of a score over the globe."""
        return [row for row in self.rows if row.key.score == score and row.key.region == GLOBAL]

    def wins(self, score: str) -> tuple[int, ...]:
        """Return how often each result is the best."""
        count = Counter(row.best_index for row in self.global_rows(score))
        return tuple(count[index] for index in range(len(self.results)))

    def to_csv(self) -> str:
        """Return CSV with one line for each score, channel and lead time."""
        heads = ("percent", "p", "independent")
        differences = [f"{name} {head}" for head in heads for name in self.names[1:]]
        columns = ("score", "channel", "unit", "lead_hours", *self.names, *differences)
        lines = []
        for row in self.rows:
            score, channel, hours, region = row.key
            better = "" if row.best_index is None else self.names[row.best_index]
            changes = ["" if change is None else repr(change) for change in row.percent[1:]]
            for name in ("p", "independent"):
                tests = row.significance[1:]
                changes += ["" if x is None else repr(getattr(x, name)) for x in tests]
            values = map(repr, row.values)
            lines.append((score, channel, row.unit, hours, *values, *changes, better, region))
        return csv_text((*columns, "better", "region"), lines)

    def to_json(self) -> str:
        """Return the same as JSON, with the warnings and the differing config keys."""
        rows = [
            {
                **row.key._asdict(),
                "unit": row.unit,
                "values": dict(zip(self.names, row.values, strict=True)),
                "percent": dict(zip(self.names[1:], row.percent[1:], strict=True)),
                "significance": {
                    name: None if x is None else x._asdict()
                    for name, x in zip(self.names[1:], row.significance[1:], strict=True)
                },
                "better": None if row.best_index is None else self.names[row.best_index],
            }
            for row in self.rows
        ]
        config = {k: dict(zip(self.names, v, strict=True)) for k, v in self.config.items()}
        content = {"warnings": list(self.warnings), "config": config, "scores": rows}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


def compare(results: Sequence[EvaluationResult]) -> Comparison:
    """Compare the scores that all results have.

    Raises:
        UserError: the results are of two kinds, or have no score in common.
    """
    first = results[0]
    for other in results[1:]:
        if other.kind != first.kind:
            raise UserError(
                f"{other.name}: is a {other.kind}, but {first.name} is a {first.kind}. Compare "
                "runs with runs, and scorecards with scorecards."
            )
    # Scores in different units are different numbers for the same error: these are left out.
    common = [key for key in first.scores if all(key in x.scores for x in results)]
    mismatched = {
        key.channel for key in common if len({x.units.get(key.channel) for x in results}) > 1
    }
    scores = dict.fromkeys([x.name for x in comparison_metrics()] + [key.score for key in common])
    keys = [
        key
        for score in scores
        for key in common
        if key.score == score and key.channel not in mismatched
    ]
    if not keys:
        names = " and ".join(result.name for result in results)
        raise UserError(
            f"{names}: have no score of the same channel, unit and lead time in common. Score "
            "the same variables at the same lead times."
        )
    warnings = [
        *_setup_warnings(results),
        *_baseline_warnings(results, keys),
        *_omission_warnings(results, mismatched),
    ]
    tests = _test_differences(results, {key.score for key in keys})
    rows = tuple(_compare_score(key, results, tests) for key in keys)
    return Comparison(
        tuple(results), tuple(warnings), MappingProxyType(_differing_config(results)), rows
    )


EVENTS_IN_TERMINAL = re.compile("csi|brier|fss_.*")


def compared_metric(name: str) -> Metric:
    """Return the metric of a score, also of one of events."""
    if name in METRICS:
        return METRICS[name]
    score = event_score(name)
    return Metric(
        name,
        score.label,
        f"{score.label} of events",
        f"Of events, {score.explanation}.",
        score.better,
        unit=no_unit,
        in_terminal=EVENTS_IN_TERMINAL.fullmatch(name) is not None,
    )


Tests = Mapping[tuple[int, str], Mapping[Place, Significance]]  # by index of the result and score


def _test_differences(results: Sequence[EvaluationResult], scores: set[str]) -> Tests:
    """Test the differences of all results from the first, of scores that rank forecasts."""
    first, events = results[0].by_date, results[0].events
    tests = {
        (index, score): compare_by_date(other.by_date, first, score)
        for index, other in enumerate(results)
        if index and first is not None and other.by_date is not None
        for score in scores & {*METRICS}
        if METRICS[score].better.ranks_sources
    }
    for index, other in enumerate(results):
        if index and events is not None and other.events is not None:
            by_score = compare_events_by_date(other.events, events)
            tests |= {(index, score): found for score, found in by_score.items()}
    return tests


def _compare_score(
    key: ScoreKey, results: Sequence[EvaluationResult], tests: Tests
) -> ComparisonRow:
    metric = compared_metric(key.score)
    by_result = [result.scores[key] for result in results]
    values = tuple(sources[FORECAST] for sources in by_result)
    # A bias of -2 is larger than one of 1, not smaller.
    sizes = [abs(x) for x in values] if metric.better is Better.CLOSER_TO_ZERO else values
    percent = tuple(100 * (x - sizes[0]) / abs(sizes[0]) if sizes[0] else None for x in sizes)
    costs = [metric.better.cost(sources) for sources in by_result]
    unit = metric.unit(results[0].units.get(key.channel, ""))
    place = key.region, key.hours, key.channel
    significance = tuple(
        tests.get((index, key.score), {}).get(place) for index in range(len(results))
    )
    return ComparisonRow(key, unit, values, percent, _single_smallest(costs), significance)


def _single_smallest(costs: Sequence[float | None]) -> int | None:
    # A tie is no win: rounding alone would decide it.
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return None
    best = [index for index, cost in enumerate(known) if cost == min(known)]
    return best[0] if len(best) == 1 else None


def _setup_warnings(results: Sequence[EvaluationResult]) -> list[str]:
    return [
        f"not comparable: {results[0].name} and {other.name} differ in {aspect}"
        for aspect in results[0].setup
        for other in results[1:]
        if other.setup[aspect] != results[0].setup[aspect]
    ]


def _baseline_warnings(results: Sequence[EvaluationResult], keys: Sequence[ScoreKey]) -> list[str]:
    # Catches setups that differ where neither file says so, such as another copy of the truth.
    first = results[0]
    lines = []
    for other in results[1:]:
        for source in BASELINES:
            pairs = [
                (first.scores[key][source], other.scores[key][source])
                for key in keys
                if source in first.scores[key] and source in other.scores[key]
            ]
            if any(abs(a - b) > BASELINE_TOLERANCE * max(abs(a), abs(b)) for a, b in pairs):
                lines.append(
                    f"not comparable: {source} has different scores in {first.name} and "
                    f"{other.name}: truth, dates or grid differ"
                )
    return lines


def _omission_warnings(results: Sequence[EvaluationResult], mismatched: set[str]) -> list[str]:
    lines = [f"left out: {channel} has different units" for channel in sorted(mismatched)]
    for result in results:
        missing = {key.channel for other in results for key in other.scores} - {
            key.channel for key in result.scores
        }
        lines += [f"left out: {result.name} has no {channel}" for channel in sorted(missing)[:3]]
        if len(missing) > 3:
            more = counted(len(missing) - 3, "more field")
            lines.append(f"left out: {result.name} lacks {more}")
    return lines


def _differing_config(results: Sequence[EvaluationResult]) -> dict[str, tuple[str, ...]]:
    if results[0].kind != RUN:
        return {}
    keys = sorted({key for result in results for key in result.config})
    configs = [
        {key: json.dumps(value, default=str) for key, value in result.config.items()}
        for result in results
    ]
    texts = {key: tuple(config.get(key, "-") for config in configs) for key in keys}
    return {key: values for key, values in texts.items() if len(set(values)) > 1}


LINE_STYLES = ("-", "--", "-.", ":")


class ComparedMetric(NamedTuple):
    """A metric's section of a comparison.

    Attributes:
        image: `data:` URI of its curves; None if they could not be drawn.
        wins: says how often each result is the best; may be empty.
    """

    metric: Metric
    image: str | None
    wins: str
    rows: list[ComparisonRow]


def comparison_page(comparison: Comparison) -> str:
    """Return the page as HTML text."""
    return render_page(
        "comparison.html",
        title=f"Comparison of {', '.join(comparison.names)}",
        names=list(comparison.names),
        differences=difference_headings(comparison),
        warnings=comparison.warnings,
        config=comparison.config,
        cards=difference_tables(comparison),
        tests=significance_tables(comparison),
        scores=[
            ComparedMetric(
                compared_metric(score),
                draw_or_warn(score, curves_image, comparison, score),
                describe_wins(comparison, score),
                rows_for_table(comparison, score),
            )
            for score in comparison.scores
        ],
        three_digits=three_digits,
        percent=format_percent,
    )


def difference_tables(comparison: Comparison) -> list[DifferenceTable]:
    """Return the RMSE of each other result relative to that of the first; none without RMSE."""
    rows = comparison.global_rows("rmse")
    if not rows:
        return []
    hours = sorted({row.key.hours for row in rows})
    channels = list(dict.fromkeys(row.key.channel for row in rows))
    values = np.full((len(comparison.names), len(hours), len(channels)), np.nan)
    for row in rows:
        values[:, hours.index(row.key.hours), channels.index(row.key.channel)] = row.values
    first, *others = comparison.names
    return [
        difference_table(
            (name, first), channels, hours, (values[index], values[0]), f"card-{index}"
        )
        for index, name in enumerate(others, start=1)
    ]


def significance_tables(comparison: Comparison) -> list[SignificanceTable]:
    """Return where each other result differs from the first by more than chance.

    A table for each result, region and score in the terminal; none where nothing is tested.
    """
    tables = []
    first, *others = comparison.names
    regions = list(dict.fromkeys(row.key.region for row in comparison.rows))
    scores = [score for score in comparison.scores if compared_metric(score).in_terminal]
    for index, name in enumerate(others, start=1):
        for region in regions:
            for score in scores:
                rows = [r for r in comparison.rows if r.key.score == score]
                rows = [r for r in rows if r.key.region == region and r.significance[index]]
                if rows:
                    where = "" if region == GLOBAL else f", {region}"
                    caption = f"{compared_metric(score).label}: {name} against {first}{where}"
                    tables.append(significance_table(rows, index, caption))
    return tables


def significance_table(
    rows: Sequence[ComparisonRow], index: int, caption: str
) -> SignificanceTable:
    """Return the table of one score in one region, of the result with this index."""
    found = {(row.key.channel, row.key.hours): row for row in rows}
    hours = sorted({hour for _, hour in found})
    hours = [hours[lead] for lead in shown_lead_indices(hours)]
    channels = list(dict.fromkeys(channel for channel, _ in found))
    cells = [
        [difference_sign(found.get((channel, hour)), index) for hour in hours]
        for channel in channels
    ]
    independent = [x.independent for row in rows if (x := row.significance[index]) is not None]
    caption += f"; {min(independent):.0f} to {max(independent):.0f} independent cases"
    headings = [lead_label(hour, hours[-1]) for hour in hours]
    return SignificanceTable(caption, headings, by_variable(channels, cells))


def difference_sign(row: ComparisonRow | None, index: int) -> Triangle:
    """Return the triangle of a score, with its numbers for who points at it."""
    test = None if row is None else row.significance[index]
    if row is None or test is None:
        return triangle(0, 1, "not tested")
    smaller_is_better = compared_metric(row.key.score).better is Better.SMALLER
    numbers = f"p = {test.p:.2g}, {test.independent:.0f} independent cases"
    title = f"{format_percent(row.percent[index])}, {numbers}"
    # Of the common initial times, not of all that each forecast has.
    change = test.difference
    return triangle(-change if smaller_is_better else change, test.p, title)


def format_percent(change: float | None) -> str:
    """Return a difference in percent as text, "-" for None."""
    return "-" if change is None else f"{change:+.1f} %"


def difference_headings(comparison: Comparison) -> list[str]:
    """Return the headings of the columns with percentages."""
    return [f"{name} - {comparison.names[0]}" for name in comparison.names[1:]]


def rows_for_table(comparison: Comparison, score: str) -> list[ComparisonRow]:
    """Return the rows of the few lead times that tables show."""
    rows = comparison.global_rows(score)
    hours = sorted({row.key.hours for row in rows})
    selected = {hours[index] for index in table_lead_indices(hours)}
    return [row for row in rows if row.key.hours in selected]


def describe_wins(comparison: Comparison, score: str) -> str:
    """Return a sentence that says how often each result is the best; "" without a best."""
    wins = comparison.wins(score)
    if not any(wins):
        return ""
    total = len(comparison.global_rows(score))
    each = ", ".join(f"{name} {count}" for name, count in zip(comparison.names, wins, strict=True))
    return f"Best of {total}: {each}."


@figure_style()
def curves_image(comparison: Comparison, score: str) -> str:
    """Return curves of a score by lead time: a panel per channel, a line per result."""
    rows, first = comparison.global_rows(score), comparison.results[0]
    names = list(dict.fromkeys(row.key.channel for row in rows))
    channels = [names[index] for index in headlines(names)]
    figure, axes_of = create_panels(len(channels), labels=[*comparison.names, *BASELINES])
    for axes, channel in zip(axes_of, channels, strict=True):
        by_lead = sorted(
            (row for row in rows if row.key.channel == channel), key=lambda row: row.key.hours
        )
        leads = lead_axis(axes, [row.key.hours for row in by_lead])
        for n, name in enumerate(comparison.names):
            # Another dash pattern each time the colours are used up.
            dashes = LINE_STYLES[n // len(SERIES) % len(LINE_STYLES)]
            values = [row.values[n] for row in by_lead]
            axes.plot(
                leads, values, f".{dashes}", color=series_colour(n), label=escape_mathtext(name)
            )
        for source in BASELINES:
            values = [first.scores[row.key].get(source, np.nan) for row in by_lead]
            if np.isfinite(values).any():
                axes.plot(leads, values, label=source, **{**SOURCE_LINES[source], "linewidth": 1.0})
        axes.set_title(title_text(panel_name(compared_metric(score), channel).replace("_", " ")))
        axes.yaxis.set_major_formatter(NUMBER)
        axes.set_ylabel(with_unit(compared_metric(score).label, by_lead[0].unit))
    add_legend(figure, axes_of)
    return figure_data_uri(figure, "svg")
