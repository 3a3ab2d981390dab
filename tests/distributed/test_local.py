"""Ranks that the program itself starts: they end together and report the cause once."""

import os
import pty
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from credit_dp.config import ParallelConfig
from credit_dp.distributed.failure_report import RankOutcome
from credit_dp.distributed.local import report_failure
from credit_dp.distributed.signals import DUPLICATE_SECONDS, EXIT_PREEMPTED
from credit_dp.files import SECONDS_TO_LOCK
from tests.distributed.processes import (
    ROOT,
    begin,
    children,
    finish,
    gone,
    hanging,
    until,
    voices,
)
from tests.ranks import TIMEOUT
from tests.tier_cases import tiers


@pytest.fixture(autouse=True)
def a_terminal_hangs_up() -> Iterator[None]:
    """Programs inherit that SIGHUP is ignored, if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files: the path of a socket in it has to be short."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize(("domain", "data"), tiers([(2, 2)], [], [(1, 0)]))
def test_all_ranks_meet(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, domain: int, data: int
) -> None:
    """Also where the folder for temporary files has a path that is too long for sockets."""
    long = str(tmp_path_factory.mktemp("long" * 30))
    code, _, err = finish(begin("meet", tmp_path, domain, data, TMPDIR=long))
    assert (code, err) == (0, "")
    world = domain * max(data, 1)
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    expected = f"{world * (world + 1) // 2} {world} {threads} {max(data, 1)} {world > 1}"
    assert [p.read_text() for p in sorted(tmp_path.iterdir())] == [expected] * world


@pytest.mark.slow
def test_a_crash_is_one_traceback(tmp_path: Path) -> None:
    code, _, err = finish(begin("crash", tmp_path))
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.startswith("rank 1 (pipeline 0, data 0, domain 1) failed:")
    assert err.rstrip().endswith("RuntimeError: a mistake of ours")


@pytest.mark.exhaustive
def test_a_mistake_of_the_user_is_one_line(tmp_path: Path) -> None:
    code, _, err = finish(begin("refuse", tmp_path))
    assert (code, err) == (2, "error: data.store: needs a store, got none\n")


@pytest.mark.parametrize(
    ("ranks", "sent", "name"),
    tiers(
        [(3, signal.SIGABRT, "SIGABRT")],
        [(2, signal.SIGKILL, "SIGKILL (out of memory?)")],
        [
            (2, signal.SIGABRT, "SIGABRT"),
            (3, signal.SIGSEGV, "SIGSEGV"),
            (2, signal.SIGRTMIN, "SIGRTMIN"),
            (3, 40, "signal 40"),
        ],
    ),
)
def test_a_rank_that_a_signal_ends_is_named_and_no_other(
    tmp_path: Path, ranks: int, sent: int, name: str
) -> None:
    """The others fail as they communicate with it, in Python, soon afterwards."""
    process, pids = hanging(tmp_path, "communicate", ranks, SEEN=str(tmp_path))
    os.kill(pids[1], sent)
    line = f"error: rank 1 (pipeline 0, data 0, domain 1) was killed by {name}; the other ranks "
    assert finish(process) == (1, "", f"{line}were stopped\n")
    assert all(gone(pid) for pid in pids)


def failed(rank: int, kind: str = "crashed") -> RankOutcome:
    return RankOutcome(rank, kind, 1, "Traceback", time=rank)


CAUSES = {
    "killed before aborted": (
        [None, None, None],
        [(2, -signal.SIGABRT), (1, -signal.SIGKILL), (0, -signal.SIGABRT)],
        {2: 5, 0: 6},
        "error: rank 1 (pipeline 0, data 0, domain 1) was killed by SIGKILL",
    ),
    "in the order of time": (
        [None, None, None],
        [(2, -signal.SIGSEGV), (0, -signal.SIGKILL)],
        {2: 5},
        "error: rank 2 (pipeline 0, data 0, domain 2) was killed by SIGSEGV",
    ),
    "the first abort": (
        [None, None, None],
        [(0, -signal.SIGABRT), (1, -signal.SIGABRT)],
        {0: 6, 1: 5},
        "error: rank 1 (pipeline 0, data 0, domain 1) was killed by SIGABRT",
    ),
    "an error before an abort": (
        [None, failed(1), failed(2)],
        [(0, -signal.SIGABRT), (2, 1), (1, 1)],
        {0: 2},
        "rank 1 (pipeline 0, data 0, domain 1) failed:",
    ),
    "an abort before errors": (
        [None, failed(1), failed(2)],
        [(2, 1), (1, 1), (0, -signal.SIGABRT)],
        {0: 0},
        "error: rank 0 (pipeline 0, data 0, domain 0) was killed by SIGABRT",
    ),
    "the fork server": (
        [None, None, None],
        [(2, 255), (0, 255)],
        {},
        "error: the process that ranks are forked from ended (killed?)",
    ),
}


def test_the_cause_is_reported_and_not_its_consequences(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, (outcomes, exit_codes, aborts, line) in CAUSES.items():
        assert report_failure(outcomes, exit_codes, aborts, ParallelConfig(domain=3)) == 1
        message = capfd.readouterr().err
        assert message.startswith(line), name
        assert len(voices(message)) == 1, name


@pytest.mark.exhaustive
def test_an_exit_code_of_its_own_is_passed_on(tmp_path: Path) -> None:
    assert finish(begin("fail_check", tmp_path)) == (1, "", "")


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    tiers(
        [],
        [(signal.SIGINT, 130, "\ninterrupted\n")],
        [(signal.SIGTERM, 143, ""), (signal.SIGUSR1, EXIT_PREEMPTED, ""), (signal.SIGHUP, 129, "")],
    ),
)
def test_signals_end_all_ranks_that_do_not_train(
    tmp_path: Path, sent: signal.Signals, code: int, said: str
) -> None:
    process, pids = hanging(tmp_path)
    os.killpg(process.pid, sent)
    assert finish(process) == (code, "", said)
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("sent", "ranks"),
    tiers([], [(signal.SIGTERM, 2)], [(signal.SIGTERM, 1), (signal.SIGUSR1, 2)]),
)
def test_ranks_that_train_stop_after_the_same_step(
    tmp_path: Path, sent: signal.Signals, ranks: int
) -> None:
    process, pids = hanging(tmp_path, "train", ranks)
    process.send_signal(sent)
    assert finish(process) == (EXIT_PREEMPTED, "", "")
    assert all(gone(pid) for pid in pids)
    lines = {(tmp_path / f"steps{rank}").read_text() for rank in range(ranks)}
    assert len(lines) == 1, lines
    assert re.match(rf"{sent.name}: stopped after step \d+, which is saved in here; ", lines.pop())


@pytest.mark.parametrize("ranks", tiers([], [(2,)], [(1,)]))
def test_ranks_go_on_if_nobody_reads_what_they_say(tmp_path: Path, ranks: int) -> None:
    process, _ = hanging(tmp_path, "train_and_show", ranks)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == EXIT_PREEMPTED
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("ranks", tiers([], [(2,)], [(1,)]))
def test_ranks_stop_after_a_step_if_the_terminal_is_lost(tmp_path: Path, ranks: int) -> None:
    """They can't write to it any more. The kernel sends SIGHUP."""
    program = ["-m", "tests.distributed.launch_program", "train_and_show", str(ranks), "0", "1"]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, *program, str(tmp_path)])
    until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(ranks)))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_PREEMPTED
    assert len({(tmp_path / f"steps{rank}").read_text() for rank in range(ranks)}) == 1


@pytest.mark.parametrize("ranks", tiers([], [(2,)], [(1,)]))
def test_nohup_holds_for_the_ranks(tmp_path: Path, ranks: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which programs inherit
    try:
        process, pids = hanging(tmp_path, "train", ranks)
    finally:
        signal.signal(signal.SIGHUP, before)
    for pid in {*pids, process.pid}:
        [ignored] = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert int(ignored, 16) & 1 << signal.SIGHUP - 1
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (EXIT_PREEMPTED, "", "")


@pytest.mark.slow
def test_a_fork_server_that_is_killed_at_the_start_is_one_line(
    tmp_path: Path, short_folder: Path
) -> None:
    process = begin("meet", tmp_path, TMPDIR=str(short_folder))
    until(lambda: len(children(process.pid, "forkserver")) == 1)
    [fork_server] = children(process.pid, "forkserver")
    os.kill(fork_server, signal.SIGSTOP)  # as it imports torch
    # Its socket, and the connection of the program, which waits for a rank.
    until(lambda: Path("/proc/net/unix").read_text().count(f" {short_folder}") == 2)
    os.kill(fork_server, signal.SIGKILL)
    line = "the process that ranks are forked from ended (killed?); all ranks were stopped"
    assert finish(process) == (1, "", f"error: {line}\n")


@pytest.mark.parametrize(
    "sent", tiers([], [(signal.SIGUSR1,)], [(signal.SIGTERM,), (signal.SIGHUP,)])
)
def test_a_signal_to_all_processes_at_once_is_one(tmp_path: Path, sent: signal.Signals) -> None:
    """Job queues signal all processes, and the program that started the ranks forwards it, too."""
    process, pids = hanging(tmp_path, "train")
    [fork_server] = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids}
    for pid in (*pids, fork_server, process.pid, process.pid):
        os.kill(pid, sent)
    assert finish(process) == (EXIT_PREEMPTED, "", "")


@pytest.mark.parametrize("ranks", tiers([], [(2,)], [(1,)]))
def test_sigterm_again_ends_ranks_that_train(tmp_path: Path, ranks: int) -> None:
    process, pids = hanging(tmp_path, "train_for_ever", ranks)
    process.send_signal(signal.SIGTERM)
    time.sleep(DUPLICATE_SECONDS + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "", "")
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
def test_the_next_run_removes_the_folders_of_a_killed_one_and_no_others(
    tmp_path: Path, short_folder: Path
) -> None:
    runs = [tmp_path / name for name in ("killed", "used", "next")]
    for run in runs:
        run.mkdir()
    process, pids = hanging(runs[0], TMPDIR=str(short_folder))
    process.kill()
    finish(process)
    until(lambda: all(gone(pid) for pid in pids))
    left = set(short_folder.iterdir())
    assert left
    process, _ = hanging(runs[1], TMPDIR=str(short_folder))
    used = set(short_folder.iterdir()) - left
    assert used
    then = time.time() - 2 * SECONDS_TO_LOCK
    for folder in left | used:
        os.utime(folder, (then, then))
    assert finish(begin("meet", runs[2], TMPDIR=str(short_folder)))[0] == 0
    assert set(short_folder.iterdir()) == used
    process.terminate()
    assert finish(process)[0] == 143
    assert list(short_folder.iterdir()) == []
