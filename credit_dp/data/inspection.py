"""What there is to know of a store before training: grid, dates, variables, chunks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from credit_dp.data.channels import Channel
from credit_dp.data.grid import POLE, max_rows_touched, row_amplification
from credit_dp.data.sources.base import Source, Times, VariableInfo, all_names
from credit_dp.variable_names import has_short_names

CELL = 4  # bytes of a value as it is read, float32
AT_POLE = 1e-3  # degrees


@final
@dataclass(frozen=True)
class TimeGap:
    """Times that are not there, between two that are."""

    after: str
    before: str
    missing: int


@final
@dataclass(frozen=True)
class TimeAxisReport:
    """The time axis.

    Attributes:
        first, last: ISO format.
        count: how many there are.
        spacing_hours: between most of them.
        gaps: where they are further apart.
        missing: how many more there would be without gaps.
    """

    first: str
    last: str
    count: int
    spacing_hours: float
    gaps: tuple[TimeGap, ...]
    missing: int


@final
@dataclass(frozen=True)
class ChunkReport:
    """What is read at once of one variable, and what that costs a band.

    Attributes:
        shape: times, channels, rows and columns that are decoded at once.
        times_together: times in one file.
        amplification: by number of ranks: what a rank has to decode for one sample over its band's
            share, of the rank where that is most.
        decoded_bytes: by number of ranks: of the rank that has to decode most.
    """

    shape: tuple[int, int, int, int]
    times_together: int
    amplification: dict[int, float]
    decoded_bytes: dict[int, int]


@final
@dataclass(frozen=True)
class VariableReport:
    """One variable; `chunks` is None if it can't be read or doesn't change in time."""

    name: str
    timed: bool
    levels: tuple[int, ...]
    units: str
    standard_name: str
    problem: str
    chunks: ChunkReport | None


@final
@dataclass(frozen=True)
class StoreReport:
    """A whole store.

    Attributes:
        grid: rows, columns.
        latitude, longitude: first and last, in the order in which they are read.
        poles: whether rows lie on the poles.
        long_names: those under which variables are found beside their own, and where they are.
        sample_bytes: of all that changes in time, at one time.
        amplification, decoded_bytes: of all that changes in time, by number of ranks.
    """

    where: str
    form: str
    grid: tuple[int, int]
    latitude: tuple[float, float]
    longitude: tuple[float, float]
    poles: bool
    dates: TimeAxisReport
    variables: tuple[VariableReport, ...]
    long_names: dict[str, str]
    sample_bytes: int
    amplification: dict[int, float]
    decoded_bytes: dict[int, int]


def inspect_source(source: Source, domains: Sequence[int]) -> StoreReport:
    """Look at a store, reading no fields.

    Args:
        domains: numbers of ranks of which the amplification is told; those above the number of rows
            are left out.
    """
    possible = [ranks for ranks in domains if ranks <= source.grid[0]]
    variables = tuple(_report_variable(source, name, possible) for name in source.variables)
    timed = [variable for variable in variables if variable.chunks is not None]
    cells = {v.name: max(1, len(v.levels)) * math.prod(source.grid) for v in timed}
    total = sum(cells.values())
    return StoreReport(
        where=source.where,
        form=type(source).__name__.removesuffix("Source").lower(),
        grid=source.grid,
        latitude=(float(source.latitude[0]), float(source.latitude[-1])),
        longitude=(float(source.longitude[0]), float(source.longitude[-1])),
        poles=bool(POLE - np.abs(source.latitude).max() < AT_POLE),
        dates=report_time_axis(source.times),
        variables=variables,
        long_names={
            name: source.variables[name].stored
            for name in all_names(source.variables)
            if has_short_names(name) and source.variables[name].stored
        },
        sample_bytes=CELL * total,
        amplification={
            ranks: sum(cells[v.name] * v.chunks.amplification[ranks] for v in timed if v.chunks)
            / max(1, total)
            for ranks in possible
        },
        decoded_bytes={
            ranks: sum(v.chunks.decoded_bytes[ranks] for v in timed if v.chunks)
            for ranks in possible
        },
    )


def report_time_axis(times: Times) -> TimeAxisReport:
    """The times, and where some are missing."""
    steps = np.diff(times)
    values, counts = np.unique(steps, return_counts=True)
    spacing = values[np.argmax(counts)] if len(values) else np.timedelta64(0, "ns")
    gaps = tuple(
        TimeGap(
            _format_minute(times[place]),
            _format_minute(times[place + 1]),
            int(steps[place] / spacing) - 1,
        )
        for place in np.flatnonzero(steps > spacing)
    )
    return TimeAxisReport(
        first=_format_minute(times[0]),
        last=_format_minute(times[-1]),
        count=len(times),
        spacing_hours=float(spacing / np.timedelta64(1, "h")),
        gaps=gaps,
        missing=sum(gap.missing for gap in gaps),
    )


def amplification(
    chunk: tuple[int, int, int, int], channels: int, height: int, ranks: int
) -> float:
    """What a rank decodes for its band of one time over what it needs, of the worst rank.

    Args:
        chunk: times, channels, rows and columns of one.
        channels: that are needed, one after the other in the store.
    """
    return _fields_decoded(chunk, channels) * row_amplification(height, ranks, chunk[2])


def _fields_decoded(chunk: tuple[int, int, int, int], channels: int) -> float:
    """Fields that come out of the chunks for each that is needed."""
    touched = -(-channels // chunk[1]) * chunk[1]
    return chunk[0] * touched / channels


def _report_variable(source: Source, name: str, domains: Sequence[int]) -> VariableReport:
    variable = source.variables[name]
    chunks = None
    if variable.timed and not variable.problem:
        chunks = _report_chunks(source, name, variable, domains)
    return VariableReport(
        name,
        variable.timed,
        variable.levels,
        variable.units,
        variable.standard_name,
        variable.problem,
        chunks,
    )


def _report_chunks(
    source: Source, name: str, variable: VariableInfo, domains: Sequence[int]
) -> ChunkReport:
    channels = [Channel(name, level) for level in variable.levels or (None,)]
    chunk = source.chunk_shape(channels[0])
    # Chunks may hold other variables too: those count as wanted, for a sample has them all.
    everything = [
        Channel(other, level)
        for other, found in source.variables.items()
        if found.timed and not found.problem
        for level in found.levels or (None,)
    ]
    group = next(x for x in source.group_by_chunk(everything) if channels[0] in x)
    height, width = source.grid
    found = {ranks: amplification(chunk, len(group), height, ranks) for ranks in domains}
    row_bytes = CELL * len(channels) * width * _fields_decoded(chunk, len(group))
    decoded = {
        ranks: round(row_bytes * max_rows_touched(height, ranks, chunk[2])) for ranks in domains
    }
    return ChunkReport(chunk, source.times_together(channels[0]), found, decoded)


def _format_minute(time: np.datetime64) -> str:
    return str(time.astype("M8[m]"))
