"""The Swin transformer V2: its attention, its way round the globe, its traffic and its size."""

from __future__ import annotations

import pytest
import torch

from credit_dp.cli.compose import Composer
from credit_dp.config import SwinConfig
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.models.swin import CosineAttention
from tests.domain_parallel.equality import MODEL, RANDOM_LOCK, assert_same_as_whole_globe
from tests.ranks import on_threads
from tests.tables import entry
from tests.tier_cases import tiers

FIELDS = Fields.flat(3, 2)
CONFIG = {
    "width": 8,
    "depths": [2, 2, 2],
    "heads": [2, 4, 2],
    "patch": [2, 2],
    "window": [3, 4],
    "mlp_ratio": 1,
}
ERA5 = Fields(
    tuple(tuple(range(13 * v, 13 * v + 13)) for v in range(5)), tuple(range(65, 69)), others=3
)


def _swin(grid, depths=(2, 2, 2)):
    return build_model(SwinConfig(**{**CONFIG, "depths": list(depths)}), FIELDS, grid)


def test_zeros_beyond_the_grid_leave_gradients_finite():
    layer = CosineAttention(8, 2, (1, 5, 7), (1, 4, 4), shifted=True)
    x = torch.randn(1, 1, 5, 7, 8, requires_grad=True)
    layer(x).square().sum().backward()
    for grad in (x.grad, *(p.grad for p in layer.parameters())):
        assert 0 < grad.abs().max() < 1e4


def test_longitude_is_periodic():
    """Turned by whole windows of the coarser level, a state has the same forecast, turned."""
    for depths in ([2, 2, 2], [0, 3, 0], [0, 1, 2]):
        model = _swin((12, 32), depths=depths).double()
        x = torch.randn(1, FIELDS.inputs, 12, 32, dtype=torch.float64)
        turned = model(x.roll(16, -1))
        with entry(depths):
            torch.testing.assert_close(turned, model(x).roll(16, -1))
        assert (turned - model(x)).abs().max() > 1e-3, depths


@pytest.mark.parametrize(
    ("ranks", "rows", "depths"),
    tiers(
        fast=[(3, 29, [2, 2, 2]), (3, 33, [0, 3, 0])],
        slow=[],
        exhaustive=[(2, 33, [2, 2, 2]), (4, 33, [0, 3, 0])],
    ),
)
def test_sharded_equals_whole(ranks, rows, depths):
    """Also with columns that fill no patches and windows."""
    case = (_swin, ((rows, 11), depths), (2, FIELDS.inputs, rows, 11), MODEL)
    on_threads(ranks, assert_same_as_whole_globe, *case)


class _OneLayer(torch.nn.Module):
    def __init__(self, shifted):
        super().__init__()
        self.attention = CosineAttention(4, 2, (1, 16, 4), (1, 4, 4), shifted)

    def forward(self, x):
        return self.attention(x.permute(0, 2, 3, 1)[:, None])[:, 0].permute(0, 3, 1, 2)


def _sent(manager, shifted):
    """Messages and rows that one rank sends in a forward, with windows that end where bands do."""
    with RANDOM_LOCK:
        layer = _OneLayer(shifted)
    model = shard_model(layer, manager, (1, 4, 16, 4))
    traffic = manager.transport.traffic
    with torch.no_grad():
        model(torch.randn(1, 4, 4, 4))
    return traffic.messages, traffic.bytes // (4 * 4 * 4)


def test_only_shifted_windows_send_half_a_window_each_way():
    assert on_threads(4, _sent, False) == [(0, 0)] * 4
    assert on_threads(4, _sent, True) == [(2, 4)] * 4


@pytest.mark.slow
def test_a_step_sends_the_least_for_its_bands():
    config = Composer("train").compose_config(["model=swin"]).model
    with torch.device("meta"):
        model = build_model(config, FIELDS, (64, 128))
    shape = (1, FIELDS.inputs, 64, 128)
    for ranks in (2, 3):
        plan = plan_report(model, shape, ranks)
        assert not plan.problems
        sent = sum(part.bytes for part in (*plan.forward, *plan.backward))
        assert sent == sum(level.least_bytes for level in plan.levels) > 0


FUXI = ["model.width=768", "model.depths=[0,48,0]", "model.heads=[24,48,24]"]


@pytest.mark.slow
def test_presets_run_on_their_grids_and_are_as_large_as_was_published():
    for keys, fields, grid, published in (
        (["model=swin"], FIELDS, (24, 48), None),
        (["model=swin_small"], FIELDS, (121, 240), None),
        (["model=swin_base"], ERA5, (721, 1440), 88e6),  # SwinV2-B
        (["model=swin_base", *FUXI], ERA5, (721, 1440), 1.5e9),
    ):
        config = Composer("train").compose_config(keys).model
        with torch.device("meta"):
            model = build_model(config, fields, grid)
            made = model(torch.empty(1, fields.inputs, *grid))
        assert made.shape == (1, fields.outputs, *grid), keys
        size = sum(p.numel() for p in model.parameters())
        assert published is None or size == pytest.approx(published, rel=0.1), keys


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"model.depths: only the first and the last stage"):
        SwinConfig(depths=[2, 0, 2])
    with pytest.raises(UserError, match=r"model.patch: \[2, 2\] needs a grid of at least 5 rows"):
        _swin((4, 64))
