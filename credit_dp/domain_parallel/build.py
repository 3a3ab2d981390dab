"""Conversion of models that declare rules for their layers, as the models of this package do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from credit_dp.domain_parallel.conversion import Converter
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.decide import DEFAULT_LIMIT
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

# The names that a model may use in its `row_rules`, a table of module type -> name.
NAMED_RULES: dict[str, Converter] = {
    "periodic_conv": DomainParallelPeriodicConv2d,  # needs `conv`, `padding`; `poles` is optional
    "periodic_upsample": DomainParallelPeriodicUpsample,  # needs `refine` and `poles`
    "long_range_conv": DomainParallelLongRangeConv2d,  # a depthwise Conv2d with `column_padding`
    "match_rows": DomainParallelMatchRows,  # crops to a reference, `forward(x, reference)`
    "pole_pad": DomainParallelPolePad,  # needs `width`, `columns` and `poles`
    "row_groups": DomainParallelRowGroups,  # needs `row_dim`, `groups` and `treat`
    "stochastic_depth": DomainParallelStochasticDepth,  # needs `rate` and `draws`
    "keep": lambda module: module,  # computes each row separately; trusted, not audited
}


def shard_model(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shape: Sequence[int],
    whole_ops: str = "allow",
    whole_ops_limit: float | None = DEFAULT_LIMIT,
) -> nn.Module:
    """Convert a model with the rules that it names in its `row_rules`.

    Args:
        model: any model, see `convert_to_domain_parallel`.
        manager: this rank's position in the mesh.
        input_shape: the shape of the global input, `(B, C, H, W)`.
        whole_ops: as for `convert_to_domain_parallel`.
        whole_ops_limit: as for `convert_to_domain_parallel`.

    Raises:
        UserError: as `declared_converters` and `convert_to_domain_parallel`.
    """
    return convert_to_domain_parallel(
        model,
        manager,
        custom_converters=declared_converters(model),
        input_shape=tuple(input_shape),
        whole_ops=whole_ops,
        whole_ops_limit=whole_ops_limit,
    )


def declared_converters(model: nn.Module) -> dict[type[nn.Module], Converter]:
    """Return the converters of the rules that a model names in its `row_rules`, if it has any.

    Raises:
        UserError: a name is unknown.
    """
    rules: dict[type[nn.Module], str] = getattr(model, "row_rules", {})
    for kind, name in rules.items():
        if name not in NAMED_RULES:
            raise UserError(
                f"{type(model).__name__}.row_rules: needs one of {', '.join(NAMED_RULES)} for "
                f"{kind.__name__}, got {name!r}."
            )
    return {kind: NAMED_RULES[name] for kind, name in rules.items()}
