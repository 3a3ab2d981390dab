"""The two entry points: `python train.py` and `credit-dp`. Here alone is decided how a run exits.

Exit codes: 0 done; 1 crashed, or a check failed; 2 a mistake in what was given, told in one line;
3 `--check` finds the config right, but can't reach the data, at an address elsewhere, from here;
75 told to stop, and can go on (`EXIT_PREEMPTED`); 130 interrupted (Ctrl-C); 143 terminated
(SIGTERM).
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from credit_dp.cli.arguments import Command, run_subcommand
from credit_dp.cli.data import data
from credit_dp.cli.evaluate import compare_runs, evaluate
from credit_dp.cli.export import checkpoint
from credit_dp.cli.forecast import forecast
from credit_dp.cli.plan import plan
from credit_dp.cli.slurm import slurm
from credit_dp.cli.sweep import sweeps
from credit_dp.cli.train import train
from credit_dp.cli.verify import doctor, verify
from credit_dp.distributed.launcher import find_launcher
from credit_dp.distributed.report import report_error, wait_for_first_rank
from credit_dp.distributed.signals import Terminated
from credit_dp.errors import UserError

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
    "sweep": sweeps,
    "slurm": slurm,
}

HELP = """\
credit-dp trains global weather models sharded by latitude.

  credit-dp train KEY=VALUE ...     train a model; the same as `python train.py`
  credit-dp doctor KEY=VALUE ...    check that sharding works on this machine
  credit-dp plan KEY=VALUE ...      say what a sharded training step takes, for any number of ranks
  credit-dp verify KEY=VALUE ...    compare the sharded model with the unsharded one
  credit-dp evaluate KEY=VALUE ...  score stored forecasts against the truth
  credit-dp compare RUN RUN ...     put the scores of runs beside each other
  credit-dp checkpoint export RUN   make one plain file of a trained model
  credit-dp forecast KEY=VALUE ...  forecast with a trained model, on any mesh
  credit-dp data COMMAND KEY=VALUE ...   look at a store, and make it ready for training
  credit-dp sweep show DIR          compare the runs of a sweep
  credit-dp slurm script KEY=VALUE ...   print a batch script for a cluster with SLURM

`credit-dp COMMAND --help` says more.
"""


def train_main() -> NoReturn:
    """What `train.py` does."""
    sys.exit(run_command(train, sys.argv[1:], "python train.py"))


def main() -> NoReturn:
    """The console script `credit-dp`."""
    sys.exit(run_command(dispatch, sys.argv[1:], "credit-dp"))


def dispatch(arguments: Sequence[str], program: str) -> int:
    """Run the command that the first argument names."""
    return run_subcommand(COMMANDS, arguments, program, HELP)


def run_command(command: Command, arguments: Sequence[str], program: str) -> int:
    """Run a command; whatever ends it early is one line (or none) and an exit code."""
    try:
        return command(arguments, program)
    except UserError as error:
        wait_for_first_rank(launcher_rank())
        report_error(str(error))
        return 2
    except KeyboardInterrupt:
        if launcher_rank() == 0:
            sys.stderr.write("\ninterrupted\n")
        return 130
    except Terminated as stop:
        return stop.code


def launcher_rank() -> int:
    """Which of a launcher's ranks this process is; 0 if nobody launched it."""
    try:
        launcher = find_launcher(os.environ)
    except UserError:
        return 0
    return 0 if launcher is None else launcher.ranks.rank
