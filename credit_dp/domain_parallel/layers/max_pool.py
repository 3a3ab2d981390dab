"""Maximum pooling on one band of rows."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.filled_layer import FilledLayer
from credit_dp.domain_parallel.layers.pool_layer import PoolLayer
from credit_dp.domain_parallel.layers.positions import positions_on_globe
from credit_dp.domain_parallel.layers.row_layer import Bands


@final
class DomainParallelMaxPool(PoolLayer, FilledLayer):
    """An `nn.MaxPool*d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride, padding and dilation, with or without ceil mode. `return_indices` returns
    positions on the whole globe.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """

    @property
    def _reach(self) -> int:
        return self.setting("dilation")[self.dim] * (self._kernel - 1) + 1

    def compute(self, x: Tensor, bands: Bands) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's output rows."""
        rows = self.fetch_filled(x, bands, -torch.inf)
        made = getattr(nn.functional, f"max_pool{self._area}d")(
            rows,
            self.setting("kernel_size"),
            self.setting("stride"),
            self.without_rows("padding"),
            self.setting("dilation"),
            self.ceil_mode,
            return_indices=self.return_indices,
        )
        if not self.return_indices:
            return made  # type: ignore[no-any-return]
        maxima, indices = made
        height = bands.taken.height
        first, stop = self.span(bands.made.rows(self.manager.domain_rank), height)
        # Where all rows of the globe are -inf the first of them counts, as in torch.
        taken = torch.arange(first, stop, device=x.device).clamp(0, height - 1)
        columns = x.shape[self.dim :].numel() // x.shape[self.dim]
        return maxima, positions_on_globe(indices, taken, columns, height)
