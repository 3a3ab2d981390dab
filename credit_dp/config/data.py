"""The config of the data: the store, its variables and dates, and how variables are transformed.

No numpy in here: `--help` has to answer in under a second.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.errors import UserError
from credit_dp.variable_names import canonical_name, long_name, possible_canonical_names

Entry = TypeVar("Entry")

STORE_FORMATS = ("quickstart", "zarr", "weatherbench2", "arco", "anemoi", "prepared")
ROLES = ("prognostic", "diagnostic", "forcing", "static")  # of variables
SPLITS = ("train", "valid", "test")
AUTO = "auto"  # dates of a split that follow from the times of the store
NORMALISERS = ("standard", "std", "minmax", "none", "sqrt", "quantile", "log1p")
LOG1P_PATTERN = re.compile(r"log1p\(([^()]+)\)")
ROWS, CONSERVATIVE, BILINEAR = "rows", "conservative", "bilinear"
REGRIDDING = (CONSERVATIVE, BILINEAR)  # to rows and columns of another grid
STEP_PATTERN = re.compile(r"([1-9]\d{0,5})([hd])")
HOURS_PER_UNIT = {"h": 1, "d": 24}


@dataclass
class QuickstartConfig:
    """The embedded climate model: its resolution, its seed, and the time spans it covers.

    `runs` independent integrations cover `run_days` each, with gaps of ten days; the first begins
    at `start`.
    """

    truncation: int = 21  # spectral truncation: largest total wavenumber of the fields, e.g. 42
    seed: int = 0  # of the initial states
    start: str = "2001-01-01"  # first date of the first run
    runs: int = 6  # number of independent integrations, ten days apart
    run_days: int = 190  # length of each run
    spinup_days: int = 40  # days that each run is integrated before its first date

    def __post_init__(self) -> None:
        if not 5 <= self.truncation <= 255:
            raise UserError(
                f"data.quickstart.truncation: needs a number from 5 to 255, got {self.truncation}. "
                "Set it to 21 (the default) or 42."
            )
        checks.at_least("data.quickstart.seed", self.seed, 0)
        checks.at_least("data.quickstart.runs", self.runs, 1)
        checks.at_least("data.quickstart.run_days", self.run_days, 1)
        checks.at_least("data.quickstart.spinup_days", self.spinup_days, 0)

    def grid_or_default(self, grid: tuple[int, int] | None) -> tuple[int, int]:
        """Return `grid`, or by default the one that resolves products at this truncation."""
        if grid is None:
            rows = 8 * -(-(3 * self.truncation + 1) // 16)
            return rows, 2 * rows
        if min(grid) < 4:
            raise UserError(
                "data.grid: the quickstart climate needs at least 4 rows and 4 columns, but the "
                f"grid is {grid[0]}x{grid[1]}. Set data.grid to something like 32x64."
            )
        return grid


@dataclass
class DatesConfig:
    """The dates of each split: `[first, last]`, both inclusive, in ISO format, or `auto`.

    A run settles them when it opens its store: from then on, also in the config that it writes,
    each split is `[first, last]`, and no date depends on the store any more.
    """

    # [first, last], both inclusive; auto: about the first 80 % of the times; with three years or
    # more whole years, at least one for each split
    train: Any = AUTO
    valid: Any = AUTO  # for the scores during training; auto: the next 10 %
    test: Any = AUTO  # for the final scores; auto: the last 10 %
    limit: int | None = None  # number of times of each split to use, the first ones; null: all
    # splits with a preset's dates: auto if the store lacks some of them; set by the command line
    preset: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for split in SPLITS:
            key = f"data.dates.{split}"
            dates = getattr(self, split)
            if dates == AUTO:
                continue
            if not isinstance(dates, list):
                raise UserError(
                    f"{key}: needs [first, last] in ISO format, like [2000-01-01, 2000-12-31], or "
                    f"{AUTO}, got {dates!r}"
                )
            dates = [str(date) for date in dates]  # YAML reads 20000101 as a number
            checks.date_range(key, dates)
            setattr(self, split, dates)
        checks.at_least("data.dates.limit", self.limit, 1)
        for split in self.preset:
            checks.one_of("data.dates.preset", split, SPLITS)

    @property
    def undetermined(self) -> bool:
        """Whether the dates depend on the times of the store."""
        automatic = AUTO in (self.train, self.valid, self.test)
        return automatic or bool(self.preset) or self.limit is not None


@dataclass
class VariableConfig:
    """How one variable is transformed between the store and the model; forecasts undo it."""

    # standard: (x - mean) / std | std: x / std | minmax: (x - min) / (max - min) | none |
    # sqrt: root of x, then standard | log1p(EPS): log(1 + x / EPS), then standard |
    # quantile: quantiles of x to those of a normal distribution, then standard
    normalise: str = "standard"
    # mean or a number: replaces NaN at points where the field is NaN at all times; null: NaN is
    # refused
    fill: Any = None
    convert: str | None = None  # FROM->TO: conversion of units between the store and the model
    # the store has sums since its previous time, which are added up over a step; null: depends on
    # the variable's name
    accumulated: bool | None = None
    # forecasts are clamped at zero; null: depends on the variable's name, true with sqrt and log1p
    nonnegative: bool | None = None
    # changes sign if the hemispheres are exchanged, as winds to the north do; null: depends on the
    # variable's name
    sign_changes: bool | None = None

    def check(self, key: str) -> None:
        """Check the values; `key` is the config key of the variable."""
        if not LOG1P_PATTERN.fullmatch(self.normalise):
            checks.one_of(f"{key}.normalise", self.normalise, NORMALISERS[:-1])
        elif not self.log1p_scale > 0:
            raise UserError(
                f"{key}.normalise: needs log1p of a number above 0, got {self.normalise}"
            )
        is_number = isinstance(self.fill, int | float) and not isinstance(self.fill, bool)
        if is_number:
            checks.number_in(f"{key}.fill", self.fill, float("-inf"))
        elif self.fill not in (None, "mean"):
            raise UserError(f"{key}.fill: needs `mean`, a number or null, got {self.fill!r}")
        if self.convert is not None and not re.fullmatch(r"[^>]+->[^>]+", self.convert):
            raise UserError(f"{key}.convert: needs FROM->TO, like hPa->Pa, got {self.convert!r}")

    @property
    def is_transformed(self) -> bool:
        """Whether a function that is not linear comes before shift and scale."""
        return self.normalise in ("sqrt", "quantile") or self.log1p_scale > 0

    @property
    def log1p_scale(self) -> float:
        """EPS of `log1p(EPS)`; NaN for other normalisations, or if EPS is not a number."""
        match = LOG1P_PATTERN.fullmatch(self.normalise)
        try:
            return float(match[1]) if match else float("nan")
        except ValueError:
            return float("nan")


@dataclass
class DataConfig:
    """The store, variables and dates that samples are read from, and how they are read."""

    name: str = MISSING  # format of the store
    store: Any = None  # path, glob or URL of a store, or a list; the quickstart generates its own
    member: Any = None  # number of an ensemble's member, or a list of them; null: all
    # folder for the quickstart's store, statistics and climatologies, shared by all runs
    cache: str = "${oc.env:CREDIT_DP_CACHE,${oc.env:HOME,.}/.cache/credit_dp}"
    # "ROWSxCOLUMNS", e.g. 121x240: the quickstart's grid, and the one that any other store is
    # regridded to while it is read; null: the store's own
    grid: str | None = None
    # how: conservative | bilinear, with a grid | rows, without one: cells become rows of the length
    # of the longest; null: conservative with a grid, otherwise rows
    regrid: str | None = None
    # of a region: rows and columns at each edge that are given to the model, not predicted
    boundary: int = 0
    # rows and columns inside of these whose predicted state is drawn towards the given one
    relaxation: int = 0
    prognostic: list[str] = MISSING  # variables in the input and the output
    diagnostic: list[str] = field(default_factory=list)  # variables in the output only
    forcing: list[str] = field(default_factory=list)  # variables in the input only
    static: list[str] = field(default_factory=list)  # input variables that are constant in time
    # those of `static` that only a preset names, and that are left out if the store lacks them; set
    # by the command line
    optional_static: list[str] = field(default_factory=list)
    levels: list[int] | None = None  # hPa, or hybrid; null: all levels of the store
    # of model levels: {a: [...], b: [...]} at the interfaces, from the top, with pressures of
    # a (Pa) + b x surface pressure; empty: the store's hyai and hybi
    hybrid: dict[str, Any] = field(default_factory=dict)
    # options of single variables, e.g. {total_precipitation: {normalise: "log1p(1e-3)"}}
    variables: dict[str, VariableConfig] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)  # allowed values, [low, high]; null: any
    step: str = "6h"  # model time step in whole hours or days; finer stores are subsampled
    dates: DatesConfig = field(default_factory=DatesConfig)
    # a file or a list of them; null: computed from the training dates and cached
    statistics: Any = None
    # whether a run on several nodes may compute statistics and climatology while its ranks wait
    fit_in_job: bool = False
    batch_size: int = 8  # samples of all ranks together, whatever the mesh
    prefetch: int = 2  # batches that are read ahead of training
    workers: int = 2  # threads that read and decode
    quickstart: QuickstartConfig = field(default_factory=QuickstartConfig)  # the embedded climate

    def __post_init__(self) -> None:
        if self.name != MISSING:
            checks.one_of("data.name", self.name, STORE_FORMATS)
        self._check_store()
        self._check_statistics()
        self._check_member()
        checks.grid("data.grid", self.grid)
        self._check_regrid()
        checks.at_least("data.boundary", self.boundary, 0)
        checks.at_least("data.relaxation", self.relaxation, 0)
        if self.boundary and self.name == "quickstart":
            raise UserError(
                "data.boundary: is for regions, but data=quickstart covers the globe, which has no "
                "edges. Set data.boundary=0."
            )
        if self.relaxation and not self.boundary:
            raise UserError(
                "data.relaxation: is for rows and columns beside a rim that is given, but "
                "data.boundary is 0. Set data.boundary or data.relaxation=0."
            )
        if not self.cache:  # which would be the working folder
            raise UserError("data.cache: needs a folder, got an empty text.")
        checks.not_empty("data.prognostic", self.prognostic)
        if self.levels is not None and not self.levels:
            raise UserError(
                "data.levels: needs at least one level, or null for all of the store's."
            )
        for key in ("prognostic", "diagnostic", "forcing", "static", "levels"):
            if getattr(self, key) not in (None, MISSING):
                checks.no_repeats(f"data.{key}", getattr(self, key))
        for name, variable in self.variables.items():
            variable.check(f"data.variables.{name}")
        for name, limits in self.limits.items():
            checks.limits(f"data.limits.{name}", limits)
        self._check_hybrid()
        self.variables = self._by_listed_name("variables", self.variables)
        self.limits = self._by_listed_name("limits", self.limits)
        if not STEP_PATTERN.fullmatch(self.step):
            raise UserError(
                f"data.step: needs whole hours or days, like 6h or 1d, got {self.step!r}"
            )
        checks.at_least("data.batch_size", self.batch_size, 1)
        checks.at_least("data.prefetch", self.prefetch, 0)
        checks.at_least("data.workers", self.workers, 1)

    def _check_store(self) -> None:
        entries = self.store if isinstance(self.store, list) else [self.store]
        if not entries or not all(isinstance(entry, str | None) for entry in entries):
            raise UserError(f"data.store: needs a path or a list of them, got {self.store!r}")

    def _check_regrid(self) -> None:
        if self.regrid is None:
            return
        checks.one_of("data.regrid", self.regrid, (ROWS, *REGRIDDING))
        if self.regrid == ROWS and self.grid is not None:
            raise UserError(
                f"data.regrid: {ROWS} keeps the latitudes of the cells, but data.grid is "
                f"{self.grid}. Leave data.grid out."
            )
        if self.regrid != ROWS and self.grid is None:
            raise UserError(
                f"data.regrid: {self.regrid} needs a grid, but data.grid is null. Set data.grid, "
                "or leave data.regrid out."
            )

    def _check_member(self) -> None:
        if self.member is None:
            return
        numbers = self.member if isinstance(self.member, list) else [self.member]
        if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
            raise UserError(
                f"data.member: needs the number of a member, or a list of them, got {self.member!r}"
            )
        checks.no_repeats("data.member", numbers)

    def _check_hybrid(self) -> None:
        if not self.hybrid:
            return
        lists = [self.hybrid.get(name) for name in ("a", "b")]
        a, b = ([] if x is None or isinstance(x, str) else list(x) for x in lists)
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in [*a, *b])
        if set(self.hybrid) != {"a", "b"} or not numbers or not 1 < len(a) == len(b):
            raise UserError(
                "data.hybrid: needs {a:[...],b:[...]} with two numbers or more, as many of a as of "
                f"b, got {self.hybrid}"
            )
        if 0 < max(map(abs, a)) <= 1:
            raise UserError(
                f"data.hybrid: needs a in Pa, got {max(a):g} at most. If these are multiples of a "
                "reference pressure such as 1e5 Pa, multiply them by it."
            )
        for surface in ("1e5", "5e4"):  # the pressure at sea level and on high mountains
            pressures = [x + float(surface) * y for x, y in zip(a, b, strict=True)]
            if any(not upper < lower for upper, lower in pairwise(pressures)):
                raise UserError(
                    f"data.hybrid: needs pressures a + b x {surface} Pa that rise from the top, "
                    f"got {', '.join(f'{pressure:g}' for pressure in pressures)} Pa"
                )
        self.hybrid = {"a": [float(x) for x in a], "b": [float(x) for x in b]}

    def _check_statistics(self) -> None:
        many = isinstance(self.statistics, list)
        entries = self.statistics if many else [self.statistics or "none"]
        if not entries or not all(isinstance(entry, str) and entry for entry in entries):
            raise UserError(
                "data.statistics: needs a file, or files of mean, std and tendency std, got "
                f"{self.statistics!r}"
            )

    def _by_listed_name(self, key: str, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Return the entries by the names in the lists of variables, from any of their names."""
        lists = (self.prognostic, self.diagnostic, self.forcing, self.static)
        listed = [name for names in lists if names != MISSING for name in names]
        entries_by_name: dict[str, Entry] = {}
        for given, entry in entries.items():
            level = long_name(given)[1]
            synonyms = [
                name
                for name in listed
                if possible_canonical_names(name) & possible_canonical_names(given)
            ]
            names = [name for name in synonyms if level in (None, long_name(name)[1])]
            if key == "limits" and not names:  # limits of a single level of a listed variable
                names = [f"{name}_{level}" for name in synonyms if long_name(name)[1] is None]
            if given in listed or not names:
                names = [given]  # a name that fits nothing is refused when the store is open
            if len({canonical_name(name) for name in names}) > 1:
                raise UserError(
                    f"data.{key}.{given}: stands for {' and '.join(names)} here. Use one of these "
                    "names."
                )
            for name in names:
                if name in entries_by_name or (name != given and name in entries):
                    raise UserError(
                        f"data.{key}.{given}: {name} has another entry in data.{key}. Keep one of "
                        "them."
                    )
                entries_by_name[name] = entry
        return entries_by_name

    @property
    def statistics_files(self) -> list[str]:
        """The files of `statistics`; empty if it is null."""
        many = isinstance(self.statistics, list)
        return list(self.statistics) if many else [self.statistics] if self.statistics else []

    @property
    def stores(self) -> list[str]:
        """The entries of `store`; empty if it is null."""
        entries = self.store if isinstance(self.store, list) else [self.store]
        return [entry for entry in entries if entry]

    @property
    def where(self) -> str:
        """The stores, for messages."""
        return ", ".join(self.stores)

    @property
    def step_hours(self) -> int:
        """The time step in hours."""
        number, unit = STEP_PATTERN.fullmatch(self.step).groups()  # type: ignore[union-attr]
        return int(number) * HOURS_PER_UNIT[unit]

    def on_grid(self, grid: str | None) -> "DataConfig":
        """Return the config with another grid, and the default way to it."""
        return replace(self, grid=grid, regrid=None)

    def variable_config(self, variable: str) -> VariableConfig:
        """Return the options of a variable; the defaults if `variables` has no entry for it."""
        return self.variables.get(variable) or VariableConfig()
