"""Units that stores give, checked against those that a model is to see; conversions by name."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from credit_dp.config import DataConfig
from credit_dp.data.known_units import KNOWN, STANDARD_NAMES, Known
from credit_dp.data.sources.source import Source, Variable
from credit_dp.data.unit_text import canonical
from credit_dp.errors import UserError
from credit_dp.variable_names import meaning

GRAVITY = 9.80665  # m s-2, standard acceleration of free fall (CGPM 1901)
WATER = 1000.0  # kg m-3
SAYS_NOTHING = ("", "unknown", "undefined")
# What is needed of a field under such a standard name, where no unit says more.
HEIGHTS = ("geopotential_height", "surface_altitude")

# new = old * scale + offset
CONVERSIONS: dict[tuple[str, str], tuple[float, float]] = {
    ("hPa", "Pa"): (100.0, 0.0),
    ("kPa", "Pa"): (1000.0, 0.0),
    ("degC", "K"): (1.0, 273.15),
    ("degF", "K"): (5 / 9, 273.15 - 32 * 5 / 9),
    ("gpm", "m2 s-2"): (GRAVITY, 0.0),
    ("m", "m2 s-2"): (GRAVITY, 0.0),
    ("dam", "m2 s-2"): (10 * GRAVITY, 0.0),
    ("J kg-1", "m2 s-2"): (1.0, 0.0),
    ("g kg-1", "1"): (1e-3, 0.0),
    ("mg kg-1", "1"): (1e-6, 0.0),
    ("%", "1"): (1e-2, 0.0),
    ("1", "%"): (100.0, 0.0),
    ("mm", "m"): (1e-3, 0.0),
    ("cm", "m"): (1e-2, 0.0),
    ("km", "m"): (1e3, 0.0),
    ("kg m-2", "m"): (1 / WATER, 0.0),
    ("mm", "kg m-2"): (WATER * 1e-3, 0.0),
    ("kt", "m s-1"): (1852 / 3600, 0.0),
    ("km h-1", "m s-1"): (1 / 3.6, 0.0),
    ("hPa s-1", "Pa s-1"): (100.0, 0.0),
    ("kJ m-2", "J m-2"): (1e3, 0.0),
    ("g cm-3", "kg m-3"): (1e3, 0.0),
}


def conversion(text: str) -> tuple[float, float]:
    """`FROM->TO` as `(scale, offset)`: new = old * scale + offset. FROM may be TO: nothing changes.

    Raises:
        UserError: no such conversion is known.
    """
    old, new = _sides(text)
    if old == new:
        return 1.0, 0.0
    if (old, new) not in CONVERSIONS:
        raise _unknown("data.variables.NAME.convert", text)
    return CONVERSIONS[old, new]


def unit_after(source: Source, name: str, config: DataConfig) -> str:
    """The unit that a model sees: what the store is converted to, or else the store's."""
    convert = config.of(name).convert
    if convert is not None:
        return convert.split("->")[1].strip()
    return source.variables[name].units


@final
@dataclass(frozen=True)
class _Wrong:
    """A variable that a model can't take as it is.

    Attributes:
        what: its unit or quantity, and what is needed.
        convert: the conversion that helps, or vouches for the values; None: none is needed.
        vouches: whether `convert` is right only if nothing but the store's text is wrong.
    """

    name: str
    what: str
    convert: str | None
    vouches: bool = False


def check_units(source: Source, config: DataConfig) -> None:
    """Refuse variables of another unit or quantity than a model is to see.

    Variables and units of which nothing is known pass, and so does a store that gives no unit.

    Raises:
        UserError: names all such variables, with an override that converts them.
    """
    wrong = []
    for name in (*config.prognostic, *config.diagnostic, *config.forcing, *config.static):
        known = KNOWN.get(name) or KNOWN.get(meaning(name))
        if known is None or name not in source.variables:
            continue
        convert = config.of(name).convert
        if convert is None:
            found = _given(name, source.variables[name], known)
        else:
            found = _converted(source.where, name, source.variables[name], known, convert)
        wrong += [found] if found is not None else []
    if wrong:
        whats = "; ".join(one.what for one in wrong)
        raise UserError(f"{source.where}: {whats}. {_advice(wrong)}")


def _given(name: str, variable: Variable, known: Known) -> _Wrong | None:
    """What is wrong with a variable that is taken as it is."""
    unit = canonical(variable.units)
    if unit not in (*SAYS_NOTHING, canonical(known.unit)):
        return _wrong(name, f"is in {variable.units}, but {known.unit} is needed", unit, known)
    other = variable.standard_name
    if other in STANDARD_NAMES and known.standard_names and other not in known.standard_names:
        what = f"has the standard name {other}, but {known.standard_names[0]} is needed"
        return _wrong(name, what, "gpm" if other in HEIGHTS else known.unit, known)
    return None


def _converted(
    where: str, name: str, variable: Variable, known: Known, convert: str
) -> _Wrong | None:
    """What is wrong with a variable that is converted: from what it is in, to what is needed."""
    key = f"data.variables.{name}.convert"
    old, new = _sides(convert)
    unit, needed = canonical(variable.units), canonical(known.unit)
    if new != needed:
        raise UserError(f"{where}: {name} needs {key} to {known.unit}, got {convert!r}.")
    if old != new and (old, new) not in CONVERSIONS:
        raise _unknown(f"{where}: {key}", convert)
    says = unit == needed or (unit, needed) in CONVERSIONS
    if not says or unit == old:
        return None
    what = f"is in {variable.units}, but {key} is {convert!r}"
    if unit == needed:
        return _Wrong(name, f"{name} {what}", None)
    return _wrong(name, what, unit, known)


def _wrong(name: str, what: str, unit: str, known: Known) -> _Wrong:
    """It is converted from `unit`; if that can't be done, from the needed unit itself."""
    vouches = (unit, canonical(known.unit)) not in CONVERSIONS
    convert = f"{known.unit if vouches else unit}->{known.unit}"
    return _Wrong(name, f"{name} {what}", convert, vouches)


def _advice(wrong: Sequence[_Wrong]) -> str:
    """What to put on the command line; other entries of `data.variables` stay as they are."""
    sure = [one for one in wrong if not one.vouches]
    unsure = [one for one in wrong if one.vouches]
    parts = [f"Set {_override(sure)}"] if sure else []
    if unsure:
        only = f"only {'these names are' if len(unsure) > 1 else 'this name is'} wrong"
        change = "change" if parts else "Change"
        parts.append(f"{change} data.store, or if {only}, set {_override(unsure)}")
    return "; ".join(parts) + "."


def _override(wrong: Sequence[_Wrong]) -> str:
    """`data.variables={...}` for a shell: the braces take any name, the quotes any unit."""
    entries = (
        f"{one.name}:{{convert:{'null' if one.convert is None else json.dumps(one.convert)}}}"
        for one in wrong
    )
    return shlex.quote(f"data.variables={{{','.join(entries)}}}")


def _unknown(key: str, text: str) -> UserError:
    known = ", ".join(f"{old}->{new}" for old, new in CONVERSIONS)
    return UserError(
        f"{key}: needs one of {known}, got {text!r}. A dimensionless unit is 1, like kg kg-1."
    )


def _sides(text: str) -> tuple[str, str]:
    old, _, new = text.partition("->")
    return canonical(old), canonical(new)
