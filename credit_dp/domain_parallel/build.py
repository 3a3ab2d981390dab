"""Conversion of models that declare rules for their layers, as the models of this package do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from credit_dp.domain_parallel.conversion import Converter
from credit_dp.domain_parallel.convert import convert_to_domain_parallel
from credit_dp.domain_parallel.decide import DEFAULT_LIMIT
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.parameter_check import remove_parameter_check
from credit_dp.domain_parallel.rules import RULES
from credit_dp.errors import UserError


def shard_model(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shape: Sequence[int],
    whole_ops: str = "allow",
    whole_ops_limit: float | None = DEFAULT_LIMIT,
) -> nn.Module:
    """Convert a model with the rules of its `row_rules`, without the check of parameters.

    Args:
        model: any model, see `convert_to_domain_parallel`.
        manager: this rank's position in the mesh.
        input_shape: the shape of the global input, `(B, C, H, W)`.
        whole_ops: as for `convert_to_domain_parallel`.
        whole_ops_limit: as for `convert_to_domain_parallel`.

    Raises:
        UserError: as `declared_converters` and `convert_to_domain_parallel`.
    """
    converted = convert_to_domain_parallel(
        model,
        manager,
        custom_converters=declared_converters(model),
        input_shape=tuple(input_shape),
        whole_ops=whole_ops,
        whole_ops_limit=whole_ops_limit,
    )
    remove_parameter_check(converted)
    return converted


def declared_converters(model: nn.Module) -> dict[type[nn.Module], Converter]:
    """Return the converters of a model's `row_rules`: names of rules, or rules themselves.

    Raises:
        UserError: a key is no type of module, or a name is unknown.
    """
    rules: dict[type[nn.Module], str | Converter] = getattr(model, "row_rules", {})
    names = [name for name in RULES if isinstance(name, str)]
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise UserError(
                f"{type(model).__name__}.row_rules: needs types of modules as keys, got {kind!r}. "
                "A rule of a function is added by credit_dp.domain_parallel.rules.register."
            )
        if not callable(rule) and rule not in names:
            raise UserError(
                f"{type(model).__name__}.row_rules: needs one of {', '.join(names)}, or a rule, "
                f"for {kind.__name__}, got {rule!r}."
            )
    return {kind: rule if callable(rule) else RULES[rule] for kind, rule in rules.items()}
