"""The parameters of a model as it was built: whether they have values, and which are frozen.

All functions take the complete model, before it is sharded: all ranks raise the same errors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from credit_dp import checks
from credit_dp.config import Config, ModelConfig, MuonConfig, OwnModelConfig
from credit_dp.domain_parallel.planning.model_plan import check_model
from credit_dp.errors import UserError
from credit_dp.fields import Fields


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern, in place.

    Args:
        model: the complete model, so that all ranks freeze the same and raise the same errors.
        patterns: full names of parameters, with the wildcards of file names.

    Raises:
        UserError: a pattern matches no parameter, or no parameter is left to train.
    """
    for parameter in parameters_to_freeze(model, patterns):
        parameter.requires_grad_(False)


def parameters_to_freeze(model: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters whose names match a pattern; see `freeze`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matching = [
        parameters[name]
        for pattern in patterns
        for name in match_names("trainer.freeze", pattern, parameters)
    ]
    frozen = set(map(id, matching))
    trained = [p for p in parameters.values() if p.requires_grad and id(p) not in frozen]
    if patterns and not trained:
        raise UserError(
            "trainer.freeze: leaves no parameter to train, it matches all "
            f"{len(parameters)}. Remove patterns from trainer.freeze."
        )
    return matching


def check_planned_model(
    model: nn.Module, config: ModelConfig, fields: Fields, grid: tuple[int, int]
) -> None:
    """Refuse a model that a run would refuse, as far as that is known without its weights.

    Args:
        model: complete and unconverted; its parameters may be on the meta device.
        config: of the model.
        fields: that it gets and returns.
        grid: rows and columns.

    Raises:
        UserError: it has lazy layers, fails, or returns another shape than is needed.
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x):
            raise _no_values_error(name)
    if isinstance(config, OwnModelConfig):
        check_model(model, fields.inputs, fields.outputs, grid)


def _no_values_error(name: str) -> UserError:
    return UserError(
        f"model: {name} has no values: it is of a lazy layer, or on the meta device. Give it its "
        "size and its values where the model is built."
    )


def check_has_values(model: nn.Module) -> None:
    """Refuse parameters and buffers without values."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(x) or x.is_meta:
            raise _no_values_error(name)


def check_parameter_patterns(model: nn.Module, config: Config) -> None:
    """Refuse patterns of the config that match no parameter of a complete model, or freeze all."""
    parameters_to_freeze(model, config.trainer.freeze)
    if isinstance(config.optimizer, MuonConfig):
        # The optimizer knows a shared parameter under the first of its names only.
        first_names = dict(model.named_parameters())
        for pattern in config.optimizer.adamw:
            match_names("optimizer.adamw", pattern, first_names)


def match_names(key: str, pattern: str, names: Collection[str]) -> list[str]:
    """Return the names of parameters that a pattern of a config key matches.

    Raises:
        UserError: there is none.
    """
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        raise UserError(
            f"{key}: needs patterns of parameters' names, but {pattern!r} matches none of "
            f"{len(names)}.{_suggest_pattern(pattern, names)}"
        )
    return matched


def _suggest_pattern(pattern: str, names: Collection[str]) -> str:
    """Suggest another pattern or name: often a module's name lacks the wildcard."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f" Did you mean {pattern}.*?"
    return checks.did_you_mean(pattern, names) or f" Names are like {next(iter(names), '')}."
