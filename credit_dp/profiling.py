"""Named regions in a profiler's trace, which `trainer.profile=true` writes.

Without a profiler they cost nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

EXCHANGE = "exchange"
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMISER = "optimiser"


def profile_region(name: str) -> AbstractContextManager[object]:
    """Return a context whose time the trace shows under `name`."""
    # Without the test, torch.compile and tracing would record the profiler's operation.
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


def profiled_call(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `call` and whose time the trace shows under `name`."""
    if not profiler._is_profiler_enabled:
        return call

    def call_in_region() -> None:
        with profile_region(name):
            call()

    return call_in_region
