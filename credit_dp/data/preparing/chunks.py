"""How many rows an inner chunk of a prepared store has."""

from collections.abc import Sequence

from credit_dp.data.bands import rows_touched
from credit_dp.errors import UserError

# A rank of N reads at most this share of 1/N of a sample, where the bands allow it.
LARGEST_EXCESS = 1.05
# Each inner chunk costs a reader about 0.1 ms, and 16 bytes of a shard's index.
MOST_CHUNKS = 1024


def check_domains(domains: Sequence[object], height: int) -> tuple[int, ...]:
    """The rank counts, each once, rising.

    Raises:
        UserError: one is no number of ranks that this many rows can be split over.
    """
    for count in domains:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= height:
            raise UserError(
                f"domains: needs numbers of ranks from 1 to {height}, the rows of the grid, "
                f"got {count!r}. Change domains."
            )
    if not domains:
        raise UserError("domains: needs at least one number of ranks, like domains=[1,2,4].")
    return tuple(sorted({int(str(count)) for count in domains}))


def chunk_rows(height: int, domains: Sequence[int]) -> int:
    """The most rows per chunk with which no rank of any of `domains` reads much that isn't its own.

    Chunks are of one size, bands are not, so edges can't always meet: 721 rows over 2 ranks begin
    at 361. The fewest chunks win whose `worst_excess` is at most `LARGEST_EXCESS`, or at most that
    of the smallest chunks allowed where even those are above it.
    """
    smallest = -(-height // MOST_CHUNKS)
    bearable = max(LARGEST_EXCESS, worst_excess(height, domains, smallest))
    fitting = (
        rows
        for rows in range(height, smallest - 1, -1)
        if worst_excess(height, domains, rows) <= bearable
    )
    return next(fitting)


def worst_excess(height: int, domains: Sequence[int], chunk: int) -> float:
    """Rows that a rank reads over an even share of the rows, of the worst rank of all `domains`."""
    return max(max(rows_touched(height, ranks, chunk)) * ranks / height for ranks in domains)
