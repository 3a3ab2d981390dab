"""An optimizer of the user's own: built by a plug-in, and tried on small tensors before it trains.

What can't be exact is refused then. Of an optimizer a checkpoint holds tensors for each parameter
and nothing else, so the next step has to follow from these. Where ranks hold parts of the
parameters (fsdp2, a pipeline), the update of a part has to be the part of the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credit_dp.config import OwnOptimizerConfig, ParallelConfig
from credit_dp.errors import UserError
from credit_dp.plugins import report_plugin_errors
from credit_dp.training.parameter_shards import is_dtensor

ParamGroups = Sequence[Mapping[str, Any]]

TRIAL_SIZES = (4, 3, 2, 2, 2, 2)  # of a small parameter, as many as it has dimensions
TRIAL_STEPS = 3
TRIAL_LR = 0.1  # so large that steps stand out from rounding
STATE_REQUIREMENT = (
    "Checkpoints hold tensors of the parameter's shape and dtype, and single numbers in tensors, "
    "by keys without dots."
)


@final
@dataclass(frozen=True)
class StateLayout:
    """What an optimizer keeps of a parameter between steps.

    Attributes:
        numbers: an example of each that is a single number instead of a tensor like the parameter.
        moments: how many are like the parameter.
        keys: the keys that a parameter may have, in sets of all that it then has; None: any.
    """

    scalars: Mapping[str, Tensor]
    moments: int
    keys: frozenset[frozenset[str]] | None = None


ADAMW = StateLayout({"step": torch.zeros(())}, moments=2)


def build_plugin_optimizer(config: OwnOptimizerConfig, groups: ParamGroups) -> Optimizer:
    """Return the optimizer that a plug-in builds for these parameter groups.

    Raises:
        UserError: it can't be built, or does not take all of the parameters.
    """
    kind = type(config)
    where = f"optimizer: {kind.__name__}.build"
    if kind.build is OwnOptimizerConfig.build:
        raise UserError(
            f"optimizer: {kind.__name__} has no build. It needs a method build(self, groups) that "
            "returns a torch.optim.Optimizer."
        )
    with report_plugin_errors(where):
        optimiser = config.build([dict(group) for group in groups])
    if not isinstance(optimiser, Optimizer):
        raise UserError(
            f"{where} has to return a torch.optim.Optimizer, got {type(optimiser).__name__}."
        )
    given, taken = (
        {id(p) for group in each for p in group["params"]}
        for each in (groups, optimiser.param_groups)
    )
    if given != taken:
        raise UserError(f"{where} has to use the parameters of all groups, and no others.")
    return optimiser


def probe_plugin_optimizer(
    config: OwnOptimizerConfig, groups: ParamGroups, parallel: ParallelConfig
) -> StateLayout:
    """Return what an optimizer keeps, after steps on small parameters like those of `groups`.

    Raises:
        UserError: it fails, or would not train exactly on this mesh or after resuming.
    """
    groups = [{**group, "lr": TRIAL_LR} for group in groups]
    small = trial_parameters(groups)
    gpus = sorted({s.value.get_device() for s in small if s.value.is_cuda})
    with torch.random.fork_rng(gpus):  # what it draws here changes nothing in training
        trained, optimiser = run_trial_steps(config, groups, small)
        layout = observed_layout(config, optimiser, trained)
        check_resuming(config, groups, small, trained)
        if parallel.data_mode == "fsdp2":
            check_sharded_update(config, groups, small, trained)
        if parallel.pipeline > 1:
            check_pipeline(config, groups, small, trained)
    return layout


class TrialParameter(NamedTuple):
    """A small random parameter.

    Attributes:
        group: the number of its group.
        like: a parameter of the model, with its dtype, device and number of dimensions.
        value: before the first step.
        gradients: of each step.
    """

    group: int
    like: Tensor
    value: Tensor
    gradients: Sequence[Tensor]

    def sliced(self, rows: slice) -> TrialParameter:
        """Return some rows of it."""
        return self._replace(value=self.value[rows], gradients=[g[rows] for g in self.gradients])

    def as_dtensor(self) -> TrialParameter:
        """Return it as this rank's share of a larger one, if the model's parameter is shared."""
        if not is_dtensor(self.like):
            return self
        from torch.distributed.tensor import DTensor

        mesh, placements = self.like.device_mesh, self.like.placements
        value, *gradients = (
            DTensor.from_local(each, mesh, placements, run_check=False)
            for each in (self.value, *self.gradients)
        )
        return self._replace(value=value, gradients=gradients)


def trial_parameters(groups: ParamGroups) -> list[TrialParameter]:
    """Return one for each number of dimensions in each group, the same on all ranks."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number, group in enumerate(groups):
        by_dims = {p.ndim: p for p in group["params"]}
        for dims, like in sorted(by_dims.items()):
            device = "cpu" if like.is_meta else like.device
            value, *gradients = (
                torch.randn(TRIAL_SIZES[:dims], generator=draw).to(device, like.dtype)
                for _ in range(1 + TRIAL_STEPS)
            )
            found.append(TrialParameter(number, like.detach(), value, gradients))
    return found


def run_trial_steps(
    config: OwnOptimizerConfig,
    groups: ParamGroups,
    small: Sequence[TrialParameter],
    steps: Iterable[int] = range(TRIAL_STEPS),
    state: Sequence[Mapping[str, Any]] = (),
) -> tuple[list[nn.Parameter], Optimizer]:
    """Return small parameters and their optimizer after some steps.

    Args:
        config: of the optimizer.
        groups: whose settings the parameters have.
        small: the parameters.
        steps: by number.
        state: what the optimizer has kept of each parameter from steps before, if there were any.

    Raises:
        UserError: the optimizer fails.
    """
    parameters = [nn.Parameter(each.value.clone()) for each in small]
    filled = [
        {**group, "params": [p for p, s in zip(parameters, small, strict=True) if s.group == n]}
        for n, group in enumerate(groups)
    ]
    optimiser = build_plugin_optimizer(config, filled)
    optimiser.state.update(zip(parameters, map(dict, state), strict=False))
    with report_plugin_errors(f"optimizer: the optimizer of {type(config).__name__}"):
        for step in steps:
            for parameter, each in zip(parameters, small, strict=True):
                parameter.grad = each.gradients[step].clone()
            optimiser.step()
    return parameters, optimiser


def observed_layout(
    config: OwnOptimizerConfig, optimiser: Optimizer, parameters: Sequence[nn.Parameter]
) -> StateLayout:
    """Return what an optimizer keeps of these parameters.

    Raises:
        UserError: it keeps what no checkpoint holds.
    """
    numbers: dict[str, Tensor] = {}
    moments: list[int] = []
    known = {id(parameter) for parameter in parameters}
    if any(id(key) not in known for key in optimiser.state):
        raise UserError(
            f"optimizer={config.name}: keeps a state of no parameter. {STATE_REQUIREMENT}"
        )
    for parameter in sorted(parameters, key=lambda p: -p.ndim):  # one without any tells nothing
        state = optimiser.state[parameter]
        for key, value in state.items():
            tensor = isinstance(value, Tensor) and value.dtype != torch.bool
            if not isinstance(key, str) or "." in key or not tensor:
                kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
                raise UserError(
                    f"optimizer={config.name}: keeps {key!r} of a parameter as {kind}. "
                    f"{STATE_REQUIREMENT}"
                )
            if value.ndim == 0 < parameter.ndim:
                numbers[key] = value
            elif value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise UserError(
                    f"optimizer={config.name}: keeps {key!r} as {tuple(value.shape)} of "
                    f"{value.dtype} for a parameter of {tuple(parameter.shape)} of "
                    f"{parameter.dtype}. {STATE_REQUIREMENT}"
                )
        moments.append(len(state.keys() - numbers.keys()))
    keys = frozenset(frozenset(optimiser.state[p]) for p in parameters)
    return StateLayout(numbers, max(moments, default=0), keys)


def check_resuming(
    config: OwnOptimizerConfig,
    groups: ParamGroups,
    small: Sequence[TrialParameter],
    trained: Sequence[nn.Parameter],
) -> None:
    """Refuse an optimizer whose next step does not follow from what it keeps of parameters."""
    *before, last = range(TRIAL_STEPS)
    parameters, optimiser = run_trial_steps(config, groups, small, before)
    values = [s._replace(value=p.detach()) for s, p in zip(small, parameters, strict=True)]
    state = [{k: v.clone() for k, v in optimiser.state[p].items()} for p in parameters]
    resumed, _ = run_trial_steps(config, groups, values, [last], state)
    if not all_close(resumed, trained):
        raise UserError(
            f"optimizer={config.name}: takes another step when it goes on from a checkpoint, which "
            "holds optimizer.state of each parameter only. Keep everything there, and draw nothing."
        )


def check_sharded_update(
    config: OwnOptimizerConfig,
    groups: ParamGroups,
    small: Sequence[TrialParameter],
    trained: Sequence[nn.Parameter],
) -> None:
    """Refuse an optimizer that does not update each entry on its own, or no shares of tensors."""
    half = slice(0, TRIAL_SIZES[0] // 2)
    cut = [each.sliced(half) if each.value.ndim else each for each in small]
    parts, _ = run_trial_steps(config, groups, cut)
    shares, _ = run_trial_steps(config, groups, [each.as_dtensor() for each in small])
    own = [p.to_local() if is_dtensor(p) else p for p in shares]
    if not all_close(parts, [p[half] if p.ndim else p for p in trained]) or not all_close(
        own, trained
    ):
        raise UserError(
            f"optimizer={config.name}: does not update each entry of a parameter on its own, as "
            "parallel.data_mode=fsdp2 needs, which shares parameters out. Use ddp."
        )


def check_pipeline(
    config: OwnOptimizerConfig,
    groups: ParamGroups,
    small: Sequence[TrialParameter],
    trained: Sequence[nn.Parameter],
) -> None:
    """Refuse an optimizer that does not update each parameter on its own."""
    alone = [run_trial_steps(config, groups, [each])[0][0] for each in small]
    if not all_close(alone, trained):
        raise UserError(
            f"optimizer={config.name}: does not update each parameter on its own, as "
            "parallel.pipeline above 1 needs. Use parallel.pipeline=1."
        )


def all_close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether tensors agree but for rounding, wherever they lie."""
    for a, b in zip(found, wanted, strict=True):
        rounding = 1000 * torch.finfo(b.dtype).eps
        if not torch.allclose(a.to(b.device), b, rtol=rounding, atol=rounding):
            return False
    return True
