"""The keys that the config has and what each one takes, read off the dataclasses."""

import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf

from credit_dp.checks import nearest
from credit_dp.config import Config, LossConfig, ModelConfig, OptimizerConfig
from credit_dp.errors import UserError

# Groups of which each choice has keys of its own.
VARIED = (ModelConfig, LossConfig, OptimizerConfig)
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
PLURALS: dict[Any, str] = {int: "integers", float: "numbers", str: "texts", bool: "true or false"}


def all_keys(schema: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the config, groups before what is in them."""
    keys: list[str] = []
    for name, kind in hints_of(schema).items():
        keys.append(prefix + name)
        if is_dataclass(kind):
            keys += all_keys(kind, f"{prefix}{name}.")
    return keys


def check_key(key: str) -> None:
    """Refuse a dotted key that the config does not have.

    Raises:
        UserError: with the nearest key and those that are allowed at the place where it departs.
    """
    schema: Any = Config
    walked: list[str] = []
    for name in key.split("."):
        if get_origin(schema) is dict and is_dataclass(get_args(schema)[1]):
            walked.append(name)
            schema = get_args(schema)[1]
            continue
        if get_origin(schema) in (dict, list, tuple):
            return  # entries of lists and tables are checked by value
        names = list(hints_of(schema))
        if name not in names:
            raise UserError(unknown_key(key, ".".join(walked), names))
        walked.append(name)
        schema = hints_of(schema)[name]


def hints_of(schema: Any) -> dict[str, Any]:
    """The keys of a group and their types; of the model group, those of all models."""
    kinds = [schema, *variants(schema)] if schema in VARIED else [schema]
    hints: dict[str, Any] = {}
    for kind in kinds:
        known = get_type_hints(kind) if is_dataclass(kind) else {}
        hints |= {each.name: known[each.name] for each in fields(kind)} if known else {}
    return hints


def variants(schema: type) -> list[type]:
    """The classes that derive from one of `VARIED`: those of every model that is known."""
    kinds: list[type] = schema.__subclasses__()
    for kind in kinds:  # which grows on the way: a model may derive from another one
        kinds += kind.__subclasses__()
    return kinds


def unknown_key(key: str, place: str, names: list[str]) -> str:
    """One line for a key that is not there."""
    allowed = f"Allowed {f'in {place}' if place else 'here'}: {', '.join(names)}."
    if not names:
        allowed = f"{place} takes a value and has no keys in it."
    known = all_keys()
    if key in known:  # of another model
        return f"{key}: no such key of this {key.partition('.')[0]}. {allowed}"
    close = nearest(key, known)
    if not close:  # the right word in the wrong group
        last = key.rpartition(".")[2]
        close = nearest(key, [other for other in known if other.endswith(f".{last}")])
    return f"{key}: no such key.{close} {allowed}"


def is_table(key: str) -> bool:
    """Whether the key takes a table, whose entries may be new: `loss.variable_weight`."""
    return get_origin(kind_of(key)) is dict


def is_table_entry(key: str) -> bool:
    """Whether the key names an entry of a table: `loss.variable_weight.geopotential`."""
    return is_table(key.rpartition(".")[0])


def is_table_entry_key(key: str) -> bool:
    """Whether the key is one of a table's entry: `data.variables.geopotential.normalise`."""
    entry = key.rpartition(".")[0]
    return is_table_entry(entry) and is_dataclass(kind_of(entry))


def kind_of(key: str) -> Any:
    """The type of a dotted key; None if there is no such key."""
    schema: Any = Config
    for name in key.split("."):
        if get_origin(schema) is dict:
            schema = get_args(schema)[1]
            continue
        hints = hints_of(schema)
        if name not in hints:
            return None
        schema = hints[name]
    return schema


def meanings(schema: type) -> dict[str, str]:
    """What the keys of a dataclass mean: the comment beside each field, or that above it."""
    found: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(kind))
        except (OSError, TypeError):  # it is not in a file
            continue
        above: list[str] = []
        for line in source.splitlines():
            code, _, comment = line.strip().partition("# ")
            key = re.match(r"    (\w+): ", line)
            if key and (comment or above):
                found[key[1]] = comment or " ".join(above)
            above = [*above, comment] if comment and not code else []
    return found


def explained(config: DictConfig, indent: str = "") -> Iterator[str]:
    """Lines of YAML that show a composed config, each key with its meaning."""
    schema = OmegaConf.get_type(config)
    known = meanings(schema) if is_dataclass(schema) else {}
    values = OmegaConf.to_container(config, enum_to_str=True)
    for key, value in values.items() if isinstance(values, dict) else ():
        name, node = str(key), config._get_node(key)
        group = isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node))
        row = f"{indent}{name}:" if group else f"{indent}{name}: {as_yaml(value)}"
        yield f"{row:<36}  # {known[name]}" if name in known else row
        if isinstance(node, DictConfig) and group:
            yield from explained(node, f"{indent}  ")


def as_yaml(value: object) -> str:
    """A value in a line of YAML."""
    plain = str(value) if isinstance(value, Path | bytes) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").rstrip()


def check_value(key: str, value: object) -> None:
    """Refuse a value that the key's own dataclass refuses, whatever the other keys are.

    Raises:
        UserError: as when the config is made.
    """
    group, _, name = key.rpartition(".")
    owner = kind_of(group) if group else Config
    if owner in VARIED and name not in {each.name for each in fields(owner)}:
        owners = [kind for kind in variants(owner) if name in {each.name for each in fields(kind)}]
        owner = owners[0] if len(owners) == 1 else None  # what a key may be depends on the model
    if is_dataclass(owner) and isinstance(owner, type):
        owner(**{name: value})


def check_lists(config: DictConfig) -> None:
    """Refuse lists in a list of numbers or words, or the other way round; OmegaConf does not.

    Raises:
        UserError: with the key and what it needs.
    """
    for key in all_keys():
        value, kind = OmegaConf.select(config, key), kind_of(key)
        kinds = [k for k in (kind, *get_args(kind)) if get_origin(k) is list]
        if not isinstance(value, ListConfig) or not kinds:
            continue
        nested = get_origin(get_args(kinds[0])[0]) is list
        if any(isinstance(entry, ListConfig) != nested for entry in value):
            raise UserError(f"{key}: needs {describe(kind)}, got {value}")


def describe(kind: Any) -> str:
    """What a type takes, in words: `list[int] | None` is `a list of integers or null`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is list and get_origin(arguments[0]) is list:
        inside = PLURALS.get(get_args(arguments[0])[0], "values")
        return f"a list of lists of {inside}, like [[a, b], [c]]"
    if origin is list:
        return f"a list of {PLURALS.get(arguments[0], 'values')}, like [a, b]"
    if origin is tuple:
        return f"{len(arguments)} {PLURALS.get(arguments[0], 'values')}, like [a, b]"
    if origin is dict:
        return f"a table from text to {PLURALS.get(arguments[1], 'values')}, like {{a: b}}"
    if is_dataclass(kind):
        return f"a group of keys ({', '.join(hints_of(kind))})"
    return WORDS.get(kind, "a value")
