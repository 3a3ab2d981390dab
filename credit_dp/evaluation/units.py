"""Units of the variables as reanalysis stores name them."""

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


def unit_of(variable: str) -> str:
    """The unit of a variable, or nothing where the name is not a standard one."""
    return UNITS.get(variable, "")
