"""PROJ, in a process of its own: beside the copy that ecCodes brings it fails, or spoils memory."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.ranks import TIMEOUT

CODE = """
import json, sys
import numpy as np
from pyproj import CRS, Proj

asked = json.load(sys.stdin)
crs = asked["crs"]
projection = Proj(crs if isinstance(crs, str) else CRS.from_cf(crs))
first, second = np.array(asked["points"])
if asked["method"] == "areal_scale":
    values = projection.get_factors(first, second).areal_scale
else:
    values = projection(first, second, inverse=asked["method"] == "inverse")
json.dump(np.asarray(values).tolist(), sys.stdout)
"""


def project(
    crs: str | Mapping[str, Any], first: np.ndarray, second: np.ndarray, method: str = "forward"
) -> np.ndarray:
    """Return `x, y` of longitudes and latitudes by PROJ's text of a projection, or its CF form.

    `"inverse"` returns longitudes and latitudes of `x, y`, and `"areal_scale"` the scale alone.
    """
    asked = {"crs": crs, "points": np.stack([first, second]).tolist(), "method": method}
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(asked), capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout))
