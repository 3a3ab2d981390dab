"""Normalisation of channels: a transform, a shift, a scale and a fill value for NaN.

A `ChannelScaler` normalises some channels and inverts that; `Normaliser` has those of all channels
of a store.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import VariableConfig
from credit_dp.data.channels import Channels
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.setup import TrainingData
from credit_dp.data.statistics import Statistics
from credit_dp.data.transforms import (
    QUANTILE_SCORES,
    QuantileMap,
    apply_transform,
    apply_transform_tensor,
    invert_transform,
)
from credit_dp.data.units import is_nonnegative
from credit_dp.errors import UserError

Vector = NDArray[np.float64]


@final
@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of some channels, `(C,)` each, quantiles `(C, 129)`; what is unknown is NaN."""

    mean: Vector
    std: Vector
    minimum: Vector
    maximum: Vector
    quantiles: Vector

    @classmethod
    def of(cls, statistics: Statistics, prefix: str = "") -> "ChannelStatistics":
        """Return the statistics of the output channels; a `prefix` (`forcing_`) selects others."""
        names = ("mean", "std", "minimum", "maximum")
        mean, std, minimum, maximum = (getattr(statistics, prefix + name) for name in names)
        unknown = np.full(len(mean), np.nan)
        quantiles = getattr(statistics, f"{prefix}quantiles")
        if not len(quantiles):
            quantiles = np.full((len(mean), len(QUANTILE_SCORES)), np.nan)
        low, high = (values if len(values) else unknown for values in (minimum, maximum))
        return cls(mean, std, low, high, quantiles)


@final
class ChannelScaler:
    """`(x - shift) / scale` per channel, after the variable's transform.

    Attributes:
        shift, scale: `(C, 1, 1)`.
        means: the normalised mean of each channel, `(C, 1, 1)`.
        fills: the normalised value that replaces NaN, `(C, 1, 1)`; 0 for channels without a fill.
        quantiles: the map of each channel that is normalised by `quantile`.
    """

    def __init__(
        self,
        names: Sequence[str],
        variables: Mapping[str, VariableConfig],
        statistics: ChannelStatistics,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        """Derive shift, scale and fill of each channel.

        Args:
            names: the variable of each channel, `(C,)`.
            variables: configs by variable; the default config for all others.
            statistics: of the same channels.
            dtype, device: of the normalised values.
        """
        configs = [variables.get(name) or VariableConfig() for name in names]
        for channel, (name, config) in enumerate(zip(names, configs, strict=True)):
            _check_complete(name, config, statistics, channel)
        shifts_and_scales = [
            _shift_and_scale(config, statistics, channel) for channel, config in enumerate(configs)
        ]
        columns = np.array(shifts_and_scales, dtype=np.float64).reshape(-1, 2)
        self._dtype, self._device = dtype, device
        self.shift = self.column(columns[:, 0])
        self.scale = self.column(columns[:, 1])
        self._divisors = columns[:, 1]  # the scale in float64
        self.means = self.column((statistics.mean - columns[:, 0]) / columns[:, 1])
        exact = {
            channel: QuantileMap(statistics.quantiles[channel])
            for channel, config in enumerate(configs)
            if config.normalise == "quantile"
        }
        self._fills = {
            channel: _normalised_fill(
                config,
                exact.get(channel),
                float(statistics.mean[channel]),
                *shifts_and_scales[channel],
            )
            for channel, config in enumerate(configs)
            if config.fill is not None
        }
        self.fills = self.column(
            np.array(
                [self._fills.get(channel, 0.0) for channel in range(len(names))], dtype=np.float64
            )
        )
        # In half precision different quantiles could become equal.
        map_dtype = torch.promote_types(dtype, torch.float32)
        self.quantiles = {
            channel: map_of.to(device=device, dtype=map_dtype) for channel, map_of in exact.items()
        }
        self._transformed = {
            channel: config for channel, config in enumerate(configs) if config.is_transformed
        }
        self._nonnegative = [
            channel for channel, name in enumerate(names) if is_nonnegative(name, configs[channel])
        ]

    def normalise(
        self, fields: NDArray[np.float32], out: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """Normalise fields and replace NaN by the fill.

        Args:
            fields: c adjacent channels in the store's units, `(..., c, h, W)`.
            out: the tensor to write to and return; None creates one.
            first: the number of the first channel.
        """
        values = _tensor(fields).to(device=self._device)
        channels = slice(first, first + values.shape[-3])
        shift, scale = self.shift[channels], self.scale[channels]
        if out is None:
            out = torch.empty(values.shape, dtype=self._dtype, device=self._device)
        # `sub` into `out` copies, casts and shifts in one pass over memory.
        torch.sub(values, shift, out=out).div_(scale)
        # Few channels have a transform or a fill: they are written once more.
        for channel in _indices_within(channels, self._transformed):
            config, position = self._transformed[channel], channel - first
            transformed = apply_transform_tensor(
                values[..., position, :, :].to(self._dtype), config, self.quantiles.get(channel)
            )
            out[..., position, :, :] = transformed.sub_(shift[position]).div_(scale[position])
        self._fill(out, channels)
        return out

    def _fill(self, values: Tensor, channels: slice) -> None:
        for channel in _indices_within(channels, self._fills):
            values[..., channel - channels.start, :, :].nan_to_num_(nan=self._fills[channel])

    def denormalise(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return normalised values in the store's units, `(..., c, h, W)`; NaN outside the mask."""
        channels = slice(0, values.shape[-3])
        out = (values * self.scale[channels]).add_(self.shift[channels])
        for channel in _indices_within(channels, self._transformed):
            out[..., channel, :, :] = invert_transform(
                out[..., channel, :, :], self._transformed[channel], self.quantiles.get(channel)
            )
        for channel in _indices_within(channels, self._nonnegative):
            # A model may predict slightly less than no rain.
            out[..., channel, :, :].clamp_(min=0)
        return out if mask is None else out.masked_fill_(~mask[channels], float("nan"))

    def divide_by_scale(self, values: Vector) -> Tensor:
        """Divide one number per channel by its scale in float64, then round: `(C, 1, 1)`."""
        return self.column(values / self._divisors)

    def column(self, values: Vector) -> Tensor:
        """Return one number per channel as `(C, 1, 1)`, in the dtype and on the device."""
        column = torch.from_numpy(values).to(device=self._device, dtype=self._dtype)
        return column[:, None, None]


def _indices_within(span: slice, channels: Iterable[int]) -> list[int]:
    return [channel for channel in channels if span.start <= channel < span.stop]


def _check_complete(
    name: str, config: VariableConfig, statistics: ChannelStatistics, channel: int
) -> None:
    if config.normalise == "minmax" and np.isnan(statistics.maximum[channel]):
        raise UserError(
            f"data.variables.{name}.normalise: minmax needs the minimum and maximum of the "
            "training dates, but data.statistics has none. Set data.statistics to null, or "
            "choose standard, std or none."
        )
    if config.normalise == "quantile" and np.isnan(statistics.quantiles[channel]).any():
        raise UserError(
            f"data.variables.{name}.normalise: quantile needs the quantiles of the training dates, "
            "but data.statistics has none. Set data.statistics to null, or choose another one."
        )


def _shift_and_scale(
    config: VariableConfig, statistics: ChannelStatistics, channel: int
) -> tuple[float, float]:
    mean = float(statistics.mean[channel])
    std = float(statistics.std[channel])
    if config.normalise == "minmax":
        minimum = float(statistics.minimum[channel])
        maximum = float(statistics.maximum[channel])
        return minimum, maximum - minimum or 1.0  # a constant field is only shifted
    shifts_and_scales = {"none": (0.0, 1.0), "std": (0.0, std)}
    return shifts_and_scales.get(config.normalise, (mean, std))


def _normalised_fill(
    config: VariableConfig, quantiles: QuantileMap | None, mean: float, shift: float, scale: float
) -> float:
    """Return the normalised value that replaces NaN."""
    if config.fill == "mean":
        return (mean - shift) / scale
    value = apply_transform(np.array(float(config.fill)), config, quantiles)
    return (float(value) - shift) / scale


def _tensor(fields: NDArray[np.float32]) -> Tensor:
    """Return a tensor that shares memory if possible.

    Torch supports neither negative strides (stores with south first) nor read-only arrays.
    """
    if min(fields.strides, default=0) < 0 or not fields.flags.writeable:
        fields = fields.copy()
    return torch.from_numpy(fields)


# Fields such as sines of the time are of order one already.
_COMPUTED = dict.fromkeys([*COMPUTED_FORCINGS, *COMPUTED_STATICS], VariableConfig(normalise="none"))


def with_computed_fields(variables: Mapping[str, VariableConfig]) -> dict[str, VariableConfig]:
    """Return the configs of variables, with those of computed fields, which are not normalised."""
    return {**variables, **_COMPUTED}


@final
class Normaliser:
    """Scales the channels of a store for the network.

    `data.variables.NAME.normalise` chooses how; computed forcings and statics are not changed.

    Attributes:
        outputs, forcing, static: scale the output, the forcing and the static channels.
        scale, fills: of the output channels, see `ChannelScaler`.
        tendency_scale: `(outputs, 1, 1)`, std of one-step changes in normalised units. A model's
            output times this scale is the change of the normalised state in one step.
        std: `(outputs, 1, 1)`, standard deviation of the normalised output channels.
    """

    def __init__(
        self,
        statistics: Statistics,
        channels: Channels,
        variables: Mapping[str, VariableConfig],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Derive the scales of all channels.

        Args:
            statistics: of the channels.
            channels: of a store.
            variables: configs by variable; the default config for all others.
            dtype, device: of the normalised fields.
        """
        configs = with_computed_fields(variables)

        def scaler(names: Sequence[str], prefix: str = "") -> ChannelScaler:
            of_channels = ChannelStatistics.of(statistics, prefix)
            return ChannelScaler(names, configs, of_channels, dtype, device)

        self.outputs = scaler([channel.variable for channel in channels.output_channels])
        self.forcing = scaler(channels.forcing, "forcing_")
        self.static = scaler(channels.static, "static_")
        self.scale = self.outputs.scale
        self.fills = self.outputs.fills
        self.tendency_scale = self.outputs.divide_by_scale(statistics.tendency_std)
        self.std = self.outputs.divide_by_scale(statistics.std)

    @classmethod
    def of(
        cls, data: TrainingData, dtype: torch.dtype, device: torch.device | None = None
    ) -> "Normaliser":
        """Return the normaliser of a store with its statistics and config."""
        store = data.store
        return cls(data.statistics, store.channels, store.config.variables, dtype, device)

    def shift_and_scale(self, part: str) -> tuple[Tensor, Tensor]:
        """Return shift and scale, `(C, 1, 1)` each, of the channels of a part of a batch.

        Args:
            part: `state` or `target` (all outputs), `forcing` or `static`.
        """
        scaler = {"forcing": self.forcing, "static": self.static}.get(part, self.outputs)
        return scaler.shift, scaler.scale

    def normalise_outputs(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Normalise the output channels or the first of them, as states are: `(..., C, h, W)`."""
        return self.outputs.normalise(fields, out)

    def normalise_forcing(self, fields: NDArray[np.float32]) -> Tensor:
        """Normalise the forcings, `(..., F, h, W)`; see `normalise_outputs`."""
        return self.forcing.normalise(fields)

    def normalise_static(self, fields: NDArray[np.float32]) -> Tensor:
        """Normalise the static fields, `(..., S, h, W)`; see `normalise_outputs`."""
        return self.static.normalise(fields)

    def denormalise(self, fields: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return normalised outputs, or the first of them, in the store's units.

        Variables that can't be negative are clamped at zero; points outside the mask are NaN.

        Shapes:
            `(..., C, h, W)`; `mask`: `(outputs, h, W)`, True where there are values.
        """
        return self.outputs.denormalise(fields, mask)
