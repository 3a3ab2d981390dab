"""Functions on bands in half precision and under autocast."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import shard_tensor
from tests.domain_parallel.band_tensor.functions import compute_on_bands
from tests.ranks import DEVICE, on_threads
from tests.tables import entry

SHAPE = (1, 3, 13, 6)
INF = float("inf")


class _Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _run_band(manager, function, x):
    """Return a rank's output, and its band's gradient if it has one."""
    model = _Model(function)
    compute_on_bands(model, manager, [tuple(x.shape)])
    local = shard_tensor(x.detach(), manager=manager).clone().requires_grad_()
    y = model(local)
    if y.requires_grad:  # each rank's loss is its share of the globe's
        (y.float().sum() / manager.domain_parallel_size).backward()
    return y.detach(), local.grad


def _on_ranks(function, x, ranks=3):
    """Return the output and the gradient of the globe."""
    results = on_threads(ranks, _run_band, function, x)
    outputs, gradients = zip(*results, strict=True)
    for y in outputs[1:]:
        assert torch.equal(outputs[0], y) or y.shape[-2] != outputs[0].shape[-2]
    return outputs, None if gradients[0] is None else torch.cat(gradients, -2)


WIDENED = {
    "sum": lambda x: x.sum((2, 3)),
    "norm": lambda x: x.norm(2, (2, 3)),
    "largest": lambda x: torch.linalg.vector_norm(x, INF, (2, 3)),
    "sum of a type": lambda x: x.sum((2, 3), dtype=torch.bfloat16),
    "mean": lambda x: x.mean((2, 3)),
    "nansum": lambda x: x.nansum((2, 3)),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-2:]),
    "product": lambda x: x @ x.mT,
    "loss": lambda x: F.mse_loss(x, x.float()),
}


def test_autocast_gives_fields_the_types_of_one_process():
    torch.manual_seed(0)
    x = torch.randn(SHAPE).bfloat16()
    for name, function in WIDENED.items():

        def cast(x, function=function):
            with torch.autocast(DEVICE, torch.bfloat16):
                return function(x)

        with entry(name):
            outputs, _ = _on_ranks(cast, x)
            expected = cast(x)
            whole = outputs[0].shape == expected.shape
            found = outputs[0] if whole else torch.cat(outputs, -2)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)  # and the type


def test_autocast_leaves_an_average_to_few_rows_as_it_is():
    torch.manual_seed(0)
    x = torch.randn(SHAPE)

    def average(x, size):
        with torch.autocast(DEVICE, torch.bfloat16):
            return F.adaptive_avg_pool2d(x, size)

    for size in (1, (2, 3)):
        (y, *_), _ = _on_ranks(partial(average, size=size), x)
        assert y.dtype == torch.float32, size
        torch.testing.assert_close(y, F.adaptive_avg_pool2d(x, size))


def test_an_average_of_halves_to_one_row_is_rounded_once():
    # 1 / 131 is 0.3 % larger in bfloat16.
    x = torch.full((1, 1, 131, 1), 200.0, dtype=torch.bfloat16)
    (y, *_), _ = _on_ranks(lambda x: F.adaptive_avg_pool2d(x, 1), x)
    assert y.dtype == torch.bfloat16
    assert float(y) == 200


SPREADS = {
    "var": lambda x: x.var((2, 3)),
    "std": lambda x: x.std((2, 3), keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, (2, 3))[0],
    "mean of std_mean": lambda x: torch.std_mean(x, (2, 3))[1],
}


def test_the_variance_of_halves_keeps_its_digits_beside_a_large_mean():
    torch.manual_seed(0)
    x = (280.5 + 2 * torch.randn(1, 3, 64, 16)).bfloat16()
    for name, spread in SPREADS.items():
        with entry(name):
            (y, *_), _ = _on_ranks(spread, x)
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y, spread(x.float()).bfloat16())


def test_the_root_of_a_large_variance_of_halves_is_finite():
    torch.manual_seed(0)
    x = (2000 * torch.randn(1, 1, 64, 64)).half()
    (y, *_), _ = _on_ranks(lambda x: x.std((2, 3)), x)
    torch.testing.assert_close(y, x.std((2, 3)))


@pytest.mark.parametrize("order", [INF, -INF])
def test_equal_extrema_of_all_bands_share_the_gradient(order):
    torch.manual_seed(0)
    x = torch.randn(SHAPE).sign()
    x[:, 0, 2:5] *= 3
    x[:, 1, :7] *= 0.5

    def norm(x):
        return torch.linalg.vector_norm(x, order, (2, 3))

    whole = x.clone().requires_grad_()
    expected = norm(whole)
    expected.sum().backward()
    (y, *_), gradient = _on_ranks(norm, x)
    torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(gradient, whole.grad)
