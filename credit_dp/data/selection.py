"""The channels and the times that a run selects from a source.

`select_channels` checks the variables of the config against those of the source;
`data_step_indices` finds the times on the config's step.
"""

import logging
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.config.data import ROLES
from credit_dp.data.calendar import Times
from credit_dp.data.channels import Channel, Channels, expand_channels, suggest_names
from credit_dp.data.dates import EPOCH, indices_on_step, time_spacing
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.sources.source import Source, all_names, is_listed
from credit_dp.errors import UserError, counted
from credit_dp.variable_names import long_name

logger = logging.getLogger(__name__)

COMPUTED_BY_ROLE: Mapping[str, Collection[str]] = {
    "forcing": COMPUTED_FORCINGS,
    "static": COMPUTED_STATICS,
}


def select_channels(source: Source, config: DataConfig) -> Channels:
    """Return the channels of the config, in its order.

    Raises:
        UserError: a variable is missing, named twice or in the wrong list, or a level is missing.
    """
    _check_variables(source, config)
    check_variable_keys(config)
    levels = _select_levels(source, config)
    outputs = (*config.prognostic, *config.diagnostic)
    on_levels = {name for name in outputs if source.variables[name].levels}
    channels = Channels(
        prognostic=tuple(expand_channels(config.prognostic, on_levels, levels)),
        forcing=tuple(config.forcing),
        static=tuple(config.static),
        diagnostic=tuple(expand_channels(config.diagnostic, on_levels, levels)),
    )
    check_hybrid(config, channels)
    _check_no_duplicates(source, [*channels.output_channels, *map(Channel, config.forcing)])
    return channels


def unused_variables(source: Source, channels: Channels) -> list[str]:
    """Return the readable variables of a source that change in time and are in no list of a run."""
    names = (*channels.forcing, *channels.static)
    used = {long_name(channel.variable, channel.level)[0] for channel in channels.output_channels}
    used |= {long_name(name)[0] for name in names}
    return sorted(
        name
        for name, variable in source.variables.items()
        if variable.has_time
        and not variable.problem
        and long_name(name, next(iter(variable.levels), None))[0] not in used
    )


def check_hybrid(config: DataConfig, channels: Channels) -> None:
    """Refuse coefficients of another number of model levels than the variables are on."""
    levels = {x.level for x in channels.output_channels if x.level is not None}
    if config.hybrid and levels and len(config.hybrid["a"]) != len(levels) + 1:
        raise UserError(
            f"data.hybrid: needs a and b at the {len(levels) + 1} interfaces of {len(levels)} "
            f"levels, got {len(config.hybrid['a'])}. Change data.hybrid or data.levels."
        )


def _check_no_duplicates(source: Source, channels: Iterable[Channel]) -> None:
    """Refuse one field under two names, unless the store itself lists both names."""
    seen: dict[tuple[str, int | None], Channel] = {}
    for channel in channels:
        # The first channel with this long name and level, which may be this one.
        other = seen.setdefault(long_name(channel.variable, channel.level), channel)
        names = (channel.variable, other.variable)
        if other != channel and not all(is_listed(name, source.variables) for name in names):
            raise UserError(
                f"{source.where}: {other.name} and {channel.name} of the data config are one "
                f"field. Take {channel.variable} out of its list."
            )


def check_variable_keys(config: DataConfig) -> None:
    """Refuse entries of `data.variables` for variables that are not read."""
    names = {name: role for role in ROLES for name in getattr(config, role)}
    for key in config.variables:
        if key not in names:
            raise UserError(
                f"data.variables.{key}: no list of the data config has a variable {key}. "
                f"{suggest_names(key, names)}. Change data.variables, or add it to a list."
            )
        if key in COMPUTED_BY_ROLE.get(names.get(key, ""), ()):
            raise UserError(
                f"data.variables.{key}: {key} is computed, not read: nothing can be set for it. "
                "Take it out of data.variables."
            )


def _check_variables(source: Source, config: DataConfig) -> None:
    seen: set[str] = set()
    for role in ROLES:
        names: list[str] = getattr(config, role)
        for name in names:
            if name in seen:
                raise UserError(
                    f"data.{role}: {name} is in another list of the data config already. "
                    "Take it out of one."
                )
            seen.add(name)
            if name not in COMPUTED_BY_ROLE.get(role, ()):
                _check_present(source, config, name, role)
                _check_kind(source, config, name, role)


def without_absent_statics(source: Source, config: DataConfig) -> DataConfig:
    """Return the config without the static fields of its preset that the source lacks."""
    absent = [
        name
        for name in config.optional_static
        if name in config.static and name not in (*all_names(source.variables), *COMPUTED_STATICS)
    ]
    if not absent:
        return config
    logger.info("%s has no %s: left out of data.static", source.where, ", ".join(absent))
    return replace(config, static=[name for name in config.static if name not in absent])


def _check_present(source: Source, config: DataConfig, name: str, role: str) -> None:
    known = all_names(source.variables)
    if name in known:
        return
    available = [*source.variables, *COMPUTED_BY_ROLE.get(role, ())]
    absent = {
        kind: [
            x for x in getattr(config, kind) if x not in (*known, *COMPUTED_BY_ROLE.get(kind, ()))
        ]
        for kind in ROLES
    }
    others = [f"{x} of data.{kind}" for kind, names in absent.items() for x in names if x != name]
    raise UserError(
        f"{source.where}: no variable {name}. {suggest_names(name, available)}. "
        + (f"Also missing: {', '.join(others)}. " if others else "")
        + correct_or_leave_out(config, absent)
    )


def correct_or_leave_out(config: DataConfig, absent: Mapping[str, Sequence[str]]) -> str:
    """Return advice on names that do not exist, by role, with keys to copy."""
    lists = {
        role: [name for name in getattr(config, role) if name not in names]
        for role, names in absent.items()
        if names
    }
    keys = _list_keys(lists)
    if not keys:
        return f"Change {' and '.join(f'data.{role}' for role in lists)}."
    several = sum(map(len, absent.values())) > 1
    advice = "Correct the names, or leave them out" if several else "Correct it, or leave it out"
    return f"{advice}: {keys}"


def _list_keys(lists: Mapping[str, Sequence[object]]) -> str:
    """Return keys that set lists of the data config, for a shell; "" without prognostic ones."""
    if not lists.get("prognostic", True):
        return ""
    return " ".join(
        shlex.quote(f"data.{name}=[{','.join(map(str, items))}]") for name, items in lists.items()
    )


def _check_kind(source: Source, config: DataConfig, name: str, role: str) -> None:
    variable = source.variables[name]
    lists = {role: [other for other in getattr(config, role) if other != name]}
    remedy = "Leave it out"
    if variable.problem:
        problem = variable.problem
        remedy = "Change data.store, or leave it out"
    elif (role == "static") == variable.has_time:
        place = "forcing" if variable.has_time else "static"
        problem = "changes in time" if variable.has_time else "has no time"
        problem += f": it belongs to data.{place}"
        lists[place] = list(dict.fromkeys([*getattr(config, place), name]))
        remedy = "Move it"
    elif role in ("forcing", "static") and variable.levels:
        problem = f"has levels, which a {role} variable can't have"
    else:
        return
    keys = _list_keys(lists)
    remedy = f"{remedy}: {keys}" if keys else f"Change data.{role} or data.store."
    raise UserError(f"{source.where}: {name} {problem}. {remedy}")


def _select_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Return the levels of the config, or the store's in rising order; empty if it has none."""
    if config.levels is None:
        return _common_levels(source, config)
    levels_of = _levels_by_variable(source, config)
    if not levels_of and not any(variable.levels for variable in source.variables.values()):
        raise UserError(f"{source.where}: has no levels. Set data.levels=null.")
    check_levels(source.where, config.levels, levels_of)
    return list(config.levels)


def _levels_by_variable(source: Source, config: DataConfig) -> dict[str, list[int]]:
    """Return the levels of the output variables that are on levels, in rising order."""
    levels = {
        x: sorted(source.variables[x].levels) for x in (*config.prognostic, *config.diagnostic)
    }
    return {name: found for name, found in levels.items() if found}


def check_levels(where: str, wanted: Sequence[int], levels_of: Mapping[str, Sequence[int]]) -> None:
    """Refuse levels of `data.levels` that a variable of a store does not have."""
    for name, levels in levels_of.items():
        missing = [level for level in wanted if level not in levels]
        if missing:
            raise UserError(
                f"{where}: {name} has no level {missing[0]}."
                + (hint_at_hpa("data.levels", wanted, levels) or _shared_levels(levels_of))
            )


def _shared_levels(levels_of: Mapping[str, Sequence[int]]) -> str:
    """Return advice with the levels that all these variables have."""
    shared = set.intersection(*map(set, levels_of.values()))
    if not shared:
        return f" No level is common to {', '.join(levels_of)}: leave some of these out."
    whose = "Levels of all variables" if len(levels_of) > 1 else "Its levels"
    return f" {whose}: {_list_keys({'levels': sorted(shared)})}"


def hint_at_hpa(key: str, wanted: Sequence[int], levels: Sequence[int]) -> str:
    """Return a question for who gives levels in Pa, or ""."""
    if any(level % 100 or level // 100 not in levels for level in wanted):
        return ""
    return f" Levels are in hPa: did you mean {key}=[{','.join(str(x // 100) for x in wanted)}]?"


def _common_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Return the levels of all output variables on levels, in rising order."""
    levels_of = _levels_by_variable(source, config)
    first = next(iter(levels_of), "")
    for name, levels in levels_of.items():
        if levels != levels_of[first]:
            raise UserError(
                f"{source.where}: {name} has the levels {', '.join(map(str, levels))}, "
                f"but {first} has {', '.join(map(str, levels_of[first]))}."
                f"{_shared_levels(levels_of)}"
            )
    return levels_of[first] if levels_of else []


def data_step_indices(
    times: Times, config: DataConfig, where: str, origin: np.datetime64 = EPOCH
) -> NDArray[np.intp]:
    """Return the indices of the times on `data.step`; see `indices_on_step`.

    Args:
        origin: a time from which steps are counted.
    """
    spacing = int(time_spacing(times) / np.timedelta64(1, "s"))
    step = 3600 * config.step_hours
    if spacing and spacing % step and step % spacing:
        whole = math.lcm(spacing, 3600)
        remedy = f"Set data.step to a multiple of {whole // 3600}h."
        if times[-1] - times[0] < np.timedelta64(whole, "s"):
            remedy = "Change data.store to one whose times are whole hours apart."
        raise UserError(
            f"{where}: its times are {counted(spacing / 3600, 'hour')} apart, so no two of them in "
            f"a row are {config.step} apart. {remedy}"
        )
    return indices_on_step(times, np.timedelta64(config.step_hours, "h"), origin)
