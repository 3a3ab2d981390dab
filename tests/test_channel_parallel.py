"""Transposes of rows to channels, and a depthwise convolution whose channels ranks share."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from credit_dp.channel_parallel import (
    DistributedDepthwiseConv2d,
    channel_slice,
    channels_per_rank,
    channels_to_rows,
    rows_to_channels,
)
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.errors import UserError
from tests.ranks import on_processes, on_threads, seeded
from tests.tier_cases import tiers


def _transpose_both_ways(manager, rows, channels, before, columns, dtype=torch.float64):
    """Compare with slices of the global tensor, bit by bit; return what was sent."""
    transport, rank = manager.transport, manager.domain_rank
    generator = seeded(0)
    shape = (*before, sum(channels), sum(rows), columns)
    globe, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    row_slice, local_channels = channel_slice(rows, rank), channel_slice(channels, rank)
    sent_before = vars(transport.traffic).copy()

    band = globe[..., row_slice, :].clone().requires_grad_()
    transposed = rows_to_channels(band, rows, transport, channels)
    assert torch.equal(transposed, globe[..., local_channels, :, :])
    transposed.backward(cotangent[..., local_channels, :, :])
    assert torch.equal(band.grad, cotangent[..., row_slice, :])

    part = globe[..., local_channels, :, :].clone().requires_grad_()
    returned = channels_to_rows(part, rows, transport, channels)
    assert torch.equal(returned, globe[..., row_slice, :])
    returned.backward(cotangent[..., row_slice, :])
    assert torch.equal(part.grad, cotangent[..., local_channels, :, :])
    return {name: value - sent_before[name] for name, value in vars(transport.traffic).items()}


@st.composite
def _cuts(draw):
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    rows = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    channels = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    return ranks, tuple(rows), tuple(channels)


@given(cuts=_cuts(), before=st.sampled_from([(), (2,), (2, 3)]), columns=st.integers(1, 4))
def test_both_ways_and_their_gradients(cuts, before, columns):
    ranks, rows, channels = cuts
    on_threads(ranks, _transpose_both_ways, rows, channels, before, columns)


CASES = [((3, 2), (2, 1)), ((3, 2, 2), (1, 1, 0)), ((1, 4, 2, 2), (3, 0, 2, 1))]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "channels"), tiers(CASES[1:2], CASES[::2]))
def test_on_gloo_ranks(rows, channels):
    on_processes(len(rows), _transpose_both_ways, rows, channels, (2,), 3, torch.bfloat16)


@pytest.mark.parametrize(("rows", "channels"), CASES)
def test_every_entry_moves_once_and_is_counted(rows, channels):
    sent = on_threads(len(rows), _transpose_both_ways, rows, channels, (2,), 3)
    unit = 2 * 3 * 8  # samples x columns x bytes
    for rank, of_rank in enumerate(sent):
        peers = [r for r in range(len(rows)) if r != rank]
        to_channels = [rows[rank] * channels[r] for r in peers]
        to_rows = [channels[rank] * rows[r] for r in peers]
        assert of_rank["bytes"] == 2 * unit * sum(to_channels + to_rows)  # each also as a gradient
        assert of_rank["messages"] == 2 * sum(size > 0 for size in to_channels + to_rows)
        assert of_rank["collectives"] == 0

    for rank in range(len(rows)):  # each counts the messages of all, without data and other ranks
        counting = CountingTransport(rank, len(rows))
        like = {"dtype": torch.float64, "device": "meta", "requires_grad": True}
        band = torch.empty(2, sum(channels), rows[rank], 3, **like)
        transposed = rows_to_channels(band, rows, counting, channels)
        channels_to_rows(transposed, rows, counting, channels).sum().backward()
        assert [s.bytes for s in counting.sent] == [of_rank["bytes"] for of_rank in sent]
        assert [s.messages for s in counting.sent] == [of_rank["messages"] for of_rank in sent]


def test_shares_differ_by_one_at_most():
    assert channels_per_rank(7, 3) == (3, 2, 2)
    assert channels_per_rank(2, 4) == (1, 1, 0, 0)
    assert [channel_slice((3, 2, 2), rank) for rank in range(3)] == [
        slice(0, 3),
        slice(3, 5),
        slice(5, 7),
    ]


def _default_shares(manager):
    rank = manager.domain_rank
    return tuple(rows_to_channels(torch.zeros(5, 2, 3), (2, 2), manager.transport).shape), rank


def test_channels_are_distributed_by_default():
    assert on_threads(2, _default_shares) == [((3, 4, 3), 0), ((2, 4, 3), 1)]


def _refused(manager, function, shape, *args, match):
    rows, *channels = args
    with pytest.raises(UserError, match=match):
        function(torch.zeros(shape), rows, manager.transport, *channels)


def test_wrong_numbers_are_refused():
    wrong = [
        (rows_to_channels, (4, 3, 2), ((2, 2),), r"needs 2 rows, got 3 of \(4, 3, 2\)"),
        (rows_to_channels, (4, 2, 2), ((2, 2), (2, 3)), "needs 5 channels, got 4"),
        (channels_to_rows, (2, 3, 2), ((2, 2), (2, 3)), "needs 4 rows, got 3"),
        (channels_to_rows, (5, 4, 2), ((2, 2), (2, 2)), "needs 2 channels, got 5"),
        (rows_to_channels, (4, 2, 2), ((2, 2, 2),), "rows: needs a number for each of 2 ranks"),
        (channels_to_rows, (2, 4, 2), ((2, 2), (4,)), "channels: needs a number for each of 2"),
    ]

    def refused(manager):
        for function, shape, args, match in wrong:
            _refused(manager, function, shape, *args, match=match)

    on_threads(2, refused)


DOUBLE = {"dtype": torch.float64, "device": "cpu"}


def test_the_documented_interface():
    parameters = inspect.signature(DistributedDepthwiseConv2d).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    empty = inspect.Parameter.empty
    assert defaults == {
        "hidden_dim": empty,
        "kernel_size": empty,
        "num_groups": None,
        "bias": False,
        "dtype": None,
        "device": None,
    }
    layer = DistributedDepthwiseConv2d(12, (5, 3), num_groups=4, bias=True, device="cpu")
    assert (layer.hidden_dim, layer.kernel_size) == (12, (5, 3))
    assert (layer.num_groups, layer.group_dim) == (4, 3)
    assert layer.weight.shape == (4, 5, 3)
    assert layer.bias.shape == (4,)
    assert layer.weight.dtype == torch.float32
    assert layer(torch.randn(2, 12, 7, 9)).shape == (2, 12, 7, 9)

    plain = DistributedDepthwiseConv2d(6, 3, device="cpu")
    assert (plain.kernel_size, plain.num_groups, plain.group_dim) == ((3, 3), 6, 1)
    assert plain.bias is None
    assert list(plain.state_dict()) == ["weight"]


def test_the_default_device():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert DistributedDepthwiseConv2d(2, 3).weight.device.type == expected
    assert DistributedDepthwiseConv2d(2, 3, device="meta").weight.is_meta
    assert DistributedDepthwiseConv2d(2, 3, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_equals_a_depthwise_convolution_with_repeated_weights():
    layer = DistributedDepthwiseConv2d(6, (5, 3), num_groups=3, bias=True, **DOUBLE)
    plain = nn.Conv2d(6, 6, (5, 3), padding="same", groups=6, **DOUBLE)
    with torch.no_grad():
        plain.weight.copy_(layer.weight[[0, 0, 1, 1, 2, 2], None])
        plain.bias.copy_(layer.bias[[0, 0, 1, 1, 2, 2]])
    x = torch.randn(2, 6, 4, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-14)


def test_weights_are_drawn_like_those_of_torch():
    torch.manual_seed(0)
    layer = DistributedDepthwiseConv2d(64, (5, 3), bias=True, **DOUBLE)
    like = nn.Conv2d(64, 64, (5, 3), groups=64, **DOUBLE)
    bound = 15**-0.5
    for drawn, of_torch in ((layer.weight, like.weight), (layer.bias, like.bias)):
        assert 0.9 * bound < drawn.abs().max() <= bound
        assert 0.9 * bound < of_torch.abs().max() <= bound
    before = layer.weight.clone()
    layer.init_weights()
    assert not torch.equal(layer.weight, before)


def test_a_tensor_without_batch_is_an_assertion_error():
    layer = DistributedDepthwiseConv2d(4, 3, device="cpu")
    with pytest.raises(AssertionError, match=r"needs \(B, C, H, W\), got \(4, 5, 6\)"):
        layer(torch.zeros(4, 5, 6))


def test_other_channels_are_a_runtime_error():
    layer = DistributedDepthwiseConv2d(4, 3, device="cpu")
    with pytest.raises(RuntimeError, match=r"needs 4 of 4 channels .*got 3"):
        layer(torch.zeros(1, 3, 5, 6))


def test_groups_that_do_not_divide_the_channels_are_refused():
    for groups in (4, 0, -1, 12):
        with pytest.raises(UserError, match=f"{groups} groups can't share 6 channels .*num_groups"):
            DistributedDepthwiseConv2d(6, 3, num_groups=groups)


def _shared(manager, channels, groups):
    """Convolve this rank's channels of a tensor; sum the gradients as a training step does."""
    torch.manual_seed(0)
    group, rank = manager.domain_group, manager.domain_rank
    unsharded = DistributedDepthwiseConv2d(channels, (5, 3), groups, bias=True, **DOUBLE)
    layer = copy.deepcopy(unsharded)
    x, cotangent = (torch.randn(2, channels, 6, 7, dtype=torch.float64) for _ in range(2))
    x_global = x.clone().requires_grad_()
    expected = unsharded(x_global)
    expected.backward(cotangent)

    local = channels // manager.domain_world_size
    channel_slice = slice(rank * local, (rank + 1) * local)
    x_local = x[:, channel_slice].clone().requires_grad_()
    y = layer(x_local, group)
    y.backward(cotangent[:, channel_slice])
    torch.testing.assert_close(y, expected[:, channel_slice], rtol=0, atol=1e-14)
    torch.testing.assert_close(x_local.grad, x_global.grad[:, channel_slice], rtol=0, atol=1e-14)
    for name, parameter in layer.named_parameters():
        total = manager.transport.all_reduce(parameter.grad)
        expected_grad = unsharded.get_parameter(name).grad
        torch.testing.assert_close(total, expected_grad, rtol=1e-12, atol=1e-12)
        assert not torch.equal(parameter.grad, expected_grad)  # each rank has only a part of it

    with pytest.raises(RuntimeError, match=f"needs {local} of {channels} channels"):
        layer(x, cp_group=group)


@pytest.mark.parametrize(
    ("ranks", "channels", "groups"), tiers([(3, 6, None)], [(2, 8, 4), (2, 4, 1)])
)
def test_ranks_that_share_channels(ranks, channels, groups):
    on_processes(ranks, _shared, channels, groups)


def _uneven(manager):
    layer = DistributedDepthwiseConv2d(7, 3, device="cpu")
    with pytest.raises(UserError, match=r"3 ranks can't share 7 channels .*hidden_dim"):
        layer(torch.zeros(1, 3, 5, 6), cp_group=manager.domain_group)


def test_channels_that_do_not_divide_are_refused_and_not_dropped():
    on_processes(3, _uneven)
