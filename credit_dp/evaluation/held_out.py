"""Score a run's own forecasts of held-out dates against persistence and climatology.

Initial times are split over the data axis, rows over the domain axis: every rank reads, forecasts
and sums only its band, and the sums are joined at the end. `HeldOutData` reads, `evaluate`
forecasts and scores with the metrics of `metric_table`, `LastLeadAccumulator` collects spectra and
error maps of the longest lead time, `example_map` gathers one field to draw.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from credit_dp.config import Config
from credit_dp.data.calendar import Times
from credit_dp.data.dates import HasTimes
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.sampling import evenly_spaced_indices, frame_offsets, initial_times
from credit_dp.data.setup import TrainingData
from credit_dp.data.units import is_nonnegative
from credit_dp.data.valid_points import ValidPoints
from credit_dp.distributed.collectives import sum_over_data_ranks
from credit_dp.domain_parallel import DomainParallelManager, gather_tensor
from credit_dp.evaluation.maps import FieldMap, MapGrid, planet_of
from credit_dp.evaluation.metric_table import (
    CLIMATOLOGY,
    FORECAST,
    PERSISTENCE,
    SPECTRA_SOURCES,
    TRUTH,
    Extent,
    ScoredFields,
    ScoreSums,
    run_metrics,
)
from credit_dp.evaluation.metrics import (
    PowerSpectra,
    RegionSpectra,
    ZonalSpectra,
    region_wavelength,
)
from credit_dp.evaluation.scorecard import HeldOutScores, headline_indices

MAX_CURVE_LEADS = 12  # of the curves of scores by lead time
PROBED_TIMES = 4  # initial times read before training, including the first and the last


@final
@dataclass(frozen=True)
class EvaluationDates:
    """Initial and lead times to forecast.

    Attributes:
        max_times: maximum number of initial times, evenly spaced; None: all.
        part: see `credit_dp.data.sampling.initial_times`.
    """

    split: str
    hours: tuple[int, ...]
    stride_hours: int
    max_times: int | None = None
    part: tuple[str, Sequence[str]] | None = None

    def initial_times(self, store: HasTimes, frames: int) -> Times:
        """Return the initial times, `(N,)`, rising."""
        times = initial_times(store, self.split, self.hours, self.stride_hours, frames, self.part)
        if self.max_times is None:
            return times
        return times[evenly_spaced_indices(len(times), self.max_times)]


def curve_hours(hours: Sequence[int], step_hours: int) -> tuple[int, ...]:
    """Return lead times for curves: some, and every step to the longest if these are at most 12.

    Otherwise every second step, every third and so on: each lead time costs a reading of the truth.
    """
    steps = max(hours) // step_hours
    spacing = -(-steps // MAX_CURVE_LEADS) * step_hours
    return tuple(sorted({*hours, *range(spacing, max(hours) + 1, spacing)}))


@final
class HeldOutData:
    """Reads initial states, forcing, truth and climatology of held-out dates, on this rank's rows.

    Args:
        like: gives device and dtype of every tensor returned.
        dates: initial and lead times; None: those of the final scores, with the lead times of
            `curve_hours`.

    Attributes:
        requested_hours: lead times of `trainer.evaluate_hours`, rising.
        hours, lead_steps: lead times, rising, in hours and in steps of `step`.
        area_weights: `(h,)` or `(h, W)`; their mean over the globe is 1.
        points: points that count: those with values, without the rim of a region; None: all.
        initial_times: the split contains all input states of each and all steps to the longest
            lead time.
        members: the data of each member of an ensemble, or `self` alone if the store has no
            members. The methods of `self` read the first member.
        first_sample: the number of its first initial time among those of all members.

    Raises:
        UserError: a lead time is no multiple of the data's step, no initial time has all states,
            or one of the fields read for a check has missing values.
    """

    def __init__(
        self,
        config: Config,
        prepared: TrainingData,
        rows: slice,
        like: Tensor,
        dates: EvaluationDates | None = None,
    ) -> None:
        requested = tuple(sorted(config.trainer.evaluate_hours))
        hours = curve_hours(requested, config.data.step_hours)
        dates = dates or EvaluationDates("test", hours, config.trainer.evaluate_stride_hours)
        self.prepared = prepared
        self.rows = rows
        self.normaliser = Normaliser.of(prepared, like.dtype, like.device)
        frames = config.model.frames
        self.initial_times: Times = dates.initial_times(prepared.store, frames)
        self.hours = tuple(sorted(dates.hours))
        self.requested_hours = requested
        self.lead_steps = tuple(hour // config.data.step_hours for hour in self.hours)
        self.step = np.timedelta64(config.data.step_hours, "h")
        self._frames = frame_offsets(frames, config.data.step_hours)
        self.area_weights = torch.as_tensor(prepared.store.grid.weights[rows]).to(like)
        self.points = ValidPoints.of(prepared.store.scored_mask(rows), like)
        self._nonlinear_channels = nonlinear_channels(prepared)
        self._static = self.normaliser.normalise_static(prepared.store.read_static(rows))
        self.first_sample = 0
        self.members = [self]
        if prepared.store.num_members > 1:
            self.members = [self._member(index) for index in range(prepared.store.num_members)]
        self._check_readable()

    def _member(self, index: int) -> "HeldOutData":
        """Return the same for one member."""
        member = copy(self)
        member.prepared = replace(self.prepared, store=self.prepared.store.member(index))
        member.first_sample = index * len(self.initial_times)
        return member

    @property
    def num_samples(self) -> int:
        """The number of forecasts, from all initial times of all members."""
        return len(self.members) * len(self.initial_times)

    def _check_readable(self) -> None:
        """Read a few fields before training, so that gaps do not stop the run after it."""
        for probe in evenly_spaced_indices(self.num_samples, PROBED_TIMES):
            member, number = divmod(probe, len(self.initial_times))
            store, start = self.members[member].prepared.store, self.initial_times[number]
            store.read_forcing(np.array([start]), self.rows)
            for time in (*(start + self._frames), start + self.lead_steps[-1] * self.step):
                store.read_outputs(np.array([time]), self.rows)

    def states(self, times: Times) -> Tensor:
        """Return normalised prognostic fields, `(B, C, h, W)`."""
        return self.normaliser.normalise_outputs(self.prepared.store.read_states(times, self.rows))

    def fields(self, times: Times) -> Tensor:
        """Return normalised output fields, prognostic and diagnostic, `(B, C + D, h, W)`."""
        return self.normaliser.normalise_outputs(self.prepared.store.read_outputs(times, self.rows))

    def newest_fields(self, times: Times, initial_states: Tensor) -> Tensor:
        """Return `fields` at `times`, from the initial states unless diagnostic fields exist."""
        channels = self.prepared.store.channels
        if channels.diagnostic:
            return self.fields(times)
        return initial_states[:, -channels.num_states :]

    def initial_states(self, times: Times) -> Tensor:
        """Return the input states of forecasts, `(B, frames * C, h, W)`, the newest last.

        A state that several forecasts start from is read once.
        """
        if len(self._frames) == 1:
            return self.states(times)
        unique_times, inverse = np.unique(times[:, None] + self._frames, return_inverse=True)
        states = self.prepared.store.read_states(unique_times, self.rows)
        states = states[inverse.reshape(len(times), -1)]
        return self.normaliser.normalise_outputs(states).flatten(1, 2)

    def climatology(self, times: Times) -> Tensor:
        """Return normalised fields of the climatology, `(B, C + D, h, W)`."""
        fields = [self.prepared.climatology.field(time, self.rows) for time in times]
        return self.normaliser.normalise_outputs(np.stack(fields))

    def denormalise(self, fields: Tensor) -> Tensor:
        """Return fields in the store's units, `(B, C + D, h, W)`; NaN on points without values."""
        return self.normaliser.denormalise(
            fields, None if self.points is None else self.points.valid
        )

    def physical_difference(self, guess: Tensor, truth: Tensor) -> Tensor:
        """Return guess minus truth in the store's units: `(B, C + D, h, W)`."""
        # Scaling the small difference rounds less than subtracting two large denormalised fields.
        difference = (guess - truth) * self.normaliser.scale
        if self._nonlinear_channels:
            between = self.normaliser.denormalise(guess) - self.normaliser.denormalise(truth)
            difference[:, self._nonlinear_channels] = between[:, self._nonlinear_channels]
        return difference

    def forcing(self, times: Times) -> Tensor:
        """Return normalised forcings, `(B, F, h, W)`."""
        return self.normaliser.normalise_forcing(self.prepared.store.read_forcing(times, self.rows))

    def static(self, count: int) -> Tensor:
        """Return normalised static fields, expanded to `(count, S, h, W)`."""
        return self._static.expand(count, -1, -1, -1)


def nonlinear_channels(prepared: TrainingData) -> list[int]:
    """Return the indices of channels whose denormalisation is not linear.

    These are transformed or cut off at zero: their differences can't be denormalised.
    """
    config = prepared.store.config
    indices = []
    for index, channel in enumerate(prepared.store.channels.output_channels):
        variable = config.variable_config(channel.variable)
        if variable.is_transformed or is_nonnegative(channel.variable, variable):
            indices.append(index)
    return indices


@final
@dataclass(frozen=True)
class LastLeadDiagnostics:
    """Spectra and an error map at the longest lead time, the same on every rank.

    Attributes:
        spectra_channels: indices of the channels with spectra.
        spectra: of forecast and truth, `(2, channels, K, N)`, see `PowerSpectra`.
        rmse, bias: of the map's channel on each grid point, `(H, W)`.
    """

    hours: int
    spectra_channels: tuple[int, ...]
    map_channel: int
    spectra: np.ndarray
    rmse: np.ndarray
    bias: np.ndarray
    wavelength: float | None = None


@final
class LastLeadAccumulator:
    """Accumulates `LastLeadDiagnostics` batch by batch."""

    def __init__(self, held_out: HeldOutData, manager: DomainParallelManager) -> None:
        store = held_out.prepared.store
        like = held_out.area_weights
        self._held_out = held_out
        self._manager = manager
        self.spectra_channels = headline_indices(store.channels.output_channels)
        self.map_channel = map_channel_index(held_out)
        points = held_out.points
        shape = (len(SPECTRA_SOURCES), len(self.spectra_channels))
        boundary = store.config.boundary
        self._wavelength = region_wavelength(store.grid, boundary)
        self._spectra: PowerSpectra
        if self._wavelength is None:
            scored = None if points is None else ValidPoints(points.valid[self.spectra_channels])
            self._spectra = ZonalSpectra(shape, store.grid, held_out.rows, scored, like.device)
        else:
            self._spectra = RegionSpectra(shape, store.grid, boundary, device=like.device)
        sizes = (2, len(like), store.grid[1])
        # float64: sums of many squares would lose digits in float32.
        self._errors = torch.zeros(sizes, dtype=torch.float64, device=like.device)
        self._count = torch.zeros(1, dtype=torch.float64, device=like.device)

    def add(self, forecast: Tensor, truth: Tensor) -> None:
        """Add normalised members `(B, M, C, h, W)` and truth `(B, C, h, W)` of this rank's rows.

        Spectra are those of the members, errors those of their mean. Collective over the domain.
        """
        fields = [self._held_out.denormalise(field) for field in (forecast.flatten(0, 1), truth)]
        for source, field in enumerate(fields):
            shown = field[:, self.spectra_channels]
            if self._wavelength is not None:
                # The transform along columns needs all rows; every rank of a domain adds the same.
                shown = gather_tensor(shown, dim=-2, manager=self._manager)
            self._spectra.add((source,), shown)
        mean = fields[0].view_as(forecast).mean(dim=1)
        error = (mean - fields[1])[:, self.map_channel].double()
        self._errors += torch.stack([error.sum(dim=0), error.square().sum(dim=0)])
        self._count += len(error)

    def result(self) -> LastLeadDiagnostics:
        """Return the diagnostics; collective over all axes."""
        manager = self._manager
        # Each domain rank has all columns of its rows, so that errors on grid points are only
        # summed over the data axis; spectra average over rows, too.
        count = sum_over_data_ranks(self._count, manager)
        mean, square = sum_over_data_ranks(self._errors, manager) / count
        return LastLeadDiagnostics(
            hours=self._held_out.hours[-1],
            spectra_channels=tuple(self.spectra_channels),
            map_channel=self.map_channel,
            spectra=self._spectra.result(manager).cpu().numpy(),
            # Gathered one after the other, so that one global field is in transit at a time.
            rmse=gather_field(square.sqrt(), manager),
            bias=gather_field(mean, manager),
            wavelength=self._wavelength,
        )


def map_channel_index(held_out: HeldOutData) -> int:
    """Return the index of the channel that maps show: geopotential at 500 hPa, or the first."""
    names = [channel.name for channel in held_out.prepared.store.channels.output_channels]
    return names.index("geopotential_500") if "geopotential_500" in names else 0


def gather_field(field: Tensor, manager: DomainParallelManager) -> np.ndarray:
    """Return the global field `(H, W)` of the ranks' bands `(h, W)`; collective."""
    global_field = gather_tensor(field[None].contiguous(), dim=-2, manager=manager)
    return np.asarray(global_field[0].cpu().numpy())


@final
class HeldOutFields(ScoredFields):
    """The forecasts of a batch of initial times, at one lead time.

    Args:
        times: the B initial times, some of those of `HeldOutData`.
        lead: in steps of the data.
        members: normalised forecasts, `(B, M, C, h, W)`.
        fields: of the truth and of other sources, normalised, `(B, C, h, W)`. The climatology is
            computed when a metric needs it.
        normalised: whether scores are in standard deviations, not in the store's units.
    """

    def __init__(
        self,
        held_out: HeldOutData,
        times: Times,
        lead: int,
        members: Tensor,
        fields: Mapping[str, Tensor],
        normalised: bool = False,
    ) -> None:
        numbers = held_out.first_sample + np.searchsorted(held_out.initial_times, times)
        self.samples = numbers.tolist()
        self._held_out = held_out
        self._normalised = normalised
        self._valid_times = times + lead * held_out.step
        self._members = members
        self._fields = dict(fields)

    @property
    def truth(self) -> Tensor:
        """Return the truth, `(B, C, h, W)`."""
        return self._scored(self._field(TRUTH))

    def members(self, source: str) -> Tensor:
        """Return the members, `(B, M, C, h, W)`; any other source is one member."""
        if source != FORECAST:
            return self._scored(self._field(source))[:, None]
        fields = self._scored(self._members.flatten(0, 1))
        return fields.view_as(self._members)

    def error(self, source: str) -> Tensor:
        """Return a source minus the truth, `(B, C, h, W)`."""
        return self._difference(source, TRUTH)

    def anomaly(self, source: str) -> Tensor:
        """Return a source minus the climatology, `(B, C, h, W)`."""
        return self._difference(source, CLIMATOLOGY)

    def _difference(self, source: str, other: str) -> Tensor:
        """Return a source minus another one; of the forecast the mean over its members."""
        subtract = torch.sub if self._normalised else self._held_out.physical_difference
        reference = self._field(other)
        if source != FORECAST:
            return subtract(self._field(source), reference)
        difference = subtract(
            self._members.flatten(0, 1), reference.repeat_interleave(self._members.shape[1], 0)
        )
        return difference.view_as(self._members).mean(dim=1)

    def _field(self, source: str) -> Tensor:
        if source == CLIMATOLOGY and source not in self._fields:
            self._fields[source] = self._held_out.climatology(self._valid_times)
        return self._fields[source]

    def _scored(self, fields: Tensor) -> Tensor:
        return fields if self._normalised else self._held_out.denormalise(fields)


# (initial times, initial states, forcing of each step, static, states after each step whose rim is
# given) -> members after each step, `(B, M, channels, h, W)`.
Rollout = Callable[
    [Times, Tensor, Iterable[Tensor], Tensor, Iterable[Tensor] | None], Iterator[Tensor]
]


@torch.no_grad()
def evaluate(
    rollout: Rollout,
    held_out: HeldOutData,
    manager: DomainParallelManager,
    batch_size: int,
    progress: Callable[[int], None],
    last_lead: LastLeadAccumulator | None = None,
    members: int = 1,
) -> HeldOutScores:
    """Return the scores of forecasts from all initial times, on every rank; collective.

    Several members also get the scores of ensembles.

    Args:
        batch_size: of the whole data axis, as in training.
        progress: called with the number of this rank's initial times that are done.
    """
    store = held_out.prepared.store
    sums = ScoreSums(
        run_metrics(members),
        (len(held_out.lead_steps), store.channels.num_outputs),
        Extent(held_out.area_weights, held_out.points, samples=held_out.num_samples),
    )
    done = 0
    for member, times, counts in rank_batches(held_out, manager, batch_size):
        if counts:
            add_forecasts(sums, rollout, member, times, last_lead)
            done += len(times)
            progress(done)
        else:
            # Only for the collectives inside the model, which the other ranks are waiting in.
            last_forecast(rollout, member, times)
    return HeldOutScores(
        channels=tuple(channel.name for channel in store.channels.output_channels),
        units=tuple(
            store.shown_unit(channel.variable) for channel in store.channels.output_channels
        ),
        hours=held_out.hours,
        shown_hours=held_out.requested_hours,
        scores={name: values.cpu().numpy() for name, values in sums.result(manager).items()},
        samples=held_out.num_samples,
        members=members,
    )


def rank_batches(
    held_out: HeldOutData, manager: DomainParallelManager, batch_size: int
) -> Iterator[tuple[HeldOutData, Times, bool]]:
    """Yield batches of this rank's initial times of each member, and whether they count.

    All ranks yield equally many batches: with sharded parameters (FSDP), every forward pass is
    collective. A rank without times left repeats one that does not count. `batch_size` is that of
    the whole data axis, as in training.
    """
    local_times = held_out.initial_times[manager.dp_rank :: manager.dp_world_size]
    size = max(1, batch_size // manager.dp_world_size)
    # Rounded up: the rank with the most times sets the number of batches on all ranks.
    max_times = -(-len(held_out.initial_times) // manager.dp_world_size)
    for member in held_out.members:
        for start in range(0, max_times, size):
            times = local_times[start : start + size]
            yield (member, times, True) if len(times) else (member, member.initial_times[:1], False)


def add_forecasts(
    sums: ScoreSums,
    rollout: Rollout,
    held_out: HeldOutData,
    times: Times,
    last_lead: LastLeadAccumulator | None,
) -> None:
    """Forecast from a batch of initial times and add the scores of all sources."""
    start = held_out.initial_states(times)
    persistence = held_out.newest_fields(times, start)
    for lead, members in enumerate(run_forecasts(rollout, held_out, times, start), start=1):
        if lead not in held_out.lead_steps:
            continue  # a step between two scored lead times
        truth = held_out.fields(times + lead * held_out.step)
        fields = {PERSISTENCE: persistence, TRUTH: truth}
        scored = HeldOutFields(held_out, times, lead, members, fields)
        sums.add(held_out.lead_steps.index(lead), scored)
        if last_lead is not None and lead == held_out.lead_steps[-1]:
            last_lead.add(members, truth)


def run_forecasts(
    rollout: Rollout, held_out: HeldOutData, times: Times, start: Tensor
) -> Iterator[Tensor]:
    """Yield the members from `times` step by step, up to the longest lead time."""
    # Generators: what a step needs is read when the rollout gets there.
    steps = held_out.lead_steps[-1]
    forcings = (held_out.forcing(times + lead * held_out.step) for lead in range(steps))
    given = None
    if held_out.prepared.store.config.boundary:
        given = (held_out.states(times + lead * held_out.step) for lead in range(1, steps + 1))
    return rollout(times, start, forcings, held_out.static(len(times)), given)


def last_forecast(rollout: Rollout, held_out: HeldOutData, times: Times) -> Tensor:
    """Return the normalised members at the longest lead time, `(B, M, C, h, W)`."""
    *_, last = run_forecasts(rollout, held_out, times, held_out.initial_states(times))
    return last


@torch.no_grad()
def example_map(
    rollout: Rollout, held_out: HeldOutData, manager: DomainParallelManager
) -> FieldMap:
    """Return one channel from the first initial time at the longest lead time, on the globe.

    An ensemble shows its first member: a mean would be smoother than any forecast.

    Collective over all axes. Global fields are gathered only for drawing, and only of one channel.
    """
    times = held_out.initial_times[:1]
    return forecast_map(held_out, manager, times, last_forecast(rollout, held_out, times)[:, 0])


def forecast_map(
    held_out: HeldOutData, manager: DomainParallelManager, times: Times, forecast: Tensor
) -> FieldMap:
    """Return one channel of a forecast at the longest lead time, on the globe; collective.

    Args:
        forecast: normalised, `(1, C, h, W)`.
    """
    store = held_out.prepared.store
    index = map_channel_index(held_out)
    channel = store.channels.output_channels[index]
    lead = held_out.lead_steps[-1]
    truth = held_out.fields(times + lead * held_out.step)
    # Denormalise both on the local rows, then gather the one channel that is drawn.
    local = held_out.denormalise(torch.cat([forecast, truth]))[:, index]
    start = store.calendar.text(times[0]).replace("T", " ")
    return FieldMap(
        title=f"{held_out.hours[-1]} h forecast from {start} UTC",
        unit=store.shown_unit(channel.variable),
        forecast=gather_field(local[0], manager),
        truth=gather_field(local[1], manager),
        grid=MapGrid(store.grid, planet_of(store.source.title)),
        bounds=manager.partition(len(store.latitude)).bounds,
        channel=channel,
        model_levels=bool(store.source.variables[channel.variable].model_levels),
    )
