"""Starts ranks as processes of this machine and stays with them: they end together.

Ranks are forked from a server process that has already imported torch (multiprocessing's
forkserver), so that all of them cost one import, and CPU and CUDA start alike. Nobody outlives
anybody: a rank that fails takes the others along, this process takes all ranks along, and the
kernel does so if this process is killed outright.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from credit_dp.config import Config, ParallelConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.report import (
    RankOutcome,
    rank_name,
    read_outcome,
    report_crash,
    report_error,
)
from credit_dp.distributed.signals import STOP_SIGNALS, Terminated, block_signals, handle_stop
from credit_dp.distributed.worker import rank_main

# What torch imports only when an optimizer is made, and a checkpoint saved: once for all ranks.
EXTRA_PRELOADS = {"credit_dp.training.run": ["torch._dynamo", "torch.distributed.checkpoint"]}
FAILURE_GRACE_SECONDS = (
    0.5  # seconds in which ranks that fail of the same cause are still listened to
)


def start_fork_server(run: str) -> None:
    """Start the server process that ranks are forked from; it imports torch meanwhile."""
    module = run.partition(":")[0]
    preload = ["credit_dp.distributed.forkserver", "torch", module, "credit_dp.distributed.worker"]
    preload += EXTRA_PRELOADS.get(module, [])
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    # A job queue may send its signals to all processes at once: those that help with starting keep
    # them waiting, and what reaches a rank that is just being forked waits until it can act.
    with block_signals(), silence_resource_tracker():
        resource_tracker.ensure_running()  # unblocks SIGTERM when it is through
    with block_signals():
        forkserver.ensure_running()


@contextlib.contextmanager
def silence_resource_tracker() -> Iterator[None]:
    """Have the process that cleans up behind ranks say nothing of what it cleans up.

    Ranks that are ended can't release the semaphores of their libraries (numcodecs' blosc has one).
    """
    before = os.environ.get("PYTHONWARNINGS")
    own = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = f"{before},{own}" if before else own
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def run_processes(config: Config, world: int, run: str) -> int:
    """Run all ranks on this machine to their end; the return value is the exit code.

    Raises:
        Terminated: a signal came before the ranks trained or afterwards, or SIGTERM came again.
    """
    start_fork_server(run)
    with tempfile.TemporaryDirectory(prefix="credit_dp-", ignore_cleanup_errors=True) as folder:
        processes: list[ForkServerProcess] = []
        try:
            for rank in range(world):
                processes.append(
                    start_rank(RankInfo(rank, world, rank, world), folder, run, config)
                )
            asked: list[int] = []
            with handle_stop(partial(forward_signal, processes, asked)):
                failed = wait_for_all(processes, Path(folder))
            deaths = [(rank, process.exitcode) for rank, process in enumerate(processes)]
        finally:
            kill(processes)
        outcomes = [read_outcome(Path(folder), rank) for rank in range(world)]
        if failed:
            if asked and any(-(code or 0) in STOP_SIGNALS for _, code in deaths):
                raise Terminated(asked[0])  # a rank had nothing to save yet, or any more
            return report_failure(outcomes, deaths, config.parallel)
        return max(outcome.code for outcome in outcomes if outcome is not None)


def forward_signal(processes: list[ForkServerProcess], asked: list[int], number: int) -> None:
    """Hand a signal on to all ranks, as one that they may get several times, and note it."""
    asked.append(number)
    for process in processes:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)


def start_rank(ranks: RankInfo, folder: str, run: str, config: Config) -> ForkServerProcess:
    """One process, started; the server forks it, so it gets this process's environment as data."""
    context = multiprocessing.get_context("forkserver")
    arguments = (ranks, folder, run, config, dict(os.environ))
    process = context.Process(target=rank_main, args=arguments, name=f"rank {ranks.rank}")
    process.start()
    return process


def wait_for_all(processes: list[ForkServerProcess], folder: Path) -> bool:
    """Wait until every rank has returned, or one has failed; whether one has.

    After the first failure the others get a moment: those that fail because of it should be seen
    too, so that the cause can be told from the consequences.
    """
    waiting = dict(enumerate(processes))
    while waiting:
        wait([process.sentinel for process in waiting.values()])
        ended = [rank for rank, process in waiting.items() if not process.is_alive()]
        for rank in ended:
            del waiting[rank]
            outcome = read_outcome(folder, rank)
            if outcome is None or outcome.kind != "returned":
                wait_briefly(list(waiting.values()))
                return True
    return False


def wait_briefly(processes: list[ForkServerProcess]) -> None:
    """Wait a moment for these processes to end as well."""
    deadline = time.monotonic() + FAILURE_GRACE_SECONDS
    while processes and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in processes], timeout=left)
        processes = [process for process in processes if process.is_alive()]


def kill(processes: list[ForkServerProcess]) -> None:
    """End what still runs, with all that it started, and wait until it is gone."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # in case it had no time to make a group of its own
    for process in processes:
        process.join()


def report_failure(
    outcomes: list[RankOutcome | None],
    deaths: list[tuple[int, int | None]],
    parallel: ParallelConfig,
) -> int:
    """Say once why the run failed: the cause, not what followed from it."""
    silent = [(r, code) for r, code in deaths if outcomes[r] is None and code is not None]
    told = [outcome for outcome in outcomes if outcome is not None and outcome.kind != "returned"]
    # nccl and gloo abort a rank whose peer has failed: a consequence, if anyone names a cause.
    causes = [(r, code) for r, code in silent if code != -signal.SIGABRT or not told]
    if causes:
        rank, code = causes[0]
        report_error(death_message(mesh_rank_name(rank, parallel), code))
        return 1
    first = min(told, key=lambda outcome: outcome.time)
    if first.kind == "refused":
        report_error(first.text)
    else:
        report_crash(f"{mesh_rank_name(first.rank, parallel)} failed:\n{first.text}")
    return first.code


def mesh_rank_name(rank: int, parallel: ParallelConfig) -> str:
    """A rank and its place on the mesh."""
    return rank_name(rank, parallel.data or 1, parallel.domain)


def death_message(who: str, code: int) -> str:
    """One line on a rank that died without a word."""
    if code >= 0:
        return f"{who} ended with exit code {code} and without a message"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"{who} was killed by {name}{hint}; the other ranks were ended"
