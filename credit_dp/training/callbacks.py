"""Calls the callbacks of users, which plug-ins define: see `OwnCallbackConfig`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from credit_dp.config import Config, OwnCallbackConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.plugins import report_plugin_errors
from credit_dp.training.monitoring import preserve_rng_state
from credit_dp.training.state import TrainingState


@final
@dataclass(frozen=True)
class CallbackRun:
    """What a callback may read of a run, on the rank that calls it.

    Attributes:
        config: of the run.
        folder: of its files.
        manager: this rank's position in the mesh, with the process groups.
    """

    config: Config
    folder: Path
    manager: DomainParallelManager
    _state: TrainingState

    @property
    def rank(self) -> int:
        """Return this rank's number; rank 0 writes."""
        return self.manager.rank

    @property
    def step(self) -> int:
        """Return the number of optimizer steps that are done."""
        return self._state.step

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Return the model, or this rank's stages of a pipeline."""
        return self._state.parts

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, with fsdp2 as shards.

        After a step `.grad` is the gradient of the global batch, clipped.
        """
        return self._state.parameters


@final
class Callbacks:
    """The callbacks of a rank, called one after the other.

    Every call raises a `UserError`, with file and line, if a callback fails.
    """

    def __init__(self, callbacks: Sequence[OwnCallbackConfig], run: CallbackRun) -> None:
        self._callbacks = callbacks
        self._run = run
        self._device = next((p.device for p in run.parameters.values()), torch.device("cpu"))

    def on_start(self) -> None:
        """Training starts or goes on."""
        self._call("on_start")

    def on_step(self, metrics: Mapping[str, float], scores: Mapping[str, float]) -> None:
        """A step is done; `scores` are those of the validation after it, if there was one."""
        self._call("on_step", metrics)
        if scores:
            self._call("on_validation", scores)

    def on_end(self, scores: Mapping[str, float]) -> None:
        """The run is complete and its final scores are written."""
        self._call("on_end", scores)

    def _call(self, method: str, *arguments: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            where = f"trainer.callbacks.{callback.name}: {type(callback).__name__}.{method}"
            # Training goes on as if there were no callback.
            with report_plugin_errors(where), preserve_rng_state(self._device), torch.no_grad():
                getattr(callback, method)(self._run, *map(dict, arguments))
