"""Stop a process on a signal.

STOP_SIGNALS ask a process to stop. `SignalRouter` decides what happens: the innermost handler that
`handle_stop` set is called, for instance to save a checkpoint; without a handler the process ends,
after its clean-up inside `raise_on_stop`.

| process | without a handler | with a handler |
|---|---|---|
| parent of local ranks | `raise_on_stop` | `handle_stop(forward_signal)` while ranks run |
| local rank | the default action: it ends | `handle_stop(record_signal)` while it trains |
| launched rank | `handle_stop_in_thread(monitor.stop)` | `handle_stop(record_signal)` as above |
| a run of one process | `raise_on_stop` | `handle_stop(record_signal)` as above |

Python runs signal handlers in the main thread only, between two of its own instructions, so
not while it waits in a collective. The default action ends a local rank at any point; while it
trains, where signals are recorded instead, its parent can kill it. A launched rank has no such
parent, and listens in a separate thread.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # SIGHUP: the terminal is gone
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again, with resume=auto
# A job queue signals a rank and also its launcher, which forwards the signal: within this time
# after the first SIGTERM another one counts as the same.
DUPLICATE_SECONDS = 2.0
NOTE = "signal"  # the file of `note_signal` in the folder of local ranks


def signal_name(number: int) -> str:
    """Return the name of a signal; Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def unignored(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process does not ignore; with nohup it ignores SIGHUP."""
    return [each for each in signals if signal.getsignal(each) is not signal.SIG_IGN]


class Terminated(BaseException):
    """Raised when a signal ends the program; only the outermost frame catches it.

    It derives from BaseException, like KeyboardInterrupt, so that `except Exception` lets it pass.

    Attributes:
        code: exit code of the process. SIGUSR1 announces the end of a job, not of the run: its
            code asks to start the same command again.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(signal_name(number))
        self.code = EXIT_PREEMPTED if number == signal.SIGUSR1 else 128 + number


@final
class SignalRouter:
    """Passes signals on to the current handler of this process.

    Attributes:
        handler: called with the number of the signal; None if a signal ends the process.
        first_sigterm: when the first SIGTERM came, on the monotonic clock.
        note: where the parent of local ranks writes which signal it passes on as SIGUSR1.
    """

    def __init__(self) -> None:
        self.handler: Callable[[int], None] | None = None
        self.first_sigterm: float | None = None
        self.note: Path | None = None

    def route(self, number: int) -> bool:
        """Call the handler and return True; return False if the signal has to end the process.

        Can be called in any thread.
        """
        now = time.monotonic()
        if number == signal.SIGTERM and self.handler is not None:
            self.first_sigterm = self.first_sigterm or now
        # A second SIGTERM ends a process whose graceful stop takes too long for the sender.
        repeated = (
            number == signal.SIGTERM and now - (self.first_sigterm or now) > DUPLICATE_SECONDS
        )
        if self.handler is None or repeated or number not in STOP_SIGNALS:
            return False
        self.handler(self._original(number))
        return True

    def _original(self, number: int) -> int:
        noted = ""
        if number == signal.SIGUSR1 and self.note is not None:
            with contextlib.suppress(OSError):  # it came from elsewhere
                noted = self.note.read_text()
        return int(noted) if noted.isdecimal() else number


_router = SignalRouter()  # a process has one set of signals


def note_signal(folder: Path, number: int) -> None:
    """Note for the ranks which signal their parent passes on as SIGUSR1."""
    with contextlib.suppress(OSError):  # a full disk
        (folder / NOTE).write_text(str(number))


def read_note_of_parent(folder: Path) -> None:
    """Let handlers of this rank get the signal that the parent noted, in place of SIGUSR1."""
    _router.note = folder / NOTE


@contextlib.contextmanager
def handle_stop(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler(number)` on a stop signal inside the context, possibly in another thread.

    Signals that still have their default action are caught here; only a main thread can do so.
    """
    received: list[int] = []

    def record(number: int) -> None:
        received.append(number)
        handler(number)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not _router.route(number):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    uncaught = [s for s in STOP_SIGNALS if is_main and signal.getsignal(s) is signal.SIG_DFL]
    outer = _router.handler
    _router.handler = record
    _router.first_sigterm = None
    for stop_signal in uncaught:
        signal.signal(stop_signal, on_signal)
    try:
        yield
    finally:
        if received and outer is None:
            # The process is about to end by itself. The same signal, forwarded late by a slow
            # launcher, must not end it sooner: it is still caught, and only recorded.
            _router.handler = received.append
        else:
            for stop_signal in uncaught:
                signal.signal(stop_signal, signal.SIG_DFL)
            _router.handler = outer


@contextlib.contextmanager
def raise_on_stop() -> Iterator[None]:
    """Raise `Terminated` on a stop signal that no handler takes, so that clean-up code runs.

    For a process that never waits in a collective, or is alone. Does nothing outside the main
    thread, which alone can catch signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not _router.route(number):
            raise Terminated(number)

    previous = {each: signal.signal(each, on_signal) for each in unignored(STOP_SIGNALS)}
    try:
        yield
    finally:
        for stop_signal, action in previous.items():
            signal.signal(stop_signal, action)


@contextlib.contextmanager
def handle_stop_in_thread(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler(number)` in a separate thread on SIGINT and on unhandled stop signals.

    For a launched rank: no parent can kill it while it waits in a collective. Does nothing outside
    the main thread, which alone can catch signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def listen() -> None:
        while number := receiver.recv(1):  # empty when the sender is closed
            if number[0] in previous and not _router.route(number[0]):
                handler(number[0])

    # A Python handler would wait until the main thread returns from a collective. The wake-up file
    # descriptor is written by the C handler, at once, with the number of the signal as one byte.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    # The C handler runs only for signals that have a Python handler, which has nothing to do.
    signals = [*unignored(STOP_SIGNALS), signal.SIGINT]
    previous = {each: signal.signal(each, lambda number, frame: None) for each in signals}
    previous_wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for each, action in previous.items():
            signal.signal(each, action)
        sender.close()  # ends the listener
        listener.join()
        receiver.close()


@contextlib.contextmanager
def block_signals(signals: tuple[signal.Signals, ...] = STOP_SIGNALS) -> Iterator[None]:
    """Delay signals until the end of the block, here and in processes started meanwhile."""
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.getsignal(each) for each in signals if is_main}
    handlers = {each: handler for each, handler in handlers.items() if callable(handler)}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # The mask belongs to this thread alone: the kernel may deliver a signal of the process to any
    # other thread, and Python then runs the handler here. Meanwhile handlers only record.
    for each in handlers:
        signal.signal(each, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        for number in received:
            signal.raise_signal(number)
