"""Write the model card of an exported model: Markdown from its metadata and its run's scores."""

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
    """Return the path of a file's card, next to it."""
    stem = path.stem if path.suffix == ".safetensors" else path.name
    return path.with_name(f"{stem}.md")


def build_card(trained: TrainedModel, path: Path, run: Path) -> str:
    """Return the card of a model that is exported to `path`, with the scores of its run.

    Raises:
        UserError: the run's config or its scores are damaged.
    """
    try:
        return render_card(trained, path, run / "metrics.json")
    except (AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise UserError(
            f"{run}: the config in its checkpoint, or metrics.json, can't be read "
            f"({type(error).__name__}: {message}). Remove metrics.json if it is damaged."
        ) from error


def render_card(trained: TrainedModel, path: Path, scores_file: Path) -> str:
    """Return the card's text, section by section."""
    metadata = trained.metadata
    config = run_config(metadata)
    scores = read_scores(metadata, scores_file)
    parts = [
        f"# {path.stem}",
        summary_text(trained),
        "## Use",
        usage_text(metadata, path),
        "## Channels",
        channels_table(metadata),
        "## Training",
        training_text(metadata, config),
        "## Scores",
        scores_table(scores),
        "## Limits",
        limits_text(scores, config),
    ]
    return "\n\n".join(parts) + "\n"


def run_config(metadata: ModelMetadata) -> dict[str, Any]:
    """Return the run's config; {} if it has none."""
    config = yaml.safe_load(metadata.config)
    return config if isinstance(config, dict) else {}


def read_scores(metadata: ModelMetadata, file: Path) -> dict[str, Any] | None:
    """Return the run's final scores; None if there are none, or they are of other weights."""
    if not file.is_file():
        return None
    scores = json.loads(file.read_text())
    # A run scores its last weights; an earlier checkpoint has no scores.
    return dict(scores) if scores.get("step") == metadata.step else None


def summary_text(trained: TrainedModel) -> str:
    """Return a summary of the model in a few sentences."""
    metadata = trained.metadata
    rows, columns = metadata.grid
    name = metadata.keys.get("name", metadata.kind)
    size = sum(tensor.numel() for tensor in trained.weights.values())
    predicts = "the change over one step" if metadata.residual else "the next state"
    return (
        f"A global weather model (`{name}`, {size:,} weights) that forecasts the state of the "
        f"atmosphere on a grid of {rows} x {columns} points {metadata.step_hours} hours ahead"
        f"{frames_text(metadata)}. The network predicts {predicts}; inputs and outputs are in the "
        f"units below. Trained with credit_dp {metadata.versions.get('credit_dp', '')}."
    )


def frames_text(metadata: ModelMetadata) -> str:
    """Return a clause with the number of input states, if there are several."""
    return "" if metadata.frames == 1 else f", from states at {metadata.frames} times a step apart"


def usage_text(metadata: ModelMetadata, path: Path) -> str:
    """Return an example of how to load and call the model."""
    rows, columns = metadata.grid
    shape = f"1, {metadata.frames * metadata.states}, {rows}, {columns}"
    what = "(time, channel, latitude, longitude)"
    names = metadata.external_forcing
    forcing = f", torch.zeros(1, {len(names)}, {rows}, {columns})" if names else ""
    block = USAGE_TEMPLATE.format(
        path=path.name, shape=shape, what=what, forcing=forcing, step=metadata.step_hours
    )
    forcing_note = f" The last argument is {', '.join(names)} at that time." if names else ""
    order_note = " The oldest state comes first." if metadata.frames > 1 else ""
    return (
        f"{block}\nRows go from {metadata.latitude[0]:g} to {metadata.latitude[-1]:g} degrees "
        f"north, columns from {metadata.longitude[0]:g} to {metadata.longitude[-1]:g} degrees "
        f"east. Times are UTC.{order_note}{forcing_note}"
    )


def channels_table(metadata: ModelMetadata) -> str:
    """Return a table of the channels in order, with units and statistics, and other inputs."""
    lines = ["| | channel | unit | mean | standard deviation |", "|---|---|---|---|---|"]
    statistics = metadata.statistics_arrays
    for index, name in enumerate(metadata.outputs):
        unit = metadata.units[index] or "-"
        channel = name if index < metadata.states else f"{name} (output only)"
        mean = statistics.mean[index]
        std = statistics.std[index]
        lines.append(f"| {index} | {channel} | {unit} | {mean:.5g} | {std:.5g} |")
    others = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (
            (
                "computed from the time",
                [n for n in metadata.forcing if n not in metadata.external_forcing],
            ),
            ("given by the caller", metadata.external_forcing),
            ("in the file", metadata.static),
        )
        if names
    ]
    further = f"\n\nFurther inputs - {'; '.join(others)}." if others else ""
    return "\n".join(lines) + further


def training_text(metadata: ModelMetadata, config: dict[str, Any]) -> str:
    """Return a sentence about the data and the length of training."""
    data = config.get("data", {})
    dates = data.get("dates", {}).get("train")
    when = f", {dates[0]} to {dates[1]}" if dates else ""
    source = f"`{data['name']}` data" if data.get("name") else "unknown data"
    batch = f" of {data['batch_size']} samples" if data.get("batch_size") else ""
    return (
        f"{metadata.step} optimiser steps{batch} on {source}{when}, seed {metadata.seed}. "
        "The complete config is in the file's metadata."
    )


def scores_table(scores: dict[str, Any] | None) -> str:
    """Return a table of errors on held-out dates."""
    if scores is None:
        return "None: the run was not scored with these weights."
    lines = [
        f"Root-mean-square errors on held-out dates ({scores['initial_times']} initial times), in "
        "each channel's unit.",
        "",
        "| channel | lead time | model | persistence | climatology |",
        "|---|---|---|---|---|",
    ]
    for channel, leads in scores["rmse"].items():
        for lead, errors in leads.items():
            values = (f"{errors[name]:.4g}" for name in ("model", "persistence", "climatology"))
            lines.append(f"| {channel} | {lead} | {' | '.join(values)} |")
    return "\n".join(lines)


def limits_text(scores: dict[str, Any] | None, config: dict[str, Any]) -> str:
    """Return a paragraph about what is not known of the model."""
    lines = ["Its errors on data, dates, grids or steps other than the above are unknown."]
    if scores is not None:
        hours = [int(lead[:-1]) for leads in scores["rmse"].values() for lead in leads]
        lines.append(f"It was not scored beyond {max(hours)} hours.")
    if config.get("data", {}).get("name") == "quickstart":
        lines.append("Its data are synthetic: it does not forecast the real weather.")
    return " ".join(lines)
