"""The config of training: trainer, loss, optimizer with its schedule, and loggers."""

from collections.abc import Callable, Mapping, Sequence
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

# The words of `torch.set_float32_matmul_precision`.
MATMUL_PRECISIONS = ("highest", "high", "medium")
HALF_PRECISION = ("float16", "bfloat16", "fp16", "bf16", "half", "16")
POINT_ERRORS = ("mse", "mae", "huber")
LOSSES = (*POINT_ERRORS, "crps")
SPHERE_ERRORS = ("amplitude", "amse")
LR_SCHEDULES = ("cosine", "constant", "step")
TRACKERS = ("wandb", "tensorboard", "mlflow")
HALF_CIRCUMFERENCE = 20_004  # km, of a sphere with the radius of `credit_dp.sphere`


@dataclass
class TrainerConfig:
    """The length of training, its numerics, and what is written during it."""

    steps: int = 450  # optimizer steps
    dtype: str = "float32"  # float32 | float64: of weights and their updates
    # bfloat16: compute in it where that is safe, with float32 weights: less memory, faster on GPUs;
    # null: compute in dtype
    autocast: str | None = None
    # highest | high | medium: of products of float32 matrices on GPUs, as torch names it; high is
    # TF32, highest float32 (slower), in convolutions too; CPUs always compute in float32
    matmul: str = "high"
    # on GPUs use only algorithms that give the same bits in every run; slower
    deterministic: bool = False
    # parts of the batch that are computed one after the other, for less memory
    accumulate: int = 1
    # forecasts of each sample, which differ in the model's noise; above 1 needs loss=crps
    members: int = 1
    gradient_clip: float | None = 1.0  # largest norm of the whole gradient; null: no clipping
    # forecast steps per optimizer step, from the given step on, e.g. {0: 1, 400: 2, 600: 4}
    rollout: dict[int, int] = field(default_factory=lambda: {0: 1})
    rollout_unit: str = "step"  # step | epoch: unit of the keys of rollout
    # false | step | blocks: what the backward pass computes again from its inputs, for less memory:
    # each forecast step as a whole, or each block of the model; true means step
    checkpoint_activations: str = "false"
    # patterns of parameters that are not trained, e.g. ["encoder.*"]
    freeze: list[str] = field(default_factory=list)
    # stop | skip: what to do at a step with a non-finite loss or gradient (NaN or inf), or with an
    # exploding gradient norm
    on_nonfinite: str = "stop"
    # step | late: when the host reads whether a step was finite: before the update, for which it
    # waits for the device, or during the next step; the device leaves out a bad update by itself
    check_finite: str = "step"
    # largest gradient norm, as a multiple of the recent median; null: any
    exploding: float | None = 1e4
    # turn each sample by a random number of columns
    shift_longitude: bool = False
    mirror: float = 0.0  # share of samples whose hemispheres are exchanged
    # standard deviation of noise on input states, in standard deviations of each field; 0: none
    input_noise: float = 0.0
    # train on the first batch only, to see whether the model can overfit it
    one_batch: bool = False
    log_every: int = 10  # steps between rows of metrics.csv
    checkpoint_every: int = 200  # steps between checkpoints; one is also written at the end
    checkpoint_async: bool = True  # write checkpoints in the background
    keep_checkpoints: int = 1  # number of the newest checkpoints that are kept
    # steps between validations; null: about ten in a run of 20 steps or more, if data.dates.valid
    # are other dates than those of test; 0: none
    validate_every: int | None = None
    # weights of scores whose sum is the validation error, e.g. {rmse: 1, acc: 0.5}; empty:
    # the RMSE, of ensembles the CRPS
    validation_scores: dict[str, float] = field(default_factory=dict)
    # parts of data.dates.valid that are scored one by one, by name, e.g. {winter: [2018-01-01,
    # 2018-02-28], summer: [2018-06-01, 2018-08-31]}; empty: all of them
    validation_dates: dict[str, list[str]] = field(default_factory=dict)
    keep_best: bool = False  # also keep the checkpoint with the lowest validation error
    # stop after so many validations in a row without a lower error; null: train all steps
    patience: int | None = None
    # callbacks of your own by name, each with its keys, e.g. {norms: {every: 100}}
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # forecasts of each initial time in validations and final scores; null: as many as members
    evaluate_members: int | None = None
    # lead times of the final scores
    evaluate_hours: list[int] = field(default_factory=lambda: [6, 24])
    # hours between initial times on the test dates; with 54 every hour of the day occurs
    evaluate_stride_hours: int = 54
    profile: bool = False  # write a profiler trace of a few steps
    # on GPUs replay forward and backward as a CUDA graph: faster on small bands, because the host
    # no longer starts each kernel
    cuda_graph: bool = False
    # keep weights of 2-D convolutions, and with them fields between layers, in the memory format
    # channels_last of torch
    channels_last: bool = False

    def __post_init__(self) -> None:
        checks.at_least("trainer.steps", self.steps, 1)
        if self.dtype in HALF_PRECISION:
            raise UserError(
                f"trainer.dtype: needs float32 or float64, as weights and gradients are, got "
                f"{self.dtype!r}. For activations in bfloat16 set trainer.autocast=bfloat16."
            )
        checks.one_of("trainer.dtype", self.dtype, ("float32", "float64"))
        if self.autocast is not None:
            checks.one_of("trainer.autocast", self.autocast, ("bfloat16",))
            if self.dtype != "float32":
                raise UserError(
                    f"trainer.autocast: needs trainer.dtype=float32, got {self.dtype}. "
                    "Change one of them."
                )
        # YAML reads false and true as booleans; true is of the time before there were blocks.
        given = str(self.checkpoint_activations).lower()
        self.checkpoint_activations = "step" if given == "true" else given
        kinds = ("false", "step", "blocks")
        checks.one_of("trainer.checkpoint_activations", self.checkpoint_activations, kinds)
        checks.one_of("trainer.matmul", self.matmul, MATMUL_PRECISIONS)
        checks.at_least("trainer.accumulate", self.accumulate, 1)
        checks.at_least("trainer.members", self.members, 1)
        checks.at_least("trainer.evaluate_members", self.evaluate_members, 1)
        checks.above_zero("trainer.gradient_clip", self.gradient_clip)
        self._check_rollout()
        checks.one_of("trainer.on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        checks.one_of("trainer.check_finite", self.check_finite, ("step", "late"))
        if self.exploding is not None:
            checks.number_in("trainer.exploding", self.exploding, 1)
        checks.number_in("trainer.mirror", self.mirror, 0, 1)
        checks.number_in("trainer.input_noise", self.input_noise, 0)
        checks.at_least("trainer.log_every", self.log_every, 1)
        checks.at_least("trainer.checkpoint_every", self.checkpoint_every, 1)
        checks.at_least("trainer.keep_checkpoints", self.keep_checkpoints, 1)
        checks.at_least("trainer.validate_every", self.validate_every, 0)
        checks.at_least("trainer.patience", self.patience, 1)
        for name, weight in self.validation_scores.items():
            checks.above_zero(f"trainer.validation_scores.{name}", weight)
        for name, dates in self.validation_dates.items():
            checks.date_range(f"trainer.validation_dates.{name}", dates)
        if self.needs_validation and self.validate_every == 0:
            raise UserError(
                f"{self.needs_validation}: needs trainer.validate_every above 0, got 0."
            )
        build_callbacks(self.callbacks)
        checks.not_empty("trainer.evaluate_hours", self.evaluate_hours)
        checks.no_repeats("trainer.evaluate_hours", self.evaluate_hours)
        checks.at_least("trainer.evaluate_hours", min(self.evaluate_hours), 1)
        checks.at_least("trainer.evaluate_stride_hours", self.evaluate_stride_hours, 1)

    def _check_rollout(self) -> None:
        checks.one_of("trainer.rollout_unit", self.rollout_unit, ("step", "epoch"))
        if 0 not in self.rollout:
            raise UserError(
                f"trainer.rollout: needs an entry for {self.rollout_unit} 0, like "
                f"{{0: 1, 1000: 2}}, got {dict(self.rollout)}."
            )
        for start, length in self.rollout.items():
            checks.at_least("trainer.rollout", start, 0)
            checks.at_least(f"trainer.rollout.{start}", length, 1)

    @property
    def needs_validation(self) -> str:
        """The key that needs validations; empty: none does."""
        keys = {
            "trainer.keep_best": self.keep_best,
            "trainer.patience": self.patience is not None,
            "trainer.validation_scores": self.validation_scores,
            "trainer.validation_dates": self.validation_dates,
        }
        return next((key for key, is_set in keys.items() if is_set), "")

    @property
    def validation_parts(self) -> dict[str, tuple[str, list[str]] | None]:
        """The key and the dates of each part of the validation dates, by name.

        Without parts, all validation dates, as None, under an empty name.
        """
        parts = self.validation_dates.items()
        key = "trainer.validation_dates"
        return {name: (f"{key}.{name}", dates) for name, dates in parts} or {"": None}

    @property
    def validation_keys(self) -> dict[str, Any]:
        """The keys that define the validation error, without empty ones."""
        keys = {"scores": dict(self.validation_scores), "dates": dict(self.validation_dates)}
        return {name: value for name, value in keys.items() if value}

    @property
    def scored_members(self) -> int:
        """Number of forecasts of each initial time that are scored."""
        return self.members if self.evaluate_members is None else self.evaluate_members

    @property
    def longest_rollout(self) -> int:
        """Number of forecast steps of the longest rollout."""
        return max(self.rollout.values())

    def rollout_at(self, step: int, steps_per_epoch: int) -> int:
        """Return the forecast steps of optimizer step number `step`, counted from 0."""
        now = step if self.rollout_unit == "step" else step // steps_per_epoch
        return self.rollout[max(start for start in self.rollout if start <= now)]

    def forecast_steps(self, steps: int, steps_per_epoch: int) -> int:
        """Return the number of forecast steps in the first `steps` optimizer steps."""
        unit = 1 if self.rollout_unit == "step" else steps_per_epoch
        starts = [unit * start for start in sorted(self.rollout)]
        ends = [min(end, steps) for end in (*starts[1:], steps)]
        lengths = [self.rollout[start] for start in sorted(self.rollout)]
        return sum(
            max(0, end - start) * length
            for start, end, length in zip(starts, ends, lengths, strict=True)
        )


@dataclass
class LossConfig:
    """The keys that all losses have: the weights of rows, levels and variables."""

    name: str = MISSING  # name of the error at each point
    latitude_weight: bool = True  # weight rows by their area; false: all rows alike
    # weight levels by their pressure (model levels without coefficients by their number), with mean
    # 1 over all channels on levels; others weigh 1
    level_weight: bool = False
    # weights of all channels of a variable, or of one channel, e.g. {geopotential: 2,
    # temperature_500: 0.5}; the others weigh 1
    variable_weight: dict[str, float] = field(default_factory=dict)
    # scale errors by the standard deviation of the tendency; false: of the field
    tendency: bool = True
    # weight of the error in zonal power spectra, against too smooth forecasts; 0: none
    spectrum: float = 0.0
    # weight of the error in spectra on the sphere, of all degrees of spherical harmonics; 0: none
    sphere_spectrum: float = 0.0
    # amplitude | amse: of sphere_spectrum: of amplitudes only, or of phases as well
    sphere_error: str = "amplitude"
    # weight of the error in differences between neighbouring points, along both directions; 0: none
    gradient: float = 0.0

    def __post_init__(self) -> None:
        checks.number_in("loss.spectrum", self.spectrum, 0)
        checks.number_in("loss.sphere_spectrum", self.sphere_spectrum, 0)
        checks.one_of("loss.sphere_error", self.sphere_error, SPHERE_ERRORS)
        checks.number_in("loss.gradient", self.gradient, 0)
        for variable, weight in self.variable_weight.items():
            checks.number_in(f"loss.variable_weight.{variable}", weight, 0)


@dataclass
class StandardLossConfig(LossConfig):
    """The losses of this package: squared error, absolute error, Huber's, and that of ensembles."""

    name: str = "mse"  # mse | mae | huber | crps, which needs trainer.members
    huber_delta: float = 1.0  # of huber: error at which it changes from squared to absolute
    # errors of all channels of a variable, e.g. {total_precipitation: mae}; the others have name
    variable_error: dict[str, str] = field(default_factory=dict)
    # of crps: share of the fair score; the rest is the score of the members as they are
    alpha: float = 1.0
    # of crps: radii in km of the neighbourhoods on the sphere whose means are scored, e.g.
    # [0, 500, 1000]; 0: points. The loss is the mean over them
    scales: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("loss.name", self.name, LOSSES)
        for variable, name in self.variable_error.items():
            checks.one_of(f"loss.variable_error.{variable}", name, POINT_ERRORS)
        checks.above_zero("loss.huber_delta", self.huber_delta)
        checks.number_in("loss.alpha", self.alpha, 0, 1)
        self._check_scales()
        if self.name == "crps":
            self._check_ensemble_loss()

    def _check_scales(self) -> None:
        """Refuse neighbourhoods that are not rising on the sphere, or that the loss has not."""
        checks.not_empty("loss.scales", self.scales)
        for radius in self.scales:
            checks.number_in("loss.scales", radius, 0, HALF_CIRCUMFERENCE)
        if sorted(set(self.scales)) != list(self.scales):
            raise UserError(
                f"loss.scales: needs radii that rise, got {list(self.scales)}. Sort them, and "
                "leave out repeats."
            )
        if self.name != "crps" and list(self.scales) != [0]:
            raise UserError(
                f"loss.scales: needs loss=crps, got {list(self.scales)} with loss={self.name}. Set "
                "loss.scales=[0], or change loss."
            )

    def _check_ensemble_loss(self) -> None:
        """Refuse errors of single members that are least if all members are alike."""
        if self.variable_error:
            raise UserError(
                "loss.variable_error: needs loss=mse, mae or huber, because crps scores all "
                "variables alike. Set loss.variable_error={}, or change loss."
            )
        for key, is_used in (
            ("loss.gradient", self.gradient > 0),
            ("loss.sphere_error=amse", self.sphere_spectrum > 0 and self.sphere_error == "amse"),
        ):
            if is_used:
                raise UserError(
                    f"{key}: can't be added to loss=crps: each member's squared error would make "
                    "members alike. Use loss.spectrum or loss.sphere_spectrum with "
                    "loss.sphere_error=amplitude."
                )


@dataclass
class OwnLossConfig(LossConfig, Plugin):
    """The base of the configs of losses from other packages or files: see `credit_dp.plugins`.

    Derive from it and register the class, and `loss=NAME` chooses it.
    """

    plugin_kind = PluginKind("loss", "credit_dp.losses")

    def build(self) -> Callable[[Any, Any], Any]:
        """Return the error at each point as a function of the tensors (forecast, truth).

        Both are normalised, and in units of the tendency's standard deviation unless
        `loss.tendency` is false. The error at a point may depend on the values at this point only;
        the package applies weights, means, masks and the sum over ranks.

        Shapes:
            the function maps `(B, C, h, W)`, `(B, C, h, W)` -> `(B, C, h, W)`, with any number of
            the globe's rows as `h`.
        """
        raise NotImplementedError


@dataclass
class OptimizerConfig:
    """The keys that all optimizers have: the learning rate, its schedule, and the weight average.

    The learning rate rises linearly during the warm-up, then follows `schedule`.
    """

    name: str = MISSING  # name of the optimizer
    lr: float = 3e-3  # learning rate after the warm-up
    weight_decay: float = 0.01  # not of biases, norms and position tables
    warmup_steps: int = 50  # steps in which the learning rate rises linearly
    # after the warm-up: cosine | constant | step, or the name of a plug-in schedule
    schedule: str = "cosine"
    # keys of a plug-in schedule, e.g. {power: 2}
    schedule_options: dict[str, Any] = field(default_factory=dict)
    final_lr: float = 1e-6  # of cosine: learning rate at the end
    decay_every: int = 1000  # of step: steps between drops of the learning rate
    decay_factor: float = 0.5  # of step: factor of each drop
    # decay of an exponential moving average of the weights, e.g. 0.999, which then makes the
    # forecasts; null: no average
    ema: float | None = None
    # factor on the learning rate of each segment of the model relative to the one after it, for
    # fine-tuning; 1: one learning rate
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        checks.above_zero("optimizer.lr", self.lr)
        checks.number_in("optimizer.weight_decay", self.weight_decay, 0)
        checks.at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        plugin_schedule(self)
        checks.number_in("optimizer.final_lr", self.final_lr, 0, self.lr)
        checks.at_least("optimizer.decay_every", self.decay_every, 1)
        checks.number_in("optimizer.decay_factor", self.decay_factor, 0, 1)
        checks.number_in("optimizer.ema", self.ema, 0, 0.999999)
        checks.above_zero("optimizer.layer_decay", self.layer_decay)
        checks.number_in("optimizer.layer_decay", self.layer_decay, 0, 1)


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: str = "adamw"  # adamw
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the averages of gradients and their squares
    eps: float = 1e-8  # added to the root of the average square, against division by zero

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("optimizer.name", self.name, ("adamw",))
        check_betas(self.betas)
        checks.above_zero("optimizer.eps", self.eps)


@dataclass
class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023)."""

    name: str = "lion"  # lion
    lr: float = 3e-4  # learning rate after the warm-up
    weight_decay: float = 0.1  # not of biases, norms and position tables
    # decay of the average of gradients in the update, and of the average that is kept
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("optimizer.name", self.name, ("lion",))
        check_betas(self.betas)


@dataclass
class MuonConfig(AdamWConfig):
    """Muon for weights of layers (Jordan et al. 2024), AdamW for all other parameters."""

    name: str = "muon"  # muon
    momentum: float = 0.95  # decay of the average of gradients of weights
    nesterov: bool = True  # look ahead by one gradient
    # patterns of weights that AdamW updates, too, e.g. ["stem.*", "head.*"]
    adamw: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        checks.one_of("optimizer.name", self.name, ("muon",))
        check_betas(self.betas)
        checks.above_zero("optimizer.eps", self.eps)
        checks.number_in("optimizer.momentum", self.momentum, 0, 0.999999)


def check_betas(betas: Sequence[float]) -> None:
    """Refuse `optimizer.betas` that are not two decays."""
    if len(betas) != 2:
        raise UserError(f"optimizer.betas: needs 2 numbers, got {len(betas)}")
    for beta in betas:
        checks.number_in("optimizer.betas", beta, 0, 0.999999)


@dataclass
class OwnOptimizerConfig(OptimizerConfig, Plugin):
    """The base of the configs of optimizers from other packages or files: see `credit_dp.plugins`.

    Derive from it and register the class, and `optimizer=NAME` chooses it. Import torch inside
    `build`, not at the top of the file, which `--help` imports as well.
    """

    plugin_kind = PluginKind("optimizer", "credit_dp.optimizers")

    def build(self, groups: Sequence[dict[str, Any]]) -> Any:
        """Return the `torch.optim.Optimizer` of these parameter groups.

        Each group has `params`, `lr` and `weight_decay`, which is 0 for biases, norms and position
        tables. The optimizer's state of a parameter may only hold tensors of its shape and dtype,
        and single numbers in tensors, which checkpoints can write for any mesh. With fsdp2
        parameters and gradients are of type `DTensor`.
        """
        raise NotImplementedError


@dataclass
class OwnScheduleConfig(Plugin):
    """The base of learning-rate schedules from other packages or files: see `credit_dp.plugins`.

    Derive from it and register the class, and `optimizer.schedule=NAME` chooses it. Set its keys by
    `optimizer.schedule_options.KEY=VALUE`.
    """

    plugin_kind = PluginKind("optimizer.schedule", "credit_dp.schedules")

    name: str = MISSING

    def factor(self, step: int, steps: int) -> float:
        """Return the factor on `optimizer.lr` at a step after the warm-up.

        Args:
            step: counted from 0 at the end of the warm-up, up to and including `steps`.
            steps: number of steps from the warm-up to the end of training, at least 1.
        """
        raise NotImplementedError


def plugin_schedule(config: OptimizerConfig) -> OwnScheduleConfig | None:
    """Return the plug-in schedule that the config names; None for one of this package's."""
    name = config.schedule
    key = "optimizer.schedule_options"
    if name in LR_SCHEDULES:
        if config.schedule_options:
            raise UserError(
                f"{key}: is for a schedule of your own, but optimizer.schedule is {name}. Leave "
                f"{key} out."
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
class OwnCallbackConfig(Plugin):
    """The base of callbacks from other packages or files: see `credit_dp.plugins`.

    Derive from it and register the class. Then `trainer.callbacks.NAME={}` uses it, and
    `trainer.callbacks.NAME.KEY=VALUE` sets its keys. Write the methods that you need.

    - All ranks call them, at the same steps, callbacks in the order of the config. So they may use
      collectives, and only rank 0 should write.
    - `run` is a `CallbackRun`. Read from it and change nothing. Gradients are not recorded, and
      training goes on with its own random numbers whatever a callback draws.
    - An exception ends the run, in one line with file and line.
    - Checkpoints hold nothing of a callback; what it keeps in attributes is lost when a run is
      resumed.
    """

    plugin_kind = PluginKind("trainer.callbacks", "credit_dp.callbacks", several=True)

    name: str = MISSING

    def on_start(self, run: Any) -> None:
        """Do something before the first step, or the first after `run.step` of a resumed run."""

    def on_step(self, run: Any, metrics: dict[str, float]) -> None:
        """Do something after each step, its validation and its checkpoint.

        Args:
            run: see above.
            metrics: what is logged of this step, the same on all ranks; empty at other steps.
        """

    def on_validation(self, run: Any, scores: dict[str, float]) -> None:
        """Do something after `on_step` of a step with a validation.

        Args:
            run: see above.
            scores: `validation_rmse` and others, the same on all ranks.
        """

    def on_end(self, run: Any, scores: dict[str, float]) -> None:
        """Do something at the end of a complete run, whose scores and plots are written.

        Args:
            run: see above.
            scores: the final ones by name, as trackers get them.
        """


def build_callbacks(callbacks: Mapping[str, Any]) -> list[OwnCallbackConfig]:
    """Return new callbacks, given the keys of each by name."""
    if not callbacks:
        return []
    kind, known = OwnCallbackConfig.plugin_kind, find_plugins(OwnCallbackConfig, ())
    built = []
    for name, values in callbacks.items():
        key = f"{kind.key}.{name}"
        if name not in known:
            names = f"one of {', '.join(known)}" if known else "a callback of a plug-in"
            raise UserError(
                f"{kind.key}: needs {names}, got {name!r}."
                f"{checks.did_you_mean(name, list(known))}{registration_hint(kind)}"
            )
        if not isinstance(values, Mapping):
            raise UserError(f"{key}: needs the callback's keys, or {{}}, got {values!r}.")
        built.append(build_plugin_config(name, known[name], key, values))
    return built


@dataclass
class LoggerConfig:
    """The trackers that get a run's numbers, besides metrics.csv, which is always written."""

    # some of wandb, tensorboard and mlflow, or none, besides metrics.csv
    trackers: list[str] = field(default_factory=lambda: ["wandb"])
    wandb: str = "offline"  # online | offline (needs no account) | disabled
    # name of the project at Weights & Biases, and of the experiment of mlflow
    project: str = "credit_dp"
    # of mlflow: folder of its files, or address of a server; null: in the run's folder
    mlflow: str | None = None

    def __post_init__(self) -> None:
        checks.no_repeats("logger.trackers", self.trackers)
        for name in self.trackers:
            checks.one_of("logger.trackers", name, TRACKERS)
        checks.one_of("logger.wandb", self.wandb, ("online", "offline", "disabled"))
