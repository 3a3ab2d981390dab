"""The units that a model is to see, and the CF standard names that go with them, by variable.

Source: ERA5 parameter database (ECMWF) for names and units, CF standard name table for the names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final


@final
@dataclass(frozen=True)
class Known:
    """Of one variable: its unit, and the standard names under which stores have it."""

    unit: str
    standard_names: tuple[str, ...] = ()


def _known(table: Mapping[str, str]) -> dict[str, Known]:
    """From `name: "unit: standard names"`."""
    found = {}
    for name, text in table.items():
        unit, _, names = text.partition(":")
        found[name] = Known(unit.strip(), tuple(names.split()))
    return found


UPPER = _known(
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
SURFACE = _known(
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
    name: Known(unit, (standard_name,))
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
SUMS = {name + span: Known("m") for name in DEPTHS for span in SPANS}
SUMS |= {name + span: Known("J m-2") for name in ENERGIES for span in SPANS}
STATICS = _known(
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

KNOWN: Mapping[str, Known] = MappingProxyType(UPPER | SURFACE | SOIL | SUMS | STATICS)
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
STANDARD_NAMES = MISTAKABLE | {name for known in KNOWN.values() for name in known.standard_names}
