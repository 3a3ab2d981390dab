"""Makes the coastlines that maps are drawn with, from the npm package `world-atlas`.

    python scripts/make_coastlines.py [land-110m.json]

Without a file, the package is fetched from the npm registry. The data are Natural Earth's land at
1:110 million, in the public domain; the package that carries them is ISC-licensed, (c) Michael
Bostock. What is written is a list of points, with NaN between lines.
"""

import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path

import numpy as np

PACKAGE = "https://registry.npmjs.org/world-atlas/-/world-atlas-2.0.2.tgz"
MEMBER = "package/land-110m.json"
OUT = Path(__file__).parents[1] / "credit_dp/evaluation/coastlines.npz"
SOURCE = "Natural Earth 1:110m land (public domain), by npm world-atlas 2.0.2 (ISC)"


def land() -> dict:
    """The topology of all land."""
    if len(sys.argv) > 1:
        return json.loads(Path(sys.argv[1]).read_text())
    with urllib.request.urlopen(PACKAGE, timeout=60) as answer:
        packed = io.BytesIO(answer.read())
    with tarfile.open(fileobj=packed) as archive:
        return json.load(archive.extractfile(MEMBER))


def lines(topology: dict) -> list[np.ndarray]:
    """Longitude and latitude of each arc, `(N, 2)`, in degrees.

    Positions are differences of integers. Longitudes run on beyond 180 degrees where an arc crosses
    it, so that no line goes round the globe.
    """
    scale, origin = (np.array(topology["transform"][key]) for key in ("scale", "translate"))
    found = [np.cumsum(np.array(arc), axis=0) * scale + origin for arc in topology["arcs"]]
    for line in found:
        line[:, 0] = np.unwrap(line[:, 0], period=360)
    return found


def main() -> None:
    """Write the file."""
    gap = np.full((1, 2), np.nan)
    points = np.concatenate([part for line in lines(land()) for part in (line, gap)])[:-1]
    np.savez_compressed(OUT, points=points.astype(np.float32), source=np.array(SOURCE))
    print(f"{OUT}: {len(points)} points, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
