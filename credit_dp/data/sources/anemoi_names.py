"""What the variables of an anemoi dataset are, by its own names and by long ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import Aliased, Variable
from credit_dp.data.sources.stored_names import StoredNames
from credit_dp.variable_names import CONSTANTS, long_name


@final
@dataclass(frozen=True)
class AnemoiNames:
    """What a dataset has.

    Attributes:
        variables: by long names; each is found by the dataset's own name and others too.
        places: of each channel along the variables of the array, under all its names.
    """

    variables: Aliased
    places: Mapping[Channel, int]

    @classmethod
    def of(cls, names: list[str], attributes: Mapping[str, Any]) -> "AnemoiNames":
        """From the names in the array's order, and what the attributes say of them.

        Constant in time is what the attributes say is, and what is known to be.
        """
        about = attributes.get("variables_metadata") or {}
        constants = {*CONSTANTS, *(attributes.get("constant_fields") or ())}
        constants |= {name for name in names if _of(about, name).get("constant_in_time") is True}
        long: dict[str, Variable] = {}
        own: dict[str, Variable] = {}
        places: dict[Channel, int] = {}
        for place, name in enumerate(names):
            timed = name not in constants
            unit = str(_of(about, name).get("units") or "")
            own[name] = Variable(timed, (), unit)
            places[Channel(name)] = place
            variable, level = long_name(name)
            levels = long[variable].levels if variable in long else ()
            long[variable] = Variable(timed, levels if level is None else (*levels, level), unit)
            places[Channel(variable, level)] = place
        found = StoredNames.of({**own, **long})
        aliases = {**found.variables.aliases, **own}
        return cls(Aliased(long, aliases), found.under_all_names(places))


def _of(about: Any, name: str) -> Mapping[str, Any]:
    found = about.get(name) if isinstance(about, Mapping) else None
    return found if isinstance(found, Mapping) else {}
