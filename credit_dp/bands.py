"""Bands of latitude rows as plain numbers, and the rows of a store's chunks that they touch.

The bands of a model's ranks are `RowPartition`s (`domain_parallel.partition`). Data commands need
only the bounds: the first row of each band and the end of the last.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise


def balanced_bounds(height: int, ranks: int) -> tuple[int, ...]:
    """Return the first row of each balanced band and the end; the first ranks get surplus rows."""
    share, surplus = divmod(height, ranks)
    return tuple(rank * share + min(rank, surplus) for rank in range(ranks + 1))


def chunk_spans(bounds: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of the chunks that each band touches, north to south.

    The end may be beyond the grid, in the padding of its last chunk. Bands without rows are left
    out.
    """
    for first, stop in pairwise(bounds):
        if stop > first:
            yield first // chunk * chunk, -(-stop // chunk) * chunk


def from_south(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the same bounds for rows that are counted from the south pole."""
    return tuple(bounds[-1] - bound for bound in reversed(bounds))


def rows_touched(height: int, ranks: int, chunk: int, south: bool = False) -> list[int]:
    """Return for each rank the rows of the chunks that its band touches, with the padding.

    In the order of the chunks: with `south`, the last rank comes first.

    Args:
        ranks: number of balanced bands; bands without rows are left out.
    """
    bounds = balanced_bounds(height, ranks)
    spans = chunk_spans(from_south(bounds) if south else bounds, chunk)
    return [stop - first for first, stop in spans]


def max_rows_touched(height: int, ranks: int, chunk: int) -> int:
    """Return the largest `rows_touched` of all ranks, with chunks from either pole."""
    return max(max(rows_touched(height, ranks, chunk, south)) for south in (False, True))


def row_amplification(height: int, ranks: int, chunk: int) -> float:
    """Return the largest ratio of rows touched to rows owned, over all ranks.

    Stores may begin at either pole; the result is that of the worse order.
    """
    owned = [stop - first for first, stop in pairwise(balanced_bounds(height, ranks))]
    north = rows_touched(height, ranks, chunk)
    south = reversed(rows_touched(height, ranks, chunk, south=True))
    return max(max(a, b) / rows for a, b, rows in zip(north, south, owned, strict=True))


def unshared_amplification(height: int, chunk: int, bounds: Sequence[int]) -> float:
    """Return the rows that all ranks decode, each for itself, relative to the rows of the globe.

    Stores may begin at either pole: the worse of the two counts.
    """
    rows_read = (
        sum(min(height, stop) - first for first, stop in chunk_spans(either, chunk))
        for either in (bounds, from_south(bounds))
    )
    return max(rows_read) / height
