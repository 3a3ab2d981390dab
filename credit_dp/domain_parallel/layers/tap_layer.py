"""Layers that treat rows and columns independently of each other, each linearly."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.layers.row_taps import RowTaps, taps_of
from credit_dp.domain_parallel.manager import DomainParallelManager

# Samples and channels come before the dimensions of space.
NON_SPATIAL = 2


class Kind(NamedTuple):
    """Positions of taps are rounded: the rows needed may depend on these."""

    dtype: torch.dtype
    device: torch.device


class TapLayer(RowLayer):
    """A layer that is a table of taps along rows and torch's own operator along all else.

    What makes fewer columns acts before rows travel, what makes more of them afterwards.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        shard_dim: int,
        manager: DomainParallelManager | None,
        *,
        ndim: int = 4,
    ) -> None:
        super().__init__(wrapped, shard_dim, manager, halo_width=1, ndim=ndim)
        self._tables: dict[tuple[int, int, Kind], RowTaps] = {}
        self._kind = Kind(torch.float32, torch.device("cpu"))

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet wherever they are but among samples and channels."""
        return dim + ndim >= NON_SPATIAL

    def row_setting(self, value: Any) -> Any:
        """Return what a setting for all dimensions, or one of each, says about rows."""
        return value[self.dim] if isinstance(value, (tuple, list)) else value

    @abstractmethod
    def along_rows(self, x: Tensor) -> Tensor:
        """Return the operator on `(1, C, H, 1)`, one column wide."""

    @abstractmethod
    def along_others(self, x: Tensor) -> Tensor:
        """Return the operator on a band along every dimension but the rows'."""

    def taps(self, height: int) -> RowTaps:
        """Return the table for a global height."""
        return self._table(height, self._kind)

    def gradient_taps(self, height: int) -> RowTaps:
        """Return the table that gradients follow."""
        return self.taps(height)

    def _table(self, height: int, kind: Kind) -> RowTaps:
        key = (self.dim, height, kind)
        if key not in self._tables:
            self._tables[key] = taps_of(self.along_rows, height, *kind)
        return self._tables[key]

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return self.taps(height).out_height

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows from the first to the last tap."""
        spans = [table.span(out) for table in (self.taps(height), self.gradient_taps(height))]
        return (Run(min(first for first, _ in spans), max(stop for _, stop in spans)),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        kind = Kind(x.dtype, x.device)
        if kind != self._kind:
            self._kind, self._exchanges = kind, {}
        with torch.no_grad():
            row = self.along_others(x.narrow(self.dim, 0, 1))
        if row.numel() <= x.narrow(self.dim, 0, 1).numel():
            return self._rows(self.along_others(x), bands).to(row.dtype)
        return self.along_others(self._rows(x, bands)).to(row.dtype)

    def _rows(self, x: Tensor, bands: Bands) -> Tensor:
        height, out = bands.taken.height, bands.made.rows(self.manager.domain_rank)
        taps, gradient_taps = self.taps(height), self.gradient_taps(height)
        rows, first = self.fetch(x, bands), self.needs(out, height)[0].start
        if taps.changes_nothing(height):
            return rows
        made = gradient_taps.apply(rows, self.dim, out, first)
        if gradient_taps is taps:
            return made
        return made + (taps.apply(rows, self.dim, out, first) - made).detach()
