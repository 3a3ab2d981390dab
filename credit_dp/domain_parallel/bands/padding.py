"""Which rows padded, rolled and flipped fields and windows show, and in which bands they are."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from credit_dp.domain_parallel.bands.rows import rows_on_globe
from credit_dp.domain_parallel.exchange import RowRange, rows_with_poles
from credit_dp.domain_parallel.partition import LARGEST_BAND


def padded_rows(out: slice, height: int, north: int, south: int, mode: str) -> tuple[RowRange, ...]:
    """Return the global rows that the rows `out` of a padded globe show; negative widths crop.

    In the mode `constant` those beyond the poles are left out: `rows_beyond_poles` counts them.

    Raises:
        UserError: the padding is wider than the rows that the mode can show.
    """
    start, stop = out.start - north, out.stop - north
    if mode == "constant":
        return rows_on_globe(start, stop, height)
    if mode != "circular":
        return rows_with_poles(start, stop, height, mode)
    # Negative widths crop first: circular padding repeats the rows that are left.
    first, cropped = max(0, -north), max(0, -north) + max(0, -south)
    ranges = rows_with_poles(start - first, stop - first, height - cropped, mode)
    return tuple(RowRange(rows.start + first, rows.stop + first) for rows in ranges)


def rolled_rows(out: slice, height: int, shift: int) -> tuple[RowRange, ...]:
    """Return the global rows that are shifted to the rows `out`: two ranges if they wrap around."""
    start = (out.start - shift) % height
    stop = start + out.stop - out.start
    ranges = (RowRange(start, min(stop, height)), RowRange(0, stop - height))
    return tuple(rows for rows in ranges if rows.length > 0)


def flipped_rows(out: slice, height: int) -> tuple[RowRange, ...]:
    """Return the global rows that are flipped to the rows `out`."""
    rows = RowRange(height - out.stop, height - out.start, flipped=True)
    return (rows,) if rows.length else ()


@lru_cache(8192)
def extended_bounds(bounds: tuple[int, ...], before: int, after: int) -> tuple[int, ...] | None:
    """Return bands with more rows on the first and the last rank, or fewer; None if too few.

    Rows stay where they are if that is balanced.
    """
    height, ranks = before + bounds[-1] + after, len(bounds) - 1
    extended = (0, *(min(max(bound + before, 0), height) for bound in bounds[1:-1]), height)
    sizes = [b - a for a, b in pairwise(extended)]
    is_balanced = max(sizes) * ranks < LARGEST_BAND * height
    return extended if is_balanced and min(sizes) > 0 else None
