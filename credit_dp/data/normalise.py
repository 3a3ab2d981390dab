"""From a store's units to normalised tensors and back."""

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import VariableConfig
from credit_dp.data.forcings import COMPUTED, COMPUTED_STATICS
from credit_dp.data.prepare import Prepared
from credit_dp.data.scales import ChannelScales, Extent
from credit_dp.data.schema import Channels
from credit_dp.data.statistics import Statistics

AS_IT_IS = VariableConfig(normalise="none")


@final
class Normaliser:
    """Makes every channel about as large as a network likes, in `dtype` on `device`.

    How, `data.variables.NAME.normalise` says; computed forcings and statics stay as they are.

    Attributes:
        dtype: of what it makes.
        tendency_scale: `(outputs, 1, 1)`, std of one-step changes in normalised units. A model's
            output times this is what one step adds to the normalised state.
        scale, fills: of what comes out, see `ChannelScales`.
    """

    def __init__(
        self,
        statistics: Statistics,
        dtype: torch.dtype,
        device: torch.device | None = None,
        variables: Mapping[str, VariableConfig] | None = None,
        channels: Channels | None = None,
    ) -> None:
        """Without `variables` and `channels`, every channel is standardised."""
        self.dtype = dtype
        computed = dict.fromkeys([*COMPUTED, *COMPUTED_STATICS], AS_IT_IS)
        known = {**(variables or {}), **computed} if channels is not None else {}

        def scales(prefix: str, names: Sequence[str] | None) -> ChannelScales:
            extent = Extent.of(statistics, prefix)
            named = [""] * len(extent.mean) if names is None else names
            return ChannelScales(named, known, extent, dtype, device)

        outputs = None if channels is None else [channel.variable for channel in channels.out]
        self._outputs = scales("", outputs)
        self.scale, self.fills = self._outputs.scale, self._outputs.fills
        self._forcing = scales("forcing_", None if channels is None else channels.forcing)
        self._static = scales("static_", None if channels is None else channels.static)
        self.tendency_scale = self._outputs.scaled(statistics.tendency_std)

    @classmethod
    def of(
        cls, prepared: Prepared, dtype: torch.dtype, device: torch.device | None = None
    ) -> "Normaliser":
        """The one of a store and its statistics, as the config wants each variable."""
        store = prepared.store
        return cls(prepared.statistics, dtype, device, store.config.variables, store.channels)

    def state(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Prognostic fields, or all that come out, normalised: `(..., C, h, W)`.

        Made on the spot if there is an `out` of that shape, which is returned.
        """
        return self._outputs.normalised(fields, out)

    def outputs(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """All that come out, normalised: `(..., outputs, h, W)`."""
        return self._outputs.normalised(fields, out)

    def forcing(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Forcing fields -> normalised: `(..., F, h, W)`."""
        return self._forcing.normalised(fields, out)

    def static(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Static fields -> normalised: `(..., S, h, W)`."""
        return self._static.normalised(fields, out)

    def physical(self, state: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised prognostic fields, or all that come out, in the store's units.

        Variables that can't be negative are clamped at zero; outside the mask all is NaN.

        Shapes:
            `(..., C, h, W)`; `mask`: `(outputs, h, W)`, True where there are values.
        """
        return self._outputs.physical(state, mask)
