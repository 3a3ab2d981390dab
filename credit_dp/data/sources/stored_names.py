"""Finds the variables of a store by any name that they go by, whatever the store calls them.

A store's own names come first. Beside them each variable is found by the other names of its
meaning (`variable_names.py`): `geopotential` where the store has `z` on levels, `2m_temperature`
where it has `t2m`. A variable on levels is also found level by level (`z_500`, `Z500`), and
variables of one level each are found together, as one on levels.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import final

from credit_dp.data.channels import Channel
from credit_dp.data.sources.base import AliasedVariables, VariableInfo
from credit_dp.variable_names import (
    STATIC_NAMES,
    UPPER_AIR_NAMES,
    all_names_of,
    canonical_name,
    long_name,
)


@final
@dataclass(frozen=True)
class _OtherNames:
    """Other names of a variable, and where it is: in one variable of the store, or one a level.

    Attributes:
        name, level: of the store's variable; a level where the names are those of one level.
        by_level: the store's variables, where each has one level.
        constant: whether it is known to be the same at all times.
    """

    names: tuple[str, ...]
    variable: VariableInfo
    name: str = ""
    level: int | None = None
    by_level: Mapping[int | None, str] = field(default_factory=dict)
    constant: bool = False

    def stored(self, channel: Channel) -> Channel:
        """The store's own channel."""
        if self.by_level:
            return Channel(self.by_level[channel.level])
        return Channel(self.name, channel.level if self.level is None else self.level)


@final
@dataclass(frozen=True)
class StoredNames:
    """The variables of a store by all their names.

    Attributes:
        variables: the store's own names are listed, the others are found.
    """

    variables: AliasedVariables
    _others: Mapping[str, _OtherNames]

    @classmethod
    def of(
        cls, own: Mapping[str, VariableInfo], static: Collection[str] = (), level: int | None = None
    ) -> "StoredNames":
        """Find the other names of a store's own variables.

        Args:
            own: what the store has.
            static: names that are wanted as static fields. Those that are known to be constant
                count as such though the store repeats them at every time: the first is read.
            level: that of the upper-air variables which have no dim of levels.
        """
        others: dict[str, _OtherNames] = {}
        found = [*_upper_air_names(own, level), *_surface_names(own, level)]
        for other in found:
            for name in other.names:
                # Where `z` may be either, it is the one on levels, unless it is wanted as static.
                takes_over = name in static and other.constant
                if name not in own and (name not in others or takes_over):
                    others[name] = other
        aliases = {
            name: _as_static_if_constant(name, others[name].variable, static) for name in others
        }
        listed = {name: _as_static_if_constant(name, own[name], static) for name in own}
        return cls(AliasedVariables(listed, aliases), others)

    def stored(self, channel: Channel) -> Channel:
        """The store's own channel."""
        other = self._others.get(channel.variable)
        return channel if other is None else other.stored(channel)

    def stored_variables(self, name: str) -> list[str]:
        """The store's own variables that one is read from."""
        channels = _channels(name, self.variables[name])
        return list(dict.fromkeys(self.stored(channel).variable for channel in channels))

    def under_all_names(self, own: Mapping[Channel, int]) -> dict[Channel, int]:
        """What is said of the store's own channels, also by their other names."""
        channels = [x for name in self._others for x in _channels(name, self.variables[name])]
        places = {channel: own.get(self.stored(channel)) for channel in channels}
        return {x: place for x, place in places.items() if place is not None} | {**own}


def _upper_air_names(own: Mapping[str, VariableInfo], at: int | None) -> Iterator[_OtherNames]:
    """The other names of upper-air variables, stored with a dim of levels or one by one."""
    single: dict[str, dict[int, str]] = {}
    for name, variable in own.items():
        long, level = _long_name_and_level(name, variable, at)
        if variable.levels:
            yield _OtherNames(all_names_of(long), replace(variable, stored=name), name)
            if not variable.model_levels:
                yield from _level_by_level(long, name, variable)
        elif level is not None:
            single.setdefault(long, {}).setdefault(level, name)
            renamed = replace(variable, stored=name)
            yield _OtherNames(_names_on_level(long, level), renamed, name)
    for long, names in single.items():
        yield _combine_levels(long, dict(sorted(names.items())), own)


def _long_name_and_level(
    name: str, variable: VariableInfo, at: int | None
) -> tuple[str, int | None]:
    """The long name, and of a variable without a dim of levels the level that it is on."""
    long = UPPER_AIR_NAMES.get(name, name)
    if variable.levels:
        return long, None
    return (long, at) if at is not None and long in UPPER_AIR_NAMES.values() else long_name(name)


def _level_by_level(long: str, name: str, variable: VariableInfo) -> Iterator[_OtherNames]:
    for level in variable.levels:
        of_level = replace(variable, levels=(), stored=f"{name} on level {level}")
        yield _OtherNames(_names_on_level(long, level), of_level, name, level)


def _combine_levels(
    long: str, names: Mapping[int, str], own: Mapping[str, VariableInfo]
) -> _OtherNames:
    """Variables with one level each as one on levels."""
    variables = [own[name] for name in names.values()]
    problem = next((variable.problem for variable in variables if variable.problem), "")
    if len({(variable.timed, variable.units) for variable in variables}) > 1:
        problem = f"is stored as {', '.join(names.values())}, which differ in time or units"
    first, *others = names.values()
    stored = f"{first} to {others[-1]}" if others else first
    whole = replace(variables[0], levels=tuple(names), stored=stored, problem=problem)
    by_level: dict[int | None, str] = dict(zip(names, names.values(), strict=True))
    return _OtherNames(all_names_of(long), whole, by_level=by_level)


def _surface_names(own: Mapping[str, VariableInfo], at: int | None) -> Iterator[_OtherNames]:
    for name, variable in own.items():
        long, level = _long_name_and_level(name, variable, at)
        if not variable.levels and level is None:
            renamed, constant = replace(variable, stored=name), long in STATIC_NAMES.values()
            yield _OtherNames(all_names_of(long), renamed, name, constant=constant)


@cache  # the files of many years have the same
def _names_on_level(long: str, level: int) -> tuple[str, ...]:
    """The names of a variable on one level."""
    texts = [f"{x}{sign}{level}" for x in all_names_of(long) for sign in ("_", "")]
    return tuple(text for text in texts if long_name(text) == (long, level))


def _channels(name: str, variable: VariableInfo) -> list[Channel]:
    return [Channel(name, level) for level in variable.levels or (None,)]


def _as_static_if_constant(
    name: str, variable: VariableInfo, static: Collection[str]
) -> VariableInfo:
    repeated = variable.timed and not variable.levels and name in static
    if not repeated or canonical_name(name) not in STATIC_NAMES.values():
        return variable
    return replace(variable, timed=False, stored=f"{variable.stored or name} at its first time")
