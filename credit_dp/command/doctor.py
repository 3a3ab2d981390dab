"""The doctor command: `credit-dp doctor parallel.domain=4` checks sharding on this machine."""

from collections.abc import Sequence

from credit_dp.command.question import read_question
from credit_dp.launch import launch

HELP = """\
{program} KEY=VALUE ...: checks that sharding works on this machine, within a minute.

Prints versions, devices, back end and threads, and compares an exchange of rows, a reduction and
one step of a sharded U-Net with the unsharded answers, and what the data and pipeline axes send,
on the ranks that these keys ask for:
  parallel.domain=4 parallel.data=2 parallel.pipeline=2 parallel.threads=1 device=cpu

  --json        the report as JSON
  --help, -h    this text

Exit code: 0 if all checks passed, 1 if one failed, 2 if the keys are wrong.
"""


def doctor(arguments: Sequence[str], program: str) -> int:
    """Check the machine; the exit code.

    Raises:
        UserError: anything that is wrong before the first process starts.
    """
    question = read_question(arguments, program, HELP)
    if question is None:
        return 0
    function = "check_json" if question.json else "check"
    return launch(question.config, f"credit_dp.doctor:{function}")
