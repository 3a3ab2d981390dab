"""The attention of `model=swin` beside that of timm's Swin transformer V2."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from credit_dp.models.swin import CosineAttention
from tests.zoo.torchvision_operators import prepare_torchvision

prepare_torchvision()
timm_swin = importlib.import_module("timm.models.swin_transformer_v2")


def _their_attention(layer):
    """Return timm's attention with the weights of a layer."""
    _, rows, columns = layer.window
    theirs = timm_swin.WindowAttention(8, (rows, columns), layer.heads, qkv_bias=False).double()
    state = {
        "logit_scale": layer.log_scale[:, None, None],
        "qkv.weight": layer.qkv.weight,
        "proj.weight": layer.projection.weight,
        "proj.bias": layer.projection.bias,
        **{f"cpb_mlp.{name}": value for name, value in layer.position_bias.state_dict().items()},
    }
    theirs.load_state_dict(state)
    return theirs


def _mask(rows, columns, window, shift, is_periodic):
    """Return timm's mask: minus infinity between tokens that only a seam brings together."""
    seam = torch.zeros(1, rows, columns, 1)
    seam[:, rows - shift[0] :] += 1
    if not is_periodic:
        seam[:, :, columns - shift[1] :] += 2
    parts = timm_swin.window_partition(seam, window).flatten(1)
    apart = parts[:, :, None] != parts[:, None]
    return torch.zeros(apart.shape, dtype=torch.float64).masked_fill(apart, -math.inf)


@pytest.mark.parametrize(("shifted", "is_periodic"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("scales", [(10.0, 30.0), (1.0, 1000.0)])
def test_attention_is_that_of_timm(shifted, is_periodic, scales):
    rows, columns, window = 8, 12, (4, 3)
    layer = CosineAttention(8, 2, (1, rows, columns), (1, *window), shifted, is_periodic).double()
    with torch.no_grad():
        layer.log_scale.copy_(torch.tensor(scales).log())
    shift = (2, 1) if shifted else (0, 0)
    x = torch.randn(2, 1, rows, columns, 8, dtype=torch.float64)
    parts = timm_swin.window_partition(x[:, 0].roll((-shift[0], -shift[1]), (1, 2)), window)
    mask = _mask(rows, columns, window, shift, is_periodic) if shifted else None
    found = _their_attention(layer)(parts.flatten(1, 2), mask)
    expected = timm_swin.window_reverse(found.unflatten(1, window), window, (rows, columns))
    expected = expected.roll(shift, (1, 2))[:, None]
    # Offsets are computed in float32 and rounded differently.
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
