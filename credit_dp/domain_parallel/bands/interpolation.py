"""Interpolation and adaptive averages along rows, as tables of rows and weights.

These operators are linear and the same for all columns, so torch's own is read off once for a
global height: which input rows each output row is made of, with which weights
(`interpolation_table_of`). A rank applies its part of the table to the rows that it has fetched,
with exactly torch's weights, and the adjoint of that part to their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.halo_exchange import empty_rows_like, memory_format_of
from credit_dp.torch_private import disable_current_modes, run_uncompiled

aten = torch.ops.aten

# Unit vectors to which the operator is applied at a time: bounds the memory.
UNIT_ROWS_PER_CALL = 256

Operator = Callable[[Tensor], Tensor]

NEAREST = ("nearest", "nearest-exact")
# The same operator along one dimension.
LINEAR = ("linear", "bilinear", "trilinear")
NEAREST_BACKWARD = {
    "nearest": aten.upsample_nearest2d_backward,
    "nearest-exact": torch.ops.aten._upsample_nearest_exact2d_backward,
}


@final
class RowWeights(NamedTuple):
    """How some output rows are made of some input rows: a part of an `InterpolationTable`.

    Attributes:
        indices: for each `k` the input row of every output row.
        weights: for each `k` its weight, as a column; None if each output row copies an input row.
    """

    indices: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] | None
    dim: int

    def apply(self, x: Tensor) -> Tensor:
        """Return the output rows.

        Half precision is promoted to float32, unless rows are only copied.
        """
        if self.weights is None:
            return select_rows(x, self.dim, self.indices[0])
        total = select_rows(x, self.dim, self.indices[0]) * self.weights[0]
        for index, weight in zip(self.indices[1:], self.weights[1:], strict=True):
            rows = select_rows(x, self.dim, index)
            total = torch.addcmul(total, rows.to(total.dtype), weight)
        return total

    def adjoint(self, grad: Tensor, rows: int) -> Tensor:
        """Return the gradients of as many input rows, given those of the output rows.

        Half precision is promoted to float32.
        """
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = empty_rows_like(grad, self.dim, rows).to(wide).zero_()
        if self.weights is None:
            return total.index_add_(self.dim, self.indices[0], grad.to(wide))
        for index, weight in zip(self.indices, self.weights, strict=True):
            total.index_add_(self.dim, index, grad * weight)
        return total


@final
@dataclass(frozen=True)
class InterpolationTable:
    """Row `i` of the output is the sum over `k` of `weights[i, k]` x input row `sources[i, k]`.

    Shapes:
        `sources`, `weights`: `(H_out, K)`, in rows of the globe. Output rows with fewer than `K`
        sources repeat one with weight 0. `weights` is None if each output row copies an input row.
    """

    sources: Tensor
    weights: Tensor | None

    @property
    def out_height(self) -> int:
        """The global height of the output."""
        return self.sources.shape[0]

    @cached_property
    @disable_current_modes()  # on a GPU a dry run would copy them, without data, to the host
    def _source_lists(self) -> list[list[int]]:
        return self.sources.tolist()

    def is_identity(self, height: int) -> bool:
        """Whether the output is the input."""
        return self.weights is None and self._source_lists == [[row] for row in range(height)]

    def has_same_sources(self, other: InterpolationTable) -> bool:
        """Whether both copy the same rows."""
        return self._source_lists == other._source_lists

    def input_span(self, out: slice) -> tuple[int, int]:
        """Return the input rows that the output rows `out` depend on, as `(start, stop)`."""
        sources = self._source_lists[out]
        return min(map(min, sources)), max(map(max, sources)) + 1

    def part(self, dim: int, out: slice, first: int) -> RowWeights:
        """Return how the output rows `out` are made of input rows from row `first` on."""
        indices = (self.sources[out] - first).unbind(1)
        weights = None
        if self.weights is not None:
            weights = self.weights[out].reshape(-1, *[1] * (-dim - 1), len(indices)).unbind(-1)
        return RowWeights(indices, weights, dim)

    def apply(self, x: Tensor, dim: int, out: slice, first: int) -> Tensor:
        """Return the output rows `out`, given the input rows `x` from row `first` on.

        Half precision is promoted to float32, unless rows are only copied.
        """
        return self.part(dim, out, first).apply(x)


def select_rows(x: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return rows of `x` in its memory format; the gradient has that format, too."""
    if memory_format_of(x) is torch.contiguous_format:
        return x.index_select(dim, indices)
    # `index_select` and its gradient are contiguous; those of this view are channels last of `x`.
    return x.movedim(1, -1).index_select(dim - 1, indices).movedim(-1, 1)


@run_uncompiled  # what torch.compiler.disable calls; importing that takes a second
@torch.inference_mode(False)  # the table is cached and may be used in training later
@torch.no_grad()
@disable_current_modes()  # a dry run has tensors without data: the table is read off values
def interpolation_table_of(
    operator: Operator,
    height: int,
    dtype: torch.dtype,
    device: torch.device,
    is_backward: bool = False,
) -> InterpolationTable:
    """Return the table of an operator that maps `(1, C, height, 1)` to `(1, C, H_out, 1)`.

    The operator has to be linear and the same for all channels. That of a backward pass, which maps
    gradients, has the table whose gradient it computes.
    """
    columns, rows, weights, out_height = _columns_of(operator, height, dtype, device)
    if is_backward:
        columns, rows, out_height = rows, columns, height
    return _table_from_triples(rows, columns, weights, out_height)


def _columns_of(
    operator: Operator, height: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the entries of an operator's matrix that are not 0, and its height.

    Each channel carries the unit vector of one row, so that the outputs are the matrix's columns.

    Returns:
        The column, the row and the value of each entry.
    """
    dtype = torch.promote_types(dtype, torch.float32)  # as torch computes half precision
    if device.type == "meta":  # the table is read off values, which meta tensors lack
        device = torch.device("cpu")
    out_rows, in_rows, weights = [], [], []
    for start in range(0, height, UNIT_ROWS_PER_CALL):
        stop = min(start + UNIT_ROWS_PER_CALL, height)
        units = torch.zeros(stop - start, height, dtype=dtype, device=device)
        units.diagonal(start).fill_(1)
        with torch.autocast(device.type, enabled=False):
            matrix = operator(units[None, :, :, None])[0, :, :, 0].T
        rows, columns = matrix.nonzero(as_tuple=True)
        out_rows.append(rows)
        in_rows.append(columns + start)
        weights.append(matrix[rows, columns])
    return torch.cat(in_rows), torch.cat(out_rows), torch.cat(weights), matrix.shape[0]


def _table_from_triples(
    out_rows: Tensor, in_rows: Tensor, weights: Tensor, out_height: int
) -> InterpolationTable:
    # Sort by output row; within a row, `column` counts its sources.
    order = out_rows.argsort(stable=True)
    out_rows, in_rows, weights = out_rows[order], in_rows[order], weights[order]
    counts = out_rows.bincount(minlength=out_height)
    first_entry = counts.cumsum(0) - counts
    column = torch.arange(len(out_rows), device=out_rows.device) - first_entry[out_rows]
    widest = int(counts.max())
    # A backward pass may use some rows nowhere, the last one, too.
    sources = in_rows[first_entry.clamp(max=len(in_rows) - 1)][:, None].repeat(1, widest)
    weight_table = weights.new_zeros(out_height, widest)
    sources[out_rows, column] = in_rows
    weight_table[out_rows, column] = weights
    # Nearest interpolation only copies rows, which keeps half precision as it is.
    copies = widest == 1 and bool((weight_table == 1).all())
    return InterpolationTable(sources, None if copies else weight_table)


def nearest_gradient_table(
    mode: str,
    height: int,
    table: InterpolationTable,
    scale: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> InterpolationTable:
    """Return the table that gradients of the modes `nearest` follow.

    torch rounds positions in backward in another way than in forward: on GPUs, and on CPUs for
    float64. One in some hundred pairs of heights has rows that differ.

    Args:
        table: of the forward pass, which is returned if gradients follow it.
        scale: the factor that torch computes positions with; None for the ratio of heights.
    """
    out_height = table.out_height

    def backward(grad: Tensor) -> Tensor:
        shape = (*grad.shape[:-2], height, 1)
        factors = (scale, None if scale is None else 1.0)
        gradient: Tensor = NEAREST_BACKWARD[mode](
            grad.contiguous(), (out_height, 1), shape, *factors
        )
        return gradient

    gradient = interpolation_table_of(backward, out_height, dtype, device, is_backward=True)
    same = gradient.weights is None and gradient.has_same_sources(table)
    return table if same else gradient


# ---------------------------------------------------------------- torch's operators, by name


@final
class RowOperator(NamedTuple):
    """An operator along rows of a global height, as torch calls it.

    Attributes:
        name: that of the operator in two dimensions, without the number of dimensions.
        settings: whether corners are aligned, if the operator asks that.
        scale: the factor that torch computes positions with; None for the ratio of heights.
        dtype, device: torch rounds positions differently for each.
        is_backward: whether the rows are those that gradients follow.
    """

    name: str
    height: int
    out_height: int
    settings: tuple[bool, ...]
    scale: float | None
    dtype: torch.dtype
    device: torch.device
    is_backward: bool = False

    def apply_to_column(self, x: Tensor) -> Tensor:
        """Apply the operator to `(1, C, H, 1)`, a single column."""
        if self.name == ADAPTIVE_AVERAGE:
            return torch.ops.aten._adaptive_avg_pool2d(x, [self.out_height, 1])  # type: ignore[no-any-return]
        # Two columns, as torch 2.13 returns wrong rows of a single one with antialias on a CPU.
        x = x.expand(*x.shape[:-1], 2)
        y: Tensor = OPERATORS[self.name](x, [self.out_height, 2], *self.settings, self.scale, None)
        return y[..., :1]


ADAPTIVE_AVERAGE = "_adaptive_avg_pool"
OPERATORS = {
    "upsample_nearest": aten.upsample_nearest2d,
    "_upsample_nearest_exact": torch.ops.aten._upsample_nearest_exact2d,
    "upsample_linear": aten.upsample_bilinear2d,
    "upsample_bilinear": aten.upsample_bilinear2d,
    "upsample_trilinear": aten.upsample_bilinear2d,
    "upsample_bicubic": aten.upsample_bicubic2d,
    "_upsample_bilinear_aa": torch.ops.aten._upsample_bilinear2d_aa,
    "_upsample_bicubic_aa": torch.ops.aten._upsample_bicubic2d_aa,
}
NEAREST_MODES = {"upsample_nearest": "nearest", "_upsample_nearest_exact": "nearest-exact"}


@lru_cache(1024)
def table_of(operator: RowOperator) -> InterpolationTable:
    """Return the table of an operator."""
    if operator.is_backward:
        table = table_of(operator._replace(is_backward=False))
        mode = NEAREST_MODES.get(operator.name)
        if mode is None:
            return table
        settings = operator.scale, operator.dtype, operator.device
        return nearest_gradient_table(mode, operator.height, table, *settings)
    column, height = operator.apply_to_column, operator.height
    return interpolation_table_of(column, height, operator.dtype, operator.device)


@lru_cache(1024)
def is_identity(operator: RowOperator) -> bool:
    """Return whether an operator returns its input rows."""
    return operator.height == operator.out_height and table_of(operator).is_identity(
        operator.height
    )


@lru_cache(8192)
def interpolation_rows(
    operator: RowOperator, out: tuple[int, ...]
) -> tuple[tuple[RowRange, ...], ...]:
    """Return the input rows that each rank needs, given the bands of the output."""
    table = table_of(operator)
    return tuple(
        (RowRange(*table.input_span(slice(a, b))),) if a < b else () for a, b in pairwise(out)
    )


@lru_cache(8192)
@torch.inference_mode(False)
@disable_current_modes()
def interpolation_weights(
    operator: RowOperator, out: tuple[int, ...], rank: int, dim: int
) -> RowWeights | None:
    """Return how a rank computes its output rows of those that it needs; None if it has none."""
    rows = interpolation_rows(operator, out)[rank]
    if not rows:
        return None
    return table_of(operator).part(dim, slice(out[rank], out[rank + 1]), rows[0].start)


@lru_cache(8192)
@torch.inference_mode(False)
@disable_current_modes()
def own_row_weights(
    operator: RowOperator, bounds: tuple[int, ...], rank: int, dim: int
) -> RowWeights | None:
    """Return which output rows a rank's input rows are parts of, as rows made of output rows.

    Its adjoint adds up what the rank's rows contribute to all output rows. None if it has no rows.
    """
    own = slice(bounds[rank], bounds[rank + 1])
    return _table_of_inputs(operator).part(dim, own, 0) if own.start < own.stop else None


@lru_cache(1024)
def _table_of_inputs(operator: RowOperator) -> InterpolationTable:
    """Return the table of an operator's adjoint: what the operator is the gradient of."""
    settings = operator.dtype, operator.device
    return interpolation_table_of(operator.apply_to_column, operator.height, *settings, True)
