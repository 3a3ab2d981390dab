"""A sweep: all runs of a `--multirun` folder, and what differs between them."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from credit_dp.errors import UserError
from credit_dp.sweeps.job import Job, read_job
from credit_dp.sweeps.planned_jobs import FILE, planned_jobs

SIGNS = (".hydra/overrides.yaml", "job.json", "submitted.json")  # of a run's folder
OWN = ("run.", "hydra.", "hydra/")  # keys that say where and how a run is started


@final
@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in their order; `keys` are those whose values differ between them."""

    folder: Path
    jobs: tuple[Job, ...]
    keys: tuple[str, ...]

    def job(self, name: str) -> Job:
        """The run with this number.

        Raises:
            KeyError: there is none.
        """
        return {job.name: job for job in self.jobs}[name]


def read_sweep(folder: Path | str) -> Sweep:
    """Read the folder of a sweep, whatever state its runs are in.

    Raises:
        UserError: the folder is not there, or holds no sweep.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder}: needs the folder of a sweep, but there is none.")
    try:
        found = {path.name for path in folder.iterdir() if is_run(path)}
    except OSError as error:
        raise UserError(f"{folder}: can't be read ({error.strerror}).") from error
    planned = {str(place): given for place, given in enumerate(planned_jobs(folder))}
    if not found and not (folder / FILE).exists():
        raise UserError(
            f"{folder}: is no sweep: there is neither {FILE} nor a run's folder in it. "
            "Give the folder that --multirun made."
        )
    names = sorted(found | planned.keys(), key=in_order)
    jobs = tuple(read_job(folder / name, planned.get(name)) for name in names)
    return Sweep(folder, jobs, swept_keys(jobs))


def is_run(folder: Path) -> bool:
    """Whether a folder looks like that of a run."""
    return any((folder / sign).exists() for sign in SIGNS)


def in_order(name: str) -> tuple[bool, int, str]:
    """Sorts numbers by their value and other names behind them."""
    return (False, int(name), name) if name.isdecimal() else (True, 0, name)


def swept_keys(jobs: tuple[Job, ...]) -> tuple[str, ...]:
    """Keys whose values are not the same in all runs, in the order in which they were given."""
    keys = dict.fromkeys(key for job in jobs for key in job.overrides if not key.startswith(OWN))
    return tuple(key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1)
