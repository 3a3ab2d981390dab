"""Describes the data and the model of a run, and compares them with those of a checkpoint.

`describe_data` is saved in every checkpoint. `check_data` compares it when a run resumes, and
`check_fields` when a forecast starts: weights must not meet other channels, another grid, step or
normalisation than they were trained with. What both compare, they compare with the same functions:
`check_model` and `check_store`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np

from credit_dp.config import DiffusionConfig, ModelConfig, VariableConfig
from credit_dp.config.model import FIXER_KEYS, MODELS, SAMPLER_KEYS
from credit_dp.data.calendar import STANDARD, Calendar
from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid
from credit_dp.data.setup import TrainingData
from credit_dp.data.store import Store, mask_digest
from credit_dp.data.units import UNSPECIFIED_UNITS, canonical_unit
from credit_dp.data.winds import wind_difference
from credit_dp.errors import UserError
from credit_dp.physics.columns import hybrid_of

DataDescription = dict[str, Any]  # only what JSON can hold, as it is saved in `state.json`

# Relative to the standard deviation: sums over the same fields differ in their last digits between
# machines.
TOLERANCE = 1e-6
# Differences of a mean or standard deviation, in standard deviations, that make no difference to a
# model.
SCALING_TOLERANCE = 0.01

QUANTILES = "quantiles"
CLAMP_KEY = "nonnegative"  # acts on forecasts only, so a run may resume with another value


def describe_data(prepared: TrainingData, model: ModelConfig) -> DataDescription:
    """Describe channels, step, grid and samples by config key, the normalisation and the model."""
    statistics = asdict(prepared.statistics)
    return {
        **describe_store(prepared.store, model),
        "statistics": {
            name: values.tolist()
            for name, values in statistics.items()
            if len(values) or not name.endswith(QUANTILES)
        },
    }


def describe_store(store: Store, model: ModelConfig) -> DataDescription:
    """Describe all but the normalisation, which takes a pass over the data."""
    rows, columns = store.grid
    return {
        "data.prognostic": list(store.channels.variables),
        "data.diagnostic": list(dict.fromkeys(c.variable for c in store.channels.diagnostic)),
        "data.levels": list(store.levels),
        "data.forcing": list(store.channels.forcing),
        "data.static": list(store.channels.static),
        "data.variables": {
            name: {key: value for key, value in settings.items() if key != CLAMP_KEY}
            for name, settings in describe_variables(store).items()
            if settings.keys() != {CLAMP_KEY}
        },
        **({"data.member": list(store.source.members)} if store.source.members else {}),
        "data.step": f"{store.config.step_hours}h",
        "data.grid": f"{rows}x{columns}",
        "model.frames": model.frames,
        "model.residual": model.residual,
        **({"model.sigma_data": model.sigma_data} if isinstance(model, DiffusionConfig) else {}),
        "masks": {channel.name: mask_digest(mask) for channel, mask in store.masks.items()},
        "model": describe_model(model),
        "fields": describe_fields(store, model),
    }


def describe_model(model: ModelConfig) -> DataDescription:
    """Describe a model by its kind and the values of its config keys."""
    kinds = [name for name, kind in MODELS.items() if type(model) is kind]
    return {"kind": kinds[0] if kinds else model.name, "keys": asdict(model)}


def describe_fields(store: Store, model: ModelConfig) -> DataDescription:
    """Describe the output channels: names, units, grid, levels and settings of their variables."""
    channels = store.channels.output_channels
    return {
        "channels": [[channel.variable, channel.level] for channel in channels],
        "units": [store.shown_unit(channel.variable) for channel in channels],
        **store.grid.to_json(),
        "diagnostic": len(store.channels.diagnostic),
        "variables": describe_variables(store),
        **(
            {"along_grid": [store.lies_along_grid(channel.variable) for channel in channels]}
            if store.grid.is_projected
            else {}
        ),
        # Of model levels, for fixers, which an exported model has, too.
        "hybrid": hybrid_of(store) if model.budgets else {},
        **({"boundary": store.config.boundary} if store.config.boundary else {}),
        **({"relaxation": store.config.relaxation} if store.config.relaxation else {}),
        **({} if store.calendar.is_standard else {"calendar": store.calendar.name}),
    }


def describe_variables(store: Store) -> dict[str, dict[str, Any]]:
    """Return the settings of each variable that differ from the defaults."""
    channels = store.channels
    config = store.config
    names = [channel.variable for channel in channels.output_channels]
    default = VariableConfig()
    described = {
        name: {
            field.name: getattr(config.variable_config(name), field.name)
            for field in fields(VariableConfig)
            if getattr(config.variable_config(name), field.name) != getattr(default, field.name)
        }
        for name in sorted({*names, *channels.forcing, *channels.static})
    }
    return {name: settings for name, settings in described.items() if settings}


@final
@dataclass(frozen=True)
class Use:
    """How the errors of a comparison begin and end; `{key}` stands for the config key.

    Attributes:
        subject: the checkpoint, after the config key that it comes from.
        key_advice: what to do about a key of the config.
        store_advice: what to do about the store.
    """

    subject: str
    key_advice: str
    store_advice: str

    def check_equal(self, key: str, saved_value: object, value: object) -> None:
        """Check that a key of the config has the checkpoint's value."""
        if saved_value != value:
            raise UserError(
                f"{self.subject} was trained with {key}={format_value(saved_value)}, the config "
                f"has {format_value(value)}. {self.key_advice.format(key=key)}"
            )


RESUMING = Use(
    "resume: the checkpoint",
    "Set {key} to that of the checkpoint, or start a new run.",
    "Set data.store to that of the checkpoint, or start a new run.",
)


def check_data(saved: DataDescription, current: DataDescription, where: str = "data.store") -> None:
    """Check that a run resumes with the data and the model of its checkpoint.

    Raises:
        UserError: channels, settings of variables, step, grid, units, normalisation, the model or
            one of its keys differ; naming the first that does. `FREE_KEYS` of the model may differ,
            but not `model.fixers` and `model.bounds`.
    """
    check_model(RESUMING, saved, current)
    for key, value in current.items():
        if key.startswith(("data.", "model.")):
            RESUMING.check_equal(key, saved.get(key), value)
    for key, type_of in FIXER_KEYS.items():
        # Models of plug-ins may not have them.
        saved_value, value = (
            described.get("model", {}).get("keys", {}).get(key) or type_of()
            for described in (saved, current)
        )
        RESUMING.check_equal(f"model.{key}", saved_value, value)
    if "fields" in current:
        check_store(RESUMING, saved["fields"], current["fields"], where)
    for name, mask in current.get("masks", {}).items():
        if saved["masks"].get(name, mask) != mask:
            raise UserError(
                f"resume: the checkpoint was trained with values of {name} on other points: "
                "data.store or data.dates.train differs. Set them to those of the checkpoint, or "
                "start a new run."
            )
    statistics = current.get("statistics", {})
    for name, values in statistics.items():
        # In units of the standard deviation: the mean of a wind component may be near zero.
        std = np.array(statistics[std_name_of(name)])
        if name.endswith(QUANTILES):  # in the unit of the variable, unlike the deviation
            std = np.ptp(values, axis=-1, keepdims=True)
        change = np.abs(np.subtract(values, saved["statistics"][name]))
        if np.any(change > TOLERANCE * np.where(std > 0, std, 1.0)):
            another = "other" if name.endswith(QUANTILES) else "another"
            raise UserError(
                f"resume: the checkpoint was trained with {another} {name} of the fields: "
                "data.store or data.dates.train differs. Set them to those of the checkpoint, or "
                "start a new run."
            )


def check_model(use: Use, saved: DataDescription, current: DataDescription) -> None:
    """Check that a model is of a checkpoint's kind, and has its keys but `FREE_KEYS`.

    Keys can change what a model computes without changing the shapes of its weights.
    """
    saved_model, model = saved.get("model"), current.get("model")
    if not saved_model or not model:
        return
    use.check_equal("model", saved_model["kind"], model["kind"])
    for key, value in saved_model["keys"].items():
        if key in model["keys"] and key not in FREE_KEYS:
            use.check_equal(f"model.{key}", value, model["keys"][key])


def check_store(use: Use, saved: DataDescription, current: DataDescription, where: str) -> None:
    """Check that a store has the calendar, grid, units, winds and levels of a checkpoint.

    Args:
        saved, current: what `describe_fields` returns, of the same channels.
    """
    calendars = [calendar_of_fields(of) for of in (saved, current)]
    if calendars[0] != calendars[1]:
        raise UserError(
            f"{use.subject} was trained with dates of the {calendars[0].name} calendar, but "
            f"{where} has those of the {calendars[1].name} calendar. {use.store_advice}"
        )
    for key in ("boundary", "relaxation"):
        use.check_equal(f"data.{key}", *(of.get(key, 0) for of in (saved, current)))
    differing = grid_of_fields(saved).difference(grid_of_fields(current))
    if differing:
        raise UserError(
            f"{use.subject} was trained with {differing[0]}, but {where} has {differing[1]}. "
            f"{use.store_advice}"
        )
    for (variable, level), *units in zip(
        current["channels"], saved["units"], current["units"], strict=False
    ):
        known = [canonical_unit(unit) for unit in units]
        if known[0] != known[1] and not {*known} & {*UNSPECIFIED_UNITS}:
            raise UserError(
                f"{use.subject} was trained with {Channel(variable, level).name} in {units[0]}, "
                f"but {where} has it in {units[1]}. {use.store_advice}"
            )
    # Missing in checkpoints of earlier versions.
    lies = zip(*(of.get("along_grid", ()) for of in (saved, current)), strict=False)
    for (variable, _), pair in zip(current["channels"], lies, strict=False):
        kinds = wind_difference(*pair)
        if kinds:
            raise UserError(
                f"{use.subject} was trained with {variable} {kinds[0]}, but {where} has it "
                f"{kinds[1]}. {use.store_advice}"
            )
    if saved.get("hybrid") and current["hybrid"]:
        for name in ("a", "b"):
            pair = saved["hybrid"][name], current["hybrid"][name]
            if len(pair[0]) != len(pair[1]) or not np.allclose(*pair, rtol=TOLERANCE, atol=0):
                raise UserError(
                    f"{use.subject} was trained with other coefficients {name} of model levels "
                    f"than data.hybrid or {where} has. {use.store_advice}"
                )


def calendar_of_fields(fields: DataDescription) -> Calendar:
    """Return the calendar of what `describe_fields` returned."""
    return Calendar(fields.get("calendar", STANDARD.name))


def grid_of_fields(fields: DataDescription) -> Grid:
    """Return the grid of what `describe_fields` returned."""
    return Grid.from_json(fields)


def differing_model_keys(saved: DataDescription, current: DataDescription) -> DataDescription:
    """Return the checkpoint's values of the keys in which a model of the same kind differs."""
    model, saved_model = current["model"], saved["model"]
    if saved_model["kind"] != model["kind"]:
        return {}
    return {
        f"model.{key}": value
        for key, value in saved_model["keys"].items()
        if key not in FREE_KEYS and model["keys"].get(key, value) != value
    }


def differently_normalised_channels(saved: DataDescription, current: DataDescription) -> list[str]:
    """Return common channels whose mean or standard deviation differs from the checkpoint's.

    Differences below `SCALING_TOLERANCE` standard deviations are ignored.
    """
    saved_scales = channel_means_and_stds(saved)
    differing = []
    for name, (mean, std) in channel_means_and_stds(current).items():
        if name in saved_scales:
            saved_mean, saved_std = saved_scales[name]
            change = max(abs(mean - saved_mean), abs(std - saved_std))
            if change > SCALING_TOLERANCE * std:
                differing.append(name)
    return differing


def channel_means_and_stds(data: DataDescription) -> dict[str, tuple[float, float]]:
    """Return the mean and standard deviation of each channel, by name."""
    statistics = data["statistics"]
    names = {
        "": [Channel(variable, level).name for variable, level in data["fields"]["channels"]],
        "forcing_": data["data.forcing"],
        "static_": data["data.static"],
    }
    return {
        name: (mean, std)
        for kind, channels in names.items()
        for name, mean, std in zip(
            channels, statistics[f"{kind}mean"], statistics[f"{kind}std"], strict=True
        )
    }


def std_name_of(name: str) -> str:
    """Return the standard deviation in whose units statistics of this name are compared."""
    prefix, _, statistic = name.rpartition("_")
    return name if statistic == "std" else f"{prefix}_std".lstrip("_")


def format_value(value: object) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{format_value(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


PREPROCESSING_KEYS = ("normalise", "fill")  # must be the same in training and forecasts
# Keys of models that forecasts may change: how it was trained, how it is sampled, and what corrects
# its fields.
FREE_KEYS = (
    *("dropout", "stochastic_depth", "activation_checkpointing", "fixers", "bounds"),
    *SAMPLER_KEYS,
)


def check_fields(path: Path, saved: DataDescription, store: Store, model: ModelConfig) -> None:
    """Check that a store and a model have the fields, grid, step and settings of a checkpoint.

    Args:
        store: has the initial states of forecasts.

    Raises:
        UserError: naming the first key that differs.
        LookupError, TypeError, ValueError: the description is damaged.
    """
    use = Use(f"checkpoint: {path}", "Leave {key} out.", "Change data.store or checkpoint.")
    fields = saved["fields"]
    channels = store.channels
    trained_channels = [Channel(variable, level).name for variable, level in fields["channels"]]
    store_channels = [channel.name for channel in channels.output_channels]
    key = "data.prognostic, data.diagnostic and data.levels"
    _check_names(use, key, trained_channels, store_channels)
    _check_names(use, "data.forcing", saved["data.forcing"], channels.forcing)
    _check_names(use, "data.static", saved["data.static"], channels.static)
    required = {
        "data.step": f"{store.config.step_hours}h",
        "model.frames": model.frames,
        "model.residual": model.residual,
    }
    for key, value in required.items():
        use.check_equal(key, saved[key], value)
    check_model(use, saved, {"model": describe_model(model)})
    variables = [*dict.fromkeys(channel.variable for channel in channels.output_channels)]
    for name in [*variables, *channels.forcing, *channels.static]:
        settings = {**asdict(VariableConfig()), **saved["data.variables"].get(name, {})}
        for key in PREPROCESSING_KEYS:
            value = getattr(store.config.variable_config(name), key)
            use.check_equal(f"data.variables.{name}.{key}", settings[key], value)
    check_store(use, fields, describe_fields(store, model), store.source.where)


def _check_names(use: Use, key: str, trained: Sequence[str], available: Sequence[str]) -> None:
    if list(trained) == list(available):
        return
    missing = next((name for name in trained if name not in available), None)
    unknown = next((name for name in available if name not in trained), None)
    if missing is not None:
        problem = f"needs {missing}, which the store does not have"
    elif unknown is not None:
        problem = f"was not trained with {unknown}"
    else:
        problem = "has them in another order"
    raise UserError(
        f"{use.subject} was trained on {len(trained)} fields of {key}, and {problem}. Leave "
        "these keys out, or change data.store or checkpoint."
    )
