"""The config of the data: which store, variables and dates make a sample, and what is done to them.

No numpy in here: see `config.py`.
"""

import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.errors import UserError
from credit_dp.variable_names import canonical_name, long_name, possible_canonical_names

Entry = TypeVar("Entry")

STORE_FORMATS = ("quickstart", "zarr", "weatherbench2", "arco", "anemoi", "prepared")
ROLES = ("prognostic", "diagnostic", "forcing", "static")  # of variables
SPLITS = ("train", "valid", "test")
AUTO = "auto"  # dates of a split that are chosen among the times of the store
NORMALISERS = ("standard", "std", "minmax", "none", "log1p")
LOG1P_PATTERN = re.compile(r"log1p\(([^()]+)\)")
STEP_PATTERN = re.compile(r"([1-9]\d{0,5})([hd])")
HOURS_PER_UNIT = {"h": 1, "d": 24}


@dataclass
class QuickstartConfig:
    """The embedded climate: spectral truncation, seed, and the spans it covers.

    `runs` independent integrations of `run_days` each, ten days apart, the first at `start`.
    """

    truncation: int = 21  # total wavenumber up to which fields have structure, e.g. 42
    seed: int = 0  # of the initial states
    start: str = "2001-01-01"  # first date of the first run
    runs: int = 6  # independent integrations, ten days apart
    run_days: int = 190  # of each run
    spinup_days: int = 40  # of each run before its first date

    def __post_init__(self) -> None:
        checks.at_least("data.quickstart.truncation", self.truncation, 5)
        checks.at_least("data.quickstart.seed", self.seed, 0)
        checks.at_least("data.quickstart.runs", self.runs, 1)
        checks.at_least("data.quickstart.run_days", self.run_days, 1)
        checks.at_least("data.quickstart.spinup_days", self.spinup_days, 0)


@dataclass
class DatesConfig:
    """Which dates each split has: `[first, last]`, both inclusive, ISO format, or `auto`.

    A run settles them when it has opened its store: from then on, and in the config that it writes,
    each split is `[first, last]`, and nothing is left to be chosen.
    """

    train: Any = AUTO  # [first, last], both included; auto: the first 80 % of the store's times
    valid: Any = AUTO  # of the scores on the way; auto: the next 10 %
    test: Any = AUTO  # of the final scores; auto: the last 10 %
    limit: int | None = None  # only so many times of each split, the first ones; null: all
    # splits with the preset's dates: auto where the store lacks some; the command line sets this
    preset: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for split in SPLITS:
            key, dates = f"data.dates.{split}", getattr(self, split)
            if dates == AUTO:
                continue
            if not isinstance(dates, list):
                raise UserError(
                    f"{key}: needs [first, last] in ISO format, like [2000-01-01, 2000-12-31], or "
                    f"{AUTO}, got {dates!r}"
                )
            dates = [str(date) for date in dates]  # 20000101 comes as a number
            checks.date_range(key, dates)
            setattr(self, split, dates)
        checks.at_least("data.dates.limit", self.limit, 1)
        for split in self.preset:
            checks.one_of("data.dates.preset", split, SPLITS)

    @property
    def open(self) -> bool:
        """Whether they are only known when the store is."""
        chosen = AUTO in (self.train, self.valid, self.test)
        return chosen or bool(self.preset) or self.limit is not None


@dataclass
class VariableConfig:
    """What is done to one variable between the store and the model, and undone in forecasts.

    Attributes:
        normalise: `standard`, `std` (not centred), `minmax` (to 0..1), `none`, or `log1p(EPS)`:
            `log(1 + x / EPS)`, then standard.
        fill: what stands for NaN on the points where a field has none ever: `mean` or a number;
            null: NaN is refused.
        convert: `FROM->TO` units, for a store that has another unit than the model is to see.
        accumulated: the store has sums since the time before: they are added up over a step.
            null: as known of the name.
        nonnegative: forecasts are clamped at zero. null: as known of the name.
    """

    normalise: str = "standard"
    fill: Any = None
    convert: str | None = None
    accumulated: bool | None = None
    nonnegative: bool | None = None

    def check(self, key: str) -> None:
        """Refuse what none of the fields may be; `key` is that of the variable.

        Raises:
            UserError: naming the key.
        """
        if not LOG1P_PATTERN.fullmatch(self.normalise):
            checks.one_of(f"{key}.normalise", self.normalise, NORMALISERS[:-1])
        elif not self.log1p_scale > 0:
            raise UserError(f"{key}.normalise: needs log1p of a number above 0")
        number = isinstance(self.fill, int | float) and not isinstance(self.fill, bool)
        if number:
            checks.number_in(f"{key}.fill", self.fill, float("-inf"))
        elif self.fill not in (None, "mean"):
            raise UserError(f"{key}.fill: needs `mean`, a number or null, got {self.fill!r}")
        if self.convert is not None and not re.fullmatch(r"[^>]+->[^>]+", self.convert):
            raise UserError(f"{key}.convert: needs FROM->TO, like hPa->Pa, got {self.convert!r}")

    @property
    def log1p_scale(self) -> float:
        """EPS of `log1p(EPS)`; NaN if that is no number, or not the normalisation."""
        found = LOG1P_PATTERN.fullmatch(self.normalise)
        try:
            return float(found[1]) if found else float("nan")
        except ValueError:
            return float("nan")


@dataclass
class DataConfig:
    """Which store, variables and dates make a sample."""

    name: str = MISSING  # form of the store
    store: Any = None  # path, glob or address of a store, or a list; the quickstart makes its own
    # folder of the quickstart's store, of statistics and climatologies, shared by all runs
    cache: str = "${oc.env:CREDIT_DP_CACHE,${oc.env:HOME,.}/.cache/credit_dp}"
    grid: str | None = None  # "ROWSxCOLUMNS", e.g. 121x240; null: the store's own
    prognostic: list[str] = MISSING  # go in and come out
    diagnostic: list[str] = field(default_factory=list)  # only come out
    forcing: list[str] = field(default_factory=list)  # only go in
    static: list[str] = field(default_factory=list)  # go in, the same at all times
    levels: list[int] | None = None  # hPa, or hybrid; null: all of the store's
    # what is done to single variables, e.g. {total_precipitation: {normalise: log1p(1e-3)}}
    variables: dict[str, VariableConfig] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)  # [low, high] of values; null: any
    step: str = "6h"  # hours or days of one step; finer stores are subsampled
    dates: DatesConfig = field(default_factory=DatesConfig)
    statistics: Any = None  # a file or a list; null: made from the training dates, in the cache
    batch_size: int = 8  # global: the mesh never changes it
    prefetch: int = 2  # batches ready ahead of the step that uses them
    workers: int = 2  # threads that read and decode
    quickstart: QuickstartConfig = field(default_factory=QuickstartConfig)  # the embedded climate

    def __post_init__(self) -> None:
        if self.name != MISSING:
            checks.one_of("data.name", self.name, STORE_FORMATS)
        self._check_store()
        self._check_statistics()
        checks.grid("data.grid", self.grid)
        checks.not_empty("data.prognostic", self.prognostic)
        for key in ("prognostic", "diagnostic", "forcing", "static", "levels"):
            if getattr(self, key) not in (None, MISSING):
                checks.no_repeats(f"data.{key}", getattr(self, key))
        for name, variable in self.variables.items():
            variable.check(f"data.variables.{name}")
        for name, limits in self.limits.items():
            checks.limits(f"data.limits.{name}", limits)
        self.variables = self._by_listed_name("variables", self.variables)
        self.limits = self._by_listed_name("limits", self.limits)
        if not STEP_PATTERN.fullmatch(self.step):
            raise UserError(f"data.step: needs hours or days, like 6h or 1d, got {self.step!r}")
        checks.at_least("data.batch_size", self.batch_size, 1)
        checks.at_least("data.prefetch", self.prefetch, 0)
        checks.at_least("data.workers", self.workers, 1)

    def _check_store(self) -> None:
        entries = self.store if isinstance(self.store, list) else [self.store]
        if not entries or not all(isinstance(entry, str | None) for entry in entries):
            raise UserError(f"data.store: needs a path or a list of them, got {self.store!r}")

    def _check_statistics(self) -> None:
        many = isinstance(self.statistics, list)
        entries = self.statistics if many else [self.statistics or "none"]
        if not entries or not all(isinstance(entry, str) and entry for entry in entries):
            raise UserError(
                "data.statistics: needs a file, or those of mean, std and tendency std, got "
                f"{self.statistics!r}"
            )

    def _by_listed_name(self, key: str, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Entries by variables, of which a name may be another name of one in the lists.

        Raises:
            UserError: a key may stand for two of them, or two keys for one.
        """
        lists = (self.prognostic, self.diagnostic, self.forcing, self.static)
        listed = [name for names in lists if names != MISSING for name in names]
        found: dict[str, Entry] = {}
        for given, entry in entries.items():
            level = long_name(given)[1]
            alike = [
                name
                for name in listed
                if possible_canonical_names(name) & possible_canonical_names(given)
            ]
            names = [name for name in alike if level in (None, long_name(name)[1])]
            if key == "limits" and not names:  # of one level
                names = [f"{name}_{level}" for name in alike if long_name(name)[1] is None]
            if given in listed or not names:
                names = [given]
            if len({canonical_name(name) for name in names}) > 1:
                raise UserError(
                    f"data.{key}.{given}: stands for {' and '.join(names)} here. Give it by one "
                    "of these names."
                )
            for name in names:
                if name in found or (name != given and name in entries):
                    raise UserError(
                        f"data.{key}.{given}: {name} has another entry in data.{key}. Give "
                        "one for both."
                    )
                found[name] = entry
        return found

    @property
    def statistics_files(self) -> list[str]:
        """The entries of `statistics`; empty if there is none."""
        many = isinstance(self.statistics, list)
        return list(self.statistics) if many else [self.statistics] if self.statistics else []

    @property
    def stores(self) -> list[str]:
        """The entries of `store`; empty if there is none."""
        found = self.store if isinstance(self.store, list) else [self.store]
        return [entry for entry in found if entry]

    @property
    def step_hours(self) -> int:
        """`step` in hours."""
        number, unit = STEP_PATTERN.fullmatch(self.step).groups()  # type: ignore[union-attr]
        return int(number) * HOURS_PER_UNIT[unit]

    def of(self, variable: str) -> VariableConfig:
        """What the config says of a variable, or the default."""
        return self.variables.get(variable) or VariableConfig()
