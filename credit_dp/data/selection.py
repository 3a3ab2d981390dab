"""Which of a source's variables and times a run takes, and in which units and steps."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.config.data import ROLES
from credit_dp.data.channels import Channel, Channels, expand_channels, suggest_names
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import parse_grid
from credit_dp.data.sources.base import Fields, Source, Times, as_slice, is_listed
from credit_dp.data.units import (
    accumulation_windows,
    indices_on_step,
    is_accumulated,
    parse_conversion,
    time_spacing,
)
from credit_dp.errors import UserError
from credit_dp.variable_names import long_name

COMPUTED_BY_ROLE: Mapping[str, Collection[str]] = {
    "forcing": COMPUTED_FORCINGS,
    "static": COMPUTED_STATICS,
}


def select_channels(source: Source, config: DataConfig) -> Channels:
    """The channels of the config, in its order.

    Raises:
        UserError: a variable is missing, named twice or of another kind, or a level is missing.
    """
    _check_grid(source, config)
    _check_variables(source, config)
    check_variable_keys(config)
    levels = _select_levels(source, config)
    outputs = (*config.prognostic, *config.diagnostic)
    on_levels = {name for name in outputs if source.variables[name].levels}
    channels = Channels(
        prognostic=tuple(expand_channels(config.prognostic, on_levels, levels)),
        forcing=tuple(config.forcing),
        static=tuple(config.static),
        diagnostic=tuple(expand_channels(config.diagnostic, on_levels, levels)),
    )
    _check_no_duplicates(source, [*channels.output_channels, *map(Channel, config.forcing)])
    return channels


def _check_no_duplicates(source: Source, channels: Iterable[Channel]) -> None:
    """Refuse one field under two names, unless the store has both names."""
    known: dict[tuple[str, int | None], Channel] = {}
    for channel in channels:
        other = known.setdefault(long_name(channel.variable, channel.level), channel)
        names = (channel.variable, other.variable)
        if other != channel and not all(is_listed(name, source.variables) for name in names):
            raise UserError(
                f"{source.where}: {other.name} and {channel.name} of the data config are one "
                f"field. Take {channel.variable} out of its list."
            )


def check_variable_keys(config: DataConfig) -> None:
    """Refuse entries of `data.variables` that say something of no variable that is read.

    Raises:
        UserError: naming the key and the nearest variables.
    """
    names = {name: role for role in ROLES for name in getattr(config, role)}
    for key in config.variables:
        if key not in names:
            raise UserError(
                f"data.variables.{key}: no list of the data config has a variable {key}. "
                f"{suggest_names(key, names)}. Change data.variables, or add it to a list."
            )
        if key in COMPUTED_BY_ROLE.get(names.get(key, ""), ()):
            raise UserError(
                f"data.variables.{key}: {key} is computed, not read: nothing can be set for it. "
                "Take it out of data.variables."
            )


def _check_grid(source: Source, config: DataConfig) -> None:
    if config.grid is not None and parse_grid(config.grid) != source.grid:
        rows, columns = source.grid
        raise UserError(
            f"{source.where}: has {rows}x{columns} rows and columns, but data.grid asks for "
            f"{config.grid}; a store is read as it is. Change data.grid, to null, or prepare "
            "another store with `credit-dp data prepare`."
        )


def _check_variables(source: Source, config: DataConfig) -> None:
    seen: set[str] = set()
    for role in ROLES:
        names: list[str] = getattr(config, role)
        for name in names:
            if name in seen:
                raise UserError(
                    f"data.{role}: {name} is in another list of the data config already. "
                    "Take it out of one."
                )
            seen.add(name)
            if name not in COMPUTED_BY_ROLE.get(role, ()):
                _check_present(source, name, role)
                _check_kind(source, name, role)


def _check_present(source: Source, name: str, role: str) -> None:
    if name in source.variables:
        return
    available = [*source.variables, *COMPUTED_BY_ROLE.get(role, ())]
    raise UserError(
        f"{source.where}: no variable {name}. {suggest_names(name, available)}. Change data.{role}."
    )


def _check_kind(source: Source, name: str, role: str) -> None:
    variable = source.variables[name]
    if variable.problem:
        problem = variable.problem
    elif role == "static" and variable.timed:
        problem = "changes in time: it belongs to data.forcing"
    elif role != "static" and not variable.timed:
        problem = "has no time: it belongs to data.static"
    elif role in ("forcing", "static") and variable.levels:
        problem = f"has levels, which a {role} variable can't have"
    else:
        return
    raise UserError(f"{source.where}: {name} {problem}. Change data.{role} or data.store.")


def _select_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """The levels of the config, or all of the store's in rising order. Empty if it has none."""
    if config.levels is None:
        return _common_levels(source, config)
    names = [*source.variables, *config.prognostic, *config.diagnostic]
    present = any(source.variables[name].levels for name in names)
    if not config.levels:
        raise UserError("data.levels: needs at least one level, or null for all of the store's.")
    if not present:
        raise UserError(f"{source.where}: has no levels. Change data.levels, to null.")
    for name in (*config.prognostic, *config.diagnostic):
        levels = source.variables[name].levels
        missing = [level for level in config.levels if levels and level not in levels]
        if missing:
            there = ", ".join(map(str, sorted(levels)))
            raise UserError(
                f"{source.where}: {name} has no level {missing[0]}. There are: {there}. "
                "Change data.levels."
            )
    return list(config.levels)


def _common_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Those that each variable has which is on levels and comes out, in rising order.

    Raises:
        UserError: two have not the same.
    """
    names = (*config.prognostic, *config.diagnostic)
    found = {name: sorted(source.variables[name].levels) for name in names}
    on_levels = [name for name, levels in found.items() if levels]
    for name in on_levels:
        first = on_levels[0]
        if found[name] != found[first]:
            raise UserError(
                f"{source.where}: {name} has the levels {', '.join(map(str, found[name]))}, but "
                f"{first} has {', '.join(map(str, found[first]))}. Set data.levels to some that "
                "both have."
            )
    return found[on_levels[0]] if on_levels else []


@final
class StepReader:
    """The fields of a source at whole steps.

    Attributes:
        times: `(T,)`, those of the source that are whole steps after midnight 1970-01-01 or, if
            there are none, after its first time; without those of which a sum is not complete.
        skipped: how many times were left out because a time is absent from a sum.
        summed: the variables that are added up over each step.
    """

    def __init__(self, source: Source, config: DataConfig, variables: Iterable[str]) -> None:
        """Take those of `variables` that are accumulated as sums, if the source's times are finer.

        Raises:
            UserError: the step does not fit the source's times, no sum is complete, or a conversion
                of units is not known.
        """
        self._source = source
        named = list(variables)
        step = np.timedelta64(config.step_hours, "h").astype("m8[ns]")
        places = data_step_indices(source.times, config, source.where)
        finer = np.timedelta64(0) < time_spacing(source.times) < step
        self.summed = frozenset(n for n in named if finer and is_accumulated(n, config))
        self._windows = places[:, None]
        if self.summed:
            self._windows = accumulation_windows(source.times, places, step)
        complete = (self._windows >= 0).all(axis=1)
        self._windows = self._windows[complete]
        self._indices = places[complete]
        if not len(self._indices):
            raise UserError(
                f"{source.where}: no time has all of the {config.step} before it, which "
                f"{min(self.summed)} is summed over. Change data.step, or "
                f"data.variables.{min(self.summed)}.accumulated to false."
            )
        self.times: Times = source.times[self._indices]
        self.num_skipped = int(np.count_nonzero(~complete))
        texts = {name: config.of(name).convert for name in named}
        self._conversions = {name: parse_conversion(text) for name, text in texts.items() if text}

    def read(self, channels: Sequence[Channel], places: NDArray[np.intp], rows: slice) -> Fields:
        """Channels that change in time at some places of `times`: `(T, C, rows, W)`.

        Channels that are not summed are read at once, and so are the others.
        """
        summed = [channel for channel in channels if channel.variable in self.summed]
        plain = [channel for channel in channels if channel.variable not in self.summed]
        if not summed:
            fields = self._source.read(channels, as_slice(self._indices[places]), rows)
        elif not plain:
            fields = self._sums(channels, places, rows)
        else:
            fields = self._read_mixed(channels, plain, summed, places, rows)
        self.convert(channels, fields)
        return fields

    def source_index(self, place: int) -> int:
        """Where one of `times` is among the source's times."""
        return int(self._indices[place])

    def chunk_numbers(self, channel: Channel, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return for each of some places of `times` the number of the source's chunk; see `Source`.

        Of a channel that is summed, the chunk of the last time of the sum.
        """
        return self._source.chunk_numbers(channel, self._indices[places])

    def blocks(self, channels: Sequence[Channel], span: slice, size: int) -> list[NDArray[np.intp]]:
        """The places of `span` in turn, about `size` at once, cut at chunk edges where they can be.

        Of channels that are summed, fewer at once: all that is added up is in memory.
        """
        places = np.arange(span.start, span.stop)
        if any(channel.variable in self.summed for channel in channels):
            size = max(1, size // self._windows.shape[1])
        stride = int(np.diff(self._indices).min()) if len(self._indices) > 1 else 1
        chunk = self._source.times_together(channels[0])
        length = -(-size * stride // chunk) * chunk
        parts = self._indices[places] // length
        return np.split(places, np.flatnonzero(np.diff(parts)) + 1)

    def convert(self, channels: Sequence[Channel], fields: Fields) -> None:
        """Change the units of `(T, C, rows, W)` in place, where the config asks for it."""
        for place, channel in enumerate(channels):
            if channel.variable in self._conversions:
                scale, offset = self._conversions[channel.variable]
                field = fields[:, place]
                field *= np.float32(scale)
                field += np.float32(offset)

    def _sums(self, channels: Sequence[Channel], places: NDArray[np.intp], rows: slice) -> Fields:
        wanted = self._windows[places]
        needed, where = np.unique(wanted, return_inverse=True)
        fields = self._source.read(channels, as_slice(needed), rows)
        parts = where.reshape(wanted.shape)
        sums: Fields = fields[parts[:, 0]]
        for column in parts.T[1:]:
            sums += fields[column]
        return sums

    def _read_mixed(
        self,
        channels: Sequence[Channel],
        plain: Sequence[Channel],
        summed: Sequence[Channel],
        places: NDArray[np.intp],
        rows: slice,
    ) -> Fields:
        first = self._source.read(plain, as_slice(self._indices[places]), rows)
        shape = (len(places), len(channels), *first.shape[2:])
        fields = np.empty(shape, dtype=np.float32)
        is_sum = np.array([channel.variable in self.summed for channel in channels])
        fields[:, ~is_sum] = first
        fields[:, is_sum] = self._sums(summed, places, rows)
        return fields


def data_step_indices(times: Times, config: DataConfig, where: str) -> NDArray[np.intp]:
    """The places of the times on `data.step`; see `indices_on_step`.

    Raises:
        UserError: no two times in a row are a step apart; `where` names them.
    """
    apart = int(time_spacing(times) / np.timedelta64(1, "s"))
    step = 3600 * config.step_hours
    if apart and apart % step and step % apart:
        raise UserError(
            f"{where}: its times are {apart / 3600:g} hours apart, so no two of them in a "
            f"row are {config.step} apart. Set data.step to a multiple of {apart / 3600:g}h."
        )
    return indices_on_step(times, np.timedelta64(config.step_hours, "h").astype("m8[ns]"))
