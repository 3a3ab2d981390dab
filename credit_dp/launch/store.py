"""What is asked of the store where ranks meet; torch's own class has no complete stub."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol


class Store(Protocol):
    """Small values by key, seen by all ranks; a RuntimeError if whoever keeps it is gone."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def add(self, key: str, amount: int) -> int:
        """Count up, and return what it is then."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys are there, and read them."""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys are there."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long reading waits."""

    def clone(self) -> Store:
        """The same store over a connection of its own, for another thread."""
