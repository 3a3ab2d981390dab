"""What is done to the values of a variable before they are normalised, and undone in forecasts."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import VariableConfig


def transformed(values: NDArray[np.floating], variable: VariableConfig) -> NDArray[np.floating]:
    """`log(1 + x / EPS)` where the variable is `log1p(EPS)`, else the values themselves."""
    scale = variable.log1p_scale
    return values if np.isnan(scale) else np.log1p(values / scale)


def restored(values: Tensor, variable: VariableConfig) -> Tensor:
    """What `transformed` gave, in the store's units again."""
    scale = variable.log1p_scale
    return values if np.isnan(scale) else torch.expm1(values) * scale
