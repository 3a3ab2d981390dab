"""Ranks import heavy modules late; counted in fresh interpreters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from credit_dp.config import Config
from credit_dp.distributed.launch import launch
from credit_dp.distributed.launcher import RankInfo
from credit_dp.training import run as training_run
from tests.ranks import TIMEOUT
from tests.training.runs import make_config, make_store

# Those that a run needs late, on some ranks, or never.
LATE = [
    "dask.base",
    "matplotlib",
    "netCDF4",
    "sympy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "wandb",
]


def run(config: Config, ranks: RankInfo) -> int:
    """Train, and write which modules this rank has imported."""
    code = training_run.run(config, ranks)
    Path(config.run.dir, f"modules{ranks.rank}").write_text(json.dumps(sorted(sys.modules)))
    return code


def main(folder: str) -> int:
    """Launch two ranks."""
    store = make_store(Path(folder), 16)
    config = make_config(store, Path(folder, "run"), steps=2, dtype="float32")
    config.parallel.domain, config.parallel.data = 2, 1
    return launch(config, f"{__name__}:run")


def alone(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter, and return its stdout."""
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_needed_late_is_imported_late():
    # What these three import by themselves differs by hundreds of modules between their releases.
    code = (
        "import json, sys, torch, xarray, zarr; before = set(sys.modules); "
        "import credit_dp.training.run; print(json.dumps([*map(sorted, (before, sys.modules))]))"
    )
    before, modules = json.loads(alone(code))
    assert [name for name in LATE if name in modules] == []
    added = {name for name in modules if not name.startswith("credit_dp")} - set(before)
    assert len(added) < 300


@pytest.mark.slow
def test_no_rank_but_0_imports_what_draws(tmp_path):
    alone(f"import sys; from {__name__} import main; sys.exit(main(sys.argv[1]))", str(tmp_path))
    first, second = (json.loads((tmp_path / f"run/modules{r}").read_text()) for r in (0, 1))
    assert "matplotlib" in first
    assert "matplotlib" not in second
    assert "wandb" not in second
