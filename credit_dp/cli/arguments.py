"""Splits command lines: options with dashes, and `KEY=VALUE` pairs."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError

Command = Callable[[Sequence[str], str], int]


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for whatever it does not understand."""
        raise UserError(f"{message}. Dashes only change the command: see --help.")


def common_parser() -> OneLineParser:
    """What every command understands."""
    result = OneLineParser(add_help=False, allow_abbrev=False)
    result.add_argument("overrides", nargs="*")
    result.add_argument("--help", "-h", action="store_true")
    return result


def train_parser() -> OneLineParser:
    """The dashes of the train command; those that Hydra has too mean the same."""
    result = common_parser()
    result.add_argument("--check", action="store_true")
    result.add_argument("--again")
    result.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    result.add_argument("--resolve", action="store_true")
    result.add_argument("--package", "-p")
    result.add_argument("--multirun", "-m", action="store_true")
    result.add_argument("--config-dir", "-cd")
    result.add_argument("--config-name", "-cn", default="config")
    result.add_argument("--shell-completion", "-sc", action="store_true")
    return result


def run_subcommand(
    commands: Mapping[str, Command], arguments: Sequence[str], program: str, help_text: str
) -> int:
    """Run the command that the first argument names, or show what there is; the exit code.

    Raises:
        UserError: there is none of this name, or what it raises.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        sys.stdout.write(help_text)
        return 0
    name, *rest = arguments
    if name not in commands:
        raise UserError(
            f"{program}: needs a command ({', '.join(commands)}), got {name!r}."
            f"{did_you_mean(name, commands)}"
        )
    return commands[name](rest, f"{program} {name}")


def parse_arguments(using: OneLineParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, dashes and overrides in any order.

    Raises:
        UserError: a dash that the command does not know.
    """
    return using.parse_intermixed_args(list(arguments))


def read_keys(
    arguments: Sequence[str], program: str, help_text: str, defaults: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Understand a command line; None if it asked for help, which has been shown.

    Args:
        arguments: keys, in any order.
        program: as messages name it.
        help_text: with `{program}` for the program.
        defaults: of each key; a text, a table, or a list of texts or of numbers like its entries.
            An empty text has to be given.

    Raises:
        UserError: a key does not exist or is missing, or its value is of another kind.
    """
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(help_text.format(program=program))
        return None
    given = dict(defaults)
    for text in args.overrides:
        key, equals, value = text.partition("=")
        if not equals or key not in defaults:
            raise UserError(
                f"{program}: needs keys like {', '.join(f'{name}=' for name in defaults)}, got "
                f"{text!r}.{did_you_mean(key, defaults)}"
            )
        given[key] = _parse_value(key, value, defaults[key])
    return given


def to_texts(key: str, values: Sequence[Any]) -> tuple[str, ...]:
    """The entries as texts.

    Raises:
        UserError: one is a list or nothing.
    """
    if any(isinstance(value, list | dict) or value is None for value in values):
        raise UserError(f"{key}: needs a list of texts, like [A,B], got {values}")
    return tuple(map(str, values))


def to_whole_numbers(key: str, values: Sequence[Any]) -> tuple[int, ...]:
    """The entries as whole numbers.

    Raises:
        UserError: one is none.
    """
    if any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise UserError(f"{key}: needs a list of whole numbers, like [24,72], got {values}")
    return tuple(values)


def _parse_value(key: str, text: str, default: Any) -> Any:
    """A value of the kind of the default."""
    if isinstance(default, str):
        return text
    return _parse_table(key, text) if isinstance(default, dict) else parse_list(key, text)


def _parse_table(key: str, text: str) -> dict[str, Any]:
    """Entries in braces, written as in the overrides of a run."""
    try:
        found: Any = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{key}: needs entries in braces, like {{NAME:[A,B]}}, got {text!r}")
    return {str(name): value for name, value in found.items()}


def parse_list(key: str, text: str) -> list[Any]:
    """A list in brackets, or one entry without.

    Raises:
        UserError: it can't be read.
    """
    try:
        value = OmegaConf.to_object(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except (OmegaConfBaseException, YAMLError):
        raise UserError(f"{key}: needs a list, like [A,B], got {text!r}") from None
    return list(value) if isinstance(value, list) else [value]
