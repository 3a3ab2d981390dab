"""The command line: checks what a user types, and starts the command.

No module in here imports torch at module level, so that `--help` and `--cfg job` answer at once.
"""

from credit_dp.cli.entry import main, train_main

__all__ = ["main", "train_main"]
