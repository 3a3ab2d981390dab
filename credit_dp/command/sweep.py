"""`--multirun`: one run for each combination of values, one after the other or as jobs."""

import os
from collections.abc import Sequence
from itertools import product

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from credit_dp.command.compose import Composer
from credit_dp.command.folders import folder_made_by_hydra
from credit_dp.command.preflight import check_plan
from credit_dp.command.run import run_in_folder
from credit_dp.errors import UserError
from credit_dp.launch.launcher import find_launcher


class RunError(Exception):
    """One run of a sweep ended with this exit code; what there was to say has been said."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def sweep(composer: Composer, overrides: Sequence[Override]) -> int:
    """Check every value of every key, then hand over to Hydra's sweeper and launcher.

    Raises:
        UserError: a value is not allowed, or this is one of several ranks already.
    """
    check_place(overrides)
    for texts in samples(composer, overrides):
        config = composer.config(texts)
        check_plan(config)
    texts = [str(override.input_line) for override in overrides]
    try:
        with folder_made_by_hydra(config.run, "multirun"):
            composer.hydra.multirun(composer.config_name, run_one, texts)
    except RunError as failure:
        return failure.code
    return 0


def check_all(composer: Composer, overrides: Sequence[Override]) -> int:
    """Check every combination and start none; how many there are.

    Raises:
        UserError: a value is not allowed, or this is one of several ranks already.
    """
    check_place(overrides)
    choices = [choice for override in overrides if (choice := values(composer, override))]
    combinations = list(product(*choices))
    for texts in combinations:
        check_plan(composer.config(texts))
    return len(combinations)


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

    Raises:
        RunError: so that Hydra and a job queue see that the run did not succeed.
    """
    code = run_in_folder(composed)
    if code:
        raise RunError(code)
    return code
