"""Average pooling, and its generalisation to other powers, on one band of rows."""

from __future__ import annotations

from abc import ABC
from math import isinf, prod
from typing import Any, final

from torch import Tensor, nn

from credit_dp.constants import constant
from credit_dp.domain_parallel.layers.pool_layer import PoolLayer
from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError


class _Average(PoolLayer, ABC):
    """Averages over windows; rows beyond the poles are zeros."""

    _counts_padding = True
    _divisor: int | None = None

    def average(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the means of this rank's windows."""
        settings: list[Any] = [
            self.setting("kernel_size"),
            self.setting("stride"),
            self.without_rows("padding") if hasattr(self.__dict__["wrapped"], "padding") else 0,
            self.ceil_mode,
            self._counts_padding,
        ]
        if self._divisor is not None:
            settings.append(self._divisor)
        rows = self.fetch(x, bands)
        made: Tensor = getattr(nn.functional, f"avg_pool{self._area}d")(rows, *settings)
        return self._recounted(made, bands)

    def _recounted(self, made: Tensor, bands: Bands) -> Tensor:
        """Divide by the rows that count in each window, where all of the kernel's were."""
        height, kernel = bands.taken.height, self._kernel
        counts = [self._rows_in(i, height) for i in range(bands.made.height)]
        if self._divisor is not None or set(counts) == {kernel}:  # on every rank alike
            return made
        out = counts[bands.made.rows(self.manager.domain_rank)]
        shares = [kernel / count if count > 0 else 0.0 for count in out]
        factors = constant(shares, made.device, made.dtype)
        return made * factors.view(-1, *[1] * (-self.dim - 1))

    def _rows_in(self, out: int, height: int) -> int:
        """Return how many rows of the window of an output row count."""
        first, stop = self.span(slice(out, out + 1), height)
        if self._counts_padding:
            return min(stop, height + self._padding) - first
        return min(stop, height) - max(first, 0)


@final
class DomainParallelAvgPool(_Average):
    """An `nn.AvgPool*d` on one band of rows, equal to that layer on the whole globe.

    Any kernel, stride and padding, ceil mode, `count_include_pad` and `divisor_override`.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.
    """

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        return self.average(x, bands)

    @property
    def _counts_padding(self) -> bool:  # type: ignore[override]
        return bool(self.count_include_pad)

    @property
    def _divisor(self) -> int | None:  # type: ignore[override]
        return getattr(self.__dict__["wrapped"], "divisor_override", None)


@final
class DomainParallelPowerPool(_Average):
    """An `nn.LPPool*d` on one band of rows, equal to that layer on the whole globe.

    Shapes:
        `(B, C, H_local, W)` -> `(B, C, H_out_local, W_out)`; also `(B, C, D, H_local, W)`, and
        `(B, C, H_local)`.

    Raises:
        UserError: the power is infinite.
    """

    def __init__(
        self,
        pool: nn.Module,
        shard_dim: int | None = None,
        *,
        manager: DomainParallelManager | None = None,
    ) -> None:
        super().__init__(pool, shard_dim, manager=manager)
        if isinf(self.norm_type):
            raise UserError(
                f"{type(pool).__name__}: norm_type has to be finite, got {self.norm_type}. "
                "Use a MaxPool of absolute values."
            )

    @property
    def _padding(self) -> int:
        return 0

    def compute(self, x: Tensor, bands: Bands) -> Tensor:
        """Return this rank's output rows."""
        means = self.average(x.pow(self.norm_type), bands)
        powers = means.sign() * means.abs().relu() * prod(self.setting("kernel_size"))
        return powers.pow(1 / self.norm_type)
