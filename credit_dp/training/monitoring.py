"""What watches a run while it trains: validation, pace, traces, and the callbacks of users."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Self, final

import torch
from torch import Tensor, nn, profiler

from credit_dp import checks
from credit_dp.config import Config, OwnCallbackConfig, TrainerConfig
from credit_dp.data.loader import Batch, Loader
from credit_dp.data.setup import TrainingData
from credit_dp.distributed.collectives import all_gather_object
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import (
    EvaluationDates,
    HeldOutData,
    HeldOutFields,
    forecast_map,
    rank_batches,
    run_forecasts,
)
from credit_dp.evaluation.maps import FieldMap
from credit_dp.evaluation.metric_table import (
    FORECAST,
    METRICS,
    TRUTH,
    Better,
    Extent,
    Metric,
    ScoreSums,
    run_metrics,
)
from credit_dp.evaluation.metrics import AreaMean
from credit_dp.files import atomic_path
from credit_dp.plugins import report_plugin_errors
from credit_dp.training.build_training import Training
from credit_dp.training.console import EtaMessage, Screen
from credit_dp.training.run_folder import translate_write_errors
from credit_dp.training.state import TrainingState
from credit_dp.training.summary import steps_per_epoch
from credit_dp.training.trainer import StepRecord

MAX_INITIAL_TIMES = 8  # of a validation


@final
class Validation:
    """Scores forecasts on the validation dates; training continues as if there were none.

    At most 8 initial times, evenly spread over `data.dates.valid` or each of its parts in
    `trainer.validation_dates`, at the shortest lead time of `trainer.evaluate_hours`. The model
    forecasts with its averaged weights, if there are any.

    Raises:
        UserError: no forecast fits into the validation dates, or they have gaps.

    Attributes:
        dates: the data of each part, by name; of all validation dates under an empty name.
        map: of the last validation, from the first initial time of this rank.
    """

    def __init__(
        self,
        config: Config,
        data: TrainingData,
        training: Training,
        manager: DomainParallelManager,
    ) -> None:
        self.every = config.trainer.validate_every or config.trainer.steps
        self.batch_size = config.data.batch_size
        self.state = training.trainer.state
        ensemble = training.ensemble
        self.rollout = replace(ensemble, step=ensemble.step.with_corrections()).rollout
        self.corrections = config.model.corrections
        self.members = config.trainer.scored_members
        self.manager = manager
        hours = (min(config.trainer.evaluate_hours),)
        self.dates = {
            name: HeldOutData(
                config,
                data,
                training.rows,
                training.like,
                EvaluationDates("valid", hours, config.data.step_hours, MAX_INITIAL_TIMES, part),
            )
            for name, part in config.trainer.validation_parts.items()
        }
        self.weights = config.trainer.validation_scores
        self.map: FieldMap | None = None

    def is_due(self, step: int) -> bool:
        """Whether to validate after this step."""
        return step % self.every == 0

    @torch.no_grad()
    def __call__(self) -> Mapping[str, float]:
        """Return scores in standard deviations of each field, averaged over all fields, by name.

        Those of the final scores, as `validation_rmse`; but of ensembles `validation_spread_skill`
        for the spread, the ratio that is 1 if members are as far from each other as from the truth.
        What fixers of budgets add in a step is in kg m-2 or J m-2, the mean over the globe and all
        steps. Those of `trainer.validation_scores` come too, and as `validation_error` the sum of
        their costs (`Better.cost`) times their weights. With named parts of the dates each score is
        the mean over them, and `NAME/PART` is that of a part.

        Collective; the same numbers on every rank.

        Source: Fortin et al. 2014, "Why should ensemble spread match the RMSE of the ensemble
        mean?", for the ratio.
        """
        self.map = None
        parts = {name: self._scores(dates) for name, dates in self.dates.items()}
        scores = {
            name: sum(part[name] for part in parts.values()) / len(parts)
            for name in next(iter(parts.values()))
        }
        if "" not in parts:
            for part, found in parts.items():
                scores |= {f"{name}/{part}": value for name, value in found.items()}
        named = {f"validation_{name}": value for name, value in scores.items()}
        # The numbers of rank 0: they choose the best checkpoint, so that not one bit may differ.
        return all_gather_object(named)[0]

    def _scores(self, dates: HeldOutData) -> dict[str, float]:
        """Return the scores on some dates, by name; collective."""
        channels = dates.prepared.store.channels.num_outputs
        weighed = [METRICS[name] for name in self.weights]
        metrics = {
            metric.name: replace(metric, sources=validated_sources(metric))
            for metric in (*run_metrics(self.members), *weighed)
        }
        extent = Extent(
            dates.area_weights, dates.points, samples=dates.num_samples, members=self.members
        )
        sums = ScoreSums(metrics.values(), (1, channels), extent)
        corrections = AreaMean((len(self.corrections),), dates.area_weights)
        lead = dates.lead_steps[-1]
        with preserve_rng_state(dates.area_weights.device), self.state.eval_mode():
            for member, times, counts in rank_batches(dates, self.manager, self.batch_size):
                start = member.initial_states(times)
                for members in run_forecasts(self.rollout, member, times, start):
                    forecast = members[:, :, :channels]
                    if counts:
                        corrections.add((), members[:, :, channels:].flatten(0, 1))
                if self.map is None:  # of the first batch, which all ranks have
                    self.map = forecast_map(member, self.manager, times[:1], forecast[:1, 0])
                if counts:
                    truth = {TRUTH: member.fields(times + lead * dates.step)}
                    sums.add(
                        0, HeldOutFields(member, times, lead, forecast, truth, normalised=True)
                    )
        found = sums.result(self.manager)
        if "spread" in found:
            ratio = math.sqrt(1 + 1 / self.members) * found.pop("spread") / found["rmse"]
            found["spread_skill"] = ratio
        scores = {name: float(values[0].mean()) for name, values in found.items()}
        means = corrections.result(self.manager).tolist() if self.corrections else []
        scores |= dict(zip(self.corrections, means, strict=True))
        if weighed:
            # A forecast that is not finite is no candidate, whatever its undefined scores are.
            error = 0.0 if math.isfinite(scores["rmse"]) else math.nan
            for metric in weighed:
                cost = mean_cost(metrics[metric.name], found[metric.name])
                scores[metric.name] = -cost if metric.better is Better.LARGER else cost
                error += self.weights[metric.name] * cost
            scores["error"] = error
        return scores


def validated_sources(metric: Metric) -> tuple[str, ...]:
    """Return the sources that the cost of a metric needs (`Better.cost`), the forecast first."""
    return (FORECAST, TRUTH) if metric.better is Better.CLOSER_TO_TRUTH else (FORECAST,)


def mean_cost(metric: Metric, values: Tensor) -> float:
    """Return the mean over channels of the cost of a metric (`Better.cost`).

    Channels for which a metric is undefined are left out.

    Shapes:
        `(sources, 1, C)`.
    """
    columns = (dict(zip(metric.sources, column, strict=True)) for column in values[:, 0].T.tolist())
    costs = [cost for scores in columns if (cost := metric.better.cost(scores)) is not None]
    if metric.may_be_undefined:
        costs = [cost for cost in costs if not math.isnan(cost)]
    return statistics.fmean(costs) if costs else math.nan


def check_validation_scores(config: TrainerConfig) -> None:
    """Refuse `trainer.validation_scores` that a validation can't have.

    Raises:
        UserError: a name is unknown, or its score needs members and there are none.
    """
    key = "trainer.validation_scores"
    names = [
        name
        for name, metric in METRICS.items()
        if metric.accumulator is not None and metric.better is not Better.UNDECIDED
    ]
    for name in config.validation_scores:
        checks.one_of(key, name, names)
        if METRICS[name].ensemble and config.scored_members == 1:
            raise UserError(
                f"{key}: {name} needs several members, but forecasts have one. Set "
                f"trainer.evaluate_members, or leave {name} out."
            )


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the state of torch's random number generators at the end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def repeat_first_batch(loader: Loader) -> Iterator[Batch]:
    """Yield the loader's first batch again and again; the loader itself stays at its start.

    A resumed run gets the same batch. Its rollout is as long as that of the first step.
    """
    start = {**loader.state_dict(), "position": 0}
    loader.load_state_dict(start)
    batch = next(loader)
    loader.load_state_dict(start)
    yield from repeat(batch)


# The first step does one-time work; the second is the profiler's own warm-up.
WAIT_STEPS, WARMUP_STEPS, ACTIVE_STEPS = 1, 1, 3


@final
class StepProfiler:
    """Records the third to fifth step that a process takes, and writes them as a Chrome trace.

    A context manager around the steps; `step` is called at the end of each.
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

    def __enter__(self) -> Self:
        self._profile.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._profile.stop()

    def step(self) -> None:
        """Tell the profiler that a step has ended."""
        self._steps_done += 1
        self._profile.step()

    def _write(self, profile: profiler.profile) -> None:
        """Write the trace atomically, so that nobody reads half of it."""
        if self._steps_done <= WAIT_STEPS + WARMUP_STEPS:
            return
        with translate_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.path) as temporary:
                profile.export_chrome_trace(str(temporary))
        self.written = True


@final
class TrainingMonitor:
    """Looks at each step of a run: validation, estimated time, and a trace of a few steps.

    All ranks have one and call it at the same steps, as a validation is collective.

    Args:
        trace: path of this rank's trace, if it writes one.

    Attributes:
        scores: of the validation after the last step, by name; empty if there was none.
        validation_error: of them, or None: that of `trainer.validation_scores`; without these the
            RMSE, of ensembles the CRPS.
        map: of the validation after the last step, or None.
        note: text for the progress bar: the loss of the last global batch that was logged, and the
            error of the last validation.
        work: see `Screen.bar`.
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
        self.profiler = None if trace is None else StepProfiler(trace)
        self.scores: Mapping[str, float] = {}
        self.validation_error: float | None = None
        self.map: FieldMap | None = None
        self.note = ""
        self._loss = self._validated = ""
        step, total = training.trainer.state.step, config.trainer.steps
        per_epoch = steps_per_epoch(config.data, training)
        # A step takes as long as its rollout is.
        self.work = partial(config.trainer.forecast_steps, steps_per_epoch=per_epoch)
        self._eta = EtaMessage(step, total, per_epoch, self.work)

    def profiling(self) -> AbstractContextManager[object]:
        """Return the context of the loop, in which this rank's trace is recorded, if it has one."""
        return nullcontext() if self.profiler is None else self.profiler

    def batches(self) -> Iterator[Batch]:
        """Return the batches to train on."""
        loader = self.training.loader
        return repeat_first_batch(loader) if self.config.trainer.one_batch else iter(loader)

    def on_step_end(self, record: StepRecord, validate: bool = True) -> Mapping[str, float]:
        """Return the metrics to log of a step, with those of a validation if one is due.

        Collective when a validation is due.
        """
        line = self._eta(record.step)
        if line is not None:
            self.screen.show(line)
        self.scores, self.validation_error, self.map = {}, None, None
        if record.loss is None:
            return {}
        metrics = record.metrics()
        # It stays on the screen until the next step that is logged.
        step = f" (step {record.step})" if self.config.trainer.log_every > 1 else ""
        self._loss = f"loss {record.loss:.4f}{step}"
        scores = self.scores = self._validate(record.step) if validate else {}
        names = ("validation_error", "validation_crps", "validation_rmse")
        name = next((name for name in names if name in scores), "")
        self.validation_error = scores.get(name)
        if self.validation_error is not None:
            self.training.trainer.state.validations.add(self.validation_error)
            metrics |= scores
            score = name.removeprefix("validation_")
            score = score if score == "error" else score.upper()
            self._validated = f"validation {score} {self.validation_error:.4f}"
        self.note = "  ".join(part for part in (self._loss, self._validated) if part)
        return metrics

    def end_step(self) -> None:
        """Close the step in the trace, its logging and checkpoint included."""
        if self.profiler is not None:
            self.profiler.step()

    def show_missing_trace(self) -> None:
        """Say so if the run was too short for its trace."""
        if self.profiler is not None and not self.profiler.written:
            self.screen.show("no trace: trainer.profile needs at least 3 steps to record one")

    def _validate(self, step: int) -> Mapping[str, float]:
        if self.validation is None or not self.validation.is_due(step):
            return {}
        scores = self.validation()
        self.map = self.validation.map
        return scores


@final
@dataclass(frozen=True)
class CallbackRun:
    """What a callback may read of a run, on the rank that calls it.

    `folder` is that of the run's files; `manager` has this rank's position in the mesh and the
    process groups.
    """

    config: Config
    folder: Path
    manager: DomainParallelManager
    _state: TrainingState

    @property
    def rank(self) -> int:
        """Return this rank's number; rank 0 writes."""
        return self.manager.rank

    @property
    def step(self) -> int:
        """Return the number of optimizer steps that are done."""
        return self._state.step

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Return the model, or this rank's stages of a pipeline."""
        return self._state.parts

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, with fsdp2 as shards.

        After a step `.grad` is the gradient of the global batch, clipped.
        """
        return self._state.parameters


@final
class Callbacks:
    """The callbacks of a rank, called one after the other.

    Every call raises a `UserError`, with file and line, if a callback fails.
    """

    def __init__(self, callbacks: Sequence[OwnCallbackConfig], run: CallbackRun) -> None:
        self._callbacks = callbacks
        self._run = run
        self._device = next((p.device for p in run.parameters.values()), torch.device("cpu"))

    def on_start(self) -> None:
        """Training starts or goes on."""
        self._call("on_start")

    def on_step(self, metrics: Mapping[str, float], scores: Mapping[str, float]) -> None:
        """A step is done; `scores` are those of the validation after it, if there was one."""
        self._call("on_step", metrics)
        if scores:
            self._call("on_validation", scores)

    def on_end(self, scores: Mapping[str, float]) -> None:
        """The run is complete and its final scores are written."""
        self._call("on_end", scores)

    def _call(self, method: str, *arguments: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            where = f"trainer.callbacks.{callback.name}: {type(callback).__name__}.{method}"
            # Training goes on as if there were no callback.
            with report_plugin_errors(where), preserve_rng_state(self._device), torch.no_grad():
                getattr(callback, method)(self._run, *map(dict, arguments))
