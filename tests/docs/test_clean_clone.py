"""What a new user gets: the first page after `make run`, and the wheel without a clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import credit_dp
from tests.commands import run_line
from tests.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]
# The page's commands; with fewer steps, a shorter and coarser climate, and fewer forecasts.
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CLIMATE = (
    "data.grid=24x48 data.quickstart.truncation=15 data.quickstart.start=2003-02-01 "
    "data.quickstart.runs=4 data.quickstart.run_days=50 data.quickstart.spinup_days=5 "
    "data.dates.train=[2003-02-01T00,2003-03-01T18] data.dates.test=[2003-04-06T00,2003-09-15T18]"
)
FEWER = {
    r"steps=\d+": "steps=4",
    r"\[24,72,120,240\]": "[24,72]",
    r"lead=240h": "lead=72h",
    r"/6d": "/60d",
    r"(train\.py)": rf"\1 trainer.evaluate_stride_hours=2000 {CLIMATE}",
}


# The region of the page, out of a climate of two short runs.
FEWER_OF_REGION = {
    r"(make_region\.py region)": r"\1 truncation=15 runs=2 run_days=20 spinup_days=5",
    r"steps=\d+": "steps=2",
    r"32x64": "24x48",
    r' "data\.dates=[^"]+"': "",
    r"boundary=3( +data\.relaxation=3)?": "boundary=2",
    r"2004-03-01/2004-06-14/7d": "2001-02-15/2001-02-16/1d",
    r"(train\.py run\.name=globe)": rf"\1 {CLIMATE}",
    r"(train\.py)": r"\1 trainer.evaluate_stride_hours=2000 'trainer.evaluate_hours=[6]'",
}


def _run_page(name, shorter, folder):
    """Run the commands of a page in a folder with the entry and the scripts alone."""
    shutil.copy(ROOT / "train.py", folder)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    script = "\n".join(BLOCK.findall((ROOT / "docs" / name).read_text()))
    lines = script.replace("\\\n", " ").splitlines()
    if lines[:2] == ["make run", "source .venv/bin/activate"]:  # `.ci/run` tries these
        lines = lines[2:]
    environment = {**os.environ, "CREDIT_DP_CACHE": str(folder / "cache")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for line in lines:
        for long, short in shorter.items():
            line = re.sub(long, short, line)
        done = run_line(line, folder, environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_page_after_the_first_run(tmp_path):
    assert "pangu_rollouts" in _run_page("first-forecast.md", FEWER, tmp_path)  # compared
    assert (tmp_path / "scores/scorecard.html").exists()


@pytest.mark.exhaustive
def test_the_page_of_a_region(tmp_path):
    said = _run_page("regional.md", FEWER_OF_REGION, tmp_path)
    assert "interpolated bilinearly: 2 initial times, without 2 rows and columns" in said


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, and the wheel that is built from it, as for a release."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT],
        check=True, timeout=TIMEOUT, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_an_index_takes_both(distributions):
    words = ["check", "--strict", *map(str, distributions.iterdir())]
    subprocess.run([sys.executable, "-m", "twine", *words], check=True, timeout=TIMEOUT)
    with ZipFile(next(distributions.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        text = wheel.read(name).decode()
    assert f"Version: {credit_dp.__version__}\n" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "command", "more"),
    [
        ("*.tar.gz", "credit-dp doctor", ""),
        ("*.whl", "credit-dp train", "experiment=fast trainer.steps=2 run.name=first"),
    ],
)
def test_what_an_index_has_works_in_an_empty_folder(kind, command, more, distributions, tmp_path):
    """Each of the two distributions with one of the commands that the page begins with."""
    (package,) = distributions.glob(kind)
    install = ["install", "--quiet", "--no-deps", "--target", tmp_path / "site", package]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=TIMEOUT)
    assert (tmp_path / "site/credit_dp/py.typed").exists()
    assert (tmp_path / "site/credit_dp/evaluation/coastlines.npz").exists()
    site, cache = str(tmp_path / "site"), str(tmp_path / "cache")
    (block,) = BLOCK.findall((ROOT / "docs/installation.md").read_text())
    (line,) = (line for line in block.splitlines() if line.startswith(command))
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "credit_dp", *line.split()[1:], *more.split()],
        cwd=tmp_path / "empty", env={**os.environ, "PYTHONPATH": site, "CREDIT_DP_CACHE": cache},
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if command == "credit-dp train":
        assert (tmp_path / "empty/outputs/first/checkpoint").exists()


def test_the_page_of_installation_has_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/installation.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(extras.keys() - {"test", "docs", "dev"})


def test_conda_installs_the_same_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    recipe = yaml.safe_load((ROOT / "recipe.yaml").read_text())
    named_otherwise = {
        "torch": "pytorch", "matplotlib": "matplotlib-base", "netCDF4": "netcdf4",
        "dask[array]": "dask-core",
    }  # fmt: skip

    def conda(requirements):
        found = [re.fullmatch(r"([^<>=]+)(.+)", line) for line in requirements]
        return {f"{named_otherwise.get(match[1], match[1])} {match[2]}" for match in found}

    needed = {f"python {project['project']['requires-python']}"}
    needed |= conda(project["project"]["dependencies"])
    assert set(recipe["requirements"]["run"]) == needed
    assert set(recipe["requirements"]["host"]) >= conda(project["build-system"]["requires"])
    assert recipe["package"]["version"] == credit_dp.__version__
