"""Models that `torch.compile` turns into machine code of their own."""

import os
import shutil
import sys

import torch
from torch import nn

from credit_dp.errors import UserError


def compile_model(model: nn.Module, device: torch.device) -> None:
    """Let a model be compiled at its first call, in place: names of parameters stay.

    Args:
        model: converted and shared out already.
        device: on which it computes.

    Raises:
        UserError: the CPU's code needs a C++ compiler, and there is none.
    """
    if device.type == "cpu":
        # Where torch's compiler looks for it.
        name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(name) is None:
            raise UserError(
                f"compile: needs a C++ compiler on the CPU, but {name} is not found. Install one, "
                "name it in the environment variable CXX, or set compile=false."
            )
    model.compile()
