"""Who is told of a run's numbers: a CSV file always, other trackers on a thread of their own."""

import contextlib
import csv
import importlib.util
import io
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self, final

from credit_dp.config import LoggerConfig
from credit_dp.errors import UserError
from credit_dp.training.run_folder import translate_write_errors, write_text_atomic


class Sink(Protocol):
    """A place that takes numbers."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one step."""

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Take the numbers that stand at the end."""

    def close(self) -> None:
        """Nothing more will come."""


QUEUE_SIZE = 1000  # steps that wait to be taken
CLOSE_TIMEOUT = 60.0  # seconds that the end of a run waits

logger = logging.getLogger(__name__)

Task = Callable[[Sink], None]


@final
class BackgroundSink:
    """Hands numbers on as they are taken.

    Whatever goes wrong with the tracker is one warning. From then on it is left alone.

    Args:
        name: of the tracker, for people.
        start: opens it; called on the thread.
        room: see `QUEUE_SIZE`.
        patience: see `GIT_TIMEOUT`.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Sink],
        room: int = QUEUE_SIZE,
        patience: float | None = None,
    ) -> None:
        self.name = name
        self.patience = CLOSE_TIMEOUT if patience is None else patience
        self._tasks: queue.Queue[Task | None] = queue.Queue(room)
        self._disable_lock = threading.Lock()
        self._disabled = False
        self.thread = threading.Thread(target=self._run_sink, args=(start,), name=name, daemon=True)
        self.thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Pass on the numbers of one step."""
        taken = dict(numbers)
        self._enqueue(lambda sink: sink.log(step, taken))

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Pass on the numbers that stand at the end."""
        taken = dict(numbers)
        self._enqueue(lambda sink: sink.summarise(taken))

    def close(self) -> None:
        """Let the tracker finish, for as long as there is patience."""
        self._enqueue(None)
        if self._disabled:
            return
        self.thread.join(self.patience)
        if self.thread.is_alive():
            self._disable(f"not done after {self.patience:g} s")

    def _enqueue(self, task: Task | None) -> None:
        if self._disabled:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._disable("it hangs")

    def _run_sink(self, start: Callable[[], Sink]) -> None:
        try:
            sink = start()
        except Exception as error:  # noqa: BLE001 - nothing that a tracker does ends a run
            self._disable(one_line_error(error))
            return
        try:
            while (task := self._tasks.get()) is not None:
                task(sink)
            sink.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._disable(one_line_error(error))
            with contextlib.suppress(Exception):
                sink.close()

    def _disable(self, reason: str) -> None:
        """Warn, unless it has been told already."""
        with self._disable_lock:
            if not self._disabled:
                logger.warning(
                    "%s: left out from here on (%s). Training goes on.", self.name, reason
                )
            self._disabled = True


def one_line_error(error: Exception) -> str:
    """What an error says, on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


FIRST_COLUMNS = ("step", "loss", "lr", "grad_norm", "seconds")  # always there, and first


Row = Mapping[str, str]


@final
class CsvLog:
    """One row per logged step, on disk as soon as it is logged.

    A resumed run appends; rows after the step it resumes from are dropped first, since those steps
    are taken again. A number with a new name becomes a column, empty in the rows before.

    What can't be written, because the disk is full for instance, is lost: the first time is told,
    every row tries again, and the end tells how many are missing.

    Args:
        path: of the file.
        step: the one that training goes on after; 0 begins a new file.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.columns = list(FIRST_COLUMNS)
        self.lost_rows = 0
        self._last_kept_step: float = step
        self._file_started = False
        try:
            self._rewrite([])
        except UserError as error:
            logger.warning("%s Training goes on; each logged step tries again.", error)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one row if possible; a column without a number stays empty."""
        row = {"step": str(step), **{name: repr(number) for name, number in numbers.items()}}
        new = [name for name in row if name not in self.columns]
        try:
            if new or not self._file_started:
                self._rewrite(new, row)
            else:
                self._append(row)
        except UserError as error:
            if not self.lost_rows:
                logger.warning("%s Training goes on; step %s is not in the log.", error, step)
            self.lost_rows += 1

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Nothing: the final numbers have a file of their own."""

    def close(self) -> None:
        """Tell what is missing; the file is closed after each row."""
        if self.lost_rows:
            logger.warning("%s: %s rows could not be written.", self.path, self.lost_rows)

    def _append(self, row: Row) -> None:
        """Write a row at the end, whole or not at all."""
        left = as_csv([row], self.columns).encode()
        # Opened for each row and without a buffer: closing would try to write again what is in it.
        with translate_write_errors(self.path), self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(end)
                raise

    def _rewrite(self, new: list[str], *rows: Row) -> None:
        """Write the whole file, with more columns and rows."""
        header, kept = read_csv_log(self.path) if self._last_kept_step else ([], [])
        kept = [row for row in kept if int(row["step"]) <= self._last_kept_step]
        columns = list(dict.fromkeys([*self.columns, *header, *new]))
        write_text_atomic(self.path, ",".join(columns) + "\n" + as_csv([*kept, *rows], columns))
        self.columns, self._last_kept_step, self._file_started = columns, float("inf"), True


def as_csv(rows: list[Row], columns: list[str]) -> str:
    """Rows as lines of a file with these columns."""
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_csv_log(path: Path) -> tuple[list[str], list[Row]]:
    """Header and rows of a log, without one that was cut off by a crash; nothing if it is no log.

    Raises:
        UserError: the file is there and can't be read.
    """
    if not path.exists():
        return [], []
    with translate_write_errors(path):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    header, *rows = [*csv.reader(line for line in lines if line.endswith("\n"))] or [[]]
    if header[:1] != ["step"]:
        return [], []
    whole = [row for row in rows if len(row) == len(header) and row[0].isdecimal()]
    return header, [dict(zip(header, row, strict=True)) for row in whole]


# Seconds that wandb waits for its server before it gives up; the last one is not in old versions.
WANDB_TIMEOUTS = {"init_timeout": 60.0, "finish_timeout": 30.0}


@final
class WandbLog:
    """A Weights & Biases run, kept in the run's folder; offline unless asked for online.

    Its id is kept there, too: a run that goes on after `step` goes on under the same one.
    """

    def __init__(
        self, mode: str, project: str, folder: Path, step: int, config: dict[str, Any]
    ) -> None:
        wandb = import_wandb()
        limits = {
            name: s for name, s in WANDB_TIMEOUTS.items() if name in wandb.Settings.__annotations__
        }
        self.run = wandb.init(
            mode="online" if mode == "online" else "offline",
            project=project,
            dir=folder,
            config=config,
            name=folder.name,
            id=load_or_create_run_id(folder / "wandb" / "id", step),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", **limits),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        self.run.log(dict(numbers), step=step)

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Put final numbers into the run's summary."""
        self.run.summary.update(dict(numbers))

    def close(self) -> None:
        """Flush and end the run."""
        self.run.finish()


def load_or_create_run_id(path: Path, step: int) -> str:
    """The id that an earlier start has left, or a new one, left for the next start.

    Raises:
        UserError: it can't be left there.
    """
    if step and path.exists():
        return path.read_text().strip()
    new = secrets.token_hex(4)
    write_text_atomic(path, new + "\n")
    return new


def check_wandb_key() -> None:
    """See that somebody can be logged in.

    Raises:
        UserError: there is no API key.
    """
    try:
        found = import_wandb().login(prompt=False)
    except Exception:  # noqa: BLE001 - the run's start meets it again, and warns
        return
    if not found:
        raise UserError(
            "logger.wandb: online needs an API key and there is none. Set WANDB_API_KEY, "
            "or choose logger.wandb=offline."
        )


def import_wandb() -> ModuleType:
    """The package, which costs a second: only runs that log with it pay."""
    # An empty WANDB_SILENT crashes wandb; the error reporter looks up a host even offline.
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


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


def check_tensorboard_installed() -> None:
    """See that the package is there.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "logger.trackers: tensorboard needs a package that is not installed. "
            "Run `pip install 'credit_dp[tensorboard]'`, or take it off logger.trackers."
        )


INTERRUPT_TIMEOUT = 5.0  # seconds for each tracker when the user wants the run to end at once


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
            if hurries and isinstance(sink, BackgroundSink):
                sink.patience = min(sink.patience, INTERRUPT_TIMEOUT)
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
            check_wandb_key()
        start = partial(WandbLog, config.wandb, config.project, folder, step, run_config)
        sinks.append(BackgroundSink("Weights & Biases", start))
    if "tensorboard" in config.trackers:
        check_tensorboard_installed()
        sinks.append(
            BackgroundSink("TensorBoard", partial(TensorBoardLog, folder / "tensorboard", step))
        )
    return Tracker([CsvLog(log, step), *sinks])
