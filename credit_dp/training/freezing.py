"""Parameters that stay as they are: named by patterns, before anything is sharded."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from credit_dp import checks
from credit_dp.errors import UserError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let nothing train whose name one of the patterns matches, in the whole model, in place.

    Args:
        model: all of it, so that every rank of a mesh freezes, or refuses, the same.
        patterns: of full names of parameters, with the wildcards of file names.

    Raises:
        UserError: a pattern matches no parameter, or none is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            raise UserError(
                f"trainer.freeze: needs patterns of parameters' names, but {pattern!r} matches "
                f"none of {len(parameters)}.{_advice(pattern, parameters)}"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"trainer.freeze: leaves no parameter to train, it matches all {len(parameters)}. "
            "Take patterns out of trainer.freeze."
        )


def _advice(pattern: str, names: Collection[str]) -> str:
    """What may have been meant: a module's name lacks the wildcard."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f" Did you mean {pattern}.*?"
    return checks.nearest(pattern, names) or f" Names are like {next(iter(names), '')}."
