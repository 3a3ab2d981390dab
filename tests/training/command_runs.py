"""Runs that commands train on one store, for tests from its inspection to the scores."""

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import commands

TRAIN = Path(__file__).parents[2] / "train.py"


@dataclass(frozen=True)
class CommandRuns:
    """A folder with a store and what commands write there.

    Args:
        folder: where commands run.
        store: the path of the store.
        keys: of every training.
    """

    folder: Path
    store: Path
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
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        return line

    @property
    def training(self) -> tuple[str, ...]:
        """The command that trains on the store."""
        return ("python", str(TRAIN), f"data.store={self.store}", *self.keys)

    def train(self, name: str, *keys: str) -> str:
        """Train a run."""
        return self.command(*self.training, f"run.dir={name}", *keys)

    def train_on_one_and_two_ranks(self) -> None:
        """Train four steps of `run1` and `run2`."""
        for ranks in (1, 2):
            self.train(f"run{ranks}", f"parallel.domain={ranks}", "trainer.steps=4")

    def log(self, name: str, column: str = "loss") -> list[float]:
        """Return the values of a run's metric."""
        with (self.folder / name / "metrics.csv").open() as file:
            return [float(row[column]) for row in csv.DictReader(file) if row[column]]

    def check_log_on(self, ranks: int) -> None:
        """Check that the log of `run1` does not depend on the number of ranks."""
        name = f"run{ranks}"
        if not (self.folder / name).exists():
            self.train(name, f"parallel.domain={ranks}", "trainer.steps=4")
        one = self.log("run1")
        assert len(one) > 0
        assert self.log(name) == pytest.approx(one, rel=1e-10)

    def check_resuming(self) -> None:
        """Check that `run2`, resumed on one rank, ends as a run that was not interrupted."""
        self.train("longer", "resume=run2", "trainer.steps=6", "parallel.domain=1")
        self.train("straight", "trainer.steps=6")
        assert self.log("longer")[-1] == pytest.approx(self.log("straight")[-1], rel=1e-10)
