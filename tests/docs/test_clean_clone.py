"""What a newcomer gets: the first command in a clean clone, and the wheel without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The commands of a newcomer's second page, in bash; with fewer steps, and forecasts of fewer dates.
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FEWER = {
    r"steps=\d+": "steps=4",
    r"/6d": "/60d",
    r"(train\.py)": r"\1 trainer.evaluate_stride_hours=2000",
}


@pytest.mark.slow
def test_make_run_from_a_clean_clone(tmp_path):
    """The first command of the README, from an empty cache to a trained model.

    In this environment: that the clone can make its own is for `.ci/run` to show.
    """
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("VENV", "OMP_NUM_THREADS")
    }
    here = f"VENV={sys.prefix}"
    kept = f"--old-file={sys.prefix}/installed"
    environment.update(CREDIT_DP_CACHE=str(tmp_path / "cache"), WANDB_MODE="disabled")
    done = subprocess.run(
        ["make", "run", here, kept], cwd=clone, env=environment, capture_output=True, text=True,
        timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (clone / "outputs").iterdir()
    check_first_run(run)
    script = "\n".join(BLOCK.findall((ROOT / "docs/first-forecast.md").read_text()))
    assert script.startswith("make run\n")
    script = "set -e\n" + script.split("\n", 2)[2].replace("python ", f"{sys.executable} ")
    for long, short in FEWER.items():
        script = re.sub(long, short, script)
    environment["PATH"] = f"{sys.prefix}/bin:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True,
        timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pangu_rollouts" in "\n".join(done.stdout.splitlines()[-40:])  # compared
    assert (clone / "scores/scorecard.html").exists()


def check_first_run(run: Path) -> None:
    """What `make run` leaves is all there, and its model is better than others' guesses."""
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
    assert (tmp_path / "site/credit_dp/evaluation/coastlines.npz").exists()
