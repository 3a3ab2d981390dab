"""What must be on disk before the first batch: store, statistics and climatology."""

import dataclasses
import json
from pathlib import Path
from typing import final

from filelock import FileLock

from credit_dp.config import DataConfig
from credit_dp.data import quickstart
from credit_dp.data.cache import ProgressCallback, cache_folder, create_once, fingerprint, lock_path
from credit_dp.data.climatology import Climatology, ClimatologyFit, climatology_path
from credit_dp.data.grid import parse_grid
from credit_dp.data.limits import ValueRange, sampled_ranges
from credit_dp.data.statistics import (
    Pair,
    Statistics,
    StatisticsFile,
    StatisticsTable,
    add_window,
    check_statistics_range,
    empty_moments,
    input_description,
    merge_moments,
    statistics_path,
)
from credit_dp.data.statistics_given import load_given_statistics, load_or_compute_statistics
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates, all_pieces, stream_windows

TITLE = "statistics and climatology"


def run_training_pass(
    store: Store,
    dates: TrainingDates,
    fit: ClimatologyFit,
    measured: bool,
    report: ProgressCallback,
) -> StatisticsTable | None:
    """Fit the climatology; also the statistics of the same dates if they are to be `measured`.

    Raises:
        UserError: a field cannot be read, or is not as needed.
    """
    work = all_pieces(store, dates, fit.bands)
    total = sum(len(piece.channels) * (piece.stop - piece.first) for piece in work)
    done = 0
    found: list[list[Pair]] = []
    for piece in work:
        if piece.first == 0:
            fit.begin(piece.channels, piece.rows)
        pairs = empty_moments(piece)
        for window in stream_windows(store, dates, piece):
            fit.add(window)
            if measured:
                pairs = add_window(store, piece, window, pairs)
            done += len(piece.channels) * len(window.dates)
            report(TITLE, done / total)
        if piece.stop == len(dates.indices):
            fit.end()
        found.append(pairs)
    return merge_moments(store, work, found) if measured else None


RANGES_VERSION = "credit_dp ranges 1"  # of the definitions: a new one makes old files unused
SAMPLED_DATES = 16  # from which the ranges of unknown variables are taken


@final
@dataclasses.dataclass(frozen=True)
class TrainingData:
    """An open store and what is known of its training dates."""

    store: Store
    statistics: Statistics
    climatology: Climatology


def prepare_training_data(
    config: DataConfig, report: ProgressCallback | None = None
) -> TrainingData:
    """Make what is missing under `config.cache`, then open it. All ranks may call this at once.

    One process makes each part and the others wait for it; a second call finds all of it there.

    Args:
        report: called with what is being made and the fraction done, in the process that makes it.

    Raises:
        UserError: the store or the statistics are not as needed; see `Store.open`, `Statistics.of`
            and `load_given_statistics`.
    """
    tell = report or _no_progress
    folder = cache_folder(config.cache)
    store = Store.open(with_quickstart_store(config, tell))
    store = store.with_ranges(load_or_sample_ranges(store, folder))
    if config.statistics_files:
        statistics, every = load_given_statistics(store, folder, tell)
        return TrainingData(store, statistics, _load_or_fit_climatology(store, folder, every, tell))
    climatology = _load_or_fit_climatology(store, folder, 1, tell, with_statistics=True)
    found = load_or_compute_statistics(store, folder, 1, tell)
    files = f"{statistics_path(store, folder)} and {climatology_path(store, folder)}"
    check_statistics_range(found.channels, store, store.source.where, f"Remove {files}")
    statistics = Statistics.of(found.channels, store, config.store)
    return TrainingData(store, statistics, climatology)


def load_or_sample_ranges(store: Store, folder: Path) -> dict[str, ValueRange]:
    """The ranges of values that are sampled from the training dates, from the cache or made now.

    Args:
        folder: the cache.

    Raises:
        UserError: a field cannot be read.
    """
    channels = store.channels_without_range
    if not channels:
        return {}
    variables = list(dict.fromkeys(channel.variable for channel in channels))
    dates = store.config.dates.train
    name = fingerprint(RANGES_VERSION, store.description(variables), store.config.step, dates)
    path = folder / f"ranges-{name}.json"
    with create_once(path, lambda file: _read_ranges(file) is not None) as file:
        if file is not None:
            found: dict[str, ValueRange] = {}
            for group in store.source.group_by_chunk(channels):
                found |= sampled_ranges(store.sample(group, SAMPLED_DATES), group)
            file.write_text(json.dumps(found))
    return _read_ranges(path) or {}


def _read_ranges(path: Path) -> dict[str, ValueRange] | None:
    """What `load_or_sample_ranges` wrote; None if it is absent or damaged."""
    try:
        found = json.loads(path.read_text())
        return {name: ValueRange(float(low), float(high)) for name, (low, high) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def with_quickstart_store(config: DataConfig, report: ProgressCallback | None = None) -> DataConfig:
    """The config with the store that it is about: that of the quickstart is made if need be.

    Raises:
        UserError: the cache cannot be written.
    """
    if config.name != "quickstart":
        return config
    path = _build_quickstart(config, cache_folder(config.cache), report or _no_progress)
    return dataclasses.replace(config, store=str(path))


def _load_or_fit_climatology(
    store: Store, folder: Path, every: int, report: ProgressCallback, with_statistics: bool = False
) -> Climatology:
    """From the cache, or fitted to every N-th training date.

    `with_statistics`: those that are missing are computed in the same pass.
    """
    path = climatology_path(store, folder, every)
    found = Climatology.load(path, store.channels)
    if found is None:
        with create_once(
            path, lambda x: Climatology.load(x, store.channels) is not None
        ) as fit_folder:
            if fit_folder is not None:
                _fit_climatology(store, folder, fit_folder, every, report, with_statistics)
        found = Climatology.load(path, store.channels)
    if found is None:
        raise OSError(f"{path}: what was just written cannot be read back")
    return found


def _fit_climatology(
    store: Store,
    folder: Path,
    fit_folder: Path,
    every: int,
    report: ProgressCallback,
    measured: bool,
) -> None:
    dates = TrainingDates.of(store, every)
    fit = ClimatologyFit(store, dates, fit_folder)
    file = statistics_path(store, folder, every)
    measured = measured and StatisticsFile.load(file) is None
    table = run_training_pass(store, dates, fit, measured, report)
    if table is not None:
        Statistics.of(table, store, store.config.store)
        StatisticsFile(input_description(store, every), table).save(file)


def _build_quickstart(config: DataConfig, folder: Path, report: ProgressCallback) -> Path:
    grid = parse_grid(config.grid) if config.grid is not None else None
    path = folder / quickstart.store_name(config.quickstart, grid)
    if not path.exists():
        with FileLock(lock_path(path)):
            if not path.exists():
                quickstart.build(config.quickstart, grid, path, report)
    return path


def _no_progress(title: str, fraction: float) -> None:
    """Nobody wants to know."""
