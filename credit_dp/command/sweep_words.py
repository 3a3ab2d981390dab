"""Splits the command line of the sweep commands: a folder, then `KEY=VALUE`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credit_dp.command.plain_keys import read_plain_keys
from credit_dp.errors import UserError


def read_words(
    arguments: Sequence[str], program: str, help_text: str, defaults: Mapping[str, Any]
) -> tuple[Path, Mapping[str, Any]] | None:
    """The folder and the keys; None if help was asked for, which has been shown.

    Raises:
        UserError: there is not one folder, or a key does not exist.
    """
    words = [text for text in arguments if not text.startswith("-") and not is_key(text, defaults)]
    keys = read_plain_keys(
        [text for text in arguments if text not in words], program, help_text, defaults
    )
    if keys is None:
        return None
    if len(words) != 1:
        raise UserError(
            f"{program}: needs the folder of one sweep, like multirun/NAME, got "
            f"{' '.join(words) or 'none'}."
        )
    return Path(words[0]), keys


def is_key(text: str, defaults: Mapping[str, Any]) -> bool:
    """Whether this is `KEY=VALUE`, be it a wrong key, and not the path of a folder."""
    key, equals, _ = text.partition("=")
    return bool(equals) and (key in defaults or not Path(text).exists())
