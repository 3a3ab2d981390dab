"""Moves of a sharded dimension: from bands along one dimension to bands along another one.

Each rank sends every other one the part of its band that the other one will hold: nothing is
gathered. An operation along rows then needs no rows of other ranks.
"""

from __future__ import annotations

from math import prod
from typing import Any, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import Transport

# Dimension, entries before the sharded ones in it, and bands, as in a layout of the view.
Bands = tuple[int, int, RowPartition]


def move_bands(local: Tensor, source: Bands, target: Bands, transport: Transport) -> Tensor:
    """Return this rank's part of a tensor that is sharded along another dimension; a collective.

    Args:
        local: this rank's part.
        source: how the tensor is sharded.
        target: how the result is, in another dimension.
        transport: sends the messages.
    """
    result: Tensor = _MoveBands.apply(local, source, target, transport)  # type: ignore[no-untyped-call]
    return result


@final
class _MoveBands(torch.autograd.Function):
    """Backward moves the gradient back."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, source: Bands, target: Bands, transport: Transport
    ) -> Tensor:
        ctx.arguments = target, source, transport
        # Not a view: autograd would forbid writes to it.
        return _exchange_blocks(local, source, target, transport).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _MoveBands.apply(grad, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


def _exchange_blocks(local: Tensor, source: Bands, target: Bands, transport: Transport) -> Tensor:
    """Send to each rank the block that lies in its part of the result, and join those received."""
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
    """Return `x` with a dimension split into `(outer, entries)`."""
    return x.reshape(*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])
