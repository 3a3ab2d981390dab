"""Parameters of models on tensors of the globe: outside of a model gradients are shares."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain, detach_domain
from credit_dp.domain_parallel.band_tensor.tensor import BandTensor
from credit_dp.errors import UserError
from tests.ranks import cpu_only, on_processes, on_threads, seeded
from tests.tables import entry

SHAPE = (2, 3, 7, 8)
Gradients = dict[str, Tensor]


class Model(nn.Module):
    """All ways to get at parameters: by modules, past them, twice, in others' weights.

    Args:
        is_wrapped: without those that data parallelism does not allow.
    """

    def __init__(self, is_wrapped: bool = False) -> None:
        super().__init__()
        self.is_wrapped = is_wrapped
        self.stem = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU(), nn.GroupNorm(2, 4))
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.tied = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.unused = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.stem(x)) * self.scale
        tokens = y.mean(3).transpose(1, 2)
        tokens = self.again(self.tied(self.gru(tokens)[0]))
        z = y + tokens.transpose(1, 2)[..., None]
        if not self.is_wrapped:
            z = z + F.conv2d(y, self.block[0].weight)
            z = checkpoint(lambda z: z * self.tied.bias[:, None, None], z, use_reentrant=True)
            z = z * sum(p.square().sum() for p in self.block.parameters())
        y = checkpoint(self.again, z.transpose(1, 3), use_reentrant=False)
        return y * self.scale.square().sum()


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model: nn.Module, x: Tensor, ranks: int) -> Tensor:
    """Return a rank's part of the loss, in which parameters occur outside of the model, too."""
    decay = sum(p.square().sum() for p in model.parameters())
    return model(x).square().sum() + model.scale.exp().sum() / ranks + decay / ranks


def step(model: nn.Module, x: Tensor, ranks: int = 1) -> nn.Module:
    loss_of(model, x, ranks).backward()
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "copy": copy.deepcopy,
    "type": lambda model: model.float().double(),
    "other parameters": lambda model: _with_new_parameters(model),
    "learns later": lambda model: _learns_later(model),
    "second step": lambda model: step(model, torch.ones(2, 3, 1, 8).expand(_shape(model))),
}


def _shape(model: nn.Module) -> tuple[int, ...]:
    call = model.__dict__.get("_call_impl")
    rows = 7 if call is None else call.domain.manager.partition(7).sizes[call.domain.rank]
    return (2, 3, rows, 8)


def _with_new_parameters(model: nn.Module) -> nn.Module:
    model(torch.ones(_shape(model), dtype=torch.float64))  # the old ones have been used
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model.again.weight = model.tied.weight
    return model


def _learns_later(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model(torch.ones(_shape(model), dtype=torch.float64))
    return model.requires_grad_(True)


def _on_rank(
    manager: DomainParallelManager, model: nn.Module, change: Any, x: Tensor
) -> tuple[Gradients, bool]:
    model = copy.deepcopy(model)
    attach_domain(model, manager, [SHAPE])
    if change is not None:
        model = CHANGES[change](model)
        model.zero_grad()
    step(model, shard_tensor(x, manager=manager), manager.domain_parallel_size)
    are_plain = all(type(p) is nn.Parameter for p in model.parameters())
    return gradients(model), are_plain and all(type(g) is Tensor for g in gradients(model).values())


@pytest.fixture(autouse=True)
def doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_inside_and_outside_add_up(change: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(SHAPE)
    model.float().double()
    expected = gradients(step(copy.deepcopy(model), x))
    results = on_threads(3, _on_rank, model, change, x)
    for name, gradient in expected.items():
        with entry(name):
            total = sum(found[name] for found, _ in results)
            torch.testing.assert_close(total, gradient, rtol=1e-11, atol=1e-12)
    assert all(are_plain for _, are_plain in results)


def _wrapped(manager: DomainParallelManager, kind: str, state: Gradients, x: Tensor) -> Gradients:
    torch.set_default_dtype(torch.float64)
    try:
        model = Model(is_wrapped=True)
        model.load_state_dict(state)
        mesh = init_device_mesh("cpu", (manager.domain_parallel_size,))
        before = kind.endswith("before")
        if not before:
            attach_domain(model, manager, [SHAPE])
        wrapped = model
        if kind == "ddp":
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            fully_shard(model.block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if before:
            attach_domain(model, manager, [SHAPE])
        band = shard_tensor(x, manager=manager)
        for _ in range(2):  # the second step finds what the first one has left
            wrapped.zero_grad()
            (wrapped(band).square().sum() * manager.domain_parallel_size).backward()
        return {
            name: g.full_tensor() if hasattr(g, "full_tensor") else g
            for name, g in gradients(model).items()
        }
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 before"])
def test_data_parallelism_gets_shares(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Model(is_wrapped=True), torch.randn(SHAPE)
    whole = copy.deepcopy(model)
    whole(x).square().sum().backward()
    found = on_processes(3, _wrapped, kind, dict(model.state_dict()), x)
    for name, gradient in gradients(whole).items():
        with entry(name):
            torch.testing.assert_close(found[0][name], gradient, rtol=1e-10, atol=1e-12)


class Small(nn.Module):
    """One function of a parameter that it gets in a way that modules know nothing of."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 1, 1, generator=seeded(1)))
        self.others = [self.weight]
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Clip(torch.autograd.Function):
    """Returns its argument; its gradient is not linear in what comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (1 + grad.norm())


def _small(
    manager: DomainParallelManager,
    function: Callable[[Any, Tensor], Tensor],
    use: Callable[[Any, Tensor], Any],
    x: Tensor,
) -> Any:
    model = Small(function)
    attach_domain(model, manager, [SHAPE])
    band = shard_tensor(x, manager=manager).clone().requires_grad_()
    return use(model, band)


def of_globe(
    function: Callable[[Any, Tensor], Tensor], use: Callable[[Any, Tensor], Any], x: Tensor
) -> Any:
    return use(Small(function), x.clone().requires_grad_())


def squares(model: Any, x: Tensor) -> Tensor:
    model(x).square().sum().backward()
    grad: Tensor = model.weight.grad
    assert type(grad) is Tensor
    return grad


ALIASES = {
    "list": lambda m, x: x * m.others[0],
    "both": lambda m, x: x * m.others[0] + x.roll(1, 2) * m.weight,
    "only parameters": lambda m, x: x * (m.others[0] * m.weight).exp(),
    "clipped": lambda m, x: Clip.apply(x) * Clip.apply(m.others[0]) * m.weight,
    "nobody's": lambda m, x: (x * 1).mul_(m.weight) + 0 * m.weight.detach(),
}


@pytest.mark.parametrize("name", ALIASES)
def test_parameters_that_are_used_past_their_module_get_shares(name: str) -> None:
    x = torch.randn(SHAPE, generator=seeded(0))
    found = on_threads(3, _small, ALIASES[name], squares, x)
    expected = of_globe(ALIASES[name], squares, x)
    torch.testing.assert_close(sum(found), expected, rtol=1e-11, atol=1e-12)


def test_a_parameter_that_model_and_loss_use_past_its_module_is_refused() -> None:
    def decayed(model: Any, x: Tensor) -> str:
        loss = model(x).square().sum() + model.weight.square().sum() / 3
        with pytest.raises(UserError) as error:
            loss.backward()
        return str(error.value)

    x = torch.randn(SHAPE, generator=seeded(0))
    for message in on_threads(3, _small, lambda m, x: x * m.others[0] + m.others[0], decayed, x):
        assert message.startswith("a parameter of shape (3, 1, 1): the model uses it past")
        assert "\n" not in message


def penalty(model: Any, x: Tensor) -> Tensor:
    """Return the gradient of a penalty of gradients, which training computes."""
    (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    grad: Tensor = model.weight.grad
    return grad


def test_gradients_of_gradients_outside() -> None:
    x = torch.randn(SHAPE, generator=seeded(0))

    def function(model: Any, x: Tensor) -> Tensor:
        return (x * model.weight).cumsum(2)

    found = on_threads(3, _small, function, penalty, x)
    torch.testing.assert_close(sum(found), of_globe(function, penalty, x), rtol=1e-11, atol=1e-12)


def test_code_in_backward_does_not_see_the_factor_of_the_loss() -> None:
    x = torch.randn(SHAPE, generator=seeded(0))

    def function(model: Any, x: Tensor) -> Tensor:
        return Clip.apply(x * Clip.apply(model.weight))

    def scaled(model: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        model.__dict__["_domain"].loss_factor = 6
        (model(x).square().sum() * 6).backward()
        return model.weight.grad, x.grad

    def unscaled(model: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        model(x).square().sum().backward()
        return model.weight.grad, x.grad

    weights, bands = zip(*on_threads(3, _small, function, scaled, x), strict=True)
    weight, field = of_globe(function, unscaled, x)
    torch.testing.assert_close(sum(weights), 6 * weight)
    torch.testing.assert_close(torch.cat(bands, -2), 6 * field)


def test_hooks_of_parameters_see_plain_shares() -> None:
    def watched(model: Any, x: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        model.weight.register_hook(seen.append)
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        squares(model, x)
        assert all(type(grad) is Tensor for grad in seen)
        return seen

    x = torch.randn(SHAPE, generator=seeded(0))
    function = ALIASES["nobody's"]
    found = on_threads(3, _small, function, watched, x)
    for i, expected in enumerate(of_globe(function, watched, x)):
        torch.testing.assert_close(sum(seen[i] for seen in found), expected)


def _writes(model: Any, x: Tensor) -> Tensor:
    """Write to parameters, as code does that normalizes its weights or keeps code books."""
    with torch.no_grad():
        model.weight.mul_(x.mean((0, 2, 3))[:, None, None])
        model.weight.data += 1
        model.weight.data = model.weight.data * x.square().mean((0, 2, 3))[:, None, None]
        model.weight[0] = x.max()
    return x * model.weight


def _assigns(model: Any, x: Tensor) -> Tensor:
    model.weight = nn.Parameter(torch.full((3, 1, 1), 2.0))
    return x * model.weight


def test_what_a_model_writes_to_its_parameters_stays() -> None:
    def values(model: Any, x: Tensor) -> tuple[Tensor, bool]:
        before = model.weight
        with torch.no_grad():
            model(x)
        model(x)
        return model.weight.detach(), before is model.weight

    x = torch.randn(SHAPE, generator=seeded(0))
    for function in (_writes, _assigns):
        expected, is_same = of_globe(function, values, x)
        for found, is_same_here in on_threads(3, _small, function, values, x):
            assert is_same_here == is_same
            torch.testing.assert_close(found, expected)


@cpu_only("which other objects hold tensors differs")
def test_models_and_old_parameters_are_freed() -> None:
    def use(model: Any, x: Tensor) -> list[bool]:
        squares(model, x)
        old, kept = weakref.ref(model.weight), weakref.ref(model)
        model.weight = nn.Parameter(model.weight.detach().clone())
        model.others.clear()
        model(x)
        gc.collect()
        is_old_freed = old() is None
        del model
        return [is_old_freed, kept]  # type: ignore[list-item]

    results = on_threads(2, _small, ALIASES["nobody's"], use, torch.ones(SHAPE))
    gc.collect()
    assert [(is_old_freed, kept()) for is_old_freed, kept in results] == [(True, None)] * 2


def test_detached_models_are_as_before() -> None:
    def use(model: Any, x: Tensor) -> list[str]:
        squares(model, x)
        detach_domain(model)
        model(x)
        left = [name for name in vars(model) if name in ("_domain", "_call_impl")]
        return [*left, *(str(h) for m in model.modules() for h in m._forward_pre_hooks.values())]

    assert on_threads(2, _small, ALIASES["nobody's"], use, torch.ones(SHAPE)) == [[], []]
    assert BandTensor.__module__ == "torch"


def test_gradients_that_nothing_accumulates_are_plain_shares() -> None:
    def asked(model: Any, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), [model.weight])
        assert type(gradient) is Tensor
        return gradient

    x = torch.randn(SHAPE, generator=seeded(0))
    for name, function in ALIASES.items():
        with entry(name):
            found = on_threads(3, _small, function, asked, x)
            torch.testing.assert_close(sum(found), of_globe(function, asked, x))
