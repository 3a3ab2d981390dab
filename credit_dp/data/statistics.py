"""Mean, spread and range of every channel over the training dates."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.forcings import COMPUTED, COMPUTED_STATICS
from credit_dp.data.grid import row_weights
from credit_dp.data.moments import Moments
from credit_dp.data.schema import Channel
from credit_dp.data.store import Store
from credit_dp.data.streaming import Piece, Window
from credit_dp.data.transform import transformed
from credit_dp.errors import UserError

NUMBERS = ("mean", "std", "tendency_std", "minimum", "maximum")

Vector = NDArray[np.float64]
Table = Mapping[str, Mapping[str, float]]  # by the channel's name, then by those of NUMBERS
Pair = tuple[Moments, Moments]  # of the values and of their changes over one step

# Computed forcings and statics are of the size that a network likes: whichever way they are
# normalised, these numbers leave them as they are.
UNCHANGED = {"mean": 0.0, "std": 1.0, "minimum": 0.0, "maximum": 1.0}


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
    def of(cls, table: Table, store: Store, where: str) -> "Statistics":
        """Those of the store's channels, in order.

        Args:
            where: what the table comes from, as messages name it.

        Raises:
            UserError: a channel is missing, or is constant, so that it cannot be normalised.
        """
        out = [_row(table, channel.name, where) for channel in store.channels.out]
        for place, (channel, row) in enumerate(zip(store.channels.out, out, strict=True)):
            _refuse_constant(channel, row, place < store.channels.states, store.config, where)
        groups = {
            "": out,
            "forcing_": [_input(table, name, COMPUTED, where) for name in store.channels.forcing],
            "static_": [
                _input(table, name, COMPUTED_STATICS, where) for name in store.channels.static
            ],
        }
        return cls(
            **{
                prefix + number: _vector([row[number] for row in rows])
                for prefix, rows in groups.items()
                for number in NUMBERS
                if number != "tendency_std" or not prefix
            }
        )


def refuse_out_of_range(table: Table, store: Store, where: str, cure: str) -> None:
    """Refuse statistics of values that would be refused: by others, or from before limits were set.

    Args:
        where: what the table comes from.
        cure: what to do about it.

    Raises:
        UserError: names the first channel whose mean or range is out of the channel's limits.
    """
    for channel in store.channels.out:
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


def nothing_seen(piece: Piece) -> list[Pair]:
    """The moments of a piece before its first window."""
    return [(Moments(), Moments()) for _ in piece.channels]


def piece_moments(store: Store, piece: Piece, windows: Iterable[Window]) -> list[Pair]:
    """The moments of one piece, channel by channel."""
    found = nothing_seen(piece)
    for window in windows:
        found = add_window(store, piece, window, found)
    return found


def add_window(store: Store, piece: Piece, window: Window, found: Sequence[Pair]) -> list[Pair]:
    """Those of the piece with a window more."""
    weights = row_weights(store.latitude)[piece.rows]
    more = []
    for place, (channel, (values, changes)) in enumerate(zip(piece.channels, found, strict=True)):
        fields = _transformed(store, channel, window.fields[:, place].astype(np.float64))
        steps = fields[window.after] - fields[window.before]
        fresh = fields if len(window.fresh) == len(fields) else fields[window.fresh]
        more.append((values + Moments.of(fresh, weights), changes + Moments.of(steps, weights)))
    return more


def merged(store: Store, pieces: Sequence[Piece], found: Sequence[Sequence[Pair]]) -> Table:
    """The statistics of all pieces, merged in their order, and those of the statics.

    Raises:
        UserError: a channel has no value at all.
    """
    total: dict[str, Pair] = {}
    for piece, pairs in zip(pieces, found, strict=True):
        for channel, (values, changes) in zip(piece.channels, pairs, strict=True):
            before = total.get(channel.name, (Moments(), Moments()))
            total[channel.name] = (before[0] + values, before[1] + changes)
    table = {name: _numbers(*pair) for name, pair in total.items()} | static_table(store)
    empty = [name for name, pair in total.items() if not pair[0].weight]
    if empty:
        raise UserError(
            f"{store.config.store}: {empty[0]} has no value at any training date. Leave it out of "
            "the data config, or change data.dates.train."
        )
    return table


def static_table(store: Store) -> dict[str, dict[str, float]]:
    """The statistics of the static fields, which change on no date."""
    weights = row_weights(store.latitude)
    table = {}
    fields = store.static(slice(None))
    for name, values in zip(store.channels.static, fields, strict=True):
        values = _transformed(store, Channel(name), values[None].astype(np.float64))
        table[name] = _numbers(Moments.of(values, weights), Moments())
    return table


def _transformed(
    store: Store, channel: Channel, values: NDArray[np.float64]
) -> NDArray[np.float64]:
    config = store.config.of(channel.variable)
    return np.asarray(transformed(values, config), dtype=np.float64)


def _numbers(values: Moments, changes: Moments) -> dict[str, float]:
    if not values.weight:  # a static field without any value
        return UNCHANGED | {"tendency_std": 0.0}
    return {
        "mean": values.mean,
        "std": values.std,
        "tendency_std": changes.std,
        "minimum": values.minimum,
        "maximum": values.maximum,
    }


def _row(table: Table, name: str, where: str) -> Mapping[str, float]:
    if name not in table:
        raise UserError(
            f"{where}: has no statistics of {name}. Change data.statistics, to null for those of "
            "the training dates, or leave the variable out of the data config."
        )
    return table[name]


def _input(table: Table, name: str, computed: Iterable[str], where: str) -> Mapping[str, float]:
    if name in computed:
        return UNCHANGED
    row = dict(_row(table, name, where))
    row["std"] = row["std"] or 1.0
    return row


def _refuse_constant(
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
