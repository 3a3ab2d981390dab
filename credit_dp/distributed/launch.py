"""Run a function on every rank, whether ranks have to be started or a launcher started them."""

import os
import traceback
from collections.abc import Callable
from functools import partial

from credit_dp.config import Config
from credit_dp.distributed.failure_report import mesh_rank_name, report_crash, report_error
from credit_dp.distributed.launcher import (
    Launcher,
    RankInfo,
    find_launcher,
    rendezvous_host,
)
from credit_dp.distributed.local import run_processes, start_fork_server
from credit_dp.distributed.peer_monitor import PeerMonitor
from credit_dp.distributed.placement import ranks_per_model, resolve_ranks
from credit_dp.distributed.signals import handle_stop_in_thread, raise_on_stop
from credit_dp.distributed.worker import exit_now, run_rank
from credit_dp.errors import UserError
from credit_dp.files import remove_abandoned_folders

# Found in the traceback of a collective that failed: gloo's source, and torch's errors of nccl.
COLLECTIVE_ERRORS = ("gloo/transport/", "torch.distributed.Dist")


def launch(
    config: Config,
    run: str = "credit_dp.training.run:run",
    advice: Callable[[], str] = lambda: "",
    explain: Callable[[UserError], str] = str,
) -> int:
    """Call the function `run` on all ranks of the mesh, and return the exit code.

    The exit code is what the function returned, 2 for a `UserError` (reported on stderr in one
    line), or 1 for a crash (reported as one traceback).

    Args:
        run: `module:function`, called as `function(config, ranks) -> int`.
        advice: returns a line, or an empty one, that a launcher's rank 0 adds after Ctrl-C.
        explain: returns the line about an error of the function in a launcher's rank.

    Raises:
        UserError: the mesh does not fit this machine or the launcher's ranks, or these can't meet;
            nothing has started.
        KeyboardInterrupt, Terminated: Ctrl-C, or another of STOP_SIGNALS while no training handles
            it, or SIGTERM more than 2 seconds after the first; all ranks have ended by then.

    Under a launcher with several ranks this returns 0, or ends the process by `os._exit`, here or
    in `PeerMonitor`; signals do not raise then.
    """
    launcher = find_launcher(os.environ)
    with raise_on_stop():
        # As far as the config says, without counting GPUs.
        if launcher is None and ranks_per_model(config.parallel) * (config.parallel.data or 1) > 1:
            start_fork_server(run)  # it imports torch while this process still works out the mesh
        config = resolve_ranks(config, launcher)
        remove_abandoned_folders()
        world_size = ranks_per_model(config.parallel) * (config.parallel.data or 1)
        if world_size == 1:
            return run_single_process(config, run)
        if launcher is None:
            return run_processes(config, world_size, run)
    # Not in `raise_on_stop`: a rank that waits in a collective can't raise until it returns.
    return run_as_launched_rank(config, launcher, run, advice, explain)


def run_single_process(config: Config, run: str) -> int:
    """Run in this process alone and return the exit code; failures are reported, not raised."""
    try:
        return run_rank(config, RankInfo(), run)
    except UserError as error:
        report_error(str(error))
        return 2
    except Exception:  # noqa: BLE001 - the outermost frame: reported here, returned as exit code
        report_crash(traceback.format_exc())
        return 1


def run_as_launched_rank(
    config: Config,
    launcher: Launcher,
    run: str,
    advice: Callable[[], str],
    explain: Callable[[UserError], str],
) -> int:
    """Run as one rank of a launcher and return its exit code; one of the ranks reports failures."""
    # torch's `env://` reads the address of rank 0 from these variables.
    # They keep what the user has set.
    os.environ["MASTER_ADDR"] = rendezvous_host(launcher, os.environ)
    os.environ["MASTER_PORT"] = str(launcher.port)
    ranks = launcher.ranks
    monitor = PeerMonitor(ranks, config.parallel, advice)
    with handle_stop_in_thread(monitor.stop):
        try:
            code = run_rank(config, ranks, run, "env://", monitor.start_monitoring)
            monitor.wait_for_all_ranks()
        except UserError as error:
            monitor.fail(2, partial(report_error, explain(error)))
        except Exception:  # noqa: BLE001 - as above
            text = traceback.format_exc()
            name = mesh_rank_name(ranks.rank, config.parallel)
            report = partial(report_crash, f"{name} failed:\n{text}")
            monitor.fail(1, report, any(word in text for word in COLLECTIVE_ERRORS))
        if code:
            exit_now(code)
    return code
