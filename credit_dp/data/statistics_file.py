"""A file of statistics: the numbers of each channel, and what they were made from.

JSON, so that people can read it:

    form        which version of this form it is
    made_from   dates, step, grid, transforms, and for each channel a digest of some of its values
    channels    for each channel by name: mean, std, tendency_std, minimum, maximum
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from credit_dp.data.accumulate import is_accumulated
from credit_dp.data.cache import fingerprint
from credit_dp.data.dates import split_span
from credit_dp.data.statistics import NUMBERS, Table
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates, channel_groups
from credit_dp.errors import UserError

FORM = "credit_dp statistics 2"  # of the definitions: a new one makes old files unused


# What has to be as in the config, and by which key it is changed.
SETTINGS = {"step": "data.step", "dates": "data.dates.train", "grid": "data.store"}


@final
@dataclass(frozen=True)
class StatisticsFile:
    """What a file holds.

    Attributes:
        made_from: see `made_from`.
        channels: by the channels' names.
    """

    made_from: Mapping[str, Any]
    channels: Table

    @classmethod
    def load(cls, path: Path) -> "StatisticsFile | None":
        """Read what `save` wrote; None if it is absent, damaged or something else."""
        try:
            found = json.loads(path.read_text())
            if found["form"] != FORM:
                return None
            rows = {
                name: {number: float(row[number]) for number in NUMBERS}
                for name, row in found["channels"].items()
            }
            made_from = dict(found["made_from"])
            whole = {"store": str, "every": int, "transforms": dict, "values": dict}
            if not all(type(made_from[key]) is kind for key, kind in whole.items()):
                return None
            return cls(made_from, rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, path: Path) -> None:
        """Write it, to the last bit; whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        content = {"form": FORM, "made_from": self.made_from, "channels": self.channels}
        write_whole(path, json.dumps(content, indent=1) + "\n")

    @property
    def every(self) -> int:
        """It is of every N-th training date."""
        return int(self.made_from["every"])

    def check(self, store: Store, where: str, change: str = "data.statistics") -> None:
        """Refuse statistics of something else than the config's training dates.

        They may hold more channels.

        Args:
            where: as messages name the file.
            change: what they advise to change, apart from the key that differs.

        Raises:
            UserError: names the first thing that differs.
        """
        own = made_from(store, self.every)
        for what, key in SETTINGS.items():
            if own[what] != self.made_from.get(what):
                raise UserError(
                    f"{where}: is of {what} {_shown(self.made_from.get(what))}, but the config has "
                    f"{_shown(own[what])}. Change {key} or {change}."
                )
        for name, done in own["transforms"].items():
            before = self.made_from["transforms"].get(name, done)
            if before != done:
                raise UserError(
                    f"{where}: is of {name} {before}, but the config has it {done}. Change "
                    f"data.variables.{name} or {change}."
                )
        for name, digest in own["values"].items():
            if self.made_from["values"].get(name, digest) != digest:
                raise UserError(
                    f"{where}: is of {self.made_from['store']}, in which {name} has other values "
                    f"than in {store.source.where}. Change data.store or {change}."
                )


def statistics_path(store: Store, folder: Path, every: int = 1) -> Path:
    """Where the statistics of this store, these variables, dates and step lie in the cache."""
    return folder / f"statistics-{strict_name(store, every)}.json"


def strict_name(store: Store, every: int) -> str:
    """A name for statistics of this very store, as old as it is now."""
    config = store.config
    times = store.times[TrainingDates.of(store, every).chosen]
    timed = [channel.variable for group in channel_groups(store) for channel in group]
    description = store.description([*dict.fromkeys(timed), *config.static])
    lists = [config.prognostic, config.diagnostic, config.forcing, config.static]
    dates = [str(time) for time in times]
    transforms = _transforms(store)
    return fingerprint(FORM, description, lists, dates, every, config.step_hours, transforms)


def made_from(store: Store, every: int) -> dict[str, Any]:
    """What the statistics of a store's training dates are made from, as JSON.

    Paths are not part of it: a copy of the store has the same statistics. Instead there is a digest
    of a row of each channel at the first training date.
    """
    span = split_span(store.config, "train", store.times)
    times = [str(time) for time in store.times[span].astype("datetime64[s]")]
    rows, columns = store.grid
    coordinates = fingerprint(store.latitude.tolist(), store.longitude.tolist())
    return {
        "store": store.source.where,
        "step": f"{store.config.step_hours}h",
        "dates": [times[0], times[-1], len(times), fingerprint(times)],
        "every": every,
        "grid": [rows, columns, coordinates],
        "transforms": _transforms(store),
        "values": _values(store, span.start),
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name, then give it its own.

    Raises:
        UserError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}). Change out, or make room."
        ) from error


def _transforms(store: Store) -> dict[str, str]:
    """What is done to the values of each variable before their moments are taken."""
    config = store.config
    names = [*config.prognostic, *config.diagnostic, *config.forcing, *config.static]
    found = {}
    for name in names:
        variable = config.of(name)
        done = [] if np.isnan(variable.log1p_scale) else [variable.normalise]
        if variable.convert:
            done.append(variable.convert)
        if is_accumulated(name, config):
            done.append("accumulated")
        found[name] = ", ".join(done) or "as it is"
    return found


def _values(store: Store, place: int) -> dict[str, str]:
    """A digest of the middle row of each channel at one date."""
    middle = store.grid[0] // 2
    rows = slice(middle, middle + 1)
    found = {}
    for group in channel_groups(store):
        for _, block in store.blocks(group, slice(place, place + 1), rows):
            for channel, values in zip(group, block[0], strict=True):
                found[channel.name] = _digest(values)
    return found


def _digest(values: np.ndarray[Any, Any]) -> str:
    known = np.where(np.isnan(values), np.float32(np.nan), values).astype("<f4")
    return hashlib.sha256(known.tobytes()).hexdigest()[:16]


def _shown(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
