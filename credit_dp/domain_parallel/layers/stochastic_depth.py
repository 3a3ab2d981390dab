"""Stochastic depth: branches that are dropped with chance, the same ones on every rank."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError
from credit_dp.torch_private import FakeTensor


@final
class DomainParallelStochasticDepth(RowLayer):
    """Stochastic depth on one band of rows, with the same branches dropped on every rank.

    Args:
        layer: a module with a `rate` and `draws`: one random number per sample, or None before
            they are set.

    Shapes:
        `(B, ...)`, with rows in any dimension except the first -> the same.

    Without draws the first rank draws for all: a collective, which plans do not count.
    """

    def __init__(self, layer: Any, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(layer, ROW_DIM, manager)

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return True: all ranks that share a globe must drop the same branches."""
        if dim == -ndim:
            raise UserError(
                f"{type(self).__name__}: rows are in the samples' dimension. Move them elsewhere."
            )
        return True

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the output rows themselves: nothing is fetched."""
        return (RowRange(out.start, out.stop),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the branches that are kept."""
        has_data = not (x.is_meta or isinstance(x, FakeTensor))  # a plan has no numbers to draw
        if not (self.training and self.rate and self.draws is None and has_data):
            return self.global_forward(x)  # type: ignore[no-any-return]
        layer = self.__dict__["wrapped"]
        layer.draws = self.manager.transport.all_gather(torch.rand(len(x), device=x.device))[0]
        try:
            return self.global_forward(x)  # type: ignore[no-any-return]
        finally:
            layer.draws = None
