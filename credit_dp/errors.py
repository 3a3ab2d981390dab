"""Exceptions for mistakes that the user can mend, words of messages, and quotes for values."""

import re
import shlex
from collections.abc import Sequence

# Starts with a letter, or is a path: Hydra takes no such word for a number.
PLAIN_TEXT = re.compile(r"(?:\.{0,2}/)?[a-z_](?:[\w./+@% -]*[\w./+@%-])?", re.ASCII | re.IGNORECASE)
OTHER_VALUES = {"true", "false", "null", "nan", "inf"}  # Hydra takes them for no text


class UserError(Exception):
    """A mistake in the user's input, in one line: where, what is needed, what came, and the fix.

    Commands print the line without a traceback and exit with a non-zero code.
    """


class UnreachableError(UserError):
    """Remote data that this machine can't reach; the config itself may be right."""


def counted(count: float, noun: str) -> str:
    """Return a number and its noun: `1 field`, `1,200 fields`."""
    number = f"{int(count):,}" if count == int(count) else f"{count:g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return " ".join(lines[0].split()) if lines else type(error).__name__


def install_extra(extra: str) -> str:
    """Return how to install packages that an extra of this one names; it is on no index."""
    return f"Run pip install '.[{extra}]' in the folder that credit_dp was cloned into"


def traceback_message(lines: Sequence[str]) -> str | None:
    """Return the first line of the last traceback's message, `TYPE: ...`; None if there is none."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    below = lines[starts[-1] + 1 :] if starts else ()
    return next((line.strip() for line in below if line.strip() and not line.startswith(" ")), None)


def shell_argument(key: str, value: str) -> str:
    """Return `key=value` for a shell, with the quotes that Hydra and the shell need for a text."""
    plain = PLAIN_TEXT.fullmatch(value) and value.lower() not in OTHER_VALUES
    return shlex.quote(f"{key}={value if plain else quote(value)}")


def quote(value: str) -> str:
    """Return a value in double quotes, with quotes in it and backslashes before quotes escaped."""
    # Hydra removes a backslash only before a quote, so others must stay single. The added quote at
    # the end is treated like one in the text, and replaced by the closing quote.
    result: list[str] = []
    backslashes = 0
    for character in value + '"':
        if character == '"':
            result.append("\\" * backslashes)
            result.append('\\"')
        else:
            result.append(character)
        backslashes = backslashes + 1 if character == "\\" else 0
    return '"' + "".join(result)[:-2] + '"'
