"""A depthwise convolution whose channels may be distributed over ranks."""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.channel_parallel.transpose import channel_slice, channels_per_rank
from credit_dp.errors import UserError

# (samples, channels, rows, columns)
INPUT_DIMS = 4


@final
class DistributedDepthwiseConv2d(nn.Module):
    """A 2-D depthwise convolution, `padding="same"`, of all channels or of this rank's.

    Every rank has the weights of all channels. With a `cp_group` it convolves only its channels, so
    that the gradients of the other channels' weights are zero: the training step has to sum the
    gradients over the group. Consecutive channels may share a kernel.

    Args:
        hidden_dim: channels of all ranks together, C.
        kernel_size: rows and columns of the kernel, or one number for both.
        num_groups: number of kernels, G, each for C / G consecutive channels; by default one per
            channel.
        bias: whether to add a bias, one per kernel.
        dtype: of the parameters, `torch.float32` by default.
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
