"""Verification: exact models pass, every kind of error shows, a failing rank ends all at once."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.config import UNetConfig
from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_to_domain_parallel,
    verify,
    verify_domain_parallel,
)
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.thread_ranks import RankError
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.domain_parallel.verify import join_bands, relative_error
from credit_dp.errors import UserError
from credit_dp.models.unet import UNet
from tests.domain_parallel.equality import THREADS
from tests.tables import entry
from tests.tier_cases import every

SHAPE = (2, 3, 11, 6)
EXHAUSTIVE = pytest.mark.exhaustive


class _Inner(nn.Module):
    """A module that a user registers as keeping rows apart; what it does is given."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _around(function):
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), _Inner(function), nn.GroupNorm(1, 3))


def _verify(model, ranks=3, shape=SHAPE, **options):
    keep = {_Inner: lambda module: module}
    return verify_domain_parallel(lambda: model, shape, ranks, custom_converters=keep, **options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", THREADS)
def test_the_unet_passes(ranks):
    config = UNetConfig(channels=[4, 8], blocks=1, groups=2)
    report = verify_domain_parallel(lambda: UNet(config, 3, 2), (2, 3, 13, 8), ranks)
    assert report.passed
    assert report.tolerance == 1e-11
    assert 0 < report.worst[1] < 1e-13
    assert list(report.outputs) == ["output"]
    assert list(report.input_gradients) == ["input 0"]
    assert set(report.gradients) == {name for name, _ in UNet(config, 3, 2).named_parameters()}


class _TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 2)

    def forward(self, x, time):
        x = self.norm(self.conv(x)) + time[:, :, None, None]
        return {"field": x, "number": [self.head(self.pool(x).flatten(1))]}


def test_outputs_without_rows_several_inputs_and_buffers():
    report = verify_domain_parallel(_TwoOutputs, (SHAPE, (2, 4)), 3)
    assert report.passed
    assert list(report.outputs) == ["output['field']", "output['number'][0]"]
    assert list(report.input_gradients) == ["input 0", "input 1"]
    assert set(report.buffers) == {
        f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert "gradient of head.weight" in report.errors


@dataclass
class _Fields:
    field: torch.Tensor
    others: tuple


class _Mean(NamedTuple):
    mean: torch.Tensor


class _NamedOutputs(_TwoOutputs):
    def forward(self, x, time):
        output = super().forward(x, time)
        return _Fields(output["field"], (_Mean(output["number"][0]), "no tensor"))


def test_outputs_in_dataclasses_are_compared():
    report = verify_domain_parallel(_NamedOutputs, (SHAPE, (2, 4)), 3)
    assert report.passed
    assert list(report.outputs) == ["output.field", "output.others[0].mean"]


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        wrong = grad.clone()
        wrong[..., -1, :] = 0
        return wrong


def test_a_wrong_output_fails():
    report = _verify(_around(lambda x: x - x.mean((-2, -1), keepdim=True)))
    assert not report.passed
    assert report.outputs["output"] > 1e-3


def test_a_wrong_gradient_fails_though_the_output_is_right():
    report = _verify(_around(_WrongBackward.apply))
    assert not report.passed
    assert report.outputs["output"] < 1e-14
    assert report.input_gradients["input 0"] > 1e-3
    assert report.gradients["0.weight"] > 1e-3
    assert report.worst[1] > 1e-3


class _KeepsMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = x.detach().mean((0, 2, 3))
        return x


def test_a_wrong_buffer_fails():
    report = verify_domain_parallel(
        _KeepsMean, SHAPE, 2, custom_converters={_KeepsMean: lambda module: module}
    )
    assert not report.passed
    assert report.worst[0] == "buffer mean"
    assert report.outputs["output"] == 0


def test_nan_fails():
    report = _verify(_around(lambda x: x * math.nan))
    assert not report.passed
    assert math.isnan(report.worst[1])


def test_all_ranks_create_tensors_on_the_device():
    # Tensors of the device meta have no numbers: with one of them nothing could be compared.
    with torch.device("meta"):
        model = lambda: _around(lambda x: x + torch.ones(x.shape[-1]))  # noqa: E731
        keep = {_Inner: lambda module: module}
        report = verify_domain_parallel(model, SHAPE, 3, custom_converters=keep, device="cpu")
    assert report.passed


def test_devices_without_numbers_are_refused():
    for device, message in [
        ("cuda:99", r"device: this machine has no cuda:99 \(.+\)\. Pass cpu"),
        ("meta", "device: needs cpu or cuda, got meta"),
    ]:
        with entry(device), pytest.raises(UserError, match=message):
            verify_domain_parallel(lambda: nn.Conv2d(3, 3, 3, padding=1), SHAPE, 2, device=device)


def test_dropout_is_switched_off():
    assert _verify(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.5))).passed


def test_other_randomness_is_refused():
    with pytest.raises(UserError, match="Sequential: draws random numbers in training mode"):
        _verify(_around(lambda x: F.dropout(x, 0.5)))
    assert _verify(_around(lambda x: F.dropout(x, 0.0))).passed


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_made_by_hooks():
    for norm in (nn.utils.weight_norm, nn.utils.spectral_norm):
        assert _verify(nn.Sequential(norm(nn.Conv2d(3, 3, 3, padding=1)))).passed, norm


def test_the_model_and_random_state_are_left_as_they_are():
    model = _TwoOutputs()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    verify_domain_parallel(lambda: model, (SHAPE, (2, 4)), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.dtype == before[name].dtype for name, x in model.state_dict().items())
    assert not any(isinstance(module, RowLayer) for module in model.modules())


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))
    model[0].requires_grad_(False)
    report = _verify(model)
    assert report.passed
    assert set(report.gradients) == {"1.weight", "1.bias"}


def test_the_seed_decides_the_numbers():
    def errors_of(seed):
        keep = {_Inner: lambda module: module}
        return verify_domain_parallel(
            lambda: _around(_WrongBackward.apply), SHAPE, 2, custom_converters=keep, seed=seed
        ).errors

    errors = [errors_of(seed) for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]


def test_one_rank_and_what_conversion_refuses_are_refused():
    for ranks in (0, 1):
        with pytest.raises(UserError, match=r"nothing to verify; needs 2 or more, got \d"):
            _verify(_around(torch.sin), ranks=ranks)
    with pytest.raises(UserError, match="2 rows can't be shared by 3 ranks"):
        _verify(nn.Conv2d(3, 3, 3, padding=1), shape=(1, 3, 2, 8))


def _fails_on_last_rank(x):
    if torch.is_grad_enabled() and x.shape[-2] == 3:  # of 11 rows the last of 3 ranks has 3
        raise ValueError("no luck")
    return x


def test_a_rank_that_fails_is_named_and_no_rank_waits():
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 2 of 3: ValueError: no luck"):
        _verify(_around(_fails_on_last_rank))
    assert time.monotonic() - began < 60


def test_a_rank_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(verify, "TIMEOUT", 0.5)
    forever = threading.Event()

    def hang(x):
        if torch.is_grad_enabled() and x.shape[-2] == 3:
            forever.wait()
        return x

    with pytest.raises(RankError, match=r"not finished after 0.5 s: .*rank 2 is at .*threading.py"):
        _verify(_around(hang))
    forever.set()


def test_relative_error():
    ten = torch.tensor([1.0, 10.0])
    assert relative_error(ten + torch.tensor([0.0, 1.0]), ten) == pytest.approx(0.1)
    assert relative_error(torch.tensor([1e-9]), torch.zeros(1), floor=1.0) == pytest.approx(1e-9)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.zeros(2), torch.zeros(3)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan, 0.0]), ten))
    mask = torch.tensor([-math.inf, 2.0])
    assert relative_error(mask + torch.tensor([0.0, 0.5]), mask) == pytest.approx(0.25)
    assert relative_error(torch.tensor([3]), torch.tensor([2])) == pytest.approx(0.5)
    assert relative_error(torch.tensor([True]), torch.tensor([True])) == 0


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", every(2, [torch.sparse_coo, torch.sparse_csr], EXHAUSTIVE))
def test_the_error_of_sparse_tensors_needs_no_dense_ones(layout):
    """Dense, this matrix between two grids would have a million times a million entries."""

    def matrix(columns, values):
        indices = torch.tensor([range(len(columns)), columns])
        return torch.sparse_coo_tensor(indices, values, (10**6, 10**6)).to_sparse(layout=layout)

    a = matrix([3, 999_999, 5], [1.0, 4.0, -math.inf])
    assert relative_error(a, a) == 0
    assert relative_error(matrix([3, 999_999, 5], [1.0, 3.0, -math.inf]), a) == 0.25
    assert relative_error(matrix([3, 999_998, 5], [1.0, 4.0, -math.inf]), a) == 1
    assert math.isnan(relative_error(matrix([3], [math.nan]), a))
    dense = torch.eye(3)
    assert relative_error(dense.to_sparse(layout=layout), 2 * dense) == 0.5


def test_joined():
    parts = [torch.ones(2, 1), torch.ones(2, 3)]
    assert [x.shape for x in join_bands(parts, (2, 4), summed=False)] == [(2, 4)]
    same = [torch.ones(2), torch.ones(2)]
    assert len(join_bands(same, (2,), summed=False)) == 2
    assert join_bands(same, (2,), summed=True)[0].tolist() == [2, 2]


class _Spectral(nn.Module):
    """Has complex parameters only; one that mixes types fails if another dtype is assumed."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=dtype))

    def forward(self, x):
        modes = torch.einsum("bchw,dc->bdhw", torch.fft.rfft2(x), self.weight)
        return torch.fft.irfft2(modes, s=x.shape[-2:])


@pytest.mark.parametrize("dtype", every(2, [torch.complex64, torch.complex128], EXHAUSTIVE))
def test_models_with_complex_parameters_only(dtype):
    report = verify_domain_parallel(lambda: _Spectral(dtype), SHAPE, 3)
    assert report.passed, report.worst
    assert report.worst[1] > 0
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    # As it is, with inputs of its own precision.
    convert_to_domain_parallel(_Spectral(dtype), manager, input_shape=SHAPE)
