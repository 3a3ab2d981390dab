"""What the config wants of a source, checked by names before any field is read."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from credit_dp.config import DataConfig
from credit_dp.data.forcings import COMPUTED, COMPUTED_STATICS
from credit_dp.data.grid import parse_grid
from credit_dp.data.schema import Channel, Channels, expand, suggestions
from credit_dp.data.sources.source import Source, is_listed
from credit_dp.data_config import ROLES
from credit_dp.errors import UserError
from credit_dp.variable_names import long_name

NOT_READ: Mapping[str, Collection[str]] = {"forcing": COMPUTED, "static": COMPUTED_STATICS}


def wanted_channels(source: Source, config: DataConfig) -> Channels:
    """The channels of the config, in its order.

    Raises:
        UserError: a variable is missing, named twice or of another kind, or a level is missing.
    """
    _check_grid(source, config)
    _check_variables(source, config)
    check_keys(config)
    levels = _wanted_levels(source, config)
    outputs = (*config.prognostic, *config.diagnostic)
    on_levels = {name for name in outputs if source.variables[name].levels}
    channels = Channels(
        prognostic=tuple(expand(config.prognostic, on_levels, levels)),
        forcing=tuple(config.forcing),
        static=tuple(config.static),
        diagnostic=tuple(expand(config.diagnostic, on_levels, levels)),
    )
    _check_different(source, [*channels.out, *map(Channel, config.forcing)])
    return channels


def _check_different(source: Source, channels: Iterable[Channel]) -> None:
    """Refuse one field under two names, unless the store has both names."""
    known: dict[tuple[str, int | None], Channel] = {}
    for channel in channels:
        other = known.setdefault(long_name(channel.variable, channel.level), channel)
        names = (channel.variable, other.variable)
        if other != channel and not all(is_listed(name, source.variables) for name in names):
            raise UserError(
                f"{source.where}: {other.name} and {channel.name} of the data config are one "
                f"field. Take {channel.variable} out of its list."
            )


def check_keys(config: DataConfig) -> None:
    """Refuse entries of `data.variables` that say something of no variable that is read.

    Raises:
        UserError: naming the key and the nearest variables.
    """
    names = {name: role for role in ROLES for name in getattr(config, role)}
    for key in config.variables:
        if key not in names:
            raise UserError(
                f"data.variables.{key}: no list of the data config has a variable {key}. "
                f"{suggestions(key, names)}. Change data.variables, or add it to a list."
            )
        if key in NOT_READ.get(names.get(key, ""), ()):
            raise UserError(
                f"data.variables.{key}: {key} is computed, not read: nothing can be set for it. "
                "Take it out of data.variables."
            )


def _check_grid(source: Source, config: DataConfig) -> None:
    if config.grid is not None and parse_grid(config.grid) != source.grid:
        rows, columns = source.grid
        raise UserError(
            f"{source.where}: has {rows}x{columns} rows and columns, but data.grid asks for "
            f"{config.grid}; a store is read as it is. Change data.grid, to null, or prepare "
            "another store with `credit-dp data prepare`."
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
            if name not in NOT_READ.get(role, ()):
                _check_present(source, name, role)
                _check_kind(source, name, role)


def _check_present(source: Source, name: str, role: str) -> None:
    if name in source.variables:
        return
    available = [*source.variables, *NOT_READ.get(role, ())]
    raise UserError(
        f"{source.where}: no variable {name}. {suggestions(name, available)}. Change data.{role}."
    )


def _check_kind(source: Source, name: str, role: str) -> None:
    variable = source.variables[name]
    if variable.problem:
        problem = variable.problem
    elif role == "static" and variable.timed:
        problem = "changes in time: it belongs to data.forcing"
    elif role != "static" and not variable.timed:
        problem = "has no time: it belongs to data.static"
    elif role in ("forcing", "static") and variable.levels:
        problem = f"has levels, which a {role} variable can't have"
    else:
        return
    raise UserError(f"{source.where}: {name} {problem}. Change data.{role} or data.store.")


def _wanted_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """The levels of the config, or all of the store's in rising order. Empty if it has none."""
    if config.levels is None:
        return _common_levels(source, config)
    names = [*source.variables, *config.prognostic, *config.diagnostic]
    present = any(source.variables[name].levels for name in names)
    if not config.levels:
        raise UserError("data.levels: needs at least one level, or null for all of the store's.")
    if not present:
        raise UserError(f"{source.where}: has no levels. Change data.levels, to null.")
    for name in (*config.prognostic, *config.diagnostic):
        levels = source.variables[name].levels
        missing = [level for level in config.levels if levels and level not in levels]
        if missing:
            there = ", ".join(map(str, sorted(levels)))
            raise UserError(
                f"{source.where}: {name} has no level {missing[0]}. There are: {there}. "
                "Change data.levels."
            )
    return list(config.levels)


def _common_levels(source: Source, config: DataConfig) -> Sequence[int]:
    """Those that each variable has which is on levels and comes out, in rising order.

    Raises:
        UserError: two have not the same.
    """
    names = (*config.prognostic, *config.diagnostic)
    found = {name: sorted(source.variables[name].levels) for name in names}
    on_levels = [name for name, levels in found.items() if levels]
    for name in on_levels:
        first = on_levels[0]
        if found[name] != found[first]:
            raise UserError(
                f"{source.where}: {name} has the levels {', '.join(map(str, found[name]))}, but "
                f"{first} has {', '.join(map(str, found[first]))}. Set data.levels to some that "
                "both have."
            )
    return found[on_levels[0]] if on_levels else []
