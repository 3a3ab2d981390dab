"""Tables of what is refused: each entry with the decisive words of its line."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from credit_dp.errors import UserError


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the line with which a call is refused; it is one line."""
    try:
        call(*arguments, **options)
    except UserError as error:
        line = str(error)
    else:
        pytest.fail(f"not refused: {arguments} {options}")
    assert "\n" not in line
    return line


def assert_refused(table: Iterable[tuple[Callable[[], Any], str]]) -> None:
    """Assert that each call is refused with a line that has the words of its pattern."""
    lines = [(words, refusal(call)) for call, words in table]
    assert [pair for pair in lines if not re.search(*pair)] == []
