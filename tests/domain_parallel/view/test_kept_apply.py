"""Functions whose `apply` was kept before the first model was converted, in a fresh process.

Torch's `apply` is replaced when a model is first converted. Before torch 2.14 it is written in
Python, since then in C. The ranks are threads, which convert their models at the same time.
"""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from credit_dp.domain_parallel import verify_domain_parallel
from tests.domain_parallel.equality import Clip
from tests.ranks import TIMEOUT


class Scale(torch.autograd.Function):
    """A product with a power of weights, whose forward gets no context."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, power: int = 1) -> Tensor:
        return x * weight**power

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, ctx.power = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_weight = (grad * x * ctx.power * weight ** (ctx.power - 1)).sum((0, 2, 3), True)
        return grad * weight**ctx.power, of_weight, None


KEPT = {"clip": Clip.apply, "scale": Scale.apply}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.weight = nn.Parameter(torch.rand(1, 3, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = KEPT["scale"](KEPT["clip"](self.conv(x)), self.weight)
        by_name = {"power": 2} if torch.__version__ >= "2.13" else {}  # before, torch refuses names
        y = y + KEPT["scale"](y, self.weight, 3) + Scale.apply(x, self.weight, **by_name)
        with torch.no_grad():
            factor = KEPT["clip"](y)
        assert not factor.requires_grad
        return x + y * factor


def main() -> None:
    report = verify_domain_parallel(Model, (2, 3, 13, 8), 2)
    assert report.passed, report


@pytest.mark.slow
def test_a_kept_apply_has_gradients_where_the_model_has_them():
    code = f"from {__name__} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
