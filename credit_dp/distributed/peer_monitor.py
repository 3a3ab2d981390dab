"""Let the ranks of a launcher end together, and report a failure once.

A launcher does not know the mesh, a killed rank can't report itself, and ranks that wait for it may
be stuck in C++ for minutes. So every rank

1. publishes its process id in the rendezvous store and reads those of its machine,
2. waits in a thread for the key `credit_dp/end` of the store: the lowest rank of a machine at the
   store, the others at a socket of that rank, which also closes when a rank ends: both ends of it
   notice a killed rank within milliseconds, long before other ranks fail as a consequence,
3. on a failure or a signal, looks which processes have ended, and adds 1 to a counter in the store:
   exactly one rank, the first, reports,
4. ends soon after the key is set, whatever its main thread waits for, unless it has finished.

The first rank to report need not be on the machine of the rank that ended first. It sets the key,
and waits a moment for the answers of the other machines: which of their ranks have ended, and when.
A rank that ends as a consequence, or by a signal, marks this in a file that the ranks of its
machine share (`EndMarks`), so that it is not taken for one that was killed.

So the store has two connections to each rank, torch's own and one for steps 3 and 4, and one more
to each machine. The second one can't be opened when it is needed: a process that is being killed
still accepts connections, and torch would try for minutes.

The store ends with rank 0, or with torchrun's agent. Then a rank on rank 0's machine reports, and
answers at the port of the store that it has done so. If nobody answers there, a rank on another
machine reports that the machine of rank 0 was lost.
"""

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from credit_dp.config import ParallelConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.process_groups import GROUP_TIMEOUT
from credit_dp.distributed.report import (
    mesh_rank_name,
    report_crash,
    report_error,
    wait_for_first_rank,
)
from credit_dp.distributed.signals import Terminated, signal_name
from credit_dp.errors import counted

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# Until a killed process shows as ended; its peers may notice the broken connection earlier.
DETECTION_SECONDS = 0.2
# The ranks on the machine of an ended rank report it; other machines leave them this time.
REMOTE_REPORT_SECONDS = 1.0
# Signals of a launcher reach all ranks; on a busy machine one may have ended so long before.
SIGNAL_SECONDS = 1.0
# In which every machine answers which of its ranks have ended.
ANSWER_SECONDS = 5
# In which a rank of rank 0's machine has reported the end of rank 0.
STAND_IN_SECONDS = 3.0
# The reporting rank may serve the store: it lives on until the others have read the key.
END_NOTICE_SECONDS = 0.5
# Other ranks end later than the first one, so that the launcher names the right one.
ROOT_CAUSE_SECONDS = 1.5
REPORTING_SECONDS = 15.0  # for which a thread waits for another one that reports
FOREVER = timedelta(days=365)
END_KEY = "credit_dp/end"
PF_EXITING = 4  # linux/sched.h; a GPU's driver may take seconds to release a killed process
LAST_RANK_SECONDS = 600.0  # for which a finished rank waits for the last one

# What the lowest rank of a machine sends the others; nothing if it was killed.
REPORTED, STORE_LOST = b"e", b"s"
NOT_MARKED, ON_PURPOSE = 0, 255  # `EndMarks`; other numbers are signals
STAND_IN = b"!"  # what a rank that has reported answers at the port of a store that has ended


@final
@dataclass(frozen=True)
class EndedRank:
    """A rank that has ended, and not as a consequence of another one's end.

    Attributes:
        rank: of the run.
        signal: number of the signal on which it ended itself; 0 if it was killed, or ended by a
            crash of its own.
        time: when this was noticed, in nanoseconds since 1970.
    """

    rank: int
    signal: int
    time: int

    @classmethod
    def parse(cls, text: str) -> "EndedRank":
        """Return the rank of a text."""
        return cls(*map(int, text.split(":")))

    def __str__(self) -> str:
        return f"{self.rank}:{self.signal}:{self.time}"


@final
class EndMarks:
    """A file without a name that the ranks of a machine share: why each of them ended itself.

    It outlives the ranks that have written it, and needs no store.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = new_nameless_file()
        self.descriptor = descriptor

    def write(self, rank: int, mark: int) -> None:
        """Mark that a rank is about to end."""
        with contextlib.suppress(OSError):  # no space: it counts as killed
            os.pwrite(self.descriptor, bytes([mark]), rank)

    def read(self, rank: int) -> int:
        """Return the mark of a rank; 0 without one."""
        return (os.pread(self.descriptor, 1, rank) or b"\0")[0]

    def send(self, connection: socket.socket) -> None:
        """Share the file with the rank at the other end, which waits for an answer."""
        try:
            socket.send_fds(connection, [b"f"], [self.descriptor])
        except OSError:  # a sandbox does not let descriptors pass
            with contextlib.suppress(OSError):  # or that rank has ended already
                connection.sendall(b"f")

    @classmethod
    def receive(cls, connection: socket.socket) -> "EndMarks":
        """Return the file that the rank at the other end shares; a new one if it does not."""
        with contextlib.suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if descriptors:
                os.set_inheritable(descriptors[0], False)
                return cls(descriptors[0])
        return cls()


@final
class PeerMonitor:
    """Watches the processes of the other ranks; before `start_monitoring` it knows only its own.

    Args:
        ranks: this rank.
        parallel: by which ranks are named.
        store_address: MASTER_ADDR and MASTER_PORT; None if there is no network.
        agent: whether an agent of torchrun listens there.
        advice: see `launch`.
    """

    def __init__(
        self,
        ranks: RankInfo,
        parallel: ParallelConfig,
        store_address: tuple[str, int] | None = None,
        agent: bool = False,
        advice: Callable[[], str] = lambda: "",
    ) -> None:
        self.ranks = ranks
        self.advice = advice
        self.parallel = parallel
        self.store_address = store_address
        self.agent_address = store_address if agent else None
        self.store: Store | None = None
        self.rendezvous_store: Store | None = None
        self.processes: dict[int, int] = {}  # rank -> process id, on this machine
        self.machines: dict[int, list[int]] = {}  # lowest rank of each machine -> its ranks
        self.marks: EndMarks | None = None  # None on a machine of one rank
        self.noticed: dict[int, int] = {}  # ended rank -> when, in nanoseconds
        self.listener: threading.Thread | None = None
        self.finished = False
        self.ending = False  # the key is set, or the store is lost
        self.stopping = False  # by a signal
        # Held while this rank reports, so that none of its threads ends the process meanwhile.
        self.reporting = threading.Lock()
        self.attempted = False  # a rank tries to report once

    def start_monitoring(self, store: "Store") -> None:
        """Exchange process ids over the store and start the listening thread; collective."""
        machine = f"{machine_id()}/{self.ranks.node}"
        store.set(f"credit_dp/process/{self.ranks.rank}", f"{machine} {os.getpid()}")
        keys = [f"credit_dp/process/{rank}" for rank in range(self.ranks.world_size)]
        entries = [value.decode().rsplit(" ", 1) for value in store.multi_get(keys)]
        self.processes = {
            rank: int(pid) for rank, (name, pid) in enumerate(entries) if name == machine
        }
        by_name: dict[str, list[int]] = {}
        for rank, (name, _) in enumerate(entries):
            by_name.setdefault(name, []).append(rank)
        self.machines = {on_machine[0]: on_machine for on_machine in by_name.values()}
        # Keep the store alive until all ranks have left, if this rank serves it.
        self.rendezvous_store = store
        # Another connection for other threads: a call of the main thread blocks its own.
        self.store = new_connection(store)
        lowest = min(self.processes)
        key = f"credit_dp/socket/{lowest}"
        if self.ranks.rank == lowest:
            others = accept_connections(len(self.processes) - 1, partial(store.set, key))
            if others:
                self.marks = EndMarks()
                for connection in others:
                    self.marks.send(connection)
                threading.Thread(target=self.watch_ranks, args=(others,), daemon=True).start()
            wait = partial(self.wait_at_store, new_connection(store), others)
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(store.get(key).decode())
            self.marks = EndMarks.receive(connection)
            wait = partial(self.wait_at_socket, connection)
        self.listener = threading.Thread(target=wait, daemon=True)
        self.listener.start()

    # Threads that wait for the end of the run or of a rank

    def wait_at_store(self, store: "Store", others: Sequence[socket.socket]) -> None:
        """Wait for the end of the run, and tell the other ranks of this machine."""
        word = STORE_LOST
        with contextlib.suppress(RuntimeError):  # the rank that served the store has ended
            store.wait([END_KEY], FOREVER)
            word = REPORTED
        self.ending = True
        for connection in others:
            with contextlib.suppress(OSError):  # that rank has ended already
                connection.sendall(word)
                connection.shutdown(socket.SHUT_RDWR)  # `watch_ranks` closes it
        if word == REPORTED:
            self.answer_reporter(store)
        self.end_process(word)

    def wait_at_socket(self, connection: socket.socket) -> None:
        """Wait for the word of the rank that waits at the store, or for the end of its process."""
        word = b""
        with connection, contextlib.suppress(OSError):
            word = connection.recv(1)
        self.ending = bool(word)
        self.end_process(word)

    def watch_ranks(self, others: Sequence[socket.socket]) -> None:
        """Wait until the connection of a rank of this machine closes: that rank has ended."""
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.PollSelector())
            for connection in others:
                selector.register(stack.enter_context(connection), selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                if not self.ending and self.wait_for_ended_rank():
                    self.end_process(b"")

    def end_process(self, word: bytes) -> None:
        """End the process if this rank has not finished; before, report why if that may be missing.

        Args:
            word: `REPORTED`, `STORE_LOST`, or none if a rank of this machine has ended.
        """
        if word == REPORTED:
            if self.reporting.acquire(timeout=REPORTING_SECONDS):
                self.attempted = True
                self.reporting.release()
        elif word != STORE_LOST:
            self.wait_for_ended_rank()
            self.report_once(None)
        elif not self.finished:  # else rank 0 may have left, after the last rank has finished
            self.wait_for_ended_rank()
            self.report_once(None, store_lost=True)
        if not self.finished:
            time.sleep(ROOT_CAUSE_SECONDS)
            self.mark_end()
            os._exit(1)

    def mark_end(self) -> None:
        """Let the other ranks of this machine know that this rank is not the first to end."""
        if self.marks is not None and not self.stopping:
            self.marks.write(self.ranks.rank, ON_PURPOSE)

    # What the main thread calls

    def wait_for_all_ranks(self) -> None:
        """Wait until all ranks have finished, so that none takes a finished rank for a lost one."""
        if self.store is None or self.listener is None:
            return
        self.finished = True
        if self.store.add("credit_dp/left", 1) == self.ranks.world_size:
            self.store.set(END_KEY, "")
        self.listener.join(LAST_RANK_SECONDS)
        self.mark_end()

    def stop(self, number: int) -> None:
        """End the process on a signal; report an ended rank first, if that is why it came."""
        self.stopping = True
        if self.marks is not None:
            self.marks.write(self.ranks.rank, number)
        if number == signal.SIGINT and self.ranks.rank == 0:
            sys.stderr.write("\ninterrupted\n")
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.advice()}\n".lstrip())
        # Launchers send SIGTERM to all ranks when one has ended. After this rank has finished, an
        # ended rank is one that has finished as well.
        if number != signal.SIGINT and not self.finished:
            self.report_once(None)
        time.sleep(DETECTION_SECONDS)  # other ranks still look which processes have ended
        os._exit(Terminated(number).code)

    def report_failure(self, report: Callable[[], None]) -> None:
        """Report this rank's failure, or the ended rank behind it, unless another rank has."""
        # An exception is often the consequence of a peer that was killed: look for one first.
        if not self.wait_for_ended_rank():
            wait_for_first_rank(self.ranks.rank)
            if len(self.machines) > 1:
                time.sleep(REMOTE_REPORT_SECONDS)
        self.report_once(report)
        self.mark_end()

    # Who reports what

    def report_once(self, report: Callable[[], None] | None, store_lost: bool = False) -> None:
        """Report once in the whole run: an ended process if there is one, otherwise by `report`."""
        ended: list[EndedRank] = []
        # Not for ever: the store may be on a machine that does not answer.
        if not self.reporting.acquire(timeout=REPORTING_SECONDS):
            return
        try:
            if not self.attempted:
                ended = self.ended_ranks()
                if ended or report is not None or store_lost:
                    self.attempted = True
                    self._report(ended, report)
        finally:
            self.reporting.release()
        if ended:
            time.sleep(ROOT_CAUSE_SECONDS)

    def _report(self, ended: list[EndedRank], report: Callable[[], None] | None) -> None:
        silent: list[int] = []
        claimed = self.claim_in_store()
        if claimed:
            more, silent = self.ask_machines()
            ended = in_order([*ended, *more])
        elif claimed is None and self.reports_without_store():
            if 0 not in self.processes or not (ended or report):
                ended = []
                report = partial(report_error, self.lost_store_message())
        else:
            return
        if ended:
            report_error(self.death_message(ended))
        elif report is not None:
            report()
        if silent:
            report_crash(
                f"no answer from {rank_list(silent)} on other machines (killed, or are the "
                "machines or the network lost?)"
            )
        if self.store is not None:
            time.sleep(END_NOTICE_SECONDS)

    def claim_in_store(self) -> bool | None:
        """Return whether this rank is the first to report, and let all others end; None: no store.

        Another rank learns what happened on the machine of this one.
        """
        if self.store is None:  # the ranks have not met: each of them reports
            return True
        try:
            first = self.store.add("credit_dp/floor", 1) == 1
        except RuntimeError:
            return None
        with contextlib.suppress(RuntimeError):
            if first:
                self.store.set(END_KEY, "")
            else:
                self.answer_reporter(self.store)
        return first

    def answer_reporter(self, store: "Store") -> None:
        """Let the rank that reports know which ranks of this machine have ended."""
        with contextlib.suppress(RuntimeError):
            text = " ".join(map(str, self.ended_ranks()))
            store.set(answer_key(min(self.processes)), text)

    def ask_machines(self) -> tuple[list[EndedRank], list[int]]:
        """Return the ended ranks of other machines, and the ranks of machines that do not answer.

        They answer when they have read the key. So the cause is reported wherever it was, and
        whichever rank noticed something first.
        """
        keys = {
            answer_key(lowest): on_machine
            for lowest, on_machine in self.machines.items()
            if self.ranks.rank not in on_machine
        }
        if not keys or self.store is None:
            return [], []
        ended: list[EndedRank] = []
        with contextlib.suppress(RuntimeError):  # the store has ended meanwhile
            for _ in range(ANSWER_SECONDS):
                with contextlib.suppress(RuntimeError):  # not all in time
                    self.store.wait(list(keys), timedelta(seconds=1))
                for key in [key for key in keys if self.store.check([key])]:
                    ended += map(EndedRank.parse, self.store.get(key).decode().split())
                    del keys[key]
                if not keys:
                    break
        return ended, [rank for on_machine in keys.values() for rank in on_machine]

    def reports_without_store(self) -> bool:
        """Return whether this rank reports, where no store can tell: one rank of the run does.

        That is on rank 0's machine the lowest rank that is left. If no rank there has reported, it
        is the lowest rank that is left on the next machine.
        """
        lowest_left = min(
            rank for rank, pid in self.processes.items() if not process_has_ended(pid)
        )
        if 0 in self.processes:
            reports = self.ranks.rank == lowest_left
            if reports and len(self.machines) > 1 and self.store_address is not None:
                port = self.store_address[1]
                threading.Thread(target=stand_in_for_store, args=(port,), daemon=True).start()
            return reports
        next_machine = min(lowest for lowest in self.machines if lowest > 0)
        if next_machine not in self.processes or self.ranks.rank != lowest_left:
            return False
        patience = STAND_IN_SECONDS if len(self.machines[0]) > 1 else 0.0
        end = time.monotonic() + patience
        while self.store_address is not None and not self.stopping:
            if stand_in_answers(self.store_address):
                return False
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        return not self.stopping

    def ended_ranks(self) -> list[EndedRank]:
        """Return the ranks of this machine that have ended, but not as a consequence, in order.

        Those that ended themselves on a signal are left out if a signal also ends this rank.
        """
        found = []
        for rank, pid in self.processes.items():
            if process_has_ended(pid):
                # Read now: the rank writes it before it ends.
                mark = NOT_MARKED if self.marks is None else self.marks.read(rank)
                noticed = self.noticed.setdefault(rank, time.time_ns())
                if mark == NOT_MARKED or (mark != ON_PURPOSE and not self.stopping):
                    found.append(EndedRank(rank, mark, noticed))
        return in_order(found)

    def wait_for_ended_rank(self) -> bool:
        """Wait for a rank that has closed its connections to show as ended; return if one does."""
        end = time.monotonic() + DETECTION_SECONDS
        while not (ended := self.ended_ranks()) and time.monotonic() < end:
            time.sleep(0.01)
        if ended and ended[0].signal:
            time.sleep(SIGNAL_SECONDS)  # meanwhile `stop` ends this rank if all get the signal
        return bool(ended)

    def death_message(self, ended: Sequence[EndedRank]) -> str:
        """Return the error line for ranks that ended without reporting, in this order."""
        first = mesh_rank_name(ended[0].rank, self.parallel)
        how = (
            f"was ended by {signal_name(ended[0].signal)}"
            if ended[0].signal
            else "ended without a message (killed, or out of memory?)"
        )
        more = sum(each.signal == ended[0].signal for each in ended[1:])
        others = f", and so did {counted(more, 'other')}" if more else ""
        return f"{first} {how}{others}; the other ranks were stopped"

    def lost_store_message(self) -> str:
        """Return the error line for a store that was lost for a reason that no rank has seen."""
        if self.agent_address is None:
            name = mesh_rank_name(0, self.parallel)
        else:
            host, port = self.agent_address
            name = f"torchrun's agent at {host}:{port}"
        return f"{name} ended, or its machine or the network to it was lost; all ranks were stopped"


def new_connection(store: "Store") -> "Store":
    """Return the same store over another connection, for another thread."""
    return cast("Store", cast(Any, store).clone())  # which the stub of torch's stores lacks


def in_order(ended: Sequence[EndedRank]) -> list[EndedRank]:
    """Return ended ranks, killed ones first, then in the order of time."""
    return sorted(ended, key=lambda each: (each.signal > 0, each.time, each.rank))


def answer_key(lowest: int) -> str:
    """Return the key of the store at which the machine with this lowest rank answers."""
    return f"credit_dp/answer/{lowest}"


def rank_list(ranks: Sequence[int]) -> str:
    """Return the ranks as text: `rank 3`, or `ranks 4, 5, 6 and 3 more`."""
    first = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {first}{more}"


def stand_in_for_store(port: int) -> None:
    """Answer at the port of a store that has ended: a rank beside it has reported why."""
    end = time.monotonic() + STAND_IN_SECONDS
    both = socket.has_dualstack_ipv6()  # IPv4 and IPv6, as torch's server
    family = socket.AF_INET6 if both else socket.AF_INET
    while time.monotonic() < end:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("", port), family=family, dualstack_ipv6=both) as listener,
        ):
            listener.settimeout(STAND_IN_SECONDS)
            while time.monotonic() < end:
                with listener.accept()[0] as peer:
                    peer.sendall(STAND_IN)
        time.sleep(0.05)  # the port is not free yet


def stand_in_answers(address: tuple[str, int]) -> bool:
    """Return whether a rank that has reported answers at the port of the store.

    A store that is not gone yet accepts the connection and says nothing.
    """
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0) as peer:
        return peer.recv(1) == STAND_IN
    return False


def new_nameless_file() -> int:
    """Return the descriptor of an empty file that ends with its last descriptor."""
    in_memory: Callable[[str], int] | None = getattr(os, "memfd_create", None)
    if in_memory is not None:  # on Linux, where no full disk matters
        with contextlib.suppress(OSError):  # hardened systems refuse it (vm.memfd_noexec=2)
            return in_memory("credit_dp")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def accept_connections(count: int, publish: Callable[[str], None]) -> list[socket.socket]:
    """Return connections to other ranks of this machine, which connect to the published address."""
    if not count:
        return []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        if sys.platform == "linux":
            # A name that is no file: containers of one machine may not share folders.
            address = f"\0credit_dp-{secrets.token_hex(16)}"
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="credit_dp-"))
            address = f"{folder}/end"
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
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, perhaps just now; or there is no /proc on this system
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # of another user
            return False
        return False
    # After the command's name in brackets come the state and, six fields later, the flags.
    return fields[0] == "Z" or bool(int(fields[6]) & PF_EXITING)
