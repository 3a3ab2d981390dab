"""Measure time and memory of planning: `python benchmarks/planning.py`.

First the large models at 721 x 1440, then models of 200 layers at a small grid, on two ranks: one
whose layers convert, and one that computes on tensors of the globe. Their planning is compared
with a forward and backward of the unsharded model at that grid.

Each number comes from a separate process with one thread. Seconds are those of its processor, which
do not grow if the machine does something else. `convert` is what a training rank does
before its first step: it converts and plans the model for the largest domain that the levels allow.
The model is on the meta device, because planning reads no weights; building it is not timed. `plan`
is `credit-dp plan` for a mesh of that domain, with as many data ranks as 1,024 ranks allow. The
time of imports is reported separately; peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from typing import Any

from side_by_side import Row
from table import show

MODELS = ("unet_base", "pangu_base", "crossformer_base")
WORK = ("convert", "plan")
GRID = (721, 1440)
RANKS = 1024
LAYERS = 200
SMALL_SHAPE = (1, 64, 90, 180)
DEEP_MODELS = ("deep", "deep_view")


def planning_rows() -> list[dict[str, Any]]:
    """Return the costs of each model and kind of work.

    Keys: `model`, `work`, `ranks` (domain x data), `seconds` of the work itself, `start_seconds`
    of the process before it, `peak_bytes`.
    """
    return [_in_a_process(model, work) for model in MODELS for work in WORK]


def _in_a_process(model: str, work: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", work, model]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=alone, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def deep_rows() -> list[dict[str, Any]]:
    """Return the costs of models of `LAYERS` layers, with the seconds of an unsharded step."""
    return [_in_a_process(model, "deep") for model in DEEP_MODELS]


def _measure_deep(name: str) -> dict[str, Any]:
    """Return the seconds of a conversion and of the fastest of three unsharded steps."""
    import torch
    from torch import nn

    from credit_dp.domain_parallel import convert_to_domain_parallel
    from credit_dp.domain_parallel.decide import counting_manager

    class Spectrum(nn.Module):
        """Computes along rows and columns at once, which no layer's rule knows."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])

    width = SMALL_SHAPE[1]
    block = (lambda: nn.Conv2d(width, width, 3, padding=1), lambda: nn.GroupNorm(8, width), nn.GELU)
    layers = [block[i % 3]() for i in range(LAYERS)]
    model = nn.Sequential(*layers, *([Spectrum()] if name == "deep_view" else []))
    x = torch.randn(SMALL_SHAPE)
    steps = []
    for _ in range(3):
        begun = time.process_time()
        model(x).sum().backward()
        steps.append(time.process_time() - begun)
    begun = time.process_time()
    convert_to_domain_parallel(model, counting_manager(2), input_shape=SMALL_SHAPE)
    return {"model": name, "seconds": time.process_time() - begun, "step_seconds": min(steps)}


def _measure(model: str, work: str) -> dict[str, Any]:
    if work == "deep":
        return _measure_deep(model)
    from peak import peak

    from credit_dp.cli.compose import Composer

    config = Composer("train").compose_config([f"model={model}", f"data.grid={GRID[0]}x{GRID[1]}"])
    domain = config.model.coarsest_rows(GRID[0])
    data = RANKS // domain if work == "plan" else 1
    run = _planner(model, domain, data) if work == "plan" else _converter(config, domain)
    begun = time.process_time()
    run()
    return {
        "model": model,
        "work": work,
        "ranks": domain * data,
        "seconds": time.process_time() - begun,
        "start_seconds": begun,
        "peak_bytes": peak(),
    }


def _planner(model: str, domain: int, data: int) -> Any:
    import torch  # noqa: F401  # every command has imported it by then

    from credit_dp.cli.plan import plan

    mesh = [f"parallel.domain={domain}", f"parallel.data={data}", f"data.batch_size={data}"]
    arguments = ["--json", f"model={model}", f"data.grid={GRID[0]}x{GRID[1]}", *mesh]

    def run() -> None:
        with redirect_stdout(io.StringIO()):
            plan(arguments, "credit-dp plan")

    return run


def _converter(config: Any, domain: int) -> Any:
    from dataclasses import replace

    from credit_dp.costs.budget import model_and_shape
    from credit_dp.domain_parallel.convert import shard_model
    from credit_dp.domain_parallel.decide import counting_manager

    one = replace(config, data=replace(config.data, batch_size=1))
    model, shape = model_and_shape(one, 1)
    return lambda: shard_model(model, counting_manager(domain), shape)


def rows() -> list[Row]:
    """Return the seconds and the peak memory of each kind of work."""
    found = []
    for row in planning_rows():
        what = f"{row['work']} {row['model']} at {GRID[0]}x{GRID[1]}, {row['ranks']} ranks"
        peak_gb = row["peak_bytes"] / 1e9
        found += [
            Row(what, "", row["seconds"], 10.0, unit="s"),
            Row(f"{what}: peak memory of the process", "", peak_gb, 1.0, unit="GB"),
        ]
    for row in deep_rows():
        what = f"convert {row['model']}, {LAYERS} layers, at {'x'.join(map(str, SMALL_SHAPE[2:]))}"
        steps = row["seconds"] / row["step_seconds"]
        found += [
            Row(what, "", row["seconds"], 15.0, unit="s"),
            Row(f"{what}: over an unsharded step", "", steps, 3.0, unit="x"),
        ]
    return found


def main() -> None:
    """Print all rows, or measure one and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("WORK", "MODEL"), help="one row, as JSON")
    measured = parser.parse_args().measure
    if measured:
        print(json.dumps(_measure(measured[1], measured[0])))
        return
    show(rows())


if __name__ == "__main__":
    main()
