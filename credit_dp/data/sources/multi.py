"""Several stores read as one: along time, or joined by variables on one grid."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.sources.base import (
    AliasedVariables,
    Fields,
    Indexer,
    Source,
    Times,
    VariableInfo,
    all_names,
    as_slice,
    is_listed,
)
from credit_dp.errors import UserError


@final
class FilesSource(Source):
    """Sources with other times each and all else alike, in the order of their times.

    A variable that one of them lacks, or has on other levels or in another unit, is there with a
    problem: it is refused if it is asked for. Fields that don't change in time are the first's.
    """

    def __init__(self, sources: Sequence[Source], where: str) -> None:
        """Put `sources` in order; `where` is the pattern that they fit.

        Raises:
            UserError: their times overlap, or their rows or columns differ.
        """
        self.where = where
        self._sources = sorted(sources, key=lambda source: source.times[0])
        _check_times(self._sources)
        first = self._sources[0]
        for source in self._sources[1:]:
            _check_same_grid(first, source)
        self.times: Times = np.concatenate([source.times for source in self._sources])
        self._starts = np.cumsum([0, *(len(source.times) for source in self._sources)])
        self.latitude: NDArray[np.float64] = first.latitude
        self.longitude: NDArray[np.float64] = first.longitude
        self.title = first.title
        self.counters = [counter for source in sources for counter in source.counters]
        self.variables: Mapping[str, VariableInfo] = _merge_variables(self._sources)

    def read(self, channels: Sequence[Channel], places: Indexer, rows: slice) -> Fields:
        """See `Source`: file by file."""
        if not self.variables[channels[0].variable].timed:
            return self._sources[0].read(channels, places, rows)
        wanted = np.arange(len(self.times))[places]
        files = np.searchsorted(self._starts, wanted, side="right") - 1
        height, width = self.grid
        north, south, _ = rows.indices(height)
        fields = np.empty((len(wanted), len(channels), south - north, width), dtype=np.float32)
        for file in np.unique(files).tolist():
            mine = files == file
            within = as_slice(wanted[mine] - self._starts[file])
            fields[mine] = self._sources[file].read(channels, within, rows)
        return fields

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`: as in the first."""
        return self._sources[0].group_by_chunk(channels)

    def times_together(self, channel: Channel) -> int:
        """See `Source`: in the first."""
        return self._sources[0].times_together(channel)

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """See `Source`: in the first."""
        return self._sources[0].chunk_shape(channel)

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """See `Source`."""
        if not self.variables[channel.variable].timed:
            return self._sources[0].location(channel, place, row, column)
        file = int(np.searchsorted(self._starts, place, side="right")) - 1
        return self._sources[file].location(channel, place - int(self._starts[file]), row, column)

    def chunk_numbers(self, channel: Channel, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """See `Source`: no chunk reaches into another file."""
        files = np.searchsorted(self._starts, places, side="right") - 1
        numbers = np.empty_like(places)
        first = 0
        for file, source in enumerate(self._sources):
            mine = files == file
            numbers[mine] = first + source.chunk_numbers(channel, places[mine] - self._starts[file])
            last = np.array([len(source.times) - 1])
            first += int(source.chunk_numbers(channel, last)[0]) + 1
        return numbers

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`: of all of them."""
        return [source.description(variables) for source in self._sources]


def _check_times(sources: Sequence[Source]) -> None:
    """Refuse times that are in two of the sources, or between those of another."""
    for earlier, later in pairwise(sources):
        if later.times[0] <= earlier.times[-1]:
            raise UserError(
                f"{later.where}: its times from {_format_minute(later.times[0])} on overlap "
                "those of "
                f"{earlier.where}, to {_format_minute(earlier.times[-1])}. Change data.store "
                "so that "
                "each time is in one of its files."
            )


def _check_same_grid(first: Source, other: Source) -> None:
    for name in ("latitude", "longitude"):
        one, two = getattr(first, name), getattr(other, name)
        if not np.array_equal(one, two):
            raise UserError(
                f"{other.where}: its {name} ({_format_range(two)}) is not exactly that of "
                f"{first.where} "
                f"({_format_range(one)}). Change data.store."
            )


def _format_range(values: NDArray[np.float64]) -> str:
    return f"{len(values)} from {values[0]:g} to {values[-1]:g}"


def _merge_variables(sources: Sequence[Source]) -> AliasedVariables:
    """Those of any of the sources, each with a problem if it isn't alike in all."""
    found: dict[str, VariableInfo] = {}
    of_each = [(source, source.variables) for source in sources]
    for name in dict.fromkeys(name for _, variables in of_each for name in all_names(variables)):
        all_sources = [(source, variables.get(name)) for source, variables in of_each]
        lacking = next((source for source, variable in all_sources if variable is None), None)
        having = [(source, variable) for source, variable in all_sources if variable is not None]
        first, variable = having[0]
        problem = variable.problem
        if lacking is not None:
            problem = f"is not in {lacking.where}, while it is in {first.where}"
        for source, other in having[1:]:
            if other != variable:
                problem = problem or _difference(variable, first, other, source)
        found[name] = replace(variable, problem=problem)
    listed = dict.fromkeys(name for source in sources for name in source.variables)
    return AliasedVariables({name: found[name] for name in listed}, found)


def _difference(one: VariableInfo, first: Source, two: VariableInfo, other: Source) -> str:
    if two.problem:
        return f"in {other.where} {two.problem}"
    for what in ("timed", "levels", "units"):
        mine, others = getattr(one, what), getattr(two, what)
        if mine != others:
            key = "change in time" if what == "timed" else what
            return f"has other {key} in {other.where} ({others}) than in {first.where} ({mine})"
    return ""


def _format_minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))


GRID_TOLERANCE = 5e-5  # degrees: float32 can't tell coordinates that are less apart

log = logging.getLogger(__name__)


@final
class JoinedSource(Source):
    """The times that all stores have; of a variable in several, the first store's.

    A store that has the variable under this very name comes before one that has it under another.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        timeless: Sequence[Source] = (),
        static: Collection[str] = (),
    ) -> None:
        """Join them.

        Args:
            sources: stores with times.
            timeless: stores of static fields; if they have a time, it does not count.
            static: names that are wanted as static fields: they are taken from a store of static
                fields, if one has them, and all others from a store where they change in time.

        Raises:
            UserError: they are on different grids, or have no time in common.
        """
        everything = [*sources, *timeless]
        first = everything[0]
        self.where = " with ".join(source.where for source in everything)
        self.latitude, self.longitude = first.latitude, first.longitude
        for other in everything[1:]:
            _check_grid(first, other)
        self.times: Times = _common_times(sources)
        self._time_indices = [np.searchsorted(source.times, self.times) for source in sources]
        self._sources = everything
        self._variables_by_source = [source.variables for source in sources]
        self._variables_by_source += [_without_time(source.variables) for source in timeless]
        self._owners: dict[str, int] = {}
        for name in dict.fromkeys(
            x for found in self._variables_by_source for x in all_names(found)
        ):
            owners = self._owners_of(name, name in static)
            if owners:
                self._owners[name] = owners[0]
        self.title = first.title
        self.counters = [counter for source in everything for counter in source.counters]
        self.variables: Mapping[str, VariableInfo] = self._variables()

    def read(self, channels: Sequence[Channel], places: Indexer, rows: slice) -> Fields:
        """See `Source`: store by store."""
        owners = [self._owner(channel) for channel in channels]
        if len(set(owners)) == 1:
            return self._read_from(owners[0], channels, places, rows)
        fields: Fields | None = None
        for owner in dict.fromkeys(owners):
            mine = [place for place, number in enumerate(owners) if number == owner]
            part = self._read_from(owner, [channels[place] for place in mine], places, rows)
            if fields is None:
                shape = (part.shape[0], len(channels), *part.shape[2:])
                fields = np.empty(shape, dtype=np.float32)
            fields[:, mine] = part
        return fields if fields is not None else np.empty((0, 0, *self.grid), dtype=np.float32)

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`: as each store says of its own."""
        return [
            group
            for owner, run in groupby(channels, self._owner)
            for group in self._sources[owner].group_by_chunk(list(run))
        ]

    def times_together(self, channel: Channel) -> int:
        """See `Source`."""
        return self._sources[self._owner(channel)].times_together(channel)

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """See `Source`."""
        return self._sources[self._owner(channel)].chunk_shape(channel)

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """See `Source`."""
        owner = self._owner(channel)
        if self._variables_by_source[owner][channel.variable].timed:
            place = int(self._time_indices[owner][place])
        return self._sources[owner].location(channel, place, row, column)

    def chunk_numbers(self, channel: Channel, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """See `Source`."""
        owner = self._owner(channel)
        return self._sources[owner].chunk_numbers(channel, self._time_indices[owner][places])

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`: of each store, with the variables that are taken from it."""
        of_each: list[list[str]] = [[] for _ in self._sources]
        for name in variables:
            of_each[self._owners[name]].append(name)
        return [
            source.description(names) for source, names in zip(self._sources, of_each, strict=True)
        ]

    def _owners_of(self, name: str, static: bool) -> list[int]:
        """The numbers of the stores that a variable may be read from, the best first."""

        def order(number: int) -> tuple[bool, bool, bool]:
            """First those of the wanted kind, then stores of that kind, then this very name."""
            variables = self._variables_by_source[number]
            of_many_times = number < len(self._time_indices)
            return (
                variables[name].timed == static,
                static and of_many_times,
                not is_listed(name, variables),
            )

        found = [(number, of.get(name)) for number, of in enumerate(self._variables_by_source)]
        return sorted((n for n, x in found if x is not None and not x.problem), key=order)

    def _owner(self, channel: Channel) -> int:
        """The number of the store that it is read from."""
        return self._owners[channel.variable]

    def _read_from(
        self, owner: int, channels: Sequence[Channel], places: Indexer, rows: slice
    ) -> Fields:
        """Channels of one store, all of which change in time or none."""
        source = self._sources[owner]
        if self._variables_by_source[owner][channels[0].variable].timed:
            places = as_slice(self._time_indices[owner][places])
        return source.read(channels, places, rows)

    def _variables(self) -> AliasedVariables:
        """Also those that can't be read, for the message that says so."""
        listed: dict[str, VariableInfo] = {}
        for variables in reversed(self._variables_by_source):
            listed |= variables
        owned = {name: self._variables_by_source[at][name] for name, at in self._owners.items()}
        return AliasedVariables({name: owned.get(name, listed[name]) for name in listed}, owned)


def _without_time(variables: Mapping[str, VariableInfo]) -> AliasedVariables:
    """The variables of a store of static fields, none of which changes in time."""
    found = {name: replace(variables[name], timed=False) for name in all_names(variables)}
    return AliasedVariables({name: found[name] for name in variables}, found)


def _check_grid(first: Source, other: Source) -> None:
    """Refuse a store that is not on the first one's grid."""
    for name, one, two in (
        ("latitude", first.latitude, other.latitude),
        ("longitude", first.longitude, other.longitude),
    ):
        if len(one) != len(two) or np.abs(one - two).max() > GRID_TOLERANCE:
            raise UserError(
                f"{other.where}: has not the grid of {first.where}: its {name} is "
                f"{_format_axis(two)}, "
                f"theirs {_format_axis(one)}. Stores that are joined need one grid: change "
                "data.store, "
                "or regrid one with `credit-dp data prepare`."
            )


def _format_axis(degrees: NDArray[np.float64]) -> str:
    return f"{len(degrees)} values from {degrees[0]:g} to {degrees[-1]:g}"


def _common_times(sources: Sequence[Source]) -> Times:
    """Those of all the stores.

    Raises:
        UserError: there are none.
    """
    common: Times = reduce(np.intersect1d, [source.times for source in sources])
    if len(common) == 0:
        spans = ", ".join(
            f"{source.where} has {source.times[0].astype('M8[m]')} to "
            f"{source.times[-1].astype('M8[m]')}"
            for source in sources
        )
        raise UserError(
            f"data.store: stores that are joined need times in common, but {spans}. "
            "Change data.store."
        )
    for source in sources:
        if len(source.times) > len(common):
            log.info(
                "%s: %d of %d times are in the other stores too; the others are left out",
                source.where,
                len(common),
                len(source.times),
            )
    return common
