"""A source as a run steps through it: the times that count, sums over a step, units as wanted."""

from collections.abc import Iterable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.accumulate import is_accumulated, on_step, spacing, windows
from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import Fields, Source, Times, as_slice
from credit_dp.data.units import conversion
from credit_dp.errors import UserError


@final
class Stepped:
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
        places = places_on_step(source.times, config, source.where)
        finer = np.timedelta64(0) < spacing(source.times) < step
        self.summed = frozenset(n for n in named if finer and is_accumulated(n, config))
        self._windows = places[:, None]
        if self.summed:
            self._windows = windows(source.times, places, step)
        complete = (self._windows >= 0).all(axis=1)
        self._windows = self._windows[complete]
        self._places = places[complete]
        if not len(self._places):
            raise UserError(
                f"{source.where}: no time has all of the {config.step} before it, which "
                f"{min(self.summed)} is summed over. Change data.step, or "
                f"data.variables.{min(self.summed)}.accumulated to false."
            )
        self.times: Times = source.times[self._places]
        self.skipped = int(np.count_nonzero(~complete))
        texts = {name: config.of(name).convert for name in named}
        self._conversions = {name: conversion(text) for name, text in texts.items() if text}

    def read(self, channels: Sequence[Channel], places: NDArray[np.intp], rows: slice) -> Fields:
        """Channels that change in time at some places of `times`: `(T, C, rows, W)`.

        Channels that are not summed are read at once, and so are the others.
        """
        summed = [channel for channel in channels if channel.variable in self.summed]
        plain = [channel for channel in channels if channel.variable not in self.summed]
        if not summed:
            fields = self._source.read(channels, as_slice(self._places[places]), rows)
        elif not plain:
            fields = self._sums(channels, places, rows)
        else:
            fields = self._both(channels, plain, summed, places, rows)
        self.convert(channels, fields)
        return fields

    def source_place(self, place: int) -> int:
        """Where one of `times` is among the source's times."""
        return int(self._places[place])

    def chunk_numbers(self, channel: Channel, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return for each of some places of `times` the number of the source's chunk; see `Source`.

        Of a channel that is summed, the chunk of the last time of the sum.
        """
        return self._source.chunk_numbers(channel, self._places[places])

    def blocks(self, channels: Sequence[Channel], span: slice, size: int) -> list[NDArray[np.intp]]:
        """The places of `span` in turn, about `size` at once, cut at chunk edges where they can be.

        Of channels that are summed, fewer at once: all that is added up is in memory.
        """
        places = np.arange(span.start, span.stop)
        if any(channel.variable in self.summed for channel in channels):
            size = max(1, size // self._windows.shape[1])
        stride = int(np.diff(self._places).min()) if len(self._places) > 1 else 1
        chunk = self._source.times_together(channels[0])
        length = -(-size * stride // chunk) * chunk
        parts = self._places[places] // length
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

    def _both(
        self,
        channels: Sequence[Channel],
        plain: Sequence[Channel],
        summed: Sequence[Channel],
        places: NDArray[np.intp],
        rows: slice,
    ) -> Fields:
        first = self._source.read(plain, as_slice(self._places[places]), rows)
        shape = (len(places), len(channels), *first.shape[2:])
        fields = np.empty(shape, dtype=np.float32)
        is_sum = np.array([channel.variable in self.summed for channel in channels])
        fields[:, ~is_sum] = first
        fields[:, is_sum] = self._sums(summed, places, rows)
        return fields


def places_on_step(times: Times, config: DataConfig, where: str) -> NDArray[np.intp]:
    """The places of the times on `data.step`; see `on_step`.

    Raises:
        UserError: no two times in a row are a step apart; `where` names them.
    """
    apart = int(spacing(times) / np.timedelta64(1, "s"))
    step = 3600 * config.step_hours
    if apart and apart % step and step % apart:
        raise UserError(
            f"{where}: its times are {apart / 3600:g} hours apart, so no two of them in a "
            f"row are {config.step} apart. Set data.step to a multiple of {apart / 3600:g}h."
        )
    return on_step(times, np.timedelta64(config.step_hours, "h").astype("m8[ns]"))
