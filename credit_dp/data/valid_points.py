"""The points on which fields have values, in sums over a rank's rows and in what a model gets."""

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sum_over_one_rank(sums: Tensor) -> Tensor:
    """Return sums unchanged: one rank has all rows of the globe."""
    return sums


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over rows and columns: `(..., h, W)` -> `(...)`.

    Args:
        weights: of rows, `(h,)`, or of all points, `(h, W)`; in the dtype of `values`.
    """
    if weights.ndim == 2:
        return values.flatten(-2) @ weights.flatten()
    return values.sum(dim=-1) @ weights


@final
class ValidPoints:
    """The points of this rank's rows that have values, for each channel; the same at all times.

    Args:
        valid: `(C, h, W)`, true where there are values.
        sum_over_globe: sums a tensor over the ranks that share the globe; collective.
    """

    def __init__(
        self, valid: Tensor, sum_over_globe: Callable[[Tensor], Tensor] = sum_over_one_rank
    ) -> None:
        self.valid = valid
        self.missing = ~valid
        self.columns = valid.shape[-1]
        self._sum_over_globe = sum_over_globe

    @classmethod
    def of(
        cls,
        valid: NDArray[np.bool_] | None,
        like: Tensor,
        sum_over_globe: Callable[[Tensor], Tensor] = sum_over_one_rank,
    ) -> "ValidPoints | None":
        """Return the points of a store's mask, on the device of `like`; None if it has no mask."""
        if valid is None:
            return None
        return cls(torch.from_numpy(valid).to(like.device), sum_over_globe)

    def weight(self, rows: Tensor) -> Tensor:
        """Return each channel's sum of weights over its valid points: `(C,)`, float64.

        Args:
            rows: weights of rows, `(h,)`, or of all points, `(h, W)`.
        """
        if rows.ndim == 2:
            return torch.stack([rows.double()[valid].sum() for valid in self.valid])
        return self.valid.sum(dim=-1).double() @ rows.double()

    def globe_weight(self, rows: Tensor) -> Tensor:
        """Return `weight`, summed over all rows of the globe; collective."""
        return self._sum_over_globe(self.weight(rows))

    def zero_invalid(self, values: Tensor) -> Tensor:
        """Return `(..., C, h, W)` with 0, and no gradient, on points without values."""
        # Not a product with the mask: NaN times 0 is NaN, in values and in gradients.
        return values.masked_fill(self.missing, 0)

    def fill_invalid(self, values: Tensor, fills: Tensor) -> Tensor:
        """Return `(B, C, h, W)` with the channel's fill, `(C, 1, 1)`, on points without values."""
        return torch.where(self.valid, values, fills)
