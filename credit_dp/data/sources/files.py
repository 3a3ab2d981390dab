"""Several stores along time, such as one for each year, read as one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import (
    Aliased,
    Fields,
    Places,
    Source,
    Times,
    Variable,
    as_slice,
    names_of,
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
        self.variables: Mapping[str, Variable] = _variables(self._sources)

    def read(self, channels: Sequence[Channel], places: Places, rows: slice) -> Fields:
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

    def together(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`: as in the first."""
        return self._sources[0].together(channels)

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
                f"{later.where}: its times from {_minute(later.times[0])} on overlap those of "
                f"{earlier.where}, to {_minute(earlier.times[-1])}. Change data.store so that "
                "each time is in one of its files."
            )


def _check_same_grid(first: Source, other: Source) -> None:
    for name in ("latitude", "longitude"):
        one, two = getattr(first, name), getattr(other, name)
        if not np.array_equal(one, two):
            raise UserError(
                f"{other.where}: its {name} ({_range(two)}) is not exactly that of {first.where} "
                f"({_range(one)}). Change data.store."
            )


def _range(values: NDArray[np.float64]) -> str:
    return f"{len(values)} from {values[0]:g} to {values[-1]:g}"


def _variables(sources: Sequence[Source]) -> Aliased:
    """Those of any of the sources, each with a problem if it isn't alike in all."""
    found: dict[str, Variable] = {}
    of_each = [(source, source.variables) for source in sources]
    for name in dict.fromkeys(name for _, variables in of_each for name in names_of(variables)):
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
    return Aliased({name: found[name] for name in listed}, found)


def _difference(one: Variable, first: Source, two: Variable, other: Source) -> str:
    if two.problem:
        return f"in {other.where} {two.problem}"
    for what in ("timed", "levels", "units"):
        mine, others = getattr(one, what), getattr(two, what)
        if mine != others:
            key = "change in time" if what == "timed" else what
            return f"has other {key} in {other.where} ({others}) than in {first.where} ({mine})"
    return ""


def _minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))
