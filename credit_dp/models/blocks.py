"""Parts of all models: stochastic depth, noise, recomputation, offsets in windows, padding.

Stochastic depth and noise have draws that are set before a forward pass, sample by sample, so that
they do not depend on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from credit_dp.config.model import CrossFormerConfig, UNetConfig
from credit_dp.constants import constant_tensor
from credit_dp.fields import GridShape
from credit_dp.random_streams import random_stream
from credit_dp.torch_private import DropoutNd


@final
class StochasticDepth(nn.Module):
    """Drops the branch of a residual block for random samples in training.

    A branch that is kept is divided by `1 - rate`, so that the expected value is the branch.

    Attributes:
        draws: a number from [0, 1) for each sample, `(B,)`, set by `draw_stochastic_depths`. None:
            torch's random numbers are drawn at each forward.
        number: of this layer in the model, if `number_stochastic_depths` has set it.

    Shapes:
        `(B, ...)` -> the same.

    Raises:
        ValueError: the draws are for another number of samples.

    Source: Huang et al. 2016.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.number: int | None = None
        self.draws: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch, with zeros for the samples that lose it."""
        if not self.training or not self.rate:
            return x
        draws = torch.rand(len(x), device=x.device) if self.draws is None else self.draws
        if len(draws) != len(x):
            raise ValueError(f"StochasticDepth: has draws for {len(draws)} samples, got {len(x)}")
        keep = (draws >= self.rate).to(x) / (1 - self.rate)
        return x * keep.view(-1, *[1] * (x.ndim - 1))

    def extra_repr(self) -> str:
        """Describe the rate."""
        return f"rate={self.rate}"


@final
class NoiseModulation(nn.Module):
    """Scales and shifts the channels of a field by linear functions of random numbers.

    It comes after a norm, which it makes conditional: members of an ensemble differ in their
    numbers. Without noise it changes nothing.

    Attributes:
        draws: the numbers, `(B, noise)`, set by `draw_noise`, or by `set_noise` to the description
            of the noise level of a diffusion model; None: no noise, which is that of zeros.

    Shapes:
        `(B, channels, ...)`, or with channels in `dim` -> the same.

    Raises:
        ValueError: the draws are for another number of samples.

    Source: Perez et al. 2018; after norms as in Lang et al. 2024 (arXiv:2412.15832), with one
    vector for the globe as in Alet et al. 2025 (arXiv:2506.10772).
    """

    def __init__(self, noise: int, channels: int, dim: int = 1) -> None:
        super().__init__()
        self.noise = noise
        self.dim = dim
        # The norm before has a bias of its own.
        self.linear = nn.Linear(noise, 2 * channels, bias=False)
        self.draws: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small initial weights."""
        # Not zeros: members would differ by rounding only, whose signs, other ones on each mesh,
        # would decide the first gradient of the CRPS.
        nn.init.normal_(self.linear.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x * (1 + scale) + shift`."""
        # In the dtype and on the device of the weights, which FSDP2 may change for the forward.
        weight: Tensor = self.linear.weight
        noise = weight.new_zeros(len(x), self.noise) if self.draws is None else self.draws
        if len(noise) != len(x):
            raise ValueError(f"NoiseModulation: has noise for {len(noise)} samples, got {len(x)}")
        # Divided by the root of their number, the scales are as large as the weights. Adam's steps,
        # large where gradients are mostly noise, would else disturb the field the more, the more
        # numbers there are.
        affine: Tensor = self.linear(noise.to(weight) / math.sqrt(self.noise))
        scale, shift = affine.chunk(2, 1)
        sizes = [len(x)] + [1] * (x.ndim - 1)
        sizes[self.dim] = -1
        return x * (1 + scale.view(sizes)) + shift.view(sizes)


def draw_noise(model: nn.Module, keys: Sequence[tuple[int, ...]]) -> None:
    """Draw the noise of the coming forward pass, normal numbers, the same for all layers.

    Args:
        model: sharded or not, or a stage of a pipeline.
        keys: of the random stream of each sample of the pass, see `credit_dp.random_streams`.
    """
    set_noise(model, lambda count: [random_stream(*key).standard_normal(count) for key in keys])


def set_noise(model: nn.Module, numbers: Callable[[int], Sequence[Iterable[float]]]) -> None:
    """Set the numbers of the coming forward pass for all layers of noise, if there are any.

    Args:
        numbers: returns those of each sample of the pass, given how many a sample has.
    """
    layers = [layer for layer in layers_with_draws(model) if isinstance(layer, NoiseModulation)]
    if not layers:
        return
    draws = [list(map(float, sample_numbers)) for sample_numbers in numbers(layers[0].noise)]
    parameter = next(model.parameters())
    noise = constant_tensor(draws, parameter.device, parameter.dtype)
    for layer in layers:
        layer.draws = noise


def has_noise(model: nn.Module) -> bool:
    """Whether a model, or a stage of a pipeline, has layers whose noise `draw_noise` draws."""
    return any(isinstance(layer, NoiseModulation) for layer in layers_with_draws(model))


def number_stochastic_depths(model: nn.Module) -> None:
    """Number the layers of the full model, so that each pipeline stage draws as the model does."""
    for number, layer in enumerate(_stochastic_depths(model)):
        layer.number = number


def draw_stochastic_depths(model: nn.Module, seed: int, step: int, samples: Sequence[int]) -> None:
    """Draw which samples of a training step lose which branches.

    The draws of a sample are the same on every rank of every mesh.

    Args:
        samples: numbers of the samples in the global batch.
    """
    for index, layer in enumerate(_stochastic_depths(model)):
        number = index if layer.number is None else layer.number
        # One generator for each sample and layer: a rank's share of the batch, or of the model,
        # does not change the others' draws.
        draws = [random_stream(seed, step, sample, number).random() for sample in samples]
        layer.draws = constant_tensor(draws, next(model.parameters()).device)


def layers_with_draws(model: nn.Module) -> list[StochasticDepth | NoiseModulation]:
    """Return the layers of a model that use numbers drawn on the host before each forward pass."""
    # A sharded layer keeps the layer that it replaced as `wrapped`.
    layers = (m.__dict__.get("wrapped", m) for m in model.modules())
    return [layer for layer in layers if isinstance(layer, StochasticDepth | NoiseModulation)]


def _stochastic_depths(model: nn.Module) -> list[StochasticDepth]:
    return [layer for layer in layers_with_draws(model) if isinstance(layer, StochasticDepth)]


def stochastic_depth_or_identity(rate: float) -> nn.Module:
    """Return a `StochasticDepth`, or an identity if the rate is 0."""
    return StochasticDepth(rate) if rate else nn.Identity()


def stochastic_depth_rates(last: float, blocks: int) -> list[float]:
    """Return the rates of consecutive blocks, rising linearly from 0 to `last`."""
    return [last * block / max(1, blocks - 1) for block in range(blocks)]


def run_block(block: nn.Module, x: Tensor, checkpointing: bool) -> Tensor:
    """Return the output of a block; with `checkpointing` backward recomputes it from its input."""
    if not (checkpointing and block.training and torch.is_grad_enabled()):
        return block(x)  # type: ignore[no-any-return]
    random = draws_from_torch(block)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if layers_with_draws(block):
        options["context_fn"] = lambda: (nullcontext(), keep_draws(block)())
    return checkpoint(block, x, **options)  # type: ignore[no-any-return]


def draws_from_torch(block: nn.Module) -> bool:
    """Return whether torch's random numbers have to be kept for computing a block again.

    Otherwise they must not: their state can't be read in a CUDA graph.
    """
    return any(map(_layer_draws, block.modules()))


def _layer_draws(layer: nn.Module) -> bool:
    layer = layer.__dict__.get("wrapped", layer)
    if isinstance(layer, StochasticDepth):
        return layer.rate > 0 and layer.draws is None
    return isinstance(layer, DropoutNd) and layer.p > 0


def keep_draws(block: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes a context in which a block, or a model, has the draws of now.

    Backward may come after the draws of another micro-batch, or of a later step of a rollout: the
    recomputation has to use those of its own forward. torch restores the state of its random
    numbers, but knows nothing of `draws`.
    """
    return partial(_with_draws, [(layer, layer.draws) for layer in layers_with_draws(block)])


@contextmanager
def _with_draws(
    draws: list[tuple[StochasticDepth | NoiseModulation, Tensor | None]],
) -> Iterator[None]:
    current = [(layer, layer.draws) for layer, _ in draws]
    for layer, layer_draws in draws:
        layer.draws = layer_draws
    try:
        yield
    finally:
        # Also if the recomputation fails or ends early, as torch's does at the last tensor needed.
        for layer, layer_draws in current:
            layer.draws = layer_draws


def pair_offsets(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return all offsets of pairs of points of a window, and the number of each pair's offset.

    A function of the offset then is computed once for each offset, not for each pair.

    Shapes:
        `((2 * rows - 1) * (2 * columns - 1), 2)` in rows and columns, and `(T, T)` for `T` points,
        with one row for each query.
    """
    steps = [torch.arange(1.0 - size, size) for size in (rows, columns)]
    points = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    down, along = (points[:, None] - points[None]).unbind(-1)
    number = (down + rows - 1) * (2 * columns - 1) + along + columns - 1
    return torch.cartesian_prod(*steps), number


POLE_PADDINGS = ("zeros", "replicate", "reflect", "mirror", "earth")
COLUMN_PADDINGS = ("circular", "zeros", "replicate", "reflect")


def padding_modes(config: UNetConfig | CrossFormerConfig, grid: GridShape) -> tuple[str, str]:
    """Return how a model pads beyond the first and last row, and beyond the first and last column.

    On a region there are no poles, and columns may not go round: see `model.edges`.
    """
    rows = config.poles if grid.is_global else config.edges
    return rows, "circular" if grid.is_periodic else config.edges


def pad_poles(x: Tensor, width: int, poles: str) -> Tensor:
    """Return a field with `width` rows more beyond each pole; see `PolePad` for their values.

    Shapes:
        `(B, C, H, W)` -> `(B, C, H + 2 * width, W)`.

    Raises:
        ValueError: the globe has fewer rows than the padding repeats.
    """
    if not width:
        return x
    if poles in ("zeros", "replicate"):
        return F.pad(x, (0, 0, width, width), mode="constant" if poles == "zeros" else poles)
    rows = x.shape[-2]
    widest = rows - 1 if poles == "reflect" else rows  # `reflect` leaves out the last row
    if width > widest:
        raise ValueError(
            f"pad_poles: {width} rows beyond each pole need as many on the globe, but for "
            f"poles={poles} it has {widest}. Use a finer grid or less padding."
        )
    if poles == "reflect":
        return F.pad(x, (0, 0, width, width), mode="reflect")
    north, south = x[..., :width, :].flip(-2), x[..., -width:, :].flip(-2)
    if poles == "earth":
        # Not `roll`, which would lose the memory format, and with it that of the whole field.
        east = x.shape[-1] - x.shape[-1] // 2  # the first column that comes from the east
        north, south = (
            torch.cat([beyond[..., east:], beyond[..., :east]], -1) for beyond in (north, south)
        )
    return torch.cat([north, x, south], -2)


def pad_columns(x: Tensor, columns: int, mode: str = "circular") -> Tensor:
    """Return a field with `columns` more columns on both sides; by default periodic in longitude.

    As `F.pad` with this mode, but forward of `circular` is one copy, which keeps the memory format.

    Shapes:
        `(B, C, H, W)` -> `(B, C, H, W + 2 * columns)`.

    Raises:
        ValueError: the grid has fewer columns than the padding repeats.
    """
    if not columns:
        return x
    if mode in ("zeros", "replicate"):
        return F.pad(x, (columns, columns, 0, 0), mode="constant" if mode == "zeros" else mode)
    widest = x.shape[-1] - (mode == "reflect")  # `reflect` leaves out the last column
    if columns > widest:
        raise ValueError(
            f"pad_columns: {columns} columns on both sides need as many on the grid, but for "
            f"{mode} padding it has {widest}. Use a finer grid or less padding."
        )
    if mode == "reflect":
        return F.pad(x, (columns, columns, 0, 0), mode="reflect")
    return torch.cat([x[..., -columns:], x, x[..., :columns]], -1)


@final
class PolePad(nn.Module):
    """Pads a field on the globe: across the poles in latitude, periodically in longitude.

    A region is padded by other modes: it has no poles, and its columns may not go round.

    A path across a pole continues on the opposite meridian: it meets the same rows in the opposite
    order, at longitudes shifted by 180 degrees. `poles="earth"` pads like this. Scalars keep their
    value there; components of vectors would change sign, which is left to the caller.

    Args:
        width: rows beyond each pole, at most those of the globe.
        poles: their values. `earth`: the rows before the pole in opposite order, rolled by `W // 2`
            columns to the east (half a column short of the opposite meridian if `W` is odd);
            `mirror`: the same rows, not rolled; `reflect`: as `mirror` without the last row, for
            grids with a row on the pole; `replicate`: the last row; `zeros`.
        columns: columns beyond the first and the last one; by default `width`.
        column_mode: their values: `circular`, `zeros`, `replicate` or `reflect`.

    Shapes:
        `(B, C, H, W)` -> `(B, C, H + 2 * width, W + 2 * columns)`.

    Raises:
        ValueError: a mode is unknown, a width is negative, or the grid has too few rows or columns.
    """

    def __init__(
        self,
        width: int,
        poles: str = "mirror",
        columns: int | None = None,
        column_mode: str = "circular",
    ) -> None:
        super().__init__()
        for name, mode, modes in (
            ("poles", poles, POLE_PADDINGS),
            ("column_mode", column_mode, COLUMN_PADDINGS),
        ):
            if mode not in modes:
                raise ValueError(f"PolePad: {name} has to be one of {', '.join(modes)}, got {mode}")
        self.width = width
        self.poles = poles
        self.column_mode = column_mode
        self.columns = width if columns is None else columns
        if min(self.width, self.columns) < 0:
            raise ValueError(f"PolePad: widths can't be negative, got {self.extra_repr()}")

    def forward(self, x: Tensor) -> Tensor:
        """Return the padded field."""
        x = pad_poles(x, self.width, self.poles)
        return pad_columns(x, self.columns, self.column_mode)

    def extra_repr(self) -> str:
        """Describe the padding."""
        text = f"width={self.width}, poles={self.poles}, columns={self.columns}"
        return text if self.column_mode == "circular" else f"{text}, column_mode={self.column_mode}"
