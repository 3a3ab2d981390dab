"""Layers that process groups of rows independently of each other, such as windowed attention.

Each rank processes whole groups. Forward: fetch the rows of this rank's groups, apply the layer to
them, and return the output rows to the ranks whose bands they are in. Nothing is sent where the
groups line up with the bands.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, count, pairwise, product
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credit_dp.constants import cached_constant
from credit_dp.domain_parallel.bands.indices import ranges_of
from credit_dp.domain_parallel.bands.rows import pad_rows
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import fetch_rows
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import RowPartition

RowOrder = tuple[int | None, ...]


class GroupAssignment(NamedTuple):
    """The work of one rank: its groups, their rows in order, and the exchanges of these rows.

    `fetch_exchange` fetches the rows of the groups, `return_exchange` returns the output.
    """

    groups: slice
    order: RowOrder
    fetch_exchange: RowExchange
    return_exchange: RowExchange


@final
class DomainParallelRowGroups(RowLayer):
    """A layer of row groups (windows, or every n-th row) on one band, equal to it on the globe.

    Groups are spread evenly over the ranks. A rank may have no group at all.

    Args:
        layer: a module with `row_dim`, the row dimension, counted from the end; `groups(height)`,
            which returns the `size` of a group, the number of groups (`count`), the rows in the
            `order` of the groups (None: a row of zeros) and the `positions` of the rows in that
            order; and `treat(x, groups, height)`, which returns the output of some of the groups,
            maybe of none. See `credit_dp.models.row_groups.GroupedRows`.

    Shapes:
        The `H_local` rows in `row_dim` stay; other dimensions may change.
    """

    def __init__(self, layer: Any, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(layer, layer.row_dim, manager)
        self._assignments: dict[RowPartition, GroupAssignment] = {}
        self._compiled_assignments: dict[int, GroupAssignment] = {}  # by height, for compiled code

    def _check_dim(self) -> None:
        """Accept the row dimension of the layer."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return True; rows in another dimension than the layer's `row_dim` are refused."""
        self.dim = self.wrapped.row_dim
        return super().couples_rows(dim, ndim)

    def set_plan(self, dim: int, heights: dict[int, int]) -> None:
        """Adopt the plan: the row dimension, and the global output height of each input height."""
        super().set_plan(dim, heights)
        self._assignments = {}

    def forget_exchanges(self) -> None:
        """Drop cached exchanges after the manager was re-assigned to another rank (dry runs)."""
        super().forget_exchanges()
        self._assignments = {}

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the output rows themselves: `assignment` decides what is fetched."""
        return (RowRange(out.start, out.stop),)

    def row_multiple(self, height: int) -> int:
        """Return the size of a group, or 1 if aligned bands would not send less."""
        groups = self.wrapped.groups(height)
        in_order = groups.positions == tuple(range(height))
        return int(groups.size) if in_order else 1

    def assignment(self, bands: RowPartition) -> GroupAssignment:
        """Return the work of this rank on a globe in these bands."""
        if torch.compiler.is_dynamo_compiling():
            return self._compiled_assignments[bands.height]
        if bands not in self._assignments:
            rank = self.manager.domain_rank
            groups = self.wrapped.groups(bands.height)
            shares = assign_groups(bands, groups)
            orders = [
                groups.order[share.start * groups.size : share.stop * groups.size]
                for share in shares
            ]
            fetched = [[row for row in order if row is not None] for order in orders]
            # On the way back the bands are the fetched rows of the ranks, one after the other.
            row_index = {row: index for index, row in enumerate(chain(*fetched))}
            returned = [
                [row_index[row] for row in range(first, stop)]
                for first, stop in pairwise(bands.bounds)
            ]
            fetch_exchange = RowExchange(bands, tuple(map(ranges_of, fetched)), rank)
            grouped_rows = RowPartition.from_sizes(list(map(len, fetched)))
            return_exchange = RowExchange(grouped_rows, tuple(map(ranges_of, returned)), rank)
            self._assignments[bands] = GroupAssignment(
                shares[rank], orders[rank], fetch_exchange, return_exchange
            )
        return self._assignments[bands]

    def prepare_height(self, bands: Bands) -> None:
        """Collect what compiled code needs of the plan at one height."""
        super().prepare_height(bands)
        self._compiled_assignments[bands.input.height] = self.assignment(bands.input)

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows: fetch, apply the layer to whole groups, return."""
        groups, order, fetch_exchange, return_exchange = self.assignment(bands.input)
        transport = self.manager.transport
        dim = self.dim
        rows = insert_zero_rows(fetch_rows(x, fetch_exchange, transport, dim), order, dim)
        y = remove_zero_rows(self.treat(rows, groups, bands.input.height), order, dim)
        if not order:
            # The output for no groups is empty and may not depend on parameters and input at all.
            # Adding sums to an empty tensor connects it to both without a change: every parameter
            # gets a gradient of zeros instead of None, and backward reaches the fetch, in which the
            # other ranks wait for this one.
            y = sum((weight.sum() for weight in self.parameters()), y + rows.sum())
        return fetch_rows(y, return_exchange, transport, dim)


def assign_groups(bands: RowPartition, groups: Any) -> list[slice]:
    """Return the consecutive groups of each rank, chosen such that it owns many of their rows.

    No rank gets more groups than the average, rounded up.
    """
    size = groups.size
    count = groups.count
    max_groups = -(-count // bands.ranks)
    # Windows, in which neighbouring rows are neighbours with one exception at most: let each rank's
    # groups end as close as possible to its band, if that is balanced.
    if sum(b - a != 1 for a, b in pairwise(groups.positions)) <= 1:
        shift = -groups.positions[0] % (size * count)  # rows by which windows are shifted
        inner_ends = [(2 * (bound - shift) + size) // (2 * size) for bound in bands.bounds[1:-1]]
        assignment = RowPartition((0, *(min(max(end, 0), count) for end in inner_ends), count))
        if max(assignment.sizes) <= max_groups:
            return [assignment.rows(rank) for rank in range(bands.ranks)]
    # Every n-th row, or unbalanced windows: cut the groups into equal shares and give them to ranks
    # greedily, by the number of rows that a rank already owns. Ties go by index on every rank.
    ranks = range(bands.ranks)
    ends = [-(-index * count // bands.ranks) for index in range(bands.ranks + 1)]
    shares = [slice(*start_and_stop) for start_and_stop in pairwise(ends)]
    rows_by_owner = [
        Counter(bands.owner(row) for row in order if row is not None)
        for order in (groups.order[share.start * size : share.stop * size] for share in shares)
    ]
    rank_share: dict[int, int] = {}
    for share_index, rank in sorted(
        product(ranks, ranks), key=lambda pair: -rows_by_owner[pair[0]][pair[1]]
    ):
        if rank not in rank_share and share_index not in rank_share.values():
            rank_share[rank] = share_index
    return [shares[rank_share[rank]] for rank in ranks]


def insert_zero_rows(x: Tensor, order: RowOrder, dim: int) -> Tensor:
    """Return `x` with a row of zeros wherever `order` has None."""
    zero_rows = order.count(None)
    if not zero_rows:
        return x
    rows = pad_rows(x, dim, 0, zero_rows)
    if order[-zero_rows:] == (None,) * zero_rows:
        return rows
    return rows.index_select(dim, cached_constant(_sources, order, x.device, torch.int64))


def _sources(order: RowOrder) -> list[int]:
    """Return where each row of the order is, if its rows of zeros follow all others."""
    next_row = count()
    next_zero = count(len(order) - order.count(None))
    return [next(next_zero if entry is None else next_row) for entry in order]


def remove_zero_rows(x: Tensor, order: RowOrder, dim: int) -> Tensor:
    """Return `x` without the rows that `insert_zero_rows` has added."""
    zero_rows = order.count(None)
    if order[len(order) - zero_rows :] == (None,) * zero_rows:
        return x.narrow(dim, 0, len(order) - zero_rows)
    return x.index_select(dim, cached_constant(_kept, order, x.device, torch.int64))


def _kept(order: RowOrder) -> list[int]:
    return [index for index, row in enumerate(order) if row is not None]
