"""What the values of a forecast depend on, as JSON: it is gone on with only for the same."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from credit_dp.data.schema import Channel
from credit_dp.errors import UserError
from credit_dp.forecast.form import Form
from credit_dp.forecast.request import ForecastConfig

SHOWN = 60  # characters of a value in a message
KEYS = {
    "dtype": "trainer.dtype",
    "hours": "lead or every",
    "stores": "data.store",
    "times": "init",
    "variables": "data.variables",
    "weights": "the weights in checkpoint",
}

Settings = dict[str, Any]


def settings_of(
    config: ForecastConfig, form: Form, weights: str, stores: Sequence[str]
) -> Settings:
    """All that a forecast depends on but for the mesh, which only rounds differently.

    Args:
        weights: the mark of the checkpoint, and `stores` the addresses of the initial states.
    """
    request, variables = config.request, config.data.variables
    return {
        "checkpoint": str(Path(request.checkpoint).expanduser().absolute()),
        "weights": weights,
        "stores": list(stores),
        "dtype": config.trainer.dtype,
        "variables": {name: asdict(variables[name]) for name in sorted(variables)},
        "perturb": request.perturb,
        "perturb_seed": request.perturb_seed,
        **describe(form),
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What was another one, for people; empty if all is the same."""
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            values = (before.get(key), now.get(key))
            if max(len(str(value)) for value in values) > SHOWN:
                return f"another {KEYS.get(key, key)}"
            return f"{KEYS.get(key, key)}={values[0]}, not {values[1]}"
    return ""


def describe(form: Form) -> Settings:
    """A form as JSON."""
    return {
        "channels": [[channel.variable, channel.level] for channel in form.channels],
        "units": dict(form.units),
        "times": [str(time.astype("M8[h]")) for time in form.times],
        "hours": list(form.hours),
        "latitude": form.latitude.tolist(),
        "longitude": form.longitude.tolist(),
        "members": form.members,
        "summed": list(form.summed),
        "span": form.span,
        "model_levels": form.model_levels,
    }


def form_of(place: Path, said: Mapping[str, Any]) -> Form:
    """What `describe` made.

    Raises:
        UserError: it is damaged.
    """
    try:
        return Form(
            tuple(Channel(variable, level) for variable, level in said["channels"]),
            dict(said["units"]),
            np.array(said["times"], "M8[ns]"),
            tuple(map(int, said["hours"])),
            np.array(said["latitude"], float),
            np.array(said["longitude"], float),
            int(said["members"]),
            # Earlier versions did not say these.
            tuple(said.get("summed", ())),
            int(said.get("span", 0)),
            bool(said.get("model_levels", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{place}: what it says of itself can't be read ({error!r}).") from error
