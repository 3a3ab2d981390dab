"""The entry points `python train.py` and `credit-dp`; sets the exit codes of commands.

Ranks set their own by `os._exit`: local ones in `distributed/worker.py`, those of a launcher in
`distributed/launch.py` and `peer_monitor.py`, and here once they have finished.

Exit codes: 0 done; 1 crashed, or a check failed; 2 a mistake in the input, reported in one line; 3
`--check` found the config right, but the data are remote and can't be reached; 75 stopped on
request while it trained, can be resumed (`EXIT_PREEMPTED`); 129 the terminal was lost (SIGHUP);
130 interrupted (Ctrl-C); 143 terminated (SIGTERM) while nothing trained.
"""

import importlib.metadata
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from credit_dp import __version__
from credit_dp.cli.arguments import Command, run_subcommand
from credit_dp.cli.cluster import cluster
from credit_dp.cli.data_commands import data
from credit_dp.cli.evaluate import compare_runs, evaluate
from credit_dp.cli.export import checkpoint
from credit_dp.cli.forecast import forecast
from credit_dp.cli.imports import imports
from credit_dp.cli.plan import plan
from credit_dp.cli.show_sweep import sweeps
from credit_dp.cli.train import train
from credit_dp.cli.verify import doctor, verify
from credit_dp.distributed.failure_report import report_error, wait_for_first_rank
from credit_dp.distributed.launcher import find_launcher, likely_rank
from credit_dp.distributed.signals import Terminated, raise_on_stop
from credit_dp.distributed.worker import exit_finished
from credit_dp.errors import UserError
from credit_dp.process import outlive_screen

# Releases of torch: the first one that works, and the last one with which the tests were run.
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)

COMMANDS: dict[str, Command] = {
    "train": train,
    "doctor": doctor,
    "plan": plan,
    "verify": verify,
    "checkpoint": checkpoint,
    "evaluate": evaluate,
    "compare": compare_runs,
    "forecast": forecast,
    "data": data,
    "import": imports,
    "sweep": sweeps,
    "cluster": cluster,
    "slurm": cluster,  # its former name
}

# Commands of commands, for users who leave out the first word.
NESTED = {
    "export": "checkpoint export",
    "inspect": "data inspect",
    "prepare": "data prepare",
    "script": "cluster script",
    "show": "sweep show",
    "stats": "data stats",
}

HELP = """\
credit-dp trains global weather models sharded by latitude.

  credit-dp train KEY=VALUE ...     train a model
  credit-dp doctor KEY=VALUE ...    check that sharding works on this machine
  credit-dp plan KEY=VALUE ...      estimate memory and traffic of a step on any number of ranks
  credit-dp verify KEY=VALUE ...    compare the sharded model with the unsharded one
  credit-dp evaluate KEY=VALUE ...  score stored forecasts against the truth
  credit-dp compare RUN RUN ...     compare the scores of runs
  credit-dp checkpoint export RUN   write a trained model to one plain file
  credit-dp forecast KEY=VALUE ...  forecast with a trained model, on any mesh
  credit-dp data COMMAND KEY=VALUE ...   inspect a store, and prepare it for training
  credit-dp import PACKAGE CONFIG   continue here what was set up with miles-credit
  credit-dp sweep show DIR          compare the runs of a sweep
  credit-dp cluster script KEY=VALUE ...   print a batch script for a cluster with SLURM or PBS

`credit-dp COMMAND --help` says more; `credit-dp --version` prints the version.
"""


def train_main() -> NoReturn:
    """Run `train.py`."""
    end(run_command(train, sys.argv[1:], "python train.py"))


def main() -> NoReturn:
    """Run the console script `credit-dp`."""
    end(run_command(dispatch, sys.argv[1:], "credit-dp"))


def end(code: int) -> NoReturn:
    """End the process, as the rank of a launcher at once if it trained or computed anything."""
    if code == 0 and "torch" in sys.modules and is_launched():
        exit_finished(code)
    sys.exit(code)


def dispatch(arguments: Sequence[str], program: str) -> int:
    """Run the command named by the first argument; return the exit code."""
    if list(arguments) == ["--version"]:
        sys.stdout.write(f"credit_dp {__version__}\n")
        return 0
    if arguments and arguments[0] in NESTED:
        full = NESTED[arguments[0]]
        raise UserError(
            f"{program}: {arguments[0]!r} is a part of a command. Use {program} {full}."
        )
    return run_subcommand(COMMANDS, arguments, program, HELP)


def run_command(command: Command, arguments: Sequence[str], program: str) -> int:
    """Run a command and return the exit code; an expected error becomes at most one line."""
    outlive_screen()
    for name in ("CREDIT_DP_CACHE", "HOME"):
        if os.environ.get(name) == "":  # as if it were not set: `data.cache` begins with it
            del os.environ[name]
    try:
        check_torch()
        with raise_on_stop():  # so that what is half written is removed
            return command(arguments, program)
    except UserError as error:
        # Every rank of a launcher meets the same mistake. The first one gets time to report it, so
        # that the line appears once.
        wait_for_first_rank(launcher_rank())
        report_error(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        silence_tasks()
        if launcher_rank() == 0:
            sys.stderr.write("\n".join(["", "interrupted", *interrupt.args, ""]))
        return 130
    except Terminated as stop:
        silence_tasks()
        return stop.code


def silence_tasks() -> None:
    """Keep Python from a line for each read of zarr that the end of this process cuts off."""
    logging.getLogger("asyncio").disabled = True
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = lambda _: None


def check_torch() -> None:
    """Warn of a torch that is newer than those that were tested, once for all ranks.

    It is not imported for this, which takes seconds.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError("torch: is not installed. Run `pip install torch`.") from error
    release = re.match(r"(\d+)\.(\d+)", version)
    found = (int(release[1]), int(release[2])) if release else OLDEST_TORCH
    if found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UserError(
            f"torch: needs {oldest} or newer, got {version}. Run `pip install 'torch>={oldest}'`."
        )
    if found > NEWEST_TORCH and launcher_rank() == 0:
        newest = ".".join(map(str, NEWEST_TORCH))
        sys.stderr.write(
            f"warning: torch {version} is newer than {newest}, the newest that was tested. "
            "`credit-dp doctor` checks that sharding works with it.\n"
        )


def is_launched() -> bool:
    """Return whether a launcher started this process with others."""
    try:
        return find_launcher(os.environ) is not None
    except UserError:
        return False


def launcher_rank() -> int:
    """Return this process's rank if a launcher started it, otherwise 0."""
    try:
        launcher = find_launcher(os.environ)
    except UserError:
        return likely_rank(os.environ)
    return 0 if launcher is None else launcher.ranks.rank
