"""Units of the variables: the store's own, or else those that a model is to see."""

from credit_dp.data.known_units import KNOWN, Known
from credit_dp.data.sources.ecmwf_names import long_name
from credit_dp.data.store import Store


def unit_of(store: Store, variable: str) -> str:
    """What the store says, else the unit of the variable; nothing where neither is known."""
    known = KNOWN.get(variable) or KNOWN.get(long_name(variable)[0], Known(""))
    return store.units(variable).strip() or known.unit
