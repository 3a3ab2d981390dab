"""Which forecasts are wanted, from which model, where they go, and who makes which."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.config import Config
from credit_dp.config.data import HOURS_PER_UNIT, STEP_PATTERN
from credit_dp.errors import UserError

FORMATS = ("zarr", "netcdf", "netcdf_file")
MAX_INITIAL_TIMES = 10**6  # initial times: more are a mistake in the stride

Times = NDArray[np.datetime64]


@final
@dataclass(frozen=True)
class ForecastRequest:
    """What the keys of the command say.

    Attributes:
        checkpoint: the folder of a run or of a checkpoint.
        init: a time, `[a,b,...]` or `FIRST/LAST/STRIDE`.
        lead, every: hours or days, like 240h: how far, and which lead times are kept; empty: all.
        out: the store or folder to write.
        members: forecasts from each initial time; 0: one, without a dimension of members.
        perturb: size of the perturbations of initial states, in standard deviations.
        perturb_seed: what perturbations are drawn from.
    """

    checkpoint: str
    init: str
    lead: str
    out: str
    every: str = ""
    format: str = "zarr"
    members: int = 0
    perturb: float = 0.0
    perturb_seed: int = 0

    def check(self, step_hours: int) -> None:
        """Refuse values that are not allowed, or that do not fit the model's step.

        Raises:
            UserError: naming the key.
        """
        checks.one_of("format", self.format, FORMATS)
        checks.at_least("members", self.members, 0)
        checks.number_in("perturb", self.perturb, 0)
        checks.integer_in("perturb_seed", self.perturb_seed, 0, 2**63 - 1)
        if self.members > 1 and not self.perturb:
            raise UserError(
                f"members: {self.members} forecasts from the same state would be the same. Give "
                "the size of perturbations too, like perturb=0.1."
            )
        if self.perturb and not self.members:
            raise UserError("perturb: needs members, like members=10, got none. Give both.")
        self.lead_hours(step_hours)

    def initial_times(self) -> Times:
        """`(N,)`, rising, each once.

        Raises:
            UserError: it is not of a form that `init` may have.
        """
        return initial_times(self.init)

    def lead_hours(self, step_hours: int) -> tuple[int, ...]:
        """The lead times that are written, rising.

        Raises:
            UserError: one is no multiple of the model's step.
        """
        last = parse_hours("lead", self.lead)
        every = parse_hours("every", self.every) if self.every else step_hours
        for key, hours in (("lead", last), ("every", every)):
            if hours % step_hours:
                raise UserError(
                    f"{key}: needs a multiple of the model's step of {step_hours}h, got {hours}h. "
                    f"Change {key}."
                )
        if last % every:
            raise UserError(f"every: needs to divide lead={last}h, got {every}h. Change either.")
        return tuple(range(every, last + 1, every))

    @property
    def target(self) -> Path:
        """Where the forecast is to be.

        Raises:
            UserError: it is no path of this machine.
        """
        if not self.out or "://" in self.out:
            raise UserError(f"out: needs a path of this machine, got {self.out!r}. Change out.")
        return checks.expand_home("out", self.out).absolute()


@final
@dataclass
class ForecastConfig(Config):
    """The config of the run that trained the model, and what to forecast with it."""

    request: ForecastRequest = ForecastRequest("", "", "", "")


def initial_times(text: str) -> Times:
    """A time, a list in brackets, or first, last and stride with slashes between them.

    Raises:
        UserError: it is none of these.
    """
    if "/" in text:
        return _parse_series(text)
    entries = text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else [text]
    times = np.array([_parse_time(entry.strip().strip("'\"")) for entry in entries], "M8[ns]")
    if len(np.unique(times)) < len(times):
        raise UserError(f"init: needs each time once, got {text}")
    return np.sort(times)


def parse_hours(key: str, text: str) -> int:
    """`240h` -> 240, `10d` -> 240.

    Raises:
        UserError: it is not of that form.
    """
    found = STEP_PATTERN.fullmatch(text)
    if found is None:
        raise UserError(f"{key}: needs hours or days, like 240h or 10d, got {text or 'nothing'!r}")
    return int(found[1]) * HOURS_PER_UNIT[found[2]]


def _parse_series(text: str) -> Times:
    parts = [part.strip() for part in text.strip("'\"").split("/")]
    if len(parts) != 3:
        raise UserError(
            f"init: needs FIRST/LAST/STRIDE, like 2001-02-10/2001-02-12/24h, got {text!r}"
        )
    first, last = _parse_time(parts[0]), _parse_time(parts[1])
    stride = np.timedelta64(parse_hours("init", parts[2]), "h")
    if not first <= last or (last - first) // stride >= MAX_INITIAL_TIMES:
        problem = (
            "after the last"
            if first > last
            else f"more than {MAX_INITIAL_TIMES} strides before the last"
        )
        raise UserError(f"init: the first time is {problem}, in {text}. Change init.")
    return np.arange(first, last + np.timedelta64(1, "ns"), stride)


def _parse_time(text: str) -> np.datetime64:
    checks.date("init", text)
    if not re.fullmatch(r"[-\d:T. ]+", text):
        raise UserError(f"init: needs a time like 2001-02-10T06, got {text!r}")
    time = np.datetime64(datetime.fromisoformat(text), "ns")
    if time != time.astype("M8[h]"):
        raise UserError(f"init: needs whole hours, like 2001-02-10T06, got {text!r}")
    return time


class ForecastJob(NamedTuple):
    """One forecast, by the places of its member and initial time."""

    member: int
    time: int


def all_jobs(times: int, members: int) -> list[ForecastJob]:
    """All members of the first initial time, then those of the next."""
    return [ForecastJob(member, time) for time in range(times) for member in range(members)]


def rank_jobs(
    jobs: Sequence[ForecastJob], rank: int, ranks: int
) -> Iterator[tuple[ForecastJob, bool]]:
    """The share of a data rank, and whether it counts.

    All ranks have equally many turns, for those that share parameters out need each other at every
    step: one without a forecast of its own left repeats one that does not count.
    """
    for start in range(0, len(jobs), ranks):
        own = jobs[start + rank : start + rank + 1]
        yield (own[0], True) if own else (jobs[0], False)
