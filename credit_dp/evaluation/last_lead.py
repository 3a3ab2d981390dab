"""What the plots of a run show of its forecasts at the longest lead time, from bands of rows."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager, gather_tensor
from credit_dp.evaluation.area_mean import sum_over_data
from credit_dp.evaluation.held_out import HeldOut
from credit_dp.evaluation.scorecard import headline
from credit_dp.evaluation.valid_points import ValidPoints
from credit_dp.evaluation.zonal_spectra import ZonalSpectra, band_weights

SOURCES = ("forecast", "truth")


@final
@dataclass(frozen=True)
class LastLead:
    """What was found, the same on every rank.

    Attributes:
        hours: the lead time.
        shown: the places of the channels with spectra, and `mapped` of the one with a map.
        spectra: `(2, channels, K, W // 2 + 1)`, of forecast and truth in K bands of latitude.
        rmse, bias: of the mapped channel on each grid point, `(H, W)`.
    """

    hours: int
    shown: tuple[int, ...]
    mapped: int
    spectra: np.ndarray
    rmse: np.ndarray
    bias: np.ndarray


@final
class LastLeadSums:
    """Collects it, batch by batch."""

    def __init__(self, dates: HeldOut, manager: DomainParallelManager) -> None:
        store, rows, like = dates.prepared.store, dates.rows, dates.area_weights
        self._dates, self._manager = dates, manager
        self.shown = headline(store.channels.out)
        self.mapped = mapped_channel(dates)
        points = dates.points
        self._spectra = ZonalSpectra(
            (len(SOURCES), len(self.shown)),
            band_weights(store.latitude)[:, rows].to(like.device),
            torch.as_tensor(store.latitude[rows].copy(), device=like.device),
            store.grid[1],
            None if points is None else ValidPoints(points.valid[self.shown]),
        )
        sizes = (2, len(like), store.grid[1])
        self._errors = torch.zeros(sizes, dtype=torch.float64, device=like.device)
        self._count = torch.zeros(1, dtype=torch.float64, device=like.device)

    def add(self, forecast: Tensor, truth: Tensor) -> None:
        """Add normalised fields `(B, C, h, W)`."""
        fields = [self._dates.physical(one) for one in (forecast, truth)]
        for source, field in enumerate(fields):
            self._spectra.add((source,), field[:, self.shown])
        error = (fields[0] - fields[1])[:, self.mapped].double()
        self._errors += torch.stack([error.sum(dim=0), error.square().sum(dim=0)])
        self._count += len(error)

    def result(self) -> LastLead:
        """What was found; collective over all axes."""
        manager = self._manager
        count = sum_over_data(self._count, manager)
        mean, square = sum_over_data(self._errors, manager) / count
        return LastLead(
            hours=self._dates.hours[-1],
            shown=tuple(self.shown),
            mapped=self.mapped,
            spectra=self._spectra.result(manager).cpu().numpy(),
            # One after the other: no more than one field is on its way.
            rmse=gathered(square.sqrt(), manager),
            bias=gathered(mean, manager),
        )


def mapped_channel(dates: HeldOut) -> int:
    """The place of the channel that maps show."""
    names = [channel.name for channel in dates.prepared.store.channels.out]
    return names.index("geopotential_500") if "geopotential_500" in names else 0


def gathered(field: Tensor, manager: DomainParallelManager) -> np.ndarray:
    """A field `(h, W)` of which each rank has a band, on the whole globe, `(H, W)`."""
    whole = gather_tensor(field[None].contiguous(), dim=-2, manager=manager)
    return np.asarray(whole[0].cpu().numpy())
