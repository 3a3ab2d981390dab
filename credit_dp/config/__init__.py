"""The configuration of a run as dataclasses: each key with its type, default and meaning.

`Config` is the root; its groups are here and in `data`, `model` and `training`. The comment beside
or above a field is its help text. Each dataclass checks its own values when it is created and
raises a `UserError` that names the key; OmegaConf reports values that are still `MISSING`.

No torch in here: `--help` and `--cfg job` have to answer in under a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING

from credit_dp import checks
from credit_dp.config.data import DataConfig, DatesConfig, QuickstartConfig, VariableConfig
from credit_dp.config.model import (
    BUDGETS,
    SUBSTITUTES,
    BlocksConfig,
    BudgetNeeds,
    CrossFormerConfig,
    DiffusionConfig,
    ModelConfig,
    OwnModelConfig,
    PanguConfig,
    SFNOConfig,
    SwinConfig,
    UNetConfig,
)
from credit_dp.config.training import (
    AdamWConfig,
    LionConfig,
    LoggerConfig,
    LossConfig,
    MuonConfig,
    OptimizerConfig,
    OwnCallbackConfig,
    OwnLossConfig,
    OwnOptimizerConfig,
    OwnScheduleConfig,
    StandardLossConfig,
    TrainerConfig,
)
from credit_dp.errors import UserError
from credit_dp.variable_names import possible_canonical_names

__all__ = [
    "AdamWConfig",
    "Config",
    "CrossFormerConfig",
    "DataConfig",
    "DatesConfig",
    "DiffusionConfig",
    "LionConfig",
    "LoggerConfig",
    "LossConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "OwnCallbackConfig",
    "OwnLossConfig",
    "OwnModelConfig",
    "OwnOptimizerConfig",
    "OwnScheduleConfig",
    "PanguConfig",
    "SwinConfig",
    "ParallelConfig",
    "QuickstartConfig",
    "RunConfig",
    "SFNOConfig",
    "StandardLossConfig",
    "TrainerConfig",
    "UNetConfig",
    "VariableConfig",
    "as_dict",
    "microbatches_per_step",
]


PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved")
STAGES_PER_INTERLEAVED_RANK = 2
FSDP_DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class RunConfig:
    """The folder of a run. `resume=auto` needs a fixed one."""

    name: str | None = None  # write to outputs/NAME; null: a new folder for each run
    dir: str = ""  # write to this folder, instead of outputs/NAME
    scaling: bool = False  # end a sweep with a table and a plot of its parallel scaling

    def __post_init__(self) -> None:
        checks.folder_name("run.name", self.name)


@dataclass
class ParallelConfig:
    """The mesh of pipeline x data x ensemble x domain ranks, and how each of its axes works."""

    # ranks that share one globe, each with a band of latitude rows, for less memory
    domain: int = 1
    # globes that are trained on at once; null: as many as the GPUs or the launcher's ranks allow
    data: int | None = None
    pipeline: int = 1  # ranks that share one model, each with some of its layers
    # ranks that share the members of a sample; a divisor of trainer.members
    ensemble: int = 1
    threads: int | None = None  # CPU threads of each rank; null: an equal share of the cores
    # ddp: every rank holds all parameters | fsdp2: data, ensemble and domain ranks hold shards, for
    # less memory
    data_mode: str = "ddp"
    # of fsdp2: float32 | bfloat16 | float16, in which parameters compute; null: trainer.dtype
    param_dtype: str | None = None
    reduce_dtype: str | None = None  # of fsdp2: the same, in which gradients are reduced
    cpu_offload: bool = False  # of fsdp2: keep parameters, gradients and moments in host memory
    schedule: str = "1f1b"  # of the pipeline: gpipe | 1f1b | interleaved
    # of the pipeline, micro-batches of each accumulated part of the batch; null: one for each rank
    microbatches: int | None = None
    # names of the segments at which later pipeline stages begin; null: stages of balanced cost
    stages: list[str] | None = None
    # functions without a rule for bands: allow (each rank gathers the rows and computes all of
    # them) | refuse (a model with such functions)
    whole_ops: str = "allow"
    # with allow, refuse a model if what runs whole makes a rank hold more than this many times the
    # activations that it would hold otherwise, and at least 256 MiB more; null: no limit
    whole_ops_limit: float | None = 1.5
    # devices of modules within one process, e.g. {root: cuda:0, decoder: cuda:1}
    layout: dict[str, Any] = field(default_factory=dict)
    # steps between checks that replicas hold equal parameters; 0: only at the start
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        checks.at_least("parallel.domain", self.domain, 1)
        checks.at_least("parallel.data", self.data, 1)
        checks.at_least("parallel.pipeline", self.pipeline, 1)
        checks.at_least("parallel.ensemble", self.ensemble, 1)
        checks.at_least("parallel.threads", self.threads, 1)
        checks.at_least("parallel.microbatches", self.microbatches, 1)
        checks.at_least("parallel.check_replicas_every", self.check_replicas_every, 0)
        checks.one_of("parallel.data_mode", self.data_mode, ("ddp", "fsdp2"))
        checks.one_of("parallel.schedule", self.schedule, PIPELINE_SCHEDULES)
        checks.one_of("parallel.whole_ops", self.whole_ops, ("allow", "refuse"))
        checks.number_in("parallel.whole_ops_limit", self.whole_ops_limit, 1)
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

    @property
    def sums_whole_gradients(self) -> bool:
        """Whether fsdp2 adds up micro-batches' gradients before it reduces them to shards.

        Without `reduce_dtype` the sum would be rounded to a lower `param_dtype` each time.
        """
        return self.param_dtype is None or self.reduce_dtype not in (None, self.param_dtype)

    def _check_pipeline(self) -> None:
        if self.stages is not None:
            checks.no_repeats("parallel.stages", self.stages)
        if self.pipeline > 1 and self.layout:
            raise UserError(
                f"parallel.layout: needs parallel.pipeline=1, got {self.pipeline}. Leave "
                "parallel.layout empty: a pipeline is cut by parallel.stages."
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
                f"got {len(self.stages)}. Change it, or set it to null to balance the stages."
            )
        too_few = self.schedule == "1f1b" and self.pipeline_microbatches < self.pipeline
        uneven = self.schedule == "interleaved" and self.pipeline_microbatches % self.pipeline
        if too_few or uneven:
            needed = "a multiple of" if uneven else "at least"
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
                "Change one of them."
            )

    @property
    def gpus_per_rank(self) -> int:
        """GPUs that each rank uses: one, or as many as the layout names."""
        devices = [d for v in self.layout.values() for d in ([v] if isinstance(v, str) else v)]
        numbers = [int(d.removeprefix("cuda:")) for d in devices if d.startswith("cuda:")]
        return 1 + max(numbers, default=0)

    @property
    def pipeline_microbatches(self) -> int:
        """Micro-batches of the pipeline in each accumulated part of the batch."""
        return self.microbatches or self.pipeline

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages on each rank."""
        return (
            STAGES_PER_INTERLEAVED_RANK
            if self.schedule == "interleaved" and self.pipeline > 1
            else 1
        )


@dataclass
class Config:
    """The configuration of a run."""

    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    parallel: ParallelConfig = MISSING
    trainer: TrainerConfig = MISSING
    loss: LossConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    logger: LoggerConfig = MISSING
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0  # of the initial weights, the order of samples and random draws
    device: str = "auto"  # auto | cpu | cuda
    resume: str | None = None  # auto | PATH of a checkpoint or of a run's folder
    init_from: str | None = None  # PATH of a checkpoint or run whose weights to start from, by name
    compile: bool = False  # compile the model by torch.compile

    def __post_init__(self) -> None:
        checks.integer_in("seed", self.seed, 0, 2**63 - 1)  # torch and numpy both take these
        if self.device == "gpu":  # whose closest word is `cpu`
            raise UserError("device: needs one of auto, cpu, cuda, got 'gpu'. Did you mean cuda?")
        checks.one_of("device", self.device, ("auto", "cpu", "cuda"))
        if self.init_from == "":
            raise UserError("init_from: needs a run's folder or a checkpoint, got none. Give one.")
        if self.resume == "":
            raise UserError("resume: needs `auto` or the path of a checkpoint, got none. Give one.")
        if self.resume == "auto" and not (self.run.name or self.run.dir):
            raise UserError("resume: auto needs run.name, which fixes the folder to look in")
        if self.compile and self.parallel.pipeline > 1:
            raise UserError(
                f"compile: needs parallel.pipeline=1, got {self.parallel.pipeline}. "
                "Change one of them."
            )
        if self.compile and self.parallel.layout:
            raise UserError(
                "compile: needs an empty parallel.layout, because moves between devices can't be "
                "compiled. Change one of them."
            )
        drawn = [
            key
            for key in ("noise", "stochastic_depth")
            if isinstance(self.model, BlocksConfig) and getattr(self.model, key)
        ]
        if self.compile and drawn and getattr(self.model, "activation_checkpointing", False):
            raise UserError(
                "compile: needs model.activation_checkpointing=false, because blocks with "
                f"model.{drawn[0]} can't be compiled and recomputed. Change one of them."
            )
        if self.trainer.checkpoint_activations != "false" and self.parallel.pipeline > 1:
            raise UserError(
                "trainer.checkpoint_activations: needs parallel.pipeline=1, got "
                f"{self.parallel.pipeline}. Use model.activation_checkpointing=true instead, which "
                "recomputes each block of a stage."
            )
        if self.trainer.checkpoint_activations == "blocks" and self.compile:
            raise UserError(
                "trainer.checkpoint_activations: blocks can't be compiled. Set compile=false, or "
                "trainer.checkpoint_activations=step."
            )
        if self.trainer.check_finite == "late":
            self._check_late_check()
        if self.trainer.cuda_graph:
            self._check_cuda_graph()
        if self.trainer.channels_last and self.parallel.data_mode == "fsdp2":
            raise UserError(
                "trainer.channels_last: needs parallel.data_mode=ddp, got fsdp2, which shards "
                "contiguous weights only. Change one of them."
            )
        if isinstance(self.optimizer, MuonConfig) and self.parallel.cpu_offload:
            raise UserError(
                "optimizer=muon: needs whole matrices, which can't be gathered from the host's "
                "memory. Set parallel.cpu_offload=false, or choose optimizer=adamw."
            )
        if self.model.fixers:
            self._check_fixers()
        for key in ("shift_longitude", "mirror"):
            if getattr(self.trainer, key) and "energy" in self.model.fixers:
                raise UserError(
                    f"trainer.{key}: can't be combined with the fixer energy, whose ground stays "
                    f"where it is. Leave trainer.{key} out, or take energy out of model.fixers."
                )
        if self.trainer.longest_rollout > 1 and self.parallel.pipeline > 1:
            raise UserError(
                "trainer.rollout: several steps need parallel.pipeline=1, got "
                f"{self.parallel.pipeline}: the last stage of a pipeline can't feed the first one "
                "within a forward pass. Raise parallel.domain instead."
            )
        if isinstance(self.model, DiffusionConfig):
            self._check_diffusion()
        else:
            self._check_ensemble()
        self._check_ensemble_ranks()

    def check_rows(self, rows: int) -> None:
        """Refuse more bands than the coarsest level of the model has rows on a grid of `rows`."""
        coarsest = self.model.coarsest_rows(rows)
        if self.parallel.domain > coarsest:
            raise UserError(
                f"parallel.domain: the model's coarsest level has {coarsest} of the grid's {rows} "
                f"rows, too few for {self.parallel.domain} ranks. Lower parallel.domain to "
                f"{coarsest}{' or less' if coarsest > 1 else ''}."
            )

    def _check_diffusion(self) -> None:
        """Refuse what a denoiser can't be trained with."""
        if self.trainer.longest_rollout > 1:
            raise UserError(
                "trainer.rollout: model=diffusion learns to denoise one step, from which forecasts "
                f"go on by themselves, got {self.trainer.longest_rollout} steps. Set "
                "trainer.rollout={0: 1}, or change model."
            )
        if self.trainer.members > 1:
            raise UserError(
                f"trainer.members: model=diffusion is trained on single samples, got "
                f"{self.trainer.members}. Set trainer.members=1, and trainer.evaluate_members for "
                "several forecasts in the scores."
            )
        if self.parallel.ensemble > 1:
            raise UserError(
                "parallel.ensemble: spreads members, of which model=diffusion trains a single one, "
                f"got {self.parallel.ensemble}. Use parallel.data or parallel.domain instead."
            )
        loss = self.loss
        if loss.name != "mse" or getattr(loss, "variable_error", {}):
            raise UserError(
                "loss: model=diffusion needs loss=mse for all variables, as denoisers are means, "
                f"got {loss.name}{' with loss.variable_error' if loss.name == 'mse' else ''}. "
                "Change loss or model."
            )
        for key in ("spectrum", "sphere_spectrum", "gradient"):
            if getattr(loss, key):
                raise UserError(
                    f"loss.{key}: compares forecasts with the truth, but model=diffusion is "
                    f"trained to denoise. Set loss.{key}=0, or change model."
                )

    def _check_ensemble(self) -> None:
        """Check that noise, members and the loss of ensembles come together."""
        # A plug-in may have a key of this name for something else.
        noise = self.model.noise if isinstance(self.model, BlocksConfig) else 0
        members = self.trainer.members
        loss = self.loss.name
        if members > 1 and loss != "crps":
            raise UserError(
                f"trainer.members: {members} members need loss=crps, got loss={loss}, which scores "
                "each forecast alone. Change one of them."
            )
        if loss == "crps" and members == 1:
            raise UserError(
                "loss: crps needs trainer.members of at least 2, got 1. Change it, or use loss=mae."
            )
        if members > 1 and not noise:
            raise UserError(
                f"trainer.members: {members} members differ in the model's noise, but "
                f"{self.model.name} has none. Set model.noise, like model.noise=32."
            )
        scored = self.trainer.scored_members
        if scored > 1 and not noise:
            raise UserError(
                f"trainer.evaluate_members: {scored} forecasts of model={self.model.name} would be "
                "the same. Set model.noise, or leave trainer.evaluate_members out."
            )
        if noise and members == 1:
            raise UserError(
                f"model.noise: {noise} needs trainer.members of at least 2 and loss=crps, got 1 "
                "member. Change one of them."
            )

    def _check_ensemble_ranks(self) -> None:
        """Check that ranks of an ensemble have equally many members each."""
        ranks, members, scored = (
            self.parallel.ensemble,
            self.trainer.members,
            self.trainer.scored_members,
        )
        if members % ranks:
            alone = ", with loss=crps and model.noise such as 32" if members == 1 else ""
            raise UserError(
                f"parallel.ensemble: {ranks} ranks need trainer.members to be a multiple of "
                f"{ranks}{alone}, got {members}. Change one of them."
            )
        if scored % ranks:
            raise UserError(
                f"trainer.evaluate_members: the {ranks} ranks of parallel.ensemble need a multiple "
                f"of {ranks}, got {scored}. Change one of them."
            )

    def _check_late_check(self) -> None:
        if type(self.optimizer) is not AdamWConfig:  # Muon's is a subclass
            raise UserError(
                "trainer.check_finite: late needs optimizer=adamw, whose update the device can "
                f"leave out by itself, got {self.optimizer.name}. Change one of them."
            )
        if self.parallel.cpu_offload:
            raise UserError(
                "trainer.check_finite: late needs parallel.cpu_offload=false, as the host waits "
                "for the gradients of weights in its memory. Change one of them."
            )

    def _check_cuda_graph(self) -> None:
        parallel = self.parallel
        supported: dict[str, tuple[object, object]] = {
            "parallel.cpu_offload": (parallel.cpu_offload, False),
            "parallel.param_dtype": (parallel.param_dtype or "null", "null"),
            "parallel.reduce_dtype": (parallel.reduce_dtype or "null", "null"),
            "parallel.pipeline": (parallel.pipeline, 1),
            "parallel.layout": (dict(parallel.layout), {}),
            "compile": (self.compile, False),
            "trainer.checkpoint_activations": (self.trainer.checkpoint_activations, "false"),
        }
        for key, (given, value) in supported.items():
            if given != value:
                raise UserError(
                    f"trainer.cuda_graph: needs {key}={str(value).lower()}, got "
                    f"{str(given).lower()}. Change one of them."
                )

    def _check_fixers(self) -> None:
        """Refuse fixers whose variables are not in the data's lists."""
        data = self.data
        outputs = [*data.prognostic, *data.diagnostic]
        for name in self.model.bounds:
            variables = possible_canonical_names(name) | {name.rpartition("_")[0]}
            if not any(possible_canonical_names(output) & variables for output in outputs):
                raise UserError(
                    f"model.bounds.{name}: needs a name from data.prognostic or data.diagnostic."
                    f"{checks.did_you_mean(name, outputs)}"
                )
        for fixer in self.model.fixers:
            needs = BUDGETS.get(fixer, BudgetNeeds(()))
            lists = {
                "data.prognostic": (data.prognostic, needs.state),
                "data.diagnostic": (outputs, needs.fluxes),
                "data.static": (data.static, needs.static),
            }
            missing = [
                f"{name} in {key}"
                for key, (names, needed) in lists.items()
                for name in needed
                if not has_variable(names, name, data.step_hours)
            ]
            if missing:
                raise UserError(
                    f"model.fixers: {fixer} needs {', '.join(missing)}. Add what is missing, or "
                    f"take {fixer} out of model.fixers."
                )


def has_variable(names: Sequence[str], needed: str, step_hours: int) -> bool:
    """Whether a variable, or its sum over a step (`_6hr`), is in a list under any of its names.

    One of `SUBSTITUTES` counts, too.
    """
    wanted = {needed, f"{needed}_{step_hours}hr", SUBSTITUTES.get(needed, needed)}
    return any(possible_canonical_names(name) & wanted for name in names)


def members_per_rank(config: Config) -> int:
    """Return the members of each sample that a rank computes."""
    return config.trainer.members // config.parallel.ensemble


def microbatches_per_step(config: Config) -> int:
    """Return the number of micro-batches, each with a forward and a backward, of a data rank."""
    parallel = config.parallel
    pipelined = parallel.pipeline_microbatches if parallel.pipeline > 1 else 1
    return config.trainer.accumulate * pipelined


def as_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain lists, dicts, numbers and texts, for YAML and JSON."""
    return asdict(config)


def flatten_keys(
    table: Mapping[Any, Any], parents: tuple[Any, ...] = ()
) -> list[tuple[tuple[Any, ...], Any]]:
    """Return all values of nested tables with their paths; an empty table counts as a value."""
    values: list[tuple[tuple[Any, ...], Any]] = []
    for key, value in table.items():
        nested = isinstance(value, dict) and value
        values += flatten_keys(value, (*parents, key)) if nested else [((*parents, key), value)]
    return values


def by_dotted_key(table: Mapping[Any, Any]) -> dict[str, Any]:
    """Return all values of nested tables by keys such as `data.dates.train`."""
    return {".".join(map(str, path)): value for path, value in flatten_keys(table)}
