"""Opens what `data.store` names: one store, several, or patterns of files.

1. Every entry is expanded (`expand_pattern`), and each address is opened by the class for its
   format (`open_single_source`), and regridded if `data.grid` is another grid (`regridded`).
2. Stores without times hold static fields; they are set apart (`_split_timeless`).
3. Stores that follow each other in time become one `FilesSource`; stores with different variables
   become one `JoinedSource` (`_join`); both are in `combined.py`.
"""

import logging
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise

import numpy as np
import zarr

from credit_dp.config import DataConfig
from credit_dp.data.calendar import GREGORIAN
from credit_dp.data.sources.address import (
    check_address,
    expand_pattern,
    is_remote,
    local_path,
    redact_secrets,
    zarr_open_error,
)
from credit_dp.data.sources.anemoi import AnemoiSource
from credit_dp.data.sources.combined import FilesSource, JoinedSource
from credit_dp.data.sources.datasets import is_netcdf
from credit_dp.data.sources.grib_file import is_grib
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE, PreparedSource
from credit_dp.data.sources.regridded import regridded
from credit_dp.data.sources.source import Source, describe_members, describe_sums, with_model_levels
from credit_dp.data.sources.storage import open_zarr_store
from credit_dp.data.sources.virtual import is_reference
from credit_dp.data.units import is_accumulated
from credit_dp.errors import UserError
from credit_dp.variable_names import STATIC_NAMES, canonical_name

logger = logging.getLogger(__name__)


def open_source(config: DataConfig) -> Source:
    """Open what `config.store` names as one source, whatever its format.

    Several entries are joined: along time if their times don't overlap, otherwise by variables.
    A store is static if it has no time axis, if it has one time and other stores have many, or if
    all its variables are known to be constant.
    """
    if not config.stores:
        raise UserError("data.store: needs the path of a zarr store, but is empty. Set it.")
    sources = [source for entry in config.stores for source in _open_entry(entry, config)]
    _agree_on_calendar(sources)
    timed, timeless = _split_timeless(sources)
    if not timed:
        raise UserError(
            f"{redact_secrets(config.where)}: needs one-dimensional coordinates time, "
            "latitude and longitude, but time is missing. Change data.store, or add a store with "
            "times to it: static fields may be in a store of their own."
        )
    for source in timeless:
        if len(source.times):
            date = source.calendar.text(source.times[0])
            logger.info("%s: its fields at %s are used as static fields", source.where, date)
    source = _join(timed, timeless, config)
    if config.hybrid:
        source.variables = with_model_levels(source.variables)
    _log_names(source, config)
    _log_assumed_sums(source, config)
    return _with_members(source, config)


def _with_members(source: Source, config: DataConfig) -> Source:
    """Return the source with the members of `data.member`; with all if it is null."""
    if config.member is None:
        return source
    numbers = config.member if isinstance(config.member, list) else [config.member]
    absent = [number for number in numbers if number not in source.members]
    if absent:
        remedy = "Choose some of these" if source.members else "Set it to null"
        raise UserError(
            f"data.member: needs members of {source.where}, which has "
            f"{describe_members(source.members)}, got {absent[0]}. {remedy}."
        )
    return source.of_members(numbers)


def open_single_source(where: str, static: Collection[str] = ()) -> Source:
    """Open the store at one path or address, whatever its format.

    Args:
        static: names that are used as static fields, see `StoredNames.of`.
    """
    check_address(where)
    if is_netcdf(where):
        return GriddedSource.open(where, static)
    group = _open_group(where)
    # Only prepared stores have this attribute; everything unknown is taken for a gridded store,
    # whose error messages say what is missing.
    if METADATA_ATTRIBUTE in group.attrs:
        return PreparedSource.open(where)
    if _is_anemoi(group):
        return AnemoiSource.open(where)
    return GriddedSource.open(where, static)


def _log_names(source: Source, config: DataConfig) -> None:
    names = (*config.prognostic, *config.diagnostic, *config.forcing, *config.static)
    stored_names = {
        name: source.variables[name].stored_name for name in names if name in source.variables
    }
    texts = [
        f"{name} from {stored_name}" for name, stored_name in stored_names.items() if stored_name
    ]
    if texts:
        logger.info("%s: reads %s", source.where, ", ".join(texts))


def _log_assumed_sums(source: Source, config: DataConfig) -> None:
    """Log which sums are assumed to cover the time since the previous one, as nothing says it."""
    names_by_sums: dict[str, list[str]] = {}
    for name in (*config.prognostic, *config.diagnostic, *config.forcing):
        variable = source.variables.get(name)
        is_known = config.variable_config(name).accumulated is None and is_accumulated(name, config)
        if not is_known or variable is None or variable.problem or not variable.has_time:
            continue
        bounds = source.sum_bounds(name)
        if not variable.sums_stated_by and not (bounds[:, 0] == bounds[:, 1]).any():
            names_by_sums.setdefault(describe_sums(bounds), []).append(name)
    texts = [f"{' and '.join(names)} to be {sums}" for sums, names in names_by_sums.items()]
    if texts:
        logger.info(
            "%s: assumes %s, as their times are that far apart and no cell_methods, time bounds or "
            "GRIB steps say what they are; if that is wrong, see data.variables.NAME.accumulated",
            source.where,
            ", ".join(texts),
        )


def _open_entry(entry: str, config: DataConfig) -> list[Source]:
    """Open one entry of `data.store`; the files of a pattern become one source per group.

    A group has the same variables on the same levels, and is concatenated in time.
    """
    sources = [x for where in expand_pattern(entry) for x in _open_address(where, config)]
    if len(sources) == 1:
        return sources
    _agree_on_calendar(sources)
    pattern = redact_secrets(entry)
    timed, timeless = _split_timeless(sources)
    groups = [timed] if _follow_in_time(timed) else _group_by_variables(timed)
    _check_groups(groups, pattern)
    is_one_group = len(groups) == 1
    return [
        *(_concat_in_time(group, pattern if is_one_group else "") for group in groups if group),
        *timeless,
    ]


def _open_address(where: str, config: DataConfig) -> Sequence[Source]:
    """Open the store at an address, on `data.grid`; a GRIB file becomes a source per variable."""
    check_address(where)
    sources: Sequence[Source]
    if not is_remote(where) and local_path(where).is_file() and is_grib(local_path(where)):
        sources = GriddedSource.open_grib(where, config.static)
    else:
        sources = [open_single_source(where, config.static)]
    return [regridded(source, config) for source in sources]


def _join(timed: Sequence[Source], timeless: Sequence[Source], config: DataConfig) -> Source:
    if _follow_in_time(timed):
        sources = [_concat_in_time(timed, redact_secrets(config.where))]
    else:
        sources = []
        for group in _group_by_variables(timed):
            # Stores that overlap in time stay apart: a variable is read from the first one.
            is_sequence = _follow_in_time(group)
            sources += [_concat_in_time(group, "")] if is_sequence else group
    if len(sources) == 1 and not timeless:
        return sources[0]
    return JoinedSource(sources, timeless, config.static)


def _concat_in_time(sources: Sequence[Source], where: str) -> Source:
    if len(sources) == 1:
        return sources[0]
    first, *_, last = sorted(sources, key=lambda source: source.times[0])
    return FilesSource(sources, where or f"{first.where} to {last.where}")


def _agree_on_calendar(sources: Sequence[Source]) -> None:
    """Refuse stores in different calendars: a time would not be the same date in all of them.

    Dates of the standard calendar are also those of the calendar that a store beyond 2262 has.
    """
    timed = [source for source in sources if len(source.times)]
    others = {x.calendar for x in timed if not x.calendar.is_standard}
    if len(others) == 1 and {x.name for x in others} < {*GREGORIAN}:
        for source in timed:
            source.set_calendar(*others)
    for first, other in pairwise(timed):
        if other.calendar != first.calendar:
            raise UserError(
                f"{other.where}: has dates of the {other.calendar.name} calendar, but "
                f"{first.where} of the {first.calendar.name} calendar. Change data.store to stores "
                "of one calendar."
            )


def _split_timeless(sources: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """Split sources into two lists: with times, and with static fields.

    A source is static if it has no time axis or nothing but known constants, or if it has one time
    where other groups have many. A single time that follows the others of its own group is not
    static: it continues their series.
    """
    with_times = [source for source in sources if len(source.times)]
    # Stores of nothing but constants are static, unless there are no others.
    groups = _group_by_variables([x for x in with_times if not _is_constant(x)] or with_times)
    max_times = max((sum(len(x.times) for x in group) for group in groups), default=0)
    timed = []
    for group in groups:
        count = sum(len(x.times) for x in group)
        # A single time within the series of others of its group can't continue it.
        spans = [(x.times[0], x.times[-1]) for x in group if len(x.times) > 1]
        for source in group:
            inside = any(first <= source.times[0] <= last for first, last in spans)
            if len(source.times) > 1 or not (inside or 1 == count < max_times):
                timed.append(source)
    ordered = [source for source in sources if source in timed]
    return ordered, [source for source in sources if source not in timed]


def _is_constant(source: Source) -> bool:
    return all(
        canonical_name(name) in STATIC_NAMES.values() and not levels
        for name, levels in _timed_variables(source)
    )


def _group_by_variables(sources: Sequence[Source]) -> list[list[Source]]:
    """Group sources that have the same variables on the same levels."""
    groups: dict[object, list[Source]] = {}
    for source in sources:
        groups.setdefault(_timed_variables(source), []).append(source)
    return list(groups.values())


def _timed_variables(source: Source) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Return names and levels of the readable variables that change in time."""
    variables = source.variables
    return frozenset(
        (name, variables[name].levels)
        for name in variables
        if variables[name].has_time and not variables[name].problem
    )


def _check_groups(groups: Sequence[Sequence[Source]], pattern: str) -> None:
    """Refuse groups of files of one pattern if it is ambiguous how they belong together."""
    for first, second in combinations(groups, 2):
        shared = {name for name, _ in _timed_variables(first[0]) & _timed_variables(second[0])}
        times = np.concatenate([source.times for source in first])
        if shared or not any(np.isin(source.times, times).any() for source in second):
            conflict = f"both have {min(shared)}" if shared else "have no time in common"
            raise UserError(
                f"{pattern}: matches stores with different variables at the same times, but "
                f"{first[0].where} and {second[0].where} {conflict}. Give one pattern for each "
                "kind, as in 'data.store=[era5_pl_*.nc,era5_sfc_*.nc]'."
            )


def _open_group(where: str) -> zarr.Group:
    if not is_remote(where) and local_path(where).is_file() and not is_reference(where):
        raise UserError(
            f"{where}: is a file, but neither GRIB nor netCDF. Set data.store to a zarr "
            "store or to such a file."
        )
    # Opened only to see the format: the source opens it again.
    store = open_zarr_store(where)
    try:
        return zarr.open_group(store, mode="r")
    except Exception as error:
        raise zarr_open_error(where, error) from error


def _is_anemoi(group: zarr.Group) -> bool:
    data = group.get("data")
    return isinstance(data, zarr.Array) and data.ndim == 4 and "dates" in group


def _follow_in_time(sources: Sequence[Source]) -> bool:
    ordered = sorted(sources, key=lambda source: source.times[0])
    return all(later.times[0] > earlier.times[-1] for earlier, later in pairwise(ordered))
