"""All that a training step makes the ranks of a domain do: operations, messages, what is kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.copies import copied
from credit_dp.domain_parallel.dry_run import Saved, dataless, row_layers, without_data
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.operation_costs import Operation, Operations
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.plan import Shape
from credit_dp.domain_parallel.rounds import Message, Rounds


@final
@dataclass(frozen=True)
class StepWork:
    """Forward and backward of one micro-batch on a domain of `ranks`.

    Attributes:
        operations: of each combination of bands that a rank may have, how many cost what.
        exchanges: the messages that are under way at once, and how often.
        collectives: bytes that each rank sends in a ring, and how often.
        kept_bytes: for backward, on the fullest rank.
    """

    ranks: int
    operations: tuple[Counter[Operation], ...]
    exchanges: Counter[tuple[Message, ...]]
    collectives: Counter[int]
    kept_bytes: int


def step_work(model: nn.Module, shape: Shape, ranks: int) -> StepWork:
    """Follow a step on tensors without data, once for each combination of bands.

    Args:
        model: not converted; left as it is.
        shape: of the whole globe's input, `(B, C, H, W)`.
        ranks: how many bands.

    Raises:
        UserError: the model can't be sharded so.
    """
    rounds = Rounds(0, ranks)
    manager = DomainParallelManager(ranks, ranks, transport=rounds)
    if ranks > 1:
        model = shard_model(copied(model), manager, shape)
    found: dict[tuple[int, ...], tuple[Counter[Operation], int]] = {}
    for rank in range(ranks):
        bands = tuple(partition.sizes[rank] for partition in manager.bands.known)
        if bands not in found:
            manager.rank = rank
            manager.transport = rounds = Rounds(rank, ranks, manager.bands.known)
            found[bands] = _follow(model, manager, shape)
    operations, kept = zip(*found.values(), strict=True)
    # Every run notes the messages of all ranks: the last one's are as good as the first one's.
    return StepWork(ranks, operations, rounds.exchanges, rounds.collectives, max(kept))


def _follow(
    model: nn.Module, manager: DomainParallelManager, shape: Shape
) -> tuple[Counter[Operation], int]:
    """Return the operations of one rank's step, and the bytes that it keeps for backward."""
    rows = manager.bands[shape[ROW_DIM]].sizes[manager.domain_rank]
    band = (*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :])
    with dataless():
        model = without_data(model)
        model.train()
        for layer in row_layers(model).values():
            layer.forget_exchanges()
        saved = Saved([*model.parameters(), *model.buffers()])
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        x = torch.empty(band, dtype=dtype, device="meta")
        operations = Operations()
        with operations:
            with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda kept: kept):
                made = model(x)
            torch.autograd.backward(made, torch.empty_like(made))
    return operations.counted, saved.bytes


def update_work(model: nn.Module) -> Counter[Operation]:
    """Return the operations of an update of all parameters by AdamW."""
    learning = [p for p in model.parameters() if p.requires_grad]
    weights = [nn.Parameter(torch.empty_like(p, device="meta")) for p in learning]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimiser = torch.optim.AdamW(weights, foreach=True)
    optimiser.step()  # makes the moments
    operations = Operations()
    with operations:
        optimiser.step()
    return operations.counted
