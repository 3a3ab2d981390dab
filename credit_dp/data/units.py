"""Units that stores give, checked against those that a model is to see; conversions by name."""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig, VariableConfig
from credit_dp.data.sources.base import Source, Times, VariableInfo
from credit_dp.errors import UserError
from credit_dp.variable_names import canonical_name

DIMENSIONLESS = "1"
# Whole texts that are no product of units; "~" is ECMWF's for a type or an index.
WORDS = {
    "dimensionless": "1",
    "unitless": "1",
    "none": "1",
    "fraction": "1",
    "proportion": "1",
    "numeric": "1",
    "index": "1",
    "~": "1",
    "-": "1",
    "0-1": "1",
    "percent": "%",
    "celsius": "degC",
    "degrees celsius": "degC",
    "degree celsius": "degC",
    "fahrenheit": "degF",
    "geopotential metre": "gpm",
    "geopotential meter": "gpm",
    "m of water equivalent": "m",
    "m of water": "m",
    "mm of water equivalent": "mm",
}
SYMBOLS = {
    "kelvin": "K",
    "degk": "K",
    "deg_k": "K",
    "c": "degC",
    "°c": "degC",
    "degc": "degC",
    "deg_c": "degC",
    "degree_c": "degC",
    "degrees_c": "degC",
    "degree_celsius": "degC",
    "degrees_celsius": "degC",
    "degf": "degF",
    "pascal": "Pa",
    "pascals": "Pa",
    "mb": "hPa",
    "mbar": "hPa",
    "millibar": "hPa",
    "millibars": "hPa",
    "hectopascal": "hPa",
    "metre": "m",
    "metres": "m",
    "meter": "m",
    "meters": "m",
    "millimetre": "mm",
    "millimeter": "mm",
    "second": "s",
    "seconds": "s",
    "sec": "s",
    "hour": "h",
    "hours": "h",
    "hr": "h",
    "knot": "kt",
    "knots": "kt",
    "radian": "rad",
    "radians": "rad",
}
FACTOR = re.compile(r"(/?)([A-Za-z°%_]+|1(?![\d.]))(?:\^?\(?([+-]?\d+)\)?)?")


def canonical_unit(text: str) -> str:
    """`m**2 s**-2`, `m2 s-2` and `m^2/s^2` -> `m2 s-2`; `(0 - 1)` and `kg/kg` -> `1`; K -> `K`.

    A text that is no product of powers comes back as it is, without spaces around it.
    """
    bare = text.strip()
    word = re.sub(r"\s+", " ", bare.strip("()[] ")).lower()
    word = WORDS.get(word.replace(" - ", "-"), WORDS.get(word, ""))
    if word:
        return word
    factors = re.sub(r"\*\*", "^", re.sub(r"[{}]|^[(\[]|[)\]]$", "", bare))
    factors = re.sub(r"\s*([/^])\s*", r"\1", factors)
    factors = re.sub(r"(?<=[A-Za-z0-9)])[.*·](?=[A-Za-z])", " ", factors).replace("/", " /")
    powers: Counter[str] = Counter()
    for factor in factors.split():
        found = FACTOR.fullmatch(factor)
        if not found:
            return bare
        slash, symbol, power = found.groups()
        if symbol != DIMENSIONLESS:
            powers[SYMBOLS.get(symbol.lower(), symbol)] += int(power or 1) * (-1 if slash else 1)
    return _format_powers(powers) if factors.split() else ""


def _format_powers(powers: Counter[str]) -> str:
    """Positive powers first, then by name; `1` if all cancel."""
    order = sorted((power < 0, symbol) for symbol, power in powers.items() if power)
    parts = [symbol if powers[symbol] == 1 else f"{symbol}{powers[symbol]}" for _, symbol in order]
    return " ".join(parts) or DIMENSIONLESS


@final
@dataclass(frozen=True)
class KnownVariable:
    """Of one variable: its unit, and the standard names under which stores have it."""

    unit: str
    standard_names: tuple[str, ...] = ()


def _parse_known(table: Mapping[str, str]) -> dict[str, KnownVariable]:
    """From `name: "unit: standard names"`."""
    found = {}
    for name, text in table.items():
        unit, _, names = text.partition(":")
        found[name] = KnownVariable(unit.strip(), tuple(names.split()))
    return found


UPPER = _parse_known(
    {
        "geopotential": "m2 s-2: geopotential",
        "temperature": "K: air_temperature",
        "u_component_of_wind": "m s-1: eastward_wind x_wind",
        "v_component_of_wind": "m s-1: northward_wind y_wind",
        "vertical_velocity": "Pa s-1: lagrangian_tendency_of_air_pressure",
        "specific_humidity": "kg kg-1: specific_humidity",
        "relative_humidity": "%: relative_humidity",
        "vorticity": "s-1: atmosphere_relative_vorticity",
        "divergence": "s-1: divergence_of_wind",
        "potential_vorticity": "K m2 kg-1 s-1: ertel_potential_vorticity",
        "ozone_mass_mixing_ratio": "kg kg-1: mass_fraction_of_ozone_in_air",
        "fraction_of_cloud_cover": "1: cloud_area_fraction_in_atmosphere_layer",
        "specific_cloud_liquid_water_content": "kg kg-1: "
        "mass_fraction_of_cloud_liquid_water_in_air",
        "specific_cloud_ice_water_content": "kg kg-1: mass_fraction_of_cloud_ice_in_air",
        "specific_rain_water_content": "kg kg-1",
        "specific_snow_water_content": "kg kg-1",
        "wind_speed": "m s-1: wind_speed",
    }
)
SURFACE = _parse_known(
    {
        "2m_temperature": "K: air_temperature",
        "2m_dewpoint_temperature": "K: dew_point_temperature",
        "10m_u_component_of_wind": "m s-1: eastward_wind x_wind",
        "10m_v_component_of_wind": "m s-1: northward_wind y_wind",
        "100m_u_component_of_wind": "m s-1: eastward_wind x_wind",
        "100m_v_component_of_wind": "m s-1: northward_wind y_wind",
        "10m_wind_speed": "m s-1: wind_speed",
        "mean_sea_level_pressure": "Pa: air_pressure_at_mean_sea_level air_pressure_at_sea_level",
        "surface_pressure": "Pa: surface_air_pressure",
        "skin_temperature": "K: surface_temperature",
        "sea_surface_temperature": "K: sea_surface_temperature surface_temperature "
        "sea_surface_skin_temperature",
        "sea_ice_cover": "1: sea_ice_area_fraction",
        "ice_temperature_layer_1": "K: sea_ice_temperature",
        "snow_depth": "m: lwe_thickness_of_surface_snow_amount",
        "snow_density": "kg m-3: snow_density",
        "temperature_of_snow_layer": "K: temperature_in_surface_snow",
        "total_cloud_cover": "1: cloud_area_fraction",
        "low_cloud_cover": "1: low_type_cloud_area_fraction cloud_area_fraction",
        "medium_cloud_cover": "1: medium_type_cloud_area_fraction cloud_area_fraction",
        "high_cloud_cover": "1: high_type_cloud_area_fraction cloud_area_fraction",
        "total_column_water": "kg m-2: atmosphere_mass_content_of_water "
        "lwe_thickness_of_atmosphere_mass_content_of_water",
        "total_column_water_vapour": "kg m-2: atmosphere_mass_content_of_water_vapor "
        "lwe_thickness_of_atmosphere_mass_content_of_water_vapor",
        "boundary_layer_height": "m: atmosphere_boundary_layer_thickness",
        "convective_available_potential_energy": "J kg-1: "
        "atmosphere_convective_available_potential_energy",
        "instantaneous_10m_wind_gust": "m s-1: wind_speed_of_gust",
    }
)
SOIL = {
    name: KnownVariable(unit, (standard_name,))
    for layer in "1234"
    for name, unit, standard_name in (
        (f"soil_temperature_level_{layer}", "K", "soil_temperature"),
        (
            f"volumetric_soil_water_layer_{layer}",
            "m3 m-3",
            "volume_fraction_of_condensed_water_in_soil",
        ),
    )
}
# Sums since the time before: of water as a depth, of energy per area.
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
SUMS = {name + span: KnownVariable("m") for name in DEPTHS for span in SPANS}
SUMS |= {name + span: KnownVariable("J m-2") for name in ENERGIES for span in SPANS}
STATICS = _parse_known(
    {
        "geopotential_at_surface": "m2 s-2: surface_geopotential geopotential",
        "land_sea_mask": "1: land_binary_mask land_area_fraction",
        "lake_cover": "1",
        "lake_depth": "m: sea_floor_depth_below_sea_level",
        "high_vegetation_cover": "1: vegetation_area_fraction",
        "low_vegetation_cover": "1: vegetation_area_fraction",
        "standard_deviation_of_orography": "m",
        "standard_deviation_of_filtered_subgrid_orography": "m",
        "slope_of_sub_gridscale_orography": "1",
        "anisotropy_of_sub_gridscale_orography": "1",
        "angle_of_sub_gridscale_orography": "rad",
    }
)

KNOWN_VARIABLES: Mapping[str, KnownVariable] = MappingProxyType(
    UPPER | SURFACE | SOIL | SUMS | STATICS
)
# Standard names of things that are taken for one of the above.
MISTAKABLE = frozenset(
    {
        "geopotential_height",
        "surface_altitude",
        "air_potential_temperature",
        "virtual_temperature",
        "humidity_mixing_ratio",
        "upward_air_velocity",
    }
)
STANDARD_NAMES = MISTAKABLE | {
    name for known in KNOWN_VARIABLES.values() for name in known.standard_names
}


GRAVITY = 9.80665  # m s-2, standard acceleration of free fall (CGPM 1901)
WATER = 1000.0  # kg m-3
UNSPECIFIED_UNITS = ("", "unknown", "undefined")
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


def parse_conversion(text: str) -> tuple[float, float]:
    """`FROM->TO` as `(scale, offset)`: new = old * scale + offset. FROM may be TO: nothing changes.

    Raises:
        UserError: no such conversion is known.
    """
    old, new = _split_conversion(text)
    if old == new:
        return 1.0, 0.0
    if (old, new) not in CONVERSIONS:
        raise _unknown_conversion_error("data.variables.NAME.convert", text)
    return CONVERSIONS[old, new]


def converted_unit(source: Source, name: str, config: DataConfig) -> str:
    """The unit that a model sees: what the store is converted to, or else the store's."""
    convert = config.of(name).convert
    if convert is not None:
        return convert.split("->")[1].strip()
    return source.variables[name].units


@final
@dataclass(frozen=True)
class _UnitMismatch:
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
        known = KNOWN_VARIABLES.get(name) or KNOWN_VARIABLES.get(canonical_name(name))
        if known is None or name not in source.variables:
            continue
        convert = config.of(name).convert
        if convert is None:
            found = _check_unconverted(name, source.variables[name], known)
        else:
            found = _check_converted(source.where, name, source.variables[name], known, convert)
        wrong += [found] if found is not None else []
    if wrong:
        whats = "; ".join(one.what for one in wrong)
        raise UserError(f"{source.where}: {whats}. {_advice(wrong)}")


def _check_unconverted(
    name: str, variable: VariableInfo, known: KnownVariable
) -> _UnitMismatch | None:
    """What is wrong with a variable that is taken as it is."""
    unit = canonical_unit(variable.units)
    if unit not in (*UNSPECIFIED_UNITS, canonical_unit(known.unit)):
        return _mismatch(name, f"is in {variable.units}, but {known.unit} is needed", unit, known)
    other = variable.standard_name
    if other in STANDARD_NAMES and known.standard_names and other not in known.standard_names:
        what = f"has the standard name {other}, but {known.standard_names[0]} is needed"
        return _mismatch(name, what, "gpm" if other in HEIGHTS else known.unit, known)
    return None


def _check_converted(
    where: str, name: str, variable: VariableInfo, known: KnownVariable, convert: str
) -> _UnitMismatch | None:
    """What is wrong with a variable that is converted: from what it is in, to what is needed."""
    key = f"data.variables.{name}.convert"
    old, new = _split_conversion(convert)
    unit, needed = canonical_unit(variable.units), canonical_unit(known.unit)
    if new != needed:
        raise UserError(f"{where}: {name} needs {key} to {known.unit}, got {convert!r}.")
    if old != new and (old, new) not in CONVERSIONS:
        raise _unknown_conversion_error(f"{where}: {key}", convert)
    says = unit == needed or (unit, needed) in CONVERSIONS
    if not says or unit == old:
        return None
    what = f"is in {variable.units}, but {key} is {convert!r}"
    if unit == needed:
        return _UnitMismatch(name, f"{name} {what}", None)
    return _mismatch(name, what, unit, known)


def _mismatch(name: str, what: str, unit: str, known: KnownVariable) -> _UnitMismatch:
    """It is converted from `unit`; if that can't be done, from the needed unit itself."""
    vouches = (unit, canonical_unit(known.unit)) not in CONVERSIONS
    convert = f"{known.unit if vouches else unit}->{known.unit}"
    return _UnitMismatch(name, f"{name} {what}", convert, vouches)


def _advice(wrong: Sequence[_UnitMismatch]) -> str:
    """What to put on the command line; other entries of `data.variables` stay as they are."""
    sure = [one for one in wrong if not one.vouches]
    unsure = [one for one in wrong if one.vouches]
    parts = [f"Set {_override(sure)}"] if sure else []
    if unsure:
        only = f"only {'these names are' if len(unsure) > 1 else 'this name is'} wrong"
        change = "change" if parts else "Change"
        parts.append(f"{change} data.store, or if {only}, set {_override(unsure)}")
    return "; ".join(parts) + "."


def _override(wrong: Sequence[_UnitMismatch]) -> str:
    """`data.variables={...}` for a shell: the braces take any name, the quotes any unit."""
    entries = (
        f"{one.name}:{{convert:{'null' if one.convert is None else json.dumps(one.convert)}}}"
        for one in wrong
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
        "boundary_layer_dissipation",
        "clear_sky_direct_solar_radiation_at_surface",
        "convective_precipitation",
        "convective_snowfall",
        "downward_uv_radiation_at_the_surface",
        "eastward_turbulent_surface_stress",
        "evaporation",
        "large_scale_precipitation",
        "large_scale_precipitation_fraction",
        "large_scale_snowfall",
        "northward_turbulent_surface_stress",
        "potential_evaporation",
        "runoff",
        "snow_evaporation",
        "snowfall",
        "snowmelt",
        "sub_surface_runoff",
        "surface_latent_heat_flux",
        "surface_net_solar_radiation",
        "surface_net_solar_radiation_clear_sky",
        "surface_net_thermal_radiation",
        "surface_net_thermal_radiation_clear_sky",
        "surface_runoff",
        "surface_sensible_heat_flux",
        "surface_solar_radiation_downward_clear_sky",
        "surface_solar_radiation_downwards",
        "surface_thermal_radiation_downward_clear_sky",
        "surface_thermal_radiation_downwards",
        "toa_incident_solar_radiation",
        "top_net_solar_radiation",
        "top_net_solar_radiation_clear_sky",
        "top_net_thermal_radiation",
        "top_net_thermal_radiation_clear_sky",
        "total_precipitation",
        "total_sky_direct_solar_radiation_at_surface",
    }
)


def is_accumulated(name: str, config: DataConfig) -> bool:
    """Whether a variable's values are sums since the time before: as the config says, or known."""
    given = config.of(name).accumulated
    return canonical_name(name) in ACCUMULATED if given is None else given


def time_spacing(times: Times) -> np.timedelta64:
    """The most common distance of neighbouring times; of a single time, none."""
    if len(times) < 2:
        return np.timedelta64(0, "ns")
    steps, counts = np.unique(np.diff(times), return_counts=True)
    common: np.timedelta64 = steps[np.argmax(counts)]
    return common


def indices_on_step(times: Times, step: np.timedelta64) -> NDArray[np.intp]:
    """Places of the times that are whole steps after midnight 1970-01-01.

    If there are none, of those that are whole steps after the first time.
    """
    epoch = np.datetime64(0, "ns")
    places = np.flatnonzero((times - epoch) % step == np.timedelta64(0))
    return places if len(places) else np.flatnonzero((times - times[0]) % step == np.timedelta64(0))


def accumulation_windows(
    times: Times, places: NDArray[np.intp], step: np.timedelta64
) -> NDArray[np.intp]:
    """Places of all times in `(t - step, t]`, the earliest first: `(T, N)`, -1 where one is absent.

    Shapes:
        `times`: all of the store's; `places`: `(T,)`, those of the times `t`.
    """
    back = np.arange(np.timedelta64(0, "ns"), step, time_spacing(times))[::-1]
    wanted = times[places][:, None] - back
    found = np.minimum(np.searchsorted(times, wanted), len(times) - 1)
    return np.where(times[found] == wanted, found, -1)


# ERA5's names, as in the Climate Data Store and WeatherBench 2; other names are looked up by their
# meaning. Net thermal radiation, fluxes and evaporation are missing on purpose: they have both
# signs.
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
    """Whether a variable can't be below zero: as the config says, or as known of the name.

    What goes through `log1p` is not below zero: smaller values would be lost there.
    """
    if variable.nonnegative is not None:
        return variable.nonnegative
    if not math.isnan(variable.log1p_scale):
        return True
    return any(fnmatchcase(canonical_name(name), pattern) for pattern in NONNEGATIVE)
