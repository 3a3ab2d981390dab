"""Which channels a rank has: consecutive ones, as many as the others' or one more."""

from __future__ import annotations

from collections.abc import Sequence


def channel_shares(channels: int, ranks: int) -> tuple[int, ...]:
    """Return how many channels each rank gets, the larger shares first; some may be 0."""
    share, surplus = divmod(channels, ranks)
    return tuple(share + (rank < surplus) for rank in range(ranks))


def share_of(shares: Sequence[int], rank: int) -> slice:
    """Return which channels are those of a rank."""
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])
