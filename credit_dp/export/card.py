"""The model card: what a trained model is, in plain words, from what is known of it."""

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from credit_dp.errors import UserError
from credit_dp.export.file import ModelMetadata, TrainedModel

USAGE_TEMPLATE = """\
```python
import numpy as np
import torch

import credit_dp

model = credit_dp.load({path!r})
fields = torch.zeros({shape})  # put yours here: {what}
times = np.array(["2001-01-01T00"], dtype="datetime64[h]")
with torch.no_grad():
    later = model(fields, times{forcing})  # {step} hours later, in the same units
```
"""


def card_path(path: Path) -> Path:
    """Where the card of a file lies: beside it."""
    stem = path.stem if path.suffix == ".safetensors" else path.name
    return path.with_name(f"{stem}.md")


def build_card(trained: TrainedModel, path: Path, run: Path) -> str:
    """The card of a model that is exported to `path`, in Markdown; scores are those of its run.

    Raises:
        UserError: the run's config or its scores are not what a run writes.
    """
    try:
        return render_card(trained, path, run / "metrics.json")
    except (AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise UserError(
            f"{run}: the config in its checkpoint, or metrics.json, can't be read "
            f"({type(error).__name__}: {told}). A file that is damaged may be removed."
        ) from error


def render_card(trained: TrainedModel, path: Path, scores_file: Path) -> str:
    """All parts of the card."""
    contents = trained.metadata
    config, found = run_config(contents), read_scores(contents, scores_file)
    parts = [
        f"# {path.stem}",
        summary_text(trained),
        "## Use",
        usage_text(contents, path),
        "## Channels",
        channels_table(contents),
        "## Training",
        training_text(contents, config),
        "## Scores",
        scores_table(found),
        "## Limits",
        limits_text(found, config),
    ]
    return "\n\n".join(parts) + "\n"


def run_config(contents: ModelMetadata) -> dict[str, Any]:
    """The run's config; empty if it has none."""
    read = yaml.safe_load(contents.config)
    return read if isinstance(read, dict) else {}


def read_scores(contents: ModelMetadata, file: Path) -> dict[str, Any] | None:
    """What a run was scored with these weights, if it was."""
    if not file.is_file():
        return None
    found = json.loads(file.read_text())
    return dict(found) if found.get("step") == contents.step else None


def summary_text(trained: TrainedModel) -> str:
    """What it is, in a sentence or two."""
    contents = trained.metadata
    rows, columns = contents.grid
    name = contents.keys.get("name", contents.kind)
    size = sum(tensor.numel() for tensor in trained.weights.values())
    predicts = "the change over one step" if contents.residual else "the next state"
    return (
        f"A global weather model (`{name}`, {size:,} weights) that takes the state of the "
        f"atmosphere{frames_text(contents)} on a grid of {rows} x {columns} points one step of "
        f"{contents.step_hours} hours on. The network predicts {predicts}; fields go in and come "
        f"out in the units below. Made with credit_dp {contents.versions.get('credit_dp', '')}."
    )


def frames_text(contents: ModelMetadata) -> str:
    """How many states go in, if it is not one."""
    return "" if contents.frames == 1 else f" at {contents.frames} times, a step apart,"


def usage_text(contents: ModelMetadata, path: Path) -> str:
    """How to load it."""
    rows, columns = contents.grid
    shape = f"1, {contents.frames * contents.states}, {rows}, {columns}"
    what = "(time, channel, latitude, longitude)"
    given = contents.external_forcing
    forcing = f", torch.zeros(1, {len(given)}, {rows}, {columns})" if given else ""
    block = USAGE_TEMPLATE.format(
        path=path.name, shape=shape, what=what, forcing=forcing, step=contents.step_hours
    )
    needed = f" The last argument is {', '.join(given)} at that time." if given else ""
    older = " The oldest state comes first." if contents.frames > 1 else ""
    return (
        f"{block}\nRows go from {contents.latitude[0]:g} to {contents.latitude[-1]:g} degrees "
        f"north, columns from {contents.longitude[0]:g} to {contents.longitude[-1]:g} degrees "
        f"east. Times are UTC.{older}{needed}"
    )


def channels_table(contents: ModelMetadata) -> str:
    """What goes in and comes out, in order, with units and statistics."""
    lines = ["| | channel | unit | mean | standard deviation |", "|---|---|---|---|---|"]
    moments = contents.statistics_arrays
    for place, name in enumerate(contents.outputs):
        unit = contents.units[place] or "-"
        channel = name if place < contents.states else f"{name} (comes out only)"
        mean, std = moments.mean[place], moments.std[place]
        lines.append(f"| {place} | {channel} | {unit} | {mean:.5g} | {std:.5g} |")
    others = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (
            (
                "computed from the time",
                [n for n in contents.forcing if n not in contents.external_forcing],
            ),
            ("given besides", contents.external_forcing),
            ("in the file", contents.static),
        )
        if names
    ]
    also = f"\n\nFurther inputs - {'; '.join(others)}." if others else ""
    return "\n".join(lines) + also


def training_text(contents: ModelMetadata, config: dict[str, Any]) -> str:
    """On what and for how long."""
    data = config.get("data", {})
    dates = data.get("dates", {}).get("train")
    when = f", {dates[0]} to {dates[1]}" if dates else ""
    source = f"`{data['name']}` data" if data.get("name") else "data that its config does not name"
    batch = f" of {data['batch_size']} samples" if data.get("batch_size") else ""
    return (
        f"{contents.step} optimiser steps{batch} on {source}{when}, seed {contents.seed}. "
        "The whole config is in the file's metadata."
    )


def scores_table(found: dict[str, Any] | None) -> str:
    """Errors on held-out dates."""
    if found is None:
        return "None: the run was not scored with these weights."
    lines = [
        f"Root-mean-square errors on held-out dates ({found['initial_times']} initial times), in "
        "each channel's unit.",
        "",
        "| channel | lead time | model | persistence | climatology |",
        "|---|---|---|---|---|",
    ]
    for channel, leads in found["rmse"].items():
        for lead, errors in leads.items():
            numbers = (f"{errors[name]:.4g}" for name in ("model", "persistence", "climatology"))
            lines.append(f"| {channel} | {lead} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def limits_text(found: dict[str, Any] | None, config: dict[str, Any]) -> str:
    """What is not known of it."""
    lines = ["Nothing is known of its errors on other data, dates, grids or steps than the above."]
    if found is not None:
        hours = [int(lead[:-1]) for leads in found["rmse"].values() for lead in leads]
        lines.append(f"It was not scored beyond {max(hours)} hours.")
    if config.get("data", {}).get("name") == "quickstart":
        lines.append("Its data are synthetic: it does not forecast the real weather.")
    return " ".join(lines)
