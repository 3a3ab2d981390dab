"""Translates a config of miles-credit, and takes the weights of its checkpoint.

Both forms of its data section are read: the flat one with `data.variables` and `data.save_loc`, and
the one with `data.source`. `read_credit` reads section after section; what it does not read becomes
a line.

Source: config/example-v2026.1.0.yml and config/gen_2/examples of github.com/NCAR/miles-credit; the
models are those of Schreck et al. 2024 (arXiv:2411.07814).
"""

import pickle
import re
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.config import has_variable
from credit_dp.config.model import BUDGETS
from credit_dp.errors import UserError, first_line
from credit_dp.files import atomic_path
from credit_dp.miles_credit import model_plugin
from credit_dp.miles_credit.foreign_config import Experiment, ForeignConfig, Reasons
from credit_dp.plugins import one_line_message
from credit_dp.variable_names import canonical_name

if TYPE_CHECKING:
    from torch import Tensor

CROSSFORMERS = ("crossformer", "wxformer", "wxformer_base")
# Models of miles-credit on one tensor, (B, channels, frames, rows, columns).
MODELS = (*CROSSFORMERS, "camulator", "fuxi", "swin", "unet", "nextgen_wxformer", "debugger")
LOSSES = ("mse", "mae", "huber")
ENSEMBLE_LOSSES = ("kcrps", "almost-fair-crps", "ring-crps")
# Fixers of budgets in miles-credit, and their counterparts in this package.
FIXERS = {
    "global_mass_fixer": "dry_air",
    "global_water_fixer": "water",
    "global_energy_fixer": "energy",
}
NOISE = 32  # numbers of a member, where theirs has its noise elsewhere
# Stores of WeatherBench 2, by the key `resolution`.
WEATHERBENCH2 = {
    "64x32": "1959-2023_01_10-6h-64x32_equiangular_conservative",
    "240x121": "1959-2023_01_10-6h-240x121_equiangular_with_poles_conservative",
    "1440x721": "1959-2023_01_10-wb13-6h-1440x721_with_derived_variables",
}
ARCO = "gs://gcp-public-data-arco-era5/ar/full_37-1h-0p25deg-chunk-1.zarr-v3"
PATH_KEYS = ("", "_surface", "_diagnostic", "_dynamic_forcing", "_static")
_ROLLOUT = (
    "the errors of all steps of a rollout count, and their gradients flow through all of them"
)
_RESUME = "resume=auto continues a run, init_from=RUN starts from its weights"
_FORECAST = "credit-dp forecast and credit-dp evaluate have keys of their own"
_CODE = "code that a config names is never imported; a plug-in file can have it"
_AFTER = "of what comes after the model, only fixers are imported"

REASONS: Reasons = {
    "save_loc": "run.name or run.dir chooses the folder of a run",
    "pbs": "credit-dp cluster script writes batch scripts",
    "predict": _FORECAST,
    "inference": _FORECAST,
    "use_ptype": _FORECAST,
    "ptype": _FORECAST,
    "custom_models": _CODE,
    "custom_objects": _CODE,
    "postblocks": _AFTER,
    "preblocks": "fields are normalised by data.statistics, or by those of the training dates",
    "visualization": "credit-dp evaluate draws plots",
    "diagnostics": "credit-dp evaluate computes scores",
    "metrics": "credit-dp evaluate computes scores",
    "model": "the model of this package has no such key",
    "data.data_clamp": "values beyond data.limits are refused",
    "loss.spectral_lambda_reg": "loss.spectrum weighs zonal spectra",
    "loss.spectral_wavenum_init": "loss.spectrum weighs zonal spectra",
    "trainer.teacher_forcing_ratio": "a rollout continues from its own states",
    "validation_data": "validation reads the same variables and stores as training",
    "data.save_loc_physics": _AFTER,
    "data.one_shot": _ROLLOUT,
    "data.backprop_on_timestep": _ROLLOUT,
    "data.retain_graph": _ROLLOUT,
    "data.dataset_type": "the form of a store is seen when it is opened",
    "data.valid_forecast_len": "validation goes to the first lead time of trainer.evaluate_hours",
    "data.valid_history_len": "validation has as many frames as training",
    "data.forcing_variables": "a year that repeats can't be read; give a store with all times",
    "data.save_loc_forcing": "a year that repeats can't be read; give a store with all times",
    "data.level_ids": "levels are those of the stores, in rising order; data.levels chooses some",
    "data.static_first": "the order of input channels is forcing, then static",
    "model.post_conf": _AFTER,
    "model.interp": "the output is cropped to the grid, not interpolated",
    "model.decoder_attention_type": "the decoder has no attention",
    "model.attention_type": "the decoder has no attention",
    "model.upsample_v_conv": "the decoder is a convolution and a pixel shuffle",
    "model.upsample_with_ps": "the decoder is a convolution and a pixel shuffle",
    "trainer.type": "there is one trainer",
    "trainer.load_weights": _RESUME,
    "trainer.load_optimizer": _RESUME,
    "trainer.load_scaler": _RESUME,
    "trainer.load_scheduler": _RESUME,
    "trainer.load_sheduler": _RESUME,
    "trainer.reload_epoch": _RESUME,
    "trainer.start_epoch": _RESUME,
    "trainer.num_epoch": "a job trains until its time is over, and resume=auto continues",
    "trainer.train_one_epoch": "a job trains until its time is over, and resume=auto continues",
    "trainer.stopping_patience": "trainer.patience counts validations, of which there are none",
    "trainer.save_backup_weights": "trainer.keep_checkpoints keeps several",
    "trainer.save_metric_vars": "the log has the loss of each field",
    "trainer.update_learning_rate": "the learning rate follows optimizer.schedule",
    "trainer.valid_batch_size": "validation forecasts one date after the other",
    "trainer.valid_batches_per_epoch": "validation forecasts from up to eight dates",
    "trainer.valid_thread_workers": "data.workers read for both",
    "trainer.checkpoint_all_layers": "blocks of the model or forecast steps are recomputed",
    "trainer.parallelism.tensor": "parallel.domain shards fields, parallel.data_mode=fsdp2 weights",
    "loss.validation_loss": "validation_rmse is the error of validation",
    "loss.latitude_weights": "weights of rows are computed from the latitudes",
    "loss.args.latitude_weights": "weights of rows are computed from the latitudes",
    "loss.args.var_weighting": "errors are of normalised fields",
    "loss.var_weighting": "errors are of normalised fields",
}


@dataclass
class Roles:
    """The variables of a config by role; those on levels come first in each list."""

    on_levels: list[str] = field(default_factory=list)
    prognostic: list[str] = field(default_factory=list)
    diagnostic: list[str] = field(default_factory=list)
    forcing: list[str] = field(default_factory=list)
    static: list[str] = field(default_factory=list)
    # numbers of variables on levels that are not prognostic
    diagnostic_on_levels: int = 0
    inputs_on_levels: int = 0


def read_credit(
    config: ForeignConfig, name: str, checkpoint: str | None
) -> tuple[Experiment, list[str]]:
    """Return the experiment of a config of miles-credit, and a line for each other key.

    The experiment has a name, which its file of weights gets. A checkpoint is a file with weights,
    or the folder that has it; without one the model starts anew.

    Raises:
        UserError: a value can't be used, or the checkpoint can't be read.
    """
    experiment = Experiment({"data": "zarr", "optimizer": "adamw"})
    experiment.set("seed", config.whole("seed"))
    nested = config.has("data.source")
    roles = _read_sources(config, experiment) if nested else _read_flat_data(config, experiment)
    if not roles.prognostic:
        raise UserError(
            f"{config.path}: data: needs prognostic variables, in data.variables or data.source, "
            "got none."
        )
    for role in ("prognostic", "diagnostic", "forcing", "static"):
        experiment.set(f"data.{role}", getattr(roles, role))
    _read_time(config, experiment, nested)
    _read_trainer(config, experiment)
    if nested:
        _read_scalers(config, experiment, roles)
    _read_model(config, experiment, roles, nested, checkpoint, name)
    _read_loss(config, experiment, roles)
    _read_fixers(config, experiment, roles)
    return experiment, config.lines(REASONS)


def _read_flat_data(config: ForeignConfig, experiment: Experiment) -> Roles:
    """Read the data section with one list of variables and one path for each kind."""
    on_levels = config.names("data.variables")
    roles = Roles(
        on_levels,
        [*on_levels, *config.names("data.surface_variables")],
        config.names("data.diagnostic_variables"),
        config.names("data.dynamic_forcing_variables"),
        config.names("data.static_variables"),
    )
    stores = config.paths(*(f"data.save_loc{kind}" for kind in PATH_KEYS))
    if not stores:
        raise UserError(f"{config.path}: data.save_loc: needs the path of the data, got none.")
    experiment.set("data.store", stores)
    options: dict[str, dict[str, Any]] = {}
    scaler = config.read("data.scaler_type", "std_new")
    means, stds = config.paths("data.mean_path"), config.paths("data.std_path")
    if scaler == "std_cached":  # the stores hold normalised fields
        timed = (*roles.prognostic, *roles.diagnostic, *roles.forcing)
        options |= {name: {"normalise": "none"} for name in timed}
    else:
        if scaler not in ("std_new", "std"):
            config.remark("data.scaler_type", "no counterpart: means and standard deviations do it")
        if means and stds:
            experiment.set("data.statistics", [*means, *stds])
    for name in (*roles.diagnostic, *roles.forcing):  # never added up over a step, by any name
        options.setdefault(name, {})["accumulated"] = False
    # Static fields are normalised by the user, in their store, so that no limits fit them.
    options |= {name: {"normalise": "none"} for name in roles.static}
    normalised = [name for name in options if options[name].get("normalise") == "none"]
    experiment.set("data.variables", options)
    experiment.set("data.limits", dict.fromkeys(normalised))
    return roles


def _read_sources(config: ForeignConfig, experiment: Experiment) -> Roles:
    """Read the data section with sources, each with its variables by role and their paths."""
    roles = Roles()
    stores: list[str] = []
    sources = config.tree["data"]["source"]
    if not isinstance(sources, dict) or not sources:
        raise config.error("data.source", "a table of sources", sources)
    for source in sources:
        prefix = f"data.source.{source}"
        if "." in str(source):
            raise config.error("data.source", "names of sources without a dot", source)
        kind = str(config.read(f"{prefix}.dataset_type", "local"))
        if kind == "weatherbench2_era5":
            resolution = str(config.read(f"{prefix}.resolution", "240x121"))
            checks.one_of(f"{config.path}: {prefix}.resolution", resolution, tuple(WEATHERBENCH2))
            stores.append(f"gs://weatherbench2/datasets/era5/{WEATHERBENCH2[resolution]}.zarr")
        elif kind.startswith("arco"):
            stores.append(ARCO)
        elif kind != "local":
            config.remark(f"{prefix}.dataset_type", "no counterpart: set data.store to its data")
        levels = config.read(f"{prefix}.levels")
        if levels:
            if not isinstance(levels, list) or any(level != int(level) for level in levels):
                raise config.error(f"{prefix}.levels", "a list of whole numbers", levels)
            experiment.set("data.levels", [int(level) for level in levels])
        config.read(f"{prefix}.level_coord")
        for theirs, ours in (
            ("prognostic", roles.prognostic),
            ("diagnostic", roles.diagnostic),
            ("dynamic_forcing", roles.forcing),
            ("static", roles.static),
        ):
            group = f"{prefix}.variables.{theirs}"
            upper = config.names(f"{group}.vars_3D")
            names = [*upper, *config.names(f"{group}.vars_2D")]
            if shared := [name for name in names if name in ours]:
                raise config.error(group, "names that no other source has", shared[0])
            ours += names
            if theirs == "prognostic":
                roles.on_levels += upper
            elif theirs == "diagnostic":
                roles.diagnostic_on_levels += len(upper)
            else:
                roles.inputs_on_levels += len(upper)
            # Dates in the names of files, as in era5_%Y.zarr: all files are one store.
            stores += [
                re.sub(r"(%[A-Za-z]|\*)+", "*", path) for path in config.paths(f"{group}.path")
            ]
    experiment.set("data.store", list(dict.fromkeys(stores)) or None)
    if not stores:
        raise UserError(
            f"{config.path}: data.source: needs the path of the data, got none. Add one, or set "
            "data.store in the experiment."
        )
    options = {name: {"accumulated": False} for name in (*roles.diagnostic, *roles.forcing)}
    experiment.set("data.variables", options or None)
    return roles


def _read_time(config: ForeignConfig, experiment: Experiment, nested: bool) -> None:
    """Read the time step, the dates of the splits, frames and rollouts."""
    if nested:
        step = str(config.read("data.timestep", "6h")).replace(" ", "").lower()
        config.read("data.lead_time_periods")
        for split, section in (("train", "data"), ("valid", "validation_data")):
            first = config.read(f"{section}.start_datetime")
            last = config.read(f"{section}.end_datetime")
            if first is not None and last is not None:
                experiment.set(f"data.dates.{split}", [_date_text(first), _date_text(last)])
        _pass_over_equal(config, "validation_data", "data")
        rollout = config.whole("data.forecast_len", 1)
    else:
        step = f"{config.whole('data.lead_time_periods', 6)}h"
        for split, key in (("train", "data.train_years"), ("valid", "data.valid_years")):
            years = config.read(key)
            if years is None:
                continue
            numbers = isinstance(years, list) and all(isinstance(year, int) for year in years)
            if not numbers or len(years) != 2:
                raise config.error(key, "[first year, year after the last]", years)
            experiment.set(f"data.dates.{split}", [f"{years[0]}-01-01", f"{years[1] - 1}-12-31"])
        rollout = config.whole("data.forecast_len", 0) + 1
    experiment.set("data.step", step)
    if config.whole("data.skip_periods", 1) != 1:
        config.remark("data.skip_periods", f"differs: data.step={step} is a step of the model")
    steps = int(re.sub(r"\D", "", step) or 6) * (24 if step.endswith("d") else 1)
    experiment.set("trainer.evaluate_hours", [steps, 4 * steps])
    history = config.whole("data.history_len", 1)
    experiment.set("model.frames", history)
    if config.has("data.valid_history_len") and config.tree["data"]["valid_history_len"] == history:
        config.read("data.valid_history_len")
    if rollout < 1:
        raise config.error(
            "data.forecast_len", "a number of steps", config.read("data.forecast_len")
        )
    experiment.set("trainer.rollout", {0: rollout})


def _date_text(value: object) -> str:
    """Return a date as this package writes it: `2018-12-31 18:00:00` is 2018-12-31T18:00."""
    text = str(value).strip().replace(" ", "T")
    return re.sub(r"(T\d\d:\d\d):00$", r"\1", text)


def _pass_over_equal(config: ForeignConfig, section: str, like: str) -> None:
    """Count keys of one section as read if they have the same values as in another one."""

    def walk(prefix: str, value: object, other: object) -> None:
        if isinstance(value, dict) and isinstance(other, dict):
            for name, entry in value.items():
                walk(f"{prefix}.{name}", entry, other.get(name))
        elif value == other:
            config.read(prefix)

    walk(section, config.tree.get(section), config.tree.get(like))


def _read_trainer(config: ForeignConfig, experiment: Experiment) -> None:
    """Read the length of training, the batch, the learning rate and the mesh."""
    epochs = config.whole("trainer.epochs")
    batches = config.whole("trainer.batches_per_epoch", 0)
    validates = not config.read("trainer.skip_validation", False)
    if epochs and batches:
        experiment.set("trainer.steps", epochs * batches)
        experiment.set("trainer.checkpoint_every", batches)
        experiment.set("trainer.validate_every", batches if validates else 0)
        if validates:  # once in an epoch, in which their patience counts
            experiment.set("trainer.patience", config.whole("trainer.stopping_patience"))
    elif epochs:
        config.remark("trainer.epochs", "no counterpart: training has trainer.steps; set it")
    # Their best weights have the lowest error of a validation, so need validations.
    if config.read("trainer.save_best_weights", False) and epochs and batches and validates:
        experiment.set("trainer.keep_best", True)
    batch = config.whole("trainer.train_batch_size")
    experiment.set("data.batch_size", batch)
    if batch is not None:
        config.remark(
            "trainer.train_batch_size", "differs: data.batch_size is of all GPUs, not of each"
        )
    experiment.set("data.workers", config.whole("trainer.thread_workers") or None)
    experiment.set("data.prefetch", config.whole("trainer.prefetch_factor"))
    experiment.set("optimizer.weight_decay", config.number("trainer.weight_decay"))
    experiment.set("optimizer.betas", [0.9, 0.95])
    clip = config.read("trainer.grad_max_norm", "dynamic")
    if clip == "dynamic" and "gen2" not in str(config.tree.get("trainer", {}).get("type", "")):
        config.remark(
            "trainer.grad_max_norm",
            "differs: nothing is clipped; their first trainer clips to the root of the norm",
        )
    # `dynamic` clips to the norm that the gradient has, and 0 does not clip: both change nothing.
    experiment.keys["trainer.gradient_clip"] = (
        None if clip in ("dynamic", 0) else config.number("trainer.grad_max_norm")
    )
    if config.whole("trainer.grad_accum_every", 1) != 1:
        config.remark(
            "trainer.grad_accum_every", "differs: trainer.accumulate splits a batch into parts"
        )
    if config.read("trainer.amp", False):
        experiment.set("trainer.autocast", "bfloat16")
        config.remark(
            "trainer.amp", "differs: trainer.autocast is bfloat16, which needs no scaling"
        )
    if config.read("trainer.compile", False):
        experiment.set("compile", True)
    decay = config.number("trainer.ema_decay", 0.9999)
    if config.read("trainer.use_ema", False):
        experiment.set("optimizer.ema", decay)
    if config.read("trainer.use_tensorboard", False):
        experiment.set("logger.trackers", ["tensorboard"])
    _read_mesh(config, experiment)
    _read_schedule(config, experiment, epochs, batches)


def _read_mesh(config: ForeignConfig, experiment: Experiment) -> None:
    key = "trainer.parallelism.data" if config.has("trainer.parallelism") else "trainer.mode"
    mode = config.read(key, "none")
    mode = "none" if mode is False else str(mode)  # YAML reads `no` as false
    if mode not in ("none", "ddp", "fsdp", "fsdp2"):
        config.remark(key, "no counterpart: parallel has the axes of the mesh")
    sharded = mode.startswith("fsdp")
    experiment.set("parallel.data_mode", "fsdp2" if sharded else None)
    domain = config.whole("trainer.parallelism.domain", 1)
    experiment.set("parallel.domain", domain if domain != 1 else None)
    if config.whole("trainer.parallelism.tensor", 1) != 1:
        config.remark(
            "trainer.parallelism.tensor", f"no counterpart: {REASONS['trainer.parallelism.tensor']}"
        )
    if config.read("trainer.cpu_offload", False):
        experiment.set("parallel.cpu_offload", True if sharded else None)
    for kind in ("param", "reduce", "buffer"):
        key = f"trainer.mixed_precision.{kind}_dtype"
        dtype = config.read(key, "float32")
        if dtype == "float32":
            continue
        if sharded and kind != "buffer":
            experiment.set(f"parallel.{kind}_dtype", dtype)
        else:
            config.remark(key, "no counterpart: fsdp2 has types of parameters and of gradients")


def _read_schedule(
    config: ForeignConfig, experiment: Experiment, epochs: int | None, batches: int
) -> None:
    prefix = "trainer.scheduler"
    lr = config.number("trainer.learning_rate")
    kind = config.read(f"{prefix}.scheduler_type", "none")
    if not config.read("trainer.use_scheduler", config.has(prefix)):
        kind = "none"
    warmup, final = 0, 0.0
    steps = experiment.keys.get("trainer.steps")
    if kind == "cosine-annealing":
        final = config.number(f"{prefix}.eta_min", 0.0)
        if epochs is not None and config.whole(f"{prefix}.T_max", epochs) != epochs:
            config.remark(f"{prefix}.T_max", "differs: the cosine ends at trainer.steps")
        config.read(f"{prefix}.last_epoch")
    elif kind == "linear-warmup-cosine":
        warmup = config.whole(f"{prefix}.warmup_steps", 1000)
        final = config.number(f"{prefix}.min_lr", 1e-5)
        if config.whole(f"{prefix}.total_steps", 500_000) != steps:
            config.remark(f"{prefix}.total_steps", "differs: the cosine ends at trainer.steps")
    elif kind == "cosine-annealing-restarts":
        warmup = config.whole(f"{prefix}.warmup_steps", 0)
        final = config.number(f"{prefix}.min_lr", 0.001)
        lr = config.number(f"{prefix}.max_lr", lr)  # its own rate, whatever the optimizer's is
        for key in ("first_cycle_steps", "cycle_mult", "gamma"):
            if config.has(f"{prefix}.{key}"):
                config.remark(f"{prefix}.{key}", "no counterpart: the cosine does not restart")
    elif kind == "lambda":  # a tenth of 100 epochs of warm-up, then a cosine to zero
        warmup = 10 * batches
        if epochs != 100:
            config.remark(
                f"{prefix}.scheduler_type", "differs: the cosine ends at trainer.steps, not at 100"
            )
    elif kind != "none":
        config.remark(f"{prefix}.scheduler_type", "no counterpart: the learning rate is constant")
    experiment.set("optimizer.lr", lr)
    cosine = kind in ("cosine-annealing", "linear-warmup-cosine", "cosine-annealing-restarts")
    experiment.set("optimizer.schedule", "cosine" if cosine or kind == "lambda" else "constant")
    experiment.set("optimizer.warmup_steps", warmup)
    experiment.set("optimizer.final_lr", final)


def _read_loss(config: ForeignConfig, experiment: Experiment, roles: Roles) -> None:
    outputs = [*roles.prognostic, *roles.diagnostic]
    args = "loss.args" if config.has("loss.args") else "loss"
    named = config.read("loss.type", "base") if args == "loss.args" else "base"
    # Errors of normalised fields: the outputs are the next state, not its tendency.
    experiment.set("loss.tendency", False)
    kind = config.read(f"{args}.training_loss", "mse")
    kind = str(kind if named == "base" else named)
    members = config.whole("trainer.ensemble_size", 1)
    if kind in LOSSES:
        experiment.choices["loss"] = kind
        if members > 1:
            config.remark("trainer.ensemble_size", f"no counterpart: loss={kind} scores no members")
    elif kind.lower() in ENSEMBLE_LOSSES and members > 1:
        _read_ensemble(config, experiment, members)
    else:
        experiment.choices["loss"] = "mse"
        config.remark(f"{args}.training_loss", "no counterpart: loss=mse; a plug-in can have it")
    weighted = bool(config.read(f"{args}.use_latitude_weights", False))
    experiment.set("loss.latitude_weight", weighted)
    if weighted:
        config.remark(
            f"{args}.use_latitude_weights", "differs: a row weighs its area, not the cosine"
        )
    key = f"{args}.variable_weights"
    used = config.read(f"{args}.use_variable_weights", args == "loss.args")
    weights = config.read(key, {})
    if not isinstance(weights, dict):
        raise config.error(key, "a table of weights", weights)
    plain = {}
    levels = _levels(config, experiment)
    for name, given in weights.items():
        values = given if isinstance(given, list) else [given]
        variable = str(name).rpartition("/")[2]  # SOURCE/prognostic/2d/NAME, or NAME
        if variable not in outputs:
            config.remark(f"{key}.{name}", "no counterpart: no output variable has this name")
        elif not used:
            config.remark(f"{key}.{name}", "no counterpart: switched off by use_variable_weights")
        elif len({float(value) for value in values}) == 1:
            plain[variable] = float(values[0])
        elif variable in roles.on_levels and len(values) == len(levels):
            pairs = zip(levels, values, strict=True)
            plain |= {f"{variable}_{level}": float(value) for level, value in pairs}
        else:
            config.remark(
                f"{key}.{name}",
                f"no counterpart: {len(values)} weights for {len(levels)} known levels",
            )
    if plain:
        experiment.set("loss.variable_weight", plain)
    for name in ("use_power_loss", "use_spectral_loss"):
        if config.read(f"{args}.{name}", False):
            config.remark(f"{args}.{name}", "no counterpart: loss.spectrum weighs zonal spectra")


def _levels(config: ForeignConfig, experiment: Experiment) -> list[int]:
    """Return the levels of variables in the order of the config; empty if it has none."""
    given = experiment.keys.get("data.levels") or config.tree["data"].get("level_ids") or []
    numbers = given if isinstance(given, list) else []
    is_whole = all(isinstance(level, int | float) and level == int(level) for level in numbers)
    return [int(level) for level in numbers] if is_whole else []


def _read_fixers(config: ForeignConfig, experiment: Experiment, roles: Roles) -> None:
    """Read what corrects the fields after the model: tracers, and budgets of air."""
    step = int(re.sub(r"\D", "", experiment.keys["data.step"]))
    outputs = [*roles.prognostic, *roles.diagnostic]
    fixers: list[str] = []
    for kind, key in _fixer_blocks(config):
        if kind == "tracer_fixer":
            fixers += _read_tracers(config, experiment, key, outputs)
            continue
        fixer = FIXERS[kind]
        needs = BUDGETS[fixer]
        lists = [(roles.prognostic, needs.state), (outputs, needs.fluxes)]
        lists.append((roles.static, needs.static))
        missing = [
            name
            for names, needed in lists
            for name in needed
            if not has_variable(names, name, step)
        ]
        if missing:
            config.remark(
                key, f"no counterpart: model.fixers: {fixer} needs {', '.join(missing)} of ERA5"
            )
            continue
        fixers.append(fixer)
        if fixer == "dry_air":
            config.remark(
                key,
                "differs: adds the same pressure everywhere, where miles-credit multiplies it",
            )
        if config.has(f"{key}.midpoint") and not config.read(f"{key}.midpoint"):
            config.remark(f"{key}.midpoint", "differs: a layer has the values of its level")
        if config.read(f"{key}.grid_type", "sigma") == "sigma":
            _read_hybrid(config, experiment, key)
        # The data have sums over their step, as a budget needs them.
        for name in outputs:
            options = experiment.keys["data.variables"].get(name, {})
            if canonical_name(name) in needs.fluxes:
                options.pop("accumulated", None)
        config.read(key)
    experiment.set("model.fixers", list(dict.fromkeys(fixers)) or None)


def _fixer_blocks(config: ForeignConfig) -> list[tuple[str, str]]:
    """Return kind and key of each fixer that is switched on, in the order in which they act."""
    found = []
    post = "model.post_conf"
    blocks = config.tree.get("model", {}).get("post_conf")
    if isinstance(blocks, dict):
        is_on = bool(config.read(f"{post}.activate", False))
        for kind in ("tracer_fixer", *FIXERS):
            if is_on and config.read(f"{post}.{kind}.activate", False):
                found.append((kind, f"{post}.{kind}"))
        for name, block in blocks.items():  # what is switched off needs no line
            if not is_on or (isinstance(block, dict) and not block.get("activate", True)):
                config.read(f"{post}.{name}")
    steps = config.tree.get("postblocks")
    per_step = steps.get("per_step") if isinstance(steps, dict) else None
    for name, block in (per_step or {}).items():
        block_type = str(block.get("type")) if isinstance(block, dict) else ""
        if block_type == "tracer_fixer" or block_type in FIXERS:
            config.read(f"postblocks.per_step.{name}.type")
            found.append((block_type, f"postblocks.per_step.{name}.args"))
    return found


def _read_tracers(
    config: ForeignConfig, experiment: Experiment, key: str, outputs: list[str]
) -> list[str]:
    """Read the limits of tracers; return the fixers that keep them."""
    given = config.names(f"{key}.tracer_name") or config.names(f"{key}.tracer_vars")
    names = [name.rpartition("/")[2] for name in given]

    def limits(end: str) -> list[Any]:
        value = config.read(f"{key}.{end}")
        values = value if isinstance(value, list) else [value] * len(names)
        if len(values) != len(names):
            raise config.error(f"{key}.{end}", f"{len(names)} limits, as names", value)
        return values

    fixers = []
    options = experiment.keys["data.variables"]
    for name, low, high in zip(
        names, limits("tracer_thres"), limits("tracer_thres_max"), strict=True
    ):
        if name not in outputs:
            config.remark(f"{key}.tracer_name", f"no counterpart: {name} is no output variable")
        elif high is not None:
            experiment.keys.setdefault("model.bounds", {})[name] = [float(low or 0), float(high)]
            fixers.append("bounds")
        elif not low:
            options.setdefault(name, {})["nonnegative"] = True
            fixers.append("nonnegative")
        else:
            config.remark(
                f"{key}.tracer_thres", f"no counterpart: {name} needs both limits, in model.bounds"
            )
    config.read(key)
    return fixers


def _read_hybrid(config: ForeignConfig, experiment: Experiment, key: str) -> None:
    """Read the coefficients of model levels from the file that the config names, if it is there."""
    names = config.names(f"{key}.lon_lat_level_name")[2:]
    own = f"{key}.save_loc_physics"
    where = own if config.has(own) else "data.save_loc_physics"
    paths = config.paths(where)
    if len(names) != 2 or len(paths) != 1 or not Path(paths[0]).exists():
        config.remark(
            where if config.has(where) else f"{key}.lon_lat_level_name",
            "no counterpart: set data.hybrid to the coefficients of the file",
        )
        return
    # Imported here because it takes a second, which --help does not need.
    import xarray as xr

    engine = "zarr" if Path(paths[0]).is_dir() else None
    try:
        with xr.open_dataset(paths[0], engine=engine) as data:
            found = {to: data[name].values.tolist() for to, name in zip("ab", names, strict=True)}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{config.path}: {where}: {paths[0]} can't be read ({one_line_message(error)})."
        ) from error
    experiment.set("data.hybrid", found)


def _read_ensemble(config: ForeignConfig, experiment: Experiment, members: int) -> None:
    """Read the loss of an ensemble: members of this package differ in the noise of its models."""
    if experiment.plugin:
        experiment.choices["loss"] = "mse"
        config.remark(
            "trainer.ensemble_size",
            "no counterpart: loss=mse, as members need a model of this package, which has "
            "model.noise",
        )
        return
    experiment.choices["loss"] = "crps"
    experiment.set("trainer.members", members)
    experiment.set("model.noise", NOISE)
    config.remark(
        "trainer.ensemble_size", f"differs: members differ in model.noise={NOISE} after norms"
    )


# The model


def _read_model(
    config: ForeignConfig,
    experiment: Experiment,
    roles: Roles,
    nested: bool,
    checkpoint: str | None,
    name: str,
) -> None:
    """Read the model: one of this package, or theirs in a plug-in file."""
    kind = config.read("model.type")
    known = isinstance(kind, str) and kind in MODELS
    if checkpoint is not None and not known:
        raise config.error("model.type", f"one of {', '.join(MODELS)}", kind)
    frames = experiment.keys["model.frames"]
    is_own = kind in CROSSFORMERS and checkpoint is None
    if config.has("model"):
        _check_channels(config, roles, is_theirs=known and frames == 1 and not is_own)
    height, width = (config.whole(f"model.image_{key}") for key in ("height", "width"))
    if height and width:
        experiment.set("data.grid", f"{height}x{width}")
    experiment.set("model.residual", False)  # theirs return the next state, normalised
    recomputes = bool(config.read("trainer.activation_checkpoint", False))
    if is_own:
        _read_crossformer(config, experiment, recomputes)
        return
    if checkpoint is not None and frames != 1:
        raise config.error("data.history_len", "1 for a model of miles-credit", frames)
    if not known or frames != 1:  # theirs would need the forcings of each frame
        experiment.choices["model"] = "unet"
        if kind is not None:
            config.remark(
                "model.type", "no counterpart: model=unet, or another one of this package"
            )
        return
    if checkpoint is not None and nested:
        _remark_scaler(config, len(config.tree["data"]["source"]))
    arguments = {k: v for k, v in config.read("model").items() if k != "type"}
    arguments.pop("post_conf", None)
    experiment.choices["model"] = "credit"
    experiment.keys["model.type"] = kind
    experiment.keys["model.arguments"] = arguments
    patches = max(arguments.get("patch_height", 1), arguments.get("patch_width", 1))
    if kind in CROSSFORMERS and patches == 1:
        # Without patches its first embedding computes nothing, and ddp needs each parameter that is
        # trained in the loss.
        experiment.set("trainer.freeze", ["model.cube_embedding.*"])
    static_first = bool(config.read("data.static_first", True))
    experiment.keys["model.static_channels"] = len(roles.static) if static_first else 0
    experiment.set("trainer.checkpoint_activations", recomputes or None)
    experiment.plugin = Path(model_plugin.__file__).read_text(encoding="utf-8")
    config.remark(
        "model.image_height",
        "differs: rows go from north to south; if theirs began in the south, set "
        "model.south_first=true",
    )
    if checkpoint is not None:
        path, tensors = read_weights(checkpoint)
        experiment.keys["model.weights"] = f"{name}.safetensors"
        experiment.write_weights = partial(_write_weights, path, tensors)


def _check_channels(config: ForeignConfig, roles: Roles, is_theirs: bool) -> None:
    """Compare a model's numbers of channels with those of the variables.

    Raises:
        UserError: they differ, and the model is theirs; one of this package follows the data.
    """
    forcing = config.names("data.forcing_variables") if config.has("data.forcing_variables") else []
    if forcing:
        config.remark(
            "data.forcing_variables", f"no counterpart: {REASONS['data.forcing_variables']}"
        )
    more = config.whole("model.levels", 1) - 1  # channels of a variable on levels beside the first
    inputs = len(roles.forcing) + len(roles.static) + len(forcing) + more * roles.inputs_on_levels
    outputs = len(roles.diagnostic) + more * roles.diagnostic_on_levels
    surface = len(roles.prognostic) - len(roles.on_levels)
    for key, count in (
        ("channels", len(roles.on_levels)),
        ("surface_channels", surface),
        ("input_only_channels", inputs),
        ("output_only_channels", outputs),
    ):
        given = config.whole(f"model.{key}", count)
        if given != count and is_theirs:
            raise config.error(f"model.{key}", f"{count}, as the variables have", given)
        if given != count:
            config.remark(f"model.{key}", f"differs: {count} channels, as the variables have")
    history = config.whole("data.history_len", 1)
    frames = config.whole("model.frames", history)
    if frames != history and is_theirs:
        raise config.error("model.frames", f"data.history_len ({history})", frames)
    if frames != history:
        config.remark("model.frames", f"differs: model.frames={history}, as data.history_len")


def _remark_scaler(config: ForeignConfig, sources: int) -> None:
    """Remark that the normalisation of the weights is not imported."""
    if sources > 1:
        raise config.error(
            "data.source", "one source, for the order of a model's channels", sources
        )
    for scaler in _scalers(config):
        config.remark(
            scaler,
            "differs: the weights expect fields that their scaler has normalised; give "
            "data.statistics with its means and standard deviations",
        )


def _scalers(config: ForeignConfig) -> dict[str, dict[str, Any]]:
    """Return the blocks before the model that normalise fields, by key; none counts as read."""
    steps = config.tree.get("preblocks")
    return {
        f"preblocks.{step}.{name}": block
        for step, blocks in (steps.items() if isinstance(steps, dict) else ())
        if isinstance(blocks, dict)
        for name, block in blocks.items()
        if isinstance(block, dict)
        and any(word in str(block.get("type")) for word in ("scaler", "normalizer"))
    }


def _read_scalers(config: ForeignConfig, experiment: Experiment, roles: Roles) -> None:
    """Read the means and standard deviations of scalers, and which fields they leave alone."""
    scaled: set[str] = set()
    for key, block in _scalers(config).items():
        if block["type"] == "era5_normalizer":
            config.read(f"{key}.type")
            means = config.paths(f"{key}.args.mean_path")
            stds = config.paths(f"{key}.args.std_path")
            if means and stds:
                experiment.set("data.statistics", [*means, *stds])
        args = block.get("args")
        names = args.get("variables") if isinstance(args, dict) else None
        if isinstance(names, list):  # of SOURCE/prognostic/2d/NAME, or NAME
            scaled |= {str(name).rpartition("/")[2] for name in names}
    fields = (*roles.prognostic, *roles.diagnostic, *roles.forcing, *roles.static)
    left = [name for name in fields if scaled and name not in scaled]
    options = experiment.keys.setdefault("data.variables", {})
    for name in left:
        options.setdefault(name, {})["normalise"] = "none"
    if left:
        experiment.set("data.limits", dict.fromkeys(left))


def _read_crossformer(config: ForeignConfig, experiment: Experiment, recomputes: bool) -> None:
    """Read the sizes of a CrossFormer, which becomes the one of this package."""
    widths = _per_level(config, "dim", 4, [64, 128, 256, 512])
    levels = len(widths)
    experiment.choices["model"] = "crossformer"
    experiment.set("model.channels", widths)
    experiment.set("model.groups", widths[0])
    experiment.set("model.depths", _per_level(config, "depth", levels, [2, 2, 8, 2]))
    experiment.set("model.head_channels", config.whole("model.dim_head", 32))
    kernels = [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]]
    experiment.set("model.kernels", config.read("model.cross_embed_kernel_sizes", kernels))
    strides = _per_level(config, "cross_embed_strides", levels, [4, 2, 2, 2])
    experiment.set("model.strides", strides)
    experiment.set("model.local_windows", _per_level(config, "local_window_size", levels, 10))
    experiment.set(
        "model.global_windows", _per_level(config, "global_window_size", levels, [5, 5, 2, 1])
    )
    experiment.set("model.mlp_ratio", 4)
    norm = bool(config.read("model.use_spectral_norm", True))
    experiment.set("model.spectral_norm", norm)
    dropout = config.number("model.ff_dropout", 0.0)
    experiment.set("model.dropout", dropout)
    if config.number("model.attn_dropout", 0.0) != dropout:
        config.remark("model.attn_dropout", "differs: model.dropout is for attention, too")
    if recomputes and norm:
        config.remark(
            "trainer.activation_checkpoint", "no counterpart: not together with spectral norm"
        )
    elif recomputes:
        experiment.set("model.activation_checkpointing", True)
    for key in ("patch_width", "patch_height", "frame_patch_size"):
        if config.whole(f"model.{key}", 1) > 1:
            config.remark(f"model.{key}", "no counterpart: the first embedding has no patches")
    if config.read("model.padding_conf.activate", False):
        experiment.set("model.poles", str(config.read("model.padding_conf.mode", "earth")))
    for key in ("padding_conf.pad_lat", "padding_conf.pad_lon", "pad_lat", "pad_lon"):
        if config.has(f"model.{key}"):
            config.remark(f"model.{key}", "differs: padded to whole windows, as few as needed")


def _per_level(config: ForeignConfig, key: str, levels: int, default: object) -> list[int]:
    """Return one number for each level; a single one is for all of them."""
    value: Any = config.read(f"model.{key}", default)
    values = value if isinstance(value, list) else [value] * levels
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        raise config.error(f"model.{key}", "a whole number for each level", value)
    return values


def read_weights(checkpoint: str) -> "tuple[Path, dict[str, Tensor]]":
    """Return the path and the weights, by name, of a checkpoint of miles-credit.

    It is a file, or a folder with `model_checkpoint.pt` or `checkpoint.pt`.

    Raises:
        UserError: there is no file, it is damaged, or it holds more than tensors and plain values,
            which are never unpickled.
    """
    # Imported here because torch takes seconds, which a config alone does not need.
    import torch

    path = checks.expand_home("CHECKPOINT", checkpoint)
    if path.is_dir():
        files = [path / name for name in ("model_checkpoint.pt", "checkpoint.pt")]
        path = next((file for file in files if file.is_file()), files[-1])
    try:
        with warnings.catch_warnings():  # of a protocol of pickle that it is about to refuse
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"CHECKPOINT: there is no file {path}. Give a checkpoint.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise UserError(
            f"CHECKPOINT: {path} can't be read as weights ({first_line(error)}). Give a file with "
            "tensors only, as torch.save(model.state_dict(), FILE) writes it."
        ) from error
    state = content.get("model_state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not state or not all(map(torch.is_tensor, state.values())):
        raise UserError(f"CHECKPOINT: {path} has no table of weights `model_state_dict`.")
    wrappers = re.compile(r"^(module\.|_orig_mod\.)+")  # of DDP and torch.compile
    return path, {wrappers.sub("", str(name)): tensor for name, tensor in state.items()}


def _write_weights(source: Path, tensors: "dict[str, Tensor]", path: Path) -> None:
    from safetensors.torch import save_file

    separate = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(separate, temporary, {"source": source.name})
