"""The config of every model as a dataclass that checks its own values.

A model of this package derives its config from `BlocksConfig` and names it by the default of
`name`; with an entry in `credit_dp.models.BUILDERS` and a file in `conf/model/` it can be chosen.

No torch in here: `--help` and `--cfg job` have to answer in under a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Any, ClassVar

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.errors import UserError
from credit_dp.fields import GridShape
from credit_dp.plugins import Plugin, PluginKind

EDGES = ("replicate", "reflect", "zeros")
UNET_POLES = ("reflect", "zeros", "mirror", "earth")
UNET_BLOCKS = ("residual", "global_depthwise")
UNET_UPSAMPLING = ("transpose", "nearest", "bilinear")


@dataclass(frozen=True)
class BudgetNeeds:
    """The variables, by their ERA5 names, that a fixer of a budget needs.

    Attributes:
        state: prognostic variables.
        fluxes: outputs that are sums over a step.
        static: constant variables.
    """

    state: tuple[str, ...]
    fluxes: tuple[str, ...] = ()
    static: tuple[str, ...] = ()


AIR = ("surface_pressure", "specific_humidity")
TOTAL_WATER = "specific_total_water"  # vapour and condensates in one, as in miles-credit's data
# Budgets and diagnostics use these in place of variables that the data do not have.
SUBSTITUTES: Mapping[str, str] = {"specific_humidity": TOTAL_WATER}
BUDGETS: Mapping[str, BudgetNeeds] = {
    "dry_air": BudgetNeeds(AIR),
    "water": BudgetNeeds(AIR, ("total_precipitation", "evaporation")),
    "energy": BudgetNeeds(
        (*AIR, "temperature", "u_component_of_wind", "v_component_of_wind"),
        (
            "top_net_solar_radiation",
            "top_net_thermal_radiation",
            "surface_net_solar_radiation",
            "surface_net_thermal_radiation",
            "surface_sensible_heat_flux",
            "surface_latent_heat_flux",
        ),
        ("geopotential_at_surface",),
    ),
}
# Ratio of the largest to the smallest noise level of a diffusion model: `level_embedding` repeats
# itself after a period, which is longer than this.
MAX_LEVEL_RATIO = 1e6
# Keys of a diffusion model that forecasts may change.
SAMPLER_KEYS = (
    *("sigma_min", "sigma_max", "rho", "sampling_steps"),
    *("s_churn", "s_tmin", "s_tmax", "s_noise"),
)
FIXERS = ("nonnegative", "bounds", *BUDGETS)
# By fixer of a budget: the variable of what it adds in a step.
CORRECTIONS = {name: f"{name}_correction" for name in BUDGETS}
FIXER_KEYS = {"fixers": list, "bounds": dict}  # keys of all models, and their types


@dataclass
class ModelConfig:
    """The keys that all models have; each model adds keys in a subclass."""

    denoises: ClassVar[bool] = False  # whether a noisy output is among the network's inputs

    name: str = MISSING  # name of the model
    frames: int = 1  # states in the input: the latest one and those of the steps before
    residual: bool = True  # predict the tendency; false: predict the next state
    # nonnegative | bounds | dry_air | water | energy: what corrects the fields after each step, in
    # this order
    fixers: list[str] = field(default_factory=list)
    # of the fixer bounds: allowed values of variables, e.g. {relative_humidity: [0, 100]}
    bounds: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.at_least("model.frames", self.frames, 1)
        checks.no_repeats("model.fixers", self.fixers)
        for name in self.fixers:
            checks.one_of("model.fixers", name, FIXERS)
        for name, limits in self.bounds.items():
            if limits is None:
                raise UserError(f"model.bounds.{name}: needs [low, high], like [0, 100], got null")
            checks.limits(f"model.bounds.{name}", limits)
        if "bounds" in self.fixers and not self.bounds:
            raise UserError(
                "model.bounds: needs values for the fixer bounds, like {temperature: [150, 350]}, "
                "got none. Give some, or take bounds out of model.fixers."
            )

    @property
    def budgets(self) -> list[str]:
        """Return the fixers of budgets, in their order."""
        return [name for name in self.fixers if name in BUDGETS]

    @property
    def corrections(self) -> list[str]:
        """Return the variables of what these fixers add in a step."""
        return [CORRECTIONS[name] for name in self.budgets]

    def coarsest_rows(self, height: int) -> int:
        """Return the rows of the model's coarsest level on a grid of `height` rows.

        A model whose config does not override this is taken to have a single level.
        """
        return height


@dataclass
class OwnModelConfig(ModelConfig, Plugin):
    """The base of the configs of models from other packages or files: see `credit_dp.plugins`.

    Derive from it and register the class, and `model=NAME` chooses it. Import torch inside `build`,
    not at the top of the file, which `--help` imports as well.
    """

    plugin_kind = PluginKind("model", "credit_dp.models")

    def build(self, in_channels: int, out_channels: int, grid: GridShape) -> Any:
        """Build the `nn.Module` for a grid of (rows, columns).

        `grid.is_global` is false for a region, which has no poles; its columns go round the globe
        if `grid.is_periodic` is true.

        Derived from `credit_dp.models.segments.SegmentedModel`, it can run in a pipeline.

        Shapes:
            the module maps `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.
        """
        raise NotImplementedError


@dataclass
class BlocksConfig(ModelConfig):
    """The keys that all models of this package have: regularisation, recomputation and edges.

    The default of `edges` continues a field with its outermost values. That leaves constants as
    they are, where zeros make a step, and it leaves half of the difference across an edge, which
    reflection makes zero; and it has no limit: kernels may be larger than the grid.
    """

    dropout: float = 0.0  # share of values that each block sets to zero in training
    stochastic_depth: float = 0.0  # rate of the last block; rates rise linearly from 0 at the first
    activation_checkpointing: bool = False  # recompute blocks in the backward pass, to save memory
    # random numbers of a sample and member that scale and shift the channels after the norms of
    # blocks, e.g. 32; 0: none. Above 0 needs trainer.members
    noise: int = 0
    edges: str = "replicate"  # replicate | reflect | zeros: padding beyond the edges of a region

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least("model.noise", self.noise, 0)
        checks.one_of("model.edges", self.edges, EDGES)
        checks.number_in("model.dropout", self.dropout, 0, 0.99)
        checks.number_in("model.stochastic_depth", self.stochastic_depth, 0, 0.99)


@dataclass
class UNetConfig(BlocksConfig):
    """The U-Net: `channels` has one entry per level, finest first.

    `kernel` is the size of the long-range convolutions of `block=global_depthwise`, in rows and
    columns of each level's grid.
    """

    name: str = "unet"
    channels: list[int] = field(default_factory=lambda: [32, 64, 128])  # of each level
    blocks: int = 1  # blocks of each level
    groups: int = 8  # groups of each group norm
    poles: str = "reflect"  # reflect | zeros | mirror | earth: padding beyond the poles
    # bilinear | nearest | transpose: by interpolation after a 1x1 convolution, or by a transposed
    # convolution, which can leave a checkerboard
    upsample: str = "bilinear"
    # residual | global_depthwise: two 3x3 convolutions, or one large convolution of each channel
    block: str = "residual"
    # of global_depthwise: odd numbers of rows and columns; larger ones reach farther and cost more
    kernel: list[int] = field(default_factory=lambda: [31, 31])
    squeeze_excite: bool = False  # gate each block's channels by their global means
    # scale and shift the decoder's channels by the coarsest level's global means
    global_conditioning: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("model.name", self.name, (type(self).name,))
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
        indivisible = next((width for width in self.channels if width % self.groups), None)
        if indivisible is not None:
            raise UserError(
                f"model.channels: needs multiples of model.groups ({self.groups}), got "
                f"{indivisible}"
            )
        if self.global_conditioning and len(self.channels) == 1:
            raise UserError(
                "model.global_conditioning: needs at least two levels, but model.channels has one "
                "entry. Add one to model.channels."
            )

    def coarsest_rows(self, height: int) -> int:
        """Return the rows of the coarsest level; each level halves them, rounding up."""
        factor: int = 2 ** (len(self.channels) - 1)
        return -(-height // factor)


@dataclass
class DiffusionConfig(UNetConfig):
    """A diffusion model of the next state, whose denoiser is the U-Net.

    Names of noise levels and of the sampler's settings are those of Karras et al. 2022.
    """

    denoises: ClassVar[bool] = True

    name: str = "diffusion"
    # cosines and sines of the logarithm of the noise level, which scale and shift the channels
    # after the norms of blocks; an even number
    noise: int = 32
    # standard deviation of what is denoised; 1 in units of the tendency's standard deviation
    sigma_data: float = 1.0
    sigma_min: float = 0.02  # smallest noise level, in units of what is denoised
    # largest noise level, from which sampling starts; at most 1e6 times the smallest
    sigma_max: float = 80.0
    # how much closer to each other small noise levels are than large ones; 1: all equally far
    rho: float = 7.0
    # noise levels of a forecast step; each calls the network twice, the last one once
    sampling_steps: int = 20
    s_churn: float = 0.0  # noise that is added again while sampling; 0: none
    s_tmin: float = 0.0  # smallest noise level at which it is added
    s_tmax: float | None = None  # largest noise level at which it is added; null: any
    s_noise: float = 1.0  # standard deviation of what is added, before it is scaled

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise < 2 or self.noise % 2:
            raise UserError(
                "model.noise: the noise level of a diffusion model needs an even number of cosines "
                f"and sines, like 32, got {self.noise}"
            )
        for key in ("sigma_data", "sigma_min", "s_noise"):
            checks.above_zero(f"model.{key}", getattr(self, key))
        if self.sigma_max <= self.sigma_min:
            raise UserError(
                f"model.sigma_max: needs more than model.sigma_min ({self.sigma_min:g}), got "
                f"{self.sigma_max:g}"
            )
        checks.number_in("model.sigma_max", self.sigma_max, 0)
        if self.sigma_max > MAX_LEVEL_RATIO * self.sigma_min:
            raise UserError(
                f"model.sigma_max: needs at most {MAX_LEVEL_RATIO:.0e} times model.sigma_min "
                f"({self.sigma_min:g}), as the network can't tell noise levels apart that are "
                f"further from each other, got {self.sigma_max:g}"
            )
        checks.number_in("model.rho", self.rho, 1)
        checks.at_least("model.sampling_steps", self.sampling_steps, 1)
        for key in ("s_churn", "s_tmin", "s_tmax"):
            checks.number_in(f"model.{key}", getattr(self, key), 0)
        if self.s_tmax is not None and self.s_tmax < self.s_tmin:
            raise UserError(
                f"model.s_tmax: needs at least model.s_tmin ({self.s_tmin:g}), got {self.s_tmax:g}"
            )


@dataclass
class WindowsConfig(BlocksConfig):
    """The keys of transformers with attention in shifted windows, at two resolutions.

    Stages between the first and the last have half the rows and columns and twice the channels.
    """

    dims: ClassVar[int]  # of a patch and of a window
    factors: ClassVar[tuple[int, ...]]  # of each stage: how much coarser and wider it is

    width: int = MISSING
    depths: list[int] = MISSING
    heads: list[int] = MISSING
    patch: list[int] = MISSING
    window: list[int] = MISSING
    mlp_ratio: int = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("model.name", self.name, (type(self).name,))
        checks.at_least("model.width", self.width, 1)
        checks.at_least("model.mlp_ratio", self.mlp_ratio, 1)
        stages = len(self.factors)
        for key, length, least in (
            ("depths", stages, 0),
            ("heads", stages, 1),
            ("patch", self.dims, 1),
            ("window", self.dims, 1),
        ):
            values = getattr(self, key)
            checks.of_length(f"model.{key}", values, length)
            checks.at_least(f"model.{key}", min(values), least)
        if not min(self.depths[1:-1]):
            raise UserError(
                "model.depths: only the first and the last stage can be without blocks, got "
                f"{list(self.depths)}"
            )
        for heads, factor in zip(self.heads, self.factors, strict=True):
            if factor * self.width % heads:
                raise UserError(
                    f"model.heads: needs a divisor of the stage's {factor * self.width} channels, "
                    f"got {heads}. Change model.heads or model.width."
                )

    def coarsest_rows(self, height: int) -> int:
        """Return the rows of patches at the coarser of the two resolutions."""
        patches = -(-height // self.patch[-2])
        return -(-patches // 2)


@dataclass
class PanguConfig(WindowsConfig):
    """The Pangu-style transformer: four stages of `depths` blocks.

    `patch` and `window` are (levels, rows, columns); a patch is measured in grid points, a window
    in patches.
    """

    dims: ClassVar[int] = 3
    factors: ClassVar[tuple[int, ...]] = (1, 2, 2, 1)

    name: str = "pangu"
    width: int = 64  # channels at the finer resolution
    depths: list[int] = field(default_factory=lambda: [2, 2, 2, 2])  # blocks of each stage
    heads: list[int] = field(default_factory=lambda: [4, 8, 8, 4])  # attention heads of each stage
    # levels, rows and columns of a patch, in grid points
    patch: list[int] = field(default_factory=lambda: [1, 2, 2])
    # levels, rows and columns of an attention window, in patches
    window: list[int] = field(default_factory=lambda: [4, 2, 4])
    mlp_ratio: int = 2  # hidden width of a block's MLP, as a multiple of the block's width


@dataclass
class SwinConfig(WindowsConfig):
    """The Swin transformer V2: three stages of `depths` blocks, the second at half the resolution.

    `patch` and `window` are (rows, columns); a patch is measured in grid points, a window in
    patches. Without blocks in the first and the last stage it has the form of FuXi.
    """

    dims: ClassVar[int] = 2
    factors: ClassVar[tuple[int, ...]] = (1, 2, 1)

    name: str = "swin"
    width: int = 64  # channels at the finer resolution
    # blocks of each stage; the first and the last may be 0
    depths: list[int] = field(default_factory=lambda: [2, 4, 2])
    heads: list[int] = field(default_factory=lambda: [4, 8, 4])  # attention heads of each stage
    # rows and columns of a patch, in grid points
    patch: list[int] = field(default_factory=lambda: [2, 2])
    # rows and columns of an attention window, in patches
    window: list[int] = field(default_factory=lambda: [4, 8])
    mlp_ratio: int = 2  # hidden width of a block's MLP, as a multiple of the block's width


@dataclass
class CrossFormerConfig(BlocksConfig):
    """The CrossFormer: every list has one entry per level, finest first.

    `kernels` are the sizes of the convolutions that embed a level, with step `strides`.
    `local_windows` and `global_windows` are the rows, and the columns, of a group of points in
    short- and in long-distance attention.
    """

    name: str = "crossformer"
    channels: list[int] = field(default_factory=lambda: [48, 96])  # of each level
    depths: list[int] = field(default_factory=lambda: [1, 2])  # blocks of each level
    head_channels: int = 24  # channels of each attention head
    # sizes of the convolutions at the beginning of each level
    kernels: list[list[int]] = field(default_factory=lambda: [[2, 4, 8], [2, 4]])
    strides: list[int] = field(default_factory=lambda: [2, 2])  # strides of these convolutions
    # rows, and columns, of a group of points in short-distance attention
    local_windows: list[int] = field(default_factory=lambda: [4, 4])
    # rows, and columns, of a group of points in long-distance attention
    global_windows: list[int] = field(default_factory=lambda: [4, 2])
    mlp_ratio: int = 2  # hidden width of a block's MLP, as a multiple of the block's width
    groups: int = 8  # groups of each group norm of the decoder
    poles: str = "earth"  # earth | mirror: padding beyond the poles
    spectral_norm: bool = False  # divide weights by their largest singular value

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("model.name", self.name, ("crossformer",))
        checks.one_of("model.poles", self.poles, ("earth", "mirror"))
        if self.spectral_norm and self.activation_checkpointing:
            raise UserError(
                "model.spectral_norm: needs model.activation_checkpointing=false: a recomputed "
                "block would have other weights than in the forward pass. Change one of them."
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
                    f"{len(kernels) - 1} times, but model.channels has {channels} there. Give "
                    "fewer kernels."
                )
            # Kernels of the stride's parity share their centres; smaller ones would skip rows.
            misfit = next((k for k in kernels if k < stride or (k - stride) % 2), None)
            if misfit is not None:
                raise UserError(
                    f"model.kernels: needs kernels of stride + 0, 2, 4, ... at a stride of "
                    f"{stride}, got {misfit}. Change model.kernels or model.strides."
                )

    @property
    def grid_multiple(self) -> int:
        """Number of which padded rows and columns are multiples: whole windows at every level."""
        return lcm(
            *(
                prod(self.strides[: level + 1]) * lcm(local, distant)
                for level, (local, distant) in enumerate(
                    zip(self.local_windows, self.global_windows, strict=True)
                )
            )
        )

    def coarsest_rows(self, height: int) -> int:
        """Return the rows of the coarsest level of the padded globe."""
        return -(-height // self.grid_multiple) * self.grid_multiple // prod(self.strides)


@dataclass
class SFNOConfig(BlocksConfig):
    """The Spherical Fourier Neural Operator: blocks on a Gaussian grid, `scale` times as coarse."""

    name: str = "sfno"
    channels: int = 48  # between encoder and decoder
    blocks: int = 4  # each multiplies the harmonics of a degree by a matrix of its own
    # rows of the grid for each of the coarser one that blocks compute on, and columns; there are as
    # many degrees of harmonics as coarser rows, and at most half as many as rows of the grid
    scale: int = 2
    mlp_ratio: int = 2  # hidden width of a block's MLP, as a multiple of model.channels

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("model.name", self.name, ("sfno",))
        for key in ("channels", "blocks", "scale", "mlp_ratio"):
            checks.at_least(f"model.{key}", getattr(self, key), 1)

    def coarsest_rows(self, height: int) -> int:
        """Return the rows of the coarser grid."""
        return -(-height // self.scale)


# The configs above, by `model.name`; `credit_dp.models.BUILDERS` has how each model is built.
MODELS: dict[str, type[ModelConfig]] = {
    config.name: config
    for config in (
        UNetConfig,
        DiffusionConfig,
        PanguConfig,
        CrossFormerConfig,
        SwinConfig,
        SFNOConfig,
    )
}
