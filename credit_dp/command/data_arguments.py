"""What the `credit-dp data` commands understand: keys of the config, and a few of their own."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.checks import nearest
from credit_dp.command.arguments import parse, parser
from credit_dp.command.compose import Composer, check_overrides
from credit_dp.command.overrides import parse_overrides, quoted, ready, try_parse
from credit_dp.config import DataConfig
from credit_dp.errors import UserError


class DataArguments(NamedTuple):
    """A checked data config, the command's own keys, and whether JSON is wanted."""

    config: DataConfig
    own: Mapping[str, Any]
    json: bool


def read_data_arguments(
    arguments: Sequence[str], program: str, help_text: str, own: Mapping[str, Any]
) -> DataArguments | None:
    """Understand a command line; None if it asked for help, which has been shown.

    `store=` is short for `data.store=`. Without `data=` the store is `data=zarr`.

    Args:
        arguments: keys and dashes, in any order.
        program: as messages name it.
        help_text: with `{program}` for the program.
        own: keys that only this command has, with their defaults; an own key is of the default's
            type, or anything where that is None.

    Raises:
        UserError: a key or a value does not exist, or is not allowed.
    """
    using = parser()
    using.add_argument("--json", action="store_true")
    args = parse(using, arguments)
    if args.help:
        sys.stdout.write(help_text.format(program=program))
        return None
    given, rest = dict(own), []
    for text in args.overrides:
        key, equals, value = text.partition("=")
        if equals and key in own:
            given[key] = _value(key, value, own[key])
        elif key == "store":
            rest.append(f"data.store={_as_text(value)}")
        elif "." not in key and key != "data":
            known = [*own, "store", "data"]
            raise UserError(
                f"{program}: needs keys like {', '.join(known)} or data.NAME, got {text!r}."
                f"{nearest(key, known)}"
            )
        else:
            rest.append(text)
    composer = Composer(program.rpartition(" ")[2])
    parsed = parse_overrides([*_defaults(rest), *rest])
    check_overrides(parsed, composer.groups)
    overrides = [str(override.input_line) for override in parsed]
    return DataArguments(composer.config(overrides).data, given, args.json)


def _value(key: str, text: str, default: Any) -> Any:
    if isinstance(default, str) and text[:1] not in ("'", '"'):
        return text  # a path may look like a number, a list or a comment
    try:
        value = OmegaConf.to_object(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except (OmegaConfBaseException, YAMLError):
        raise UserError(f"{key}: can't be read, got {text!r}") from None
    if default is not None and type(value) is not type(default):
        raise UserError(f"{key}: needs {_kind(default)}, got {text!r}")
    return value


def _as_text(store: str) -> str:
    """A path that Hydra can't read as it is, in quotes; a list that it can't, entry by entry.

    Raises:
        UserError: it has a comma, and may be one path or several.
    """
    parsed = try_parse(f"x={store}")
    if parsed is not None and parsed.is_sweep_override():
        raise UserError(
            f"store: needs brackets for several stores, store=[{store}], or quotes for one with a "
            f"comma, {ready('store', store)}"
        )
    return store if parsed is not None else next(quoted(store), store)


def _kind(default: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", list: "a list", str: "a text"}
    return kinds[type(default)]


def _defaults(given: Sequence[str]) -> list[str]:
    return [] if any(text.startswith("data=") for text in given) else ["data=zarr"]
