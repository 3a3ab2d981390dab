"""What is to be scored against what, and how a message of the data names its keys."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from credit_dp.errors import UserError

# Keys of a run's config, and those that stand for them here.
KEYS = {
    "data.prognostic": "variables",
    "data.levels": "levels",
    "data.limits": "limits",
    "no list of the data config has a variable": "what is scored has no variable",
    "Change limits, or add it to a list": "Change limits or variables",
    "data.dates.train": "climatology_dates",
    "data.cache": "the environment variable CREDIT_DP_CACHE",
}
FILL = re.compile(r"set data\.variables\.(\w+)\.fill=mean, or to a number")
CONVERT = re.compile(r"set data\.variables\.\S+\.convert='[^']*'")
FILLED = re.compile(r", which data\.variables\.\w+\.fill goes by")


@final
@dataclass(frozen=True)
class ScoreRequest:
    """A forecast store, the truth, and what of them is scored; what is empty is all there is.

    Attributes:
        truth: its stores, as those of `data.store`.
        dates: first and last initial time, in ISO format.
        hours: lead times.
        climatology: a store by hour and day of the year.
        climatology_dates: those of the truth that a climatology is fitted to, without such a store.
        limits: `[low, high]` of a variable's values, or None for any; see `DataConfig`.
        masked: variables that have no values on some points at any time, as over land.
        cache: folder for a climatology that is fitted.
    """

    forecast: str
    truth: tuple[str, ...]
    cache: str
    variables: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    dates: tuple[str, ...] = ()
    hours: tuple[int, ...] = ()
    climatology: str = ""
    climatology_dates: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def keys_for(store: str) -> Iterator[None]:
    """Errors of the data in terms of the request: `store` is the key that gave the store.

    Raises:
        UserError: as raised inside, with the request's keys.
    """
    try:
        yield
    except UserError as error:
        text = FILLED.sub("", FILL.sub(r"give masked=[\1]", str(error)))
        text = CONVERT.sub("convert it, or leave it out of variables=", text)
        for old, new in {"data.store": store, **KEYS}.items():
            text = text.replace(old, new)
        raise UserError(text) from error
