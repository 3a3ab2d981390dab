"""Units of variables: parsing, conversion, and checks against the unit that each should have.

Also what is known of variables by name: their CF standard names, whether they are accumulated in
time, and whether they can be negative.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig, VariableConfig
from credit_dp.data.sources.source import Source, VariableInfo
from credit_dp.errors import UserError
from credit_dp.variable_names import canonical_name

DIMENSIONLESS = "1"
# Spellings, by unit, of units that are not products of powers; ECMWF writes "~" for a type or an
# index.
_WORDS = {
    "1": "dimensionless, unitless, none, fraction, proportion, numeric, index, ~, -, 0-1",
    "%": "percent",
    "degC": "celsius, degrees celsius, degree celsius",
    "degF": "fahrenheit",
    "gpm": "geopotential metre, geopotential meter",
    "m": "m of water equivalent, m of water",
    "mm": "mm of water equivalent",
}
_SYMBOLS = {
    "K": "kelvin, degk, deg_k",
    "degC": "c, °c, degc, deg_c, degree_c, degrees_c, degree_celsius, degrees_celsius",
    "degF": "degf",
    "Pa": "pascal, pascals",
    "hPa": "mb, mbar, millibar, millibars, hectopascal",
    "m": "metre, metres, meter, meters",
    "mm": "millimetre, millimeter",
    "s": "second, seconds, sec",
    "h": "hour, hours, hr",
    "kt": "knot, knots",
    "rad": "radian, radians",
}
WORDS = {word: unit for unit, words in _WORDS.items() for word in words.split(", ")}
SYMBOLS = {symbol: unit for unit, symbols in _SYMBOLS.items() for symbol in symbols.split(", ")}
# A slash, a symbol or 1, and a power: m, /s, m2, s-1, m^2, s^(-2). Other numbers are not allowed,
# because they scale the values.
FACTOR = re.compile(r"(/?)([A-Za-z°%_]+|1(?![\d.]))(?:\^?\(?([+-]?\d+)\)?)?")


def canonical_unit(text: str) -> str:
    """Return the standard form of a unit, so that equal units have equal texts.

    `m**2 s**-2`, `m2 s-2` and `m^2/s^2` become `m2 s-2`; `(0 - 1)` and `kg/kg` become `1`. A text
    that is not a product of powers is returned unchanged, except for spaces around it.
    """
    stripped = text.strip()
    word = re.sub(r"\s+", " ", stripped.strip("()[] ")).lower()
    word = WORDS.get(word.replace(" - ", "-"), WORDS.get(word, ""))
    if word:
        return word
    # Drop braces as in m^{2} and brackets around the whole text; ** and ^ mean the same.
    factors = re.sub(r"\*\*", "^", re.sub(r"[{}]|^[(\[]|[)\]]$", "", stripped))
    factors = re.sub(r"\s*([/^])\s*", r"\1", factors)
    # A dot or a star between two factors multiplies them, as a space does; the dot of a number
    # stays.
    factors = re.sub(r"(?<=[A-Za-z0-9)])[.*·](?=[A-Za-z])", " ", factors).replace("/", " /")
    powers: Counter[str] = Counter()
    for factor in factors.split():
        match = FACTOR.fullmatch(factor)
        if not match:
            return stripped
        slash, symbol, power = match.groups()
        if symbol != DIMENSIONLESS:
            powers[SYMBOLS.get(symbol.lower(), symbol)] += int(power or 1) * (-1 if slash else 1)
    return _format_powers(powers) if factors.split() else ""


def _format_powers(powers: Counter[str]) -> str:
    order = sorted((power < 0, symbol) for symbol, power in powers.items() if power)
    parts = [symbol if powers[symbol] == 1 else f"{symbol}{powers[symbol]}" for _, symbol in order]
    return " ".join(parts) or DIMENSIONLESS


class ValueRange(NamedTuple):
    """The smallest and the largest plausible value."""

    low: float
    high: float

    def outside(self, values: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return which values are smaller or larger; NaN is not."""
        return (values < self.low) | (values > self.high)


class KnownVariable(NamedTuple):
    """The unit of a variable, its physical limits, and the standard names that stores use."""

    unit: str
    limits: ValueRange
    standard_names: tuple[str, ...] = ()


KNOWN = re.compile(r"(.+) \[(.+), (.+)\](?:: (.+))?")


def _parse_known(table: Mapping[str, str]) -> dict[str, KnownVariable]:
    """Parse a table of `name: "unit [low, high]: standard names"`."""
    variables = {}
    for name, text in table.items():
        unit, low, high, names = KNOWN.fullmatch(text).groups("")  # type: ignore[union-attr]
        limits = ValueRange(float(low), float(high))
        variables[name] = KnownVariable(unit, limits, tuple(names.split()))
    return variables


# Limits have a wide margin around all values ever measured or analysed, so that overshoots of
# interpolation and packing pass.
# Sources: WMO World Weather and Climate Extremes Archive (2 m temperature -89.2 to 56.7 degC, mean
# sea level pressure 870 to 1084.8 hPa, rain of a day 1.825 m); ERA5 on its 137 model levels, up to
# 0.01 hPa; solar constant 1361 W m-2 (Kopp & Lean 2011), which bounds energies of a day.
_VARIABLES = _parse_known(
    {
        "geopotential": "m2 s-2 [-20000, 2e+06]: geopotential",
        "temperature": "K [100, 400]: air_temperature",
        "u_component_of_wind": "m s-1 [-300, 300]: eastward_wind x_wind",
        "v_component_of_wind": "m s-1 [-300, 300]: northward_wind y_wind",
        "vertical_velocity": "Pa s-1 [-100, 100]: lagrangian_tendency_of_air_pressure",
        "specific_humidity": "kg kg-1 [-0.01, 0.1]: specific_humidity",
        "specific_total_water": "kg kg-1 [-0.01, 0.1]",
        "relative_humidity": "% [-50, 250]: relative_humidity",
        "vorticity": "s-1 [-0.1, 0.1]: atmosphere_relative_vorticity",
        "divergence": "s-1 [-0.1, 0.1]: divergence_of_wind",
        "potential_vorticity": "K m2 kg-1 s-1 [-100, 100]: ertel_potential_vorticity",
        "ozone_mass_mixing_ratio": "kg kg-1 [-0.0001, 0.001]: mass_fraction_of_ozone_in_air",
        "fraction_of_cloud_cover": "1 [-0.5, 1.5]: cloud_area_fraction_in_atmosphere_layer",
        "specific_cloud_liquid_water_content": "kg kg-1 [-0.01, 0.1]: "
        "mass_fraction_of_cloud_liquid_water_in_air",
        "specific_cloud_ice_water_content": "kg kg-1 [-0.01, 0.1]: "
        "mass_fraction_of_cloud_ice_in_air",
        "specific_rain_water_content": "kg kg-1 [-0.01, 0.1]",
        "specific_snow_water_content": "kg kg-1 [-0.01, 0.1]",
        "wind_speed": "m s-1 [-1, 300]: wind_speed",
        "2m_temperature": "K [150, 350]: air_temperature",
        "2m_dewpoint_temperature": "K [100, 350]: dew_point_temperature",
        "10m_u_component_of_wind": "m s-1 [-150, 150]: eastward_wind x_wind",
        "10m_v_component_of_wind": "m s-1 [-150, 150]: northward_wind y_wind",
        "100m_u_component_of_wind": "m s-1 [-150, 150]: eastward_wind x_wind",
        "100m_v_component_of_wind": "m s-1 [-150, 150]: northward_wind y_wind",
        "10m_wind_speed": "m s-1 [-1, 150]: wind_speed",
        "mean_sea_level_pressure": "Pa [80000, 120000]: air_pressure_at_mean_sea_level "
        "air_pressure_at_sea_level",
        "surface_pressure": "Pa [25000, 120000]: surface_air_pressure",
        "skin_temperature": "K [150, 400]: surface_temperature",
        "sea_surface_temperature": "K [250, 350]: sea_surface_temperature surface_temperature "
        "sea_surface_skin_temperature",
        "sea_ice_cover": "1 [-0.5, 1.5]: sea_ice_area_fraction",
        "ice_temperature_layer_1": "K [150, 350]: sea_ice_temperature",
        "snow_depth": "m [-1, 100]: lwe_thickness_of_surface_snow_amount",
        "snow_density": "kg m-3 [-1, 1500]: snow_density",
        "temperature_of_snow_layer": "K [150, 350]: temperature_in_surface_snow",
        "total_cloud_cover": "1 [-0.5, 1.5]: cloud_area_fraction",
        "low_cloud_cover": "1 [-0.5, 1.5]: low_type_cloud_area_fraction cloud_area_fraction",
        "medium_cloud_cover": "1 [-0.5, 1.5]: medium_type_cloud_area_fraction cloud_area_fraction",
        "high_cloud_cover": "1 [-0.5, 1.5]: high_type_cloud_area_fraction cloud_area_fraction",
        "total_column_water": "kg m-2 [-10, 200]: atmosphere_mass_content_of_water "
        "lwe_thickness_of_atmosphere_mass_content_of_water",
        "total_column_water_vapour": "kg m-2 [-10, 200]: atmosphere_mass_content_of_water_vapor "
        "lwe_thickness_of_atmosphere_mass_content_of_water_vapor",
        # What fixers have added in a step.
        "dry_air_correction": "kg m-2 [-1000, 1000]",
        "water_correction": "kg m-2 [-1000, 1000]",
        "energy_correction": "J m-2 [-3e8, 3e8]",
        "boundary_layer_height": "m [-100, 20000]: atmosphere_boundary_layer_thickness",
        "convective_available_potential_energy": "J kg-1 [-100, 50000]: "
        "atmosphere_convective_available_potential_energy",
        "instantaneous_10m_wind_gust": "m s-1 [-1, 200]: wind_speed_of_gust",
        "geopotential_at_surface": "m2 s-2 [-10000, 100000]: surface_geopotential geopotential",
        "land_sea_mask": "1 [-0.5, 1.5]: land_binary_mask land_area_fraction",
        "lake_cover": "1 [-0.5, 1.5]",
        "lake_depth": "m [-100, 12000]: sea_floor_depth_below_sea_level",
        "high_vegetation_cover": "1 [-0.5, 1.5]: vegetation_area_fraction",
        "low_vegetation_cover": "1 [-0.5, 1.5]: vegetation_area_fraction",
        "standard_deviation_of_orography": "m [-10, 5000]",
        "standard_deviation_of_filtered_subgrid_orography": "m [-10, 5000]",
        "slope_of_sub_gridscale_orography": "1 [-0.5, 1.5]",
        "anisotropy_of_sub_gridscale_orography": "1 [-0.5, 1.5]",
        "angle_of_sub_gridscale_orography": "rad [-7, 7]",
    }
)
_SOIL = _parse_known(
    {
        "soil_temperature_level_": "K [150, 400]: soil_temperature",
        "volumetric_soil_water_layer_": "m3 m-3 [-0.5, 1.5]: "
        "volume_fraction_of_condensed_water_in_soil",
    }
)
SOIL = {name + layer: known for name, known in _SOIL.items() for layer in "1234"}
# Sums since the previous time: water as a depth, energy per area.
DEPTHS = (
    "total_precipitation",
    "large_scale_precipitation",
    "convective_precipitation",
    "snowfall",
    "evaporation",
    "potential_evaporation",
    "runoff",
    "surface_runoff",
    "snowmelt",
)
ENERGIES = (
    "toa_incident_solar_radiation",
    "top_net_solar_radiation",
    "top_net_thermal_radiation",
    "surface_solar_radiation_downwards",
    "surface_thermal_radiation_downwards",
    "surface_net_solar_radiation",
    "surface_net_thermal_radiation",
    "surface_sensible_heat_flux",
    "surface_latent_heat_flux",
)
SPANS = ("", "_6hr", "_12hr", "_24hr")
# Limits of sums over up to a day.
_SUMS = {name: KnownVariable("m", ValueRange(-1, 2)) for name in DEPTHS}
_SUMS |= {name: KnownVariable("J m-2", ValueRange(-3e8, 3e8)) for name in ENERGIES}
SUMS = {name + span: known for name, known in _SUMS.items() for span in SPANS}

KNOWN_VARIABLES: Mapping[str, KnownVariable] = MappingProxyType(_VARIABLES | SOIL | SUMS)
# Standard names of quantities that are easily confused with one of the above.
MISTAKABLE = frozenset(
    {
        "geopotential_height",
        "surface_altitude",
        "air_potential_temperature",
        "virtual_temperature",
        "humidity_mixing_ratio",
        "upward_air_velocity",
        "mole_fraction_of_ozone_in_air",
        "convection_time_fraction",
    }
)
STANDARD_NAMES = MISTAKABLE | {
    name for known in KNOWN_VARIABLES.values() for name in known.standard_names
}


GRAVITY = 9.80665  # m s-2, standard acceleration of free fall (CGPM 1901)
WATER = 1000.0  # kg m-3
UNSPECIFIED_UNITS = ("", "unknown", "undefined")
# Standard names of heights, which are converted to geopotential from `gpm`.
HEIGHTS = ("geopotential_height", "surface_altitude")

# new = old * scale + offset
CONVERSIONS: dict[tuple[str, str], tuple[float, float]] = {
    ("hPa", "Pa"): (100.0, 0.0),
    ("kPa", "Pa"): (1000.0, 0.0),
    ("degC", "K"): (1.0, 273.15),
    ("degF", "K"): (5 / 9, 273.15 - 32 * 5 / 9),
    ("gpm", "m2 s-2"): (GRAVITY, 0.0),
    ("m", "m2 s-2"): (GRAVITY, 0.0),
    ("gpm", "m"): (1.0, 0.0),
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


def parse_conversion(text: str) -> tuple[float, float]:
    """Parse `FROM->TO` into `(scale, offset)`, with new = old * scale + offset.

    FROM may equal TO: then values do not change.
    """
    old, new = _split_conversion(text)
    if old == new:
        return 1.0, 0.0
    if (old, new) not in CONVERSIONS:
        raise _unknown_conversion_error("data.variables.NAME.convert", text)
    return CONVERSIONS[old, new]


def find_conversion(old: str, new: str) -> tuple[float, float] | None:
    """Return `(scale, offset)` from one unit to another, with new = old * scale + offset.

    None if there is no such conversion. An unspecified unit is taken for the other one.
    """
    before, after = canonical_unit(old), canonical_unit(new)
    if before == after or {before, after} & set(UNSPECIFIED_UNITS):
        return 1.0, 0.0
    if (before, after) in CONVERSIONS:
        return CONVERSIONS[before, after]
    if (after, before) in CONVERSIONS:
        scale, offset = CONVERSIONS[after, before]
        return 1 / scale, -offset / scale
    return None


def converted_unit(source: Source, name: str, config: DataConfig) -> str:
    """Return the unit after the config's conversion, or the store's without a conversion."""
    convert = config.variable_config(name).convert
    if convert is not None:
        return convert.split("->")[1].strip()
    return source.variables[name].units


@final
@dataclass(frozen=True)
class _UnitMismatch:
    """A variable whose unit or quantity is not the expected one.

    Attributes:
        name: of the variable.
        problem: its unit or quantity, and the expected one, as text.
        convert: the conversion to set; None to set none.
        relabels: `convert` changes no values, it only declares the store's text to be wrong. That
            is right if the values are in the expected unit already.
    """

    name: str
    problem: str
    convert: str | None
    relabels: bool = False


def find_known(name: str) -> KnownVariable | None:
    """Return what is known of a variable, under any of its names."""
    return KNOWN_VARIABLES.get(name) or KNOWN_VARIABLES.get(canonical_name(name))


def usual_unit(name: str) -> str:
    """Return the unit that a variable has in most stores, empty if the variable is unknown."""
    known = find_known(name)
    return "" if known is None else known.unit


def check_units(source: Source, config: DataConfig) -> None:
    """Refuse variables whose unit or quantity is not the expected one.

    Unknown variables pass, and so do variables without a unit.

    Raises:
        UserError: names all such variables, with a command-line override that converts them.
    """
    mismatches = []
    for name in (*config.prognostic, *config.diagnostic, *config.forcing, *config.static):
        known = find_known(name)
        if known is None or name not in source.variables:
            continue
        convert = config.variable_config(name).convert
        if convert is None:
            mismatch = _check_unconverted(name, source.variables[name], known)
        else:
            mismatch = _check_converted(source.where, name, source.variables[name], known, convert)
        mismatches += [mismatch] if mismatch is not None else []
    if mismatches:
        problems = "; ".join(each.problem for each in mismatches)
        raise UserError(f"{source.where}: {problems}. {_advice(mismatches)}")


def _check_unconverted(
    name: str, variable: VariableInfo, known: KnownVariable
) -> _UnitMismatch | None:
    """Return the mismatch of a variable without a conversion; None if it has the expected unit."""
    unit = canonical_unit(variable.units)
    if unit not in (*UNSPECIFIED_UNITS, canonical_unit(known.unit)):
        return _mismatch(name, f"is in {variable.units}, but {known.unit} is needed", unit, known)
    standard_name = variable.standard_name
    if (
        standard_name in STANDARD_NAMES
        and known.standard_names
        and standard_name not in known.standard_names
    ):
        problem = f"has the standard name {standard_name}, but {known.standard_names[0]} is needed"
        return _mismatch(name, problem, "gpm" if standard_name in HEIGHTS else known.unit, known)
    return None


def _check_converted(
    where: str, name: str, variable: VariableInfo, known: KnownVariable, convert: str
) -> _UnitMismatch | None:
    """Return the mismatch of a conversion with the store's unit; None if they agree."""
    key = f"data.variables.{name}.convert"
    old, new = _split_conversion(convert)
    unit, needed = canonical_unit(variable.units), canonical_unit(known.unit)
    if new != needed:
        raise UserError(f"{where}: {name} needs {key} to {known.unit}, got {convert!r}.")
    if old != new and (old, new) not in CONVERSIONS:
        raise _unknown_conversion_error(f"{where}: {key}", convert)
    is_convertible = unit == needed or (unit, needed) in CONVERSIONS
    # A unit that is neither the needed one nor convertible to it says nothing: trust the config.
    if not is_convertible or unit == old:
        return None
    problem = f"is in {variable.units}, but {key} is {convert!r}"
    if unit == needed:
        return _UnitMismatch(name, f"{name} {problem}", None)
    return _mismatch(name, problem, unit, known)


def _mismatch(name: str, problem: str, unit: str, known: KnownVariable) -> _UnitMismatch:
    relabels = (unit, canonical_unit(known.unit)) not in CONVERSIONS
    convert = f"{known.unit if relabels else unit}->{known.unit}"
    return _UnitMismatch(name, f"{name} {problem}", convert, relabels)


def _advice(mismatches: Sequence[_UnitMismatch]) -> str:
    certain = [mismatch for mismatch in mismatches if not mismatch.relabels]
    uncertain = [mismatch for mismatch in mismatches if mismatch.relabels]
    parts = [f"Set {_override(certain)}"] if certain else []
    if uncertain:
        only = f"only {'these names are' if len(uncertain) > 1 else 'this name is'} wrong"
        change = "change" if parts else "Change"
        parts.append(f"{change} data.store, or if {only}, set {_override(uncertain)}")
    return "; ".join(parts) + "."


def _override(mismatches: Sequence[_UnitMismatch]) -> str:
    """Return `data.variables={...}`, quoted for a shell.

    Hydra merges the entries into the config. The braces allow any name, the quotes any unit.
    """
    # JSON quotes are valid in Hydra's override grammar, and None becomes null.
    entries = (
        f"{mismatch.name}:{{convert:{json.dumps(mismatch.convert)}}}" for mismatch in mismatches
    )
    return shlex.quote(f"data.variables={{{','.join(entries)}}}")


def _unknown_conversion_error(key: str, text: str) -> UserError:
    known = ", ".join(f"{old}->{new}" for old, new in CONVERSIONS)
    return UserError(
        f"{key}: needs one of {known}, got {text!r}. A dimensionless unit is 1, like kg kg-1."
    )


def _split_conversion(text: str) -> tuple[str, str]:
    old, _, new = text.partition("->")
    return canonical_unit(old), canonical_unit(new)


# Source: the accumulated parameters of ERA5's hourly data, by their names in the Climate Data Store
# (ECMWF, "ERA5: data documentation", table 3). Other names, such as `tp`, count as these.
ACCUMULATED = frozenset(
    {
        *DEPTHS,
        *ENERGIES,
        "boundary_layer_dissipation",
        "clear_sky_direct_solar_radiation_at_surface",
        "convective_snowfall",
        "downward_uv_radiation_at_the_surface",
        "eastward_turbulent_surface_stress",
        "large_scale_precipitation_fraction",
        "large_scale_snowfall",
        "northward_turbulent_surface_stress",
        "snow_evaporation",
        "sub_surface_runoff",
        "surface_net_solar_radiation_clear_sky",
        "surface_net_thermal_radiation_clear_sky",
        "surface_solar_radiation_downward_clear_sky",
        "surface_thermal_radiation_downward_clear_sky",
        "top_net_solar_radiation_clear_sky",
        "top_net_thermal_radiation_clear_sky",
        "total_sky_direct_solar_radiation_at_surface",
    }
)


def is_accumulated(name: str, config: DataConfig) -> bool:
    """Whether a variable is a sum since the previous time, by the config, otherwise by its name."""
    given = config.variable_config(name).accumulated
    return canonical_name(name) in ACCUMULATED if given is None else given


# ERA5's names, as in the Climate Data Store and WeatherBench 2; other names are translated first.
# Net thermal radiation, fluxes and evaporation are not listed because they have both signs.
NONNEGATIVE = (
    "*_cloud_cover",
    "*_precipitation",
    "*_precipitation_*hr",
    "*_snowfall",
    "*_wind_speed",
    "fraction_of_cloud_cover",
    "ozone_mass_mixing_ratio",
    "relative_humidity",
    "sea_ice_cover",
    "significant_height_of_*",
    "snow_depth",
    "snowfall",
    "specific_cloud_*_water_content",
    "specific_humidity",
    "specific_total_water",
    "specific_rain_water_content",
    "specific_snow_water_content",
    "*surface_net_solar_radiation*",
    "*surface_solar_radiation_downward*",
    "*surface_thermal_radiation_downward*",
    "toa_incident_solar_radiation*",
    "top_net_solar_radiation*",
    "total_column_*water*",
    "total_column_cloud_*",
    "total_column_ozone",
    "volumetric_soil_water_layer_*",
    "wind_speed",
)


def is_nonnegative(name: str, variable: VariableConfig) -> bool:
    """Whether a variable can't be negative, by the config, otherwise by its name.

    Variables normalised by `sqrt` or `log1p` can't: these map negative values to zero.
    """
    if variable.nonnegative is not None:
        return variable.nonnegative
    if variable.is_transformed and variable.normalise != "quantile":
        return True
    return any(fnmatchcase(canonical_name(name), pattern) for pattern in NONNEGATIVE)
