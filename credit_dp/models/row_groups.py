"""Layers that act on groups of rows separately: windows of rows, or rows a fixed distance apart.

Attention in windows is such a layer. When rows are sharded, each rank gets some of the groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.constants import cached_constant


@final
@dataclass(frozen=True)
class RowGroups:
    """A division of the globe's rows into groups of `size` rows.

    Attributes:
        order: row numbers, group after group, each row once; None stands for a row of zeros. Its
            length is a multiple of `size`.
    """

    size: int
    order: tuple[int | None, ...]

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.order) // self.size

    @property
    def positions(self) -> tuple[int, ...]:
        """Index in `order` of each row, from north to south."""
        # torch's compiler can't follow the lock that a cached property holds in Python 3.11.
        if torch.compiler.is_dynamo_compiling():
            return self._compute_positions()
        return self._positions

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        return self._compute_positions()

    def _compute_positions(self) -> tuple[int, ...]:
        indices = sorted((row, index) for index, row in enumerate(self.order) if row is not None)
        return tuple(index for _, index in indices)


def windows(height: int, size: int, shift: int = 0) -> RowGroups:
    """Return windows of `size` consecutive rows, the first beginning at row `shift`.

    Rows of zeros in the south pad the globe to a multiple of `size`. With a shift the last window
    wraps around: it holds the southernmost rows and then the `shift` northernmost ones.
    """
    padded = -(-height // size) * size
    rows = ((index + shift) % padded for index in range(padded))
    return RowGroups(size, tuple(row if row < height else None for row in rows))


def dilated(height: int, size: int) -> RowGroups:
    """Return groups of `size` rows at the largest distance that the globe allows.

    Rows of zeros in the south pad the globe to a multiple of `size`.
    """
    dilation = -(-height // size)
    rows = (first + dilation * step for first in range(dilation) for step in range(size))
    return RowGroups(size, tuple(row if row < height else None for row in rows))


class GroupedRows(nn.Module, ABC):
    """A layer whose output rows depend on the input rows of the same group only.

    A subclass defines in `groups` how rows are grouped, and in `treat` the output of some of the
    groups. `forward` applies `treat` to the whole globe, a sharded layer to the groups of its rank.
    """

    row_dim: ClassVar[int] = -2  # dim of the rows, counted from the end

    @abstractmethod
    def groups(self, height: int) -> RowGroups:
        """Return the groups of rows of a globe of `height` rows."""

    @abstractmethod
    def treat(self, x: Tensor, groups: slice, height: int) -> Tensor:
        """Return the output of some consecutive groups; of none, if a rank has none.

        Args:
            x: the rows of these groups, group after group, in `row_dim`.
            groups: numbers of these groups among those of the globe.

        Shapes:
            rows keep their number and order; other dims may change.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the whole globe."""
        dim = self.row_dim
        height = x.shape[dim]
        groups = self.groups(height)
        rows = self.treat(_rows_by_group(x, groups, dim), slice(0, groups.count), height)
        if groups.positions == tuple(range(height)):
            return rows.narrow(dim, 0, height)
        return rows.index_select(dim, cached_constant(_positions, groups, x.device, torch.int64))


def _rows_by_group(x: Tensor, groups: RowGroups, dim: int) -> Tensor:
    height = x.shape[dim]
    if groups.order == tuple(range(height)):
        return x
    # Rows of zeros are appended.
    x = F.pad(x, (*[0, 0] * (-dim - 1), 0, len(groups.order) - height))
    order = _padded_order(groups)
    if order == sorted(order):  # the copy of `index_select` is not needed
        return x
    return x.index_select(dim, cached_constant(_padded_order, groups, x.device, torch.int64))


def _padded_order(groups: RowGroups) -> list[int]:
    padding = count(len(groups.order) - groups.order.count(None))
    return [next(padding) if row is None else row for row in groups.order]


def _positions(groups: RowGroups) -> Sequence[int]:
    return groups.positions
