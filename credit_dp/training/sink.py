"""What every tracker can do, whichever it is."""

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """A place that takes numbers."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one step."""

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Take the numbers that stand at the end."""

    def close(self) -> None:
        """Nothing more will come."""
