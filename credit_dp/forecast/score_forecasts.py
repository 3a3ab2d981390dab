"""Score the forecasts of a trained model while they are made, without writing them; on every rank.

Each data rank makes the forecasts of some initial times, as `make_forecasts` does. All rows of a
lead time go to one rank of the domain, each lead time to another one, which scores them as a stored
forecast is scored, in a thread of its own. What it adds up goes to a file of its own in
`OUT.partial` once in `SAVE_SECONDS`, from which another run resumes on any mesh; at the end rank 0
joins them. What each initial time contributes to the scores goes to a second file at once.

Memory holds one lead time of all members on the rank that scores it, the truth and climatology of
it, and the sums.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import FileIO
from itertools import tee
from pathlib import Path
from typing import Any, final
from zipfile import BadZipFile

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor
from xarray.backends import BackendArray
from xarray.core import indexing

from credit_dp.data.cache import clear_new
from credit_dp.data.calendar import Times
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.coordinates import with_points
from credit_dp.data.sources.datasets import all_dates
from credit_dp.data.store import Store
from credit_dp.distributed.collectives import all_gather_object, run_on_all_ranks, run_on_rank_0
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import fetch_rows
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.alignment import AlignedForecast, ScoreRequest, align
from credit_dp.evaluation.forecast_blocks import LeadReader
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.score import Scorer
from credit_dp.evaluation.score_folder import ScoreFolder
from credit_dp.evaluation.scorecard import Scorecard
from credit_dp.files import (
    atomic_path,
    fsync_path,
    partial_path,
    remove_if_possible,
    rename_durably,
    write_text_atomic,
)
from credit_dp.forecast.boundary import settings_of_boundary
from credit_dp.forecast.format import (
    ForecastFormat,
    describe_difference,
    given_width,
    global_attributes,
    read_settings_attribute,
)
from credit_dp.forecast.make_forecasts import (
    KEY,
    InitialStates,
    build_model,
    check_times,
    form_and_settings,
    needed_times,
    open_data,
    split_by_variable,
    wait_for_all,
)
from credit_dp.forecast.request import ForecastConfig, ForecastJob, rank_jobs
from credit_dp.forecast.writer import disk_errors, locked
from credit_dp.physics.diagnostics import WrittenFields
from credit_dp.training.checkpoint_shards import Checkpoint
from credit_dp.training.console import Screen
from credit_dp.training.forecast_step import EnsembleForecast

SAVE_SECONDS = 60
SETTINGS_NAME = "settings.json"
DONE = "done"
DATES = ".dates"  # suffix of the file with what each initial time contributes to the scores
SHAPE = "shape"  # of that file


@final
@dataclass
class ScoredForecastConfig(ForecastConfig):
    """The config of forecasts that are scored; `request.out` is the folder of the scores."""

    score: ScoreRequest = field(kw_only=True)


def score_forecasts(
    config: ScoredForecastConfig,
    manager: DomainParallelManager,
    device: torch.device,
    screen: Screen,
) -> Scorecard | None:
    """Score forecasts from all initial times, and return the scores on rank 0; collective.

    Raises:
        UserError: checkpoint, data or output are not usable; what was added up is kept, and the
            next run resumes.
    """
    checkpoint = run_on_rank_0(lambda: Checkpoint.open(KEY, Path(config.request.checkpoint)))
    with screen.report() as report:
        prepared = open_data(config, checkpoint, report)
    times = run_on_all_ranks(lambda: complete_times(config, prepared.store))
    left_out = len(config.request.initial_times()) - len(times)
    if left_out:
        lacks = f"{counted(left_out, 'initial time')}, for which the data lack a state"
        screen.show(f"{'note':<13}leaves out {lacks}")
    init = f"[{','.join(map(prepared.store.calendar.text, times))}]"
    config = replace(config, request=replace(config.request, init=init))
    form, settings = run_on_all_ranks(lambda: form_and_settings(config, prepared.store))
    settings |= run_on_all_ranks(lambda: settings_of_boundary(config.request, prepared.store))
    computed = ComputedForecast(form, settings, config.score.forecast)
    attributes = computed.store.attributes
    request = config.score.with_origin(
        read_settings_attribute(attributes), given_width(attributes), computed.store.where
    )
    is_first = manager.rank == 0
    with screen.report() as report:
        # A climatology is fitted by rank 0; the others read what it has stored.
        first = run_on_all_ranks(
            lambda: align(request, computed.store, report) if is_first else None
        )
        aligned = run_on_all_ranks(lambda: first or align(request, computed.store, report))
        saved = SavedScores(config.request.target, settings | {"scores": asdict(request)})
        open_file = partial(FileIO, saved.path.with_suffix(DATES), "w+")
        scorer = run_on_all_ranks(lambda: Scorer(aligned, request, report, open_file))
    with ExitStack() as locks:
        run_on_all_ranks(
            lambda: locks.enter_context(locked(config.request.target)) if is_first else None
        )
        ensemble, states, fields = build_model(config, prepared, checkpoint, None, manager, device)
        run_on_all_ranks(lambda: saved.begin() if is_first else None)
        wait_for_all(manager)
        # All ranks need the same times: what rank 0 finds counts.
        done = all_gather_object(run_on_all_ranks(lambda: saved.done(scorer.dates.shape)))[0]
        wait_for_all(manager)  # no rank saves while another one is still reading
        runner = ForecastScorer(
            ensemble, states, fields, computed, aligned, scorer, manager, saved, done
        )
        left = np.flatnonzero(~done.all(axis=1)).tolist()
        if len(left) < len(done):
            screen.show(f"resuming: {len(done) - len(left)} of {len(done)} forecasts are scored")
        with screen.bar("forecasting", runner.count(left)) as bar:
            runner.run(left, bar)
        wait_for_all(manager)

        def finish() -> Scorecard:
            total = Scorer(aligned, request, lambda title, part: None)
            saved.add_to(total)
            card = total.result(request)
            saved.write(card)
            return card

        return run_on_all_ranks(lambda: finish() if is_first else None)


def complete_times(config: ScoredForecastConfig, store: Store) -> Times:
    """Return the initial times at which the data have all that forecasts and scores need.

    Raises:
        UserError: there is none.
    """
    request, frames = config.request, config.model.frames
    times = request.initial_times()
    needed = [*needed_times(store, request, frames).values()]
    if not config.score.truth:  # the same data are the truth
        needed.append(times[:, None] + np.array(config.score.hours, "m8[h]"))
    complete = np.all([np.isin(each, store.times).all(axis=1) for each in needed], axis=0)
    if not complete.any():
        with words_of_scores():
            check_times(store, request, frames)
        raise UserError(
            f"dates: needs initial times whose forecasts can be scored, but {store.source.where} "
            f"ends at {store.calendar.text(store.times[-1])}. Change dates, hours or truth."
        )
    return times[complete]


@contextmanager
def words_of_scores() -> Iterator[None]:
    """Name the keys of scores in errors about initial and lead times of forecasts."""
    try:
        yield
    except UserError as error:
        text = re.sub(r"(?<=Change )init, lead\b", "dates, hours", str(error))
        text = re.sub(r"^init(?=:)|(?<=Change )init\b", "dates", text)
        text = re.sub(r"^lead(?=:)|(?<=Change )lead\b", "hours", text)
        raise UserError(text) from error


@final
class ComputedFields(BackendArray):
    """A variable of a forecast store of which one initial and lead time is there.

    Attributes:
        fields: of that time, with dims of length 1 for both; what is read at any time.
    """

    def __init__(self, shape: tuple[int, ...], leading: int) -> None:
        self.shape = shape
        self.dtype = np.dtype(np.float32)
        self.fields: FieldArray | None = None
        self._times = (leading - 2, leading - 1)  # dims of the initial and of the lead time

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        """Return a part, as xarray indexes lazy arrays."""
        support = indexing.IndexingSupport.OUTER_1VECTOR
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._select)

    def _select(self, key: tuple[Any, ...]) -> FieldArray:
        if self.fields is None:
            raise RuntimeError("read before it is computed")
        selected = [slice(None) if dim in self._times else k for dim, k in enumerate(key)]
        return self.fields[tuple(selected)]


@final
class ComputedForecast:
    """Forecasts as a store, of which one lead time of one initial time can be read at a time."""

    def __init__(self, form: ForecastFormat, settings: Mapping[str, Any], where: str) -> None:
        self.form = form
        leading = len(form.leading_dims)
        self._fields = [ComputedFields(form.shape(v), leading) for v in form.variables]
        variables = {
            variable.name: xr.Variable(
                variable.dims, indexing.LazilyIndexedArray(fields), variable.attributes
            )
            for variable, fields in zip(form.variables, self._fields, strict=True)
        }
        fixed = {x.name: xr.Variable(x.dims, x.values, x.attributes) for x in form.fixed_arrays}
        encoded = xr.Dataset({**variables, **fixed}, attrs=global_attributes(settings))
        with all_dates():
            dataset = xr.decode_cf(encoded, decode_timedelta=False)
        self.store = ForecastStore(with_points(dataset, where), where)

    def put(self, values: FieldArray) -> None:
        """Replace the fields by those of another lead time, `(M, C, H, W)`."""
        members = slice(None) if self.form.members else 0
        axis = 1 if self.form.members else 0
        by_variable = zip(*(split_by_variable(self.form, x) for x in values), strict=True)
        for fields, parts in zip(self._fields, by_variable, strict=True):
            fields.fields = np.expand_dims(np.stack(parts)[members], (axis, axis + 1))


@final
class SavedScores:
    """What was added up, in the folder of scores that are not complete.

    Attributes:
        path: of the file for what this rank adds up.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self._out = out
        self._partial = partial_path(out)
        self.path = self._partial / f"{uuid.uuid4().hex}.npz"
        # As they come back from a file: tuples are lists, and keys are strings.
        self._settings = json.loads(json.dumps(settings))

    def begin(self) -> None:
        """Create the folder, or check that what was begun can be resumed.

        Raises:
            UserError: it was begun with other settings.
        """
        path = self._partial / SETTINGS_NAME
        if not self._partial.exists():
            with disk_errors(self._out):
                new = clear_new(self._out)
                write_text_atomic(new / SETTINGS_NAME, json.dumps(self._settings))
                rename_durably(new, self._partial)
            return
        try:
            begun = json.loads(path.read_text())
        except (OSError, ValueError):
            raise UserError(
                f"{self._partial}: has no scores that were begun. Move it, or change out."
            ) from None
        difference = describe_difference(begun, self._settings)
        if difference:
            raise UserError(
                f"{self._partial}: was begun with {difference}. Set the same to resume it, remove "
                "it to start over, or change out."
            )
        for dates in self._partial.glob(f"*{DATES}"):  # of ranks that were killed before they saved
            if not dates.with_suffix(".npz").exists():
                remove_if_possible(dates)

    def done(self, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
        """Return which initial and lead times were scored by earlier runs.

        Args:
            shape: number of initial times, of lead times, and of values of each.

        Raises:
            UserError: a file is damaged, or of another version.
        """
        done = np.zeros(shape[:2], bool)
        for path, state in self._states():
            if state.get(SHAPE, np.zeros(0)).tolist() != [*shape]:
                raise UserError(
                    f"{self._partial}: was begun by another version. Remove it to start over, or "
                    "change out."
                )
            with self._damage(path):
                path.with_suffix(DATES).stat()  # raises if it is not there
                done |= state[DONE]
        return done

    def save(self, done: NDArray[np.bool_], scorer: Scorer) -> None:
        """Write what was added up at the times that are done, in place of the file before.

        Raises:
            UserError: the disk is full, or gone.
        """
        scorer.dates.save()  # before the file that says which of them count
        arrays: dict[str, Any] = {DONE: done, SHAPE: scorer.dates.shape, **scorer.state()}
        with disk_errors(self._out), atomic_path(self.path) as temporary:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)
            fsync_path(temporary)

    def add_to(self, scorer: Scorer) -> None:
        """Add what all ranks and runs have saved."""
        for path, state in self._states():
            with self._damage(path):
                scorer.add_state(state, FileIO(path.with_suffix(DATES)), state[DONE])

    def write(self, card: Scorecard) -> None:
        """Write the scores, and remove what they were made of."""
        folder = ScoreFolder(self._out)
        with folder.cleanup_on_failure():
            folder.write(card)
        shutil.rmtree(self._partial, ignore_errors=True)  # its lock file is open

    def _states(self) -> Iterator[tuple[Path, Mapping[str, NDArray[Any]]]]:
        for path in sorted(self._partial.glob("*.npz")):
            with self._damage(path), np.load(path) as file:
                state = dict(file)
            yield path, state

    @contextmanager
    def _damage(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
            raise UserError(
                f"{path}: can't be read ({error}). Remove {self._partial} to start over."
            ) from error


@final
class ForecastScorer:
    """Makes this data rank's forecasts on this domain rank's rows, and scores its lead times.

    Args:
        done: initial and lead times that are scored already, `(times, leads)`; the same on all
            ranks.
    """

    def __init__(
        self,
        ensemble: EnsembleForecast,
        states: InitialStates,
        fields: WrittenFields,
        computed: ComputedForecast,
        aligned: AlignedForecast,
        scorer: Scorer,
        manager: DomainParallelManager,
        saved: SavedScores,
        done: NDArray[np.bool_],
    ) -> None:
        self._ensemble = ensemble
        self._states = states
        self._fields = fields
        self._computed = computed
        self._reader = LeadReader(aligned, scorer.valid)
        self._scorer = scorer
        self._manager = manager
        self._saved = saved
        self._done_before = done
        self._done = np.zeros_like(done)  # by this rank
        self._saved_at = time.monotonic()
        self._scoring: Future[None] | None = None
        height = computed.form.height
        rows = manager.partition(height)
        # For each rank of the domain: moves all rows there.
        self._exchanges = [
            RowExchange(
                rows,
                tuple((RowRange(0, height),) if r == owner else () for r in range(rows.ranks)),
                manager.domain_rank,
            )
            for owner in range(rows.ranks)
        ]
        step_hours = states.store.config.step_hours
        # Number of each lead time that is scored, by number of steps.
        self._leads = {hour // step_hours: lead for lead, hour in enumerate(aligned.hours)}

    def count(self, times: Sequence[int]) -> int:
        """Return the number of lead times that this rank's forecasts from these times have."""
        own = times[self._manager.dp_rank :: self._manager.dp_world_size]
        return int(np.count_nonzero(~self._done_before[own]))

    @torch.no_grad()
    def run(self, times: Sequence[int], progress: Callable[[int], None]) -> None:
        """Make and score the forecasts from these initial times; collective, the same on all ranks.

        Args:
            progress: called with the number of this rank's lead times that are done.

        Raises:
            UserError: the disk is full, or a state or a forecast has values that can't be scored.
        """
        finished = 0
        jobs = [ForecastJob(0, time) for time in times]
        with ThreadPoolExecutor(1, thread_name_prefix="scores") as thread:
            for job, counts in rank_jobs(jobs, self._manager.dp_rank, self._manager.dp_world_size):
                # A job that does not count runs to its end, for the collectives in the model.
                for number, members in enumerate(self._rollout(job.time), start=1):
                    lead = self._leads.get(number)
                    if counts and lead is not None and not self._done_before[job.time, lead]:
                        self._score_lead(thread, job.time, lead, members)
                        progress(finished := finished + 1)
            self._wait()
        if self._done.any():
            self._saved.save(self._done, self._scorer)

    def _rollout(self, start: int) -> Iterator[Tensor]:
        """Yield all members at one lead time after another, `(M, C, h, W)`."""
        states = self._states
        members = max(1, self._computed.form.members)
        jobs = [ForecastJob(member, start) for member in range(members)]
        forcings = tee(states.forcings(jobs[0]), members)
        given = states.given(jobs[0])
        rims = [None] * members if given is None else tee(given, members)
        rollouts = [
            replace(self._ensemble, members=(job.member,)).rollout(
                states.times[[start]], states.initial_state(job), forcing, states.static, rim
            )
            for job, forcing, rim in zip(jobs, forcings, rims, strict=True)
        ]
        # Member by member, as they are forecast alone.
        for fields in zip(*rollouts, strict=True):
            yield torch.cat([member[:, 0] for member in fields])

    def _score_lead(
        self, thread: ThreadPoolExecutor, start: int, lead: int, fields: Tensor
    ) -> None:
        """Pass one lead time to the thread that scores.

        All ranks of a pipeline have the fields; the first one scores them.
        """
        if self._manager.pipeline_rank > 0:
            return
        owner = lead % len(self._exchanges)
        # Waiting before the copy to the CPU keeps a single lead time in memory.
        if owner == self._manager.domain_rank:
            self._wait()
        physical = self._fields(self._states.denormalise(fields))
        rows = fetch_rows(physical.contiguous(), self._exchanges[owner], self._manager.transport)
        if owner == self._manager.domain_rank:
            values = rows.to(device="cpu", dtype=torch.float32).numpy()
            self._scoring = thread.submit(self._score, start, lead, values)

    def _score(self, start: int, lead: int, values: FieldArray) -> None:
        self._computed.put(values)
        for block in self._reader.read_blocks(start, lead):
            self._scorer.add(block)
        self._done[start, lead] = True
        if time.monotonic() - self._saved_at > SAVE_SECONDS:
            self._saved.save(self._done, self._scorer)
            self._saved_at = time.monotonic()

    def _wait(self) -> None:
        """Wait until the last lead time is scored, and raise its error."""
        if self._scoring is not None:
            self._scoring.result()
