"""Translate the names of ERA5's variables in different stores.

The canonical name of a variable is its long name in WeatherBench 2, ARCO-ERA5 and the Climate Data
Store. Short names are ECMWF's, as in GRIB files, in anemoi's datasets and (beginning with a letter)
in the netCDF files of cfgrib and the Climate Data Store. NCAR's copy of ERA5 has short names in
capitals; the training data of miles-credit has these, and a few others. WRF has its own; its `U10`
and `V10` are not here, as they follow its rows and columns. Names of CMIP6 are here if ERA5 has the
same quantity, be it in another unit; its fluxes are no sums, and keep their names.

Sources: ECMWF parameter database; NCAR RDA d633000; the configs of miles-credit; WRF's registry;
CMIP6 data request 01.00.33.

Imports nothing of this package, because the config imports it.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType


def _with_ncar_names(names: Mapping[str, str], **others: str) -> Mapping[str, str]:
    """Return `names`, the same as NCAR writes them (`SP`, and for `2t` `VAR_2T`), and `others`."""
    capitals = {("VAR_" if x[0].isdigit() else "") + x.upper(): names[x] for x in names}
    return MappingProxyType({**names, **capitals, **others})


# GRIB has other quantities under some of these: a store's variables need the standard name, too.
CMIP6_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "zg": "geopotential",
        "ta": "temperature",
        "ua": "u_component_of_wind",
        "va": "v_component_of_wind",
        "wap": "vertical_velocity",
        "hus": "specific_humidity",
        "hur": "relative_humidity",
        "clw": "specific_cloud_liquid_water_content",
        "cli": "specific_cloud_ice_water_content",
        "tas": "2m_temperature",
        "tdps": "2m_dewpoint_temperature",
        "uas": "10m_u_component_of_wind",
        "vas": "10m_v_component_of_wind",
        "sfcWind": "10m_wind_speed",
        "psl": "mean_sea_level_pressure",
        "ps": "surface_pressure",
        "ts": "skin_temperature",
        "tos": "sea_surface_temperature",
        "clt": "total_cloud_cover",
        "prw": "total_column_water_vapour",
        "orog": "geopotential_at_surface",
        "sftlf": "land_sea_mask",
    }
)


def _cmip6(*names: str) -> Mapping[str, str]:
    return {name: CMIP6_NAMES[name] for name in names}


# Variables on levels.
UPPER_AIR_NAMES = _with_ncar_names(
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
    },
    **_cmip6("zg", "ta", "ua", "va", "wap", "hus", "hur", "clw", "cli"),
)
# Variables without levels that are constant in time.
STATIC_NAMES = _with_ncar_names(
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
    },
    Z_GDS4_SFC="geopotential_at_surface",
    LANDMASK="land_sea_mask",
    **_cmip6("orog", "sftlf"),
)
# Variables without levels that change in time.
SURFACE_NAMES = _with_ncar_names(
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
        "u10n": "10m_u_component_of_neutral_wind",
        "v10n": "10m_v_component_of_neutral_wind",
        "ewss": "eastward_turbulent_surface_stress",
        "nsss": "northward_turbulent_surface_stress",
        "iews": "instantaneous_eastward_turbulent_surface_stress",
        "inss": "instantaneous_northward_turbulent_surface_stress",
        "lgws": "eastward_gravity_wave_surface_stress",
        "mgws": "northward_gravity_wave_surface_stress",
        **{f"stl{layer}": f"soil_temperature_level_{layer}" for layer in "1234"},
        **{f"swvl{layer}": f"volumetric_soil_water_layer_{layer}" for layer in "1234"},
    },
    # A netCDF name begins with a letter: `2t` becomes `t2m`.
    t2m="2m_temperature",
    d2m="2m_dewpoint_temperature",
    u10="10m_u_component_of_wind",
    v10="10m_v_component_of_wind",
    u100="100m_u_component_of_wind",
    v100="100m_v_component_of_wind",
    SSTK="sea_surface_temperature",
    T2="2m_temperature",
    PSFC="surface_pressure",
    TSK="skin_temperature",
    tsi="toa_incident_solar_radiation",
    **_cmip6("tas", "tdps", "uas", "vas", "sfcWind", "psl", "ps", "ts", "tos", "clt", "prw"),
)

SINGLE_LEVEL_NAMES: Mapping[str, str] = MappingProxyType({**SURFACE_NAMES, **STATIC_NAMES})
# `z_500`, or from three digits on `Z500`: the numbers of `t2` and `u10` are heights in metres.
NAME_WITH_LEVEL = re.compile(r"(.+)_(\d+)|(\D+)(\d{3,})")


def long_name(name: str, level: int | None = None) -> tuple[str, int | None]:
    """Return the long name of a field and its level.

    Without a dim of levels `z_500` and `Z500` -> `("geopotential", 500)`; `2t` ->
    `("2m_temperature", None)`; `z` -> `("geopotential_at_surface", None)`. An unknown name is
    returned unchanged.

    Args:
        level: of a field with a dim of levels; `z` is then the geopotential.
    """
    if level is not None:
        return UPPER_AIR_NAMES.get(name, name), level
    match = None if name in SINGLE_LEVEL_NAMES else NAME_WITH_LEVEL.fullmatch(name)
    if match:
        variable = match[1] or match[3]
        long = UPPER_AIR_NAMES.get(variable, variable)
        if long in UPPER_AIR_NAMES.values():
            return long, int(match[2] or match[4])
    return SINGLE_LEVEL_NAMES.get(name, name), None


def canonical_name(name: str) -> str:
    """Return the long name of a variable from any of its names: `t`, `t_500`, `2t`, `t2m`.

    `z` is taken for `geopotential_at_surface`; see `possible_canonical_names`.
    """
    long, _ = long_name(name)
    return UPPER_AIR_NAMES.get(long, long)


def possible_canonical_names(name: str) -> set[str]:
    """Return all long names that a name may stand for: for `z` on levels and at the surface."""
    return {canonical_name(name), UPPER_AIR_NAMES.get(name, canonical_name(name))}


def has_short_names(name: str) -> bool:
    """Whether this is a long name, of a variable that also has short ones."""
    return name in _SHORT_NAMES


def all_names_of(long: str) -> tuple[str, ...]:
    """Return all names of a variable, its long name first."""
    return (long, *_SHORT_NAMES.get(long, ()))


def _short_names_by_long_name() -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for table in (UPPER_AIR_NAMES, SURFACE_NAMES, STATIC_NAMES):
        for name, long in table.items():
            if name != long:
                names[long] = (*names.get(long, ()), name)
    return names


_SHORT_NAMES = _short_names_by_long_name()
