"""How each channel is normalised: its transform, a shift and a scale, and what stands for NaN."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import VariableConfig
from credit_dp.data.statistics import (
    Statistics,
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
    """The statistics of some channels, `(C,)` each; the last two NaN where they are not known."""

    mean: Vector
    std: Vector
    minimum: Vector
    maximum: Vector

    @classmethod
    def of(cls, statistics: Statistics, prefix: str = "") -> "ChannelStatistics":
        """Those of the channels that come out, or of `forcing_` or `static_` ones."""
        names = ("mean", "std", "minimum", "maximum")
        mean, std, *bounds = (getattr(statistics, prefix + name) for name in names)
        unknown = np.full(len(mean), np.nan)
        return cls(mean, std, *(found if len(found) else unknown for found in bounds))


@final
class ChannelScaler:
    """`(x - shift) / scale` per channel, after the variable's transform.

    Attributes:
        shift, scale, means: `(C, 1, 1)`; the means are normalised.
        fills: what stands for NaN, normalised, `(C, 1, 1)`; 0 where nothing does.
    """

    def __init__(
        self,
        names: Sequence[str],
        variables: Mapping[str, VariableConfig],
        extent: ChannelStatistics,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        """Take the channels of some variables, `names` with repeats for levels.

        Raises:
            UserError: a range is needed that the statistics do not have.
        """
        configs = [variables.get(name) or VariableConfig() for name in names]
        for c, (name, config) in enumerate(zip(names, configs, strict=True)):
            _check_range(name, config, extent, c)
        pairs = [_shift_and_scale(config, extent, c) for c, config in enumerate(configs)]
        columns = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        self._dtype, self._device = dtype, device
        self.shift = self.column(columns[:, 0])
        self.scale = self.column(columns[:, 1])
        self._divisors = columns[:, 1]
        self.means = self.column((extent.mean - columns[:, 0]) / columns[:, 1])
        self._fills = {
            c: _normalised_fill(config, float(extent.mean[c]), *pairs[c])
            for c, config in enumerate(configs)
            if config.fill is not None
        }
        self.fills = self.column(
            np.array([self._fills.get(c, 0.0) for c in range(len(names))], dtype=np.float64)
        )
        self._transformed = {
            c: config for c, config in enumerate(configs) if not np.isnan(config.log1p_scale)
        }
        self._nonnegative = [c for c, name in enumerate(names) if is_nonnegative(name, configs[c])]

    def normalise(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """`(..., c, h, W)` of the first c channels, in the store's units; NaN becomes the fill.

        Written to `out` if there is one.
        """
        values = _tensor(fields).to(device=self._device)
        channels = values.shape[-3]
        shift, scale = self.shift[:channels], self.scale[:channels]
        # Copied, cast and shifted in one pass over memory.
        if out is None:
            out = torch.empty(values.shape, dtype=self._dtype, device=self._device)
        torch.sub(values, shift, out=out).div_(scale)
        for channel in _indices_below(channels, self._transformed):
            config = self._transformed[channel]
            part = values[..., channel, :, :].to(self._dtype)
            part = apply_transform_tensor(part, config).sub_(shift[channel]).div_(scale[channel])
            out[..., channel, :, :] = part
        for channel in _indices_below(channels, self._fills):
            out[..., channel, :, :].nan_to_num_(nan=self._fills[channel])
        return out

    def denormalise(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """What was normalised, in the store's units: `(..., c, h, W)`; NaN outside the mask."""
        channels = values.shape[-3]
        out = (values * self.scale[:channels]).add_(self.shift[:channels])
        for channel in _indices_below(channels, self._transformed):
            part = out[..., channel, :, :]
            out[..., channel, :, :] = invert_transform(part, self._transformed[channel])
        for channel in _indices_below(channels, self._nonnegative):
            out[..., channel, :, :].clamp_(min=0)
        return out if mask is None else out.masked_fill_(~mask[:channels], float("nan"))

    def divide_by_scale(self, values: Vector) -> Tensor:
        """Numbers per channel over its scale, `(C, 1, 1)`: rounded after the division."""
        return self.column(values / self._divisors)

    def column(self, values: Vector) -> Tensor:
        """Numbers per channel as `(C, 1, 1)`."""
        column = torch.from_numpy(values).to(device=self._device, dtype=self._dtype)
        return column[:, None, None]


def _indices_below(channels: int, some: Iterable[int]) -> list[int]:
    return [channel for channel in some if channel < channels]


def _check_range(
    name: str, config: VariableConfig, extent: ChannelStatistics, channel: int
) -> None:
    if config.normalise == "minmax" and np.isnan(extent.maximum[channel]):
        raise UserError(
            f"data.variables.{name}.normalise: minmax needs the minimum and maximum of the "
            "training dates, but data.statistics has none. Set data.statistics to null, or "
            "choose standard, std or none."
        )


def _shift_and_scale(
    config: VariableConfig, extent: ChannelStatistics, channel: int
) -> tuple[float, float]:
    mean, std = float(extent.mean[channel]), float(extent.std[channel])
    if config.normalise == "minmax":
        minimum, maximum = float(extent.minimum[channel]), float(extent.maximum[channel])
        return minimum, maximum - minimum or 1.0
    shifts_and_scales = {"none": (0.0, 1.0), "std": (0.0, std)}
    return shifts_and_scales.get(config.normalise, (mean, std))


def _normalised_fill(config: VariableConfig, mean: float, shift: float, scale: float) -> float:
    """What stands for NaN, as a network sees it."""
    if config.fill == "mean":
        return (mean - shift) / scale
    value = apply_transform(np.array(float(config.fill)), config)
    return (float(value) - shift) / scale


def _tensor(fields: NDArray[np.float32]) -> Tensor:
    """Without a copy where torch can read the memory; it knows no falling rows, nor read-only."""
    if min(fields.strides, default=0) < 0 or not fields.flags.writeable:
        fields = fields.copy()
    return torch.from_numpy(fields)
