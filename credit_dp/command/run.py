"""One run in its folder: what Hydra calls once, or once for each run of a sweep."""

import os
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from credit_dp.command.compose import Composer, to_config
from credit_dp.command.folders import (
    check_folder,
    check_free,
    claim,
    folder_key,
    folder_made_by_hydra,
    run_folder,
)
from credit_dp.command.preflight import check_plan
from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.launch import launch
from credit_dp.launch.launcher import find_launcher
from credit_dp.launch.report import after_first_rank, report_crash, report_refusal


def run_once(composer: Composer, overrides: Sequence[str], config: Config) -> int:
    """A single run; of a launcher's ranks only the first makes the folder, and tells the others.

    Raises:
        UserError: the folder holds another run.
    """
    launcher = find_launcher(os.environ)
    if config.run.name or config.run.dir:
        # Seen by every rank, so that none waits for one that has left.
        folder = Path(run_folder(config.run.name, config.run.dir))
        check_folder(folder, config, folder_key(config.run))
        if launcher is None:
            check_free(folder, folder_key(config.run))
    if launcher is not None and launcher.ranks.rank > 0:
        return launch(config)
    with folder_made_by_hydra(config.run, "outputs"):
        result = composer.hydra.run(composer.config_name, run_in_folder, list(overrides))
    return int(result.return_value)


def run_in_folder(composed: DictConfig) -> int:
    """Run a composed config in the folder that Hydra made for it; the exit code.

    A `UserError` is told here: Hydra would print lines of its own around it. So is an `OSError`,
    which outside would pass for one of making the folder.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    launcher = find_launcher(os.environ)
    try:
        config = to_config(composed)
        check_plan(config)
        key = folder_key(config.run)
        config = replace(config, run=replace(config.run, dir=str(folder)))
        if launcher is not None and launcher.ranks.rank > 0:
            return launch(config)  # a job of a sweep: the first rank has claimed the folder
        check_folder(folder, config, key)
        with claim(folder, key):
            return launch(config)
    except UserError as error:
        after_first_rank(0 if launcher is None else launcher.ranks.rank)
        report_refusal(str(error))
        return 2
    except OSError:
        report_crash(traceback.format_exc())
        return 1
