"""Layers that see a number where there are no rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.window_layer import WindowLayer


class FilledLayer(WindowLayer):
    """A window layer that fetches the globe's rows only and fills in those beyond the poles."""

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows of the windows that the globe has, maybe none."""
        first, stop = self.span(out, height)
        run = Run(max(first, 0), min(stop, height))
        return (run,) if run.length > 0 else ()

    def fetch_filled(self, x: Tensor, bands: Bands, value: float) -> Tensor:
        """Return the rows of the windows, with `value` in those beyond the poles."""
        height = bands.taken.height
        first, stop = self.span(bands.made.rows(self.manager.domain_rank), height)
        north, south = max(0, min(stop, 0) - first), max(0, stop - max(first, height))
        rows = self.fetch(x, bands)
        if not north and not south:
            return rows
        return F.pad(rows, (*[0, 0] * (-self.dim - 1), north, south), value=value)
