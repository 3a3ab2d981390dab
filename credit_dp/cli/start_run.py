"""Runs a checked config in its folder.

The order: Hydra makes the folder; the folder is checked and locked; the ranks start. Only the first
of a launcher's ranks has Hydra make the folder; the others get its path when the ranks meet.
"""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from credit_dp.cli.check_run import explain_refusal
from credit_dp.cli.compose import Composer
from credit_dp.cli.folders import (
    check_run_folder,
    check_unlocked,
    explain_folder_errors,
    folder_key,
    lock_folder,
    remove_unused_folders,
    run_folder,
)
from credit_dp.config import Config, RunConfig
from credit_dp.distributed.failure_report import report_crash, report_error, wait_for_first_rank
from credit_dp.distributed.launch import launch
from credit_dp.distributed.launcher import find_launcher
from credit_dp.errors import UserError
from credit_dp.training.checkpoint_files import list_checkpoints
from credit_dp.training.run_folder import RunFolder


def run_once(composer: Composer, overrides: Sequence[str], config: Config) -> int:
    """Start a single run and return its exit code."""
    launcher = find_launcher(os.environ)
    folder = Path(run_folder(config.run.name, config.run.dir)).absolute()
    if config.run.name or config.run.dir:
        # The ranks check all else. This they can't: Hydra writes into the folder before they meet,
        # and a rank 0 that is refused then leaves the others of a launcher waiting for it.
        check_run_folder(folder, config, folder_key(config.run))
        if launcher is None:
            check_unlocked(folder, folder_key(config.run))
    explain = partial(explain_refusal, config, overrides)
    if launcher is not None and launcher.ranks.rank > 0:
        # Hydra would make another folder here. `launch` gets the path of the first rank's instead.
        return launch(config, explain=explain)
    # Without a name Hydra's folder is another new one beside it.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    with explain_folder_errors(config.run, "outputs"):
        result = composer.hydra.run(
            composer.config_name,
            lambda _: report_errors(lambda: run_in_folder(config, existing, explain)),
            list(overrides),
        )
    return int(result.return_value)


def report_errors(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, which Hydra calls; report its errors here.

    Hydra would print lines of its own around a `UserError`, and the caller takes an `OSError` for
    an error of making the folder.
    """
    try:
        return run()
    except UserError as error:
        launcher = find_launcher(os.environ)
        wait_for_first_rank(0 if launcher is None else launcher.ranks.rank)
        report_error(str(error))
        return 2
    except OSError:
        report_crash(traceback.format_exc())
        return 1


def run_in_folder(config: Config, existing: Path, explain: Callable[[UserError], str]) -> int:
    """Run a checked config in the folder that Hydra made for it; return the exit code.

    Hydra made all folders below `existing`.
    """
    key = folder_key(config.run)
    folder = Path(str(HydraConfig.get().runtime.output_dir))
    config = replace(config, run=replace(config.run, dir=str(folder)))
    check_run_folder(folder, config, key)

    def explain_and_remove(error: UserError) -> str:
        remove_unused_folders(folder, existing)  # a launcher's rank ends without the `finally`
        return explain(error)

    advice = partial(resume_advice, config.run)
    with lock_folder(folder, key), name_last_checkpoint(config.run):
        code = 1
        try:
            code = launch(config, advice=advice, explain=explain_and_remove)
        finally:
            if code:
                remove_unused_folders(folder, existing)
        return code


@contextlib.contextmanager
def name_last_checkpoint(run: RunConfig) -> Iterator[None]:
    """Add a line to a KeyboardInterrupt on how to continue the run, if it has saved anything."""
    try:
        yield
    except KeyboardInterrupt:
        advice = resume_advice(run)
        if not advice:
            raise
        raise KeyboardInterrupt(advice) from None


def resume_advice(run: RunConfig) -> str:
    """Return a line on how to continue a run; empty if it has saved nothing."""
    folder = RunFolder(Path(run.dir))
    saved = list_checkpoints(folder.checkpoints)
    if not saved:
        return ""
    return (
        f"the last checkpoint is {saved[-1]}; the same command with {folder.resume_keys(run)} "
        "continues from there"
    )
