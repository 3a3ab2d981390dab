"""Whether a store has the fields that a trained model takes and makes, where it has them."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import ModelConfig
from credit_dp.data.schema import Channel
from credit_dp.data.store import Store
from credit_dp.data_config import VariableConfig
from credit_dp.errors import UserError
from credit_dp.model_config import with_former_defaults
from credit_dp.training.data_description import UNSAID, Description, shown

NEAR = 1e-3  # degrees: stores round latitudes and longitudes
TREATED = ("normalise", "fill")  # what was done to values when the model learnt to take them
TRAINING = ("dropout", "stochastic_depth", "activation_checkpointing")  # no matter in forecasts


def check_fields(path: Path, saved: Description, store: Store, model: ModelConfig) -> None:
    """Refuse a store with other fields, of another grid or step than a checkpoint was trained on.

    Args:
        path: of the checkpoint, and `saved` what it says of its data.
        store: what forecasts are to start from.
        model: of the config.

    Raises:
        UserError: naming the first key that differs.
        LookupError, TypeError, ValueError: the checkpoint does not say what it should.
    """
    saved = {**UNSAID, **saved}
    fields, channels = saved["fields"], store.channels
    made = [Channel(variable, level).name for variable, level in fields["channels"]]
    here = [channel.name for channel in channels.out]
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
    keys = with_former_defaults(trained.get("kind", ""), trained.get("keys", {}))
    for key, value in keys.items():
        if key in now and key not in TRAINING:
            _check_equal(path, f"model.{key}", value, now[key])
    variables = [*dict.fromkeys(channel.variable for channel in channels.out)]
    for name in [*variables, *channels.forcing, *channels.static]:
        before = {**asdict(VariableConfig()), **saved["data.variables"].get(name, {})}
        for key in TREATED:
            value = getattr(store.config.of(name), key)
            _check_equal(path, f"data.variables.{name}.{key}", before[key], value)
    _check_grid(path, fields, store)


def _check_equal(path: Path, key: str, wanted: object, found: object) -> None:
    if wanted != found:
        raise UserError(
            f"checkpoint: {path} was trained with {key}={shown(wanted)}, the config has "
            f"{shown(found)}. Leave {key} out."
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


def _check_grid(path: Path, fields: Description, store: Store) -> None:
    rows, columns = len(fields["latitude"]), len(fields["longitude"])
    if (rows, columns) != store.grid:
        raise UserError(
            f"checkpoint: {path} was trained on a grid of {rows}x{columns}, but "
            f"{store.source.where} has {store.grid[0]}x{store.grid[1]}. Change data.store or "
            "checkpoint."
        )
    for name, own in (("latitude", store.latitude), ("longitude", store.longitude)):
        _check_near(path, name, np.array(fields[name], float), own, store.source.where)


def _check_near(
    path: Path, name: str, wanted: NDArray[np.float64], own: NDArray[np.float64], where: str
) -> None:
    far = np.flatnonzero(np.abs(wanted - own) > NEAR)
    if len(far):
        place = int(far[0])
        raise UserError(
            f"checkpoint: {path} was trained with {name} {wanted[place]:g} at place {place}, but "
            f"{where} has {own[place]:g} there. Change data.store or checkpoint."
        )
