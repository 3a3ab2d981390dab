"""Numbers of a run as files for TensorBoard."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import final

from credit_dp.errors import UserError


@final
class TensorBoardLog:
    """Event files in one folder.

    TensorBoard hides what earlier files have of steps after `step`, the one that training goes on
    after: they are taken again.

    Args:
        folder: of the files; those of earlier starts stay.
        step: the one that training goes on after; 0 at a fresh start.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # Costs a second: only runs that log with it pay.
        from torch.utils.tensorboard import SummaryWriter

        self.step = step
        self.writer = SummaryWriter(folder, purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one step."""
        self.step = step
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Write final numbers, at the last step."""
        self.log(self.step, numbers)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self.writer.close()


def require_tensorboard() -> None:
    """See that the package is there.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "logger.trackers: tensorboard needs a package that is not installed. "
            "Run `pip install 'credit_dp[tensorboard]'`, or take it off logger.trackers."
        )
