"""Convolutions on bands equal the convolution of the whole globe, whatever their options."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelConv1d,
    DomainParallelConv2d,
    DomainParallelConv3d,
    convert_to_domain_parallel,
)
from credit_dp.domain_parallel.convert import _needs_halo_conv2d, _needs_halo_conv3d
from credit_dp.errors import UserError
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.domain_parallel.models import MOVE, MOVE_BACK, Moved
from tests.ranks import PROCESSES, on_processes, on_threads, seeded

RANKS = st.sampled_from([2, 3, 4, 8])
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# Sizes of the other dimensions than the rows': columns last, times or levels first.
OTHERS = {1: (), 2: (6,), 3: (5, 6)}


def _along(spatial, row, others):
    """Return a setting of all spatial dimensions, the rows' at its index."""
    return (*others[: spatial - 2], row, *others[spatial - 2 :]) if spatial > 1 else (row,)


@st.composite
def cases(draw, spatial):
    """Options, and a height at which no rank is without an output row; often some has only one."""
    ranks, mode = draw(RANKS), draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    kernel, stride, dilation = (draw(st.integers(1, n)) for n in (6, 4, 3))
    padding = draw(st.integers(0, 5))
    others = [[draw(st.integers(a, b)) for _ in OTHERS[spatial]] for a, b in ((1, 3), (1, 2))]
    options = {
        "kernel_size": _along(spatial, kernel, others[0]),
        "stride": _along(spatial, stride, others[1]),
        "padding": _along(spatial, padding, [draw(st.integers(0, 2)) for _ in OTHERS[spatial]]),
        "dilation": _along(spatial, dilation, [draw(st.integers(1, 2)) for _ in OTHERS[spatial]]),
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
        "padding_mode": mode,
    }
    named = draw(st.sampled_from([None, None, "same", "valid"]))
    if named is not None:
        stride = 1 if named == "same" else stride
        options |= {"padding": named} | ({"stride": 1} if named == "same" else {})
        padding = dilation * (kernel - 1) // 2 if named == "same" else 0
    least = (ranks - 1) * stride + dilation * (kernel - 1) + 1 - 2 * padding
    height = max(ranks, least, padding + 2) + draw(st.integers(0, 12))
    return ranks, options, height


def _shape(spatial, height, batch):
    """The input's shape; a 1d convolution's rows are in columns, which it gets as samples."""
    others = OTHERS[spatial] or (3,)
    return (*batch, 2, *others[:-1], height, others[-1])


def _conv(spatial, options):
    conv = CONVS[spatial](2, 4, **options)
    return conv if spatial > 1 else Moved(conv, "columns")


def _exists(spatial, options, shape, ranks):
    """Return whether torch accepts the padding for these columns, and every rank gets a row."""
    try:
        made = _conv(spatial, options).to("meta")(torch.empty(shape, device="meta"))
    except RuntimeError:
        return False
    return made.shape[-2] >= ranks


def _assert_exact(spatial, case, batch=(2,)):
    ranks, options, height = case
    shape = _shape(spatial, height, batch)
    on_threads(ranks, assert_same_as_whole_globe, _conv, (spatial, options), shape)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data())
def test_conv(spatial, data):
    ranks, options, height = case = data.draw(cases(spatial))
    assume(_exists(spatial, options, _shape(spatial, height, (2,)), ranks))
    _assert_exact(spatial, case)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_without_a_batch(mode, stride):
    options = {"kernel_size": 3, "stride": stride, "padding": 1, "padding_mode": mode}
    _assert_exact(2, (3, options, 11), batch=())


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_one_row_per_rank(spatial, mode, ranks):
    options = {"kernel_size": 7, "padding": 3, "padding_mode": mode}
    if spatial == 3:
        options = {"kernel_size": (1, 7, 1), "padding": (0, 3, 0), "padding_mode": mode}
    _assert_exact(spatial, (ranks, options, ranks))


def _fixed(kind, *args, **options):
    return nn.Sequential(kind(2, 4, *args, **options), nn.SiLU(), nn.Conv2d(4, 2, 3, padding=1))


def _fixed_3d(*args, **options):
    return nn.Conv3d(2, 3, *args, **options)


CASES = {
    "dilated": (3, 1, 2, 2),
    "even kernel": (4, 1, 1),
    "no padding": (3, 1, 0),
    "much padding": (3, 1, 2),
    "strided": (3, 2, 1),
    "strided, even kernel": (4, 2, 1),
    "patches": (4, 4),
    "stride beyond the kernel": (2, 3),
    "wide": (15, 1, 7),
}


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", PROCESSES)
def test_on_gloo_ranks(ranks, name):
    # Rows that no number of ranks divides, and whose bands no stride does.
    args = (_fixed, (nn.Conv2d, *CASES[name]), (2, 2, 37, 5))
    on_processes(ranks, assert_same_as_whole_globe, *args)


@pytest.mark.slow
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_on_gloo_ranks(mode):
    args = (_padded, (mode,), (2, 2, 18, 5))
    on_processes(4, assert_same_as_whole_globe, *args)


def _padded(mode):
    return _fixed(nn.Conv2d, 3, padding="same", padding_mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", PROCESSES)
def test_conv3d_and_conv1d_on_gloo_ranks(ranks):
    args = (_fixed_3d, ((1, 3, 3), (1, 2, 2), (0, 1, 1)), (1, 2, 3, 21, 6))
    on_processes(ranks, assert_same_as_whole_globe, *args)
    args = (_conv, (1, {"kernel_size": 5, "stride": 2, "padding": 1}), (2, 2, 21, 3))
    on_processes(ranks, assert_same_as_whole_globe, *args)


@pytest.mark.parametrize("height", [181, 721])
def test_rows_of_real_grids(height):
    args = (_fixed, (nn.Conv2d, 3, 2, 1), (1, 2, height, 4), 1e-11)
    on_threads(8, assert_same_as_whole_globe, *args)


@pytest.mark.parametrize(
    ("move", "conv"),
    [
        ("samples", nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular")),
        ("samples", nn.Conv1d(2, 4, 3, stride=2)),
        ("tokens", nn.Conv1d(2, 4, 5, padding=2)),
        ("turned", nn.Conv2d(2, 4, (3, 1), padding=(1, 0), padding_mode="circular")),
        ("times", nn.Conv3d(2, 4, (1, 1, 3), padding=(0, 0, 1))),
        ("times", nn.Conv3d(2, 4, (1, 1, 3), stride=(1, 2, 1), padding=(0, 1, 1))),
        ("columns", nn.Conv1d(2, 4, 1)),
        ("nothing", nn.Conv2d(2, 4, (1, 3), padding=(0, 1), padding_mode="circular")),
        ("nothing", nn.Conv2d(2, 4, 1, padding=1)),
    ],
)
@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_rows_elsewhere_than_where_the_kernel_is(ranks, move, conv):
    def build():
        return Moved(copy.deepcopy(conv), move)

    on_threads(ranks, assert_same_as_whole_globe, build, (), (2, 2, 9, 6))


@pytest.mark.parametrize(
    ("move", "conv", "message"),
    [
        ("turned", nn.Conv2d(2, 4, 3, padding=1), "conv: DomainParallelConv2d: rows are in dim"),
        ("turned", nn.Conv2d(2, 4, (1, 3)), "aten.convolution: mixes rows"),
        ("times", nn.Conv3d(2, 4, (3, 1, 1)), "aten.convolution: mixes rows"),
        ("times", nn.Conv3d(2, 4, (3, 3, 1)), "conv: DomainParallelConv3d: rows are in dim"),
        ("channels", nn.Conv2d(9, 9, 1), "mixes rows"),
    ],
)
def test_rows_under_another_side_of_the_kernel_are_refused(move, conv, message):
    def refused(manager):
        with pytest.raises(UserError, match=message) as caught:
            convert_to_domain_parallel(
                Moved(copy.deepcopy(conv), move),
                manager,
                input_shape=(2, 2, 9, 6),
                whole_ops="refuse",
            )
        assert "\n" not in str(caught.value)

    on_threads(3, refused)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Conv2d(2, 2, 4, 4)], "0: 3 rows can't be shared by 4 ranks. Lower parallel.domain to"),
        ([nn.Identity(), nn.Conv2d(2, 2, 11)], "1: 2 rows can't be shared by 4 ranks"),
        ([nn.ConvTranspose2d(2, 2, 1, padding=5)], "0: 2 rows can't be shared by 4 ranks"),
    ],
)
def test_fewer_output_rows_than_ranks_are_refused(layers, message):
    def refused(manager):
        model = nn.Sequential(*copy.deepcopy(layers))
        with pytest.raises(UserError, match=message):
            convert_to_domain_parallel(
                model, manager, input_shape=(1, 2, 12, 12), whole_ops="refuse"
            )

    on_threads(4, refused)


class _OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.flip(-1))


def test_a_subclass_is_not_taken_for_its_parent():
    def refused(manager):
        model = nn.Sequential(_OwnForward(2, 2, 3, padding=1))
        with pytest.raises(UserError, match=r"test_conv.py:\d+: aten.convolution: mixes rows"):
            convert_to_domain_parallel(model, manager, input_shape=(1, 2, 9, 6), whole_ops="refuse")

    on_threads(2, refused)


def _twice():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(conv, nn.SiLU(), nn.Sequential(conv))


@pytest.mark.usefixtures("overlap")
def test_a_layer_under_two_names():
    on_threads(3, assert_same_as_whole_globe, _twice, (), (2, 2, 9, 6))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "halo"), [(3, 1, 1, 1), (4, 2, 1, 1), (32, 2, 15, 15)]
)
def test_halo_width(kernel, stride, padding, halo):
    conv = nn.Conv2d(1, 1, kernel, stride, padding)
    layer = DomainParallelConv2d(conv)
    assert layer.halo_width == halo
    assert layer.halo_exchange.halo_width == halo
    assert layer.conv is conv
    assert layer.weight is conv.weight
    assert layer.bias is conv.bias
    assert layer.shard_dim == -2


def test_attributes_and_rules():
    conv = nn.Conv3d(1, 1, (3, 5, 1))
    layer = DomainParallelConv3d(conv)
    assert (layer.shard_dim, layer.dim, layer.halo_exchange.halo_width) == (3, -2, 2)
    assert layer.conv is conv
    line = DomainParallelConv1d(nn.Conv1d(1, 1, 3))
    assert (line.shard_dim, line.dim, line.halo_exchange.dim) == (-1, -1, -1)
    assert _needs_halo_conv3d(conv)
    assert not _needs_halo_conv3d(nn.Conv3d(1, 1, (3, 1, 3)))
    assert _needs_halo_conv2d(nn.Conv2d(1, 1, (3, 1)))
    assert not _needs_halo_conv2d(nn.Conv2d(1, 1, (1, 3)))


def test_wrappers_shard_rows_only():
    for wrong in (-1, 3, -3):
        with pytest.raises(UserError, match="only latitude rows, its dimension -2"):
            DomainParallelConv2d(nn.Conv2d(1, 1, 3), shard_dim=wrong)
    with pytest.raises(UserError, match="only latitude rows, its dimension -1"):
        DomainParallelConv1d(nn.Conv1d(1, 1, 3), shard_dim=-2)
    with pytest.raises(UserError, match="only latitude rows"):
        DomainParallelConv3d(nn.Conv3d(1, 1, 3), shard_dim=2)
    assert DomainParallelConv2d(nn.Conv2d(1, 1, 3), shard_dim=2).dim == -2
    assert DomainParallelConv1d(nn.Conv1d(1, 1, 3), shard_dim=2).dim == -1


def _by_hand(manager, wrapper, conv, rows, shape):
    """Build a wrapper without the converter, on bands that differ from the balanced ones."""
    generator = seeded(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    layer = wrapper(conv, manager=manager)
    cut = {2: (0, 9, shape[rows]), 3: (0, 1, 7, shape[rows])}[manager.domain_parallel_size]
    start, stop = cut[manager.domain_rank : manager.domain_rank + 2]
    y, expected = layer(x.narrow(rows, start, stop - start)), conv(x)
    made = manager.bands[expected.shape[rows]].rows(manager.domain_rank)
    mine = expected.narrow(rows, made.start, made.stop - made.start)
    torch.testing.assert_close(y, mine, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("wrapper", "conv", "rows", "shape"),
    [
        (DomainParallelConv1d, nn.Conv1d(2, 4, 4, 2, 1), -1, (2, 2, 16)),
        (DomainParallelConv1d, nn.Conv1d(2, 4, 3, 3, padding_mode="circular"), -1, (2, 16)),
        (DomainParallelConv2d, nn.Conv2d(2, 4, 3, 2, 1), -2, (1, 2, 16, 4)),
        (DomainParallelConv2d, nn.Conv2d(2, 4, 3, 3), -2, (1, 2, 15, 4)),
        (DomainParallelConv3d, nn.Conv3d(2, 4, 3, 3, 1), -2, (1, 2, 3, 15, 4)),
        (DomainParallelConv3d, nn.Conv3d(2, 4, 3, 1, 1), -2, (2, 3, 15, 4)),
    ],
)
def test_wrappers_built_by_hand_take_any_bands(ranks, wrapper, conv, rows, shape):
    on_threads(ranks, _by_hand, wrapper, conv.double(), rows, shape)


def test_moves_undo_each_other():
    x = torch.randn(2, 3, 5, 4)
    for name in MOVE:
        assert torch.equal(MOVE_BACK[name](x, MOVE[name](x)), x)
