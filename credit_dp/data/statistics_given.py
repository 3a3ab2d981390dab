"""Statistics that `data.statistics` names, whoever computed them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
import zarr

from credit_dp.data.cache import ProgressCallback, create_once
from credit_dp.data.channels import Channel
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.sources.address import (
    check_address,
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
)
from credit_dp.data.sources.storage import open_zarr_store
from credit_dp.data.sources.zarr import no_garbage_collection
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
from credit_dp.data.streaming import ThreadWorkers, TrainingDates
from credit_dp.errors import UserError
from credit_dp.variable_names import all_names_of, long_name

SUFFIXES = {"mean": ("_mean", ""), "std": ("_std",), "tendency_std": ("_tendency_std",)}
# What a dataset has to have of a channel that comes out, by `normalise`; all of it for any other.
NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"none": (), "std": ("std",)})


def read_external_statistics(entries: Sequence[str], store: Store) -> dict[str, dict[str, float]]:
    """The statistics of the store's stored channels, as far as the datasets have them.

    A row lacks what no dataset says of its channel; a range, which none of them has, is NaN.

    Raises:
        UserError: a dataset can't be read, or a channel that comes out can't be normalised as the
            config wants it without what a dataset lacks.
    """
    if len(entries) > len(SUFFIXES):
        raise UserError(
            "data.statistics: needs one file, or those of mean, std and tendency std, got "
            f"{len(entries)}"
        )
    datasets = [_open_dataset(entry) for entry in entries]
    out = store.channels.output_channels
    names = (*store.channels.forcing, *store.channels.static)
    inputs = [Channel(x) for x in names if x not in COMPUTED_FORCINGS and x not in COMPUTED_STATICS]
    table = {}
    for channel in (*out, *inputs):
        normalise = store.config.of(channel.variable).normalise
        needed = NEEDED.get(normalise, ("mean", "std", "tendency_std")) if channel in out else ()
        row = table[channel.name] = {"minimum": float("nan"), "maximum": float("nan")}
        for place, number in enumerate(SUFFIXES):
            value = _find_statistic(entries, datasets, channel, number, place)
            if value is not None:
                row[number] = value
            elif number in needed and (number != "tendency_std" or len(entries) == len(SUFFIXES)):
                raise UserError(
                    f"{entries[min(place, len(entries) - 1)]}: has no {number} of {channel.name}. "
                    "Change data.statistics, to null for those of the training dates, or "
                    f"data.variables.{channel.variable}.normalise to none."
                )
    return table


def _find_statistic(
    entries: Sequence[str],
    datasets: Sequence[xr.Dataset],
    channel: Channel,
    number: str,
    place: int,
) -> float | None:
    """One number of a channel; None if the datasets do not have it."""
    alone = len(datasets) == 1
    if not alone and place >= len(datasets):
        return None
    dataset = datasets[0 if alone else place]
    where = entries[0 if alone else place]
    suffixes = SUFFIXES[number] if alone else ("",)
    long, level = long_name(channel.variable, channel.level)
    one = Channel(channel.variable, level)
    for name in dict.fromkeys([channel.variable, *all_names_of(long)]):
        for suffix in suffixes:
            flat = {f"{name}{level}{suffix}", f"{name}_{level}{suffix}"}
            for found in sorted(flat & set(map(str, dataset))):
                return _value_on_level(dataset[found], Channel(channel.variable), where)
            array = dataset.get(name + suffix)
            if array is not None and not _is_other_variable(array, name, one):
                return _value_on_level(array, channel if name == channel.variable else one, where)
    return None


def _is_other_variable(array: xr.DataArray, name: str, channel: Channel) -> bool:
    """Whether a short name stands for a variable on levels, where one off them is asked for.

    `z` is the geopotential, or that at the surface.
    """
    on_levels = any(dim in array.coords for dim in array.dims)
    return name != channel.variable and channel.level is None and on_levels


def _value_on_level(array: xr.DataArray, channel: Channel, where: str) -> float | None:
    """The number of the channel's level; None if that level is not there."""
    array = array.squeeze()
    if channel.level is None and not array.ndim:
        return _check_finite(float(array.values), channel, where)
    dim = str(array.dims[0]) if array.ndim == 1 else ""
    if channel.level is None or array.ndim > 1 or (dim and dim not in array.coords):
        raise UserError(
            f"{where}: {array.name} needs to be a number for each level, with the levels' values, "
            f"but has the dims {', '.join(map(str, array.dims)) or 'none'}. Change data.statistics."
        )
    levels = array[dim].values if dim else _scalar_level(array, where)
    if not np.issubdtype(levels.dtype, np.number):
        raise UserError(
            f"{where}: {array.name} has levels that are no numbers. Change data.statistics."
        )
    places = np.flatnonzero(levels == channel.level)
    if not len(places):
        return None
    return _check_finite(float(np.atleast_1d(array.values)[places[0]]), channel, where)


def _scalar_level(array: xr.DataArray, where: str) -> np.ndarray[Any, Any]:
    """The level of a variable that has one only."""
    for coordinate in array.coords.values():
        if np.issubdtype(coordinate.dtype, np.number) and not coordinate.ndim:
            return np.atleast_1d(coordinate.values)
    raise UserError(
        f"{where}: {array.name} does not say of which level it is. Change data.statistics."
    )


def _check_finite(value: float, channel: Channel, where: str) -> float:
    if not np.isfinite(value):
        raise UserError(f"{where}: {channel.name} is {value}. Change data.statistics.")
    return value


def _open_dataset(where: str) -> xr.Dataset:
    """The dataset at a path or address.

    Raises:
        UserError: there is none that can be read.
    """
    check_address(where)
    try:
        if not is_remote(where) and local_path(where).is_file():
            with no_garbage_collection():
                dataset = xr.open_dataset(local_path(where), engine="netcdf4")
        else:
            disk = open_zarr_store(where)
            metadata = zarr.open_group(disk, mode="r").metadata
            consolidated = metadata.consolidated_metadata is not None
            dataset = xr.open_zarr(disk, chunks=None, consolidated=consolidated)
        with dataset:
            loaded: xr.Dataset = dataset.load()
        return loaded
    except Exception as error:
        raise UserError(
            f"{redact_secrets(where)}: no statistics that can be read ({reason_of(error)}). "
            "Change data.statistics."
        ) from error


SAMPLED_DATES = 500  # dates that determine the tendency std to better than a percent

logger = logging.getLogger(__name__)


class GivenStatistics(NamedTuple):
    """Statistics, and of which training dates they are: every N-th."""

    statistics: Statistics
    every: int


def load_given_statistics(store: Store, folder: Path, report: ProgressCallback) -> GivenStatistics:
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
    own = _load_native_file(entries)
    if own is not None:
        return _native_statistics(own, store, where)
    _check_untransformed(store, where)
    table = read_external_statistics(entries, store)
    check_statistics_range(table, store, where, "Change data.statistics")
    _add_missing(
        table, store, where, lambda every: load_or_compute_statistics(store, folder, every, report)
    )
    return GivenStatistics(Statistics.of(table, store, where), 1)


def _add_missing(
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
    for name, row in static_statistics(store).items():
        if not {"mean", "std"} <= table.get(name, {}).keys():
            table[name] = row
    for name in (*store.channels.forcing, *store.channels.static):
        if name in table:
            table[name]["tendency_std"] = 0.0  # nobody uses that of an input
            if store.config.of(name).normalise == "none":
                table[name] = {**IDENTITY_STATISTICS, **table[name]}
    values = [name for name, row in table.items() if not {"mean", "std"} <= row.keys()]
    changes = [name for name, row in table.items() if "tendency_std" not in row]
    if not values and not changes:
        return
    every = sampling_stride(store)
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


def check_given_statistics(store: Store) -> None:
    """Refuse files of `data.statistics` that don't fit; what they lack is not computed.

    Raises:
        UserError: see `load_given_statistics`.
    """
    entries = store.config.statistics_files
    own = _load_native_file(entries)
    if own is not None:
        _native_statistics(own, store, ", ".join(entries))
    else:
        where = ", ".join(entries)
        _check_untransformed(store, where)
        check_statistics_range(
            read_external_statistics(entries, store), store, where, "Change data.statistics"
        )


def _load_native_file(entries: Sequence[str]) -> StatisticsFile | None:
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


def load_or_compute_statistics(
    store: Store, folder: Path, every: int, report: ProgressCallback
) -> StatisticsFile:
    """Those of every N-th training date, from the cache or computed now."""
    path = statistics_path(store, folder, every)
    with create_once(path, lambda file: StatisticsFile.load(file) is not None) as file:
        if file is not None:
            with closing(StatisticsRun(store, file, every)) as run:
                done = _fraction_callback(run.fields, report)
                run.run(ThreadWorkers(store, run.dates, store.config.workers), done)
    found = StatisticsFile.load(path)
    if found is None:
        raise OSError(f"{path}: what was just written cannot be read back")
    return found


def sampling_stride(store: Store) -> int:
    """Of which N every N-th date is enough for the tendency std, and meets all hours of the day."""
    dates = len(TrainingDates.of(store).indices)
    every = max(1, dates // SAMPLED_DATES)
    while not covers_all_hours(every, store.config.step_hours):
        every -= 1
    return every


def covers_all_hours(every: int, step_hours: int) -> bool:
    """Whether every N-th date meets all hours of the day that the dates have."""
    return gcd(every * step_hours, 24) == gcd(step_hours, 24)


def _native_statistics(found: StatisticsFile, store: Store, where: str) -> GivenStatistics:
    found.check(store, where)
    check_statistics_range(found.channels, store, where, "Change data.statistics")
    if found.every > 1:
        logger.info(
            "%s is of one in %d training dates, and so is the climatology", where, found.every
        )
    return GivenStatistics(Statistics.of(found.channels, store, where), found.every)


def _check_untransformed(store: Store, where: str) -> None:
    """Statistics by others are of values as they are."""
    out = [channel.variable for channel in store.channels.output_channels]
    for name in dict.fromkeys([*out, *store.channels.forcing, *store.channels.static]):
        normalise = store.config.of(name).normalise
        if normalise.startswith("log1p"):
            raise UserError(
                f"{where}: is of {name} as it is, but the config normalises it by {normalise}. "
                f"Change data.variables.{name}.normalise, or data.statistics to null."
            )


def _fraction_callback(total: int, report: ProgressCallback) -> Callable[[int], None]:
    return lambda done: report("statistics", done / total)
