"""Where a run writes: `outputs/NAME` for a run with a name, else a folder of its own."""

import contextlib
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from credit_dp import checks
from credit_dp.config import Config, DataConfig, RunConfig
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import whole_steps
from credit_dp.training.run_folder import RunFolder

LOCK = ".run.lock"


def register_resolvers() -> None:
    """Make what the files in conf/ interpolate known."""
    # Cached, so that one config gives one answer, however often it is asked.
    OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("rows_per_rank", rows_per_rank, replace=True)
    OmegaConf.register_new_resolver("of_quickstart", of_quickstart, replace=True)
    OmegaConf.register_new_resolver("hours_of_steps", hours_of_steps, replace=True)


def run_folder(name: str | None, folder: str) -> str:
    """The folder of one run."""
    return os.path.expanduser(folder) or f"outputs/{name or unique_name()}"


def sweep_folder(name: str | None, folder: str) -> str:
    """The folder of a sweep, in which its runs are numbered."""
    return os.path.expanduser(folder) or (
        f"outputs/{name}" if name else f"multirun/{unique_name()}"
    )


def rows_per_rank(grid: str, *, _root_: DictConfig) -> str:
    """The grid that leaves each domain rank this many rows: `24x48` is `96x48` on four ranks.

    Raises:
        UserError: it is no grid.
    """
    checks.grid("data.grid", str(grid))  # digits alone come as a number
    rows, columns = grid.split("x")
    return f"{int(rows) * int(OmegaConf.select(_root_, 'parallel.domain'))}x{columns}"


def of_quickstart(value: object, other: object = None, *, _root_: DictConfig) -> object:
    """The value where the data are the quickstart's, whose store is made as the config says."""
    return value if OmegaConf.select(_root_, "data.name") == "quickstart" else other


def hours_of_steps(*counts: int, _root_: DictConfig) -> list[int]:
    """The hours that so many steps of the data have.

    Raises:
        UserError: the step is none.
    """
    step = DataConfig(step=str(OmegaConf.select(_root_, "data.step"))).step_hours
    return [step * count for count in counts]


def unique_name() -> str:
    """Differs between any two runs: time in microseconds, and the job or the process."""
    job = os.environ.get("SLURM_JOB_ID", os.getpid())
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}_{job}"


def folder_key(run: RunConfig) -> str:
    """The key that chose the folder, which is the one to change."""
    return "run.dir" if run.dir else "run.name"


@contextlib.contextmanager
def folder_made_by_hydra(run: RunConfig, default: str) -> Iterator[None]:
    """Tell in one line if the folder, which Hydra makes before anything of ours runs, can't be.

    Raises:
        UserError: no folder can be made there, or nothing can be written to it.
    """
    try:
        yield
    except OSError as error:
        folder = run.dir or (f"outputs/{run.name}" if run.name else default)
        raise UserError(
            f"run.dir: cannot write to {error.filename or folder} ({error.strerror}). "
            "Give another folder, or free some space."
        ) from error


def check_folder(folder: Path, config: Config, key: str = "run.name") -> None:
    """Refuse to start a fresh run over the checkpoint of another.

    Raises:
        UserError: there is one, and `resume` does not go on from it.
    """
    checkpoints = RunFolder(folder).checkpoint
    steps = whole_steps(checkpoints)
    if not steps or config.resume == "auto":
        return
    own = {path.resolve() for path in (folder, checkpoints, *steps)}
    if config.resume and Path(config.resume).expanduser().resolve() in own:
        return
    raise UserError(
        f"{key}: {folder} holds the checkpoint of an earlier run. "
        f"Go on from it with resume=auto, or give another {key}."
    )


def check_free(folder: Path, key: str = "run.name") -> None:
    """Refuse a folder that another run is writing to, before anything is written there.

    Raises:
        UserError: see `claim`.
    """
    if (folder / LOCK).exists():
        with claim(folder, key):
            pass


@contextlib.contextmanager
def claim(folder: Path, key: str = "run.name") -> Iterator[None]:
    """Hold the folder while a run writes to it; the system lets go of it when the process ends.

    Raises:
        UserError: another run does, or the folder cannot be written to.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"{key}: another run is writing to {folder}. Give another one.") from None
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder} ({error.strerror})") from error
    try:
        yield
    finally:
        lock.release()
