"""The forecasts of a request, one for each initial time and member, and who makes which."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Job(NamedTuple):
    """One forecast, by the places of its member and initial time."""

    member: int
    time: int


def all_jobs(times: int, members: int) -> list[Job]:
    """All members of the first initial time, then those of the next."""
    return [Job(member, time) for time in range(times) for member in range(members)]


def turns(jobs: Sequence[Job], rank: int, ranks: int) -> Iterator[tuple[Job, bool]]:
    """The share of a data rank, and whether it counts.

    All ranks have equally many turns, for those that share parameters out need each other at every
    step: one without a forecast of its own left repeats one that does not count.
    """
    for start in range(0, len(jobs), ranks):
        own = jobs[start + rank : start + rank + 1]
        yield (own[0], True) if own else (jobs[0], False)
