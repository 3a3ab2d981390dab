"""Forecasts with a trained model, from its checkpoint to the files: what every rank executes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import Config, DatesConfig, microbatches_per_step
from credit_dp.data.cache import ProgressCallback, fingerprint
from credit_dp.data.climatology import Climatology
from credit_dp.data.limits import ValueRange
from credit_dp.data.setup import TrainingData, with_quickstart_store
from credit_dp.data.sources.address import absolute_address
from credit_dp.data.sources.opening import open_source
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store
from credit_dp.data.units import check_units
from credit_dp.distributed import RankInfo
from credit_dp.distributed.collectives import all_gather_object, run_on_all_ranks
from credit_dp.distributed.mesh import build_manager, rank_device
from credit_dp.distributed.worker import pop_early_records
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.errors import UserError
from credit_dp.evaluation.metrics import ValidPoints, unit_of
from credit_dp.forecast.check import WRITERS
from credit_dp.forecast.format import ForecastFormat, settings_of
from credit_dp.forecast.initial_states import InitialStates, check_times
from credit_dp.forecast.request import ForecastConfig, ForecastJob, rank_jobs
from credit_dp.forecast.writer import Fields, ForecastWriter, disk_errors
from credit_dp.pipeline_parallel.placement import model_output_device
from credit_dp.training.build import DTYPES, build_model_parts
from credit_dp.training.checkpoint_files import METADATA_FILE, Metadata, read_metadata
from credit_dp.training.console import Screen, notes_of, screen_for
from credit_dp.training.data_description import check_fields
from credit_dp.training.forecast_step import ForecastStep
from credit_dp.training.shards import translate_read_errors
from credit_dp.training.transfer import load_valid_mask, load_weights


@final
class SingleTaskExecutor:
    """One thread, and one task at a time: never is more than one lead time in its hands.

    An error of a task is raised where the next one is given, or at the end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._last: Future[None] | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Wait until the last task is done, then start this one."""
        self.wait()
        self._last = self._thread.submit(task)

    def wait(self) -> None:
        """Wait until all is done."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._thread.shutdown()


@final
class ForecastRunner:
    """Makes forecasts of this rank's share of initial times and members, on its rows.

    In memory are the state of one forecast, and one lead time of it on its way to the disk.

    Args:
        step: of the model, on this rank's rows.
        states: what forecasts start from and are driven by.
        writer: begun already, on all ranks.
    """

    def __init__(
        self,
        step: ForecastStep,
        states: InitialStates,
        writer: ForecastWriter,
        manager: DomainParallelManager,
    ) -> None:
        self._step = step
        self._states = states
        self._writer = writer
        self._manager = manager
        own = manager.partition(writer.form.height)
        written = writer.bands_to_write(own)
        runs = tuple((RowRange(*band),) for band in pairwise(written.bounds))
        self._exchange = RowExchange(own, runs, manager.domain_rank)
        self._rows = written.rows(manager.domain_rank)
        step_hours = states.store.config.step_hours
        self._leads = {hour // step_hours: place for place, hour in enumerate(writer.form.hours)}

    @torch.no_grad()
    def run(self, jobs: Sequence[ForecastJob], progress: Callable[[int], None]) -> None:
        """Make these forecasts, which are the same on all ranks; collective.

        `progress` is told how many of this rank's lead times are done.

        Raises:
            UserError: the disk is full, or a state has gaps.
        """
        done, ranks = 0, self._manager.dp_world_size
        with SingleTaskExecutor() as streaming:
            for job, counts in rank_jobs(jobs, self._manager.dp_rank, ranks):
                states = self._states
                rollout = self._step.rollout(states.start(job), states.forcings(job), states.static)
                for number, fields in enumerate(rollout, start=1):
                    lead = self._leads.get(number)
                    if counts and lead is not None:
                        self._write_lead(streaming, job, lead, fields)
                        progress(done := done + 1)
                if counts:
                    streaming.submit(partial(self._write_to_disk, self._writer.close, job))

    def _write_lead(
        self, streaming: SingleTaskExecutor, job: ForecastJob, lead: int, fields: Tensor
    ) -> None:
        """Hand one lead time to the disk; of a pipeline's ranks, which all have it, the first's."""
        if self._manager.pipeline_rank > 0:
            return
        streaming.wait()  # for the lead time before, while this one was computed
        physical = self._states.denormalise(fields)
        rows = self._exchange.apply(physical.contiguous(), self._manager.transport)[0]
        values = rows.to(device="cpu", dtype=torch.float32).numpy()
        parts = split_by_variable(self._writer.form, values)
        write = self._writer.write
        streaming.submit(partial(self._write_to_disk, write, job, lead, self._rows, parts))

    def _write_to_disk(self, act: Callable[..., None], *args: object) -> None:
        """Do what may find the disk full, and say so then."""
        with disk_errors(self._writer.out):
            act(*args)


def split_by_variable(form: ForecastFormat, values: Fields) -> list[Fields]:
    """`(channels, rows, W)` -> of each variable `(rows, W)` or `(levels, rows, W)`."""
    return [
        values[variable.channels] if variable.on_levels else values[variable.channels.start]
        for variable in form.variables
    ]


KEY = "checkpoint"


def run(config: Config, ranks: RankInfo) -> int:
    """Make the forecasts of a `ForecastConfig`, and say where they are; the exit code.

    Every rank calls this; only rank 0 shows anything.

    Raises:
        UserError: something is not as needed; what was written so far is gone on with next time.
    """
    if not isinstance(config, ForecastConfig):
        raise TypeError(f"needs a ForecastConfig, got {type(config).__name__}")
    manager = build_manager(config.parallel, ranks)
    screen = screen_for(ranks.rank)
    make_forecasts(config, manager, rank_device(config, ranks), screen)
    return 0


def make_forecasts(
    config: ForecastConfig, manager: DomainParallelManager, device: torch.device, screen: Screen
) -> None:
    """Make the forecasts that are not there yet; collective over all ranks of the mesh.

    Raises:
        UserError: see `run`.
    """
    forecasting = Forecasting.prepare(config, manager, device, screen)
    for note in notes_of(pop_early_records()):
        screen.show(f"{'note':<13}{note}")
    writer, first = forecasting.writer, manager.rank == 0
    with ExitStack() as held:
        run_on_all_ranks(lambda: held.enter_context(writer.lock()) if first else None)
        # The model before the folder: a forecast that is refused leaves none.
        step, states = forecasting.model()
        bands = manager.partition(writer.form.height)
        run_on_all_ranks(lambda: writer.begin(bands) if first else None)
        forecasting.barrier()
        jobs = all_gather_object(writer.unfinished_jobs())[0]
        forecasting.barrier()
        rolling = ForecastRunner(step, states, writer, manager)
        own = len(jobs[manager.dp_rank :: manager.dp_world_size]) * len(writer.form.hours)
        there = len(writer.jobs) - len(jobs)
        if there:
            screen.show(f"going on: {there} of {len(writer.jobs)} forecasts are there")
        with screen.bar("forecasting", own) as bar:
            rolling.run(jobs, bar)
        forecasting.barrier()
        for piece in range(writer.piece_count):
            run_on_all_ranks(partial(writer.assemble_piece, piece) if first else lambda: None)
        run_on_all_ranks(lambda: writer.finish() if first else None)
        forecasting.barrier()
    screen.show(f"{'forecast':<13}{writer.out}")


@final
@dataclass(frozen=True)
class Forecasting:
    """What is known before the model is built."""

    config: ForecastConfig
    manager: DomainParallelManager
    prepared: TrainingData
    path: Path
    numbers: Metadata
    writer: ForecastWriter
    like: torch.Tensor
    first_gpu: int

    @classmethod
    def prepare(
        cls,
        config: ForecastConfig,
        manager: DomainParallelManager,
        device: torch.device,
        screen: Screen,
    ) -> "Forecasting":
        """Open the checkpoint and the store, and see whether they fit, and the output can be made.

        Raises:
            UserError: see `run`; nothing has been written.
        """
        request, path = config.request, Path(config.request.checkpoint)
        numbers = run_on_all_ranks(lambda: read_metadata(KEY, path))
        with screen.report() as report:
            store = run_on_all_ranks(lambda: open_store(config, numbers, report))
        with translate_read_errors(KEY, path):
            check_fields(path, numbers["data"], store, config.model)
            statistics = statistics_of(numbers)
        prepared = TrainingData(store, statistics, Climatology([], []))
        run_on_all_ranks(lambda: check_times(store, request, config.model.frames))
        units = {c.variable: unit_of(store, c.variable) for c in store.channels.output_channels}
        form = ForecastFormat.of(store, units, request)
        settings = settings_of(config, form, checkpoint_fingerprint(path), store_addresses(store))
        writer = WRITERS[request.format](request.target, form, settings)
        run_on_all_ranks(writer.check)
        first_gpu = device.index or 0  # before the layout says where the output goes
        device = model_output_device(config.parallel.layout, device, first_gpu)
        like = torch.zeros((), device=device, dtype=DTYPES[config.trainer.dtype])
        return cls(config, manager, prepared, path, numbers, writer, like, first_gpu)

    def model(self) -> tuple[ForecastStep, InitialStates]:
        """The trained model on this rank's rows or stages, and what it starts from; collective.

        Raises:
            UserError: the weights are those of another model, or the mesh does not fit.
        """
        config, manager, store = self.config, self.manager, self.prepared.store
        config = replace(
            config, data=replace(config.data, batch_size=forecast_batch_size(config, manager))
        )
        parts = build_model_parts(config, self.prepared, manager, self.like, self.first_gpu)
        load_weights(KEY, self.path, self.numbers, parts.parts)
        for part in parts.parts:
            part.eval()
        rows = manager.rows(store.grid[0])
        frames = config.model.frames
        states = InitialStates(self.prepared, config.request, frames, rows, self.like)
        tendency = states.normaliser.tendency_scale[: store.channels.states]
        valid = load_valid_mask(KEY, self.path, self.numbers)
        run_on_all_ranks(lambda: self._check_valid(store.valid_mask(rows), valid, rows))
        points = ValidPoints.of(store.valid_mask(rows), self.like)
        fills = states.normaliser.fills
        fill = None if points is None else lambda fields: points.fill_invalid(fields, fills)
        return ForecastStep(parts.forecast_model, tendency, config.model.residual, fill), states

    def _check_valid(
        self, own: NDArray[np.bool_] | None, trained: torch.Tensor | None, rows: slice
    ) -> None:
        """Refuse a first state with gaps elsewhere than in training: they would be forecast."""
        if own is None or trained is None:  # as the config says, which is the checkpoint's
            return
        store = self.prepared.store
        differs = (own != trained[:, rows].numpy()).any(axis=(1, 2))
        if differs.any():
            first = self.config.request.initial_times()[0].astype("M8[m]")
            raise UserError(
                f"{store.source.where}: "
                f"{store.channels.output_channels[differs.argmax()].name} has values at "
                f"other points at {first} than in training. Change init or data.store."
            )

    def barrier(self) -> None:
        """Wait for all ranks of the mesh."""
        self.manager.transport.sum(self.like.new_zeros(1))
        all_gather_object(None)


def open_store(config: ForecastConfig, numbers: Metadata, report: ProgressCallback) -> Store:
    """The store of initial states; which dates were trained on, does not matter.

    Values are held against the limits that they had in training, as far as the checkpoint's
    `numbers` have them.

    Raises:
        UserError: it is not as needed.
    """
    data = with_quickstart_store(config.data, report)
    # Points without values are those of the first date of a split.
    span = [str(t.astype("M8[s]")) for t in config.request.initial_times()[[0, -1]]]
    data = replace(data, dates=DatesConfig(span, span, span))
    ranges = {
        name: ValueRange(*limits) for name, limits in numbers["data"].get("ranges", {}).items()
    }
    store = Store(open_source(data), data, ranges)
    check_units(store.source, data)
    return store


def statistics_of(numbers: Metadata) -> Statistics:
    """Those that the model was trained with, whatever the store."""
    said: dict[str, Any] = numbers["data"]["statistics"]
    return Statistics(**{name: np.array(values, float) for name, values in said.items()})


def checkpoint_fingerprint(path: Path) -> str:
    """Differs between any two checkpoints, also of the same name."""
    return fingerprint((path / METADATA_FILE).read_text())


def forecast_batch_size(config: Config, manager: DomainParallelManager) -> int:
    """The global batch of which each model has one sample at a time."""
    return manager.dp_world_size * microbatches_per_step(config)


def store_addresses(store: Store) -> list[str]:
    """Where the initial states are, as a forecast says it."""
    return [absolute_address(where) for where in store.config.stores or [store.source.where]]
