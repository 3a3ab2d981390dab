"""The CrossFormer: any grid, its attention and embedding, its presets, equality under sharding."""

from __future__ import annotations

import copy

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from credit_dp.config.model import CrossFormerConfig
from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.models.crossformer import (
    CrossScaleEmbedding,
    LongDistanceAttention,
    ShortDistanceAttention,
    SubPixelConv,
    split_in_halves,
)
from tests.domain_parallel.equality import MODEL, RANDOM_LOCK, assert_same_as_whole_globe
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers

NARROW = {
    "channels": [8, 8],
    "depths": [1, 1],
    "head_channels": 4,
    "kernels": [[2, 4, 8], [2, 4]],
    "strides": [2, 2],
    "local_windows": [2, 4],
    "global_windows": [4, 2],
    "mlp_ratio": 1,
    "groups": 4,
}
FIELDS = Fields.flat(2, 1)


def _model(grid, **options):
    return build_model(CrossFormerConfig(**{**NARROW, **options}), FIELDS, grid)


def _same(manager, rows, columns=13, batch=2, **options):
    def build():
        return _model((rows, columns), **options)

    assert_same_as_whole_globe(manager, build, (), (batch, 3, rows, columns), MODEL)


VARIANTS = {
    "two levels": {},
    "one level": {
        "channels": [8], "depths": [2], "kernels": [[3, 5]], "strides": [1],
        "local_windows": [3], "global_windows": [2],
    },
    "three levels": {
        "channels": [4, 8, 8], "depths": [1, 1, 1], "kernels": [[4, 8], [2], [4]],
        "strides": [2, 2, 2], "local_windows": [2, 2, 2], "global_windows": [2, 4, 1],
    },
    "odd strides": {"strides": [3, 1], "kernels": [[3, 5], [1, 3]]},
    "mirror": {"poles": "mirror"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "rows", "variant"),
    tiers(
        fast=[(3, 33, "two levels")],
        slow=[(3, 33, "three levels"), (3, 33, "odd strides")],
        exhaustive=[(4, 61, "two levels"), (3, 33, "one level"), (2, 33, "mirror")],
    ),
)
def test_sharded_equals_whole(ranks, rows, variant):
    on_threads(ranks, _same_variant, rows, VARIANTS[variant])


def _same_variant(manager, rows, options):
    _same(manager, rows, 14, **options)


def _same_when_computed_again(manager):
    _same(manager, 33, activation_checkpointing=True, depths=[2, 1])


@pytest.mark.slow
def test_sharded_equals_whole_when_computed_again():
    """On processes: computing again sets torch's random state, which threads share."""
    on_processes(2, _same_when_computed_again)


def _same_with_spectral_norm(manager):
    _same(manager, 32, spectral_norm=True)


@pytest.mark.slow
def test_sharded_equals_whole_with_spectral_norm():
    on_threads(2, _same_with_spectral_norm)


def _sent(manager, act):
    before = vars(manager.transport.traffic).copy()
    made = act()
    after = vars(manager.transport.traffic)
    return made, after["messages"] - before["messages"], after["bytes"] - before["bytes"]


class _Alone(nn.Module):
    def __init__(self, layer, channels=1):
        super().__init__()
        self.layer, self.channels = layer, channels

    def forward(self, x):
        return self.layer(x.movedim(1, self.channels)).movedim(self.channels, 1)


def _traffic_of_attention(manager):
    """Two ranks with half of the rows: of each group, and of its output, half has to cross."""
    with RANDOM_LOCK:
        torch.manual_seed(0)
        whole, x = _Alone(LongDistanceAttention(8, 4, 4), -1), torch.randn(2, 8, 32, 8)
    model = shard_model(copy.deepcopy(whole), manager, x.shape)
    band = shard_tensor(x, manager=manager).requires_grad_()
    y, messages, size = _sent(manager, lambda: model(band))
    input_rows = x[:, :, :8].numel() * x.element_size()
    assert (messages, size) == (2, 2 * input_rows)  # there and back
    assert _sent(manager, lambda: y.sum().backward())[1:] == (2, 2 * input_rows)


def _traffic_of_embedding(manager):
    with RANDOM_LOCK:
        torch.manual_seed(0)
        whole = _Alone(CrossScaleEmbedding(3, 8, [2, 4, 8], 2, "earth"))
        x = torch.randn(2, 3, 32, 8)
    model = shard_model(copy.deepcopy(whole), manager, x.shape)
    band = shard_tensor(x, manager=manager).requires_grad_()
    y, messages, size = _sent(manager, lambda: model(band))
    largest = (8 - 2) // 2  # rows beyond an edge that the largest kernel reaches
    row = x[:, :, 0].numel() * x.element_size()
    assert (messages, size) == (1, largest * row)
    assert _sent(manager, lambda: y.sum().backward())[1:] == (messages, size)


def test_attention_returns_its_output_and_branches_of_an_embedding_share_one_exchange():
    on_threads(2, _traffic_of_attention)
    on_threads(2, _traffic_of_embedding)


def test_any_grid():
    for grid in ((32, 64), (9, 15), (33, 17), (16, 16), (121, 30)):
        assert _model(grid)(torch.zeros(1, 3, *grid)).shape == (1, 2, *grid)


def test_padding_shows_the_globe_beyond_its_edges_and_is_cropped():
    model = _model((33, 13))
    x = torch.randn(1, 3, 33, 13)
    wide = model.enlarge(x)
    assert wide.shape == (1, 3, 48, 16)
    assert torch.equal(model.crop(wide), x)
    assert torch.equal(wide[..., 7, 2:15], x[..., 0, :].roll(6, -1))
    assert torch.equal(wide[..., 8, :2], x[..., 0, -2:])


@pytest.mark.parametrize("kind", [ShortDistanceAttention, LongDistanceAttention])
def test_attention_equals_a_formula_of_indices(kind):
    size, heads, rows, columns = 2, 2, 6, 8
    spread = kind is LongDistanceAttention
    layer = kind(32, size, 16).double()  # 8 numbers wide is the network of the bias
    x = torch.randn(1, rows, columns, 32, dtype=torch.float64)

    def members(at, extent):
        apart = extent // size
        first = at % apart if spread else at // size * size
        return [first + step * (apart if spread else 1) for step in range(size)]

    query, key, value = layer.qkv(x)[0].view(rows, columns, 3, heads, 16).unbind(2)
    expected = torch.empty_like(x)
    for row in range(rows):
        for column in range(columns):
            down, along = members(row, rows), members(column, columns)
            mine = down.index(row), along.index(column)
            scores, seen = [], []
            for i, other_row in enumerate(down):
                for j, other_column in enumerate(along):
                    offset = torch.tensor([mine[0] - i, mine[1] - j], dtype=torch.float64)
                    dot = (query[row, column] * key[other_row, other_column]).sum(-1)
                    scores.append(dot / 16**0.5 + layer.position_bias.layers(offset))
                    seen.append(value[other_row, other_column])
            weights = torch.stack(scores).softmax(0)
            made = (weights[..., None] * torch.stack(seen)).sum(0).flatten()
            expected[0, row, column] = layer.project(made)
    torch.testing.assert_close(layer(x), expected)


def test_longitude_shifts_by_whole_windows():
    """Of a globe that needs no columns more, and without groups of far columns, which have ends."""
    model = _model((32, 32), global_windows=[1, 1]).double()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    window = 4 * 4  # columns of the coarser level's windows
    torch.testing.assert_close(model(x.roll(window, -1)), model(x).roll(window, -1))


@pytest.mark.slow
def test_channels_are_split_in_halves():
    for channels, parts, shares in ((128, 4, [64, 32, 16, 16]), (6, 2, [3, 3]), (5, 1, [5])):
        assert split_in_halves(channels, parts) == shares
        embedding = CrossScaleEmbedding(2, channels, [8, 2, 4, 16][:parts][::-1], 2, "mirror")
        assert [branch.conv.out_channels for branch in embedding.branches] == shares
        sizes = [branch.conv.kernel_size[0] for branch in embedding.branches]
        assert sizes == sorted(sizes), channels


@pytest.mark.slow
def test_finer_points_are_equal_at_first():
    made = SubPixelConv(3, 2, 2, "earth")(torch.randn(1, 3, 6, 8))
    coarse = made[..., ::2, ::2]
    torch.testing.assert_close(made, coarse.repeat_interleave(2, -1).repeat_interleave(2, -2))


@pytest.mark.slow
def test_spectral_norm_bounds_all_weights():
    model = _model((16, 16), spectral_norm=True).eval()
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer in layers:
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), 2) < 1.5
    assert len(layers) > 20


def _gradients(model, x):
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_computing_again_gives_the_same_gradients():
    """Also of stochastic depth without draws, which takes torch's random numbers."""
    options = {"depths": [2, 2], "dropout": 0.4, "stochastic_depth": 0.4}
    x = torch.randn(2, 3, 16, 16)
    kept = _model((16, 16), **options)
    again = _model((16, 16), **options, activation_checkpointing=True)
    again.load_state_dict(kept.state_dict())
    for a, b in zip(_gradients(kept, x), _gradients(again, x), strict=True):
        torch.testing.assert_close(a, b)


def test_drops_in_training_only():
    x = torch.randn(2, 3, 16, 16)
    for option in ("dropout", "stochastic_depth"):
        model = _model((16, 16), depths=[2, 2], **{option: 0.5})
        assert not torch.equal(model(x), model(x)), option
        model.eval()
        assert torch.equal(model(x), model(x)), option


def _preset(name):
    values = OmegaConf.load(f"conf/model/{name}.yaml")
    values.pop("defaults")
    return CrossFormerConfig(**OmegaConf.to_container(values))


@pytest.mark.slow
def test_the_base_preset_is_as_large_as_wxformer():
    for upper, theirs in ((4, 154_684_148), (5, 155_126_486)):
        # With 13 levels, 4 variables at the surface and 4 that are input only.
        fields = Fields.flat(13 * upper + 4, 4)
        with torch.device("meta"):
            model = build_model(_preset("crossformer_base"), fields, (721, 1440))
        ours = sum(p.numel() for p in model.parameters())
        assert 0.95 * theirs < ours < 1.05 * theirs, upper


PLANNED = {
    "crossformer": [(24, 48), (25, 48), (64, 128)],
    "crossformer_small": [(32, 64), (121, 240)],
    "crossformer_base": [(721, 1440)],
}


@pytest.mark.slow
def test_presets_run_on_their_grids():
    for name, grids in PLANNED.items():
        for rows, columns in grids:
            with torch.device("meta"):
                model = build_model(_preset(name), FIELDS, (rows, columns))
                made = model(torch.empty(1, 3, rows, columns))
            assert made.shape == (1, 2, rows, columns), name


def _planned_rows(ranks, rows):
    manager = DomainParallelManager(
        ranks, ranks, transport=ThreadTransport(ThreadWorld(ranks, timeout=1.0), 0)
    )
    with torch.device("meta"):
        model = build_model(_preset("crossformer_base"), FIELDS, (rows, 1440))
    shard_model(model, manager, (1, 3, rows, 1440))
    return manager.partition(50).sizes


@pytest.mark.slow
def test_base_can_be_sharded_up_to_its_coarsest_rows():
    assert min(_planned_rows(50, 721)) == 1


def test_grids_that_are_too_small_are_refused():
    for grid in ((4, 64), (64, 4)):
        with pytest.raises(UserError, match=r"model.local_windows: .* multiple of 16 .* data.grid"):
            build_model(CrossFormerConfig(**NARROW), FIELDS, grid)
    with pytest.raises(UserError, match=r"model.kernels: those of level 1 .* up to 16 rows"):
        _model((16, 16), kernels=[[2], [18]])
