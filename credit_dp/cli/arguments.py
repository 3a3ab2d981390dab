"""Parses command lines: options that begin with a dash, and `KEY=VALUE` pairs.

Any function of a command may raise a `UserError`, which `run_command` prints in one line. In this
folder docstrings say so only where it matters what has happened until then.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.errors import UserError

Command = Callable[[Sequence[str], str], int]


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of argparse's usage text."""
        raise UserError(
            f"{message}. Options begin with a dash, keys of the config don't: see --help."
        )


def common_parser() -> OneLineParser:
    """Return a parser for what every command accepts: overrides and `--help`."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    return parser


def train_parser() -> OneLineParser:
    """Return the parser of the train command; options that Hydra has, too, mean the same."""
    parser = common_parser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--again")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    return parser


def run_subcommand(
    commands: Mapping[str, Command], arguments: Sequence[str], program: str, help_text: str
) -> int:
    """Run the command named by the first argument, or print the help; return the exit code."""
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


def parse_arguments(parser: OneLineParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments; options and overrides may come in any order."""
    return parser.parse_intermixed_args(list(arguments))


def read_keys(
    arguments: Sequence[str], program: str, help_text: str, defaults: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return the value of each key; None after printing the help, if it was requested.

    `program` is the name of the command in messages and, for `{program}`, in the help.
    """
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(help_text.format(program=program))
        return None
    values, others = split_keys(args.overrides, defaults)
    for text in others:
        raise UserError(
            f"{program}: needs keys like {', '.join(f'{name}=' for name in defaults)}, got "
            f"{text!r}.{did_you_mean(text.partition('=')[0], defaults)}"
        )
    return values


def read_folders_and_keys(
    arguments: Sequence[str], program: str, help_text: str, defaults: Mapping[str, Any], name: str
) -> tuple[list[Path], Mapping[str, Any]] | None:
    """Return the folders and the value of each key; None after printing the help, if requested.

    `name` is that of a folder in the help.
    """
    folders = [text for text in arguments if not text.startswith("-") and "=" not in text]
    others = [text for text in arguments if text not in folders]
    keys = read_keys(others, program, help_text, defaults)
    return None if keys is None else ([checks.expand_home(name, text) for text in folders], keys)


def split_keys(
    arguments: Sequence[str], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the value of each key, and the arguments that are none of these keys.

    A default gives the type of the value; None accepts any type.
    """
    values, others = dict(defaults), []
    for text in arguments:
        key, equals, value = text.partition("=")
        if equals and key in defaults:
            values[key] = _parse_value(key, value, defaults[key])
        else:
            others.append(text)
    return values, others


def to_texts(key: str, values: Sequence[Any]) -> tuple[str, ...]:
    """Return the entries as texts."""
    if any(isinstance(value, list | dict) or value is None for value in values):
        raise UserError(f"{key}: needs a list of texts, like [A,B], got {values}")
    return tuple(map(str, values))


def to_whole_numbers(key: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Return the entries, which have to be whole numbers."""
    if any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise UserError(f"{key}: needs a list of whole numbers, like [24,72], got {values}")
    return tuple(values)


def _parse_value(key: str, text: str, default: Any) -> Any:
    """Return a value of the type of the key's default."""
    if isinstance(default, str):  # YAML would read some paths as a number, a list or a comment
        quoted = len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]
        return text[1:-1] if quoted else text
    if isinstance(default, dict):
        return _parse_table(key, text)
    if isinstance(default, list):
        return parse_list(key, text)
    if isinstance(default, bool) or default is None:
        value = _parse_yaml(key, text, "a value in YAML")
        if default is not None and not isinstance(value, bool):
            raise UserError(f"{key}: needs true or false, got {text!r}")
        return value
    try:  # YAML would read 010 as 8, and 1:30 as 90
        return type(default)(text)
    except ValueError:
        number = "a whole number" if isinstance(default, int) else "a number"
        raise UserError(f"{key}: needs {number}, got {text!r}") from None


def _parse_table(key: str, text: str) -> dict[str, Any]:
    """Return the entries of a table in braces, in the syntax of overrides."""
    try:
        table: Any = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException:
        table = None
    if not isinstance(table, dict):
        raise UserError(f"{key}: needs a table in braces, like {{NAME:[A,B]}}, got {text!r}")
    return {str(name): value for name, value in table.items()}


def parse_list(key: str, text: str) -> list[Any]:
    """Return a list in brackets; a value without brackets is its only entry."""
    value = _parse_yaml(key, text, "a list, like [A,B]")
    return list(value) if isinstance(value, list) else [value]


def _parse_yaml(key: str, text: str, needed: str) -> Any:
    try:
        return OmegaConf.to_object(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except (OmegaConfBaseException, YAMLError):
        raise UserError(f"{key}: needs {needed}, got {text!r}") from None
