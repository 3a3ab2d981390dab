"""Forecasts of held-out dates, scored against persistence and climatology, band by band."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import Config, TrainerConfig
from credit_dp.data.dates import HasTimes, Times
from credit_dp.data.grid import row_weights
from credit_dp.data.loader import Normaliser
from credit_dp.data.sampling import frame_offsets, initial_times
from credit_dp.data.setup import TrainingData
from credit_dp.data.units import is_nonnegative
from credit_dp.domain_parallel import DomainParallelManager, gather_tensor
from credit_dp.evaluation.maps import NO_LINES, FieldMap, MapGrid, coasts_of
from credit_dp.evaluation.metrics import (
    RootMeanSquare,
    ValidPoints,
    ZonalSpectra,
    latitude_band_weights,
    sum_over_data_ranks,
    unit_of,
)
from credit_dp.evaluation.scorecard import SOURCES, HeldOutScores, headline_indices

PROBED_TIMES = 4  # initial times looked at before training, first and last among them


@final
@dataclass(frozen=True)
class EvaluationDates:
    """From which dates to forecast, and how far.

    Attributes:
        split: train, valid or test.
        hours: lead times.
        stride_hours: the least between initial times.
        most: initial times, evenly spread; None: all.
    """

    split: str
    hours: tuple[int, ...]
    stride_hours: int
    max_times: int | None = None

    @classmethod
    def for_final_scores(cls, trainer: TrainerConfig) -> "EvaluationDates":
        """Those of a run's final scores."""
        return cls("test", tuple(trainer.evaluate_hours), trainer.evaluate_stride_hours)

    def initial_times(self, store: HasTimes, frames: int) -> Times:
        """`(N,)`, rising.

        Raises:
            UserError: as in `initial_times`.
        """
        found = initial_times(store, self.split, self.hours, self.stride_hours, frames)
        return (
            found
            if self.max_times is None
            else found[evenly_spaced_indices(len(found), self.max_times)]
        )


def evenly_spaced_indices(count: int, most: int) -> NDArray[np.intp]:
    """Evenly spread places among `count`, at most so many, first and last among them."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.intp))


@final
class HeldOutData:
    """Reads what forecasts of held-out dates start from and are compared with.

    Args:
        rows: the rank's own.
        like: its device and dtype are those of every tensor returned.
        chosen: which dates; None: those of the final scores.

    Attributes:
        hours, leads: lead times, rising, in hours and in steps of `step`.
        area_weights: `(h,)`, the globe's have mean 1.
        points: those with values, if not all fields have them everywhere.
        initial_times: every one has the states that a forecast starts from and all steps to the
            longest lead within the split.

    Raises:
        UserError: a lead time is no multiple of the data's step, no date has them all, or one of
            the few fields that are read at once has gaps.
    """

    def __init__(
        self,
        config: Config,
        prepared: TrainingData,
        rows: slice,
        like: Tensor,
        chosen: EvaluationDates | None = None,
    ) -> None:
        chosen = chosen or EvaluationDates.for_final_scores(config.trainer)
        self.prepared = prepared
        self.rows = rows
        self.normaliser = Normaliser.of(prepared, like.dtype, like.device)
        frames = config.model.frames
        self.initial_times: Times = chosen.initial_times(prepared.store, frames)
        self.hours = tuple(sorted(chosen.hours))
        self.lead_steps = tuple(hour // config.data.step_hours for hour in self.hours)
        self.step = np.timedelta64(config.data.step_hours, "h")
        self._frames = frame_offsets(frames, config.data.step_hours)
        self.area_weights = torch.as_tensor(row_weights(prepared.store.latitude)[rows]).to(like)
        self.points = ValidPoints.of(prepared.store.valid_mask(rows), like)
        self._nonlinear_channels = nonlinear_channels(prepared)
        self._static = self.normaliser.static(prepared.store.static(rows))
        self._check_readable()

    def _check_readable(self) -> None:
        """Read some of what evaluation needs: gaps should not come to light after training."""
        for start in self.initial_times[
            evenly_spaced_indices(len(self.initial_times), PROBED_TIMES)
        ]:
            self.prepared.store.forcing(start, self.rows)
            for time in (*(start + self._frames), start + self.lead_steps[-1] * self.step):
                self.prepared.store.read_outputs(np.array([time]), self.rows)

    def states(self, times: Times) -> Tensor:
        """Normalised prognostic fields, `(B, C, h, W)`."""
        return self.normaliser.state(self.prepared.store.read_states(times, self.rows))

    def fields(self, times: Times) -> Tensor:
        """Normalised fields of all that a model makes, `(B, C + D, h, W)`."""
        return self.normaliser.state(self.prepared.store.read_outputs(times, self.rows))

    def newest_fields(self, times: Times, starts: Tensor) -> Tensor:
        """As `fields`, at the newest time of what forecasts start from, read as far as need be."""
        channels = self.prepared.store.channels
        return self.fields(times) if channels.diagnostic else starts[:, -channels.states :]

    def initial_states(self, times: Times) -> Tensor:
        """What forecasts from these times start from, `(B, frames * C, h, W)`, the newest last.

        A state that is in several of them is read once.
        """
        if len(self._frames) == 1:
            return self.states(times)
        wanted, places = np.unique(times[:, None] + self._frames, return_inverse=True)
        read = self.prepared.store.read_states(wanted, self.rows)
        return self.normaliser.state(read[places.reshape(len(times), -1)]).flatten(1, 2)

    def climatology(self, times: Times) -> Tensor:
        """What the climatology expects at these times, normalised, `(B, C + D, h, W)`."""
        fields = [self.prepared.climatology.field(time, self.rows) for time in times]
        return self.normaliser.state(np.stack(fields))

    def denormalise(self, fields: Tensor) -> Tensor:
        """Normalised fields in the store's units: `(B, C + D, h, W)`; NaN where there are none."""
        return self.normaliser.denormalise(
            fields, None if self.points is None else self.points.valid
        )

    def physical_difference(self, guess: Tensor, truth: Tensor) -> Tensor:
        """How far normalised fields are apart, in the store's units: `(B, C + D, h, W)`."""
        difference = (guess - truth) * self.normaliser.scale
        if self._nonlinear_channels:
            between = self.normaliser.denormalise(guess) - self.normaliser.denormalise(truth)
            difference[:, self._nonlinear_channels] = between[:, self._nonlinear_channels]
        return difference

    def forcing(self, times: Times) -> Tensor:
        """Normalised forcings, `(B, F, h, W)`."""
        return self.normaliser.forcing(self.prepared.store.read_forcing(times, self.rows))

    def static(self, count: int) -> Tensor:
        """Normalised static fields, the same for each of `count` samples, `(count, S, h, W)`."""
        return self._static.expand(count, -1, -1, -1)


def nonlinear_channels(prepared: TrainingData) -> list[int]:
    """The channels whose normalised differences say little of those in the store's units.

    Of all others the difference is scaled, which rounds less than two large numbers do.
    """
    config = prepared.store.config
    found = []
    for place, channel in enumerate(prepared.store.channels.output_channels):
        variable = config.of(channel.variable)
        bent = not np.isnan(variable.log1p_scale) or is_nonnegative(channel.variable, variable)
        found += [place] if bent else []
    return found


LAST_LEAD_SOURCES = ("forecast", "truth")


@final
@dataclass(frozen=True)
class LastLeadDiagnostics:
    """What was found, the same on every rank.

    Attributes:
        hours: the lead time.
        shown: the places of the channels with spectra, and `mapped` of the one with a map.
        spectra: `(2, channels, K, W // 2 + 1)`, of forecast and truth in K bands of latitude.
        rmse, bias: of the mapped channel on each grid point, `(H, W)`.
    """

    hours: int
    shown: tuple[int, ...]
    map_channel: int
    spectra: np.ndarray
    rmse: np.ndarray
    bias: np.ndarray


@final
class LastLeadAccumulator:
    """Collects it, batch by batch."""

    def __init__(self, dates: HeldOutData, manager: DomainParallelManager) -> None:
        store, rows, like = dates.prepared.store, dates.rows, dates.area_weights
        self._dates, self._manager = dates, manager
        self.shown = headline_indices(store.channels.output_channels)
        self.map_channel = map_channel_index(dates)
        points = dates.points
        self._spectra = ZonalSpectra(
            (len(LAST_LEAD_SOURCES), len(self.shown)),
            latitude_band_weights(store.latitude)[:, rows].to(like.device),
            torch.as_tensor(store.latitude[rows].copy(), device=like.device),
            store.grid[1],
            None if points is None else ValidPoints(points.valid[self.shown]),
        )
        sizes = (2, len(like), store.grid[1])
        self._errors = torch.zeros(sizes, dtype=torch.float64, device=like.device)
        self._count = torch.zeros(1, dtype=torch.float64, device=like.device)

    def add(self, forecast: Tensor, truth: Tensor) -> None:
        """Add normalised fields `(B, C, h, W)`."""
        fields = [self._dates.denormalise(one) for one in (forecast, truth)]
        for source, field in enumerate(fields):
            self._spectra.add((source,), field[:, self.shown])
        error = (fields[0] - fields[1])[:, self.map_channel].double()
        self._errors += torch.stack([error.sum(dim=0), error.square().sum(dim=0)])
        self._count += len(error)

    def result(self) -> LastLeadDiagnostics:
        """What was found; collective over all axes."""
        manager = self._manager
        count = sum_over_data_ranks(self._count, manager)
        mean, square = sum_over_data_ranks(self._errors, manager) / count
        return LastLeadDiagnostics(
            hours=self._dates.hours[-1],
            shown=tuple(self.shown),
            map_channel=self.map_channel,
            spectra=self._spectra.result(manager).cpu().numpy(),
            # One after the other: no more than one field is on its way.
            rmse=gather_field(square.sqrt(), manager),
            bias=gather_field(mean, manager),
        )


def map_channel_index(dates: HeldOutData) -> int:
    """The place of the channel that maps show."""
    names = [channel.name for channel in dates.prepared.store.channels.output_channels]
    return names.index("geopotential_500") if "geopotential_500" in names else 0


def gather_field(field: Tensor, manager: DomainParallelManager) -> np.ndarray:
    """A field `(h, W)` of which each rank has a band, on the whole globe, `(H, W)`."""
    whole = gather_tensor(field[None].contiguous(), dim=-2, manager=manager)
    return np.asarray(whole[0].cpu().numpy())


# (states, forcing of each step, static) -> the fields after each step, all `(B, channels, h, W)`
Rollout = Callable[[Tensor, Iterable[Tensor], Tensor], Iterator[Tensor]]


@torch.no_grad()
def evaluate(
    rollout: Rollout,
    dates: HeldOutData,
    manager: DomainParallelManager,
    batch_size: int,
    progress: Callable[[int], None],
    last_lead: LastLeadAccumulator | None = None,
) -> HeldOutScores:
    """Score forecasts from all initial times; the same on every rank.

    Initial times are split over the data axis, see `shares`, rows over the domain axis. `progress`
    is told how many of this rank's initial times are done. `last_lead` is given the fields at the
    longest lead time.
    """
    store = dates.prepared.store
    shape = (len(SOURCES), len(dates.lead_steps), store.channels.outputs)
    errors = RootMeanSquare(shape, dates.area_weights, dates.points)
    done = 0
    for times, counts in rank_batches(dates, manager, batch_size):
        if counts:
            add_errors(errors, rollout, dates, times, last_lead)
            done += len(times)
            progress(done)
        else:
            last_forecast(rollout, dates, times)
    return HeldOutScores(
        channels=tuple(channel.name for channel in store.channels.output_channels),
        units=tuple(unit_of(store, channel.variable) for channel in store.channels.output_channels),
        hours=dates.hours,
        rmse=errors.result(manager).cpu().numpy(),
        samples=len(dates.initial_times),
    )


def rank_batches(
    dates: HeldOutData, manager: DomainParallelManager, batch_size: int
) -> Iterator[tuple[Times, bool]]:
    """This rank's initial times, some at a time, and whether they count.

    All ranks have equally many turns, for those that share parameters out need each other at every
    step: a rank without times left repeats one that does not count. `batch_size` is that of the
    whole data axis, as in training.
    """
    own = dates.initial_times[manager.dp_rank :: manager.dp_world_size]
    size = max(1, batch_size // manager.dp_world_size)
    most = -(-len(dates.initial_times) // manager.dp_world_size)
    for start in range(0, most, size):
        times = own[start : start + size]
        yield (times, True) if len(times) else (dates.initial_times[:1], False)


def add_errors(
    errors: RootMeanSquare,
    rollout: Rollout,
    dates: HeldOutData,
    times: Times,
    last_lead: LastLeadAccumulator | None,
) -> None:
    """Forecast from a batch of initial times and add the errors of all sources."""
    start = dates.initial_states(times)
    now = dates.newest_fields(times, start)
    for lead, forecast in enumerate(run_forecasts(rollout, dates, times, start), start=1):
        if lead not in dates.lead_steps:
            continue
        place = dates.lead_steps.index(lead)
        valid = times + lead * dates.step
        truth = dates.fields(valid)
        guesses = (forecast, now, dates.climatology(valid))
        for source, guess in enumerate(guesses):
            errors.add((source, place), dates.physical_difference(guess, truth))
        if last_lead is not None and lead == dates.lead_steps[-1]:
            last_lead.add(forecast, truth)


def run_forecasts(
    rollout: Rollout, dates: HeldOutData, times: Times, start: Tensor
) -> Iterator[Tensor]:
    """Forecasts from `times`, which start from `start`, up to the longest lead time."""
    forcings = (dates.forcing(times + lead * dates.step) for lead in range(dates.lead_steps[-1]))
    return rollout(start, forcings, dates.static(len(times)))


def last_forecast(rollout: Rollout, dates: HeldOutData, times: Times) -> Tensor:
    """The forecasts from `times` to the longest lead time, normalised, `(B, C, h, W)`."""
    *_, last = run_forecasts(rollout, dates, times, dates.initial_states(times))
    return last


@torch.no_grad()
def example_map(rollout: Rollout, dates: HeldOutData, manager: DomainParallelManager) -> FieldMap:
    """One field at the longest lead time from the first initial time, gathered from all bands.

    Collective over all axes. Only for what is drawn are fields of the whole globe on a rank: here
    those of a single channel. Coasts are on rank 0 alone, which draws.
    """
    store = dates.prepared.store
    index = map_channel_index(dates)
    channel = store.channels.output_channels[index]
    times, lead = dates.initial_times[:1], dates.lead_steps[-1]
    last = last_forecast(rollout, dates, times)
    truth = dates.fields(times + lead * dates.step)
    own = dates.denormalise(torch.cat([last, truth]))[:, index]
    coasts = coasts_of(store.source) if manager.rank == 0 else NO_LINES
    start = str(times[0].astype("datetime64[m]")).replace("T", " ")
    return FieldMap(
        title=f"{channel.name}, {dates.hours[-1]} h forecast from {start} UTC",
        unit=unit_of(store, channel.variable),
        forecast=gather_field(own[0], manager),
        truth=gather_field(own[1], manager),
        grid=MapGrid(store.latitude, store.longitude, coasts),
        bounds=manager.partition(len(store.latitude)).bounds,
    )
