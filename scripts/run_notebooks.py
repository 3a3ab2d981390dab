"""Runs the notebooks and stores their results in them, as the site and GitHub show them.

What differs from machine to machine is left out: paths, times of execution, and metadata.

    python scripts/run_notebooks.py [NOTEBOOK ...]
"""

import base64
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TIMEOUT = 1200  # seconds for a cell, on a machine that is busy
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
METADATA = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
ARTIST = re.compile(r"<matplotlib\.|Text\(")
TEMPORARY = re.compile(r"/tmp/[^/\s'\"]+/?|" + re.escape(f"{FOLDER.parent}/"))


def main() -> None:
    """Run the notebooks on the command line, or all of them."""
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook,
            timeout=TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute()
        notebook.metadata = nbformat.from_dict(METADATA)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                shown = (output for output in cell.outputs if not names_an_artist(output))
                cell.outputs = [portable(output) for output in shown]
        nbformat.write(notebook, path)


def names_an_artist(output: Any) -> bool:
    """Whether an output is only the name of what the last line of a cell has drawn."""
    data = output.get("data", {})
    return data.keys() == {"text/plain"} and bool(ARTIST.match(data["text/plain"]))


def portable(output: Any) -> Any:
    """Return an output of a cell without paths of this machine, and with small pictures."""
    if output.output_type == "stream":
        output.text = TEMPORARY.sub("", output.text)
        return output
    output.metadata = {}
    data = output.data
    if "xr-wrap" in data.get("text/html", ""):  # xarray's page has random names, and 30 kB
        del data["text/html"]
    if "image/png" in data:
        data["image/png"] = with_palette(data["image/png"])
    for kind in data.keys() & {"text/plain", "text/html"}:
        data[kind] = TEMPORARY.sub("", data[kind])
    return output


def with_palette(png: str) -> str:
    """Return a picture with 256 colours, which has a third of the size."""
    small = BytesIO()
    picture = Image.open(BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


if __name__ == "__main__":
    main()
