"""Transposed convolutions on one band of rows.

A band fetches the input rows whose kernel reaches its output rows; `bands/convolutions.py` says how
these are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.convolutions import (
    TransposedRows,
    convolve_transposed,
    transposed_rows,
    transposed_span,
)
from credit_dp.domain_parallel.layers.base import Bands
from credit_dp.domain_parallel.layers.conv import ConvLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError
from credit_dp.torch_private import padding_widths

# Keys: the number of spatial dimensions.
CONV_TRANSPOSE_FUNCTIONS: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def _along_rows(settings: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    changed = list(settings)
    changed[dim] = value
    return tuple(changed)


class _RowConvTranspose(ConvLayer):
    """Computes all rows that the fetched ones reach and crops them to this rank's band."""

    def __init__(
        self,
        conv: nn.ConvTranspose2d | nn.ConvTranspose3d,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(conv, conv, padding_widths(conv), shard_dim, manager)

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:  # type: ignore[override]
        """Return this rank's output rows."""
        if output_size is not None:
            raise UserError(
                f"{type(self.conv).__name__}: output_size has no meaning on a band of rows. "
                "Set output_padding in the layer, or crop with a MatchRows module."
            )
        y: Tensor = super().forward(x)
        return y

    @property
    def wrapped_is_exact(self) -> bool:
        """Whether every row makes rows of its own, and the bands of input and output line up."""
        sides = (self.north, self.south, self.conv.output_padding[ROW_DIM])
        return (
            self._kernel_extent == self._stride
            and not any(sides)
            and all(self.exchange(self.planned_bands(h)).is_identity for h in self.planned_heights)
        )

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global output height.

        Source: Dumoulin & Visin 2016, relationship 14, with dilation.
        """
        extra = self._kernel_extent + self.conv.output_padding[ROW_DIM] - 2 * self.north
        return int((height - 1) * self._stride + extra)

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        return transposed_span(self._windows, out, height)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        out = bands.output.rows(self.manager.domain_rank)
        cut = transposed_rows(self._windows, out.start, out.stop, bands.input.height)
        rows = self.fetch(x, bands)
        convolve = partial(self._convolve, rows, cut=cut)
        return convolve_transposed(convolve, self.bias, cut, ROW_DIM, len(self.conv.kernel_size))

    def _convolve(self, rows: Tensor, bias: Tensor | None, cut: TransposedRows) -> Tensor:
        conv = self.conv
        dim = ROW_DIM
        return CONV_TRANSPOSE_FUNCTIONS[len(conv.padding)](
            rows,
            self.weight,
            bias,
            conv.stride,
            _along_rows(conv.padding, dim, cut.padding),
            _along_rows(conv.output_padding, dim, cut.output_padding),
            conv.groups,
            conv.dilation,
        )


@final
class DomainParallelConvTranspose2d(_RowConvTranspose):
    """A `ConvTranspose2d` on one band of rows, equal to that layer on the whole globe.

    Supports every kernel, stride, padding, output padding, dilation and number of groups. Nothing
    is sent where the kernel equals the stride and the bands line up.

    Shapes:
        `(B, C_in, H_local, W)` -> `(B, C_out, H_out_local, W_out)`; without `B` too.
    """


@final
class DomainParallelConvTranspose3d(_RowConvTranspose):
    """A `ConvTranspose3d` on one band of rows, equal to that layer on the whole globe.

    Supports every kernel, stride, padding, output padding, dilation and number of groups. Nothing
    is sent where the kernel equals the stride and the bands line up.

    Shapes:
        `(B, C_in, T, H_local, W)` -> `(B, C_out, T_out, H_out_local, W_out)`; without `B` too.
        `T` are times or levels.
    """

    def __init__(
        self,
        conv: nn.ConvTranspose3d,
        shard_dim: int = 3,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(conv, shard_dim, manager=manager)
