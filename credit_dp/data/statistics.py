"""Mean, standard deviation and range of every channel over the training dates, and quantiles.

`Moments` accumulate values block by block. `Statistics` are the arrays that normalisation takes,
`StatisticsFile` is their form on disk, and `StatisticsRun` computes a file year by year, so that an
interrupted run can be resumed. `check_statistics_range` judges what was computed or given.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.cache import fingerprint
from credit_dp.data.channels import Channel
from credit_dp.data.dates import split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.sources.source import describe_members
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
from credit_dp.data.transforms import (
    QUANTILE_SCORES,
    QuantileMap,
    apply_transform,
    sample_quantiles,
    weighted_quantiles,
)
from credit_dp.data.units import is_accumulated
from credit_dp.errors import UserError
from credit_dp.files import write_text_atomic


@final
@dataclass(frozen=True)
class Moments:
    """Weighted moments of values, which can be added to those of other values.

    Squares are of differences from the mean: E[x^2] - E[x]^2 would lose all digits where the mean
    is large and the spread small.

    Attributes:
        weight: the sum of all weights.
        mean: the weighted mean.
        squares: the weighted sum of squared differences from the mean.
        minimum, maximum: infinite without values.

    Source: Chan, Golub & LeVeque 1983, eq. 2.1, with weights for counts.
    """

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float = float("inf")
    maximum: float = float("-inf")

    @classmethod
    def of(cls, values: NDArray[np.float64], rows: NDArray[np.float64]) -> "Moments":
        """Return the moments of `(T, h, W)` with weights `(h,)` or `(h, W)`; NaN is ignored."""
        if not values.size:
            return cls()
        if rows.ndim == 2:  # each cell is a row
            values, rows = values.reshape(len(values), -1, 1), rows.ravel()
        sums = values.sum(axis=(0, 2))
        # A sum is NaN if a value is. Testing each value would take as long as the moments.
        if np.isnan(sums).any():
            return cls._of_some(values, rows)
        weight = len(values) * values.shape[2] * float(rows.sum())
        mean = float(sums @ rows) / weight
        deviations = values - mean
        squares = float(np.einsum("thw,thw->h", deviations, deviations) @ rows)
        return cls(weight, mean, squares, float(values.min()), float(values.max()))

    @classmethod
    def _of_some(cls, values: NDArray[np.float64], rows: NDArray[np.float64]) -> "Moments":
        valid = ~np.isnan(values)
        weight = float(valid.sum(axis=(0, 2)) @ rows)
        if not weight:
            return cls()
        mean = float(np.where(valid, values, 0).sum(axis=(0, 2)) @ rows) / weight
        deviations = np.where(valid, values - mean, 0)
        squares = float(np.einsum("thw,thw->h", deviations, deviations) @ rows)
        return cls(weight, mean, squares, float(np.nanmin(values)), float(np.nanmax(values)))

    def __add__(self, other: "Moments") -> "Moments":
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
        """The standard deviation; 0 if it is within float32 rounding of the mean."""
        if not self.weight:
            return 0.0
        std = float(np.sqrt(self.squares / self.weight))
        return std if std > np.finfo(np.float32).eps * abs(self.mean) else 0.0


STATISTIC_NAMES = ("mean", "std", "tendency_std", "minimum", "maximum")
# Further statistics of channels that are normalised by `quantile`, in order.
QUANTILE_NAMES = tuple(f"quantile_{number}" for number in range(len(QUANTILE_SCORES)))

Vector = NDArray[np.float64]
# By the channel's name, then by one of `STATISTIC_NAMES` or `QUANTILE_NAMES`.
StatisticsTable = Mapping[str, Mapping[str, float]]
Quantiles = Mapping[str, Vector]  # by the channel's name; only of those normalised by `quantile`
Pair = tuple[Moments, Moments]  # of values, and of their changes over one step
MomentsTable = dict[str, Pair]  # by the channel's name
NO_QUANTILES: Quantiles = MappingProxyType({})

# Computed forcings and statics are of order one. With these statistics, every kind of normalisation
# leaves them unchanged.
IDENTITY_STATISTICS = {"mean": 0.0, "std": 1.0, "minimum": 0.0, "maximum": 1.0}


def _none() -> Vector:
    return np.empty(0)


@final
@dataclass(frozen=True)
class Statistics:
    """Area-weighted statistics of all channels over the training dates.

    They are of transformed values (see `apply_transform`) in the units that the config converts to.
    Points without values have no weight, nor has the rim of a region, except in static fields,
    which may vary there alone.

    Constant forcings and statics have std 1; computed ones have mean 0, std 1 and the range 0 to 1.
    A range is NaN if a given file lacks it, and empty in models exported without ranges.

    Quantiles are of values before the transform `quantile`, see `QuantileMap`. They are NaN for
    channels without this transform, and empty if no channel has it.

    Shapes:
        `mean`, `std`, `tendency_std` (of the change over one step), `minimum`, `maximum`: `(C,)`,
        prognostic, then diagnostic; `forcing_...`: `(F,)`; `static_...`: `(S,)`;
        `quantiles`: `(C, 129)`, and in the same way of forcings and static fields.
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
    quantiles: Vector = field(default_factory=_none)
    forcing_quantiles: Vector = field(default_factory=_none)
    static_quantiles: Vector = field(default_factory=_none)

    @classmethod
    def of(cls, table: StatisticsTable, store: Store, where: str) -> "Statistics":
        """Return the statistics of the store's channels, in order.

        Raises:
            UserError: a channel is missing, or constant and so can't be normalised.
        """
        output_rows = [
            _find_row(table, channel.name, where) for channel in store.channels.output_channels
        ]
        for index, (channel, row) in enumerate(
            zip(store.channels.output_channels, output_rows, strict=True)
        ):
            _check_not_constant(
                channel, row, index < store.channels.num_states, store.config, where
            )
        groups = {
            "": output_rows,
            "forcing_": [
                _input(table, name, COMPUTED_FORCINGS, where) for name in store.channels.forcing
            ],
            "static_": [
                _input(table, name, COMPUTED_STATICS, where) for name in store.channels.static
            ],
        }
        quantiles = {f"{prefix}quantiles": _quantile_rows(rows) for prefix, rows in groups.items()}
        return cls(
            **{
                prefix + statistic: np.array([row[statistic] for row in rows], float)
                for prefix, rows in groups.items()
                for statistic in STATISTIC_NAMES
                if statistic != "tendency_std" or not prefix
            },
            **quantiles,
        )


def check_statistics_range(table: StatisticsTable, store: Store, where: str, remedy: str) -> None:
    """Refuse statistics of values that are out of range, or of fill values.

    Such statistics come from other programs, or were computed before the limits were set; and
    values of unknown variables have limits that small fill values keep.

    Args:
        table: statistics by channel name; without ranges, means are judged alone.
        remedy: the advice in the error message, without a full stop.
    """
    outputs = store.channels.output_channels
    static = [Channel(name) for name in store.channels.static if name not in COMPUTED_STATICS]
    for channel in (*outputs, *store.stored_forcing, *static):
        if store.config.variable_config(channel.variable).is_transformed:
            continue
        limits = store.limits.range_of(channel) if channel in outputs else None
        for statistic in ("minimum", "maximum", "mean"):
            value = table.get(channel.name, {}).get(statistic, np.nan)
            if limits is not None and (value < limits.low or value > limits.high):
                raise UserError(
                    f"{where}: the {statistic} of {channel.name} is {value:.6g}, but its limits "
                    f"are {limits.low:.6g} to {limits.high:.6g}. {remedy}, or set "
                    f"data.limits.{channel.variable}."
                )
            if statistic != "mean" and store.limits.is_undeclared_fill(channel, value):
                raise UserError(
                    f"{where}: the {statistic} of {channel.name} is {value:.6g}, which looks like "
                    "a fill value that no attribute of the store declares. Declare it, as by "
                    "_FillValue, or if the values are right, set "
                    f"'data.limits={{{channel.variable}:[LOW,HIGH]}}'."
                )


def add_window(
    moments: MomentsTable, store: Store, piece: Piece, window: Window, quantiles: Quantiles
) -> None:
    """Add a window of a piece to the moments of its channels, in place."""
    weights = store.grid.weights[piece.rows]
    inner_fields = store.without_rim(window.fields, piece.rows)
    for index, channel in enumerate(piece.channels):
        values = inner_fields[:, index].astype(np.float64)
        fields = _transform_fields(store, channel, values, quantiles)
        step_changes = fields[window.after] - fields[window.before]
        # A window repeats fields of the one before that a pair still needs: count those only once.
        new_fields = fields if len(window.fresh) == len(fields) else fields[window.fresh]
        pair = Moments.of(new_fields, weights), Moments.of(step_changes, weights)
        add_moments(moments, {channel.name: pair})


def add_moments(total: MomentsTable, more: MomentsTable) -> None:
    """Add the moments of channels to `total`, in place."""
    for name, (values, changes) in more.items():
        previous = total.get(name, (Moments(), Moments()))
        total[name] = (previous[0] + values, previous[1] + changes)


def moments_to_statistics(
    store: Store, total: MomentsTable, quantiles: Quantiles = NO_QUANTILES
) -> StatisticsTable:
    """Return the statistics of these moments and of the static fields."""
    empty = next((name for name, pair in total.items() if not pair[0].weight), None)
    if empty is not None:
        raise UserError(
            f"{store.config.where}: {empty} has no value at any training date. Leave it out of "
            "the data config, or change data.dates.train."
        )
    table = {
        name: _statistics_row(*pair) | _quantile_row(quantiles.get(name))
        for name, pair in total.items()
    }
    return table | static_statistics(store)


def static_statistics(store: Store) -> dict[str, dict[str, float]]:
    """Return the statistics of the static fields."""
    weights = store.grid.weights
    table = {}
    fields = store.read_static(slice(None))
    for name, values in zip(store.channels.static, fields, strict=True):
        quantiles = {}
        if store.config.variable_config(name).normalise == "quantile":
            quantiles[name] = weighted_quantiles(values, weights)
        values = _transform_fields(store, Channel(name), values[None].astype(np.float64), quantiles)
        row = _statistics_row(Moments.of(values, weights), Moments())
        table[name] = row | _quantile_row(quantiles.get(name))
    return table


def _transform_fields(
    store: Store, channel: Channel, values: NDArray[np.float64], quantiles: Quantiles
) -> NDArray[np.float64]:
    config = store.config.variable_config(channel.variable)
    known = quantiles.get(channel.name)
    transformed = apply_transform(values, config, None if known is None else QuantileMap(known))
    return np.asarray(transformed, dtype=np.float64)


def _quantile_row(quantiles: Vector | None) -> dict[str, float]:
    return {} if quantiles is None else dict(zip(QUANTILE_NAMES, quantiles.tolist(), strict=True))


def _quantile_rows(rows: Sequence[Mapping[str, float]]) -> Vector:
    """Return the quantiles of channels, `(C, 129)`; empty if no channel has any."""
    if not any(QUANTILE_NAMES[0] in row for row in rows):
        return _none()
    return np.array([[row.get(name, np.nan) for name in QUANTILE_NAMES] for row in rows])


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
    # constant if it is not divided by its standard deviation.
    normalise = config.variable_config(channel.variable).normalise
    constant = not row["std"] and normalise != "none"
    if constant or (prognostic and not (row["std"] and row["tendency_std"])):
        role = "prognostic" if prognostic else "diagnostic"
        raise UserError(
            f"{where}: {channel.name} is constant over the training dates, so "
            f"it cannot be normalised. Leave it out of data.{role} or data.levels."
        )


FILE_FORMAT = "credit_dp statistics 2"  # change with the definitions: old files are ignored


# Settings of a file that must equal those of the config, and the key that changes each.
SETTINGS = {
    "step": "data.step",
    "dates": "data.dates.train",
    "grid": "data.store",
    "boundary": "data.boundary",
}


@final
@dataclass(frozen=True)
class StatisticsFile:
    """Statistics on disk, with a description of the data that they were computed from.

    Attributes:
        input_description: see the function `input_description`.
        channels: statistics by channel name.
    """

    input_description: Mapping[str, Any]
    channels: StatisticsTable

    @classmethod
    def load(cls, path: Path) -> "StatisticsFile | None":
        """Read a file of `save`; None if it is absent, damaged or of another format."""
        try:
            content = json.loads(path.read_text())
            if content["form"] != FILE_FORMAT:
                return None
            rows = {
                name: {
                    statistic: float(row[statistic])
                    for statistic in (*STATISTIC_NAMES, *QUANTILE_NAMES)
                    if statistic in row or statistic in STATISTIC_NAMES
                }
                for name, row in content["channels"].items()
            }
            description = {"boundary": 0, **content["made_from"]}
            required = {"every": int, "transforms": dict}
            if not all(type(description[key]) is kind for key, kind in required.items()):
                return None
            return cls(description, rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, path: Path) -> None:
        """Write the file atomically, with all digits of each number."""
        content = {
            "form": FILE_FORMAT,
            "made_from": self.input_description,
            "channels": self.channels,
        }
        write_statistics_file(path, json.dumps(content, indent=1) + "\n")

    @property
    def every(self) -> int:
        """The N of "every N-th training date"."""
        return int(self.input_description["every"])

    def check(self, store: Store, where: str, change: str = "data.statistics") -> None:
        """Refuse statistics that were not computed from the config's training dates.

        The file may have more channels than the config, and more members of an ensemble.

        Args:
            change: what to change besides the key that differs, in error messages.
        """
        expected = input_description(store, self.every)
        for setting, key in SETTINGS.items():
            if expected.get(setting) != self.input_description.get(setting):
                raise UserError(
                    f"{where}: has statistics of {setting} "
                    f"{_format_value(self.input_description.get(setting))}, but the config has "
                    f"{_format_value(expected.get(setting))}. Change {key} or {change}."
                )
        for name, transform in expected["transforms"].items():
            stored = self.input_description["transforms"].get(name, transform)
            if stored != transform:
                raise UserError(
                    f"{where}: has statistics of {name} {stored}, but the config has it "
                    f"{transform}. Change data.variables.{name} or {change}."
                )
        members, own = self.input_description.get("members", ()), store.source.members
        if (not own or not {*own} <= {*members}) if members else len(own) > 1:
            raise UserError(
                f"{where}: has statistics of "
                f"{describe_members(members) if members else 'a single member'}, but the config "
                f"has {describe_members(sorted(own))}. Change data.member or {change}."
            )


def statistics_path(store: Store, folder: Path, every: int = 1) -> Path:
    """Return the cache file of the statistics of this store and config."""
    return folder / f"statistics-{statistics_cache_key(store, every)}.json"


def statistics_cache_key(store: Store, every: int) -> str:
    """Return a hash of the store (its path and age), variables, dates, step, transforms and rim."""
    config = store.config
    times = store.times[TrainingDates.of(store, every).indices]
    variables = [channel.variable for group in channel_groups(store) for channel in group]
    description = store.description([*dict.fromkeys(variables), *config.static])
    roles = [config.prognostic, config.diagnostic, config.forcing, config.static]
    dates = [str(time) for time in times]
    transforms = _describe_transforms(store)
    parts = [FILE_FORMAT, description, roles, dates, every, config.step_hours, transforms]
    return fingerprint(*parts, *([config.boundary] if config.boundary else []))


def input_description(store: Store, every: int) -> dict[str, Any]:
    """Return a description, as JSON, of the data that the statistics are computed from.

    A copy of the store has the same one but for the path, which is for the reader alone.
    """
    span = split_slice(store.config, "train", store.times, store.calendar)
    times = store.times[span].astype("M8[s]")
    rows, columns = store.grid
    members = store.source.members
    coordinates = fingerprint(store.latitude.tolist(), store.longitude.tolist())
    return {
        "store": store.source.where,
        "step": f"{store.config.step_hours}h",
        "dates": [
            *(store.calendar.text(time, "s") for time in times[[0, -1]]),
            len(times),
            fingerprint([str(time) for time in times]),
        ],
        "every": every,
        "grid": [rows, columns, coordinates],
        "boundary": store.config.boundary,
        "transforms": _describe_transforms(store),
        **({"members": sorted(members)} if len(members) > 1 else {}),
    }


def write_statistics_file(path: Path, text: str) -> None:
    """Write a file atomically; create its folder if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that fits a climatology may save the same statistics without the lock of this file.
        write_text_atomic(path, text, unique=True)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}). Change out, or make room."
        ) from error


def _describe_transforms(store: Store) -> dict[str, str]:
    """Return by variable the transforms of its values before their moments are computed."""
    config = store.config
    names = [*config.prognostic, *config.diagnostic, *config.forcing, *config.static]
    transforms = {}
    for name in names:
        variable = config.variable_config(name)
        steps = [variable.normalise] if variable.is_transformed else []
        if variable.convert:
            steps.append(variable.convert)
        if is_accumulated(name, config):
            steps.append("accumulated")
        transforms[name] = ", ".join(steps) or "as it is"
    return transforms


def _format_value(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


CountCallback = Callable[[int], None]  # number of fields processed so far


@final
class StatisticsRun:
    """Computes a file of statistics, and keeps each finished year in a file beside it.

    If a run is interrupted, the next one continues with the years that are missing.

    Attributes:
        num_fields: fields to be read in all, each one channel at one date.
        num_done: fields that an earlier run has processed.

    Raises:
        UserError: the file can't be written, another process is writing it, or no date has another
            one a step later.
    """

    def __init__(self, store: Store, path: Path, every: int = 1) -> None:
        self.store = store
        self.path = path
        self.every = every
        self.dates = TrainingDates.of(store, every)
        self.dates.check_pairs(store, every)
        # Year by year, each in the order of merging.
        self.pieces = sorted(all_pieces(store, self.dates), key=lambda piece: piece.first)
        self._folder = path.with_name(f"{path.name}.parts")
        self._name = statistics_cache_key(store, every)
        self._lock = FileLock(self._folder / "lock")
        self._lock_folder()
        found = {piece.first: self._load_year(piece.first) for piece in self.pieces}
        self._years = {first: moments for first, moments in found.items() if moments is not None}
        self.remaining = [piece for piece in self.pieces if piece.first not in self._years]
        self.num_fields = sum(map(_field_count, self.pieces))
        self.num_done = self.num_fields - sum(map(_field_count, self.remaining))

    @cached_property
    def quantiles(self) -> Quantiles:
        """The quantiles of channels that need them; a resumed run finds the same ones."""
        return sample_quantiles(self.store, self.dates)

    def run(self, workers: PieceWorkers, report: CountCallback) -> StatisticsFile:
        """Process the remaining years, write the file and remove those of the years.

        Args:
            report: called with the number of fields processed so far.
        """
        process = partial(compute_moments, quantiles=self.quantiles)
        num_done = self.num_done
        report(num_done)
        results = zip(self.remaining, workers.run(process, self.remaining), strict=True)
        for first, year in groupby(results, lambda result: result[0].first):
            moments: MomentsTable = {}
            for piece, more in year:
                add_moments(moments, more)
                num_done += _field_count(piece)
                report(num_done)
            self._save_year(first, moments)
            self._years[first] = moments
        total: MomentsTable = {}
        for _, moments in sorted(self._years.items()):
            add_moments(total, moments)
        table = moments_to_statistics(self.store, total, self.quantiles)
        # Raises if a channel is constant or has fill values, before the file is written.
        Statistics.of(table, self.store, self.store.config.store)
        check_statistics_range(table, self.store, self.store.source.where, "Change data.store")
        result = StatisticsFile(input_description(self.store, self.every), table)
        result.save(self.path)
        # Before the release: afterwards the files in the folder may be another process's.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.release()
        with suppress(OSError):  # NFS keeps a file that is open, and so its folder
            self._folder.rmdir()
        return result

    def close(self) -> None:
        """Release the lock, so that another process may continue."""
        self._lock.release()

    def _lock_folder(self) -> None:
        """Create and lock the folder of years; fails before hours of reading if it can't."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise UserError(
                f"{self.path}: another process is writing it. Wait, or change out."
            ) from None
        except OSError as error:
            raise UserError(
                f"{self._folder}: cannot be created ({error.strerror}). Change out."
            ) from error

    def _year_path(self, first: int) -> Path:
        date = self.store.calendar.text(self.store.times[self.dates.indices[first]], "D")
        return self._folder / f"{self._name}-{date}.json"

    def _save_year(self, first: int, moments: MomentsTable) -> None:
        content = {name: [astuple(x) for x in pair] for name, pair in moments.items()}
        write_statistics_file(self._year_path(first), json.dumps(content))

    def _load_year(self, first: int) -> MomentsTable | None:
        try:
            content = json.loads(self._year_path(first).read_text())
            return {
                name: (Moments(*map(float, values)), Moments(*map(float, changes)))
                for name, (values, changes) in content.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return None


def compute_moments(
    store: Store, dates: TrainingDates, piece: Piece, quantiles: Quantiles = NO_QUANTILES
) -> MomentsTable:
    """Read one piece and return the moments of its channels."""
    moments: MomentsTable = {}
    for window in stream_windows(store, dates, piece):
        add_window(moments, store, piece, window, quantiles)
    return moments


def process_first_window(
    store: Store, dates: TrainingDates, piece: Piece, quantiles: Quantiles
) -> int:
    """Process the first fields of a piece, for timing; return how many fields there were."""
    window = next(stream_windows(store, dates, piece))
    add_window({}, store, piece, window, quantiles)
    return len(piece.channels) * len(window.fields)


def _field_count(piece: Piece) -> int:
    return len(piece.channels) * (piece.stop - piece.first)
