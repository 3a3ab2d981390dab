"""A depthwise convolution whose channels may be dealt to ranks, with weights shared by groups."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.channel_parallel.transpose import channel_slice, channels_per_rank
from credit_dp.errors import UserError

# Samples, channels, rows, columns.
INPUT_DIMS = 4


@final
class DistributedDepthwiseConv2d(nn.Module):
    """A 2-D depthwise convolution, `padding="same"`, of all channels or of this rank's.

    Every rank has all the weights. With a `cp_group` it convolves its own channels with theirs, so
    the gradient of a weight is that of the rank's channels alone, and zero where it has none:
    whoever owns the step sums it over the group.

    Args:
        hidden_dim: channels of all ranks together, C.
        kernel_size: rows and columns of the kernel, or one number for both.
        num_groups: G kernels, each for C / G consecutive channels; by default one per channel.
        bias: whether there is a bias, one per kernel.
        dtype: of the parameters, `torch.float32` by default.
        device: of the parameters; by default the current CUDA device where there is one, else
            torch's default device.

    Attributes:
        group_dim: channels of a group, C / G.
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
        """Draw weights and bias from the range that `nn.Conv2d` has: +-1 / sqrt(Kh * Kw)."""
        rows, columns = self.kernel_size
        bound = (rows * columns) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def expand_to_channels(self, x: Tensor) -> Tensor:
        """Return a parameter with an entry for each channel instead of for each group."""
        return x.repeat_interleave(self.group_dim, 0)

    def forward(self, x: Tensor, cp_group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the convolution of all channels or, with a group, of this rank's.

        Shapes:
            `(B, C_local, H, W)` -> the same, with `C_local = C / ranks of the group`.

        Raises:
            AssertionError: `x` has other than four dimensions.
            UserError: the ranks of the group can't share the channels evenly.
            RuntimeError: `x` has other channels than this rank's.
        """
        if x.ndim != INPUT_DIMS:
            raise AssertionError(
                f"DistributedDepthwiseConv2d: needs (B, C, H, W), got {tuple(x.shape)}"
            )
        mine = self._channel_slice(cp_group)
        expected = mine.stop - mine.start
        if x.shape[1] != expected:
            raise RuntimeError(
                f"DistributedDepthwiseConv2d: needs {expected} of {self.hidden_dim} channels "
                f"({mine.start} to {mine.stop - 1}), got {x.shape[1]}"
            )
        weight = self.expand_to_channels(self.weight)[mine, None]
        bias = None if self.bias is None else self.expand_to_channels(self.bias)[mine]
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
        """Describe the sizes."""
        bias = self.bias is not None
        return f"{self.hidden_dim}, {self.kernel_size}, num_groups={self.num_groups}, bias={bias}"
