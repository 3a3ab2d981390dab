"""One call that runs a function on every rank, however the ranks come about."""

import os
import sys
import traceback

from credit_dp.config import Config
from credit_dp.distributed.launcher import Launcher, RankInfo, find_launcher
from credit_dp.distributed.local import run_processes, start_fork_server
from credit_dp.distributed.peer_monitor import PeerMonitor
from credit_dp.distributed.placement import ranks_per_model, resolve_ranks
from credit_dp.distributed.report import rank_name, report_crash, report_error
from credit_dp.distributed.signals import handle_stop_in_thread, raise_on_stop
from credit_dp.distributed.worker import run_rank
from credit_dp.errors import UserError


def launch(config: Config, run: str = "credit_dp.training.run:run") -> int:
    """Run `module:function` as `function(config, ranks) -> int` on all ranks of the mesh.

    Returns the exit code, after saying on stderr what went wrong, once: 0, or 2 for a `UserError`
    (one line), or 1 for a crash (one traceback), or what the function returned.

    Raises:
        UserError: the mesh does not fit this machine or the launcher's ranks; nothing has started.
        KeyboardInterrupt, Terminated: Ctrl-C, or SIGTERM or SIGUSR1 where there is no training that
            could heed it; all ranks are gone by then. A launcher's rank ends at once instead.
    """
    launcher = find_launcher(os.environ)
    with raise_on_stop():
        if launcher is None and is_multi_rank(config):
            start_fork_server(run)  # it imports torch while this process still works out the mesh
        config = resolve_ranks(config, launcher)
        world = ranks_per_model(config.parallel) * (config.parallel.data or 1)
        if world == 1:
            return run_single_process(config, run)
        if launcher is None:
            return run_processes(config, world, run)
    return run_as_launched_rank(config, launcher, run)


def is_multi_rank(config: Config) -> bool:
    """Whether more than one rank is certain before anyone has counted GPUs."""
    return ranks_per_model(config.parallel) * (config.parallel.data or 1) > 1


def run_single_process(config: Config, run: str) -> int:
    """Run in this process alone, and say what went wrong instead of raising it."""
    try:
        return run_rank(config, RankInfo(), run)
    except UserError as error:
        report_error(str(error))
        return 2
    except Exception:  # noqa: BLE001 - the boundary of the program: shown, and told by exit code
        report_crash(traceback.format_exc())
        return 1


def run_as_launched_rank(config: Config, launcher: Launcher, run: str) -> int:
    """Be one rank of those that a launcher started; one of them says what went wrong."""
    os.environ.setdefault("MASTER_ADDR", launcher.address)
    os.environ.setdefault("MASTER_PORT", str(launcher.port))
    ranks, witness = launcher.ranks, PeerMonitor(launcher.ranks, config.parallel)
    with handle_stop_in_thread(witness.stop):
        try:
            code = run_rank(config, ranks, run, "env://", witness.start_monitoring)
            witness.wait_for_all_ranks()
        except UserError as error:
            code, line = 2, str(error)
            witness.report_failure(lambda: report_error(line))
        except Exception:  # noqa: BLE001 - as above
            name = rank_name(ranks.rank, config.parallel.data or 1, config.parallel.domain)
            code, text = 1, f"{name} failed:\n{traceback.format_exc()}"
            witness.report_failure(lambda: report_crash(text))
        if code:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(code)  # an orderly exit would wait for ranks that may never answer
    return code
