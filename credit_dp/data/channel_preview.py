"""The channels, times and grid of a data config, known before any data are prepared.

Commands that plan or check a run use them; the quickstart store need not exist yet.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from credit_dp.config import DataConfig
from credit_dp.config.data import SPLITS
from credit_dp.data.channels import Channels, expand_channels, suggest_names
from credit_dp.data.dates import resolve_dates, split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.grid import parse_grid
from credit_dp.data.quickstart.dataset import (
    LEVEL_VARIABLES,
    STATIC_VARIABLES,
    SURFACE_VARIABLES,
    plan_runs,
    resolve_grid,
)
from credit_dp.data.quickstart.dynamics import LEVELS
from credit_dp.data.selection import check_variable_keys, data_step_indices
from credit_dp.data.sources.base import Times
from credit_dp.data.store import Store
from credit_dp.errors import UserError


def expected_channels(config: DataConfig) -> Channels:
    """Return the channels of a data config. A user's store is opened, the quickstart's is not.

    The config's levels are not checked against the quickstart's, so a plan may use those of ERA5.

    Raises:
        UserError: a variable does not exist, or the store does not fit the config.
    """
    if config.name != "quickstart":
        return Store.open(replace(config, grid=None)).channels  # any grid will do
    timed = {**LEVEL_VARIABLES, **SURFACE_VARIABLES}
    _check_names("prognostic", config.prognostic, timed)
    _check_names("diagnostic", config.diagnostic, timed)
    _check_names("forcing", config.forcing, COMPUTED_FORCINGS)
    _check_names("static", config.static, {*STATIC_VARIABLES, *COMPUTED_STATICS})
    check_variable_keys(config)
    levels = LEVELS if config.levels is None else config.levels
    return Channels(
        prognostic=tuple(expand_channels(config.prognostic, set(LEVEL_VARIABLES), levels)),
        forcing=tuple(config.forcing),
        static=tuple(config.static),
        diagnostic=tuple(expand_channels(config.diagnostic, set(LEVEL_VARIABLES), levels)),
    )


@final
@dataclass
class QuickstartTimes:
    """The times of a quickstart store on the config's step, known before the store exists."""

    config: DataConfig
    times: Times


def quickstart_times(config: DataConfig) -> QuickstartTimes:
    """Return the times of the quickstart store and a config whose dates are among them.

    Raises:
        UserError: dates are outside the store, or no two times are one step apart.
    """
    times = np.concatenate([run.times for run in plan_runs(config.quickstart)]).astype("M8[ns]")
    # As `Store.open` does: times on the step, then dates that are `auto`, then all splits.
    times = times[data_step_indices(times, config, config.name)]
    config = replace(config, store=config.name)  # the name in error messages
    if config.dates.undetermined:
        config = replace(config, dates=resolve_dates(config, times).dates)
    for split in SPLITS:
        split_slice(config, split, times)
    return QuickstartTimes(config, times)


def expected_grid(config: DataConfig) -> tuple[int, int]:
    """Return rows and columns: the first of `data.grid`, the store and the quickstart.

    Raises:
        UserError: the store does not fit the config, or the grid is too small.
    """
    if config.name != "quickstart":
        return Store.open(config).grid if config.grid is None else parse_grid(config.grid)
    return quickstart_grid(config)


def quickstart_grid(config: DataConfig) -> tuple[int, int]:
    """Return rows and columns of `data.grid`, or the quickstart's default.

    Raises:
        UserError: the grid is too small.
    """
    requested = None if config.grid is None else parse_grid(config.grid)
    return resolve_grid(config.quickstart, requested)


def _check_names(kind: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(
                f"data.{kind}: the quickstart climate has no variable {name}. "
                f"{suggest_names(name, known)}"
            )
