"""ECMWF's short names, and the long ones under which WeatherBench 2 and ARCO-ERA5 have the same.

Source: ECMWF parameter database.
"""

from collections.abc import Mapping
from types import MappingProxyType

UPPER: Mapping[str, str] = MappingProxyType(
    {
        "z": "geopotential",
        "t": "temperature",
        "u": "u_component_of_wind",
        "v": "v_component_of_wind",
        "w": "vertical_velocity",
        "q": "specific_humidity",
        "r": "relative_humidity",
        "vo": "vorticity",
        "d": "divergence",
        "pv": "potential_vorticity",
        "o3": "ozone_mass_mixing_ratio",
        "cc": "fraction_of_cloud_cover",
        "clwc": "specific_cloud_liquid_water_content",
        "ciwc": "specific_cloud_ice_water_content",
        "crwc": "specific_rain_water_content",
        "cswc": "specific_snow_water_content",
    }
)
CONSTANTS: Mapping[str, str] = MappingProxyType(
    {
        "z": "geopotential_at_surface",
        "lsm": "land_sea_mask",
        "sdor": "standard_deviation_of_orography",
        "sdfor": "standard_deviation_of_filtered_subgrid_orography",
        "slor": "slope_of_sub_gridscale_orography",
        "isor": "anisotropy_of_sub_gridscale_orography",
        "anor": "angle_of_sub_gridscale_orography",
        "cl": "lake_cover",
        "dl": "lake_depth",
        "cvh": "high_vegetation_cover",
        "cvl": "low_vegetation_cover",
        "tvh": "type_of_high_vegetation",
        "tvl": "type_of_low_vegetation",
        "slt": "soil_type",
        "cos_latitude": "cos_latitude",
        "sin_latitude": "sin_latitude",
        "cos_longitude": "cos_longitude",
        "sin_longitude": "sin_longitude",
    }
)
SURFACE: Mapping[str, str] = MappingProxyType(
    {
        "2t": "2m_temperature",
        "2d": "2m_dewpoint_temperature",
        "10u": "10m_u_component_of_wind",
        "10v": "10m_v_component_of_wind",
        "100u": "100m_u_component_of_wind",
        "100v": "100m_v_component_of_wind",
        "msl": "mean_sea_level_pressure",
        "sp": "surface_pressure",
        "skt": "skin_temperature",
        "sst": "sea_surface_temperature",
        "ci": "sea_ice_cover",
        "siconc": "sea_ice_cover",
        "istl1": "ice_temperature_layer_1",
        "sd": "snow_depth",
        "rsn": "snow_density",
        "tsn": "temperature_of_snow_layer",
        "tcc": "total_cloud_cover",
        "lcc": "low_cloud_cover",
        "mcc": "medium_cloud_cover",
        "hcc": "high_cloud_cover",
        "tcw": "total_column_water",
        "tcwv": "total_column_water_vapour",
        "blh": "boundary_layer_height",
        "cape": "convective_available_potential_energy",
        "i10fg": "instantaneous_10m_wind_gust",
        "tp": "total_precipitation",
        "lsp": "large_scale_precipitation",
        "cp": "convective_precipitation",
        "sf": "snowfall",
        "e": "evaporation",
        "ro": "runoff",
        "sro": "surface_runoff",
        "smlt": "snowmelt",
        "tisr": "toa_incident_solar_radiation",
        "tsr": "top_net_solar_radiation",
        "ttr": "top_net_thermal_radiation",
        "ssrd": "surface_solar_radiation_downwards",
        "strd": "surface_thermal_radiation_downwards",
        "ssr": "surface_net_solar_radiation",
        "str": "surface_net_thermal_radiation",
        "sshf": "surface_sensible_heat_flux",
        "slhf": "surface_latent_heat_flux",
        # Those that begin with a digit are turned round in the CDS's netCDF files.
        "t2m": "2m_temperature",
        "d2m": "2m_dewpoint_temperature",
        "u10": "10m_u_component_of_wind",
        "v10": "10m_v_component_of_wind",
        "u100": "100m_u_component_of_wind",
        "v100": "100m_v_component_of_wind",
        **{f"stl{layer}": f"soil_temperature_level_{layer}" for layer in "1234"},
        **{f"swvl{layer}": f"volumetric_soil_water_layer_{layer}" for layer in "1234"},
    }
)


def long_name(short: str) -> tuple[str, int | None]:
    """`z_500` -> `("geopotential", 500)`; `2t` -> `("2m_temperature", None)`; others unchanged."""
    variable, _, level = short.rpartition("_")
    if variable in UPPER and level.isdecimal():
        return UPPER[variable], int(level)
    return {**SURFACE, **CONSTANTS}.get(short, short), None


def meaning(name: str) -> str:
    """The long name of a variable by whatever name a store has it: `t`, `t_500`, `2t`, `t2m`.

    `z`, at the surface or on levels, is `geopotential_at_surface`.
    """
    long, _ = long_name(name)
    return UPPER.get(long, long)
