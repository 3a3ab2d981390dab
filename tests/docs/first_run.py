"""Look at what `make run` left: `python tests/docs/first_run.py outputs/RUN`."""

import json
import sys
from pathlib import Path

FILES = {"checkpoint", "metrics.json", "metrics.csv", "config.yaml", "forecast.png"}


def check_first_run(run: Path) -> None:
    """Check that all files exist, and that the model is better than persistence and climatology."""
    assert {path.name for path in run.iterdir()} >= FILES
    scores = json.loads((run / "metrics.json").read_text())["rmse"]
    assert len(scores) == 14
    for lead in ("6h", "24h"):
        for rmse in (of_variable[lead] for of_variable in scores.values()):
            assert rmse["model"] <= 0.5 * rmse["persistence"]
            assert rmse["model"] < rmse["climatology"]


if __name__ == "__main__":
    (path,) = sys.argv[1:]
    check_first_run(Path(path))
