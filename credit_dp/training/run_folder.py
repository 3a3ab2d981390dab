"""The folder of one run: which file is what, and writes that are whole or not there at all."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from omegaconf import OmegaConf

from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import FOLDER


@final
@dataclass(frozen=True)
class RunFolder:
    """Paths of what a run leaves behind."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """The folder of checkpoints: weights and all that a resumed run needs."""
        return self.path / FOLDER

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
    def map(self) -> Path:
        """Forecast, truth and error of one field."""
        return self.path / "forecast.png"

    @property
    def loss(self) -> Path:
        """Loss and validation scores over steps, drawn."""
        return self.path / "loss.png"

    @property
    def rmse(self) -> Path:
        """Errors by lead time, drawn."""
        return self.path / "rmse.png"

    @property
    def spectra(self) -> Path:
        """Power by zonal wavenumber at the longest lead time, drawn."""
        return self.path / "spectra.png"

    @property
    def errors(self) -> Path:
        """Errors on each grid point at the longest lead time, drawn."""
        return self.path / "errors.png"

    @property
    def again(self) -> str:
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


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that readers see the old one or the new one, never half of it.

    Raises:
        UserError: the folder cannot be written to.
    """
    temporary = unfinished(path)
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            discard(temporary)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
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


def unfinished(path: Path) -> Path:
    """Where a file is written before it takes its name.

    Always the same: a killed run leaves one such file at most, and the next write replaces it. Only
    one process writes to a run's folder.
    """
    return path.with_name(f".{path.name}.part")


def discard(path: Path) -> None:
    """Remove a file where possible."""
    with contextlib.suppress(OSError):
        path.unlink()
