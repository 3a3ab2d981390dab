"""Sharding a model of this package: the converter plus the rules that the model declares."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from credit_dp.domain_parallel.convert import Converter, convert_to_domain_parallel
from credit_dp.domain_parallel.layers import (
    DomainParallelLongRangeConv2d,
    DomainParallelMatchRows,
    DomainParallelPeriodicConv2d,
    DomainParallelPeriodicUpsample,
    DomainParallelPolePad,
    DomainParallelRowGroups,
    DomainParallelStochasticDepth,
)
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError

# What a model may name in its `row_rules`: module type -> one of these.
NAMED_RULES: dict[str, Converter] = {
    "periodic_conv": DomainParallelPeriodicConv2d,
    "periodic_upsample": DomainParallelPeriodicUpsample,
    "long_range_conv": DomainParallelLongRangeConv2d,
    "match_rows": DomainParallelMatchRows,
    "pole_pad": DomainParallelPolePad,
    "row_groups": DomainParallelRowGroups,
    "stochastic_depth": DomainParallelStochasticDepth,
    "keep": lambda module: module,
}


def shard_model(
    model: nn.Module, manager: DomainParallelManager, input_shape: Sequence[int]
) -> nn.Module:
    """Convert a model with the rules of its `row_rules`, a table of module type -> rule name.

    Shapes:
        `input_shape` is the whole globe's `(B, C, H, W)`.
    """
    return convert_to_domain_parallel(
        model,
        manager,
        custom_converters=declared_converters(model),
        input_shape=tuple(input_shape),
    )


def declared_converters(model: nn.Module) -> dict[type[nn.Module], Converter]:
    """Return the rules that a model names in its `row_rules`, if it has any, as converters.

    Raises:
        UserError: there is no rule of a name.
    """
    rules: dict[type[nn.Module], str] = getattr(model, "row_rules", {})
    for kind, rule in rules.items():
        if rule not in NAMED_RULES:
            raise UserError(
                f"{type(model).__name__}.row_rules: needs one of {', '.join(NAMED_RULES)} for "
                f"{kind.__name__}, got {rule!r}."
            )
    return {kind: NAMED_RULES[rule] for kind, rule in rules.items()}
