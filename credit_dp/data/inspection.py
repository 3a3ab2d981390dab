"""Reports on a store before training: grid, dates, variables, chunks and read amplification.

`inspect_source` returns a `StoreReport` without reading any fields.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from credit_dp.bands import max_rows_touched, row_amplification
from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.channels import Channel
from credit_dp.data.dates import time_spacing
from credit_dp.data.grid import POLE, Grid, turns, unit_vectors
from credit_dp.data.sources.source import Source, VariableInfo, all_names
from credit_dp.data.winds import describe_winds, lies_along_grid, other_component
from credit_dp.variable_names import has_short_names

CELL = 4  # bytes of a float32 value
AT_POLE = 1e-3  # degrees
EARTH_RADIUS_KM = 6371.0


@final
@dataclass(frozen=True)
class TimeGap:
    """Missing times between two times of the store."""

    after: str
    before: str
    missing: int


@final
@dataclass(frozen=True)
class TimeAxisReport:
    """The time axis.

    Attributes:
        first, last: in ISO format.
        spacing_hours: the most common distance; None of one time.
        spacing_months: the most common distance in months, if they are months apart; else 0.
        gaps: larger distances.
        missing: number of missing times in all gaps.
    """

    first: str
    last: str
    count: int
    spacing_hours: float | None
    gaps: tuple[TimeGap, ...]
    missing: int
    spacing_months: int = 0
    calendar: str = "standard"


@final
@dataclass(frozen=True)
class ChunkReport:
    """The chunks of one variable and the cost of reading a band of rows from them.

    Attributes:
        shape: times, channels, rows and columns of a chunk.
        times_together: times in one file.
        amplification: by number of ranks, bytes that a rank decodes for one sample divided by bytes
            that it needs, for the worst rank.
        decoded_bytes: by number of ranks, bytes that the worst rank decodes for one sample.
    """

    shape: tuple[int, int, int, int]
    times_together: int
    amplification: dict[int, float]
    decoded_bytes: dict[int, int]


@final
@dataclass(frozen=True)
class VariableReport:
    """One variable; `chunks` is None if it can't be read or is static."""

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
    """A store.

    Attributes:
        form: kind of source, such as `zarr`.
        latitude, longitude: first and last, in reading order; see `Grid.extent`.
        poles: whether there are rows on the poles.
        projection: the CF name of the projection of a region; empty without one.
        spacing: of the region's rows and columns, and whether these go round the globe.
        winds: on a projection, the components of winds by how they lie; empty on other grids.
        long_names: the long names that a config may use, with the store's own name of each.
        sample_bytes: of all time-dependent variables at one time.
        amplification, decoded_bytes: by number of ranks, of all time-dependent variables.
        row_amplification: the part of the amplification, a factor, that is due to rows; the rest is
            due to times and levels.
    """

    where: str
    form: str
    grid: tuple[int, int]
    latitude: tuple[float, float]
    longitude: tuple[float, float]
    poles: bool
    is_global: bool
    projection: str
    spacing: str
    winds: dict[str, list[str]]
    dates: TimeAxisReport
    members: tuple[int, ...]
    variables: tuple[VariableReport, ...]
    long_names: dict[str, str]
    sample_bytes: int
    amplification: dict[int, float]
    row_amplification: dict[int, float]
    decoded_bytes: dict[int, int]


def inspect_source(source: Source, domains: Sequence[int]) -> StoreReport:
    """Report on a store without reading fields.

    Args:
        domains: numbers of ranks to report the amplification for; numbers above the number of rows
            are left out.
    """
    possible_ranks = [ranks for ranks in domains if ranks <= source.grid[0]]
    variables = tuple(_report_variable(source, name, possible_ranks) for name in source.variables)
    readable = [variable for variable in variables if variable.chunks is not None]
    cells = {v.name: max(1, len(v.levels)) * math.prod(source.grid) for v in readable}
    total_cells = sum(cells.values())
    latitude, longitude = source.grid.extent
    timed = [name for name, x in source.variables.items() if x.has_time and not x.problem]
    common_times = source.times[source.has_all_times(timed)]
    return StoreReport(
        where=source.where,
        form=type(source).__name__.removesuffix("Source").lower(),
        grid=source.grid.shape,
        latitude=latitude,
        longitude=longitude,
        poles=bool(POLE - np.abs(source.latitude).max() < AT_POLE),
        is_global=source.grid.is_global,
        projection=_projection(source.grid),
        spacing=_spacing(source.grid),
        winds=_winds(source),
        dates=report_time_axis(common_times, source.calendar),
        members=source.members,
        variables=variables,
        long_names={
            name: source.variables[name].stored_name
            for name in all_names(source.variables)
            if has_short_names(name) and source.variables[name].stored_name
        },
        sample_bytes=CELL * total_cells,
        amplification={
            ranks: sum(cells[v.name] * v.chunks.amplification[ranks] for v in readable if v.chunks)
            / max(1, total_cells)
            for ranks in possible_ranks
        },
        row_amplification={
            ranks: sum(
                cells[v.name] * row_amplification(source.grid[0], ranks, v.chunks.shape[2])
                for v in readable
                if v.chunks
            )
            / max(1, total_cells)
            for ranks in possible_ranks
        },
        decoded_bytes={
            ranks: sum(v.chunks.decoded_bytes[ranks] for v in readable if v.chunks)
            for ranks in possible_ranks
        },
    )


def _projection(grid: Grid) -> str:
    if not grid.is_projected:
        return ""
    attributes = grid.projection.attributes
    return str(attributes.get("grid_mapping_name") or "unnamed projection")


def _spacing(grid: Grid) -> str:
    if grid.is_global:
        return ""
    if not grid.is_projected:
        steps = (np.abs(turns(axis)).mean() for axis in (grid.latitude, grid.longitude))
        size = " x ".join(f"{step:.4g}" for step in steps) + " degrees"
        return size + (", columns round the globe" if grid.is_periodic else "")
    row, column = (size // 2 for size in grid)
    near = slice(row - 1, row + 1), slice(column - 1, column + 1)
    points = unit_vectors(grid.latitude[near], grid.longitude[near])
    apart = [
        np.linalg.norm(points[:, 1, 1] - other) for other in (points[:, 0, 1], points[:, 1, 0])
    ]
    return " x ".join(f"{EARTH_RADIUS_KM * step:.4g}" for step in apart) + " km in the middle"


def _winds(source: Source) -> dict[str, list[str]]:
    winds: dict[str, list[str]] = {}
    for name, variable in source.variables.items() if source.grid.is_projected else ():
        along_grid = lies_along_grid(variable.standard_name, source.grid)
        if not variable.problem and (along_grid or other_component(name)):
            assumed = ", as no standard name says otherwise" if along_grid is None else ""
            winds.setdefault(describe_winds(along_grid) + assumed, []).append(name)
    return winds


def report_time_axis(times: Times, calendar: Calendar = STANDARD) -> TimeAxisReport:
    """Return a report on times and their gaps, counted in months if times are months apart."""
    months = _months(times, calendar)
    steps = np.diff(times if months is None else months)
    spacing = time_spacing(times if months is None else months)
    # Times that are closer than usual are no gaps.
    gaps = tuple(
        TimeGap(
            calendar.text(times[index]),
            calendar.text(times[index + 1]),
            int(steps[index] / spacing) - 1,
        )
        for index in np.flatnonzero(steps > spacing)
    )
    return TimeAxisReport(
        first=calendar.text(times[0]),
        last=calendar.text(times[-1]),
        count=len(times),
        spacing_hours=float(time_spacing(times) / np.timedelta64(1, "h")) if len(steps) else None,
        gaps=gaps,
        missing=sum(gap.missing for gap in gaps),
        spacing_months=0 if months is None else int(spacing / np.timedelta64(1, "M")),
        calendar=calendar.name,
    )


def _months(times: Times, calendar: Calendar) -> Times | None:
    """Return the months of times that are whole months apart; None if some are not.

    Their days may differ by three: means of months are dated at the first, the last or the middle.
    """
    months = calendar.months(times)
    days = (times - calendar.starts(months)) / np.timedelta64(1, "D")
    apart = np.diff(times) >= np.timedelta64(28, "D")
    return months if len(times) > 1 and apart.all() and np.ptp(days) <= 3 else None


def band_read_amplification(
    chunk: tuple[int, int, int, int], channels: int, height: int, ranks: int
) -> float:
    """Return values decoded divided by values needed for the band of the worst rank at one time.

    Args:
        chunk: times, channels, rows and columns of a chunk.
        channels: number of channels needed, adjacent in the store.
    """
    return _fields_decoded(chunk, channels) * row_amplification(height, ranks, chunk[2])


def _fields_decoded(chunk: tuple[int, int, int, int], channels: int) -> float:
    """Return the number of fields decoded for each field needed."""
    # Adjacent channels need whole chunks of channels, and every chunk holds all of its times.
    touched = -(-channels // chunk[1]) * chunk[1]
    return chunk[0] * touched / channels


def _report_variable(source: Source, name: str, domains: Sequence[int]) -> VariableReport:
    variable = source.variables[name]
    chunks = None
    if variable.has_time and not variable.problem:
        chunks = _report_chunks(source, name, variable, domains)
    return VariableReport(
        name=name,
        timed=variable.has_time,
        levels=variable.levels,
        units=variable.units,
        standard_name=variable.standard_name,
        problem=variable.problem,
        chunks=chunks,
    )


def _report_chunks(
    source: Source, name: str, variable: VariableInfo, domains: Sequence[int]
) -> ChunkReport:
    channels = [Channel(name, level) for level in variable.levels or (None,)]
    chunk = source.chunk_shape(channels[0])
    # A chunk may hold other variables, too. They count as needed, since a sample has all variables.
    all_channels = [
        Channel(other, level)
        for other, info in source.variables.items()
        if info.has_time and not info.problem
        for level in info.levels or (None,)
    ]
    group = next(x for x in source.group_by_chunk(all_channels) if channels[0] in x)
    height, width = source.grid
    amplification = {
        ranks: band_read_amplification(chunk, len(group), height, ranks) for ranks in domains
    }
    row_bytes = CELL * len(channels) * width * _fields_decoded(chunk, len(group))
    decoded_bytes = {
        ranks: round(row_bytes * max_rows_touched(height, ranks, chunk[2])) for ranks in domains
    }
    return ChunkReport(
        shape=chunk,
        times_together=source.times_per_file(channels[0]),
        amplification=amplification,
        decoded_bytes=decoded_bytes,
    )
