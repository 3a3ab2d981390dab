"""Models that are not of this package: in files that the user names, or in installed packages.

A package names its config classes in its entry points of the group `credit_dp.models`. A name in a
config only chooses among these; it never says what to import.
"""

import logging
from collections.abc import Container
from importlib.metadata import entry_points

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from credit_dp.command.own_files import VARIABLE, configs_of_files, named_files
from credit_dp.config import OwnModelConfig
from credit_dp.errors import UserError

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


def all_own_models(ours: Container[str]) -> dict[str, type[OwnModelConfig]]:
    """Those of packages and those of files; `ours` are the names of this package's models.

    Raises:
        UserError: a file can't be used, or has a model with a name that is taken.
    """
    found = own_models()
    for name, config in configs_of_files().items():
        if name in ours or name in found:
            owner = "this package" if name in ours else f"the entry point of {found[name].__name__}"
            raise UserError(
                f"{VARIABLE}: {config.__name__} is named {name!r}, as a model of {owner} is. "
                "Give it another name."
            )
        found[name] = config
    return found


def node_of(name: str, config: type[OwnModelConfig]) -> DictConfig:
    """What Hydra is told of a model: its keys, their types and defaults.

    Raises:
        UserError: a key has a type that no YAML file could hold.
    """
    try:
        node: DictConfig = OmegaConf.structured(config)
    except OmegaConfBaseException as error:
        told = " ".join(str(error).split("\n")[0].split())
        raise UserError(
            f"model={name}: the fields of {config.__name__} need types that YAML has ({told})"
        ) from error
    node.name = name
    return node


def how_to_register() -> str:
    """The end of an error line: what to do if the unknown model is the user's own."""
    if named_files():
        return ""
    return f" A model of your own is known by its file: set {VARIABLE}=my_model.py."
