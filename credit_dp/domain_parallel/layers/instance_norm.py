"""Instance normalisation with the statistics of the whole globe."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from credit_dp.domain_parallel.layers.batch_norm import track
from credit_dp.domain_parallel.layers.moments import Spread, centred_moments, normalise
from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.statistics_layer import StatisticsLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


@final
class DomainParallelInstanceNorm(StatisticsLayer):
    """An `InstanceNorm` on one band of rows, equal to that layer on the whole globe.

    One small collective forward and one backward; none where running statistics are used.

    Args:
        norm: the layer to shard; parameters and buffers are shared with it.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(B, C, ..., H_local, ...)` or `(C, ..., H_local, ...)` -> the same.

    Source: Ulyanov, Vedaldi & Lempitsky 2016, eq. 1.
    """

    def __init__(self, norm: InstanceNorm, *, manager: DomainParallelManager | None = None) -> None:
        super().__init__(norm, -2, manager)
        # Dimensions of one channel of a sample.
        self._area = norm._get_no_batch_dim() - 1

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet where a channel's entries are."""
        if dim == -self._area - 1:
            raise UserError(
                "InstanceNorm: rows are in the channels' dimension. Move them elsewhere."
            )
        if dim < -self._area and self.track_running_stats:
            raise UserError(
                "InstanceNorm: rows are among the samples, over which running statistics are "
                "averaged. Move them elsewhere or set track_running_stats=False."
            )
        return dim >= -self._area

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments or by running statistics."""
        if not self.training and self.track_running_stats:
            return self.whole(x)  # type: ignore[no-any-return]
        dims = tuple(range(-self._area, 0))
        spread = Spread(dims, self.dim, bands.taken.sizes, self.manager.transport)
        moments = centred_moments(x, spread)
        if self.running_mean is not None:
            # As torch does: batches are not counted, so that no momentum means no update.
            momentum = self.momentum or 0.0
            running = (self.running_mean, self.running_var)
            track(running, moments, spread.count(x), momentum)
        per_channel = (-1, *(1,) * self._area)
        weight, bias = (p if p is None else p.view(per_channel) for p in (self.weight, self.bias))
        return normalise(x, moments, self.eps, weight, bias, spread)
