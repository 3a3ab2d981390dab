"""What the commands that answer a question about a config have in common."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from credit_dp.command.arguments import OneLineParser, parse, parser
from credit_dp.command.compose import Composer, check_overrides
from credit_dp.command.overrides import parse_overrides
from credit_dp.command.train import check_run
from credit_dp.config import Config


class Question(NamedTuple):
    """A checked config, whether the answer is wanted as JSON, and all that began with a dash."""

    config: Config
    json: bool
    dashes: argparse.Namespace


def read_question(
    arguments: Sequence[str],
    program: str,
    help_text: str,
    add_dashes: Callable[[OneLineParser], None] = lambda using: None,
) -> Question | None:
    """Understand a command line; None if it asked for help, which has been shown.

    `add_dashes` declares what else the command understands.

    Raises:
        UserError: a key or a value does not exist, or is not allowed.
    """
    using = parser()
    using.add_argument("--json", action="store_true")
    add_dashes(using)
    args = parse(using, arguments)
    if args.help:
        sys.stdout.write(help_text.format(program=program))
        return None
    composer = Composer(program.rpartition(" ")[2])  # from here on the user's models are known
    overrides = parse_overrides(args.overrides)
    check_overrides(overrides, composer.groups)
    return Question(check_run(composer, overrides), args.json, args)
