"""What is asked of the store where ranks meet; torch's own class has no complete stub.
What one rank does: set itself up, run the function, and say how it ended."""

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
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

from credit_dp.config import Config
from credit_dp.distributed.forkserver import die_with_parent
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.placement import gpu_index, threads_per_rank
from credit_dp.distributed.report import RankOutcome, write_outcome
from credit_dp.distributed.signals import STOP_SIGNALS
from credit_dp.errors import UserError


class Store(Protocol):
    """Small values by key, seen by all ranks; a RuntimeError if whoever keeps it is gone."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def add(self, key: str, amount: int) -> int:
        """Count up, and return what it is then."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys are there, and read them."""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys are there."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long reading waits."""

    def clone(self) -> Store:
        """The same store over a connection of its own, for another thread."""


RunFunction = Callable[[Config, RankInfo], int]

GROUP_TIMEOUT = timedelta(minutes=10)  # until a rank that waits for another gives up


def rank_main(
    ranks: RankInfo, folder: str, run: str, config: Config, environment: dict[str, str]
) -> None:
    """The main function of a process that `credit_dp.distributed.local` starts."""
    die_with_parent()
    os.setpgid(0, 0)  # so that the parent can end this rank together with what it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process: the parent decides
    for kind in STOP_SIGNALS:  # until there is something to save
        signal.signal(kind, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.update(environment)
    try:
        code = run_rank(config, ranks, run, f"file://{folder}/store")
    except UserError as error:
        exit_rank(folder, RankOutcome(ranks.rank, "refused", 2, str(error)))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent has to show it
        exit_rank(folder, RankOutcome(ranks.rank, "crashed", 1, traceback.format_exc()))
    else:
        exit_rank(folder, RankOutcome(ranks.rank, "returned", code))


def exit_rank(folder: str, outcome: RankOutcome) -> None:
    """Leave word and go at once: threads and process groups may be stuck after a failure."""
    write_outcome(Path(folder), outcome)
    if outcome.kind == "returned":
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined] # else semaphores of libraries count as leaked
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(outcome.code)


def run_rank(
    config: Config,
    ranks: RankInfo,
    run: str,
    meeting_point: str = "",
    attend: Callable[[Store], None] | None = None,
) -> int:
    """Run the function on this rank, inside a process group if there is more than one rank."""
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:  # job launchers may use it themselves
        with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr may be no real file
            faulthandler.register(signal.SIGUSR2)  # stacks of a run that hangs: kill -USR2
    with limit_threads(threads_per_rank(config.parallel, ranks, os.environ)):
        configure_logging(ranks)
        function = import_function(run)
        if ranks.world_size == 1:
            return function(config, ranks)
        with process_group(config, ranks, meeting_point, attend):
            return function(broadcast_run_folder(config, ranks), ranks)


def import_function(run: str) -> RunFunction:
    """`package.module:function`. Only our own code passes such names, never a config."""
    module, _, name = run.partition(":")
    return cast(RunFunction, getattr(importlib.import_module(module), name))


@contextlib.contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Share out the cores: ranks that all use every core slow each other down several times.

    The environment is as before afterwards: the next run of a sweep, in this same process, would
    take what is in there for the user's wish.
    """
    import torch  # takes seconds

    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)  # for libraries that start later
    torch.set_num_threads(count)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


class EarlyRecords(logging.Handler):
    """Keeps what is logged before a run has a log file."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._records.append(record)

    def pop_all(self) -> list[logging.LogRecord]:
        """The records so far, which are not kept any longer."""
        records, self._records = self._records, []
        return records


def configure_logging(ranks: RankInfo) -> None:
    """Show warnings, of ranks with their number; what is below belongs in the log file."""
    sender = "" if ranks.world_size == 1 else f"[rank {ranks.rank}] "
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{sender}%(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    ours = logging.getLogger("credit_dp")
    ours.handlers = [handler, EarlyRecords()]  # runs of a sweep follow each other in one process
    ours.propagate = False  # Hydra has a handler of its own at the root
    ours.setLevel(logging.INFO)


def pop_early_records() -> list[logging.LogRecord]:
    """What has been logged so far, for a log file or the screen; each record is given once."""
    handlers = logging.getLogger("credit_dp").handlers
    early = [handler for handler in handlers if isinstance(handler, EarlyRecords)]
    for handler in early:
        logging.getLogger("credit_dp").removeHandler(handler)
    return [record for handler in early for record in handler.pop_all()]


def join_rendezvous(meeting_point: str, ranks: RankInfo) -> Store:
    """The store where the ranks find each other; waits for the one that keeps it."""
    from torch.distributed.rendezvous import rendezvous

    meeting = rendezvous(meeting_point, ranks.rank, ranks.world_size, timeout=GROUP_TIMEOUT)
    store = cast(Store, next(meeting)[0])
    store.set_timeout(GROUP_TIMEOUT)
    return store


@contextlib.contextmanager
def process_group(
    config: Config, ranks: RankInfo, meeting_point: str, attend: Callable[[Store], None] | None
) -> Iterator[None]:
    """All ranks in one group, over nccl or gloo; left in order, as some back ends abort else.

    `attend` is called with the store where they met, before the group is there.
    """
    import torch
    from torch import distributed

    cuda = config.device == "cuda"
    # What waits in the host's memory is also added up there.
    both = cuda and config.parallel.cpu_offload
    backend = "cpu:gloo,cuda:nccl" if both else "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(gpu_index(config.parallel, ranks))
    elif ranks.local_world_size == ranks.world_size:
        # A laptop's host name may resolve to nothing, or to an address that is not its own.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    store = join_rendezvous(meeting_point, ranks)
    if attend is not None:
        attend(store)
    distributed.init_process_group(
        backend=backend,
        store=cast(Any, store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=GROUP_TIMEOUT,
        device_id=torch.device("cuda", gpu_index(config.parallel, ranks)) if cuda else None,
    )
    yield
    # Not in a `finally`: after a failure the others may never come, and the process ends anyway.
    distributed.destroy_process_group()


def loopback_interface() -> str:
    """The name of the interface that connects this machine to itself."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def broadcast_run_folder(config: Config, ranks: RankInfo) -> Config:
    """The config with rank 0's run folder: ranks that a launcher started can't agree on one."""
    import torch
    from torch import distributed

    gpu = gpu_index(config.parallel, ranks)
    device = torch.device("cuda", gpu) if config.device == "cuda" else None
    text = torch.zeros(4096, dtype=torch.uint8, device=device)
    folder = config.run.dir.encode()
    text[: len(folder)] = torch.tensor(list(folder), dtype=torch.uint8)
    distributed.broadcast(text, src=0)
    shared = bytes(text.tolist()).rstrip(b"\0").decode()
    return replace(config, run=replace(config.run, dir=shared))
