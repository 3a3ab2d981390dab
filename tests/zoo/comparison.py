"""Compares a family's sharded model with the unsharded one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_to_domain_parallel,
    shard_tensor,
)
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.dry_run import row_layers
from credit_dp.domain_parallel.thread_ranks import ThreadRanks
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.domain_parallel.verify import (
    local_cotangent,
    run_step,
    step_errors,
    train_without_dropout,
)
from tests.zoo.families import Family

SECONDS = 480.0


class _WithArguments(nn.Module):
    """A model of one input, whose other arguments are always the same."""

    def __init__(self, model: nn.Module, others: tuple[Any, ...]) -> None:
        super().__init__()
        self.model = model
        self.others = others

    def forward(self, x: Tensor) -> Any:
        return self.model(x, *self.others)


@dataclass(frozen=True)
class Comparison:
    """What a family's model did on a number of ranks.

    Attributes:
        conversion: `layers` or `globe`.
        errors: the relative errors of outputs, gradients and buffers, by name.
        whole_calls: functions that ran whole in the forward of one step -> number of calls.
    """

    conversion: str
    errors: dict[str, float]
    whole_calls: dict[str, int]

    @property
    def worst(self) -> tuple[str, float]:
        """Return the name and the size of the largest error; NaN is the largest."""
        return max(self.errors.items(), key=lambda item: (item[1] != item[1], item[1]))


def build_model(family: Family) -> nn.Module:
    """Return the model of a family in float64, with parameters that are always the same."""
    torch.manual_seed(0)
    return _WithArguments(family.build(), family.others()).double()


def convert_for_ranks(model: nn.Module, family: Family, ranks: int) -> list[_Rank]:
    """Return the converted model of each rank.

    The first rank plans for all: the others have copies of its model, with managers of their own.
    """
    world = ThreadWorld(ranks, timeout=2 * SECONDS)
    managers = [
        DomainParallelManager(ranks, ranks, transport=ThreadTransport(world, rank))
        for rank in range(ranks)
    ]
    first = managers[0]
    converted = convert_to_domain_parallel(
        copy.deepcopy(model), first, input_shape=family.shape, whole_ops="allow"
    )
    result = [_Rank(first, converted)]
    for manager in managers[1:]:
        manager.bands.__dict__.update(first.bands.__dict__)
        replaced = {id(first): manager, id(first.bands): manager.bands}
        result.append(_Rank(manager, copy.deepcopy(converted, replaced)))
        for layer in row_layers(result[-1].model).values():
            layer.forget_exchanges()
    return result


@dataclass(frozen=True)
class _Rank:
    manager: DomainParallelManager
    model: nn.Module


def _train_without_randomness(model: nn.Module) -> nn.Module:
    """Put a model into training mode without dropout and dropped paths."""
    for module in model.modules():
        if isinstance(getattr(module, "drop_prob", None), float):
            module.drop_prob = 0.0
    return train_without_dropout(model)


def compare(family: Family, ranks: int, trains: bool) -> Comparison:
    """Return the errors of a sharded step: forward and backward, in training or evaluation mode.

    Dropout is off, as ranks that are threads share one random state. Errors of gradients are
    relative to their largest entry, or to a thousandth of the largest gradient of the model if that
    is more: the gradient of a bias in front of a norm is zero but for rounding.
    """

    def in_mode(model: nn.Module) -> nn.Module:
        return _train_without_randomness(model) if trains else model.eval()

    unsharded = build_model(family)
    sharded = convert_for_ranks(unsharded, family, ranks)
    torch.manual_seed(1)
    x = torch.randn(family.shape, dtype=torch.float64)
    cotangents: list[Tensor] = []

    def draw(outputs: list[Tensor]) -> list[Tensor]:
        cotangents.extend(torch.randn_like(y) for y in outputs)
        return cotangents

    expected = run_step(in_mode(unsharded), [x], draw)

    def step(rank: int) -> Any:
        manager, model = sharded[rank].manager, in_mode(sharded[rank].model)

        def local_cotangents(outputs: list[Tensor]) -> list[Tensor]:
            pairs = zip(outputs, cotangents, strict=True)
            return [local_cotangent(y, cotangent, manager) for y, cotangent in pairs]

        return run_step(model, [shard_tensor(x, manager=manager)], local_cotangents)

    bands = ThreadRanks[Any](sharded[0].manager.transport.world, SECONDS).run(step)
    by_kind = step_errors(expected, bands)
    errors = {f"{kind} {name}": e for kind, each in by_kind.items() for name, e in each.items()}
    domain = attached_domain(sharded[0].model)
    if domain is None:
        return Comparison("layers", errors, {})
    return Comparison("globe", errors, dict(domain.whole_calls))
