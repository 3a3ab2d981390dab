"""Activations compute on bands, forward and backward, though torch does not call all pointwise."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tests.domain_parallel.band_tensor import functions

ACTIVATIONS = (
    *("elu", "celu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish"),
    *("softplus", "gelu", "silu", "selu", "relu6", "tanhshrink", "hardshrink", "softshrink"),
)


def together(model: Any, x: Tensor) -> list[Tensor]:
    return [
        *[getattr(F, name)(x) for name in ACTIVATIONS],
        F.prelu(x, model.scale),
        F.hardswish(x * 1, inplace=True),
        F.mish(x * 1, inplace=True),
        F.threshold(x * 1, 0.1, 3.0, inplace=True),
    ]


def test_activations() -> None:
    functions.check(together)
