"""Layers that treat groups of rows apart from each other: whole groups are dealt to ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count, pairwise, product
from typing import Any, NamedTuple, final

import torch.nn.functional as F
from torch import Tensor

from credit_dp.constants import constant_tensor
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.layers.base import Bands, RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import RowPartition

RowOrder = tuple[int | None, ...]


class GroupAssignment(NamedTuple):
    """Which groups this rank treats, their rows in order, and how these come and go home."""

    groups: slice
    order: RowOrder
    fetch_exchange: RowExchange
    return_exchange: RowExchange


@final
class DomainParallelRowGroups(RowLayer):
    """A layer of row groups (windows, or every n-th row) on one band, equal to it on the globe.

    Each rank treats whole groups, as many as the others or one more, maybe none: it fetches their
    rows and sends the output home. Where groups end where bands do, nothing is sent.

    Args:
        layer: has `row_dim`, where rows are, counted from the end; `groups(height)`, which returns
            the `size` of a group, how many there are (`count`), the rows in the `order` of the
            groups (None: a row of zeros) and the `positions` of the rows in that order; and
            `treat(x, groups, height)`, the output of some of the groups, maybe of none. See
            `credit_dp.models.row_groups.GroupedRows`.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        the input's `H_local` rows in `row_dim` stay; other dimensions may change.
    """

    def __init__(self, layer: Any, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(layer, layer.row_dim, manager)
        self._assignments: dict[RowPartition, GroupAssignment] = {}

    def _check_dim(self) -> None:
        """Rows are where the layer says."""

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Rows meet in the layer's own dimension of rows, and may be in no other."""
        self.dim = self.wrapped.row_dim
        return super().couples_rows(dim, ndim)

    def set_plan(self, dim: int, planned: dict[int, int]) -> None:
        """Adopt where the plan found rows, and the global heights: taken -> made."""
        super().set_plan(dim, planned)
        self._assignments = {}

    def forget_exchanges(self) -> None:
        """Make exchanges anew, because the manager has become another rank."""
        super().forget_exchanges()
        self._assignments = {}

    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the same height."""
        return height

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows as they are: what is fetched depends on the groups, see `assignment`."""
        return (RowRange(out.start, out.stop),)

    def row_multiple(self, height: int) -> int:
        """Return of how many rows a band should be a multiple; 1 if that would spare nothing."""
        groups = self.wrapped.groups(height)
        in_order = groups.positions == tuple(range(height))
        return int(groups.size) if in_order else 1

    def assignment(self, bands: RowPartition) -> GroupAssignment:
        """Return what this rank does of a globe in these bands."""
        if bands not in self._assignments:
            groups, rank = self.wrapped.groups(bands.height), self.manager.domain_rank
            shares = assign_groups(bands, groups)
            orders = [
                groups.order[share.start * groups.size : share.stop * groups.size]
                for share in shares
            ]
            rows = [[row for row in order if row is not None] for order in orders]
            at = {row: place for place, row in enumerate(chain(*rows))}
            home = [[at[row] for row in _range(bands.rows(r))] for r in range(bands.ranks)]
            there = RowExchange(bands, tuple(map(_row_ranges, rows)), rank)
            treated = RowPartition.from_sizes(list(map(len, rows)))
            back = RowExchange(treated, tuple(map(_row_ranges, home)), rank)
            self._assignments[bands] = GroupAssignment(shares[rank], orders[rank], there, back)
        return self._assignments[bands]

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Fetch the rows of this rank's groups, treat them, and send them home."""
        groups, order, there, back = self.assignment(bands.input)
        transport, dim = self.manager.transport, self.dim
        rows = insert_zero_rows(there.apply(x, transport, dim), order, dim)
        treated = remove_zero_rows(self.treat(rows, groups, bands.input.height), order, dim)
        if not order:
            # Without a group every parameter gets a gradient of zeros, and not none, and the rows'
            # way home is taken in backward: what is made of nothing may have forgotten both.
            treated = sum((weight.sum() for weight in self.parameters()), treated + rows.sum())
        return back.apply(treated, transport, dim)


def assign_groups(bands: RowPartition, groups: Any) -> list[slice]:
    """Share out groups, to each rank consecutive ones of which it has many rows.

    No rank gets more than if all had the same number, rounded up.
    """
    size, count, first = groups.size, groups.count, groups.positions[0]
    most = -(-count // bands.ranks)
    if _is_consecutive(groups.positions):
        shift = -first % (size * count)
        near = [(2 * (bound - shift) + size) // (2 * size) for bound in bands.bounds[1:-1]]
        nearest = RowPartition((0, *(min(max(at, 0), count) for at in near), count))
        if max(nearest.sizes) <= most:
            return [nearest.rows(rank) for rank in range(bands.ranks)]
    ranks = range(bands.ranks)
    ends = [-(-at * count // bands.ranks) for at in range(bands.ranks + 1)]
    shares = [slice(*each) for each in pairwise(ends)]
    owned = [
        Counter(bands.owner(row) for row in order if row is not None)
        for order in (groups.order[share.start * size : share.stop * size] for share in shares)
    ]
    dealt: dict[int, int] = {}
    for at, rank in sorted(product(ranks, ranks), key=lambda pair: -owned[pair[0]][pair[1]]):
        if rank not in dealt and at not in dealt.values():
            dealt[rank] = at
    return [shares[dealt[rank]] for rank in ranks]


def _is_consecutive(positions: Sequence[int]) -> bool:
    """Return whether rows that follow each other do so in the groups, but for one place."""
    return sum(b - a != 1 for a, b in pairwise(positions)) <= 1


def insert_zero_rows(x: Tensor, order: RowOrder, dim: int) -> Tensor:
    """Put rows of zeros where an order has None."""
    blanks = order.count(None)
    if not blanks:
        return x
    rows = F.pad(x, (*[0, 0] * (-dim - 1), 0, blanks))
    if order[-blanks:] == (None,) * blanks:
        return rows
    row, blank = count(), count(len(order) - blanks)
    source = [next(blank if entry is None else row) for entry in order]
    return rows.index_select(dim, constant_tensor(source, x.device))


def remove_zero_rows(x: Tensor, order: RowOrder, dim: int) -> Tensor:
    """Undo `insert_zero_rows`."""
    places = [place for place, row in enumerate(order) if row is not None]
    if places == list(range(len(places))):
        return x.narrow(dim, 0, len(places))
    return x.index_select(dim, constant_tensor(places, x.device))


def _range(rows: slice) -> range:
    return range(rows.start, rows.stop)


def _row_ranges(rows: Iterable[int]) -> tuple[RowRange, ...]:
    """Return rows as runs of consecutive ones."""
    runs: list[RowRange] = []
    for row in rows:
        if runs and runs[-1].stop == row:
            runs[-1] = RowRange(runs[-1].start, row + 1)
        else:
            runs.append(RowRange(row, row + 1))
    return tuple(runs)
