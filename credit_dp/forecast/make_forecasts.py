"""Make forecasts with a trained model, from its checkpoint to files; every rank executes this.

The order, in `make_forecasts`: open checkpoint and store and check that they fit; lock the output;
build the model; create the output or clean up what was begun; forecast the missing jobs, each data
rank its own and each domain rank its rows, while a thread writes the lead time before; assemble and
publish the output on rank 0. `InitialStates`, below, reads what forecasts start from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import Config, DatesConfig, microbatches_per_step
from credit_dp.config.data import CONSERVATIVE, REGRIDDING
from credit_dp.config.model import CORRECTIONS
from credit_dp.data.cache import ProgressCallback, fingerprint
from credit_dp.data.calendar import Times
from credit_dp.data.climatology import Climatology
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.grid import FieldArray, unit_vectors
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.regrid import PointInterpolation
from credit_dp.data.sampling import frame_offsets
from credit_dp.data.setup import TrainingData, with_quickstart_store
from credit_dp.data.sources.address import absolute_address
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.source import describe_members
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store
from credit_dp.data.units import KNOWN_VARIABLES, check_units
from credit_dp.data.valid_points import ValidPoints
from credit_dp.distributed.collectives import (
    all_gather_object,
    run_on_all_ranks,
    run_on_rank_0,
)
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.mesh import build_manager, rank_device
from credit_dp.distributed.worker import pop_early_records
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import fetch_rows
from credit_dp.errors import UserError
from credit_dp.forecast.boundary import (
    TRUTH,
    describe_boundary,
    open_driver,
    settings_of_boundary,
)
from credit_dp.forecast.format import ForecastFormat, settings_of
from credit_dp.forecast.initial_file import InitialFiles, StateReader, open_initial_files
from credit_dp.forecast.request import ForecastConfig, ForecastJob, ForecastRequest, rank_jobs
from credit_dp.forecast.writer import ForecastWriter, locked
from credit_dp.physics.diagnostics import WrittenFields, written_fields
from credit_dp.pipeline_parallel.module_placement import model_output_device
from credit_dp.random_streams import random_stream, time_key
from credit_dp.training.checkpoint import check_model_size, model_shapes
from credit_dp.training.checkpoint_files import METADATA_FILE, Metadata
from credit_dp.training.checkpoint_shards import Checkpoint
from credit_dp.training.console import Screen, notes_of, screen_for
from credit_dp.training.data_description import check_fields
from credit_dp.training.forecast_step import EnsembleForecast, build_forecast_step
from credit_dp.training.model_parts import build_model_parts
from credit_dp.training.transfer import load_valid_mask, load_weights

KEY = "checkpoint"  # prefix of error messages
CORRELATION_LENGTH = 0.16  # in earth radii: about 1000 km
WAVE_COUNT = 256  # waves per perturbation
STATE = "a state"

Matrix = NDArray[np.float64]


def run(config: Config, ranks: RankInfo) -> int:
    """Make the forecasts of a `ForecastConfig`, and return the exit code; collective.

    Only rank 0 prints to the screen.

    Raises:
        UserError: checkpoint, store or output are not usable; fields that were written are kept,
            and the next run resumes.
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
    """Make the forecasts that are missing; collective over all ranks of the mesh."""
    # Open what is read, and check that it fits and that the output can be written.
    checkpoint = run_on_rank_0(lambda: Checkpoint.open(KEY, Path(config.request.checkpoint)))
    with screen.report() as report:
        prepared = open_data(config, checkpoint, report)
    files = run_on_all_ranks(lambda: open_initial_files(config.request))
    reader = run_on_all_ranks(lambda: state_reader(files, prepared.store, config))
    run_on_all_ranks(lambda: check_times(prepared.store, config.request, config.model.frames))
    writer = run_on_all_ranks(lambda: open_writer(config, prepared.store, files, screen))
    run_on_all_ranks(writer.check)
    # Messages that were logged before the screen could show them.
    for note in notes_of(pop_early_records()):
        screen.show(f"{'note':<13}{note}")

    def on_first(action: Callable[[], object]) -> None:
        run_on_all_ranks(lambda: action() if manager.rank == 0 else None)

    with ExitStack() as locks:
        on_first(lambda: locks.enter_context(locked(writer.out)))
        # The model before the folder: a model that can't be built leaves no output behind.
        ensemble, states, fields = build_model(
            config, prepared, checkpoint, reader, manager, device
        )
        on_first(lambda: writer.begin(manager.partition(writer.form.height)))
        wait_for_all(manager)
        # All ranks need the same jobs: rank 0's list counts.
        jobs = all_gather_object(writer.unfinished_jobs())[0]
        # No rank starts to write while another one is still listing.
        wait_for_all(manager)

        runner = ForecastRunner(ensemble, states, fields, writer, manager)
        count = len(jobs[manager.dp_rank :: manager.dp_world_size]) * len(writer.form.hours)
        total = len(writer.store.jobs)
        if len(jobs) < total:
            screen.show(f"resuming: {total - len(jobs)} of {total} forecasts are finished")
        with screen.bar("forecasting", count) as bar:
            runner.run(jobs, bar)

        # Copies, and `finish`, need the fields of all ranks.
        wait_for_all(manager)
        copies, most = run_on_all_ranks(
            lambda: [writer.copies(rank, manager.world_size) for rank in (manager.rank, 0)]
        )
        # Copied piece by piece, with a collective after each: a single long wait would run into
        # the process group's timeout on the other ranks.
        for number in range(len(most)):  # rank 0 has as many as any
            has_one = number < len(copies)
            run_on_all_ranks(partial(writer.copy, *copies[number]) if has_one else lambda: None)
        wait_for_all(manager)
        on_first(writer.finish)
    screen.show(f"{'forecast':<13}{writer.out}")


def wait_for_all(manager: DomainParallelManager) -> None:
    """Wait for all ranks of the mesh."""
    if manager.mesh is not None:
        all_gather_object(None)
    else:  # one rank, or threads of this process that share one globe
        manager.transport.all_reduce(torch.zeros(1))


def open_data(
    config: ForecastConfig, checkpoint: Checkpoint, report: ProgressCallback
) -> TrainingData:
    """Open the store of initial states and forcings with the checkpoint's statistics; collective.

    Raises:
        UserError: the store can't be opened, or is not of the fields that the model knows.
    """
    path, metadata = Path(config.request.checkpoint), checkpoint.metadata
    store = run_on_all_ranks(lambda: open_store(config, report))
    check_fields(path, metadata["data"], store, config.model)
    inputs = store.channels.fields(config.model.frames, config.model.denoises)
    saved = model_shapes(checkpoint.shapes)
    check_model_size(f"{KEY}: {path}", config.model, inputs, store.grid, saved)
    valid = load_valid_mask(checkpoint)
    if valid is not None:
        # The model knows no others: fill values at other points would be forecast as weather.
        masks = dict(zip(store.channels.output_channels, valid.numpy(), strict=True))
        store = store.with_masks({c: masks[c] for c in store.filled_channels if c in masks})
    # Forecasts need no climatology.
    return TrainingData(store, statistics_of(metadata), Climatology([], []))


def open_writer(
    config: ForecastConfig, store: Store, files: InitialFiles | None, screen: Screen
) -> ForecastWriter:
    """Return the writer of the fields that are requested; nothing is written yet.

    Raises:
        UserError: a diagnostic can't be computed, or the rim of a region is not given.
    """
    request = config.request
    boundary = settings_of_boundary(request, store)
    form, settings = form_and_settings(config, store)
    members = store.source.members
    if len(members) > 1 and files is None:
        line = f"starts from member {members[0]} of {describe_members(members)}; "
        screen.show(f"{'note':<13}{line}data.member={members[1]} chooses another")
    if files is not None:
        settings["init_file"] = files.stamps
        if regridding(config) != CONSERVATIVE:
            settings["regrid"] = regridding(config)
    if boundary:
        settings |= boundary
        screen.show(f"{'boundary':<13}{describe_boundary(request, boundary)}")
    return ForecastWriter(request.target, request.format, form, settings)


def form_and_settings(
    config: ForecastConfig, store: Store
) -> tuple[ForecastFormat, dict[str, Any]]:
    """Return the layout of the fields that are requested, and what their values depend on.

    Raises:
        UserError: a diagnostic can't be computed.
    """
    request = config.request
    fields = written_fields(store, None, request.diagnostic_names(), request.levels_in_hpa())
    units = {c.variable: store.shown_unit(c.variable) for c in store.channels.output_channels}
    units |= {name: KNOWN_VARIABLES[name].unit for name in fields.diagnostics}
    form = ForecastFormat.of(store, fields.channels, units, request)
    # Differs between checkpoints of the same name, too.
    identity = fingerprint((Path(request.checkpoint) / METADATA_FILE).read_text())
    stores = [absolute_address(x) for x in store.config.stores or [store.source.where]]
    settings = settings_of(config, form, identity, stores)
    if store.source.members:
        settings["member"] = store.source.members[0]
    return form, settings


def build_model(
    config: ForecastConfig,
    prepared: TrainingData,
    checkpoint: Checkpoint,
    reader: StateReader | None,
    manager: DomainParallelManager,
    device: torch.device,
) -> tuple[EnsembleForecast, InitialStates, WrittenFields]:
    """Build the trained model on this rank's rows or stages, its input and output; collective.

    Args:
        reader: reads initial states; None: they are in the store.

    Raises:
        UserError: the weights are those of another model, or the mesh does not fit.
    """
    store, request = prepared.store, config.request
    # Each model gets one sample at a time.
    batch_size = manager.dp_world_size * microbatches_per_step(config)
    config = replace(config, data=replace(config.data, batch_size=batch_size))
    # A layout may put the model's output on another device than `cuda:0`, which is `device`.
    first_gpu = device.index or 0
    device = model_output_device(config.parallel.layout, device, first_gpu)
    like = torch.zeros((), device=device, dtype=getattr(torch, config.trainer.dtype))
    parts = build_model_parts(config, prepared, manager, like, first_gpu)
    load_weights(checkpoint, parts.parts)
    for part in parts.parts:
        part.eval()  # no dropout or stochastic depth
    rows = manager.rows(store.grid[0])
    states = InitialStates(prepared, request, config.model.frames, rows, like, reader)
    points = ValidPoints.of(store.valid_mask(rows), like)
    step = run_on_all_ranks(
        lambda: build_forecast_step(
            config.model,
            prepared,
            manager,
            parts.forecast_model,
            states.normaliser,
            points,
            store.given_share(rows),
        )
    )
    names, levels = request.diagnostic_names(), request.levels_in_hpa()
    # Those of the step come in the order of the fixers.
    corrections = config.model.corrections if {*names} & {*CORRECTIONS.values()} else []
    fields = run_on_all_ranks(lambda: written_fields(store, rows, names, levels, corrections))
    if corrections:
        step = step.with_corrections()
    ensemble = EnsembleForecast(step, parts.draw_noise, seed=request.perturb_seed)
    return ensemble, states, fields.to(like.device)


@final
class ForecastRunner:
    """Makes this data rank's forecasts on this domain rank's rows and writes them.

    Memory holds the state of one forecast and one lead time that is being written. The output has
    been created before.
    """

    def __init__(
        self,
        ensemble: EnsembleForecast,
        states: InitialStates,
        fields: WrittenFields,
        writer: ForecastWriter,
        manager: DomainParallelManager,
    ) -> None:
        self._ensemble = ensemble
        self._states = states
        self._fields = fields
        self._writer = writer
        self._manager = manager
        computed = manager.partition(states.store.grid[0])
        cells = writer.form.cells
        self._back = None if cells is None else PointInterpolation(writer.form.grid, *cells)
        written = writer.store.rows_to_write(manager.domain_world_size)
        # Moves rows from the rank that computes them to the rank that writes them, or their cells.
        bands = [slice(*band) for band in pairwise(written.bounds)]
        if self._back is not None:
            bands = [self._back.source_rows(band) for band in bands]
        ranges = tuple((RowRange(band.start, band.stop),) for band in bands)
        self._exchange = RowExchange(computed, ranges, manager.domain_rank)
        self._rows = written.rows(manager.domain_rank)
        step_hours = states.store.config.step_hours
        self._writing: Future[None] | None = None
        # Index of the lead time to write, by number of steps.
        self._leads = {hour // step_hours: lead for lead, hour in enumerate(writer.form.hours)}

    @torch.no_grad()
    def run(self, jobs: Sequence[ForecastJob], progress: Callable[[int], None]) -> None:
        """Make and write these forecasts; collective, with the same `jobs` on all ranks.

        Args:
            progress: called with the number of this rank's lead times that are done.

        Raises:
            UserError: the disk is full, or a state has missing values.
        """
        done = 0
        states = self._states
        with ThreadPoolExecutor(1, thread_name_prefix="forecast") as thread:
            for job, counts in rank_jobs(jobs, self._manager.dp_rank, self._manager.dp_world_size):
                rollout = replace(self._ensemble, members=(job.member,)).rollout(
                    states.times[[job.time]],
                    states.initial_state(job),
                    states.forcings(job),
                    states.static,
                    states.given(job),
                )
                # A job that does not count runs to its end, for the collectives in the model.
                for number, members in enumerate(rollout, start=1):
                    lead = self._leads.get(number)
                    if counts and lead is not None:
                        self._write_lead(thread, job, lead, members[:, 0])
                        progress(done := done + 1)
            self._wait_for_disk()

    def _write_lead(
        self, thread: ThreadPoolExecutor, job: ForecastJob, lead: int, fields: Tensor
    ) -> None:
        """Pass one lead time to the writer's thread.

        All ranks of a pipeline have the fields; the first one writes them.
        """
        if self._manager.pipeline_rank > 0:
            return
        # The lead time before was written while this one was computed. Waiting before the copy to
        # the CPU keeps a single lead time in memory.
        self._wait_for_disk()
        # On this thread: ranks exchange rows here, in an order that has to be the same on all of
        # them. The writer's thread only touches files.
        physical = self._fields(self._states.denormalise(fields))
        rows = fetch_rows(physical.contiguous(), self._exchange, self._manager.transport)[0]
        values = rows.to(device="cpu", dtype=torch.float32).numpy()
        if self._back is not None:
            values = np.asarray(self._back(values, self._rows), dtype=np.float32)
        parts = split_by_variable(self._writer.form, values)
        self._writing = thread.submit(self._writer.write, job, lead, self._rows, parts)

    def _wait_for_disk(self) -> None:
        """Wait until the last lead time is written, and raise its error."""
        if self._writing is not None:
            self._writing.result()


def split_by_variable(form: ForecastFormat, values: FieldArray) -> list[FieldArray]:
    """Split `(channels, ...)` into `(...)` or `(levels, ...)` of each variable."""
    return [
        values[variable.channels] if variable.on_levels else values[variable.channels.start]
        for variable in form.variables
    ]


def open_store(config: ForecastConfig, report: ProgressCallback) -> Store:
    """Open the store of initial states, which need not contain the training dates.

    Raises:
        UserError: the store can't be opened, or lacks a variable.
    """
    data = with_quickstart_store(config.data, report)
    if not config.request.init_file:
        # The dates of training need not be in this store.
        span = [
            config.request.calendar.text(time, "s")
            for time in config.request.initial_times()[[0, -1]]
        ]
        data = replace(data, dates=DatesConfig(span, span, span))
    store = Store(open_source(data), data)
    check_units(store.source, data)
    store.resolve_dates()
    return store


def state_reader(
    files: InitialFiles | None, store: Store, config: ForecastConfig
) -> StateReader | None:
    """Return what reads the initial states from the files of `init_file`; None without."""
    if files is None:
        return None
    offsets = frame_offsets(config.model.frames, store.config.step_hours)
    times = (config.request.initial_times()[:, None] + offsets).ravel()
    return files.reader(store, times, regridding(config))


def regridding(config: ForecastConfig) -> str:
    """Return how states of `init_file` on another grid are regridded."""
    methods = (config.request.regrid, config.data.regrid)
    return next((method for method in methods if method in REGRIDDING), CONSERVATIVE)


def statistics_of(metadata: Metadata) -> Statistics:
    """Return the statistics that the model was trained with, from the checkpoint's metadata."""
    arrays: dict[str, Any] = metadata["data"]["statistics"]
    return Statistics(**{name: np.array(values, float) for name, values in arrays.items()})


@final
class Perturbations:
    """Draws perturbations of initial states on this rank's rows.

    They are sums of random waves in space, whose covariance approaches a Gaussian of the distance.
    A wave can be evaluated on any row alone, so that ranks need no communication.

    Args:
        latitude, longitude: of rows and columns in degrees, or on a projection of all points.
        channels: number of channels of a state; each is perturbed independently.
    """

    def __init__(self, seed: int, latitude: Matrix, longitude: Matrix, channels: int) -> None:
        self._seed = seed
        self._latitude = latitude
        self._longitude = np.broadcast_to(longitude, (len(latitude), longitude.shape[-1]))
        self._channels = channels

    def draw(self, time: np.datetime64, job: ForecastJob) -> Matrix:
        """Return fields of mean 0 and variance 1: `(C, h, W)`, independent of the partition."""
        # Every rank draws the same waves and evaluates them on its own rows.
        random = random_stream(self._seed, time_key(time), job.member)
        waves = random.standard_normal((WAVE_COUNT, 3)) / CORRELATION_LENGTH
        amplitudes = random.standard_normal((self._channels, 2 * WAVE_COUNT)) / np.sqrt(WAVE_COUNT)
        rows = []
        for latitude, longitude in zip(self._latitude, self._longitude, strict=True):
            # Of points in space: waves are smooth across the poles.
            angles = waves @ unit_vectors(latitude, longitude)
            rows.append(amplitudes @ np.concatenate([np.cos(angles), np.sin(angles)]))
        return np.stack(rows, axis=1)


@final
class InitialStates:
    """Reads and perturbs initial states, and reads forcing, on this rank's rows.

    Args:
        frames: number of input states of the model.
        like: gives device and dtype of every tensor returned.
        files: reads the states instead of the store.
    """

    def __init__(
        self,
        prepared: TrainingData,
        request: ForecastRequest,
        frames: int,
        rows: slice,
        like: Tensor,
        files: StateReader | None = None,
    ) -> None:
        self.store = prepared.store
        self._read_states = (files or self.store).read_states
        self.rows = rows
        self.times: Times = request.initial_times()
        self.normaliser = Normaliser.of(prepared, like.dtype, like.device)
        step_hours = self.store.config.step_hours
        self._frames = frame_offsets(frames, step_hours)
        self._steps = request.steps(step_hours)
        self._request = request
        self._static = self.normaliser.normalise_static(self.store.read_static(rows))
        masks = self.store.valid_mask(rows)
        self._valid = None if masks is None else torch.from_numpy(masks).to(like.device)
        self._amplitude = request.perturb
        states = self.store.channels.num_states
        self._std = self.normaliser.std[:states]
        self._perturbations = Perturbations(
            request.perturb_seed, *self.store.grid.coordinates(rows), states
        )

    def initial_state(self, job: ForecastJob) -> Tensor:
        """Return the input states of a forecast, `(1, frames * C, h, W)`, the newest last."""
        times = self.times[job.time] + self._frames
        states = self.normaliser.normalise_outputs(self._read_states(times, self.rows))
        if self._amplitude:
            noise = torch.from_numpy(self._perturbations.draw(self.times[job.time], job)).to(states)
            # The same noise on all input states: the tendency between them does not change.
            states = states + self._amplitude * self._std * noise
            if self._valid is not None:
                # Points without values get their fill back, as in training.
                count = states.shape[1]
                fills = self.normaliser.fills[:count]
                states = torch.where(self._valid[:count], states, fills)
        return states.flatten(0, 1)[None]

    def forcings(self, job: ForecastJob) -> Iterator[Tensor]:
        """Yield the forcing of each step, `(1, F, h, W)`; each is read when it is needed."""
        # That of a step is the one at its beginning.
        for time in self.times[job.time] + self._steps - self._steps[0]:
            yield self.normaliser.normalise_forcing(self.store.read_forcing(time[None], self.rows))

    def given(self, job: ForecastJob) -> Iterator[Tensor] | None:
        """Yield the states after each step, whose rim is given, `(1, C, h, W)`; None without."""
        if not self.store.config.boundary:
            return None
        driver = open_driver(self._request, self.store, self.times[job.time])
        if driver is not None:
            states = driver.states(self.rows, self._read_states)
        else:
            times = self.times[job.time] + self._steps
            states = (self.store.read_states(time[None], self.rows) for time in times)
        return map(self.normaliser.normalise_outputs, states)

    def denormalise(self, fields: Tensor) -> Tensor:
        """Return fields in the store's units, `(B, C + D, h, W)`; NaN on points without values.

        Channels after them, corrections, have their units already.
        """
        count = self.store.channels.num_outputs
        physical = self.normaliser.denormalise(fields[:, :count], self._valid)
        if fields.shape[1] == count:
            return physical
        return torch.cat([physical, fields[:, count:]], dim=1)

    @property
    def static(self) -> Tensor:
        """Return normalised static fields, `(1, S, h, W)`."""
        return self._static[None]


def check_times(store: Store, request: ForecastRequest, frames: int) -> None:
    """Check that the store has all needed times, before a model is built or a file written.

    Raises:
        UserError: the store lacks an input state or the forcing of a step.
    """
    for what, times in needed_times(store, request, frames).items():
        missing = times[~np.isin(times, store.times)]
        if missing.size:
            keys = "init" if what == STATE else "init, lead"
            text = store.calendar.text
            raise UserError(
                f"init: needs {what} at {text(missing.flat[0])}, but {store.source.where} has "
                f"{text(store.times[0])} to {text(store.times[-1])} in steps of "
                f"{store.config.step} and lacks this time. Change {keys} or data.store."
            )


def needed_times(store: Store, request: ForecastRequest, frames: int) -> dict[str, Times]:
    """Return the times that forecasts need of the store, `(initial times, ...)`, by what of it."""
    hours = store.config.step_hours
    times, steps = request.initial_times()[:, None], request.steps(hours)
    needed: dict[str, Times] = {}
    if not request.init_file:
        needed[STATE] = times + frame_offsets(frames, hours)
    if request.boundary == TRUTH:
        needed["the rim"] = times + steps
    # The last step's forcing is that at its beginning, so that the last valid time is not needed.
    if any(name not in COMPUTED_FORCINGS for name in store.channels.forcing):
        needed["the forcing"] = times + steps - steps[0]
    return needed
