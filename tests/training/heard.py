"""What the package's loggers say, whatever else hears them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@contextmanager
def heard_from(name: str = "credit_dp") -> Iterator[list[str]]:
    """The warnings of a logger and those below it."""
    handler, logger = Lines(logging.WARNING), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


@final
class Lines(logging.Handler):
    """Keeps messages."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(record.getMessage())
