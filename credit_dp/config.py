"""The whole configuration as dataclasses: what every key means and which values it may have.

Each dataclass checks its own values when it is made and raises a `UserError` that names the key.
What is still `MISSING` is left for OmegaConf to report.

No torch in here: `--help` and `--cfg job` must answer in under a second.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.data_config import DataConfig, DatesConfig, QuickstartConfig, VariableConfig
from credit_dp.errors import UserError
from credit_dp.model_config import (
    CrossFormerConfig,
    ModelConfig,
    OwnModelConfig,
    PanguConfig,
    UNetConfig,
)

__all__ = [
    "Config",
    "CrossFormerConfig",
    "DataConfig",
    "DatesConfig",
    "LoggerConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OwnModelConfig",
    "PanguConfig",
    "ParallelConfig",
    "QuickstartConfig",
    "RunConfig",
    "TrainerConfig",
    "UNetConfig",
    "VariableConfig",
    "as_dict",
    "microbatches",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved")
INTERLEAVED_STAGES = 2  # of each rank
FSDP_DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class RunConfig:
    """Where a run writes. A fixed name is what `resume=auto` finds again."""

    name: str | None = None
    dir: str = ""  # empty: outputs/NAME, or a folder of its own for a run without a name

    def __post_init__(self) -> None:
        checks.folder_name("run.name", self.name)


@dataclass
class ParallelConfig:
    """The mesh of pipeline x data x domain ranks, and how each of its axes works."""

    domain: int = 1
    data: int | None = None  # null: what is left of the visible GPUs or of the launcher's ranks
    pipeline: int = 1
    threads: int | None = None  # null: this machine's cores shared out
    data_mode: str = "ddp"  # ddp | fsdp2
    param_dtype: str | None = None  # fsdp2: of parameters while they compute; null: trainer.dtype
    reduce_dtype: str | None = None  # fsdp2: of gradients while they are added up
    cpu_offload: bool = False  # fsdp2: parameters, gradients and moments wait in the host's memory
    schedule: str = "1f1b"  # gpipe | 1f1b | interleaved
    microbatches: int | None = None  # of the pipeline; null: one for each of its ranks
    stages: list[str] | None = None  # where later stages begin; null: balanced by cost
    layout: dict[str, Any] = field(default_factory=dict)  # module -> its device, or (in, out)
    check_replicas_every: int = 0  # steps; 0: at the start only

    def __post_init__(self) -> None:
        checks.at_least("parallel.domain", self.domain, 1)
        checks.at_least("parallel.data", self.data, 1)
        checks.at_least("parallel.pipeline", self.pipeline, 1)
        checks.at_least("parallel.threads", self.threads, 1)
        checks.at_least("parallel.microbatches", self.microbatches, 1)
        checks.at_least("parallel.check_replicas_every", self.check_replicas_every, 0)
        checks.one_of("parallel.data_mode", self.data_mode, ("ddp", "fsdp2"))
        checks.one_of("parallel.schedule", self.schedule, SCHEDULES)
        self._check_fsdp()
        self._check_pipeline()
        self._check_layout()

    def _check_fsdp(self) -> None:
        for key in ("param_dtype", "reduce_dtype"):
            if getattr(self, key) is not None:
                checks.one_of(f"parallel.{key}", getattr(self, key), FSDP_DTYPES)
        given = [k for k in ("param_dtype", "reduce_dtype", "cpu_offload") if getattr(self, k)]
        if given and self.data_mode != "fsdp2":
            raise UserError(
                f"parallel.{given[0]}: needs parallel.data_mode=fsdp2, got {self.data_mode}"
            )

    def _check_pipeline(self) -> None:
        if self.stages is not None:
            checks.no_repeats("parallel.stages", self.stages)
        if self.pipeline > 1 and self.layout:
            raise UserError(
                f"parallel.layout: needs parallel.pipeline=1, got {self.pipeline}. A pipeline is "
                "cut by parallel.stages; leave parallel.layout empty."
            )
        hints = {"microbatches": " or use trainer.accumulate", "stages": ""}
        for key, hint in hints.items():
            if getattr(self, key) is not None and self.pipeline == 1:
                raise UserError(
                    f"parallel.{key}: needs parallel.pipeline of at least 2, got 1. Raise it{hint}."
                )
        later = self.pipeline * self.virtual_stages - 1
        if self.stages is not None and len(self.stages) != later:
            raise UserError(
                f"parallel.stages: needs a name for each of the {later} stages after the first, "
                f"got {len(self.stages)}. Change it, or leave it null to balance them."
            )
        few = self.schedule == "1f1b" and self.microbatches_or_default < self.pipeline
        odd = self.schedule == "interleaved" and self.microbatches_or_default % self.pipeline
        if few or odd:
            needed = "a multiple of" if odd else "at least"
            raise UserError(
                f"parallel.microbatches: parallel.schedule={self.schedule} needs {needed} "
                f"parallel.pipeline ({self.pipeline}), got {self.microbatches}. Change one of them."
            )

    def _check_layout(self) -> None:
        for name, value in self.layout.items():
            checks.devices(f"parallel.layout.{name}", value)
        if self.layout and self.data_mode != "ddp":
            raise UserError(
                f"parallel.layout: needs parallel.data_mode=ddp, got {self.data_mode}. "
                "Change either."
            )

    @property
    def gpus_of_rank(self) -> int:
        """GPUs that each rank drives: one, or as many as the layout counts."""
        devices = [d for v in self.layout.values() for d in ([v] if isinstance(v, str) else v)]
        numbers = [int(d.removeprefix("cuda:")) for d in devices if d.startswith("cuda:")]
        return 1 + max(numbers, default=0)

    @property
    def microbatches_or_default(self) -> int:
        """Micro-batches of the pipeline for each part of the batch that is accumulated."""
        return self.microbatches or self.pipeline

    @property
    def virtual_stages(self) -> int:
        """Stages of the pipeline that each rank has."""
        return INTERLEAVED_STAGES if self.schedule == "interleaved" and self.pipeline > 1 else 1


@dataclass
class TrainerConfig:
    """How long to train and what to do on the way."""

    steps: int = MISSING
    dtype: str = "float32"  # float32 | float64
    accumulate: int = 1  # parts of the batch that are computed one after the other
    gradient_clip: float | None = 1.0  # largest global norm
    log_every: int = 10
    checkpoint_every: int = 200
    evaluate_hours: list[int] = field(default_factory=lambda: [6, 24])
    evaluate_stride_hours: int = 30  # between initial times on the held-out dates

    def __post_init__(self) -> None:
        if self.steps != MISSING:
            checks.at_least("trainer.steps", self.steps, 1)
        checks.one_of("trainer.dtype", self.dtype, ("float32", "float64"))
        checks.at_least("trainer.accumulate", self.accumulate, 1)
        checks.above_zero("trainer.gradient_clip", self.gradient_clip)
        checks.at_least("trainer.log_every", self.log_every, 1)
        checks.at_least("trainer.checkpoint_every", self.checkpoint_every, 1)
        checks.not_empty("trainer.evaluate_hours", self.evaluate_hours)
        checks.no_repeats("trainer.evaluate_hours", self.evaluate_hours)
        checks.at_least("trainer.evaluate_hours", min(self.evaluate_hours), 1)
        checks.at_least("trainer.evaluate_stride_hours", self.evaluate_stride_hours, 1)


@dataclass
class LossConfig:
    """Which error is minimised, and how rows, levels and variables weigh in it."""

    name: str = "mse"  # mse | mae
    latitude_weight: bool = True
    level_weight: bool = True  # by pressure, mean 1
    variable_weight: dict[str, float] = field(default_factory=dict)  # others weigh 1

    def __post_init__(self) -> None:
        checks.one_of("loss.name", self.name, ("mse", "mae"))
        for variable, weight in self.variable_weight.items():
            checks.number_in(f"loss.variable_weight.{variable}", weight, 0)


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine to `final_lr`."""

    name: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 50
    final_lr: float = 1e-6

    def __post_init__(self) -> None:
        checks.one_of("optimizer.name", self.name, ("adamw",))
        checks.above_zero("optimizer.lr", self.lr)
        if len(self.betas) != 2:
            raise UserError(f"optimizer.betas: needs 2 numbers, got {len(self.betas)}")
        for beta in self.betas:
            checks.number_in("optimizer.betas", beta, 0, 0.999999)
        checks.above_zero("optimizer.eps", self.eps)
        checks.number_in("optimizer.weight_decay", self.weight_decay, 0)
        checks.at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        checks.number_in("optimizer.final_lr", self.final_lr, 0, self.lr)


@dataclass
class LoggerConfig:
    """Weights & Biases beside the CSV log that is always written."""

    wandb: str = "offline"  # online | offline | disabled
    project: str = "credit_dp"

    def __post_init__(self) -> None:
        checks.one_of("logger.wandb", self.wandb, ("online", "offline", "disabled"))


@dataclass
class Config:
    """Everything a run is made of."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    parallel: ParallelConfig = MISSING
    trainer: TrainerConfig = MISSING
    loss: LossConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    logger: LoggerConfig = MISSING
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    resume: str | None = None  # auto | PATH

    def __post_init__(self) -> None:
        checks.integer_in("seed", self.seed, 0, 2**63 - 1)  # what torch and numpy both take
        checks.one_of("device", self.device, ("auto", "cpu", "cuda"))
        if self.resume == "auto" and not (self.run.name or self.run.dir):
            raise UserError("resume: auto needs run.name, which fixes the folder to look in")


def microbatches(config: Config) -> int:
    """Into how many parts a data rank's share of a batch is cut: one forward and backward each."""
    parallel = config.parallel
    pipelined = parallel.microbatches_or_default if parallel.pipeline > 1 else 1
    return config.trainer.accumulate * pipelined


def as_dict(config: Config) -> dict[str, Any]:
    """Plain lists, dicts, numbers and text: what can be written or sent elsewhere."""
    return asdict(config)
