"""From a store's units to normalised tensors and back."""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.statistics import Statistics


@final
class Normaliser:
    """`(x - mean) / std` per channel, computed in `dtype` on `device`.

    Attributes:
        tendency_scale: `(C, 1, 1)`, std of one-step changes in normalised units. A model's output
            times this is what one step adds to the normalised state.
    """

    def __init__(
        self, statistics: Statistics, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._mean, self._std = self._pair(statistics.mean, statistics.std)
        self._forcing = self._pair(statistics.forcing_mean, statistics.forcing_std)
        self._static = self._pair(statistics.static_mean, statistics.static_std)
        self.tendency_scale = self._column(statistics.tendency_std / statistics.std)

    def state(self, fields: NDArray[np.float32]) -> Tensor:
        """Prognostic fields in the store's units -> normalised: `(..., C, h, W)`."""
        return self._apply(fields, (self._mean, self._std))

    def forcing(self, fields: NDArray[np.float32]) -> Tensor:
        """Forcing fields -> normalised: `(..., F, h, W)`."""
        return self._apply(fields, self._forcing)

    def static(self, fields: NDArray[np.float32]) -> Tensor:
        """Static fields -> normalised: `(..., S, h, W)`."""
        return self._apply(fields, self._static)

    def physical(self, state: Tensor) -> Tensor:
        """Normalised prognostic fields -> the store's units: `(..., C, h, W)`."""
        return state * self._std + self._mean

    def _apply(self, fields: NDArray[np.float32], moments: tuple[Tensor, Tensor]) -> Tensor:
        mean, std = moments
        tensor = torch.from_numpy(fields).to(device=self._device, dtype=self._dtype, copy=True)
        return tensor.sub_(mean).div_(std)

    def _pair(self, mean: NDArray[np.float64], std: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        return self._column(mean), self._column(std)

    def _column(self, values: NDArray[np.float64]) -> Tensor:
        column = torch.from_numpy(values).to(device=self._device, dtype=self._dtype)
        return column[:, None, None]
