"""A trained model on one device: from physical fields to physical fields, one step later."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from credit_dp.config import ModelConfig, VariableConfig
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.scaling import ChannelScaler, ChannelStatistics
from credit_dp.data.statistics import Statistics, apply_transform_tensor
from credit_dp.errors import UserError
from credit_dp.export.file import TrainedModel
from credit_dp.models import build_model
from credit_dp.training.checkpoint import check_model_shapes
from credit_dp.training.forecast_step import ForecastStep
from credit_dp.training.state import MODEL_PREFIX, model_tensors

UNNORMALISED = VariableConfig(normalise="none")


@final
class ChannelNormaliser:
    """Normalises some channels and undoes it, as for training; gradients go through both.

    Args:
        names: the variable of each channel.
        variables: what is done to each variable, where that is not the default.
        statistics: of the training.
        prefix: of the statistics of these channels: none for what comes out, `forcing_` or
            `static_`.
    """

    def __init__(
        self,
        names: Sequence[str],
        variables: Mapping[str, VariableConfig],
        statistics: Statistics,
        prefix: str = "",
    ) -> None:
        computed = dict.fromkeys([*COMPUTED_FORCINGS, *COMPUTED_STATICS], UNNORMALISED)
        self._names = names
        self._variables = {**variables, **computed}
        self._extent = ChannelStatistics.of(statistics, prefix)
        self._scales: dict[tuple[torch.dtype, torch.device], ChannelScaler] = {}

    def scales(self, like: Tensor) -> ChannelScaler:
        """Shift, scale and fill of each channel, with the dtype and on the device of `like`."""
        key = (like.dtype, like.device)
        if key not in self._scales:
            self._scales[key] = ChannelScaler(self._names, self._variables, self._extent, *key)
        return self._scales[key]

    def normalise(self, values: Tensor, like: Tensor, valid: Tensor | None = None) -> Tensor:
        """The first channels in the data's units -> normalised, as `like`.

        What is NaN, or not valid, becomes the variable's fill, if it has one.

        Shapes:
            values `(..., c, H, W)`, valid `(C, H, W)` -> `(..., c, H, W)`.
        """
        scales, values = self.scales(like), values.to(like)
        count = values.shape[-3]
        configs = [self._variables.get(name) or VariableConfig() for name in self._names[:count]]
        if any(config.log1p_scale > 0 for config in configs):
            parts = zip(values.unbind(-3), configs, strict=True)
            values = torch.stack([apply_transform_tensor(*part) for part in parts], dim=-3)
        values = (values - scales.shift[:count]) / scales.scale[:count]
        filled = torch.tensor([config.fill is not None for config in configs]).to(values.device)
        if not filled.any():
            return values
        there = ~values.isnan()
        if valid is not None:
            there = there & valid[:count].to(values.device)
        return torch.where(there | ~filled[:, None, None], values, scales.fills[:count])

    def denormalise(self, values: Tensor, valid: Tensor | None = None) -> Tensor:
        """The first channels, normalised -> in the data's units, NaN where not valid."""
        return self.scales(values).denormalise(values, valid)


Times = Sequence[np.datetime64] | np.ndarray


@final
class Forecaster(nn.Module):
    """Takes the weather at one time, or at several that are a step apart, one step on.

    Shapes:
        fields `(B, frames * states, H, W)`, the oldest state first; times `(B,)`, in UTC, of the
        newest state; forcing `(B, len(self.forcing), H, W)`, if there is any ->
        `(B, len(self.variables), H, W)`.

    Units:
        of the data that it was trained on, see `units`; rows from north to south. What has no
        values on some points, such as a sea surface temperature, is NaN there, in and out.

    Attributes:
        variables: the channels that come out, in order.
        states: how many of them, the first ones, are a state that goes in again.
        units: of each.
        latitude, longitude: `(H,)` and `(W,)`, in degrees.
        step: from one state to the next.
        frames: states that go in.
        forcing: inputs besides, at the time of the newest state; those that follow from the time
            alone are computed.
        config: of the run that trained it, as YAML.
    """

    tendency_scale: Tensor
    static: Tensor
    valid: Tensor | None

    def __init__(self, model: nn.Module, trained: TrainedModel) -> None:
        super().__init__()
        contents = trained.metadata
        self.model = model
        self.variables = tuple(contents.outputs)
        self.states = contents.states
        self.units = tuple(contents.units)
        self.latitude = np.array(contents.latitude)
        self.longitude = np.array(contents.longitude)
        self.step = np.timedelta64(contents.step_hours, "h")
        self.frames = contents.frames
        self.forcing = tuple(contents.external_forcing)
        self.config = contents.config
        self.metadata = contents
        self._register_normalisation(trained)

    def _register_normalisation(self, trained: TrainedModel) -> None:
        """Hold what normalises, in the model's type, where it moves with the model."""
        contents, like = trained.metadata, torch.zeros((), dtype=_compute_dtype(trained))
        moments, treated = contents.statistics_arrays, contents.variable_configs
        out = [variable for variable, _ in contents.channels]
        self._output_normaliser = ChannelNormaliser(out, treated, moments)
        self._forcing_normaliser = ChannelNormaliser(contents.forcing, treated, moments, "forcing_")
        scale = self._output_normaliser.scales(like).divide_by_scale(moments.tendency_std)[
            : contents.states
        ]
        self.register_buffer("tendency_scale", scale, persistent=False)
        units = ChannelNormaliser(contents.static, treated, moments, "static_")
        self.register_buffer("static", units.normalise(trained.static, like), persistent=False)
        valid = None if trained.valid is None else trained.valid.bool()
        self.register_buffer("valid", valid, persistent=False)

    @property
    def mean(self) -> Tensor:
        """The state to start from where there is none: of each channel its mean, in its unit.

        That of the training dates at points with values, of `log1p` where that is taken.

        Shapes:
            `(states, 1, 1)`.
        """
        scales = self._output_normaliser.scales(self.tendency_scale)
        return scales.denormalise(scales.means[: self.states], None)

    def rollout(
        self,
        fields: Tensor,
        times: Times,
        steps: int,
        forcing: Callable[[np.ndarray], Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the fields after each of some steps, each made from those before.

        All `variables` are yielded, of which only the states go in again; of several frames, the
        oldest is dropped.

        Args:
            fields, times: see the class.
            steps: how many.
            forcing: returns `self.forcing` at times `(B,)`, if there is any.

        Raises:
            UserError: as in `forward`.
        """
        moments = _to_datetime64(times)
        for _ in range(steps):
            later = self(fields, moments, None if forcing is None else forcing(moments))
            yield later
            fields = torch.cat([fields, later[:, : self.states]], dim=1)[:, self.states :]
            moments = moments + self.step

    def forward(self, fields: Tensor, times: Times, forcing: Tensor | None = None) -> Tensor:
        """The fields one `step` after `times`; for several steps see `rollout`.

        Raises:
            UserError: a shape or a type is not as needed.
        """
        moments = _to_datetime64(times)
        given = self._checked_forcing(fields, moments, forcing)
        shape = (len(moments), self.frames, self.states, *self.metadata.grid)
        now = self._output_normaliser.normalise(
            fields.reshape(shape), self.static, self.valid
        ).flatten(1, 2)
        step = ForecastStep(self.model, self.tendency_scale, self.metadata.residual)
        static = self.static.expand(len(now), -1, -1, -1)
        later = step(now, self._normalised_forcing(moments, given), static)
        return self._output_normaliser.denormalise(later, self.valid)

    def _normalised_forcing(self, times: np.ndarray, given: Tensor) -> Tensor:
        """Normalised forcings, in the model's order."""
        found = []
        for name in self.metadata.forcing:
            if name in COMPUTED_FORCINGS:
                # As the store gives them: rounded to single precision.
                values = COMPUTED_FORCINGS[name](times, self.latitude, self.longitude).astype(
                    np.float32
                )
                field = torch.from_numpy(values).to(self.static)
            else:
                field = given[:, self.forcing.index(name)].to(self.static)
            found.append(field)
        if not found:
            return self.static.new_empty(len(times), 0, *self.metadata.grid)
        return self._forcing_normaliser.normalise(torch.stack(found, dim=1), self.static)

    def _checked_forcing(self, fields: Tensor, times: np.ndarray, forcing: Tensor | None) -> Tensor:
        """The forcing, empty if there is none; refuse what does not fit."""
        states, out, grid = self.frames * self.states, len(self.variables), self.metadata.grid
        each = "the states" if self.frames == 1 else f"{self.frames} x {self.states} states"
        hint = ""
        if states != _channel_count(fields) in (out, states - self.states + out):
            hint = (
                f" The last {out - self.states} of what comes out do not go in again: leave them "
                "out, with fields[:, : model.states], or use model.rollout."
            )
        wanted = (len(times), states, *grid)
        _check_tensor("fields", fields, wanted, f"{states} channels ({each})", hint)
        count = len(self.forcing)
        if forcing is None and count:
            raise UserError(
                f"forcing: this model needs {', '.join(self.forcing)} as the third argument, got "
                "none."
            )
        given = fields.new_empty(len(times), 0, *grid) if forcing is None else forcing
        names = f" ({', '.join(self.forcing)})" if count else ""
        what = f"{count} channel{'s' if count != 1 else ''}{names}"
        _check_tensor("forcing", given, (len(times), count, *grid), what)
        return given


def _to_datetime64(times: Times) -> np.ndarray:
    """`(B,)` datetime64[ns].

    Raises:
        UserError: they are no dates.
    """
    try:
        given = np.atleast_1d(np.asarray(times))
        dates = given.astype("datetime64[ns]")
    except (TypeError, ValueError):
        dates = np.array(["NaT"], dtype="datetime64[ns]")
    if dates.ndim != 1 or np.isnat(dates).any() or given.dtype.kind not in "MOSU":
        raise UserError(f"times: need a date for each sample, like np.datetime64, got {times!r}.")
    return dates


def _channel_count(fields: object) -> int | None:
    """How many channels a tensor has, if it is one of fields."""
    return fields.shape[1] if isinstance(fields, Tensor) and fields.ndim == 4 else None


def _check_tensor(
    name: str, tensor: object, wanted: tuple[int, int, int, int], channels: str, hint: str = ""
) -> None:
    """Refuse another shape, whole numbers, or what is no tensor, in words.

    Args:
        wanted: samples, channels, rows and columns.
        channels: how many, and what they are.
        hint: what to do, after the message.

    Raises:
        UserError: with what is needed and what came.
    """
    count, _, rows, columns = wanted
    needs = f"{count} sample{'s' if count != 1 else ''} (one for each time) x {channels}"
    if not isinstance(tensor, Tensor):
        got = f"{type(tensor).__name__}, which is no tensor"
    elif not tensor.is_floating_point():
        got = f"{tensor.dtype}; needs floating-point numbers"
    elif tuple(tensor.shape) != wanted:
        got = " x ".join(map(str, tensor.shape)) or "a single number"
    else:
        return
    raise UserError(f"{name}: needs {needs} x {rows} rows x {columns} columns, got {got}.{hint}")


def build_forecaster(where: str, trained: TrainedModel, config: ModelConfig) -> Forecaster:
    """Build the model of `config` and give it the weights.

    Raises:
        UserError: the weights are not those of this model.
    """
    contents = trained.metadata
    out = tuple(Channel(variable, level) for variable, level in contents.channels)
    channels = Channels(
        prognostic=out[: contents.states],
        forcing=tuple(contents.forcing),
        static=tuple(contents.static),
        diagnostic=out[contents.states :],
    )
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, channels.fields(contents.frames), contents.grid)
    model.to(_compute_dtype(trained))
    room = {name.removeprefix(MODEL_PREFIX): held for name, held in model_tensors((model,)).items()}
    check_model_shapes(
        f"{where}:",
        {name: tuple(tensor.shape) for name, tensor in trained.weights.items()},
        {name: tuple(tensor.shape) for name, tensor in room.items()},
        advice="The code of the model has changed since it was trained.",
    )
    for name, tensor in room.items():
        tensor.copy_(trained.weights[name])
    return Forecaster(model, trained).eval()


def _compute_dtype(trained: TrainedModel) -> torch.dtype:
    """What the model computes in."""
    floats = (x.dtype for x in trained.weights.values() if x.is_floating_point())
    return next(floats, torch.float32)
