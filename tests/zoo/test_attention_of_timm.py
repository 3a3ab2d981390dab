"""The attention of `model=swin` beside that of timm's Swin transformer V2."""

from __future__ import annotations

import importlib
import math
from itertools import product

import torch

from credit_dp.models.swin import CosineAttention
from tests.zoo.torchvision_operators import prepare_torchvision

prepare_torchvision()


def _their_attention(timm_swin, layer):
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


def _mask(timm_swin, rows, columns, window, shift, is_periodic):
    """Return timm's mask: minus infinity between tokens that only a seam brings together."""
    seam = torch.zeros(1, rows, columns, 1)
    seam[:, rows - shift[0] :] += 1
    if not is_periodic:
        seam[:, :, columns - shift[1] :] += 2
    parts = timm_swin.window_partition(seam, window).flatten(1)
    apart = parts[:, :, None] != parts[:, None]
    return torch.zeros(apart.shape, dtype=torch.float64).masked_fill(apart, -math.inf)


def test_attention_is_that_of_timm():
    timm_swin = importlib.import_module("timm.models.swin_transformer_v2")  # takes seconds
    rows, columns, window = 8, 12, (4, 3)
    forms = [(False, True), (True, True), (True, False)]
    for (shifted, is_periodic), scales in product(forms, [(10.0, 30.0), (1.0, 1000.0)]):
        sizes = (1, rows, columns), (1, *window)
        layer = CosineAttention(8, 2, *sizes, shifted, is_periodic).double()
        with torch.no_grad():
            layer.log_scale.copy_(torch.tensor(scales).log())
        shift = (2, 1) if shifted else (0, 0)
        x = torch.randn(2, 1, rows, columns, 8, dtype=torch.float64)
        parts = timm_swin.window_partition(x[:, 0].roll((-shift[0], -shift[1]), (1, 2)), window)
        mask = _mask(timm_swin, rows, columns, window, shift, is_periodic) if shifted else None
        found = _their_attention(timm_swin, layer)(parts.flatten(1, 2), mask)
        expected = timm_swin.window_reverse(found.unflatten(1, window), window, (rows, columns))
        expected = expected.roll(shift, (1, 2))[:, None]
        # Offsets are computed in float32 and rounded differently.
        case = f"{shifted=}, {is_periodic=}, {scales=}"
        torch.testing.assert_close(
            layer(x), expected, rtol=1e-6, atol=1e-6, msg=lambda text, case=case: f"{case}: {text}"
        )
