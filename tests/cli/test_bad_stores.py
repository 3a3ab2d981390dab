"""Bad input that only the ranks can see: the real program prints one line and ends."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests import commands
from tests.cli.invocation import store_overrides
from tests.data import stores

ROOT = Path(__file__).parents[2]
HANGS = 60  # seconds

Change = Callable[[xr.Dataset], xr.Dataset]


def with_nan(data: xr.Dataset) -> xr.Dataset:
    values = data["temperature"].values.copy()
    values[3, 1, 5, 2] = np.nan
    return data.assign(temperature=(stores.DIMS, values))


CASES: dict[str, tuple[Change, list[str], str]] = {
    "missing store": (lambda data: data, ["data.store=/nope.zarr"], "data.store"),
    "missing variable": (lambda data: data.drop_vars("temperature"), [], "data.prognostic"),
    "NaN in a variable": (with_nan, [], "data.prognostic"),
    "wrong dims": (lambda data: data.rename(longitude="x"), [], "data.store"),
    "dates outside": (
        lambda data: data,
        ["data.dates.train=[1980-01-01,1980-01-02]"],
        "data.dates.train",
    ),
    "too many ranks": (
        lambda data: data,
        ["parallel.domain=7", "parallel.whole_ops=refuse"],
        "parallel.domain",
    ),
}


def run(store: Path, more: list[str]) -> subprocess.CompletedProcess[str]:
    words = ["python", "train.py", *store_overrides(store), *more]
    return commands.run(words, ROOT, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout=HANGS)


def the_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_line_and_the_end(tmp_path: Path, case: tuple[Change, list[str], str]) -> None:
    change, more, key = case
    store = stores.write(change(stores.dataset()), tmp_path / "store.zarr")
    assert key in the_error(run(store, more))


def cut_short(chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes()[:50])


DAMAGES: dict[str, Callable[[Path], None]] = {"cut short": cut_short, "missing": Path.unlink}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "when"), [("cut short", "before the statistics"), ("missing", "after them")]
)
def test_damaged_chunk(tmp_path: Path, damage: str, when: str) -> None:
    """Whichever rank meets it, reading ahead in a thread, all of them end with one line."""
    store = stores.write(stores.dataset(), tmp_path / "store.zarr")
    if when == "after them":
        assert run(store, ["trainer.steps=8"]).returncode == 0
        shutil.rmtree(tmp_path / "run")
    DAMAGES[damage](store / "temperature" / "c" / "3" / "0" / "0" / "0")
    error = the_error(run(store, ["trainer.steps=8"]))
    assert str(store) in error
    assert "temperature at 2000-01-01T18:00" in error
