"""Writes each lead time while the next one is computed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, final


@final
class Streaming:
    """One thread, and one task at a time: never is more than one lead time in its hands.

    An error of a task is raised where the next one is given, or at the end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._last: Future[None] | None = None

    def give(self, task: Callable[[], None]) -> None:
        """Wait until the last task is done, then start this one."""
        self.wait()
        self._last = self._thread.submit(task)

    def wait(self) -> None:
        """Wait until all is done."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._thread.shutdown()
