"""The optimizer, its learning rate, the seeds of steps, and the average of weights."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from credit_dp.config import (
    AdamWConfig,
    Config,
    OptimizerConfig,
    OwnOptimizerConfig,
    OwnScheduleConfig,
    ParallelConfig,
)
from credit_dp.config.training import plugin_schedule
from credit_dp.errors import UserError
from credit_dp.plugins import report_plugin_errors
from credit_dp.training.own_optimizer import (
    ADAMW,
    StateLayout,
    build_plugin_optimizer,
    probe_plugin_optimizer,
)
from credit_dp.training.replicas import local_tensor

SCHEDULE_SAMPLES = 100  # steps at which a schedule of the user's own is tried before training
# Ends of the names of parameters on which weight decay does not act, besides those of norms:
# biases, and tables of what a position adds.
NO_DECAY_SUFFIXES = ("bias", "table", "pos_embed")


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Return the optimizer of all parameters that are not frozen.

    Raises:
        UserError: a plug-in can't build it.
    """
    groups = parameter_groups(parameters, config)
    if isinstance(config, OwnOptimizerConfig):
        return build_plugin_optimizer(config, groups)
    if not isinstance(config, AdamWConfig):
        raise TypeError(f"{type(config).__name__} is the config of no optimizer")
    betas = (config.betas[0], config.betas[1])
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps)


def state_layout(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, parallel: ParallelConfig
) -> StateLayout:
    """Return what the optimizer of these parameters keeps of each of them.

    Raises:
        UserError: a plug-in's optimizer would not train exactly on this mesh or after resuming.
    """
    if not isinstance(config, OwnOptimizerConfig):
        return ADAMW
    return probe_plugin_optimizer(config, parameter_groups(parameters, config), parallel)


def moments_per_parameter(part: nn.Module, config: Config) -> int:
    """Return how many tensors like a parameter the optimizer keeps for each parameter of a model.

    Raises:
        UserError: see `state_layout`.
    """
    parameters = dict(part.named_parameters())
    return state_layout(parameters, config.optimizer, config.parallel).moments


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameters that are not frozen: those with weight decay, and those without."""
    return [
        {
            "params": [
                p
                for name, p in parameters.items()
                if p.requires_grad and has_weight_decay(name, p) is decay
            ],
            "lr": config.lr,
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]


def has_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: not on biases, tables and the affine part of norms.

    Told by name and shape, which sharding keeps; module types change on conversion.

    Source: Liu et al. 2021, whose published training exempts biases, norms, tables of relative
    position biases and position embeddings.
    """
    return parameter.ndim > 1 and not name.endswith(NO_DECAY_SUFFIXES)


def build_schedule(optimiser: Optimizer, config: OptimizerConfig, steps: int) -> LambdaLR:
    """The learning rate of each of `steps` steps, as a factor of `lr`.

    It rises in a line over the first `warmup_steps`, the last of which has all of it; what comes
    then is that of `schedule`.

    Raises:
        UserError: a schedule of the user's own fails, here or at a later step.
    """
    own = plugin_schedule(config)
    after = max(1, steps - config.warmup_steps)

    def later(step: int) -> float:
        if own is not None:
            return schedule_factor(own, min(step, after), after)
        return SCHEDULE_FACTORS[config.schedule](config, step, after)

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        return later(step - config.warmup_steps)

    check_schedule(config, steps)
    return LambdaLR(optimiser, factor)


def check_schedule(config: OptimizerConfig, steps: int) -> None:
    """Refuse a schedule of the user's own that fails somewhere in `steps` steps.

    Raises:
        UserError: see `schedule_factor`.
    """
    own = plugin_schedule(config)
    after = max(1, steps - config.warmup_steps)
    if own is not None:
        for part in range(SCHEDULE_SAMPLES + 1):
            schedule_factor(own, part * after // SCHEDULE_SAMPLES, after)


def schedule_factor(schedule: OwnScheduleConfig, step: int, steps: int) -> float:
    """Return the factor that a schedule of the user's own gives.

    Raises:
        UserError: it fails, or gives no finite number of at least 0.
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
    """Half a cosine from 1 to `final_lr` at the end, where it stays.

    Source: Loshchilov & Hutter 2017, eq. 5, without restarts.
    """
    lowest = config.final_lr / config.lr
    done = min(step / max(1, steps), 1.0)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * done))


def constant_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """All of it."""
    return 1.0


def step_factor(config: OptimizerConfig, step: int, steps: int) -> float:
    """Times `decay_factor` after every `decay_every` steps."""
    return float(config.decay_factor ** (step // config.decay_every))


# By their names in `optimizer.schedule`: (config, steps since the warm-up, all of these) -> factor.
SCHEDULE_FACTORS: dict[str, Callable[[OptimizerConfig, int, int], float]] = {
    "cosine": cosine_factor,
    "constant": constant_factor,
    "step": step_factor,
}


def restore_schedule(optimiser: Optimizer, schedule: LambdaLR, saved: dict[str, Any]) -> None:
    """Go to the position of a saved schedule, but take no setting from it: those are the config's.

    Optimiser and schedule come fresh from the config, which may have changed since the save.
    """
    step = saved["last_epoch"]
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [float(base) * factor(step) for base, factor in pairs]
    own = {"base_lrs": schedule.base_lrs, "_last_lr": rates}
    place = {"last_epoch": step, "_step_count": step + 1}
    schedule.load_state_dict({**schedule.state_dict(), **place, **own})
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate


def seed_step(seed: int, step: int, data_rank: int, domain_rank: int) -> None:
    """Seed what one training step draws, so that a resumed run draws the same.

    Ranks draw different numbers, for different samples or rows of dropout; the first domain rank
    of the first data rank draws what one process would.
    """
    state = torch.tensor([seed, step, data_rank, domain_rank], dtype=torch.int64)
    mixed = 0
    for part in state.tolist():
        # The 64-bit finaliser of SplitMix (Steele, Lea & Flood 2014): neighbouring steps and ranks
        # get unrelated seeds.
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    torch.manual_seed(mixed % 2**63)


@final
class WeightAverage:
    """An exponential moving average of parameters, of this rank's shares where they are shared out.

    Nothing is sent: the average of a share is the share of the average. Buffers are not averaged.

    Args:
        parameters: by name; what they are averaged of. They have to be in their shared-out form.
        decay: of the average in one update, once it has seen enough of them; see `current_decay`.

    Attributes:
        averages: by the names of the parameters, and shared out as they are.
        updates: that the average has taken in.

    Source: Polyak & Juditsky 1992; the weights of early updates as the documentation of
    TensorFlow's `ExponentialMovingAverage` gives them for `num_updates`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.parameters = parameters
        self.decay = decay
        self.updates = 0
        self.averages: dict[str, Tensor] = {n: p.detach().clone() for n, p in parameters.items()}

    @property
    def current_decay(self) -> float:
        """What the next update leaves of the average: little at first, when weights are random."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self) -> None:
        """Take in what the parameters are now.

        All in one operation on this rank's shares: one each would cost a GPU more time to start
        than to do, and through `DTensor` many times that.
        """
        if self.parameters:
            averages = [local_tensor(self.averages[name]) for name in self.parameters]
            now = [local_tensor(parameter) for parameter in self.parameters.values()]
            take_in = get_ema_multi_avg_fn(self.current_decay)  # type: ignore[no-untyped-call]
            take_in(averages, now, self.updates)
        self.updates += 1

    @torch.no_grad()
    def reset_to_parameters(self, names: Collection[str], updates: int = 0) -> None:
        """Forget the averages of these names: they are what the parameters are now.

        Args:
            names: of parameters.
            updates: that those of other names have taken in.
        """
        for name in names:
            self.averages[name].copy_(self.parameters[name])
        self.updates = updates

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model have the averages for its parameters meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            now = parameter.detach().clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(now)
