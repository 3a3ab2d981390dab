"""Mean, spread and range of every channel over the training dates."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import DataConfig, VariableConfig
from credit_dp.data.cache import fingerprint
from credit_dp.data.channels import Channel
from credit_dp.data.dates import split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import row_weights
from credit_dp.data.store import Store
from credit_dp.data.streaming import (
    Piece,
    PieceWorkers,
    TrainingDates,
    Window,
    all_pieces,
    channel_groups,
    stream_windows,
)
from credit_dp.data.units import is_accumulated
from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class Moments:
    """What is known of the values seen so far; merged with others, never as E[x^2] - E[x]^2.

    Attributes:
        weight: the sum of all weights.
        squares: the weighted sum of squared differences from the mean.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, with weights for counts.
    """

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float = float("inf")
    maximum: float = float("-inf")

    @classmethod
    def of(cls, values: NDArray[np.float64], rows: NDArray[np.float64]) -> "Moments":
        """Those of `(T, h, W)` with the weights `(h,)` of its rows; NaN is left out."""
        if not values.size:
            return cls()
        sums = values.sum(axis=(0, 2))
        # A sum is NaN only if a value is: looking at each costs as much as the moments themselves.
        if np.isnan(sums).any():
            return cls._of_some(values, rows)
        weight = len(values) * values.shape[2] * float(rows.sum())
        mean = float(sums @ rows) / weight
        away = values - mean
        squares = float(np.einsum("thw,thw->h", away, away) @ rows)
        return cls(weight, mean, squares, float(values.min()), float(values.max()))

    @classmethod
    def _of_some(cls, values: NDArray[np.float64], rows: NDArray[np.float64]) -> "Moments":
        """As `of`, where some values are NaN."""
        valid = ~np.isnan(values)
        weight = float(valid.sum(axis=(0, 2)) @ rows)
        if not weight:
            return cls()
        mean = float(np.where(valid, values, 0).sum(axis=(0, 2)) @ rows) / weight
        away = np.where(valid, values - mean, 0)
        squares = float(np.einsum("thw,thw->h", away, away) @ rows)
        least, most = float(np.nanmin(values)), float(np.nanmax(values))
        return cls(weight, mean, squares, least, most)

    def __add__(self, other: "Moments") -> "Moments":
        """Those of both."""
        weight = self.weight + other.weight
        if not (self.weight and other.weight):
            return self if self.weight else other
        shift = other.mean - self.mean
        return Moments(
            weight,
            self.mean + shift * other.weight / weight,
            self.squares + other.squares + shift**2 * self.weight * other.weight / weight,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    @property
    def std(self) -> float:
        """Standard deviation; 0 if what is there is no more than float32 rounding of the mean."""
        if not self.weight:
            return 0.0
        std = float(np.sqrt(self.squares / self.weight))
        return std if std > np.finfo(np.float32).eps * abs(self.mean) else 0.0

    def as_list(self) -> list[float]:
        """All of it, for `Moments(*numbers)`."""
        return list(astuple(self))


def apply_transform(values: NDArray[np.floating], variable: VariableConfig) -> NDArray[np.floating]:
    """`log(1 + x / EPS)` where the variable is `log1p(EPS)`, else the values themselves.

    Below zero, where packing may leave a rainless point, it is as at zero.
    """
    scale = variable.log1p_scale
    return values if np.isnan(scale) else np.log1p(np.maximum(values, 0) / scale)


def apply_transform_tensor(values: Tensor, variable: VariableConfig) -> Tensor:
    """What `transformed` does, of a tensor; a new one, unless nothing is done."""
    scale = variable.log1p_scale
    return values if np.isnan(scale) else values.clamp(min=0).div_(scale).log1p_()


def invert_transform(values: Tensor, variable: VariableConfig) -> Tensor:
    """What `transformed` gave, in the store's units again."""
    scale = variable.log1p_scale
    return values if np.isnan(scale) else torch.expm1(values) * scale


STATISTIC_NAMES = ("mean", "std", "tendency_std", "minimum", "maximum")

Vector = NDArray[np.float64]
StatisticsTable = Mapping[
    str, Mapping[str, float]
]  # by the channel's name, then by those of NUMBERS
Pair = tuple[Moments, Moments]  # of the values and of their changes over one step

# Computed forcings and statics are of the size that a network likes: whichever way they are
# normalised, these numbers leave them as they are.
IDENTITY_STATISTICS = {"mean": 0.0, "std": 1.0, "minimum": 0.0, "maximum": 1.0}


def _none() -> Vector:
    return np.empty(0)


@final
@dataclass(frozen=True)
class Statistics:
    """Moments of transformed values, weighted by area, over the training dates.

    Values are transformed by `transform.py`, in the units that the config converts to. Where a
    variable has no values it has no weight.

    Shapes:
        `mean`, `std`, `tendency_std` (of the change over one step), `minimum`, `maximum`: `(C,)`,
        prognostic, then diagnostic; `forcing_...`: `(F,)`; `static_...`: `(S,)`. Constant forcings
        and statics have std 1; computed ones have mean 0, std 1 and the range 0 to 1. A range is
        NaN where a file that was given does not say it, and empty in models that were exported
        without one.
    """

    mean: Vector
    std: Vector
    tendency_std: Vector
    forcing_mean: Vector
    forcing_std: Vector
    static_mean: Vector
    static_std: Vector
    minimum: Vector = field(default_factory=_none)
    maximum: Vector = field(default_factory=_none)
    forcing_minimum: Vector = field(default_factory=_none)
    forcing_maximum: Vector = field(default_factory=_none)
    static_minimum: Vector = field(default_factory=_none)
    static_maximum: Vector = field(default_factory=_none)

    @classmethod
    def of(cls, table: StatisticsTable, store: Store, where: str) -> "Statistics":
        """Those of the store's channels, in order.

        Args:
            where: what the table comes from, as messages name it.

        Raises:
            UserError: a channel is missing, or is constant, so that it cannot be normalised.
        """
        out = [_find_row(table, channel.name, where) for channel in store.channels.output_channels]
        for place, (channel, row) in enumerate(
            zip(store.channels.output_channels, out, strict=True)
        ):
            _check_not_constant(channel, row, place < store.channels.states, store.config, where)
        groups = {
            "": out,
            "forcing_": [
                _input(table, name, COMPUTED_FORCINGS, where) for name in store.channels.forcing
            ],
            "static_": [
                _input(table, name, COMPUTED_STATICS, where) for name in store.channels.static
            ],
        }
        return cls(
            **{
                prefix + number: _vector([row[number] for row in rows])
                for prefix, rows in groups.items()
                for number in STATISTIC_NAMES
                if number != "tendency_std" or not prefix
            }
        )


def check_statistics_range(table: StatisticsTable, store: Store, where: str, cure: str) -> None:
    """Refuse statistics of values that would be refused: by others, or from before limits were set.

    Args:
        where: what the table comes from.
        cure: what to do about it.

    Raises:
        UserError: names the first channel whose mean or range is out of the channel's limits.
    """
    for channel in store.channels.output_channels:
        limits = store.limits.of(channel)
        if limits is None or not np.isnan(store.config.of(channel.variable).log1p_scale):
            continue
        for number in ("minimum", "maximum", "mean"):
            value = table.get(channel.name, {}).get(number, np.nan)
            if value < limits.low or value > limits.high:
                raise UserError(
                    f"{where}: the {number} of {channel.name} is {value:.6g}, but its limits are "
                    f"{limits.low:.6g} to {limits.high:.6g}. {cure}, or set "
                    f"data.limits.{channel.variable}."
                )


def empty_moments(piece: Piece) -> list[Pair]:
    """The moments of a piece before its first window."""
    return [(Moments(), Moments()) for _ in piece.channels]


def accumulate_moments(store: Store, piece: Piece, windows: Iterable[Window]) -> list[Pair]:
    """The moments of one piece, channel by channel."""
    found = empty_moments(piece)
    for window in windows:
        found = add_window(store, piece, window, found)
    return found


def add_window(store: Store, piece: Piece, window: Window, found: Sequence[Pair]) -> list[Pair]:
    """Those of the piece with a window more."""
    weights = row_weights(store.latitude)[piece.rows]
    more = []
    for place, (channel, (values, changes)) in enumerate(zip(piece.channels, found, strict=True)):
        fields = _transform_fields(store, channel, window.fields[:, place].astype(np.float64))
        steps = fields[window.after] - fields[window.before]
        fresh = fields if len(window.fresh) == len(fields) else fields[window.fresh]
        more.append((values + Moments.of(fresh, weights), changes + Moments.of(steps, weights)))
    return more


def merge_moments(
    store: Store, pieces: Sequence[Piece], found: Sequence[Sequence[Pair]]
) -> StatisticsTable:
    """The statistics of all pieces, merged in their order, and those of the statics.

    Raises:
        UserError: a channel has no value at all.
    """
    total: dict[str, Pair] = {}
    for piece, pairs in zip(pieces, found, strict=True):
        for channel, (values, changes) in zip(piece.channels, pairs, strict=True):
            before = total.get(channel.name, (Moments(), Moments()))
            total[channel.name] = (before[0] + values, before[1] + changes)
    table = {name: _statistics_row(*pair) for name, pair in total.items()} | static_statistics(
        store
    )
    empty = [name for name, pair in total.items() if not pair[0].weight]
    if empty:
        raise UserError(
            f"{store.config.store}: {empty[0]} has no value at any training date. Leave it out of "
            "the data config, or change data.dates.train."
        )
    return table


def static_statistics(store: Store) -> dict[str, dict[str, float]]:
    """The statistics of the static fields, which change on no date."""
    weights = row_weights(store.latitude)
    table = {}
    fields = store.static(slice(None))
    for name, values in zip(store.channels.static, fields, strict=True):
        values = _transform_fields(store, Channel(name), values[None].astype(np.float64))
        table[name] = _statistics_row(Moments.of(values, weights), Moments())
    return table


def _transform_fields(
    store: Store, channel: Channel, values: NDArray[np.float64]
) -> NDArray[np.float64]:
    config = store.config.of(channel.variable)
    return np.asarray(apply_transform(values, config), dtype=np.float64)


def _statistics_row(values: Moments, changes: Moments) -> dict[str, float]:
    if not values.weight:  # a static field without any value
        return IDENTITY_STATISTICS | {"tendency_std": 0.0}
    return {
        "mean": values.mean,
        "std": values.std,
        "tendency_std": changes.std,
        "minimum": values.minimum,
        "maximum": values.maximum,
    }


def _find_row(table: StatisticsTable, name: str, where: str) -> Mapping[str, float]:
    if name not in table:
        raise UserError(
            f"{where}: has no statistics of {name}. Change data.statistics, to null for those of "
            "the training dates, or leave the variable out of the data config."
        )
    return table[name]


def _input(
    table: StatisticsTable, name: str, computed: Iterable[str], where: str
) -> Mapping[str, float]:
    if name in computed:
        return IDENTITY_STATISTICS
    row = dict(_find_row(table, name, where))
    row["std"] = row["std"] or 1.0
    return row


def _check_not_constant(
    channel: Channel, row: Mapping[str, float], prognostic: bool, config: DataConfig, where: str
) -> None:
    # A prognostic channel that never changes leaves nothing to predict. A diagnostic one may be
    # anything as long as no division by its spread is asked for.
    normalise = config.of(channel.variable).normalise
    constant = not row["std"] and normalise != "none"
    if constant or (prognostic and not (row["std"] and row["tendency_std"])):
        role = "prognostic" if prognostic else "diagnostic"
        raise UserError(
            f"{where}: {channel.name} is constant over the training dates, so "
            f"it cannot be normalised. Leave it out of data.{role} or data.levels."
        )


def _vector(values: list[float]) -> Vector:
    return np.array(values, dtype=np.float64)


FILE_FORMAT = "credit_dp statistics 2"  # of the definitions: a new one makes old files unused


# What has to be as in the config, and by which key it is changed.
SETTINGS = {"step": "data.step", "dates": "data.dates.train", "grid": "data.store"}


@final
@dataclass(frozen=True)
class StatisticsFile:
    """What a file holds.

    Attributes:
        input_description: see the function of this name.
        channels: by the channels' names.
    """

    input_description: Mapping[str, Any]
    channels: StatisticsTable

    @classmethod
    def load(cls, path: Path) -> "StatisticsFile | None":
        """Read what `save` wrote; None if it is absent, damaged or something else."""
        try:
            found = json.loads(path.read_text())
            if found["form"] != FILE_FORMAT:
                return None
            rows = {
                name: {number: float(row[number]) for number in STATISTIC_NAMES}
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
        content = {
            "form": FILE_FORMAT,
            "made_from": self.input_description,
            "channels": self.channels,
        }
        write_text_atomic(path, json.dumps(content, indent=1) + "\n")

    @property
    def every(self) -> int:
        """It is of every N-th training date."""
        return int(self.input_description["every"])

    def check(self, store: Store, where: str, change: str = "data.statistics") -> None:
        """Refuse statistics of something else than the config's training dates.

        They may hold more channels.

        Args:
            where: as messages name the file.
            change: what they advise to change, apart from the key that differs.

        Raises:
            UserError: names the first thing that differs.
        """
        own = input_description(store, self.every)
        for what, key in SETTINGS.items():
            if own[what] != self.input_description.get(what):
                raise UserError(
                    f"{where}: is of {what} {_format_value(self.input_description.get(what))}, "
                    "but the config has "
                    f"{_format_value(own[what])}. Change {key} or {change}."
                )
        for name, done in own["transforms"].items():
            before = self.input_description["transforms"].get(name, done)
            if before != done:
                raise UserError(
                    f"{where}: is of {name} {before}, but the config has it {done}. Change "
                    f"data.variables.{name} or {change}."
                )
        for name, digest in own["values"].items():
            if self.input_description["values"].get(name, digest) != digest:
                raise UserError(
                    f"{where}: is of {self.input_description['store']}, in which {name} has "
                    "other values "
                    f"than in {store.source.where}. Change data.store or {change}."
                )


def statistics_path(store: Store, folder: Path, every: int = 1) -> Path:
    """Where the statistics of this store, these variables, dates and step lie in the cache."""
    return folder / f"statistics-{statistics_cache_key(store, every)}.json"


def statistics_cache_key(store: Store, every: int) -> str:
    """A name for statistics of this very store, as old as it is now."""
    config = store.config
    times = store.times[TrainingDates.of(store, every).indices]
    timed = [channel.variable for group in channel_groups(store) for channel in group]
    description = store.description([*dict.fromkeys(timed), *config.static])
    lists = [config.prognostic, config.diagnostic, config.forcing, config.static]
    dates = [str(time) for time in times]
    transforms = _describe_transforms(store)
    return fingerprint(FILE_FORMAT, description, lists, dates, every, config.step_hours, transforms)


def input_description(store: Store, every: int) -> dict[str, Any]:
    """What the statistics of a store's training dates are made from, as JSON.

    Paths are not part of it: a copy of the store has the same statistics. Instead there is a digest
    of a row of each channel at the first training date.
    """
    span = split_slice(store.config, "train", store.times)
    times = [str(time) for time in store.times[span].astype("datetime64[s]")]
    rows, columns = store.grid
    coordinates = fingerprint(store.latitude.tolist(), store.longitude.tolist())
    return {
        "store": store.source.where,
        "step": f"{store.config.step_hours}h",
        "dates": [times[0], times[-1], len(times), fingerprint(times)],
        "every": every,
        "grid": [rows, columns, coordinates],
        "transforms": _describe_transforms(store),
        "values": _value_digests(store, span.start),
    }


def write_text_atomic(path: Path, text: str) -> None:
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


def _describe_transforms(store: Store) -> dict[str, str]:
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


def _value_digests(store: Store, place: int) -> dict[str, str]:
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


def _format_value(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


CountCallback = Callable[[int], None]  # how many fields have been seen


@final
class StatisticsRun:
    """What is to be read for a file of statistics, and what of it has been.

    Attributes:
        fields: how many there are to be read, each one channel at one date.
        done: how many of them an earlier run has read.

    Raises:
        UserError: the file can't be written, another process is making it, or no date has one a
            step later.
    """

    def __init__(self, store: Store, path: Path, every: int = 1) -> None:
        self.store, self.path, self.every = store, path, every
        self.dates = TrainingDates.of(store, every)
        self.pieces = all_pieces(store, self.dates)
        self._folder = path.with_name(f"{path.name}.parts")
        self._name = statistics_cache_key(store, every)
        self._lock = FileLock(self._folder / "lock")
        self._lock_folder()
        self._results = {
            index: pairs
            for index, piece in enumerate(self.pieces)
            if (pairs := self._load_part(index, piece)) is not None
        }
        self.fields = sum(map(_field_count, self.pieces))
        self.done = sum(_field_count(self.pieces[index]) for index in self._results)

    @property
    def left(self) -> list[Piece]:
        """The pieces that are still to be done."""
        return [piece for index, piece in enumerate(self.pieces) if index not in self._results]

    def run(self, workers: PieceWorkers, done: CountCallback) -> StatisticsFile:
        """Do what is left, write the file and remove what was kept.

        Raises:
            UserError: a field cannot be read, a channel is constant, or the disk is full.
        """
        waiting = [index for index in range(len(self.pieces)) if index not in self._results]
        seen = self.done
        done(seen)
        for index, pairs in zip(waiting, workers.run(moments_of, self.left), strict=True):
            self._save_part(index, pairs)
            self._results[index] = pairs
            seen += _field_count(self.pieces[index])
            done(seen)
        table = merge_moments(
            self.store, self.pieces, [self._results[i] for i in range(len(self.pieces))]
        )
        Statistics.of(table, self.store, self.store.config.store)
        result = StatisticsFile(input_description(self.store, self.every), table)
        result.save(self.path)
        self._lock.release()
        shutil.rmtree(self._folder, ignore_errors=True)
        return result

    def close(self) -> None:
        """Let another process go on."""
        self._lock.release()

    def _lock_folder(self) -> None:
        """Make the folder, which tells before hours of reading that it can be written to."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise UserError(
                f"{self.path}: another process is making it. Wait, or change out."
            ) from None
        except OSError as error:
            raise UserError(
                f"{self._folder}: cannot be made ({error.strerror}). Change out."
            ) from error

    def _part_path(self, index: int) -> Path:
        return self._folder / f"{self._name}-{index:05}.json"

    def _save_part(self, index: int, pairs: list[Pair]) -> None:
        numbers = [[values.as_list(), changes.as_list()] for values, changes in pairs]
        write_text_atomic(self._part_path(index), json.dumps(numbers))

    def _load_part(self, index: int, piece: Piece) -> list[Pair] | None:
        """What an earlier run found; None if it did not, or what it wrote is damaged."""
        try:
            numbers = json.loads(self._part_path(index).read_text())
            pairs = [(Moments(*map(float, v)), Moments(*map(float, c))) for v, c in numbers]
        except (OSError, ValueError, TypeError):
            return None
        return pairs if len(pairs) == len(piece.channels) else None


def moments_of(store: Store, dates: TrainingDates, piece: Piece) -> list[Pair]:
    """The moments of one piece."""
    return accumulate_moments(store, piece, stream_windows(store, dates, piece))


def process_first_window(store: Store, dates: TrainingDates, piece: Piece) -> int:
    """Read and use the first fields of a piece, to see how long it takes: how many."""
    window = next(stream_windows(store, dates, piece))
    accumulate_moments(store, piece, [window])
    return len(piece.channels) * len(window.fields)


def _field_count(piece: Piece) -> int:
    return len(piece.channels) * (piece.stop - piece.first)
