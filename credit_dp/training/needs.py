"""What a run is going to take on a rank: memory, bytes sent, and disk for its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from credit_dp.config import Config, microbatches
from credit_dp.data.prepare import Prepared
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.dry_run import DryRun, dry_run
from credit_dp.training.agreement import gather
from credit_dp.training.build import Training
from credit_dp.training.replicas import shard

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Needs:
    """Bytes of this rank, but for those of checkpoints, which are of all ranks together.

    Attributes:
        held: at once, by item.
        messages, sent: of rows, in a step.
        averaged: of gradients that are added up with other ranks' in each step.
        checkpoint: each of them.
    """

    held: dict[str, int]
    messages: int
    sent: int
    averaged: int
    checkpoint: int


def needs_of(
    config: Config, prepared: Prepared, training: Training, manager: DomainParallelManager
) -> Needs:
    """Estimate the needs of a run that is ready to start; collective with a pipeline.

    Activations and messages are those of a training step on tensors without data, which only ranks
    that hold the whole model can take; `held` has no activations on others.
    """
    state = training.trainer.state
    trained, averages = state.trained.values(), 1 if state.average is not None else 0
    learning = own_bytes(trained)
    held = {
        "weights": own_bytes(state.parameters.values()),
        "gradients": learning,
        "moments": state.layout.moments * learning,
        "averages": averages * learning,
    }
    whole = sum(p.nbytes for p in state.parameters.values())
    whole += (state.layout.moments + averages) * sum(p.nbytes for p in trained)
    if manager.pipeline_parallel_size > 1:
        copies = manager.domain_world_size * manager.dp_world_size
        whole = sum(gather(whole)) // copies
    step = dry_step(config, prepared, training, manager) if manager.rank == 0 else None
    messages = sent = 0
    if step is not None:
        # A later forecast step keeps as much as the first, unless it is computed again.
        steps = config.trainer.longest_rollout
        again = config.trainer.checkpoint_activations
        held["activations"] = step.saved_bytes * (1 if again else steps)
        passes = steps * microbatches(config)
        totals = [t[manager.domain_rank] for t in (*step.forward.values(), *step.backward.values())]
        messages = passes * sum(total.messages for total in totals)
        sent = passes * sum(total.bytes for total in totals)
    averaged = learning if manager.domain_world_size * manager.dp_world_size > 1 else 0
    return Needs(held, messages, sent, averaged, whole)


def own_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, or of this rank's shares of them."""
    return sum(shard(t).nbytes for t in tensors)


def dry_step(
    config: Config, prepared: Prepared, training: Training, manager: DomainParallelManager
) -> DryRun | None:
    """A micro-batch's training step without data; None where the model can't take one."""
    parallel = config.parallel
    plain = parallel.pipeline == 1 and parallel.data_mode == "ddp" and not parallel.layout
    if not plain or config.compile:
        return None
    store = prepared.store
    samples = config.data.batch_size // manager.dp_world_size // microbatches(config)
    inputs = store.channels.fields(config.model.frames).inputs
    (model,) = training.trainer.state.parts
    try:
        return dry_run(model, manager, [(samples, inputs, *store.grid)], manager.rank)
    except Exception as error:  # noqa: BLE001 - a model of the user's own; an estimate ends no run
        logger.info("no estimate of activations: %s: %s", type(error).__name__, error)
        return None
