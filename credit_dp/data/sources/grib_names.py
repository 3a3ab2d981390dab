"""GRIB: the codes of variables that can be written, and what variables are called in files.

Sources: WMO Manual on Codes, FM 92 GRIB edition 2, code table 4.2; ECMWF parameter database; the
names that ecCodes gives to NCEP's messages.
"""

from collections.abc import Mapping
from typing import NamedTuple

from credit_dp.variable_names import UPPER_AIR_NAMES, long_name

PRESSURE, MODEL, SINGLE = "isobaricInhPa", "hybrid", ""  # kinds of levels; SINGLE is any other


class GribCode(NamedTuple):
    """The code of a variable.

    Attributes:
        discipline, category, number: of the parameter.
        unit: of its values.
        level_type: ecCodes' type of level; `SINGLE` for a variable on pressure or model levels.
        level: of that type.
    """

    discipline: int
    category: int
    number: int
    unit: str
    level_type: str = SINGLE
    level: int = 0


def _parse_codes(table: Mapping[str, str]) -> dict[str, GribCode]:
    """Parse a table of `name: "discipline category number [level_type [level]]: unit"`."""
    codes = {}
    for name, text in table.items():
        numbers, _, unit = text.partition(":")
        discipline, category, number, *level = numbers.split()
        level_type = level[0] if level else SINGLE
        height = int(level[1]) if len(level) > 1 else 0
        parameter = int(discipline), int(category), int(number)
        codes[name] = GribCode(*parameter, unit.strip(), level_type, height)
    return codes


CODES: Mapping[str, GribCode] = _parse_codes(
    {
        "geopotential": "0 3 4: m2 s-2",
        "temperature": "0 0 0: K",
        "u_component_of_wind": "0 2 2: m s-1",
        "v_component_of_wind": "0 2 3: m s-1",
        "vertical_velocity": "0 2 8: Pa s-1",
        "specific_humidity": "0 1 0: kg kg-1",
        "relative_humidity": "0 1 1: %",
        "vorticity": "0 2 12: s-1",
        "divergence": "0 2 13: s-1",
        "potential_vorticity": "0 2 14: K m2 kg-1 s-1",
        "ozone_mass_mixing_ratio": "0 14 1: kg kg-1",
        "fraction_of_cloud_cover": "0 6 32: 1",
        "specific_cloud_liquid_water_content": "0 1 83: kg kg-1",
        "specific_cloud_ice_water_content": "0 1 84: kg kg-1",
        "specific_rain_water_content": "0 1 85: kg kg-1",
        "specific_snow_water_content": "0 1 86: kg kg-1",
        "wind_speed": "0 2 1: m s-1",
        "2m_temperature": "0 0 0 heightAboveGround 2: K",
        "2m_dewpoint_temperature": "0 0 6 heightAboveGround 2: K",
        "10m_u_component_of_wind": "0 2 2 heightAboveGround 10: m s-1",
        "10m_v_component_of_wind": "0 2 3 heightAboveGround 10: m s-1",
        "100m_u_component_of_wind": "0 2 2 heightAboveGround 100: m s-1",
        "100m_v_component_of_wind": "0 2 3 heightAboveGround 100: m s-1",
        "10m_wind_speed": "0 2 1 heightAboveGround 10: m s-1",
        "instantaneous_10m_wind_gust": "0 2 22 heightAboveGround 10: m s-1",
        "mean_sea_level_pressure": "0 3 0 meanSea: Pa",
        "surface_pressure": "0 3 0 surface: Pa",
        "skin_temperature": "0 0 17 surface: K",
        "sea_surface_temperature": "10 3 0 surface: K",
        "sea_ice_cover": "10 2 0 surface: 1",
        "snow_depth": "0 1 60 surface: kg m-2",
        "snow_density": "0 1 61 surface: kg m-3",
        "total_cloud_cover": "0 6 1 entireAtmosphere: %",
        "low_cloud_cover": "0 6 3 surface: %",
        "medium_cloud_cover": "0 6 4 surface: %",
        "high_cloud_cover": "0 6 5 surface: %",
        "total_column_water": "0 1 51 entireAtmosphere: kg m-2",
        "total_column_water_vapour": "0 1 64 entireAtmosphere: kg m-2",
        "boundary_layer_height": "0 3 18 surface: m",
        "convective_available_potential_energy": "0 7 6 entireAtmosphere: J kg-1",
        **{f"soil_temperature_level_{layer}": f"2 3 18 soilLayer {layer}: K" for layer in "1234"},
        **{
            f"volumetric_soil_water_layer_{layer}": f"2 0 25 soilLayer {layer}: m3 m-3"
            for layer in "1234"
        },
        "total_precipitation": "0 1 52 surface: kg m-2",
        "large_scale_precipitation": "0 1 54 surface: kg m-2",
        "convective_precipitation": "0 1 37 surface: kg m-2",
        "snowfall": "0 1 53 surface: kg m-2",
        "toa_incident_solar_radiation": "0 4 7 nominalTop: J m-2",
        "top_net_solar_radiation": "0 4 9 nominalTop: J m-2",
        "top_net_thermal_radiation": "0 5 5 nominalTop: J m-2",
        "surface_solar_radiation_downwards": "0 4 7 surface: J m-2",
        "surface_thermal_radiation_downwards": "0 5 3 surface: J m-2",
        "surface_net_solar_radiation": "0 4 9 surface: J m-2",
        "surface_net_thermal_radiation": "0 5 5 surface: J m-2",
        "surface_sensible_heat_flux": "0 0 11 surface: J m-2",
        "surface_latent_heat_flux": "0 0 10 surface: J m-2",
    }
)

# Short names of messages besides those of ECMWF in `variable_names`, the best first: NCEP's, the
# parameters of edition 2 without a layer in their name, and heights for geopotential. Names of
# variables on levels that are on another level here carry it, see `message_name`.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "geopotential": ("gh", "HGT"),
    "ozone_mass_mixing_ratio": ("o3mr",),
    "specific_cloud_liquid_water_content": ("clwmr",),
    "specific_cloud_ice_water_content": ("icmr",),
    "specific_rain_water_content": ("rwmr",),
    "specific_snow_water_content": ("snmr",),
    "wind_speed": ("ws",),
    "10m_wind_speed": ("10si", "ws heightAboveGround 10"),
    "100m_u_component_of_wind": ("u heightAboveGround 100",),
    "100m_v_component_of_wind": ("v heightAboveGround 100",),
    "mean_sea_level_pressure": ("prmsl", "mslet"),
    "skin_temperature": ("t surface 0",),
    "snow_depth": ("sdwe",),
    "total_column_water_vapour": ("pwat",),
    **{f"soil_temperature_level_{layer}": (f"sot soilLayer {layer}",) for layer in "1234"},
    **{f"volumetric_soil_water_layer_{layer}": (f"vsw soilLayer {layer}",) for layer in "1234"},
}
# Layers of clouds, of the ground or between heights have the names of other variables.
SINGLE_LEVEL_TYPES = frozenset(
    {
        *("surface", "meanSea", "heightAboveGround", "nominalTop", "entireAtmosphere"),
        *("atmosphere", "atmosphereSingleLayer", "lowCloudLayer", "middleCloudLayer"),
        *("highCloudLayer", "soilLayer", "depthBelowLand", "depthBelowLandLayer"),
        *("snowLayer", "seaIceLayer", "iceLayerOnWater", "oceanSurface"),
    }
)


def message_name(short_name: str, kind: str, level_type: str, level: int) -> str:
    """Return the name under which a message is listed.

    Names of variables on levels say little on other ones, `t` for example at the surface: type and
    level follow.
    """
    needs_level = short_name in {*UPPER_AIR_NAMES, "ws", "sot", "vsw"}
    return f"{short_name} {level_type} {level}" if kind == SINGLE and needs_level else short_name


def code_of(variable: str, level: int | None) -> GribCode | None:
    """Return the code of a field; None if there is none."""
    code = CODES.get(long_name(variable, level)[0])
    on_levels = long_name(variable, level)[1] is not None
    return code if code is not None and (code.level_type == SINGLE) == on_levels else None
