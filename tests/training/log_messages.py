"""Captures the warnings of the package's loggers, whatever other handlers they have."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@contextmanager
def captured_warnings(name: str = "credit_dp") -> Iterator[list[str]]:
    """Yield the list of warnings that a logger and its children issue."""
    handler, logger = Lines(logging.WARNING), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


@final
class Lines(logging.Handler):
    """Keeps messages in a list."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.lines.append(record.getMessage())
