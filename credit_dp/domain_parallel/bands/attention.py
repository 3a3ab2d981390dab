"""How ranks share attention over rows: each computes some heads, or the queries of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, final

from credit_dp.domain_parallel.partition import RowPartition, falls_into_equal_parts

Shape = Sequence[int]


@final
class Split(NamedTuple):
    """How ranks share attention: `groups` ranks after each other have a part of the heads each.

    Attributes:
        dim: the dimension that is shared, of heads or of samples; negative.
    """

    dim: int
    groups: int

    def heads(self, count: int, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return for each rank its first head and the end."""
        bounds = RowPartition.balanced(count, self.groups).bounds
        parts = (rank % self.groups for rank in range(ranks))
        return tuple((bounds[part], bounds[part + 1]) for part in parts)

    def rows(self, bands: RowPartition) -> tuple[tuple[int, int], ...]:
        """Return for each rank the rows of its queries: those of all ranks around it."""
        firsts = (rank - rank % self.groups for rank in range(bands.ranks))
        return tuple((bands.bounds[first], bands.bounds[first + self.groups]) for first in firsts)


def best_split(query: Shape, key: Shape, value: Shape, ranks: int) -> Split | None:
    """Return the shares with the fewest bytes, and of equal ones the shares that hold least.

    Args:
        query, key, value: the shapes of tensors with rows in their last dimension but one.

    Returns:
        None if it is best that queries stay, and keys and values travel.
    """
    moved = prod(query) + prod(query) // max(query[-1], 1) * value[-1]
    gathered = prod(key) + prod(value)

    def entries(groups: int) -> int:
        """Return how many entries all ranks send, times the number of ranks."""
        alike = ranks // groups
        return moved * (ranks - alike) + gathered * (ranks - 1) * alike

    choices = [
        (entries(groups), -groups, dim)
        for dim in range(-len(query), -2)
        for groups in range(2, ranks + 1)
        if ranks % groups == 0
        and len({shape[dim] for shape in (query, key, value)}) == 1
        and falls_into_equal_parts(query[dim], groups)
    ]
    if not choices or min(choices)[0] > entries(1):
        return None
    _, groups, dim = min(choices)
    return Split(dim, -groups)
