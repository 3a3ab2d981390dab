"""The comparison of all exactness tests: sharded against unsharded model, in float64."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel import DomainParallelManager, gather_tensor, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.dry_run import row_layers
from credit_dp.domain_parallel.layers import base
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.domain_parallel.verify import relative_error as error
from tests.tables import entry

# Ranks that are threads share one random state: only one of them may draw from it at a time.
RANDOM_LOCK = threading.Lock()
# The plan of the first thread of a world: the number of threads that still need it, its manager and
# its model.
_PLANNED: WeakKeyDictionary[ThreadWorld, tuple[int, DomainParallelManager, nn.Module]] = (
    WeakKeyDictionary()
)

OPERATOR = 1e-12
MODEL = 1e-11

# Threads: of three ranks one has two neighbours. Other numbers show nothing that three do not.
THREADS = [3, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (2, 4))]
SMALL_BAND_ENTRIES = base.SMALL_BAND_ENTRIES  # before it is replaced


@contextmanager
def halos_travel(*, meanwhile: bool) -> Iterator[None]:
    """Convolve bands while their halo travels, as large ones, or fetch it first, as small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "SMALL_BAND_ENTRIES", 0 if meanwhile else SMALL_BAND_ENTRIES)
        with entry(f"halos travel meanwhile: {meanwhile}"):
            yield


def in_both_ways(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in both ways, of large bands and of small ones."""

    @functools.wraps(test)
    def both(*args: Any, **kwargs: Any) -> None:
        for meanwhile in (True, False):
            with halos_travel(meanwhile=meanwhile):
                test(*args, **kwargs)

    return both


def assert_same_as_whole_globe(
    manager: DomainParallelManager,
    build: Callable[..., nn.Module],
    args: tuple[Any, ...],
    shape: tuple[int, ...],
    tolerance: float = OPERATOR,
    offset: float = 0.0,
    planned: bool = True,
    seed: int = 0,
    backend: str | None = None,
    whole_ops: str = "refuse",
) -> None:
    """Compare outputs, input gradient, every parameter gradient and buffer of `build(*args)`.

    With `backend` the sharded model is compiled to one graph, and sends what it sends uncompiled.
    An output without rows is the same on every rank; each gets an equal share of its cotangent.
    With `whole_ops="allow"` a model may compute on tensors of the globe, and nothing runs whole.
    """
    with RANDOM_LOCK:
        torch.manual_seed(seed)
        unsharded = build(*args).double()
        x = torch.randn(shape, dtype=torch.float64) + offset
        sharded = _sharded(unsharded, manager, shape if planned else None, whole_ops)
        x_global = x.clone().requires_grad_()
        ys_global = _floats(unsharded(x_global))
        cotangents = [torch.randn_like(y) for y in ys_global]
        # Inside the lock, too: recomputation in backward resets the random state.
        torch.autograd.backward(ys_global, cotangents)
    assert list(sharded.state_dict()) == list(unsharded.state_dict())
    assert x_global.grad is not None

    x_band = shard_tensor(x, manager=manager).requires_grad_()
    model = sharded
    if backend is not None:
        sent = _traffic_of_step(sharded, x_band, manager)
        # Torch 2.11 does not compile the layers.
        model = torch.compile(sharded, backend=backend, fullgraph=torch.__version__ >= "2.12")
        _traffic_of_step(model, x_band, manager)  # the second step runs what the first has compiled
        assert _traffic_of_step(model, x_band, manager) == sent
        sharded.zero_grad()
        x_band.grad = None
    ys_band = _floats(model(x_band))
    banded = [a.shape != b.shape for a, b in zip(ys_band, ys_global, strict=True)]
    local_cotangents = [
        shard_tensor(c, manager=manager) if has_rows else c / manager.domain_parallel_size
        for c, has_rows in zip(cotangents, banded, strict=True)
    ]
    torch.autograd.backward(ys_band, local_cotangents)
    assert x_band.grad is not None

    with torch.no_grad():
        ys = [
            gather_tensor(y.detach(), manager=manager) if has_rows else y.detach()
            for y, has_rows in zip(ys_band, banded, strict=True)
        ]
        grad = gather_tensor(x_band.grad, manager=manager)
    grads = {name: p.grad for name, p in unsharded.named_parameters()}
    largest = max([x_global.grad.abs().max(), *(g.abs().max() for g in grads.values())]).item()
    errors = {
        f"output {i}": error(y, y_global.detach())
        for i, (y, y_global) in enumerate(zip(ys, ys_global, strict=True))
    }
    errors["input gradient"] = error(grad, x_global.grad, 1e-3 * largest)
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is not None
        total = manager.transport.all_reduce(parameter.grad)
        errors[name] = error(total, grads[name], 1e-3 * largest)
    buffers = dict(sharded.named_buffers())
    for name, buffer in unsharded.named_buffers():
        errors[f"buffer {name}"] = error(buffers[name].double(), buffer.double())
    domain = attached_domain(sharded)
    assert domain is None or not domain.whole_calls, domain.whole_calls
    wrong = {name: value for name, value in errors.items() if not value <= tolerance}
    assert not wrong, wrong


def _sharded(
    unsharded: nn.Module,
    manager: DomainParallelManager,
    shape: tuple[int, ...] | None,
    whole_ops: str,
) -> nn.Module:
    """Convert a copy. Of ranks that are threads the first one plans for all, to save time.

    Ranks that are processes plan for themselves, and all do if the model may compute on tensors of
    the globe.
    """
    transport = manager.transport
    plans = shape is not None and isinstance(transport, ThreadTransport) and whole_ops == "refuse"
    if plans and transport.world in _PLANNED:
        remaining, first, converted = _PLANNED.pop(transport.world)
        if remaining > 1:
            _PLANNED[transport.world] = remaining - 1, first, converted
        manager.bands.__dict__.update(first.bands.__dict__)
        replaced = {id(first): manager, id(first.bands): manager.bands}
        model = copy.deepcopy(converted, replaced)
        for layer in row_layers(model).values():
            layer.forget_exchanges()
        return model
    rules = getattr(unsharded, "converters", {})
    model = copy.deepcopy(unsharded)
    model = convert_to_domain_parallel(
        model, manager, -2, rules, input_shape=shape, whole_ops=whole_ops
    )
    if plans:
        _PLANNED[transport.world] = (
            transport.size - 1,
            manager,
            copy.deepcopy(model, {id(manager): manager, id(manager.bands): manager.bands}),
        )
    return model


def _traffic_of_step(model: nn.Module, x: Tensor, manager: DomainParallelManager) -> list[int]:
    """Return the messages, bytes and collectives of a forward and backward pass."""
    traffic = manager.transport.traffic
    before = dataclasses.astuple(traffic)
    sum(y.sum() for y in _floats(model(x))).backward()
    return [b - a for a, b in zip(before, dataclasses.astuple(traffic), strict=True)]


def _floats(output: Any) -> list[Tensor]:
    """Return the outputs that have gradients."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


class Clip(torch.autograd.Function):
    """A backward that is not linear in the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + grad.norm())
