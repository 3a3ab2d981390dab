"""The training loss: an error weighted by area, pressure level and variable.

Each rank sums over its own rows and divides by the weight of the whole globe. The domain's ranks
thus add up to the loss of the whole globe, and no rank needs another's rows to know its share.
"""

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import LossConfig
from credit_dp.data.grid import row_weights
from credit_dp.data.schema import Channel, Channels, suggestions
from credit_dp.errors import UserError

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {"mse": torch.square, "mae": torch.abs}


@final
class WeightedLoss:
    """This rank's share of the weighted mean error, in units of each channel's tendency.

    Shapes:
        forecast and target `(B, C, h, W)`, both normalised -> scalar.

    Args:
        name: `mse` or `mae`.
        rows: weight of each own row, `(h,)`, scaled so that the globe's weights have mean 1.
        channels: weight of each channel, `(C,)`.
        tendency_scale: tendency standard deviation over standard deviation, `(C, 1, 1)`.
        height: rows of the whole globe.
    """

    def __init__(
        self, name: str, rows: Tensor, channels: Tensor, tendency_scale: Tensor, height: int
    ) -> None:
        self.pointwise = POINTWISE[name]
        self.tendency_scale = tendency_scale
        self.weight = rows[:, None] * (channels / channels.sum())[:, None, None] / height

    def __call__(self, forecast: Tensor, target: Tensor) -> Tensor:
        """Own rows' weighted error over the weight of the globe and of the batch given."""
        error = self.pointwise((forecast - target) / self.tendency_scale)
        batch, _, _, width = error.shape
        return (error * self.weight).sum() / (batch * width)


def build_loss(
    config: LossConfig,
    channels: Channels,
    latitude: NDArray[np.float64],
    rows: slice,
    scale: Tensor,
) -> WeightedLoss:
    """The loss that the config asks for, on these rows of the globe.

    `scale` is `(C, 1, 1)`, see `WeightedLoss`; its device and dtype become the loss's.

    Raises:
        UserError: `loss.variable_weight` names no prognostic variable, or all weights are 0.
    """
    weights = row_weights(latitude) if config.latitude_weight else np.ones(len(latitude))
    return WeightedLoss(
        config.name,
        torch.as_tensor(np.asarray(weights[rows], dtype=np.float64)).to(scale),
        torch.as_tensor(channel_weights(config, channels.prognostic)).to(scale),
        scale,
        len(latitude),
    )


def channel_weights(config: LossConfig, channels: tuple[Channel, ...]) -> NDArray[np.float64]:
    """Weight of each prognostic channel, `(C,)`: its level's times its variable's.

    A level weighs as its pressure, with mean 1 over all channels that have a level; a surface
    variable weighs 1.

    Raises:
        UserError: `loss.variable_weight` names no prognostic variable, or all weights are 0.
    """
    variables = {channel.variable for channel in channels}
    unknown = next((name for name in config.variable_weight if name not in variables), None)
    if unknown is not None:
        raise UserError(
            f"loss.variable_weight: needs names from data.prognostic, got {unknown!r}. "
            f"{suggestions(unknown, variables)}. Change the name in loss.variable_weight."
        )
    levels = [channel.level for channel in channels if channel.level is not None]
    mean_level = sum(levels) / len(levels) if levels else 1.0

    def weight(channel: Channel) -> float:
        by_level = config.level_weight and channel.level is not None
        level = channel.level / mean_level if by_level and channel.level is not None else 1.0
        return level * config.variable_weight.get(channel.variable, 1.0)

    weights = np.array([weight(channel) for channel in channels])
    if not weights.sum() > 0:
        raise UserError(
            "loss.variable_weight: at least one variable needs a weight above 0, all are 0."
        )
    return weights
