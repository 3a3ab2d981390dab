"""Numbers of a run at Weights & Biases."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, final

from credit_dp.errors import UserError
from credit_dp.training.run_folder import write_whole

# Seconds that wandb waits for its server before it gives up; the last one is not in old versions.
LIMITS = {"init_timeout": 60.0, "finish_timeout": 30.0}


@final
class WandbLog:
    """A Weights & Biases run, kept in the run's folder; offline unless asked for online.

    Its id is kept there, too: a run that goes on after `step` goes on under the same one.
    """

    def __init__(
        self, mode: str, project: str, folder: Path, step: int, config: dict[str, Any]
    ) -> None:
        wandb = import_wandb()
        limits = {name: s for name, s in LIMITS.items() if name in wandb.Settings.__annotations__}
        self.run = wandb.init(
            mode="online" if mode == "online" else "offline",
            project=project,
            dir=folder,
            config=config,
            name=folder.name,
            id=run_id(folder / "wandb" / "id", step),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", **limits),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        self.run.log(dict(numbers), step=step)

    def summarise(self, numbers: Mapping[str, float]) -> None:
        """Put final numbers into the run's summary."""
        self.run.summary.update(dict(numbers))

    def close(self) -> None:
        """Flush and end the run."""
        self.run.finish()


def run_id(path: Path, step: int) -> str:
    """The id that an earlier start has left, or a new one, left for the next start.

    Raises:
        UserError: it can't be left there.
    """
    if step and path.exists():
        return path.read_text().strip()
    new = secrets.token_hex(4)
    write_whole(path, new + "\n")
    return new


def require_key() -> None:
    """See that somebody can be logged in.

    Raises:
        UserError: there is no API key.
    """
    try:
        found = import_wandb().login(prompt=False)
    except Exception:  # noqa: BLE001 - the run's start meets it again, and warns
        return
    if not found:
        raise UserError(
            "logger.wandb: online needs an API key and there is none. Set WANDB_API_KEY, "
            "or choose logger.wandb=offline."
        )


def import_wandb() -> ModuleType:
    """The package, which costs a second: only runs that log with it pay."""
    # An empty WANDB_SILENT crashes wandb; the error reporter looks up a host even offline.
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb
