"""What a rank launches in a step on a GPU: few operations, and no operation that reads values.

The steps run on tensors without data. Fake tensors of a GPU need a build of torch with CUDA, so
they are a CPU's, and `computes_on_cpu`, by which layers ask for the device, says that they are not.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from credit_dp.cli.compose import Composer
from credit_dp.costs.budget import model_and_shape
from credit_dp.domain_parallel import DomainParallelGroupNorm
from credit_dp.domain_parallel.band_tensor.tensor import BandTensor
from credit_dp.domain_parallel.bands import group_norm
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.domain_parallel.dry_run import row_layers
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.planning.trace import launches_kernel, tensor_leaves
from credit_dp.domain_parallel.recomputation import checkpoint_modules
from credit_dp.models.unet import LongRangeConv2d, PeriodicConv2d, PeriodicUpsample
from credit_dp.pipeline_parallel.stages import _tensors_of as tensors_of
from tests.domain_parallel.equality import in_both_ways
from tests.ranks import cpu_only
from tests.tier_cases import tiers

LEVELS = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
ERA5 = ["data.grid=721x1440", f"data.levels={LEVELS}", "device=cpu"]
# They copy to the host or wait for the device.
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class Launches(TorchDispatchMode):
    """Counts what starts a kernel, views and allocations, and notes what should not happen.

    `meanwhile`: for each exchange, what starts while its messages travel.
    """

    def __init__(self):
        super().__init__()
        self.launches, self.views, self.meanwhile = Counter(), 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if BandTensor in types:  # its rules start kernels of what a rank holds
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim" or not tensor_leaves((args, kwargs, result)):
            return result  # FakeTensorMode itself asks for devices
        if not launches_kernel(func):
            self.views += 1
            return result
        name = func._overloadpacket.__name__
        self.launches[name] += 1
        assert name not in SYNCHRONISING
        assert (kwargs or {}).get("device") is None or name not in ("_to_copy", "copy_")
        return result


@torch.library.custom_op("credit_dp_tests::smooth", mutates_args=())
def smooth(x: torch.Tensor) -> torch.Tensor:
    return x * 1


ATEN = torch.ops.aten
KERNELS = {
    ATEN.add.Tensor: True,
    ATEN.relu_.default: True,
    ATEN.copy_.default: True,
    torch.ops.credit_dp_tests.smooth.default: True,
    ATEN.view.default: False,
    ATEN._unsafe_view.default: False,
    ATEN.empty_like.default: False,
    ATEN.squeeze_.dim: False,
    ATEN.unsqueeze_.default: False,
    ATEN.transpose_.default: False,
    ATEN.detach_.default: False,
    torch.ops.prim.device.default: False,
}


def test_what_starts_a_kernel():
    """Views in place start none, operators of other packages do."""
    assert {operation: launches_kernel(operation) for operation in KERNELS} == KERNELS


def launches_of_a_step(model, shape, ranks, rank, needs_grad=False, recomputed=()):
    """Return what a rank launches in forward and backward; `needs_grad`: also of the input."""
    manager = DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))
    model = shard_model(model, manager, shape, "allow", None)
    manager.rank = rank
    manager.transport = CountingTransport(rank, ranks, manager.bands.planned_partitions)
    for layer in row_layers(model).values():
        layer.forget_exchanges()
    rows = manager.bands[shape[-2]].sizes[rank]
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        model = copy.deepcopy(model, {id(x): without_data(x) for x in tensors_of(model)}).train()
        checkpoint_modules(model, recomputed)
        x = torch.empty(*shape[:-2], rows, shape[-1])
        counted = Launches()

        def start(transport, send, receive):
            before = counted.launches.copy()
            return lambda: counted.meanwhile.append(counted.launches - before)

        patch.setattr(CountingTransport, "_start", start)
        with counted:
            y = model(x.requires_grad_(needs_grad))
            y.backward(torch.empty_like(y))
    return counted


def without_data(x):
    empty = torch.empty(x.shape, dtype=x.dtype)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


SHAPE = (2, 6, 24, 8)
# Launches and views of a step of one layer on an interior rank. They may fall, but not rise.
LAYERS = {
    "convolution": (lambda: nn.Conv2d(6, 6, 3, padding=1), 25, 39),
    "circular convolution": (lambda: PeriodicConv2d(6, 6, poles="earth"), 33, 56),
    "strided convolution": (lambda: PeriodicConv2d(6, 6, stride=2), 12, 23),
    "long convolution": (lambda: LongRangeConv2d(6, (7, 5)), 33, 56),
    "transposed convolution": (lambda: nn.ConvTranspose2d(6, 6, 4, 2, 1), 12, 24),
    "upsampling": (PeriodicUpsample, 18, 29),
    "circular padding": (lambda: nn.CircularPad2d(2), 8, 17),
    "mean pool": (lambda: nn.AvgPool2d(3, 2, 1), 8, 14),
    "maximum pool": (lambda: nn.MaxPool2d(3, 2, 1), 8, 15),  # one allocation, but no copy is kept
    "group norm": (lambda: nn.GroupNorm(3, 6), 28, 52),
    "batch norm": (lambda: nn.BatchNorm2d(6), 38, 22),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), 32, 18),
}


@cpu_only("launches are counted on fake tensors of a CPU")
def test_a_layer_launches_no_more():
    for name, (build, launches, views) in LAYERS.items():
        counted = launches_of_a_step(nn.Sequential(build()), SHAPE, 3, 1, needs_grad=True)
        assert counted.launches.total() <= launches, name
        assert counted.views <= views, name


# The same for the base models at 721x1440, on the rank at the north pole of 8.
MODELS = {
    "unet_base": (2151, 3020),
    "pangu_base": (1101, 2043),
    "crossformer_base": (5881, 12629),
}


BASE = [("pangu_base",), ("crossformer_base",)]


@pytest.mark.parametrize("name", tiers(fast=(), slow=[("unet_base",)], exhaustive=BASE))
def test_a_model_launches_no_more_and_what_is_planned(name):
    config = Composer("train").compose_config([f"model={name}", *ERA5])
    model, (_, *shape) = model_and_shape(config, 1)
    planned = plan_report(model, (1, *shape), 8).launches
    counted = launches_of_a_step(model, (1, *shape), 8, 0)
    launches, views = MODELS[name]
    assert planned == counted.launches.total() <= launches
    assert counted.views <= views


@in_both_ways
@pytest.mark.parametrize(("recomputed", "more_copies"), [([], 0), (["0"], 1)])
def test_the_plan_counts_what_is_launched(recomputed, more_copies):
    """Backward copies a halo that it kept to where the layer that computes again looks for it."""
    block = nn.Sequential(PeriodicConv2d(6, 8), nn.GroupNorm(2, 8))
    model = nn.Sequential(block, PeriodicConv2d(8, 6, stride=2))
    shape = (1, 6, 16, 8)
    counted = launches_of_a_step(model, shape, 2, 0, recomputed=recomputed)
    planned = plan_report(model, shape, 2, recomputed=recomputed)
    assert planned.refusal == ""
    assert planned.launches + more_copies == counted.launches.total()


class Centred(nn.Module):
    """A model that computes on tensors of the globe: it takes a mean over rows."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return y - y.mean((-2, -1), keepdim=True)


def test_the_plan_counts_what_is_launched_on_tensors_of_the_globe():
    report = plan_report(Centred(), (1, 6, 16, 8), 2)
    assert "aten.mean needs rows of other ranks" in report.refusal
    counted = launches_of_a_step(Centred(), (1, 6, 16, 8), 2, 0)
    assert report.launches == counted.launches.total()


def test_views_and_allocations_are_no_launches():
    x = torch.empty(4, 6)
    with FakeTensorMode(allow_non_fake_inputs=True), Launches() as counted:
        x.T.reshape(4, 6).add_(1)  # copies, then writes in place
        torch.empty_like(x).view(-1)[:3].expand(2, 3)
    assert counted.launches == {"clone": 1, "add_": 1}
    assert counted.views == 6


class Readers(nn.Module):
    """Two convolutions that share an exchange."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 5, padding=2)

    def forward(self, x):
        return self.narrow(x) + self.wide(x)


def test_rows_that_stay_are_copied_while_others_travel():
    for layer in (nn.Conv2d(3, 8, 3, 2, 1), Readers()):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
        found = launches_of_a_step(model, (1, 3, 16, 16), 2, 0).meanwhile
        assert len(found) == 2, layer  # forward and backward
        assert all(launches["copy_"] + launches["clone"] for launches in found), layer


def test_a_norm_saves_half_precision_as_it_is(monkeypatch):
    monkeypatch.setattr(group_norm, "is_chunked", lambda x: False)
    saved = []
    x = torch.randn(2, 6, 24, 8, dtype=torch.bfloat16, requires_grad=True)
    norm = DomainParallelGroupNorm(nn.GroupNorm(3, 6), manager=DomainParallelManager(1, 1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    assert [t.shape for t in saved if t.dtype == torch.float32 and t.numel() >= x.numel()] == []
