"""Let the ranks of a launcher end together, and report a failure once.

The launcher ends all ranks when one fails: torchrun by itself, others with a flag
(docs/cluster.md). But a rank that was killed can't report itself, ranks that lose it would all
report that, and a rank that trains can't tell the launcher's SIGTERM from one that asks for a
checkpoint. So in every rank

1. a thread looks twice a second for the key `credit_dp/end` of the rendezvous store, and whether
   the processes of all ranks of this machine are still there,
2. whoever ends first, for whatever reason, adds 1 to a counter in the store and is the one that
   reports: the killed rank if there is one on its machine, otherwise its own failure,
3. it sets the key, and all others end without a message, whatever their main thread waits for.

If a collective has failed, ranks of other machines may be unreachable: the rank that reports waits
a moment for the answers of all to the key, and names one that gave none.

The store ends with rank 0, or with torchrun's agent. So rank 0 stays for a moment after it has
failed. If it was killed, or its machine is unreachable, one rank of each machine says so.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast, final

from credit_dp.config import ParallelConfig
from credit_dp.distributed.failure_report import mesh_rank_name, report_error, wait_for_first_rank
from credit_dp.distributed.launcher import RankInfo, agent_serves_store
from credit_dp.distributed.signals import Terminated
from credit_dp.distributed.worker import exit_now
from credit_dp.errors import counted

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

POLL_SECONDS = 0.5
# Until a killed process shows as ended; its peers may notice the broken connection earlier.
DETECTION_SECONDS = 0.2
# The ranks on the machine of a killed rank report it; other machines leave them this time.
REMOTE_REPORT_SECONDS = 1.0
# Ranks of other machines answer within POLL_SECONDS, unless they are very busy.
ANSWER_SECONDS = 4.0
# The rank that serves the store stays so long, for others to read the key. A rank that ends as a
# consequence does, too, so that the launcher takes the right one for the first.
END_SECONDS = 2.0
REPORTING_SECONDS = 8.0  # in which a rank ends, whether it can report or not
LAST_RANK_SECONDS = 600.0  # for which a finished rank waits for the last one
END_KEY = "credit_dp/end"
LOOK_THERE = "all ranks were stopped. Look there; resume=auto continues a training"
PF_EXITING = 4  # linux/sched.h; a GPU's driver may take seconds to release a killed process


@final
class PeerMonitor:
    """Ends this rank with the others; before `start_monitoring` it knows only this one.

    Args:
        ranks: this rank.
        parallel: by which ranks are named.
        advice: see `launch`.
    """

    def __init__(
        self, ranks: RankInfo, parallel: ParallelConfig, advice: Callable[[], str] = lambda: ""
    ) -> None:
        self.ranks = ranks
        self.parallel = parallel
        self.advice = advice
        self.serves_store = ranks.rank == 0 and not agent_serves_store(os.environ)
        self.store: Store | None = None
        self.rendezvous_store: Store | None = None
        self.processes: dict[int, int] = {}  # rank -> process id, on this machine
        self.watcher: threading.Thread | None = None
        self.finished = False
        self.left = threading.Event()  # this rank has finished, and waits for no other
        self.store_lost = False
        self.asks_store = False  # to report a failure
        self.in_collective = False  # it has failed
        self.reported = False  # by another rank
        self.ending = threading.Lock()  # held by the thread that ends the process

    def start_monitoring(self, store: "Store") -> None:
        """Exchange process ids over the store and start the thread; collective."""
        self.rendezvous_store = store  # serves the others until this rank ends
        # Another connection for other threads: a call of the main thread blocks its own. It can't
        # be opened later: a process that is being killed still accepts connections.
        self.store = cast("Store", cast(Any, store).clone())  # which the stub of torch lacks
        machine = f"{machine_id()}/{self.ranks.node}"
        store.set(f"credit_dp/process/{self.ranks.rank}", f"{os.getpid()} {machine}")
        keys = [f"credit_dp/process/{rank}" for rank in range(self.ranks.world_size)]
        entries = [value.decode().split(" ", 1) for value in store.multi_get(keys)]
        self.processes = {
            rank: int(pid) for rank, (pid, where) in enumerate(entries) if where == machine
        }
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def watch(self) -> None:
        """End this rank when another one has ended; if it has finished, only for a killed one."""
        while self.store is not None and not (self.left.is_set() or self.ended_ranks()):
            try:
                self.reported = self.store.check([END_KEY])
            except RuntimeError:
                self.store_lost = True
            if self.reported or self.store_lost:
                break
            self.left.wait(POLL_SECONDS)
        if self.reported and not self.finished:  # then `wait_for_all_ranks` does
            self._answer()
        if not (self.finished and (self.reported or self.store_lost or self.left.is_set())):
            self.end(1)

    # What the main thread and that of the signals call

    def wait_for_all_ranks(self) -> None:
        """Wait until all ranks have finished, so that none takes a finished rank for a lost one."""
        self.finished = True
        if self.store is None or self.rendezvous_store is None:
            return
        with contextlib.suppress(RuntimeError):  # too late, or the store has ended
            if self.store.add("credit_dp/finished", 1) == self.ranks.world_size:
                self.store.set(END_KEY, "")
            self.rendezvous_store.wait([END_KEY], timedelta(seconds=LAST_RANK_SECONDS))
        # A thread that is in a call of torch when the interpreter ends aborts the process.
        self.left.set()
        if self.watcher is not None:
            self.watcher.join(REPORTING_SECONDS)
        left = [left_key(rank) for rank in range(self.ranks.world_size)]
        with contextlib.suppress(RuntimeError):  # the store has ended
            # torch's `set` would return before the store has the key.
            self.rendezvous_store.add(left[self.ranks.rank], 1)
            if self.serves_store:  # torch writes a page to stderr if it ends while others read
                self.rendezvous_store.wait(left, timedelta(seconds=END_SECONDS))

    def fail(self, code: int, report: Callable[[], None], in_collective: bool = False) -> NoReturn:
        """End the process after an exception, which may be the consequence of a lost rank.

        Args:
            code, report: as of `end`.
            in_collective: whether a collective has failed: then machines may be unreachable.
        """
        self.asks_store = not self.finished
        self.in_collective = in_collective
        with self._limited(code):
            if not self.wait_for_ended_rank() and self.ranks.on_several_nodes:
                time.sleep(REMOTE_REPORT_SECONDS)
        self.end(code, report)

    def stop(self, number: int) -> NoReturn:
        """End the process on a signal, without a message if it came by itself."""
        if number == signal.SIGINT and self.ranks.rank == 0:
            with contextlib.suppress(OSError):
                sys.stderr.write("\ninterrupted\n" + f"{self.advice()}\n".lstrip())
        self.end(Terminated(number).code)

    def end(self, code: int, report: Callable[[], None] | None = None) -> NoReturn:
        """End the process and all ranks; the first rank to do so reports why.

        Args:
            code: exit code.
            report: writes the failure of this rank; None if it has none of its own.
        """
        try:
            with self._limited(code):
                self.ending.acquire()
                is_cause = not self.reported and self._report_first(report)
                if self.serves_store or not is_cause:
                    time.sleep(END_SECONDS)
        finally:
            exit_now(code)

    @contextlib.contextmanager
    def _limited(self, code: int) -> Iterator[None]:
        """End the process if the block takes long: the store's machine may not answer."""
        limit = threading.Timer(REPORTING_SECONDS, self._end_without_answer, (code,))
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()

    def _end_without_answer(self, code: int) -> NoReturn:
        if self.asks_store and self._reports_lost_store():
            report_error(self.lost_store_message())
        exit_now(code)

    def _reports_lost_store(self) -> bool:
        """Whether this rank reports a lost store: one of each machine, on rank 0's the next one."""
        return self.ranks.local_rank == int(self.ranks.rank == self.ranks.local_rank)

    def _report_first(self, report: Callable[[], None] | None) -> bool:
        """Report if no other rank has; return whether this rank ends first."""
        if self.store is None:  # the ranks have not met: each of them reports
            if report is not None:
                wait_for_first_rank(self.ranks.rank)
                report()
            return True
        ended = self.ended_ranks()
        reports = False
        silent: list[int] = []
        if not self.store_lost:  # torch writes a page to stderr whenever it is called then
            try:
                reports = self.store.add("credit_dp/ended", 1) == 1
                self.store.set(END_KEY, "")
                self._answer()
                if reports and self.in_collective and not ended:
                    silent = self.silent_ranks(self.store)
            except RuntimeError:
                self.store_lost = True
        self.asks_store = False
        if self.store_lost:
            reports = self._reports_lost_store()
            if self.finished:  # then rank 0 may have left, after the last rank has finished
                return report is None
            report = partial(report_error, self.lost_store_message())
        if reports and ended:
            report_error(self.death_message(ended))
        elif silent:
            report_error(self.silence_message(silent))
        elif reports and report is not None:
            report()
        return not ended and (reports or report is None)

    def ended_ranks(self) -> list[int]:
        """Return the ranks of this machine whose processes have ended before they finished."""
        ended = [rank for rank, pid in self.processes.items() if process_has_ended(pid)]
        if self.store is None or self.store_lost:
            return ended
        try:  # asked after their end, as a rank sets its key just before that
            return [rank for rank in ended if not self.store.check([left_key(rank)])]
        except RuntimeError:
            self.store_lost = True
            return ended

    def _answer(self) -> None:
        """Let the rank that reports know that this one ends, and can be reached."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.add(left_key(self.ranks.rank), 1)

    def silent_ranks(self, store: "Store") -> list[int]:
        """Return the ranks of other machines that do not answer to the key of the end."""
        others = [r for r in range(self.ranks.world_size) if r not in self.processes]
        end = time.monotonic() + ANSWER_SECONDS
        while others and time.monotonic() < end:
            others = [rank for rank in others if not store.check([left_key(rank)])]
            time.sleep(POLL_SECONDS / 5)
        return others

    def wait_for_ended_rank(self) -> bool:
        """Wait for a rank that has closed its connections to show as ended; return if one does."""
        end = time.monotonic() + DETECTION_SECONDS
        while not (ended := self.ended_ranks()) and time.monotonic() < end:
            time.sleep(0.01)
        return bool(ended)

    def death_message(self, ended: Sequence[int]) -> str:
        """Return the error line for ranks that ended without reporting."""
        first = mesh_rank_name(ended[0], self.parallel)
        others = f", and so did {counted(len(ended) - 1, 'other')}" if len(ended) > 1 else ""
        return (
            f"{first} ended without a message (killed, or out of memory?){others}; the other ranks "
            "were stopped"
        )

    def silence_message(self, silent: Sequence[int]) -> str:
        """Return the error line for ranks of other machines that do not answer."""
        first = mesh_rank_name(silent[0], self.parallel)
        others = f", nor did {counted(len(silent) - 1, 'other')}" if len(silent) > 1 else ""
        return (
            f"{first} gave no answer{others}: its process, its machine or the network to it was "
            f"lost; {LOOK_THERE}"
        )

    def lost_store_message(self) -> str:
        """Return the error line for a store that was lost for a reason that no rank has seen."""
        name = mesh_rank_name(0, self.parallel)
        if agent_serves_store(os.environ):
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            name = f"torchrun's agent at {address}"
        return f"{name} ended, or its machine or the network to it was lost; {LOOK_THERE}"


def left_key(rank: int) -> str:
    """Return the key of the store that a rank sets when it ends, finished or with the others."""
    return f"credit_dp/left/{rank}"


def machine_id() -> str:
    """Return a text that is equal on ranks that see each other's process ids.

    Process ids are only unique within one boot of a machine and one pid namespace (container).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


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
