"""Checkpoints: one file that any mesh can go on from, written whole or not at all."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from credit_dp import checks
from credit_dp.errors import UserError
from credit_dp.training.data_description import Description, check_data
from credit_dp.training.optimisation import load_moments
from credit_dp.training.run_folder import discard, unfinished

FORMAT = 2


class Stateful(Protocol):
    """Something that can tell and take back where it stands."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Stand there again."""


@final
@dataclass
class TrainingState:
    """All that changes while training, so that a checkpoint of it is complete.

    `model` is the plain or converted model, not its DDP wrapper: the names saved are then the
    same on every mesh. `data` describes what it trains on; see `describe_data`.
    """

    model: nn.Module
    optimiser: Optimizer
    schedule: LambdaLR
    sampler: Stateful
    data: Description
    seed: int
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text only: `torch.load(weights_only=True)` reads it."""
        return {
            "format": FORMAT,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "sampler": self.sampler.state_dict(),
            "data": self.data,
            # Each step's numbers are drawn from (seed, step, rank), so the seed is what has to be
            # kept; the generator's own state is for whoever draws outside of a step.
            "random": {"seed": self.seed, "generator": torch.get_rng_state()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved state, which must fit: see `check_fit` and `check_data`.

        What the config sets of optimiser and schedule stays as it is.
        """
        self.model.load_state_dict(state["model"])
        load_moments(self.optimiser, self.schedule, state["optimiser"], state["schedule"])
        self.sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["random"]["generator"])
        self.seed = state["random"]["seed"]
        self.step = state["step"]


def save_checkpoint(path: Path, state: TrainingState, config: str) -> None:
    """Write a checkpoint with the resolved config (YAML); one rank does this for all.

    The previous file stays until the new one is whole and on disk.

    Raises:
        UserError: it could not be written, for instance because the disk is full.
    """
    temporary = unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save({**state.state_dict(), "config": config}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        discard(temporary)
        # torch raises a RuntimeError of its own over the OSError of a failed write.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(
            f"{path}: the checkpoint of step {state.step} could not be written "
            f"({cause.strerror or cause}). The previous one is untouched; free space there or "
            f"change run.dir, then go on with resume=auto."
        ) from error


def find_checkpoint(resume: str | None, own: Path) -> Path | None:
    """The checkpoint to start from, or None for a fresh start.

    `resume` is None, `auto` (the run's own checkpoint, if it has one yet), or the path of a
    checkpoint or of the folder of a run.

    Raises:
        UserError: a path was given and nothing is there.
    """
    if resume is None:
        return None
    if resume == "auto":
        return own if own.exists() else None
    path = checks.checkpoint_path("resume", resume)
    return checks.checkpoint_path("resume", str(path / own.name)) if path.is_dir() else path


def load_checkpoint(path: Path, state: TrainingState) -> None:
    """Bring `state` to where a checkpoint left it, on any mesh.

    Raises:
        UserError: not a readable checkpoint, or one of another model or of other data.
    """
    try:
        # On the CPU first: the file may come from a machine with other devices.
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"resume: {path} is not a readable checkpoint ({reason}).") from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise UserError(f"resume: {path} is not a checkpoint of this program (format {FORMAT}).")
    check_data(saved["data"], state.data)
    check_fit(path, saved["model"], state.model.state_dict())
    state.load_state_dict(saved)


def check_fit(path: Path, saved: dict[str, Any], model: dict[str, Any]) -> None:
    """Refuse weights of another model, naming the first that differs."""
    for name, tensor in model.items():
        if name not in saved:
            raise UserError(
                f"resume: {path} has no {name}, which the model has. "
                "Change the model group to that of the checkpoint, or resume."
            )
        if saved[name].shape != tensor.shape:
            raise UserError(
                f"resume: {name} is {tuple(tensor.shape)} in the model and "
                f"{tuple(saved[name].shape)} in {path}. "
                "Change the model or data group to that of the checkpoint, or resume."
            )
    extra = next((name for name in saved if name not in model), None)
    if extra is not None:
        raise UserError(
            f"resume: {path} has {extra}, which the model does not have. "
            "Change the model group to that of the checkpoint, or resume."
        )
