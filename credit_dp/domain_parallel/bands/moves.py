"""Moves of a sharded dimension: from bands along one dimension to bands along another one.

Each rank sends every other one the part of its band that the other one will hold: nothing is
gathered. An operation along rows then needs no rows of other ranks. `exchange_to_blocks` is for
attention, of which a rank computes some heads: it gets their part of several tensors in one
exchange, and `exchange_to_bands` sends the results back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import Transport

# Dimension, entries before the sharded ones in it, and bands, as a tensor of the globe is held.
CutDimension = tuple[int, int, RowPartition]


def exchange_blocks(
    local: Tensor, source: CutDimension, target: CutDimension, transport: Transport
) -> Tensor:
    """Return this rank's part of a tensor that is cut along another dimension; a collective.

    Each rank sends every other one the block that lies in its part of the result.
    """
    rank, ranks = transport.rank, transport.size
    first, second = sorted((source[0], target[0]))
    outers = {source[0]: source[1], target[0]: target[1]}
    # Each of both dimensions becomes (outer, entries); the later one first, to keep the numbers.
    blocks = _split(_split(local, second, outers[second]), first, outers[first])
    entries_dims = {first: first + 1, second: second + 2}
    from_dim, to_dim = entries_dims[source[0]], entries_dims[target[0]]
    sent, kept = source[2].sizes, target[2]
    others = prod(size for d, size in enumerate(blocks.shape) if d not in (from_dim, to_dim))
    entry_bytes = others * local.element_size()
    transport.announce_sizes(
        [[sent[p] * kept.sizes[r] * entry_bytes for r in range(ranks)] for p in range(ranks)],
        source[2],
    )
    parts = []
    for peer in range(ranks):
        shape = list(blocks.shape)
        shape[from_dim], shape[to_dim] = sent[peer], kept.sizes[rank]
        parts.append(blocks.new_empty(shape))
    parts[rank] = blocks.narrow(to_dim, kept.bounds[rank], kept.sizes[rank])
    send = [
        (peer, blocks.narrow(to_dim, kept.bounds[peer], kept.sizes[peer]).contiguous())
        for peer in range(ranks)
        if peer != rank and sent[rank] * kept.sizes[peer] * others
    ]
    receive = [
        (peer, parts[peer])
        for peer in range(ranks)
        if peer != rank and sent[peer] * kept.sizes[rank] * others
    ]
    transport.start(send, receive)()
    joined = torch.cat(parts, from_dim)
    return joined.flatten(second + 1, second + 2).flatten(first, first + 1)


def _split(x: Tensor, dim: int, outer: int) -> Tensor:
    return x.reshape(*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])


# ---------------------------------------------------------------- blocks of heads and rows


@final
class Blocks(NamedTuple):
    """The block of a tensor `(..., heads, ..., rows, features)` that each rank gets.

    Attributes:
        bands: of the rows; every rank has all heads of its own.
        rows: for each rank the first row of its block and the end.
        heads: for each rank the first head of its block and the end.
    """

    bands: RowPartition
    dim: int
    rows: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, int], ...]

    @property
    def are_shared(self) -> bool:
        """Return whether several ranks get the same entries."""
        sizes = zip(self.rows, self.heads, strict=True)
        entries = sum((rows[1] - rows[0]) * (heads[1] - heads[0]) for rows, heads in sizes)
        return entries > self.bands.height * self.head_count

    @property
    def head_count(self) -> int:
        """Return the number of heads."""
        return max(stop for _, stop in self.heads)

    def overlap(self, owner: int, receiver: int) -> tuple[int, int]:
        """Return which rows of its band a rank has for another one's block: first row, number."""
        band = self.bands.rows(owner)
        start, stop = self.rows[receiver]
        first, end = max(start, band.start), min(stop, band.stop)
        return (first - band.start, end - first) if first < end else (0, 0)

    def shape(self, x: Tensor, owner: int, receiver: int) -> list[int]:
        """Return the shape of what a rank sends to another one, of a tensor like `x`."""
        start, stop = self.heads[receiver]
        shape = list(x.shape)
        shape[self.dim], shape[-2] = stop - start, self.overlap(owner, receiver)[1]
        return shape

    def part(self, x: Tensor, owner: int, receiver: int) -> Tensor:
        """Return the part of a rank's band that is in another one's block."""
        start, stop = self.heads[receiver]
        return x.narrow(-2, *self.overlap(owner, receiver)).narrow(self.dim, start, stop - start)

    def parts(self, block: Tensor, receiver: int) -> list[Tensor]:
        """Return the parts of a rank's block, by the rank that owns their rows."""
        ranks = range(self.bands.ranks)
        return list(
            block.split_with_sizes([self.overlap(owner, receiver)[1] for owner in ranks], -2)
        )


def exchange_to_blocks(
    tensors: Sequence[Tensor], blocks: Sequence[Blocks], transport: Transport
) -> tuple[Tensor, ...]:
    """Return this rank's block of each tensor, of which it holds a band; one exchange.

    Shapes:
        `(..., heads, ..., H_local, D)` -> `(..., own heads, ..., own rows, D)`
    """
    rank, peers = transport.rank, range(transport.size)
    pairs = list(zip(tensors, blocks, strict=True))
    parts = _exchange_parts(
        [[of.part(x, rank, peer) for x, of in pairs] for peer in peers],
        [[of.shape(x, peer, rank) for x, of in pairs] for peer in peers],
        [[[prod(of.shape(x, p, r)) for r in peers] for p in peers] for x, of in pairs],
        blocks[0].bands,
        transport,
    )
    return tuple(torch.cat([parts[p][i] for p in peers], -2) for i in range(len(pairs)))


def exchange_to_bands(
    tensors: Sequence[Tensor], blocks: Sequence[Blocks], transport: Transport
) -> tuple[Tensor, ...]:
    """Return this rank's band of each tensor, of which it holds a block; one exchange.

    The adjoint of `exchange_to_blocks`: entries that are in several blocks are added up.
    """
    rank, peers = transport.rank, range(transport.size)
    pairs = list(zip(tensors, blocks, strict=True))
    by_tensor = [of.parts(x, rank) for x, of in pairs]
    parts = _exchange_parts(
        [[own_parts[peer] for own_parts in by_tensor] for peer in peers],
        [[of.shape(x, rank, peer) for x, of in pairs] for peer in peers],
        [[[prod(of.shape(x, r, p)) for r in peers] for p in peers] for x, of in pairs],
        blocks[0].bands,
        transport,
    )
    totals = []
    for i, (x, of) in enumerate(pairs):
        shape = list(x.shape)
        shape[of.dim], shape[-2] = of.head_count, of.bands.sizes[rank]
        total = x.new_zeros(shape) if of.are_shared else x.new_empty(shape)
        # In the order of ranks: sums are the same bits in every run.
        for peer in peers:
            part = of.part(total, rank, peer)
            part.add_(parts[peer][i]) if of.are_shared else part.copy_(parts[peer][i])
        totals.append(total)
    return tuple(totals)


def _exchange_parts(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Sequence[int]]],
    entries: Sequence[Sequence[Sequence[int]]],
    bands: RowPartition,
    transport: Transport,
) -> list[list[Tensor]]:
    """Send parts of several tensors to each rank, in one message; return those of each rank.

    Args:
        entries: for each tensor and sender the numbers of entries to each receiver.
    """
    rank, ranks = transport.rank, range(transport.size)
    like = sent[rank][0]
    transport.announce_sizes(
        [[sum(n[p][r] for n in entries) * like.element_size() for r in ranks] for p in ranks], bands
    )
    send, receive, parts = [], [], [list(rank_parts) for rank_parts in sent]
    for peer in ranks:
        if peer == rank:
            continue
        message, copies = _empty_message(like, [part.shape for part in sent[peer]])
        for copy, part in zip(copies, sent[peer], strict=True):
            copy.copy_(part)
        if len(message):
            send.append((peer, message))
        message, parts[peer] = _empty_message(like, received[peer])
        if len(message):
            receive.append((peer, message))
    transport.start(send, receive)()
    return parts


def _empty_message(like: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    sizes = [prod(shape) for shape in shapes]
    message = like.new_empty(sum(sizes))
    parts = zip(message.split_with_sizes(sizes), shapes, strict=True)
    return message, [part.view(list(shape)) for part, shape in parts]
