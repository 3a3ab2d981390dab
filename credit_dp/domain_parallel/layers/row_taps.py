"""Linear operators along rows, as tables: which input rows make an output row, with what weights.

The tables are read off torch's own operator, so that rounding of positions, scale factors and edges
are torch's own on every device and for every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

# Unit rows that are sent through the operator at a time.
BLOCK = 256

Operator = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class RowTaps:
    """Row `i` of the output is the sum over `k` of `weights[i, k]` x input row `sources[i, k]`.

    Shapes:
        `sources`, `weights`: `(H_out, K)`, rows of the globe. Rows with fewer sources repeat one
        with weight 0. `weights` is None where every output row is a copy of one input row.
    """

    sources: Tensor
    weights: Tensor | None

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        return self.sources.shape[0]

    @cached_property
    def _reached(self) -> list[list[int]]:
        return self.sources.tolist()

    def changes_nothing(self, height: int) -> bool:
        """Whether the output is the input."""
        return self.weights is None and self._reached == [[row] for row in range(height)]

    def same_as(self, other: RowTaps) -> bool:
        """Whether both copy the same rows."""
        return self._reached == other._reached

    def span(self, out: slice) -> tuple[int, int]:
        """Return the first input row that the output rows `out` need and the row after the last."""
        reached = self._reached[out]
        return min(map(min, reached)), max(map(max, reached)) + 1

    def apply(self, x: Tensor, dim: int, out: slice, first: int) -> Tensor:
        """Return the output rows `out`; the rows of `x` begin at input row `first`.

        Half precision becomes float32, unless rows are only copied.
        """
        places = (self.sources[out] - first).unbind(1)
        if self.weights is None:
            return x.index_select(dim, places[0])
        weights = self.weights[out].reshape(-1, *[1] * (-dim - 1), len(places)).unbind(-1)
        total = x.index_select(dim, places[0]) * weights[0]
        for place, weight in zip(places[1:], weights[1:], strict=True):
            total = torch.addcmul(total, x.index_select(dim, place).to(total.dtype), weight)
        return total


@_disable_dynamo  # as torch.compiler.disable, which takes a second to import
@torch.inference_mode(False)  # a table is kept, maybe for training
@torch.no_grad()
def taps_of(operator: Operator, height: int, dtype: torch.dtype, device: torch.device) -> RowTaps:
    """Return the table of an operator that maps `(1, C, height, 1)` to `(1, C, H_out, 1)`.

    It has to be linear and to treat the channels alike.
    """
    dtype = torch.promote_types(dtype, torch.float32)  # as torch computes half precision
    if device.type == "meta":  # which rows are tapped, is read off numbers
        device = torch.device("cpu")
    made, taken, weight = [], [], []
    for start in range(0, height, BLOCK):
        stop = min(start + BLOCK, height)
        units = torch.zeros(stop - start, height, dtype=dtype, device=device)
        units.diagonal(start).fill_(1)
        with torch.autocast(device.type, enabled=False):
            matrix = operator(units[None, :, :, None])[0, :, :, 0].T
        rows, columns = matrix.nonzero(as_tuple=True)
        made.append(rows)
        taken.append(columns + start)
        weight.append(matrix[rows, columns])
    return _table(torch.cat(made), torch.cat(taken), torch.cat(weight), matrix.shape[0])


def _table(made: Tensor, taken: Tensor, weight: Tensor, out_height: int) -> RowTaps:
    """Put triples of output row, input row and weight into rows of one length."""
    order = made.argsort(stable=True)
    made, taken, weight = made[order], taken[order], weight[order]
    counts = made.bincount(minlength=out_height)
    begins = counts.cumsum(0) - counts
    nth = torch.arange(len(made), device=made.device) - begins[made]
    widest = int(counts.max())
    sources = taken[begins][:, None].repeat(1, widest)
    weights = weight.new_zeros(out_height, widest)
    sources[made, nth] = taken
    weights[made, nth] = weight
    copies = widest == 1 and bool((weights == 1).all())
    return RowTaps(sources, None if copies else weights)
