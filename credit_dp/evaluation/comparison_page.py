"""A comparison as one HTML page that needs no other file and no network."""

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from credit_dp.evaluation.compared_result import Place
from credit_dp.evaluation.comparison import REFERENCES, Comparison, Row
from credit_dp.evaluation.figure_style import (
    SERIES,
    SOURCE_LINES,
    figure_style,
    plain,
    series_colour,
    with_unit,
)
from credit_dp.evaluation.panels import legend, panels
from credit_dp.evaluation.score_page import STYLE, TITLES, TOLD, table_leads
from credit_dp.evaluation.score_plots import LABELS, picture
from credit_dp.evaluation.scorecard import HEADLINE, SHOWN
from credit_dp.evaluation.table import three_digits

LINES = ("-", "--", "-.", ":")


def comparison_page(found: Comparison) -> str:
    """The whole page, as text."""
    parts = [*_head(found), *_config(found), *_scores(found)]
    title = escape(f"Comparison of {', '.join(found.names)}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def percent(share: float | None) -> str:
    """A difference for people."""
    return "-" if share is None else f"{share:+.1f} %"


def share_names(found: Comparison) -> list[str]:
    """What the percentages are of, for the head of a table."""
    return [f"{name} - {found.names[0]}" for name in found.names[1:]]


def shown_rows(found: Comparison, score: str) -> list[Row]:
    """Those of a few lead times, for tables."""
    rows = [row for row in found.rows if row.place.score == score]
    hours = sorted({row.place.hours for row in rows})
    few = {hours[place] for place in table_leads(hours)}
    return [row for row in rows if row.place.hours in few]


def _head(found: Comparison) -> Iterable[str]:
    yield f"<h1>Comparison of {escape(', '.join(found.names))}</h1>"
    for line in found.warnings:
        yield f'<p class="note"><b>{escape(line)}</b></p>'
    yield (
        f'<p class="note">Percentages are differences from {escape(found.names[0])}; the best is '
        "bold. All numbers are in comparison.csv and comparison.json beside this page.</p>"
    )


def _config(found: Comparison) -> Iterable[str]:
    if not found.config:
        return
    yield "<h2>What differs in the configs</h2>"
    lines = [(key, *values) for key, values in found.config.items()]
    yield _table("config", ("key", *found.names), [[(cell, "text") for cell in x] for x in lines])


def _scores(found: Comparison) -> Iterable[str]:
    for score in found.scores:
        title = TITLES[score]
        yield f"<h2>{title}</h2>"
        yield f'<p class="note">{TOLD[score]} {escape(wins_told(found, score))}</p>'
        yield f'<img src="{_curves(found, score)}" alt="{title} by lead time">'
        names = ("channel", "unit", "hours", *found.names, *share_names(found))
        lines = [
            [
                (row.place.channel, "text"),
                (row.unit, "text"),
                (str(row.place.hours), ""),
                *(
                    (three_digits(x), "best" if n == row.best else "")
                    for n, x in enumerate(row.values)
                ),
                *((percent(share), "") for share in row.percent[1:]),
            ]
            for row in shown_rows(found, score)
        ]
        yield _table(score, names, lines)


def wins_told(found: Comparison, score: str) -> str:
    """How often each is best, in words; nothing where none can be."""
    wins = found.wins(score)
    if not any(wins):
        return ""
    of = sum(row.place.score == score for row in found.rows)
    each = ", ".join(f"{name} {won}" for name, won in zip(found.names, wins, strict=True))
    return f"Best of {of}: {each}."


def _table(name: str, heads: Sequence[str], lines: Sequence[Sequence[tuple[str, str]]]) -> str:
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
def _curves(found: Comparison, score: str) -> str:
    """One score by lead time, all results in each panel, a panel for each channel shown."""
    rows = [row for row in found.rows if row.place.score == score]
    channels = shown_channels([row.place.channel for row in rows])
    figure, axes_of = panels(len(channels))
    for axes, channel in zip(axes_of, channels, strict=True):
        own = sorted((row for row in rows if row.place.channel == channel), key=_hours)
        days = np.array([row.place.hours for row in own]) / 24
        for n, name in enumerate(found.names):
            dashes = LINES[n // len(SERIES) % len(LINES)]
            values = [row.values[n] for row in own]
            axes.plot(days, values, f".{dashes}", color=series_colour(n), label=plain(name))
        for of in REFERENCES:
            values = [_reference(found, row.place, of) for row in own]
            if np.isfinite(values).any():
                axes.plot(days, values, label=of, **{**SOURCE_LINES[of], "linewidth": 1.0})
        axes.set_title(plain(channel))
        axes.set_xlabel("lead time (days)")
        axes.set_ylabel(with_unit(LABELS[score], own[0].unit))
    legend(figure, axes_of[0])
    return picture(figure, "svg")


def shown_channels(channels: Sequence[str]) -> list[str]:
    """A few channels: those that are known best, then the first others."""
    there = list(dict.fromkeys(channels))
    known = [channel.name for channel in HEADLINE if channel.name in there]
    few = set((known + [name for name in there if name not in known])[:SHOWN])
    return [name for name in there if name in few]


def _reference(found: Comparison, place: Place, of: str) -> float:
    return found.results[0].scores[place].get(of, np.nan)


def _hours(row: Row) -> int:
    return row.place.hours
