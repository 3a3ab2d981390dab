"""Rules of sliding windows: each rank fetches the rows of its windows, and `fold` adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.bands.indices import ranges_of
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import add_to_owners
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_of,
    rule_for,
)
from credit_dp.domain_parallel.view.layers import with_spatial_rows
from credit_dp.domain_parallel.view.shapes import in_units, move_rows, with_bands
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    Layout,
    exchange_entries,
    wrap,
)


class Windows(NamedTuple):
    """Windows along rows: `size` rows, `dilation` apart, each `step` rows after the one before."""

    size: int
    step: int
    dilation: int = 1
    padding: int = 0

    @property
    def extent(self) -> int:
        """Return the number of rows from the first to the last of a window."""
        return self.dilation * (self.size - 1) + 1

    def count(self, height: int) -> int:
        """Return the number of windows in a field with so many rows."""
        return (height + 2 * self.padding - self.extent) // self.step + 1

    def required_rows(self, bands: RowPartition, height: int) -> list[tuple[RowRange, ...]]:
        """Return the rows of each rank's windows, with zeros beyond the poles."""
        required = []
        for windows in map(bands.rows, range(bands.ranks)):
            first = windows.start * self.step - self.padding
            stop = (windows.stop - 1) * self.step - self.padding + self.extent
            rows = [row if 0 <= row < height else -1 for row in range(first, stop)]
            required.append(ranges_of(rows))
        return required


def _has_windows_for_all(x: GlobalTensor, windows: Windows) -> bool:
    """Return whether each rank gets a window along the rows, which are not folded."""
    layout = layout_of(x)
    return layout.outer == 1 and windows.count(layout.size) >= x.view_.ranks


def _rows_of_windows(x: GlobalTensor, windows: Windows) -> tuple[Tensor, RowPartition]:
    """Return the rows of this rank's windows, and the bands of windows; a collective.

    Raises:
        NoRuleError: there are fewer windows than ranks, or rows are folded into a batch.
    """
    layout = layout_of(x)
    bands = x.view_.partition(windows.count(layout.size))
    if bands is None or layout.outer != 1:
        raise NoRuleError
    required = windows.required_rows(bands, layout.size)
    return exchange_entries(x, required, layout._replace(partition=bands)).local, bands


@rule_for("unfold")
def unfold(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Windows along one dimension, or the windows of a convolution."""
    if func is F.unfold:
        return _unfold_image(args, kwargs)
    arguments = bind(("input", "dimension", "size", "step"), args, kwargs)
    x, size, step = arguments["input"], arguments["size"], arguments["step"]
    layout, dim = layout_of(x), arguments["dimension"] % x.ndim
    if dim != layout.dim:
        return wrap(x.local.unfold(dim, size, step), layout, x.view_)
    windows = Windows(size, step)
    if not _has_windows_for_all(x, windows):
        return move_rows(x, [dim]).unfold(dim, size, step)
    rows, bands = _rows_of_windows(x, windows)
    return wrap(rows.unfold(dim, size, step), layout._replace(partition=bands), x.view_)


SETTINGS = ("kernel_size", "dilation", "padding", "stride")
DEFAULTS = {"dilation": 1, "padding": 0, "stride": 1}


def _pairs(arguments: Kwargs, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return settings along rows and columns."""
    return [
        (value, value) if isinstance(value, int) else (value[0], value[-1])
        for value in (arguments[name] for name in names)
    ]


def _unfold_image(args: Args, kwargs: Kwargs) -> Any:
    """Return all windows of `(B, C, H, W)` or `(C, H, W)`, one column each."""
    arguments = DEFAULTS | bind(("input", *SETTINGS), args, kwargs)
    x = arguments["input"]
    if x.ndim == 3:
        return F.unfold(**arguments | {"input": x.unsqueeze(0)}).squeeze(0)
    kernel, dilation, padding, stride = _pairs(arguments, SETTINGS)
    if layout_of(x).dim != 0:
        x = with_spatial_rows(x, 2)
    windows = Windows(kernel[0], stride[0], dilation[0], padding[0])
    is_by_rows = layout_of(x).dim == 2 and _has_windows_for_all(x, windows)
    if layout_of(x).dim > 1 and not is_by_rows:
        x = move_rows(x, [2, 3], [1])
    layout = layout_of(x)
    if not is_by_rows:
        local = F.unfold(x.local, kernel, dilation, padding, stride)
        if layout.dim == 1:  # each channel has an entry for each point of the kernel
            layout = layout._replace(partition=_times(layout.partition, kernel[0] * kernel[1]))
        return wrap(local, layout, x.view_)
    rows, bands = _rows_of_windows(x, windows)
    local = F.unfold(rows, kernel, dilation, (0, padding[1]), stride)
    columns = Windows(kernel[1], stride[1], dilation[1], padding[1]).count(x.shape[3])
    return wrap(local, Layout(2, 1, _times(bands, columns)), x.view_)


def _times(bands: RowPartition, factor: int) -> RowPartition:
    """Return the bands of entries of which each row has so many."""
    return RowPartition(tuple(bound * factor for bound in bands.bounds))


@rule_for("fold")
def fold(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The sum of overlapping windows, of which neighbours add the rows that they share."""
    arguments = DEFAULTS | bind(("input", "output_size", *SETTINGS), args, kwargs)
    x, view = arguments["input"], arguments["input"].view_
    if x.ndim == 2:
        return F.fold(**arguments | {"input": x.unsqueeze(0)}).squeeze(0)
    kernel, dilation, padding, stride, size = _pairs(arguments, (*SETTINGS, "output_size"))
    layout = layout_of(x)
    if layout.dim == 0:
        return wrap(F.fold(x.local, size, kernel, dilation, padding, stride), layout, view)
    windows = Windows(kernel[0], stride[0], dilation[0], padding[0])
    columns = Windows(kernel[1], stride[1], dilation[1], padding[1]).count(size[1])
    target = view.partition(size[0])
    if x.shape[2] != columns * windows.count(size[0]):
        raise NoRuleError
    has_windows = layout.dim == 2 and layout.outer == 1 and windows.count(size[0]) >= view.ranks
    if not has_windows or target is None:
        points = kernel[0] * kernel[1]
        x = _with_whole_channels(x, points)
        local = F.fold(x.local, size, kernel, dilation, padding, stride)
        layout = layout_of(x)
        bounds = tuple(bound // points for bound in layout.partition.bounds)
        return wrap(local, layout._replace(partition=RowPartition(bounds)), view)
    x = in_units(x, columns)
    bands = RowPartition(tuple(bound // columns for bound in layout_of(x).partition.bounds))
    if 0 in bands.sizes:
        raise NoRuleError
    height = (bands.sizes[view.rank] - 1) * windows.step + windows.extent
    local = F.fold(x.local, (height, size[1]), kernel, dilation, (0, padding[1]), stride)
    exchange = RowExchange(target, tuple(windows.required_rows(bands, size[0])), view.rank)
    total = add_to_owners(local, exchange, view.manager.transport, -2)
    return wrap(total, Layout(2, 1, target), view)


def _with_whole_channels(x: GlobalTensor, points: int) -> GlobalTensor:
    """Return windows `(B, C * points, L)` of which each rank has those of some channels.

    Raises:
        NoRuleError: there are fewer channels than ranks.
    """
    layout, ranks = layout_of(x), x.view_.ranks
    partition = layout.partition
    # The last bound, too: where rows are folded, a channel may have the end of one group of rows
    # and the beginning of the next.
    is_whole = layout.dim == 1 and all(bound % points == 0 for bound in partition.bounds)
    if is_whole and 0 not in partition.sizes:
        return x
    if x.shape[1] < ranks * points:
        raise NoRuleError
    return with_bands(x, Layout(1, 1, RowPartition.in_multiples_of(x.shape[1], ranks, points)))
