"""From some rows of all channels to all rows of some channels, and back, among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_dp.errors import UserError


def channels_per_rank(channels: int, ranks: int) -> tuple[int, ...]:
    """Return how many channels each rank gets, the larger shares first; some may be 0."""
    share, surplus = divmod(channels, ranks)
    return tuple(share + (rank < surplus) for rank in range(ranks))


def channel_slice(shares: Sequence[int], rank: int) -> slice:
    """Return which channels are those of a rank."""
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


CHANNEL_DIM, ROW_DIM = -3, -2
# Of (channels, rows, columns), counted from the end; samples before them are never cut.
FIELD_DIMS = 3
PeerTensor = tuple[int, Tensor]


class Messenger(Protocol):
    """What a transport of `credit_dp.domain_parallel` offers, as far as it is used here."""

    rank: int
    size: int

    def start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        """Begin an exchange; the result waits until it is over."""

    def announce_sizes(self, sizes: Sequence[Sequence[int]]) -> None:
        """Hear how many bytes each rank is about to send to each."""


@final
@dataclass(frozen=True)
class TransposePlan:
    """How a globe is cut by rows and by channels: how many of each every rank has."""

    rows: tuple[int, ...]
    channels: tuple[int, ...]

    def rows_sent(self, to_channels: bool) -> list[list[int]]:
        """Return how many rows of one channel each rank sends to each; to itself none."""
        ranks = range(len(self.rows))
        kept, given = (self.rows, self.channels) if to_channels else (self.channels, self.rows)
        return [[kept[a] * given[b] if a != b else 0 for b in ranks] for a in ranks]

    def total_rows_sent(self, to_channels: bool) -> int:
        """Return how many rows of one channel all ranks send together."""
        return sum(map(sum, self.rows_sent(to_channels)))


def rows_to_channels(
    x: Tensor,
    rows: Sequence[int],
    messenger: Messenger,
    channels: Sequence[int] | None = None,
) -> Tensor:
    """Trade a band of rows of all channels for all rows of a share of the channels.

    Differentiable; its backward is `channels_to_rows`. Reached by all ranks together. A rank with
    no channel gets an empty tensor, and its rows are sent all the same.

    Args:
        x: this rank's band.
        rows: how many rows each rank has, north to south.
        messenger: how the ranks talk, the `transport` of a manager.
        channels: how many channels each rank is to have; by default those of `channels_per_rank`.

    Shapes:
        `(..., C, H_local, W)` -> `(..., C_local, H, W)`.

    Raises:
        UserError: rows or channels are not as many as said.
    """
    if channels is None:
        channels = channels_per_rank(x.shape[CHANNEL_DIM], messenger.size)
    plan = _transpose_plan(rows, channels, messenger)
    _check_size(x, ROW_DIM, "rows", plan.rows[messenger.rank], messenger)
    _check_size(x, CHANNEL_DIM, "channels", sum(plan.channels), messenger)
    return _TransposeFunction.apply(x, plan, messenger, True)  # type: ignore[no-any-return, no-untyped-call]


def channels_to_rows(
    x: Tensor, rows: Sequence[int], messenger: Messenger, channels: Sequence[int]
) -> Tensor:
    """Trade all rows of a share of the channels for a band of rows of all channels.

    Differentiable; its backward is `rows_to_channels`. Reached by all ranks together.

    Args:
        x: this rank's share.
        rows: how many rows each rank is to have, north to south.
        messenger: how the ranks talk, the `transport` of a manager.
        channels: how many channels each rank has.

    Shapes:
        `(..., C_local, H, W)` -> `(..., C, H_local, W)`.

    Raises:
        UserError: rows or channels are not as many as said.
    """
    plan = _transpose_plan(rows, channels, messenger)
    _check_size(x, ROW_DIM, "rows", sum(plan.rows), messenger)
    _check_size(x, CHANNEL_DIM, "channels", plan.channels[messenger.rank], messenger)
    return _TransposeFunction.apply(x, plan, messenger, False)  # type: ignore[no-any-return, no-untyped-call]


def _transpose_plan(
    rows: Sequence[int], channels: Sequence[int], messenger: Messenger
) -> TransposePlan:
    for what, sizes in (("rows", rows), ("channels", channels)):
        if len(sizes) != messenger.size:
            raise UserError(
                f"{what}: needs a number for each of {messenger.size} ranks, got {len(sizes)}. "
                "Give every rank's, in rank order."
            )
    return TransposePlan(tuple(rows), tuple(channels))


def _check_size(x: Tensor, dim: int, what: str, expected: int, messenger: Messenger) -> None:
    if x.shape[dim] != expected:
        raise UserError(
            f"transpose of rows and channels: rank {messenger.rank} needs {expected} {what}, got "
            f"{x.shape[dim]} of {tuple(x.shape)}. Give every rank's numbers as they are."
        )


@final
class _TransposeFunction(torch.autograd.Function):
    """A permutation of entries over all ranks, so its inverse is its adjoint. Saves no tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: TransposePlan, messenger: Messenger, to_channels: bool
    ) -> Tensor:
        ctx.plan, ctx.messenger, ctx.to_channels = plan, messenger, to_channels
        return _transpose(x, plan, messenger, to_channels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        home = _transpose(grad, ctx.plan, ctx.messenger, not ctx.to_channels)
        return home, None, None, None


def _transpose(x: Tensor, plan: TransposePlan, messenger: Messenger, to_channels: bool) -> Tensor:
    """Send every rank its part of `x` and glue what comes; empty parcels are not sent."""
    cut, glue = (CHANNEL_DIM, ROW_DIM) if to_channels else (ROW_DIM, CHANNEL_DIM)
    cuts, glued = (plan.channels, plan.rows) if to_channels else (plan.rows, plan.channels)
    rank = messenger.rank
    parts = torch.split(x, list(cuts), cut)
    send = [(peer, part.contiguous()) for peer, part in enumerate(parts) if peer != rank]
    shape = list(parts[rank].shape)
    came = []
    for peer, size in enumerate(glued):
        shape[glue] = size
        came.append(parts[rank] if peer == rank else x.new_empty(shape))
    receive = [(peer, part) for peer, part in enumerate(came) if peer != rank]
    messenger.announce_sizes(_message_bytes(x, plan, to_channels))
    messenger.start(_not_empty(send), _not_empty(receive))()
    return torch.cat(came, glue)


def _not_empty(parcels: list[PeerTensor]) -> list[PeerTensor]:
    return [(peer, part) for peer, part in parcels if part.numel()]


def _message_bytes(x: Tensor, plan: TransposePlan, to_channels: bool) -> list[list[int]]:
    others = (*x.shape[:-FIELD_DIMS], x.shape[-1])
    unit = prod(others) * x.element_size()
    return [[unit * number for number in row] for row in plan.rows_sent(to_channels)]
