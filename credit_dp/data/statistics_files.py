"""Statistics from the files of `data.statistics`, and from the cache.

A native file was written by `credit-dp data stats` and is used unchanged. External files (datasets
of mean, std and tendency std, as other projects publish them) may lack some statistics, which are
then computed from the training dates.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from credit_dp.data.cache import ProgressCallback, load_or_create
from credit_dp.data.channels import Channel
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.sources.address import (
    check_address,
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
)
from credit_dp.data.sources.datasets import dates_error, open_shared_netcdf
from credit_dp.data.sources.storage import open_current_group, open_zarr_store
from credit_dp.data.statistics import (
    IDENTITY_STATISTICS,
    Statistics,
    StatisticsFile,
    StatisticsRun,
    check_statistics_range,
    static_statistics,
    statistics_path,
)
from credit_dp.data.store import Store
from credit_dp.data.streaming import PieceWorkers, TrainingDates
from credit_dp.errors import UserError
from credit_dp.variable_names import all_names_of, long_name

SUFFIXES = {"mean": ("_mean", ""), "std": ("_std",), "tendency_std": ("_tendency_std",)}
# Statistics that a dataset needs for an output channel, by `normalise`; all of them for any other.
NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"none": (), "std": ("std",)})
SAMPLED_DATES = 500  # enough for the tendency std to better than a percent

logger = logging.getLogger(__name__)


class SampledStatistics(NamedTuple):
    """Statistics of every N-th training date, and that N."""

    statistics: Statistics
    every: int


def load_statistics_files(
    store: Store, folder: Path, progress: ProgressCallback, *, compute: bool = True
) -> SampledStatistics:
    """Read the files of `data.statistics` and compute what external files lack.

    Statistics of static fields are computed now. Others come from a sample of the training dates:
    tendency std, forcings, and statistics that a channel's normalisation does not need.

    Args:
        compute: whether what the cache lacks may be computed.

    Raises:
        NotComputedError: it may not be computed.
    """
    where = ", ".join(store.config.statistics_files)
    table = _read_and_check(store, where)
    if isinstance(table, SampledStatistics):
        return table
    _add_missing(
        table,
        store,
        where,
        lambda every: load_or_compute_statistics(store, folder, every, progress, compute=compute),
    )
    check_statistics_range(table, store, where, "Change data.statistics")  # of what was added
    return SampledStatistics(Statistics.of(table, store, where), 1)


def _add_missing(
    table: dict[str, dict[str, float]],
    store: Store,
    where: str,
    compute: Callable[[int], StatisticsFile],
) -> None:
    """Add to `table` the statistics that external files lack.

    Args:
        compute: returns the statistics of every N-th training date.
    """
    for name, row in static_statistics(store).items():
        if not {"mean", "std"} <= table.get(name, {}).keys():
            table[name] = row
    for name in (*store.channels.forcing, *store.channels.static):
        if name in table:
            table[name]["tendency_std"] = 0.0  # not used for inputs
            if store.config.variable_config(name).normalise == "none":
                table[name] = {**IDENTITY_STATISTICS, **table[name]}
    no_mean_or_std = [name for name, row in table.items() if not {"mean", "std"} <= row.keys()]
    no_tendency = [name for name, row in table.items() if "tendency_std" not in row]
    if not no_mean_or_std and not no_tendency:
        return
    every = sampling_stride(store)
    missing = ["no tendency std"] if no_tendency else []
    missing += [f"no mean or std of {', '.join(no_mean_or_std)}"] if no_mean_or_std else []
    description = " and ".join(missing)
    source_dates = "all training dates" if every == 1 else f"one in {every} training dates"
    logger.info("%s has %s: computed from %s", where, description, source_dates)
    computed = compute(every).channels
    for name in no_tendency:
        table[name]["tendency_std"] = computed[name]["tendency_std"]
    for name in no_mean_or_std:
        # Given values replace computed ones, unless they are NaN (which is not equal to itself).
        given = {statistic: value for statistic, value in table[name].items() if value == value}
        table[name] = {**computed[name], **given}


def check_statistics_files(store: Store) -> None:
    """Refuse files of `data.statistics` that don't fit the config, without computing anything."""
    _read_and_check(store, ", ".join(store.config.statistics_files))


def _read_and_check(store: Store, where: str) -> SampledStatistics | dict[str, dict[str, float]]:
    entries = store.config.statistics_files
    native = _load_native_file(entries)
    if native is not None:
        return _native_statistics(native, store, where)
    _check_untransformed(store, where)
    table = read_external_statistics(entries, store)
    check_statistics_range(table, store, where, "Change data.statistics")
    return table


def _load_native_file(entries: Sequence[str]) -> StatisticsFile | None:
    """Load a file that `credit-dp data stats` wrote; None if the entries are another kind."""
    if len(entries) != 1 or is_remote(entries[0]):
        return None
    path = local_path(entries[0])
    if not path.exists():
        raise UserError(f"{path.absolute()}: no such file. Change data.statistics.")
    return StatisticsFile.load(path)


def load_or_compute_statistics(
    store: Store, folder: Path, every: int, progress: ProgressCallback, *, compute: bool = True
) -> StatisticsFile:
    """Return the statistics of every N-th training date, from the cache or computed now.

    Raises:
        NotComputedError: the cache lacks them and they may not be computed.
    """

    def create(file: Path) -> None:
        with (
            closing(StatisticsRun(store, file, every)) as run,
            closing(PieceWorkers(store, run.dates, store.config.workers)) as workers,
        ):
            run.run(workers, lambda done: progress("statistics", done / run.num_fields))

    path = statistics_path(store, folder, every)
    return load_or_create(path, StatisticsFile.load, create, "statistics", compute)


def sampling_stride(store: Store) -> int:
    """Return N such that every N-th date gives the tendency std and covers all hours of the day."""
    dates = len(TrainingDates.of(store).indices)
    every = max(1, dates // SAMPLED_DATES)
    # Every 4th of 6-hourly dates, for one, would always be at the same hour of the day.
    while not covers_all_hours(every, store.config.step_hours):
        every -= 1
    return every


def covers_all_hours(every: int, step_hours: int) -> bool:
    """Whether every N-th date covers all hours of the day that the dates have."""
    return gcd(every * step_hours, 24) == gcd(step_hours, 24)


def _native_statistics(native: StatisticsFile, store: Store, where: str) -> SampledStatistics:
    native.check(store, where)
    check_statistics_range(native.channels, store, where, "Change data.statistics")
    if native.every > 1:
        logger.info(
            "%s has statistics of one in %d training dates; the climatology uses the same dates",
            where,
            native.every,
        )
    return SampledStatistics(Statistics.of(native.channels, store, where), native.every)


def _check_untransformed(store: Store, where: str) -> None:
    """Refuse external statistics for variables that the config transforms.

    External statistics are of untransformed values.
    """
    outputs = [channel.variable for channel in store.channels.output_channels]
    for name in dict.fromkeys([*outputs, *store.channels.forcing, *store.channels.static]):
        variable = store.config.variable_config(name)
        if variable.is_transformed:
            raise UserError(
                f"{where}: is of {name} as it is, but the config normalises it by "
                f"{variable.normalise}. "
                f"Change data.variables.{name}.normalise, or data.statistics to null."
            )


def read_external_statistics(entries: Sequence[str], store: Store) -> dict[str, dict[str, float]]:
    """Read the statistics of a store's channels from datasets, as far as they have them.

    Args:
        entries: one dataset, or those of mean, std and tendency std in this order.
        store: gives the channels; computed ones are left out.

    Returns:
        Statistics by channel name. A row lacks what the datasets lack; ranges are NaN.
    """
    if len(entries) > len(SUFFIXES):
        raise UserError(
            "data.statistics: needs one file, or those of mean, std and tendency std, got "
            f"{len(entries)}"
        )
    datasets = [_open_dataset(entry) for entry in entries]
    output_channels = store.channels.output_channels
    names = (*store.channels.forcing, *store.channels.static)
    inputs = [
        Channel(name)
        for name in names
        if name not in COMPUTED_FORCINGS and name not in COMPUTED_STATICS
    ]
    table = {}
    for channel in (*output_channels, *inputs):
        normalise = store.config.variable_config(channel.variable).normalise
        needed = (
            NEEDED.get(normalise, ("mean", "std", "tendency_std"))
            if channel in output_channels
            else ()
        )
        row = table[channel.name] = {"minimum": float("nan"), "maximum": float("nan")}
        for position, statistic in enumerate(SUFFIXES):
            value = _find_statistic(entries, datasets, channel, statistic, position)
            if value is not None:
                row[statistic] = value
            # Without a dataset of its own, a tendency std that is absent is computed later.
            elif statistic in needed and (
                statistic != "tendency_std" or len(entries) == len(SUFFIXES)
            ):
                raise UserError(
                    f"{entries[min(position, len(entries) - 1)]}: has no {statistic} of "
                    f"{channel.name}. Change data.statistics, to null for those of the training "
                    f"dates, or data.variables.{channel.variable}.normalise to none."
                )
    return table


def _find_statistic(
    entries: Sequence[str],
    datasets: Sequence[xr.Dataset],
    channel: Channel,
    statistic: str,
    position: int,
) -> float | None:
    """Return one statistic of a channel; None if the datasets do not have it.

    Args:
        channel: to look for, under its own, its long and its short name.
        position: of the statistic's dataset, if there are several.
    """
    single = len(datasets) == 1
    if not single and position >= len(datasets):
        return None
    dataset = datasets[0 if single else position]
    where = entries[0 if single else position]
    suffixes = SUFFIXES[statistic] if single else ("",)
    canonical, level = long_name(channel.variable, channel.level)
    long_channel = Channel(channel.variable, level)
    for name in dict.fromkeys([channel.variable, *all_names_of(canonical)]):
        for suffix in suffixes:
            array = dataset.get(name + suffix)
            if array is not None and not _is_other_variable(array, name, long_channel):
                wanted = channel if name == channel.variable else long_channel
                return _value_on_level(array, wanted, where)
    return None


def _is_other_variable(array: xr.DataArray, name: str, channel: Channel) -> bool:
    """Whether an array is on levels while the channel is a surface variable of the same short name.

    `z`, for one, is short for the geopotential and for that at the surface.
    """
    on_levels = any(dim in array.coords for dim in array.dims)
    return name != channel.variable and channel.level is None and on_levels


def _value_on_level(array: xr.DataArray, channel: Channel, where: str) -> float | None:
    """Return the value on the channel's level; None if the array lacks that level."""
    array = array.squeeze()
    if channel.level is None and not array.ndim:
        return _check_finite(float(array.values), channel, where)
    dim = str(array.dims[0]) if array.ndim == 1 else ""
    if channel.level is None or array.ndim > 1 or (dim and dim not in array.coords):
        raise UserError(
            f"{where}: {array.name} needs one value per level and a coordinate with the levels, "
            f"but has the dims {', '.join(map(str, array.dims)) or 'none'}. Change data.statistics."
        )
    levels = array[dim].values if dim else _scalar_level(array, where)
    if not np.issubdtype(levels.dtype, np.number):
        raise UserError(
            f"{where}: {array.name} has levels that are not numbers. Change data.statistics."
        )
    matches = np.flatnonzero(levels == channel.level)
    if not len(matches):
        return None
    return _check_finite(float(np.atleast_1d(array.values)[matches[0]]), channel, where)


def _scalar_level(array: xr.DataArray, where: str) -> np.ndarray[Any, Any]:
    for coordinate in array.coords.values():
        if np.issubdtype(coordinate.dtype, np.number) and not coordinate.ndim:
            return np.atleast_1d(coordinate.values)
    raise UserError(
        f"{where}: {array.name} has no coordinate with its level. Change data.statistics."
    )


def _check_finite(value: float, channel: Channel, where: str) -> float:
    if not np.isfinite(value):
        raise UserError(f"{where}: {channel.name} is {value}. Change data.statistics.")
    return value


def _open_dataset(where: str) -> xr.Dataset:
    """Open and load the dataset at a path or address."""
    check_address(where)
    open_dataset = partial(open_shared_netcdf, local_path(where))
    try:
        if not is_remote(where) and local_path(where).is_file():
            dataset = open_dataset()
        else:
            zarr_store = open_zarr_store(where)
            metadata = open_current_group(zarr_store, where).metadata
            consolidated = metadata.consolidated_metadata is not None
            open_dataset = partial(xr.open_zarr, zarr_store, chunks=None, consolidated=consolidated)
            dataset = open_dataset()
        # Loaded whole: statistics are small, and the file need not stay open.
        with dataset:
            loaded: xr.Dataset = dataset.load()
        return loaded
    except Exception as error:
        raise dates_error(where, open_dataset) or UserError(
            f"{redact_secrets(where)}: no statistics that can be read ({reason_of(error)}). "
            "Change data.statistics."
        ) from error
