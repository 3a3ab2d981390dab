"""The command line: checks what a user types, and starts the command.

No module in here imports torch at module level, so that `--help` and `--cfg job` answer at once.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from credit_dp.distributed.launcher import likely_rank

__all__ = ["main", "train_main"]

# With them nothing is trained.
SHOWING_OPTIONS = ("--help", "-h", "--cfg", "-c", "--shell-completion", "-sc")
REPEAT_SECONDS = 2.0  # after Ctrl-C, in which another one counts as the same


def main() -> NoReturn:
    """Run the console script `credit-dp`."""
    if sys.argv[1:2] == ["train"]:
        say_loading(sys.argv[2:])
    with exit_on_interrupt():
        from credit_dp.cli import entry
    entry.main()


def train_main() -> NoReturn:
    """Run `train.py`."""
    say_loading(sys.argv[1:])
    with exit_on_interrupt():
        from credit_dp.cli import entry
    entry.train_main()


def say_loading(arguments: Sequence[str]) -> None:
    """Say on a terminal that a run begins, for the seconds until its first line.

    Once for all ranks of a launcher, and not on stdout, which other programs may read.
    """
    shows = any(text.partition("=")[0] in SHOWING_OPTIONS for text in arguments)
    if not shows and sys.stderr and sys.stderr.isatty() and likely_rank(os.environ) == 0:
        sys.stderr.write("loading, which takes some seconds\n")
        sys.stderr.flush()


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
