"""A trained model on one device: from physical fields to physical fields, one step later."""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from credit_dp.config import ModelConfig
from credit_dp.data.forcings import COMPUTED
from credit_dp.data.schema import Channel, Channels
from credit_dp.errors import UserError
from credit_dp.export.trained import Trained
from credit_dp.forecast.step import ForecastStep
from credit_dp.models import build_model
from credit_dp.training.checkpoint import check_fit
from credit_dp.training.state import MODEL, model_tensors

Times = Sequence[np.datetime64] | np.ndarray


@final
class Forecaster(nn.Module):
    """Takes the weather at one time, or at several that are a step apart, one step on.

    Shapes:
        fields `(B, frames * C, H, W)`, the oldest state first; times `(B,)`, in UTC, of the newest
        state; forcing `(B, len(self.forcing), H, W)`, if there is any -> `(B, C, H, W)`.

    Units:
        of the data that it was trained on, see `units`; rows from north to south.

    Attributes:
        variables: the C channels, in order.
        units: of each.
        latitude, longitude: `(H,)` and `(W,)`, in degrees.
        step: from one state to the next.
        frames: states that go in.
        forcing: inputs besides, at the time of the newest state; those that follow from the time
            alone are computed.
        config: of the run that trained it, as YAML.
    """

    mean: Tensor
    std: Tensor
    tendency_scale: Tensor
    forcing_mean: Tensor
    forcing_std: Tensor
    static: Tensor

    def __init__(self, model: nn.Module, trained: Trained) -> None:
        super().__init__()
        contents = trained.contents
        self.model = model
        self.variables = tuple(contents.outputs)
        self.units = tuple(contents.units)
        self.latitude = np.array(contents.latitude)
        self.longitude = np.array(contents.longitude)
        self.step = np.timedelta64(contents.step_hours, "h")
        self.frames = contents.frames
        self.forcing = tuple(contents.given_forcing)
        self.config = contents.config
        self.contents = contents
        self._keep(trained)

    def _keep(self, trained: Trained) -> None:
        """Hold what normalises, in the model's type, where it moves with the model."""
        moments = trained.contents.moments
        dtype = _dtype(trained)
        columns = {
            "mean": moments.mean,
            "std": moments.std,
            "tendency_scale": moments.tendency_std / moments.std,
            "forcing_mean": moments.forcing_mean,
            "forcing_std": moments.forcing_std,
        }
        for name, values in columns.items():
            column = torch.from_numpy(values).to(dtype)[:, None, None]
            self.register_buffer(name, column, persistent=False)
        mean, std = (
            torch.from_numpy(values).to(dtype)[:, None, None]
            for values in (moments.static_mean, moments.static_std)
        )
        static = (trained.static.to(dtype) - mean) / std
        self.register_buffer("static", static, persistent=False)

    def forward(self, fields: Tensor, times: Times, forcing: Tensor | None = None) -> Tensor:
        """The fields one `step` after `times`.

        Raises:
            UserError: a shape is not as needed.
        """
        moments = np.atleast_1d(np.asarray(times, dtype="datetime64[ns]"))
        given = self._checked(fields, moments, forcing)
        rows, columns = self.contents.grid
        shape = (len(moments), self.frames, len(self.variables), rows, columns)
        states = fields.to(self.mean).reshape(shape)
        now = ((states - self.mean) / self.std).flatten(1, 2)
        step = ForecastStep(self.model, self.tendency_scale, self.contents.residual)
        static = self.static.expand(len(now), -1, -1, -1)
        later = step(now, self._forcing(moments, given), static)
        return later * self.std + self.mean

    def _forcing(self, times: np.ndarray, given: Tensor) -> Tensor:
        """Normalised forcings, in the model's order."""
        rows, columns = self.contents.grid
        found = []
        for name in self.contents.forcing:
            if name in COMPUTED:
                # As the store gives them: rounded to single precision.
                values = torch.from_numpy(COMPUTED[name](times).astype(np.float32))
                field = values.to(self.mean)[:, None, None].expand(-1, rows, columns)
            else:
                field = given[:, self.forcing.index(name)].to(self.mean)
            found.append(field)
        if not found:
            return self.mean.new_empty(len(times), 0, rows, columns)
        return (torch.stack(found, dim=1) - self.forcing_mean) / self.forcing_std

    def _checked(self, fields: Tensor, times: np.ndarray, forcing: Tensor | None) -> Tensor:
        """The forcing, empty if there is none; refuse what does not fit."""
        rows, columns = self.contents.grid
        given = fields.new_empty(len(times), 0, rows, columns) if forcing is None else forcing
        wanted = (len(times), self.frames * len(self.variables), rows, columns)
        if tuple(fields.shape) != wanted:
            raise UserError(
                f"fields: need the shape {wanted} for {len(times)} times, got "
                f"{tuple(fields.shape)}."
            )
        wanted = (len(times), len(self.forcing), rows, columns)
        if tuple(given.shape) != wanted:
            raise UserError(
                f"forcing: needs {', '.join(self.forcing) or 'nothing'} in the shape {wanted}, got "
                f"{tuple(given.shape)}."
            )
        return given


def build_forecaster(where: str, trained: Trained, config: ModelConfig) -> Forecaster:
    """Build the model of `config` and give it the weights.

    Raises:
        UserError: the weights are not those of this model.
    """
    contents = trained.contents
    channels = Channels(
        tuple(Channel(variable, level) for variable, level in contents.channels),
        tuple(contents.forcing),
        tuple(contents.static),
    )
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, channels.fields(contents.frames), contents.grid)
    model.to(_dtype(trained))
    room = {name.removeprefix(MODEL): held for name, held in model_tensors((model,)).items()}
    check_fit(
        f"{where}:",
        {name: tuple(tensor.shape) for name, tensor in trained.weights.items()},
        {name: tuple(tensor.shape) for name, tensor in room.items()},
        advice="The code of the model has changed since it was trained.",
    )
    for name, tensor in room.items():
        tensor.copy_(trained.weights[name])
    return Forecaster(model, trained).eval()


def _dtype(trained: Trained) -> torch.dtype:
    """What the model computes in."""
    floats = (x.dtype for x in trained.weights.values() if x.is_floating_point())
    return next(floats, torch.float32)
