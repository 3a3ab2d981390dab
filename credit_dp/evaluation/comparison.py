"""Runs or scorecards beside each other: where they differ, and which is better where."""

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, final

from credit_dp.errors import UserError
from credit_dp.evaluation.compared_result import RUN, Place, Result

# Of which a smaller number is better, and of which a larger one. Activity is to be the truth's;
# spread is neither good nor bad alone.
SMALLER = ("rmse", "crps")
LARGER = ("acc",)
ORDER = ("rmse", "acc", "crps", "bias", "activity", "spread")
REFERENCES = ("persistence", "climatology")
SAME = 1e-6  # relative: scores of persistence that differ by more are of other truths or dates


class Row(NamedTuple):
    """One score of all results.

    Attributes:
        percent: differences from the first result's; of the bias, in its size. None where the
            first is zero.
        best: the place of the best; None if none is.
    """

    place: Place
    unit: str
    values: tuple[float, ...]
    percent: tuple[float | None, ...]
    best: int | None


@final
@dataclass(frozen=True)
class Comparison:
    """What was found out about several results.

    Attributes:
        warnings: why scores can't be compared as they are, one line each.
        config: keys in which runs differ, and each one's value.
        rows: of every score that all have, by score, channel and lead time.
    """

    results: tuple[Result, ...]
    warnings: tuple[str, ...]
    config: Mapping[str, tuple[str, ...]]
    rows: tuple[Row, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results."""
        return tuple(result.name for result in self.results)

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores that all have."""
        return tuple(dict.fromkeys(row.place.score for row in self.rows))

    def wins(self, score: str) -> tuple[int, ...]:
        """How often each is best."""
        count = Counter(row.best for row in self.rows if row.place.score == score)
        return tuple(count[place] for place in range(len(self.results)))

    def csv(self) -> str:
        """One line for each score, channel and lead time."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        percents = [f"{name} percent" for name in self.names[1:]]
        writer.writerow(
            ("score", "channel", "unit", "lead_hours", *self.names, *percents, "better")
        )
        for row in self.rows:
            of, better = row.place, "" if row.best is None else self.names[row.best]
            shares = ["" if share is None else repr(share) for share in row.percent[1:]]
            values = map(repr, row.values)
            writer.writerow((of.score, of.channel, row.unit, of.hours, *values, *shares, better))
        return text.getvalue()

    def json(self) -> str:
        """The same, with what differs in the configs."""
        rows = [
            {
                **row.place._asdict(),
                "unit": row.unit,
                "values": dict(zip(self.names, row.values, strict=True)),
                "percent": dict(zip(self.names[1:], row.percent[1:], strict=True)),
                "better": None if row.best is None else self.names[row.best],
            }
            for row in self.rows
        ]
        config = {k: dict(zip(self.names, v, strict=True)) for k, v in self.config.items()}
        content = {"warnings": list(self.warnings), "config": config, "scores": rows}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


def compare(results: Sequence[Result]) -> Comparison:
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
        for score in ORDER
        for place in places
        if place.score == score and place.channel not in odd
    ]
    if not kept:
        names = " and ".join(result.name for result in results)
        raise UserError(
            f"{names}: have no score of the same channel, unit and lead time in common. Score "
            "the same variables at the same lead times."
        )
    warnings = [*_facts(results), *_references(results, kept), *_left_out(results, places, odd)]
    rows = tuple(_row(place, results) for place in kept)
    return Comparison(tuple(results), tuple(warnings), MappingProxyType(_config(results)), rows)


def _row(place: Place, results: Sequence[Result]) -> Row:
    found = [result.scores[place] for result in results]
    values = tuple(of["forecast"] for of in found)
    sizes = [abs(value) for value in values] if place.score == "bias" else values
    percent = tuple(100 * (x - sizes[0]) / abs(sizes[0]) if sizes[0] else None for x in sizes)
    costs: list[float] = []
    if place.score in SMALLER:
        costs = list(values)
    elif place.score in LARGER:
        costs = [-value for value in values]
    elif place.score == "bias":
        costs = list(sizes)
    elif place.score == "activity" and all("truth" in of for of in found):
        costs = [abs(of["forecast"] - of["truth"]) for of in found]
    least = [n for n, cost in enumerate(costs) if cost == min(costs)]
    unit = "1" if place.score == "acc" else results[0].units.get(place.channel, "")
    return Row(place, unit, values, percent, least[0] if len(least) == 1 else None)


def _facts(results: Sequence[Result]) -> list[str]:
    """What scores depend on, and is not the same."""
    return [
        f"not comparable: {other.name} has other {fact} than {results[0].name}"
        for fact in results[0].facts
        for other in results[1:]
        if other.facts[fact] != results[0].facts[fact]
    ]


def _references(results: Sequence[Result], places: Sequence[Place]) -> list[str]:
    """Persistence and climatology score the same where truth and dates are the same."""
    first, lines = results[0], []
    for other in results[1:]:
        for of in REFERENCES:
            pairs = [
                (first.scores[p][of], other.scores[p][of])
                for p in places
                if of in first.scores[p] and of in other.scores[p]
            ]
            if any(abs(a - b) > SAME * max(abs(a), abs(b)) for a, b in pairs):
                lines.append(
                    f"not comparable: {of} scores otherwise for {other.name} than for "
                    f"{first.name}: truth, dates or grid are others"
                )
    return lines


def _left_out(results: Sequence[Result], common: Sequence[Place], odd: set[str]) -> list[str]:
    lines = [f"left out: {channel} has different units" for channel in sorted(odd)]
    for result in results:
        lacking = {place.channel for other in results for place in other.scores} - {
            place.channel for place in result.scores
        }
        lines += [f"left out: {result.name} has no {channel}" for channel in sorted(lacking)[:3]]
        if len(lacking) > 3:
            lines.append(f"left out: and {len(lacking) - 3} more that {result.name} lacks")
    return lines


def _config(results: Sequence[Result]) -> dict[str, tuple[str, ...]]:
    """Keys that are not the same in all runs, and each one's value."""
    if results[0].kind != RUN:
        return {}
    keys = sorted({key for result in results for key in result.config})
    found = {key: tuple(_text(result.config, key) for result in results) for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _text(config: Mapping[str, object], key: str) -> str:
    return json.dumps(config[key], default=str) if key in config else "-"
