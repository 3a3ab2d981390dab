"""One call that runs a function on every rank, however the ranks come about."""

import os
import sys
import traceback

from credit_dp.config import Config
from credit_dp.distributed.launcher import Launcher, Ranks, find_launcher
from credit_dp.distributed.local import run_processes, start_nursery
from credit_dp.distributed.peer_monitor import Witness
from credit_dp.distributed.placement import lay_out, per_model
from credit_dp.distributed.report import name_of, report_crash, report_refusal
from credit_dp.distributed.signals import on_stop, terminable
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
    with terminable():
        if launcher is None and may_need_processes(config):
            start_nursery(run)  # it imports torch while this process still works out the mesh
        config = lay_out(config, launcher)
        world = per_model(config.parallel) * (config.parallel.data or 1)
        if world == 1:
            return run_here(config, run)
        if launcher is None:
            return run_processes(config, world, run)
    return join_ranks(config, launcher, run)


def may_need_processes(config: Config) -> bool:
    """Whether more than one rank is certain before anyone has counted GPUs."""
    return per_model(config.parallel) * (config.parallel.data or 1) > 1


def run_here(config: Config, run: str) -> int:
    """Run in this process alone, and say what went wrong instead of raising it."""
    try:
        return run_rank(config, Ranks(), run)
    except UserError as error:
        report_refusal(str(error))
        return 2
    except Exception:  # noqa: BLE001 - the boundary of the program: shown, and told by exit code
        report_crash(traceback.format_exc())
        return 1


def join_ranks(config: Config, launcher: Launcher, run: str) -> int:
    """Be one rank of those that a launcher started; one of them says what went wrong."""
    os.environ.setdefault("MASTER_ADDR", launcher.address)
    os.environ.setdefault("MASTER_PORT", str(launcher.port))
    ranks, witness = launcher.ranks, Witness(launcher.ranks, config.parallel)
    with on_stop(witness.stop):
        try:
            code = run_rank(config, ranks, run, "env://", witness.attend)
            witness.leave()
        except UserError as error:
            code, line = 2, str(error)
            witness.fail(lambda: report_refusal(line))
        except Exception:  # noqa: BLE001 - as above
            name = name_of(ranks.rank, config.parallel.data or 1, config.parallel.domain)
            code, text = 1, f"{name} failed:\n{traceback.format_exc()}"
            witness.fail(lambda: report_crash(text))
        if code:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(code)  # an orderly exit would wait for ranks that may never answer
    return code
