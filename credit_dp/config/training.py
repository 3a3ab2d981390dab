"""What is minimised, how, for how long, and who is told: the config of a run's training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.errors import UserError
from credit_dp.plugins import (
    Plugin,
    PluginKind,
    build_plugin_config,
    find_plugins,
    registration_hint,
)

LOSSES = ("mse", "mae", "huber")
LR_SCHEDULES = ("cosine", "constant", "step")
TRACKERS = ("wandb", "tensorboard")


@dataclass
class TrainerConfig:
    """How long to train and what to do on the way."""

    steps: int = 450  # optimiser steps
    dtype: str = "float32"  # float32 | float64: of weights and their updates
    # bfloat16: what the model computes in, where that is safe; weights stay float32
    autocast: str | None = None
    accumulate: int = 1  # parts of the batch that are computed one after the other
    gradient_clip: float | None = 1.0  # largest global gradient norm; null: no clipping
    # how many forecast steps from which optimiser step on, e.g. {0: 1, 400: 2, 600: 4}
    rollout: dict[int, int] = field(default_factory=lambda: {0: 1})
    rollout_unit: str = "step"  # step | epoch: what the keys of rollout count
    checkpoint_activations: bool = False  # compute each forecast step again in backward
    # parameters that are not trained, by pattern, e.g. ["encoder.*"]
    freeze: list[str] = field(default_factory=list)
    # stop | skip: what happens at a step whose loss or gradient is not finite (NaN or inf)
    on_nonfinite: str = "stop"
    # largest gradient norm, as a multiple of the recent median; null: any
    exploding: float | None = 1e4
    # train on the first batch only, to see whether the model can learn it by heart
    one_batch: bool = False
    log_every: int = 10  # steps between rows of metrics.csv
    checkpoint_every: int = 200  # steps between checkpoints; one is also written at the end
    checkpoint_async: bool = True  # write checkpoints while training goes on
    keep_checkpoints: int = 1  # how many of the newest checkpoints are kept
    validate_every: int = 0  # steps between validations; 0: none
    keep_best: bool = False  # the checkpoint with the lowest validation error is kept, too
    evaluate_hours: list[int] = field(default_factory=lambda: [6, 24])  # leads of the final scores
    # hours between initial times on the held-out dates; with 54 every hour of the day occurs
    evaluate_stride_hours: int = 54
    profile: bool = False  # write a trace of a few steps

    def __post_init__(self) -> None:
        checks.at_least("trainer.steps", self.steps, 1)
        checks.one_of("trainer.dtype", self.dtype, ("float32", "float64"))
        if self.autocast is not None:
            checks.one_of("trainer.autocast", self.autocast, ("bfloat16",))
            if self.dtype != "float32":
                raise UserError(
                    f"trainer.autocast: needs trainer.dtype=float32, got {self.dtype}. "
                    "Change either."
                )
        checks.at_least("trainer.accumulate", self.accumulate, 1)
        checks.above_zero("trainer.gradient_clip", self.gradient_clip)
        self._check_rollout()
        checks.one_of("trainer.on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        if self.exploding is not None:
            checks.number_in("trainer.exploding", self.exploding, 1)
        checks.at_least("trainer.log_every", self.log_every, 1)
        checks.at_least("trainer.checkpoint_every", self.checkpoint_every, 1)
        checks.at_least("trainer.keep_checkpoints", self.keep_checkpoints, 1)
        checks.at_least("trainer.validate_every", self.validate_every, 0)
        if self.keep_best and not self.validate_every:
            raise UserError("trainer.keep_best: needs trainer.validate_every above 0, got 0.")
        checks.not_empty("trainer.evaluate_hours", self.evaluate_hours)
        checks.no_repeats("trainer.evaluate_hours", self.evaluate_hours)
        checks.at_least("trainer.evaluate_hours", min(self.evaluate_hours), 1)
        checks.at_least("trainer.evaluate_stride_hours", self.evaluate_stride_hours, 1)

    def _check_rollout(self) -> None:
        checks.one_of("trainer.rollout_unit", self.rollout_unit, ("step", "epoch"))
        if 0 not in self.rollout:
            raise UserError(
                f"trainer.rollout: needs a length from {self.rollout_unit} 0 on, like "
                f"{{0: 1, 1000: 2}}, got {dict(self.rollout)}."
            )
        for start, length in self.rollout.items():
            checks.at_least("trainer.rollout", start, 0)
            checks.at_least(f"trainer.rollout.{start}", length, 1)

    @property
    def longest_rollout(self) -> int:
        """Forecast steps of the longest rollout."""
        return max(self.rollout.values())

    def rollout_at(self, step: int, steps_per_epoch: int) -> int:
        """Forecast steps of the pass that makes optimiser step number `step`, counted from 0."""
        place = step if self.rollout_unit == "step" else step // steps_per_epoch
        return self.rollout[max(start for start in self.rollout if start <= place)]


@dataclass
class LossConfig:
    """What the config of every loss has: how rows, levels and variables weigh in it."""

    name: str = MISSING  # the error at a point
    latitude_weight: bool = True  # rows weigh as their area; false: all alike
    # levels weigh as their pressure, with mean 1 over all channels on levels; others weigh 1
    level_weight: bool = False
    # of all channels of a variable, e.g. {geopotential: 2}; the others weigh 1
    variable_weight: dict[str, float] = field(default_factory=dict)
    # errors in units of the tendency's standard deviation; false: of the field's
    tendency: bool = True
    # weight of the error in zonal power spectra, against smooth forecasts; 0: none
    spectrum: float = 0.0

    def __post_init__(self) -> None:
        checks.number_in("loss.spectrum", self.spectrum, 0)
        for variable, weight in self.variable_weight.items():
            checks.number_in(f"loss.variable_weight.{variable}", weight, 0)


@dataclass
class StandardLossConfig(LossConfig):
    """The errors of this package: squared, absolute, and Huber's."""

    name: str = "mse"  # mse | mae | huber
    huber_delta: float = 1.0  # of huber: where it turns from squared to absolute

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("loss.name", self.name, LOSSES)
        checks.above_zero("loss.huber_delta", self.huber_delta)


@dataclass
class OwnLossConfig(LossConfig, Plugin):
    """The config of a loss that another package or file brings: see `credit_dp.plugins`.

    Derive from it and register the class, and `loss=NAME` chooses it.
    """

    plugin_kind = PluginKind("loss", "credit_dp.losses")

    def build(self) -> Callable[[Any, Any], Any]:
        """Return the error at each point as a function of the tensors (forecast, truth).

        Both are normalised, and in units of the tendency's standard deviation unless
        `loss.tendency` is false. Each error may depend on its own point alone: weights, means,
        points without values and sums over ranks are not the function's business.

        Shapes:
            it maps twice `(B, C, h, W)`, with any part of the globe's rows, -> the same.
        """
        raise NotImplementedError


@dataclass
class OptimizerConfig:
    """What the config of every optimizer has: the learning rate, its schedule, and averages.

    The rate rises in a line over the first steps, then follows `schedule`.
    """

    name: str = MISSING  # which optimizer
    lr: float = 3e-3  # learning rate after the warm-up
    weight_decay: float = 0.01  # not of biases, norms and tables of positions
    warmup_steps: int = 50  # steps in which the rate rises in a line
    schedule: str = "cosine"  # cosine | constant | step, or a name of your own: after the warm-up
    # keys of a schedule of your own, e.g. {power: 2}
    schedule_options: dict[str, Any] = field(default_factory=dict)
    final_lr: float = 1e-6  # of cosine: the rate at the end
    decay_every: int = 1000  # of step: steps between drops of the rate
    decay_factor: float = 0.5  # of step: what each drop multiplies the rate by
    # e.g. 0.999: forecasts are made with a moving average of the weights that decays so
    ema: float | None = None

    def __post_init__(self) -> None:
        checks.above_zero("optimizer.lr", self.lr)
        checks.number_in("optimizer.weight_decay", self.weight_decay, 0)
        checks.at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        plugin_schedule(self)
        checks.number_in("optimizer.final_lr", self.final_lr, 0, self.lr)
        checks.at_least("optimizer.decay_every", self.decay_every, 1)
        checks.number_in("optimizer.decay_factor", self.decay_factor, 0, 1)
        checks.number_in("optimizer.ema", self.ema, 0, 0.999999)


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: str = "adamw"  # adamw
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the averages of gradients and squares
    eps: float = 1e-8  # added to the root of the average square

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("optimizer.name", self.name, ("adamw",))
        if len(self.betas) != 2:
            raise UserError(f"optimizer.betas: needs 2 numbers, got {len(self.betas)}")
        for beta in self.betas:
            checks.number_in("optimizer.betas", beta, 0, 0.999999)
        checks.above_zero("optimizer.eps", self.eps)


@dataclass
class OwnOptimizerConfig(OptimizerConfig, Plugin):
    """The config of an optimizer that another package or file brings: see `credit_dp.plugins`.

    Derive from it and register the class, and `optimizer=NAME` chooses it. Keep torch out of the
    module's imports: `--help` imports it.
    """

    plugin_kind = PluginKind("optimizer", "credit_dp.optimizers")

    def build(self, groups: Sequence[dict[str, Any]]) -> Any:
        """Return the `torch.optim.Optimizer` of these parameter groups.

        Each group has `params`, `lr` and `weight_decay`, which is 0 for biases, norms and tables.
        What the optimizer keeps of each parameter has to be tensors of the parameter's shape, or
        single numbers in tensors: checkpoints hold these.
        """
        raise NotImplementedError


@dataclass
class OwnScheduleConfig(Plugin):
    """A schedule of the learning rate that another package or file brings.

    Derive from it and register the class, and `optimizer.schedule=NAME` chooses it; values of its
    keys are given as `optimizer.schedule_options.KEY=VALUE`.
    """

    plugin_kind = PluginKind("optimizer.schedule", "credit_dp.schedules")

    name: str = MISSING

    def factor(self, step: int, steps: int) -> float:
        """Return what `optimizer.lr` is multiplied by at a step after the warm-up.

        Args:
            step: counted from 0 at the end of the warm-up.
            steps: all of them, from there to the end of training, at least 1; `step` may be this.
        """
        raise NotImplementedError


def plugin_schedule(config: OptimizerConfig) -> OwnScheduleConfig | None:
    """Return the schedule of the user's own that the config names; None if it is one of ours.

    Raises:
        UserError: there is none of this name, or not with these options.
    """
    name, key = config.schedule, "optimizer.schedule_options"
    if name in LR_SCHEDULES:
        if config.schedule_options:
            raise UserError(
                f"{key}: is for a schedule of your own, but optimizer.schedule is {name}. Leave "
                "it out."
            )
        return None
    known = find_plugins(OwnScheduleConfig, LR_SCHEDULES)
    if name not in known:
        names = [*LR_SCHEDULES, *known]
        raise UserError(
            f"optimizer.schedule: needs one of {', '.join(names)}, got {name!r}."
            f"{checks.did_you_mean(name, names)}{registration_hint(OwnScheduleConfig.plugin_kind)}"
        )
    return build_plugin_config(name, known[name], key, config.schedule_options)


@dataclass
class LoggerConfig:
    """Who is told of a run's numbers beside the CSV log that is always written."""

    # wandb, tensorboard, both or none, besides metrics.csv
    trackers: list[str] = field(default_factory=lambda: ["wandb"])
    wandb: str = "offline"  # online | offline (needs no account) | disabled
    project: str = "credit_dp"  # at Weights & Biases

    def __post_init__(self) -> None:
        checks.no_repeats("logger.trackers", self.trackers)
        for name in self.trackers:
            checks.one_of("logger.trackers", name, TRACKERS)
        checks.one_of("logger.wandb", self.wandb, ("online", "offline", "disabled"))
