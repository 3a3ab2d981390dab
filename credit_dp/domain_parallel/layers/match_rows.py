"""Cropping to another tensor's rows, on one band."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager


@final
class DomainParallelMatchRows(RowLayer):
    """Crops the southernmost rows and easternmost columns of a globe to those of a reference.

    Args:
        crop: a module whose `forward(x, reference)` returns
            `x[..., :reference.shape[-2], :reference.shape[-1]]`.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` and `(B, D, H_reference_local, W_reference)` ->
        `(B, C, H_reference_local, W_reference)`.
    """

    def __init__(
        self, crop: nn.Module, shard_dim: int = -2, *, manager: DomainParallelManager | None = None
    ) -> None:
        super().__init__(crop, shard_dim, manager)

    def forward(self, x: Tensor, reference: Tensor) -> Tensor:  # type: ignore[override]
        """Return this rank's rows of the cropped globe."""
        rows: Tensor = super().forward(x, reference)
        return rows[..., : reference.shape[-1]]

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the reference's global rows; a collective."""
        return self.manager.gathered_partition(others[0].shape[self.dim]).height

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the rows as they are."""
        return (Run(out.start, out.stop),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the rows that this rank owns of the cropped globe."""
        return self.fetch(x, bands)
