"""One micro-batch on one stage without data or other ranks: what is kept, what rows are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from credit_dp.domain_parallel.dry_run import Saved, dataless, row_layers, without_data
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.tally import Sent, Tally
from credit_dp.pipeline_parallel.stages import Slots, Stage


@final
@dataclass(frozen=True)
class StageRun:
    """What one micro-batch takes on a stage of a pipeline.

    Attributes:
        kept_bytes: for backward, on one rank: what autograd saves, and what the stage makes. The
            state that it is given is not in it: `state_bytes` counts that.
        sent: by each rank of the domain, forward and backward.
    """

    kept_bytes: int
    sent: tuple[Sent, ...]


def run_stage(stage: Stage, manager: DomainParallelManager, samples: int) -> StageRun:
    """Run a stage forward and backward on tensors without data, as one rank of the domain.

    Args:
        stage: its module is left as it is.
        manager: the one that the model was converted with; its `rank` says whose band it is.
        samples: of a micro-batch.
    """
    transport, size = manager.transport, manager.domain_parallel_size
    tally = Tally(manager.domain_rank, size, manager.bands.known)
    manager.transport = tally
    try:
        with dataless():
            return StageRun(_kept(stage, samples), tally.sent)
    finally:
        manager.transport = transport


def _kept(stage: Stage, samples: int) -> int:
    model = without_data(stage.module)
    model.train()
    for layer in row_layers(model).values():
        layer.forget_exchanges()
    given = [slot.empty(samples, "meta") for slot in stage.takes]
    own = [*model.parameters(), *model.buffers()]
    saved = Saved(own if stage.is_first else [*own, *given])
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x):
        made = model(*given)
    made = made if isinstance(made, tuple) else (made,)
    for x in made:
        saved.add(x)
    ends = [x for x in made if x.requires_grad]
    torch.autograd.backward(ends, [torch.empty_like(x) for x in ends])
    return saved.bytes


def state_bytes(slots: Slots, samples: int, *, gradients: bool = False) -> int:
    """Return the bytes of a state that is handed on, or of the gradients that come back for it."""
    tensors = [slot.empty(samples, "meta") for slot in slots if slot.has_gradient or not gradients]
    return sum(tensor.nbytes for tensor in tensors)
