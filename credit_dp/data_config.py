"""The config of the data: which store, variables and dates make a sample, and what is done to them.

No numpy in here: see `config.py`.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.errors import UserError

FORMS = ("quickstart", "zarr", "weatherbench2", "arco", "anemoi", "prepared")
SPLITS = ("train", "valid", "test")
NORMALISERS = ("standard", "std", "minmax", "none", "log1p")
LOG1P = re.compile(r"log1p\(([^()]+)\)")
STEP = re.compile(r"([1-9]\d{0,5})([hd])")
HOURS = {"h": 1, "d": 24}


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
    """`[first, last]` of each split, both inclusive, ISO format."""

    train: list[str] = MISSING  # [first, last], both included
    valid: list[str] = MISSING  # of the scores on the way
    test: list[str] = MISSING  # of the final scores

    def __post_init__(self) -> None:
        for split in SPLITS:
            if getattr(self, split) != MISSING:
                checks.span(f"data.dates.{split}", getattr(self, split))


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
        if not LOG1P.fullmatch(self.normalise):
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
        found = LOG1P.fullmatch(self.normalise)
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
    step: str = "6h"  # hours or days of one step; finer stores are subsampled
    dates: DatesConfig = field(default_factory=DatesConfig)  # first and last of each split
    statistics: Any = None  # a file or a list; null: made from the training dates, in the cache
    batch_size: int = 8  # global: the mesh never changes it
    prefetch: int = 2  # batches ready ahead of the step that uses them
    workers: int = 2  # threads that read and decode
    quickstart: QuickstartConfig = field(default_factory=QuickstartConfig)  # the embedded climate

    def __post_init__(self) -> None:
        if self.name != MISSING:
            checks.one_of("data.name", self.name, FORMS)
        self._check_store()
        self._check_statistics()
        checks.grid("data.grid", self.grid)
        checks.not_empty("data.prognostic", self.prognostic)
        for key in ("prognostic", "diagnostic", "forcing", "static", "levels"):
            if getattr(self, key) not in (None, MISSING):
                checks.no_repeats(f"data.{key}", getattr(self, key))
        for name, variable in self.variables.items():
            variable.check(f"data.variables.{name}")
        if not STEP.fullmatch(self.step):
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
        number, unit = STEP.fullmatch(self.step).groups()  # type: ignore[union-attr]
        return int(number) * HOURS[unit]

    def of(self, variable: str) -> VariableConfig:
        """What the config says of a variable, or the default."""
        return self.variables.get(variable) or VariableConfig()
