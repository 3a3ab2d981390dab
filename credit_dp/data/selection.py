"""The channels, times, units and steps that a run selects from a source.

`select_channels` checks the variables of the config against those of the source. `StepReader` reads
them on the config's step: it sums accumulated variables over the step and converts units.
"""

import logging
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.config.data import ROLES
from credit_dp.data.calendar import Times
from credit_dp.data.channels import Channel, Channels, expand_channels, suggest_names
from credit_dp.data.dates import EPOCH, SumWindows, indices_on_step, sum_windows, time_spacing
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.source import (
    Source,
    all_names,
    as_slice,
    describe_sums,
    hours_of,
    is_listed,
)
from credit_dp.data.units import is_accumulated, parse_conversion
from credit_dp.errors import UserError, counted
from credit_dp.variable_names import long_name

logger = logging.getLogger(__name__)

COMPUTED_BY_ROLE: Mapping[str, Collection[str]] = {
    "forcing": COMPUTED_FORCINGS,
    "static": COMPUTED_STATICS,
}


def select_channels(source: Source, config: DataConfig) -> Channels:
    """Return the channels of the config, in its order.

    Raises:
        UserError: a variable is missing, named twice or in the wrong list, or a level is missing.
    """
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


def unused_variables(source: Source, channels: Channels) -> list[str]:
    """Return the readable variables of a source that change in time and are in no list of a run."""
    names = (*channels.forcing, *channels.static)
    used = {long_name(channel.variable, channel.level)[0] for channel in channels.output_channels}
    used |= {long_name(name)[0] for name in names}
    return sorted(
        name
        for name, variable in source.variables.items()
        if variable.has_time
        and not variable.problem
        and long_name(name, next(iter(variable.levels), None))[0] not in used
    )


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
                _check_kind(source, config, name, role)


def without_absent_statics(source: Source, config: DataConfig) -> DataConfig:
    """Return the config without the static fields of its preset that the source lacks."""
    absent = [
        name
        for name in config.optional_static
        if name in config.static and name not in (*all_names(source.variables), *COMPUTED_STATICS)
    ]
    if not absent:
        return config
    logger.info("%s has no %s: left out of data.static", source.where, ", ".join(absent))
    return replace(config, static=[name for name in config.static if name not in absent])


def _check_present(source: Source, config: DataConfig, name: str, role: str) -> None:
    known = all_names(source.variables)
    if name in known:
        return
    available = [*source.variables, *COMPUTED_BY_ROLE.get(role, ())]
    absent = {
        kind: [
            x for x in getattr(config, kind) if x not in (*known, *COMPUTED_BY_ROLE.get(kind, ()))
        ]
        for kind in ROLES
    }
    others = [f"{x} of data.{kind}" for kind, names in absent.items() for x in names if x != name]
    raise UserError(
        f"{source.where}: no variable {name}. {suggest_names(name, available)}. "
        + (f"Also missing: {', '.join(others)}. " if others else "")
        + correct_or_leave_out(config, absent)
    )


def correct_or_leave_out(config: DataConfig, absent: Mapping[str, Sequence[str]]) -> str:
    """Return advice on names that do not exist, by role, with keys to copy."""
    lists = {
        role: [name for name in getattr(config, role) if name not in names]
        for role, names in absent.items()
        if names
    }
    keys = _list_keys(lists)
    if not keys:
        return f"Change {' and '.join(f'data.{role}' for role in lists)}."
    several = sum(map(len, absent.values())) > 1
    advice = "Correct the names, or leave them out" if several else "Correct it, or leave it out"
    return f"{advice}: {keys}"


def _list_keys(lists: Mapping[str, Sequence[object]]) -> str:
    """Return keys that set lists of the data config, for a shell; "" without prognostic ones."""
    if not lists.get("prognostic", True):
        return ""
    return " ".join(
        shlex.quote(f"data.{name}=[{','.join(map(str, items))}]") for name, items in lists.items()
    )


def _check_kind(source: Source, config: DataConfig, name: str, role: str) -> None:
    variable = source.variables[name]
    lists = {role: [other for other in getattr(config, role) if other != name]}
    remedy = "Leave it out"
    if variable.problem:
        problem = variable.problem
        remedy = "Change data.store, or leave it out"
    elif (role == "static") == variable.has_time:
        place = "forcing" if variable.has_time else "static"
        problem = "changes in time" if variable.has_time else "has no time"
        problem += f": it belongs to data.{place}"
        lists[place] = list(dict.fromkeys([*getattr(config, place), name]))
        remedy = "Move it"
    elif role in ("forcing", "static") and variable.levels:
        problem = f"has levels, which a {role} variable can't have"
    else:
        return
    keys = _list_keys(lists)
    remedy = f"{remedy}: {keys}" if keys else f"Change data.{role} or data.store."
    raise UserError(f"{source.where}: {name} {problem}. {remedy}")


def _select_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Return the levels of the config, or the store's in rising order; empty if it has none."""
    if config.levels is None:
        return _common_levels(source, config)
    levels_of = _levels_by_variable(source, config)
    if not levels_of and not any(variable.levels for variable in source.variables.values()):
        raise UserError(f"{source.where}: has no levels. Set data.levels=null.")
    check_levels(source.where, config.levels, levels_of)
    return list(config.levels)


def _levels_by_variable(source: Source, config: DataConfig) -> dict[str, list[int]]:
    """Return the levels of the output variables that are on levels, in rising order."""
    levels = {
        x: sorted(source.variables[x].levels) for x in (*config.prognostic, *config.diagnostic)
    }
    return {name: found for name, found in levels.items() if found}


def check_levels(where: str, wanted: Sequence[int], levels_of: Mapping[str, Sequence[int]]) -> None:
    """Refuse levels of `data.levels` that a variable of a store does not have."""
    for name, levels in levels_of.items():
        missing = [level for level in wanted if level not in levels]
        if missing:
            raise UserError(
                f"{where}: {name} has no level {missing[0]}."
                + (hint_at_hpa("data.levels", wanted, levels) or _shared_levels(levels_of))
            )


def _shared_levels(levels_of: Mapping[str, Sequence[int]]) -> str:
    """Return advice with the levels that all these variables have."""
    shared = set.intersection(*map(set, levels_of.values()))
    if not shared:
        return f" No level is common to {', '.join(levels_of)}: leave some of these out."
    whose = "Levels of all variables" if len(levels_of) > 1 else "Its levels"
    return f" {whose}: {_list_keys({'levels': sorted(shared)})}"


def hint_at_hpa(key: str, wanted: Sequence[int], levels: Sequence[int]) -> str:
    """Return a question for who gives levels in Pa, or ""."""
    if any(level % 100 or level // 100 not in levels for level in wanted):
        return ""
    return f" Levels are in hPa: did you mean {key}=[{','.join(str(x // 100) for x in wanted)}]?"


def _common_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Return the levels of all output variables on levels, in rising order.

    Raises:
        UserError: two of these variables have different levels.
    """
    levels_of = _levels_by_variable(source, config)
    first = next(iter(levels_of), "")
    for name, levels in levels_of.items():
        if levels != levels_of[first]:
            raise UserError(
                f"{source.where}: {name} has the levels {', '.join(map(str, levels))}, "
                f"but {first} has {', '.join(map(str, levels_of[first]))}."
                f"{_shared_levels(levels_of)}"
            )
    return levels_of[first] if levels_of else []


@final
class StepReader:
    """Reads the fields of a source on the config's step.

    Attributes:
        times: `(T,)`, times of the source that are whole steps from the origin or, if there are
            none, after its first time; without times whose sum is incomplete.
        num_skipped: times left out because their sum is incomplete.
        summed: the variables that are summed over each step, and how many times a sum has at most.
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        variables: Iterable[str],
        origin: np.datetime64 = EPOCH,
    ) -> None:
        """Find the times on the step, and the windows of variables that are summed.

        Accumulated variables are summed if their values are sums over less than the step. The
        windows are formed from all times of the source that the variable is read from, whichever
        times the other variables have.

        Args:
            source: gives the fields.
            config: gives step, conversions and the variables that are accumulated.
            variables: names of the variables to read.
            origin: a time from which steps are counted.

        Raises:
            UserError: the step does not fit the source's times, no sum is complete, or a conversion
                of units is unknown.
        """
        self._source = source
        names = list(variables)
        timed = [name for name in names if source.variables[name].has_time]
        accumulated = [name for name in timed if is_accumulated(name, config)]
        # A sum that ends at a time does not need to be stored under it.
        instants = [name for name in timed if name not in accumulated] or accumulated
        present = np.flatnonzero(source.has_all_times(instants))
        indices = present[data_step_indices(source.times[present], config, source.where, origin)]
        # The same times for all variables, so that a sample has either all of its fields or none.
        complete = np.ones(len(indices), dtype=bool)
        windows: dict[str, NDArray[np.intp]] = {}
        for name in accumulated:
            found = _sum_windows_of(source, config, name, indices)
            windows[name] = found.indices
            complete &= found.complete
        if not complete.any():
            raise UserError(
                f"{source.where}: no time has all of the {config.step} before it, which "
                f"{min(accumulated)} is summed over. Change data.step, or "
                f"set data.variables.{min(accumulated)}.accumulated to false."
            )
        self._indices = indices[complete]
        # Row t has the source's times that are summed for time t; variables may share windows.
        self._windows: list[NDArray[np.intp]] = []
        self._window_numbers: dict[str, int] = {}
        for name, window in windows.items():
            kept = window[complete]
            if np.array_equal(kept, self._indices[:, None]):
                continue
            equal = (n for n, other in enumerate(self._windows) if np.array_equal(other, kept))
            self._window_numbers[name] = next(equal, len(self._windows))
            if self._window_numbers[name] == len(self._windows):
                self._windows.append(kept)
        self.summed = {
            name: self._windows[number].shape[1] for name, number in self._window_numbers.items()
        }
        self.times: Times = source.times[self._indices]
        self.num_skipped = int(np.count_nonzero(~complete))
        conversions = {name: config.variable_config(name).convert for name in names}
        self._conversions = {
            name: parse_conversion(text) for name, text in conversions.items() if text
        }

    def of_source(self, source: Source) -> "StepReader":
        """Return the same reader of a source with the same times, such as another member."""
        reader = copy(self)
        reader._source = source
        return reader

    def read(
        self, channels: Sequence[Channel], indices: NDArray[np.intp], rows: slice
    ) -> FieldArray:
        """Read channels that change in time, `(T, C, rows, W)`, in the config's units.

        Channels with the same window take one read of the source.

        Args:
            channels: in any order.
            indices: of `times`.
            rows: the band.
        """
        groups: dict[int | None, list[int]] = {}
        for position, channel in enumerate(channels):
            number = self._window_numbers.get(channel.variable)
            groups.setdefault(number, []).append(position)
        parts = [
            self._read_window(number, [channels[position] for position in positions], indices, rows)
            for number, positions in groups.items()
        ]
        fields = parts[0]
        if len(parts) > 1:
            fields = np.empty((len(indices), len(channels), *fields.shape[2:]), dtype=np.float32)
            for positions, part in zip(groups.values(), parts, strict=True):
                fields[:, positions] = part
        self.convert(channels, fields)
        return fields

    def source_index(self, index: int) -> int:
        """Return the index among the source's times of `times[index]`."""
        return int(self._indices[index])

    def chunk_numbers(self, channel: Channel, indices: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the source's chunk number of each index of `times`; see `Source`.

        For a summed channel it is the chunk of the last time of the sum.
        """
        return self._source.chunk_numbers(channel, self._last_times(channel)[indices])

    def blocks(
        self, channels: Sequence[Channel], span: slice, count: int
    ) -> list[NDArray[np.intp]]:
        """Split the indices of `span` into blocks of about `count`, at chunk edges if possible.

        Blocks of summed channels are shorter, as all the times of their sums are in memory.
        """
        indices = np.arange(span.start, span.stop)
        longest = max((self.summed.get(channel.variable, 1) for channel in channels), default=1)
        count = max(1, count // longest)
        # Divide the variable's times into blocks of whole chunks: then each chunk is decoded once.
        first = channels[0]
        places = np.cumsum(self._source.has_times(first.variable)) - 1
        positions = places[self._last_times(first)]
        stride = int(np.diff(positions).min()) if len(positions) > 1 else 1
        chunk = self._source.times_per_file(first)
        block_length = -(-count * stride // chunk) * chunk
        block_numbers = positions[indices] // block_length
        return np.split(indices, np.flatnonzero(np.diff(block_numbers)) + 1)

    def convert(self, channels: Sequence[Channel], fields: FieldArray) -> None:
        """Convert the units of `(T, C, rows, W)` in place, where the config sets a conversion."""
        if not self._conversions:
            return
        for index, channel in enumerate(channels):
            if channel.variable in self._conversions:
                scale, offset = self._conversions[channel.variable]
                field = fields[:, index]
                field *= np.float32(scale)
                field += np.float32(offset)

    def _last_times(self, channel: Channel) -> NDArray[np.intp]:
        """Return the index among the source's times of the last that is read for each time."""
        number = self._window_numbers.get(channel.variable)
        return self._indices if number is None else self._windows[number][:, -1]

    def _read_window(
        self,
        number: int | None,
        channels: Sequence[Channel],
        indices: NDArray[np.intp],
        rows: slice,
    ) -> FieldArray:
        """Read channels that are not summed, or that are summed over one kind of window."""
        if number is None:
            return self._source.read(channels, as_slice(self._indices[indices]), rows)
        windows = self._windows[number][indices]
        is_summed = windows >= 0
        # Windows may share times; read each once.
        unique_indices, inverse = np.unique(windows[is_summed], return_inverse=True)
        fields = self._source.read(channels, as_slice(unique_indices), rows)
        positions = np.zeros_like(windows)
        positions[is_summed] = inverse
        sums = np.zeros((len(indices), *fields.shape[1:]), dtype=np.float32)
        for column, present in zip(positions.T, is_summed.T, strict=True):
            np.add(sums, fields[column], out=sums, where=present[:, None, None, None])
        return sums


def _sum_windows_of(
    source: Source, config: DataConfig, name: str, indices: NDArray[np.intp]
) -> SumWindows:
    """Return the windows of a variable over the step that ends at each of some times.

    Raises:
        UserError: the store says what the sums are, and they fill no step.
    """
    step = np.timedelta64(config.step_hours, "h")
    bounds = source.sum_bounds(name)
    if (bounds[:, 0] == bounds[:, 1]).any():
        # There is one time alone, whose value has to be the sum that is needed.
        return SumWindows(indices[:, None], source.has_times(name)[indices])
    windows = sum_windows(bounds, source.times[indices], step)
    stated_by = source.variables[name].sums_stated_by
    # Sums since the start of a forecast grow longer than a step.
    longer = bounds[bounds[:, 1] - bounds[:, 0] > step, 1]
    is_longer = np.isin(source.times[indices], longer).any()
    if not stated_by or (windows.complete.any() and not is_longer):
        return windows
    if config.variable_config(name).accumulated:
        unstated = source.sum_bounds(name, stated=False)
        return sum_windows(unstated, source.times[indices], step)
    apart = hours_of(time_spacing(source.times[source.has_times(name)]))
    raise UserError(
        f"{source.where}: {name} has {describe_sums(bounds)} by its {stated_by}, and its times are "
        f"{counted(apart, 'hour')} apart: these sums do not fill the {config.step} of data.step. "
        f"Change data.store to one with all hours, or set data.variables.{name}.accumulated to "
        "false, to take the values as they are, or to true, if they are sums since the time before."
    )


def data_step_indices(
    times: Times, config: DataConfig, where: str, origin: np.datetime64 = EPOCH
) -> NDArray[np.intp]:
    """Return the indices of the times on `data.step`; see `indices_on_step`.

    Args:
        times: of a source.
        config: gives the step.
        where: name of the source in the error message.
        origin: a time from which steps are counted.

    Raises:
        UserError: no two consecutive times are one step apart.
    """
    spacing = int(time_spacing(times) / np.timedelta64(1, "s"))
    step = 3600 * config.step_hours
    if spacing and spacing % step and step % spacing:
        whole = math.lcm(spacing, 3600)
        remedy = f"Set data.step to a multiple of {whole // 3600}h."
        if times[-1] - times[0] < np.timedelta64(whole, "s"):
            remedy = "Change data.store to one whose times are whole hours apart."
        raise UserError(
            f"{where}: its times are {counted(spacing / 3600, 'hour')} apart, so no two of them in "
            f"a row are {config.step} apart. {remedy}"
        )
    return indices_on_step(times, np.timedelta64(config.step_hours, "h"), origin)
