"""The channels, times, units and steps that a run selects from a source.

`select_channels` checks the variables of the config against those of the source. `StepReader` reads
them on the config's step: it sums accumulated variables over the step and converts units.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.config.data import ROLES
from credit_dp.data.channels import Channel, Channels, expand_channels, suggest_names
from credit_dp.data.dates import accumulation_windows, indices_on_step, time_spacing
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import parse_grid
from credit_dp.data.sources.base import Fields, Source, Times, as_slice, is_listed
from credit_dp.data.units import is_accumulated, parse_conversion
from credit_dp.errors import UserError, counted
from credit_dp.variable_names import long_name

COMPUTED_BY_ROLE: Mapping[str, Collection[str]] = {
    "forcing": COMPUTED_FORCINGS,
    "static": COMPUTED_STATICS,
}


def select_channels(source: Source, config: DataConfig) -> Channels:
    """Return the channels of the config, in its order.

    Raises:
        UserError: a variable is missing, named twice or in the wrong list, or a level is missing.
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
    check_hybrid(config, channels)
    _check_no_duplicates(source, [*channels.output_channels, *map(Channel, config.forcing)])
    return channels


def check_hybrid(config: DataConfig, channels: Channels) -> None:
    """Refuse coefficients of another number of model levels than the variables are on."""
    levels = {x.level for x in channels.output_channels if x.level is not None}
    if config.hybrid and levels and len(config.hybrid["a"]) != len(levels) + 1:
        raise UserError(
            f"data.hybrid: needs a and b at the {len(levels) + 1} interfaces of {len(levels)} "
            f"levels, got {len(config.hybrid['a'])}. Change data.hybrid or data.levels."
        )


def _check_no_duplicates(source: Source, channels: Iterable[Channel]) -> None:
    """Refuse one field under two names, unless the store itself lists both names."""
    seen: dict[tuple[str, int | None], Channel] = {}
    for channel in channels:
        # The first channel with this long name and level, which may be this one.
        other = seen.setdefault(long_name(channel.variable, channel.level), channel)
        names = (channel.variable, other.variable)
        if other != channel and not all(is_listed(name, source.variables) for name in names):
            raise UserError(
                f"{source.where}: {other.name} and {channel.name} of the data config are one "
                f"field. Take {channel.variable} out of its list."
            )


def check_variable_keys(config: DataConfig) -> None:
    """Refuse entries of `data.variables` for variables that are not read."""
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
            f"{source.where}: has {rows}x{columns} rows and columns, but data.grid is "
            f"{config.grid}, and stores are not regridded while they are read. Set data.grid=null, "
            "or prepare another store with `credit-dp data prepare`."
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
                _check_present(source, config, name, role)
                _check_kind(source, name, role)


def _check_present(source: Source, config: DataConfig, name: str, role: str) -> None:
    if name in source.variables:
        return
    available = [*source.variables, *COMPUTED_BY_ROLE.get(role, ())]
    others = [
        f"{other} of data.{kind}"
        for kind in ROLES
        for other in getattr(config, kind)
        if other not in (name, *source.variables, *COMPUTED_BY_ROLE.get(kind, ()))
    ]
    raise UserError(
        f"{source.where}: no variable {name}. {suggest_names(name, available)}. Change data.{role}."
        + (f" Also missing: {', '.join(others)}." if others else "")
    )


def _check_kind(source: Source, name: str, role: str) -> None:
    variable = source.variables[name]
    if variable.problem:
        problem = variable.problem
    elif role == "static" and variable.has_time:
        problem = "changes in time: it belongs to data.forcing"
    elif role != "static" and not variable.has_time:
        problem = "has no time: it belongs to data.static"
    elif role in ("forcing", "static") and variable.levels:
        problem = f"has levels, which a {role} variable can't have"
    else:
        return
    raise UserError(f"{source.where}: {name} {problem}. Change data.{role} or data.store.")


def _select_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Return the levels of the config, or the store's in rising order; empty if it has none."""
    if config.levels is None:
        return _common_levels(source, config)
    names = [*source.variables, *config.prognostic, *config.diagnostic]
    has_levels = any(source.variables[name].levels for name in names)
    if not has_levels:
        raise UserError(f"{source.where}: has no levels. Change data.levels, to null.")
    for name in (*config.prognostic, *config.diagnostic):
        levels = source.variables[name].levels
        missing = [level for level in config.levels if levels and level not in levels]
        if missing:
            available = ", ".join(map(str, sorted(levels)))
            raise UserError(
                f"{source.where}: {name} has no level {missing[0]}. There are: {available}. "
                "Change data.levels."
            )
    return list(config.levels)


def _common_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Return the levels of all output variables on levels, in rising order.

    Raises:
        UserError: two of these variables have different levels.
    """
    names = (*config.prognostic, *config.diagnostic)
    levels_of = {name: sorted(source.variables[name].levels) for name in names}
    on_levels = [name for name, levels in levels_of.items() if levels]
    for name in on_levels:
        first = on_levels[0]
        if levels_of[name] != levels_of[first]:
            raise UserError(
                f"{source.where}: {name} has the levels {', '.join(map(str, levels_of[name]))}, "
                f"but {first} has {', '.join(map(str, levels_of[first]))}. Set data.levels to some "
                "that both have."
            )
    return levels_of[on_levels[0]] if on_levels else []


@final
class StepReader:
    """Reads the fields of a source on the config's step.

    Attributes:
        times: `(T,)`, times of the source that are whole steps after midnight 1970-01-01 or, if
            there are none, after its first time; without times whose sum is incomplete.
        num_skipped: times left out because their sum is incomplete.
        summed: the variables that are summed over each step.
    """

    def __init__(self, source: Source, config: DataConfig, variables: Iterable[str]) -> None:
        """Find the times on the step, and the windows of variables that are summed.

        Accumulated variables are summed if the source's time spacing is smaller than the step.

        Args:
            source: gives the fields.
            config: gives step, conversions and the variables that are accumulated.
            variables: names of the variables to read.

        Raises:
            UserError: the step does not fit the source's times, no sum is complete, or a conversion
                of units is unknown.
        """
        self._source = source
        names = list(variables)
        step = np.timedelta64(config.step_hours, "h").astype("m8[ns]")
        indices = data_step_indices(source.times, config, source.where)
        is_finer = np.timedelta64(0, "D") < time_spacing(source.times) < step
        self.summed = frozenset(name for name in names if is_finer and is_accumulated(name, config))
        # Row t has the source's times that are summed for time t: without sums, only t itself.
        self._windows = indices[:, None]
        if self.summed:
            self._windows = accumulation_windows(source.times, indices, step)
        # The same times for all variables, so that a sample has either all of its fields or none.
        complete = (self._windows >= 0).all(axis=1)
        self._windows = self._windows[complete]
        self._indices = indices[complete]
        if not len(self._indices):
            raise UserError(
                f"{source.where}: no time has all of the {config.step} before it, which "
                f"{min(self.summed)} is summed over. Change data.step, or "
                f"data.variables.{min(self.summed)}.accumulated to false."
            )
        self.times: Times = source.times[self._indices]
        self.num_skipped = int(np.count_nonzero(~complete))
        conversions = {name: config.variable_config(name).convert for name in names}
        self._conversions = {
            name: parse_conversion(text) for name, text in conversions.items() if text
        }

    def read(self, channels: Sequence[Channel], indices: NDArray[np.intp], rows: slice) -> Fields:
        """Read channels that change in time, `(T, C, rows, W)`, in the config's units.

        Summed channels take one read of the source, all others another one.

        Args:
            channels: in any order.
            indices: of `times`.
            rows: the band.
        """
        summed = [channel for channel in channels if channel.variable in self.summed]
        unsummed = [channel for channel in channels if channel.variable not in self.summed]
        if not summed:
            fields = self._source.read(channels, as_slice(self._indices[indices]), rows)
        elif not unsummed:
            fields = self._read_sums(channels, indices, rows)
        else:
            fields = self._read_mixed(channels, unsummed, summed, indices, rows)
        self.convert(channels, fields)
        return fields

    def source_index(self, index: int) -> int:
        """Return the index among the source's times of `times[index]`."""
        return int(self._indices[index])

    def chunk_numbers(self, channel: Channel, indices: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the source's chunk number of each index of `times`; see `Source`.

        For a summed channel it is the chunk of the last time of the sum.
        """
        return self._source.chunk_numbers(channel, self._indices[indices])

    def blocks(
        self, channels: Sequence[Channel], span: slice, count: int
    ) -> list[NDArray[np.intp]]:
        """Split the indices of `span` into blocks of about `count`, at chunk edges if possible.

        Blocks of summed channels are shorter, as all the times of their sums are in memory.
        """
        indices = np.arange(span.start, span.stop)
        if any(channel.variable in self.summed for channel in channels):
            count = max(1, count // self._windows.shape[1])
        # Divide the source's times into blocks of whole chunks: then each chunk is decoded once.
        stride = int(np.diff(self._indices).min()) if len(self._indices) > 1 else 1
        chunk = self._source.times_per_file(channels[0])
        block_length = -(-count * stride // chunk) * chunk
        block_numbers = self._indices[indices] // block_length
        return np.split(indices, np.flatnonzero(np.diff(block_numbers)) + 1)

    def convert(self, channels: Sequence[Channel], fields: Fields) -> None:
        """Convert the units of `(T, C, rows, W)` in place, where the config sets a conversion."""
        if not self._conversions:
            return
        for index, channel in enumerate(channels):
            if channel.variable in self._conversions:
                scale, offset = self._conversions[channel.variable]
                field = fields[:, index]
                field *= np.float32(scale)
                field += np.float32(offset)

    def _read_sums(
        self, channels: Sequence[Channel], indices: NDArray[np.intp], rows: slice
    ) -> Fields:
        windows = self._windows[indices]
        # Windows may share times; read each once.
        unique_indices, inverse = np.unique(windows, return_inverse=True)
        fields = self._source.read(channels, as_slice(unique_indices), rows)
        positions = inverse.reshape(windows.shape)
        sums: Fields = fields[positions[:, 0]]
        for column in positions.T[1:]:
            sums += fields[column]
        return sums

    def _read_mixed(
        self,
        channels: Sequence[Channel],
        unsummed: Sequence[Channel],
        summed: Sequence[Channel],
        indices: NDArray[np.intp],
        rows: slice,
    ) -> Fields:
        unsummed_fields = self._source.read(unsummed, as_slice(self._indices[indices]), rows)
        shape = (len(indices), len(channels), *unsummed_fields.shape[2:])
        fields = np.empty(shape, dtype=np.float32)
        is_sum = np.array([channel.variable in self.summed for channel in channels])
        fields[:, ~is_sum] = unsummed_fields
        fields[:, is_sum] = self._read_sums(summed, indices, rows)
        return fields


def data_step_indices(times: Times, config: DataConfig, where: str) -> NDArray[np.intp]:
    """Return the indices of the times on `data.step`; see `indices_on_step`.

    Args:
        times: of a source.
        config: gives the step.
        where: name of the source in the error message.

    Raises:
        UserError: no two consecutive times are one step apart.
    """
    spacing = int(time_spacing(times) / np.timedelta64(1, "s"))
    step = 3600 * config.step_hours
    if spacing and spacing % step and step % spacing:
        raise UserError(
            f"{where}: its times are {counted(spacing / 3600, 'hour')} apart, so no two of them in "
            f"a row are {config.step} apart. Set data.step to a multiple of {spacing / 3600:g}h."
        )
    return indices_on_step(times, np.timedelta64(config.step_hours, "h").astype("m8[ns]"))
