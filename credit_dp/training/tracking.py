"""The log of a run: a CSV file always, Weights & Biases beside it."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, final

from credit_dp.config import LoggerConfig
from credit_dp.errors import UserError
from credit_dp.training.run_folder import write_whole, writing

COLUMNS = ("step", "loss", "lr", "grad_norm", "seconds")


class Sink(Protocol):
    """A place that takes numbers."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one step."""

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Take the numbers that stand at the end."""

    def close(self) -> None:
        """Nothing more will come."""


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
        for sink in self.sinks:
            sink.close()


@final
class CsvLog:
    """One row per logged step, on disk as soon as it is logged.

    A resumed run appends; rows after the step it resumes from are dropped first, since those steps
    are taken again.
    """

    def __init__(self, path: Path, step: int) -> None:
        rows = kept_rows(path, step) if step else []
        lines = [",".join(row) for row in [list(COLUMNS), *rows]]
        write_whole(path, "\n".join(lines) + "\n")
        self.path = path

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one row; a column without a number stays empty.

        Raises:
            UserError: it could not be written, for instance because the disk is full.
        """
        values = [repr(numbers[name]) if name in numbers else "" for name in COLUMNS[1:]]
        # Opened for each row: nothing is left in a buffer that closing would fail to write again.
        with writing(self.path), self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([step, *values])

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Nothing: the final numbers have a file of their own."""

    def close(self) -> None:
        """Nothing: the file is closed after each row."""


def kept_rows(path: Path, step: int) -> list[list[str]]:
    """Rows of an earlier log up to and with `step`; a last row cut off by a crash is dropped."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [row for row in rows if len(row) == len(COLUMNS) and int(row[0]) <= step]


@final
class WandbLog:
    """A Weights & Biases run, kept in the run's folder; offline unless asked for online."""

    def __init__(self, mode: str, project: str, folder: Path, config: dict[str, Any]) -> None:
        # An empty WANDB_SILENT crashes wandb; the error reporter looks up a host even offline.
        os.environ["WANDB_SILENT"] = "true"
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # costs a second: only runs that log with it pay

        if mode == "online" and not wandb.login(prompt=False):
            raise UserError(
                "logger.wandb: online needs an API key and there is none. Set WANDB_API_KEY, "
                "or choose logger.wandb=offline."
            )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(
                mode="online" if mode == "online" else "offline",
                project=project,
                dir=folder,
                config=config,
                name=folder.name,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (wandb.errors.CommError, wandb.errors.UsageError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"logger.wandb: {mode} did not start ({reason}). Choose logger.wandb=offline."
            ) from error

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        self.run.log(dict(numbers), step=step)

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Put final numbers into the run's summary."""
        self.run.summary.update(dict(numbers))

    def close(self) -> None:
        """Flush and end the run."""
        self.run.finish()


def open_tracker(
    config: LoggerConfig, log: Path, step: int, run_config: dict[str, Any], rank: int
) -> Tracker:
    """The tracker of one rank: rank 0 writes, the others do nothing.

    `log` is the CSV file, in the run's folder; `step` is the one resumed from, 0 at a fresh start.

    Raises:
        UserError: `logger.wandb=online` without a key or a connection.
    """
    if rank != 0:
        return Tracker([])
    sinks: list[Sink] = []
    # Sites and test suites switch wandb off by its own variable; only that much is taken from it.
    wanted = "wandb" in config.trackers and config.wandb != "disabled"
    if wanted and os.environ.get("WANDB_MODE") != "disabled":
        sinks.append(WandbLog(config.wandb, config.project, log.parent, run_config))
    return Tracker([*sinks, CsvLog(log, step)])
