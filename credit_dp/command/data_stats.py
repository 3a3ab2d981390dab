"""The stats command: `credit-dp data stats store=...` computes what fields are normalised with."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.command.data_arguments import read_data_arguments
from credit_dp.command.data_prepare import span
from credit_dp.command.overrides import ready
from credit_dp.command.tables import amount
from credit_dp.config import DataConfig
from credit_dp.data_config import AUTO, DatesConfig
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.data.piece_workers import Workers
    from credit_dp.data.statistics_run import StatisticsRun
    from credit_dp.data.store import Store
    from credit_dp.training.screen import Screen

HELP = """\
{program} store=STORE KEY=VALUE ...: computes mean, standard deviation, that of the change over a
step, minimum and maximum of each channel, weighted by area, over exactly the training dates.

  data.dates.train=[1979-01-01,2017-12-31]   the training dates; without it those of a run with
                the same keys
  data=weatherbench2 data.prognostic=[...] data.levels=[...] data.step=6h   which fields
  out=FILE      the file to write, for data.statistics=FILE; without it, the cache's own, where
                training with the same data finds it
  every=1       take every N-th date, and the one a step later; N that meet all hours are best
  workers=2     threads
  scheduler=tcp://HOST:PORT   have the workers of a distributed dask scheduler do it

Killed at any point, it goes on where it stopped when it is started again.

  --help, -h    this text

Exit code: 0 if it is done, 2 if the keys or the store are wrong.
"""

OWN: Mapping[str, Any] = {"out": "", "every": 1, "workers": 2, "scheduler": ""}


def stats(arguments: Sequence[str], program: str) -> int:
    """Compute the statistics of a store; the exit code.

    Raises:
        UserError: the keys, the store or the file are not as needed.
    """
    read = read_data_arguments(arguments, program, HELP, OWN)
    if read is None:
        return 0
    if read.json:
        raise UserError(f"{program}: has no --json. Leave it out.")
    for key in ("every", "workers"):
        if read.own[key] < 1:
            raise UserError(f"{key}: needs a whole number of at least 1, got {read.own[key]}")
    if read.config.name == "quickstart":
        raise UserError(
            f"{program}: needs a store: the quickstart's is made by training. Set store."
        )
    from rich.console import Console

    from credit_dp.data.cache import cache_folder
    from credit_dp.data.prepare import ranges_of
    from credit_dp.training.screen import Screen, data_notes

    screen = Screen(Console(file=sys.stdout))
    with data_notes() as notes:
        store = _opened(read.config)
    for note in notes:
        screen.say(f"note: {note}")
    store = store.with_ranges(ranges_of(store, cache_folder(store.config.cache)))
    path = _path(store, read.own)
    if not _is_there(store, path, read.own["every"]):
        _compute(store, path, read.own, screen)
    screen.say(_how_to_use(path, read.own["out"]))
    return 0


def _opened(config: DataConfig) -> "Store":
    """The store; of the dates that are given, it only has to have those to train on."""
    from credit_dp.data.sources.opening import open_source
    from credit_dp.data.store import Store
    from credit_dp.data.units import check_units

    train = config.dates.train
    if train != AUTO and "train" not in config.dates.preset:
        config = replace(config, dates=DatesConfig(train, train, train, config.dates.limit))
    source = open_source(config)
    check_units(source, config)
    store = Store(source, config)
    store.settle_dates()
    return store


def _path(store: "Store", own: Mapping[str, Any]) -> Path:
    from credit_dp.data.cache import cache_folder
    from credit_dp.data.statistics_file import statistics_path

    if own["out"]:
        return checks.home_replaced("out", own["out"])
    return statistics_path(store, cache_folder(store.config.cache), own["every"])


def _is_there(store: "Store", path: Path, every: int) -> bool:
    """Whether the file is there and of the same.

    Raises:
        UserError: there is something else.
    """
    from credit_dp.data.statistics import Statistics
    from credit_dp.data.statistics_file import StatisticsFile

    if not path.exists():
        return False
    found = StatisticsFile.load(path)
    if found is None:
        raise UserError(f"{path}: is there, and no file of statistics. Change out, or remove it.")
    if found.every != every:
        raise UserError(
            f"{path}: is there, of every={found.every}, not {every}. Change out, or remove it."
        )
    found.check(store, str(path), change="out, or remove the file")
    Statistics.of(found.channels, store, str(path))
    return True


def _compute(store: "Store", path: Path, own: Mapping[str, Any], screen: "Screen") -> None:
    from credit_dp.data.piece_workers import Cluster, Threads
    from credit_dp.data.statistics_run import StatisticsRun

    with closing(StatisticsRun(store, path, own["every"])) as run:
        screen.say(_told(run))
        workers: Workers
        if own["scheduler"]:
            workers = Cluster(store, run.dates, own["scheduler"])
        else:
            workers = Threads(store, run.dates, own["workers"])
        with closing(workers):
            if run.left:
                screen.say(_expected(run, workers))
            with screen.bar("statistics (fields)", run.fields, run.done) as bar:
                run.run(workers, bar)


def _told(run: "StatisticsRun") -> str:
    """What will be read."""
    from credit_dp.data.statistics_given import meets_all_hours

    store, dates = run.store, run.store.times[run.dates.chosen].astype("M8[m]")
    nth = f", every={run.every} of the training dates" if run.every > 1 else ""
    variables = dict.fromkeys(c.variable for piece in run.pieces for c in piece.channels)
    lines = [
        f"{store.source.where}: {len(dates)} dates, {dates[0]} to {dates[-1]}{nth}; "
        f"{_size(run, run.fields)} of fields of {store.grid[0]} x {store.grid[1]}",
        f"variables: {', '.join(variables)}",
    ]
    if store.chosen_dates:
        lines.append(f"data.dates: {store.chosen_dates}")
    if run.done:
        lines.append(f"going on: {_size(run, run.done)} of it are done")
    step = store.config.step_hours
    if not meets_all_hours(run.every, step):
        better = next(n for n in count(run.every) if meets_all_hours(n, step))
        lines.append(
            f"every={run.every} does not meet all hours of the day: means will be those of a few. "
            f"every={better} is better."
        )
    return "\n".join(lines)


def _expected(run: "StatisticsRun", workers: "Workers") -> str:
    """How long it will take, from a try with the first fields of as many pieces as there are
    workers."""
    from credit_dp.data.statistics_run import first_window

    some = run.left[: workers.count]
    started = time.perf_counter()
    fields = sum(workers.run(first_window, some))
    speed = fields / max(time.perf_counter() - started, 1e-9)
    left = run.fields - run.done
    return (
        f"expected: {span(left / speed / 3600)}, at {_size(run, int(speed))} in a second, as "
        f"the first {_size(run, fields)} were read"
    )


def _size(run: "StatisticsRun", fields: int) -> str:
    rows, columns = run.store.grid
    return amount(4 * fields * rows * columns)


def _how_to_use(path: Path, out: str) -> str:
    if out:
        return f"{path}: train with {ready('data.statistics', str(path))}"
    return f"{path}: training with the same data and data.cache finds it there"
