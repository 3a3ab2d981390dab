"""What concerns the process itself: its CPU cores, its garbage collector, its profiler's trace.

No torch at module level: data commands do not import it.
"""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

Result = TypeVar("Result")

# The regions in the trace that `trainer.profile=true` writes.
EXCHANGE = "exchange"
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMISER = "optimiser"


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
