"""Start the ranks as processes of this machine, and wait until all of them have ended.

In this order: a fork server imports torch once (multiprocessing's forkserver), each rank is forked
from it, the parent waits, and the ranks' outcomes are read from files. Forking from a process that
has never touched CUDA lets CPU and CUDA ranks start alike.

All processes end together: if one rank fails, the parent kills the others; if the parent ends, it
kills all ranks; and if the parent itself is killed, the kernel does (see `forkserver`).
"""

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from credit_dp.config import Config, ParallelConfig
from credit_dp.distributed.failure_report import (
    RankOutcome,
    mesh_rank_name,
    read_aborts,
    read_outcome,
    report_crash,
    report_error,
)
from credit_dp.distributed.forkserver import import_from_same_folders
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.signals import (
    STOP_SIGNALS,
    Terminated,
    block_signals,
    handle_stop,
    note_signal,
    signal_name,
)
from credit_dp.distributed.worker import rank_main
from credit_dp.files import temporary_folder

# torch imports these late, for an optimizer and a checkpoint: the fork server does, once for all.
EXTRA_PRELOADS = {"credit_dp.training.run": ["torch._dynamo", "torch.distributed.checkpoint"]}
# A job queue may signal all processes of a job at once. The two helper processes inherit the
# blocked signals, and so does each rank until `rank_main` unblocks them: a signal that comes while
# a rank is being forked is delivered once the rank can act on it. Ctrl-C in a terminal would show a
# traceback of their first imports, before our `forkserver` ignores it.
BLOCKED = (*STOP_SIGNALS, signal.SIGINT)
# After the first failure, ranks that fail for the same reason have so long to report it.
FAILURE_GRACE_SECONDS = 0.5
# What multiprocessing returns for a rank if the fork server has ended.
LOST_FORK_SERVER = 255
LOST_FORK_SERVER_LINE = (
    "the process that ranks are forked from ended (killed?); all ranks were stopped"
)


def start_fork_server(run: str) -> None:
    """Start the process that ranks are forked from; it imports torch in the background."""
    module = run.partition(":")[0]
    preload = ["credit_dp.distributed.forkserver", "torch", module, "credit_dp.distributed.worker"]
    preload += EXTRA_PRELOADS.get(module, [])
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    use_locked_folder()
    start_resource_tracker()
    with import_from_same_folders(), block_signals(BLOCKED):
        forkserver.ensure_running()


def start_resource_tracker() -> None:
    """Start multiprocessing's process that removes what killed processes leave."""
    with import_from_same_folders(), block_signals(BLOCKED), silence_resource_tracker():
        resource_tracker.ensure_running()  # it unblocks some signals in this process at the end


def use_locked_folder() -> None:
    """Let multiprocessing keep its sockets in a folder that this process has locked.

    The folder that it would create stays where this process is killed; a locked one is removed by
    `remove_abandoned_folders`. A child process uses that of its parent.
    """
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in settings:
        stack = contextlib.ExitStack()
        settings["tempdir"] = str(stack.enter_context(temporary_folder()))
        Finalize(None, stack.close, exitpriority=-100)  # in this process only, not in forked ones


@contextlib.contextmanager
def silence_resource_tracker() -> Iterator[None]:
    """Silence the warnings of multiprocessing's resource tracker, if it is started meanwhile.

    It warns of semaphores that a killed rank could not release (numcodecs' blosc has one).
    """
    before = os.environ.get("PYTHONWARNINGS")
    ignored = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = f"{before},{ignored}" if before else ignored
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def run_processes(config: Config, world_size: int, run: str) -> int:
    """Run all ranks on this machine, and return the exit code when all have ended.

    Raises:
        Terminated: a signal came before training began or after it ended, or SIGTERM came again
            more than 2 seconds after the first.
    """
    start_fork_server(run)
    with temporary_folder() as folder:
        processes: list[ForkServerProcess] = []
        try:
            try:
                for rank in range(world_size):
                    ranks = RankInfo(rank, world_size, rank, world_size)
                    processes.append(start_rank(ranks, str(folder), run, config))
            except (ConnectionError, EOFError):
                report_error(LOST_FORK_SERVER_LINE)
                return 1
            received: list[int] = []
            with handle_stop(partial(forward_signal, processes, received, folder)):
                # Before `kill`, which gives the surviving ranks an exit code as well.
                failed, exit_codes = wait_for_all(processes, folder)
        finally:
            kill(processes)
        outcomes = [read_outcome(folder, rank) for rank in range(world_size)]
        if failed:
            # A rank without a handler, before or after training, ends by the forwarded signal.
            if received and any(-(code or 0) in STOP_SIGNALS for _, code in exit_codes):
                raise Terminated(received[0])
            return report_failure(outcomes, exit_codes, read_aborts(folder), config.parallel)
        return max(outcome.code for outcome in outcomes if outcome is not None)


def forward_signal(
    processes: list[ForkServerProcess], received: list[int], folder: Path, number: int
) -> None:
    """Record a signal and send SIGUSR1 to all ranks, which may get it several times.

    Always SIGUSR1: a SIGTERM that is repeated after 2 seconds would end a rank that is saving. A
    note in the folder tells them which signal it was.
    """
    received.append(number)
    note_signal(folder, received[0])
    for process in processes:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)


def start_rank(ranks: RankInfo, folder: str, run: str, config: Config) -> ForkServerProcess:
    """Start the process of one rank and return it."""
    context = multiprocessing.get_context("forkserver")
    # The fork server has the environment of the moment it was started: ranks get the current one.
    arguments = (ranks, folder, run, config, dict(os.environ))
    process = context.Process(target=rank_main, args=arguments, name=f"rank {ranks.rank}")
    process.start()
    return process


def wait_for_all(
    processes: Sequence[ForkServerProcess], folder: Path
) -> tuple[bool, list[tuple[int, int | None]]]:
    """Wait until every rank has returned or one has failed.

    After the first failure the other ranks have a moment to report theirs: the first rank to end
    need not be the first that failed.

    Returns:
        whether one has failed; rank and exit code of each rank that has ended, in order.
    """
    waiting = dict(enumerate(processes))
    ended: list[tuple[int, int | None]] = []
    deadline: float | None = None
    while waiting:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        wait([process.sentinel for process in waiting.values()], left)
        for rank, process in list(waiting.items()):
            if process.is_alive():
                continue
            del waiting[rank]
            ended.append((rank, process.exitcode))
            outcome = read_outcome(folder, rank)
            if deadline is None and (outcome is None or outcome.kind != "returned"):
                deadline = time.monotonic() + FAILURE_GRACE_SECONDS
    return deadline is not None, ended


def kill(processes: list[ForkServerProcess]) -> None:
    """Kill the processes that still run, with their children, and wait until they have ended."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # a rank that has just been forked may lack its own process group
    for process in processes:
        process.join()


def report_failure(
    outcomes: list[RankOutcome | None],
    exit_codes: list[tuple[int, int | None]],
    aborts: Mapping[int, int],
    parallel: ParallelConfig,
) -> int:
    """Report the cause of a failed run, not its consequences, and return the exit code.

    Args:
        outcomes: of all ranks.
        exit_codes: rank and exit code of each rank that has ended, in order.
        aborts: when a rank aborted, as far as known.
        parallel: by which ranks are named.
    """
    silent = [(r, code) for r, code in exit_codes if outcomes[r] is None and code is not None]
    failures = [o for o in outcomes if o is not None and o.kind != "returned"]
    # nccl and gloo abort a rank whose peer has failed: an abort is a consequence if a rank was
    # killed, or had reported an error or aborted before.
    first = min((outcome.time for outcome in failures), default=math.inf)
    aborted = [(r, code) for r, code in silent if aborts.get(r, 0) < first]
    aborted.sort(key=lambda entry: aborts.get(entry[0], 0))
    causes = [(r, code) for r, code in silent if code != -signal.SIGABRT] or aborted
    if causes:
        rank, code = causes[0]
        report_error(death_message(mesh_rank_name(rank, parallel), code))
        return 1
    # Errors of other ranks, such as a lost connection, follow from the first one.
    failure = min(failures, key=lambda outcome: outcome.time)
    if failure.kind == "refused":
        report_error(failure.text)
    else:
        report_crash(f"{mesh_rank_name(failure.rank, parallel)} failed:\n{failure.text}")
    return failure.code


def death_message(name: str, code: int) -> str:
    """Return the error line for a rank that ended without reporting an outcome."""
    if code == LOST_FORK_SERVER:
        return LOST_FORK_SERVER_LINE
    if code >= 0:
        return f"{name} ended with exit code {code} and without a message"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"{name} was killed by {signal_name(-code)}{hint}; the other ranks were stopped"
