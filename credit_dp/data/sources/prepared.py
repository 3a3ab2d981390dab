"""Stores that `credit-dp data prepare` wrote: all channels stacked, cut by latitude."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.sources.address import redact_secrets
from credit_dp.data.sources.base import (
    Fields,
    Indexer,
    Source,
    Times,
    VariableInfo,
    check_coordinates,
)
from credit_dp.data.sources.stacked import (
    StackedArray,
    coordinate_dataset,
    describe_source,
    get_array,
    open_shard_reader,
    open_stacked,
    read_array,
)
from credit_dp.data.sources.storage import CountingStore, StoreChangeDetector
from credit_dp.data.sources.stored_names import StoredNames
from credit_dp.errors import UserError

METADATA_ATTRIBUTE = "credit_dp"
FORMAT_VERSION = 1
TIME_UNITS = "hours since 1900-01-01"
EPOCH = np.datetime64("1900-01-01", "h")


@final
@dataclass(frozen=True)
class PreparedMetadata:
    """What the attributes of a prepared store say.

    Attributes:
        channels: of `fields`, in order.
        static: of `static`, in order.
        units, standard_names: by variable; empty where the source gave none.
        origin: where the fields came from, for people.
        model_levels: levels are those of a model, by number, not of pressure.
        title: what the source said that it is.
    """

    channels: tuple[Channel, ...]
    static: tuple[str, ...]
    units: dict[str, str]
    standard_names: dict[str, str]
    origin: str
    model_levels: bool = False
    title: str = ""

    def attributes(self) -> dict[str, Any]:
        """As JSON."""
        return {"form": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def of(cls, attributes: Any, where: str) -> "PreparedMetadata":
        """What `attributes` made.

        Raises:
            UserError: they are of another form, or damaged.
        """
        try:
            if attributes["form"] != FORMAT_VERSION:
                raise ValueError
            return cls(
                tuple(Channel(**channel) for channel in attributes["channels"]),
                tuple(attributes["static"]),
                dict(attributes["units"]),
                dict(attributes["standard_names"]),
                str(attributes["origin"]),
                bool(attributes.get("model_levels", False)),  # earlier versions did not say
                str(attributes.get("title", "")),  # stores of before don't have it
            )
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{where}: is not a store that this version prepared (form {FORMAT_VERSION}). "
                "Prepare it again with `credit-dp data prepare`."
            ) from None


ARRAYS = ("fields", "static")


@final
class PreparedSource(Source):
    """One prepared store: a read of neighbouring channels is one read of `fields`."""

    def __init__(self, group: zarr.Group, disk: CountingStore, address: str) -> None:
        where = redact_secrets(address)
        form = PreparedMetadata.of(group.attrs.get(METADATA_ATTRIBUTE), where)
        self.where, self._address = where, address
        self.title = form.title
        hours = read_array(group, "time", where).astype("timedelta64[h]")
        self.times: Times = (EPOCH + hours).astype("datetime64[ns]")
        self.latitude: NDArray[np.float64] = read_array(group, "latitude", where).astype(float)
        self.longitude: NDArray[np.float64] = read_array(group, "longitude", where).astype(float)
        check_coordinates(coordinate_dataset(self), where)
        if self.latitude[0] < self.latitude[-1]:
            raise UserError(
                f"{where}: latitude has to fall in a prepared store, but rises. Prepare it again "
                "with `credit-dp data prepare`."
            )
        names = StoredNames.of(_variables(form))
        self.variables: Mapping[str, VariableInfo] = names.variables
        channels = {channel: place for place, channel in enumerate(form.channels)}
        constants = {Channel(name): place for place, name in enumerate(form.static)}
        self._channel_indices = names.under_all_names(channels)
        self._static_indices = names.under_all_names(constants)
        watch = StoreChangeDetector(address, ARRAYS)
        quick = partial(open_shard_reader, address, disk=disk)
        fields = get_array(group, "fields", where)
        self._fields = StackedArray(fields, where, self.times, watch, quick("fields"))
        self._check("fields", self._fields, (len(self.times), len(channels), *self.grid))
        self._static = self._fields
        if form.static:
            static = get_array(group, "static", where)
            self._static = StackedArray(static, where, None, watch, quick("static"))
            self._check("static", self._static, (len(form.static), *self.grid))
        self.counters = [disk]
        disk.reset()

    @classmethod
    def open(cls, where: str) -> "PreparedSource":
        """Open the store at a path or address.

        Raises:
            UserError: there is none, or it is of another form, or damaged.
        """
        return cls(*open_stacked(where, ARRAYS), where)

    def read(self, channels: Sequence[Channel], places: Indexer, rows: slice) -> Fields:
        """See `Source`."""
        if channels[0] in self._static_indices:
            of_static = [self._static_indices[channel] for channel in channels]
            return self._static.read(places, of_static, (rows, slice(None)))
        return self._fields.read(
            places, [self._channel_indices[channel] for channel in channels], (rows, slice(None))
        )

    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """See `Source`: all of them."""
        return [list(channels)]

    def times_together(self, channel: Channel) -> int:
        """See `Source`."""
        return self._fields.times_together

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """See `Source`."""
        times, channels, rows, columns = self._fields.array.chunks
        return times, channels, rows, columns

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """See `Source`."""
        if channel in self._static_indices:
            number = self._static_indices[channel]
            return f"{self.where}, {self._static.chunk_name((number, row, column))}"
        at = (place, self._channel_indices[channel], row, column)
        return f"{self.where}, {self._fields.chunk_name(at)}"

    def description(self, variables: Sequence[str]) -> list[object]:
        """See `Source`."""
        return describe_source(self, self._address, variables)

    def _check(self, name: str, array: StackedArray, shape: tuple[int, ...]) -> None:
        """Refuse an array that is not as long as its coordinates say."""
        if array.array.shape != shape:
            raise UserError(
                f"{self.where}: {name} needs the shape {shape} of its coordinates, but has "
                f"{array.array.shape}. Prepare it again with `credit-dp data prepare`."
            )


def _variables(form: PreparedMetadata) -> dict[str, VariableInfo]:
    levels: dict[str, tuple[int, ...]] = {}
    for channel in form.channels:
        level = () if channel.level is None else (channel.level,)
        levels[channel.variable] = levels.get(channel.variable, ()) + level
    found = {name: _variable(form, name, True, levels[name]) for name in levels}
    return found | {name: _variable(form, name, False, ()) for name in form.static}


def _variable(
    form: PreparedMetadata, name: str, timed: bool, levels: tuple[int, ...]
) -> VariableInfo:
    units, standard_name = form.units.get(name, ""), form.standard_names.get(name, "")
    model_levels = form.model_levels and bool(levels)
    return VariableInfo(timed, levels, units, standard_name, model_levels=model_levels)
