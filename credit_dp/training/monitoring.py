"""What is watched while a run trains: validation, pace and traces."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import profiler

from credit_dp.config import Config
from credit_dp.data.loader import Batch, Loader
from credit_dp.data.setup import TrainingData
from credit_dp.distributed.collectives import all_gather_object
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.held_out import EvaluationDates, HeldOutData, last_forecast, rank_batches
from credit_dp.evaluation.metrics import RootMeanSquare
from credit_dp.profiling import DATA, profile_region
from credit_dp.training.build import Training
from credit_dp.training.console import EtaMessage, Screen
from credit_dp.training.run_folder import temporary_file, translate_write_errors
from credit_dp.training.summary import steps_per_epoch
from credit_dp.training.trainer import StepRecord

MAX_INITIAL_TIMES = 8  # initial times


@final
class Validation:
    """Scores forecasts on the validation dates, and leaves training as it would be without.

    At most 8 initial times, evenly spread over `data.dates.valid`, at the shortest of
    `trainer.evaluate_hours`. The state forecasts with the averages of its weights, if it has any.

    Raises:
        UserError: no forecast fits into the validation dates, or they have gaps.
    """

    def __init__(
        self,
        config: Config,
        prepared: TrainingData,
        training: Training,
        manager: DomainParallelManager,
    ) -> None:
        self.every = config.trainer.validate_every
        self.batch_size = config.data.batch_size
        self.state = training.trainer.state
        self.rollout = training.forecast_step.rollout
        self.manager = manager
        hours = (min(config.trainer.evaluate_hours),)
        chosen = EvaluationDates("valid", hours, config.data.step_hours, MAX_INITIAL_TIMES)
        self.dates = HeldOutData(config, prepared, training.rows, training.like, chosen)

    def is_due(self, step: int) -> bool:
        """Whether to validate after this step."""
        return step % self.every == 0

    @torch.no_grad()
    def __call__(self) -> float:
        """The RMSE of each field in its own standard deviations, averaged over all fields.

        Collective; the same number on every rank.
        """
        dates = self.dates
        channels = dates.prepared.store.channels.num_outputs
        errors = RootMeanSquare((channels,), dates.area_weights, dates.points)
        ahead = dates.lead_steps[-1] * dates.step
        with preserve_rng_state(dates.area_weights.device), self.state.eval_mode():
            for times, counts in rank_batches(dates, self.manager, self.batch_size):
                forecast = last_forecast(self.rollout, dates, times)
                if counts:
                    errors.add((), forecast - dates.fields(times + ahead))
        mean = float(errors.result(self.manager).mean())
        return all_gather_object(mean)[
            0
        ]  # the best checkpoint is chosen by it: not one bit may differ


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Leave torch's random numbers where they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def repeat_first_batch(loader: Loader) -> Iterator[Batch]:
    """The loader's first batch without end, in a resumed run too; the loader stays at its start.

    Its rollout is as long as that of the first step.
    """
    start = {**loader.state_dict(), "position": 0}
    loader.load_state_dict(start)
    batch = next(loader)
    loader.load_state_dict(start)
    yield from repeat(batch)


T = TypeVar("T")

# The first step is apart, as much is set up in it; the second is the profiler's own first.
WAIT_STEPS, WARMUP_STEPS, ACTIVE_STEPS = 1, 1, 3


def with_data_span(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches, with a name for the time that is waited for them."""
    iterator = iter(batches)
    while True:
        with profile_region(DATA):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


@final
class StepProfiler:
    """Records the third to fifth step that a process takes, and writes them as a Chrome trace.

    Args:
        path: of the trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = False
        self._steps_done = 0
        self._profile = profiler.profile(
            schedule=profiler.schedule(
                wait=WAIT_STEPS, warmup=WARMUP_STEPS, active=ACTIVE_STEPS, repeat=1
            ),
            on_trace_ready=self._write,
        )

    def steps(self, records: Iterable[T]) -> Iterator[T]:
        """Hand on what is told of each step; meanwhile the trace is made."""
        with self._profile:
            for record in records:
                yield record
                self._steps_done += 1
                self._profile.step()

    def _write(self, found: profiler.profile) -> None:
        """Write it under another name first, so that no reader meets half a trace."""
        if self._steps_done <= WAIT_STEPS + WARMUP_STEPS:
            return
        part = temporary_file(self.path)
        with translate_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(part))
            os.replace(part, self.path)
        self.written = True


@final
class TrainingMonitor:
    """Follows the steps of a run, the same on every rank.

    Args:
        screen: this rank's.
        validation: if there is any.
        trace: where this rank's trace goes, if it makes one.

    Attributes:
        validation_rmse: found after the step that was followed last, or None.
        note: for the progress bar.
    """

    def __init__(
        self,
        config: Config,
        training: Training,
        screen: Screen,
        validation: Validation | None,
        trace: Path | None,
    ) -> None:
        self.config = config
        self.training = training
        self.screen = screen
        self.validation = validation
        self.trace = None if trace is None else StepProfiler(trace)
        self.validation_rmse: float | None = None
        self.note = ""
        self._loss = self._validated = ""
        step, total = training.trainer.state.step, config.trainer.steps
        self._eta = EtaMessage(step, total, steps_per_epoch(config, training))

    def batches(self) -> Iterator[Batch]:
        """Those that the run is to train on."""
        loader = self.training.loader
        return with_data_span(
            repeat_first_batch(loader) if self.config.trainer.one_batch else loader
        )

    def steps(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """The records, with a trace of some of the steps if one is made."""
        return iter(records) if self.trace is None else self.trace.steps(records)

    def on_step_end(self, record: StepRecord, validates: bool = True) -> Mapping[str, float]:
        """The numbers to log of a step, with the validation's if it is due; collective then."""
        line = self._eta(record.step)
        if line is not None:
            self.screen.show(line)
        if record.loss is None:
            self.validation_rmse = None
            return {}
        numbers = record.metrics()
        self._loss = f"loss {record.loss:.4f}"
        self.validation_rmse = self._validate(record.step) if validates else None
        if self.validation_rmse is not None:
            numbers["validation_rmse"] = self.validation_rmse
            self._validated = f"validation {self.validation_rmse:.4f}"
        self.note = "  ".join(part for part in (self._loss, self._validated) if part)
        return numbers

    def close(self) -> None:
        """Say what is missing."""
        if self.trace is not None and not self.trace.written:
            self.screen.show("no trace: trainer.profile needs at least 3 steps to record one")

    def _validate(self, step: int) -> float | None:
        due = self.validation is not None and self.validation.is_due(step)
        return self.validation() if due and self.validation is not None else None
