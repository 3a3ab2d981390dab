"""Mean and standard deviation of every channel over the training dates."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.cache import fingerprint
from credit_dp.data.dates import one_step_pairs, split_span
from credit_dp.data.forcings import COMPUTED
from credit_dp.data.grid import row_weights
from credit_dp.data.moments import Moments
from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import Fields
from credit_dp.data.store import Store
from credit_dp.errors import UserError

VERSION = 1  # of the definitions below: a new one makes old files unused

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Moments in the store's units, weighted by area, over the training dates.

    Shapes:
        `mean`, `std`, and `tendency_std` (of the change over one step): `(C,)`, prognostic;
        `forcing_mean`, `forcing_std`: `(F,)`; `static_mean`, `static_std`: `(S,)`. Computed
        forcings have mean 0 and std 1, constant forcings and statics std 1.
    """

    mean: Vector
    std: Vector
    tendency_std: Vector
    forcing_mean: Vector
    forcing_std: Vector
    static_mean: Vector
    static_std: Vector

    @classmethod
    def load(cls, path: Path) -> "Statistics | None":
        """Read what `save` wrote; None if it is absent or damaged."""
        try:
            found = json.loads(path.read_text())
            return cls(**{f.name: _vector(found[f.name]) for f in fields(cls)})
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Write as JSON, to the last bit."""
        path.write_text(json.dumps({name: list(values) for name, values in asdict(self).items()}))


def statistics_path(store: Store, folder: Path) -> Path:
    """Where the statistics of this store, these variables, dates and step lie."""
    config = store.config
    times = store.times[split_span(config, "train", store.times)]
    variables = [*store.channels.variables, *config.forcing, *config.static]
    stored = [name for name in variables if name not in COMPUTED]
    lists = [config.prognostic, config.forcing, config.static]
    dates = [str(time) for time in times]
    name = fingerprint(VERSION, store.description(stored), lists, dates, config.step_hours)
    return folder / f"statistics-{name}.json"


@final
class StatisticsPass:
    """Gathers the statistics during a pass over the training dates."""

    def __init__(self, store: Store) -> None:
        """Find the pairs of dates one step apart.

        Raises:
            UserError: there is no such pair.
        """
        self._store = store
        self._weights = row_weights(store.latitude)
        config = store.config
        span = split_span(config, "train", store.times)
        self._now, self._later = one_step_pairs(store.times[span], config.step_hours)
        if not len(self._now):
            raise UserError(
                f"{config.store}: no two dates of data.dates.train are {config.step_hours} "
                f"hours apart. Change data.step or data.dates.train."
            )
        self._reach = int((self._later - self._now).max())
        self._values: list[Moments] = []
        self._changes: list[Moments] = []
        self._window: Fields | None = None
        self._levels = 0

    def begin(self, variable: str, levels: int) -> None:
        """Expect blocks of another variable."""
        self._levels = levels
        self._window = None
        self._values += [Moments(self._weights) for _ in range(levels)]
        self._changes += [Moments(self._weights) for _ in range(levels)]

    def add(self, first: int, block: Fields) -> None:
        """Take in `(T, levels, H, W)` and its changes, those since the block before included."""
        end = first + len(block)
        # The last times are kept, so that no pair is lost between two blocks.
        kept = block[:0] if self._window is None else self._window[-self._reach :]
        window = np.concatenate([kept, block])
        origin = end - len(window)
        fresh = (self._later >= first) & (self._later < end)
        before, after = self._now[fresh] - origin, self._later[fresh] - origin
        for level in range(self._levels):
            self._values[level - self._levels].add(block[:, level])
            change = window[after, level].astype(np.float64) - window[before, level]
            self._changes[level - self._levels].add(change)
        self._window = window

    def end(self) -> None:
        """Let go of the last fields."""
        self._window = None

    def result(self) -> Statistics:
        """The statistics, once every variable has been seen.

        Raises:
            UserError: a prognostic channel is constant, or a forcing or static is not finite.
        """
        channels = self._store.channels
        for channel, values, changes in zip(
            channels.prognostic, self._values, self._changes, strict=True
        ):
            self._refuse_constant(channel, values, changes)
        forcing = [self._forcing(name) for name in channels.forcing]
        static = self._static()
        return Statistics(
            mean=_vector([moments.mean for moments in self._values]),
            std=_vector([moments.std for moments in self._values]),
            tendency_std=_vector([moments.std for moments in self._changes]),
            forcing_mean=_vector([mean for mean, _ in forcing]),
            forcing_std=_vector([std for _, std in forcing]),
            static_mean=_vector([mean for mean, _ in static]),
            static_std=_vector([std for _, std in static]),
        )

    def _refuse_constant(self, channel: Channel, values: Moments, changes: Moments) -> None:
        if values.std and changes.std:
            return
        raise UserError(
            f"{self._store.config.store}: {channel.name} is constant over the training dates, so "
            f"it cannot be normalised. Leave it out of data.prognostic or data.levels."
        )

    def _forcing(self, name: str) -> tuple[float, float]:
        if name in COMPUTED:
            return 0.0, 1.0
        moments = Moments(self._weights)
        span = split_span(self._store.config, "train", self._store.times)
        for _, block in self._store.blocks([Channel(name)], span, slice(None)):
            moments.add(block[:, 0])
        return moments.mean, moments.std or 1.0

    def _static(self) -> list[tuple[float, float]]:
        found = []
        for field in self._store.static(slice(None)):
            moments = Moments(self._weights)
            moments.add(field[None])
            found.append((moments.mean, moments.std or 1.0))
        return found


def _vector(values: list[float]) -> Vector:
    return np.array(values, dtype=np.float64)
