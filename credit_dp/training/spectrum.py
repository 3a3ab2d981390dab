"""The error between zonal power spectra: how strong each wavenumber is, wherever its waves lie.

A forecast that is unsure of where something happens has the least squared error if it smooths it
away. The spectrum of a row does not see where, only how much varies at which scale, so that what is
smoothed costs. It takes whole rows and no two of them together: every rank computes its own.
"""

import torch
from torch import Tensor

# Added to the power of a wavenumber, which makes the amplitude smooth where there is none: its
# gradient is 0 there, and nowhere above 1.
FLOOR = 1e-8


def amplitudes(rows: Tensor) -> Tensor:
    """How strong each zonal wavenumber is: `A_k = sqrt(n_k |F_k|^2 / W^2 + FLOOR)`.

    `F_k = sum over j of x_j exp(-2 pi i j k / W)`. `n_k` is 2 where the wavenumber -k is another
    one, 1 for k = 0 and k = W / 2. The powers, without their floor, thus add up to the mean of
    `x_j^2` (Parseval's theorem).

    Shapes:
        `(..., W)` -> `(..., W // 2 + 1)`.

    Units:
        Those of `rows`.
    """
    width = rows.shape[-1]
    waves = torch.view_as_real(torch.fft.rfft(rows, norm="forward"))
    power = waves.square().sum(dim=-1)
    times = power.new_full(power.shape[-1:], 2.0)
    times[0] = 1.0
    if width % 2 == 0:
        times[-1] = 1.0
    return (power * times + FLOOR).sqrt()


def spectrum_error(forecast: Tensor, target: Tensor) -> Tensor:
    """Squared difference of amplitudes, added up over all zonal wavenumbers.

    It is never more than the mean squared difference of the rows themselves, and equals it where
    the waves of both lie at the same places and differ in strength alone.

    Shapes:
        `(..., W)` -> `(...)`.

    Source: Subich et al. 2025 (arXiv:2501.19374), the part of their loss that amplitudes have,
    here with one spectrum for each row in place of one for the sphere.
    """
    return (amplitudes(forecast) - amplitudes(target)).square().sum(dim=-1)
