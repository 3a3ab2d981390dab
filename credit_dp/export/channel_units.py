"""Between the units of the data and what a network sees, wherever the model has been moved to."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from credit_dp.config import VariableConfig
from credit_dp.data.forcings import COMPUTED, COMPUTED_STATICS
from credit_dp.data.scales import ChannelScales, Extent
from credit_dp.data.statistics import Statistics
from credit_dp.data.transform import transformed_tensor

AS_IT_IS = VariableConfig(normalise="none")


@final
class ChannelUnits:
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
        computed = dict.fromkeys([*COMPUTED, *COMPUTED_STATICS], AS_IT_IS)
        self._names = names
        self._variables = {**variables, **computed}
        self._extent = Extent.of(statistics, prefix)
        self._scales: dict[tuple[torch.dtype, torch.device], ChannelScales] = {}

    def scales(self, like: Tensor) -> ChannelScales:
        """Shift, scale and fill of each channel, with the dtype and on the device of `like`."""
        key = (like.dtype, like.device)
        if key not in self._scales:
            self._scales[key] = ChannelScales(self._names, self._variables, self._extent, *key)
        return self._scales[key]

    def normalised(self, values: Tensor, like: Tensor, valid: Tensor | None = None) -> Tensor:
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
            values = torch.stack([transformed_tensor(*part) for part in parts], dim=-3)
        values = (values - scales.shift[:count]) / scales.scale[:count]
        filled = torch.tensor([config.fill is not None for config in configs]).to(values.device)
        if not filled.any():
            return values
        there = ~values.isnan()
        if valid is not None:
            there = there & valid[:count].to(values.device)
        return torch.where(there | ~filled[:, None, None], values, scales.fills[:count])

    def physical(self, values: Tensor, valid: Tensor | None = None) -> Tensor:
        """The first channels, normalised -> in the data's units, NaN where not valid."""
        return self.scales(values).physical(values, valid)
