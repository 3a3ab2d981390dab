"""The statistics that `data.statistics` names, whoever made them."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from math import gcd
from pathlib import Path
from typing import NamedTuple

from credit_dp.data.cache import Report, claim
from credit_dp.data.piece_workers import Threads
from credit_dp.data.sources.address import is_remote, local_path
from credit_dp.data.statistics import UNCHANGED, Statistics, refuse_out_of_range, static_table
from credit_dp.data.statistics_file import StatisticsFile, statistics_path
from credit_dp.data.statistics_import import read_foreign
from credit_dp.data.statistics_run import StatisticsRun
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates
from credit_dp.errors import UserError

SAMPLED = 500  # dates that determine the tendency std to better than a percent

logger = logging.getLogger(__name__)


class Given(NamedTuple):
    """Statistics, and of which training dates they are: every N-th."""

    statistics: Statistics
    every: int


def given_statistics(store: Store, folder: Path, report: Report) -> Given:
    """Read the files of `data.statistics`; what those of others do not say is computed.

    Of static fields on the spot, of others from a sample of the training dates: changes over a
    step, forcings, and what a channel is not normalised with.

    Args:
        folder: the cache, where what is computed is kept.

    Raises:
        UserError: a file can't be read, is of something else, or lacks a variable.
    """
    entries = store.config.statistics_files
    where = ", ".join(entries)
    own = _own_file(entries)
    if own is not None:
        return _own(own, store, where)
    _refuse_transforms(store, where)
    table = read_foreign(entries, store)
    refuse_out_of_range(table, store, where, "Change data.statistics")
    _complete(table, store, where, lambda every: computed_statistics(store, folder, every, report))
    return Given(Statistics.of(table, store, where), 1)


def _complete(
    table: dict[str, dict[str, float]],
    store: Store,
    where: str,
    compute: Callable[[int], StatisticsFile],
) -> None:
    """Add to `table` what the files of others lack.

    Args:
        table: what they have, by the channels' names.
        where: the files.
        compute: gives the statistics of every N-th training date.
    """
    for name, row in static_table(store).items():
        if not {"mean", "std"} <= table.get(name, {}).keys():
            table[name] = row
    for name in (*store.channels.forcing, *store.channels.static):
        if name in table:
            table[name]["tendency_std"] = 0.0  # nobody uses that of an input
            if store.config.of(name).normalise == "none":
                table[name] = {**UNCHANGED, **table[name]}
    values = [name for name, row in table.items() if not {"mean", "std"} <= row.keys()]
    changes = [name for name, row in table.items() if "tendency_std" not in row]
    if not values and not changes:
        return
    every = sampled(store)
    what = ["no tendency std"] if changes else []
    what += [f"no mean or std of {', '.join(values)}"] if values else []
    lacking = " and ".join(what)
    dates = "all training dates" if every == 1 else f"one in {every} training dates"
    logger.info("%s has %s: computed from %s", where, lacking, dates)
    computed = compute(every).channels
    for name in changes:
        table[name]["tendency_std"] = computed[name]["tendency_std"]
    for name in values:
        given = {number: value for number, value in table[name].items() if value == value}
        table[name] = {**computed[name], **given}


def check_given(store: Store) -> None:
    """Refuse files of `data.statistics` that don't fit; what they lack is not computed.

    Raises:
        UserError: see `given_statistics`.
    """
    entries = store.config.statistics_files
    own = _own_file(entries)
    if own is not None:
        _own(own, store, ", ".join(entries))
    else:
        where = ", ".join(entries)
        _refuse_transforms(store, where)
        refuse_out_of_range(read_foreign(entries, store), store, where, "Change data.statistics")


def _own_file(entries: Sequence[str]) -> StatisticsFile | None:
    """The file that `credit-dp data stats` wrote, if it is one.

    Raises:
        UserError: a path of this machine leads nowhere.
    """
    if len(entries) != 1 or is_remote(entries[0]):
        return None
    path = local_path(entries[0])
    if not path.exists():
        raise UserError(f"{path}: no such file. Change data.statistics.")
    return StatisticsFile.load(path)


def computed_statistics(store: Store, folder: Path, every: int, report: Report) -> StatisticsFile:
    """Those of every N-th training date, from the cache or computed now."""
    path = statistics_path(store, folder, every)
    with claim(path, lambda file: StatisticsFile.load(file) is not None) as file:
        if file is not None:
            with closing(StatisticsRun(store, file, every)) as run:
                done = _share(run.fields, report)
                run.run(Threads(store, run.dates, store.config.workers), done)
    found = StatisticsFile.load(path)
    if found is None:
        raise OSError(f"{path}: what was just written cannot be read back")
    return found


def sampled(store: Store) -> int:
    """Of which N every N-th date is enough for the tendency std, and meets all hours of the day."""
    dates = len(TrainingDates.of(store).chosen)
    every = max(1, dates // SAMPLED)
    while not meets_all_hours(every, store.config.step_hours):
        every -= 1
    return every


def meets_all_hours(every: int, step_hours: int) -> bool:
    """Whether every N-th date meets all hours of the day that the dates have."""
    return gcd(every * step_hours, 24) == gcd(step_hours, 24)


def _own(found: StatisticsFile, store: Store, where: str) -> Given:
    found.check(store, where)
    refuse_out_of_range(found.channels, store, where, "Change data.statistics")
    if found.every > 1:
        logger.info(
            "%s is of one in %d training dates, and so is the climatology", where, found.every
        )
    return Given(Statistics.of(found.channels, store, where), found.every)


def _refuse_transforms(store: Store, where: str) -> None:
    """Statistics by others are of values as they are."""
    out = [channel.variable for channel in store.channels.out]
    for name in dict.fromkeys([*out, *store.channels.forcing, *store.channels.static]):
        normalise = store.config.of(name).normalise
        if normalise.startswith("log1p"):
            raise UserError(
                f"{where}: is of {name} as it is, but the config normalises it by {normalise}. "
                f"Change data.variables.{name}.normalise, or data.statistics to null."
            )


def _share(total: int, report: Report) -> Callable[[int], None]:
    return lambda done: report("statistics", done / total)
