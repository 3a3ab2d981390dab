"""Run contestants in turn, round after round, and compare their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pinned import Team


@dataclass(frozen=True)
class Row:
    """A figure and its goal; without a goal it is only printed.

    `best` compares the fastest rounds, `typical` the medians. `spread` is the ratio of two
    measurements of the baseline in the same rounds; `with_spread` adds it to the goal. `by_median`
    compares the median with the goal, for a small difference of two large times, whose extreme is
    noise.
    """

    what: str
    against: str
    best: float
    goal: float | None
    typical: float | None = None
    spread: float | None = None
    with_spread: bool = False
    at_least: bool = False
    by_median: bool = False
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the goal is reached, if there is one."""
        if self.goal is None:
            return True
        reached = self.typical if self.by_median and self.typical is not None else self.best
        slack = self.spread - 1 if self.with_spread and self.spread is not None else 0.0
        return reached >= self.goal - slack if self.at_least else reached <= self.goal + slack


class Entry(NamedTuple):
    """A contestant of a team, and the label of its times."""

    label: str
    team: Team
    name: str


def times(entries: Sequence[Entry], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each entry in each round; every other round is in reverse order."""
    found: dict[str, list[float]] = {entry.label: [] for entry in entries}
    for number in range(rounds):
        for entry in entries[:: -1 if number % 2 else 1]:
            found[entry.label].append(entry.team.seconds(entry.name))
    return found


class Ratio(NamedTuple):
    """Times relative to those of a baseline, and the spread of the baseline."""

    best: float
    typical: float
    spread: float


def ratio(contestant: Sequence[float], first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Compare a contestant with a baseline that was measured twice."""
    halves = min(first), min(second)
    return Ratio(
        min(contestant) / min(halves),
        median(contestant) / median([*first, *second]),
        max(halves) / min(halves),
    )
