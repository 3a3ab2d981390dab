"""Layers that treat groups of rows apart from each other: windows, or every n-th row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.constants import constant_tensor


@final
@dataclass(frozen=True)
class RowGroups:
    """The rows of a globe in the order in which groups of `size` rows follow each other.

    `order` has every row once; None stands for a row of zeros. A multiple of `size` in all.
    """

    size: int
    order: tuple[int | None, ...]

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.order) // self.size

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where each row, from north to south, is in the order."""
        found = sorted((row, at) for at, row in enumerate(self.order) if row is not None)
        return tuple(at for _, at in found)


def windows(height: int, size: int, shift: int = 0) -> RowGroups:
    """Return windows of `size` consecutive rows, the first beginning at row `shift`.

    Zeros in the south make the globe a multiple of `size` first. The last window goes around: it
    holds the southernmost rows and then the `shift` northernmost ones.
    """
    padded = -(-height // size) * size
    rows = ((at + shift) % padded for at in range(padded))
    return RowGroups(size, tuple(row if row < height else None for row in rows))


def dilated(height: int, size: int) -> RowGroups:
    """Return groups of `size` rows as far apart from each other as the globe allows.

    Zeros in the south make the globe a multiple of `size` first.
    """
    apart = -(-height // size)
    rows = (first + apart * step for first in range(apart) for step in range(size))
    return RowGroups(size, tuple(row if row < height else None for row in rows))


class GroupedRows(nn.Module, ABC):
    """A layer whose output rows depend on the rows of their group only.

    Its `forward` takes the whole globe; `treat` is what it does, to some of the groups.
    """

    row_dim: ClassVar[int] = -2  # where rows are, counted from the end

    @abstractmethod
    def groups(self, height: int) -> RowGroups:
        """Return the groups of a globe of `height` rows."""

    @abstractmethod
    def treat(self, x: Tensor, groups: slice, height: int) -> Tensor:
        """Return the output of the groups number `groups.start` to `groups.stop - 1`, maybe none.

        Args:
            x: the rows of these groups, one group after the other, in `row_dim`.
            groups: which ones of the globe's these are.
            height: rows of the globe.

        Shapes:
            the rows and their order stay; other dimensions may change.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the whole globe."""
        dim, height = self.row_dim, x.shape[self.row_dim]
        groups = self.groups(height)
        rows = self.treat(_rows_by_group(x, groups, dim), slice(0, groups.count), height)
        if groups.positions == tuple(range(height)):
            return rows.narrow(dim, 0, height)
        return rows.index_select(dim, constant_tensor(groups.positions, x.device))


def _rows_by_group(x: Tensor, groups: RowGroups, dim: int) -> Tensor:
    height = x.shape[dim]
    if groups.order == tuple(range(height)):
        return x
    x = F.pad(x, (*[0, 0] * (-dim - 1), 0, len(groups.order) - height))
    blank = iter(range(height, len(groups.order)))
    order = [next(blank) if row is None else row for row in groups.order]
    if order == sorted(order):
        return x
    return x.index_select(dim, constant_tensor(order, x.device))
