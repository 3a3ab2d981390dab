"""What weights, gradients and the optimizer's moments take on a rank, and what is sent for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from credit_dp.config import ParallelConfig
from credit_dp.training.parameter_shards import shared_blocks


@final
@dataclass(frozen=True)
class ParameterBudget:
    """Bytes on the fullest rank, and those that it sends in a step if reductions go in rings.

    Attributes:
        weights: as they are between steps.
        gradients: most of them at once.
        moments: of the optimizer.
        gathered: parameters of others that are here while a block computes.
        sent_gradients: to add gradients up.
        sent_weights: to gather what is shared out.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int = 0
    sent_gradients: int = 0
    sent_weights: int = 0

    def __add__(self, other: ParameterBudget) -> ParameterBudget:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return ParameterBudget(*(a + b for a, b in pairs))


def of_all(part: nn.Module, replicas: int, moments: int) -> ParameterBudget:
    """Return what it takes if each rank has all of a part (ddp).

    Args:
        part: the model, or a stage of it.
        replicas: ranks that have it, over the data and the domain axis.
        moments: of the optimizer, for each parameter.
    """
    weights = sum(p.nbytes for p in part.parameters())
    learning = sum(p.nbytes for p in _learning(part.parameters()))
    sent = all_reduced(learning, replicas)
    return ParameterBudget(weights, learning, moments * learning, 0, sent)


def of_shares(
    part: nn.Module,
    parallel: ParallelConfig,
    data: int,
    domain: int,
    micros: int,
    *,
    moments: int,
    gathers: int | None = None,
) -> ParameterBudget:
    """Return what it takes if the data ranks share out a part (fsdp2).

    Args:
        part: the converted model, or a stage of it.
        parallel: dtypes.
        data: ranks that share.
        domain: ranks that have the same shares.
        micros: micro-batches of a step.
        moments: of the optimizer, for each parameter.
        gathers: how often a block is gathered in a step of a pipeline, whose stages keep gradients
            whole until its end; None without a pipeline.
    """
    blocks = [list(block.parameters()) for block in shared_blocks(part)]
    in_blocks = {id(p) for block in blocks for p in block}
    rest = [p for p in part.parameters() if id(p) not in in_blocks]
    whole = [*(p for block in blocks for p in block), *rest]
    learning = list(_learning(whole))
    compute, reduce = parallel.param_dtype, parallel.reduce_dtype or parallel.param_dtype
    # Without a pipeline for forward and for backward; what belongs to no block stays in between.
    times = 2 * micros if gathers is None else gathers
    once = micros if gathers is None else 1
    padded = data * _shares(learning, data, reduce)
    in_block = [data * _shares(block, data, compute) for block in blocks]
    of_rest = data * _shares(rest, data, compute)
    total = times * sum(in_block) + once * of_rest
    reduced = (data - 1) * padded // data + all_reduced(padded // data, domain)
    return ParameterBudget(
        _shares(whole, data),
        _shares(learning, data) if gathers is None else max(padded, _shares(learning, data)),
        moments * _shares(learning, data),
        of_rest + (max(in_block, default=0) if gathers is None else sum(in_block)),
        once * reduced,
        (data - 1) * total // data,
    )


def all_reduced(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends to add up `size` bytes in a ring."""
    return 2 * (ranks - 1) * size // ranks


def _learning(parameters: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return (p for p in parameters if p.requires_grad)


def _shares(parameters: Sequence[nn.Parameter], ranks: int, dtype: str | None = None) -> int:
    """Return the bytes of the first rank's shares, which are the largest: rows of dimension 0."""
    total = 0
    for p in parameters:
        rows = -(-p.shape[0] // ranks)
        size = p.element_size() if dtype is None else getattr(torch, dtype).itemsize
        total += rows * (p.numel() // p.shape[0]) * size
    return total
