"""The Pangu-style model: its windows and biases, its channels, and equality under sharding."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from omegaconf import OmegaConf

from credit_dp.config.model import PanguConfig
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.errors import UserError
from credit_dp.fields import Fields
from credit_dp.models import build_model
from credit_dp.models.pangu import CubeEmbedding, CubeRecovery, EarthAttention, bias_index
from credit_dp.models.shifted_windows import WindowBlock, window_columns
from tests.domain_parallel.equality import MODEL, RANDOM_LOCK, assert_same_as_whole_globe
from tests.ranks import assert_same_numbers, on_processes, on_threads
from tests.tables import entry
from tests.tier_cases import tiers

# Two variables on three levels and two at the surface, in between; a forcing; two states.
FIELDS = Fields(((1, 2, 3), (5, 6, 7)), (0, 4), others=1, frames=2)
CONFIG = {
    "width": 4,
    "depths": [2, 2, 1, 1],
    "heads": [2, 2, 1, 1],
    "patch": [2, 2, 2],
    "window": [2, 3, 4],
    "mlp_ratio": 1,
}


def _pangu(grid, fields=FIELDS, **changes):
    return build_model(PanguConfig(**{**CONFIG, **changes}), fields, grid)


@pytest.mark.parametrize(
    ("ranks", "rows"),
    tiers(
        fast=[],
        slow=[(3, 61)],
        exhaustive=[(2, 33), (8, 33)],  # 9 coarse rows in 3 windows: most ranks have none
    ),
)
def test_sharded_equals_whole(ranks, rows):
    case = (_pangu, ((rows, 10),), (1, FIELDS.inputs, rows, 10), MODEL)
    on_threads(ranks, assert_same_as_whole_globe, *case)


@pytest.mark.slow
def test_sharded_equals_whole_on_processes():
    case = (_pangu, ((33, 10),), (2, FIELDS.inputs, 33, 10), MODEL)
    on_processes(2, assert_same_as_whole_globe, *case)


class _OneLayer(torch.nn.Module):
    """Attention, with the rows of its input in the dimension where a globe's are."""

    def __init__(self, globe, window, shifted):
        super().__init__()
        self.attention = EarthAttention(4, 2, globe, window, shifted)
        torch.nn.init.normal_(self.attention.table)

    def forward(self, x):
        return self.attention(x.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)


@pytest.mark.parametrize(
    ("ranks", "rows", "window", "shifted"),
    tiers(
        fast=[
            (3, 9, (2, 4, 3), True),
            (3, 16, (2, 4, 4), False),
            (3, 5, (4, 8, 16), True),  # larger than the globe
        ],
        slow=[(8, 9, (2, 4, 4), True)],  # 3 windows
        exhaustive=[(2, 16, (2, 4, 4), True), (4, 31, (2, 6, 4), True)],
    ),
)
def test_sharded_attention_equals_whole(ranks, rows, window, shifted):
    case = (_OneLayer, ((3, rows, 8), window, shifted), (2, 4, 3, rows, 8), MODEL)
    on_threads(ranks, assert_same_as_whole_globe, *case)


def test_the_bias_depends_on_levels_rows_and_the_distance_of_columns():
    levels, rows, columns = window = (2, 3, 4)
    index = bias_index(window).view(24, 24)
    tokens = list(itertools.product(range(levels), range(rows), range(columns)))
    entry = {}
    for (i, (level, row, column)), (j, (level_, row_, column_)) in itertools.product(
        enumerate(tokens), enumerate(tokens)
    ):
        pair = (level, level_, row, row_, column - column_)
        assert entry.setdefault(pair, index[i, j].item()) == index[i, j]
    assert sorted(entry.values()) == list(range(levels**2 * rows**2 * (2 * columns - 1)))


def test_attention_equals_a_loop_over_windows():
    for shifted, is_periodic, columns in (
        (False, True, 6),
        (True, True, 6),
        (True, False, 6),
        (True, False, 7),
    ):
        layer = EarthAttention(4, 2, (3, 5, columns), (2, 2, 3), shifted, is_periodic).double()
        torch.nn.init.normal_(layer.table)
        x = torch.randn(2, 3, 5, columns, 4, dtype=torch.float64)
        case = f"shifted {shifted}, periodic {is_periodic}, {columns} columns"
        with entry(case):
            torch.testing.assert_close(layer(x), _slow_attention(layer, x))


def _slow_attention(layer, x):
    """Token by token, as the layer's contract says."""
    wide, tall, heads = layer.window, layer.counts, layer.heads
    full = [n * w for n, w in zip(tall, wide, strict=True)]
    padded = x.new_zeros(len(x), *full, x.shape[-1])
    padded[:, : x.shape[1], : x.shape[2], : x.shape[3]] = x
    query, key, value = layer.qkv(padded).unflatten(-1, (3, heads, -1)).unbind(-3)
    places = list(itertools.product(*map(range, full)))
    shift = layer.shift
    moved = {p: [(i - s) % n for i, s, n in zip(p, shift, full, strict=True)] for p in places}
    windows = {p: tuple(i // w for i, w in zip(m, wide, strict=True)) for p, m in moved.items()}
    within = {p: [i % w for i, w in zip(m, wide, strict=True)] for p, m in moved.items()}
    sides = {p: [i < s for i, s in zip(p, shift, strict=True)] for p in places}  # from afar
    out = torch.zeros_like(padded)
    for p in places:
        level, row, column = windows[p]
        near = [q for q in places if windows[q] == windows[p]]
        if level == tall[0] - 1:
            near = [q for q in near if sides[q][0] == sides[p][0]]
        if row == tall[1] - 1:
            near = [q for q in near if sides[q][1] == sides[p][1]]
        if column == tall[2] - 1 and not layer.is_periodic:
            near = [q for q in near if sides[q][2] == sides[p][2]]
        entries = [_entry(within[p], within[q], wide) for q in near]
        at = tuple(torch.tensor(near).T)
        logits = (query[:, *p][:, None] * key[:, *at]).sum(-1) / query.shape[-1] ** 0.5
        weights = (logits + layer.table[level, row][:, entries].T).softmax(1)
        out[:, *p] = (weights[..., None] * value[:, *at]).sum(1).flatten(1)
    return layer.projection(out)[:, : x.shape[1], : x.shape[2], : x.shape[3]]


def _entry(mine, other, window):
    levels, rows, columns = window
    pair = (mine[0] * levels + other[0]) * rows + mine[1]
    return (pair * rows + other[1]) * (2 * columns - 1) + mine[2] - other[2] + columns - 1


def _block(globe, window, shifted):
    config = PanguConfig(**{**CONFIG, "width": 4})
    return WindowBlock(EarthAttention(4, 2, globe, window, shifted), 4, config, 0.0)


def test_the_ends_of_levels_and_rows_do_not_influence_each_other():
    globe = [4, 8, 8]
    block = _block(tuple(globe), (2, 4, 4), shifted=True)
    x = torch.randn(1, *globe, 4)
    for dim, size in ((1, 4), (2, 8)):
        changed = x.clone()
        changed.select(dim, 0).add_(1.0)
        difference = (block(changed) - block(x)).abs().amax([i for i in range(5) if i != dim])
        assert difference[0] > 1e-3, dim
        assert not difference[size // 2 :].any(), dim


def test_longitude_is_periodic():
    model = _pangu((8, 32))  # 16 columns of patches and 8, in windows of 4
    x = torch.randn(1, FIELDS.inputs, 8, 32)
    torch.testing.assert_close(model(x.roll(16, -1)), model(x).roll(16, -1))
    for columns, window in ((8, 4), (10, 6)):  # also where the window does not divide the columns
        block = _block((2, 6, columns), (2, 3, window), shifted=True)
        x = torch.randn(1, 2, 6, columns, 4)
        east = x.clone()
        east[:, :, :, 0] += 1
        assert (block(east) - block(x))[:, :, :, -1].any(), columns


def test_windows_go_around_the_globe_where_a_good_one_divides_it():
    cases = ((8, 64, 8), (8, 60, 6), (12, 180, 12), (8, 5, 5), (4, 5, 4), (8, 61, 8), (3, 9, 3))
    for window, columns, expected in cases:
        assert window_columns(window, columns) == expected, (window, columns)


def test_channels_come_back_in_the_order_of_the_state():
    size, patch = (3, 5, 7), (2, 2, 2)
    width = 2 * 8 + 2 * 4  # of a cube's values, and of a surface patch's
    fields = Fields(FIELDS.upper, FIELDS.surface)
    embedding = CubeEmbedding(fields, size, patch, width)
    recovery = CubeRecovery(fields, size, patch, width)
    with torch.no_grad():  # tokens hold the values themselves
        for convolution, first, channels in [
            (embedding.upper[1], 0, 16),
            (recovery.upper[0], 0, 16),
            (embedding.surface[1], 16, 8),
            (recovery.surface[0], 16, 8),
        ]:
            torch.nn.init.zeros_(convolution.bias)
            values = torch.eye(channels).view(channels, 2, *convolution.kernel_size)
            torch.nn.init.zeros_(convolution.weight)[first : first + channels] = values
    x = torch.randn(2, fields.inputs, 5, 7)
    torch.testing.assert_close(recovery(embedding(x)), x)


def test_every_frame_and_forcing_goes_in():
    embedding = CubeEmbedding(FIELDS, (3, 4, 4), (1, 2, 2), 4)
    x = torch.randn(1, FIELDS.inputs, 4, 4, requires_grad=True)
    embedding(x).square().sum().backward()
    assert (x.grad.abs().sum((0, 2, 3)) > 0).all()
    upper = [c + frame * 8 for frame in (0, 1) for c in (1, 2, 3, 5, 6, 7)]
    assert embedding.upper_channels.tolist() == upper
    assert embedding.surface_channels.tolist() == [0, 4, 8, 12, 16]


def test_any_grid_also_without_variables_at_the_surface():
    for others in (0, 2):
        fields = Fields(((0, 1),), (), others)
        model = _pangu((8, 8), fields)
        assert (model.embedding.surface is None) == (not others)
        assert model(torch.zeros(1, fields.inputs, 8, 8)).shape == (1, 2, 8, 8)
    for grid in ((32, 64), (9, 7), (5, 5), (121, 24)):
        assert _pangu(grid)(torch.zeros(1, FIELDS.inputs, *grid)).shape == (1, 8, *grid)


def test_checkpointing_gives_the_same_gradients():
    torch.manual_seed(0)
    plain = _pangu((9, 8)).double()
    again = _pangu((9, 8), activation_checkpointing=True).double()
    again.load_state_dict(plain.state_dict())
    x = torch.randn(1, FIELDS.inputs, 9, 8, dtype=torch.float64)
    for model in (plain, again):
        model(x).square().sum().backward()
    for kept, computed in zip(plain.parameters(), again.parameters(), strict=True):
        assert_same_numbers(computed.grad, kept.grad)


ERA5 = Fields(
    tuple(tuple(range(13 * v, 13 * v + 13)) for v in range(5)), tuple(range(65, 69)), others=3
)
SMALL = Fields(((0, 1, 2), (3, 4, 5)), (6,), others=4)


def _preset(name):
    values = OmegaConf.load(f"conf/model/{name}.yaml")
    values.pop("defaults")
    return PanguConfig(**OmegaConf.to_container(values))


def test_presets_build():
    for name, fields, grid in (
        ("pangu", SMALL, (32, 64)),
        ("pangu_small", SMALL, (121, 240)),
        ("pangu_base", ERA5, (721, 1440)),
    ):
        with torch.device("meta"):
            model = build_model(_preset(name), fields, grid)
    # The last has as many parameters as were published.
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(64e6, rel=0.05)
    tables = [m.table.shape for m in model.modules() if isinstance(m, EarthAttention)]
    entries = (2 * 12 - 1) * 6**2 * 2**2
    assert set(tables) == {(4, 31, 6, entries), (4, 16, 12, entries)}


def test_what_does_not_fit_is_refused_in_one_line():
    for fields, grid, said in (
        (Fields.flat(3), (32, 64), "model.name: pangu needs variables on levels, but data.prog"),
        (FIELDS, (4, 64), "model.patch: [2, 2, 2] needs a grid of at least 5 rows and 5 columns"),
    ):
        with pytest.raises(UserError, match=re.escape(said)) as raised:
            build_model(PanguConfig(**CONFIG), fields, grid)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="EarthAttention: was built for 8 rows, got 9"):
        EarthAttention(4, 2, (1, 8, 8), (1, 4, 4), shifted=False)(torch.zeros(1, 1, 9, 8, 4))


def _sent(manager, shifted):
    """Messages and rows that one rank sends in a forward, with windows that end where bands do."""
    with RANDOM_LOCK:
        layer = _OneLayer((2, 16, 4), (2, 4, 4), shifted)
    model = shard_model(layer, manager, (1, 4, 2, 16, 4))
    traffic = manager.transport.traffic
    with torch.no_grad():
        model(torch.randn(1, 4, 2, 4, 4))
    return traffic.messages, traffic.bytes // (2 * 4 * 4 * 4)


def test_only_shifted_windows_send_half_a_window_each_way():
    """Two rows go to the neighbour whose window they are in, and two come home."""
    assert on_threads(4, _sent, False) == [(0, 0)] * 4
    assert on_threads(4, _sent, True) == [(2, 4)] * 4
