"""The least that any exchange could send for a layer and its bands, to hold a plan against.

It is worked out from what the layers need, not from what their exchanges send: each row of a tensor
that a rank needs and doesn't own crosses once in each direction, however many layers read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import final

from torch import Tensor

from credit_dp.domain_parallel.layers.depthwise_layer import DepthwiseLayer
from credit_dp.domain_parallel.layers.row_groups import DomainParallelRowGroups
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.layers.statistics_layer import StatisticsLayer
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.running import in_backward

# A global row, and the rank that gets it.
Crossing = tuple[int, int]


@final
class Least:
    """Adds up what the layers of a step would have to send at least, all ranks together.

    `bytes`: by the global rows of a layer's input. What is computed again in backward, to save
    memory, is fetched again.
    """

    def __init__(self) -> None:
        self.bytes: Counter[int] = Counter()
        # What has crossed of each tensor. The tensors are held: the address of a freed one would
        # be given out again.
        self._crossed: dict[object, set[Crossing]] = defaultdict(set)
        self._read: list[Tensor] = []

    def add(self, layer: RowLayer, bands: Bands, x: Tensor, made: object) -> None:
        """Add one call of a layer: of `x`, whose rows are where its plan says."""
        height = bands.taken.height
        if isinstance(layer, DepthwiseLayer) and layer.transposes(height):
            there, back = layer.transposes_of(bands)
            self._add(height, there.moved(to_channels=True), _channel_row_bytes(x), x)
            if isinstance(made, Tensor):
                self._add(height, back.moved(to_channels=False), _channel_row_bytes(made), made)
            return
        size = row_bytes(x, layer.dim)
        if not isinstance(layer, DomainParallelRowGroups):
            self._add(height, len(self._new(missing(layer, bands), x)), size, x)
            return
        rows = rows_away(layer, bands.taken)
        self._add(height, rows, size, x)
        if isinstance(made, Tensor):  # the rows go home again
            self._add(height, rows, row_bytes(made, layer.dim), made)

    def _add(self, height: int, rows: int, size: int, x: Tensor) -> None:
        """Add rows of `x` of some bytes, there and, if it needs a gradient, back."""
        directions = 2 if x.requires_grad and not in_backward() else 1
        self.bytes[height] += rows * size * directions

    def _new(self, crossings: set[Crossing], x: Tensor) -> set[Crossing]:
        """Return what hasn't crossed yet, for another layer that reads this tensor."""
        self._read.append(x)
        crossed = self._crossed[id(x), x._version, in_backward()]
        new = crossings - crossed
        crossed |= new
        return new


def missing(layer: RowLayer, bands: Bands) -> set[Crossing]:
    """Return each row that a rank needs for its output and doesn't own."""
    if isinstance(layer, StatisticsLayer):  # whose rows stay where they are
        return set()
    return {
        (row, rank)
        for rank, runs in enumerate(layer.exchange(bands).needs)
        for run in runs
        if not run.blank
        for row in range(run.start, run.stop)
        if bands.taken.owner(row) != rank
    }


def rows_away(layer: DomainParallelRowGroups, bands: RowPartition) -> int:
    """Return how many rows must leave home if each group is treated where most of its rows are."""
    groups = layer.wrapped.groups(bands.height)
    away = 0
    for first in range(0, len(groups.order), groups.size):
        group = groups.order[first : first + groups.size]
        owners = Counter(bands.owner(row) for row in group if row is not None)
        away += owners.total() - max(owners.values(), default=0)
    return away


def _channel_row_bytes(x: Tensor) -> int:
    """Return the bytes of one row of one channel, of all samples."""
    return x.shape[:-3].numel() * x.shape[-1] * x.element_size()


def row_bytes(x: Tensor, dim: int) -> int:
    """Return the bytes of one row, which is in the negative dimension `dim`."""
    return x.shape[:dim].numel() * x.shape[dim:][1:].numel() * x.element_size()
