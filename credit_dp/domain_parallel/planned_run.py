"""What layers see of how a model runs: on tensors of the globe, or without data for a plan."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor


class GlobeTensor(Tensor):
    """A tensor of the globe, whose operators know what its rows are: the base of `BandTensor`."""


class ActivePlanner(Protocol):
    """What layers ask of a run of `planning.comparison`."""

    def call_layer(self, layer: Any, x: Tensor, *others: Tensor) -> Any:
        """Return the output of a sharded layer in the current run: replaces its forward."""


run_planner: ContextVar[ActivePlanner | None] = ContextVar("active planner", default=None)


def active_planner() -> ActivePlanner | None:
    """Return the planner of the run in progress, if any."""
    # Nothing is compiled while planning, and torch's compiler can't read a context variable.
    return None if torch.compiler.is_dynamo_compiling() else run_planner.get()
