"""Threads that read ahead, in order, and can be left behind when a store does not answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar, final

T = TypeVar("T")
Tasks = SimpleQueue[Callable[[], None] | None]

PATIENCE = 5.0  # seconds for what is being read when reading is closed


@final
class ReadingThreads:
    """Some threads that begin tasks in the order in which they came.

    They end with the process, unlike those of `concurrent.futures`, which a process waits for: a
    store that is slow or gone must not keep a run from ending.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Have a task done; its result or error is that of the future.

        Raises:
            RuntimeError: the threads were closed.
        """
        if self._closed:
            raise RuntimeError("reading was closed")
        for number in range(len(self._threads), self._count):
            name = f"loader-{number}"
            thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        future: Future[T] = Future()
        self._tasks.put(partial(_run, future, task))
        return future

    def close(self) -> None:
        """Begin no more, and wait a while for what is under way. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        patience = PATIENCE
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(patience)
            patience = 0.0 if thread.is_alive() else patience


def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # a batch lives no longer than somebody wants it


def _run(future: Future[T], task: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = task()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the task has to see it
        future.set_exception(error)
    else:
        future.set_result(result)
