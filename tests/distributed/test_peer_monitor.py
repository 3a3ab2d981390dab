"""Which rank is named when some have ended: the first one, whoever reports, and however late."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from credit_dp.config import ParallelConfig
from credit_dp.distributed import peer_monitor
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.peer_monitor import (
    REPORTED,
    EndedRank,
    EndMarks,
    PeerMonitor,
    accept_connections,
    answer_key,
    in_order,
    process_has_ended,
    rank_list,
    stand_in_answers,
)
from credit_dp.distributed.report import report_error
from tests.distributed.processes import free_port, until

MACHINES = {0: [0, 1], 2: [2, 3], 4: [4, 5]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOT_CAUSE_SECONDS", "END_NOTICE_SECONDS", "SIGNAL_SECONDS"):
        monkeypatch.setattr(peer_monitor, name, 0.0)
    monkeypatch.setattr(peer_monitor, "ANSWER_SECONDS", 1)


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def monitor_of(
    rank: int, store: object, *ended: int, port: int = 0, machines: dict[int, list[int]] = MACHINES
) -> PeerMonitor:
    """A monitor that has exchanged process ids; `ended`: ranks of its machine that were killed."""
    size = sum(map(len, machines.values()))
    lowest = next(lowest for lowest, ranks in machines.items() if rank in ranks)
    ranks = RankInfo(rank, size, rank - lowest, len(machines[lowest]), lowest)
    monitor = PeerMonitor(ranks, ParallelConfig(domain=size), ("127.0.0.1", port))
    monitor.machines = machines
    monitor.processes = {
        other: ended_process() if other in ended else os.getpid() for other in machines[lowest]
    }
    monitor.store = store  # type: ignore[assignment]
    monitor.marks = EndMarks()
    return monitor


@pytest.mark.parametrize(
    ("rank", "advice", "text"),
    [
        (0, "the last checkpoint is A", "\ninterrupted\nthe last checkpoint is A\n"),
        (0, "", "\ninterrupted\n"),
        (1, "the last checkpoint is A", ""),
    ],
)
def test_ctrl_c_of_a_launchers_ranks_is_answered_once_with_how_to_continue(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    advice: str,
    text: str,
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    PeerMonitor(RankInfo(rank, 2), ParallelConfig(domain=2), advice=lambda: advice).stop(
        signal.SIGINT
    )
    assert (codes, capsys.readouterr().err) == ([130], text)


class LostStore:
    """A store whose connection has ended."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("connection reset")


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


def test_a_rank_that_ended_as_a_consequence_is_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever looks first: the rank that ended on purpose has left a mark."""
    monitor = monitor_of(1, HashStore(), 0, machines={0: [0, 1]})
    monitor.marks.write(0, peer_monitor.ON_PURPOSE)
    assert monitor.ended_ranks() == []
    monitor.report_once(None)
    assert capfd.readouterr().err == ""
    assert not monitor.store.check(["credit_dp/floor"])


def test_a_rank_that_a_signal_ended_is_named_unless_it_ends_all(
    capfd: pytest.CaptureFixture[str],
) -> None:
    monitor = monitor_of(1, HashStore(), 0, machines={0: [0, 1]})
    monitor.marks.write(0, signal.SIGTERM)
    monitor.stopping = True
    assert monitor.ended_ranks() == []
    monitor.stopping = False
    monitor.report_once(None)
    line = "error: rank 0 (pipeline 0, data 0, domain 0) was ended by SIGTERM; the other ranks were"
    assert capfd.readouterr().err == f"{line} stopped\n"


def test_marks_are_shared_with_the_ranks_of_a_machine() -> None:
    marks = EndMarks()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        marks.send(ours)
        received = EndMarks.receive(theirs)
        assert not os.get_inheritable(received.descriptor)
        received.write(7, 255)
        assert [marks.read(rank) for rank in (6, 7, 8)] == [0, 255, 0]
        ours.close()
        assert EndMarks.receive(theirs).read(7) == 0  # the other rank has ended: one of its own


def test_ranks_start_where_descriptors_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some sandboxes; the rank at the other end would wait for ever."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(socket, "send_fds", refuse)
    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    marks = EndMarks()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(30)
        marks.send(ours)
        received = EndMarks.receive(theirs)
        received.write(7, 255)
        assert (received.read(7), marks.read(7)) == (255, 0)
        ours.sendall(REPORTED)
        assert theirs.recv(1) == REPORTED


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no sockets without a file")
def test_ranks_of_a_machine_meet_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """/tmp may be full, or belong to one container alone."""

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    connections: list[socket.socket] = []

    def connect(address: str) -> None:
        connections.append(socket.socket(socket.AF_UNIX))
        connections[0].connect(address)

    (accepted,) = accept_connections(1, connect)
    with accepted, connections[0]:
        accepted.sendall(REPORTED)
        assert connections[0].recv(1) == REPORTED


def test_killed_ranks_come_first_in_the_order_of_time() -> None:
    ended = [EndedRank(1, 15, 10), EndedRank(5, 0, 30), EndedRank(3, 0, 20)]
    assert [each.rank for each in in_order(ended)] == [3, 5, 1]
    assert EndedRank.parse(str(ended[0])) == ended[0]


def test_the_reporter_names_a_rank_of_another_machine(capfd: pytest.CaptureFixture[str]) -> None:
    """Though it was the first to notice anything, and what it has itself is a consequence."""
    store = HashStore()
    reporter = monitor_of(4, store, 5)
    store.set(answer_key(2), "")
    store.set(answer_key(0), str(EndedRank(0, 0, 123)))
    reporter.report_once(lambda: report_error("connection closed by peer"))
    message = capfd.readouterr().err
    assert message.startswith(
        "error: rank 0 (pipeline 0, data 0, domain 0) ended without a message"
    )
    assert "and so did 1 other; " in message
    assert message.count("\n") == 1
    assert store.check([peer_monitor.END_KEY])


def test_the_other_machines_answer_the_reporter(capfd: pytest.CaptureFixture[str]) -> None:
    """Also a rank that would have reported itself, but was not the first."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    reporter, second, waiting = (
        monitor_of(4, store),
        monitor_of(1, store, 0),
        monitor_of(2, store),
    )
    waiting.finished = True
    threads = [threading.Thread(target=waiting.wait_at_store, args=(store, []))]

    def report_late() -> None:
        store.wait([peer_monitor.END_KEY])
        second.report_once(None)

    threads.append(threading.Thread(target=report_late))
    for thread in threads:
        thread.start()
    reporter.report_once(lambda: report_error("connection closed by peer"))
    for thread in threads:
        thread.join(60)
    message = capfd.readouterr().err
    assert message.startswith("error: rank 0 (")
    assert message.count("\n") == 1


def test_machines_that_do_not_answer_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    store.set(answer_key(2), "")
    monitor_of(5, store).report_once(lambda: report_error("connection closed by peer"))
    assert capfd.readouterr().err == (
        "error: connection closed by peer\n"
        "no answer from ranks 0, 1 on other machines (killed, or are the machines or the network "
        "lost?)\n"
    )


@pytest.mark.parametrize("machine_0_is_left", [True, False])
def test_one_machine_reports_when_the_store_is_lost(
    machine_0_is_left: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with rank 0, which serves it: a rank beside it reports, else one of the next machine."""
    monkeypatch.setattr(peer_monitor, "STAND_IN_SECONDS", 1.0)
    port, store = free_port(), LostStore()
    monitors = [monitor_of(rank, store, port=port) for rank in (2, 3, 4, 5)]
    if machine_0_is_left:
        monitors.append(monitor_of(1, store, 0, port=port))
    threads = [
        threading.Thread(target=monitor.report_once, args=(None, True)) for monitor in monitors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    start = "error: rank 0 (pipeline 0, data 0, domain 0) ended"
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    if machine_0_is_left:
        assert message.startswith(f"{start} without a message (killed, or out of memory?); ")
    else:
        assert message.startswith(f"{start}, or its machine or the network to it was lost; ")


def test_a_signal_ends_a_rank_that_waits_for_a_report(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that stops the ranks of rank 0's machine first stops those of others soon."""
    monkeypatch.setattr(peer_monitor, "STAND_IN_SECONDS", 60.0)
    monitor = monitor_of(2, LostStore(), port=free_port())
    thread = threading.Thread(target=monitor.report_once, args=(None, True))
    thread.start()
    time.sleep(0.2)
    monitor.stopping = True
    thread.join(30)
    assert not thread.is_alive()
    assert capfd.readouterr().err == ""


def test_who_answers_at_the_port_of_the_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = ("127.0.0.1", server.port)
    assert not stand_in_answers(address)
    port = server.port
    del server
    assert not stand_in_answers(address)
    thread = threading.Thread(target=peer_monitor.stand_in_for_store, args=(port,), daemon=True)
    thread.start()
    until(lambda: stand_in_answers(address))


def test_the_loss_of_the_store_under_torchrun() -> None:
    monitor = PeerMonitor(RankInfo(2, 4, 0, 2, 1), ParallelConfig(), ("node1", 29500), True)
    assert monitor.lost_store_message() == (
        "torchrun's agent at node1:29500 ended, or its machine or the network to it was lost; "
        "all ranks were stopped"
    )


def test_many_ranks_are_a_short_text() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list(range(8, 24)) == "ranks 8, 9, 10, 11, 12, 13, 14, 15 and 8 more"
