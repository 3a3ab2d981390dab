"""What a run is about to do and to take: memory, bytes sent, and disk, on one screen."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.filesize import decimal
from torch import Tensor

from credit_dp.config import Config, microbatches_per_step
from credit_dp.data.setup import TrainingData
from credit_dp.distributed.collectives import all_gather_object
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.costs.report import DryRun, dry_run
from credit_dp.training.build import Training
from credit_dp.training.replicas import local_tensor

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class RunEstimate:
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


def estimate_run(
    config: Config, prepared: TrainingData, training: Training, manager: DomainParallelManager
) -> RunEstimate:
    """Estimate the needs of a run that is ready to start; collective with a pipeline.

    Activations and messages are those of a training step on tensors without data, which only ranks
    that hold the whole model can take; `held` has no activations on others.
    """
    state = training.trainer.state
    trained, averages = state.trainable_parameters.values(), 1 if state.average is not None else 0
    learning = local_bytes(trained)
    held = {
        "weights": local_bytes(state.parameters.values()),
        "gradients": learning,
        "moments": state.layout.moments * learning,
        "averages": averages * learning,
    }
    whole = sum(p.nbytes for p in state.parameters.values())
    whole += (state.layout.moments + averages) * sum(p.nbytes for p in trained)
    if manager.pipeline_parallel_size > 1:
        copies = manager.domain_world_size * manager.dp_world_size
        whole = sum(all_gather_object(whole)) // copies
    step = dry_run_step(config, prepared, training, manager) if manager.rank == 0 else None
    messages = sent = 0
    if step is not None:
        # A later forecast step keeps as much as the first, unless it is computed again.
        steps = config.trainer.longest_rollout
        again = config.trainer.checkpoint_activations
        held["activations"] = step.saved_bytes * (1 if again else steps)
        passes = steps * microbatches_per_step(config)
        totals = [t[manager.domain_rank] for t in (*step.forward.values(), *step.backward.values())]
        messages = passes * sum(total.messages for total in totals)
        sent = passes * sum(total.bytes for total in totals)
    averaged = learning if manager.domain_world_size * manager.dp_world_size > 1 else 0
    return RunEstimate(held, messages, sent, averaged, whole)


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, or of this rank's shares of them."""
    return sum(local_tensor(t).nbytes for t in tensors)


def dry_run_step(
    config: Config, prepared: TrainingData, training: Training, manager: DomainParallelManager
) -> DryRun | None:
    """A micro-batch's training step without data; None where the model can't take one."""
    parallel = config.parallel
    plain = parallel.pipeline == 1 and parallel.data_mode == "ddp" and not parallel.layout
    if not plain or config.compile:
        return None
    store = prepared.store
    samples = config.data.batch_size // manager.dp_world_size // microbatches_per_step(config)
    inputs = store.channels.fields(config.model.frames).inputs
    (model,) = training.trainer.state.parts
    try:
        return dry_run(model, manager, [(samples, inputs, *store.grid)], manager.rank)
    except Exception as error:  # noqa: BLE001 - a model of the user's own; an estimate ends no run
        logger.info("no estimate of activations: %s: %s", type(error).__name__, error)
        return None


def summary_lines(
    config: Config, prepared: TrainingData, training: Training, manager: DomainParallelManager
) -> list[str]:
    """Lines for people; collective with a pipeline."""
    needs = estimate_run(config, prepared, training, manager)
    parts = {
        "model": model_line(config, training),
        "mesh": mesh_line(manager, prepared.store.grid[0]),
        "data": data_line(config, prepared, training),
        "batch": batch_line(config, manager),
        "training": training_line(config, training),
        "sent": sent_line(needs),
        "memory": memory_line(needs),
        "disk": disk_line(config, needs),
        "writes to": config.run.dir,
    }
    return [f"{label:<11}{text}" for label, text in parts.items() if text]


def model_line(config: Config, training: Training) -> str:
    """Name, parameters and numbers."""
    state = training.trainer.state
    count = sum(p.numel() for p in state.parameters.values())
    frozen = count - sum(p.numel() for p in state.trainable_parameters.values())
    kind = config.trainer.dtype
    kind += f", computes in {config.trainer.autocast}" if config.trainer.autocast else ""
    of_rank = " on rank 0" if config.parallel.pipeline > 1 else ""
    stay = f", {frozen:,} of them frozen" if frozen else ""
    return f"{config.model.name}, {count:,} parameters{of_rank}{stay}, {kind}"


def mesh_line(manager: DomainParallelManager, rows: int) -> str:
    """The mesh, and how the globe's rows are shared out."""
    axes = {
        "pipeline": manager.pipeline_parallel_size,
        "data": manager.data_parallel_size,
        "domain": manager.domain_parallel_size,
    }
    mesh = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    sizes = sorted(set(manager.partition(rows).sizes), reverse=True)
    bands = f"{' or '.join(map(str, sizes))} of {rows} rows each"
    return f"{mesh or 'one rank'}, {bands if manager.domain_parallel_size > 1 else f'{rows} rows'}"


def data_line(config: Config, prepared: TrainingData, training: Training) -> str:
    """The store, its fields and the span that is trained on."""
    store = prepared.store
    first, last = config.data.dates.train
    rows, columns = store.grid
    samples = training.loader.state_dict()["count"]
    fields = store.channels.states
    return (
        f"{config.data.name}, {first} to {last}, {samples:,} samples of {fields} fields on "
        f"{rows} x {columns} points"
    )


def batch_line(config: Config, manager: DomainParallelManager) -> str:
    """How the batch is shared out."""
    batch, micros = config.data.batch_size, microbatches_per_step(config)
    own = batch // manager.dp_world_size
    shared = f", {own} on each data rank" if manager.dp_world_size > 1 else ""
    return f"{batch} samples{shared}{f', {micros} parts one by one' if micros > 1 else ''}"


def training_line(config: Config, training: Training) -> str:
    """Steps, epochs, and forecast steps."""
    steps, per_epoch = config.trainer.steps, steps_per_epoch(config, training)
    done = training.trainer.state.step
    line = f"{steps:,} steps, {done:,} of them done" if done else f"{steps:,} steps"
    line += f", {steps / per_epoch:.3g} epochs of {per_epoch:,} steps"
    lengths = dict(sorted(config.trainer.rollout.items()))
    if lengths == {0: 1}:
        return line
    told = ", ".join(
        f"{length} from {config.trainer.rollout_unit} {start}" for start, length in lengths.items()
    )
    return f"{line}; forecast steps: {told}"


def steps_per_epoch(config: Config, training: Training) -> int:
    """Whole batches among the samples."""
    return int(training.loader.state_dict()["count"]) // config.data.batch_size


def sent_line(needs: RunEstimate) -> str:
    """What rank 0 sends in a step; nothing for a rank that is alone."""
    parts = []
    if needs.messages:
        parts.append(f"{decimal(needs.sent)} of rows in {needs.messages} messages")
    if needs.averaged:
        parts.append(f"{decimal(needs.averaged)} of gradients added up")
    return f"{', '.join(parts)}, by each rank in a step" if parts else ""


def memory_line(needs: RunEstimate) -> str:
    """About how much a rank holds, by item; small ones are left out."""
    total = sum(needs.held.values())
    items = [f"{name} {decimal(size)}" for name, size in needs.held.items() if size > total // 100]
    about = "about" if "activations" in needs.held else "activations and"
    return f"{about} {decimal(total)} on each rank: {', '.join(items)}"


def disk_line(config: Config, needs: RunEstimate) -> str:
    """Room for checkpoints: one more than stay, while it is written."""
    count = config.trainer.keep_checkpoints + 1 + config.trainer.keep_best
    needed, free = count * needs.checkpoint, free_space(Path(config.run.dir))
    line = f"{decimal(needed)} for checkpoints, at most {count} of {decimal(needs.checkpoint)}"
    if free is None:
        return line
    short = ": TOO LITTLE, lower trainer.keep_checkpoints" if free < needed else ""
    return f"{line}; {decimal(free)} free there{short}"


def free_space(folder: Path) -> int | None:
    """Bytes that are free where a folder is or will be; None if nobody can tell."""
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
