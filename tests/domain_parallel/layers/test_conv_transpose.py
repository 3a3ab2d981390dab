"""Transposed convolutions on bands equal those of the whole globe, whatever their options."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelConvTranspose2d,
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.convert import replan
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from tests.domain_parallel.equality import THREADS, assert_same_as_whole_globe
from tests.domain_parallel.models import Moved
from tests.ranks import DEVICE, on_threads, seeded
from tests.tables import entry

SLOW = pytest.mark.slow
CONVS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
# Settings along the other dimensions: columns last, times or levels first.
OTHERS = {
    "kernel_size": (3, 2),
    "stride": (1, 2),
    "padding": (1, 0),
    "output_padding": (0, 1),
    "dilation": (2, 1),
}


def _settings(spatial, **along_rows):
    """Return a setting of all spatial dimensions, the rows' at its index."""
    return {
        key: (*OTHERS[key][: spatial - 2], row, OTHERS[key][1]) if spatial > 1 else (row,)
        for key, row in along_rows.items()
    }


@st.composite
def cases(draw, spatial, ranks):
    """Options, and a height at which no rank is without a row, going in or coming out."""
    kernel, stride, dilation = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    padding, extra = draw(st.integers(0, 3)), draw(st.integers(0, max(stride, dilation) - 1))
    options = _settings(
        spatial,
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        output_padding=extra,
        dilation=dilation,
    )
    options |= {"groups": draw(st.sampled_from([1, 2])), "bias": draw(st.booleans())}
    added = dilation * (kernel - 1) + 1 + extra - 2 * padding
    least = max(ranks, -(-(ranks - added) // stride) + 1)
    return options, least + draw(st.integers(0, 10))


def _conv(spatial, options):
    conv = CONVS[spatial](2, 4, **options)
    return conv if spatial > 1 else Moved(conv, "columns")


def _shape(spatial, height, batch=(2,)):
    return (*batch, 2, *(2,) * (spatial - 2), height, 3)


@pytest.mark.parametrize("ranks", THREADS)
@pytest.mark.parametrize("spatial", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
@given(data=st.data())
def test_conv_transpose(ranks, spatial, data):
    options, height = data.draw(cases(spatial, ranks))
    args = (_conv, (spatial, options), _shape(spatial, height))
    on_threads(ranks, assert_same_as_whole_globe, *args)


def test_narrow_bands_bands_that_no_input_reaches_and_no_batch():
    for ranks, settings, height, batch in [
        (4, {"kernel_size": 4, "stride": 2}, 4, (2,)),
        (4, {"kernel_size": 2, "stride": 5}, 4, (2,)),
        (4, {"kernel_size": 7, "stride": 1}, 4, (2,)),
        (8, {"kernel_size": 1, "stride": 1, "dilation": 5, "output_padding": 4}, 8, (2,)),
        (3, {"kernel_size": 4, "stride": 2, "padding": 1}, 11, ()),
    ]:
        args = (_conv, (2, _settings(2, **settings)), _shape(2, height, batch))
        with entry(settings):
            on_threads(ranks, assert_same_as_whole_globe, *args)


def _sent(manager, conv, shape):
    convert_to_domain_parallel(
        model := nn.Sequential(copy.deepcopy(conv)), manager, input_shape=shape
    )
    x = shard_tensor(torch.zeros(shape), manager=manager).requires_grad_()
    model(x).sum().backward()
    return manager.transport.traffic.messages


def test_what_is_sent():
    # Of three ranks, the one in the middle: to both sides, forward and backward, or to none.
    for conv, shape, messages in [
        (nn.ConvTranspose2d(2, 4, 2, 2), (1, 2, 9, 3), 0),
        (nn.ConvTranspose3d(2, 4, (2, 4, 4), (2, 4, 4)), (1, 2, 2, 9, 3), 0),
        (nn.ConvTranspose3d(2, 4, (2, 4, 4), (2, 2, 4), (0, 1, 0)), (1, 2, 2, 9, 3), 4),
    ]:
        assert on_threads(3, _sent, conv, shape)[1] == messages, conv


UPSAMPLING = [
    (nn.ConvTranspose2d(2, 4, 2, 2), (1, 2, 30, 3)),
    (nn.ConvTranspose3d(2, 4, (2, 4, 4), (2, 4, 4)), (1, 2, 2, 30, 3)),
]


def _exact_layers(manager, conv, shape, sizes, is_alone):
    model = nn.Sequential(copy.deepcopy(conv).double(), nn.Identity())
    convert_to_domain_parallel(model, manager)
    assert type(model[0]) is type(conv)
    x = torch.randn(shape, dtype=torch.float64, generator=seeded(0))
    band = x.split(sizes, -2)[manager.domain_rank].clone().requires_grad_()
    y = model(band)
    assert (type(model[0]) is type(conv)) == is_alone
    everyone = manager.transport.all_gather(torch.tensor(manager.transport.traffic.messages))
    assert (int(everyone.sum()) == 0) == is_alone
    expected = (whole := copy.deepcopy(conv).double())(x.requires_grad_())
    torch.testing.assert_close(gather_tensor(y, manager=manager), expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(band.grad, x.grad.split(sizes, -2)[manager.domain_rank])
    grads = manager.transport.all_gather(model[0].weight.grad)
    torch.testing.assert_close(grads.sum(0), whole.weight.grad)
    assert convert_from_domain_parallel(model) is model
    assert type(model[0]) is type(conv)


def test_rows_that_do_not_overlap_are_left_to_torch():
    for conv, shape in UPSAMPLING:
        for sizes in [(10, 10, 10), (9, 11, 10), (28, 1, 1)]:
            is_alone = sizes != (28, 1, 1)  # its output has balanced bands
            with entry((conv, sizes)):
                on_threads(3, _exact_layers, conv, shape, sizes, is_alone)


def _left_alone_for_one_shape(manager):
    model = nn.Sequential(nn.ConvTranspose2d(2, 4, 2, 2), nn.GELU())
    convert_to_domain_parallel(model, manager, input_shape=(1, 2, 9, 3))
    assert type(model[0]) is nn.ConvTranspose2d
    manager.bands.register(RowPartition((0, 14, 15, 16)))
    model.eval()
    replan(model, (1, 2, 16, 3))
    assert type(model[0]) is DomainParallelConvTranspose2d
    assert not model[0].training
    with pytest.raises(UserError, match="2 rows can't be shared by 3 ranks"):
        replan(model, (1, 2, 2, 3))
    assert type(model[0]) is DomainParallelConvTranspose2d
    replan(model, (1, 2, 9, 3))
    assert type(model[0]) is nn.ConvTranspose2d


def _hooked(manager, plain):
    model = copy.deepcopy(plain)
    convert_to_domain_parallel(model, manager, input_shape=(1, 2, 9, 3))
    calls = []
    model[0].register_full_backward_hook(lambda *_: calls.append(model[0]))
    manager.bands.register(RowPartition((0, 14, 15, 16)))
    for height in (16, 9):
        replan(model, (1, 2, height, 3))
        rows = manager.partition(height).sizes[manager.domain_rank]
        calls.clear()
        model(torch.ones(1, 2, rows, 3, requires_grad=True)).sum().backward()
        assert calls == [model[0]]


def test_backward_hooks_stay_whatever_layer_a_plan_needs():
    on_threads(3, _hooked, nn.Sequential(nn.ConvTranspose2d(2, 2, 2, 2)))


def test_another_plan_may_need_the_layer():
    on_threads(3, _left_alone_for_one_shape)


class _Refined(nn.Module):
    """Needs no `up`."""

    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(2, 2, 3, padding=1), nn.ConvTranspose2d(2, 2, 2, 2)

    def forward(self, x):
        return self.conv(x if getattr(self, "up", None) is None else self.up(x))


def _taken_out(manager):
    shape = (1, 2, 9, 3)
    model = convert_to_domain_parallel(_Refined(), manager, input_shape=shape)
    model.up = new = nn.Identity()
    replan(model, shape)
    assert model.up is new
    model.up = other = nn.ConvTranspose2d(2, 2, 2, 2)
    replan(model, shape)  # its bands line up
    assert model.up is other
    model.up = None
    replan(model, shape)
    assert model.up is None
    del model.up
    replan(model, shape)
    assert not hasattr(model, "up")
    assert model(torch.ones(1, 2, 3, 3)).shape == (1, 2, 3, 3)


def test_a_plan_keeps_what_the_user_put_in_place_of_a_layer():
    on_threads(3, _taken_out)


def test_rows_beyond_an_edge_are_not_left_to_torch():
    def converted(manager):
        for conv in (
            nn.ConvTranspose2d(2, 4, 2, 2, output_padding=1),
            nn.ConvTranspose2d(2, 4, 4, 4, 2),
        ):
            model = nn.Sequential(conv)
            convert_to_domain_parallel(model, manager, input_shape=(1, 2, 9, 3))
            assert type(model[0]) is DomainParallelConvTranspose2d, conv

    on_threads(3, converted)


def _output_size(manager):
    layer = DomainParallelConvTranspose2d(nn.ConvTranspose2d(1, 1, 3, 2, 1), manager=manager)
    with pytest.raises(UserError, match="ConvTranspose2d: output_size has no meaning on a band"):
        layer(torch.zeros(1, 1, 4, 4), output_size=[8, 8])


def test_output_size_is_refused():
    on_threads(2, _output_size)


def _half_precision(manager):
    conv = nn.ConvTranspose2d(2, 4, 2, 5)  # rows that no input reaches hold the bias alone
    convert_to_domain_parallel(model := nn.Sequential(conv), manager, input_shape=(1, 2, 6, 3))
    x = shard_tensor(torch.ones(1, 2, 6, 3), manager=manager)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert model(x).dtype == conv(x).dtype == torch.bfloat16


def test_the_type_of_numbers_is_that_of_the_layer():
    on_threads(4, _half_precision)
