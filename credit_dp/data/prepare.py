"""Everything that must be on disk before the first batch: store, statistics and climatology."""

import dataclasses
from pathlib import Path
from typing import final

from filelock import FileLock

from credit_dp.config import DataConfig
from credit_dp.data import quickstart
from credit_dp.data.cache import Report, cache_folder, claim, lock_of
from credit_dp.data.climatology import Climatology, ClimatologyFit, climatology_path
from credit_dp.data.grid import parse_grid
from credit_dp.data.statistics import Statistics, StatisticsPass, statistics_path
from credit_dp.data.store import Store
from credit_dp.data.training_pass import Consumer, run_training_pass


@final
@dataclasses.dataclass(frozen=True)
class Prepared:
    """An open store and what is known of its training dates."""

    store: Store
    statistics: Statistics
    climatology: Climatology


def prepare(config: DataConfig, report: Report | None = None) -> Prepared:
    """Make what is missing under `config.cache`, then open it. All ranks may call this at once.

    One process makes each part and the others wait for it; a second call finds all of it there.

    Args:
        report: called with what is being made and the fraction done, in the process that makes it.

    Raises:
        UserError: the store is not as needed; see `Store.open` and `StatisticsPass`.
    """
    tell = report or _silent
    folder = cache_folder(config.cache)
    if config.name == "quickstart":
        config = dataclasses.replace(config, store=str(_quickstart(config, folder, tell)))
    store = Store.open(config)
    return Prepared(store, *_known(store, folder, tell))


def _known(store: Store, folder: Path, report: Report) -> tuple[Statistics, Climatology]:
    """Statistics and climatology from the cache; what is missing is made in one pass."""
    statistics_file = statistics_path(store, folder)
    climatology_folder = climatology_path(store, folder)

    def load() -> tuple[Statistics | None, Climatology | None]:
        found = Climatology.load(climatology_folder, store.channels)
        return Statistics.load(statistics_file), found

    statistics, climatology = load()
    if statistics is None or climatology is None:
        _make(store, statistics_file, climatology_folder, report)
        statistics, climatology = load()
    if statistics is None or climatology is None:
        raise OSError(f"{folder}: what was just written cannot be read back")
    return statistics, climatology


def _make(store: Store, statistics_file: Path, climatology_folder: Path, report: Report) -> None:
    with (
        claim(statistics_file, lambda path: Statistics.load(path) is not None) as file,
        claim(
            climatology_folder, lambda path: Climatology.load(path, store.channels) is not None
        ) as fit_folder,
    ):
        consumers: list[Consumer] = []
        if fit_folder is not None:
            consumers.append(ClimatologyFit(store, fit_folder))
        gathered = StatisticsPass(store)
        if file is not None:
            consumers.append(gathered)
        if consumers:
            run_training_pass(store, consumers, report)
        if file is not None:
            gathered.result().save(file)


def _quickstart(config: DataConfig, folder: Path, report: Report) -> Path:
    grid = parse_grid(config.grid) if config.grid is not None else None
    path = folder / quickstart.store_name(config.quickstart, grid)
    if not path.exists():
        with FileLock(lock_of(path)):
            if not path.exists():
                quickstart.build(config.quickstart, grid, path, report)
    return path


def _silent(title: str, fraction: float) -> None:
    """Nobody wants to know."""
