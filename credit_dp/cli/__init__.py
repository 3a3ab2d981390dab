"""The command line: checks what a user types, and starts the command.

No module in here imports torch at module level, so that `--help` and `--cfg job` answer at once.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

__all__ = ["main", "train_main"]


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
    Ctrl-C raises KeyboardInterrupt again.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as with nohup
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: exit_interrupted())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_interrupted() -> NoReturn:
    """End the process at once, without Python's clean-up."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)
