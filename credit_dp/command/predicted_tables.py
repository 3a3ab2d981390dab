"""Predictions of a step as a table or JSON."""

import json
from typing import TYPE_CHECKING

from credit_dp.command.machine import Machine
from credit_dp.command.tables import table
from credit_dp.config import Config

if TYPE_CHECKING:
    from credit_dp.command.predicted import Prediction, Predictions

NAMES = ("ranks", "domain", "data", "GiB", "fits", "compute", "exchange", "reduction", "step")


def predictions_table(predictions: "Predictions", config: Config, machine: Machine) -> str:
    """Lines for people: one for each mesh."""
    if not predictions.lines:
        return f"It can't be sharded:\n  {predictions.refused}\n"
    rows = [_cells(line, machine) for line in predictions.lines]
    dtype = config.trainer.autocast or config.trainer.dtype
    lines = [
        f"model    {config.model.name}, {dtype}",
        f"machine  {machine.name}",
        f"source   {machine.source}",
        "",
        *table((*NAMES, "samples/s", "efficiency"), rows),
        "",
        "Predicted, not measured. Every data rank has one sample; times are seconds of a step.",
        f"GiB: of the fullest rank; fits: in the {machine.memory_gib:g} GiB of a rank",
        "compute: of the slowest rank; exchange: rows and sums over the domain; reduction: of",
        "  gradients, over all ranks. Nothing is taken to overlap",
        "efficiency: samples/s of a rank over those of one rank alone, which may not fit",
    ]
    if predictions.refused:
        lines.append(f"No larger domain: {predictions.refused}")
    return "\n".join(lines) + "\n"


def _cells(line: "Prediction", machine: Machine) -> tuple[str, ...]:
    time = line.time
    return (
        *(str(line.ranks), str(line.domain), str(line.data)),
        f"{line.held_bytes / 2**30:.2f}",
        "yes" if line.fits(machine) else "NO",
        *(f"{s:.4f}" for s in (time.compute, time.exchange, time.reduction, time.step)),
        f"{line.samples_per_s:.1f}",
        f"{line.efficiency:.1%}",
    )


def predictions_json(predictions: "Predictions", config: Config, machine: Machine) -> str:
    """One entry for each mesh; times in seconds."""
    content = {
        "model": config.model.name,
        "dtype": config.trainer.autocast or config.trainer.dtype,
        "machine": machine.name,
        "source": machine.source,
        "memory_gib": machine.memory_gib,
        "up_to": predictions.up_to,
        "refused": predictions.refused,
        "meshes": [
            {
                "ranks": line.ranks,
                "domain": line.domain,
                "data": line.data,
                "held_bytes": line.held_bytes,
                "fits": line.fits(machine),
                **vars(line.time),
                "step": line.time.step,
                "samples_per_s": line.samples_per_s,
                "efficiency": line.efficiency,
            }
            for line in predictions.lines
        ],
    }
    return json.dumps(content, indent=2) + "\n"
