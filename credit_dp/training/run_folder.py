"""The folder of one run: its files, its log files, and which code it is made with."""

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

from omegaconf import OmegaConf

import credit_dp
from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import CHECKPOINTS_FOLDER


@final
@dataclass(frozen=True)
class RunFolder:
    """Paths of what a run leaves behind."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """The folder of checkpoints: weights and all that a resumed run needs."""
        return self.path / CHECKPOINTS_FOLDER

    @property
    def log(self) -> Path:
        """Loss and its company, one row for each logged step."""
        return self.path / "metrics.csv"

    @property
    def scores(self) -> Path:
        """Errors on the held-out dates."""
        return self.path / "metrics.json"

    @property
    def config(self) -> Path:
        """The resolved config, as YAML."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """Versions, commit and uncommitted changes of the code that ran."""
        return self.path / "code.diff"

    @property
    def trace(self) -> Path:
        """Chrome's trace of a few steps of rank 0, if it was asked for."""
        return self.path / "trace-rank0.json"

    @property
    def map_plot(self) -> Path:
        """Forecast, truth and error of one field."""
        return self.path / "forecast.png"

    @property
    def loss_plot(self) -> Path:
        """Loss and validation scores over steps, drawn."""
        return self.path / "loss.png"

    @property
    def rmse_plot(self) -> Path:
        """Errors by lead time, drawn."""
        return self.path / "rmse.png"

    @property
    def spectra_plot(self) -> Path:
        """Power by zonal wavenumber at the longest lead time, drawn."""
        return self.path / "spectra.png"

    @property
    def errors(self) -> Path:
        """Errors on each grid point at the longest lead time, drawn."""
        return self.path / "errors.png"

    @property
    def rerun_command(self) -> str:
        """The command that does the run once more, in another folder."""
        return f"credit-dp train --again {shlex.quote(str(self.path.absolute()))}"

    def shown(self) -> dict[str, Path]:
        """What a user is told of at the end, by label: what is there, and plots as a pattern.

        A run that only evaluates another's checkpoint has none of its own.
        """
        files = {
            "checkpoint": self.checkpoint,
            "metrics": self.scores,
            "training log": self.log,
            "config": self.config,
            "plots": self.path / "*.png",
            "code": self.code,
            "trace": self.trace,
        }
        return {label: file for label, file in files.items() if any(self.path.glob(file.name))}


def resolved_yaml(config: Config) -> str:
    """The whole config as plain YAML, interpolations resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write a small file so that readers see the old one or the new one, never half of it.

    Raises:
        UserError: the folder cannot be written to.
    """
    temporary = temporary_file(path)
    with translate_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            remove_if_possible(temporary)
            raise


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Say in one line that `path` could not be written.

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


def temporary_file(path: Path) -> Path:
    """Where a file is written before it takes its name.

    Always the same: a killed run leaves one such file at most, and the next write replaces it. Only
    one process writes to a run's folder.
    """
    return path.with_name(f".{path.name}.part")


def remove_if_possible(path: Path) -> None:
    """Remove a file where possible."""
    with contextlib.suppress(OSError):
        path.unlink()


PACKAGE = Path(__file__).resolve().parents[1]
GIT_TIMEOUT = 10.0  # seconds for an answer of git, which may sit on a slow file system
MAX_PATCH_CHARACTERS = 2**20  # characters of a difference that are kept
# What a user's settings may change about a difference so that it is no patch of the whole checkout.
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
MAX_UNTRACKED_NAMES = 50  # names of files that git does not know


@cache
def provenance() -> dict[str, str]:
    """Versions, and the commit if the package is run from a git checkout; small enough to repeat.

    `changed` says whether the checkout differs from its commit. Asked for once in a process, as
    what is imported does not change with the files either.
    """
    import torch  # which takes seconds; the command line only reads names of files

    found = {
        "credit_dp": credit_dp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    commit = run_git("rev-parse", "HEAD") if in_checkout() else None
    if commit is not None:
        found["commit"] = commit.strip()
        found["changed"] = "yes" if git_diff() or untracked_files() else "no"
    return found


def provenance_text() -> str:
    """`provenance`, and the difference to the commit as a patch that `git apply` takes."""
    lines = [f"{name}: {value}" for name, value in provenance().items()]
    if "commit" not in provenance():
        return "\n".join([*lines, ""])
    names = untracked_files()
    lines += [f"not in git: {name}" for name in names[:MAX_UNTRACKED_NAMES]]
    lines += (
        [f"not in git: {len(names) - MAX_UNTRACKED_NAMES} more files"]
        if len(names) > MAX_UNTRACKED_NAMES
        else []
    )
    patch = git_diff()
    if len(patch) > MAX_PATCH_CHARACTERS:
        lines.append(
            f"the difference has {len(patch)} characters; the first {MAX_PATCH_CHARACTERS} follow"
        )
    return "\n".join([*lines, "", patch[:MAX_PATCH_CHARACTERS]])


def in_checkout() -> bool:
    """Whether git knows the package; an installed one may lie in a folder of another project."""
    return run_git("ls-files", "--error-unmatch", "__init__.py") is not None


def git_diff() -> str:
    """What differs from the commit in files that git knows, whatever form the user likes best."""
    return run_git("diff", "HEAD", *PATCH_OPTIONS) or ""


def untracked_files() -> list[str]:
    """Files of the package that git does not know."""
    return (run_git("ls-files", "--others", "--exclude-standard") or "").splitlines()


def run_git(*arguments: str) -> str | None:
    """What git answers about the checkout; None if it can't, for whatever reason."""
    # A hook of git sets variables that point to its own repository.
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(PACKAGE), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            env={**own, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def log_to_file(folder: Path, rank: int, early: Iterable[logging.LogRecord] = ()) -> Iterator[None]:
    """Write `logs/rank-RANK.log` in a run's folder meanwhile, after what it has from earlier.

    The terminal shows what it showed before. The error that ends a run is in the file, too. That
    the file can't be written is one warning, and nothing else happens.

    Args:
        folder: of the run.
        rank: of this process.
        early: what was logged before there was a file.
    """
    path = folder / "logs" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LogFile(path, rank)
    except OSError as error:
        logger.warning("%s: no log is kept there (%s).", path, error.strerror or error)
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
    """Lines with a time and a rank; a disk that is full is told once."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, encoding="utf-8")
        line = f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"
        self.setFormatter(logging.Formatter(line))
        self.warned = False

    def write_line(self, level: int, message: str, *args: object, error: bool = False) -> None:
        """Write a line that nobody else is to see; with the error that is under way."""
        trace = sys.exc_info() if error else None
        self.handle(logging.LogRecord(__name__, level, "", 0, message, args, trace))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as it is called
        """Warn the others instead of showing a traceback for each line."""
        if not self.warned:
            self.warned = True
            logger.warning("%s: could not be written (%s).", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        """Write what waits, if that is possible."""
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def attach_to_loggers(file: LogFile) -> Iterator[None]:
    """Hear this package's loggers from INFO on, and all others; what else hears them stays so."""
    ours, root = logging.getLogger("credit_dp"), logging.getLogger()
    heard_by = [(handler, handler.level) for handler in ours.handlers]
    level = ours.level
    added: list[tuple[logging.Logger, logging.Handler]] = [(root, file)]
    if not ours.propagate:
        added.append((ours, file))
        for handler, own in heard_by:
            handler.setLevel(max(own, level))
        ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))
    if not root.handlers and logging.lastResort is not None:
        added.append((root, logging.lastResort))  # it shows what has no handler: now there is one
    for source, handler in added:
        source.addHandler(handler)
    try:
        yield
    finally:
        for source, handler in added:
            source.removeHandler(handler)
        for handler, own in heard_by:
            handler.setLevel(own)
        ours.setLevel(level)


@contextlib.contextmanager
def log_warnings(log: LogFile) -> Iterator[None]:
    """Write warnings that are shown into the file as well."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        shown(message, category, filename, lineno, file, line)
        text = warnings.formatwarning(message, category, filename, lineno, line)
        log.write_line(logging.WARNING, "%s", text.rstrip())

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown
