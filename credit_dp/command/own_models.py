"""Models that other packages bring: their entry points of the group `credit_dp.models`.

A name in a config only chooses among what is installed; it never says what to import.
"""

import logging
from importlib.metadata import entry_points

from credit_dp.config import OwnModelConfig

logger = logging.getLogger(__name__)

GROUP = "credit_dp.models"


def own_models() -> dict[str, type[OwnModelConfig]]:
    """The config class of every such model, by name; one that fails to load is told and skipped."""
    found: dict[str, type[OwnModelConfig]] = {}
    for entry in entry_points(group=GROUP):
        try:
            config = entry.load()
        except Exception as error:  # noqa: BLE001 - it is another's code
            logger.warning("model %s: %s can't be imported (%s)", entry.name, entry.value, error)
            continue
        if isinstance(config, type) and issubclass(config, OwnModelConfig):
            found[entry.name] = config
        else:
            logger.warning("model %s: %s is no OwnModelConfig", entry.name, entry.value)
    return found
