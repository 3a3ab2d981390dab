"""Summarises a run before it starts: model, mesh, data, steps, communication, memory and disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.filesize import decimal
from torch import Tensor

from credit_dp.config import Config, DataConfig, members_per_rank, microbatches_per_step
from credit_dp.config.training import TrainerConfig
from credit_dp.data.channels import Channels
from credit_dp.data.selection import unused_variables
from credit_dp.data.setup import TrainingData
from credit_dp.data.store import Store
from credit_dp.distributed.collectives import all_gather_object
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.decide import way_of, whole_call_lines
from credit_dp.domain_parallel.dry_run import DryRun, dry_run
from credit_dp.domain_parallel.recomputation import checkpointed
from credit_dp.errors import counted
from credit_dp.models.segments import SegmentedModel
from credit_dp.plain_text import in_one_line
from credit_dp.training.build_training import Training
from credit_dp.training.forward_backward import recomputed_modules
from credit_dp.training.loss import members_sent
from credit_dp.training.optim import moments_per_parameter
from credit_dp.training.parameter_shards import local_tensor

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class RunEstimate:
    """The estimated memory, communication and disk space of a run.

    Attributes:
        memory: bytes of this rank at once, by item.
        messages: number of messages with rows that this rank sends in a step.
        sent_bytes: of these messages.
        members_bytes: of members that this rank sends for the loss in a step, there and back.
        reduced_bytes: of gradients that this rank adds up with other ranks in a step.
        checkpoint_bytes: of one checkpoint, of all ranks together.
    """

    memory: dict[str, int]
    messages: int
    sent_bytes: int
    members_bytes: int
    reduced_bytes: int
    checkpoint_bytes: int


def estimate_run(
    config: Config, prepared: TrainingData, training: Training, manager: DomainParallelManager
) -> RunEstimate:
    """Estimate the needs of a run that is ready to start; collective with a pipeline.

    Activations and messages are those of a training step on tensors without data. Only rank 0 takes
    it, and only if it has the complete model: otherwise activations are left out, messages are 0.
    """
    state = training.trainer.state
    trained = state.trainable_parameters.values()
    averages = 1 if state.average is not None else 0
    trained_bytes = local_bytes(trained)
    moments = moments_per_parameter(config.optimizer)
    memory = {
        "weights": local_bytes(state.parameters.values()),
        "gradients": trained_bytes,
        "moments": moments * trained_bytes,
        "averages": averages * trained_bytes,
    }
    # `nbytes` of a DTensor is that of the unsharded tensor: each rank counts the parameters of its
    # pipeline stages in full.
    checkpoint_bytes = sum(p.nbytes for p in state.parameters.values())
    checkpoint_bytes += (moments + averages) * sum(p.nbytes for p in trained)
    if manager.pipeline_parallel_size > 1:
        checkpoint_bytes = sum(all_gather_object(checkpoint_bytes)) // manager.replicas
    step = dry_run_step(config, prepared, training, manager) if manager.rank == 0 else None
    messages = sent_bytes = 0
    if step is not None:
        # Each forecast step saves as much as the first one for the backward pass. What is
        # computed again is there once at a time.
        steps = config.trainer.longest_rollout
        memory["activations"] = step.saved_bytes * steps + step.recomputed_bytes
        passes = steps * microbatches_per_step(config)
        totals = [t[manager.domain_rank] for t in (*step.forward.values(), *step.backward.values())]
        messages = passes * sum(total.messages for total in totals)
        sent_bytes = passes * sum(total.bytes for total in totals)
    reduced_bytes = trained_bytes if manager.replicas > 1 else 0
    traded = members_bytes(config, prepared, training, manager)
    return RunEstimate(memory, messages, sent_bytes, traded, reduced_bytes, checkpoint_bytes)


def members_bytes(
    config: Config, prepared: TrainingData, training: Training, manager: DomainParallelManager
) -> int:
    """Return the bytes that this rank sends for the loss to ranks with other members, in a step."""
    if manager.pipeline_rank < manager.pipeline_parallel_size - 1:
        return 0  # the last stage has the loss
    rows, store = training.rows, prepared.store
    values = members_sent(
        config.data.batch_size // manager.dp_world_size,
        config.trainer.members,
        store.channels.num_outputs,
        (rows.stop - rows.start) * store.grid[1],
        manager.ensemble_rank,
        manager.ensemble_parallel_size,
    )
    return values * config.trainer.longest_rollout * training.like.element_size()


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, or of this rank's shards of them."""
    return sum(local_tensor(t).nbytes for t in tensors)


def dry_run_step(
    config: Config, prepared: TrainingData, training: Training, manager: DomainParallelManager
) -> DryRun | None:
    """Run a training step of one micro-batch without data; None if that is not possible."""
    parallel = config.parallel
    is_unsharded = parallel.pipeline == 1 and parallel.data_mode == "ddp" and not parallel.layout
    if not is_unsharded or config.compile:
        return None
    store = prepared.store
    samples = config.data.batch_size // manager.dp_world_size // microbatches_per_step(config)
    samples *= members_per_rank(config)
    inputs = store.channels.fields(config.model.frames, config.model.denoises).inputs
    (model,) = training.trainer.state.parts
    by_itself = isinstance(model, SegmentedModel) and model.checkpointing
    try:
        # Blocks are checkpointed within the model already, complete steps only around it. On one
        # rank the model may checkpoint blocks by itself, which would not be counted.
        again = [""] if config.trainer.checkpoint_activations == "step" else []
        if parallel.domain == 1:
            again = recomputed_modules(model, config, 2)
        with checkpointed(model, again):
            shape = (samples, inputs, *store.grid)
            rank = manager.domain_rank
            return dry_run(model, manager, [shape], rank=rank, backward=True, training=True)
    except Exception as error:  # noqa: BLE001 - a failed estimate ends no run
        logger.info("no estimate of activations: %s: %s", type(error).__name__, error)
        return None
    finally:
        if isinstance(model, SegmentedModel):
            model.checkpointing = by_itself


def summary_lines(
    config: Config, prepared: TrainingData, training: Training, manager: DomainParallelManager
) -> list[str]:
    """Return the lines of the summary; collective with a pipeline."""
    estimate = estimate_run(config, prepared, training, manager)
    lines = {
        "model": model_line(config, training),
        "mesh": mesh_line(manager, prepared.store.grid[0]),
        "data": data_line(config.data, prepared, training),
        "variables": variables_line(prepared.store.channels),
        "inputs": inputs_line(prepared.store.channels),
        "unused": unused_line(prepared.store),
        "batch": batch_line(config, manager),
        "training": training_line(config, training),
        "validation": validation_line(config),
        "sent": sent_line(estimate),
        "memory": memory_line(estimate),
        "disk": disk_line(config, estimate),
        "writes to": config.run.dir,
    }
    summary = [f"{label:<11}{text}" for label, text in lines.items() if text]
    return [*summary, *(f"{'whole':<11}{line}" for line in whole_lines(training))]


def whole_lines(training: Training) -> list[str]:
    """Return lines about what runs whole, if the model computes on tensors of the globe."""
    domains = [x for x in map(attached_domain, training.trainer.state.parts) if x is not None]
    decisions = [domain.decision for domain in domains if domain.decision is not None]
    calls = [call for decision in decisions for call in decision.whole_calls]
    return whole_call_lines(calls)


def model_line(config: Config, training: Training) -> str:
    """Return the model's name, number of parameters, dtype, and how ranks share it."""
    state = training.trainer.state
    count = sum(p.numel() for p in state.parameters.values())
    frozen = count - sum(p.numel() for p in state.trainable_parameters.values())
    dtype = config.trainer.dtype
    dtype += f", computes in {config.trainer.autocast}" if config.trainer.autocast else ""
    if config.device == "cuda":
        dtype += gpu_precision(config.trainer)
    on_rank = " on rank 0" if config.parallel.pipeline > 1 else ""
    of_them = f", {frozen:,} of them frozen" if frozen else ""
    way = ""
    if config.parallel.domain > 1 and not on_rank:
        way = way_of(on_globe=any(attached_domain(part) for part in state.parts))
    return f"{config.model.name}, {count:,} parameters{on_rank}{of_them}, {dtype}{way}"


def gpu_precision(trainer: TrainerConfig) -> str:
    """Return how GPUs compute products of float32 matrices, and whether deterministically."""
    dtype = {"highest": "float32", "high": "TF32", "medium": "bfloat16"}[trainer.matmul]
    products = f", products of float32 in {dtype}" if trainer.dtype == "float32" else ""
    return products + (", deterministic" if trainer.deterministic else "")


def mesh_line(manager: DomainParallelManager, rows: int) -> str:
    """Return the sizes of the mesh, and the rows of each band."""
    axes = {
        "pipeline": manager.pipeline_parallel_size,
        "data": manager.data_parallel_size,
        "ensemble": manager.ensemble_parallel_size,
        "domain": manager.domain_parallel_size,
    }
    mesh = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    sizes = sorted(set(manager.partition(rows).sizes), reverse=True)
    bands = f"{' or '.join(map(str, sizes))} of {rows} rows each"
    return f"{mesh or 'one rank'}, {bands if manager.domain_parallel_size > 1 else f'{rows} rows'}"


def data_line(data: DataConfig, prepared: TrainingData, training: Training) -> str:
    """Return the name of the data, the dates and samples of training, and the fields."""
    store = prepared.store
    first, last = data.dates.train
    rows, columns = store.grid
    samples = training.loader.state_dict()["count"]
    fields = store.channels.num_states
    return (
        f"{data.name}, {first} to {last}, {counted(samples, 'sample')} of "
        f"{counted(fields, 'field')} on {rows} x {columns} points"
    )


MAX_NAMES = 12  # of variables in a line


def variables_line(channels: Channels) -> str:
    """Return the variables that are forecast, and the levels of those that are on levels."""
    outputs = channels.output_channels
    levels = list(dict.fromkeys(c.level for c in outputs if c.level is not None))
    upper = dict.fromkeys(c.variable for c in outputs if c.level is not None)
    surface = dict.fromkeys(c.variable for c in outputs if c.level is None)
    parts = []
    if upper:
        ends = f"{levels[0]} to {levels[-1]}" if len(levels) > 1 else levels[0]
        parts.append(f"{listed(upper)} on {counted(len(levels), 'level')} ({ends})")
    if surface:
        parts.append(listed(surface))
    if channels.diagnostic:
        names = dict.fromkeys(channel.variable for channel in channels.diagnostic)
        parts.append(f"never an input: {listed(names)}")
    return "; ".join(parts)


def inputs_line(channels: Channels) -> str:
    """Return the variables that the model gets besides those that it forecasts."""
    return listed([*channels.forcing, *channels.static])


def unused_line(store: Store) -> str:
    """Return the variables of the store that the run does not use, and the key to change."""
    names = unused_variables(store.source, store.channels)
    return f"{listed(names)}: add what you need to data.prognostic" if names else ""


def listed(names: Iterable[str]) -> str:
    """Return names separated by commas; of many the first ones, and how many more there are."""
    texts = [in_one_line(name) for name in names]
    more = len(texts) - MAX_NAMES
    return ", ".join(texts[:MAX_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def validation_line(config: Config) -> str:
    """Return when a run validates, and on which dates."""
    every = config.trainer.validate_every
    if not every:
        return "none"
    first, last = config.data.dates.valid
    return f"every {counted(every, 'step')}, from {first} to {last}"


def batch_line(config: Config, manager: DomainParallelManager) -> str:
    """Return the samples of a batch, of each data rank, and the numbers of members and parts."""
    batch = config.data.batch_size
    n_microbatches = microbatches_per_step(config)
    local = batch // manager.dp_world_size
    on_each_rank = f", {local} on each data rank" if manager.dp_world_size > 1 else ""
    microbatches = f", in {n_microbatches} micro-batches" if n_microbatches > 1 else ""
    members = config.trainer.members
    each = f", {members} members of each" if members > 1 else ""
    if manager.ensemble_parallel_size > 1:
        each += f", {members_per_rank(config)} of them on each ensemble rank"
    return f"{counted(batch, 'sample')}{on_each_rank}{each}{microbatches}"


def training_line(config: Config, training: Training) -> str:
    """Return the number of steps, of epochs, and of forecast steps in a sample."""
    steps = config.trainer.steps
    per_epoch = steps_per_epoch(config.data, training)
    done = training.trainer.state.step
    line = counted(steps, "step") + (f", {done:,} of them done" if done else "")
    line += f", {steps / per_epoch:.3g} epochs of {counted(per_epoch, 'step')}"
    lengths = dict(sorted(config.trainer.rollout.items()))
    if lengths == {0: 1}:
        return line
    rollout = ", ".join(
        f"{length} from {config.trainer.rollout_unit} {start}" for start, length in lengths.items()
    )
    return f"{line}; forecast steps: {rollout}"


def steps_per_epoch(data: DataConfig, training: Training) -> int:
    """Return the number of complete batches in an epoch."""
    return int(training.loader.state_dict()["count"]) // data.batch_size


def sent_line(estimate: RunEstimate) -> str:
    """Return what rank 0 sends in a step: rows, members, gradients; empty for a single rank."""
    parts = []
    if estimate.messages:
        messages = counted(estimate.messages, "message")
        parts.append(f"{decimal(estimate.sent_bytes)} of rows in {messages}")
    if estimate.members_bytes:
        parts.append(f"{decimal(estimate.members_bytes)} of members")
    if estimate.reduced_bytes:
        parts.append(f"{decimal(estimate.reduced_bytes)} of gradients reduced")
    return f"{', '.join(parts)}, by each rank in a step" if parts else ""


def memory_line(estimate: RunEstimate) -> str:
    """Return the memory of a rank, in total and by item; items below 1 % are left out."""
    memory = estimate.memory
    total = sum(memory.values())
    items = [f"{name} {decimal(size)}" for name, size in memory.items() if size > total // 100]
    about = "about" if "activations" in memory else "activations and"
    return f"{about} {decimal(total)} on each rank: {', '.join(items)}"


def disk_line(config: Config, estimate: RunEstimate) -> str:
    """Return the disk space for checkpoints, and how much is free."""
    # Old checkpoints are removed only when a new one is complete: one more than are kept.
    count = config.trainer.keep_checkpoints + 1 + config.trainer.keep_best
    size = estimate.checkpoint_bytes
    needed = count * size
    free = free_space(Path(config.run.dir))
    line = f"{decimal(needed)} for checkpoints, at most {count} of {decimal(size)}"
    if free is None:
        return line
    short = ": TOO LITTLE, lower trainer.keep_checkpoints" if free < needed else ""
    return f"{line}; {decimal(free)} free there{short}"


def free_space(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder, which need not exist yet; None if unknown."""
    for path in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(path).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
