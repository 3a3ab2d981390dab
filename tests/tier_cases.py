"""Divides a list of cases between the fast and the long tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def every(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases; all but every `number`-th are marked slow.

    A tuple holds several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        case
        if index % number == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def tiers(fast: Iterable[tuple[Any, ...]], slow: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases of both tiers, named by all of their arguments."""
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=marks)
        for cases, marks in ((fast, ()), (slow, pytest.mark.slow))
        for case in cases
    ]
