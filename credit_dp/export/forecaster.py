"""A trained model on one device that takes and returns fields in physical units.

`Forecaster.forward` makes one step: normalise states and forcing, run the network, denormalise.
`load` is `credit_dp.load`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from credit_dp import checks
from credit_dp.config import DiffusionConfig, ModelConfig, OwnModelConfig, VariableConfig
from credit_dp.config.model import FIXER_KEYS, MODELS
from credit_dp.data.boundary import given_share
from credit_dp.data.calendar import Calendar, are_dates, calendar_of, decode_dates
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.normaliser import ChannelScaler, ChannelStatistics, with_computed_fields
from credit_dp.data.statistics import Statistics
from credit_dp.data.transforms import apply_transform_tensor
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel.transport import SingleRankTransport
from credit_dp.errors import UserError, first_line
from credit_dp.export.file import ModelMetadata, TrainedModel, read_trained
from credit_dp.models import build_model, cast_model
from credit_dp.models.blocks import draw_noise, has_noise, keep_draws
from credit_dp.physics.columns import PhysicalChannels, surface_geopotential
from credit_dp.physics.fixers import Fixers, GlobalMean, build_fixers
from credit_dp.plugins import find_plugins, registration_hint
from credit_dp.random_streams import time_key
from credit_dp.training.checkpoint import check_model_shapes, check_model_size
from credit_dp.training.diffusion import Sampler
from credit_dp.training.forecast_step import ForecastStep, Model
from credit_dp.training.state import MODEL_PREFIX, model_tensors


@final
class ChannelNormaliser:
    """Normalises and denormalises channels as in training; differentiable.

    `names` has the variable of each channel, and `variables` the configs that differ from the
    default. The channels have a prefix in `statistics`: "" for outputs, `forcing_` or `static_`.
    """

    def __init__(
        self,
        names: Sequence[str],
        variables: Mapping[str, VariableConfig],
        statistics: Statistics,
        prefix: str = "",
    ) -> None:
        self._names = names
        self._variables = with_computed_fields(variables)
        self._extent = ChannelStatistics.of(statistics, prefix)
        self._scales: dict[tuple[torch.dtype, torch.device], ChannelScaler] = {}

    def scales(self, like: Tensor) -> ChannelScaler:
        """Return shift, scale and fill of each channel, cached by dtype and device of `like`."""
        key = (like.dtype, like.device)
        if key not in self._scales:
            self._scales[key] = ChannelScaler(self._names, self._variables, self._extent, *key)
        return self._scales[key]

    def normalise(self, values: Tensor, like: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the first channels normalised, with dtype and device of `like`.

        Values that are NaN or not valid become the variable's fill, if it has one.

        Shapes:
            values `(..., c, H, W)`, valid `(C, H, W)` -> `(..., c, H, W)`.
        """
        scales = self.scales(like)
        values = values.to(like)
        count = values.shape[-3]
        configs = [self._variables.get(name) or VariableConfig() for name in self._names[:count]]
        if any(config.is_transformed for config in configs):
            parts = zip(values.unbind(-3), configs, strict=True)
            transformed = [
                apply_transform_tensor(field, config, scales.quantiles.get(channel))
                for channel, (field, config) in enumerate(parts)
            ]
            values = torch.stack(transformed, dim=-3)
        # Fewer channels than the scales have are allowed: states are the first of the outputs.
        values = (values - scales.shift[:count]) / scales.scale[:count]
        has_fill = torch.tensor([config.fill is not None for config in configs]).to(values.device)
        if not has_fill.any():
            return values
        present = ~values.isnan()
        if valid is not None:
            present = present & valid[:count].to(values.device)
        return torch.where(present | ~has_fill[:, None, None], values, scales.fills[:count])

    def denormalise(self, values: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the first channels in the data's units, NaN on points that are not valid."""
        return self.scales(values).denormalise(values, valid)


Times = Sequence[np.datetime64] | np.ndarray


@final
class Forecaster(nn.Module):
    """A trained model that forecasts one step from one state, or from several a step apart.

    Shapes:
        fields `(B, frames * states, H, W)`, the oldest state first; times `(B,)`, in UTC, of the
        newest state, those of cftime in other calendars than the standard one; forcing
        `(B, len(self.forcing), H, W)`, if the model needs any -> `(B, len(self.variables), H, W)`.

    Units:
        Those of the training data, see `units`; rows from north to south. Variables without values
        on some points, such as a sea surface temperature, are NaN there, in inputs and outputs.

    Attributes:
        variables: names of the output channels, in order.
        states: number of the first output channels that are the state, and inputs again.
        units: the unit of each output channel.
        latitude, longitude: `(H,)` and `(W,)`, in degrees, or `(H, W)` each, on a projection.
        step: the time between two states.
        calendar: the calendar of the times.
        frames: number of input states.
        forcing: names of forcings that the caller gives, at the time of the newest state; those
            that depend on time and position alone are computed.
        config: the config of the run that trained the model, as YAML.
        fixers: what corrects the fields after each step, if the run has any.
        diffusion: how a diffusion model is sampled, as its config has it; None: it is no such
            model. Set another one with `dataclasses.replace`.
    """

    tendency_scale: Tensor
    static: Tensor
    valid: Tensor | None
    given_share: Tensor | None

    def __init__(
        self, model: nn.Module, trained: TrainedModel, diffusion: DiffusionConfig | None = None
    ) -> None:
        super().__init__()
        metadata = trained.metadata
        self.model = model
        self.variables = tuple(metadata.outputs)
        self.states = metadata.states
        self.units = tuple(metadata.units)
        self.latitude = metadata.grid.latitude
        self.longitude = metadata.grid.longitude
        self.step = np.timedelta64(metadata.step_hours, "h")
        self.calendar = Calendar(metadata.calendar)
        self.frames = metadata.frames
        self.forcing = tuple(metadata.external_forcing)
        self.config = metadata.config
        self.metadata = metadata
        self._register_normalisation(trained)
        self.fixers = _build_fixers(trained)
        self.diffusion = diffusion

    def _register_normalisation(self, trained: TrainedModel) -> None:
        """Create the normalisers, and buffers in the model's dtype."""
        metadata = trained.metadata
        like = torch.zeros((), dtype=_compute_dtype(trained))
        statistics = metadata.statistics_arrays
        configs = metadata.variable_configs
        out = [variable for variable, _ in metadata.channels]
        self._output_normaliser = ChannelNormaliser(out, configs, statistics)
        self._forcing_normaliser = ChannelNormaliser(
            metadata.forcing, configs, statistics, "forcing_"
        )
        scales = self._output_normaliser.scales(like)
        tendency_scale = scales.divide_by_scale(statistics.tendency_std)[: metadata.states]
        static_normaliser = ChannelNormaliser(metadata.static, configs, statistics, "static_")
        static = static_normaliser.normalise(trained.static, like)
        # Buffers move with the model; not persistent, so that its state dict has weights only.
        self.register_buffer("tendency_scale", tendency_scale, persistent=False)
        self.register_buffer("static", static, persistent=False)
        valid = None if trained.valid is None else trained.valid.bool()
        self.register_buffer("valid", valid, persistent=False)
        share = given_share(metadata.grid, metadata.boundary, metadata.relaxation)
        rim = torch.from_numpy(share).to(like) if metadata.boundary else None
        self.register_buffer("given_share", rim, persistent=False)

    @property
    def mean(self) -> Tensor:
        """Return the mean state of the training dates, in physical units, as a state to start from.

        Over points with values; for log-transformed variables the mean of the logarithm,
        transformed back.

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
        *,
        boundary: Callable[[np.ndarray], Tensor] | None = None,
        member: int | None = None,
        seed: int = 0,
    ) -> Iterator[Tensor]:
        """Yield the fields after each of several steps.

        All `variables` are yielded, but only the states are inputs of the next step; with several
        frames the oldest one is dropped.

        Args:
            fields, times: see the class.
            steps: how many steps to make.
            forcing: returns `self.forcing` at times `(B,)`; needed if the model has any.
            boundary: returns the states at times `(B,)` after each step; see `forward`.
            member, seed: see `forward`.

        Raises:
            UserError: as in `forward`.
        """
        valid_times = _decode_times(times, self.calendar)
        for number in range(1, steps + 1):
            dates = self.calendar.dates(valid_times)
            external = None if forcing is None else forcing(dates)
            valid_times = valid_times + self.step
            rim = None if boundary is None else boundary(self.calendar.dates(valid_times))
            output = self(
                fields, dates, external, boundary=rim, member=member, seed=seed, number=number
            )
            yield output
            # Append the new state, drop the oldest.
            fields = torch.cat([fields, output[:, : self.states]], dim=1)[:, self.states :]

    def forward(
        self,
        fields: Tensor,
        times: Times,
        forcing: Tensor | None = None,
        *,
        boundary: Tensor | None = None,
        member: int | None = None,
        seed: int = 0,
        number: int = 1,
    ) -> Tensor:
        """Return the fields one `step` after `times`; for several steps see `rollout`.

        Args:
            fields, times, forcing: see the class.
            boundary: states one step later, `(B, states, H, W)`, that give the rim of a model with
                `data.boundary`, of which it needs one; what they have elsewhere is not used.
            member: a member of an ensemble, from 0: its noise is that of `credit-dp forecast` with
                `perturb_seed=seed`; None: no noise, or member 0 of a diffusion model.
            seed: chooses the noise.
            number: this step's number in its forecast, from 1, on which the noise depends.

        Raises:
            UserError: a shape or a type is invalid, or the model has no noise.
        """
        dates = _decode_times(times, self.calendar)
        external = self._checked_forcing(fields, dates, forcing)
        given = self._normalised_boundary(len(dates), boundary)
        shape = (len(dates), self.frames, self.states, *self.metadata.grid)
        states = self._output_normaliser.normalise(
            fields.reshape(shape), self.static, self.valid
        ).flatten(1, 2)
        residual = self.metadata.residual
        static = self.static.expand(len(states), -1, -1, -1)
        with self._noise(dates - (number - 1) * self.step, (seed, member, number)) as model:
            step = ForecastStep(
                model,
                self.tendency_scale,
                residual,
                fixers=self.fixers,
                given_share=self.given_share,
            )
            forcings = [self._normalised_forcing(dates, external)]
            [output] = step.rollout(states, forcings, static, given=given)
        return self._output_normaliser.denormalise(output, self.valid)

    @contextmanager
    def _noise(
        self, initial_times: np.ndarray, stream: tuple[int, int | None, int]
    ) -> Iterator[Model]:
        """Yield the model, which draws the noise of `(seed, member, number)` inside the context.

        Raises:
            UserError: it has no noise, or one of the three is too small.
        """
        seed, member, number = stream
        if member is None and self.diffusion is None:
            yield self.model
            return
        member = member or 0
        for name, value, least in (("seed", seed, 0), ("member", member, 0), ("number", number, 1)):
            checks.at_least(name, value, least)
        keys = [(seed, time_key(time), member, number) for time in initial_times]
        if self.diffusion is not None:
            points = None if self.valid is None else ValidPoints(self.valid)
            rows, outputs = slice(0, self.metadata.grid[0]), len(self.variables)
            sampler = Sampler(self.diffusion, self.model, [self.model], outputs, rows, points)
            sampler.keys = keys
            yield sampler
            return
        if not has_noise(self.model):
            raise UserError(
                "member: this model has no noise, so that all members are alike. Leave member out."
            )
        with keep_draws(self.model)():  # afterwards it has none again
            draw_noise(self.model, keys)
            yield self.model

    def _normalised_forcing(self, times: np.ndarray, external: Tensor) -> Tensor:
        """Return normalised forcings in the model's order, `(B, F, H, W)`."""
        forcings = []
        for name in self.metadata.forcing:
            if name in COMPUTED_FORCINGS:
                # In single precision first, as a store gives them in training.
                values = COMPUTED_FORCINGS[name](
                    times, self.latitude, self.longitude, self.calendar
                ).astype(np.float32)
                field = torch.from_numpy(values).to(self.static)
            else:
                field = external[:, self.forcing.index(name)].to(self.static)
            forcings.append(field)
        if not forcings:
            return self.static.new_empty(len(times), 0, *self.metadata.grid)
        return self._forcing_normaliser.normalise(torch.stack(forcings, dim=1), self.static)

    def _normalised_boundary(self, count: int, boundary: Tensor | None) -> list[Tensor] | None:
        """Check and return the states that give the rim, normalised; None without one.

        Raises:
            UserError: they are missing, invalid, or the model has no rim.
        """
        width, states = self.metadata.boundary, self.states
        if boundary is None and width:
            raise UserError(
                f"boundary: this model was trained with data.boundary={width}, rows and columns at "
                f"the rim that are given: it needs the {states} states one step later, got none."
            )
        if boundary is None:
            return None
        if not width:
            raise UserError("boundary: this model predicts all points. Leave boundary out.")
        shape = (count, states, *self.metadata.grid)
        _check_tensor("boundary", boundary, shape, f"{states} channels (the states)")
        return [self._output_normaliser.normalise(boundary, self.static, self.valid)]

    def _checked_forcing(self, fields: Tensor, times: np.ndarray, forcing: Tensor | None) -> Tensor:
        """Check fields and forcing, and return the forcing, with no channels if there is none.

        Raises:
            UserError: a shape or a type is invalid.
        """
        states = self.frames * self.states
        out = len(self.variables)
        grid = self.metadata.grid
        each = "the states" if self.frames == 1 else f"{self.frames} x {self.states} states"
        hint = ""
        # The usual mistake: the output of a step is given as input, with diagnostic channels.
        given = fields.shape[1] if isinstance(fields, Tensor) and fields.ndim == 4 else None
        if states != given in (out, states - self.states + out):
            hint = (
                f" The last {out - self.states} output channels are no inputs: leave them out, "
                "with fields[:, : model.states], or use model.rollout."
            )
        expected = (len(times), states, *grid)
        _check_tensor("fields", fields, expected, f"{states} channels ({each})", hint)
        count = len(self.forcing)
        if forcing is None and count:
            raise UserError(
                f"forcing: this model needs {', '.join(self.forcing)} as the third argument, got "
                "none."
            )
        external = fields.new_empty(len(times), 0, *grid) if forcing is None else forcing
        names = f" ({', '.join(self.forcing)})" if count else ""
        channels = f"{count} channel{'s' if count != 1 else ''}{names}"
        _check_tensor("forcing", external, (len(times), count, *grid), channels)
        return external


def _build_fixers(trained: TrainedModel) -> Fixers | None:
    """Return the fixers that the model was trained with, on the globe."""
    metadata = trained.metadata
    keys = {name: metadata.keys.get(name) or type_of() for name, type_of in FIXER_KEYS.items()}
    if not keys["fixers"]:
        return None
    ground = surface_geopotential(metadata.static, trained.static)
    channels = PhysicalChannels(
        [Channel(variable, level) for variable, level in metadata.channels],
        metadata.variable_configs,
        metadata.statistics_arrays,
        metadata.hybrid,
        ground,
    )
    rows, columns = metadata.grid
    mean = GlobalMean(metadata.grid.weights, slice(0, rows), columns, SingleRankTransport())
    return build_fixers(ModelConfig(**keys), channels, mean, metadata.step_hours)


def _decode_times(times: Times, calendar: Calendar) -> np.ndarray:
    """Return times as `(B,)` datetime64 of the calendar.

    Raises:
        UserError: they are not dates of the calendar.
    """
    like = "np.datetime64"
    try:
        array = np.atleast_1d(np.asarray(times))
        if calendar.is_standard:
            dates = array.astype("datetime64[ns]")
        else:
            like = f'cftime.datetime(2001, 1, 1, calendar="{calendar.name}")'
            if not are_dates(array) or calendar_of(array) != calendar:
                raise ValueError
            dates = decode_dates(array)
    except (TypeError, ValueError):
        dates = np.array(["NaT"], dtype="datetime64[ns]")
    # NumPy would take numbers for nanoseconds since 1970.
    if dates.ndim != 1 or np.isnat(dates).any() or array.dtype.kind not in "MOSU":
        raise UserError(f"times: need a date for each sample, like {like}, got {times!r}.")
    return dates


def _check_tensor(
    name: str, tensor: object, shape: tuple[int, int, int, int], channels: str, hint: str = ""
) -> None:
    """Refuse an argument that is no floating-point tensor of this shape, `(B, C, H, W)`.

    The message has the number and names of the channels, and ends with the hint.
    """
    count, _, rows, columns = shape
    needs = f"{count} sample{'s' if count != 1 else ''} (one for each time) x {channels}"
    if not isinstance(tensor, Tensor):
        got = f"{type(tensor).__name__}, which is not a tensor"
    elif not tensor.is_floating_point():
        got = f"{tensor.dtype}; needs floating-point numbers"
    elif tuple(tensor.shape) != shape:
        got = " x ".join(map(str, tensor.shape)) or "a single number"
    else:
        return
    raise UserError(f"{name}: needs {needs} x {rows} rows x {columns} columns, got {got}.{hint}")


CHANGED = "The code of the model has changed since it was trained."


def build_forecaster(where: str, trained: TrainedModel, config: ModelConfig) -> Forecaster:
    """Build the model of `config` and load the weights.

    Raises:
        UserError: the weights are of another model.
    """
    metadata = trained.metadata
    out = tuple(Channel(variable, level) for variable, level in metadata.channels)
    channels = Channels(
        prognostic=out[: metadata.states],
        forcing=tuple(metadata.forcing),
        static=tuple(metadata.static),
        diagnostic=out[metadata.states :],
    )
    fields = channels.fields(metadata.frames, config.denoises)
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.weights.items()}
    check_model_size(f"{where}:", config, fields, metadata.grid, shapes, CHANGED)
    # Initial weights are drawn and then overwritten: the caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, fields, metadata.grid)
    cast_model(model, _compute_dtype(trained))
    parameters = {
        name.removeprefix(MODEL_PREFIX): tensor for name, tensor in model_tensors((model,)).items()
    }
    check_model_shapes(
        f"{where}:",
        shapes,
        {name: tuple(tensor.shape) for name, tensor in parameters.items()},
        CHANGED,
    )
    for name, tensor in parameters.items():
        tensor.copy_(trained.weights[name])
    diffusion = config if isinstance(config, DiffusionConfig) else None
    return Forecaster(model, trained, diffusion).eval()


def _compute_dtype(trained: TrainedModel) -> torch.dtype:
    """Return the dtype of the weights, in which the model computes."""
    floats = (x.dtype for x in trained.weights.values() if x.is_floating_point())
    return next(floats, torch.float32)


def load(path: str, device: str = "cpu") -> Forecaster:
    """Return the trained model of an exported file, of a checkpoint, or of a run's folder.

    No code in the file is executed: a model of your own needs its file or package, as in training.

    Raises:
        UserError: there is no model, it can't be read, or its kind is unknown.
    """
    trained = read_trained(path)
    config = build_model_config(path, trained.metadata)
    return build_forecaster(path, trained, config).to(device)


def build_model_config(where: str, metadata: ModelMetadata) -> ModelConfig:
    """Return the model's config, checked as on the command line.

    Raises:
        UserError: the kind of model is unknown, or has other keys.
    """
    known = MODELS | find_plugins(OwnModelConfig, MODELS)
    if metadata.kind not in known:
        raise UserError(
            f"{where}: needs the model {metadata.kind!r}, but only {', '.join(known)} are known."
            f"{registration_hint(OwnModelConfig.plugin_kind)}"
        )
    checks.no_interpolation(where, metadata.keys)
    try:
        node = OmegaConf.merge(OmegaConf.structured(known[metadata.kind]), metadata.keys)
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{where}: its model has keys that are unknown or invalid ({first_line(error)})."
        ) from error
    if not isinstance(config, ModelConfig):
        raise UserError(f"{where}: {metadata.kind} is not a model.")
    return config
