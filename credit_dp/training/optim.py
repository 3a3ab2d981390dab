"""Optimization: optimizer, learning rate schedule, seeds of steps, moving average of weights.

A step of the trainer calls them in this order: `seed_step`, forward and backward passes, the
optimizer, `WeightAverage.update`, the schedule.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from credit_dp.config import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    OwnOptimizerConfig,
    OwnScheduleConfig,
)
from credit_dp.config.training import plugin_schedule
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentedModel
from credit_dp.plugins import report_plugin_errors
from credit_dp.random_streams import random_seed, seed_python
from credit_dp.torch_private import set_schedule
from credit_dp.training.optimizers import Lion, Muon, build_plugin_optimizer
from credit_dp.training.parameter_shards import local_tensor

FUSED_DEVICES = {"cuda", "cpu"}  # on which one kernel updates the weights
SCHEDULE_SAMPLES = 100  # steps at which a user's own schedule is tried before training
# Endings of the names of parameters without weight decay: biases, and tables of position biases and
# embeddings. Parameters of norms are found by their number of dimensions.
NO_DECAY_SUFFIXES = ("bias", "table", "pos_embed")


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    factors: Mapping[str, float] | None = None,
    *,
    skips_on_device: bool = False,
) -> Optimizer:
    """Return the optimizer of all parameters that are not frozen.

    Args:
        factors: of the learning rate, by the names of parameters; see `learning_rate_factors`.
        skips_on_device: whether `take_step` gets `skip`, which torch's fused update reads.

    Raises:
        UserError: a plug-in can't build it, or a parameter can't have a fused update.
    """
    groups = parameter_groups(parameters, config, factors or {})
    if isinstance(config, OwnOptimizerConfig):
        return build_plugin_optimizer(config, groups)
    if not isinstance(config, AdamWConfig | LionConfig):
        raise TypeError(f"{type(config).__name__} is the config of no optimizer")
    betas = (config.betas[0], config.betas[1])
    if isinstance(config, LionConfig):
        return Lion(groups, betas)
    if isinstance(config, MuonConfig):
        groups = split_matrices(groups, parameters, config)
        return Muon(groups, config.momentum, config.nesterov, betas, config.eps)
    learning = {name: p for name, p in parameters.items() if p.requires_grad}
    for name, parameter in learning.items() if skips_on_device else ():
        if not parameter.is_floating_point():
            raise UserError(
                f"trainer.check_finite: late needs real parameters, but {name} is "
                f"{parameter.dtype}. Set trainer.check_finite=step."
            )
        if not is_dense(parameter):
            raise UserError(
                f"trainer.check_finite: late needs parameters without gaps in memory, but {name} "
                f"has the strides {tuple(parameter.stride())}. Set trainer.check_finite=step."
            )
    # None: torch chooses
    fused = True if skips_on_device or can_fuse(learning.values()) else None
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def take_step(optimizer: Optimizer, skip: Tensor | None = None) -> None:
    """Take the optimizer's step.

    With `skip`, which has no dimensions, the device decides: where it is 1, weights, moments and
    counters stay. The optimizer is then built with `skips_on_device`.
    """
    if skip is None:
        optimizer.step()
        return
    # The name by which fused optimizers read what a gradient scaler has found.
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one kernel can update all parameters that are not frozen: real ones without gaps.

    Otherwise torch calls a kernel for each operation of the update, which on CPUs takes three times
    as long.
    """
    learning = [p for p in parameters if p.requires_grad]
    return bool(learning) and all(
        p.is_floating_point() and p.device.type in FUSED_DEVICES and is_dense(p) for p in learning
    )


def is_dense(parameter: nn.Parameter) -> bool:
    """Whether a parameter, or this rank's shard of it, fills its memory without gaps.

    Autograd gives its gradient the same strides then, and the optimizer its moments. The fused
    update on CPUs relies on this without a check: it treats all four as vectors.
    """
    local = local_tensor(parameter)
    return torch.empty_like(local, device="meta").stride() == local.stride()


def moments_per_parameter(config: OptimizerConfig) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for each parameter.

    Muon has one for matrices, and two for the few other parameters. A plug-in's optimizer is taken
    to keep as many as AdamW.
    """
    return 1 if isinstance(config, LionConfig | MuonConfig) else 2


def parameter_groups(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    factors: Mapping[str, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return groups of the parameters that are not frozen: with and without weight decay.

    The first two groups have the learning rate of the config; each other factor has two more.

    Args:
        factors: of the learning rate, by the names of parameters; 1 for all others.
    """
    return [
        {
            "params": [
                p
                for name, p in parameters.items()
                if p.requires_grad
                and has_weight_decay(name, p) is decay
                and factors.get(name, 1.0) == factor
            ],
            "lr": config.lr * factor,
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for factor in dict.fromkeys([1.0, *factors.values()])
        for decay in (True, False)
    ]


def learning_rate_factors(parts: Sequence[nn.Module], config: OptimizerConfig) -> dict[str, float]:
    """Return the factor on the learning rate of each parameter, by name; empty if all have 1.

    That of a segment is `layer_decay` to the power of the number of segments after it. Parameters
    of no segment belong to the first one.

    Args:
        parts: the model, or stages of it, which know all segments of the model.

    Raises:
        UserError: the model has no segments.

    Source: Clark et al. 2020, "ELECTRA", appendix A.
    """
    if config.layer_decay == 1:
        return {}
    factors = {}
    for part in parts:
        if not isinstance(part, SegmentedModel):
            raise UserError(
                "optimizer.layer_decay: needs a model with segments, which tell the order of its "
                f"layers, but {type(part).__name__} has none. Set optimizer.layer_decay=1."
            )
        segments = part.segments()
        paths = {path: n for n, segment in enumerate(segments) for path in segment.modules}
        for name, _ in part.named_parameters():
            inside = [n for path, n in paths.items() if name.startswith(f"{path}.")]
            later = len(segments) - 1 - min(inside, default=0)
            factors[name] = config.layer_decay**later
    return factors


def split_matrices(
    groups: Sequence[dict[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    config: MuonConfig,
) -> list[dict[str, Any]]:
    """Return the groups of `Muon`: weights that decay are matrices, except those of AdamW."""
    matrices = {
        id(p)
        for name, p in parameters.items()
        if has_weight_decay(name, p)
        and p.is_floating_point()  # complex weights are AdamW's
        and not any(fnmatchcase(name, pattern) for pattern in config.adamw)
    }
    return [
        {
            **group,
            "params": [p for p in group["params"] if (id(p) in matrices) is is_matrix],
            "matrices": is_matrix,
        }
        for group in groups
        for is_matrix in (False, True)
    ]


def has_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: not on biases, tables and weights of norms.

    Decided by name and number of dimensions, which sharding keeps; conversion changes the types of
    modules.

    Source: Liu et al. 2021, whose published training exempts biases, norms, tables of relative
    position biases and position embeddings.
    """
    return parameter.ndim > 1 and not name.endswith(NO_DECAY_SUFFIXES)


def build_schedule(optimizer: Optimizer, config: OptimizerConfig, steps: int) -> LambdaLR:
    """Return the schedule of the learning rate for a run of `steps` steps.

    The learning rate rises linearly to `lr` over `warmup_steps`, and then follows
    `optimizer.schedule`.

    Raises:
        UserError: a user's own schedule fails, here or at a later step.
    """
    plugin = plugin_schedule(config)
    steps_after_warmup = max(1, steps - config.warmup_steps)

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        step -= config.warmup_steps
        if plugin is not None:
            # A checkpoint may be beyond the last step of a run that was made shorter: the plug-in
            # is never called with a later step than the last.
            return schedule_factor(plugin, min(step, steps_after_warmup), steps_after_warmup)
        return SCHEDULE_FACTORS[config.schedule](config, step, steps_after_warmup)

    check_schedule(config, steps)
    return LambdaLR(optimizer, factor)


def check_schedule(config: OptimizerConfig, steps: int) -> None:
    """Try a user's own schedule at steps spread over a run of `steps` steps."""
    plugin = plugin_schedule(config)
    steps_after_warmup = max(1, steps - config.warmup_steps)
    if plugin is not None:
        for sample in range(SCHEDULE_SAMPLES + 1):
            step = sample * steps_after_warmup // SCHEDULE_SAMPLES
            schedule_factor(plugin, step, steps_after_warmup)


def schedule_factor(schedule: OwnScheduleConfig, step: int, steps: int) -> float:
    """Return the factor of `lr` that a user's own schedule gives for a step after the warm-up.

    Raises:
        UserError: it fails, or returns something else than a finite number of at least 0.
    """
    where = f"optimizer.schedule: {type(schedule).__name__}.factor"
    if type(schedule).factor is OwnScheduleConfig.factor:
        raise UserError(f"{where} is missing. It needs a method factor(self, step, steps).")
    with report_plugin_errors(where):
        value = schedule.factor(step, steps)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(
            f"{where} has to return a finite number of at least 0, got {value!r} for step {step} "
            f"of {steps}."
        )
    return float(value)


def cosine_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the factor of half a cosine from `lr` at the start to `final_lr` at the end.

    Source: Loshchilov & Hutter 2017, eq. 5, without restarts.
    """
    lowest = config.final_lr / config.lr
    progress = min(step / max(1, steps), 1.0)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def constant_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return 1: the learning rate stays at `lr`."""
    return 1.0


def step_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the factor that is multiplied by `decay_factor` every `decay_every` steps."""
    return float(config.decay_factor ** (step // config.decay_every))


# By name in `optimizer.schedule`: (config, step after the warm-up, number of these) -> factor.
SCHEDULE_FACTORS: dict[str, Callable[[OptimizerConfig, int, int], float]] = {
    "cosine": cosine_factor,
    "constant": constant_factor,
    "step": step_factor,
}


def restore_schedule(optimizer: Optimizer, schedule: LambdaLR, saved: dict[str, Any]) -> None:
    """Set a schedule to the step of a saved one; settings such as `lr` stay those of the config.

    Optimizer and schedule are newly built from the config, which may have changed since the save.
    """
    step = saved["last_epoch"]
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [float(base) * factor(step) for base, factor in pairs]
    set_schedule(schedule, step, rates)
    # A LambdaLR writes the rate into the optimizer only when it steps: the first step after
    # resuming needs it now.
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def seed_step(seed: int, step: int, data_rank: int, model_rank: int) -> None:
    """Seed the random numbers of one training step, so that a resumed run draws the same.

    Ranks draw different numbers, as they have different samples or rows. The first rank of the
    mesh draws the same numbers as a single process. The generators of Python and NumPy are the same
    on all ranks that share the model.

    Args:
        model_rank: number of this rank among the ranks that share the model and its globe: pipeline
            rank * domain ranks + domain rank.
    """
    number = random_seed(seed, step, data_rank, model_rank)
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        # Where there is none, `torch.manual_seed` keeps the seed for one that may come, together
        # with the stack of the call: that takes 1 ms.
        torch.default_generator.manual_seed(number)
    # A model may decide by these which layers run, and all ranks of its globe have to run the same.
    seed_python(random_seed(seed, step, data_rank))


@final
class WeightAverage:
    """An exponential moving average of parameters, or of this rank's shards of them.

    Nothing is sent: the average of a shard is the shard of the average. Buffers are not averaged.

    Args:
        parameters: by name; FSDP parameters in their sharded form.
        decay: of the average in one update, after the first updates; see `current_decay`.

    Attributes:
        averages: by the names of the parameters, sharded as they are.
        updates: number of updates so far.

    Source: Polyak & Juditsky 1992; the decay of early updates as the documentation of TensorFlow's
    `ExponentialMovingAverage` gives it for `num_updates`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.parameters = parameters
        self.decay = decay
        self.updates = 0
        self.averages: dict[str, Tensor] = {n: p.detach().clone() for n, p in parameters.items()}

    @property
    def current_decay(self) -> float:
        """Return the decay of the next update: small at first, when weights are still random."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self) -> None:
        """Add the present parameters to the average.

        One fused operation on all local shards: launching one kernel for each parameter would take
        a GPU longer than the arithmetic, and dispatch through `DTensor` many times longer.
        """
        if self.parameters:
            averages = [local_tensor(self.averages[name]) for name in self.parameters]
            current = [local_tensor(parameter) for parameter in self.parameters.values()]
            update = get_ema_multi_avg_fn(self.current_decay)  # type: ignore[no-untyped-call]
            update(averages, current, self.updates)
        self.updates += 1

    @torch.no_grad()
    def reset_to_parameters(self, names: Collection[str], updates: int = 0) -> None:
        """Set the averages of these names to the present parameters."""
        for name in names:
            self.averages[name].copy_(self.parameters[name])
        self.updates = updates

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the parameters by their averages inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            current = parameter.detach().clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(current)
