"""Reads `KEY=VALUE`; what does not parse is answered with the quoted form that does."""

import shlex
from collections.abc import Iterator, Sequence
from typing import get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from credit_dp.command.keys import (
    check_key,
    check_value,
    describe,
    is_table,
    is_table_entry,
    is_table_entry_key,
    kind_of,
)
from credit_dp.data_config import AUTO, SPLITS
from credit_dp.errors import UserError

# Keys of any type that are a text or a list of texts.
TEXTS = ("data.store", "data.statistics", *(f"data.dates.{split}" for split in SPLITS))


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """All overrides, parsed.

    Raises:
        UserError: one does not parse; the line gives a form that does, ready for the shell.
    """
    parsed = [_parse(_whole_entry(text)) for given in texts for text in _of_each_split(given)]
    for override in parsed:
        refuse_dotted_entry(override)
    # Hydra would ask for a plus before a new entry of a table; here KEY=VALUE is all there is.
    return [
        _parse(f"++{override.input_line}")
        if override.type == OverrideType.CHANGE and adds_entries(override.key_or_group)
        else override
        for override in parsed
    ]


def _of_each_split(text: str) -> list[str]:
    """`data.dates=auto` as the keys that it stands for; anything else as it is."""
    key, _, value = text.lstrip("+").partition("=")
    if key == "data.dates" and value.strip("'\"") == AUTO:
        return [f"{key}.{split}={AUTO}" for split in SPLITS]
    return [text]


def adds_entries(key: str) -> bool:
    """Whether a value given to this key may bring entries that its table does not have yet."""
    return is_table(key) or is_table_entry(key)


def _whole_entry(text: str) -> str:
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
    if quoted is None and kind_of(key) is not None:
        raise UserError(f"{key}: needs {describe(kind_of(key))}, got {value!r}")
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


def takes_quotes(key: str, value: object) -> bool:
    """Whether text, or a list of texts, is of the type that the key needs; Hydra knows its own."""
    if key.startswith("hydra."):
        return True
    kind = kind_of(key.lstrip("+"))
    if key.lstrip("+") in TEXTS:
        return True
    if isinstance(value, list):
        return list[str] in (kind, *get_args(kind))
    return str in (kind, *get_args(kind)) and get_origin(kind) not in (list, dict, tuple)


def quoted_form(key: str, value: str) -> str | None:
    """`key=value` with the quotes that make it parse, to a list if it looks like one.

    Raises:
        UserError: the value is not allowed, quoted or not.
    """
    for candidate in _candidates(value):
        parsed = try_parse(f"{key}={candidate}")
        if parsed is None or parsed.is_sweep_override() or not takes_quotes(key, parsed.value()):
            continue
        if isinstance(parsed.value(), list) or parsed.value() == value:
            check_value(key.lstrip("+"), parsed.value())
            return f"{key}={candidate}"
    return None


def ready(key: str, value: str) -> str:
    """`key=value` for a command line, with the quotes that Hydra and the shell need for a text."""
    parsed = try_parse(f"{key}={value}")
    plain = parsed is not None and not parsed.is_sweep_override() and parsed.value() == value
    return shlex.quote(f"{key}={value if plain else quote(value)}")


def quoted(value: str) -> Iterator[str]:
    """Forms of a value with quotes that parse, a list of texts first if it looks like one."""
    return (form for form in _candidates(value) if try_parse(f"x={form}") is not None)


def _candidates(value: str) -> Iterator[str]:
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
