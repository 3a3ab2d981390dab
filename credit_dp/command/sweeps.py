"""The sweep commands: `credit-dp sweep show|scaling` read what `--multirun` left."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from credit_dp.command.arguments import Command, run_named
from credit_dp.command.sweep_scaling import scaling
from credit_dp.command.sweep_show import show

HELP = """\
credit-dp sweep reads the folder of a sweep (`python train.py --multirun ...`), also while it runs.

  credit-dp sweep show DIR       the runs with what was swept, how they stand, and which does best
  credit-dp sweep scaling DIR    speed-up and efficiency over numbers of ranks

`credit-dp sweep COMMAND --help` says more.
"""

COMMANDS: Mapping[str, Command] = MappingProxyType({"show": show, "scaling": scaling})


def sweeps(arguments: Sequence[str], program: str) -> int:
    """Run the sweep command that the first argument names; the exit code.

    Raises:
        UserError: there is none of this name, or what it raises.
    """
    return run_named(COMMANDS, arguments, program, HELP)
