"""The whole configuration as dataclasses: what every key means and which values it may have.

Each dataclass checks its own values when it is made and raises a `UserError` that names the key.
What is still `MISSING` is left for OmegaConf to report.

No torch in here: `--help` and `--cfg job` must answer in under a second.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING

from credit_dp import checks
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
    "as_dict",
]


@dataclass
class RunConfig:
    """Where a run writes. A fixed name is what `resume=auto` finds again."""

    name: str | None = None
    dir: str = ""  # empty: outputs/NAME, or a folder of its own for a run without a name

    def __post_init__(self) -> None:
        checks.folder_name("run.name", self.name)


@dataclass
class QuickstartConfig:
    """The embedded climate: spectral truncation, seed, and the spans it covers.

    `runs` independent integrations of `run_days` each, ten days apart, the first at `start`.
    """

    truncation: int = 21
    seed: int = 0
    start: str = "2001-01-01"
    runs: int = 6
    run_days: int = 190
    spinup_days: int = 40

    def __post_init__(self) -> None:
        checks.at_least("data.quickstart.truncation", self.truncation, 5)
        checks.at_least("data.quickstart.seed", self.seed, 0)
        checks.at_least("data.quickstart.runs", self.runs, 1)
        checks.at_least("data.quickstart.run_days", self.run_days, 1)
        checks.at_least("data.quickstart.spinup_days", self.spinup_days, 0)


@dataclass
class DataConfig:
    """Which store, variables and dates make a sample.

    Date ranges are `[first, last]`, both inclusive, ISO format.
    """

    name: str = MISSING
    store: str | None = None  # a zarr store; the quickstart makes its own under `cache`
    cache: str = "${oc.env:CREDIT_DP_CACHE,${oc.env:HOME,.}/.cache/credit_dp}"
    grid: str | None = None  # "ROWSxCOLUMNS", e.g. 121x240; null: the store's own
    prognostic: list[str] = MISSING
    levels: list[int] | None = None  # hPa; null: all of the store's
    forcing: list[str] = field(default_factory=list)
    static: list[str] = field(default_factory=list)
    step_hours: int = 6
    train: list[str] = MISSING
    valid: list[str] = MISSING
    test: list[str] = MISSING
    batch_size: int = 8  # global: the mesh never changes it
    prefetch: int = 2  # samples ready ahead of the step that uses them
    quickstart: QuickstartConfig = field(default_factory=QuickstartConfig)

    def __post_init__(self) -> None:
        if self.name != MISSING:
            checks.one_of("data.name", self.name, ("quickstart", "zarr"))
        checks.grid("data.grid", self.grid)
        checks.not_empty("data.prognostic", self.prognostic)
        for key in ("prognostic", "forcing", "static", "levels"):
            if getattr(self, key) not in (None, MISSING):
                checks.no_repeats(f"data.{key}", getattr(self, key))
        for key in ("train", "valid", "test"):
            if getattr(self, key) != MISSING:
                checks.span(f"data.{key}", getattr(self, key))
        checks.at_least("data.step_hours", self.step_hours, 1)
        checks.at_least("data.batch_size", self.batch_size, 1)
        checks.at_least("data.prefetch", self.prefetch, 0)


@dataclass
class ParallelConfig:
    """The mesh: ranks per globe, globes at once, threads per rank."""

    domain: int = 1
    data: int | None = None  # null: what is left of the visible GPUs or of the launcher's ranks
    threads: int | None = None  # null: this machine's cores shared out

    def __post_init__(self) -> None:
        checks.at_least("parallel.domain", self.domain, 1)
        checks.at_least("parallel.data", self.data, 1)
        checks.at_least("parallel.threads", self.threads, 1)


@dataclass
class TrainerConfig:
    """How long to train and what to do on the way."""

    steps: int = MISSING
    dtype: str = "float32"  # float32 | float64
    gradient_clip: float | None = 1.0  # largest global norm
    log_every: int = 10
    checkpoint_every: int = 200
    evaluate_hours: list[int] = field(default_factory=lambda: [6, 24])
    evaluate_stride_hours: int = 30  # between initial times on the held-out dates

    def __post_init__(self) -> None:
        if self.steps != MISSING:
            checks.at_least("trainer.steps", self.steps, 1)
        checks.one_of("trainer.dtype", self.dtype, ("float32", "float64"))
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


def as_dict(config: Config) -> dict[str, Any]:
    """Plain lists, dicts, numbers and text: what can be written or sent elsewhere."""
    return asdict(config)
