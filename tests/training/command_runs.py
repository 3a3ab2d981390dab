"""Runs that commands train on one store, for tests from its inspection to the scores."""

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import xarray as xr

from tests import commands

TRAIN = Path(__file__).parents[2] / "train.py"


@dataclass(frozen=True)
class CommandRuns:
    """A folder with a store and what commands write there.

    Args:
        folder: where commands run.
        store: the address of the store.
        keys: of every training.
    """

    folder: Path
    store: Path | str
    keys: tuple[str, ...]

    def run(self, *words: str) -> CompletedProcess[str]:
        """Run a command."""
        cache = str(self.folder / "cache")
        environment = {**os.environ, "CREDIT_DP_CACHE": cache, "OMP_NUM_THREADS": "1"}
        return commands.run(words, self.folder, environment)

    def command(self, *words: str) -> str:
        """Run a command, which has to succeed, and return what it printed."""
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, *words: str) -> str:
        """Return the only line of a command that is refused."""
        done = self.run(*words)
        assert done.returncode == 2, done.stderr
        [line] = done.stderr.splitlines()
        return line

    @property
    def training(self) -> tuple[str, ...]:
        """The command that trains on the store."""
        return ("python", str(TRAIN), f"data.store='{self.store}'", *self.keys)

    def train(self, name: str, *keys: str) -> str:
        """Train a run."""
        return self.command(*self.training, f"run.dir={name}", *keys)

    def log(self, name: str, column: str = "loss") -> list[float]:
        """Return the values of a run's metric."""
        with (self.folder / name / "metrics.csv").open() as file:
            return [float(row[column]) for row in csv.DictReader(file) if row[column]]

    def forecast(self, name: str, *keys: str) -> xr.Dataset:
        """Forecast one day from the checkpoint of `run2`."""
        words = ("checkpoint=run2", "lead=24h", f"out={name}.zarr", *keys)
        self.command("credit-dp", "forecast", *words)
        return self.opened(name)

    def opened(self, name: str) -> xr.Dataset:
        """Open a forecast."""
        return xr.open_zarr(self.folder / f"{name}.zarr", decode_timedelta=True)
