"""Units that stores give, checked against those that a model is to see; conversions by name."""

from credit_dp.config import DataConfig
from credit_dp.data.known_units import KNOWN, STANDARD_NAMES, Known
from credit_dp.data.sources.ecmwf_names import meaning
from credit_dp.data.sources.source import Source, Variable
from credit_dp.data.unit_text import canonical
from credit_dp.errors import UserError

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


def check_units(source: Source, config: DataConfig) -> None:
    """Refuse variables of another unit or quantity than a model is to see.

    Variables and units of which nothing is known pass, and so does a store that gives no unit.

    Raises:
        UserError: names the variable and the conversion that it needs.
    """
    for name in (*config.prognostic, *config.diagnostic, *config.forcing, *config.static):
        known = KNOWN.get(name) or KNOWN.get(meaning(name))
        if known is None or name not in source.variables:
            continue
        convert = config.of(name).convert
        if convert is None:
            _check_given(source.where, name, source.variables[name], known)
        else:
            _check_converted(source.where, name, source.variables[name], known, convert)


def _check_given(where: str, name: str, variable: Variable, known: Known) -> None:
    """A variable that is taken as it is."""
    unit = canonical(variable.units)
    if unit not in (*SAYS_NOTHING, canonical(known.unit)):
        raise UserError(
            f"{where}: {name} is in {variable.units}, but {known.unit} is needed. "
            f"{_key(name, unit, known)}."
        )
    other = variable.standard_name
    if other in STANDARD_NAMES and known.standard_names and other not in known.standard_names:
        raise UserError(
            f"{where}: {name} has the standard name {other}, but {known.standard_names[0]} is "
            f"needed. {_key(name, 'gpm' if other in HEIGHTS else known.unit, known)}."
        )


def _check_converted(where: str, name: str, variable: Variable, known: Known, convert: str) -> None:
    """A variable that is converted: from what the store says, to what is needed."""
    key = f"data.variables.{name}.convert"
    old, new = _sides(convert)
    unit, needed = canonical(variable.units), canonical(known.unit)
    if new != needed:
        raise UserError(f"{where}: {name} needs {key} to {known.unit}, got {convert!r}.")
    if old != new and (old, new) not in CONVERSIONS:
        raise _unknown(f"{where}: {key}", convert)
    says = unit == needed or (unit, needed) in CONVERSIONS
    if says and unit != old:
        advice = "Take it out" if unit == needed else _key(name, unit, known)
        raise UserError(
            f"{where}: {name} is in {variable.units}, but {key} is {convert!r}. {advice}."
        )


def _unknown(key: str, text: str) -> UserError:
    known = ", ".join(f"{old}->{new}" for old, new in CONVERSIONS)
    return UserError(
        f"{key}: needs one of {known}, got {text!r}. A dimensionless unit is 1, like kg kg-1."
    )


def _key(name: str, unit: str, known: Known) -> str:
    """The advice to convert; from the needed unit itself if nothing is known of this one."""
    key = f"data.variables.{name}.convert"
    if (unit, canonical(known.unit)) in CONVERSIONS:
        return f"Set {key}='{unit}->{known.unit}'"
    return (
        f"Change data.store, or if only this name is wrong, set {key}='{known.unit}->{known.unit}'"
    )


def _sides(text: str) -> tuple[str, str]:
    old, _, new = text.partition("->")
    return canonical(old), canonical(new)
