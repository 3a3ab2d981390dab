"""Transposed convolution on one band of rows."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.window_layer import WindowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError


@final
class DomainParallelConvTranspose2d(WindowLayer):
    """A `ConvTranspose2d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride, padding, output padding, dilation and groups. Where the kernel equals the
    stride and the bands line up, nothing is sent.

    Args:
        conv: the layer to shard; parameters are shared with it.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`.
    """

    def __init__(
        self,
        conv: nn.ConvTranspose2d,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        reach = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
        halo_width = max(0, (reach - conv.stride[0]) // 2)
        super().__init__(conv, shard_dim, manager, halo_width=halo_width)
        self.__dict__["conv"] = conv
        self.halo_width = halo_width
        self._reach = reach
        # Paddings are numbers here: `same` and `valid` don't exist for transposed convolutions.
        self._stride, self._padding = conv.stride[0], int(conv.padding[0])

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:  # type: ignore[override]
        """Return this rank's output rows.

        Raises:
            UserError: `output_size` is given, which would mean the band's size to the caller.
        """
        if output_size is not None:
            raise UserError(
                "ConvTranspose2d: output_size has no meaning on a band of rows. "
                "Set output_padding in the layer, or crop with a MatchRows module."
            )
        made: Tensor = super().forward(x)
        return made

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output: Dumoulin & Visin 2016, relationship 14, with dilation."""
        extra = self._reach + self.conv.output_padding[0] - 2 * self._padding
        return int((height - 1) * self._stride + extra)

    def span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the input rows that reach the output rows; one at least, as convolutions do."""
        first = -(-(out.start + self._padding - self._reach + 1) // self._stride)
        last = (out.stop - 1 + self._padding) // self._stride
        first = min(max(first, 0), height - 1)
        return first, max(first, min(last, height - 1)) + 1

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        conv, out = self.conv, bands.made.rows(self.manager.domain_rank)
        first, _ = self.span(out, bands.taken.height)
        rows = F.conv_transpose2d(
            self.fetch(x, bands),
            self.weight,
            None,
            conv.stride,
            (0, conv.padding[1]),
            (0, conv.output_padding[1]),
            conv.groups,
            conv.dilation,
        )
        # The first row made is output row `made_from`; rows that no input reaches are zero.
        made_from = first * self._stride - self._padding
        rows = rows[..., max(0, out.start - made_from) : max(0, out.stop - made_from), :]
        north = min(max(0, made_from - out.start), out.stop - out.start)
        south = out.stop - out.start - north - rows.shape[-2]
        rows = F.pad(rows, (0, 0, north, south))
        return rows if self.bias is None else rows + self.bias[:, None, None]
