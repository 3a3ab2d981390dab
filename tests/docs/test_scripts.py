"""The scripts run, at a size that takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
def test_the_comparison_of_models(tmp_path):
    command = [sys.executable, SCRIPTS / "compare_models.py", "--models", "crossformer,unet"]
    environment = {**os.environ, "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [*command, "experiment=fast", "trainer.steps=2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    head, line, *rows = done.stdout.splitlines()
    assert [row.count("|") for row in (head, line, *rows)] == [10] * 4
    assert [row.split()[1] for row in rows] == ["`crossformer`", "`unet`"]
