"""Channel parallelism: ranks that share channels, and transposes between rows and channels.

A transpose takes ranks from some rows of all channels to all rows of some channels, and back. An
operation that couples rows but no channels, such as a depthwise convolution with a large kernel,
needs no messages between `rows_to_channels` and `channels_to_rows`. Each of these is an all-to-all,
in which every rank sends every other one a block of its tensor, and the adjoint of the other.

Independent of models and configs: `credit_dp.domain_parallel` imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.errors import UserError

CHANNEL_DIM = -3
ROW_DIM = -2
# (channels, rows, columns); dimensions before these are never split.
FIELD_DIMS = 3
# (samples, channels, rows, columns)
INPUT_DIMS = 4
PeerTensor = tuple[int, Tensor]


class TransportLike(Protocol):
    """The part of `credit_dp.domain_parallel.transport.Transport` that is used here.

    A protocol, because `domain_parallel` imports this module.
    """

    rank: int
    size: int

    def start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        """Start all messages; return a function that waits for them."""

    def announce_sizes(self, sizes: Sequence[Sequence[int]]) -> None:
        """Hook for transports that count messages, with the bytes from each rank to each rank."""


def channels_per_rank(channels: int, ranks: int) -> tuple[int, ...]:
    """Return each rank's number of channels, the larger ones first; some may be 0."""
    share, surplus = divmod(channels, ranks)
    return tuple(share + (rank < surplus) for rank in range(ranks))


def channel_slice(shares: Sequence[int], rank: int) -> slice:
    """Return the channels of one rank, given the number of channels of every rank."""
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


@final
@dataclass(frozen=True)
class Transposition:
    """The number of rows and of channels of every rank."""

    rows: tuple[int, ...]
    channels: tuple[int, ...]

    def rows_sent(self, to_channels: bool) -> list[list[int]]:
        """Return how many rows of one channel each rank sends to each rank."""
        ranks = range(len(self.rows))
        # A sender holds its share of one dimension and splits the other by the receivers' shares.
        sender_sizes, receiver_sizes = self.rows, self.channels
        if not to_channels:
            sender_sizes, receiver_sizes = self.channels, self.rows
        return [
            [
                sender_sizes[sender] * receiver_sizes[receiver] if sender != receiver else 0
                for receiver in ranks
            ]
            for sender in ranks
        ]

    def shape_on(self, rank: int, x: Tensor, to_channels: bool) -> list[int]:
        """Return the shape that a rank's tensor `x` has after the transpose."""
        shape = list(x.shape)
        if to_channels:
            shape[CHANNEL_DIM], shape[ROW_DIM] = self.channels[rank], sum(self.rows)
        else:
            shape[CHANNEL_DIM], shape[ROW_DIM] = sum(self.channels), self.rows[rank]
        return shape

    def total_rows_sent(self, to_channels: bool) -> int:
        """Return how many rows of one channel all ranks send together."""
        return sum(map(sum, self.rows_sent(to_channels)))


def rows_to_channels(
    x: Tensor,
    rows: Sequence[int],
    transport: TransportLike,
    channels: Sequence[int] | None = None,
) -> Tensor:
    """Exchange a band of rows of all channels for all rows of this rank's channels.

    Differentiable; its backward is `channels_to_rows`. Called by all ranks together. A rank without
    channels gets an empty tensor, but sends its rows.

    Args:
        channels: number of channels that each rank gets; by default those of `channels_per_rank`.

    Shapes:
        `(..., C, H_local, W)` -> `(..., C_local, H, W)`.

    Raises:
        UserError: `x` does not have the given numbers of rows or channels.
    """
    if channels is None:
        channels = channels_per_rank(x.shape[CHANNEL_DIM], transport.size)
    transposition = _transposition(rows, channels, transport)
    _check_size(x, ROW_DIM, "rows", transposition.rows[transport.rank], transport)
    _check_size(x, CHANNEL_DIM, "channels", sum(transposition.channels), transport)
    return _TransposeFunction.apply(x, transposition, transport, True)  # type: ignore[no-any-return, no-untyped-call]


def channels_to_rows(
    x: Tensor, rows: Sequence[int], transport: TransportLike, channels: Sequence[int]
) -> Tensor:
    """Exchange all rows of this rank's channels for a band of rows of all channels.

    Differentiable; its backward is `rows_to_channels`. Called by all ranks together.

    Shapes:
        `(..., C_local, H, W)` -> `(..., C, H_local, W)`.

    Raises:
        UserError: `x` does not have the given numbers of rows or channels.
    """
    transposition = _transposition(rows, channels, transport)
    _check_size(x, ROW_DIM, "rows", sum(transposition.rows), transport)
    _check_size(x, CHANNEL_DIM, "channels", transposition.channels[transport.rank], transport)
    return _TransposeFunction.apply(x, transposition, transport, False)  # type: ignore[no-any-return, no-untyped-call]


def _transposition(
    rows: Sequence[int], channels: Sequence[int], transport: TransportLike
) -> Transposition:
    for name, sizes in (("rows", rows), ("channels", channels)):
        if len(sizes) != transport.size:
            raise UserError(
                f"{name}: needs a number for each of {transport.size} ranks, got {len(sizes)}. "
                "Give the numbers of all ranks, in rank order."
            )
    return Transposition(tuple(rows), tuple(channels))


def _check_size(x: Tensor, dim: int, name: str, expected: int, transport: TransportLike) -> None:
    if x.shape[dim] != expected:
        raise UserError(
            f"transpose of rows and channels: rank {transport.rank} needs {expected} {name}, got "
            f"{x.shape[dim]} of {tuple(x.shape)}. Give the actual numbers of every rank."
        )


@final
class _TransposeFunction(torch.autograd.Function):
    """A permutation of the entries of all ranks, so that its inverse is its adjoint.

    Saves no tensor: the transposition is enough.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        transposition: Transposition,
        transport: TransportLike,
        to_channels: bool,
    ) -> Tensor:
        ctx.transposition = transposition
        ctx.transport = transport
        ctx.to_channels = to_channels
        return transpose_blocks(x, transposition, transport, to_channels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arguments = (grad, ctx.transposition, ctx.transport, not ctx.to_channels)
        return _TransposeFunction.apply(*arguments), None, None, None  # type: ignore[no-untyped-call]


def transpose_blocks(
    x: Tensor, transposition: Transposition, transport: TransportLike, to_channels: bool
) -> Tensor:
    """Send every rank its block of `x` and concatenate the received blocks.

    Not differentiable: see `rows_to_channels` and `channels_to_rows`, which check the sizes.
    """
    split_dim, cat_dim = (CHANNEL_DIM, ROW_DIM) if to_channels else (ROW_DIM, CHANNEL_DIM)
    split_sizes, cat_sizes = transposition.channels, transposition.rows
    if not to_channels:
        split_sizes, cat_sizes = transposition.rows, transposition.channels
    rank = transport.rank
    blocks = torch.split(x, list(split_sizes), split_dim)
    send = [(peer, block.contiguous()) for peer, block in enumerate(blocks) if peer != rank]
    # All received blocks are like this rank's block except along the dimension to concatenate.
    shape = list(blocks[rank].shape)
    received = []
    for peer, size in enumerate(cat_sizes):
        shape[cat_dim] = size
        received.append(blocks[rank] if peer == rank else x.new_empty(shape))
    receive = [(peer, block) for peer, block in enumerate(received) if peer != rank]
    transport.announce_sizes(_message_bytes(x, transposition, to_channels))
    # Sender and receiver know that a block is empty, and skip its message together.
    transport.start(_without_empty(send), _without_empty(receive))()
    return torch.cat(received, cat_dim)


def _without_empty(blocks: list[PeerTensor]) -> list[PeerTensor]:
    return [(peer, block) for peer, block in blocks if block.numel()]


def _message_bytes(x: Tensor, transposition: Transposition, to_channels: bool) -> list[list[int]]:
    row_bytes = prod((*x.shape[:-FIELD_DIMS], x.shape[-1])) * x.element_size()
    return [
        [row_bytes * rows for rows in by_receiver]
        for by_receiver in transposition.rows_sent(to_channels)
    ]


@final
class DistributedDepthwiseConv2d(nn.Module):
    """A 2-D depthwise convolution, `padding="same"`, of all channels or of this rank's.

    Every rank has the weights of all channels. With a `cp_group` it convolves only its channels, so
    that the gradients of the other channels' weights are zero: the training step has to sum the
    gradients over the group. Consecutive channels may share a kernel.

    Args:
        hidden_dim: channels of all ranks together, C.
        num_groups: number of kernels, G, each for C / G consecutive channels; by default one per
            channel.
        device: of the parameters; by default the current CUDA device where there is one, else
            torch's default device.

    Attributes:
        group_dim: channels per kernel, C / G.
        weight: `(G, Kh, Kw)`.
        bias: `(G,)`, or None.

    Raises:
        UserError: `num_groups` does not divide `hidden_dim`.
    """

    def __init__(
        self,
        hidden_dim: int,
        kernel_size: int | tuple[int, int],
        num_groups: int | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        groups = hidden_dim if num_groups is None else num_groups
        if groups < 1 or hidden_dim < 1 or hidden_dim % groups:
            raise UserError(
                f"DistributedDepthwiseConv2d: {groups} groups can't share {hidden_dim} channels "
                f"evenly. Give a num_groups that divides hidden_dim={hidden_dim}."
            )
        self.hidden_dim = hidden_dim
        rows, columns = (kernel_size,) * 2 if isinstance(kernel_size, int) else kernel_size
        self.kernel_size = (rows, columns)
        self.num_groups = groups
        self.group_dim = hidden_dim // groups
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        dtype = dtype or torch.float32
        self.weight = nn.Parameter(torch.empty(groups, rows, columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(groups, dtype=dtype, device=device)) if bias else None
        self.init_weights()

    def init_weights(self) -> None:
        """Draw weights and bias uniformly from +-1 / sqrt(Kh * Kw), as `nn.Conv2d` does."""
        rows, columns = self.kernel_size
        bound = (rows * columns) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def expand_to_channels(self, x: Tensor) -> Tensor:
        """Return a parameter with one entry per channel instead of one per group."""
        return x.repeat_interleave(self.group_dim, 0)

    def forward(self, x: Tensor, cp_group: dist.ProcessGroup | None = None) -> Tensor:
        """Convolve all channels or, with a group, this rank's channels.

        Shapes:
            `(B, C_local, H, W)` -> the same, with `C_local = C / ranks of the group`.

        Raises:
            AssertionError: `x` does not have four dimensions.
            UserError: the number of channels is not a multiple of the number of ranks.
            RuntimeError: `x` does not have this rank's number of channels.
        """
        if x.ndim != INPUT_DIMS:
            raise AssertionError(
                f"DistributedDepthwiseConv2d: needs (B, C, H, W), got {tuple(x.shape)}"
            )
        channels = self._channel_slice(cp_group)
        expected = channels.stop - channels.start
        if x.shape[1] != expected:
            raise RuntimeError(
                f"DistributedDepthwiseConv2d: needs {expected} of {self.hidden_dim} channels "
                f"({channels.start} to {channels.stop - 1}), got {x.shape[1]}"
            )
        # Expanding before slicing gives the weights of the other ranks' channels a gradient of
        # zero here, so that summing over the group yields the whole gradient.
        weight = self.expand_to_channels(self.weight)[channels, None]
        bias = None if self.bias is None else self.expand_to_channels(self.bias)[channels]
        return F.conv2d(x, weight, bias, padding="same", groups=expected)

    def _channel_slice(self, cp_group: dist.ProcessGroup | None) -> slice:
        ranks = 1 if cp_group is None else dist.get_world_size(cp_group)
        if self.hidden_dim % ranks:
            raise UserError(
                f"DistributedDepthwiseConv2d: {ranks} ranks can't share {self.hidden_dim} channels "
                f"evenly. Make hidden_dim a multiple of {ranks}, or give a smaller cp_group."
            )
        rank = 0 if cp_group is None else dist.get_rank(cp_group)
        return channel_slice(channels_per_rank(self.hidden_dim, ranks), rank)

    def extra_repr(self) -> str:
        """Return the sizes, for the model's printed form."""
        bias = self.bias is not None
        return f"{self.hidden_dim}, {self.kernel_size}, num_groups={self.num_groups}, bias={bias}"
