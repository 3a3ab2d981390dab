"""Describes the data and the model of a run, and compares them with those of a checkpoint.

`describe_data` is saved in every checkpoint. `check_data` compares it when a run resumes, and
`check_fields` when a forecast starts: weights must not meet other channels, another grid, step or
normalisation than they were trained with.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DiffusionConfig, ModelConfig, VariableConfig
from credit_dp.config.model import FIXER_KEYS, MODELS, SAMPLER_KEYS, with_legacy_defaults
from credit_dp.data.channels import Channel
from credit_dp.data.setup import TrainingData
from credit_dp.data.store import Store, mask_digest
from credit_dp.errors import UserError
from credit_dp.evaluation.metrics import unit_of
from credit_dp.physics.columns import hybrid_of
from credit_dp.physics.fixers import has_budgets

DataDescription = dict[str, Any]  # only what JSON can hold, as it is saved in `state.json`

# Relative to the standard deviation: sums over the same fields differ in their last digits between
# machines.
TOLERANCE = 1e-6
# Differences of a mean or standard deviation, in standard deviations, that make no difference to a
# model.
SCALING_TOLERANCE = 0.01

# The values of keys that older checkpoints do not have.
DEFAULT_DESCRIPTION: DataDescription = {
    "model.frames": 1,
    "model.residual": True,
    "model.sigma_data": 1.0,  # models of another kind do not have it either
    "data.diagnostic": [],
    "data.variables": {},
}

RANGE_SUFFIXES = ("minimum", "maximum")
QUANTILES = "quantiles"
CLAMP_KEY = "nonnegative"  # acts on forecasts only, so a run may resume with another value


def describe_data(prepared: TrainingData, model: ModelConfig) -> DataDescription:
    """Describe channels, step, grid and samples by config key, the normalisation and the model."""
    store = prepared.store
    rows, columns = store.grid
    statistics = asdict(prepared.statistics)
    return {
        "data.prognostic": list(store.channels.variables),
        "data.diagnostic": list(dict.fromkeys(c.variable for c in store.channels.diagnostic)),
        "data.levels": list(store.levels),
        "data.forcing": list(store.channels.forcing),
        "data.static": list(store.channels.static),
        "data.variables": {
            name: {key: value for key, value in settings.items() if key != CLAMP_KEY}
            for name, settings in describe_variables(prepared).items()
            if settings.keys() != {CLAMP_KEY}
        },
        "data.step": f"{store.config.step_hours}h",
        "data.grid": f"{rows}x{columns}",
        "model.frames": model.frames,
        "model.residual": model.residual,
        **({"model.sigma_data": model.sigma_data} if isinstance(model, DiffusionConfig) else {}),
        "statistics": {
            name: values.tolist()
            for name, values in statistics.items()
            if len(values) or not name.endswith(QUANTILES)
        },
        "ranges": dict(store.limits.sampled_ranges),
        "masks": {channel.name: mask_digest(mask) for channel, mask in store.masks.items()},
        "model": describe_model(model),
        "fields": describe_fields(prepared, model),
    }


def describe_model(model: ModelConfig) -> DataDescription:
    """Describe a model by its kind and the values of its config keys."""
    kinds = [name for name, kind in MODELS.items() if type(model) is kind]
    return {"kind": kinds[0] if kinds else model.name, "keys": asdict(model)}


def describe_fields(prepared: TrainingData, model: ModelConfig) -> DataDescription:
    """Describe the output channels: names, units, grid, levels and settings of their variables."""
    store = prepared.store
    channels = store.channels.output_channels
    return {
        "channels": [[channel.variable, channel.level] for channel in channels],
        "units": [unit_of(store, channel.variable) for channel in channels],
        "latitude": store.latitude.tolist(),
        "longitude": store.longitude.tolist(),
        "diagnostic": len(store.channels.diagnostic),
        "variables": describe_variables(prepared),
        # Of model levels, for fixers, which an exported model has, too.
        "hybrid": hybrid_of(store) if has_budgets(model) else {},
    }


def describe_variables(prepared: TrainingData) -> dict[str, dict[str, Any]]:
    """Return the settings of each variable that differ from the defaults."""
    channels = prepared.store.channels
    config = prepared.store.config
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


def check_data(saved: DataDescription, current: DataDescription) -> None:
    """Check that a run resumes with the data of its checkpoint.

    Args:
        saved: the description in the checkpoint.
        current: description of the present data and config.

    Raises:
        UserError: channels, settings of variables, step, grid, normalisation, `model.frames`,
            `model.residual`, `model.sigma_data`, `model.fixers`, `model.bounds` or a key of
            `LEGACY_DEFAULTS` differ; naming the first that does.
    """
    saved = {**DEFAULT_DESCRIPTION, **saved}
    for key, value in current.items():
        saved_value = saved.get(key)
        if key.startswith(("data.", "model.")) and saved_value != value:
            raise _mismatch_error(key, saved_value, value)
    for key, (saved_value, value) in differing_model_keys(saved, current).items():
        raise _mismatch_error(key, saved_value, value)
    for key, type_of in FIXER_KEYS.items():
        # Absent in older checkpoints.
        saved_value, value = (
            described.get("model", {}).get("keys", {}).get(key) or type_of()
            for described in (saved, current)
        )
        if saved_value != value:
            raise _mismatch_error(f"model.{key}", saved_value, value)
    for name, mask in current.get("masks", {}).items():
        # Absent in older checkpoints.
        if saved.get("masks", {}).get(name, mask) != mask:
            raise UserError(
                f"resume: the checkpoint was trained with values of {name} on other points: "
                "data.store or data.dates.train differs. Set them to those of the checkpoint, or "
                "start a new run."
            )
    statistics = current.get("statistics", {})
    for name, values in statistics.items():
        # Older checkpoints have no ranges.
        if name.endswith(RANGE_SUFFIXES) and name not in saved["statistics"]:
            continue
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


def _mismatch_error(key: str, saved_value: object, value: object) -> UserError:
    return UserError(
        f"resume: the checkpoint was trained with {key}={format_value(saved_value)}, the config "
        f"has {format_value(value)}. Set {key} to that of the checkpoint, or start a new run."
    )


def differing_model_keys(
    saved: DataDescription, current: DataDescription
) -> dict[str, tuple[Any, Any]]:
    """Return keys of the same kind of model that differ, as (checkpoint's value, current value).

    Only keys in `LEGACY_DEFAULTS` are compared. Older checkpoints do not have them, and their
    values change the structure of the model.
    """
    saved_model = saved.get("model")
    model = current.get("model")
    if not saved_model or not model or saved_model["kind"] != model["kind"]:
        return {}
    legacy = with_legacy_defaults(model["kind"], {})
    saved_keys = {**legacy, **saved_model["keys"]}
    pairs = {f"model.{key}": (saved_keys[key], model["keys"][key]) for key in legacy}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


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


COORDINATE_TOLERANCE = 1e-3  # degrees: stores round latitudes and longitudes
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
        path: of the checkpoint.
        saved: the description in the checkpoint.
        store: has the initial states of forecasts.
        model: of the config.

    Raises:
        UserError: naming the first key that differs.
        LookupError, TypeError, ValueError: the description is damaged.
    """
    saved = {**DEFAULT_DESCRIPTION, **saved}
    fields = saved["fields"]
    channels = store.channels
    trained_channels = [Channel(variable, level).name for variable, level in fields["channels"]]
    store_channels = [channel.name for channel in channels.output_channels]
    key = "data.prognostic, data.diagnostic and data.levels"
    _check_names(path, key, trained_channels, store_channels)
    _check_names(path, "data.forcing", saved["data.forcing"], channels.forcing)
    _check_names(path, "data.static", saved["data.static"], channels.static)
    required = {
        "data.step": f"{store.config.step_hours}h",
        "model.frames": model.frames,
        "model.residual": model.residual,
    }
    for key, value in required.items():
        _check_equal(path, key, saved[key], value)
    # Other keys of the model can change the forecast without changing the shapes of weights.
    current_keys = asdict(model)
    saved_model = saved.get("model", {})
    saved_keys = with_legacy_defaults(saved_model.get("kind", ""), saved_model.get("keys", {}))
    for key, value in saved_keys.items():
        if key in current_keys and key not in FREE_KEYS:
            _check_equal(path, f"model.{key}", value, current_keys[key])
    variables = [*dict.fromkeys(channel.variable for channel in channels.output_channels)]
    for name in [*variables, *channels.forcing, *channels.static]:
        settings = {**asdict(VariableConfig()), **saved["data.variables"].get(name, {})}
        for key in PREPROCESSING_KEYS:
            value = getattr(store.config.variable_config(name), key)
            _check_equal(path, f"data.variables.{name}.{key}", settings[key], value)
    _check_grid(path, fields, store)


def _check_equal(path: Path, key: str, saved_value: object, value: object) -> None:
    if saved_value != value:
        raise UserError(
            f"checkpoint: {path} was trained with {key}={format_value(saved_value)}, the config "
            f"has {format_value(value)}. Leave {key} out."
        )


def _check_names(path: Path, key: str, trained: Sequence[str], available: Sequence[str]) -> None:
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
        f"checkpoint: {path} was trained on {len(trained)} fields of {key}, and {problem}. Leave "
        "these keys out, or change data.store or checkpoint."
    )


def _check_grid(path: Path, fields: DataDescription, store: Store) -> None:
    rows, columns = len(fields["latitude"]), len(fields["longitude"])
    if (rows, columns) != store.grid:
        raise UserError(
            f"checkpoint: {path} was trained on a grid of {rows}x{columns}, but "
            f"{store.source.where} has {store.grid[0]}x{store.grid[1]}. Change data.store or "
            "checkpoint."
        )
    for name, values in (("latitude", store.latitude), ("longitude", store.longitude)):
        _check_coordinate(path, name, np.array(fields[name], float), values, store.source.where)


def _check_coordinate(
    path: Path, name: str, trained: NDArray[np.float64], values: NDArray[np.float64], where: str
) -> None:
    differing = np.flatnonzero(np.abs(trained - values) > COORDINATE_TOLERANCE)
    if len(differing):
        index = int(differing[0])
        raise UserError(
            f"checkpoint: {path} was trained with {name} {trained[index]:g} at index {index}, but "
            f"{where} has {values[index]:g}. Change data.store or checkpoint."
        )
