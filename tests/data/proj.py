"""PROJ, in a process of its own: beside the copy that ecCodes brings it fails, or spoils memory.

The process lives as long as that of the tests, as it takes a second to start.
"""

import atexit
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

CODE = """
import json, sys, traceback
import numpy as np
from pyproj import CRS, Proj

for line in sys.stdin:
    try:
        asked = json.loads(line)
        crs = asked["crs"]
        projection = Proj(crs if isinstance(crs, str) else CRS.from_cf(crs))
        first, second = np.array(asked["points"])
        if asked["method"] == "areal_scale":
            values = projection.get_factors(first, second).areal_scale
        else:
            values = projection(first, second, inverse=asked["method"] == "inverse")
        answer = {"values": np.asarray(values).tolist()}
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
"""


@cache
def _process() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)  # which closes its input, and waits for its end
    return process


def project(
    crs: str | Mapping[str, Any], first: np.ndarray, second: np.ndarray, method: str = "forward"
) -> np.ndarray:
    """Return `x, y` of longitudes and latitudes by PROJ's text of a projection, or its CF form.

    `"inverse"` returns longitudes and latitudes of `x, y`, and `"areal_scale"` the scale alone.
    """
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    asked = {"crs": crs, "points": np.stack([first, second]).tolist(), "method": method}
    print(json.dumps(asked), file=process.stdin, flush=True)
    answer = json.loads(process.stdout.readline())
    assert "error" not in answer, answer["error"]
    return np.array(answer["values"])
