"""Batch normalisation with the statistics of the whole globe."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from credit_dp.domain_parallel.layers.moments import Spread, centred_moments, normalise
from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.statistics_layer import StatisticsLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@final
class DomainParallelBatchNorm(StatisticsLayer):
    """A `BatchNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective forward and one backward; none where running statistics are used. Running
    statistics are those of the whole globe, the same on every rank of a domain.

    Args:
        norm: the layer to shard; parameters and buffers are shared with it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, ..., H_local, ...)` -> the same.

    Source: Ioffe & Szegedy 2015, algorithm 1.
    """

    def __init__(self, norm: BatchNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet in every dimension but the channels'."""
        if dim + ndim == 1:
            raise UserError("BatchNorm: rows are in the channels' dimension. Move them elsewhere.")
        return True

    def whole(self, x: Tensor, *others: Tensor) -> Tensor:
        """Normalise a tensor where no rows meet."""
        if not self._tracks or self.momentum is not None:
            return super().whole(x, *others)  # type: ignore[no-any-return]
        # torch would read the number of batches, which is no number yet while planning.
        y = functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        variance, mean = torch.var_mean(x.detach(), self._reduced(x), correction=0)
        self._track((mean, variance), x[:, 0].numel())
        return y

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments or by running statistics."""
        if not self.training and self.running_mean is not None:
            return self.whole(x)
        spread = Spread(self._reduced(x), self.dim, bands.taken.sizes, self.manager.transport)
        moments = centred_moments(x, spread)
        if self._tracks:
            self._track(moments, spread.count(x))
        per_channel = (-1, *(1,) * (x.ndim - 2))
        weight, bias = (p if p is None else p.view(per_channel) for p in (self.weight, self.bias))
        return normalise(x, moments, self.eps, weight, bias, spread)

    @property
    def _tracks(self) -> bool:
        return bool(self.training and self.track_running_stats)

    def _reduced(self, x: Tensor) -> tuple[int, ...]:
        return tuple(dim for dim in range(-x.ndim, 0) if dim != 1 - x.ndim)

    def _track(self, moments: tuple[Tensor, Tensor], count: int) -> None:
        """Count the batch and move the running statistics towards it."""
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        track((self.running_mean, self.running_var), moments, count, momentum)


@torch.no_grad()
def track(
    running: tuple[Tensor, Tensor],
    moments: tuple[Tensor, Tensor],
    count: int,
    momentum: float | Tensor,
) -> None:
    """Move running mean and variance towards moments of `count` entries, averaged over samples."""
    mean, variance = moments
    for old, new in zip(running, (mean, variance * (count / (count - 1))), strict=True):
        average = new.reshape(-1, len(old)).mean(0).to(old.dtype)
        old.mul_(1 - momentum).add_(average * momentum)
