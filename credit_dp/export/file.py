"""A trained model with everything needed to use it: read from a file or checkpoint, and written.

`ModelMetadata` describes the model, its channels and their statistics; `TrainedModel` adds the
tensors. `read_trained` reads both from an exported file, a checkpoint or a run's folder, and
`write_safetensors` writes them. `build_card` describes the model in Markdown, from the metadata and
the scores of its run.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, final, get_origin

import cftime
import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from credit_dp import checks
from credit_dp.checks import existing_path
from credit_dp.config import VariableConfig
from credit_dp.config.model import MODELS
from credit_dp.data.boundary import check_boundary
from credit_dp.data.calendar import STANDARD, Calendar
from credit_dp.data.channels import Channel
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.grid import Grid
from credit_dp.data.statistics import Statistics
from credit_dp.data.transforms import QuantileMap
from credit_dp.errors import UserError, counted
from credit_dp.export.hub import SCHEME, card_metadata, exported_file_in, fetch_model
from credit_dp.files import write_bytes_atomic
from credit_dp.plugins import PLUGINS_VARIABLE, one_line_message
from credit_dp.training.checkpoint_files import locate_checkpoint
from credit_dp.training.checkpoint_shards import CHECKSUMS_KEY, Checkpoint, checksums, real_view
from credit_dp.training.state import AVERAGE_PREFIX, MODEL_PREFIX, STATIC_KEY, VALID_KEY

FORMAT = "credit_dp model 2"
PROJECTION_KEYS = ("latitude", "longitude", "shape", "projection", "axes")  # see `Grid.to_json`
# Entries that most models lack, and their usual values.
LATER_ENTRIES = {
    "calendar": STANDARD.name,
    "projection": {},
    "boundary": 0,
    "relaxation": 0,
    "along_grid": [],
}
MAX_STEP_HOURS = 10**6  # larger steps can overflow datetime64[ns]
# The errors that damaged metadata can cause.
METADATA_ERRORS = (AttributeError, KeyError, TypeError, ValueError, RecursionError, UserError)

USAGE_TEMPLATE = """\
```python
{imports}
import torch

import credit_dp

model = credit_dp.load({path!r})
fields = torch.zeros({shape})  # put yours here: {what}
times = {times}
with torch.no_grad():
    later = model(fields, times{forcing})  # {step} hours later, in the same units
```
"""

# The errors that a damaged config or damaged scores can cause.
SCORE_ERRORS = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)


@final
@dataclass(frozen=True)
class ModelMetadata:
    """The model's config, channels, grid and statistics.

    Attributes:
        kind, keys: name and keys of the model's config.
        config: the run's config, as YAML.
        channels: (variable, level or None) of all outputs, in order: states first.
        units: units of the channels; empty if unknown.
        forcing, static: further inputs, in order.
        frames: number of input states.
        residual: whether the network predicts the change over a step.
        step_hours: the model's step.
        latitude, longitude: degrees of rows and columns; empty on a projection.
        statistics: the lists of `Statistics` by their names, in the store's units; quantiles are
            lists of lists.
        step, seed: optimiser steps and seed of the training.
        versions: versions of the libraries used for training.
        diagnostic: number of channels, at the end, that are outputs but no inputs.
        variables: settings of variables that differ from the default, by the names of
            `VariableConfig`.
        hybrid: coefficients `a` and `b` of model levels, if a fixer needs them; see `HybridLayers`.
        calendar: name of the times' calendar; see `Calendar`.
        projection: a grid on a projection, as `Grid.to_json` has it; empty on latitudes.
        boundary, relaxation: widths at the rim of a region; see `credit_dp.data.boundary`.
        along_grid: on a projection, which channels are winds along its axes; see `lies_along_grid`.
    """

    kind: str
    keys: dict[str, Any]
    config: str
    channels: list[list[Any]]
    units: list[str]
    forcing: list[str]
    static: list[str]
    frames: int
    residual: bool
    step_hours: int
    latitude: list[float]
    longitude: list[float]
    statistics: dict[str, list[Any]]
    step: int
    seed: int
    versions: dict[str, str]
    diagnostic: int = 0
    variables: dict[str, Any] = field(default_factory=dict)
    hybrid: dict[str, Any] = field(default_factory=dict)
    calendar: str = STANDARD.name
    projection: dict[str, Any] = field(default_factory=dict)
    boundary: int = 0
    relaxation: int = 0
    along_grid: list[bool | None] = field(default_factory=list)

    @property
    def states(self) -> int:
        """Return the number of channels of a state, which are both outputs and inputs."""
        return len(self.channels) - self.diagnostic

    @property
    def outputs(self) -> list[str]:
        """Return the names of the outputs, such as `geopotential_500` or `2m_temperature`."""
        return [Channel(variable, level).name for variable, level in self.channels]

    @property
    def inputs(self) -> list[str]:
        """Return the names of the network's inputs: states, oldest first, forcing, static."""
        ages = [self.step_hours * age for age in reversed(range(self.frames))]
        names = self.outputs[: self.states]
        states = [name if age == 0 else f"{name} -{age}h" for age in ages for name in names]
        return [*states, *self.forcing, *self.static]

    @property
    def external_forcing(self) -> list[str]:
        """Return the forcings that can't be computed from the time."""
        return [name for name in self.forcing if name not in COMPUTED_FORCINGS]

    @property
    def variable_configs(self) -> dict[str, VariableConfig]:
        """Return the configs of variables that differ from the default."""
        return {name: VariableConfig(**keys) for name, keys in self.variables.items()}

    @property
    def statistics_arrays(self) -> Statistics:
        """Return the statistics as arrays."""
        arrays = {name: np.array(values, float) for name, values in self.statistics.items()}
        return Statistics(**arrays)

    @cached_property
    def grid(self) -> Grid:
        """The grid, which knows whether it is a region."""
        lists = {"latitude": self.latitude, "longitude": self.longitude}
        return Grid.from_json(self.projection or lists)

    def __post_init__(self) -> None:
        # The values come from a file that anybody may have written: check them all.
        for entry in fields(self):
            kind = get_origin(entry.type) or entry.type
            if isinstance(kind, type) and type(getattr(self, entry.name)) is not kind:
                raise TypeError(f"{entry.name} is not of type {kind.__name__}")
        cftime.datetime(2000, 1, 1, calendar=self.calendar)  # raises if there is no such calendar
        names = [variable for variable, _ in self.channels]
        if not all(type(t) is str for t in (*names, *self.units, *self.forcing, *self.static)):
            raise TypeError("a name or a unit is not a string")
        if self.projection and not self.grid.is_projected:
            raise ValueError("the coordinates of the projection do not have two dims")
        if not all(np.isfinite(x).all() for x in (self.grid.latitude, self.grid.longitude)):
            raise ValueError("a latitude or longitude is not finite")
        if min(self.boundary, self.relaxation) < 0:
            raise ValueError("boundary or relaxation is out of range")
        check_boundary(self.boundary, self.relaxation, self.grid, "the model")
        for name, variable in self.variable_configs.items():
            variable.check(f"data.variables.{name}")
        if self.hybrid and np.shape([self.hybrid[name] for name in ("a", "b")])[1:] < (2,):
            raise ValueError("hybrid has no layers")
        if not 0 <= self.diagnostic < max(1, len(self.channels)):
            raise ValueError("diagnostic is out of range")
        if self.frames < 1 or not 1 <= self.step_hours <= MAX_STEP_HOURS:
            raise ValueError("frames or step_hours is out of range")
        statistics = self.statistics_arrays
        outputs = (statistics.mean, statistics.std, statistics.tendency_std)
        if len({len(self.channels), len(self.units), *map(len, outputs)}) > 1:
            raise ValueError("the numbers of channels, units and statistics differ")
        if self.along_grid and len(self.along_grid) != len(self.channels):
            raise ValueError("the numbers of channels and of along_grid differ")
        if len(self.forcing) != len(statistics.forcing_mean):
            raise ValueError("the numbers of forcings and of their statistics differ")
        if len(self.static) != len(statistics.static_mean):
            raise ValueError("the numbers of static fields and of their statistics differ")
        self._check_quantiles("", names)
        self._check_quantiles("forcing_", self.forcing)
        self._check_quantiles("static_", self.static)

    def _check_quantiles(self, prefix: str, names: list[str]) -> None:
        quantiles = getattr(self.statistics_arrays, f"{prefix}quantiles")
        for index, name in enumerate(names):
            config = self.variable_configs.get(name, VariableConfig())
            if config.normalise == "quantile":
                if len(quantiles) != len(names):
                    raise ValueError("the numbers of channels and of their quantiles differ")
                QuantileMap(quantiles[index])  # raises if they are no quantiles

    def to_texts(self) -> dict[str, str]:
        """Return the metadata of a safetensors file, which is text; other values as JSON."""
        # Names and units of channels are redundant, for people and other programs.
        entries = {
            "format": FORMAT,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "units_of_outputs": dict(zip(self.outputs, self.units, strict=True)),
            **asdict(self),
        }
        for name, usual in LATER_ENTRIES.items():
            if entries[name] == usual:
                del entries[name]
        return {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in entries.items()
        }

    @classmethod
    def from_texts(cls, where: str, texts: Mapping[str, str]) -> "ModelMetadata":
        """Return the metadata from the texts of `to_texts`.

        Raises:
            UserError: an entry is missing or invalid.
        """
        try:
            entries: dict[str, Any] = {
                entry.name: (
                    texts[entry.name] if entry.type is str else json.loads(texts[entry.name])
                )
                for entry in fields(cls)
                if entry.name in texts or entry.name not in LATER_ENTRIES
            }
            return cls(**entries)
        except METADATA_ERRORS as error:
            raise UserError(f"{where}: has metadata that can't be read ({error!r}).") from error

    @classmethod
    def from_checkpoint(cls, where: str, state: Mapping[str, Any]) -> "ModelMetadata":
        """Return the metadata from a checkpoint's `state.json`.

        Raises:
            UserError: an entry is missing or invalid.
        """
        data = state["data"]
        try:
            entries = data["fields"]
            if "shape" in entries:
                projection = {name: entries[name] for name in PROJECTION_KEYS}
                entries = {name: entries[name] for name in entries if name not in PROJECTION_KEYS}
                entries |= {"latitude": [], "longitude": [], "projection": projection}
            return cls(
                kind=data["model"]["kind"],
                keys=data["model"]["keys"],
                config=state["config"],
                **entries,
                forcing=data["data.forcing"],
                static=data["data.static"],
                frames=data["model.frames"],
                residual=data["model.residual"],
                step_hours=int(data["data.step"].removesuffix("h")),
                statistics=data["statistics"],
                step=state["step"],
                seed=state["seed"],
                versions=state["versions"],
            )
        except METADATA_ERRORS as error:
            raise UserError(
                f"{where}: lacks what is needed to use it without the data ({error!r}). Resume "
                "the run for one step to write a new checkpoint."
            ) from error


KEY = "checkpoint"  # prefix of error messages
# No module or parameter has names like these.
STATIC_TENSOR = "credit_dp.static"
VALID_TENSOR = "credit_dp.valid"
PAIRS_ENTRY = "complex_pairs"  # names of complex tensors, which are saved as pairs of real numbers
METADATA_ENTRY = "its metadata"  # among the checksums; in a sentence of an error


@final
@dataclass(frozen=True)
class TrainedModel:
    """A trained model: metadata and tensors.

    Attributes:
        weights: the model's tensors by name, averaged ones if weights were averaged.
        static: static fields, `(S, H, W)`, in the store's units.
        valid: `(outputs, H, W)`, nonzero on points with values; None: everywhere.
    """

    metadata: ModelMetadata
    weights: dict[str, Tensor]
    static: Tensor
    valid: Tensor | None = None


def read_trained(path: str) -> TrainedModel:
    """Read an exported file, a checkpoint, or the newest checkpoint of a run, in one process.

    An exported file may be alone in its folder, or in a repository at `hf://OWNER/NAME`.

    Raises:
        UserError: there is no model, or it can't be read.
    """
    if path.startswith(SCHEME):
        path = str(fetch_model(path))
    existing = existing_path(path)
    if existing is not None:
        file = existing if existing.is_file() else exported_file_in(existing)
        if file is not None:
            return read_safetensors(file)
    return read_checkpoint(checkpoint_at(path))


def checkpoint_at(path: str) -> Path:
    """Return the folder of a checkpoint, given itself or the folder of its run.

    Raises:
        UserError: there is no checkpoint.
    """
    if existing_path(path) is None:
        raise UserError(
            f"{path}: does not exist. Give the folder of a run or of a checkpoint, or the file of "
            "an exported model."
        )
    return locate_checkpoint(KEY, path)


def read_checkpoint(path: Path) -> TrainedModel:
    """Read a checkpoint: the shards of all ranks as complete tensors.

    Raises:
        UserError: it can't be read, is damaged, or lacks metadata.
    """
    checkpoint = Checkpoint.open(KEY, path)
    metadata = ModelMetadata.from_checkpoint(str(path), checkpoint.metadata)
    # Only what a forecast needs: the state of the optimiser is left in the files.
    tensors = {
        name: torch.empty(shape, dtype=checkpoint.dtype(name))
        for name, shape in checkpoint.shapes.items()
        if name.startswith((MODEL_PREFIX, AVERAGE_PREFIX)) or name in (STATIC_KEY, VALID_KEY)
    }
    checkpoint.read(tensors)
    if metadata.static and STATIC_KEY not in tensors:
        raise UserError(f"{path}: has no static fields, which the model needs.")
    static = tensors.pop(STATIC_KEY, torch.empty(0, *metadata.grid))
    valid = tensors.pop(VALID_KEY, None)
    check_fields(str(path), metadata, static, valid)
    weights = {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_PREFIX)
    }
    # If weights were averaged, forecasts are made with the averages.
    weights |= {
        name.removeprefix(AVERAGE_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(AVERAGE_PREFIX)
    }
    return TrainedModel(metadata, weights, static, valid)


def read_safetensors(path: Path) -> TrainedModel:
    """Read a file of `write_safetensors`; one without checksums is taken as it is.

    Raises:
        UserError: it can't be read, is damaged, or was not exported by this program.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            texts = file.metadata() or {}
            # `safe_open` has keys(), but can't be iterated.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({error}).") from error
    if texts.get("format") != FORMAT:
        raise UserError(f"{path}: is not a model that this program exported ({FORMAT}).")
    damaged = first_damaged(texts, tensors)
    if damaged is not None:
        raise UserError(
            f"{path}: is damaged: {damaged} is not as it was written (checksum). Export the model "
            "again, or copy the file again from where it is whole."
        )
    try:
        pairs = json.loads(texts[PAIRS_ENTRY])
        tensors |= {name: torch.view_as_complex(tensors[name]) for name in pairs}
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({error}).") from error
    metadata = ModelMetadata.from_texts(str(path), texts)
    static = tensors.pop(STATIC_TENSOR, torch.empty(0, *metadata.grid))
    valid = tensors.pop(VALID_TENSOR, None)
    check_fields(str(path), metadata, static, valid)
    return TrainedModel(metadata, tensors, static, valid)


def check_fields(where: str, metadata: ModelMetadata, static: Tensor, valid: Tensor | None) -> None:
    """Check the shapes of static fields and of the mask of points with values.

    Raises:
        UserError: a shape is not that of the model's channels and grid.
    """
    expected = (len(metadata.static), *metadata.grid)
    if tuple(static.shape) != expected:
        raise UserError(
            f"{where}: has static fields of shape {tuple(static.shape)}, but its model needs "
            f"{expected}."
        )
    expected = (len(metadata.channels), *metadata.grid)
    if valid is not None and tuple(valid.shape) != expected:
        raise UserError(
            f"{where}: has a mask of valid points of shape {tuple(valid.shape)}, but its model "
            f"needs {expected}."
        )


def write_safetensors(trained: TrainedModel, path: Path) -> None:
    """Write one safetensors file atomically.

    Raises:
        UserError: the file can't be written.
    """
    tensors = {**trained.weights, STATIC_TENSOR: trained.static}
    if trained.valid is not None:
        tensors[VALID_TENSOR] = trained.valid
    pairs = [name for name, tensor in tensors.items() if tensor.is_complex()]
    tensors = {name: real_view(tensor) for name, tensor in tensors.items()}
    texts = {**trained.metadata.to_texts(), PAIRS_ENTRY: json.dumps(pairs)}
    content = save(tensors, {**texts, CHECKSUMS_KEY: json.dumps(file_checksums(texts, tensors))})
    write_bytes(path, content)


def file_checksums(
    texts: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, int | list[int]]:
    """Return checksums of the metadata and, by name, of the tensors of an exported file."""
    described = [(name, str(tensor.dtype), *tensor.shape) for name, tensor in tensors.items()]
    content = json.dumps([sorted(texts.items()), sorted(described)]).encode()
    return {METADATA_ENTRY: zlib.crc32(content), **{n: checksums(t) for n, t in tensors.items()}}


def first_damaged(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first entry of an exported file that is not as it was written."""
    if CHECKSUMS_KEY not in texts:
        return None
    found = file_checksums({k: v for k, v in texts.items() if k != CHECKSUMS_KEY}, tensors)
    try:
        written = json.loads(texts[CHECKSUMS_KEY])
        return next((name for name in found | written if found.get(name) != written[name]), None)
    except METADATA_ERRORS:
        return METADATA_ENTRY


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: an existing file is replaced only by a complete one.

    Raises:
        UserError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, content, durable=True)
    except OSError as error:
        raise UserError(
            f"{path}: could not be written ({error.strerror or error}). "
            "Free space there or change --output."
        ) from error


def card_path(path: Path) -> Path:
    """Return the path of a file's card, next to it."""
    stem = path.stem if path.suffix == ".safetensors" else path.name
    return path.with_name(f"{stem}.md")


def build_card(trained: TrainedModel, path: Path, run: Path) -> str:
    """Return the card of a model that is exported to `path`, with the scores of its run.

    Raises:
        UserError: the run's config or its scores are damaged.
    """
    metadata = trained.metadata
    try:
        content = yaml.safe_load(checks.plain_yaml(metadata.config))
        config = content if isinstance(content, dict) else {}
        scores = read_scores(metadata, run / "metrics.json")
        parts = [
            f"{card_metadata(path.stem, scores)}\n\n# {path.stem}",
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
    except (*SCORE_ERRORS, yaml.YAMLError) as error:
        raise UserError(
            f"{run}: the config in its checkpoint, or metrics.json, can't be read "
            f"({type(error).__name__}: {one_line_message(error)}). Remove metrics.json if it is "
            "damaged."
        ) from error
    return "\n\n".join(parts) + "\n"


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
    extent = "global" if metadata.grid.is_global else "regional"
    predicts = "the change over one step" if metadata.residual else "the next state"
    several = metadata.frames > 1
    frames = f", from states at {metadata.frames} times a step apart" if several else ""
    return (
        f"A {extent} weather model (`{name}`, {size:,} weights) that forecasts the state of the "
        f"atmosphere on a grid of {rows} x {columns} points {metadata.step_hours} hours ahead"
        f"{frames}. The network predicts {predicts}; inputs and outputs are in the "
        f"units below. Trained with credit_dp {metadata.versions.get('credit_dp', '')}."
    )


def usage_text(metadata: ModelMetadata, path: Path) -> str:
    """Return an example of how to load and call the model."""
    rows, columns = metadata.grid
    shape = f"1, {metadata.frames * metadata.states}, {rows}, {columns}"
    what = "(time, channel, latitude, longitude)"
    names = metadata.external_forcing
    forcing = f", torch.zeros(1, {len(names)}, {rows}, {columns})" if names else ""
    if metadata.boundary:
        forcing += f", boundary=torch.zeros(1, {metadata.states}, {rows}, {columns})"
    imports, times = "import numpy as np", 'np.array(["2001-01-01T00"], dtype="datetime64[h]")'
    if not Calendar(metadata.calendar).is_standard:
        imports = "import cftime"
        times = f'[cftime.datetime(2001, 1, 1, calendar="{metadata.calendar}")]'
    block = USAGE_TEMPLATE.format(
        path=path.name,
        imports=imports,
        times=times,
        shape=shape,
        what=what,
        forcing=forcing,
        step=metadata.step_hours,
    )
    forcing_note = f" The last argument is {', '.join(names)} at that time." if names else ""
    order_note = " The oldest state comes first." if metadata.frames > 1 else ""
    if metadata.kind not in MODELS:
        block = (
            f"The file has no code. Its model `{metadata.kind}` comes from a plug-in: before you "
            f"start Python, set {PLUGINS_VARIABLE} to the Python file that defines it, or install "
            f"the package that has it.\n\n{block}"
        )
    if metadata.boundary:
        order_note += (
            f" The states of `boundary`, one step later, give the {metadata.boundary} rows and "
            "columns at each edge, which the model does not predict."
        )
    (north, south), (west, east) = metadata.grid.extent
    place = (
        f"Rows go from {north:g} to {south:g} degrees north, columns from {west:g} to {east:g} "
        "degrees east."
    )
    if metadata.projection:
        place = "`model.latitude` and `model.longitude` have the degrees of each point."
    winds = [x for x, along in zip(metadata.outputs, metadata.along_grid, strict=False) if along]
    if winds:
        place += f" Winds are along its rows and columns: {', '.join(winds)}."
    return f"{block}\n{place} Times are UTC.{order_note}{forcing_note}"


def channels_table(metadata: ModelMetadata) -> str:
    """Return a table of the channels in order, with units and statistics, and other inputs."""
    lines = ["| | channel | unit | mean | standard deviation |", "|---|---|---|---|---|"]
    statistics = metadata.statistics_arrays
    for index, name in enumerate(metadata.outputs):
        unit = metadata.units[index] or "-"
        channel = name if index < metadata.states else f"{name} (output only)"
        mean, std = statistics.mean[index], statistics.std[index]
        lines.append(f"| {index} | {channel} | {unit} | {mean:.5g} | {std:.5g} |")
    others = {
        "computed from the time": [
            name for name in metadata.forcing if name not in metadata.external_forcing
        ],
        "given by the caller": metadata.external_forcing,
        "in the file": metadata.static,
    }
    listed = [f"{kind}: {', '.join(names)}" for kind, names in others.items() if names]
    further = f"\n\nFurther inputs - {'; '.join(listed)}." if listed else ""
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
        f"Root-mean-square errors on held-out dates "
        f"({counted(scores['initial_times'], 'initial time')}), in each channel's unit.",
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
