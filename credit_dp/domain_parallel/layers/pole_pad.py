"""Padding across the poles, on one band of rows."""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM


@final
class DomainParallelPolePad(WindowLayer):
    """A padding of the globe on one band of rows, equal to it on the whole globe.

    Any width up to the globe's height, also wider than a band.

    Args:
        pad: a module that adds `width` rows beyond each pole, which hold what `poles` says
            (`zeros`, `replicate`, `reflect`, `mirror`, `earth`), and then `columns` circular ones
            on both sides, as `credit_dp.models.padding.PolePad` does.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W + 2 * columns)`, with
        `H_out = H + 2 * width`.
    """

    def __init__(
        self, pad: Any, shard_dim: int = ROW_DIM, *, manager: DomainParallelManager | None = None
    ) -> None:
        super().__init__(pad, shard_dim, manager, halo_width=pad.width)
        self.pole_mode = pad.poles

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the padded globe."""
        return int(height + 2 * self.width)

    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the same rows, counted from the globe's first one."""
        return out.start - self.width, out.stop - self.width

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's rows of the padded globe."""
        rows = self.fetch(x, bands)
        return F.pad(rows, (self.columns, self.columns, 0, 0), mode="circular")
