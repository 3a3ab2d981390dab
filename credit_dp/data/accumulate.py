"""Variables of which a store holds sums since the time before, and the times to add up.

ERA5's accumulations cover the hour before their time. Names such as `total_precipitation_6hr` are
not among them: they are sums over the time that they name, whatever the store's spacing.
"""

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.sources.source import Times
from credit_dp.variable_names import meaning

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
    return meaning(name) in ACCUMULATED if given is None else given


def spacing(times: Times) -> np.timedelta64:
    """The most common distance of neighbouring times; of a single time, none."""
    if len(times) < 2:
        return np.timedelta64(0, "ns")
    steps, counts = np.unique(np.diff(times), return_counts=True)
    common: np.timedelta64 = steps[np.argmax(counts)]
    return common


def on_step(times: Times, step: np.timedelta64) -> NDArray[np.intp]:
    """Places of the times that are whole steps after midnight 1970-01-01.

    If there are none, of those that are whole steps after the first time.
    """
    epoch = np.datetime64(0, "ns")
    places = np.flatnonzero((times - epoch) % step == np.timedelta64(0))
    return places if len(places) else np.flatnonzero((times - times[0]) % step == np.timedelta64(0))


def windows(times: Times, places: NDArray[np.intp], step: np.timedelta64) -> NDArray[np.intp]:
    """Places of all times in `(t - step, t]`, the earliest first: `(T, N)`, -1 where one is absent.

    Shapes:
        `times`: all of the store's; `places`: `(T,)`, those of the times `t`.
    """
    back = np.arange(np.timedelta64(0, "ns"), step, spacing(times))[::-1]
    wanted = times[places][:, None] - back
    found = np.minimum(np.searchsorted(times, wanted), len(times) - 1)
    return np.where(times[found] == wanted, found, -1)
