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


@pytest.mark.slow
def test_the_page_after_the_first_run(tmp_path):
    """Its commands in a folder with the entry alone; `.ci/run` tries the first run itself."""
    shutil.copy(ROOT / "train.py", tmp_path)
    script = "\n".join(BLOCK.findall((ROOT / "docs/first-forecast.md").read_text()))
    first, activate, *lines = script.replace("\\\n", " ").splitlines()
    assert (first, activate) == ("make run", "source .venv/bin/activate")
    environment = {**os.environ, "CREDIT_DP_CACHE": str(tmp_path / "cache")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for line in lines:
        for long, short in FEWER.items():
            line = re.sub(long, short, line)
        done = run_line(line, tmp_path, environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "pangu_rollouts" in done.stdout  # compared
    assert (tmp_path / "scores/scorecard.html").exists()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, and the wheel that is built from it, as for a release."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT],
        check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_an_index_takes_both(distributions):
    words = ["check", "--strict", *map(str, distributions.iterdir())]
    subprocess.run([sys.executable, "-m", "twine", *words], check=True, timeout=60)
    with ZipFile(next(distributions.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        text = wheel.read(name).decode()
    assert f"Version: {credit_dp.__version__}\n" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.tar.gz", "*.whl"])
def test_what_an_index_has_works_outside_a_checkout(kind, distributions, tmp_path):
    (package,) = distributions.glob(kind)
    install = ["install", "--quiet", "--no-deps", "--target", tmp_path / "site", package]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=300)
    assert (tmp_path / "site/credit_dp/py.typed").exists()
    entry = "from credit_dp.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", entry, "train", "--cfg", "job"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "name: unet" in done.stdout
    assert (tmp_path / "site/credit_dp/conf/config.yaml").exists()
    assert (tmp_path / "site/credit_dp/evaluation/coastlines.npz").exists()


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
