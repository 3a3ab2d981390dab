"""Read the runs of a `--multirun` folder: their overrides, status, timings and scores.

Everything is read from files, also of runs that are still going, failed or half-written.
"""

from credit_dp.sweeps.read import Job, Sweep, read_sweep

__all__ = ["Job", "Sweep", "read_sweep"]
