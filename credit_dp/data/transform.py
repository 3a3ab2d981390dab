"""What is done to the values of a variable before they are normalised, and undone in forecasts."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import VariableConfig


def transformed(values: NDArray[np.floating], variable: VariableConfig) -> NDArray[np.floating]:
    """`log(1 + x / EPS)` where the variable is `log1p(EPS)`, else the values themselves.

    Below zero, where packing may leave a rainless point, it is as at zero.
    """
    scale = variable.log1p_scale
    return values if np.isnan(scale) else np.log1p(np.maximum(values, 0) / scale)


def transformed_tensor(values: Tensor, variable: VariableConfig) -> Tensor:
    """What `transformed` does, of a tensor; a new one, unless nothing is done."""
    scale = variable.log1p_scale
    return values if np.isnan(scale) else values.clamp(min=0).div_(scale).log1p_()


def restored(values: Tensor, variable: VariableConfig) -> Tensor:
    """What `transformed` gave, in the store's units again."""
    scale = variable.log1p_scale
    return values if np.isnan(scale) else torch.expm1(values) * scale
