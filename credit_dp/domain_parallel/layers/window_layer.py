"""Layers whose output rows are each made of a window of consecutive input rows."""

from __future__ import annotations

from abc import abstractmethod

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import RowLayer
from credit_dp.domain_parallel.poles import rows_with_poles


class WindowLayer(RowLayer):
    """A layer that needs an interval of rows; beyond the poles it sees what `pole_mode` says."""

    pole_mode: str = "zeros"

    @abstractmethod
    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the first row that the output rows `out` need and the row after the last.

        Rows below 0 and from `height` on lie beyond a pole.
        """

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows of the windows, poles included."""
        return rows_with_poles(*self.span(out, height), height, self.pole_mode)
