"""The interface of all data sources.

`Source` is what the rest of the package reads from; its subclasses in this folder read one format
each (zarr and netCDF, anemoi, prepared stores) or combine other sources (`combined`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.dates import time_spacing
from credit_dp.data.grid import Degrees, FieldArray, Grid
from credit_dp.data.regrid import CellLayout
from credit_dp.data.sources.rows import CellRows
from credit_dp.errors import counted

Indexer = slice | NDArray[np.intp]


@final
@dataclass(frozen=True)
class VariableInfo:
    """The metadata of one variable, known before any field is read.

    Attributes:
        has_time: whether the variable changes in time.
        levels: its levels in the store's order; empty if it has no level dim.
        units, standard_name: as the source gives them; empty if it gives none.
        problem: why the variable can't be read, to be shown after its name; empty if it can.
        model_levels: whether `levels` are numbers of model levels, not pressures; None if the store
            does not say so, and they are used as pressures.
        stored_name: its name in the store, if that is another one.
        sums_stated_by: what says which hours its values are sums over, such as "cell_methods";
            empty if nothing says it.
        sum_hours: how many hours before each time; 0 if the source's `time_bounds` say it.
        has_members: whether it has values of its own for each of the source's `members`.
    """

    has_time: bool
    levels: tuple[int, ...] = ()
    units: str = ""
    standard_name: str = ""
    problem: str = ""
    model_levels: bool | None = False
    stored_name: str = ""
    sums_stated_by: str = ""
    sum_hours: float = 0.0
    has_members: bool = False


TIME_BOUNDS = "time bounds"


class ReadCounter(Protocol):
    """Counts what is read from one store."""

    data_bytes: int
    chunk_reads: int


@final
@dataclass(frozen=True)
class AliasedVariables(Mapping[str, VariableInfo]):
    """Variables by name; the names in `aliases` can be looked up, but are not listed."""

    listed: Mapping[str, VariableInfo]
    aliases: Mapping[str, VariableInfo]

    def __getitem__(self, name: str) -> VariableInfo:
        return self.listed[name] if name in self.listed else self.aliases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


def all_names(variables: Mapping[str, VariableInfo]) -> list[str]:
    """Return all names that can be looked up, listed or not."""
    aliases = variables.aliases if isinstance(variables, AliasedVariables) else ()
    return list(dict.fromkeys([*variables, *aliases]))


def is_listed(name: str, variables: Mapping[str, VariableInfo]) -> bool:
    """Whether `name` is the store's own name, not an alias."""
    return name in (variables.listed if isinstance(variables, AliasedVariables) else variables)


def with_model_levels(variables: Mapping[str, VariableInfo]) -> AliasedVariables:
    """Return variables whose levels are numbers of model levels, whatever the store says."""

    def renumbered(variable: VariableInfo) -> VariableInfo:
        return replace(variable, model_levels=True) if variable.levels else variable

    listed = {name: renumbered(variables[name]) for name in variables}
    others = {
        name: renumbered(variables[name]) for name in all_names(variables) if name not in listed
    }
    return AliasedVariables(listed, others)


class Source(ABC):
    """An open store with checked coordinates: float32 fields with row 0 in the north.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        where: its address as messages show it.
        times: `(T,)` datetime64, increasing, perhaps with gaps. A variable of a source that is
            joined from others may lack some of them, see `has_times`.
        grid: its rows from the north, its columns in the store's order.
        variables: metadata of the variables by their names in the config.
        counters: one counter of reads for each store that is read.
        hybrid: coefficients a, in Pa, and b at the interfaces of all model levels, from the top,
            `(L + 1,)` each; None if the store has none.
        time_bounds: `(T, 2)`, begin and end of the cells of `times`; None if the store has none.
        cells: how a store of cells becomes rows; None for one of rows and columns.
        members: numbers of the members of an ensemble, of which the first is read; empty if there
            are none.
    """

    where: str
    times: Times
    grid: Grid
    variables: Mapping[str, VariableInfo]
    counters: Sequence[ReadCounter]
    title: str = ""
    hybrid: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    time_bounds: Times | None = None
    calendar: Calendar = STANDARD
    cells: CellRows | None = None
    members: tuple[int, ...] = ()

    @property
    def latitude(self) -> Degrees:
        """Degrees, falling from row to row: `(H,)`, or `(H, W)` on a projection."""
        return self.grid.latitude

    @property
    def longitude(self) -> Degrees:
        """Degrees in the store's order: `(W,)`, or `(H, W)` on a projection."""
        return self.grid.longitude

    @abstractmethod
    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read channels at some times: `(T, C, rows, W)`, with NaN for missing values.

        Either all channels change in time or none does. A chunk that holds several of them is
        read once.

        Args:
            channels: in the order of the result.
            times: indices into `self.times`; `slice(0, 1)` for channels without a time.
            rows: counted from the north.

        Raises:
            UserError: the store can't be read; the message names file, variable and date.
        """

    def of_members(self, numbers: Sequence[int]) -> Self:
        """Return the same source with only some of its members."""
        source = copy(self)
        source.members = tuple(numbers)
        if len(numbers) == 1 < len(self.members):
            source.where = f"{self.where}, member {numbers[0]}"
        return source

    @property
    def original(self) -> "Source":
        """The store as it is, of a source that reads another one; the first of several."""
        return self

    def set_calendar(self, calendar: Calendar) -> None:
        """Take the times for those of a calendar in which they count the same."""
        self.calendar = calendar
        self.times = self.times.astype(calendar.dtype)
        if self.time_bounds is not None:
            self.time_bounds = self.time_bounds.astype(calendar.dtype)

    def cell_layout(self) -> CellLayout:
        """Return where the values of `read_values` are."""
        if self.cells is not None:
            return self.cells.layout
        return CellLayout.of(self.grid)

    def read_values(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read as `read` does, but cells as they are stored: `(T, C, n)`, see `cell_layout`."""
        fields = self.read(channels, times, rows)
        return fields.reshape(*fields.shape[:2], -1)

    def has_times(self, variable: str) -> NDArray[np.bool_]:
        """Return at which of `times` a variable can be read, `(T,)`."""
        return np.ones(len(self.times), dtype=bool)

    def has_all_times(self, variables: Sequence[str]) -> NDArray[np.bool_]:
        """Return at which of `times` all of these variables can be read, `(T,)`."""
        has_all = np.ones(len(self.times), dtype=bool)
        for variable in variables:
            has_all &= self.has_times(variable)
        return has_all

    def sum_bounds(self, variable: str, stated: bool = True) -> Times:
        """Return begin and end of what an accumulated variable is the sum over, `(T, 2)`.

        This is what the store says or, without a word, the time since the previous one, as far
        apart as most times are. Begin and end are equal if there is only one time, and NaT at
        times that the variable lacks.

        Args:
            stated: whether to follow what the store says.
        """
        info = self.variables[variable]
        if stated and info.sums_stated_by and not info.sum_hours and self.time_bounds is not None:
            return self.time_bounds
        period = time_spacing(self.times)
        if stated and info.sum_hours:
            period = np.timedelta64(round(3600 * info.sum_hours), "s")
        return np.stack([self.times - period, self.times], axis=1)

    @abstractmethod
    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """Split the channels, in order, into groups that share no chunk with each other."""

    @abstractmethod
    def times_per_file(self, channel: Channel) -> int:
        """Return how many times share one shard of the channel, or one chunk without shards."""

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """Return the shape that is decoded at once: times, channels, rows, columns.

        This is the chunk, or the inner chunk of a shard. By default it is one channel on the
        globe.
        """
        return self.times_per_file(channel), 1, *self.grid

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        """Return the file (or store) and the chunk that hold one value, for a message.

        Args:
            time: index into `self.times`; 0 for a channel without a time.
            row: counted from the north.
        """
        return self.where

    def chunk_numbers(self, channel: Channel, times: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the number of the chunk that holds each of `times`, increasing with time.

        Times with the same number are decoded together.
        """
        return times // self.chunk_shape(channel)[0]

    @abstractmethod
    def description(self, variables: Sequence[str]) -> list[object]:
        """Return what a cached result depends on, as JSON: address, age, grid and variables."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes of chunks read since opening, without metadata and shard indices."""
        return sum(counter.data_bytes for counter in self.counters)

    @property
    def chunk_reads(self) -> int:
        """Return how many chunks (or inner chunks of shards) were read since opening."""
        return sum(counter.chunk_reads for counter in self.counters)


class SourceWrapper(Source):
    """A source that reads another one in its own way, and is otherwise like it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.where = source.where
        self.times = source.times
        self.calendar = source.calendar
        self.grid = source.grid
        self.variables = source.variables
        self.counters = source.counters
        self.title = source.title
        self.hybrid = source.hybrid
        self.time_bounds = source.time_bounds
        self.members = source.members

    def set_calendar(self, calendar: Calendar) -> None:
        super().set_calendar(calendar)
        self._source.set_calendar(calendar)

    def of_members(self, numbers: Sequence[int]) -> Self:
        source = super().of_members(numbers)
        source._source = self._source.of_members(numbers)
        return source

    @property
    def original(self) -> Source:
        return self._source.original

    def has_times(self, variable: str) -> NDArray[np.bool_]:
        return self._source.has_times(variable)

    def sum_bounds(self, variable: str, stated: bool = True) -> Times:
        return self._source.sum_bounds(variable, stated)

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        return self._source.group_by_chunk(channels)

    def times_per_file(self, channel: Channel) -> int:
        return self._source.times_per_file(channel)

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        return self._source.chunk_shape(channel)

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        return self._source.location(channel, time, row, column)

    def chunk_numbers(self, channel: Channel, times: NDArray[np.intp]) -> NDArray[np.intp]:
        return self._source.chunk_numbers(channel, times)

    def description(self, variables: Sequence[str]) -> list[object]:
        return self._source.description(variables)


def describe_members(members: Sequence[int]) -> str:
    """Return numbers of members in words, such as `10 members, 0 to 9`."""
    if len(members) < 2:
        return f"member {members[0]}" if members else "no members"
    first, last = members[0], members[-1]
    in_a_row = len(members) > 2 and list(members) == list(range(first, last + 1))
    numbers = f"{first} to {last}" if in_a_row else ", ".join(map(str, members))
    return f"{counted(len(members), 'member')}, {numbers}"


def hours_of(duration: np.timedelta64) -> float:
    """Return a duration in hours."""
    return float(duration / np.timedelta64(1, "h"))


def describe_sums(bounds: Times) -> str:
    """Return how long sums with these bounds are, such as `sums over 1 hour`."""
    periods = bounds[:, 1] - bounds[:, 0]
    hours = [hours_of(period) for period in np.unique(periods[~np.isnat(periods)])]
    if len(hours) == 1:
        return f"sums over {counted(hours[0], 'hour')}"
    return f"sums over {hours[0]:g} to {hours[-1]:g} hours"


def as_slice(indices: NDArray[np.intp]) -> Indexer:
    """Return evenly increasing indices as a slice, which zarr reads faster; others unchanged."""
    steps = np.diff(indices)
    step = int(steps[0]) if len(steps) else 1
    if len(indices) == 0 or step < 1 or np.any(steps != step):
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, step)
