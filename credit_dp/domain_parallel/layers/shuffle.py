"""Pixel shuffle and its inverse on one band of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError

# Channels, rows and columns trade places: rows may be in either of the last two dimensions.
SPATIAL = (-2, -1)
CHANNELS = -3


class _Shuffle(RowLayer, ABC):
    """Rows and columns become channels, or the other way round."""

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet in the last two dimensions.

        Raises:
            UserError: rows are among the channels.
        """
        if dim == CHANNELS:
            raise UserError(
                f"{type(self).__name__}: rows are in the channels' dimension. Move them elsewhere."
            )
        return dim in SPATIAL

    @abstractmethod
    def out_rows(self, rows: slice) -> slice:
        """Return the output rows that whole input rows make."""

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Shuffle whole groups of rows and crop to this rank's."""
        out = bands.made.rows(self.manager.domain_rank)
        (taken,) = self.needs(out, bands.taken.height)
        made: Tensor = self.whole(self.fetch(x, bands))
        start = self.out_rows(slice(taken.start, taken.stop)).start
        return made.narrow(self.dim, out.start - start, out.stop - out.start)


@final
class DomainParallelPixelShuffle(_Shuffle):
    """A `PixelShuffle` on one band of rows, equal to that layer on the whole globe.

    Where the bands line up nothing is sent.

    Args:
        shuffle: the layer to shard.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C * r ** 2, H_local, W)` -> `(B, C, H_out_local, W * r)`, with `H_out = H * r`.
    """

    def __init__(
        self,
        shuffle: nn.PixelShuffle,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(shuffle, shard_dim, manager)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return int(height * self.upscale_factor)

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows of which these are made."""
        factor = self.upscale_factor
        return (Run(out.start // factor, -(-out.stop // factor)),)

    def out_rows(self, rows: slice) -> slice:
        """Return the output rows that whole input rows make."""
        return slice(rows.start * self.upscale_factor, rows.stop * self.upscale_factor)


@final
class DomainParallelPixelUnshuffle(_Shuffle):
    """A `PixelUnshuffle` on one band of rows, equal to that layer on the whole globe.

    Where the bands line up nothing is sent.

    Args:
        unshuffle: the layer to shard.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C * r ** 2, H_out_local, W / r)`, with `H_out = H / r`.
    """

    def __init__(
        self,
        unshuffle: nn.PixelUnshuffle,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(unshuffle, shard_dim, manager)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the output."""
        return int(height // self.downscale_factor)

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows of which these are made."""
        return (Run(out.start * self.downscale_factor, out.stop * self.downscale_factor),)

    def out_rows(self, rows: slice) -> slice:
        """Return the output rows that whole input rows make."""
        return slice(rows.start // self.downscale_factor, rows.stop // self.downscale_factor)
