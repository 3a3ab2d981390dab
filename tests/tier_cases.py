"""Divides a list of cases between the tiers."""

from collections.abc import Iterable
from typing import Any

import pytest


def every(
    number: int, cases: Iterable[Any], others: pytest.MarkDecorator = pytest.mark.slow
) -> list[Any]:
    """Return all cases; all but every `number`-th have the mark of another tier.

    A tuple holds several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        case
        if index % number == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=others)
        for index, case in enumerate(cases)
    ]


def tiers(
    fast: Iterable[tuple[Any, ...]],
    slow: Iterable[tuple[Any, ...]],
    exhaustive: Iterable[tuple[Any, ...]] = (),
) -> list[Any]:
    """Return the cases of all tiers, named by all of their arguments."""
    marked = ((fast, ()), (slow, pytest.mark.slow), (exhaustive, pytest.mark.exhaustive))
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=marks)
        for cases, marks in marked
        for case in cases
    ]
