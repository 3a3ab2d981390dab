"""Layer and root-mean-square normalisation over dimensions that hold the globe's rows."""

from __future__ import annotations

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.moments import (
    Moments,
    Spread,
    centred_moments,
    mean_square,
    normalise,
)
from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.layers.statistics_layer import (
    StatisticsLayer,
    as_autocast_takes,
    wide_dtype,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError


class _TrailingNorm(StatisticsLayer):
    """Normalisation over the last dimensions of a shape that is the whole globe's."""

    def __init__(
        self,
        norm: nn.LayerNorm | nn.RMSNorm,
        shard_dim: int = -2,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(norm, shard_dim, manager)

    def mixes(self, dim: int, ndim: int) -> bool:
        """Rows meet where they are among the normalised dimensions."""
        return -dim <= len(self.normalized_shape)

    def reduce(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the band, normalised by the globe's moments, scaled by its rows' parameters."""
        if self.normalized_shape[self.dim] != bands.taken.height:
            raise UserError(
                f"{type(self).__name__}: the globe has {bands.taken.height} rows, normalized_shape "
                f"is {tuple(self.normalized_shape)}. Make dimension {self.dim} of it that number."
            )
        x = as_autocast_takes(x)
        dims = tuple(range(-len(self.normalized_shape), 0))
        spread = Spread(dims, self.dim, bands.taken.sizes, self.manager.transport)
        weight, bias = (self._own_rows(p, bands) for p in (self.weight, self._bias()))
        return normalise(x, self._moments(x, spread), self._eps(x), weight, bias, spread)

    def _own_rows(self, parameter: Tensor | None, bands: Bands) -> Tensor | None:
        """View this rank's rows: the gradient of the others' is zero, and the ranks' sum whole."""
        if parameter is None:
            return None
        rows = bands.taken.rows(self.manager.domain_rank)
        return parameter.narrow(self.dim, rows.start, rows.stop - rows.start)

    @abstractmethod
    def _moments(self, x: Tensor, spread: Spread) -> Moments: ...

    @abstractmethod
    def _eps(self, x: Tensor) -> float: ...

    def _bias(self) -> Tensor | None:
        return None


@final
class DomainParallelLayerNorm(_TrailingNorm):
    """A `LayerNorm` over rows on one band of them, equal to that layer on the whole globe.

    Parameters stay those of the whole globe; each rank uses its rows of them. One small collective
    forward and one backward.

    Args:
        norm: the layer to shard; parameters are shared with it.
        shard_dim: the input's row dimension, until the plan finds it elsewhere.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.

    Shapes:
        `(..., H_local, ...)` -> the same; `normalized_shape` has `H_global`.

    Raises:
        UserError: the globe's rows are not those of `normalized_shape`.

    Source: Ba, Kiros & Hinton 2016, eq. 4.
    """

    def _moments(self, x: Tensor, spread: Spread) -> Moments:
        return centred_moments(x, spread)

    def _eps(self, x: Tensor) -> float:
        return float(self.eps)

    def _bias(self) -> Tensor | None:
        bias: Tensor | None = self.bias
        return bias


@final
class DomainParallelRMSNorm(_TrailingNorm):
    """An `RMSNorm` over rows on one band of them, equal to that layer on the whole globe.

    See `DomainParallelLayerNorm` for arguments, shapes and errors.

    Source: Zhang & Sennrich 2019, eq. 4.
    """

    def _moments(self, x: Tensor, spread: Spread) -> Moments:
        return mean_square(x, spread)

    def _eps(self, x: Tensor) -> float:
        # As torch does: that of the type it computes in.
        return torch.finfo(wide_dtype(x)).eps if self.eps is None else float(self.eps)
