"""Every block of the README and the docs runs, and the test command of the README is CI's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import era5

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "docs/first-forecast.md"  # runs as it stands, in a clean clone
DOCS = sorted({*(ROOT / "docs").glob("*.md")} - {FIRST})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block that begins with a file's name is in that file when the page's commands run.
FILE = re.compile(r"# (\w+\.py)\n")
# A training command of a page is run at this size; `make` targets are looked at, not run.
SMALL = "experiment=fast"
# On this page as it stands, but for its length: its store and its dates are what it is about.
SHORT = {"your-era5.md": "model=unet_tiny trainer.steps=3 logger=csv"}
# Blocks that take long: pages that work at full size, and several commands in a row.
LONG = (
    *(f"README.md-{number}" for number in range(2, 7)),
    "training.md",
    "models.md",
    "checkpoints.md",
    "forecasting.md",
    "evaluating.md",
    "sweeps.md",
)
MESHES = (
    "pipeline.md-0",
    "data-parallel.md-0",
    "which-parallelism.md-0",
    "your-own-model.md-1",
    "device-placement.md-1",
    "mesh.md-1",
    "cluster.md-1",
)
PLANS = (
    "plan-and-verify.md-0",
    "plan-and-verify.md-2",
    "plan-and-verify.md-3",
    "plan-and-verify.md-5",
    "which-parallelism.md-1",
)
# Commands that need what is not here: the words that say so, and the exit codes that they may have.
ELSEWHERE = {
    "data=weatherbench2 model=unet_base": ("can't be reached from here", (0, 3)),  # the network
    "data.store=/data/era5.zarr": ("/data/era5.zarr: no such zarr store", (2,)),
}
LONGER = (
    "quickstart-climate.md",
    "your-own-model.md-2",
    "your-own-model.md-4",
    "your-own-model.md-7",
)
STORES = ("your-era5.md-1", "your-era5.md-2", "your-era5.md-3")
SLOW = dict.fromkeys((*LONG, *MESHES, *PLANS, *LONGER, *STORES), pytest.mark.slow)


def _files(page):
    """What the page says is in files, by name."""
    blocks = [text for _, text in BLOCK.findall(page.read_text())]
    return {found[1]: text for text in blocks if (found := FILE.match(text))}


def _blocks(language):
    return [
        pytest.param(
            *([text] if language == "python" else [text, page]),
            id=f"{page.name}-{number}",
            marks=SLOW.get(page.name, SLOW.get(f"{page.name}-{number}", ())),
        )
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


def _trains(line):
    looks = (" --help", " --cfg", " --check")
    return "train.py" in line and not any(look in line for look in looks)


def _lines(block):
    """The commands of a block, continued lines joined."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder: the entry, the config and the scripts, a store, and an empty cache."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("train.py", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("conf", "scripts"):
        shutil.copytree(ROOT / name, folder / name)
    era5.write(folder / "era5.zarr")
    return folder


def _environment(user):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cache = str(user / "cache")
    return {**os.environ, "PATH": path, "CREDIT_DP_CACHE": cache, "WANDB_MODE": "disabled"}


def test_pages_have_only_known_languages():
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text())}
    assert kinds <= {"bash", "python", "text"}


@pytest.mark.parametrize("block", _blocks("python"))
def test_python_blocks_run(block, user):
    subprocess.run(
        [sys.executable, "-W", "error", "-c", block], cwd=user, env=_environment(user), check=True,
        timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(("block", "page"), _blocks("bash"))
def test_bash_blocks_run(block, page, user):
    for name, text in _files(page).items():
        (user / name).write_text(text)
    for line in _lines(block):
        command = line
        if line.startswith("make "):
            command = line.replace("make ", "make -n ", 1)
        elif "/data/era5.zarr" in line:
            command = f"{line} --check"
        elif _trains(line):
            command = f"{line} {SHORT.get(page.name, SMALL)}"
        done = subprocess.run(
            command, shell=True, cwd=user, env=_environment(user), capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        what, codes = next((said for key, said in ELSEWHERE.items() if key in line), ("", (0,)))
        said = f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.returncode in codes, said
        assert done.returncode == 0 or what in said, said


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test\n" in (ROOT / "README.md").read_text()
    assert " make test\n" in (ROOT / ".ci/run").read_text()
