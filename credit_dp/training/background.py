"""A tracker on a thread of its own, so that training never waits for it and never fails with it."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import final

from credit_dp.training.sink import Sink

ROOM = 1000  # steps that wait to be taken
PATIENCE = 60.0  # seconds that the end of a run waits

logger = logging.getLogger(__name__)

Task = Callable[[Sink], None]


@final
class Background:
    """Hands numbers on as they are taken.

    Whatever goes wrong with the tracker is one warning. From then on it is left alone.

    Args:
        name: of the tracker, for people.
        start: opens it; called on the thread.
        room: see `ROOM`.
        patience: see `PATIENCE`.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Sink],
        room: int = ROOM,
        patience: float | None = None,
    ) -> None:
        self.name = name
        self.patience = PATIENCE if patience is None else patience
        self._tasks: queue.Queue[Task | None] = queue.Queue(room)
        self._dropping = threading.Lock()
        self._dropped = False
        self.thread = threading.Thread(target=self._work, args=(start,), name=name, daemon=True)
        self.thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Pass on the numbers of one step."""
        taken = dict(numbers)
        self._pass_on(lambda sink: sink.log(step, taken))

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Pass on the numbers that stand at the end."""
        taken = dict(numbers)
        self._pass_on(lambda sink: sink.summarise(taken))

    def close(self) -> None:
        """Let the tracker finish, for as long as there is patience."""
        self._pass_on(None)
        if self._dropped:
            return
        self.thread.join(self.patience)
        if self.thread.is_alive():
            self._drop(f"not done after {self.patience:g} s")

    def _pass_on(self, task: Task | None) -> None:
        if self._dropped:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._drop("it hangs")

    def _work(self, start: Callable[[], Sink]) -> None:
        try:
            sink = start()
        except Exception as error:  # noqa: BLE001 - nothing that a tracker does ends a run
            self._drop(said(error))
            return
        try:
            while (task := self._tasks.get()) is not None:
                task(sink)
            sink.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._drop(said(error))
            with contextlib.suppress(Exception):
                sink.close()

    def _drop(self, reason: str) -> None:
        """Warn, unless it has been told already."""
        with self._dropping:
            if not self._dropped:
                logger.warning(
                    "%s: left out from here on (%s). Training goes on.", self.name, reason
                )
            self._dropped = True


def said(error: Exception) -> str:
    """What an error says, on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
