"""One run in its folder: what Hydra calls once, or once for each run of a sweep."""

import os
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from credit_dp.cli.compose import (
    Composer,
    check_run_config,
    check_run_folder,
    check_unlocked,
    explain_folder_errors,
    folder_key,
    lock_folder,
    run_folder,
    to_config,
)
from credit_dp.cli.output import print_line
from credit_dp.cli.sweep_jobs import earlier_state, failure_cause, record_job
from credit_dp.config import Config
from credit_dp.distributed import launch
from credit_dp.distributed.launcher import find_launcher
from credit_dp.distributed.report import (
    capture_reports,
    report_crash,
    report_error,
    wait_for_first_rank,
)
from credit_dp.errors import UserError


def run_once(composer: Composer, overrides: Sequence[str], config: Config) -> int:
    """A single run; of a launcher's ranks only the first makes the folder, and tells the others.

    Raises:
        UserError: the folder holds another run.
    """
    launcher = find_launcher(os.environ)
    if config.run.name or config.run.dir:
        # Seen by every rank, so that none waits for one that has left.
        folder = Path(run_folder(config.run.name, config.run.dir))
        check_run_folder(folder, config, folder_key(config.run))
        if launcher is None:
            check_unlocked(folder, folder_key(config.run))
    if launcher is not None and launcher.ranks.rank > 0:
        return launch(config)
    with explain_folder_errors(config.run, "outputs"):
        result = composer.hydra.run(composer.config_name, run_in_folder, list(overrides))
    return int(result.return_value)


def run_in_folder(composed: DictConfig, of_sweep: bool = False) -> int:
    """Run a composed config in the folder that Hydra made for it; the exit code.

    A run of a sweep leaves a record of how it ended; what has finished before is not run again,
    and what has not goes on.

    A `UserError` is told here: Hydra would print lines of its own around it. So is an `OSError`,
    which outside would pass for one of making the folder.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    launcher = find_launcher(os.environ)
    try:
        config = to_config(composed)
        key = folder_key(config.run)
        config = replace(config, run=replace(config.run, dir=str(folder)))
        if launcher is not None and launcher.ranks.rank > 0:
            return check_and_launch(config)  # of a sweep: the first has claimed it
        state = earlier_state(folder, task_overrides(), config) if of_sweep else "new"
        if state == "finished":
            print_line(f"{folder}: done already")
            return 0
        if state == "unfinished" and config.resume is None:
            config = replace(config, resume="auto")
        check_run_folder(folder, config, key)
        with lock_folder(folder, key):
            return record_run(config) if of_sweep else check_and_launch(config)
    except UserError as error:
        wait_for_first_rank(0 if launcher is None else launcher.ranks.rank)
        report_error(str(error))
        return 2
    except OSError:
        report_crash(traceback.format_exc())
        return 1


def record_run(config: Config) -> int:
    """Check and launch a run of a sweep, and leave a record of how it ended.

    Raises:
        UserError: the run can't be started.
    """
    with capture_reports() as told, record_job(Path(config.run.dir), task_overrides()) as ending:
        try:
            ending.code = check_and_launch(config)
        except UserError as error:
            ending.code, ending.cause = 2, str(error)
            raise
        ending.cause = failure_cause("".join(told))
    return ending.code


def task_overrides() -> list[str]:
    """The overrides of the run that Hydra has started."""
    return [str(text) for text in HydraConfig.get().overrides.task]


def check_and_launch(config: Config) -> int:
    """Refuse what is bound to fail, then start the ranks.

    Raises:
        UserError: the run can't be started.
    """
    check_run_config(config)
    return launch(config)
