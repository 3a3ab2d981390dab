"""What a new user gets: the first page after `make run`, and the wheel without a clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_wheel_works_outside_a_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
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
