"""What has to be known of a trained model to use it: everything in its file but the tensors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, final, get_origin

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.forcings import COMPUTED
from credit_dp.data.schema import Channel
from credit_dp.data.statistics import Statistics
from credit_dp.errors import UserError

FORMAT = "credit_dp model 1"
LONGEST = 10**6  # hours: a step that any clock can add


@final
@dataclass(frozen=True)
class Contents:
    """Which model it is, and what its channels mean.

    Attributes:
        kind, keys: of the model's config.
        config: of the run, as YAML.
        channels: (variable, level or None) of all that comes out, in order.
        units: of these, as far as they are known.
        forcing, static: further inputs, in order.
        latitude, longitude: of rows and columns, in degrees.
        statistics: by the names of `Statistics`, in the store's units.
        step, seed: of the training: how many steps, and what it was drawn from.
        versions: what it was trained with.
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

    @property
    def outputs(self) -> list[str]:
        """What comes out, `geopotential_500` or `2m_temperature`."""
        return [Channel(variable, level).name for variable, level in self.channels]

    @property
    def inputs(self) -> list[str]:
        """What goes into the network: states, the oldest first, then forcing and static fields."""
        ages = [self.step_hours * back for back in reversed(range(self.frames))]
        states = [name if age == 0 else f"{name} -{age}h" for age in ages for name in self.outputs]
        return [*states, *self.forcing, *self.static]

    @property
    def given_forcing(self) -> list[str]:
        """The forcings that can't be computed from the time."""
        return [name for name in self.forcing if name not in COMPUTED]

    @property
    def moments(self) -> Statistics:
        """The statistics as arrays."""
        arrays = {name: np.array(values, float) for name, values in self.statistics.items()}
        return Statistics(**arrays)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.latitude), len(self.longitude)

    def __post_init__(self) -> None:
        for field in fields(self):
            kind = get_origin(field.type) or field.type
            if isinstance(kind, type) and type(getattr(self, field.name)) is not kind:
                raise TypeError(f"{field.name} is no {kind.__name__}")
        names = [variable for variable, _ in self.channels]
        if not all(type(t) is str for t in (*names, *self.units, *self.forcing, *self.static)):
            raise TypeError("a name or a unit is no text")
        if not np.isfinite(np.array([*self.latitude, *self.longitude], float)).all():
            raise ValueError("a latitude or longitude is no number")
        if self.frames < 1 or not 1 <= self.step_hours <= LONGEST:
            raise ValueError("frames or step_hours is out of range")
        lengths = {len(self.channels), len(self.units), *map(len, self._of_channels())}
        if len(lengths) > 1:
            raise ValueError("channels, units and statistics are not equally many")
        if len(self.forcing) != len(self.moments.forcing_mean):
            raise ValueError("forcing and its statistics are not equally many")
        if len(self.static) != len(self.moments.static_mean):
            raise ValueError("static fields and their statistics are not equally many")

    def _of_channels(self) -> list[NDArray[np.float64]]:
        moments = self.moments
        return [moments.mean, moments.std, moments.tendency_std]

    def texts(self) -> dict[str, str]:
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
    def of_texts(cls, where: str, texts: Mapping[str, str]) -> "Contents":
        """Read what `texts` made.

        Raises:
            UserError: it is not there, or is not what it should be.
        """
        if texts.get("format") != FORMAT:
            raise UserError(f"{where}: is not a model that this program exported ({FORMAT}).")
        try:
            read: dict[str, Any] = {
                field.name: texts[field.name]
                if field.type is str
                else json.loads(texts[field.name])
                for field in fields(cls)
            }
            return cls(**read)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{where}: has metadata that can't be read ({error!r}).") from error

    @classmethod
    def of_checkpoint(cls, where: str, numbers: Mapping[str, Any]) -> "Contents":
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
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where}: does not say what its use without the data needs ({error!r}). "
                "Go on with it for a step, with resume, to have it written anew."
            ) from error
