"""Draw figures in such a way that one that can't be drawn costs a warning, and nothing else.

Figures come last, after hours of training or scoring. Every command draws them through
`draw_or_warn`.
"""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


def draw_or_warn(
    name: str, draw: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
) -> T | None:
    """Return the result of a function that draws; if it fails, warn in one line and return None."""
    try:
        # No error at all of a figure may end a command.
        return draw(*arguments, **keywords)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("%s: not drawn, all else is written (%s)", name, reason)
        logger.info("%s: the error", name, exc_info=True)  # for the log file of a run
        return None
