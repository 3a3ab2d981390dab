"""The one comparison of every exactness test: sharded against whole, in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel import DomainParallelManager, gather_tensor, shard_tensor
from credit_dp.domain_parallel.build import NAMED_RULES
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.costs.report import row_layers
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.domain_parallel.verify import relative_error as error

# Thread ranks share one global random state: what is drawn from it is drawn by one at a time.
_RANDOM = threading.Lock()
# How many threads of a world have yet to take the plan of the first one: its manager, its model.
_PLANNED: WeakKeyDictionary[ThreadWorld, tuple[int, DomainParallelManager, nn.Module]] = (
    WeakKeyDictionary()
)

OPERATOR = 1e-12
MODEL = 1e-11


def assert_same_as_whole_globe(
    manager: DomainParallelManager,
    build: Callable[..., nn.Module],
    args: tuple[Any, ...],
    shape: tuple[int, ...],
    tolerance: float = OPERATOR,
    offset: float = 0.0,
    planned: bool = True,
    seed: int = 0,
) -> None:
    """Compare outputs, input gradient, every parameter gradient and buffer of `build(*args)`.

    An output without rows is the same on every rank; its cotangent is shared between them.
    """
    with _RANDOM:
        torch.manual_seed(seed)
        whole = build(*args).double()
        x = torch.randn(shape, dtype=torch.float64) + offset
        sharded = _sharded(whole, manager, shape if planned else None)
        x_whole = x.clone().requires_grad_()
        ys_whole = _floats(whole(x_whole))
        cotangents = [torch.randn_like(y) for y in ys_whole]
        # What is computed again in backward sets the random state back, too.
        torch.autograd.backward(ys_whole, cotangents)
    assert list(sharded.state_dict()) == list(whole.state_dict())
    assert x_whole.grad is not None

    x_band = shard_tensor(x, manager=manager).requires_grad_()
    ys_band = _floats(sharded(x_band))
    banded = [a.shape != b.shape for a, b in zip(ys_band, ys_whole, strict=True)]
    shares = [
        shard_tensor(c, manager=manager) if has_rows else c / manager.domain_parallel_size
        for c, has_rows in zip(cotangents, banded, strict=True)
    ]
    torch.autograd.backward(ys_band, shares)
    assert x_band.grad is not None

    with torch.no_grad():
        ys = [
            gather_tensor(y.detach(), manager=manager) if has_rows else y.detach()
            for y, has_rows in zip(ys_band, banded, strict=True)
        ]
        grad = gather_tensor(x_band.grad, manager=manager)
    grads = {name: p.grad for name, p in whole.named_parameters()}
    largest = max([x_whole.grad.abs().max(), *(g.abs().max() for g in grads.values())]).item()
    errors = {
        f"output {i}": error(y, y_whole.detach())
        for i, (y, y_whole) in enumerate(zip(ys, ys_whole, strict=True))
    }
    errors["input gradient"] = error(grad, x_whole.grad, 1e-3 * largest)
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is not None
        total = manager.transport.sum(parameter.grad)
        errors[name] = error(total, grads[name], 1e-3 * largest)
    buffers = dict(sharded.named_buffers())
    for name, buffer in whole.named_buffers():
        errors[f"buffer {name}"] = error(buffers[name].double(), buffer.double())
    wrong = {name: value for name, value in errors.items() if not value <= tolerance}
    assert not wrong, wrong


def _sharded(
    whole: nn.Module, manager: DomainParallelManager, shape: tuple[int, ...] | None
) -> nn.Module:
    """Convert a copy. Of threads the first one plans for all, which would plan the same.

    That each rank can plan for itself is for the ranks in processes to show.
    """
    transport = manager.transport
    plans = shape is not None and isinstance(transport, ThreadTransport)
    if plans and transport.world in _PLANNED:
        left, first, converted = _PLANNED.pop(transport.world)
        if left > 1:
            _PLANNED[transport.world] = left - 1, first, converted
        manager.bands.__dict__.update(first.bands.__dict__)
        replaced = {id(first): manager, id(first.bands): manager.bands}
        model = copy.deepcopy(converted, replaced)
        for layer in row_layers(model).values():
            layer.forget_exchanges()
        return model
    rules = {kind: NAMED_RULES[rule] for kind, rule in getattr(whole, "row_rules", {}).items()}
    model = copy.deepcopy(whole)
    model = convert_to_domain_parallel(model, manager, -2, rules, input_shape=shape)
    if plans:
        _PLANNED[transport.world] = (
            transport.size - 1,
            manager,
            copy.deepcopy(model, {id(manager): manager, id(manager.bands): manager.bands}),
        )
    return model


def _floats(made: Any) -> list[Tensor]:
    """The outputs that have gradients."""
    return [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.is_floating_point()]
