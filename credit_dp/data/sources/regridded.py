"""Regrids a store while it is read: each rank reads the source rows that its target rows need."""

import logging
from collections.abc import Sequence
from typing import final

import numpy as np

from credit_dp.config import DataConfig
from credit_dp.config.data import CONSERVATIVE, ROWS
from credit_dp.data.channels import Channel
from credit_dp.data.grid import FieldArray, degrees_east, parse_grid
from credit_dp.data.regrid import regridder_to, regular_grid
from credit_dp.data.sources.source import Indexer, Source, SourceWrapper
from credit_dp.errors import UserError

logger = logging.getLogger(__name__)


def regridded(source: Source, config: DataConfig) -> Source:
    """Return a source on `data.grid`; the source itself if it is on it, or without a grid."""
    cells = source.cells if source.cells is not None and not source.cells.is_regular else None
    if config.regrid == ROWS and cells is None:
        raise UserError(
            f"{source.where}: data.regrid={ROWS} is for cells in rows of different lengths, but "
            f"its rows all have {source.grid[1]} columns. Leave data.regrid out."
        )
    if config.grid is None:
        if cells is not None:
            logger.info("%s, read as %d rows of %d columns", cells.description, *source.grid)
        return source
    rows, columns = parse_grid(config.grid)
    if rows < 2:
        raise UserError(f"data.grid: needs at least two rows, got {config.grid}. Change data.grid.")
    source.grid.check_global(f"{source.where}: data.grid={config.grid}", "Leave data.grid out.")
    if cells is None and source.grid.difference(regular_grid(rows, columns)) is None:
        return source
    return RegriddedSource(source, rows, columns, config.regrid or CONSERVATIVE)


@final
class RegriddedSource(SourceWrapper):
    """A source on the usual grid of some size, regridded from a source on another one."""

    def __init__(self, source: Source, rows: int, columns: int, method: str) -> None:
        super().__init__(source)
        self._method = method
        self._regridder = regridder_to(source.cell_layout(), rows, columns, method)
        self.grid = self._regridder.grid

    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> FieldArray:
        values = self._source.read_values(channels, times, self._regridder.source_rows(rows))
        return np.asarray(self._regridder(values, rows), dtype=np.float32)

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """Return about the part of the target grid that a chunk covers."""
        times, channels, *sizes = self._source.chunk_shape(channel)
        rows, columns = (
            min(new, -(-size * new // old))
            for size, new, old in zip(sizes, self.grid, self._source.grid, strict=True)
        )
        return times, channels, rows, columns

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        """Name the chunk of the nearest value."""
        away = np.abs(degrees_east(self._source.longitude, self.longitude[column]))
        row = int(abs(self._source.latitude - self.latitude[row]).argmin())
        return self._source.location(channel, time, row, int(away.argmin()))

    def description(self, variables: Sequence[str]) -> list[object]:
        return [*super().description(variables), [self._method, *self.grid]]
