"""What every form of store offers: coordinates, variables, and fields of some rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.schema import Channel

Fields = NDArray[np.float32]
Times = NDArray[np.datetime64]
Places = slice | NDArray[np.intp]


@final
@dataclass(frozen=True)
class Variable:
    """What a source says of one variable before any field is read.

    Attributes:
        timed: whether it changes in time.
        levels: the levels it has, as in the store; empty if it is on none.
        units, standard_name: as the source gives them; empty if it gives none.
        problem: why it can't be read, after its name; empty if it can.
        model_levels: its levels are those of a model, by number, not of pressure.
        stored: what the store calls it, where that is another name.
    """

    timed: bool
    levels: tuple[int, ...] = ()
    units: str = ""
    standard_name: str = ""
    problem: str = ""
    model_levels: bool = False
    stored: str = ""


class Counter(Protocol):
    """Counts what is read of one place."""

    data_bytes: int
    chunk_reads: int


@final
@dataclass(frozen=True)
class Aliased(Mapping[str, Variable]):
    """Variables by name; those of `aliases` are found as well, but not listed."""

    listed: Mapping[str, Variable]
    aliases: Mapping[str, Variable]

    def __getitem__(self, name: str) -> Variable:
        return self.listed[name] if name in self.listed else self.aliases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


def names_of(variables: Mapping[str, Variable]) -> list[str]:
    """All names that are found, listed or not."""
    aliases = variables.aliases if isinstance(variables, Aliased) else ()
    return list(dict.fromkeys([*variables, *aliases]))


def is_listed(name: str, variables: Mapping[str, Variable]) -> bool:
    """Whether it is a name that the store itself has."""
    return name in (variables.listed if isinstance(variables, Aliased) else variables)


class Source(ABC):
    """An open store, checked: fields as float32, row 0 northernmost.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        where: its address, as messages name it.
        times: `(T,)` datetime64[ns], rising, perhaps with gaps.
        latitude: `(H,)` degrees, falling.
        longitude: `(W,)` degrees, in the store's order.
        variables: by their names in the config.
        counters: what counts the reads, one for each place that is read.
        title: what the store says that it is, if it does.
    """

    where: str
    times: Times
    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    variables: Mapping[str, Variable]
    counters: Sequence[Counter]
    title: str = ""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.latitude), len(self.longitude)

    @abstractmethod
    def read(self, channels: Sequence[Channel], places: Places, rows: slice) -> Fields:
        """Some channels at some places of `times`: `(T, C, rows, W)`, NaN where there is no value.

        All of them change in time, or none: then `places` is `slice(0, 1)`. A chunk that holds
        several of what is asked for is read once.

        Raises:
            UserError: what is on disk cannot be read; names file, variable and date.
        """

    @abstractmethod
    def together(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """The channels in groups, in order, of which each shares its chunks with no other."""

    @abstractmethod
    def times_together(self, channel: Channel) -> int:
        """Times that lie in one shard of the channel or, without shards, in one chunk."""

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """What is decoded at once: times, channels, rows, columns. Here one channel's whole globe.

        Of shards, the inner chunk.
        """
        return self.times_together(channel), 1, *self.grid

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """The file or store, and the chunk, that one value was read from, for a message.

        Args:
            place: in `times`; 0 for what does not change in time.
            row: counted from the north.
        """
        return self.where

    def chunk_numbers(self, channel: Channel, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return for each of some places of `times` the number of its chunk, rising with time.

        Places of one number are decoded at once.
        """
        return places // self.chunk_shape(channel)[0]

    @abstractmethod
    def description(self, variables: Sequence[str]) -> list[object]:
        """What a cached result depends on, as JSON: where, how old, coordinates, variables."""

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read since opening, without metadata and shard indices."""
        return sum(counter.data_bytes for counter in self.counters)

    @property
    def chunk_reads(self) -> int:
        """Chunks, or inner chunks of shards, read since opening."""
        return sum(counter.chunk_reads for counter in self.counters)


def as_slice(places: NDArray[np.intp]) -> Places:
    """The same places as a slice if they rise evenly, which zarr reads faster, else unchanged."""
    steps = np.diff(places)
    step = int(steps[0]) if len(steps) else 1
    if len(places) == 0 or step < 1 or np.any(steps != step):
        return places
    return slice(int(places[0]), int(places[-1]) + 1, step)
