"""Names for stretches of work, as they appear in a profiler's trace; without one they cost nothing.

A trace is asked for by `trainer.profile=true`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

EXCHANGE, DATA = "exchange", "data"
FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser"


def profile_region(name: str) -> AbstractContextManager[object]:
    """A context whose time the trace shows under `name`."""
    # Asked first: code that torch compiles or traces meets no operation that it would keep.
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


def profiled_call(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """The call, whose time the trace shows under `name`."""
    if not profiler._is_profiler_enabled:
        return call

    def call_in_span() -> None:
        with profile_region(name):
            call()

    return call_in_span
