"""The folders of runs and sweeps: their names, their locks, and what a run may not write over."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from credit_dp.config import Config, RunConfig
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import list_checkpoints
from credit_dp.training.run_folder import RunFolder

LOCK_FILE = ".run.lock"
HYDRA_FOLDER = ".hydra"
SWEEP_FILE = "multirun.yaml"  # in the folder of a sweep: its config


def run_folder(name: str | None, folder: str) -> str:
    """Return the folder of a run."""
    return os.path.expanduser(folder) or f"outputs/{name or unique_name()}"


def sweep_folder(name: str | None, folder: str) -> str:
    """Return the folder of a sweep, which numbers its runs in it."""
    return os.path.expanduser(folder) or (
        f"outputs/{name}" if name else f"multirun/{unique_name()}"
    )


def unique_name() -> str:
    """Return a name that no other run has: the time in microseconds and the job or process."""
    job = os.environ.get("SLURM_JOB_ID") or os.getpid()
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}_{job}"


def folder_key(run: RunConfig) -> str:
    """Return the key that determines the folder, for messages."""
    return "run.dir" if run.dir else "run.name"


@contextlib.contextmanager
def explain_folder_errors(run: RunConfig, default: str) -> Iterator[None]:
    """Turn errors of Hydra making the run's folder into one line.

    Hydra makes the folder before it calls any function of this package.
    """
    try:
        yield
    except OSError as error:
        folder = run.dir or (f"outputs/{run.name}" if run.name else default)
        raise UserError(
            f"run.dir: cannot write to {error.filename or folder} ({error.strerror}). "
            "Give another folder, or free some space."
        ) from error


def run_checkpoints(folder: Path, key: str) -> list[Path]:
    """Return the checkpoints of the run in a folder."""
    try:
        return list_checkpoints(RunFolder(folder).checkpoints)
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UserError(
            f"{key}: cannot read {folder} ({error.strerror}). Give another {key}."
        ) from error


def check_sweep_folder(run: RunConfig) -> None:
    """Refuse to number the runs of a sweep in the folder of a single run."""
    folder, key = Path(sweep_folder(run.name, run.dir)), folder_key(run)
    if run_checkpoints(folder, key):
        raise UserError(
            f"{key}: {folder} holds the checkpoint of a single run, but a sweep needs a folder of "
            f"its own. Give another {key}."
        )


def check_run_folder(folder: Path, config: Config, key: str = "run.name") -> None:
    """Refuse to start a run in the folder of a sweep, or in one with another run's checkpoints."""
    steps = run_checkpoints(folder, key)
    if (folder / SWEEP_FILE).exists():
        raise UserError(
            f"{key}: {folder} is the folder of a sweep, but a single run needs a folder of its "
            f"own. Give another {key}."
        )
    if not steps or config.resume == "auto":
        return
    resumable = {path.resolve() for path in (folder, RunFolder(folder).checkpoints, *steps)}
    if config.resume and Path(config.resume).expanduser().resolve() in resumable:
        return
    raise UserError(
        f"{key}: {folder} holds the checkpoint of an earlier run. "
        f"Continue that run with resume=auto, or give another {key}."
    )


def check_unlocked(folder: Path, key: str = "run.name") -> None:
    """Refuse a folder that another run is writing to, without writing there."""
    if (folder / LOCK_FILE).exists():
        with lock_folder(folder, key):
            pass


def remove_unused_folders(folder: Path, existing: Path) -> None:
    """Remove the folders that were created for a run, if the run has written nothing there.

    A run that was refused has only what Hydra writes before it begins, and the lock, which has to
    be held. `existing` is the innermost folder that existed before, which stays.
    """
    if existing not in folder.parents:
        return
    with contextlib.suppress(OSError):  # another run has begun beside it
        if {path.name for path in folder.iterdir()} <= {HYDRA_FOLDER, LOCK_FILE}:
            shutil.rmtree(folder)
            while (folder := folder.parent) != existing:
                folder.rmdir()


@contextlib.contextmanager
def lock_folder(folder: Path, key: str = "run.name") -> Iterator[None]:
    """Lock the folder while a run writes to it; the system releases it if the process dies."""
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"{key}: another run is writing to {folder}. Give another {key}.") from None
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder} ({error.strerror})") from error
    try:
        yield
    finally:
        lock.release()
