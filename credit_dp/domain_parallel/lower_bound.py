"""The least that converted layers have to send, for comparison with what they send."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import final

from torch import Tensor

from credit_dp.domain_parallel.halo_exchange import row_bytes
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.layers.depthwise import DepthwiseLayer
from credit_dp.domain_parallel.layers.norm import ReductionLayer
from credit_dp.domain_parallel.layers.row_groups import DomainParallelRowGroups
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.torch_private import backward_pass, version_of

# A global row and the rank that receives it.
RowTransfer = tuple[int, int]


@final
class TrafficLowerBound:
    """Sums the bytes that the layers have to send at least in one step, over all ranks.

    `bytes`: by the bands of a layer's input. Layers that activation checkpointing computes
    again in backward fetch their rows again.
    """

    def __init__(self) -> None:
        self.bytes: Counter[RowPartition] = Counter()
        # The transfers of each tensor so far, by `id`. The tensors are kept alive, as Python would
        # reuse the `id` of a freed one.
        self._transferred: dict[object, set[RowTransfer]] = defaultdict(set)
        self._tensors: list[Tensor] = []

    def add(self, layer: RowLayer, bands: Bands, x: Tensor, output: object) -> None:
        """Add one call of a layer with first input `x`."""
        source = bands.input
        if isinstance(layer, DepthwiseLayer) and layer.transposes(source.height):
            to_channels, to_rows = layer.transpose_pair(bands)
            self._add(
                source, to_channels.total_rows_sent(to_channels=True), _channel_row_bytes(x), x
            )
            if isinstance(output, Tensor):
                self._add(
                    source,
                    to_rows.total_rows_sent(to_channels=False),
                    _channel_row_bytes(output),
                    output,
                )
            return
        row_size = row_bytes(x, layer.dim)
        if not isinstance(layer, DomainParallelRowGroups):
            self._add(
                source,
                len(self._not_yet_transferred(required_transfers(layer, bands), x)),
                row_size,
                x,
            )
            return
        # Whole groups move to one rank and their output moves back to the owners of the rows.
        rows = min_rows_moved(layer, source)
        self._add(source, rows, row_size, x)
        if isinstance(output, Tensor):  # the output rows are returned
            self._add(source, rows, row_bytes(output, layer.dim), output)

    def _add(self, source: RowPartition, rows: int, row_size: int, x: Tensor) -> None:
        # Activation checkpointing runs a forward again within backward: it fetches again, but its
        # gradients were counted the first time.
        directions = 2 if x.requires_grad and backward_pass() < 0 else 1
        self.bytes[source] += rows * row_size * directions

    def _not_yet_transferred(self, transfers: set[RowTransfer], x: Tensor) -> set[RowTransfer]:
        """Return new transfers only: layers that read the same tensor can share them."""
        self._tensors.append(x)
        transferred = self._transferred[id(x), version_of(x), backward_pass() >= 0]
        new = transfers - transferred
        transferred |= new
        return new


def required_transfers(layer: RowLayer, bands: Bands) -> set[RowTransfer]:
    """Return every row that a rank needs for its output and does not own."""
    if isinstance(layer, ReductionLayer):  # sends statistics, no rows
        return set()
    return {
        (row, rank)
        for rank, ranges in enumerate(layer.exchange(bands).required_rows)
        for rows in ranges
        if not rows.zero_filled
        for row in range(rows.start, rows.stop)
        if bands.input.owner(row) != rank
    }


def min_rows_moved(layer: DomainParallelRowGroups, bands: RowPartition) -> int:
    """Return the rows to send if each group is processed by the rank that owns most of its rows."""
    groups = layer.wrapped.groups(bands.height)
    rows_moved = 0
    for first in range(0, len(groups.order), groups.size):
        group = groups.order[first : first + groups.size]
        owners = Counter(bands.owner(row) for row in group if row is not None)
        rows_moved += owners.total() - max(owners.values(), default=0)
    return rows_moved


def _channel_row_bytes(x: Tensor) -> int:
    return x.shape[:-3].numel() * x.shape[-1] * x.element_size()
