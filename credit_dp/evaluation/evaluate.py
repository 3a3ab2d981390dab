"""Forecasts from held-out dates, scored against persistence and climatology, rows by rows."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from credit_dp.data.dates import Times
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.held_out import HeldOut
from credit_dp.evaluation.last_lead import LastLeadSums, gathered, mapped_channel
from credit_dp.evaluation.maps import NONE, FieldMap, MapGrid, coasts_of
from credit_dp.evaluation.metrics import RootMeanSquare
from credit_dp.evaluation.table import SOURCES, Scores
from credit_dp.evaluation.units import unit_of

# (states, forcing of each step, static) -> the fields after each step, all `(B, channels, h, W)`
Rollout = Callable[[Tensor, Iterable[Tensor], Tensor], Iterator[Tensor]]


@torch.no_grad()
def evaluate(
    rollout: Rollout,
    dates: HeldOut,
    manager: DomainParallelManager,
    batch_size: int,
    progress: Callable[[int], None],
    last_lead: LastLeadSums | None = None,
) -> Scores:
    """Score forecasts from all initial times; the same on every rank.

    Initial times are split over the data axis, see `shares`, rows over the domain axis. `progress`
    is told how many of this rank's initial times are done. `last_lead` is given the fields at the
    longest lead time.
    """
    store = dates.prepared.store
    shape = (len(SOURCES), len(dates.leads), store.channels.outputs)
    errors = RootMeanSquare(shape, dates.area_weights, dates.points)
    done = 0
    for times, counts in shares(dates, manager, batch_size):
        if counts:
            add_errors(errors, rollout, dates, times, last_lead)
            done += len(times)
            progress(done)
        else:
            last_forecast(rollout, dates, times)
    return Scores(
        channels=tuple(channel.name for channel in store.channels.out),
        units=tuple(unit_of(store, channel.variable) for channel in store.channels.out),
        hours=dates.hours,
        rmse=errors.result(manager).cpu().numpy(),
        samples=len(dates.initial_times),
    )


def shares(
    dates: HeldOut, manager: DomainParallelManager, batch_size: int
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
    dates: HeldOut,
    times: Times,
    last_lead: LastLeadSums | None,
) -> None:
    """Forecast from a batch of initial times and add the errors of all sources."""
    start = dates.starts(times)
    now = dates.newest(times, start)
    for lead, forecast in enumerate(forecasts(rollout, dates, times, start), start=1):
        if lead not in dates.leads:
            continue
        place = dates.leads.index(lead)
        valid = times + lead * dates.step
        truth = dates.fields(valid)
        guesses = (forecast, now, dates.climatology(valid))
        for source, guess in enumerate(guesses):
            errors.add((source, place), dates.difference(guess, truth))
        if last_lead is not None and lead == dates.leads[-1]:
            last_lead.add(forecast, truth)


def forecasts(rollout: Rollout, dates: HeldOut, times: Times, start: Tensor) -> Iterator[Tensor]:
    """Forecasts from `times`, which start from `start`, up to the longest lead time."""
    forcings = (dates.forcing(times + lead * dates.step) for lead in range(dates.leads[-1]))
    return rollout(start, forcings, dates.static(len(times)))


def last_forecast(rollout: Rollout, dates: HeldOut, times: Times) -> Tensor:
    """The forecasts from `times` to the longest lead time, normalised, `(B, C, h, W)`."""
    *_, last = forecasts(rollout, dates, times, dates.starts(times))
    return last


@torch.no_grad()
def example(rollout: Rollout, dates: HeldOut, manager: DomainParallelManager) -> FieldMap:
    """One field at the longest lead time from the first initial time, gathered from all bands.

    Collective over all axes. Only for what is drawn are fields of the whole globe on a rank: here
    those of a single channel. Coasts are on rank 0 alone, which draws.
    """
    store = dates.prepared.store
    index = mapped_channel(dates)
    channel = store.channels.out[index]
    times, lead = dates.initial_times[:1], dates.leads[-1]
    last = last_forecast(rollout, dates, times)
    truth = dates.fields(times + lead * dates.step)
    own = dates.physical(torch.cat([last, truth]))[:, index]
    coasts = coasts_of(store.source) if manager.rank == 0 else NONE
    start = str(times[0].astype("datetime64[m]")).replace("T", " ")
    return FieldMap(
        title=f"{channel.name}, {dates.hours[-1]} h forecast from {start} UTC",
        unit=unit_of(store, channel.variable),
        forecast=gathered(own[0], manager),
        truth=gathered(own[1], manager),
        grid=MapGrid(store.latitude, store.longitude, coasts),
        bounds=manager.partition(len(store.latitude)).bounds,
    )
