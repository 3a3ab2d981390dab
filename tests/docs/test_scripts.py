"""The scripts run, at a size that takes seconds."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import TIMEOUT

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.exhaustive
def test_the_comparison_of_models(tmp_path):
    command = [sys.executable, SCRIPTS / "compare_models.py", "--models", "crossformer,unet"]
    environment = {**os.environ, "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [*command, "experiment=fast", "trainer.steps=2", "trainer.evaluate_stride_hours=2000"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    head, line, *rows = done.stdout.splitlines()
    assert [row.count("|") for row in (head, line, *rows)] == [10] * 4
    assert [row.split()[1] for row in rows] == ["`crossformer`", "`unet`"]


def test_spectra_of_scorecards_beside_each_other(tmp_path):
    from matplotlib.image import imread

    names = "variable,level,band,lead_hours,wavenumber,forecast,truth"
    rows = [
        f"{variable},30N to 60N,{hours},{wave},{10.0**-wave},{10.0**-wave}"
        for variable in ("geopotential,500", "2m_temperature,")
        for hours in (6, 24)
        for wave in range(9)
    ]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spectra.csv").write_text("\n".join([names, *rows, ""]))
    draw = runpy.run_path(str(SCRIPTS / "compare_spectra.py"))["main"]
    draw([str(tmp_path / "one"), str(tmp_path / "other"), "--out", str(tmp_path / "a.png")])
    assert imread(tmp_path / "a.png").shape[1] > 600


def test_outputs_of_notebooks_are_stored_without_paths():
    import nbformat.v4

    script = runpy.run_path(str(SCRIPTS / "run_notebooks.py"))
    written = nbformat.v4.new_output("stream", text="wrote /tmp/credit_dp-x1/outputs/first\n")
    assert script["portable"](written).text == "wrote outputs/first\n"
    data = {"text/plain": "<xarray.Dataset>", "text/html": '<div class="xr-wrap">'}
    shown = script["portable"](nbformat.v4.new_output("execute_result", data=data))
    assert shown.data == {"text/plain": "<xarray.Dataset>"}
    name = {"text/plain": "<matplotlib.legend.Legend at 0x7f8f>"}
    assert script["names_an_artist"](nbformat.v4.new_output("execute_result", data=name))
    assert not script["names_an_artist"](shown)
