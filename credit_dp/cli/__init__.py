"""The command line: checks what a user types, and starts the command.

No module in here imports torch at module level, so that `--help` and `--cfg job` answer at once.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

__all__ = ["main", "train_main"]

REPEAT_SECONDS = 2.0  # after Ctrl-C, in which another one counts as the same


def main() -> NoReturn:
    """Run the console script `credit-dp`."""
    with exit_on_interrupt():
        from credit_dp.cli import entry
    entry.main()


def train_main() -> NoReturn:
    """Run `train.py`."""
    with exit_on_interrupt():
        from credit_dp.cli import entry
    entry.train_main()


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process with one line and exit code 130 on Ctrl-C while the commands are imported.

    This takes a second, in which nothing has been started that needs to be cleaned up. Afterwards
    Ctrl-C raises KeyboardInterrupt, but not again within `REPEAT_SECONDS`, in which a process that
    cleans up and ends would show a traceback.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as with nohup
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: exit_interrupted())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, raise_once())


def raise_once() -> Callable[[int, FrameType | None], None]:
    """Return a handler that raises KeyboardInterrupt unless it has just done so."""
    last = -math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > REPEAT_SECONDS:
            last = now
            raise KeyboardInterrupt

    return on_signal


def exit_interrupted() -> NoReturn:
    """End the process at once, without Python's clean-up."""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, b"\ninterrupted\n")
    os._exit(130)
