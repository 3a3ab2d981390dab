"""Combines sources: `FilesSource` along time, `JoinedSource` by variables.

Which of them is used for what `data.store` names: `opening.py`. A `JoinedSource` may hold
`FilesSource`s, not the other way round.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby, pairwise
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.calendar import Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.dates import time_spacing
from credit_dp.data.grid import FieldArray, Grid
from credit_dp.data.sources.source import (
    AliasedVariables,
    Indexer,
    Source,
    SourceWrapper,
    VariableInfo,
    all_names,
    as_slice,
    describe_members,
    is_listed,
)
from credit_dp.data.winds import lies_along_grid, wind_difference
from credit_dp.errors import UserError

GRID_TOLERANCE = 5e-5  # degrees: more than the rounding of coordinates in float32

logger = logging.getLogger(__name__)


class _CombinedSource(Source):
    """A source that reads others."""

    _sources: Sequence[Source]

    @property
    def original(self) -> Source:
        return self._sources[0].original

    def set_calendar(self, calendar: Calendar) -> None:
        super().set_calendar(calendar)
        for source in self._sources:
            source.set_calendar(calendar)

    def of_members(self, numbers: Sequence[int]) -> Self:
        source = super().of_members(numbers)
        source._sources = [x.of_members(numbers) if x.members else x for x in self._sources]
        return source


@final
class FilesSource(_CombinedSource):
    """Sources that follow each other in time and agree in everything else.

    A variable that one source lacks, or has on other levels or in other units, is listed with a
    problem, so that only its use is refused. Static fields are read from the first source.
    """

    def __init__(self, sources: Sequence[Source], where: str) -> None:
        """Sort the sources in time.

        Args:
            where: the address for messages, such as the pattern that the files match.
        """
        self.where = where
        self._sources = _from_one_meridian(sorted(sources, key=lambda source: source.times[0]))
        _check_times(self._sources)
        first = self._sources[0]
        for source in self._sources[1:]:
            _check_grid(first, source, 0)
        self.times: Times = np.concatenate([source.times for source in self._sources])
        self.calendar = first.calendar
        # The index in `times` of each source's first time, and their number at the end.
        self._starts = np.cumsum([0, *(len(source.times) for source in self._sources)])
        self.grid = first.grid
        self.title = first.title
        self.hybrid = first.hybrid
        self.counters = [counter for source in sources for counter in source.counters]
        self.variables: Mapping[str, VariableInfo] = _merge_variables(self._sources)
        self.members = _common_members(self._sources)

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read file by file."""
        if not self.variables[channels[0].variable].has_time:
            return self._sources[0].read(channels, times, rows)
        time_indices = np.arange(len(self.times))[times]
        files = np.searchsorted(self._starts, time_indices, side="right") - 1
        height, width = self.grid
        north, south, _ = rows.indices(height)
        fields = np.empty(
            (len(time_indices), len(channels), south - north, width), dtype=np.float32
        )
        # Each file is read once, whatever the order of the requested times.
        for file in np.unique(files).tolist():
            in_file = files == file
            times_in_file = as_slice(time_indices[in_file] - self._starts[file])
            fields[in_file] = self._sources[file].read(channels, times_in_file, rows)
        return fields

    def sum_bounds(self, variable: str, stated: bool = True) -> Times:
        """The sources may have times that are differently far apart."""
        bounds = np.concatenate([x.sum_bounds(variable, stated) for x in self._sources])
        # Only their series tells how far apart the times of sources with one time are.
        unknown = bounds[:, 0] == bounds[:, 1]
        bounds[unknown, 0] -= time_spacing(self.times)
        return bounds

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        return self._sources[0].group_by_chunk(channels)

    def times_per_file(self, channel: Channel) -> int:
        return self._sources[0].times_per_file(channel)

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        return self._sources[0].chunk_shape(channel)

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        if not self.variables[channel.variable].has_time:
            return self._sources[0].location(channel, time, row, column)
        file = int(np.searchsorted(self._starts, time, side="right")) - 1
        return self._sources[file].location(channel, time - int(self._starts[file]), row, column)

    def chunk_numbers(self, channel: Channel, times: NDArray[np.intp]) -> NDArray[np.intp]:
        """Chunks of different files have different numbers."""
        files = np.searchsorted(self._starts, times, side="right") - 1
        numbers = np.empty_like(times)
        first = 0
        # Files number their chunks from 0: shift them by the chunks of all files before.
        for file, source in enumerate(self._sources):
            in_file = files == file
            numbers[in_file] = first + source.chunk_numbers(
                channel, times[in_file] - self._starts[file]
            )
            # Numbers continue from source to source, because no chunk spans two of them.
            last = np.array([len(source.times) - 1])
            first += int(source.chunk_numbers(channel, last)[0]) + 1
        return numbers

    def description(self, variables: Sequence[str]) -> list[object]:
        """Return one entry for each source."""
        return [source.description(variables) for source in self._sources]


def _common_members(sources: Sequence[Source]) -> tuple[int, ...]:
    """Return the members that all sources have; without several, those of the first with one."""
    first = max(sources, key=lambda source: len(source.members))
    for other in sources:
        if len(first.members) > 1 and other.members != first.members:
            raise UserError(
                f"{other.where}: has {describe_members(other.members)}, but {first.where} "
                f"{describe_members(first.members)}. Stores that are joined need the same members, "
                "or no dim of members: change data.store."
            )
    return first.members


def _check_times(sources: Sequence[Source]) -> None:
    for earlier, later in pairwise(sources):
        if later.times[0] <= earlier.times[-1]:
            raise UserError(
                f"{later.where}: its times from {later.calendar.text(later.times[0])} on overlap "
                f"those of {earlier.where}, which end at "
                f"{earlier.calendar.text(earlier.times[-1])}. Change "
                "data.store so that each time is in one of its files."
            )


@final
class _RolledSource(SourceWrapper):
    """A source whose columns begin some columns further east than they are stored."""

    def __init__(self, source: Source, columns: int, grid: Grid) -> None:
        super().__init__(source)
        self._columns = columns
        self.grid = grid

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        return np.roll(self._source.read(channels, times, rows), -self._columns, axis=-1)

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        stored = (column + self._columns) % self.grid[1]
        return self._source.location(channel, time, row, stored)

    def description(self, variables: Sequence[str]) -> list[object]:
        return [*super().description(variables), ["rolled", self._columns]]


def _from_one_meridian(sources: Sequence[Source]) -> list[Source]:
    """Return sources whose columns begin where those of the first do, as at -180 instead of 0."""
    first = sources[0].grid
    columns = [source.grid.columns_east(first, GRID_TOLERANCE) for source in sources]
    return [
        _RolledSource(source, east, Grid(source.latitude, first.longitude)) if east else source
        for source, east in zip(sources, columns, strict=True)
    ]


def _check_grid(first: Source, other: Source, tolerance: float) -> None:
    differing = other.grid.difference(first.grid, tolerance)
    if differing:
        cure = "regrid one with `credit-dp data prepare`"
        if not (first.grid.is_global and other.grid.is_global):
            cure = "write regions that lie side by side as one, with xarray's concat"
        raise UserError(
            f"{other.where}: is not {'' if tolerance else 'exactly '}on the grid of {first.where}: "
            f"its {differing[0].removeprefix('a ')} is not {differing[1]}. Stores that are joined "
            f"need one grid: change data.store, or {cure}."
        )


def _merge_variables(sources: Sequence[Source]) -> AliasedVariables:
    """Merge the variables of all sources; one that differs between them gets a problem."""
    merged: dict[str, VariableInfo] = {}
    by_source = [(source, source.variables) for source in sources]
    for name in dict.fromkeys(name for _, variables in by_source for name in all_names(variables)):
        versions = [(source, variables.get(name)) for source, variables in by_source]
        without = next((source for source, variable in versions if variable is None), None)
        with_it = [(source, variable) for source, variable in versions if variable is not None]
        first, variable = with_it[0]
        problem = variable.problem
        if without is not None:
            problem = f"is not in {without.where}, while it is in {first.where}"
        for source, other in with_it[1:]:
            if other != variable:
                problem = problem or _difference(variable, first, other, source)
        merged[name] = replace(variable, problem=problem)
    listed = dict.fromkeys(name for source in sources for name in source.variables)
    return AliasedVariables({name: merged[name] for name in listed}, merged)


def _difference(
    variable: VariableInfo, first: Source, other_variable: VariableInfo, other: Source
) -> str:
    if other_variable.problem:
        return f"in {other.where} {other_variable.problem}"
    for field in ("has_time", "levels", "units"):
        value, other_value = getattr(variable, field), getattr(other_variable, field)
        if value != other_value:
            if field == "has_time":
                changing, constant = (other, first) if other_value else (first, other)
                return f"changes in time in {changing.where}, but not in {constant.where}"
            return (
                f"has other {field} in {other.where} ({other_value}) than in {first.where} "
                f"({value})"
            )
    lies = [lies_along_grid(x.standard_name, first.grid) for x in (variable, other_variable)]
    kinds = wind_difference(*lies)
    return f"is {kinds[0]} in {first.where}, but {kinds[1]} in {other.where}" if kinds else ""


@final
class JoinedSource(_CombinedSource):
    """Sources with different variables on one grid, at the times of all of them.

    A variable that several stores have is read from the first one; a store that has it under the
    config's name comes before a store that has it under another. It has the times of its store:
    sums over a step need the hours of a store that is finer than the others. A store without
    members of an ensemble belongs to each member of the others.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        timeless: Sequence[Source] = (),
        static: Collection[str] = (),
    ) -> None:
        """Join sources by variables.

        Args:
            timeless: stores of static fields; if they have a time, it is ignored.
            static: names that are used as static fields. They are read from a timeless store if
                one has them; all other names from a store in which they change in time.
        """
        all_sources = _from_one_meridian([*sources, *timeless])
        first = all_sources[0]
        # The variables of a GRIB file are sources of one address.
        self.where = " with ".join(dict.fromkeys(source.where for source in all_sources))
        self.grid = first.grid
        for other in all_sources[1:]:
            _check_grid(first, other, GRID_TOLERANCE)
        _check_common_times(sources)
        self.times: Times = reduce(np.union1d, [source.times for source in sources])
        self.calendar = sources[0].calendar
        # A time has other indices in each store; -1 if the store lacks it.
        self._time_indices = [
            np.where(np.isin(self.times, x.times), np.searchsorted(x.times, self.times), -1)
            for x in sources
        ]
        self._sources = all_sources
        self._variables_by_source = [source.variables for source in sources]
        self._variables_by_source += [_without_time(source.variables) for source in timeless]
        self._owners: dict[str, int] = {}
        for name in dict.fromkeys(
            name for variables in self._variables_by_source for name in all_names(variables)
        ):
            # A variable that no store can read has no owner, but stays listed, with its problem.
            owners = self._find_owners(name, name in static)
            if owners:
                self._owners[name] = owners[0]
        self.title = first.title
        given = (source.hybrid for source in all_sources)
        self.hybrid = next((hybrid for hybrid in given if hybrid is not None), None)
        self.counters = [counter for source in all_sources for counter in source.counters]
        self.variables: Mapping[str, VariableInfo] = self._variables()
        with_members = [source for source in all_sources if source.members]
        self.members = _common_members(with_members) if with_members else ()

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read store by store."""
        owners = [self._owner(channel) for channel in channels]
        if len(set(owners)) == 1:
            return self._read_from(owners[0], channels, times, rows)
        fields: FieldArray | None = None
        # One read of each store, with all of its channels, as they may share chunks.
        for owner in dict.fromkeys(owners):
            positions = [position for position, other in enumerate(owners) if other == owner]
            part = self._read_from(
                owner, [channels[position] for position in positions], times, rows
            )
            if fields is None:
                shape = (part.shape[0], len(channels), *part.shape[2:])
                fields = np.empty(shape, dtype=np.float32)
            fields[:, positions] = part
        return fields if fields is not None else np.empty((0, 0, *self.grid), dtype=np.float32)

    def has_times(self, variable: str) -> NDArray[np.bool_]:
        if not self.variables[variable].has_time:
            return super().has_times(variable)
        return self._time_indices[self._owners[variable]] >= 0

    def sum_bounds(self, variable: str, stated: bool = True) -> Times:
        bounds = np.full((len(self.times), 2), np.datetime64("NaT", "ns"), dtype=self.times.dtype)
        owner = self._sources[self._owners[variable]]
        bounds[self.has_times(variable)] = owner.sum_bounds(variable, stated)
        return bounds

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """Channels of different stores share no chunk."""
        return [
            group
            for owner, run in groupby(channels, self._owner)
            for group in self._sources[owner].group_by_chunk(list(run))
        ]

    def times_per_file(self, channel: Channel) -> int:
        return self._sources[self._owner(channel)].times_per_file(channel)

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        return self._sources[self._owner(channel)].chunk_shape(channel)

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        owner = self._owner(channel)
        # A static field is at index 0 in its own store, too.
        if self._variables_by_source[owner][channel.variable].has_time:
            time = int(self._time_indices[owner][time])
        return self._sources[owner].location(channel, time, row, column)

    def chunk_numbers(self, channel: Channel, times: NDArray[np.intp]) -> NDArray[np.intp]:
        owner = self._owner(channel)
        return self._sources[owner].chunk_numbers(channel, self._time_indices[owner][times])

    def description(self, variables: Sequence[str]) -> list[object]:
        """Return one entry for each store, with the variables that are read from it."""
        names_by_source: list[list[str]] = [[] for _ in self._sources]
        for name in variables:
            names_by_source[self._owners[name]].append(name)
        return [
            source.description(names)
            for source, names in zip(self._sources, names_by_source, strict=True)
        ]

    def _find_owners(self, name: str, static: bool) -> list[int]:
        """Return the numbers of the stores that can provide a variable, the best first."""

        def order(number: int) -> tuple[bool, bool, bool]:
            """Return a sorting key: the preferred stores have False first.

            They have a matching time dependence, then no times (for static fields), then the
            very name of the config.
            """
            variables = self._variables_by_source[number]
            has_times = number < len(self._time_indices)
            return (
                variables[name].has_time == static,
                static and has_times,
                not is_listed(name, variables),
            )

        candidates = [
            (number, variables.get(name))
            for number, variables in enumerate(self._variables_by_source)
        ]
        return sorted((n for n, x in candidates if x is not None and not x.problem), key=order)

    def _owner(self, channel: Channel) -> int:
        return self._owners[channel.variable]

    def _read_from(
        self, owner: int, channels: Sequence[Channel], times: Indexer, rows: slice
    ) -> FieldArray:
        """Read channels of one store: either all change in time or none does."""
        source = self._sources[owner]
        if self._variables_by_source[owner][channels[0].variable].has_time:
            indices = self._time_indices[owner][times]
            if (indices < 0).any():
                raise IndexError(f"{source.where} lacks times of {channels[0].variable}")
            times = as_slice(indices)
        return source.read(channels, times, rows)

    def _variables(self) -> AliasedVariables:
        listed: dict[str, VariableInfo] = {}
        # Backwards, so that the entry of the first store is the one that stays.
        for variables in reversed(self._variables_by_source):
            listed |= variables
        known: dict[str, VariableInfo] = {}
        for variables in reversed(self._variables_by_source):
            known |= {name: variables[name] for name in all_names(variables)}
        known |= {
            name: self._variables_by_source[owner][name] for name, owner in self._owners.items()
        }
        return AliasedVariables({name: known[name] for name in listed}, known)


def _without_time(variables: Mapping[str, VariableInfo]) -> AliasedVariables:
    """Return the variables of a store of static fields, marked as constant in time."""
    static = {name: replace(variables[name], has_time=False) for name in all_names(variables)}
    return AliasedVariables({name: static[name] for name in variables}, static)


def _check_common_times(sources: Sequence[Source]) -> None:
    """Refuse sources without a time in common, and log how many of the times of each are."""
    common: Times = reduce(np.intersect1d, [source.times for source in sources])
    if len(common) == 0:
        ranges = ", ".join(
            f"{source.where} has {source.calendar.text(source.times[0])} to "
            f"{source.calendar.text(source.times[-1])}"
            for source in sources
        )
        raise UserError(
            f"data.store: stores that are joined need times in common, but {ranges}. "
            "Change data.store."
        )
    for source in sources:
        if len(source.times) > len(common):
            logger.info(
                "%s: %d of its %d times are in all other stores, too",
                source.where,
                len(common),
                len(source.times),
            )
