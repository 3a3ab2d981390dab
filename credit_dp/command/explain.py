"""Turns an error of Hydra or OmegaConf, several lines about its insides, into one for the user."""

import re
from dataclasses import fields, is_dataclass

from hydra.errors import ConfigCompositionException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from credit_dp.command.keys import all_keys, describe, kind_of, unknown_key


def explain(error: BaseException) -> str:
    """One line: the key and the file, what is needed, what came."""
    chain = causes(error)
    place = next((found for e in chain if (found := file_of(e))), "")
    override = next((found for e in chain if (found := override_of(e))), "")
    for cause in chain:
        if isinstance(cause, OmegaConfBaseException):
            return (
                f"{f'conf/{place}.yaml: ' if place else ''}{of_omegaconf(cause, place, override)}"
            )
    message = next((str(e) for e in chain if str(e).strip()), type(error).__name__)
    return " ".join(re.split(r"\n(?:Config )?[Ss]earch path:", message)[0].split())


def causes(error: BaseException) -> list[BaseException]:
    """The error and all that led to it, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def file_of(error: BaseException) -> str:
    """The config file that Hydra says it was merging, without `.yaml`."""
    found = re.match(r"In '([^']+)':", str(error))
    return found[1] if found and isinstance(error, ConfigCompositionException) else ""


def override_of(error: BaseException) -> str:
    """The key of the override that Hydra says it was merging."""
    found = re.match(r"Error merging override \+*([\w.]+)=", str(error))
    return found[1] if found and isinstance(error, ConfigCompositionException) else ""


def of_omegaconf(error: OmegaConfBaseException, place: str, override: str) -> str:
    """One line for a value of the wrong type, a key that is unknown, or one that is missing."""
    key = full_key(error, place)
    if re.fullmatch(r"[\d.]*", key):  # of an entry, and not in which list
        key = override
    key = re.sub(r"\[\d+\]$", "", key)  # what is said of an entry is true of its list
    needed = describe(kind_of(key)) if kind_of(key) is not None else "another type"
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: needs a value ({needed}), and none is given"
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        parent = key.rpartition(".")[0]
        return unknown_key(key, parent, _names(error))
    if isinstance(error, (ValidationError, ConfigTypeError)):
        key = key_of_group(str(error)) or key
        needed = describe(kind_of(key)) if kind_of(key) is not None else needed
        value = re.search(r"[Vv]alue(?:: | ')(.*?)(?:'|$)", str(error), re.MULTILINE)
        came = f", got {value[1]!r}" if value else ""
        return f"{key}: needs {needed}{came}"
    first = str(error).split("\n    full_key:")[0]
    return f"{key}: {' '.join(first.split())}" if key else " ".join(first.split())


def key_of_group(message: str) -> str:
    """The key of the group that OmegaConf misses; its message may only have the dataclass."""
    schema = re.search(r"is not a subclass of (\w+)", message)
    kinds = {key: kind_of(key) for key in all_keys()} if schema else {}
    groups = (key for key, kind in kinds.items() if is_dataclass(kind))
    return next((key for key in groups if schema and kinds[key].__name__ == schema[1]), "")


def full_key(error: OmegaConfBaseException, place: str) -> str:
    """The dotted key from the root; inside a group's file OmegaConf leaves the group out."""
    key = str(error.full_key or error.key or "")
    group = place.rpartition("/")[0].replace("/", ".")
    inside = not group or group == "experiment" or key.split(".")[0] == group
    return key if inside else f"{group}.{key}"


def _names(error: OmegaConfBaseException) -> list[str]:
    """The keys of the node in which another one was asked for."""
    node = error.parent_node
    schema = None if node is None else node._metadata.object_type
    return [field.name for field in fields(schema)] if is_dataclass(schema) else []
