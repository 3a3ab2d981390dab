"""Starts the ranks of a run, or joins those that torchrun, srun or submitit started.

`launch(config)` is all that a command needs: it finds out where it is, works out the number of
ranks, and runs one function on every rank. No torch at module level.
"""

from credit_dp.distributed.launch import launch
from credit_dp.distributed.launcher import RankInfo

__all__ = ["RankInfo", "launch"]
