"""Padding, cropping and rolling on one band of rows.

Each layer computes which global rows its output band shows, fetches them, and leaves all other
dimensions to torch.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.padding import padded_rows
from credit_dp.domain_parallel.exchange import RowRange
from credit_dp.domain_parallel.halo_exchange import memory_format_of
from credit_dp.domain_parallel.layers.base import (
    Bands,
    ConstantFillLayer,
    RowLayer,
    StencilLayer,
    torch_layer_type,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM

MODES = ("constant", "reflect", "replicate", "circular")


def pad_circularly(x: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Return `x` continued periodically, by any widths from 0 on, in the order of `F.pad`.

    In contrast to `F.pad` it keeps the memory format, and copies once where that copies three
    times, and five times as often in its backward.
    """
    return _CircularPad.apply(x, widths) if any(widths) else x  # type: ignore[no-untyped-call]


def circular_gradient(grad: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Return the gradient of `x`, given that of `pad_circularly(x, widths)`."""
    for index in reversed(range(0, len(widths), 2)):
        before, after = widths[index : index + 2]
        if before or after:
            grad = _add_up_turns(grad, -1 - index // 2, before, after)
    return grad


class _CircularPad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        ctx.widths = widths
        for index in range(0, len(widths), 2):
            before, after = widths[index : index + 2]
            dim = -1 - index // 2
            size = x.shape[dim]
            turns_before, first = divmod(before, size)
            turns_after, last = divmod(after, size)
            parts = [x] * (turns_before + 1 + turns_after)
            parts = [x.narrow(dim, size - first, first), *parts] if first else parts
            parts = [*parts, x.narrow(dim, 0, last)] if last else parts
            x = torch.cat(parts, dim) if len(parts) > 1 else x
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return circular_gradient(grad, ctx.widths), None


def _add_up_turns(grad: Tensor, dim: int, before: int, after: int) -> Tensor:
    size = grad.shape[dim] - before - after
    inner = grad.narrow(dim, before, size)
    total = inner.clone(memory_format=memory_format_of(grad))
    # From `start` of the padded size on, up to the next copy of the first entry.
    start = 0
    while start < before + size + after:
        entry = (start - before) % size
        length = min(size - entry, before + size + after - start)
        if start != before:
            total.narrow(dim, entry, length).add_(grad.narrow(dim, start, length))
        start += length
    return total


@final
@dataclass(frozen=True)
class ColumnPadding:
    """Padding of all dimensions except the rows, in the order of `F.pad`; zero along the rows."""

    padding_widths: tuple[int, ...]
    mode: str

    def pad(self, x: Tensor) -> Tensor:
        """Return `x` with its padding; circular padding may be wider than the globe."""
        if self.mode == "circular":
            return pad_circularly(x, self.padding_widths)
        return F.pad(x, self.padding_widths, self.mode) if any(self.padding_widths) else x

    def unpad(self, padded: Tensor) -> Tensor:
        """Return a view of the entries that are not padding."""
        for dim, (before, after) in enumerate(
            zip(self.padding_widths[::2], self.padding_widths[1::2], strict=True)
        ):
            if before or after:
                size = padded.shape[-1 - dim] - before - after
                padded = padded.narrow(-1 - dim, before, size)
        return padded

    def gradients(self, grad: Tensor) -> Tensor:
        """Return the gradient of `x`, given that of the padded `x`."""
        if not any(self.padding_widths):
            return grad
        if self.mode == "circular":
            return circular_gradient(grad, self.padding_widths)
        # torch's own adjoint of `pad`, whatever the mode; the values of `x` don't matter.
        with torch.enable_grad():
            x = torch.zeros_like(self.unpad(grad)).requires_grad_()
            return torch.autograd.grad(self.pad(x), x, grad)[0]


def column_padding_of(layer: Any, columns: int) -> ColumnPadding:
    """Return the padding by `columns` on both sides in a layer's `column_mode`, or circular."""
    mode = getattr(layer, "column_mode", "circular")
    return ColumnPadding((columns, columns, 0, 0), "constant" if mode == "zeros" else mode)


class _RowPad(ConstantFillLayer, ABC):
    """`F.pad`: rows by an exchange, all other dimensions by torch."""

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
        self.pad = pad
        self.mode = mode
        self.value = value

    def _check_dim(self) -> None:
        """Accept rows in any dimension; one-dimensional pads have them in the last."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        return 2 * -dim <= len(self.pad)

    def _row_padding(self) -> tuple[int, int]:
        # `F.pad` lists widths from the last dimension on and may leave out leading dimensions.
        index = 2 * (-self.dim - 1)
        north, south = (*self.pad, *[0] * (index + 2))[index : index + 2]
        return north, south

    def out_height(self, height: int, *others: Tensor) -> int:
        return height + sum(self._row_padding())

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        north, _ = self._row_padding()
        return out.start - north, out.stop - north

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        return padded_rows(out, height, *self._row_padding(), self.mode)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        if not any(self.pad):
            return self.fetch(x, bands).clone()  # as torch does: either may be changed in place
        index = 2 * (-self.dim - 1)
        other_widths = tuple(
            0 if i in (index, index + 1) else width for i, width in enumerate(self.pad)
        )
        if self.mode != "constant":
            rows = self.fetch(x, bands)
            fits = all(
                0 <= width <= rows.shape[-1 - i // 2] for i, width in enumerate(other_widths)
            )
            if self.mode == "circular" and fits:  # torch refuses to wrap around more than once
                return pad_circularly(rows, other_widths)
            return F.pad(rows, other_widths, self.mode) if any(other_widths) else rows
        rows = self.fetch_with_fill(x, bands, self.value)
        return F.pad(rows, other_widths, value=self.value) if any(other_widths) else rows


@final
class DomainParallelPadLayer(_RowPad):
    """A torch padding layer on one band of rows, equal to that layer on the whole globe.

    Args:
        layer: an `nn.ZeroPad*d`, `nn.ConstantPad*d`, `nn.ReflectionPad*d`, `nn.ReplicationPad*d` or
            `nn.CircularPad*d`.
        shard_dim: the row dimension of the input; by default -2, or -1 for one-dimensional layers.

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
class DomainParallelPolePad(StencilLayer):
    """Padding around the globe on one band of rows, equal to it on the whole globe.

    Supports every width up to the globe's height, also wider than a band.

    Args:
        pad: a module that adds `width` rows beyond each pole, in the mode `poles` (`zeros`,
            `replicate`, `reflect`, `mirror` or `earth`), and then `columns` columns on both sides
            in the mode `column_mode` (by default `circular`), as
            `credit_dp.models.blocks.PolePad` does.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W + 2 * columns)`, with
        `H_out = H + 2 * width`.
    """

    def __init__(
        self, pad: Any, shard_dim: int = ROW_DIM, *, manager: DomainParallelManager | None = None
    ) -> None:
        super().__init__(pad, shard_dim, manager, halo_width=pad.width)
        self.pole_mode = pad.poles
        self.column_padding = column_padding_of(pad, pad.columns)

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the height of the padded globe."""
        return int(height + 2 * self.width)

    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the same rows, counted from the first row of the unpadded globe."""
        return out.start - self.width, out.stop - self.width

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's rows of the padded globe."""
        # Columns last: rows beyond a pole may be rolled in longitude, which needs the plain globe.
        return self.column_padding.pad(self.fetch(x, bands))


@final
class DomainParallelMatchRows(RowLayer):
    """Crops southern rows and eastern columns of a globe to the shape of a reference.

    Args:
        crop: a module whose `forward(x, reference)` returns
            `x[..., :reference.shape[-2], :reference.shape[-1]]`.

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
        """Return the global height of the reference; a collective."""
        return self.manager.gather_partition(others[0].shape[self.dim]).height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the output rows themselves: only southern rows are cropped."""
        return (RowRange(out.start, out.stop),)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's rows of the cropped globe."""
        return self.fetch(x, bands)
