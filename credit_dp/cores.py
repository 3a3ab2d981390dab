"""The CPU cores of this process."""

import os


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # Linux only; counts the cores of a job or container, not all of the machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
