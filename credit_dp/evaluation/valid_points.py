"""Which points of a field have values: not the land of a sea surface temperature, for one."""

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def of_one_rank(sums: Tensor) -> Tensor:
    """The globe's sums where one rank has all rows."""
    return sums


@final
class ValidPoints:
    """Those of the rank's own rows, channel by channel; the same at all times.

    Args:
        valid: `(C, h, W)`, true where there are values.
        over_globe: sums a tensor over the ranks that share the globe; collective.
    """

    def __init__(self, valid: Tensor, over_globe: Callable[[Tensor], Tensor] = of_one_rank) -> None:
        self.valid, self.missing = valid, ~valid
        self.columns = valid.shape[-1]
        self._over_globe = over_globe

    @classmethod
    def of(
        cls,
        valid: NDArray[np.bool_] | None,
        like: Tensor,
        over_globe: Callable[[Tensor], Tensor] = of_one_rank,
    ) -> "ValidPoints | None":
        """Those of a store's mask, on the device of `like`; None where all points have values."""
        return None if valid is None else cls(torch.from_numpy(valid).to(like.device), over_globe)

    def weight(self, rows: Tensor) -> Tensor:
        """Each channel's sum of `rows`, `(h,)`, over its points with values: `(C,)`, float64."""
        return self.valid.sum(dim=-1).double() @ rows.double()

    def globe_weight(self, rows: Tensor) -> Tensor:
        """`weight`, summed over all rows of the globe; collective."""
        return self._over_globe(self.weight(rows))

    def only(self, values: Tensor) -> Tensor:
        """`(..., C, h, W)` with 0, and no gradient, where there are no values."""
        return values.masked_fill(self.missing, 0)

    def filled(self, values: Tensor, fills: Tensor) -> Tensor:
        """`(B, C, h, W)` with the channel's fill, of `(C, 1, 1)`, where there are no values."""
        return torch.where(self.valid, values, fills)
