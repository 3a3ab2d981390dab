"""Finds the variables of a store by any name in use, whatever the store calls them.

A store's own names come first. Each variable is also found by the other names of the same quantity
(`variable_names.py`): `geopotential` where the store has `z` on levels, `2m_temperature` where it
has `t2m`. A variable on levels is also found level by level (`z_500`, `Z500`), and variables that
are stored one level each are also found as one variable on levels.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import final

from credit_dp.data.channels import Channel
from credit_dp.data.sources.source import AliasedVariables, VariableInfo
from credit_dp.data.units import HEIGHTS, KNOWN_VARIABLES
from credit_dp.variable_names import (
    CMIP6_NAMES,
    STATIC_NAMES,
    UPPER_AIR_NAMES,
    all_names_of,
    canonical_name,
    long_name,
)


@final
@dataclass(frozen=True)
class _OtherNames:
    """Aliases of a variable, and the stored variable or variables that they refer to.

    Attributes:
        names: the aliases.
        variable: metadata under these names.
        name: the stored variable; empty if `by_level` is used.
        level: its level, where the aliases refer to one level.
        by_level: the stored variables by level, where each has one.
        constant: whether the variable is known not to change in time.
    """

    names: tuple[str, ...]
    variable: VariableInfo
    name: str = ""
    level: int | None = None
    by_level: Mapping[int | None, str] = field(default_factory=dict)
    constant: bool = False

    def stored_channel(self, channel: Channel) -> Channel:
        """Return the channel of the store that a channel under one of `names` refers to."""
        if self.by_level:
            return Channel(self.by_level[channel.level])
        return Channel(self.name, channel.level if self.level is None else self.level)


@final
@dataclass(frozen=True)
class StoredNames:
    """The variables of a store under all their names.

    Attributes:
        variables: metadata by name; aliases can be looked up, but are not listed.
    """

    variables: AliasedVariables
    _others: Mapping[str, _OtherNames]

    @classmethod
    def of(
        cls,
        stored: Mapping[str, VariableInfo],
        static: Collection[str] = (),
        level: int | None = None,
    ) -> "StoredNames":
        """Find the aliases of a store's variables.

        Args:
            stored: metadata by the store's own names.
            static: names that are used as static fields. If one is known to be constant, only its
                first time is read, though the store repeats it at every time.
            level: the pressure level of upper-air variables without a level dim.
        """
        by_alias: dict[str, _OtherNames] = {}
        candidates = [*_upper_air_names(stored, level), *_surface_names(stored, level)]
        for candidate in candidates:
            for name in candidate.names:
                # `z` may be geopotential on levels or at the surface. The first candidate wins,
                # the one on levels, unless the name is used as a static field.
                takes_over = name in static and candidate.constant
                if name not in stored and (name not in by_alias or takes_over):
                    by_alias[name] = candidate
        aliases = {
            name: _as_static_if_constant(name, by_alias[name].variable, static) for name in by_alias
        }
        listed = {name: _as_static_if_constant(name, stored[name], static) for name in stored}
        return cls(AliasedVariables(listed, aliases), by_alias)

    def stored_channel(self, channel: Channel) -> Channel:
        """Return the channel of the store that `channel` refers to."""
        other_names = self._others.get(channel.variable)
        return channel if other_names is None else other_names.stored_channel(channel)

    def stored_variables(self, name: str) -> list[str]:
        """Return the stored variables that a variable is read from."""
        channels = _channels(name, self.variables[name])
        return list(dict.fromkeys(self.stored_channel(channel).variable for channel in channels))

    def under_all_names(self, by_channel: Mapping[Channel, int]) -> dict[Channel, int]:
        """Return a mapping by the store's channels, extended by all aliases of each channel."""
        channels = [
            channel for name in self._others for channel in _channels(name, self.variables[name])
        ]
        by_alias = {channel: by_channel.get(self.stored_channel(channel)) for channel in channels}
        known = {channel: value for channel, value in by_alias.items() if value is not None}
        return {**known, **by_channel}


def _upper_air_names(
    stored: Mapping[str, VariableInfo], scalar_level: int | None
) -> Iterator[_OtherNames]:
    """Yield aliases of upper-air variables, stored with a level dim or one level each."""
    single_level: dict[str, dict[int, str]] = {}
    for name, variable in stored.items():
        long, level = _long_name_and_level(name, variable, scalar_level)
        if variable.levels:
            yield _OtherNames(all_names_of(long), replace(variable, stored_name=name), name)
            if not variable.model_levels:
                yield from _level_by_level(long, name, variable)
        elif level is not None:
            single_level.setdefault(long, {}).setdefault(level, name)
            renamed = replace(variable, stored_name=name)
            yield _OtherNames(_names_on_level(long, level), renamed, name)
    for long, names in single_level.items():
        yield _combine_levels(long, dict(sorted(names.items())), stored)


def _long_name_and_level(
    name: str, variable: VariableInfo, scalar_level: int | None
) -> tuple[str, int | None]:
    """Return the long name, and the level of a variable without a level dim."""
    cmip6 = CMIP6_NAMES.get(name.rstrip("_0123456789"))
    if cmip6 is not None:
        known = KNOWN_VARIABLES[cmip6].standard_names
        if variable.standard_name not in (*known, *HEIGHTS):
            return name, None
    long = UPPER_AIR_NAMES.get(name, name)
    if variable.levels:
        return long, None
    return (
        (long, scalar_level)
        if scalar_level is not None and long in UPPER_AIR_NAMES.values()
        else long_name(name)
    )


def _level_by_level(long: str, name: str, variable: VariableInfo) -> Iterator[_OtherNames]:
    for level in variable.levels:
        on_level = replace(variable, levels=(), stored_name=f"{name} on level {level}")
        yield _OtherNames(_names_on_level(long, level), on_level, name, level)


def _combine_levels(
    long: str, names: Mapping[int, str], stored: Mapping[str, VariableInfo]
) -> _OtherNames:
    variables = [stored[name] for name in names.values()]
    problem = next((variable.problem for variable in variables if variable.problem), "")
    if len({(variable.has_time, variable.units) for variable in variables}) > 1:
        problem = f"is stored as {', '.join(names.values())}, which differ in time or units"
    first, *others = names.values()
    description = f"{first} to {others[-1]}" if others else first
    combined = replace(variables[0], levels=tuple(names), stored_name=description, problem=problem)
    by_level: dict[int | None, str] = dict(zip(names, names.values(), strict=True))
    return _OtherNames(all_names_of(long), combined, by_level=by_level)


def _surface_names(
    stored: Mapping[str, VariableInfo], scalar_level: int | None
) -> Iterator[_OtherNames]:
    for name, variable in stored.items():
        long, level = _long_name_and_level(name, variable, scalar_level)
        if not variable.levels and level is None:
            renamed = replace(variable, stored_name=name)
            constant = long in STATIC_NAMES.values()
            yield _OtherNames(all_names_of(long), renamed, name, constant=constant)


@cache  # stores of many files ask for the same names once per file
def _names_on_level(long: str, level: int) -> tuple[str, ...]:
    """Return the names of a variable on one level, such as `z_500` and `Z500`."""
    texts = [f"{x}{sign}{level}" for x in all_names_of(long) for sign in ("_", "")]
    return tuple(text for text in texts if long_name(text) == (long, level))


def _channels(name: str, variable: VariableInfo) -> list[Channel]:
    return [Channel(name, level) for level in variable.levels or (None,)]


def _as_static_if_constant(
    name: str, variable: VariableInfo, static: Collection[str]
) -> VariableInfo:
    is_repeated = variable.has_time and not variable.levels and name in static
    if not is_repeated or canonical_name(name) not in STATIC_NAMES.values():
        return variable
    return replace(
        variable, has_time=False, stored_name=f"{variable.stored_name or name} at its first time"
    )
