"""Set one rank up, run the function on it, and write how it ended.

In this order: signals, threads and logging; the rendezvous with the other ranks; the run folder of
rank 0; the process group; the function. Everything that needs torch imports it late.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing.util
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from credit_dp.config import Config, ParallelConfig
from credit_dp.config.training import TrainerConfig
from credit_dp.distributed.failure_report import RankOutcome, record_abort, write_outcome
from credit_dp.distributed.forkserver import die_with_parent
from credit_dp.distributed.launcher import RankInfo, agent_serves_store
from credit_dp.distributed.placement import gpu_index, threads_per_rank
from credit_dp.distributed.process_groups import (
    GROUP_TIMEOUT,
    check_file_limit,
    raise_file_limit,
    trace_collectives,
    wait_until_connected,
)
from credit_dp.distributed.signals import STOP_SIGNALS, read_note_of_parent, unignored
from credit_dp.errors import UserError
from credit_dp.plain_text import printable
from credit_dp.process import outlive_screen, output_file

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

RunFunction = Callable[[Config, RankInfo], int]

# A host that drops what arrives at a closed port does not answer; a busy one answers late.
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.2


def rank_main(
    ranks: RankInfo, folder: str, run: str, config: Config, environment: dict[str, str]
) -> None:
    """Run one rank to its end, as a process that `credit_dp.distributed.local` starts."""
    die_with_parent()
    os.setpgid(0, 0)  # the parent kills this rank and its children as one process group
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is left to the parent
    # Training sets its handler once there is something to save.
    for stop_signal in unignored(STOP_SIGNALS):
        signal.signal(stop_signal, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked by `start_fork_server`
    os.environ.update(environment)
    outlive_screen()
    record_abort(Path(folder), ranks.rank)
    read_note_of_parent(Path(folder))
    try:
        code = run_rank(config, ranks, run, f"file://{folder}/store")
    except UserError as error:
        exit_rank(folder, RankOutcome(ranks.rank, "refused", 2, str(error)))
    except BaseException:  # noqa: BLE001 - the parent has to show any failure
        exit_rank(folder, RankOutcome(ranks.rank, "crashed", 1, traceback.format_exc()))
    else:
        exit_rank(folder, RankOutcome(ranks.rank, "returned", code))


def exit_rank(folder: str, outcome: RankOutcome) -> None:
    """Write the outcome and end the process at once."""
    with contextlib.suppress(FileNotFoundError):  # the parent has just ended
        write_outcome(Path(folder), outcome)
    if outcome.kind == "returned":
        exit_finished(outcome.code)
    exit_now(outcome.code)


def exit_finished(code: int) -> NoReturn:
    """End the process of a rank that has finished.

    Not in Python's way, which would wait for the collectives that threads beside training have
    begun: those of batches read ahead that not all ranks begin, for up to `BACKGROUND_TIMEOUT`.
    """
    # `os._exit` skips multiprocessing's finalizers; without them the resource tracker reports
    # semaphores of libraries as leaked.
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End the process at once.

    An orderly exit would wait for threads and process groups, which may be stuck after a failure.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_rank(
    config: Config,
    ranks: RankInfo,
    run: str,
    init_method: str = "",
    on_store: Callable[[Store], None] | None = None,
) -> int:
    """Run the function on this rank, inside a process group if there are several ranks.

    Args:
        config: of the run.
        ranks: this rank.
        run: `module:function`.
        init_method: where the ranks find each other, as torch takes it: `env://` or `file://PATH`.
        on_store: called with the store of a launcher's ranks, before they connect; collective.
    """
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:  # unless a job launcher uses it
        with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr may be no real file
            faulthandler.register(signal.SIGUSR2)  # `kill -USR2` shows the stacks of a hanging run
    raise_file_limit(ranks)
    with limit_threads(threads_per_rank(config.parallel, ranks, os.environ)):
        configure_logging(ranks)
        if config.device == "cuda":
            set_precision(config.trainer)
        function = import_function(run)
        if ranks.world_size == 1:
            return function(config, ranks)
        with process_group(config, ranks, init_method, on_store) as config:
            return function(config, ranks)


def set_precision(trainer: TrainerConfig) -> None:
    """Set the precision of float32 on GPUs, and whether to use deterministic algorithms only."""
    import torch  # takes seconds

    torch.set_float32_matmul_precision(trainer.matmul)
    # By default torch runs convolutions in TF32, but not products of matrices.
    torch.backends.cudnn.allow_tf32 = trainer.matmul != "highest"
    if trainer.deterministic:
        # cuBLAS reads it when it is first used. The user may have chosen another workspace.
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG") or ":4096:8"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
        torch.backends.cudnn.benchmark = False
    # Both ways: the runs of a sweep share a process.
    torch.use_deterministic_algorithms(trainer.deterministic)
    torch.backends.cudnn.deterministic = trainer.deterministic
    # Filling every new tensor would cost a launch each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def import_function(run: str) -> RunFunction:
    """Return the function of `package.module:function`.

    Only this package passes such names. A config can't: it would choose which code to run.
    """
    module, _, name = run.partition(":")
    return cast(RunFunction, getattr(importlib.import_module(module), name))


@contextlib.contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Limit torch, and libraries loaded later, to `count` CPU threads.

    Ranks that each use every core slow each other down several times.
    """
    import torch  # takes seconds

    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)  # libraries read it when they are loaded
    torch.set_num_threads(count)
    try:
        yield
    finally:
        # The next run of a sweep, in the same process, takes this variable for the user's choice.
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


class EarlyRecords(logging.Handler):
    """Keeps the records that are logged before a run has its log file."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._records.append(record)

    def pop_all(self) -> list[logging.LogRecord]:
        """Return the records so far and forget them."""
        records = self._records
        self._records = []
        return records


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure_logging(ranks: RankInfo) -> None:
    """Show this rank's warnings on stderr, and keep lower levels for the log file."""
    prefix = "" if ranks.world_size == 1 else f"[rank {ranks.rank}] "
    handler = logging.StreamHandler(output_file())  # None: stderr
    handler.setFormatter(_PrintableFormatter(f"{prefix}%(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    package_logger = logging.getLogger("credit_dp")
    # Replaces the handlers of an earlier run: the runs of a sweep may share a process.
    package_logger.handlers = [handler, EarlyRecords()]
    package_logger.propagate = False  # Hydra's handler at the root would repeat every line
    package_logger.setLevel(logging.INFO)


def pop_early_records() -> list[logging.LogRecord]:
    """Return the records logged so far and stop keeping them; a second call returns none."""
    handlers = logging.getLogger("credit_dp").handlers
    early = [handler for handler in handlers if isinstance(handler, EarlyRecords)]
    for handler in early:
        logging.getLogger("credit_dp").removeHandler(handler)
    return [record for handler in early for record in handler.pop_all()]


def join_rendezvous(
    init_method: str, ranks: RankInfo, on_store: Callable[[Store], None] | None
) -> Store:
    """Return the store through which the ranks find each other, after calling `on_store` with it.

    Waits until the store is served and, on the rank that serves it, for all ranks.

    Raises:
        UserError: the ranks of a launcher can't meet.
    """
    from torch.distributed import DistError, DistStoreError
    from torch.distributed.rendezvous import rendezvous

    try:
        agent = agent_serves_store(os.environ)
        if init_method == "env://" and (ranks.rank > 0 or agent):
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            wait_for_listener(address, port, listened_before=agent)
        # torch yields (store, rank, world size), and again after a change of an elastic job.
        handlers = rendezvous(init_method, ranks.rank, ranks.world_size, timeout=GROUP_TIMEOUT)
        store: Store = next(handlers)[0]
        store.set_timeout(GROUP_TIMEOUT)
    except (DistError, OSError, UnicodeError) as error:
        if init_method != "env://":
            raise
        raise missing_ranks(ranks, error) from error
    if on_store is not None:
        try:
            on_store(store)
        except DistStoreError as error:  # of the time; a store that is lost is no mistake
            raise missing_ranks(ranks, error) from error
    return store


def missing_ranks(ranks: RankInfo, error: Exception) -> UserError:
    """Return the error of a rank that does not meet the others."""
    reason = str(error).partition("\n")[0].rstrip(".")  # the calls in C++ follow
    return UserError(
        f"MASTER_ADDR: rank {ranks.rank} does not meet all {ranks.world_size} ranks at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({reason}). Start all ranks, "
        "and set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, the "
        "same on all ranks."
    )


def wait_for_listener(address: str, port: int, listened_before: bool) -> None:
    """Wait until a process listens there: torch would write pages to stderr if none does.

    Args:
        address, port: of rank 0, or of torchrun's agent.
        listened_before: whether none will if none does, as with an agent, which starts ranks later.

    Raises:
        OSError: none does within `GROUP_TIMEOUT`.
    """
    end = time.monotonic() + GROUP_TIMEOUT.total_seconds()
    while True:
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            has_ended = listened_before and isinstance(error, ConnectionRefusedError)
            if has_ended or time.monotonic() > end:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            return


@contextlib.contextmanager
def process_group(
    config: Config,
    ranks: RankInfo,
    init_method: str,
    on_store: Callable[[Store], None] | None,
) -> Iterator[Config]:
    """Initialise torch's process group of all ranks, over nccl or gloo, and destroy it at the end.

    Yields the config with the run folder of rank 0.

    Args:
        config: of the run.
        ranks: this rank.
        init_method: as torch takes it.
        on_store: see `run_rank`.
    """
    import torch
    from torch import distributed

    cuda = config.device == "cuda"
    # With cpu_offload gradients are in the host's memory: NCCL can't add them up, gloo can.
    both = cuda and config.parallel.cpu_offload
    backend = "cpu:gloo,cuda:nccl" if both else "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(gpu_index(config.parallel, ranks))
    elif not ranks.on_several_nodes:
        # gloo connects to the address of the host's name, which a laptop may resolve to none or to
        # another machine's. On one machine the loopback interface always works.
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or loopback_interface()
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    check_file_limit(config.parallel, ranks, "gloo" in backend, init_method == "env://")
    store = join_rendezvous(init_method, ranks, on_store)
    if cuda and on_store is not None:
        check_own_gpu(store, config.parallel, ranks)
    config = share_run_folder(config, ranks, store)
    if cuda:
        trace_collectives(Path(config.run.dir))
    distributed.init_process_group(
        backend=backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=GROUP_TIMEOUT,
        device_id=torch.device("cuda", gpu_index(config.parallel, ranks)) if cuda else None,
    )
    wait_until_connected()
    yield config
    # Some back ends abort a process that exits without this. Not in a `finally`: after a failure
    # the other ranks may never get here, and the process ends anyway.
    distributed.destroy_process_group()


def check_own_gpu(store: Store, parallel: ParallelConfig, ranks: RankInfo) -> None:
    """Refuse a GPU that two ranks take for their own; nccl would refuse it in many lines.

    Raises:
        UserError: on all ranks of that GPU but one.
    """
    import torch

    index = gpu_index(parallel, ranks)
    gpu = str(torch.cuda.get_device_properties(index).uuid)
    if store.add(f"credit_dp/gpu/{gpu}", 1) > 1:
        raise UserError(
            f"device: {ranks.local_world_size} ranks on this machine need a GPU each, but rank "
            f"{ranks.rank} shares GPU {gpu} with another rank. Start one rank for each GPU (srun "
            "--gpus-per-task=1; torchrun --nproc-per-node with the number of GPUs), or use "
            "device=cpu."
        )


def loopback_interface() -> str:
    """Return the name of this machine's loopback network interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def share_run_folder(config: Config, ranks: RankInfo, store: Store) -> Config:
    """Return the config with rank 0's run folder; collective.

    A launcher's ranks compose the config separately, and may choose different folders.
    """
    key = "credit_dp/run_folder"
    if ranks.rank == 0:
        store.set(key, config.run.dir)
    return replace(config, run=replace(config.run, dir=store.get(key).decode()))
