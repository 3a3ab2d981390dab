"""Moves of a sharded dimension that autograd follows: see `bands.moves`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.bands.moves import (
    Bands,
    Blocks,
    exchange_blocks,
    exchange_to_bands,
    exchange_to_blocks,
)
from credit_dp.domain_parallel.transport import Transport


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
        return exchange_blocks(local, source, target, transport).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _MoveBands.apply(grad, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


def fetch_blocks(
    tensors: Sequence[Tensor], blocks: Sequence[Blocks], transport: Transport
) -> tuple[Tensor, ...]:
    """Return this rank's block of each tensor, in one exchange; a differentiable collective.

    Shapes:
        `(..., heads, ..., H_local, D)` -> `(..., own heads, ..., own rows, D)`
    """
    return _FetchBlocks.apply(tuple(blocks), transport, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def return_blocks(
    tensors: Sequence[Tensor], blocks: Sequence[Blocks], transport: Transport
) -> tuple[Tensor, ...]:
    """Return the bands of tensors of which each rank has a block; the adjoint of `fetch_blocks`."""
    return _ReturnBlocks.apply(tuple(blocks), transport, *tensors)  # type: ignore[no-any-return, no-untyped-call]


@final
class _FetchBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: tuple[Blocks, ...], transport: Transport, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = blocks, transport
        return exchange_to_blocks(tensors, blocks, transport)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_ReturnBlocks.apply(*ctx.arguments, *grads)  # type: ignore[no-untyped-call]


@final
class _ReturnBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: tuple[Blocks, ...], transport: Transport, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = blocks, transport
        return exchange_to_bands(tensors, blocks, transport)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_FetchBlocks.apply(*ctx.arguments, *grads)  # type: ignore[no-untyped-call]
