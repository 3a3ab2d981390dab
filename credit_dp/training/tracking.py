"""Who is told of a run's numbers: a CSV file always, other trackers beside it."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from credit_dp.config import LoggerConfig
from credit_dp.training.background import Background
from credit_dp.training.csv_log import CsvLog
from credit_dp.training.sink import Sink
from credit_dp.training.tensorboard_log import TensorBoardLog, require_tensorboard
from credit_dp.training.wandb_log import WandbLog, require_key

LAST_WAIT = 5.0  # seconds for each tracker when the user wants the run to end at once


@final
class Tracker:
    """Hands every logged step to all sinks; one without sinks (ranks other than 0) stays quiet."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of one training step."""
        for sink in self.sinks:
            sink.log(step, numbers)

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Record what stands at the end of a run."""
        for sink in self.sinks:
            sink.summarise(numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        hurries = error is not None and not isinstance(error, Exception)
        for sink in self.sinks:
            if hurries and isinstance(sink, Background):
                sink.patience = min(sink.patience, LAST_WAIT)
            sink.close()


def open_tracker(
    config: LoggerConfig, log: Path, step: int, run_config: dict[str, Any], rank: int
) -> Tracker:
    """The tracker of one rank: rank 0 writes, the others do nothing.

    `log` is the CSV file, in the run's folder; `step` is the one resumed from, 0 at a fresh start.

    Raises:
        UserError: `logger.wandb=online` without a key, or a tracker's package is not installed.
            What goes wrong later is a warning.
    """
    if rank != 0:
        return Tracker([])
    folder = log.parent
    sinks: list[Sink] = []
    # Sites and test suites switch wandb off by its own variable; only that much is taken from it.
    off = config.wandb == "disabled" or os.environ.get("WANDB_MODE") == "disabled"
    if "wandb" in config.trackers and not off:
        if config.wandb == "online":
            require_key()
        start = partial(WandbLog, config.wandb, config.project, folder, step, run_config)
        sinks.append(Background("Weights & Biases", start))
    if "tensorboard" in config.trackers:
        require_tensorboard()
        sinks.append(
            Background("TensorBoard", partial(TensorBoardLog, folder / "tensorboard", step))
        )
    return Tracker([CsvLog(log, step), *sinks])
