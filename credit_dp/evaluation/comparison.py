"""Runs or scorecards beside each other: where they differ, and which is better where."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import (
    SERIES,
    SOURCE_LINES,
    escape_mathtext,
    figure_style,
    series_colour,
    with_unit,
)
from credit_dp.evaluation.plots import add_legend, create_panels
from credit_dp.evaluation.report import (
    EXPLANATIONS,
    LABELS,
    PAGE_CSS,
    TITLES,
    figure_data_uri,
    table_lead_indices,
)
from credit_dp.evaluation.scorecard import HEADLINE_CHANNELS, MAX_HEADLINES, three_digits

RUN, CARD = "training run", "scorecard"
CONFIG, METRICS, SCORES = "config.yaml", "metrics.json", "scores.json"
IDENTITY_KEYS = ("run.name", "run.dir")  # keys in which runs always differ
# What scores depend on besides the forecasts, by how it is called.
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
    """Of what a number is a score."""

    score: str
    channel: str
    hours: int


@final
@dataclass(frozen=True)
class EvaluationResult:
    """The scores of one run or scorecard.

    Attributes:
        name: what it is called in tables.
        kind: `RUN` or `CARD`.
        units: by channel.
        scores: by place, then by what they are of: `forecast`, `persistence` and so on. Those that
            are not defined, or infinite, are left out; so are places without the forecast's.
        facts: what scores depend on besides the forecasts.
        config: of a run, flat; without the keys in which runs always differ.
    """

    name: str
    kind: str
    units: Mapping[str, str]
    scores: Mapping[ScoreKey, Mapping[str, float]]
    setup: Mapping[str, object]
    config: Mapping[str, object]


def read_result(folder: Path, name: str) -> EvaluationResult:
    """Read the folder of a training run or of a scorecard.

    Raises:
        UserError: it is neither, the run has not finished, or a file is damaged.
    """
    if (folder / SCORES).is_file():
        return _read_scorecard(folder, name)
    if (folder / METRICS).is_file() and (folder / CONFIG).is_file():
        return _read_run(folder, name)
    if (folder / CONFIG).is_file():
        raise UserError(
            f"{folder}: this run has not finished: it has no {METRICS}. Go on with it, or leave it "
            "out."
        )
    what = "has neither" if folder.is_dir() else "is no folder: there is neither"
    raise UserError(
        f"{folder}: {what} {METRICS} of a training run nor {SCORES} of credit-dp evaluate. Give "
        "the folder of one."
    )


def _read_run(folder: Path, name: str) -> EvaluationResult:
    content = _read_json(folder / METRICS)
    config = dict(_flatten_config(_read_yaml(folder / CONFIG)))
    facts = {
        fact: [(key, config[key]) for key in config if key.startswith(keys)]
        for fact, keys in RUN_SETUP_KEYS.items()
    }
    kept = {key: value for key, value in config.items() if key not in IDENTITY_KEYS}
    try:
        nested = {channel: {"rmse": leads} for channel, leads in content["rmse"].items()}
        facts["dates"].append(("initial_times", content["initial_times"]))
        return EvaluationResult(
            name, RUN, dict(content["units"]), _flatten_scores(nested), facts, kept
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged_error(folder / METRICS, error) from error


def _read_scorecard(folder: Path, name: str) -> EvaluationResult:
    content = _read_json(folder / SCORES)
    try:
        facts = {fact: content[key] for fact, key in CARD_SETUP_KEYS.items()}
        scores = _flatten_scores(content["scores"])
        return EvaluationResult(name, CARD, dict(content["units"]), scores, facts, {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged_error(folder / SCORES, error) from error


def _flatten_scores(nested: Mapping[str, Any]) -> dict[ScoreKey, dict[str, float]]:
    """From channel, score, lead time and source."""
    found: dict[ScoreKey, dict[str, float]] = {}
    for channel, of_channel in nested.items():
        for score, leads in of_channel.items():
            for lead, sources in leads.items():
                values = {
                    "forecast" if of == "model" else of: float(value)
                    for of, value in sources.items()
                    if value is not None and math.isfinite(value)
                }
                if "forecast" in values:
                    found[ScoreKey(score, channel, int(lead.removesuffix("h")))] = values
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged_error(path, error) from error


def _read_yaml(path: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise _damaged_error(path, error) from error


def _damaged_error(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:80] or type(error).__name__
    return UserError(f"{path}: can't be read ({reason}). Make it again, or leave it out.")


def _flatten_config(config: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys with dots, and what they are set to."""
    if not isinstance(config, dict) or not config:
        yield prefix, config
        return
    for key, value in config.items():
        yield from _flatten_config(value, f"{prefix}.{key}" if prefix else str(key))


# Of which a smaller number is better, and of which a larger one. Activity is to be the truth's;
# spread is neither good nor bad alone.
SMALLER_IS_BETTER = ("rmse", "crps")
LARGER_IS_BETTER = ("acc",)
SCORE_ORDER = ("rmse", "acc", "crps", "bias", "activity", "spread")
BASELINES = ("persistence", "climatology")
BASELINE_TOLERANCE = (
    1e-6  # relative: scores of persistence that differ by more are of other truths or dates
)


class ComparisonRow(NamedTuple):
    """One score of all results.

    Attributes:
        percent: differences from the first result's; of the bias, in its size. None where the
            first is zero.
        best: the place of the best; None if none is.
    """

    key: ScoreKey
    unit: str
    values: tuple[float, ...]
    percent: tuple[float | None, ...]
    best_index: int | None


@final
@dataclass(frozen=True)
class Comparison:
    """What was found out about several results.

    Attributes:
        warnings: why scores can't be compared as they are, one line each.
        config: keys in which runs differ, and each one's value.
        rows: of every score that all have, by score, channel and lead time.
    """

    results: tuple[EvaluationResult, ...]
    warnings: tuple[str, ...]
    config: Mapping[str, tuple[str, ...]]
    rows: tuple[ComparisonRow, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results."""
        return tuple(result.name for result in self.results)

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores that all have."""
        return tuple(dict.fromkeys(row.key.score for row in self.rows))

    def wins(self, score: str) -> tuple[int, ...]:
        """How often each is best."""
        count = Counter(row.best_index for row in self.rows if row.key.score == score)
        return tuple(count[place] for place in range(len(self.results)))

    def to_csv(self) -> str:
        """One line for each score, channel and lead time."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        percents = [f"{name} percent" for name in self.names[1:]]
        writer.writerow(
            ("score", "channel", "unit", "lead_hours", *self.names, *percents, "better")
        )
        for row in self.rows:
            of, better = row.key, "" if row.best_index is None else self.names[row.best_index]
            shares = ["" if share is None else repr(share) for share in row.percent[1:]]
            values = map(repr, row.values)
            writer.writerow((of.score, of.channel, row.unit, of.hours, *values, *shares, better))
        return text.getvalue()

    def to_json(self) -> str:
        """The same, with what differs in the configs."""
        rows = [
            {
                **row.key._asdict(),
                "unit": row.unit,
                "values": dict(zip(self.names, row.values, strict=True)),
                "percent": dict(zip(self.names[1:], row.percent[1:], strict=True)),
                "better": None if row.best_index is None else self.names[row.best_index],
            }
            for row in self.rows
        ]
        config = {k: dict(zip(self.names, v, strict=True)) for k, v in self.config.items()}
        content = {"warnings": list(self.warnings), "config": config, "scores": rows}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


def compare(results: Sequence[EvaluationResult]) -> Comparison:
    """Put results beside each other.

    Raises:
        UserError: they are of two kinds, or have no score in common.
    """
    first = results[0]
    for other in results[1:]:
        if other.kind != first.kind:
            raise UserError(
                f"{other.name}: is a {other.kind}, but {first.name} is a {first.kind}. Compare "
                "runs with runs, and scorecards with scorecards."
            )
    places = [place for place in first.scores if all(place in x.scores for x in results)]
    odd = {p.channel for p in places if len({x.units.get(p.channel) for x in results}) > 1}
    kept = [
        place
        for score in SCORE_ORDER
        for place in places
        if place.score == score and place.channel not in odd
    ]
    if not kept:
        names = " and ".join(result.name for result in results)
        raise UserError(
            f"{names}: have no score of the same channel, unit and lead time in common. Score "
            "the same variables at the same lead times."
        )
    warnings = [
        *_setup_warnings(results),
        *_baseline_warnings(results, kept),
        *_omission_warnings(results, places, odd),
    ]
    rows = tuple(_compare_score(place, results) for place in kept)
    return Comparison(
        tuple(results), tuple(warnings), MappingProxyType(_differing_config(results)), rows
    )


def _compare_score(place: ScoreKey, results: Sequence[EvaluationResult]) -> ComparisonRow:
    found = [result.scores[place] for result in results]
    values = tuple(of["forecast"] for of in found)
    sizes = [abs(value) for value in values] if place.score == "bias" else values
    percent = tuple(100 * (x - sizes[0]) / abs(sizes[0]) if sizes[0] else None for x in sizes)
    costs: list[float] = []
    if place.score in SMALLER_IS_BETTER:
        costs = list(values)
    elif place.score in LARGER_IS_BETTER:
        costs = [-value for value in values]
    elif place.score == "bias":
        costs = list(sizes)
    elif place.score == "activity" and all("truth" in of for of in found):
        costs = [abs(of["forecast"] - of["truth"]) for of in found]
    least = [n for n, cost in enumerate(costs) if cost == min(costs)]
    unit = "1" if place.score == "acc" else results[0].units.get(place.channel, "")
    return ComparisonRow(place, unit, values, percent, least[0] if len(least) == 1 else None)


def _setup_warnings(results: Sequence[EvaluationResult]) -> list[str]:
    """What scores depend on, and is not the same."""
    return [
        f"not comparable: {other.name} has other {fact} than {results[0].name}"
        for fact in results[0].setup
        for other in results[1:]
        if other.setup[fact] != results[0].setup[fact]
    ]


def _baseline_warnings(
    results: Sequence[EvaluationResult], places: Sequence[ScoreKey]
) -> list[str]:
    """Persistence and climatology score the same where truth and dates are the same."""
    first, lines = results[0], []
    for other in results[1:]:
        for of in BASELINES:
            pairs = [
                (first.scores[p][of], other.scores[p][of])
                for p in places
                if of in first.scores[p] and of in other.scores[p]
            ]
            if any(abs(a - b) > BASELINE_TOLERANCE * max(abs(a), abs(b)) for a, b in pairs):
                lines.append(
                    f"not comparable: {of} scores otherwise for {other.name} than for "
                    f"{first.name}: truth, dates or grid are others"
                )
    return lines


def _omission_warnings(
    results: Sequence[EvaluationResult], common: Sequence[ScoreKey], odd: set[str]
) -> list[str]:
    lines = [f"left out: {channel} has different units" for channel in sorted(odd)]
    for result in results:
        lacking = {place.channel for other in results for place in other.scores} - {
            place.channel for place in result.scores
        }
        lines += [f"left out: {result.name} has no {channel}" for channel in sorted(lacking)[:3]]
        if len(lacking) > 3:
            lines.append(f"left out: and {len(lacking) - 3} more that {result.name} lacks")
    return lines


def _differing_config(results: Sequence[EvaluationResult]) -> dict[str, tuple[str, ...]]:
    """Keys that are not the same in all runs, and each one's value."""
    if results[0].kind != RUN:
        return {}
    keys = sorted({key for result in results for key in result.config})
    found = {key: tuple(_config_text(result.config, key) for result in results) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _config_text(config: Mapping[str, object], key: str) -> str:
    return json.dumps(config[key], default=str) if key in config else "-"


LINE_STYLES = ("-", "--", "-.", ":")


def comparison_page(found: Comparison) -> str:
    """The whole page, as text."""
    parts = [*_page_header(found), *_config_section(found), *_score_sections(found)]
    title = escape(f"Comparison of {', '.join(found.names)}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{PAGE_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def percent(share: float | None) -> str:
    """A difference for people."""
    return "-" if share is None else f"{share:+.1f} %"


def difference_headings(found: Comparison) -> list[str]:
    """What the percentages are of, for the head of a table."""
    return [f"{name} - {found.names[0]}" for name in found.names[1:]]


def rows_for_table(found: Comparison, score: str) -> list[ComparisonRow]:
    """Those of a few lead times, for tables."""
    rows = [row for row in found.rows if row.key.score == score]
    hours = sorted({row.key.hours for row in rows})
    few = {hours[place] for place in table_lead_indices(hours)}
    return [row for row in rows if row.key.hours in few]


def _page_header(found: Comparison) -> Iterable[str]:
    yield f"<h1>Comparison of {escape(', '.join(found.names))}</h1>"
    for line in found.warnings:
        yield f'<p class="note"><b>{escape(line)}</b></p>'
    yield (
        f'<p class="note">Percentages are differences from {escape(found.names[0])}; the best is '
        "bold. All numbers are in comparison.csv and comparison.json beside this page.</p>"
    )


def _config_section(found: Comparison) -> Iterable[str]:
    if not found.config:
        return
    yield "<h2>What differs in the configs</h2>"
    lines = [(key, *values) for key, values in found.config.items()]
    yield _html_table(
        "config", ("key", *found.names), [[(cell, "text") for cell in x] for x in lines]
    )


def _score_sections(found: Comparison) -> Iterable[str]:
    for score in found.scores:
        title = TITLES[score]
        yield f"<h2>{title}</h2>"
        yield f'<p class="note">{EXPLANATIONS[score]} {escape(describe_wins(found, score))}</p>'
        yield f'<img src="{_curves_image(found, score)}" alt="{title} by lead time">'
        names = ("channel", "unit", "hours", *found.names, *difference_headings(found))
        lines = [
            [
                (row.key.channel, "text"),
                (row.unit, "text"),
                (str(row.key.hours), ""),
                *(
                    (three_digits(x), "best" if n == row.best_index else "")
                    for n, x in enumerate(row.values)
                ),
                *((percent(share), "") for share in row.percent[1:]),
            ]
            for row in rows_for_table(found, score)
        ]
        yield _html_table(score, names, lines)


def describe_wins(found: Comparison, score: str) -> str:
    """How often each is best, in words; nothing where none can be."""
    wins = found.wins(score)
    if not any(wins):
        return ""
    of = sum(row.key.score == score for row in found.rows)
    each = ", ".join(f"{name} {won}" for name, won in zip(found.names, wins, strict=True))
    return f"Best of {of}: {each}."


def _html_table(name: str, heads: Sequence[str], lines: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Cells with their classes."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in line) + "</tr>"
        for line in lines
    )
    return (
        f'<div class="wide"><table id="{name}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


@figure_style()
def _curves_image(found: Comparison, score: str) -> str:
    """One score by lead time, all results in each panel, a panel for each channel shown."""
    rows = [row for row in found.rows if row.key.score == score]
    channels = headline_channels([row.key.channel for row in rows])
    figure, axes_of = create_panels(len(channels))
    for axes, channel in zip(axes_of, channels, strict=True):
        own = sorted((row for row in rows if row.key.channel == channel), key=_lead_hours)
        days = np.array([row.key.hours for row in own]) / 24
        for n, name in enumerate(found.names):
            dashes = LINE_STYLES[n // len(SERIES) % len(LINE_STYLES)]
            values = [row.values[n] for row in own]
            axes.plot(
                days, values, f".{dashes}", color=series_colour(n), label=escape_mathtext(name)
            )
        for of in BASELINES:
            values = [_baseline_score(found, row.key, of) for row in own]
            if np.isfinite(values).any():
                axes.plot(days, values, label=of, **{**SOURCE_LINES[of], "linewidth": 1.0})
        axes.set_title(escape_mathtext(channel))
        axes.set_xlabel("lead time (days)")
        axes.set_ylabel(with_unit(LABELS[score], own[0].unit))
    add_legend(figure, axes_of[0])
    return figure_data_uri(figure, "svg")


def headline_channels(channels: Sequence[str]) -> list[str]:
    """A few channels: those that are known best, then the first others."""
    there = list(dict.fromkeys(channels))
    known = [channel.name for channel in HEADLINE_CHANNELS if channel.name in there]
    few = set((known + [name for name in there if name not in known])[:MAX_HEADLINES])
    return [name for name in there if name in few]


def _baseline_score(found: Comparison, place: ScoreKey, of: str) -> float:
    return found.results[0].scores[place].get(of, np.nan)


def _lead_hours(row: ComparisonRow) -> int:
    return row.key.hours
