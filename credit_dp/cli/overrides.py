"""Parses overrides, checks their keys and explains errors of Hydra and OmegaConf in one line.

`parse_overrides` comes first on every command line; `check_key` then looks a key up in the
dataclasses of the config, which also supply the types in error messages.
"""

import difflib
import inspect
import re
import shlex
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
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
from credit_dp.errors import UserError, quote

# Groups whose choices have different keys: each choice is a class that derives from these.
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


# What other packages and launchers call these keys.
NAMES_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("epochs", "max_epochs", "max_steps", "num_epoch"), "trainer.steps"),
    **dict.fromkeys(("learning_rate", "rate"), "optimizer.lr"),
    **dict.fromkeys(("train_batch_size", "batch"), "data.batch_size"),
    **dict.fromkeys(("precision", "amp", "mixed_precision"), "trainer.autocast"),
    **dict.fromkeys(("gpus", "devices", "world_size", "nproc"), "parallel.data"),
    **dict.fromkeys(("num_workers", "thread_workers"), "data.workers"),
    **dict.fromkeys(("history_len", "multistep_input"), "model.frames"),
    **dict.fromkeys(("checkpoint", "ckpt", "ckpt_path", "load_weights"), "resume"),
}


def all_keys(schema: Any = Config, prefix: str = "") -> list[str]:
    """Return every dotted key of the config; a group comes before its keys."""
    keys: list[str] = []
    for name, key_type in key_types(schema).items():
        keys.append(prefix + name)
        if is_dataclass(key_type):
            keys += all_keys(key_type, f"{prefix}{name}.")
    return keys


def check_key(key: str, composed: bool = False) -> None:
    """Refuse a dotted key that the config does not have.

    Hydra has checked the keys of the chosen model in a `composed` config, so these pass.
    """
    schema: Any = Config
    parents: list[str] = []
    for name in key.split("."):
        if get_origin(schema) is dict and is_dataclass(get_args(schema)[1]):
            schema = get_args(schema)[1]
        elif get_origin(schema) in (dict, list, tuple):
            return  # entries of lists and tables are checked by value
        else:
            types_by_key = key_types(schema)
            if name not in types_by_key and composed and schema in GROUPS_WITH_VARIANTS:
                return
            if name not in types_by_key:
                raise UserError(unknown_key_message(key, ".".join(parents), list(types_by_key)))
            schema = types_by_key[name]
        parents.append(name)


def key_types(schema: Any) -> dict[str, Any]:
    """Return the keys of a group and their types, of all its variants if it has some."""
    classes = [schema, *variant_classes(schema)] if schema in GROUPS_WITH_VARIANTS else [schema]
    types_by_key: dict[str, Any] = {}
    for cls in classes:
        types_by_key |= field_types(cls)
    return types_by_key


@cache
def field_types(cls: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass and their types; nothing for any other type."""
    if not is_dataclass(cls):
        return {}
    hints = get_type_hints(cls)  # slow: it evaluates texts
    return {item.name: hints[item.name] for item in fields(cls)}


def variant_classes(schema: type) -> list[type]:
    """Return all subclasses of one of `GROUPS_WITH_VARIANTS`, those of plug-ins included."""
    classes: list[type] = schema.__subclasses__()
    for cls in classes:  # the list grows meanwhile: a model may derive from another one
        classes += cls.__subclasses__()
    return classes


def unknown_key_message(key: str, parent: str, names: list[str]) -> str:
    """Return one line about a key that does not exist: the nearest one, and what is allowed."""
    allowed = f"Allowed {f'in {parent}' if parent else 'here'}: {', '.join(names)}."
    if not names:
        allowed = f"{parent} takes a value and has no keys."
    known = all_keys()
    if key in known:  # a key of another choice, such as of another model
        return f"{key}: no such key of this {key.partition('.')[0]}. {allowed}"
    last_name = key.rpartition(".")[2]
    prefix = f"{parent}." if parent else ""
    # Not the keys of other choices of this group.
    known = [k for k in known if k.rpartition(".")[0] != parent or k.removeprefix(prefix) in names]
    close = difflib.get_close_matches(last_name, names, n=1, cutoff=0.8)
    same_name = [other for other in known if other.endswith(f".{last_name}")]
    if close:
        suggestion = f" Did you mean {prefix}{close[0]}?"
    elif len(same_name) == 1:  # the right name in the wrong group, or without one
        suggestion = f" Did you mean {same_name[0]}?"
    elif last_name in NAMES_ELSEWHERE:
        suggestion = f" Did you mean {NAMES_ELSEWHERE[last_name]}?"
    else:
        suggestion = did_you_mean(key, known) or did_you_mean(key, same_name)
    return f"{key}: no such key.{suggestion} {allowed}"


def is_table(key: str) -> bool:
    """Whether the key takes a table, which may get new entries: `loss.variable_weight`."""
    return get_origin(type_of_key(key)) is dict


def is_table_entry(key: str) -> bool:
    """Whether the key names an entry of a table: `loss.variable_weight.geopotential`."""
    return is_table(key.rpartition(".")[0])


def is_table_entry_key(key: str) -> bool:
    """Whether the key is below an entry of a table: `data.variables.geopotential.normalise`."""
    entry = key.rpartition(".")[0]
    kind = type_of_key(entry)
    return is_table_entry(entry) and (is_dataclass(kind) or get_origin(kind) is dict)


def type_of_key(key: str) -> Any:
    """Return the type of a dotted key; None if there is no such key."""
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


@cache  # reading a class parses its module
def key_comments(schema: type) -> dict[str, str]:
    """Return the comments on the fields of a dataclass: beside a field, or above it."""
    comments: dict[str, str] = {}
    # Base classes first, so that a subclass can replace a comment.
    for cls in reversed(schema.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(cls))
        except (OSError, TypeError):  # the class was not read from a file
            continue
        above: list[str] = []
        for line in source.splitlines():
            code, _, comment = line.strip().partition("# ")
            key = re.match(r"    (\w+): ", line)
            if key and (comment or above):
                comments[key[1]] = comment or " ".join(above)
            above = [*above, comment] if comment and not code else []
    return comments


def annotated_yaml(config: DictConfig, indent: str = "") -> Iterator[str]:
    """Yield lines of YAML that show a composed config, with the comment of each key."""
    schema = OmegaConf.get_type(config)
    comments = key_comments(schema) if is_dataclass(schema) else {}
    values = OmegaConf.to_container(config, enum_to_str=True)
    for key, value in values.items() if isinstance(values, dict) else ():
        name = str(key)
        group = is_dataclass(OmegaConf.get_type(config, name))
        line = f"{indent}{name}:" if group else f"{indent}{name}: {as_yaml(value)}"
        yield f"{line:<36}  # {comments[name]}" if name in comments else line
        if group:
            yield from annotated_yaml(config[key], f"{indent}  ")


def as_yaml(value: object) -> str:
    """Return a value as one line of YAML."""
    plain = str(value) if isinstance(value, Path | bytes) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10**6)
    return text.removesuffix("...\n").rstrip()


def check_value(key: str, value: object) -> None:
    """Refuse a value that the key's dataclass refuses whatever the other keys are."""
    group, _, name = key.rpartition(".")
    schema = type_of_key(group) if group else Config
    if schema in GROUPS_WITH_VARIANTS and name not in {item.name for item in fields(schema)}:
        classes = [
            cls for cls in variant_classes(schema) if name in {item.name for item in fields(cls)}
        ]
        # If several choices have this key, what is allowed depends on the choice.
        schema = classes[0] if len(classes) == 1 else None
    if is_dataclass(schema) and isinstance(schema, type):
        schema(**{name: value})


def check_lists(config: DictConfig) -> None:
    """Refuse lists in a list of numbers or texts, and the reverse; OmegaConf accepts both."""
    for key in all_keys():
        value = OmegaConf.select(config, key)
        key_type = type_of_key(key)
        list_types = [
            option for option in (key_type, *get_args(key_type)) if get_origin(option) is list
        ]
        if not isinstance(value, ListConfig) or not list_types:
            continue
        nested = get_origin(get_args(list_types[0])[0]) is list
        if any(isinstance(entry, ListConfig) != nested for entry in value):
            raise UserError(f"{key}: needs {describe_type(key_type)}, got {value}")


def describe_type(key_type: Any) -> str:
    """Return a type in words: `list[int] | None` is `a list of integers or null`."""
    origin, arguments = get_origin(key_type), get_args(key_type)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is list and get_origin(arguments[0]) is list:
        entries = PLURAL_TYPE_NAMES.get(get_args(arguments[0])[0], "values")
        return f"a list of lists of {entries}, like [[a, b], [c]]"
    if origin is list:
        return f"a list of {PLURAL_TYPE_NAMES.get(arguments[0], 'values')}, like [a] or [a, b]"
    if origin is tuple:
        return f"{len(arguments)} {PLURAL_TYPE_NAMES.get(arguments[0], 'values')}, like [a, b]"
    if origin is dict:
        names, values = (PLURAL_TYPE_NAMES.get(argument, "values") for argument in arguments)
        return f"a table from {names} to {values}, like {{a: b}}"
    if is_dataclass(key_type):
        return f"a group of keys ({', '.join(key_types(key_type))})"
    return TYPE_NAMES.get(key_type, "a value")


def describe_key(key: str) -> str:
    """Return what a key takes in words; the example of a table is that of its comment."""
    text = describe_type(type_of_key(key))
    if "{a: b}" not in text:
        return text
    group, _, name = key.rpartition(".")
    schema = type_of_key(group) if group else Config
    comments = (key_comments(cls).get(name, "") for cls in (schema, *variant_classes(schema)))
    example = next((match[1] for c in comments if (match := re.search(r"e\.g\. (\{.*\})", c))), "")
    return text.replace("{a: b}", example or "{a: b}")


# Keys that take a text or a list of texts, which their type (Any) does not say.
TEXT_KEYS = ("data.store", "data.statistics", *(f"data.dates.{split}" for split in SPLITS))


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Return the parsed overrides."""
    parsed = [
        _parse(_as_table_entry(text)) for argument in texts for text in _expand_dates(argument)
    ]
    for override in parsed:
        refuse_dotted_entry(override)
    # Hydra requires `+` for a new entry of a table. Here KEY=VALUE is enough: `++` adds or sets it.
    return [
        _parse(f"++{override.input_line}")
        if override.type == OverrideType.CHANGE
        and (is_table(override.key_or_group) or is_table_entry(override.key_or_group))
        else override
        for override in parsed
    ]


def _expand_dates(text: str) -> list[str]:
    """Return the keys that `data.dates=auto` stands for, or any other override unchanged."""
    key, _, value = text.lstrip("+").partition("=")
    if key == "data.dates" and value.strip("'\"") == AUTO:
        return [f"{key}.{split}={AUTO}" for split in SPLITS]
    return [text]


def _as_table_entry(text: str) -> str:
    """Return `table={entry: {key: value}}` for a key below an entry, which may not exist yet."""
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not is_table_entry_key(key):
        return text
    parsed = try_parse(f"x={value}")
    if parsed is None or parsed.is_sweep_override():
        return text
    check_key(key)
    entry, _, name = key.rpartition(".")
    table, _, entry = entry.rpartition(".")
    return f"{table}={{{entry}: {{{name}: {value}}}}}"


def refuse_dotted_entry(override: Override) -> None:
    """Refuse `parallel.layout.encoder.0=...`: Hydra would split the entry's name at its dot."""
    names = override.key_or_group.split(".")
    for count in range(1, len(names) - 1):
        table, entry = ".".join(names[:count]), ".".join(names[count:])
        if is_table(table) and not is_table_entry_key(override.key_or_group):
            value = str(override.input_line).partition("=")[2]
            raise UserError(
                f"{override.key_or_group}: a name with dots can only be set in a table; "
                f"write {shlex.quote(f'{table}={{{entry}: {value}}}')}"
            )


def _parse(text: str) -> Override:
    if text.lstrip("+").startswith("="):  # Hydra would take the key to be empty
        raise UserError(f"{text}: needs the form KEY=VALUE")
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
        raise UserError(f"{text}: can't be parsed: {key!r} is no key, or brackets don't match")
    if not quoted.startswith(f"{key}="):
        raise UserError(
            f"{text}: this name can only be set in a table; write {shlex.quote(quoted)}"
        )
    raise UserError(f"{text}: the value needs quotes; write {shlex.quote(quoted)}")


def try_parse(text: str) -> Override | None:
    """Return the parsed override, or None if it can't be parsed."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def table_form(key: str, value: str) -> str | None:
    """Return `table={entry: value}` for an entry whose name can't be in a key: 2m_temperature."""
    table, _, entry = key.rpartition(".")
    if is_table_entry_key(key):
        table, _, name = table.rpartition(".")
        entry, value = name, f"{{{entry}: {value if try_parse(f'x={value}') else quote(value)}}}"
    form = f"{table}={{{entry}: {value}}}"
    if not is_table(table) or try_parse(f"{key}=0") is not None or try_parse(form) is None:
        return None
    return form


def accepts_text(key: str, value: object) -> bool:
    """Whether a text, or a list of texts, has the type that the key needs."""
    if key.startswith("hydra."):
        return True  # Hydra checks its own keys
    key_type = type_of_key(key.lstrip("+"))
    if key.lstrip("+") in TEXT_KEYS:
        return True
    if isinstance(value, list):
        return list[str] in (key_type, *get_args(key_type))
    is_container = get_origin(key_type) in (list, dict, tuple)
    return str in (key_type, *get_args(key_type)) and not is_container


def quoted_form(key: str, value: str) -> str | None:
    """Return `key=value` with quotes that make it parse; in brackets, the entries are quoted."""
    for candidate in _quoted_candidates(value):
        parsed = try_parse(f"{key}={candidate}")
        if parsed is None or parsed.is_sweep_override() or not accepts_text(key, parsed.value()):
            continue
        if isinstance(parsed.value(), list) or parsed.value() == value:
            check_value(key.lstrip("+"), parsed.value())
            return f"{key}={candidate}"
    return None


def quoted_forms(value: str) -> Iterator[str]:
    """Yield quoted forms of a value that parse; in brackets, a list of texts comes first."""
    return (form for form in _quoted_candidates(value) if try_parse(f"x={form}") is not None)


def _quoted_candidates(value: str) -> Iterator[str]:
    """Yield a value with its entries in quotes, if it is in brackets, and the value in quotes."""
    if value.startswith("[") and value.endswith("]"):
        entries = [entry.strip() for entry in value[1:-1].split(",")]
        quoted = (entry if try_parse(f"x={entry}") else quote(entry) for entry in entries)
        yield f"[{','.join(quoted)}]"
    yield quote(value)


def explain_error(error: BaseException) -> str:
    """Return one line about an error of Hydra: the key and its file, what is needed, what came."""
    chain = error_chain(error)
    # The file, without `.yaml`, and the key of the override that Hydra was merging.
    config_file = _merged(chain, r"In '([^']+)':")
    override = _merged(chain, r"Error merging override \+*([\w.]+)=")
    for cause in chain:
        if isinstance(cause, OmegaConfBaseException):
            where = f"conf/{config_file}.yaml: " if config_file else ""
            return f"{where}{explain_omegaconf(cause, config_file, override)}"
    message = next((str(cause) for cause in chain if str(cause).strip()), type(error).__name__)
    return " ".join(re.split(r"\n(?:Config )?[Ss]earch path:", message)[0].split())


def error_chain(error: BaseException) -> list[BaseException]:
    """Return the error and all its causes, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _merged(chain: Sequence[BaseException], pattern: str) -> str:
    """Return the group of a pattern in the first of Hydra's errors that has it, or no text."""
    errors = [error for error in chain if isinstance(error, ConfigCompositionException)]
    return next((match[1] for error in errors if (match := re.match(pattern, str(error)))), "")


def explain_omegaconf(error: OmegaConfBaseException, config_file: str, override: str) -> str:
    """Return one line about a value of a wrong type, an unknown key, or a missing value."""
    key = full_key(error, config_file)
    # The number of an entry without its list, or the name of an entry without its table.
    if re.fullmatch(r"[\d.]*", key) or override.endswith(f".{key}"):
        key = override
    key = re.sub(r"\[\d+\]$", "", key)  # name the list, not one of its entries
    needed = describe_key(key) if type_of_key(key) is not None else "another type"
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: needs a value ({needed}), and none is given"
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        parent = key.rpartition(".")[0]
        return unknown_key_message(key, parent, _sibling_keys(error))
    if isinstance(error, (ValidationError, ConfigTypeError)):
        key = key_of_group(str(error)) or key
        needed = describe_key(key) if type_of_key(key) is not None else needed
        value = re.search(r"[Vv]alue(?:: | ')(.*?)(?:'|$)", str(error), re.MULTILINE)
        got = f", got {value[1]!r}" if value else ""
        return f"{key}: needs {needed}{got}"
    message = str(error).split("\n    full_key:")[0]
    return f"{key}: {' '.join(message.split())}" if key else " ".join(message.split())


def key_of_group(message: str) -> str:
    """Return the key of the group whose dataclass a message of OmegaConf names."""
    schema = re.search(r"is not a subclass of (\w+)", message)
    types_by_key = {key: type_of_key(key) for key in all_keys()} if schema else {}
    groups = (key for key, key_type in types_by_key.items() if is_dataclass(key_type))
    return next((key for key in groups if schema and types_by_key[key].__name__ == schema[1]), "")


def full_key(error: OmegaConfBaseException, config_file: str) -> str:
    """Return the dotted key from the root; in a group's file OmegaConf leaves out the group."""
    key = str(error.full_key or error.key or "")
    group = config_file.rpartition("/")[0].replace("/", ".")
    is_full = not group or group == "experiment" or key.split(".")[0] == group
    return key if is_full else f"{group}.{key}"


def _sibling_keys(error: OmegaConfBaseException) -> list[str]:
    """Return the keys of the node in which a missing one was looked up."""
    node = error.parent_node
    schema = OmegaConf.get_type(node)
    return [field.name for field in fields(schema)] if is_dataclass(schema) else []
