"""The CPU cores of this process."""

import os


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # Linux only; counts the cores that a job or a cpuset allows. CPU quotas are not seen.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
