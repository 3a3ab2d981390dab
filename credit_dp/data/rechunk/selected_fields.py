"""Reads the fields that `credit-dp data prepare` copies, as a run with the same config would."""

import itertools
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.cache import fingerprint
from credit_dp.data.calendar import Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.dates import date_interval
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import FieldArray
from credit_dp.data.limits import ValueLimits, check_limit_keys
from credit_dp.data.selection import select_channels, without_absent_statics
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.prepared import PreparedMetadata
from credit_dp.data.sources.source import Source, describe_members, hours_of
from credit_dp.data.store import StepReader
from credit_dp.data.units import check_units, converted_unit, is_accumulated
from credit_dp.errors import UserError


@final
class SelectedFields:
    """Reads the stored fields that a config selects; missing values (NaN) stay.

    Attributes:
        times: `(T,)`.
        grid: its rows begin in the north.
        metadata: for the attributes of the prepared store.
    """

    def __init__(self, config: DataConfig, dates: Sequence[str] = ()) -> None:
        """Open the store of a config, for the dates `(first, last)` or for all.

        Raises:
            UserError: it lacks a requested variable, level or date.
        """
        source = open_source(config)
        config = without_absent_statics(source, config)
        # Computed forcings and static fields are not copied: a run computes them again.
        channels = select_channels(source, config)
        check_units(source, config)
        stored_forcing = [
            Channel(name) for name in channels.forcing if name not in COMPUTED_FORCINGS
        ]
        self._channels = [*channels.prognostic, *channels.diagnostic, *stored_forcing]
        self._static = [Channel(name) for name in channels.static if name not in COMPUTED_STATICS]
        variables = [channel.variable for channel in (*self._channels, *self._static)]
        self._variables = list(dict.fromkeys(variables))
        differing = any(source.variables[name].has_members for name in self._variables)
        if differing and len(source.members) > 1:
            raise UserError(
                f"{source.where}: has {describe_members(source.members)}, but a prepared store has "
                "one. Choose it with data.member."
            )
        self._source = source
        self._config = config
        self._step_reader = StepReader(source, config, self._variables)
        check_limit_keys(config, [*self._channels, *self._static])
        self._limits = ValueLimits(source, config)
        self._start, stop = _date_bounds(
            self._step_reader.times, dates, source.where, source.calendar
        )
        self.times: Times = self._step_reader.times[self._start : stop]
        self.calendar = source.calendar
        self.grid = source.grid
        self.metadata = self._metadata()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the numbers of times, channels, rows and columns."""
        return len(self.times), len(self._channels), *self.grid

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Split the times into blocks `(first, stop)` of at most `size` times.

        Blocks end where the store's chunks end, so that each chunk is decoded once if `size`
        allows it.
        """
        span = slice(self._start, self._start + len(self.times))
        parts: list[tuple[int, int]] = []
        # Size 1 gives the smallest parts that end at chunk edges; they are joined up to `size`.
        for indices in self._step_reader.blocks(self._channels, span, 1):
            first, stop = int(indices[0]) - self._start, int(indices[-1]) + 1 - self._start
            if parts and stop - parts[-1][0] <= size:  # joins the block before
                first, _ = parts.pop()
            parts += itertools.pairwise([*range(first, stop, size), stop])
        return parts

    def fields(self, first: int, stop: int, rows: slice = slice(None)) -> FieldArray:
        """Read all channels at the times from `first` up to `stop`: `(T, C, rows, W)`."""
        indices = np.arange(self._start + first, self._start + stop)
        # Group by group, so that the chunks of only one group are in memory at a time.
        groups = self._source.group_by_chunk(self._channels)
        parts = [self._read(group, indices, rows) for group in groups]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def static(self) -> FieldArray:
        """Read the static channels: `(S, H, W)`."""
        fields = self._source.read(self._static, slice(0, 1), slice(None))
        self._step_reader.convert(self._static, fields)
        for index, channel in enumerate(self._static):
            self._limits.check(channel, fields[:, index], lambda _: (0, ""))
        return np.asarray(fields[0])

    def settings(self) -> dict[str, object]:
        """Return everything that the fields depend on, as JSON."""
        conversions = {name: self._config.variable_config(name).convert for name in self._variables}
        return {
            "store": self._source.where,
            "grid": list(self.shape[2:]),
            "regrid": self._config.regrid,
            "store's fingerprint": fingerprint(*self._source.description(self._variables)),
            "dates": [str(self.times[0]), str(self.times[-1]), len(self.times)],
            **({} if self.calendar.is_standard else {"calendar": self.calendar.name}),
            "data.step": self._config.step_hours,
            "variables": [channel.name for channel in (*self._channels, *self._static)],
            "summed over the step": dict(sorted(self._step_reader.summed.items())),
            "conversions": {name: text for name, text in conversions.items() if text},
        }

    def _read(
        self, channels: Sequence[Channel], indices: NDArray[np.intp], rows: slice
    ) -> FieldArray:
        """Read fields and check that their values are plausible.

        This is the last chance: a prepared store no longer knows which file a value came from.
        """

        def describe_time(time: int) -> tuple[int, str]:
            index = int(indices[time])
            date = self.calendar.text(self._step_reader.times[index])
            return self._step_reader.source_index(index), f"{date}, "

        fields = self._step_reader.read(channels, indices, rows)
        for position, channel in enumerate(channels):
            self._limits.check(channel, fields[:, position], describe_time, rows.start or 0)
        return fields

    def _metadata(self) -> PreparedMetadata:
        variables = {name: self._source.variables[name] for name in self._variables}
        return PreparedMetadata(
            channels=tuple(self._channels),
            static=tuple(channel.variable for channel in self._static),
            units={name: converted_unit(self._source, name, self._config) for name in variables},
            standard_names={name: variable.standard_name for name, variable in variables.items()},
            origin=self._source.where,
            model_levels=any(bool(variable.model_levels) for variable in variables.values()),
            title=self._source.title,
            hybrid=_hybrid_as_lists(self._source),
            sum_hours=self._sum_hours(),
            calendar=self.calendar.name,
        )

    def _sum_hours(self) -> dict[str, float]:
        """Return how many hours the written sums cover, by variable, where that is known."""
        hours: dict[str, float] = {}
        for name in dict.fromkeys(channel.variable for channel in self._channels):
            if is_accumulated(name, self._config):
                hours[name] = self._config.step_hours
            elif self._source.variables[name].sums_stated_by:
                begins, ends = self._source.sum_bounds(name).T
                periods = np.unique((ends - begins)[self._source.has_times(name)])
                if len(periods) == 1:
                    hours[name] = hours_of(periods[0])
        return hours


def _hybrid_as_lists(source: Source) -> dict[str, list[float]]:
    a, b = source.hybrid or ((), ())
    return {"a": list(map(float, a)), "b": list(map(float, b))} if len(a) else {}


def _date_bounds(
    times: Times, dates: Sequence[str], where: str, calendar: Calendar
) -> tuple[int, int]:
    """Return the index of the first time within `dates`, and the index after the last one.

    Raises:
        UserError: no time is within `dates`.
    """
    if not dates:
        return 0, len(times)
    first, last = (date_interval("dates", date, calendar) for date in dates)
    start = int(np.searchsorted(times, first[0], side="left"))
    stop = int(np.searchsorted(times, last[1], side="right"))
    if start >= stop:
        raise UserError(
            f"{where}: holds {calendar.text(times[0])} to {calendar.text(times[-1])}, but no "
            f"time from {dates[0]} to {dates[1]}. Change dates."
        )
    return start, stop
