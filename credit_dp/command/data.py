"""The data commands: `credit-dp data inspect|stats|prepare` look at a store and make it ready."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from credit_dp.command.arguments import Command, run_named
from credit_dp.command.data_inspect import inspect
from credit_dp.command.data_prepare import prepare
from credit_dp.command.data_stats import stats

HELP = """\
credit-dp data makes stores ready for training.

  credit-dp data inspect store=PATH       say what is in a store and how it is laid out
  credit-dp data stats store=PATH         compute the statistics that fields are normalised with
  credit-dp data prepare store=PATH out=PATH   copy it into the form that ranks read fastest

`credit-dp data COMMAND --help` says more.
"""

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "inspect": inspect,
        "prepare": prepare,
        "stats": stats,
    }
)


def data(arguments: Sequence[str], program: str) -> int:
    """Run the data command that the first argument names; the exit code.

    Raises:
        UserError: there is none of this name, or what it raises.
    """
    return run_named(COMMANDS, arguments, program, HELP)
