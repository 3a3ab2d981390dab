"""Ranks import heavy modules late: by what the package imports, and in fresh interpreters."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import credit_dp
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


WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def imported_at_once(body: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the modules that statements import when they are run, and what may be modules."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_at_once(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = ast.iter_child_nodes(node)
            yield from imported_at_once([x for x in parts if isinstance(x, WITH_STATEMENTS)])


def test_no_module_of_a_run_imports_at_once_what_is_needed_late():
    root = Path(credit_dp.__file__).parents[1]
    late, seen, ahead = set(), set(), ["credit_dp.training.run"]
    while ahead:
        name = ahead.pop()
        if name in seen or not name.startswith("credit_dp"):
            continue
        seen.add(name)
        path = root / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not path.exists():  # what is no module
            continue
        found = set(imported_at_once(ast.parse(path.read_text()).body))
        late |= {f"{name}: {module}" for module in found if module.startswith(tuple(LATE))}
        ahead += [*found, name.rpartition(".")[0]]
    assert len(seen) > 100
    assert late == set()


@pytest.mark.slow
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
