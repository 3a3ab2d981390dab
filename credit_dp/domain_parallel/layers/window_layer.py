"""Layers whose output rows are each made of a window of consecutive input rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.poles import rows_with_poles

if TYPE_CHECKING:
    from credit_dp.domain_parallel.shared_exchange import SharedExchange


class WindowLayer(RowLayer):
    """A layer that needs an interval of rows; beyond the poles it sees what `pole_mode` says."""

    pole_mode: str = "zeros"
    # With layers that read the same tensor; the plan finds them.
    shared_exchange: SharedExchange | None = None

    @property
    def planned(self) -> Mapping[int, int]:
        """Global rows that the plan has seen going in, and what comes out of them."""
        return self._planned

    def fetches(self, height: int) -> bool:
        """Return whether rows of this planned height are fetched as windows."""
        return True

    def planned_bands(self, height: int) -> Bands:
        """Return the partitions of a planned height."""
        table = self.manager.bands
        return Bands(table[height], table[self._planned[height]])

    def fetch(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the rows of the windows, poles included."""
        shared = self.shared_exchange
        rows = None if shared is None else shared.fetch(self, x)
        return super().fetch(x, bands) if rows is None else rows

    @abstractmethod
    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the first row that the output rows `out` need and the row after the last.

        Rows below 0 and from `height` on lie beyond a pole.
        """

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows of the windows, poles included."""
        return rows_with_poles(*self.span(out, height), height, self.pole_mode)

    def halo(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows of the windows beyond those of the same numbers, north ones first."""
        first, stop = self.span(out, height)
        north = rows_with_poles(first, out.start, height, self.pole_mode)
        return (*north, *rows_with_poles(out.stop, stop, height, self.pole_mode))
