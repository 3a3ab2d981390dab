"""Units of the variables: the store's own, or else those that a model is to see."""

from credit_dp.data.known_units import KNOWN, Known
from credit_dp.data.store import Store
from credit_dp.variable_names import meaning


def unit_of(store: Store, variable: str) -> str:
    """What the store says, else the unit of the variable; nothing where neither is known."""
    known = KNOWN.get(variable) or KNOWN.get(meaning(variable), Known(""))
    return store.units(variable).strip() or known.unit
