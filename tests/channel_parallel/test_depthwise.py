"""`DistributedDepthwiseConv2d`: weights shared by channels, channels distributed over ranks."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from credit_dp.channel_parallel import DistributedDepthwiseConv2d
from credit_dp.errors import UserError
from tests.ranks import on_processes

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


@pytest.mark.parametrize("groups", [4, 0, -1, 12])
def test_groups_that_do_not_divide_the_channels_are_refused(groups):
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


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "channels", "groups"), [(2, 8, 4), (2, 4, 1), (3, 6, None)])
def test_ranks_that_share_channels(ranks, channels, groups):
    on_processes(ranks, _shared, channels, groups)


def _uneven(manager):
    layer = DistributedDepthwiseConv2d(7, 3, device="cpu")
    with pytest.raises(UserError, match=r"2 ranks can't share 7 channels .*hidden_dim"):
        layer(torch.zeros(1, 3, 5, 6), cp_group=manager.domain_group)


def test_channels_that_do_not_divide_are_refused_and_not_dropped():
    on_processes(2, _uneven)
