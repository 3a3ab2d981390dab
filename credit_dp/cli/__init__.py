"""The command line: what a user types, turned into a checked config and handed to `launch`.

Nothing in here imports torch at module level, so `--help` and `--cfg job` answer at once.
"""

from credit_dp.cli.entry import main, train_main

__all__ = ["main", "train_main"]
