"""Who reports when a launcher's ranks end, what it says, and when a rank ends with the others."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from credit_dp.config import ParallelConfig
from credit_dp.distributed import peer_monitor
from credit_dp.distributed.failure_report import report_error
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.peer_monitor import END_KEY, PeerMonitor, process_has_ended

RANK_0 = "error: rank 0 (pipeline 0, data 0, domain 0) ended"
KILLED = f"{RANK_0} without a message (killed, or out of memory?); the other ranks were stopped\n"
LOST = (
    "or its machine or the network to it was lost; all ranks were stopped. Look there; "
    "resume=auto continues a training\n"
)
OWN = partial(report_error, "connection closed by peer")
OWN_LINE = "error: connection closed by peer\n"


class Exited(BaseException):
    """Instead of the end of the process."""


class LostStore:
    """A store whose connection has ended."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("connection reset")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("connection reset")

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset")


class WakingStore(HashStore):
    """A store whose `add` wakes those who wait, as torch's TCPStore; HashStore's does not."""

    def add(self, key: str, amount: int) -> int:
        number = super().add(key, amount)
        self.set("woken", "")
        return number


class LateStore:
    """A store of which `set` does not wait for the server, as in torch's TCPStore."""

    def __init__(self, store: HashStore) -> None:
        self.store = store
        self.sent: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.sent.append(key)

    def add(self, key: str, amount: int) -> int:
        for sent in self.sent:
            self.store.set(sent, "")
        self.sent.clear()
        return self.store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.store.wait(keys, timeout)


@pytest.fixture(autouse=True)
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of the processes that would have ended."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    names = ("END", "REMOTE_REPORT", "POLL", "DETECTION", "ANSWER")
    for name in names:
        monkeypatch.setattr(peer_monitor, f"{name}_SECONDS", 0.0)
    return codes


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def monitor_of(rank: int, store: object, *killed: int, per_node: int = 4) -> PeerMonitor:
    """A monitor of one of four ranks that has exchanged process ids with those of its machine."""
    node = rank // per_node
    ranks = RankInfo(rank, 4, rank % per_node, per_node, node)
    monitor = PeerMonitor(ranks, ParallelConfig(domain=4))
    on_machine = range(node * per_node, (node + 1) * per_node)
    monitor.processes = {r: ended_process() if r in killed else os.getpid() for r in on_machine}
    monitor.store = store  # type: ignore[assignment]
    return monitor


def end(action: Callable[[], object]) -> None:
    with pytest.raises(Exited):
        action()


def test_ctrl_c_of_a_launchers_ranks_is_answered_once_with_how_to_continue(
    codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, advice, text in (
        (0, "the last checkpoint is A", "\ninterrupted\nthe last checkpoint is A\n"),
        (0, "", "\ninterrupted\n"),
        (1, "the last checkpoint is A", ""),
    ):
        advise = partial(str, advice)
        monitor = PeerMonitor(RankInfo(rank, 2), ParallelConfig(domain=2), advise)
        end(partial(monitor.stop, signal.SIGINT))
        assert (codes.pop(), capsys.readouterr().err) == (130, text)


def test_a_process_that_ends_while_it_is_looked_at_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parent may wait for it between two questions to the system."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)"])
    assert not process_has_ended(process.pid)
    read = Path.read_text

    def read_too_late(path: Path) -> str:
        process.kill()
        process.wait()
        return read(path)

    monkeypatch.setattr(Path, "read_text", read_too_late)
    assert process_has_ended(process.pid)


def test_the_killed_rank_is_named_and_not_what_follows_from_it(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """By the first rank that notices it; the second one is silent."""
    store = HashStore()
    end(partial(monitor_of(3, store, 0).fail, 2, OWN))
    assert capfd.readouterr().err == KILLED
    assert store.check([END_KEY])
    end(partial(monitor_of(2, store, 0).fail, 1, OWN))
    assert capfd.readouterr().err == ""
    assert codes == [2, 1]


def test_ranks_killed_together_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    end(monitor_of(3, HashStore(), 0, 1, 2).watch)
    message = capfd.readouterr().err
    assert message == KILLED.replace("?);", "?), and so did 2 others;")


def test_a_rank_reports_its_own_failure_once(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    for per_node in (4, 2):
        store = HashStore()
        for rank in (3, 0):
            end(partial(monitor_of(rank, store, per_node=per_node).fail, 1, OWN))
        assert capfd.readouterr().err == OWN_LINE, per_node
    assert codes == [1] * 4


def test_ranks_that_a_signal_ends_are_not_named(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither by themselves nor by others, to which they look like killed ones."""
    store = HashStore()
    end(partial(monitor_of(0, store).stop, signal.SIGTERM))
    end(partial(monitor_of(1, store, 0).fail, 1, OWN))
    end(monitor_of(2, store, 0, 1).watch)
    assert (codes, capfd.readouterr().err) == ([143, 1, 1], "")


def test_the_signal_of_a_launcher_that_lost_a_rank_does_not_hide_it(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    end(partial(monitor_of(1, HashStore(), 0).stop, signal.SIGTERM))
    assert (codes, capfd.readouterr().err) == ([143], KILLED)


def test_a_rank_ends_with_the_others_whatever_its_main_thread_waits_for(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    store = HashStore()
    store.set(END_KEY, "")
    end(monitor_of(1, store).watch)
    assert (codes, capfd.readouterr().err) == ([1], "")


def test_a_finished_rank_is_not_taken_for_a_killed_one(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """All of them wait for the last one, and leave in any order then."""
    store = WakingStore()
    monitors = [monitor_of(rank, store) for rank in range(4)]
    for monitor in monitors:
        monitor.rendezvous_store = store
    threads = [threading.Thread(target=each.wait_for_all_ranks) for each in monitors]
    for thread in threads[:3]:
        thread.start()
    assert not store.check([END_KEY])
    threads[3].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert store.check([END_KEY])
    monitors[0].processes[1] = ended_process()
    monitors[0].watch()
    end(partial(monitors[0].stop, signal.SIGTERM))
    assert (codes, capfd.readouterr().err) == ([143], "")


def test_a_rank_leaves_when_the_others_can_know() -> None:
    store = HashStore()
    store.set(END_KEY, "")
    first, leaving = monitor_of(0, store), monitor_of(1, store)
    leaving.rendezvous_store = LateStore(store)  # type: ignore[assignment]
    leaving.wait_for_all_ranks()
    first.processes[1] = ended_process()
    assert first.ended_ranks() == []


def test_a_finished_rank_names_the_one_that_is_killed_before_its_end(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """It would wait for the killed rank in vain; torchrun, which may tell it, knows no mesh."""
    for told, code in ((False, 1), (True, 143)):
        monitor = monitor_of(1, HashStore(), 0)
        monitor.finished = True
        end(partial(monitor.stop, signal.SIGTERM) if told else monitor.watch)
        assert (codes.pop(), capfd.readouterr().err) == (code, KILLED)


def test_no_thread_is_in_a_call_of_torch_when_a_rank_leaves(codes: list[int]) -> None:
    """C++ ends a process whose interpreter ends meanwhile: `terminate called without ...`."""
    monitor = PeerMonitor(RankInfo(), ParallelConfig(domain=1))
    monitor.start_monitoring(TCPStore("127.0.0.1", 0, 1, is_master=True))
    assert monitor.watcher is not None
    assert monitor.watcher.is_alive()
    monitor.wait_for_all_ranks()
    assert not monitor.watcher.is_alive()
    assert codes == []


def test_a_rank_that_works_for_long_is_not_ended_by_a_finished_one(
    codes: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rank 0 while it draws: the others have waited for it, and then left."""
    monkeypatch.setattr(peer_monitor, "LAST_RANK_SECONDS", 0.01)
    store = HashStore()
    finished, working = monitor_of(1, store), monitor_of(0, store)
    finished.rendezvous_store = store
    finished.wait_for_all_ranks()
    working.processes[1] = ended_process()
    assert working.ended_ranks() == []
    assert not store.check([END_KEY])
    end(partial(working.fail, 2, OWN))
    assert (codes, capfd.readouterr().err) == ([2], OWN_LINE)


def test_one_rank_of_each_machine_says_that_the_store_is_lost(
    codes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """As with rank 0, which serves it; on its machine, its process is seen to have ended."""
    for rank in (1, 2, 3):
        killed = (0,) if rank == 1 else ()
        end(monitor_of(rank, LostStore(), *killed, per_node=2).watch)
    assert capfd.readouterr().err == f"{KILLED}{RANK_0}, {LOST}"
    assert codes == [1, 1, 1]


def test_a_signal_ends_a_rank_though_the_store_does_not_answer(
    codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the loss of the network: torch waits for minutes."""
    answered = threading.Event()

    class SilentStore(LostStore):
        def add(self, key: str, amount: int) -> int:
            answered.wait()
            return super().add(key, amount)

    monkeypatch.setattr(peer_monitor, "REPORTING_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), answered.set()))
    monitor_of(1, SilentStore()).stop(signal.SIGTERM)
    assert codes[0] == 143


def test_one_rank_of_a_machine_says_that_the_store_does_not_answer(
    codes: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the link to rank 0's machine is down: its own collective has failed, after long."""
    answered = threading.Event()

    class SilentStore(LostStore):
        def add(self, key: str, amount: int) -> int:
            answered.wait()
            raise Exited

    monkeypatch.setattr(peer_monitor, "REPORTING_SECONDS", 0.2)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), answered.set()))
    for rank, line in ((2, f"{RANK_0}, {LOST}"), (3, "")):
        answered.clear()
        end(partial(monitor_of(rank, SilentStore(), per_node=2).fail, 1, OWN))
        assert (codes[0], capfd.readouterr().err) == (1, line)
        codes.clear()


def test_a_rank_whose_collective_failed_names_those_that_cannot_be_reached(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that can be reached answer, as where one of them hangs: then the traceback helps."""
    monkeypatch.setattr(peer_monitor, "ANSWER_SECONDS", 0.2)

    class AnsweredStore(HashStore):
        """A store in which other ranks answer as soon as they are told of the end."""

        answering: tuple[int, ...]

        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            for rank in self.answering if key == END_KEY else ():
                end(monitor_of(rank, self, per_node=2).watch)

    silent = "error: rank 2 (pipeline 0, data 0, domain 2) gave no answer"
    for answering, line in {
        (2, 3): OWN_LINE,
        (3,): f"{silent}: its process, {LOST[3:]}",
        (): f"{silent}, nor did 1 other: its process, {LOST[3:]}",
    }.items():
        store = AnsweredStore()
        store.answering = answering
        end(partial(monitor_of(0, store, per_node=2).fail, 1, OWN, in_collective=True))
        assert capfd.readouterr().err == line


def test_the_loss_of_the_store_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("ADDR", "node1"), ("PORT", "29500")):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    end(partial(monitor_of(2, LostStore(), per_node=2).fail, 1, OWN))
    assert capfd.readouterr().err == f"error: torchrun's agent at node1:29500 ended, {LOST}"
