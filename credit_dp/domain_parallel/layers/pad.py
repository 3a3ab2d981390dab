"""Padding, cropping and rolling on one band of rows."""

from __future__ import annotations

from abc import ABC
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import RowRange, rows_with_poles
from credit_dp.domain_parallel.layers.base import (
    Bands,
    ConstantFillLayer,
    RowLayer,
    StencilLayer,
    torch_layer_type,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError

MODES = ("constant", "reflect", "replicate", "circular")


class _RowPad(ConstantFillLayer, ABC):
    """`F.pad`: its rows by exchange, all other dimensions by torch."""

    def __init__(
        self,
        wrapped: nn.Module,
        pad: tuple[int, ...],
        mode: str,
        value: float,
        shard_dim: int,
        manager: DomainParallelManager | None,
    ) -> None:
        super().__init__(wrapped, shard_dim, manager)
        self.pad, self.mode, self.value = pad, mode, value

    def _check_dim(self) -> None:
        """Accept rows wherever this pads; those of one-dimensional pads are last."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet, or change in number, in the dimensions that are padded."""
        return 2 * -dim <= len(self.pad)

    def _row_padding(self) -> tuple[int, int]:
        """Return the rows to add in the north and in the south, or to crop if negative."""
        at = 2 * (-self.dim - 1)
        north, south = (*self.pad, *[0] * (at + 2))[at : at + 2]
        return north, south

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the padded globe."""
        return height + sum(self._row_padding())

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the same rows, counted from the globe's first one."""
        north, _ = self._row_padding()
        return out.start - north, out.stop - north

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows inside and those that the mode shows beyond the poles."""
        if self.mode == "constant":
            return super().required_rows(out, height)
        first, stop = self.input_span(out, height)
        if self.mode != "circular":
            return rows_with_poles(first, stop, height, self.mode)
        # Circular rows are those of the globe that cropping leaves.
        cropped = [max(0, -side) for side in self._row_padding()]
        runs = rows_with_poles(
            first - cropped[0], stop - cropped[0], height - sum(cropped), self.mode
        )
        return tuple(RowRange(run.start + cropped[0], run.stop + cropped[0]) for run in runs)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's rows of the padded globe."""
        at = 2 * (-self.dim - 1)
        others = tuple(0 if i in (at, at + 1) else side for i, side in enumerate(self.pad))
        if self.mode != "constant":
            rows = self.fetch(x, bands)
            return F.pad(rows, others, self.mode) if any(others) else rows
        rows = self.fetch_with_fill(x, bands, self.value)
        return F.pad(rows, others, value=self.value) if any(others) else rows


@final
class DomainParallelPad(_RowPad):
    """`F.pad` on one band of rows, equal to it on the whole globe.

    Any width, also wider than a band; negative widths crop.

    Args:
        pad: widths in the order of `torch.nn.functional.pad`: west, east, north, south, ...
        mode: `constant`, `reflect`, `replicate` or `circular`.
        value: what a constant pad holds, 0 by default.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, W)` -> `(..., H_out_local, W_out)`.

    Raises:
        UserError: the mode is unknown.
    """

    def __init__(
        self,
        pad: tuple[int, ...],
        mode: str = "constant",
        value: float | None = None,
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        if mode not in MODES:
            raise UserError(f"DomainParallelPad: mode is one of {', '.join(MODES)}, got {mode}.")
        pad = tuple(pad)
        super().__init__(_Pad(pad, mode, value), pad, mode, value or 0.0, shard_dim, manager)


@final
class DomainParallelPadLayer(_RowPad):
    """A padding layer of torch on one band of rows, equal to that layer on the whole globe.

    Args:
        layer: an `nn.ZeroPad*d`, `nn.ConstantPad*d`, `nn.ReflectionPad*d`, `nn.ReplicationPad*d` or
            `nn.CircularPad*d`.
        shard_dim: the row dimension of the input; by default -2, or -1 of one-dimensional layers.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """

    def __init__(
        self,
        layer: Any,
        shard_dim: int | None = None,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        pad = tuple(layer.padding)
        dim = max(ROW_DIM, -len(pad) // 2) if shard_dim is None else shard_dim
        value = getattr(layer, "value", 0.0)
        mode = PAD_LAYERS[torch_layer_type(type(layer)) or type(layer)]
        super().__init__(layer, pad, mode, value, dim, manager)


PAD_LAYERS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), "constant"),
    **dict.fromkeys((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), "constant"),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), "reflect"),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), "replicate"),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), "circular"),
}


@final
class _Pad(nn.Module):
    """`F.pad` as a module."""

    def __init__(self, pad: tuple[int, ...], mode: str, value: float | None) -> None:
        super().__init__()
        self.pad, self.mode, self.value = pad, mode, value

    def forward(self, x: Tensor) -> Tensor:
        """Return the padded tensor."""
        return F.pad(x, self.pad, self.mode, self.value)

    def extra_repr(self) -> str:
        """Describe the widths and the mode."""
        return f"pad={self.pad}, mode={self.mode}"


@final
class DomainParallelPolePad(StencilLayer):
    """A padding of the globe on one band of rows, equal to it on the whole globe.

    Any width up to the globe's height, also wider than a band.

    Args:
        pad: a module that adds `width` rows beyond each pole, which hold what `poles` says
            (`zeros`, `replicate`, `reflect`, `mirror`, `earth`), and then `columns` circular ones
            on both sides, as `credit_dp.models.blocks.PolePad` does.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W + 2 * columns)`, with
        `H_out = H + 2 * width`.
    """

    def __init__(
        self, pad: Any, shard_dim: int = ROW_DIM, *, manager: DomainParallelManager | None = None
    ) -> None:
        super().__init__(pad, shard_dim, manager, halo_width=pad.width)
        self.pole_mode = pad.poles

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the rows of the padded globe."""
        return int(height + 2 * self.width)

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the same rows, counted from the globe's first one."""
        return out.start - self.width, out.stop - self.width

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's rows of the padded globe."""
        rows = self.fetch(x, bands)
        return F.pad(rows, (self.columns, self.columns, 0, 0), mode="circular")


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
        return self.manager.gather_partition(others[0].shape[self.dim]).height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows as they are."""
        return (RowRange(out.start, out.stop),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the rows that this rank owns of the cropped globe."""
        return self.fetch(x, bands)


@final
class DomainParallelRoll(RowLayer):
    """`torch.roll` on one band of rows, equal to it on the whole globe.

    Args:
        shifts: places to move by, one for each of `dims`.
        dims: dimensions to roll, counted from the start or the end.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, W)` -> the same.

    Raises:
        UserError: there are more shifts than dimensions, or no dimensions.
    """

    def __init__(
        self,
        shifts: int | tuple[int, ...],
        dims: int | tuple[int, ...],
        shard_dim: int = ROW_DIM,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        roll = _Roll(
            (shifts,) if isinstance(shifts, int) else tuple(shifts),
            (dims,) if isinstance(dims, int) else tuple(dims),
        )
        if not roll.dims or len(roll.shifts) != len(roll.dims):
            raise UserError(
                f"DomainParallelRoll: needs one shift for each dimension, got shifts {roll.shifts} "
                f"and dims {roll.dims}. Name the dimensions."
            )
        super().__init__(roll, shard_dim, manager)
        self._row_shift = 0

    def _check_dim(self) -> None:
        """Accept rows in any dimension."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether the dimension is rolled."""
        return dim % ndim in {d % ndim for d in self.dims}

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows that come to lie here: around a pole they are two runs."""
        start = (out.start - self._row_shift) % height
        stop = start + out.stop - out.start
        runs = (RowRange(start, min(stop, height)), RowRange(0, stop - height))
        return tuple(run for run in runs if run.length > 0)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's rows of the rolled globe."""
        moves = [(s, d % x.ndim) for s, d in zip(self.shifts, self.dims, strict=True)]
        rows = self.dim % x.ndim
        row_shift = sum(shift for shift, dim in moves if dim == rows)
        if row_shift != self._row_shift:
            self._row_shift, self._exchanges = row_shift, {}
        others = [(shift, dim) for shift, dim in moves if dim != rows]
        x = self.fetch(x, bands)
        return x.roll(*zip(*others, strict=True)) if others else x


@final
class _Roll(nn.Module):
    """`torch.roll` as a module."""

    def __init__(self, shifts: tuple[int, ...], dims: tuple[int, ...]) -> None:
        super().__init__()
        self.shifts, self.dims = shifts, dims

    def forward(self, x: Tensor) -> Tensor:
        """Return the rolled tensor."""
        return torch.roll(x, self.shifts, self.dims)

    def extra_repr(self) -> str:
        """Describe the shifts."""
        return f"shifts={self.shifts}, dims={self.dims}"
