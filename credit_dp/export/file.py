"""A trained model as one file: its tensors, and everything needed to use them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, final, get_origin

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from credit_dp.checks import existing_path
from credit_dp.config import VariableConfig
from credit_dp.data.channels import Channel
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.statistics import Statistics
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import locate_checkpoint, read_metadata
from credit_dp.training.run_folder import remove_if_possible, temporary_file
from credit_dp.training.shards import check_shards, read_shards, read_tensor_metadata
from credit_dp.training.state import AVERAGE_PREFIX, MODEL_PREFIX, STATIC_KEY, VALID_KEY

FORMAT = "credit_dp model 1"
OPTIONAL_FIELDS = ("diagnostic", "variables")  # not in all files of this format
MAX_STEP_HOURS = 10**6  # hours: a step that any clock can add
# What text or numbers that are not what they should be end in.
METADATA_ERRORS = (AttributeError, KeyError, TypeError, ValueError, RecursionError, UserError)


@final
@dataclass(frozen=True)
class ModelMetadata:
    """Which model it is, and what its channels mean.

    Attributes:
        kind, keys: of the model's config.
        config: of the run, as YAML.
        channels: (variable, level or None) of all that comes out, in order: states first.
        units: of these, as far as they are known.
        forcing, static: further inputs, in order.
        latitude, longitude: of rows and columns, in degrees.
        statistics: by the names of `Statistics`, in the store's units.
        step, seed: of the training: how many steps, and what it was drawn from.
        versions: what it was trained with.
        diagnostic: how many of the channels, the last ones, never go in.
        variables: what is done to the values of each variable, where that is not the default, by
            the names of `VariableConfig`.
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
    statistics: dict[str, list[float]]
    step: int
    seed: int
    versions: dict[str, str]
    diagnostic: int = 0
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def states(self) -> int:
        """How many channels a state has: those that come out and go in again."""
        return len(self.channels) - self.diagnostic

    @property
    def outputs(self) -> list[str]:
        """What comes out, `geopotential_500` or `2m_temperature`."""
        return [Channel(variable, level).name for variable, level in self.channels]

    @property
    def inputs(self) -> list[str]:
        """What goes into the network: states, the oldest first, then forcing and static fields."""
        ages = [self.step_hours * back for back in reversed(range(self.frames))]
        names = self.outputs[: self.states]
        states = [name if age == 0 else f"{name} -{age}h" for age in ages for name in names]
        return [*states, *self.forcing, *self.static]

    @property
    def external_forcing(self) -> list[str]:
        """The forcings that can't be computed from the time."""
        return [name for name in self.forcing if name not in COMPUTED_FORCINGS]

    @property
    def variable_configs(self) -> dict[str, VariableConfig]:
        """What is done to the values of the variables that are not as by default."""
        return {name: VariableConfig(**keys) for name, keys in self.variables.items()}

    @property
    def statistics_arrays(self) -> Statistics:
        """The statistics as arrays."""
        arrays = {name: np.array(values, float) for name, values in self.statistics.items()}
        return Statistics(**arrays)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.latitude), len(self.longitude)

    def __post_init__(self) -> None:
        for each in fields(self):
            kind = get_origin(each.type) or each.type
            if isinstance(kind, type) and type(getattr(self, each.name)) is not kind:
                raise TypeError(f"{each.name} is no {kind.__name__}")
        names = [variable for variable, _ in self.channels]
        if not all(type(t) is str for t in (*names, *self.units, *self.forcing, *self.static)):
            raise TypeError("a name or a unit is no text")
        if not np.isfinite(np.array([*self.latitude, *self.longitude], float)).all():
            raise ValueError("a latitude or longitude is no number")
        for name, variable in self.variable_configs.items():
            variable.check(f"data.variables.{name}")
        if not 0 <= self.diagnostic < max(1, len(self.channels)):
            raise ValueError("diagnostic is out of range")
        if self.frames < 1 or not 1 <= self.step_hours <= MAX_STEP_HOURS:
            raise ValueError("frames or step_hours is out of range")
        lengths = {len(self.channels), len(self.units), *map(len, self._of_channels())}
        if len(lengths) > 1:
            raise ValueError("channels, units and statistics are not equally many")
        if len(self.forcing) != len(self.statistics_arrays.forcing_mean):
            raise ValueError("forcing and its statistics are not equally many")
        if len(self.static) != len(self.statistics_arrays.static_mean):
            raise ValueError("static fields and their statistics are not equally many")

    def _of_channels(self) -> list[NDArray[np.float64]]:
        moments = self.statistics_arrays
        return [moments.mean, moments.std, moments.tendency_std]

    def to_texts(self) -> dict[str, str]:
        """All of it as the text that a safetensors file may carry; JSON where it is no text."""
        known = {
            "format": FORMAT,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "units_of_outputs": dict(zip(self.outputs, self.units, strict=True)),
            **asdict(self),
        }
        return {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in known.items()
        }

    @classmethod
    def from_texts(cls, where: str, texts: Mapping[str, str]) -> "ModelMetadata":
        """Read what `texts` made.

        Raises:
            UserError: it is not there, or is not what it should be.
        """
        if texts.get("format") != FORMAT:
            raise UserError(f"{where}: is not a model that this program exported ({FORMAT}).")
        try:
            read: dict[str, Any] = {
                each.name: texts[each.name] if each.type is str else json.loads(texts[each.name])
                for each in fields(cls)
                if each.name in texts or each.name not in OPTIONAL_FIELDS
            }
            return cls(**read)
        except METADATA_ERRORS as error:
            raise UserError(f"{where}: has metadata that can't be read ({error!r}).") from error

    @classmethod
    def from_checkpoint(cls, where: str, numbers: Mapping[str, Any]) -> "ModelMetadata":
        """What a checkpoint's `state.json` says.

        Raises:
            UserError: it does not say all of it.
        """
        data = numbers["data"]
        try:
            return cls(
                kind=data["model"]["kind"],
                keys=data["model"]["keys"],
                config=numbers["config"],
                **data["fields"],
                forcing=data["data.forcing"],
                static=data["data.static"],
                frames=data["model.frames"],
                residual=data["model.residual"],
                step_hours=int(data["data.step"].removesuffix("h")),
                statistics=data["statistics"],
                step=numbers["step"],
                seed=numbers["seed"],
                versions=numbers["versions"],
            )
        except METADATA_ERRORS as error:
            raise UserError(
                f"{where}: does not say what its use without the data needs ({error!r}). "
                "Go on with it for a step, with resume, to have it written anew."
            ) from error


KEY = "checkpoint"  # what lines about one begin with
# No module or parameter has names like these.
STATIC_TENSOR = "credit_dp.static"
VALID_TENSOR = "credit_dp.valid"


@final
@dataclass(frozen=True)
class TrainedModel:
    """A trained model.

    Shapes:
        static `(S, H, W)`, in the store's units; valid `(channels out, H, W)`, not zero where there
        are values, or None: everywhere.
    """

    metadata: ModelMetadata
    weights: dict[str, Tensor]
    static: Tensor
    valid: Tensor | None = None


def read_trained(path: str) -> TrainedModel:
    """Read an exported file, a checkpoint, or the newest checkpoint of a run; needs no ranks.

    Raises:
        UserError: there is none, or it can't be read.
    """
    place = existing_path(path)
    if place is not None and place.is_file():
        return read_safetensors(place)
    return read_checkpoint(checkpoint_at(path))


def checkpoint_at(path: str) -> Path:
    """The checkpoint in a folder, in that of a run, or of this path.

    Raises:
        UserError: there is none.
    """
    if existing_path(path) is None:
        raise UserError(
            f"{path}: does not exist. Give the folder of a run or of a checkpoint, or the file of "
            "an exported model."
        )
    return locate_checkpoint(KEY, path)


def read_checkpoint(path: Path) -> TrainedModel:
    """Read what all ranks of a run have written.

    Raises:
        UserError: it can't be read, or says too little.
    """
    numbers = read_metadata(KEY, path)
    contents = ModelMetadata.from_checkpoint(str(path), numbers)
    shapes = {name: tuple(shape) for name, shape in numbers["tensors"].items()}
    check_shards(KEY, path, shapes)
    held = read_tensor_metadata(KEY, path)
    room = {
        name: torch.empty(shape, dtype=held[name].properties.dtype)
        for name, shape in shapes.items()
        if name.startswith((MODEL_PREFIX, AVERAGE_PREFIX)) or name in (STATIC_KEY, VALID_KEY)
    }
    read_shards(KEY, path, room, together=False)
    if contents.static and STATIC_KEY not in room:
        raise UserError(f"{path}: has no static fields, which the model needs.")
    static = room.pop(STATIC_KEY, torch.empty(0, *contents.grid))
    valid = room.pop(VALID_KEY, None)
    check_fields(str(path), contents, static, valid)
    weights = {
        n.removeprefix(MODEL_PREFIX): x for n, x in room.items() if n.startswith(MODEL_PREFIX)
    }
    # Where weights were averaged, the averages are what forecasts are made with.
    weights |= {
        n.removeprefix(AVERAGE_PREFIX): x for n, x in room.items() if n.startswith(AVERAGE_PREFIX)
    }
    return TrainedModel(contents, weights, static, valid)


def read_safetensors(path: Path) -> TrainedModel:
    """Read what `write_safetensors` wrote.

    Raises:
        UserError: it can't be read, or is of something else.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            texts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({error}).") from error
    contents = ModelMetadata.from_texts(str(path), texts)
    static = tensors.pop(STATIC_TENSOR, torch.empty(0, *contents.grid))
    valid = tensors.pop(VALID_TENSOR, None)
    check_fields(str(path), contents, static, valid)
    return TrainedModel(contents, tensors, static, valid)


def check_fields(where: str, contents: ModelMetadata, static: Tensor, valid: Tensor | None) -> None:
    """Refuse static fields that are not those which the model needs, or points of another grid."""
    wanted = (len(contents.static), *contents.grid)
    if tuple(static.shape) != wanted:
        raise UserError(
            f"{where}: has static fields of shape {tuple(static.shape)}, but its model needs "
            f"{wanted}."
        )
    wanted = (len(contents.channels), *contents.grid)
    if valid is not None and tuple(valid.shape) != wanted:
        raise UserError(
            f"{where}: says where there are values in the shape {tuple(valid.shape)}, but its "
            f"model needs {wanted}."
        )


def write_safetensors(trained: TrainedModel, path: Path) -> None:
    """Write one plain safetensors file, whole or not at all.

    Raises:
        UserError: it could not be written.
    """
    tensors = {**trained.weights, STATIC_TENSOR: trained.static}
    if trained.valid is not None:
        tensors[VALID_TENSOR] = trained.valid
    content = save(tensors, trained.metadata.to_texts())
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole, or leave what is there.

    Raises:
        UserError: it could not be written.
    """
    temporary = temporary_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        remove_if_possible(temporary)
        raise UserError(
            f"{path}: could not be written ({error.strerror or error}). "
            "Free space there or change --output."
        ) from error
