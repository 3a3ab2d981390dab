"""The planner of the run without data that is in progress, as layers and functions see it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor


class ActivePlanner(Protocol):
    """What layers and functions ask of a `planning.planner.Planner`."""

    names: dict[Any, str]

    @property
    def is_global_run(self) -> bool:
        """Whether this is the run on the whole globe."""

    def call_layer(self, layer: Any, x: Tensor, *others: Tensor) -> Any:
        """Return the output of a sharded layer in the current run: replaces its forward."""

    def band_of_parameter(self, parameter: Tensor, rows: Any, path: str) -> Tensor:
        """Return this run's band of a parameter or buffer with a row for each row of the globe."""


planner_of_run: ContextVar[ActivePlanner | None] = ContextVar("active planner", default=None)


def active_planner() -> ActivePlanner | None:
    """Return the planner of the run in progress, if any."""
    # Nothing is compiled while planning, and torch's compiler can't read a context variable.
    return None if torch.compiler.is_dynamo_compiling() else planner_of_run.get()
