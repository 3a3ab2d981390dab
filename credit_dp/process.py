"""The CPU cores that this process may use, and its garbage collector."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # Linux only; counts the cores that a job or a cpuset allows. CPU quotas are not seen.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
