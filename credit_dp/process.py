"""What concerns the process itself: its screen, CPU cores, garbage collector, profiler's trace.

No torch at module level: data commands do not import it.
"""

import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO, TypeVar, cast, final

Result = TypeVar("Result")

# The regions in the trace that `trainer.profile=true` writes.
EXCHANGE = "exchange"
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMISER = "optimiser"


@final
class LastingFile(io.FileIO):
    """A file for the screen: when nobody reads it any more, what is written goes nowhere."""

    def write(self, data: Any, /) -> int:
        """Write bytes."""
        try:
            return super().write(data)
        except OSError as error:
            # The reader of a pipe has ended, as of `| head -1`, or the terminal is gone.
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


# Names the file that gets what a run of a sweep would show on the screen; ranks inherit it.
OUTPUT_VARIABLE = "CREDIT_DP_OUTPUT"


@final
class AppendedFile(io.TextIOBase):
    """A text file that is open only while it is written to, so that nobody has to close it.

    What it can't take goes to stderr: a full disk does not end a run.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, text: str, /) -> int:
        """Append a text."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                return file.write(text)
        except OSError:
            return sys.stderr.write(text)


def output_file() -> TextIO | None:
    """Return the file that replaces the screen of this process; None if the screen is used."""
    path = os.environ.get(OUTPUT_VARIABLE)
    return cast(TextIO, AppendedFile(path)) if path else None


@contextmanager
def output_to(path: str) -> Iterator[None]:
    """Let what a run shows, and its warnings, go to a file meanwhile; errors stay on stderr."""
    os.environ[OUTPUT_VARIABLE] = path
    try:
        yield
    finally:
        del os.environ[OUTPUT_VARIABLE]


def outlive_screen() -> None:
    """Let stdout and stderr of this process be written to when nobody reads them any more.

    A run goes on, with its logs in files, and a report ends as if it had been read.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - to the end
        elif isinstance(stream, io.TextIOWrapper) and stream.fileno() == number:
            file = LastingFile(number, "w", closefd=False)
            # With `python -u` there is no buffer.
            buffered = isinstance(stream.buffer, io.BufferedWriter)
            lasting = io.TextIOWrapper(
                io.BufferedWriter(file) if buffered else file,
                stream.encoding,
                stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # Linux only; counts the cores that a job or a cpuset allows. CPU quotas are not seen.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def complete(future: Future[Result], task: Callable[[], Result]) -> None:
    """Run a task, and give its result or its error to a future.

    For daemon threads, which do not keep a program from ending: Python joins those of its executors
    at exit.
    """
    try:
        result = task()
    except BaseException as error:  # noqa: BLE001 - raised again by `future.result`
        future.set_exception(error)
    else:
        future.set_result(result)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Free nothing that is in reference cycles inside the context, in any thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def profile_region(name: str) -> AbstractContextManager[object]:
    """Return a context whose time the trace shows under `name`; without a profiler it is empty."""
    from credit_dp.torch_private import is_profiling

    # Without the test, torch.compile and tracing would record the profiler's operation.
    if not is_profiling():
        return nullcontext()
    from torch.autograd import profiler

    return profiler.record_function(name)


def profiled_call(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `call` and whose time the trace shows under `name`."""
    from credit_dp.torch_private import is_profiling

    if not is_profiling():
        return call

    def call_in_region() -> None:
        with profile_region(name):
            call()

    return call_in_region
