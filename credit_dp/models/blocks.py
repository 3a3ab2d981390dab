"""What the blocks of all models share: padding on the globe, dropped branches, recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from credit_dp.constants import constant_tensor


@final
class StochasticDepth(nn.Module):
    """Drops the branch of a residual block for a sample, with probability `rate`, while training.

    What stays is divided by `1 - rate`, so that the mean is the branch.

    Args:
        rate: of samples that lose the branch.

    Attributes:
        draws: a number from [0, 1) for each sample, `(B,)`, set by `draw_stochastic_depths`;
        None: drawn from torch's random numbers at each forward.

        place: its number in the model, if `number_stochastic_depths` has set it.

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
        """Return the branch, zeros for samples that lose it."""
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


def number_stochastic_depths(model: nn.Module) -> None:
    """Number the layers that drop branches, so that a stretch of the model draws as the whole."""
    for place, layer in enumerate(_stochastic_depths(model)):
        layer.number = place


def draw_stochastic_depths(model: nn.Module, seed: int, step: int, samples: Sequence[int]) -> None:
    """Decide which samples of a training step lose which branches, sharded or not.

    The same for a sample wherever it is computed. `samples` are their numbers in the global batch.
    """
    for number, layer in enumerate(_stochastic_depths(model)):
        place = number if layer.number is None else layer.number
        keys = ([seed, step, sample, place] for sample in samples)
        drawn = [np.random.default_rng(key).random() for key in keys]
        layer.draws = constant_tensor(drawn, next(model.parameters()).device)


def _stochastic_depths(model: nn.Module) -> list[StochasticDepth]:
    layers = (m.__dict__.get("wrapped", m) for m in model.modules())
    return [layer for layer in layers if isinstance(layer, StochasticDepth)]


def stochastic_depth_or_identity(rate: float) -> nn.Module:
    """Return stochastic depth, or a layer that costs nothing where nothing is dropped."""
    return StochasticDepth(rate) if rate else nn.Identity()


def stochastic_depth_rates(last: float, blocks: int) -> list[float]:
    """Return the rates of blocks in a row: from 0 to that of the last one, linearly."""
    return [last * block / max(1, blocks - 1) for block in range(blocks)]


def run_block(block: nn.Module, x: Tensor, again: bool) -> Tensor:
    """Call a block; with `again` keep its input only, and compute the rest again in backward."""
    if not (again and block.training and torch.is_grad_enabled()):
        return block(x)  # type: ignore[no-any-return]
    if not _stochastic_depths(block):
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]
    return checkpoint(block, x, use_reentrant=False, context_fn=partial(_draw_contexts, block))  # type: ignore[no-any-return]


def _draw_contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds a block's forward, and its second one: by then others may have been drawn."""
    return nullcontext(), _with_draws([(layer, layer.draws) for layer in _stochastic_depths(block)])


@contextmanager
def _with_draws(draws: list[tuple[StochasticDepth, Tensor | None]]) -> Iterator[None]:
    now = [(layer, layer.draws) for layer, _ in draws]
    for layer, of_layer in draws:
        layer.draws = of_layer
    yield
    for layer, of_layer in now:
        layer.draws = of_layer


POLE_PADDINGS = ("zeros", "replicate", "reflect", "mirror", "earth")


def pad_poles(x: Tensor, width: int, poles: str) -> Tensor:
    """Add `width` rows beyond each pole; see `PolePad` for what they hold.

    Shapes:
        `(B, C, H, W)` -> `(B, C, H + 2 * width, W)`.

    Raises:
        ValueError: the globe has too few rows for what lies beyond its poles.
    """
    if not width:
        return x
    if poles == "zeros":
        return F.pad(x, (0, 0, width, width))
    if poles == "replicate":
        return F.pad(x, (0, 0, width, width), mode="replicate")
    rows = x.shape[-2]
    widest = rows - 1 if poles == "reflect" else rows
    if width > widest:
        raise ValueError(
            f"pad_poles: {width} rows beyond each pole need as many on the globe to show, which "
            f"has {widest} for poles={poles}. Use a finer grid or less padding."
        )
    if poles == "reflect":
        return F.pad(x, (0, 0, width, width), mode="reflect")
    north, south = x[..., :width, :].flip(-2), x[..., -width:, :].flip(-2)
    if poles == "earth":
        north, south = (beyond.roll(x.shape[-1] // 2, -1) for beyond in (north, south))
    return torch.cat([north, x, south], -2)


@final
class PolePad(nn.Module):
    """Pads a field on the globe: by what `poles` says in latitude, around in longitude.

    On the globe nothing ends at a pole: who walks across comes down on the other side, meets the
    rows of before in the opposite order, and finds each at the longitude turned by 180 degrees.
    That is `earth`. A scalar stays what it is there; the components of a vector change sign, which
    is left to the caller.

    Args:
        width: rows beyond each pole, up to all that the globe has.
        poles: what they hold. `earth`: the rows before them, turned by half the longitudes, which
            for an odd number of columns are `W // 2` to the east, half a column short of the
            opposite side; `mirror`: the rows before them; `reflect`: those without the last one,
            for grids with a row on the pole; `replicate`: the last one; `zeros`.
        columns: columns beyond the first and the last one; by default `width`.

    Shapes:
        `(B, C, H, W)` -> `(B, C, H + 2 * width, W + 2 * columns)`.

    Raises:
        ValueError: `poles` is unknown, a width is negative, or the globe has too few rows.
    """

    def __init__(self, width: int, poles: str = "mirror", columns: int | None = None) -> None:
        super().__init__()
        if poles not in POLE_PADDINGS:
            raise ValueError(
                f"PolePad: poles has to be one of {', '.join(POLE_PADDINGS)}, got {poles}"
            )
        self.width = width
        self.poles = poles
        self.columns = width if columns is None else columns
        if min(self.width, self.columns) < 0:
            raise ValueError(f"PolePad: widths can't be negative, got {self.extra_repr()}")

    def forward(self, x: Tensor) -> Tensor:
        """Return the padded field."""
        x = pad_poles(x, self.width, self.poles)
        return F.pad(x, (self.columns, self.columns, 0, 0), mode="circular")

    def extra_repr(self) -> str:
        """Describe the widths."""
        return f"width={self.width}, poles={self.poles}, columns={self.columns}"
