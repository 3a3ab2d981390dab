"""Translates a config of anemoi-training: its data, dates, loss, learning rate and rollouts.

Three forms are read: the one whose sections have `datasets.data`, with `task` and
`training.optimization`, the earlier one with `training.lr`, `training.rollout` and
`training.scalers`, and the one before with `training.variable_loss_scaling`. The dataset is
opened, because the config does not name the prognostic variables: all variables that are neither
forcing nor diagnostic are prognostic.

Source: training/src/anemoi/training/config and training/docs of github.com/ecmwf/anemoi-core.
"""

import calendar
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from credit_dp.cli.foreign_config import Experiment, ForeignConfig, Reasons
from credit_dp.errors import UserError
from credit_dp.variable_names import (
    STATIC_NAMES,
    UPPER_AIR_NAMES,
    canonical_name,
    long_name,
)

DATA = "datasets.data"  # the one dataset of a config with several
LOSSES = {"mse": "mse", "mae": "mae", "huber": "huber"}
# Scores of ensembles, and the key and default of the share of the fair one.
ENSEMBLE_LOSSES = {
    "crps": ("alpha", 0.95),
    "almostfairkernelcrps": ("alpha", 1.0),
    "kernelcrps": ("fair", 1.0),
}
NOISE = 32  # numbers of a member, where theirs has its noise elsewhere
_MODEL = "the model is one of this package, model=NAME"
_RESUME = "resume=auto continues a run, init_from=RUN starts from its weights"
_PATHS = "run.name or run.dir chooses the folder of a run"

REASONS: Reasons = {
    "defaults": "groups are not composed here; give what `anemoi-training config dump` writes",
    "model": _MODEL,
    "graph": _MODEL,
    "system.output": _PATHS,
    "system.input.graph": _MODEL,
    "system.input.warm_start": _RESUME,
    "hardware.paths": _PATHS,
    "hardware.files": _PATHS,
    "diagnostics": "logs, plots and checkpoints have keys of their own in logger and trainer",
    "dataloader.test": "dates only; the rest is that of training",
    "dataloader.validation": "dates only; the rest is that of training",
    "dataloader.read_group_size": "ranks of a domain share the reading by themselves",
    "dataloader.pin_memory": "batches are always copied from pinned memory",
    "data.imputer": "data.variables.NAME.fill replaces points without values",
    "training.method": "the loss and the model say how a run is trained",
    "training.check_variables_compatibility": "a store is checked when it is opened",
    "training.num_sanity_val_steps": "--check with the same keys checks a run before it starts",
    "task": "a run trains a forecast",
    "training.run_id": _RESUME,
    "training.fork_run_id": _RESUME,
    "training.load_weights_only": _RESUME,
    "training.transfer_learning": _RESUME,
    "training.strategy": "parallel.domain shards fields, parallel.data copies the model",
    "training.submodules_to_freeze": "trainer.freeze takes names of parameters of this model",
    "training.validation_metrics": "validation_rmse is the error of validation",
    "training.metrics": "final scores are of all variables",
    "training.loss_gradient_scaling": "gradients are clipped by their norm",
    "training.swa": "optimizer.ema averages weights",
}


@dataclass(frozen=True)
class Dataset:
    """What a config needs to know of its dataset.

    Attributes:
        names: of all variables, as in the dataset.
        constant: variables that don't change in time.
        first, last: its first and last time, in ISO format; empty if it can't be read.
        problem: why this package can't read it; empty if it can.
    """

    names: Sequence[str]
    constant: frozenset[str]
    first: str = ""
    last: str = ""
    problem: str = ""


def read_anemoi(
    config: ForeignConfig, name: str, second: str | None
) -> tuple[Experiment, list[str]]:
    """Return the experiment of a config of anemoi-training, and a line for each other key.

    Args:
        config: the file.
        name: of the experiment; not used.
        second: not used: a model of anemoi is a graph of points, which has no rows.
    """
    _resolve(config)
    experiment = Experiment({"data": "anemoi", "optimizer": "adamw"})
    outputs = _read_data(config, experiment)
    _read_time(config, experiment)
    _read_trainer(config, experiment)
    _read_learning_rate(config, experiment)
    _read_loss(config, experiment, outputs)
    _read_transport(config, experiment)
    scalers = f"training.scalers.{DATA}"
    reasons = {
        **REASONS,
        f"{scalers}.nan_mask_weights": "points without values never count",
        f"{scalers}.node_weights": "a row weighs its area",
        f"{scalers}.time_steps": "a step forecasts one state",
    }
    return experiment, config.lines(reasons)


def _resolve(config: ForeignConfig) -> None:
    """Replace interpolations, `${data.frequency}`, by what they refer to.

    Raises:
        UserError: one refers to a key that the file does not have.
    """
    try:
        with no_environment():
            tree = OmegaConf.create(dict(config.tree))
            resolved: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{config.path}: can't be resolved ({reason}). Give a composed config, as "
            "`anemoi-training config dump` writes it."
        ) from error
    config.tree = resolved


@contextmanager
def no_environment() -> Iterator[None]:
    """Let `${oc.env:NAME}` be an error inside: an error or a line could print what it read."""

    def refuse(name: str, *default: str) -> str:
        raise UserError(f"${{oc.env:{name}}} reads your environment")

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _first_of(config: ForeignConfig, *keys: str) -> str:
    """Return the first of the keys that the config has, otherwise the last one."""
    return next((key for key in keys if config.has(key)), keys[-1])


def _read_data(config: ForeignConfig, experiment: Experiment) -> list[str]:
    """Read the dataset and the roles of its variables; return the names of output variables."""
    key = _first_of(
        config,
        f"dataloader.training.{DATA}.dataset_config.dataset",
        f"dataloader.training.{DATA}.dataset_config",
        f"dataloader.training.{DATA}.dataset",
        "dataloader.training.dataset.dataset",
        "dataloader.training.dataset",
        "dataloader.dataset",
    )
    paths = config.paths(key) if not isinstance(config.read(key), dict) else []
    if len(paths) != 1:
        raise config.error(
            key, "the path of one dataset; combined ones can't be read", config.read(key)
        )
    # The same path, where interpolations repeat it.
    for other in ("dataloader.dataset", "system.input.dataset"):
        if config.has(other) and config.paths(other) != paths:
            config.remark(other, f"no counterpart: the data are those of {key}")
    config.read("data.format")
    dataset = open_dataset(config, key, paths[0])
    section = f"data.{DATA}" if config.has(f"data.{DATA}") else "data"
    inputs = config.names(f"{section}.forcing")
    diagnostic = config.names(f"{section}.diagnostic")
    dropped = config.names(_first_of(config, "dataloader.training.dataset.drop",
                                     "dataloader.training.drop"))  # fmt: skip
    missing = [x for x in (*inputs, *diagnostic) if x not in dataset.names]
    if missing:
        raise config.error(f"{section}.forcing", f"variables of {paths[0]}", missing[0])
    prognostic = [x for x in dataset.names if x not in {*inputs, *diagnostic, *dropped}]
    states, levels = group_levels(prognostic)
    experiment.set("data.store", paths[0])
    experiment.set("data.prognostic", states)
    experiment.set("data.diagnostic", diagnostic)
    experiment.set("data.forcing", [x for x in inputs if x not in dataset.constant])
    experiment.set("data.static", [x for x in inputs if x in dataset.constant])
    experiment.set("data.levels", levels)
    if dataset.problem:
        config.remark(key, f"can't be read here: {dataset.problem}")
    _read_normaliser(config, experiment, section, [*states, *diagnostic, *inputs])
    _read_dates(config, experiment, dataset)
    return [*states, *diagnostic]


def open_dataset(config: ForeignConfig, key: str, path: str) -> Dataset:
    """Return what is needed of the dataset, also if its grid can't be read here.

    Raises:
        UserError: there is no dataset.
    """
    # Imported here because xarray and zarr take a second, which --help does not need.
    from credit_dp.data.dates import format_minute
    from credit_dp.data.sources.anemoi import AnemoiSource
    from credit_dp.data.sources.stacked import open_stacked

    try:
        group = open_stacked(path, ("data",))[0]
    except UserError as error:
        raise UserError(f"{config.path}: {key}: {error}") from error
    attributes = dict(group.attrs)
    names = [str(name) for name in attributes.get("variables", [])]  # type: ignore[union-attr]
    if not names:
        raise config.error(key, "a dataset of anemoi, with the attribute `variables`", path)
    try:
        source = AnemoiSource.open(path)
    except UserError as error:
        known = {name for name in names if canonical_name(name) in STATIC_NAMES.values()}
        return Dataset(names, frozenset(known), problem=str(error))
    constant = {name for name in names if _is_constant(source.variables, name)}
    first, last = (format_minute(source.times[end]) for end in (0, -1))
    return Dataset(names, frozenset(constant), first, last)


def _is_constant(variables: Mapping[str, Any], name: str) -> bool:
    return name in variables and not variables[name].has_time


def group_levels(names: Sequence[str]) -> tuple[list[str], list[int] | None]:
    """Return variables on levels by their long names, first, and the levels that all of them have.

    `z_500, z_850, t_500, t_850, 2t` -> `([geopotential, temperature, 2t], [500, 850])`. If they
    differ in their levels, all names stay as they are, and the levels are None.
    """
    levels: dict[str, list[int]] = {}
    flat = []
    for name in names:
        long, level = long_name(name)
        if level is None:
            flat.append(name)
        else:
            levels.setdefault(long, []).append(level)
    sets = {tuple(sorted(each)) for each in levels.values()}
    if len(sets) != 1:
        return list(names), None
    return [*levels, *flat], list(sets.pop())


def _read_normaliser(
    config: ForeignConfig, experiment: Experiment, section: str, names: Sequence[str]
) -> None:
    """Read how variables are normalised."""
    prefix = _first_of(config, f"{section}.processors.normalizer.config", f"{section}.normalizer")
    config.read(f"{section}.processors.normalizer._target_")
    words = {"mean-std": "standard", "std": "std", "min-max": "minmax", "none": "none"}
    options = {}
    default = config.read(f"{prefix}.default", "mean-std")
    if default not in words:
        config.remark(f"{prefix}.default", "no counterpart: standard")
    elif default != "mean-std":
        options = {name: {"normalise": words[default]} for name in names}
    for word, normalise in words.items():
        for name in config.names(f"{prefix}.{word}"):
            options |= {x: {"normalise": normalise} for x in _same_variable(name, names)}
    if config.names(f"{prefix}.max"):
        config.remark(f"{prefix}.max", "differs: standard, there is no division by the maximum")
    experiment.set("data.variables", options or None)


def _same_variable(name: str, names: Sequence[str]) -> list[str]:
    """Return the names that are this variable; `q` is on all levels, and `q_500` on one of them."""
    if name in names:
        return [name]
    long = {long_name(name)[0], long_name(name, 0)[0]}
    return [each for each in names if long_name(each)[0] in long or each in long]


def _read_dates(config: ForeignConfig, experiment: Experiment, dataset: Dataset) -> None:
    """Read the dates of the splits; a year is all of it, and null is the dataset's end."""
    for split, section in (("train", "training"), ("valid", "validation"), ("test", "test")):
        prefix = f"dataloader.{section}.{DATA}"
        if not config.has(prefix):
            prefix = f"dataloader.{section}"
        if not config.has(prefix):
            continue
        first = date_text(config.read(f"{prefix}.start"), is_last=False) or dataset.first
        last = date_text(config.read(f"{prefix}.end"), is_last=True) or dataset.last
        # The dates of a run have to be in its store.
        first = max(first, dataset.first) if dataset.first else first
        last = dataset.last if dataset.last and last[:10] > dataset.last[:10] else last
        if first and last and first[:10] <= last[:10]:
            experiment.set(f"data.dates.{split}", [first, last])
        else:
            config.remark(f"{prefix}.start", "differs: the dataset has none of these dates: auto")
    train, other = f"dataloader.training.{DATA}", "dataloader.training.dataset"
    frequency = _first_of(config, f"{train}.dataset_config.frequency", f"{train}.frequency",
                          f"{other}.frequency", "dataloader.training.frequency")  # fmt: skip
    config.read(frequency)


def date_text(value: object, is_last: bool) -> str:
    """Return the first or last day of a year or month, or a day as it is; empty for null."""
    if value is None:
        return ""
    text = str(value).strip().replace(" ", "T")
    if re.fullmatch(r"\d{4}", text):
        text += "-12" if is_last else "-01"
    if month := re.fullmatch(r"(\d{4})-(\d\d)", text):
        year, number = map(int, month.groups())
        days = calendar.monthrange(year, number)[1] if 1 <= number <= 12 else 1
        return f"{text}-{days if is_last else 1:02}"
    return text


def _read_time(config: ForeignConfig, experiment: Experiment) -> None:
    """Read the step, the number of states in the input, and rollouts."""
    key = _first_of(config, "task.timestep", "data.timestep", "data.frequency")
    step = str(config.read(key, "6h")).lower()
    config.read("data.frequency")
    config.read("data.resolution")
    experiment.set("data.step", step)
    hours = int(re.sub(r"\D", "", step) or 6) * (24 if step.endswith("d") else 1)
    experiment.set("trainer.evaluate_hours", [hours, 4 * hours])
    key = _first_of(config, "task.multistep_input", "training.multistep_input")
    experiment.set("model.frames", config.whole(key, 1))
    key = _first_of(config, "task.multistep_output", "training.multistep_output")
    if config.whole(key, 1) != 1:
        config.remark(key, "no counterpart: a step forecasts one state")
    prefix = _first_of(config, "task.rollout", "training.rollout")
    start = config.whole(f"{prefix}.start", 1)
    longer = config.whole(f"{prefix}.epoch_increment", 0)
    most = config.whole(_first_of(config, f"{prefix}.maximum", f"{prefix}.max"), start)
    # Theirs grows at the end of epochs 0, n, 2 n, ..., if n is the increment.
    rollout = {0: start}
    for more in range(most - start if longer else 0):
        rollout[more * longer + 1] = start + more + 1
    experiment.set("trainer.rollout", rollout)
    experiment.set("trainer.rollout_unit", "epoch" if longer else None)


def _read_trainer(config: ForeignConfig, experiment: Experiment) -> None:
    """Read the length of training, the batch, the precision and the mesh."""
    gpus, per_model, per_ensemble = _read_hardware(config)
    for key in ("per_model", "per_ensemble"):
        config.read(f"training.strategy.num_gpus_{key}")
    copies = max(1, gpus // per_ensemble)
    experiment.set("parallel.domain", per_model if per_model > 1 else None)
    parallel = per_ensemble // per_model
    experiment.set("parallel.ensemble", parallel if parallel > 1 else None)
    parts = config.whole("training.accum_grad_batches", 1)
    batch = config.whole("dataloader.batch_size.training")
    if batch is not None:
        experiment.set("data.batch_size", batch * copies * parts)
        config.remark(
            "dataloader.batch_size.training",
            f"differs: data.batch_size is of all GPUs together, here {copies} x {batch} x {parts}",
        )
    experiment.set("trainer.accumulate", parts)
    experiment.set("data.workers", config.whole("dataloader.num_workers.training") or None)
    experiment.set("data.prefetch", config.whole("dataloader.prefetch_factor"))
    steps, epochs = config.whole("training.max_steps"), config.whole("training.max_epochs")
    batches = config.whole("dataloader.limit_batches.training")
    if epochs and batches:
        steps = min(steps or epochs * batches, epochs * batches)
    elif epochs:
        config.remark("training.max_epochs", "no counterpart: training ends at trainer.steps")
    experiment.set("trainer.steps", steps)
    precision = str(config.read("training.precision", "32"))
    if precision.startswith("64"):
        experiment.set("trainer.dtype", "float64")
    elif precision.startswith(("16", "bf16")):
        experiment.set("trainer.autocast", "bfloat16")
        if precision.startswith("16"):
            config.remark("training.precision", "differs: bfloat16, which needs no scaling")
    experiment.set("trainer.deterministic", config.read("training.deterministic") or None)
    clip = config.number("training.gradient_clip.val", 0)
    by_norm = config.read("training.gradient_clip.algorithm", "norm") == "norm"
    experiment.keys["trainer.gradient_clip"] = clip if clip and by_norm else None
    if not by_norm:
        config.remark("training.gradient_clip.val", "no counterpart: only the norm is clipped")
    averaging = str(config.read("training.weight_averaging._target_", ""))
    if averaging.endswith("EMAWeightAveraging"):
        experiment.set("optimizer.ema", config.number("training.weight_averaging.decay", 0.999))
    elif averaging:
        config.remark(
            "training.weight_averaging._target_", "no counterpart: only an average in time"
        )
    trackers = [
        name
        for name in ("wandb", "mlflow", "tensorboard")
        if config.read(f"diagnostics.log.{name}.enabled", False)
    ]
    experiment.set("logger.trackers", trackers)


def _read_hardware(config: ForeignConfig) -> tuple[int, int, int]:
    """Return the numbers of all GPUs, of those of a model, and of those of an ensemble."""
    prefix = _first_of(config, "system.hardware", "hardware")
    gpus = config.whole(f"{prefix}.num_gpus_per_node", 1) * config.whole(f"{prefix}.num_nodes", 1)
    per_model = config.whole(f"{prefix}.num_gpus_per_model", 1)
    key = f"{prefix}.num_gpus_per_ensemble"
    per_ensemble = config.whole(key, per_model)
    if per_model < 1 or per_ensemble < 1 or per_ensemble % per_model:
        raise config.error(key, "a multiple of num_gpus_per_model", per_ensemble)
    return gpus, per_model, per_ensemble


def _read_learning_rate(config: ForeignConfig, experiment: Experiment) -> None:
    """Read the optimizer and its schedule: a warm-up, then a cosine."""
    gpus, _, per_ensemble = _read_hardware(config)
    copies = gpus / per_ensemble
    new = "training.optimization"
    key = _first_of(config, f"{new}.lr", "training.lr.rate")
    rate = config.number(key)
    if rate is not None:  # theirs is multiplied by the number of copies of the model
        experiment.set("optimizer.lr", rate * max(copies, 1))
        if copies > 1:
            config.remark(key, f"differs: optimizer.lr is {copies:g} times as much, as theirs is")
    scheduler = f"{new}.lr_scheduler"
    target = str(config.read(f"{scheduler}._target_", "CosineLRScheduler"))
    cosine = target.endswith(("CosineLRScheduler", "CosineAnnealingLR"))
    if not cosine:
        config.remark(f"{scheduler}._target_", "no counterpart: the learning rate is constant")
    experiment.set("optimizer.schedule", "cosine" if cosine else "constant")
    experiment.set(
        "optimizer.warmup_steps",
        config.whole(_first_of(config, f"{scheduler}.warmup_t", "training.lr.warmup",
                               "training.lr.warmup_t"), 0),
    )  # fmt: skip
    final = config.number(_first_of(config, f"{scheduler}.lr_min", "training.lr.min"), 0.0)
    experiment.set("optimizer.final_lr", final)
    key = _first_of(config, f"{scheduler}.t_initial", "training.lr.iterations")
    steps = experiment.keys.get("trainer.steps")
    if config.whole(key, steps) != steps:
        config.remark(key, "differs: the cosine ends at trainer.steps")
    config.read(f"{scheduler}.t_in_epochs")
    config.read(f"{new}.pl_lr_scheduler.interval")
    kind = str(config.read(f"{new}.optimizer._target_", "torch.optim.AdamW"))
    if kind.endswith(".ZeroRedundancyOptimizer"):
        config.remark(
            f"{new}.optimizer._target_", "differs: parallel.data_mode=fsdp2 shards its state"
        )
        kind = str(config.read(f"{new}.optimizer.optimizer_class._target_", kind))
        config.read(f"{new}.optimizer.optimizer_class._partial_")
    if not kind.endswith(".AdamW"):
        config.remark(f"{new}.optimizer._target_", "no counterpart: AdamW")
    kwargs = _first_of(config, f"{new}.optimizer", "training.optimizer.kwargs")
    # Of an optimizer that a config names the defaults are those of torch.
    default = [0.9, 0.999] if config.has(f"{new}.optimizer") else [0.9, 0.95]
    betas = config.read(f"{kwargs}.betas", default)
    experiment.set("optimizer.betas", [float(beta) for beta in betas[:2]])
    experiment.set("optimizer.weight_decay", config.number(f"{kwargs}.weight_decay"))
    experiment.set("optimizer.eps", config.number(f"{kwargs}.eps"))


def _read_loss(config: ForeignConfig, experiment: Experiment, outputs: Sequence[str]) -> None:
    """Read the error and the weights of rows, levels and variables."""
    prefix = f"training.training_loss.{DATA}"
    if not config.has(prefix):
        prefix = "training.training_loss"
    if str(config.read(f"{prefix}._target_", "")).endswith("MultiscaleLossWrapper"):
        if (
            config.read(f"{prefix}.multiscale_config")
            or len(config.read(f"{prefix}.weights", [])) > 1
        ):
            config.remark(
                f"{prefix}.multiscale_config",
                "no counterpart: the score is that of all points; loss.sphere_spectrum adds an "
                "error of spectra",
            )
        prefix = f"{prefix}.per_scale_loss"
    target = str(config.read(f"{prefix}._target_", "MSELoss"))
    word = re.sub(r"^weighted|loss$", "", target.rpartition(".")[2].lower())
    members, members_key = _read_members(config)
    if word in ENSEMBLE_LOSSES and members > 1:
        key, default = ENSEMBLE_LOSSES[word]
        experiment.choices["loss"] = "crps"
        experiment.set("loss.alpha", float(config.number(f"{prefix}.{key}", default)))
        experiment.set("trainer.members", members)
        experiment.set("model.noise", NOISE)
        config.remark(
            members_key,
            f"differs: trainer.members={members} of all GPUs of an ensemble, which differ in "
            f"model.noise={NOISE} after norms",
        )
    else:
        name = LOSSES.get(word, "mse")
        experiment.choices["loss"] = name
        experiment.keys.pop("parallel.ensemble", None)
        if word not in LOSSES:
            config.remark(f"{prefix}._target_", "no counterpart: loss=mse; a plug-in can have it")
        if members > 1:
            config.remark(members_key, f"no counterpart: loss={name} scores no members")
    scalers = config.names(_first_of(config, f"{prefix}.scalers", f"{prefix}.scalars"))

    def uses(name: str) -> bool:
        chosen = any(fnmatch(name, each) for each in scalers if not each.startswith("!"))
        return chosen and f"!{name}" not in scalers

    known = ("node_weights", "pressure_level", "general_variable", "stdev_tendency", "variable")
    # Earlier configs without a list use weights of nodes and variables.
    experiment.set("loss.latitude_weight", uses("node_weights") or not scalers)
    tendency = next((x for x in ("var_tendency", "stdev_tendency") if uses(x)), None)
    experiment.set("loss.tendency", tendency is not None)
    # No key switches these off here: `REASONS` says why.
    built_in = ("time_steps", "nan_mask_weights", "*")
    others = [name for name in scalers if name not in (*known, "var_tendency", *built_in)]
    notes = [f"no counterpart: {', '.join(others)}"] if others else []
    # Their scaler multiplies the error. Here differences are divided, and then squared or not.
    is_squared = experiment.choices["loss"] in ("mse", "huber")
    if tendency and is_squared != (tendency == "var_tendency"):
        notes.append("loss.tendency divides differences by the standard deviation of tendencies")
    table = f"training.scalers.{DATA}"
    table = table if config.has(table) else "training.scalers"
    for name in (*known, "var_tendency"):
        config.read(f"{table}.{name}._target_")
    weights_key = _first_of(config, f"{table}.general_variable.weights",
                            "training.variable_loss_scaling")  # fmt: skip
    weights: dict[str, float] = {}
    if uses("general_variable") or uses("variable") or not scalers:
        weights = _read_variable_weights(config, weights_key, outputs)
    elif config.has(weights_key):
        config.remark(weights_key, "no counterpart: the loss does not use these weights")
    if uses("pressure_level") or (
        uses("variable") and config.has("training.pressure_level_scaler")
    ):
        level_weight = _read_level_weight(config, table)
        if level_weight is None:
            experiment.set("loss.level_weight", True)
            notes.append("level weights are proportional to pressure")
        else:
            weights = _with_levels(config, experiment, weights, level_weight)
    experiment.set("loss.variable_weight", weights or None)
    if notes:
        config.remark(f"{prefix}.scalers", f"differs: {'; '.join(notes)}")


def _read_members(config: ForeignConfig) -> tuple[int, str]:
    """Return the number of members of a sample, on all GPUs of its ensemble, and its key."""
    _, per_model, per_ensemble = _read_hardware(config)
    key = "training.ensemble_size_per_device"
    return config.whole(key, 1) * per_ensemble // per_model, key


def _read_transport(config: ForeignConfig, experiment: Experiment) -> None:
    """Read a diffusion model: its noise levels, and how it samples."""
    prefix = "training.transport"
    if not config.has(prefix):
        return
    objective = config.read(f"{prefix}.objective", "edm_diffusion")
    if objective != "edm_diffusion":
        config.remark(f"{prefix}.objective", "no counterpart: a forecast without diffusion")
        return
    experiment.choices["model"] = "diffusion"
    of_tendency = config.read(f"{prefix}.prediction_mode", "state") == "tendency"
    experiment.set("model.residual", of_tendency)
    experiment.set("loss.tendency", of_tendency)
    model = "model.model.transport"
    for key in ("sigma_data", "sigma_min", "sigma_max", "rho"):
        value = config.number(f"{model}.{key}")
        experiment.set(f"model.{key}", config.number(f"{model}.training_condition.{key}", value))
    experiment.set("model.noise", config.whole(f"{model}.noise_channels"))
    sampling = f"{model}.inference_defaults.sampling_schedule"
    experiment.set("model.sampling_steps", config.whole(f"{sampling}.num_steps"))
    for key in ("sigma_min", "sigma_max", "rho"):
        value = config.number(f"{sampling}.{key}")
        if value not in (None, experiment.keys.get(f"model.{key}")):
            config.remark(f"{sampling}.{key}", f"differs: give model.{key} to credit-dp forecast")
    sampler = f"{model}.inference_defaults.sampler.sampler"
    if config.read(sampler, "heun") != "heun":
        config.remark(sampler, "no counterpart: the method of Heun")
    config.read(f"{model}.objective")
    distribution = f"{model}.training_condition.distribution"
    if config.read(distribution, "karras") != "karras":
        config.remark(distribution, "no counterpart: levels are even on the sampler's scale")


def _read_level_weight(config: ForeignConfig, table: str) -> Callable[[int], float] | None:
    """Return the weight of a level in hPa; None if the config has no table of it."""
    prefix = _first_of(config, f"{table}.pressure_level", "training.pressure_level_scaler")
    if not config.has(prefix):
        return None
    kind = str(config.read(f"{prefix}._target_", "")).rpartition(".")[2]
    lowest = config.number(_first_of(config, f"{prefix}.y_intercept", f"{prefix}.minimum"), 0.0)
    slope = config.number(f"{prefix}.slope", 0.001)
    config.read(f"{prefix}.norm")  # divides all weights by one number
    config.read(f"{prefix}.group")
    if kind.startswith("Relu"):
        return lambda level: max(lowest, slope * level)
    if kind.startswith("Linear"):
        return lambda level: lowest + slope * level
    if kind.startswith("Polynomial"):
        return lambda level: float((slope * level) ** 2 + lowest)
    if not kind.startswith("No"):
        config.remark(f"{prefix}._target_", "no counterpart: levels weigh alike")
    return lambda level: 1.0


def _with_levels(
    config: ForeignConfig,
    experiment: Experiment,
    weights: Mapping[str, float],
    level_weight: Callable[[int], float],
) -> dict[str, float]:
    """Return weights with those of each channel, of the group of variables that has level weights.

    Args:
        weights: of variables.
        level_weight: of a level in hPa.
    """
    prefix = f"training.variable_groups.{DATA}"
    prefix = prefix if config.has(prefix) else "training.variable_groups"
    key = _first_of(config, f"{prefix}.pl.param", f"{prefix}.pl")
    group = config.names(key) if config.has(key) else []
    config.read(f"{prefix}.default")
    levels: Sequence[int] = experiment.keys.get("data.levels") or ()
    found = dict(weights)
    for name in (*experiment.keys["data.prognostic"], *experiment.keys["data.diagnostic"]):
        long, level = long_name(name)
        if level is None and not (levels and name in UPPER_AIR_NAMES.values()):
            continue
        if group and not any(UPPER_AIR_NAMES.get(each, each) == long for each in group):
            continue
        weight = found.pop(name, 1.0)
        of_variable = {name: level} if level is not None else {f"{name}_{x}": x for x in levels}
        for channel, pressure in of_variable.items():
            found[channel] = float(f"{weight * level_weight(pressure):.12g}")
    return found


def _read_variable_weights(
    config: ForeignConfig, key: str, outputs: Sequence[str]
) -> dict[str, float]:
    """Return the weights of variables that are not 1."""
    given = config.read(key, {})
    if not isinstance(given, dict):
        raise config.error(key, "a table of weights", given)
    flat: dict[str, Any] = {}
    for name, value in given.items():  # groups pl and sfc of earlier configs
        flat |= value if isinstance(value, dict) else {name: value}
    default = float(flat.pop("default", 1))
    weights = dict.fromkeys(outputs, default) if default != 1 else {}
    for name, value in flat.items():
        names = _same_variable(str(name), outputs)
        weights |= dict.fromkeys(names, float(value))
        if not names:
            config.remark(f"{key}.{name}", "no counterpart: the dataset has no such output")
    return weights
