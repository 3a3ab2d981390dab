"""How many rows a band makes its rank read, when rows lie in chunks."""

from itertools import pairwise


def balanced_bounds(height: int, ranks: int) -> tuple[int, ...]:
    """First rows of balanced bands, and the end: surplus rows go to the first ranks."""
    share, surplus = divmod(height, ranks)
    return tuple(rank * share + min(rank, surplus) for rank in range(ranks + 1))


def rows_touched(height: int, ranks: int, chunk: int, from_south: bool = False) -> list[int]:
    """Rows in the chunks that each rank's band touches, the padding of the last chunk included.

    Args:
        height, ranks: balanced bands of so many rows in all.
        chunk: rows of a chunk.
        from_south: whether the first chunk begins at the southernmost row, not the northernmost.
    """
    bounds = balanced_bounds(height, ranks)
    if from_south:
        bounds = tuple(height - bound for bound in reversed(bounds))
    return [
        (-(-stop // chunk) - first // chunk) * chunk
        for first, stop in pairwise(bounds)
        if stop > first
    ]


def most_rows_touched(height: int, ranks: int, chunk: int) -> int:
    """Of all ranks; chunks begin at the pole where that is worse."""
    return max(max(rows_touched(height, ranks, chunk, south)) for south in (False, True))


def row_amplification(height: int, ranks: int, chunk: int) -> float:
    """Rows touched over rows owned, of the rank where that is most.

    Chunks begin at the pole where that is worse: stores may hold either pole first.
    """
    bounds = balanced_bounds(height, ranks)
    owned = [stop - first for first, stop in pairwise(bounds)]
    north = rows_touched(height, ranks, chunk)
    south = reversed(rows_touched(height, ranks, chunk, from_south=True))
    return max(max(a, b) / own for a, b, own in zip(north, south, owned, strict=True))
