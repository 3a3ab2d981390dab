"""The configuration of every model as dataclasses, which check themselves.

No torch in here: `--help` and `--cfg job` must answer in under a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Any

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.errors import UserError
from credit_dp.plugins import Plugin, PluginKind

UNET_POLES = ("reflect", "zeros", "mirror", "earth")
UNET_BLOCKS = ("residual", "global_depthwise")
UNET_UPSAMPLING = ("transpose", "nearest", "bilinear")

# By `model.name`: what configs and checkpoints from before a key existed were made with, where that
# is not the key's default. Whoever reads a model's keys that were saved completes them by it.
LEGACY_DEFAULTS: dict[str, dict[str, Any]] = {"unet": {"upsample": "transpose"}}


def with_legacy_defaults(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved keys of a model, and those that did not exist when they were saved."""
    return {**LEGACY_DEFAULTS.get(name, {}), **keys}


@dataclass
class ModelConfig:
    """What the config of every model has; each model adds keys in a class of its own."""

    name: str = MISSING  # which model
    frames: int = 1  # states that go in: the last one and those of the steps before
    residual: bool = True  # predicts the tendency; false: the next state itself

    def __post_init__(self) -> None:
        checks.at_least("model.frames", self.frames, 1)

    def coarsest_rows(self, height: int) -> int:
        """Rows of the coarsest level on a grid of `height` rows, as far as the keys tell."""
        return height


@dataclass
class OwnModelConfig(ModelConfig, Plugin):
    """The config of a model that another package or file brings: see `credit_dp.plugins`.

    Derive from it and register the class, and `model=NAME` chooses it. Keep torch out of the
    module's imports: `--help` imports it.
    """

    plugin_kind = PluginKind("model", "credit_dp.models")

    def build(self, in_channels: int, out_channels: int, grid: tuple[int, int]) -> Any:
        """Build the `nn.Module` for a grid of (rows, columns).

        Its class may have `row_rules`, a table of module type -> name of a sharding rule, and be a
        `credit_dp.models.segments.SegmentedModel`, which a pipeline can cut.

        Shapes:
            it maps `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.
        """
        raise NotImplementedError


@dataclass
class BlocksConfig(ModelConfig):
    """What the models of this package share: how their blocks are regularised and kept."""

    dropout: float = 0.0  # share of the values that each block drops while training
    stochastic_depth: float = 0.0  # rate of the last block; it rises from 0 at the first
    activation_checkpointing: bool = False  # compute blocks again in backward, to save memory

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number_in("model.dropout", self.dropout, 0, 0.99)
        checks.number_in("model.stochastic_depth", self.stochastic_depth, 0, 0.99)


@dataclass
class UNetConfig(BlocksConfig):
    """Width and depth of the U-Net: one entry of `channels` per level, finest first.

    `kernel` are the rows and columns of the long-range convolutions of `block=global_depthwise`, in
    grid points of each level.
    """

    name: str = "unet"
    channels: list[int] = field(default_factory=lambda: [32, 64, 128])  # of each level
    blocks: int = 1  # of each level
    groups: int = 8  # of the norms
    poles: str = "reflect"  # reflect | zeros | mirror | earth: what lies beyond a pole
    upsample: str = "bilinear"  # or nearest, each of a 1x1 convolution; transpose: a checkerboard
    # residual, or global_depthwise: large convolutions of each channel apart
    block: str = "residual"
    # of global_depthwise: odd rows and columns; larger ones reach farther and cost more
    kernel: list[int] = field(default_factory=lambda: [31, 31])
    squeeze_excite: bool = False  # gates each block's channels by their global means
    global_conditioning: bool = False  # adds what the coarsest level's global mean says

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("model.name", self.name, ("unet",))
        checks.not_empty("model.channels", self.channels)
        checks.at_least("model.channels", min(self.channels), 1)
        checks.at_least("model.blocks", self.blocks, 1)
        checks.at_least("model.groups", self.groups, 1)
        checks.one_of("model.poles", self.poles, UNET_POLES)
        checks.one_of("model.upsample", self.upsample, UNET_UPSAMPLING)
        checks.one_of("model.block", self.block, UNET_BLOCKS)
        checks.of_length("model.kernel", self.kernel, 2)
        even = next((size for size in self.kernel if size < 1 or size % 2 == 0), None)
        if even is not None:
            raise UserError(f"model.kernel: needs odd numbers of rows and columns, got {even}")
        odd = next((width for width in self.channels if width % self.groups), None)
        if odd is not None:
            raise UserError(
                f"model.channels: needs multiples of model.groups ({self.groups}), got {odd}"
            )

        if self.global_conditioning and len(self.channels) == 1:
            raise UserError(
                "model.global_conditioning: needs a coarser level to take means of, but "
                "model.channels has 1 entry. Give it another one."
            )

    def coarsest_rows(self, height: int) -> int:
        """Rows of the coarsest level on a grid of `height` rows; each level halves, rounding up."""
        factor: int = 2 ** (len(self.channels) - 1)
        return -(-height // factor)


@dataclass
class PanguConfig(BlocksConfig):
    """The Pangu-style transformer: two resolutions, four stages of `depths` blocks.

    `patch` and `window` are (levels, rows, columns); the patch is in grid points, the window in
    patches. Stages two and three have half the rows and columns and twice the channels.
    """

    name: str = "pangu"
    width: int = 64  # channels of the finer resolution
    depths: list[int] = field(default_factory=lambda: [2, 2, 2, 2])  # blocks of each stage
    heads: list[int] = field(default_factory=lambda: [4, 8, 8, 4])  # of attention, of each stage
    patch: list[int] = field(default_factory=lambda: [1, 2, 2])  # levels, rows, columns
    window: list[int] = field(default_factory=lambda: [4, 2, 4])  # levels, rows, columns of patches
    mlp_ratio: int = 2  # hidden width of a block's perceptron, in widths of the block

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("model.name", self.name, ("pangu",))
        checks.at_least("model.width", self.width, 1)
        checks.at_least("model.mlp_ratio", self.mlp_ratio, 1)
        for key, length in (("depths", 4), ("heads", 4), ("patch", 3), ("window", 3)):
            values = getattr(self, key)
            checks.of_length(f"model.{key}", values, length)
            checks.at_least(f"model.{key}", min(values), 1)
        for heads, factor in zip(self.heads, (1, 2, 2, 1), strict=True):
            if factor * self.width % heads:
                raise UserError(
                    f"model.heads: has to divide the stage's {factor * self.width} channels, "
                    f"got {heads}. Change model.heads or model.width."
                )

    def coarsest_rows(self, height: int) -> int:
        """Rows of patches at the coarser of the two resolutions."""
        patches = -(-height // self.patch[1])
        return -(-patches // 2)


@dataclass
class CrossFormerConfig(BlocksConfig):
    """The CrossFormer: one entry per level, finest first, of every list.

    `kernels` are those of the embedding that makes a level, in steps of `strides`; `local_windows`
    and `global_windows` the rows, and columns, of short- and of long-distance attention.
    """

    name: str = "crossformer"
    channels: list[int] = field(default_factory=lambda: [48, 96])  # of each level
    depths: list[int] = field(default_factory=lambda: [1, 2])  # blocks of each level
    head_channels: int = 24  # of each head of attention
    # sizes of the convolutions that a level begins with
    kernels: list[list[int]] = field(default_factory=lambda: [[2, 4, 8], [2, 4]])
    strides: list[int] = field(default_factory=lambda: [2, 2])  # of these convolutions
    local_windows: list[int] = field(default_factory=lambda: [4, 4])  # of short-distance attention
    global_windows: list[int] = field(default_factory=lambda: [4, 2])  # of long-distance attention
    mlp_ratio: int = 2  # hidden width of a block's perceptron, in widths of the block
    groups: int = 8  # of the decoder's norms
    poles: str = "earth"  # earth | mirror: what lies beyond a pole
    spectral_norm: bool = False  # bound the largest singular value of the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("model.name", self.name, ("crossformer",))
        checks.one_of("model.poles", self.poles, ("earth", "mirror"))
        if self.spectral_norm and self.activation_checkpointing:
            raise UserError(
                "model.spectral_norm: needs model.activation_checkpointing=false: what is computed "
                "again in backward would use other weights than the forward did"
            )
        checks.not_empty("model.channels", self.channels)
        levels = len(self.channels)
        for key in ("channels", "depths", "strides", "local_windows", "global_windows"):
            values = getattr(self, key)
            checks.of_length(f"model.{key}", values, levels, "model.channels")
            checks.at_least(f"model.{key}", min(values), 1)
        checks.of_length("model.kernels", self.kernels, levels, "model.channels")
        for key in ("head_channels", "mlp_ratio", "groups"):
            checks.at_least(f"model.{key}", getattr(self, key), 1)
        for channels, divisor, key in (
            *((c, self.head_channels, "head_channels") for c in self.channels),
            *((c, self.groups, "groups") for c in self.channels[:-1]),
        ):
            if channels % divisor:
                raise UserError(
                    f"model.channels: needs multiples of model.{key} ({divisor}), got {channels}"
                )
        for kernels, stride, channels in zip(
            self.kernels, self.strides, self.channels, strict=True
        ):
            checks.not_empty("model.kernels", kernels)
            if channels < 2 ** (len(kernels) - 1):
                raise UserError(
                    f"model.kernels: {len(kernels)} kernels halve the channels of their level "
                    f"{len(kernels) - 1} times, and model.channels has {channels} there. Give "
                    "fewer kernels."
                )
            odd = next((k for k in kernels if k < stride or (k - stride) % 2), None)
            if odd is not None:
                raise UserError(
                    f"model.kernels: needs kernels of stride + 0, 2, 4, ... at a stride of "
                    f"{stride}, got {odd}. Change model.kernels or model.strides."
                )

    @property
    def grid_multiple(self) -> int:
        """Rows and columns are padded to a multiple of this: whole windows at every level."""
        return lcm(
            *(
                prod(self.strides[: level + 1]) * lcm(local, distant)
                for level, (local, distant) in enumerate(
                    zip(self.local_windows, self.global_windows, strict=True)
                )
            )
        )

    def coarsest_rows(self, height: int) -> int:
        """Rows of the coarsest level, of the padded globe."""
        return -(-height // self.grid_multiple) * self.grid_multiple // prod(self.strides)
