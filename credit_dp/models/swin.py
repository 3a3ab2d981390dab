"""A Swin transformer V2 of two dimensions, with one skip connection like FuXi's.

First attention, then the embedding of patches and its inverse, and at the end `Swin`, three stages
of a `WindowTransformer` whose tokens have one level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.config.model import SwinConfig
from credit_dp.fields import Fields, GridShape
from credit_dp.models.blocks import pair_offsets
from credit_dp.models.shifted_windows import (
    Size,
    WindowAttention,
    WindowTransformer,
    check_patches,
    embed_patches,
    initialise,
    patch_counts,
    recover_patches,
)

BIAS_WIDTH = 512  # of the network that computes position biases
LARGEST_BIAS = 16.0
LARGEST_SCALE = 100.0  # of cosines; the temperature is its inverse
INITIAL_SCALE = 10.0


def log_offsets(offsets: Tensor, rows: int, columns: int) -> Tensor:
    """Return the offsets of points of a window on a logarithmic axis, from about -1 to 1.

    Shapes:
        `(N, 2)`, in rows and columns -> the same.

    Source: Liu et al. 2022, section 3.3, and their code for the factor 8 of the largest offset.
    """
    relative = 8 * offsets / torch.tensor([max(rows - 1, 1), max(columns - 1, 1)])
    return relative.sign() * (relative.abs() + 1).log2() / 3


@final
class CosineAttention(WindowAttention):
    """Attention by the cosine of query and key, with a continuous bias of their positions.

    Each head has a learned temperature. A small network computes the bias from the offset in rows
    and columns; it is the same in all windows. Queries, keys and values have no biases: where zeros
    pad the grid, keys and values are zeros. For arguments and shapes see `WindowAttention`; there
    is one level.

    Source: Liu et al. 2022, sections 3.2 and 3.3.
    """

    qkv_bias: ClassVar[bool] = False

    def add_biases(self) -> None:
        """Add the temperatures and the network."""
        _, rows, columns = self.window
        self.log_scale = nn.Parameter(torch.full((self.heads,), math.log(INITIAL_SCALE)))
        self.position_bias = nn.Sequential(
            nn.Linear(2, BIAS_WIDTH), nn.ReLU(), nn.Linear(BIAS_WIDTH, self.heads, bias=False)
        )
        offsets, index = pair_offsets(rows, columns)
        self.register_buffer("offsets", log_offsets(offsets, rows, columns), persistent=False)
        self.register_buffer("index", index.flatten(), persistent=False)

    def pair_bias(self, groups: slice) -> Tensor:
        """Return the biases, from 0 to 16; see `WindowAttention.pair_bias`."""
        tokens = math.prod(self.window)
        biases: Tensor = LARGEST_BIAS * self.position_bias(self.offsets).sigmoid()
        pairs = biases.T.index_select(1, cast(Tensor, self.index)).view(-1, tokens, tokens)
        return pairs.repeat(groups.stop - groups.start, 1, 1)

    def scale_pairs(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return both with a norm of 1, but queries divided by the temperature."""
        scale = self.log_scale.clamp(max=math.log(LARGEST_SCALE)).exp()
        # The attention divides by the root of the width; heads are the last that are folded.
        scale = (scale * math.sqrt(query.shape[-1])).repeat(query.shape[1] // self.heads)
        query, key = (F.normalize(x, dim=-1, eps=1e-6) for x in (query, key))
        return query * scale[:, None, None].to(query.dtype), key


@final
class PatchEmbedding(nn.Module):
    """Embeds patches of all channels as tokens of one level, and normalises them.

    Shapes:
        `(B, channels, H, W)` -> `(B, width, 1, rows, columns)`.
    """

    def __init__(
        self, channels: int, width: int, grid: GridShape, patch: Sequence[int], edges: str
    ) -> None:
        super().__init__()
        self.patches = embed_patches(channels, width, grid, patch, edges)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        tokens = self.norm(self.patches(x).permute(0, 2, 3, 1))
        return tokens.permute(0, 3, 1, 2)[:, :, None]  # type: ignore[no-any-return]


@final
class PatchRecovery(nn.Module):
    """Turns tokens back into the output channels.

    Shapes:
        `(B, width, 1, rows, columns)` -> `(B, channels, H, W)`.
    """

    def __init__(self, width: int, channels: int, grid: GridShape, patch: Sequence[int]) -> None:
        super().__init__()
        self.patches = recover_patches(width, channels, grid, patch)

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels."""
        return self.patches(x[:, :, 0])  # type: ignore[no-any-return]


@final
class Swin(WindowTransformer):
    """Predicts a state, or its tendency over one step, from the input channels.

    Three stages: the first and the last at the resolution of the patches, the second at half of it.

    Shapes:
        `(B, fields.inputs, H, W)` -> `(B, fields.outputs, H, W)`.

    Raises:
        UserError: the grid is too small.

    Source: Liu et al. 2022 (arXiv 2111.09883); the skip connection as in Chen et al. 2023 (arXiv
    2306.12873).
    """

    def __init__(self, config: SwinConfig, fields: Fields, grid: GridShape) -> None:
        super().__init__()
        check_patches(config, grid)
        edges = "zeros" if grid.is_global else config.edges
        patch, width = config.patch, config.width
        fine = cast(Size, (1, *patch_counts(grid, patch)))
        self.embedding = PatchEmbedding(fields.inputs, width, grid, patch, edges)
        self.build_stages(config, grid, CosineAttention, fine, cast(Size, (1, *config.window)))
        self.recovery = PatchRecovery(2 * width, fields.outputs, grid, patch)
        self.apply(initialise)
