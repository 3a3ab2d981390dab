"""Reads the stores that `credit-dp data prepare` writes, and defines their format.

One array `fields` holds all channels of a time in one shard, cut into bands of latitude, and one
array `static` the fields without a time. `rechunk/target.py` writes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
import xarray as xr
import zarr

from credit_dp.data.calendar import Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray, Grid
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.coordinates import check_coordinates, projected_grid
from credit_dp.data.sources.names import StoredNames
from credit_dp.data.sources.source import Indexer, Source, VariableInfo
from credit_dp.data.sources.stacked import (
    StackedArray,
    describe_source,
    get_array,
    open_shard_reader,
    open_stacked,
    read_array,
    times_dataset,
)
from credit_dp.data.sources.storage import CountingStore, StoreChangeDetector
from credit_dp.errors import UserError

METADATA_ATTRIBUTE = "credit_dp"
FORMAT_VERSION = 1


@final
@dataclass(frozen=True)
class PreparedMetadata:
    """The metadata in the attributes of a prepared store; an older one lacks some of the last.

    Attributes:
        channels: the channels of the array `fields`, in order.
        static: the fields of the array `static`, in order.
        units, standard_names: by variable; empty where the source gave none.
        origin: the store that the fields came from, for people.
        model_levels: whether levels are numbers of model levels, not pressures.
        title: the title of the source.
        hybrid: coefficients `a` and `b` of all model levels, see `Source`; empty if there are none.
        sum_hours: by accumulated variable, how many hours before each time its sums cover.
        calendar: the name of the calendar, as in `Calendar`.
    """

    channels: tuple[Channel, ...]
    static: tuple[str, ...]
    units: dict[str, str]
    standard_names: dict[str, str]
    origin: str
    model_levels: bool = False
    title: str = ""
    hybrid: dict[str, list[float]] = field(default_factory=dict)
    sum_hours: dict[str, float] = field(default_factory=dict)
    calendar: str = "standard"

    def attributes(self) -> dict[str, Any]:
        """Return the metadata as JSON for a zarr attribute."""
        attributes = {"form": FORMAT_VERSION, **asdict(self)}
        if Calendar(self.calendar).is_standard:
            del attributes["calendar"]  # as in older stores
        return attributes

    @classmethod
    def of(cls, attributes: Any, where: str) -> "PreparedMetadata":
        """Read the metadata that `attributes()` returned.

        Raises:
            UserError: they have another format version, or are damaged.
        """
        try:
            if attributes["form"] != FORMAT_VERSION:
                raise ValueError
            known = cls.__dataclass_fields__
            given = {name: attributes[name] for name in known if name in attributes}
            given["channels"] = tuple(Channel(**channel) for channel in given["channels"])
            given["static"] = tuple(given["static"])
            return cls(**given)
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{where}: is not a prepared store of format version {FORMAT_VERSION}. "
                "Prepare it again with `credit-dp data prepare`."
            ) from None


ARRAYS = ("fields", "static")


@final
class PreparedSource(Source):
    """A source that reads one prepared store; adjacent channels are one read of `fields`."""

    def __init__(self, group: zarr.Group, store: CountingStore, address: str) -> None:
        where = redact_secrets(address)
        metadata = PreparedMetadata.of(group.attrs.get(METADATA_ATTRIBUTE), where)
        self.where = where
        self._address = address
        self.title = metadata.title
        if metadata.hybrid:
            a, b = (np.array(metadata.hybrid[name], np.float64) for name in ("a", "b"))
            self.hybrid = a, b
        self.calendar = Calendar(metadata.calendar)
        units = str(get_array(group, "time", where).attrs.get("units"))
        self.times: Times = self.calendar.decode(read_array(group, "time", where), units)
        latitude, longitude = (
            read_array(group, name, where).astype(float) for name in ("latitude", "longitude")
        )
        self.grid = Grid(latitude, longitude)
        if self.grid.is_projected:
            dataset = xr.open_zarr(group.store, consolidated=False, decode_times=False, chunks=None)
            self.grid = projected_grid(dataset) or self.grid
        check_coordinates(times_dataset(self), where, grid=self.grid)
        if self.grid.rises:
            raise UserError(
                f"{where}: latitude has to decrease in a prepared store, but increases. Prepare it "
                "again with `credit-dp data prepare`."
            )
        names = StoredNames.of(_variables(metadata))
        self.variables: Mapping[str, VariableInfo] = names.variables
        channels = {channel: index for index, channel in enumerate(metadata.channels)}
        constants = {Channel(name): index for index, name in enumerate(metadata.static)}
        self._channel_indices = names.under_all_names(channels)
        self._static_indices = names.under_all_names(constants)
        change_detector = StoreChangeDetector(address, ARRAYS)
        open_reader = partial(open_shard_reader, address, store=store)
        fields = get_array(group, "fields", where)
        self._fields = StackedArray(
            fields, where, self.times, change_detector, open_reader("fields"), self.calendar
        )
        # Coordinates and attributes are separate files: a copy that was interrupted may lack some.
        self._check("fields", self._fields, (len(self.times), len(channels), *self.grid))
        # Without static fields, no channel refers to `_static`.
        self._static = self._fields
        if metadata.static:
            static = get_array(group, "static", where)
            self._static = StackedArray(static, where, None, change_detector, open_reader("static"))
            self._check("static", self._static, (len(metadata.static), *self.grid))
        self.counters = [store]
        store.reset()

    @classmethod
    def open(cls, where: str) -> "PreparedSource":
        """Open the store at a path or address.

        Raises:
            UserError: there is no store, it has another format version, or it is damaged.
        """
        return cls(*open_stacked(where, ARRAYS), where)

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        """Read channels, all of them with a time or all without."""
        array, indices = self._fields, self._channel_indices
        if channels[0] in self._static_indices:
            array, indices = self._static, self._static_indices
        return array.read(times, [indices[channel] for channel in channels], (rows, slice(None)))

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """Return one group: all channels share their chunks."""
        return [list(channels)]

    def times_per_file(self, channel: Channel) -> int:
        """Return how many times a shard holds."""
        return self._fields.times_per_file

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """Return the chunks of the fields: times, channels, rows, columns."""
        times, channels, rows, columns = self._fields.array.chunks
        return times, channels, rows, columns

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        """Name the chunk that holds a value."""
        if channel in self._static_indices:
            index = self._static_indices[channel]
            return f"{self.where}, {self._static.chunk_name((index, row, column))}"
        indices = (time, self._channel_indices[channel], row, column)
        return f"{self.where}, {self._fields.chunk_name(indices)}"

    def description(self, variables: Sequence[str]) -> list[object]:
        """Describe the content, for the fingerprint of what is computed from it."""
        return describe_source(self, self._address, variables, ARRAYS)

    def _check(self, name: str, array: StackedArray, shape: tuple[int, ...]) -> None:
        """Refuse an array whose shape differs from that of its coordinates."""
        if array.array.shape != shape:
            raise UserError(
                f"{self.where}: {name} needs the shape {shape} of its coordinates, but has "
                f"{array.array.shape}. Prepare it again with `credit-dp data prepare`."
            )


def _variables(metadata: PreparedMetadata) -> dict[str, VariableInfo]:
    levels: dict[str, tuple[int, ...]] = {}
    for channel in metadata.channels:
        level = () if channel.level is None else (channel.level,)
        # Levels in the order of the channels.
        levels[channel.variable] = levels.get(channel.variable, ()) + level
    return {
        name: VariableInfo(
            name in levels,
            levels.get(name, ()),
            metadata.units.get(name, ""),
            metadata.standard_names.get(name, ""),
            model_levels=metadata.model_levels and bool(levels.get(name)),
            sums_stated_by="attributes" if metadata.sum_hours.get(name) else "",
            sum_hours=metadata.sum_hours.get(name, 0.0),
        )
        for name in (*levels, *metadata.static)
    }
