"""Trains every model on the quickstart data, one after the other, and prints a table of them.

`python scripts/compare_models.py` takes minutes for each on 2 cores. Further keys are passed to
every run, such as `parallel.domain=1`; `--models unet,pangu` chooses among the models.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from credit_dp.export.file import read_trained

# Steps and learning rate of each: without convolutions a model learns more slowly.
STEPS = {"unet": 450, "pangu": 800, "swin": 450, "crossformer": 450, "sfno": 450}
RATES = {"unet": 3e-3, "pangu": 4e-3, "swin": 3e-3, "crossformer": 3e-3, "sfno": 3e-3}
TRAIN = Path(__file__).parents[1] / "train.py"
SHOWN = "geopotential_500"
LEADS = ("6h", "24h")


@dataclass(frozen=True)
class Result:
    """The time and the scores of one run.

    Attributes:
        rmse: of the channel `SHOWN`, at each of `LEADS`.
        worst: the largest ratio to persistence of all variables, at each of `LEADS`.
    """

    model: str
    parameters: int
    seconds_per_step: float
    minutes: float
    rmse: tuple[float, ...]
    worst: tuple[float, ...]


def main() -> None:
    """Print a row as soon as its run is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(STEPS))
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_args()
    models = chosen.models.split(",")
    if not STEPS.keys() >= set(models):
        parser.error(f"--models: needs some of {', '.join(STEPS)}, got {chosen.models}")
    leads = " | ".join(f"Z500 RMSE {lead} | largest RMSE / persistence {lead}" for lead in LEADS)
    print(f"| model | parameters | steps | s / step | minutes | {leads} |")
    print("|---" * (5 + 2 * len(LEADS)) + "|", flush=True)
    for model in models:
        found = train(model, chosen.keys)
        scores = zip(found.rmse, found.worst, strict=True)
        cells = " | ".join(f"{rmse:.1f} | {worst:.2f}" for rmse, worst in scores)
        print(
            f"| `{model}` | {found.parameters:,} | {STEPS[model]} | "
            f"{found.seconds_per_step:.2f} | {found.minutes:.1f} | {cells} |",
            flush=True,
        )


def train(model: str, keys: list[str]) -> Result:
    """Train one model in a folder of its own.

    Raises:
        SystemExit: the run failed; its own words are printed.
    """
    with TemporaryDirectory() as folder:
        command = [sys.executable, TRAIN, f"model={model}", f"run.dir={folder}", "logger=csv"]
        command += [f"trainer.steps={STEPS[model]}", f"optimizer.lr={RATES[model]}"]
        command.append("parallel.domain=2")
        began = time.monotonic()
        done = subprocess.run([*command, *keys], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr or done.stdout)
        return read(model, Path(folder), time.monotonic() - began)


def read(model: str, folder: Path, seconds: float) -> Result:
    """Return the result of a run from its files."""
    weights = read_trained(str(folder)).weights
    with (folder / "metrics.csv").open() as file:
        paces = [float(row["seconds"]) for row in csv.DictReader(file) if row.get("seconds")]
    scores = json.loads((folder / "metrics.json").read_text())["rmse"]
    ratios = {
        lead: max(s[lead]["model"] / s[lead]["persistence"] for s in scores.values())
        for lead in LEADS
    }
    return Result(
        model,
        sum(math.prod(weight.shape) for weight in weights.values()),
        sorted(paces)[len(paces) // 2],
        seconds / 60,
        tuple(scores[SHOWN][lead]["model"] for lead in LEADS),
        tuple(ratios[lead] for lead in LEADS),
    )


if __name__ == "__main__":
    main()
