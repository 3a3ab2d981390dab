"""How strong each zonal wavenumber is, averaged over the rows of bands of latitude.

Source:
    Rasp et al. 2024, "WeatherBench 2", and its `ZonalEnergySpectrum`: `S_0 = C |F_0|^2` and
    `S_k = 2 C |F_k|^2`, where `F_k = sum over j of x_j exp(-2 pi i j k / W) / W` and `C` is the
    circle's length. As there, k = W / 2 counts twice too, once too often for Parseval's theorem.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.grid import row_weights
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.area_mean import Index, sum_over_ranks
from credit_dp.evaluation.valid_points import ValidPoints

RADIUS = 6_367_500.0  # m, the mean of the polar and the equatorial one, as in WeatherBench 2
# From and to which latitude, in degrees north.
BANDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"30N to 60N": (30.0, 60.0), "20S to 20N": (-20.0, 20.0), "60S to 30S": (-60.0, -30.0)}
)


def band_weights(
    latitude: NDArray[np.float64], bands: Mapping[str, tuple[float, float]] = BANDS
) -> Tensor:
    """Area weights of all rows, zero outside of each band: `(H,)` -> `(K, H)`, float64."""
    weights = row_weights(latitude)
    inside = [(latitude >= south) & (latitude <= north) for south, north in bands.values()]
    return torch.from_numpy(np.stack(inside) * weights)


@final
class ZonalSpectra:
    """Collects power spectra of own rows and samples; `result` joins all ranks.

    A row with a point without values has no spectrum and is left out.

    Args:
        shape: what spectra are kept apart, for instance (sources, leads, channels).
        bands: weight of each own row in each band, `(K, h)`; only ratios within a band matter.
        latitude: of own rows, `(h,)`, in degrees.
        columns: of the globe, W.
        points: those with values, if not all have them.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        bands: Tensor,
        latitude: Tensor,
        columns: int,
        points: ValidPoints | None = None,
    ) -> None:
        self.bands = bands.double()
        whole = None if points is None else points.valid.all(dim=-1)
        self._whole = whole  # (C, h)
        circles = 2 * torch.pi * RADIUS * torch.deg2rad(latitude.double()).cos().abs()
        times = torch.full((columns // 2 + 1,), 2.0, dtype=torch.float64, device=bands.device)
        times[0] = 1.0
        self._lengths = circles[:, None] * times
        sizes = (*shape, len(bands), columns // 2 + 1)
        self.sums = torch.zeros(sizes, dtype=torch.float64, device=bands.device)
        self.weights = torch.zeros(sizes[:-1], dtype=torch.float64, device=bands.device)

    def add(self, index: Index, fields: Tensor) -> None:
        """Add the spectra of fields `(B, ..., C, h, W)` of all channels to the place `index`."""
        channels, height = fields.shape[-3:-1]
        rows = self.bands.expand(channels, -1, height)
        if self._whole is not None:
            rows = rows * self._whole[:, None]
            fields = fields.masked_fill(~self._whole[:, :, None], 0)
        waves = torch.fft.rfft(fields.double(), norm="forward")
        # Part by part: to sum pairs of numbers takes torch fifteen times as long.
        power = (waves.real.square() + waves.imag.square()).sum(dim=0) * self._lengths
        self.sums[index] += rows @ power
        self.weights[index] += len(fields) * rows.sum(dim=-1)

    def result(self, manager: DomainParallelManager) -> Tensor:
        """The mean spectra, of `shape + (K, W // 2 + 1)`, on every rank; NaN where no row is.

        Collective: every rank calls it, also one that had no samples.

        Units:
            Those of the fields squared, times metres.
        """
        sums = sum_over_ranks(self.sums, manager)
        return sums / sum_over_ranks(self.weights, manager)[..., None]
