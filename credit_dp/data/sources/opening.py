"""Opens whatever `data.store` names."""

import logging
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise

import numpy as np
import zarr

from credit_dp.config import DataConfig
from credit_dp.data.sources.address import (
    check_address,
    expand_pattern,
    is_remote,
    local_path,
    redact_secrets,
    zarr_open_error,
)
from credit_dp.data.sources.anemoi import AnemoiSource
from credit_dp.data.sources.base import Source
from credit_dp.data.sources.multi import FilesSource, JoinedSource
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE, PreparedSource
from credit_dp.data.sources.storage import open_zarr_store
from credit_dp.data.sources.zarr import GriddedSource, is_netcdf
from credit_dp.errors import UserError
from credit_dp.variable_names import STATIC_NAMES, canonical_name

logger = logging.getLogger(__name__)


def open_source(config: DataConfig) -> Source:
    """Open what `config.store` names, in whatever form it is.

    Several entries are joined: along time if none has a time of another, else by variables. Those
    without a time axis, or with one time beside stores of many, are stores of static fields, and so
    are those of nothing but what is known to be constant.

    Raises:
        UserError: there is nothing, nothing that can be read, or its coordinates are not as needed.
    """
    if not config.stores:
        raise UserError("data.store: needs the path of a zarr store, but is empty. Set it.")
    sources = [source for entry in config.stores for source in _open_entry(entry, config.static)]
    timed, timeless = _split_timeless(sources)
    if not timed:
        raise UserError(
            f"{redact_secrets(', '.join(config.stores))}: needs one-dimensional coordinates time, "
            "latitude and longitude, but time is missing. Change data.store, or add a store with "
            "times to it: static fields may be in a store of their own."
        )
    for one in timeless:
        if len(one.times):
            time = one.times[0].astype("M8[m]")
            logger.info("%s: its fields are static, those of %s", one.where, time)
    source = _join(timed, timeless, config)
    _log_names(source, config)
    return source


def open_single_source(where: str, static: Collection[str] = ()) -> Source:
    """Open the store at one path or address, in whatever form it is.

    Args:
        where: the path or address.
        static: names that are wanted as static fields, see `StoredNames.of`.

    Raises:
        UserError: there is none that can be read.
    """
    check_address(where)
    if is_netcdf(where):
        return GriddedSource.open(where, static)
    group = _open_group(where)
    if METADATA_ATTRIBUTE in group.attrs:
        return PreparedSource.open(where)
    if _is_anemoi(group):
        return AnemoiSource.open(where)
    return GriddedSource.open(where, static)


def _log_names(source: Source, config: DataConfig) -> None:
    """Say which variables of the config the store has under other names."""
    names = (*config.prognostic, *config.diagnostic, *config.forcing, *config.static)
    found = {name: source.variables[name].stored for name in names if name in source.variables}
    texts = [f"{name} from {stored}" for name, stored in found.items() if stored]
    if texts:
        logger.info("%s: reads %s", source.where, ", ".join(texts))


def _open_entry(entry: str, static: Collection[str]) -> list[Source]:
    """One store, or all that a pattern stands for: along time, one source of each kind."""
    sources = [open_single_source(where, static) for where in expand_pattern(entry)]
    if len(sources) == 1:
        return sources
    pattern = redact_secrets(entry)
    timed, timeless = _split_timeless(sources)
    kinds = [timed] if _follow_in_time(timed) else _group_by_variables(timed)
    _check_groups(kinds, pattern)
    whole = len(kinds) == 1
    return [*(_concat_in_time(kind, pattern if whole else "") for kind in kinds if kind), *timeless]


def _join(timed: Sequence[Source], timeless: Sequence[Source], config: DataConfig) -> Source:
    """All entries of `config.store` as one source."""
    if _follow_in_time(timed):
        sources = [_concat_in_time(timed, redact_secrets(", ".join(config.stores)))]
    else:
        sources = []
        for kind in _group_by_variables(timed):
            follow = _follow_in_time(kind)
            sources += [_concat_in_time(kind, "")] if follow else kind
    if len(sources) == 1 and not timeless:
        return sources[0]
    return JoinedSource(sources, timeless, config.static)


def _concat_in_time(sources: Sequence[Source], where: str) -> Source:
    if len(sources) == 1:
        return sources[0]
    first, *_, last = sorted(sources, key=lambda source: source.times[0])
    return FilesSource(sources, where or f"{first.where} to {last.where}")


def _split_timeless(sources: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """The stores with times, and those of static fields.

    These have no time axis, or nothing but known constants, or one time where others have many,
    unless they go on where stores of the same variables end.
    """
    with_times = [source for source in sources if len(source.times)]
    kinds = _group_by_variables([x for x in with_times if not _is_constant(x)] or with_times)
    most = max((sum(len(x.times) for x in kind) for kind in kinds), default=0)
    timed = []
    for kind in kinds:
        count = sum(len(x.times) for x in kind)
        spans = [(x.times[0], x.times[-1]) for x in kind if len(x.times) > 1]
        for source in kind:
            inside = any(first <= source.times[0] <= last for first, last in spans)
            if len(source.times) > 1 or not (inside or 1 == count < most):
                timed.append(source)
    ordered = [source for source in sources if source in timed]
    return ordered, [source for source in sources if source not in timed]


def _is_constant(source: Source) -> bool:
    """Whether all that changes in time, as far as the store says, is known not to."""
    return all(
        canonical_name(name) in STATIC_NAMES.values() and not levels
        for name, levels in _timed_variables(source)
    )


def _group_by_variables(sources: Sequence[Source]) -> list[list[Source]]:
    """The sources in groups with the same variables, on the same levels."""
    kinds: dict[object, list[Source]] = {}
    for source in sources:
        kinds.setdefault(_timed_variables(source), []).append(source)
    return list(kinds.values())


def _timed_variables(source: Source) -> frozenset[tuple[str, tuple[int, ...]]]:
    """What changes in time in a source: names and levels."""
    found = source.variables
    return frozenset((x, found[x].levels) for x in found if found[x].timed and not found[x].problem)


def _check_groups(kinds: Sequence[Sequence[Source]], pattern: str) -> None:
    """Refuse kinds of which it is not clear how they belong together.

    Raises:
        UserError: two have a variable in common, or no time.
    """
    for one, two in combinations(kinds, 2):
        same = {name for name, _ in _timed_variables(one[0]) & _timed_variables(two[0])}
        times = np.concatenate([source.times for source in one])
        if same or not any(np.isin(source.times, times).any() for source in two):
            why = f"both have {min(same)}" if same else "have no time in common"
            raise UserError(
                f"{pattern}: stands for stores with different variables at the same times, but "
                f"{one[0].where} and {two[0].where} {why}. Give one pattern for each kind, as in "
                "'data.store=[era5_pl_*.nc,era5_sfc_*.nc]'."
            )


def _open_group(where: str) -> zarr.Group:
    """The zarr group at a path or address."""
    if not is_remote(where) and local_path(where).is_file():
        raise UserError(
            f"{where}: is a file, but not a netCDF file by its name (.nc). Set data.store to a "
            "zarr store or to a netCDF file."
        )
    disk = open_zarr_store(where)
    try:
        return zarr.open_group(disk, mode="r")
    except Exception as error:
        raise zarr_open_error(where, error) from error


def _is_anemoi(group: zarr.Group) -> bool:
    data = group.get("data")
    return isinstance(data, zarr.Array) and data.ndim == 4 and "dates" in group


def _follow_in_time(sources: Sequence[Source]) -> bool:
    ordered = sorted(sources, key=lambda source: source.times[0])
    return all(later.times[0] > earlier.times[-1] for earlier, later in pairwise(ordered))
