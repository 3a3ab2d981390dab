"""Splits a command line: what begins with a dash changes the command, the rest are overrides."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from credit_dp.checks import nearest
from credit_dp.errors import UserError

Command = Callable[[Sequence[str], str], int]


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for whatever it does not understand."""
        raise UserError(f"{message}. Dashes only change the command: see --help.")


def parser() -> OneLineParser:
    """What every command understands."""
    result = OneLineParser(add_help=False, allow_abbrev=False)
    result.add_argument("overrides", nargs="*")
    result.add_argument("--help", "-h", action="store_true")
    return result


def train_parser() -> OneLineParser:
    """The dashes of the train command; those that Hydra has too mean the same."""
    result = parser()
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


def run_named(
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
            f"{nearest(name, commands)}"
        )
    return commands[name](rest, f"{program} {name}")


def parse(using: OneLineParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments, dashes and overrides in any order.

    Raises:
        UserError: a dash that the command does not know.
    """
    return using.parse_intermixed_args(list(arguments))
