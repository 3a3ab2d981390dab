"""Every block of the README and the docs runs, and the two commands of the README are CI's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block that begins with a file's name is in that file when the page's commands run.
FILE = re.compile(r"# (\w+\.py)\n")
# A training command of a page is run at this size; `make` targets are looked at, not run.
SMALL = "experiment=fast"
# Blocks that take long: pages that work at full size, and several commands in a row.
LONG = ("README.md-3", "README.md-4", "README.md-5", "training.md-0", "models.md", "checkpoints.md")
MESHES = ("pipeline.md-0", "data-parallel.md-0", "which-parallelism.md-0", "your-own-model.md-1")
PLANS = ("plan-and-verify.md-0", "plan-and-verify.md-2", "which-parallelism.md-1")
LONGER = ("quickstart-climate.md", "your-own-model.md-2", "your-own-model.md-4")
SLOW = dict.fromkeys((*LONG, *MESHES, *PLANS, *LONGER), pytest.mark.slow)


def _files(page):
    """What the page says is in files, by name."""
    blocks = [text for _, text in BLOCK.findall(page.read_text())]
    return {found[1]: text for text in blocks if (found := FILE.match(text))}


def _blocks(language):
    return [
        pytest.param(
            *([text] if language == "python" else [text, _files(page)]),
            id=f"{page.name}-{number}",
            marks=SLOW.get(page.name, SLOW.get(f"{page.name}-{number}", ())),
        )
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


def _trains(line):
    return "train.py" in line and " --help" not in line and " --cfg" not in line


def _lines(block):
    """The commands of a block, continued lines joined."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder: the entry, the config and the scripts, and an empty cache."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("train.py", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("conf", "scripts"):
        shutil.copytree(ROOT / name, folder / name)
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


@pytest.mark.parametrize(("block", "files"), _blocks("bash"))
def test_bash_blocks_run(block, files, user):
    for name, text in files.items():
        (user / name).write_text(text)
    for line in _lines(block):
        command = line
        if line.startswith("make "):
            command = line.replace("make ", "make -n ", 1)
        elif "data=zarr" in line:  # of a store that is not here: the config is checked
            command = f"{line} --check"
        elif _trains(line):
            command = f"{line} {SMALL}"
        done = subprocess.run(
            command, shell=True, cwd=user, env=_environment(user), capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test\n" in (ROOT / "README.md").read_text()
    assert " make test\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.slow
def test_make_run_from_a_clean_clone(tmp_path):
    """The first command of the README, from nothing to a trained model, in its own environment."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("VENV", "OMP_NUM_THREADS")
    }
    environment.update(CREDIT_DP_CACHE=str(tmp_path / "cache"), WANDB_MODE="disabled")
    done = subprocess.run(
        ["make", "run"], cwd=clone, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (clone / "outputs").iterdir()
    written = {path.name for path in run.iterdir()}
    assert written >= {
        "checkpoint",
        "metrics.json",
        "metrics.csv",
        "config.yaml",
        "forecast.png",
    }
    scores = json.loads((run / "metrics.json").read_text())["rmse"]
    assert len(scores) == 14
    for lead in ("6h", "24h"):
        for rmse in (of_variable[lead] for of_variable in scores.values()):
            assert rmse["model"] <= 0.5 * rmse["persistence"]
            assert rmse["model"] < rmse["climatology"]


@pytest.mark.slow
def test_the_wheel_works_outside_a_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    entry = "from credit_dp.command import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", entry, "train", "--cfg", "job"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "name: unet" in done.stdout
    assert (tmp_path / "site/credit_dp/conf/config.yaml").exists()
