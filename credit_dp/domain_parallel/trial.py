"""One forward of a model on tensors without data: does it make what it is meant to?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.fake_run import (
    DEPENDS_ON_DATA,
    code_line,
    dtype_and_device,
    traceable,
    unchanged,
)
from credit_dp.errors import UserError

BATCH = 2


def check_model(
    model: nn.Module, in_channels: int, out_channels: int, grid: tuple[int, int]
) -> None:
    """Refuse a model of the user's that fails or makes another shape; it is left as it was.

    Shapes:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)` is what is needed.

    Raises:
        UserError: it has nothing to train, fails, or makes something else.
    """
    name = type(model).__name__
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model: {name} has no parameters to train.")
    dtype, device = dtype_and_device(model)
    needed = (BATCH, out_channels, *grid)
    x_shape = (BATCH, in_channels, *grid)
    try:
        with unchanged(model), traceable(model):
            try:
                made = model.eval()(torch.empty(x_shape, dtype=dtype, device=device))
            except DEPENDS_ON_DATA:  # it can't be sharded, which one rank has no need of
                return
    except UserError:
        raise
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            f"model: {name}.forward fails at {code_line(error)} ({type(error).__name__}: {text})."
        ) from error
    came = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
    if came != needed:
        raise UserError(
            f"model: {name} needs to make {needed} of {x_shape}, got {came}. "
            "It has to return one tensor with the rows and columns of its input."
        )
