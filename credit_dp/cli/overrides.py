"""Reads overrides, checks their keys and explains what is wrong with them in one line."""

import inspect
import re
import shlex
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from credit_dp.checks import did_you_mean
from credit_dp.config import Config, LossConfig, ModelConfig, OptimizerConfig
from credit_dp.config.data import AUTO, SPLITS
from credit_dp.errors import UserError

# Groups of which each choice has keys of its own.
GROUPS_WITH_VARIANTS = (ModelConfig, LossConfig, OptimizerConfig)
TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
PLURAL_TYPE_NAMES: dict[Any, str] = {
    int: "integers",
    float: "numbers",
    str: "texts",
    bool: "true or false",
}


def all_keys(schema: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the config, groups before what is in them."""
    keys: list[str] = []
    for name, kind in key_types(schema).items():
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
        names = list(key_types(schema))
        if name not in names:
            raise UserError(unknown_key_message(key, ".".join(walked), names))
        walked.append(name)
        schema = key_types(schema)[name]


def key_types(schema: Any) -> dict[str, Any]:
    """The keys of a group and their types; of the model group, those of all models."""
    kinds = [schema, *variant_classes(schema)] if schema in GROUPS_WITH_VARIANTS else [schema]
    hints: dict[str, Any] = {}
    for kind in kinds:
        known = get_type_hints(kind) if is_dataclass(kind) else {}
        hints |= {each.name: known[each.name] for each in fields(kind)} if known else {}
    return hints


def variant_classes(schema: type) -> list[type]:
    """The classes that derive from one of `GROUPS_WITH_VARIANTS`: those of every model that is
    known."""
    kinds: list[type] = schema.__subclasses__()
    for kind in kinds:  # which grows on the way: a model may derive from another one
        kinds += kind.__subclasses__()
    return kinds


def unknown_key_message(key: str, place: str, names: list[str]) -> str:
    """One line for a key that is not there."""
    allowed = f"Allowed {f'in {place}' if place else 'here'}: {', '.join(names)}."
    if not names:
        allowed = f"{place} takes a value and has no keys in it."
    known = all_keys()
    if key in known:  # of another model
        return f"{key}: no such key of this {key.partition('.')[0]}. {allowed}"
    close = did_you_mean(key, known)
    if not close:  # the right word in the wrong group
        last = key.rpartition(".")[2]
        close = did_you_mean(key, [other for other in known if other.endswith(f".{last}")])
    return f"{key}: no such key.{close} {allowed}"


def is_table(key: str) -> bool:
    """Whether the key takes a table, whose entries may be new: `loss.variable_weight`."""
    return get_origin(type_of_key(key)) is dict


def is_table_entry(key: str) -> bool:
    """Whether the key names an entry of a table: `loss.variable_weight.geopotential`."""
    return is_table(key.rpartition(".")[0])


def is_table_entry_key(key: str) -> bool:
    """Whether the key is one of a table's entry: `data.variables.geopotential.normalise`."""
    entry = key.rpartition(".")[0]
    return is_table_entry(entry) and is_dataclass(type_of_key(entry))


def type_of_key(key: str) -> Any:
    """The type of a dotted key; None if there is no such key."""
    schema: Any = Config
    for name in key.split("."):
        if get_origin(schema) is dict:
            schema = get_args(schema)[1]
            continue
        hints = key_types(schema)
        if name not in hints:
            return None
        schema = hints[name]
    return schema


def key_comments(schema: type) -> dict[str, str]:
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


def annotated_yaml(config: DictConfig, indent: str = "") -> Iterator[str]:
    """Lines of YAML that show a composed config, each key with its meaning."""
    schema = OmegaConf.get_type(config)
    known = key_comments(schema) if is_dataclass(schema) else {}
    values = OmegaConf.to_container(config, enum_to_str=True)
    for key, value in values.items() if isinstance(values, dict) else ():
        name, node = str(key), config._get_node(key)
        group = isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node))
        row = f"{indent}{name}:" if group else f"{indent}{name}: {as_yaml(value)}"
        yield f"{row:<36}  # {known[name]}" if name in known else row
        if isinstance(node, DictConfig) and group:
            yield from annotated_yaml(node, f"{indent}  ")


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
    owner = type_of_key(group) if group else Config
    if owner in GROUPS_WITH_VARIANTS and name not in {each.name for each in fields(owner)}:
        owners = [
            kind for kind in variant_classes(owner) if name in {each.name for each in fields(kind)}
        ]
        owner = owners[0] if len(owners) == 1 else None  # what a key may be depends on the model
    if is_dataclass(owner) and isinstance(owner, type):
        owner(**{name: value})


def check_lists(config: DictConfig) -> None:
    """Refuse lists in a list of numbers or words, or the other way round; OmegaConf does not.

    Raises:
        UserError: with the key and what it needs.
    """
    for key in all_keys():
        value, kind = OmegaConf.select(config, key), type_of_key(key)
        kinds = [k for k in (kind, *get_args(kind)) if get_origin(k) is list]
        if not isinstance(value, ListConfig) or not kinds:
            continue
        nested = get_origin(get_args(kinds[0])[0]) is list
        if any(isinstance(entry, ListConfig) != nested for entry in value):
            raise UserError(f"{key}: needs {describe_type(kind)}, got {value}")


def describe_type(kind: Any) -> str:
    """What a type takes, in words: `list[int] | None` is `a list of integers or null`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is list and get_origin(arguments[0]) is list:
        inside = PLURAL_TYPE_NAMES.get(get_args(arguments[0])[0], "values")
        return f"a list of lists of {inside}, like [[a, b], [c]]"
    if origin is list:
        return f"a list of {PLURAL_TYPE_NAMES.get(arguments[0], 'values')}, like [a, b]"
    if origin is tuple:
        return f"{len(arguments)} {PLURAL_TYPE_NAMES.get(arguments[0], 'values')}, like [a, b]"
    if origin is dict:
        return (
            f"a table from text to {PLURAL_TYPE_NAMES.get(arguments[1], 'values')}, like {{a: b}}"
        )
    if is_dataclass(kind):
        return f"a group of keys ({', '.join(key_types(kind))})"
    return TYPE_NAMES.get(kind, "a value")


# Keys of any type that are a text or a list of texts.
TEXT_KEYS = ("data.store", "data.statistics", *(f"data.dates.{split}" for split in SPLITS))


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """All overrides, parsed.

    Raises:
        UserError: one does not parse; the line gives a form that does, ready for the shell.
    """
    parsed = [_parse(_as_table_entry(text)) for given in texts for text in _expand_dates(given)]
    for override in parsed:
        refuse_dotted_entry(override)
    # Hydra would ask for a plus before a new entry of a table; here KEY=VALUE is all there is.
    return [
        _parse(f"++{override.input_line}")
        if override.type == OverrideType.CHANGE and may_add_entries(override.key_or_group)
        else override
        for override in parsed
    ]


def _expand_dates(text: str) -> list[str]:
    """`data.dates=auto` as the keys that it stands for; anything else as it is."""
    key, _, value = text.lstrip("+").partition("=")
    if key == "data.dates" and value.strip("'\"") == AUTO:
        return [f"{key}.{split}={AUTO}" for split in SPLITS]
    return [text]


def may_add_entries(key: str) -> bool:
    """Whether a value given to this key may bring entries that its table does not have yet."""
    return is_table(key) or is_table_entry(key)


def _as_table_entry(text: str) -> str:
    """`table={entry: {key: value}}` for a key of a table's entry, which need not be there yet."""
    key, equals, value = text.lstrip("+").partition("=")
    alone = try_parse(f"x={value}")
    if not equals or not is_table_entry_key(key) or alone is None or alone.is_sweep_override():
        return text
    check_key(key)
    entry, _, name = key.rpartition(".")
    table, _, entry = entry.rpartition(".")
    return f"{table}={{{entry}: {{{name}: {value}}}}}"


def refuse_dotted_entry(override: Override) -> None:
    """Refuse `parallel.layout.encoder.0=...`: the dots in an entry's name would make tables of it.

    Raises:
        UserError: with the form that is understood.
    """
    names = override.key_or_group.split(".")
    for count in range(1, len(names) - 1):
        table, entry = ".".join(names[:count]), ".".join(names[count:])
        if is_table(table) and not is_table_entry_key(override.key_or_group):
            value = str(override.input_line).partition("=")[2]
            raise UserError(
                f"{override.key_or_group}: a name with dots is only understood in a table; "
                f"write {shlex.quote(f'{table}={{{entry}: {value}}}')}"
            )


def _parse(text: str) -> Override:
    parsed = try_parse(text)
    if parsed is not None:
        return parsed
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{text}: needs the form KEY=VALUE")
    quoted = table_form(key, value) or quoted_form(key, value)
    if quoted is None and type_of_key(key) is not None:
        raise UserError(f"{key}: needs {describe_type(type_of_key(key))}, got {value!r}")
    if quoted is None:
        raise UserError(f"{text}: does not parse, because {key!r} is no key or the brackets differ")
    if not quoted.startswith(f"{key}="):
        raise UserError(
            f"{text}: that name is only understood in a table; write {shlex.quote(quoted)}"
        )
    raise UserError(f"{text}: the value needs quotes; write {shlex.quote(quoted)}")


def try_parse(text: str) -> Override | None:
    """The override, or None if it does not parse."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def table_form(key: str, value: str) -> str | None:
    """`table={entry: value}`, for an entry whose name no key may have, like 2m_temperature."""
    table, _, entry = key.rpartition(".")
    if is_table_entry_key(key):
        table, _, name = table.rpartition(".")
        entry, value = name, f"{{{entry}: {value if try_parse(f'x={value}') else quote(value)}}}"
    form = f"{table}={{{entry}: {value}}}"
    if not is_table(table) or try_parse(f"{key}=0") is not None or try_parse(form) is None:
        return None
    return form


def accepts_text(key: str, value: object) -> bool:
    """Whether text, or a list of texts, is of the type that the key needs; Hydra knows its own."""
    if key.startswith("hydra."):
        return True
    kind = type_of_key(key.lstrip("+"))
    if key.lstrip("+") in TEXT_KEYS:
        return True
    if isinstance(value, list):
        return list[str] in (kind, *get_args(kind))
    return str in (kind, *get_args(kind)) and get_origin(kind) not in (list, dict, tuple)


def quoted_form(key: str, value: str) -> str | None:
    """`key=value` with the quotes that make it parse, to a list if it looks like one.

    Raises:
        UserError: the value is not allowed, quoted or not.
    """
    for candidate in _quoted_candidates(value):
        parsed = try_parse(f"{key}={candidate}")
        if parsed is None or parsed.is_sweep_override() or not accepts_text(key, parsed.value()):
            continue
        if isinstance(parsed.value(), list) or parsed.value() == value:
            check_value(key.lstrip("+"), parsed.value())
            return f"{key}={candidate}"
    return None


def shell_argument(key: str, value: str) -> str:
    """`key=value` for a command line, with the quotes that Hydra and the shell need for a text."""
    parsed = try_parse(f"{key}={value}")
    plain = parsed is not None and not parsed.is_sweep_override() and parsed.value() == value
    return shlex.quote(f"{key}={value if plain else quote(value)}")


def quoted_forms(value: str) -> Iterator[str]:
    """Forms of a value with quotes that parse, a list of texts first if it looks like one."""
    return (form for form in _quoted_candidates(value) if try_parse(f"x={form}") is not None)


def _quoted_candidates(value: str) -> Iterator[str]:
    if value.startswith("[") and value.endswith("]"):
        entries = [entry.strip() for entry in value[1:-1].split(",")]
        yield "[" + ",".join(e if try_parse(f"x={e}") else quote(e) for e in entries) + "]"
    yield quote(value)


def quote(value: str) -> str:
    """The value in double quotes: a quote in it is escaped, and so are backslashes before one."""
    result, backslashes = [], 0
    for character in value + '"':
        if character == '"':
            result.append("\\" * backslashes)
            result.append('\\"')
        else:
            result.append(character)
        backslashes = backslashes + 1 if character == "\\" else 0
    return '"' + "".join(result)[:-2] + '"'


def explain_error(error: BaseException) -> str:
    """One line: the key and the file, what is needed, what came."""
    chain = error_chain(error)
    place = next((found for e in chain if (found := config_file_of(e))), "")
    override = next((found for e in chain if (found := override_key_of(e))), "")
    for cause in chain:
        if isinstance(cause, OmegaConfBaseException):
            where = f"conf/{place}.yaml: " if place else ""
            return f"{where}{explain_omegaconf(cause, place, override)}"
    message = next((str(e) for e in chain if str(e).strip()), type(error).__name__)
    return " ".join(re.split(r"\n(?:Config )?[Ss]earch path:", message)[0].split())


def error_chain(error: BaseException) -> list[BaseException]:
    """The error and all that led to it, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def config_file_of(error: BaseException) -> str:
    """The config file that Hydra says it was merging, without `.yaml`."""
    found = re.match(r"In '([^']+)':", str(error))
    return found[1] if found and isinstance(error, ConfigCompositionException) else ""


def override_key_of(error: BaseException) -> str:
    """The key of the override that Hydra says it was merging."""
    found = re.match(r"Error merging override \+*([\w.]+)=", str(error))
    return found[1] if found and isinstance(error, ConfigCompositionException) else ""


def explain_omegaconf(error: OmegaConfBaseException, place: str, override: str) -> str:
    """One line for a value of the wrong type, a key that is unknown, or one that is missing."""
    key = full_key(error, place)
    if re.fullmatch(r"[\d.]*", key):  # of an entry, and not in which list
        key = override
    key = re.sub(r"\[\d+\]$", "", key)  # what is said of an entry is true of its list
    needed = describe_type(type_of_key(key)) if type_of_key(key) is not None else "another type"
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: needs a value ({needed}), and none is given"
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        parent = key.rpartition(".")[0]
        return unknown_key_message(key, parent, _sibling_keys(error))
    if isinstance(error, (ValidationError, ConfigTypeError)):
        key = key_of_group(str(error)) or key
        needed = describe_type(type_of_key(key)) if type_of_key(key) is not None else needed
        value = re.search(r"[Vv]alue(?:: | ')(.*?)(?:'|$)", str(error), re.MULTILINE)
        came = f", got {value[1]!r}" if value else ""
        return f"{key}: needs {needed}{came}"
    first = str(error).split("\n    full_key:")[0]
    return f"{key}: {' '.join(first.split())}" if key else " ".join(first.split())


def key_of_group(message: str) -> str:
    """The key of the group that OmegaConf misses; its message may only have the dataclass."""
    schema = re.search(r"is not a subclass of (\w+)", message)
    kinds = {key: type_of_key(key) for key in all_keys()} if schema else {}
    groups = (key for key, kind in kinds.items() if is_dataclass(kind))
    return next((key for key in groups if schema and kinds[key].__name__ == schema[1]), "")


def full_key(error: OmegaConfBaseException, place: str) -> str:
    """The dotted key from the root; inside a group's file OmegaConf leaves the group out."""
    key = str(error.full_key or error.key or "")
    group = place.rpartition("/")[0].replace("/", ".")
    inside = not group or group == "experiment" or key.split(".")[0] == group
    return key if inside else f"{group}.{key}"


def _sibling_keys(error: OmegaConfBaseException) -> list[str]:
    """The keys of the node in which another one was asked for."""
    node = error.parent_node
    schema = None if node is None else node._metadata.object_type
    return [field.name for field in fields(schema)] if is_dataclass(schema) else []
