"""The request for forecasts: checkpoint, times, members and output; and its split over ranks."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.config import Config
from credit_dp.config.data import HOURS_PER_UNIT, REGRIDDING, STEP_PATTERN
from credit_dp.config.model import CORRECTIONS
from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.errors import UserError

FORMATS = ("zarr", "netcdf", "netcdf_file", "grib")
DIAGNOSTICS = {
    "z": "geopotential",
    "msl": "mean_sea_level_pressure",
    "tcw": "total_column_water",
    "tcwv": "total_column_water_vapour",
    **{name: name for name in CORRECTIONS.values()},
}
MAX_INITIAL_TIMES = 10**6  # a longer series is taken for a mistake in the stride


@final
@dataclass(frozen=True)
class ForecastRequest:
    """The keys of the forecast command, as text.

    Attributes:
        checkpoint: the folder of a run or of a checkpoint.
        init: a time, `[a,b,...]` or `FIRST/LAST/STRIDE`.
        lead: longest lead time, in hours or days, like 240h or 10d.
        out: the store or folder to write.
        every: step between the lead times to write, like 24h; empty: the model's step.
        format: one of `FORMATS`.
        members: forecasts from each initial time; 0: one, without a dimension of members.
        perturb: amplitude of the perturbations of initial states, in standard deviations.
        perturb_seed: seed of the perturbations, and of the model's noise.
        diagnostics: `NAME` or `[NAME,...]` of `DIAGNOSTICS`, which are written, too.
        pressure_levels: `HPA` or `[HPA,...]`, on which variables on model levels are written.
        init_file: `PATH` or `[PATH,...]` of files with the initial states; "": the run's data.
        regrid: one of `REGRIDDING`: how states of `init_file` on another grid are regridded; "": as
            `data.regrid` says, by default conservatively.
        grid: `source`: fields are written on the cells of the data; "": on the model's grid.
        boundary: what gives the rim of a region: `truth`, the run's data, or `PATH` or
            `[PATH,...]` of a driving model; "": the model has no rim.
        calendar: of the model's data, in which `init` is.
    """

    checkpoint: str = ""
    init: str = ""
    lead: str = ""
    out: str = ""
    every: str = ""
    format: str = "zarr"
    members: int = 0
    perturb: float = 0.0
    perturb_seed: int = 0
    diagnostics: str = ""
    pressure_levels: str = ""
    init_file: str = ""
    regrid: str = ""
    grid: str = ""
    boundary: str = ""
    calendar: Calendar = STANDARD

    def check(self, step_hours: int, noise: bool = False) -> None:
        """Check all values, and that lead times fit the model's step.

        Args:
            noise: whether the model has noise, so that members differ from the same state.
        """
        checks.one_of("format", self.format, FORMATS)
        if self.grid:
            checks.one_of("grid", self.grid, ("source",))
            if self.format not in ("zarr", "grib"):
                raise UserError(
                    f"format: cells, grid={self.grid}, are written as zarr or grib, got "
                    f"{self.format}. Change format, or leave grid out."
                )
        if self.regrid:
            checks.one_of("regrid", self.regrid, REGRIDDING)
            if not self.init_file:
                raise UserError(
                    f"regrid: {self.regrid} is for states of init_file, which is empty. "
                    "Leave it out, or give init_file."
                )
        checks.at_least("members", self.members, 0)
        checks.number_in("perturb", self.perturb, 0)
        checks.integer_in("perturb_seed", self.perturb_seed, 0, 2**63 - 1)
        if self.format == "grib" and not self.calendar.is_standard:
            raise UserError(
                f"format: GRIB has no dates of the {self.calendar.name} calendar, which the "
                "training data have. Use format=zarr or format=netcdf."
            )
        if self.members > 1 and not self.perturb and not noise:
            raise UserError(
                f"members: {self.members} forecasts from the same state would be the same. Set "
                "perturb, too, like perturb=0.1, or a model with model.noise or model=diffusion."
            )
        if self.perturb and not self.members:
            raise UserError("perturb: needs members, like members=10, got none. Give both.")
        self.lead_hours(step_hours)
        self.diagnostic_names()
        self.levels_in_hpa()

    def diagnostic_names(self) -> tuple[str, ...]:
        """Return the long names of the diagnostics.

        Raises:
            UserError: a name is unknown, or occurs twice.
        """
        names = [DIAGNOSTICS.get(name, name) for name in parse_list(self.diagnostics)]
        allowed = [*dict.fromkeys([*DIAGNOSTICS, *DIAGNOSTICS.values()])]
        for name in names:
            checks.one_of("diagnostics", name, allowed)
        checks.no_repeats("diagnostics", names)
        return tuple(names)

    def levels_in_hpa(self) -> tuple[int, ...]:
        """Return the pressure levels.

        Raises:
            UserError: one is no whole number above 0, or occurs twice.
        """
        texts = parse_list(self.pressure_levels)
        for text in texts:
            if not text.isdecimal() or not int(text):
                raise UserError(
                    f"pressure_levels: needs whole numbers of hPa, like [500,850], got {text!r}"
                )
        checks.no_repeats("pressure_levels", texts)
        return tuple(map(int, texts))

    def initial_times(self) -> Times:
        """Return the initial times, `(N,)`, rising, each once.

        Raises:
            UserError: `init` is neither a time, nor a list, nor a series.
        """
        return parse_initial_times(self.init, self.calendar)

    def lead_hours(self, step_hours: int) -> tuple[int, ...]:
        """Return the lead times to write in hours, rising.

        Raises:
            UserError: `lead` or `every` is no multiple of the model's step.
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

    def steps(self, step_hours: int) -> NDArray[np.timedelta64]:
        """Return the time from the initial time to each step of the model, `(N,)`, rising."""
        return np.arange(step_hours, self.lead_hours(step_hours)[-1] + 1, step_hours, dtype="m8[h]")

    @property
    def target(self) -> Path:
        """Return the absolute path of the output.

        Raises:
            UserError: it is not a local path.
        """
        if not self.out or "://" in self.out:
            raise UserError(f"out: needs a local path, got {self.out!r}. Change out.")
        return checks.expand_home("out", self.out).absolute()


# The keys of the command, with their defaults.
FORECAST_KEYS = {x.name: x.default for x in fields(ForecastRequest) if x.name != "calendar"}


@dataclass
class ForecastConfig(Config):
    """The config of the run that trained the model, with the request for forecasts."""

    request: ForecastRequest = ForecastRequest()


def parse_initial_times(text: str, calendar: Calendar = STANDARD) -> Times:
    """Parse a time, a list in brackets, or FIRST/LAST/STRIDE.

    Raises:
        UserError: the text is none of these.
    """
    if "/" in text:
        return _parse_series(text, calendar)
    entries = parse_list(text) or [""]
    times = np.array([_parse_time(entry, calendar) for entry in entries], calendar.dtype)
    if len(np.unique(times)) < len(times):
        raise UserError(f"init: needs each time once, got {text}")
    return np.sort(times)


def parse_list(text: str) -> list[str]:
    """Return the entries of `[a,b,...]`, without quotes; another text is one, "" and `[]` none."""
    in_brackets = text.startswith("[") and text.endswith("]")
    content = text[1:-1].strip() if in_brackets else text
    entries = content.split(",") if in_brackets and content else [content] if content else []
    return [entry.strip().strip("'\"") for entry in entries]


def parse_hours(key: str, text: str) -> int:
    """Parse a number of hours or days: `240h` -> 240, `10d` -> 240.

    Raises:
        UserError: names the key with the invalid value.
    """
    match = STEP_PATTERN.fullmatch(text)
    if match is None:
        raise UserError(
            f"{key}: needs whole hours or days, like 240h or 10d, got {text or 'nothing'!r}"
        )
    return int(match[1]) * HOURS_PER_UNIT[match[2]]


def _parse_series(text: str, calendar: Calendar) -> Times:
    parts = [part.strip() for part in text.strip("'\"").split("/")]
    if len(parts) != 3:
        raise UserError(
            f"init: needs FIRST/LAST/STRIDE, like 2001-02-10/2001-02-12/24h, got {text!r}"
        )
    first = _parse_time(parts[0], calendar)
    last = _parse_time(parts[1], calendar)
    stride = np.timedelta64(parse_hours("init", parts[2]), "h")
    if not first <= last or (last - first) // stride >= MAX_INITIAL_TIMES:
        problem = "after the last"
        if first <= last:
            problem = f"more than {MAX_INITIAL_TIMES} strides before the last"
        raise UserError(f"init: the first time is {problem}, in {text}. Change init.")
    # `arange` excludes its end; one more instant includes `last`.
    return np.arange(first, last + calendar.instant, stride)


def _parse_time(text: str, calendar: Calendar) -> np.datetime64:
    checks.date("init", text)
    if not re.fullmatch(r"[-\d:T. ]+", text):
        raise UserError(f"init: needs a time like 2001-02-10T06, got {text!r}")
    time = calendar.parse("init", text)
    if time != time.astype("M8[m]"):
        raise UserError(f"init: needs whole minutes, like 2001-02-10T06:30, got {text!r}")
    return time


class ForecastJob(NamedTuple):
    """One forecast, by the indices of its member and initial time."""

    member: int
    time: int


def all_jobs(times: int, members: int) -> list[ForecastJob]:
    """Return all forecasts, ordered by initial time, then by member."""
    return [ForecastJob(member, time) for time in range(times) for member in range(members)]


def rank_jobs(
    jobs: Sequence[ForecastJob], rank: int, ranks: int
) -> Iterator[tuple[ForecastJob, bool]]:
    """Yield the jobs of a data rank, and whether they count.

    All ranks yield equally many jobs: with sharded parameters (FSDP), every forward pass is
    collective. A rank without a job left repeats one that does not count.
    """
    for start in range(0, len(jobs), ranks):
        local_jobs = jobs[start + rank : start + rank + 1]
        yield (local_jobs[0], True) if local_jobs else (jobs[0], False)
