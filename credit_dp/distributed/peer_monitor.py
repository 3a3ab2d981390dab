"""Let the ranks of a launcher end together, and report a failure once.

A launcher does not know the mesh, a killed rank can't report itself, and ranks that wait for it may
be stuck in C++ for minutes. So every rank

1. publishes its process id in the rendezvous store and reads those of its machine,
2. waits in a thread for the key `credit_dp/end` of the store: the lowest rank of a machine at the
   store, the others at a socket of that rank,
3. on a failure or a signal, looks which processes have ended, and adds 1 to a counter in the store:
   exactly one rank, the first, reports,
4. ends soon after the key is set, whatever its main thread waits for, unless it has finished.

So the store has two connections to each rank, torch's own and one for steps 3 and 4, and one more
to each machine. The second one can't be opened when it is needed: a process that is being killed
still accepts connections, and torch would try for minutes. On several nodes they all go through
processes that are no ranks (`shared_store`), which a killed rank does not take along; the rank that
has started such a process reports its end.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import final

from credit_dp.config import ParallelConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.process_groups import GROUP_TIMEOUT
from credit_dp.distributed.report import mesh_rank_name, report_error, wait_for_first_rank
from credit_dp.distributed.shared_store import RendezvousStore, StoreLink, connect
from credit_dp.distributed.signals import Terminated

# Until a killed process shows as ended; its peers may notice the broken connection earlier.
DETECTION_SECONDS = 0.2
# The ranks on the machine of an ended rank report it; other machines leave them this time.
REMOTE_REPORT_SECONDS = 1.0
# The reporting rank may serve the store: it lives on until the others have read the key.
END_NOTICE_SECONDS = 0.5
# Other ranks end later than the first one, so that the launcher names the right one.
ROOT_CAUSE_SECONDS = 1.5
EXIT_SECONDS = 5.0  # until a process that is ending has an exit code
RECONNECT_TIMEOUT = timedelta(seconds=5)
FOREVER = timedelta(days=365)
END_KEY = "credit_dp/end"
PF_EXITING = 4  # linux/sched.h; a GPU's driver may take seconds to release a killed process
LAST_RANK_SECONDS = 600.0  # for which a finished rank waits for the last one


@final
class PeerMonitor:
    """Watches the processes of the other ranks; before `start_monitoring` it knows only its own."""

    def __init__(self, ranks: RankInfo, parallel: ParallelConfig) -> None:
        self.ranks = ranks
        self.parallel = parallel
        self.store: RendezvousStore | None = None
        self.rendezvous_store: RendezvousStore | None = None
        self.link = StoreLink()
        self.processes: dict[int, int] = {}  # rank -> process id, on this machine
        self.listener: threading.Thread | None = None
        self.finished = False
        self.claim_attempted = threading.Lock()  # never released: a rank tries once

    def start_monitoring(self, store: RendezvousStore, link: StoreLink) -> None:
        """Exchange process ids over the store and start the listening thread; collective."""
        machine = f"{machine_id()}/{self.ranks.node}"
        store.set(f"credit_dp/process/{self.ranks.rank}", f"{machine} {os.getpid()}")
        keys = [f"credit_dp/process/{rank}" for rank in range(self.ranks.world_size)]
        entries = [value.decode().rsplit(" ", 1) for value in store.multi_get(keys)]
        self.processes = {
            rank: int(pid) for rank, (name, pid) in enumerate(entries) if name == machine
        }
        # Keep the store alive until all ranks have left, if this rank serves it or its process.
        self.rendezvous_store, self.link = store, link
        # Another connection for other threads: a call of the main thread blocks its own.
        self.store = store.clone()
        lowest = min(self.processes)
        key = f"credit_dp/socket/{lowest}"
        if self.ranks.rank == lowest:
            others = accept_connections(len(self.processes) - 1, partial(store.set, key))
            wait = partial(self.wait_at_store, store.clone(), others)
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(store.get(key).decode())
            wait = partial(self.wait_at_socket, connection)
        self.listener = threading.Thread(target=wait, daemon=True)
        self.listener.start()

    def wait_at_store(self, store: RendezvousStore, others: Sequence[socket.socket]) -> None:
        """Wait for the end of the run, and tell the other ranks of this machine."""
        word = b""
        with contextlib.suppress(RuntimeError):  # the rank that served the store has ended
            store.wait([END_KEY], FOREVER)
            word = b"e"
        for connection in others:
            with contextlib.suppress(OSError):  # that rank has ended already
                connection.sendall(word)
            connection.close()
        self.end_process(reported=bool(word))

    def wait_at_socket(self, connection: socket.socket) -> None:
        """Wait for the word of the rank that waits at the store, or for the end of its process."""
        word = b""
        with connection, contextlib.suppress(OSError):
            word = connection.recv(1)
        self.end_process(reported=bool(word))

    def end_process(self, reported: bool) -> None:
        """End the process if this rank has not finished.

        Args:
            reported: whether a rank has reported the failure; if not, this rank may have to.
        """
        if reported:
            self.claim_attempted.acquire(blocking=False)
        elif not self.finished:
            self.report_once(None)
        if not self.finished:
            time.sleep(ROOT_CAUSE_SECONDS)
            os._exit(1)

    def wait_for_all_ranks(self) -> None:
        """Wait until all ranks have finished, so that none takes a finished rank for a lost one."""
        if self.store is None or self.listener is None:
            return
        self.finished = True
        if self.store.add("credit_dp/left", 1) == self.ranks.world_size:
            self.store.set(END_KEY, "")
        self.listener.join(LAST_RANK_SECONDS)

    def stop(self, number: int) -> None:
        """End the process on a signal; report an ended rank first, if that is why it came."""
        if number == signal.SIGINT and self.ranks.rank == 0:
            sys.stderr.write("\ninterrupted\n")
        # Launchers send SIGTERM to all ranks when one has ended. After this rank has finished, an
        # ended rank is one that has finished as well.
        if number != signal.SIGINT and not self.finished:
            self.report_once(None)
        time.sleep(DETECTION_SECONDS)  # other ranks still look which processes have ended
        os._exit(Terminated(number).code)

    def report_failure(self, report: Callable[[], None]) -> None:
        """Report this rank's failure, or the ended rank behind it, unless another rank has."""
        # An exception is often the consequence of a peer that was killed: look for one first.
        time.sleep(DETECTION_SECONDS)
        if not self.ended_ranks():
            wait_for_first_rank(self.ranks.rank)
            if len(self.processes) < self.ranks.world_size and self.store is not None:
                time.sleep(REMOTE_REPORT_SECONDS)
        self.report_once(report)

    def report_once(self, report: Callable[[], None] | None) -> None:
        """Report once in the whole run: an ended process if there is one, otherwise by `report`."""
        ended = self.ended_ranks()
        lost = "" if ended else self.lost_store_process()
        if (ended or lost or report is not None) and self.claim_reporting(ended, lost):
            if ended:
                report_error(self.death_message(ended))
            elif lost:
                report_error(f"{lost} ended (killed, or out of memory?); all ranks were stopped")
            elif report is not None:
                report()
            self.announce_end()
        if ended:
            time.sleep(ROOT_CAUSE_SECONDS)

    def claim_reporting(self, ended: list[int], lost: str) -> bool:
        """Return whether this rank reports; each rank can try once, in any of its threads."""
        if not self.claim_attempted.acquire(blocking=False):
            return False
        if self.store is None:
            return True
        try:
            return self.store.add("credit_dp/floor", 1) == 1
        except RuntimeError:
            # The store ended with the rank that served it: one rank of each machine reports. Or its
            # process was killed, which only the rank knows that had started it.
            return bool(lost) or self.ranks.rank == min(set(self.processes) - set(ended))

    def announce_end(self) -> None:
        """Set the key that all ranks wait for, after the failure has been reported."""
        with contextlib.suppress(RuntimeError):  # without a store the others notice that themselves
            if self.store is not None:
                self.store.set(END_KEY, "")
                time.sleep(END_NOTICE_SECONDS)

    def ended_ranks(self) -> list[int]:
        """Return the ranks of this machine whose process has ended."""
        return [rank for rank, pid in self.processes.items() if process_has_ended(pid)]

    def lost_store_process(self) -> str:
        """Return which process of the store this rank has started, if it was killed; "" if not.

        If it was a relay, this rank connects to rank 0 anew, so that it can report failures.
        """
        process = self.link.process
        if process is None or not process_has_ended(process.pid):
            return ""
        try:
            code = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        if code == 0:  # as of a relay, when the process that keeps the store was killed
            return ""
        if self.link.server is not None:  # which ranks of other nodes still listen to
            with contextlib.suppress(RuntimeError):
                self.store = connect(*self.link.server, RECONNECT_TIMEOUT)
        return self.link.name

    def death_message(self, ended: list[int]) -> str:
        """Return the error line for ranks that ended without reporting."""
        parallel = self.parallel
        first = mesh_rank_name(ended[0], parallel)
        others = f", and so did {len(ended) - 1} others" if len(ended) > 1 else ""
        return (
            f"{first} ended without a message (killed, or out of memory?){others}; "
            "the other ranks were stopped"
        )


def accept_connections(count: int, publish: Callable[[str], None]) -> list[socket.socket]:
    """Return connections to other ranks of this machine, which connect to the published address."""
    if not count:
        return []
    with (
        tempfile.TemporaryDirectory(prefix="credit_dp-") as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        # On Linux a name that is no file: containers of one machine may not share folders.
        address = f"\0{folder}" if sys.platform == "linux" else f"{folder}/end"
        server.bind(address)
        server.listen(count)
        server.settimeout(GROUP_TIMEOUT.total_seconds())
        publish(address)
        return [server.accept()[0] for _ in range(count)]


def machine_id() -> str:
    """Return a text that is equal on ranks that see each other's process ids.

    Process ids are only unique within one boot of a machine and one pid namespace (container).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename


def process_has_ended(pid: int) -> bool:
    """Return whether a process has ended; zombies and exiting processes have."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return True
    except OSError:  # no /proc on this system
        return False
    # After the command's name in brackets come the state and, six fields later, the flags.
    return fields[0] == "Z" or bool(int(fields[6]) & PF_EXITING)
