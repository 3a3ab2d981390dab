"""Stochastic depth on one band of rows: a sample loses the same branches on all ranks."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from credit_dp.domain_parallel.exchange import Run
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError


@final
class DomainParallelStochasticDepth(RowLayer):
    """Drops branches of samples as the layer on the whole globe does.

    Args:
        layer: has a `rate` and `draws`, one number for each sample, None until they are set.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, ...)`, rows in any dimension but the first -> the same.

    Raises:
        UserError: in training, nobody has set the numbers: each rank would draw its own.
    """

    def __init__(self, layer: Any, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(layer, ROW_DIM, manager)

    def mixes(self, dim: int, ndim: int) -> bool:
        """All ranks have to draw alike wherever rows are, but among the samples.

        Raises:
            UserError: rows are in the samples' dimension.
        """
        if dim == -ndim:
            raise UserError(
                f"{type(self).__name__}: rows are in the samples' dimension. Move them elsewhere."
            )
        return True

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def needs(self, out: slice, height: int) -> tuple[Run, ...]:
        """Return the same rows."""
        return (Run(out.start, out.stop),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the branches that stay."""
        if self.training and self.rate and self.draws is None and not x.is_meta:
            raise UserError(
                f"{type(self).__name__}: the ranks of a globe have to drop the same branches. "
                "Call credit_dp.models.blocks.draw_depths before each training step."
            )
        return self.whole(x)  # type: ignore[no-any-return]
