"""A user's own optimizer: built by a plug-in, and tried on small tensors before training.

An optimizer that would not train exactly is refused. A checkpoint holds tensors of each parameter
and nothing else of an optimizer, so the next step must follow from these tensors. If ranks hold
parts of the parameters (fsdp2, a pipeline), updating a part must give that part of the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credit_dp.config import OwnOptimizerConfig, ParallelConfig
from credit_dp.errors import UserError
from credit_dp.plugins import report_plugin_errors
from credit_dp.training.optimizers import StateLayout
from credit_dp.training.parameter_shards import is_dtensor

ParamGroups = Sequence[Mapping[str, Any]]

TRIAL_SIZES = (4, 3, 2, 2, 2, 2)  # of the first dimensions of a trial parameter
TRIAL_STEPS = 3
TRIAL_LR = 0.1  # large, so that updates are well above rounding errors
STATE_REQUIREMENT = (
    "Checkpoints hold tensors of the parameter's shape and dtype, and single numbers in tensors, "
    "by keys without dots."
)


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
        # Copies, because torch's optimizers write their defaults into the groups.
        optimizer = config.build([dict(group) for group in groups])
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"{where} has to return a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    given, used = (
        {id(p) for group in parameter_groups for p in group["params"]}
        for parameter_groups in (groups, optimizer.param_groups)
    )
    if given != used:
        raise UserError(f"{where} has to use the parameters of all groups, and no others.")
    return optimizer


def probe_plugin_optimizer(
    config: OwnOptimizerConfig, groups: ParamGroups, parallel: ParallelConfig
) -> StateLayout:
    """Return an optimizer's state layout after steps on small parameters like those of `groups`.

    Raises:
        UserError: it fails, or would not train exactly on this mesh or after resuming.
    """
    groups = [{**group, "lr": TRIAL_LR} for group in groups]
    trials = trial_parameters(groups)
    where = f"optimizer={config.name}"
    gpus = sorted({t.value.get_device() for t in trials if t.value.is_cuda})
    with torch.random.fork_rng(gpus):  # the training's random numbers stay the same
        trained, optimizer = run_trial_steps(config, groups, trials)
        layout = observed_layout(config, optimizer, trained)
        *earlier, last = range(TRIAL_STEPS)
        parameters, optimizer = run_trial_steps(config, groups, trials, earlier)
        values = [t._replace(value=p.detach()) for t, p in zip(trials, parameters, strict=True)]
        state = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in parameters]
        # A new optimizer with a copy of the state has to take the same last step.
        resumed, _ = run_trial_steps(config, groups, values, [last], state)
        if not all_close(resumed, trained):
            raise UserError(
                f"{where}: takes another step when it resumes from a checkpoint, which holds "
                "optimizer.state of each parameter only. Keep everything in it, and draw no random "
                "numbers."
            )
        if parallel.data_mode == "fsdp2":
            half = slice(0, TRIAL_SIZES[0] // 2)
            halves = [trial.sliced(half) if trial.value.ndim else trial for trial in trials]
            updated_halves, _ = run_trial_steps(config, groups, halves)
            shards, _ = run_trial_steps(config, groups, [trial.as_dtensor() for trial in trials])
            updated = [*updated_halves, *(p.to_local() if is_dtensor(p) else p for p in shards)]
            if not all_close(updated, [*(p[half] if p.ndim else p for p in trained), *trained]):
                raise UserError(
                    f"{where}: does not update each entry of a parameter on its own, as "
                    "parallel.data_mode=fsdp2 needs, which shards parameters. Use ddp."
                )
        if parallel.pipeline > 1:
            alone = [run_trial_steps(config, groups, [trial])[0][0] for trial in trials]
            if not all_close(alone, trained):
                raise UserError(
                    f"{where}: does not update each parameter on its own, as parallel.pipeline "
                    "above 1 needs. Use parallel.pipeline=1."
                )
    return layout


class TrialParameter(NamedTuple):
    """A small random parameter.

    Attributes:
        group: the index of its parameter group.
        like: a parameter of the model with the same dtype, device and number of dimensions.
        value: before the first step.
        gradients: one for each step.
    """

    group: int
    like: Tensor
    value: Tensor
    gradients: Sequence[Tensor]

    def sliced(self, rows: slice) -> TrialParameter:
        """Return the parameter cut to some entries of its first dimension."""
        return self._replace(value=self.value[rows], gradients=[g[rows] for g in self.gradients])

    def as_dtensor(self) -> TrialParameter:
        """Return the parameter as this rank's shard of a larger one, if the model's is sharded."""
        if not is_dtensor(self.like):
            return self
        from torch.distributed.tensor import DTensor

        mesh, placements = self.like.device_mesh, self.like.placements
        # Every rank's shard gets the values of the trial parameter; without the check nothing is
        # sent.
        value, *gradients = (
            DTensor.from_local(tensor, mesh, placements, run_check=False)
            for tensor in (self.value, *self.gradients)
        )
        return self._replace(value=value, gradients=gradients)


def trial_parameters(groups: ParamGroups) -> list[TrialParameter]:
    """Return a trial parameter for each number of dimensions in each group; equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    trials = []
    for number, group in enumerate(groups):
        # Some optimizers treat matrices and vectors differently.
        by_dims = {p.ndim: p for p in group["params"]}
        for dims, like in sorted(by_dims.items()):
            device = "cpu" if like.is_meta else like.device
            value, *gradients = (
                torch.randn(TRIAL_SIZES[:dims], generator=generator).to(device, like.dtype)
                for _ in range(1 + TRIAL_STEPS)
            )
            trials.append(TrialParameter(number, like.detach(), value, gradients))
    return trials


def run_trial_steps(
    config: OwnOptimizerConfig,
    groups: ParamGroups,
    trials: Sequence[TrialParameter],
    steps: Iterable[int] = range(TRIAL_STEPS),
    state: Sequence[Mapping[str, Any]] = (),
) -> tuple[list[nn.Parameter], Optimizer]:
    """Return the trial parameters and their optimizer after some steps.

    Args:
        config: of the optimizer.
        groups: have the settings of the parameters.
        trials: the parameters before the first step, and their gradients.
        steps: the indices of the gradients to use.
        state: the optimizer's state of each parameter after earlier steps, if there were any.

    Raises:
        UserError: the optimizer fails.
    """
    parameters = [nn.Parameter(trial.value.clone()) for trial in trials]
    trial_groups = [
        {**group, "params": [p for p, t in zip(parameters, trials, strict=True) if t.group == n]}
        for n, group in enumerate(groups)
    ]
    optimizer = build_plugin_optimizer(config, trial_groups)
    # Not strict: without earlier steps there is no state at all.
    optimizer.state.update(zip(parameters, map(dict, state), strict=False))
    with report_plugin_errors(f"optimizer: the optimizer of {type(config).__name__}"):
        for step in steps:
            for parameter, trial in zip(parameters, trials, strict=True):
                parameter.grad = trial.gradients[step].clone()
            optimizer.step()
    return parameters, optimizer


def observed_layout(
    config: OwnOptimizerConfig, optimizer: Optimizer, parameters: Sequence[nn.Parameter]
) -> StateLayout:
    """Return the layout of the state that an optimizer has after steps on these parameters.

    Raises:
        UserError: the state has something that a checkpoint can't hold.
    """
    scalars: dict[str, Tensor] = {}
    moments: list[int] = []
    known = {id(parameter) for parameter in parameters}
    if any(id(key) not in known for key in optimizer.state):
        raise UserError(
            f"optimizer={config.name}: keeps state that belongs to no parameter. "
            f"{STATE_REQUIREMENT}"
        )
    # A parameter without dimensions comes last: its moments look like single numbers.
    for parameter in sorted(parameters, key=lambda p: -p.ndim):
        state = optimizer.state[parameter]
        for key, value in state.items():
            can_be_saved = isinstance(value, Tensor) and value.dtype != torch.bool
            if not isinstance(key, str) or "." in key or not can_be_saved:
                kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
                raise UserError(
                    f"optimizer={config.name}: keeps {key!r} of a parameter as {kind}. "
                    f"{STATE_REQUIREMENT}"
                )
            if value.ndim == 0 < parameter.ndim:
                scalars[key] = value
            elif value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise UserError(
                    f"optimizer={config.name}: keeps {key!r} as {tuple(value.shape)} of "
                    f"{value.dtype} for a parameter of {tuple(parameter.shape)} of "
                    f"{parameter.dtype}. {STATE_REQUIREMENT}"
                )
        moments.append(len(state.keys() - scalars.keys()))
    keys = frozenset(frozenset(optimizer.state[p]) for p in parameters)
    return StateLayout(scalars, max(moments, default=0), keys)


def all_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether tensors agree within rounding errors, on whichever devices they are."""
    for a, b in zip(actual, expected, strict=True):
        tolerance = 1000 * torch.finfo(b.dtype).eps
        if not torch.allclose(a.to(b.device), b, rtol=tolerance, atol=tolerance):
            return False
    return True
