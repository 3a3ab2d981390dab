"""The data commands: `credit-dp data inspect|stats|prepare` look at a store and make it ready."""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from credit_dp.checks import nearest
from credit_dp.command.data_inspect import inspect
from credit_dp.command.data_prepare import prepare
from credit_dp.command.data_stats import stats
from credit_dp.errors import UserError

HELP = """\
credit-dp data makes stores ready for training.

  credit-dp data inspect store=PATH       say what is in a store and how it is laid out
  credit-dp data stats store=PATH         compute the statistics that fields are normalised with
  credit-dp data prepare store=PATH out=PATH   copy it into the form that ranks read fastest

`credit-dp data COMMAND --help` says more.
"""

COMMANDS: Mapping[str, Callable[[Sequence[str], str], int]] = MappingProxyType(
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
    if not arguments or arguments[0] in ("--help", "-h"):
        sys.stdout.write(HELP)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise UserError(
            f"{program}: needs a command ({', '.join(COMMANDS)}), got {name!r}."
            f"{nearest(name, COMMANDS)}"
        )
    return COMMANDS[name](rest, f"{program} {name}")
