"""Autocast, checkpointing and other ways to run a model: sharded equals unsharded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from credit_dp.domain_parallel import (
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.dry_run import row_layers
from credit_dp.fields import Fields
from credit_dp.models import build_model
from tests.domain_parallel.equality import (
    MODEL,
    RANDOM_LOCK,
    assert_same_as_whole_globe,
    error,
    in_both_ways,
)
from tests.ranks import DEVICE, on_processes, on_threads
from tests.tier_cases import tiers
from tests.training.runs import tiny_crossformer, tiny_pangu, tiny_unet

SHAPE = (2, 3, 13, 8)


class Model(nn.Module):
    """A shared layer used twice, a step down and up, norms of both kinds."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        self.norm = nn.GroupNorm(2, 4)
        self.shared = nn.Conv2d(4, 4, 5, padding=2)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm_down = nn.GroupNorm(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1)
        self.head = nn.Conv2d(4, 2, 1)
        self.recompute = False

    def body(self, x):
        y = self.shared(torch.tanh(self.shared(x)))
        return x + nn.functional.silu(self.norm(y))

    def forward(self, x):
        x = self.stem(x)
        x = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        y = torch.tanh(self.norm_down(self.down(x)))
        return self.head(x[..., : self.width(x)] + self.up(y)[..., : self.width(x)])

    def width(self, x):
        return x.shape[-1] - 1


def _built(dtype=torch.float64):
    torch.manual_seed(0)
    return Model().to(dtype), torch.randn(SHAPE, dtype=dtype)


def _both(manager, prepare=lambda model: None, dtype=torch.float64):
    """The whole model and its sharded copy, a globe and its band."""
    with RANDOM_LOCK:
        whole, x = _built(dtype)
        prepare(whole)
        sharded = convert_to_domain_parallel(copy.deepcopy(whole), manager, input_shape=SHAPE)
    return whole, sharded, x, shard_tensor(x, manager=manager)


def _assert_gradients_equal(manager, whole, sharded, tolerance=MODEL):
    found = dict(sharded.named_parameters())
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    norms = [grad.abs().max().item() for grad in wanted.values() if grad is not None]
    largest = max(norms, default=0.0)
    for name, grad in wanted.items():
        assert (found[name].grad is None) == (grad is None), name
        if grad is not None:
            total = manager.transport.all_reduce(found[name].grad)
            assert error(total, grad, 1e-3 * largest) <= tolerance, name


def _step(model, x):
    y = model(x)
    (y * torch.arange(y.shape[-1])).sum().backward()
    return y.detach()


def _same_step(manager, prepare=lambda model: None, change=lambda x: x, steps=1):
    whole, sharded, x, band = _both(manager, prepare)
    for _ in range(steps):  # gradients add up
        y = gather_tensor(_step(sharded, change(band)), manager=manager)
        assert error(y, _step(whole, change(x))) <= MODEL
    _assert_gradients_equal(manager, whole, sharded)
    for name, buffer in whole.named_buffers():
        assert error(dict(sharded.named_buffers())[name].double(), buffer.double()) <= MODEL


def _recomputing(model):
    model.recompute = True


def _frozen(model):
    for layer in (model.shared, model.norm):
        layer.requires_grad_(False)


def _channels_last(x):
    return x.to(memory_format=torch.channels_last)


WAYS = {
    "plain, an input without gradient": {},
    "recomputed activations": {"prepare": _recomputing},
    "frozen layers": {"prepare": _frozen},
    "accumulated gradients": {"steps": 3},
    "channels last": {"change": _channels_last, "prepare": _channels_last},
    "an input with gradient": {"change": lambda x: x.clone().requires_grad_()},
}


@pytest.mark.parametrize("way", WAYS)
@in_both_ways
def test_a_step_is_the_same(way):
    on_threads(3, _way, WAYS[way])


def _way(manager, way):
    _same_step(manager, **way)


def _recomputed_on_gloo(manager):
    _same_step(manager, prepare=_recomputing)


@pytest.mark.slow
@in_both_ways
def test_recomputed_activations_on_gloo_ranks():
    on_processes(3, _recomputed_on_gloo)


def _without_gradients(manager):
    whole, sharded, x, band = _both(manager)
    whole.eval()
    sharded.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = sharded(band)
            assert not y.requires_grad
            assert error(gather_tensor(y, manager=manager), whole(x)) <= MODEL


@in_both_ways
def test_no_gradients():
    on_threads(3, _without_gradients)


def _autocast(manager):
    """Rounding differs from the globe's, but is no larger."""
    whole, sharded, x, band = _both(manager, dtype=torch.float32)
    exact = copy.deepcopy(whole)
    with torch.autocast(DEVICE, torch.bfloat16):
        y, y_whole = sharded(band), whole(x)
    y_exact = exact(x)
    assert y.dtype == y_whole.dtype
    for made in (y, y_whole, y_exact):
        made.float().square().sum().backward()
    found = manager.transport.all_reduce(_gradient(sharded))
    wanted = _gradient(exact)
    off, off_whole = (found - wanted).norm(), (_gradient(whole) - wanted).norm()
    assert 0 < off <= 2 * off_whole <= 0.1 * wanted.norm()
    y = gather_tensor(y.detach().float(), manager=manager)
    assert (y - y_exact).norm() <= 2 * (y_whole.float() - y_exact).norm()


def _gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _autocast_with_reflected_columns(manager):
    with RANDOM_LOCK:
        conv = nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect")
    sharded = convert_to_domain_parallel(nn.Sequential(conv), manager, input_shape=SHAPE)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = sharded(shard_tensor(torch.ones(SHAPE), manager=manager))
    assert y.dtype == torch.bfloat16


@in_both_ways
def test_autocast():
    on_threads(3, _autocast)
    on_threads(2, _autocast_with_reflected_columns)


FIELDS = Fields(((1, 2, 3), (5, 6, 7)), (0, 4), others=1, frames=2)
COMPILED = {
    "unet": tiny_unet(squeeze_excite=True),
    # Its kernels reach over the globe: rows and channels are transposed.
    "depthwise": tiny_unet(block="global_depthwise", kernel=[25, 3]),
    "pangu": tiny_pangu(),
    # Its branches of three sizes share an exchange.
    "crossformer": tiny_crossformer(kernels=[[2, 4, 8], [2, 4]], local_windows=[2, 4]),
}


# Each model on a number of ranks by each backend.
COMPILATIONS = [
    (name, *backend) for name in COMPILED for backend in ((3, "aot_eager"), (2, "inductor"))
]
OFTEN = ("unet", 2, "inductor")


def _compiled_to_one_graph(manager, config, rows, backend):
    grid = (rows, 16)
    case = (build_model, (config, FIELDS, grid), (2, FIELDS.inputs, *grid), MODEL)
    assert_same_as_whole_globe(manager, *case, backend=backend)


def _few_layers():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 2, 3, stride=2, padding=1),
    )


def _few_layers_compiled(manager):
    assert_same_as_whole_globe(manager, _few_layers, (), SHAPE, backend="aot_eager")


@pytest.mark.slow
@in_both_ways
def test_sharded_layers_compile_to_one_graph():
    on_processes(2, _few_layers_compiled)


def _norms():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, track_running_stats=False),
    )


def _norms_compiled(manager):
    assert_same_as_whole_globe(manager, _norms, (), SHAPE, MODEL, backend="aot_eager")


@pytest.mark.exhaustive
def test_sharded_norms_compile_to_one_graph():
    on_processes(3, _norms_compiled)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's compiler
@pytest.mark.parametrize(
    ("name", "ranks", "backend"),
    tiers([], [OFTEN], [case for case in COMPILATIONS if case != OFTEN]),
)
def test_a_sharded_model_compiles_to_one_graph_by_each_backend(name, ranks, backend):
    on_processes(ranks, _compiled_to_one_graph, COMPILED[name], 33, backend)


def _knows_that_it_recomputes(manager):
    for prepare in (lambda model: None, _recomputing):
        _, sharded, _, _ = _both(manager, prepare)
        layers = row_layers(sharded).values()
        assert any(layer.is_recomputed for layer in layers) == sharded.recompute


def test_the_plan_knows_whether_a_model_recomputes_activations():
    on_threads(2, _knows_that_it_recomputes)


class _Sequence(nn.Sequential):
    """Blocks of layers recomputed together."""

    def forward(self, x):
        return checkpoint_sequential(list(self), 2, x, use_reentrant=False)


def _recomputed_blocks(manager):
    with RANDOM_LOCK:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.SiLU()]
        whole = _Sequence(*layers, nn.Conv2d(3, 3, 4, 2, 1), nn.Tanh()).double()
        sharded = convert_to_domain_parallel(copy.deepcopy(whole), manager, input_shape=SHAPE)
        x = torch.randn(SHAPE, dtype=torch.float64)
    y = _step(sharded, shard_tensor(x, manager=manager).requires_grad_())
    assert error(gather_tensor(y, manager=manager), _step(whole, x.requires_grad_())) <= MODEL
    _assert_gradients_equal(manager, whole, sharded)


@in_both_ways
def test_recomputed_blocks():
    on_threads(3, _recomputed_blocks)
