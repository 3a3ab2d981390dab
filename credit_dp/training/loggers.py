"""Logs the metrics of a run: always to a CSV file, and to the trackers of `logger.trackers`.

`open_tracker` opens the sinks of a run. Trackers run in threads of their own (`BackgroundSink`):
one that fails or hangs is disabled with a warning, and never stops the training.
"""

import contextlib
import csv
import importlib.util
import io
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any, Protocol, Self, final

from credit_dp.config import LoggerConfig, by_dotted_key
from credit_dp.errors import UserError, counted, install_extra
from credit_dp.training.run_folder import translate_write_errors, write_run_file

Metrics = Mapping[str, float]


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""

    def summarise(self, metrics: Mapping[str, float]) -> None:
        """Log the final metrics of a run."""

    def close(self, failed: bool) -> None:
        """Finish writing; the run has `failed` if it ends with an error, or was interrupted."""


@final
class Tracker:
    """Passes metrics to all sinks of a rank; ranks other than 0 have none."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one training step."""
        for sink in self.sinks:
            sink.log(step, metrics)

    def summarise(self, metrics: Mapping[str, float]) -> None:
        """Log the final metrics of a run."""
        for sink in self.sinks:
            sink.summarise(metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        # KeyboardInterrupt and SystemExit are no `Exception`: the user wants the run to end now.
        is_interrupt = error is not None and not isinstance(error, Exception)
        end = time.monotonic() + (INTERRUPT_TIMEOUT if is_interrupt else CLOSE_TIMEOUT)
        for sink in self.sinks:
            if isinstance(sink, BackgroundSink):
                sink.timeout = min(sink.timeout, max(0.0, end - time.monotonic()))
            sink.close(failed=error is not None)


def open_tracker(
    config: LoggerConfig, log: Path, step: int, run_config: dict[str, Any], rank: int
) -> Tracker:
    """Open the tracker of one rank: rank 0 logs, the others do nothing.

    Args:
        log: the CSV file, in the run's folder.
        step: the last step before training starts; 0 for a new run.
        run_config: the config of the run, for wandb and mlflow.

    Raises:
        UserError: `logger.wandb=online` without a key, or a tracker's package is not installed.
            Later errors of trackers are warnings.
    """
    if rank != 0:
        return Tracker([])
    folder = log.parent
    sinks: list[Sink] = []
    check_trackers(config)
    if "wandb" in config.trackers and not is_wandb_off(config):
        start = partial(WandbLog, config.wandb, config.project, folder, step, run_config)
        sinks.append(BackgroundSink("Weights & Biases", start))
    if "mlflow" in config.trackers:
        address = config.mlflow or str(folder / "mlflow")
        is_shared = config.mlflow is not None
        start_mlflow = partial(
            MlflowLog, address, config.project, folder, step, run_config, is_shared
        )
        sinks.append(BackgroundSink("MLflow", start_mlflow))
    if "tensorboard" in config.trackers:
        check_installed("tensorboard")
        sinks.append(
            BackgroundSink("TensorBoard", partial(TensorBoardLog, folder / "tensorboard", step))
        )
    return Tracker([CsvLog(log, step), *sinks])


CLOSE_TIMEOUT = 60.0  # seconds that the end of a run waits for all trackers
INTERRUPT_TIMEOUT = 5.0  # the same if it is interrupted

logger = logging.getLogger(__name__)

Task = Callable[[Sink], None]


@final
class BackgroundSink:
    """Passes metrics to a tracker in a thread, so that training never waits for it.

    An error of the tracker is one warning, after which it gets nothing more. So is one that is not
    done `timeout` seconds after the end of the run.

    Args:
        start: opens the tracker; called in the thread, as importing a tracker takes seconds.
    """

    def __init__(self, name: str, start: Callable[[], Sink], timeout: float | None = None) -> None:
        self.name = name
        self.timeout = CLOSE_TIMEOUT if timeout is None else timeout
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._failed = False
        self._given_up = False
        # A daemon: the interpreter does not wait for one that hangs.
        self.thread = threading.Thread(target=self._run_sink, args=(start,), name=name, daemon=True)
        self.thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of one step."""
        copied = dict(metrics)  # the caller may change its own before the thread reads them
        self.submit(lambda sink: sink.log(step, copied))

    def summarise(self, metrics: Mapping[str, float]) -> None:
        """Pass on the final metrics."""
        copied = dict(metrics)
        self.submit(lambda sink: sink.summarise(copied))

    def close(self, failed: bool) -> None:
        """Let the tracker finish, and wait for it until the timeout."""
        self._failed = failed
        self.submit(None)  # tells the thread to close the tracker
        self.thread.join(self.timeout)
        if self.thread.is_alive():
            self._given_up = True
            logger.warning("%s: given up, as it is not done after %g s.", self.name, self.timeout)

    def submit(self, task: Task | None) -> None:
        """Let the thread do a task, unless the tracker has failed; None closes the tracker."""
        if self.thread.is_alive():
            self._tasks.put(task)

    def _run_sink(self, start: Callable[[], Sink]) -> None:
        try:
            sink = start()
            try:
                while (task := self._tasks.get()) is not None:
                    task(sink)
            except Exception:
                with contextlib.suppress(Exception):
                    sink.close(self._failed)
                raise
            sink.close(self._failed)
        except Exception as error:  # noqa: BLE001 - no error of a tracker ends a run
            if not self._given_up:
                logger.warning(
                    "%s: disabled for the rest of the run (%s). Training continues.",
                    self.name,
                    one_line_error(error),
                )


def one_line_error(error: Exception) -> str:
    """Return the type and the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


FIRST_COLUMNS = ("step", "loss", "lr", "grad_norm", "seconds")  # of every log


Row = Mapping[str, str]


@final
class CsvLog:
    """A CSV file with one row per logged step, written as soon as the step is logged.

    A resumed run appends to the file, after removing the rows of later steps than the checkpoint's,
    which are repeated. A metric with a new name becomes a new column, empty in earlier rows.

    Rows that can't be written, for instance because the disk is full, are lost: the first one gives
    a warning, and another one at the end says how many are missing.

    Rows up to `step` are kept; 0 starts a new file.
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
            logger.warning("%s Training continues; each logged step tries again.", error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row if possible; a column without a value stays empty."""
        row = {"step": str(step), **{name: repr(value) for name, value in metrics.items()}}
        new_columns = [name for name in row if name not in self.columns]
        try:
            if new_columns or not self._file_started:
                self._rewrite(new_columns, row)
            else:
                self._append(row)
        except UserError as error:
            if not self.lost_rows:
                logger.warning("%s Training continues; step %s is not in the log.", error, step)
            self.lost_rows += 1

    def summarise(self, metrics: Mapping[str, float]) -> None:
        """Do nothing: the final metrics have a file of their own."""

    def close(self, failed: bool) -> None:
        """Warn of missing rows; the file itself is closed after each row."""
        if self.lost_rows:
            rows = counted(self.lost_rows, "row")
            logger.warning("%s: %s could not be written.", self.path, rows)

    def _append(self, row: Row) -> None:
        """Append a row completely or not at all."""
        remaining = as_csv([row], self.columns).encode()
        # Opened for each row and unbuffered: after a failed write, closing a buffered file would
        # write the rest of the row.
        with translate_write_errors(self.path), self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            except OSError:
                file.truncate(end)
                raise

    def _rewrite(self, new_columns: list[str], *new_rows: Row) -> None:
        """Write the file again, with more columns and rows."""
        header, earlier_rows = read_csv_log(self.path) if self._last_kept_step else ([], [])
        kept_rows = [row for row in earlier_rows if int(row["step"]) <= self._last_kept_step]
        columns = list(dict.fromkeys([*self.columns, *header, *new_columns]))
        text = as_csv([*kept_rows, *new_rows], columns)
        write_run_file(self.path, ",".join(columns) + "\n" + text)
        # Only now: if writing fails, the next row tries the same again.
        self.columns = columns
        self._last_kept_step = float("inf")
        self._file_started = True


def as_csv(rows: list[Row], columns: list[str]) -> str:
    """Format rows as lines of a CSV file with these columns."""
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_csv_log(path: Path) -> tuple[list[str], list[Row]]:
    """Read the header and the complete rows of a log; nothing if the file is missing or no log.

    A row that was cut off by a crash is left out.

    Raises:
        UserError: the file can't be read.
    """
    if not path.exists():
        return [], []
    with translate_write_errors(path):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    header, *rows = [*csv.reader(line for line in lines if line.endswith("\n"))] or [[]]
    if header[:1] != ["step"]:
        return [], []
    complete_rows = [row for row in rows if len(row) == len(header) and row[0].isdecimal()]
    return header, [dict(zip(header, row, strict=True)) for row in complete_rows]


# Seconds that wandb waits for its server. Old versions of wandb do not have `finish_timeout`.
WANDB_TIMEOUTS = {"init_timeout": 60.0, "finish_timeout": 30.0}


@final
class WandbLog:
    """A Weights & Biases run, stored in the run's folder; offline unless `mode` is `online`.

    Its id is stored there, too: a training run that is resumed continues the same wandb run.
    """

    def __init__(
        self, mode: str, project: str, folder: Path, step: int, config: dict[str, Any]
    ) -> None:
        wandb = import_wandb()
        timeouts = {
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
            settings=wandb.Settings(silent=True, console="off", **timeouts),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""
        self.run.log(dict(metrics), step=step)

    def summarise(self, metrics: Mapping[str, float]) -> None:
        """Put the final metrics into the run's summary."""
        self.run.summary.update(dict(metrics))

    def close(self, failed: bool) -> None:
        """Flush and end the run, as failed or finished."""
        self.run.finish(exit_code=int(failed))


def load_or_create_run_id(path: Path, step: int) -> str:
    """Return the stored id of a resumed run, or store a new one.

    Raises:
        UserError: the id can't be written.
    """
    if step and path.exists():
        return path.read_text().strip()
    run_id = secrets.token_hex(4)
    write_run_file(path, run_id + "\n")
    return run_id


def check_trackers(config: LoggerConfig) -> None:
    """Refuse trackers that rank 0 can't open.

    Raises:
        UserError: `logger.wandb=online` without a key, or a tracker's package is not installed.
    """
    if "wandb" in config.trackers and config.wandb == "online" and not is_wandb_off(config):
        check_wandb_key()
    if "mlflow" in config.trackers:
        check_installed("mlflow")


def is_wandb_off(config: LoggerConfig) -> bool:
    """Return whether the config or the environment disables wandb."""
    # Some sites and test suites disable wandb by this variable; its other values are ignored.
    return config.wandb == "disabled" or os.environ.get("WANDB_MODE") == "disabled"


def check_wandb_key() -> None:
    """Check that wandb has an API key.

    Raises:
        UserError: there is no API key.
    """
    try:
        has_key = import_wandb().login(prompt=False)
    except Exception:  # noqa: BLE001 - `WandbLog` meets the same error, and warns
        return
    if not has_key:
        raise UserError(
            "logger.wandb: online needs an API key and there is none. Set WANDB_API_KEY, "
            "or choose logger.wandb=offline."
        )


def import_wandb() -> ModuleType:
    """Import wandb, which takes a second, only in runs that use it."""
    # wandb crashes if WANDB_SILENT is empty. Its error reporter looks up a host even offline.
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


@final
class TensorBoardLog:
    """TensorBoard's event files in one folder.

    If a run is resumed, TensorBoard hides the values of later steps in earlier files, because these
    steps are repeated.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # Imported here: it takes a second, and most runs do not use it.
        from torch.utils.tensorboard import SummaryWriter

        self.step = step
        self.writer = SummaryWriter(folder, purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        self.step = step
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def summarise(self, metrics: Mapping[str, float]) -> None:
        """Write the final metrics at the last step."""
        self.log(self.step, metrics)

    def close(self, failed: bool) -> None:
        """Flush and close the file."""
        self.writer.close()


# What MLflow does not accept in the names of metrics and parameters.
NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w\-. :]", re.ASCII)


@final
class MlflowLog:
    """A run of MLflow: files in a folder, or a server.

    Its id is stored in the training run's folder: a training run that is resumed continues the same
    run of MLflow, and its repeated steps appear a second time there. Jobs of a sweep that share an
    address are children of one run, which is named as the sweep's folder.

    Args:
        address: a folder, or the address of a server, `http://...`.
        project: name of MLflow's experiment.
        config: each key becomes a parameter.
        is_shared: whether other runs may use the address, too.
    """

    def __init__(
        self,
        address: str,
        project: str,
        folder: Path,
        step: int,
        config: dict[str, Any],
        is_shared: bool = False,
    ) -> None:
        client_type, self.metric_type, param_type = import_mlflow()
        is_folder = "://" not in address
        uri = Path(address).expanduser().resolve().as_uri() if is_folder else address
        self.step = step
        self.folder = folder
        self.client = client_type(tracking_uri=uri)
        experiment = self._experiment(project)
        id_file = folder / "mlflow-id"
        if step and id_file.exists():
            self.run_id = id_file.read_text().strip()
            self.client.update_run(self.run_id, "RUNNING")
            return
        tags = {}
        if is_shared and (folder / JOB_RECORD).exists():
            tags["mlflow.parentRunId"] = self._run_of_sweep(experiment, folder.parent)
        run = self.client.create_run(experiment, run_name=folder.name, tags=tags)
        self.run_id = str(run.info.run_id)
        write_run_file(id_file, self.run_id + "\n")
        pairs = by_dotted_key(config).items()
        params = [param_type(mlflow_name(key), str(value)) for key, value in pairs]
        for first in range(0, len(params), MLFLOW_BATCH):
            self.client.log_batch(self.run_id, params=params[first : first + MLFLOW_BATCH])

    def _run_of_sweep(self, experiment: str, sweep: Path) -> str:
        """Return the id of a sweep's run, created by the first of the jobs that call this."""
        path = sweep / "mlflow-id"
        if path.exists():
            return path.read_text().strip()
        run_id = str(self.client.create_run(experiment, run_name=sweep.name).info.run_id)
        with NamedTemporaryFile("w", dir=sweep, prefix=".mlflow-id-") as file:
            file.write(run_id + "\n")
            file.flush()
            try:
                os.link(file.name, path)  # never seen half-written
            except FileExistsError:  # another job was faster
                self.client.delete_run(run_id)
                return path.read_text().strip()
        self.client.set_terminated(run_id)  # it has no end of its own
        return run_id

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which another run may make at the same time."""
        known = self.client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self.client.create_experiment(name))
            except Exception:  # of MLflow; if the experiment is there now, another run was faster
                known = self.client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        self.step = step
        now = int(time.time() * 1000)
        values = [
            self.metric_type(mlflow_name(name), float(value), now, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(values), MLFLOW_BATCH):
            self.client.log_batch(self.run_id, metrics=values[first : first + MLFLOW_BATCH])

    def summarise(self, metrics: Mapping[str, float]) -> None:
        """Write the final metrics at the last step."""
        self.log(self.step, metrics)

    def close(self, failed: bool) -> None:
        """Mark the run as finished or failed, and store its files as artifacts."""
        # First, as not every server has a place for artifacts.
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
        for name in ARTIFACTS:
            if (self.folder / name).exists():
                self.client.log_artifact(self.run_id, str(self.folder / name))


JOB_RECORD = "job.json"  # in the folder of each job of a sweep
ARTIFACTS = ("config.yaml", "code.diff", "metrics.csv", "metrics.json")
MLFLOW_BATCH = 100  # parameters that MLflow accepts at once; it accepts more metrics


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: `loss/+6h` becomes `loss.6h`.

    MLflow writes a file for each name, and a folder for what comes before a slash: `loss` can't be
    both.
    """
    return NOT_IN_MLFLOW_NAMES.sub("_", name.replace("/", ".").replace("+", ""))


def import_mlflow() -> tuple[Any, Any, Any]:
    """Return MLflow's client and its classes of metrics and parameters, imported only if used."""
    # Recent versions refuse files, which need no database, unless the first is set. The second
    # keeps MLflow from reporting its use.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A server that is not there is found out at once, not after a minute of attempts.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    return MlflowClient, Metric, Param


def check_installed(tracker: str) -> None:
    """Check that the package of a tracker, which is optional, is installed.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec(tracker) is None:
        raise UserError(
            f"logger.trackers: {tracker} needs a package that is not installed. "
            f"{install_extra(tracker)}, or remove it from logger.trackers."
        )
