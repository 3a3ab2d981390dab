"""What halo rows add to a convolved band: a few rows at its edges, nothing of the band's size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor


@final
@dataclass(frozen=True)
class Kernel:
    """Settings of a convolution with stride 1 along the rows.

    `padding`: zeros on both sides of every spatial dimension. `dim`: the rows', from the end.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dim: int

    def without_row_padding(self) -> Kernel:
        """Return the same without zeros north and south."""
        padding = list(self.padding)
        padding[self.dim] = 0
        return replace(self, padding=tuple(padding))

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve a batch."""
        none = (0,) * len(self.padding)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, none, self.groups
        )

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> list[Tensor]:
        """Return the gradients of input, weight and bias, as far as wanted."""
        sizes = (list(s) for s in (self.stride, self.padding, self.dilation))
        none = [0] * len(self.padding)
        made: list[Tensor] = torch.ops.aten.convolution_backward(
            grad, x, weight, [len(weight)], *sizes, False, none, self.groups, list(wanted)
        )
        return made


@final
@dataclass(frozen=True)
class Edge:
    """What the halo on one side of a band adds to the band's rows at that edge.

    Args:
        kernel: the convolution, without padding along the rows.
        taps: those of the kernel's taps that meet the halo: the first and how many.
        halo: this side's rows of the whole halo: the first and how many.
        zeros: rows north and south of them that stand for the band, as far as the taps reach.
        met: the band's rows that are given something: the first and how many.
        skipped: rows before those that the halo gives to more rows than the band has.
    """

    kernel: Kernel
    taps: tuple[int, int]
    halo: tuple[int, int]
    zeros: tuple[int, int]
    met: tuple[int, int]
    skipped: int

    def add(self, y: Tensor, halo: Tensor, weight: Tensor) -> None:
        """Add to the convolved band what the halo gives."""
        made = self.kernel.convolve(self._rows_of(halo), self._taps_of(weight))
        dim = self.kernel.dim
        y.narrow(dim, *self.met).add_(made.narrow(dim, self.skipped, self.met[1]))

    def cotangents(
        self, grad: Tensor, halo: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Return those of this side's halo and taps, as far as wanted, given the band's."""
        parts = (self._given(grad), self._rows_of(halo), self._taps_of(weight))
        of_rows, of_taps, _ = self.kernel.gradients(*parts, (*wanted, False))
        return of_rows, of_taps

    def add_halo_grad(self, total: Tensor, of_rows: Tensor) -> None:
        """Add the first of `cotangents` to those of the whole halo."""
        dim, (first, number) = self.kernel.dim, self.halo
        total.narrow(dim, first, number).add_(of_rows.narrow(dim, self.zeros[0], number))

    def add_weight_grad(self, total: Tensor, of_taps: Tensor) -> None:
        """Add the second of `cotangents` to those of the whole weight."""
        self._taps_of(total).add_(of_taps)

    def _taps_of(self, weight: Tensor) -> Tensor:
        return weight.narrow(self.kernel.dim, *self.taps)

    def _rows_of(self, halo: Tensor) -> Tensor:
        dim = self.kernel.dim
        return _pad_rows(halo.narrow(dim, *self.halo), *self.zeros, dim).contiguous()

    def _given(self, grad: Tensor) -> Tensor:
        dim, missing = self.kernel.dim, self.halo[1] - self.met[1]
        rows = grad.narrow(dim, *self.met)
        return _pad_rows(rows, self.skipped, missing - self.skipped, dim).contiguous()


def _pad_rows(rows: Tensor, north: int, south: int, dim: int) -> Tensor:
    return F.pad(rows, (*(0, 0) * (-dim - 1), north, south)) if north or south else rows


def edges_of(kernel: Kernel, rows: int, taps: int) -> tuple[Edge, Edge]:
    """Return the northern and the southern edge of a band of `rows` rows.

    `kernel` has `taps` taps along the rows and pads by half of what they reach over, `width` rows.
    The halo is `width` rows north of the band followed by as many south of it.
    """
    width, reaching = kernel.padding[kernel.dim], taps // 2
    beside = kernel.dilation[kernel.dim] * (reaching - 1)
    met, bare = min(width, rows), kernel.without_row_padding()
    north = Edge(bare, (0, reaching), (0, width), (0, beside), (0, met), 0)
    last = (taps - reaching, reaching), (width, width), (beside, 0)
    return north, Edge(bare, *last, (rows - met, met), width - met)
