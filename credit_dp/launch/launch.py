"""One call that runs a function on every rank, however the ranks come about."""

import os
import sys
import traceback

from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.launch.launcher import Launcher, find_launcher
from credit_dp.launch.layout import lay_out
from credit_dp.launch.local import run_processes, start_nursery, terminable
from credit_dp.launch.ranks import Ranks
from credit_dp.launch.report import after_first_rank, report_crash, report_refusal
from credit_dp.launch.worker import run_rank


def launch(config: Config, run: str = "credit_dp.train:run") -> int:
    """Run `module:function` as `function(config, ranks) -> int` on all data x domain ranks.

    Returns the exit code, after saying on stderr what went wrong, once: 0, or 2 for a `UserError`
    (one line), or 1 for a crash (one traceback), or what the function returned.

    Raises:
        UserError: the mesh does not fit this machine or the launcher's ranks; nothing has started.
        KeyboardInterrupt, Terminated: Ctrl-C or SIGTERM; all ranks are gone by then.
    """
    launcher = find_launcher(os.environ)
    with terminable():
        if launcher is None and may_need_processes(config):
            start_nursery(run)  # it imports torch while this process still works out the mesh
        config = lay_out(config, launcher)
        world = config.parallel.domain * (config.parallel.data or 1)
        if launcher is not None and world > 1:
            return join_ranks(config, launcher, run)
        if world > 1:
            return run_processes(config, world, run)
        return run_here(config, Ranks(), run, "")


def may_need_processes(config: Config) -> bool:
    """Whether more than one rank is certain before anyone has counted GPUs."""
    return config.parallel.domain * (config.parallel.data or 1) > 1


def join_ranks(config: Config, launcher: Launcher, run: str) -> int:
    """Be one rank of those that a launcher started."""
    os.environ.setdefault("MASTER_ADDR", launcher.address)
    os.environ.setdefault("MASTER_PORT", str(launcher.port))
    code = run_here(config, launcher.ranks, run, "env://")
    if code:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)  # an orderly exit would wait for ranks that may never answer
    return code


def run_here(config: Config, ranks: Ranks, run: str, meeting_point: str) -> int:
    """Run in this process, and say what went wrong instead of raising it."""
    try:
        return run_rank(config, ranks, run, meeting_point)
    except UserError as error:
        after_first_rank(ranks.rank)
        report_refusal(str(error))
        return 2
    except Exception:  # noqa: BLE001 - the boundary of the program: shown, and told by exit code
        after_first_rank(ranks.rank)
        report_crash(traceback.format_exc())
        return 1
