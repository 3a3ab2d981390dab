"""The jobs of a sweep: one for each combination, in the folder that it has had before, if any.

A job is known by its overrides, so that a sweep that is started again finds what it has done, in
whatever order its values are given.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, final

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp.command.again import flat, plain
from credit_dp.command.compose import Composer
from credit_dp.command.job_record import FILE, read_overrides
from credit_dp.config import Config, as_dict
from credit_dp.errors import UserError
from credit_dp.training.run_folder import RunFolder, write_whole

SUBMITTED = "submitted.json"  # beside FILE: what is to be done there
OF_THE_SWEEP = (
    "run.",
    "hydra.",
    "hydra/",
    "resume",
)  # not of what a job computes
# What a run makes definite, depending on where it runs: key and value that leave it open.
LEFT_OPEN = (("device", "auto"), ("parallel.data", None))

State = Literal["finished", "unfinished", "new"]


@final
@dataclass(frozen=True)
class Job:
    """One run of a sweep: its overrides, but for those of the whole sweep, and its folder."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    config: Config
    state: State


def plan_jobs(composer: Composer, choices: Sequence[Sequence[str]], sweep: Path) -> list[Job]:
    """A job for each combination of the choices, in the order of Hydra's sweeper.

    Args:
        composer: of the command.
        choices: for each key the overrides to choose from.
        sweep: the folder of the sweep.

    Raises:
        UserError: a combination is not allowed, or a job was run before with another config.
    """
    known, jobs = known_folders(sweep), []
    free = max((int(folder.name) for folder in numbered(sweep)), default=-1) + 1
    for texts in combinations(choices):
        config = composer.config(texts)
        overrides = tuple(text for text in texts if not text.lstrip("+").startswith(OF_THE_SWEEP))
        folder = known.get(identity(overrides))
        if folder is None:
            folder, free = sweep / str(free), free + 1
        jobs.append(Job(int(folder.name), folder, overrides, config, state_of(folder, config)))
    return jobs


def combinations(choices: Sequence[Sequence[str]]) -> list[list[str]]:
    """One override of each key, in every way, the last key's values changing fastest."""
    return [list(texts) for texts in product(*choices)]


def identity(overrides: Sequence[str]) -> tuple[str, ...]:
    """What two jobs have in common if they are the same."""
    texts = (text.lstrip("+") for text in overrides)
    return tuple(sorted(text for text in texts if not text.startswith(OF_THE_SWEEP)))


def note_job(job: Job, slurm_job: str | None = None) -> None:
    """Leave in a job's folder what it is, before it starts, and its number in a queue.

    Raises:
        UserError: the folder cannot be written to.
    """
    told = {"overrides": job.overrides, "slurm_job": slurm_job}
    write_whole(job.folder / SUBMITTED, json.dumps(told, indent=2) + "\n")


def numbered(sweep: Path) -> list[Path]:
    """The folders of jobs in a sweep."""
    if not sweep.is_dir():
        return []
    return [folder for folder in sweep.iterdir() if folder.name.isdecimal() and folder.is_dir()]


def known_folders(sweep: Path) -> dict[tuple[str, ...], Path]:
    """The folder of each job that was started or submitted before."""
    found = {}
    for folder in numbered(sweep):
        for name in (SUBMITTED, FILE):
            overrides = read_overrides(folder / name)
            if overrides is not None:
                found[identity(overrides)] = folder
    return found


def earlier_state(folder: Path, overrides: Sequence[str], config: Config) -> State:
    """How far a job has come, if it was this one that was run in the folder.

    Raises:
        UserError: it was, with another config.
    """
    before = read_overrides(folder / FILE)
    same = before is not None and identity(before) == identity(overrides)
    return state_of(folder, config) if same else "new"


def state_of(folder: Path, config: Config) -> State:
    """How far the job in a folder has come; one has finished that has its scores.

    Raises:
        UserError: the folder is that of a run with another config.
    """
    run = RunFolder(folder)
    if not run.config.exists():
        return "new"
    changed = first_difference(run.config, config)
    if changed is not None:
        raise UserError(
            f"run.name: {folder} was run with these overrides, but with another config "
            f"({changed}). Give another run.name, or remove that folder to run the job afresh."
        )
    return "finished" if run.scores.is_file() else "unfinished"


def first_difference(path: Path, config: Config) -> str | None:
    """The first key that has another value in a run's config file, with both; None if none has."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException):
        return f"{path.name} can't be read"
    before = values_of(saved if isinstance(saved, dict) else {})
    for key, value in values_of(as_dict(config)).items():
        dates = config.data.dates.open and key.startswith("data.dates.")
        open_here = dates or (key, value) in LEFT_OPEN
        if not open_here and not key.startswith(OF_THE_SWEEP) and before.get(key, ...) != value:
            return f"{key}: {before.get(key, 'nothing')}, now {value}"
    return None


def values_of(table: Mapping[Any, Any]) -> dict[str, object]:
    """All values by dotted key, tuples as lists."""
    return {".".join(map(str, key)): plain(value) for key, value in flat(table)}


def choices_of(overrides: Sequence[Override], composer: Composer) -> list[list[str]]:
    """For each key of a command line the overrides to choose from.

    Raises:
        UserError: a key has a range, of which there is no end of values.
    """
    choices = []
    for override in overrides:
        if not override.is_sweep_override():
            choices.append([str(override.input_line)])
            continue
        if not override.is_discrete_sweep():
            raise UserError(f"{override.key_or_group}: needs a list of values, like 1,2,3")
        override.config_loader = composer.hydra.config_loader
        key = override.get_key_element()
        choices.append([f"{key}={text}" for text in override.sweep_string_iterator()])
    return choices
