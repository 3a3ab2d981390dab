"""Every notebook runs from top to bottom, leaves nothing behind, and is stored with results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands import warm_environment

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TIMEOUT = 600  # seconds for a cell, on a machine that is busy
# Metadata that do not depend on the machine on which a notebook was saved.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SHOWN = {"stream", "display_data", "execute_result"}  # no errors
LARGEST_PICTURE = 200_000
PATH = re.compile(r"/(?:tmp|home|root|Users|work)/| at 0x")


def test_notebooks_are_stored_with_results_that_name_no_machine():
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        assert notebook["metadata"] == METADATA, path
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)], path
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert {output["output_type"] for output in outputs} <= SHOWN, path
        pictures = [output.get("data", {}).pop("image/png", "") for output in outputs]
        assert any(pictures), path
        assert max(map(len, pictures)) < LARGEST_PICTURE, path
        assert not PATH.search(json.dumps(outputs)), path
        assert all(cell["metadata"] == {} for cell in notebook["cells"]), path


def test_links_lead_somewhere():
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        texts = (cell["source"] for cell in cells if cell["cell_type"] == "markdown")
        text = "\n".join(map("".join, texts))
        links = [link.split("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", text)]
        assert [link for link in links if not (FOLDER / link).exists()] == [], path


def test_every_notebook_is_listed():
    linked = re.findall(r"\]\((\w+\.ipynb)\)", (FOLDER / "README.md").read_text())
    assert linked == [path.name for path in NOTEBOOKS]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The name of a kernel whose `credit-dp` runs in a process that has imported everything."""
    with warm_environment(tmp_path / "environment") as python:
        spec = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
        folder = tmp_path / "kernels/warm"
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps({**spec, "display_name": "warm"}))
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
        yield "warm"


OF_A_SWEEP = FOLDER / "4_reading_a_sweep.ipynb"  # `tests/slurm/test_cluster.py` runs it, too


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.exhaustive) if path == OF_A_SWEEP else path
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_notebook_runs(path, kernel):
    """Runs as if opened in the folder of notebooks, and leaves no file there."""
    import nbformat
    from nbclient import NotebookClient

    before = sorted(FOLDER.rglob("*"))
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, timeout=TIMEOUT, kernel_name=kernel, resources=place)
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert sorted(FOLDER.rglob("*")) == before
