"""Signals that ask a process to stop, and the time at which its job ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import final

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again, with resume=auto
DUPLICATE_SECONDS = 2.0  # seconds: a job queue signals a rank and its launcher, which hands that on


class Terminated(BaseException):
    """A signal ends the program; like KeyboardInterrupt, nothing but its end should catch this.

    `code` is that to exit with. SIGUSR1 announces an end that is not of the run's making, so that
    whoever starts runs again is told to.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = EXIT_PREEMPTED if number == signal.SIGUSR1 else 128 + number


@final
class SignalRouter:
    """Who in this process heeds signals, if anyone, and when SIGTERM first came."""

    def __init__(self) -> None:
        self.handler: Callable[[int], None] | None = None
        self.first_sigterm: float | None = None

    def route(self, number: int) -> bool:
        """Hand a signal on; False if it ends the process instead. Called in any thread."""
        now = time.monotonic()
        if number == signal.SIGTERM and self.handler is not None:
            self.first_sigterm = self.first_sigterm or now
        again = number == signal.SIGTERM and now - (self.first_sigterm or now) > DUPLICATE_SECONDS
        if self.handler is None or again or number not in STOP_SIGNALS:
            return False
        self.handler(number)
        return True


_router = SignalRouter()  # a process has one set of signals


@contextlib.contextmanager
def handle_stop(act: Callable[[int], None]) -> Iterator[None]:
    """Have a signal that asks to stop call `act(number)` meanwhile, if need be in another thread.

    Where nobody else has set this process's signals up, that is done here; only a main thread can.
    Once it has been asked, the process is taken to end: it is not ended sooner by a signal that
    says the same and comes late, from a launcher that was slow to hand it on.
    """
    asked: list[int] = []

    def note(number: int) -> None:
        asked.append(number)
        act(number)

    def take(number: int, frame: FrameType | None) -> None:
        if not _router.route(number):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    main = threading.current_thread() is threading.main_thread()
    ours = [kind for kind in STOP_SIGNALS if main and signal.getsignal(kind) is signal.SIG_DFL]
    outer, _router.handler, _router.first_sigterm = _router.handler, note, None
    for kind in ours:
        signal.signal(kind, take)
    try:
        yield
    finally:
        if asked and outer is None:
            _router.handler = asked.append
        else:
            for kind in ours:
                signal.signal(kind, signal.SIG_DFL)
            _router.handler = outer


@contextlib.contextmanager
def raise_on_stop() -> Iterator[None]:
    """Turn signals that nobody heeds into `Terminated`, so that clean-up runs.

    Only a main thread can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def take(number: int, frame: FrameType | None) -> None:
        if not _router.route(number):
            raise Terminated(number)

    before = [signal.signal(kind, take) for kind in STOP_SIGNALS]
    try:
        yield
    finally:
        for kind, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(kind, handler)


@contextlib.contextmanager
def handle_stop_in_thread(act: Callable[[int], None]) -> Iterator[None]:
    """Have SIGINT, and signals that nobody heeds, call `act(number)` in a thread of its own.

    Python runs handlers in the main thread between two lines of Python: one that waits in a
    collective gets there only when the collective ends. Only a main thread can set this up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def listen() -> None:
        while number := ear.recv(1):
            if number[0] in kinds and not _router.route(number[0]):
                act(number[0])

    kinds = (*STOP_SIGNALS, signal.SIGINT)
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = [signal.signal(kind, lambda number, frame: None) for kind in kinds]
    woken = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
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


@contextlib.contextmanager
def block_signals(kinds: tuple[signal.Signals, ...] = STOP_SIGNALS) -> Iterator[None]:
    """Keep signals waiting, here and in processes that are started meanwhile.

    A thread holds back only what is sent to itself: what reaches the process by another one waits
    too, where this is the main thread, in which Python runs handlers.
    """
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handlers = {kind: signal.getsignal(kind) for kind in kinds if main}
    handlers = {kind: handler for kind, handler in handlers.items() if callable(handler)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
    for kind in handlers:
        signal.signal(kind, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in came:
            signal.raise_signal(number)


def slurm_job_id(environment: Mapping[str, str]) -> str | None:
    """`7`, or `7_2` in an array; None outside of SLURM.

    `SLURM_JOB_ID` will not do: that of an array's last job is the number of the whole array, and
    `scontrol requeue` would queue all its jobs again, those that are done too.
    """
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


MARGIN_SECONDS = 120.0  # seconds before the end: for the rest of a step and a checkpoint
MARGIN_SHARE = 0.1  # of a short job's time, which may be less
LEAST_MARGIN_SECONDS = 15.0  # seconds that a checkpoint of anything takes on a busy machine
SLURM_TIMEOUT = 10.0  # seconds for SLURM to answer
UNIT_SECONDS = (1, 60, 3600, 86400)  # of `[days-[hours:]]minutes:seconds`, from the right


@final
class TimeLimit:
    """The moment at which a run of a job has to stop to be saved in time; never outside a job."""

    def __init__(self, seconds_left: float | None) -> None:
        self.deadline: float | None = None
        if seconds_left is not None:
            margin = min(MARGIN_SECONDS, max(LEAST_MARGIN_SECONDS, MARGIN_SHARE * seconds_left))
            self.deadline = time.monotonic() + seconds_left - margin

    def reached(self) -> bool:
        """Whether it is time to stop."""
        return self.deadline is not None and time.monotonic() >= self.deadline


def job_time_limit() -> TimeLimit:
    """Of the job that this process is part of."""
    return TimeLimit(seconds_left(os.environ))


def seconds_left(environment: Mapping[str, str]) -> float | None:
    """Until SLURM ends this job; None outside of one, without a limit, or if it can't be told."""
    job = slurm_job_id(environment)
    if job is None:
        return None
    end = environment.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():  # set by newer versions
        return max(0.0, int(end) - time.time())
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%L"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SLURM_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_duration(done.stdout.strip())


def parse_duration(text: str) -> float | None:
    """Seconds of `1-02:03:04`, `2:03:04` or `3:04`; None for `UNLIMITED` and the like."""
    if not re.fullmatch(r"(\d+-)?(\d+:){1,2}\d+", text):
        return None
    parts = reversed(re.split("[-:]", text))
    return float(sum(int(part) * unit for part, unit in zip(parts, UNIT_SECONDS, strict=False)))
