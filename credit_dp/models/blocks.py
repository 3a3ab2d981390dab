"""What the blocks of all models share: dropped branches, and computing again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from credit_dp.constants import constant


@final
class StochasticDepth(nn.Module):
    """Drops the branch of a residual block for a sample, with probability `rate`, while training.

    What stays is divided by `1 - rate`, so that the mean is the branch.

    Args:
        rate: of samples that lose the branch.

    Attributes:
        draws: a number from [0, 1) for each sample, `(B,)`, set by `draw_depths`; None: drawn from
            torch's random numbers at each forward.

        place: its number in the model, if `number_depths` has set it.

    Shapes:
        `(B, ...)` -> the same.

    Raises:
        ValueError: the draws are for another number of samples.

    Source: Huang et al. 2016.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.place: int | None = None
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


def number_depths(model: nn.Module) -> None:
    """Number the layers that drop branches, so that a stretch of the model draws as the whole."""
    for place, layer in enumerate(_dropping(model)):
        layer.place = place


def draw_depths(model: nn.Module, seed: int, step: int, samples: Sequence[int]) -> None:
    """Decide which samples of a training step lose which branches, sharded or not.

    The same for a sample wherever it is computed. `samples` are their numbers in the global batch.
    """
    for number, layer in enumerate(_dropping(model)):
        place = number if layer.place is None else layer.place
        keys = ([seed, step, sample, place] for sample in samples)
        drawn = [np.random.default_rng(key).random() for key in keys]
        layer.draws = constant(drawn, next(model.parameters()).device)


def _dropping(model: nn.Module) -> list[StochasticDepth]:
    layers = (m.__dict__.get("wrapped", m) for m in model.modules())
    return [layer for layer in layers if isinstance(layer, StochasticDepth)]


def drop_depth(rate: float) -> nn.Module:
    """Return stochastic depth, or a layer that costs nothing where nothing is dropped."""
    return StochasticDepth(rate) if rate else nn.Identity()


def depth_rates(last: float, blocks: int) -> list[float]:
    """Return the rates of blocks in a row: from 0 to that of the last one, linearly."""
    return [last * block / max(1, blocks - 1) for block in range(blocks)]


def run_block(block: nn.Module, x: Tensor, again: bool) -> Tensor:
    """Call a block; with `again` keep its input only, and compute the rest again in backward."""
    if not (again and block.training and torch.is_grad_enabled()):
        return block(x)  # type: ignore[no-any-return]
    if not _dropping(block):
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]
    return checkpoint(block, x, use_reentrant=False, context_fn=partial(_same_draws, block))  # type: ignore[no-any-return]


def _same_draws(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds a block's forward, and its second one: by then others may have been drawn."""
    return nullcontext(), _drawn([(layer, layer.draws) for layer in _dropping(block)])


@contextmanager
def _drawn(draws: list[tuple[StochasticDepth, Tensor | None]]) -> Iterator[None]:
    now = [(layer, layer.draws) for layer, _ in draws]
    for layer, of_layer in draws:
        layer.draws = of_layer
    yield
    for layer, of_layer in now:
        layer.draws = of_layer
