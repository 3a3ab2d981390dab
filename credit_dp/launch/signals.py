"""SIGTERM as an exception where this program starts the ranks, as a call where it is a rank."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Terminated(BaseException):
    """SIGTERM arrived; like KeyboardInterrupt, nothing but the program's end should catch it."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into `Terminated`, so that clean-up runs; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def on_stop(act: Callable[[int], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `act(number)` in a thread of its own, and do nothing else.

    Python runs handlers in the main thread between two lines of Python: one that waits in a
    collective gets there only when the collective ends. Only a main thread can set this up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heed() -> None:
        while number := ear.recv(1):
            if number[0] in kinds:
                act(number[0])

    kinds = (signal.SIGTERM, signal.SIGINT)
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = [signal.signal(kind, lambda signum, frame: None) for kind in kinds]
    woken = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=heed, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
        mouth.close()
        listener.join()
        ear.close()
