"""Reading sweeps: what the runs of a `--multirun` folder were to do, how far they are, how well.

Files alone are read, also of runs that are under way, failed or half-written. No torch in here.
"""

from credit_dp.sweeps.read import Job, Sweep, read_sweep

__all__ = ["Job", "Sweep", "read_sweep"]
