"""What of a list of cases belongs into the fast tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def every(number: int, cases: Iterable[Any]) -> list[Any]:
    """All cases; but for every `number`-th, they are for the long tier.

    Tuples stand for several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        case
        if index % number == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
