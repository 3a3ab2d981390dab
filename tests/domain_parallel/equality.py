"""The one comparison of every exactness test: sharded against whole, in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager, gather_tensor, shard_tensor
from credit_dp.domain_parallel.build import NAMED_RULES
from credit_dp.domain_parallel.convert import convert_to_domain_parallel

# Thread ranks share one global random state: what is drawn from it is drawn by one at a time.
_RANDOM = threading.Lock()

OPERATOR = 1e-12
MODEL = 1e-11


def error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest entry of `b` (or to `floor`)."""
    if a.shape != b.shape:
        return float("inf")
    return ((a - b).abs().max() / max(b.abs().max().item(), floor, 1e-300)).item()


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
    """Compare output, input gradient and every parameter gradient of `build(*args)`."""
    with _RANDOM:
        torch.manual_seed(seed)
        whole = build(*args).double()
        x = torch.randn(shape, dtype=torch.float64) + offset
        sharded = convert_to_domain_parallel(
            copy.deepcopy(whole),
            manager,
            custom_converters={
                kind: NAMED_RULES[rule] for kind, rule in getattr(whole, "row_rules", {}).items()
            },
            input_shape=shape if planned else None,
        )
        x_whole = x.clone().requires_grad_()
        y_whole = whole(x_whole)
        cotangent = torch.randn_like(y_whole)
    assert list(sharded.state_dict()) == list(whole.state_dict())
    y_whole.backward(cotangent)
    assert x_whole.grad is not None

    x_band = shard_tensor(x, manager=manager).requires_grad_()
    y_band = sharded(x_band)
    y_band.backward(shard_tensor(cotangent, manager=manager))
    assert x_band.grad is not None

    with torch.no_grad():
        y = gather_tensor(y_band.detach(), manager=manager)
        grad = gather_tensor(x_band.grad, manager=manager)
    grads = {name: p.grad for name, p in whole.named_parameters()}
    largest = max([x_whole.grad.abs().max(), *(g.abs().max() for g in grads.values())]).item()
    errors = {"output": error(y, y_whole.detach())}
    errors["input gradient"] = error(grad, x_whole.grad, 1e-3 * largest)
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is not None
        total = manager.transport.sum(parameter.grad)
        errors[name] = error(total, grads[name], 1e-3 * largest)
    wrong = {name: value for name, value in errors.items() if not value <= tolerance}
    assert not wrong, wrong
