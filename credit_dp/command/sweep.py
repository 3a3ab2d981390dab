"""`--multirun`: one run for each combination of values, one after the other or as jobs."""

import os
import signal
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from credit_dp.command.compose import Composer
from credit_dp.command.folders import folder_made_by_hydra
from credit_dp.command.overrides import parse_overrides
from credit_dp.command.preflight import check_plan
from credit_dp.command.run import run_in_folder
from credit_dp.command.sweep_launchers import launcher_of, sweep_as_jobs
from credit_dp.command.sweep_scaling import show_at_the_end
from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.launch.launcher import find_launcher
from credit_dp.launch.report import report_refusal
from credit_dp.launch.signals import PREEMPTED, Terminated


class RunError(Exception):
    """One run of a sweep ended with this exit code; what there was to say has been said."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def sweep(composer: Composer, overrides: Sequence[Override], dashes: Sequence[str]) -> int:
    """Check every value of every key, then hand over to Hydra's sweeper and launcher, or ours.

    `dashes` are those that each run has to be given, too.

    Raises:
        UserError: a value is not allowed, or this is one of several ranks already.
    """
    check_place(overrides)
    overrides = with_params(composer, overrides)
    launcher = launcher_of(overrides)
    if launcher is not None:
        return sweep_as_jobs(composer, overrides, dashes, launcher)
    for texts in samples(composer, overrides):
        config = composer.config(texts)
        check_plan(config)
    texts = [str(override.input_line) for override in overrides]
    try:
        with folder_made_by_hydra(config.run, "multirun"):
            batches = composer.hydra.multirun(composer.config_name, run_one, texts)
    except RunError as failure:
        return failure.code
    jobs = [job for batch in batches or () for job in batch]
    if config.run.scaling and jobs:
        show_at_the_end(folder_of(jobs[0]).parent)
    return end_of(jobs)


def end_of(jobs: Sequence[JobReturn]) -> int:
    """Name the runs that failed, in one line; the exit code of the first of them, or 0."""
    failed = [job for job in jobs if job.return_value]
    if failed:
        folders = [folder_of(job) for job in failed]
        names = ", ".join(folder.name for folder in folders)
        report_refusal(
            f"--multirun: {len(failed)} of {len(jobs)} runs failed: {names}. "
            f"See `credit-dp sweep show {folders[0].parent}`."
        )
    return int(failed[0].return_value) if failed else 0


def folder_of(job: JobReturn) -> Path:
    """Where a run that Hydra started has written."""
    found = job.hydra_cfg or OmegaConf.create()
    return Path(str(OmegaConf.select(found, "hydra.runtime.output_dir")))


def check_all(composer: Composer, overrides: Sequence[Override]) -> list[Config]:
    """Check every combination and start none; their configs.

    Raises:
        UserError: a value is not allowed, or this is one of several ranks already.
    """
    check_place(overrides)
    overrides = with_params(composer, overrides)
    choices = [choice for override in overrides if (choice := values(composer, override))]
    configs = [composer.config(texts) for texts in product(*choices)]
    for config in configs:
        check_plan(config)
    return configs


def check_place(overrides: Sequence[Override]) -> None:
    """Refuse a sweep inside a rank, and runs that would each want to name the sweep's folder."""
    launcher = find_launcher(os.environ)
    if launcher is not None:
        raise UserError(f"--multirun: sweep from outside {launcher.name}, which started ranks here")
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group in ("run.name", "run.dir"):
            raise UserError(
                f"{override.key_or_group}: names the whole sweep, whose runs are numbered in it; "
                "give one value"
            )


def with_params(composer: Composer, overrides: Sequence[Override]) -> list[Override]:
    """With what an experiment has the sweeper vary, where no value of it is given.

    Given like this, interpolations in them are resolved in each run, and not by the sweeper.
    """
    given = {override.key_or_group for override in overrides}
    composed = composer.compose(samples(composer, overrides)[0])
    params = composed.hydra.sweeper.get("params") or {}
    texts = [f"{key}={value}" for key, value in params.items() if key not in given]
    return [*parse_overrides(texts), *overrides]


def samples(composer: Composer, overrides: Sequence[Override]) -> list[list[str]]:
    """Enough combinations to see each value once: their number is a sum and not a product."""
    choices = [values(composer, override) for override in overrides]
    first = [choice[0] for choice in choices if choice]
    result = [first]
    for position, choice in enumerate(choices):
        for text in choice[1:]:
            result.append([*first[:position], text, *first[position + 1 :]])
    return result


def values(composer: Composer, override: Override) -> list[str]:
    """The override, or one for each value of its sweep; none if they cannot be counted."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        return []
    override.config_loader = composer.hydra.config_loader
    return [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]


def run_one(composed: DictConfig) -> int:
    """What Hydra calls for each run of a sweep, here or inside a job.

    Here, the runs after one that failed are still to be made. One that was told to stop ends the
    sweep, for so was this program.

    Raises:
        RunError: inside a job, so that a job queue sees that the run did not succeed.
        Terminated: here, the run was told to stop.
    """
    code = run_in_folder(composed, of_sweep=True)
    choices = HydraConfig.get().runtime.choices
    here = all(choices[f"hydra/{name}"] == "basic" for name in ("launcher", "sweeper"))
    if here and code == PREEMPTED:
        raise Terminated(signal.SIGUSR1)
    if code and not here:
        raise RunError(code)
    return code
