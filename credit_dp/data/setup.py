"""Prepare the data of a run: store, statistics and climatology, all on disk before the first batch.

`prepare_training_data` does so in order: it opens the store (and builds the quickstart's first),
finds the points without values, fits the climatology and computes the statistics, if they are not
in the cache. Climatology and statistics share one pass over the training dates.

Commands that plan or check a run use `expected_data` and `quickstart_times` instead, which need no
prepared data: the quickstart store need not exist yet.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from credit_dp.config import DataConfig
from credit_dp.config.data import SPLITS
from credit_dp.data import quickstart
from credit_dp.data.cache import (
    ProgressCallback,
    cache_folder,
    check_may_compute,
    load_or_create,
    lock_cached,
)
from credit_dp.data.calendar import STANDARD, Calendar, Times
from credit_dp.data.channels import Channels, expand_channels, suggest_names
from credit_dp.data.climatology import Climatology, ClimatologyFit, climatology_path
from credit_dp.data.dates import TimesNeeded, resolve_dates, split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import Grid, parse_grid
from credit_dp.data.masks import with_masks
from credit_dp.data.quickstart.dataset import (
    LEVEL_VARIABLES,
    STATIC_VARIABLES,
    SURFACE_VARIABLES,
    plan_runs,
)
from credit_dp.data.quickstart.dynamics import LEVELS
from credit_dp.data.selection import (
    check_hybrid,
    check_variable_keys,
    correct_or_leave_out,
    data_step_indices,
)
from credit_dp.data.statistics import (
    MomentsTable,
    Statistics,
    StatisticsFile,
    StatisticsTable,
    add_moments,
    add_window,
    check_statistics_range,
    input_description,
    moments_to_statistics,
    statistics_path,
)
from credit_dp.data.statistics_files import load_or_compute_statistics, load_statistics_files
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates, all_pieces, stream_windows
from credit_dp.data.transforms import sample_quantiles
from credit_dp.errors import UserError
from credit_dp.fields import GridShape

TITLE = "statistics and climatology"


@final
@dataclasses.dataclass(frozen=True)
class TrainingData:
    """An open store with the statistics and the climatology of its training dates."""

    store: Store
    statistics: Statistics
    climatology: Climatology


def prepare_training_data(
    config: DataConfig,
    progress: ProgressCallback | None = None,
    check: Callable[[Store], object] | None = None,
    *,
    compute: bool = True,
) -> TrainingData:
    """Create what is missing under `config.cache`, then open everything.

    All ranks may call this at once: one process creates each part and the others wait for it.

    Args:
        progress: called in the process that creates a part, with its title and the fraction done.
        check: called with the open store, before anything is computed from it.
        compute: whether missing parts are created; otherwise the first one is refused.

    Raises:
        UserError: store or statistics don't fit the config; see `Store.open`, `Store.check_static`,
            `Statistics.of` and `load_statistics_files`.
        NotComputedError: a part is missing and may not be created.
    """
    progress = progress or _no_progress
    folder = cache_folder(config.cache)
    store = Store.open(with_quickstart_store(config, progress, compute=compute))
    store.check_static()
    if check is not None:
        check(store)
    store = with_masks(store, folder, progress, compute=compute)
    if config.statistics_files:
        statistics, every = load_statistics_files(store, folder, progress, compute=compute)
        climatology = load_or_fit_climatology(store, folder, every, progress, compute=compute)
        return TrainingData(store, statistics, climatology)
    climatology = load_or_fit_climatology(
        store, folder, 1, progress, with_statistics=True, compute=compute
    )
    file = load_or_compute_statistics(store, folder, 1, progress, compute=compute)
    paths = f"{statistics_path(store, folder)} and {climatology_path(store, folder)}"
    check_statistics_range(file.channels, store, store.source.where, f"Remove {paths}")
    statistics = Statistics.of(file.channels, store, config.store)
    return TrainingData(store, statistics, climatology)


def _run_training_pass(
    store: Store,
    dates: TrainingDates,
    fit: ClimatologyFit,
    with_statistics: bool,
    progress: ProgressCallback,
) -> StatisticsTable | None:
    pieces = all_pieces(store, dates, fit.bands)
    quantiles = sample_quantiles(store, dates) if with_statistics else {}
    total = sum(len(piece.channels) * (piece.stop - piece.first) for piece in pieces)
    done = 0
    moments: MomentsTable = {}
    for piece in pieces:
        # The pieces of one group of channels and band follow each other: the fit sums over them.
        if piece.first == piece.member == 0:
            fit.begin(piece.channels, piece.rows)
        more: MomentsTable = {}
        for window in stream_windows(store, dates, piece):
            fit.add(window)
            if with_statistics:
                add_window(more, store, piece, window, quantiles)
            done += len(piece.channels) * len(window.dates)
            progress(TITLE, done / total)
        if piece.stop == len(dates.indices) and piece.member == store.num_members - 1:
            fit.end()
        add_moments(moments, more)
    return moments_to_statistics(store, moments, quantiles) if with_statistics else None


def with_quickstart_store(
    config: DataConfig, progress: ProgressCallback | None = None, *, compute: bool = True
) -> DataConfig:
    """Return the config with the path of its store; build the quickstart's store if it is missing.

    Raises:
        NotComputedError: see `prepare_training_data`.
    """
    if config.name != "quickstart":
        return config
    folder = cache_folder(config.cache)
    path = _build_quickstart(config, folder, progress or _no_progress, compute)
    return dataclasses.replace(config, store=str(path))


def _build_quickstart(
    config: DataConfig, folder: Path, progress: ProgressCallback, compute: bool
) -> Path:
    grid = parse_grid(config.grid) if config.grid is not None else None
    path = folder / quickstart.store_name(config.quickstart, grid)
    if not path.exists():
        check_may_compute(compute, "store", folder)
        with lock_cached(path):
            # Another process may have built it while this one waited for the lock.
            if not path.exists():
                quickstart.build(config.quickstart, grid, path, progress)
    return path


def load_or_fit_climatology(
    store: Store,
    folder: Path,
    every: int,
    progress: ProgressCallback,
    with_statistics: bool = False,
    *,
    compute: bool = True,
) -> Climatology:
    """Return the climatology, from the cache or fitted to every N-th training date.

    With `with_statistics`, missing statistics are computed in the same pass.

    Raises:
        NotComputedError: it is missing, and `compute` is False.
    """
    path = climatology_path(store, folder, every)

    def create(new: Path) -> None:
        dates = TrainingDates.of(store, every)
        file = statistics_path(store, folder, every)
        lacks_statistics = with_statistics and StatisticsFile.load(file) is None
        if lacks_statistics:
            dates.check_pairs(store, every)
        fit = ClimatologyFit(store, dates, new)
        table = _run_training_pass(store, dates, fit, lacks_statistics, progress)
        if table is not None:
            # Raises if a channel is constant, before such statistics get into the cache.
            Statistics.of(table, store, store.config.store)
            StatisticsFile(input_description(store, every), table).save(file)

    load = partial(Climatology.load, channels=store.channels, calendar=store.calendar)
    return load_or_create(path, load, create, "climatology", compute)


def _no_progress(title: str, fraction: float) -> None:
    """Ignore progress."""


def open_on_own_grid(config: DataConfig) -> Store:
    """Open a user's store for what it has on any grid, whatever `data.grid` says."""
    return Store.open(config.on_grid(None))


@final
class ExpectedData(NamedTuple):
    """The channels of a run and its grid; whether that is a region is known from the store."""

    channels: Channels
    grid: Grid | GridShape


def expected_data(config: DataConfig) -> ExpectedData:
    """Return what a model has to know of the data. A user's store is opened, the quickstart's not.

    The grid is the first of `data.grid`, the store's and the quickstart's. The config's levels are
    not checked against the quickstart's, so a plan may use those of ERA5.

    Raises:
        UserError: a variable does not exist, the store does not fit the config, or the grid is too
            small.
    """
    if config.name == "quickstart":
        return ExpectedData(_quickstart_channels(config), GridShape(quickstart_grid(config)))
    store = open_on_own_grid(config)
    own, shape = store.grid, None if config.grid is None else parse_grid(config.grid)
    if shape is None or own == shape:
        return ExpectedData(store.channels, own)
    return ExpectedData(store.channels, GridShape(shape, own.is_global, own.is_periodic))


def _quickstart_channels(config: DataConfig) -> Channels:
    timed = {**LEVEL_VARIABLES, **SURFACE_VARIABLES}
    _check_names(config, "prognostic", timed)
    _check_names(config, "diagnostic", timed)
    _check_names(config, "forcing", COMPUTED_FORCINGS)
    _check_names(config, "static", {*STATIC_VARIABLES, *COMPUTED_STATICS})
    check_variable_keys(config)
    levels = LEVELS if config.levels is None else config.levels
    channels = Channels(
        prognostic=tuple(expand_channels(config.prognostic, set(LEVEL_VARIABLES), levels)),
        forcing=tuple(config.forcing),
        static=tuple(config.static),
        diagnostic=tuple(expand_channels(config.diagnostic, set(LEVEL_VARIABLES), levels)),
    )
    check_hybrid(config, channels)
    return channels


@final
@dataclass
class QuickstartTimes:
    """The times of a quickstart store on the config's step, known before the store exists."""

    config: DataConfig
    times: Times
    calendar: Calendar = STANDARD
    num_members: int = 1


def quickstart_times(
    config: DataConfig, needed: Mapping[str, TimesNeeded] | None = None
) -> QuickstartTimes:
    """Return the times of the quickstart store and a config whose dates are among them."""
    times = np.concatenate([run.times for run in plan_runs(config.quickstart)]).astype("M8[ns]")
    # As `Store.open` does: times on the step, then dates that are `auto`, then all splits.
    times = times[data_step_indices(times, config, config.name)]
    config = replace(config, store=config.name)  # the name in error messages
    if config.dates.undetermined:
        config = replace(config, dates=resolve_dates(config, times, needed).dates)
    for split in SPLITS:
        split_slice(config, split, times)
    return QuickstartTimes(config, times)


def quickstart_grid(config: DataConfig) -> tuple[int, int]:
    """Return rows and columns of `data.grid`, or the quickstart's default.

    Raises:
        UserError: the grid is too small.
    """
    return config.quickstart.grid_or_default(
        None if config.grid is None else parse_grid(config.grid)
    )


def _check_names(config: DataConfig, role: str, known: Collection[str]) -> None:
    absent = [name for name in getattr(config, role) if name not in known]
    if absent:
        raise UserError(
            f"data.{role}: the quickstart climate has no variable {absent[0]}. "
            f"{suggest_names(absent[0], known)}. {correct_or_leave_out(config, {role: absent})}"
        )
