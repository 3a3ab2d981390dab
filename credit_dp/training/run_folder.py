"""The folder of one run: the paths of its files, its log files, and the version of the code.

`RunFolder` has the paths. `write_run_file` writes small files, `provenance` finds out which code
runs, and `log_to_file` copies the log of each rank into the folder.
"""

import contextlib
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO, final

from omegaconf import DictConfig, OmegaConf

import credit_dp
from credit_dp.config import Config, RunConfig
from credit_dp.data.sources.address import absolute_address
from credit_dp.errors import UserError, counted, shell_argument
from credit_dp.files import write_text_atomic
from credit_dp.plugins import plugins_setting
from credit_dp.training.checkpoint_files import CHECKPOINTS_FOLDER


@final
@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS_FOLDER

    @property
    def log(self) -> Path:
        """The metrics of training, one row for each logged step."""
        return self.path / "metrics.csv"

    @property
    def scores(self) -> Path:
        """The scores on the held-out dates."""
        return self.path / "metrics.json"

    @property
    def config(self) -> Path:
        """The resolved config, as YAML."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """Versions, commit and uncommitted changes of the code."""
        return self.path / "code.diff"

    @property
    def trace(self) -> Path:
        """The profile of a few steps of rank 0 in Chrome's trace format, with `trainer.profile`."""
        return self.path / "trace-rank0.json"

    @property
    def score_table(self) -> Path:
        """The same scores as a table."""
        return self.path / "scores.csv"

    @property
    def map_plot(self) -> Path:
        """Maps of forecast, truth and error of one field."""
        return self.path / "forecast.png"

    @property
    def loss_plot(self) -> Path:
        """A plot of the loss and the validation error over steps."""
        return self.path / "loss.png"

    @property
    def rmse_plot(self) -> Path:
        """A plot of the errors by lead time."""
        return self.path / "rmse.png"

    @property
    def spectra_plot(self) -> Path:
        """A plot of the power spectra at the longest lead time."""
        return self.path / "spectra.png"

    @property
    def errors_plot(self) -> Path:
        """Maps of the errors at the longest lead time."""
        return self.path / "errors.png"

    @property
    def page(self) -> Path:
        """The page of the run: live while it trains, its report at the end."""
        return self.path / "run.html"

    @property
    def maps(self) -> Path:
        """The folder of maps of validations."""
        return self.path / "maps"

    @property
    def rerun_command(self) -> str:
        """The command that repeats the run in another folder."""
        command = f"credit-dp train --again {shlex.quote(str(self.path.absolute()))}"
        return f"{plugins_setting()} {command}".lstrip()

    def resume_keys(self, run: RunConfig) -> str:
        """Return the keys with which the command of a run with these keys continues it."""
        # Without a name the same command would choose another folder.
        folder = [] if run.name else [shell_argument("run.dir", str(self.path))]
        return " ".join([*folder, "resume=auto"])

    def last_lines(self) -> list[str]:
        """Return the lines at the end of a run, which name its folder once and then its files.

        Files that do not exist are left out: a run that only evaluates has no checkpoints.
        """
        files = {
            "page": [self.page],
            "scores": [self.scores, self.score_table],
            "plots": [
                *(self.map_plot, self.loss_plot, self.rmse_plot),
                *(self.spectra_plot, self.errors_plot),
            ],
            "training": [self.log, self.checkpoints, self.trace],
            "set-up": [self.config, self.code],
        }
        existing = {
            label: [
                f"{path.name}/" if path.is_dir() else path.name for path in paths if path.exists()
            ]
            for label, paths in files.items()
        }
        return [
            f"{'written to':<13}{self.path}",
            *(f"  {label:<11}{', '.join(names)}" for label, names in existing.items() if names),
            f"{'once more':<13}{self.rerun_command}",
        ]


# Keys whose values are paths, or may be.
PATH_KEYS = ("data.store", "data.statistics", "data.cache", "logger.mlflow", "init_from", "resume")


def resolved_yaml(config: Config) -> str:
    """Return the config as YAML, resolved, with paths that are valid in every working folder."""
    return OmegaConf.to_yaml(with_absolute_paths(config), resolve=True)


def with_absolute_paths(config: Config) -> DictConfig:
    """Return the config with paths that are valid in every working folder."""
    node: DictConfig = OmegaConf.structured(config)
    for key in PATH_KEYS:
        value = OmegaConf.select(node, key)
        if OmegaConf.is_list(value):
            OmegaConf.update(node, key, [entry and absolute_address(entry) for entry in value])
        elif value and (key, value) != ("resume", "auto"):
            OmegaConf.update(node, key, absolute_address(value))
    return node


def write_run_file(path: Path, text: str) -> None:
    """Write a small file atomically, and the folder that it is in if there is none.

    Raises:
        UserError: the file can't be written.
    """
    with translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a `UserError` of one line that names `path`.

    Raises:
        UserError: the disk is full, the folder is not writable, or the like.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: could not be written ({error.strerror or error}). "
            "Free space there or change run.dir."
        ) from error


PACKAGE = Path(__file__).resolve().parents[1]
GIT_TIMEOUT = 10.0  # seconds for one git command; the checkout may be on a slow file system
MAX_PATCH_CHARACTERS = 2**20  # longer patches are cut
# Override the user's git settings that would give something else than a patch of the checkout.
PATCH_OPTIONS = (
    "--binary",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--submodule=short",
    "--unified=3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
MAX_UNTRACKED_NAMES = 50  # further untracked files are counted


@cache
def provenance() -> dict[str, str]:
    """Return the versions of the code, and the commit if it runs from a git checkout.

    `changed` says whether the checkout differs from its commit. The result is cached: imported code
    does not change when its files do.
    """
    import torch  # takes seconds, and the command line needs only names of files from this module

    versions = {
        "credit_dp": credit_dp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    commit = None
    # An installed package may be inside another project's checkout.
    if run_git("ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = run_git("rev-parse", "HEAD")
    if commit is not None:
        versions["commit"] = commit.strip()
        versions["changed"] = "yes" if git_diff() or untracked_files() else "no"
    return versions


def provenance_text() -> str:
    """Return `provenance` as text, with the uncommitted changes as a patch for `git apply`."""
    lines = [f"{name}: {value}" for name, value in provenance().items()]
    if "commit" not in provenance():
        return "\n".join([*lines, ""])
    names = untracked_files()
    lines += [f"not in git: {name}" for name in names[:MAX_UNTRACKED_NAMES]]
    if len(names) > MAX_UNTRACKED_NAMES:
        lines.append(f"not in git: {counted(len(names) - MAX_UNTRACKED_NAMES, 'more file')}")
    patch = git_diff()
    if len(patch) > MAX_PATCH_CHARACTERS:
        lines.append(
            f"the difference has {len(patch)} characters; the first {MAX_PATCH_CHARACTERS} follow"
        )
    return "\n".join([*lines, "", patch[:MAX_PATCH_CHARACTERS]])


def git_diff() -> str:
    """Return the uncommitted changes of tracked files as a patch."""
    return run_git("diff", "HEAD", *PATCH_OPTIONS) or ""


def untracked_files() -> list[str]:
    """Return the untracked files of the package."""
    return (run_git("ls-files", "--others", "--exclude-standard") or "").splitlines()


def run_git(*arguments: str) -> str | None:
    """Return the output of a git command in the package's folder; None if it fails."""
    # Inside a git hook, GIT_* variables point to the repository of the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(PACKAGE), "-c", "core.fsmonitor=false", *arguments]
    try:
        result = subprocess.run(
            command,
            # Without optional locks `git diff` does not write to the index, which others may use.
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace")


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def log_to_file(folder: Path, rank: int, early: Iterable[logging.LogRecord] = ()) -> Iterator[None]:
    """Append the log to `logs/rank-RANK.log` in a run's folder, inside the context.

    The terminal shows the same as without the file. The error that ends a run is logged to the
    file. If the file can't be written, there is one warning.

    Args:
        early: records from before the file was opened.
    """
    path = folder / "logs" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LogFile(path, rank)
    except OSError as error:
        logger.warning("%s: the log can't be written there (%s).", path, error.strerror or error)
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        stack.enter_context(attach_to_loggers(file))
        stack.enter_context(log_warnings(file))
        file.write_line(
            logging.INFO, "started as process %s on %s", os.getpid(), socket.gethostname()
        )
        for record in early:
            file.handle(record)
        try:
            yield
        except BaseException:
            file.write_line(logging.ERROR, "ended by an error", error=True)
            raise
        file.write_line(logging.INFO, "ended")


@final
class LogFile(logging.FileHandler):
    """Writes log records with time and rank; warns once if the disk is full."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, encoding="utf-8")
        line = f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"
        self.setFormatter(logging.Formatter(line))
        self.warned = False

    def write_line(self, level: int, message: str, *args: object, error: bool = False) -> None:
        """Write a line to this file only; with `error`, the traceback of the present error."""
        trace = sys.exc_info() if error else None
        self.handle(logging.LogRecord(__name__, level, "", 0, message, args, trace))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Warn once, instead of printing a traceback for each line."""
        if not self.warned:
            self.warned = True
            logger.warning("%s: could not be written (%s).", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        """Flush and close the file, ignoring errors of the disk."""
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def attach_to_loggers(file: LogFile) -> Iterator[None]:
    """Send the records of this package from INFO on, and of all other loggers, to a file.

    Other handlers get the same records as before.
    """
    package = logging.getLogger("credit_dp")
    root = logging.getLogger()
    package_handlers = [(handler, handler.level) for handler in package.handlers]
    level = package.level
    added: list[tuple[logging.Logger, logging.Handler]] = [(root, file)]
    if not package.propagate:
        added.append((package, file))
        # The logger's level is lowered to INFO for the file. The other handlers get the logger's
        # former level, so that the terminal does not show more.
        for handler, handler_level in package_handlers:
            handler.setLevel(max(handler_level, level))
        package.setLevel(min(package.getEffectiveLevel(), logging.INFO))
    if not root.handlers and logging.lastResort is not None:
        # Python uses this handler for loggers without one. Now there is one: the file's.
        added.append((root, logging.lastResort))
    for source, handler in added:
        source.addHandler(handler)
    try:
        yield
    finally:
        for source, handler in added:
            source.removeHandler(handler)
        for handler, handler_level in package_handlers:
            handler.setLevel(handler_level)
        package.setLevel(level)


@contextlib.contextmanager
def log_warnings(log: LogFile) -> Iterator[None]:
    """Write Python's warnings to the file as well as to the terminal."""
    original = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        original(message, category, filename, lineno, file, line)
        text = warnings.formatwarning(message, category, filename, lineno, line)
        log.write_line(logging.WARNING, "%s", text.rstrip())

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:  # unless somebody else has replaced it meanwhile
            warnings.showwarning = original
