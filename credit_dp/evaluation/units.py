"""Units of the variables: the store's own, or else those of reanalysis stores."""

from credit_dp.data.store import Store

UNITS = {
    "geopotential": "m2 s-2",
    "temperature": "K",
    "u_component_of_wind": "m s-1",
    "v_component_of_wind": "m s-1",
    "vertical_velocity": "Pa s-1",
    "specific_humidity": "kg kg-1",
    "2m_temperature": "K",
    "10m_u_component_of_wind": "m s-1",
    "10m_v_component_of_wind": "m s-1",
    "mean_sea_level_pressure": "Pa",
    "surface_pressure": "Pa",
}


def unit_of(store: Store, variable: str) -> str:
    """What the store says, else the standard name's unit; nothing where neither is known."""
    return store.units(variable).strip() or UNITS.get(variable, "")
