"""How ranks that a launcher started end together, and say once why.

The launcher knows no mesh, a rank that was killed can't speak, and those that wait for it may wait
in C++ for minutes. So every rank lists the processes of its machine, and a thread of its own hears
from the store, where the ranks met, that the run is over. Of all ranks one has the floor.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import final

from credit_dp.config import ParallelConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.report import rank_name, report_error, wait_for_first_rank
from credit_dp.distributed.signals import Terminated
from credit_dp.distributed.worker import Store

DETECTION_SECONDS = (
    0.2  # seconds until a killed process is seen to be gone by those that it was connected to
)
REMOTE_REPORT_SECONDS = 1.0  # seconds that the machine of a lost rank has to tell of it
END_NOTICE_SECONDS = (
    0.5  # seconds until all have heard from the store, which this rank may take along
)
ROOT_CAUSE_SECONDS = (
    1.5  # seconds by which others end later, so that the launcher sees what came first
)
FOREVER = timedelta(days=365)
PF_EXITING = 4  # linux/sched.h; a GPU's driver may take seconds to let go of a killed process
LAST_RANK_SECONDS = 600.0  # seconds that the first rank that is through waits for the last


@final
class PeerMonitor:
    """One rank's knowledge of the others' lives; without a store yet it only speaks for itself."""

    def __init__(self, ranks: RankInfo, parallel: ParallelConfig) -> None:
        self.ranks = ranks
        self.parallel = parallel
        self.store: Store | None = None
        self.rendezvous_store: Store | None = None
        self.processes: dict[int, int] = {}  # rank -> id, on this machine
        self.listener: threading.Thread | None = None
        self.finished = False
        self.claim_attempted = threading.Lock()  # never released

    def start_monitoring(self, store: Store) -> None:
        """Exchange process ids over the store and begin to listen; a collective."""
        own = f"{machine_id()}/{self.ranks.node}"
        store.set(f"credit_dp/process/{self.ranks.rank}", f"{own} {os.getpid()}")
        keys = [f"credit_dp/process/{rank}" for rank in range(self.ranks.world_size)]
        told = [value.decode().rsplit(" ", 1) for value in store.multi_get(keys)]
        self.processes = {rank: int(pid) for rank, (where, pid) in enumerate(told) if where == own}
        self.rendezvous_store = (
            store  # by one of the ranks, if the launcher does not: until all have left
        )
        self.store = store.clone()  # a connection of its own: the other one may be busy
        ear = store.clone()
        self.listener = threading.Thread(target=self.wait_for_end, args=(ear,), daemon=True)
        self.listener.start()

    def wait_for_end(self, ear: Store) -> None:
        """Wait for the end of the run; if this rank is not through with it, end at once."""
        try:
            ear.wait(["credit_dp/end"], FOREVER)
            self.claim_attempted.acquire(blocking=False)  # it has been said
        except RuntimeError:  # the rank that kept the store is gone
            if not self.finished:
                self.report_once(None)
        if not self.finished:
            time.sleep(ROOT_CAUSE_SECONDS)
            os._exit(1)

    def wait_for_all_ranks(self) -> None:
        """Wait until all ranks are through with the run, so that none misses another that is."""
        if self.store is None or self.listener is None:
            return
        self.finished = True
        if self.store.add("credit_dp/left", 1) == self.ranks.world_size:
            self.store.set("credit_dp/end", "")
        self.listener.join(LAST_RANK_SECONDS)

    def stop(self, number: int) -> None:
        """End on a signal; if it comes because a rank is gone, one rank has to say so first."""
        if number == signal.SIGINT and self.ranks.rank == 0:
            sys.stderr.write("\ninterrupted\n")
        if number != signal.SIGINT and not self.finished:  # else those that are gone were through
            self.report_once(None)
        time.sleep(DETECTION_SECONDS)  # others still look who is gone
        os._exit(Terminated(number).code)

    def report_failure(self, report: Callable[[], None]) -> None:
        """Report why this rank fails, or what it follows from; not if another rank has spoken."""
        time.sleep(DETECTION_SECONDS)
        if not self.ended_ranks():
            wait_for_first_rank(self.ranks.rank)
            if len(self.processes) < self.ranks.world_size and self.store is not None:
                time.sleep(REMOTE_REPORT_SECONDS)
        self.report_once(report)

    def report_once(self, report: Callable[[], None] | None) -> None:
        """Take the floor if it is free: name a rank that is gone, else report."""
        lost = self.ended_ranks()
        if (lost or report is not None) and self.claim_reporting(lost):
            if lost:
                report_error(self.death_message(lost))
            elif report is not None:
                report()
            self.announce_end()
        if lost:
            time.sleep(ROOT_CAUSE_SECONDS)

    def claim_reporting(self, lost: list[int]) -> bool:
        """Whether this rank is the one that speaks; it may ask once, from whichever thread."""
        if not self.claim_attempted.acquire(blocking=False):
            return False
        if self.store is None:
            return True
        try:
            return self.store.add("credit_dp/floor", 1) == 1
        except RuntimeError:  # nobody can be asked any more: one rank of each machine
            return self.ranks.rank == min(set(self.processes) - set(lost))

    def announce_end(self) -> None:
        """Tell all ranks that the run is over and that it has been said why."""
        with contextlib.suppress(RuntimeError):  # they find out by the same lack of a store
            if self.store is not None:
                self.store.set("credit_dp/end", "")
                time.sleep(END_NOTICE_SECONDS)

    def ended_ranks(self) -> list[int]:
        """Ranks of this machine whose process is gone."""
        return [rank for rank, pid in self.processes.items() if process_has_ended(pid)]

    def death_message(self, lost: list[int]) -> str:
        """One line on ranks that died without a word."""
        parallel = self.parallel
        first = rank_name(lost[0], parallel.data or 1, parallel.domain)
        others = f", and so are {len(lost) - 1} others" if len(lost) > 1 else ""
        return (
            f"{first} is gone without a word (killed, or out of memory?){others}; "
            "the other ranks were ended"
        )


def machine_id() -> str:
    """What ranks have in common that see each other's processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename


def process_has_ended(pid: int) -> bool:
    """Whether no such process runs; one that is ending does not, nor one that awaits its parent."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return True
    except OSError:  # no /proc on this system
        return False
    return fields[0] == "Z" or bool(int(fields[6]) & PF_EXITING)
