"""What a model was trained on and for: resuming for anything else is refused."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import CrossFormerConfig, ModelConfig, PanguConfig, UNetConfig, VariableConfig
from credit_dp.config.model import with_legacy_defaults
from credit_dp.data.channels import Channel
from credit_dp.data.setup import TrainingData
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.evaluation.metrics import unit_of

DataDescription = dict[str, Any]  # text, numbers and lists only: it lies in the checkpoint

# Sums over the same fields differ in their last digits between machines.
TOLERANCE = 1e-6
# Standard deviations by which a mean or a deviation may differ without weights noticing.
SCALING_TOLERANCE = 0.01

# What checkpoints that do not say it were made with.
DEFAULT_DESCRIPTION: DataDescription = {
    "model.frames": 1,
    "model.residual": True,
    "data.diagnostic": [],
    "data.variables": {},
}

RANGE_SUFFIXES = ("minimum", "maximum")
CLAMP_KEY = "nonnegative"  # acts on forecasts alone: no reason not to go on

# The models of this package, by what a description calls them; others go by their own name.
MODEL_KINDS: dict[str, type[ModelConfig]] = {
    "unet": UNetConfig,
    "pangu": PanguConfig,
    "crossformer": CrossFormerConfig,
}


def describe_data(prepared: TrainingData, model: ModelConfig) -> DataDescription:
    """Channels in order, step, grid and sample by their config keys, and the normalisation."""
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
            name: {key: value for key, value in treated.items() if key != CLAMP_KEY}
            for name, treated in describe_variables(prepared).items()
            if treated.keys() != {CLAMP_KEY}
        },
        "data.step": f"{store.config.step_hours}h",
        "data.grid": f"{rows}x{columns}",
        "model.frames": model.frames,
        "model.residual": model.residual,
        "statistics": {name: values.tolist() for name, values in statistics.items()},
        "ranges": dict(store.limits.sampled_ranges),
        "model": describe_model(model),
        "fields": describe_fields(prepared),
    }


def describe_model(model: ModelConfig) -> DataDescription:
    """Which model it is: its kind, and the value of each of its keys."""
    kinds = [name for name, kind in MODEL_KINDS.items() if type(model) is kind]
    return {"kind": kinds[0] if kinds else model.name, "keys": asdict(model)}


def describe_fields(prepared: TrainingData) -> DataDescription:
    """The channels that come out, their units, and where they are given."""
    store = prepared.store
    channels = store.channels.output_channels
    return {
        "channels": [[channel.variable, channel.level] for channel in channels],
        "units": [unit_of(store, channel.variable) for channel in channels],
        "latitude": store.latitude.tolist(),
        "longitude": store.longitude.tolist(),
        "diagnostic": len(store.channels.diagnostic),
        "variables": describe_variables(prepared),
    }


def describe_variables(prepared: TrainingData) -> dict[str, dict[str, Any]]:
    """What is done to the values of each variable, where that is not the default."""
    channels, config = prepared.store.channels, prepared.store.config
    names = [channel.variable for channel in channels.output_channels]
    default = VariableConfig()
    described = {
        name: {
            field.name: getattr(config.of(name), field.name)
            for field in fields(VariableConfig)
            if getattr(config.of(name), field.name) != getattr(default, field.name)
        }
        for name in sorted({*names, *channels.forcing, *channels.static})
    }
    return {name: treated for name, treated in described.items() if treated}


def check_data(saved: DataDescription, own: DataDescription) -> None:
    """Refuse to go on with other data, naming the first key that differs.

    Raises:
        UserError: the weights would meet other channels, another step, grid or normalisation, or
            stand for something else.
    """
    saved = {**DEFAULT_DESCRIPTION, **saved}
    for key, value in own.items():
        before = saved.get(key)
        if key.startswith(("data.", "model.")) and before != value:
            raise _mismatch_error(key, before, value)
    for key, (before, value) in differing_model_keys(saved, own).items():
        raise _mismatch_error(key, before, value)
    statistics = own.get("statistics", {})
    for name, values in statistics.items():
        if (
            name.endswith(RANGE_SUFFIXES) and name not in saved["statistics"]
        ):  # an older one says less
            continue
        # Compared in units of the spread: the mean of a wind may well be near zero.
        spread = np.array(statistics[std_name_of(name)])
        change = np.abs(np.subtract(values, saved["statistics"][name]))
        if np.any(change > TOLERANCE * np.where(spread > 0, spread, 1.0)):
            raise UserError(
                f"resume: the checkpoint was trained with another {name} of the fields: "
                "data.store or data.dates.train differs. Set them to those of the checkpoint, or "
                "start a new run."
            )


def _mismatch_error(key: str, before: object, value: object) -> UserError:
    return UserError(
        f"resume: the checkpoint was trained with {key}={format_value(before)}, the config has "
        f"{format_value(value)}. Set {key} to that of the checkpoint, or start a new run."
    )


def differing_model_keys(
    saved: DataDescription, own: DataDescription
) -> dict[str, tuple[Any, Any]]:
    """The keys of one kind of model that differ, as (checkpoint's, own), of those in
    `LEGACY_DEFAULTS`: a checkpoint need not have them, and their values change the model's form.
    """
    before, now = saved.get("model"), own.get("model")
    if not before or not now or before["kind"] != now["kind"]:
        return {}
    former = with_legacy_defaults(now["kind"], {})
    keys = {**former, **before["keys"]}
    pairs = {f"model.{key}": (keys[key], now["keys"][key]) for key in former}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def differently_normalised_channels(saved: DataDescription, own: DataDescription) -> list[str]:
    """Channels in common whose values are not normalised by the same mean and standard deviation.

    The same are those that differ by less than `SCALING_TOLERANCE` standard deviations.
    """
    before, now = channel_means_and_stds(saved), channel_means_and_stds(own)
    return [
        name
        for name, (mean, std) in now.items()
        if name in before
        and max(abs(mean - before[name][0]), abs(std - before[name][1])) > SCALING_TOLERANCE * std
    ]


def channel_means_and_stds(data: DataDescription) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each channel, by name."""
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
    """The statistics in whose units those of this name are compared."""
    prefix, _, number = name.rpartition("_")
    return name if number == "std" else f"{prefix}_std".lstrip("_")


def format_value(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{format_value(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


COORDINATE_TOLERANCE = 1e-3  # degrees: stores round latitudes and longitudes
PREPROCESSING_KEYS = (
    "normalise",
    "fill",
)  # what was done to values when the model learnt to take them
TRAINING_ONLY_KEYS = (
    "dropout",
    "stochastic_depth",
    "activation_checkpointing",
)  # no matter in forecasts


def check_fields(path: Path, saved: DataDescription, store: Store, model: ModelConfig) -> None:
    """Refuse a store with other fields, of another grid or step than a checkpoint was trained on.

    Args:
        path: of the checkpoint, and `saved` what it says of its data.
        store: what forecasts are to start from.
        model: of the config.

    Raises:
        UserError: naming the first key that differs.
        LookupError, TypeError, ValueError: the checkpoint does not say what it should.
    """
    saved = {**DEFAULT_DESCRIPTION, **saved}
    fields, channels = saved["fields"], store.channels
    made = [Channel(variable, level).name for variable, level in fields["channels"]]
    here = [channel.name for channel in channels.output_channels]
    _check_names(path, "data.prognostic, data.diagnostic and data.levels", made, here)
    _check_names(path, "data.forcing", saved["data.forcing"], channels.forcing)
    _check_names(path, "data.static", saved["data.static"], channels.static)
    same = {
        "data.step": f"{store.config.step_hours}h",
        "model.frames": model.frames,
        "model.residual": model.residual,
    }
    for key, value in same.items():
        _check_equal(path, key, saved[key], value)
    # Weights of the same shapes make something else where other keys of the model differ, too.
    now = asdict(model)
    trained = saved.get("model", {})
    keys = with_legacy_defaults(trained.get("kind", ""), trained.get("keys", {}))
    for key, value in keys.items():
        if key in now and key not in TRAINING_ONLY_KEYS:
            _check_equal(path, f"model.{key}", value, now[key])
    variables = [*dict.fromkeys(channel.variable for channel in channels.output_channels)]
    for name in [*variables, *channels.forcing, *channels.static]:
        before = {**asdict(VariableConfig()), **saved["data.variables"].get(name, {})}
        for key in PREPROCESSING_KEYS:
            value = getattr(store.config.of(name), key)
            _check_equal(path, f"data.variables.{name}.{key}", before[key], value)
    _check_grid(path, fields, store)


def _check_equal(path: Path, key: str, wanted: object, found: object) -> None:
    if wanted != found:
        raise UserError(
            f"checkpoint: {path} was trained with {key}={format_value(wanted)}, the config has "
            f"{format_value(found)}. Leave {key} out."
        )


def _check_names(path: Path, key: str, wanted: Sequence[str], found: Sequence[str]) -> None:
    if list(wanted) == list(found):
        return
    odd = next((name for name in wanted if name not in found), None)
    if odd is not None:
        what = f"needs {odd}, which the data here lack"
    else:
        odd = next((name for name in found if name not in wanted), None)
        what = "has them in another order" if odd is None else f"does not know {odd}"
    raise UserError(
        f"checkpoint: {path} was trained on {len(wanted)} fields of {key}, and {what}. Leave these "
        "keys out, or change data.store or checkpoint."
    )


def _check_grid(path: Path, fields: DataDescription, store: Store) -> None:
    rows, columns = len(fields["latitude"]), len(fields["longitude"])
    if (rows, columns) != store.grid:
        raise UserError(
            f"checkpoint: {path} was trained on a grid of {rows}x{columns}, but "
            f"{store.source.where} has {store.grid[0]}x{store.grid[1]}. Change data.store or "
            "checkpoint."
        )
    for name, own in (("latitude", store.latitude), ("longitude", store.longitude)):
        _check_coordinate(path, name, np.array(fields[name], float), own, store.source.where)


def _check_coordinate(
    path: Path, name: str, wanted: NDArray[np.float64], own: NDArray[np.float64], where: str
) -> None:
    far = np.flatnonzero(np.abs(wanted - own) > COORDINATE_TOLERANCE)
    if len(far):
        place = int(far[0])
        raise UserError(
            f"checkpoint: {path} was trained with {name} {wanted[place]:g} at place {place}, but "
            f"{where} has {own[place]:g} there. Change data.store or checkpoint."
        )
