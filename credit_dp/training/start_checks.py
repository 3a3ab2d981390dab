"""What a run refuses before hours of statistics, and `--check` without them: one list for both.

`check_without_data` needs the config alone. `check_start` needs the data, of which nothing is read
but times, names and grid, and the checkpoint that the run starts from.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import nn

from credit_dp.config import Config, DiffusionConfig, OwnLossConfig
from credit_dp.data.calendar import Times
from credit_dp.data.dates import HasTimes
from credit_dp.data.quickstart.dataset import LEVEL_VARIABLES
from credit_dp.data.quickstart.dynamics import LEVELS
from credit_dp.data.sampling import SampleSequence, initial_times, sample_times
from credit_dp.data.selection import check_levels
from credit_dp.data.setup import expected_data
from credit_dp.data.store import Store
from credit_dp.distributed.collectives import has_process_group
from credit_dp.errors import UserError, counted
from credit_dp.fields import Fields
from credit_dp.models import build_on_meta
from credit_dp.physics.columns import hybrid_of
from credit_dp.physics.fixers import bounded_channels, check_budgets
from credit_dp.training.augmentation import check_augmentation
from credit_dp.training.checkpoint import check_model_shapes, check_optimizer, model_shapes
from credit_dp.training.checkpoint_shards import Checkpoint
from credit_dp.training.data_description import check_data, describe_store
from credit_dp.training.loggers import check_trackers
from credit_dp.training.loss import (
    build_plugin_error,
    channel_errors,
    channel_weights,
    check_spectra,
)
from credit_dp.training.model_parts import check_parameter_patterns, check_planned_model
from credit_dp.training.monitoring import MAX_INITIAL_TIMES
from credit_dp.training.optim import build_optimizer, check_schedule, learning_rate_factors
from credit_dp.training.state import model_tensors
from credit_dp.training.transfer import check_initial_weights


def check_without_data(config: Config) -> None:
    """Check a user's own loss and schedule as far as that needs no data.

    Raises:
        UserError: the run would be refused.
    """
    if isinstance(config.loss, OwnLossConfig):
        build_plugin_error(config.loss, torch.zeros((), dtype=getattr(torch, config.trainer.dtype)))
    check_schedule(config.optimizer, config.trainer.steps)


def check_start(
    config: Config, data: HasTimes, data_ranks: int, resume: Path | None = None
) -> SampleCounts:
    """Check whether loss, model, samples and checkpoint fit the data, and loggers can be opened.

    In a run only rank 0 calls it: it alone logs, and all others would read the same checkpoint.

    Args:
        config: of the run; `--check` knows the dates and the grid that the data give it.
        data: the store; or the times of a quickstart store that is not built yet.
        resume: the checkpoint that the run resumes from.

    Raises:
        UserError: the run would be refused.
    """
    store = data if isinstance(data, Store) else None
    expected = expected_data(config.data) if store is None else store
    channels, grid = expected.channels, expected.grid
    check_trackers(config.logger)
    config.check_rows(grid[0])
    counts = count_samples(config, data, data_ranks)
    with_validation(config, data)
    channel_weights(config.loss, channels.output_channels)
    channel_errors(config.loss, channels.output_channels)
    if "bounds" in config.model.fixers:
        bounded_channels(config.model.bounds, channels.output_channels)
    if store is None:  # a plan may have the levels of ERA5, but the quickstart's store has not
        names = (*config.data.prognostic, *config.data.diagnostic)
        levels_of = {name: LEVELS for name in names if name in LEVEL_VARIABLES}
        check_levels(config.data.name, config.data.levels or LEVELS, levels_of)
    else:
        check_spectra(config.loss, store.grid)
        check_augmentation(config.trainer, store)
        if config.model.budgets:
            remedy = "Leave the fixers of budgets out of model.fixers."
            store.grid.check_global("model.fixers", remedy)
            check_budgets(config.model, store)
            hybrid_of(store)
    model = planned_model(config, channels.fields(config.model.frames, config.model.denoises), grid)
    factors = learning_rate_factors((model,), config.optimizer)
    if not has_process_group():  # a plug-in may communicate: ranks build it together, later
        # A plug-in may fail, but not because parameters are on the meta device.
        parameters = {
            name: nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
            for name, p in model.named_parameters()
        }
        build_optimizer(parameters, config.optimizer, factors)
    if resume is not None:
        _check_resumed(resume, config, model, data, counts.samples)
    elif config.init_from is not None:
        check_initial_weights(config.init_from, model, config.model, store)
    return counts


def start_notes(config: Config) -> list[str]:
    """Return lines about keys that allow a run, but that the user may not have meant."""
    warmup, steps = config.optimizer.warmup_steps, config.trainer.steps
    if warmup < max(2, steps):
        return []
    return [
        f"optimizer.warmup_steps: {warmup} is not below trainer.steps, which is {steps}: the "
        "learning rate rises until the end. Lower optimizer.warmup_steps, or raise trainer.steps."
    ]


LEAST_STEPS_BETWEEN = 20  # of training between two validations that nobody has asked for
VALIDATIONS_IN_RUN = 10
LARGEST_SHARE = 0.05  # of such validations in the work of the model


def validation_times(config: Config, times: HasTimes) -> list[Times]:
    """Return the times from which a forecast can be scored, on each part of the validation dates.

    Raises:
        UserError: a part has none, or is not within the validation dates.
    """
    leads, step = [min(config.trainer.evaluate_hours)], config.data.step_hours
    return [
        initial_times(times, "valid", leads, step, config.model.frames, part)
        for part in config.trainer.validation_parts.values()
    ]


def with_validation(config: Config, times: HasTimes) -> Config:
    """Return the config with a number in `trainer.validate_every`, where it has null.

    It is 0 if validation has no dates of its own, or if the run is too short.

    Args:
        config: of the run, with the dates that the store gives it.

    Raises:
        UserError: a key like `trainer.keep_best` needs validations, but there would be none.
    """
    trainer = config.trainer
    if trainer.validate_every is not None:
        return config
    dates = times.config.dates
    every = 0
    if dates.valid != dates.test:
        with contextlib.suppress(UserError):
            found = validation_times(config, times)
            count = sum(min(len(times), MAX_INITIAL_TIMES) for times in found)
            every = validation_interval(config, times.num_members * count)
    if trainer.needs_validation and not every:
        raise UserError(
            f"{trainer.needs_validation}: needs validations, and a run of "
            f"{counted(trainer.steps, 'step')} with these data.dates.valid makes none by itself. "
            "Set trainer.validate_every."
        )
    return replace(config, trainer=replace(trainer, validate_every=every))


def validation_interval(config: Config, forecasts: int) -> int:
    """Return the number of steps between validations, a multiple of `trainer.log_every`; 0: none.

    Args:
        forecasts: of a validation, without members that differ in the model's noise.
    """
    trainer, model = config.trainer, config.model
    lead_steps = min(trainer.evaluate_hours) // config.data.step_hours
    evaluations = 2 * model.sampling_steps if isinstance(model, DiffusionConfig) else 1
    passes = forecasts * trainer.scored_members * lead_steps * evaluations
    # The backward pass takes twice as long as the forward pass.
    passes_of_step = 3 * config.data.batch_size * trainer.members
    every = max(
        math.ceil(trainer.steps / VALIDATIONS_IN_RUN),
        math.ceil(passes / passes_of_step / LARGEST_SHARE),
        LEAST_STEPS_BETWEEN,
    )
    every = math.ceil(every / trainer.log_every) * trainer.log_every
    return every if every <= trainer.steps else 0


def planned_model(config: Config, fields: Fields, grid: tuple[int, int]) -> nn.Module:
    """Return the model with its parameters on the meta device, checked as a run does.

    Raises:
        UserError: it does not fit the grid or the variables, returns another shape, or a pattern
            matches no parameter.
    """
    model = build_on_meta(config.model, fields, grid)
    check_planned_model(model, config.model, fields, grid)
    check_parameter_patterns(model, config)
    return model


@final
class SampleCounts(NamedTuple):
    """The numbers of training samples, of steps in an epoch, and of forecasts for testing."""

    samples: int
    steps: int
    forecasts: int


def count_samples(config: Config, times: HasTimes, data_ranks: int) -> SampleCounts:
    """Count the samples and forecasts of a run.

    Raises:
        UserError: there are too few.
    """
    trainer, frames = config.trainer, config.model.frames
    starts = sample_times(times, "train", frames, trainer.longest_rollout)
    count = times.num_members * len(starts)
    sequence = SampleSequence(count, config.data.batch_size, data_size=data_ranks)
    if trainer.validate_every or trainer.validation_dates:
        validation_times(config, times)
    stride = trainer.evaluate_stride_hours
    tests = initial_times(times, "test", trainer.evaluate_hours, stride, frames)
    return SampleCounts(count, sequence.batches_per_epoch, times.num_members * len(tests))


def _check_resumed(
    path: Path, config: Config, model: nn.Module, data: HasTimes, samples: int
) -> None:
    """Refuse a checkpoint that a run can't resume from, as far as that needs no statistics."""
    checkpoint = Checkpoint.open("resume", path)
    metadata = checkpoint.metadata
    if isinstance(data, Store):
        check_data(metadata["data"], describe_store(data, config.model), data.source.where)
    check_optimizer(metadata, config.optimizer.name)
    shapes = {name: tuple(tensor.shape) for name, tensor in model_tensors((model,)).items()}
    check_model_shapes(f"resume: {path}", model_shapes(checkpoint.shapes), model_shapes(shapes))
    sequence = SampleSequence(samples, config.data.batch_size, seed=config.seed)
    sequence.load_state_dict(metadata["sampler"])
