"""Runs on nodes that this machine stands for: their connections, and what ends them."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.processes import PATIENCE, ROOT, gone, until
from tests.distributed.test_failures import SOON, voices

pytestmark = pytest.mark.slow


def begin_on_nodes(
    size: int, per_node: int, program: list[str], files: int | None = None, **environment: str
) -> subprocess.Popen[str]:
    """Start a program on ranks; `files` limits how many files each process may open."""
    limits = (resource.RLIMIT_NOFILE, (files or 0, files or 0))
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.distributed.nodes_program",
            *map(str, (size, per_node)),
            *program,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(resource.setrlimit, *limits) if files else None,
    )


def launch_program(function: str, folder: Path, size: int) -> list[str]:
    """Arguments of a program whose ranks, all in one domain, call one of `rank_functions`."""
    for rank in range(size):
        (folder / f"of-rank-{rank}").mkdir()
    return ["tests.distributed.launch_program", function, str(size), "1", "1", str(folder)]


def finish_on_nodes(program: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Wait for a program, and return the exit codes of its ranks, and their stderr."""
    out, err = program.communicate(timeout=2 * PATIENCE)
    return json.loads(out), err


def store_processes(ranks: list[int]) -> dict[str, dict[int, int]]:
    """The processes of the store that ranks have started: kind -> rank -> process id."""
    found: dict[str, dict[int, int]] = {"server": {}, "relay": {}}
    for rank, pid in enumerate(ranks):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if any(word.endswith("store_process.py") for word in words):
                kind = "server" if "server" in words else "relay"
                found[kind][rank] = int(child)
    return found


class Run:
    """Six ranks on three nodes, which communicate until a process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = begin_on_nodes(
            6, 2, launch_program("communicate", folder, 6), SEEN=str(folder)
        )

    def start(self) -> None:
        files = [self.folder / f"pid{rank}" for rank in range(6)]
        until(lambda: all(file.exists() for file in files) or self.program.poll() is not None)
        self.ranks = [int(file.read_text()) for file in files]
        self.processes = store_processes(self.ranks)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.program.kill()
    run.program.communicate()


@pytest.mark.parametrize("victim", ["rank 0", "starter", "other", "server", "relay"])
def test_whatever_is_killed_ends_all_ranks_and_one_line_names_it(run: Run, victim: str) -> None:
    """Of a node's two ranks one has started the relay, which does not end with it."""
    run.start()
    starters = run.processes["relay"]
    assert len(starters) == 3
    assert list(run.processes["server"]) == [0]
    starter = next(rank for rank in starters if rank > 1)
    other = starter ^ 1
    killed, line = {
        "rank 0": (run.ranks[0], "error: rank 0 ("),
        "starter": (run.ranks[starter], f"error: rank {starter} ("),
        "other": (run.ranks[other], f"error: rank {other} ("),
        "server": (run.processes["server"][0], "error: the process that keeps the store of the"),
        "relay": (starters[starter], "error: the process that connects this node to the store"),
    }[victim]
    os.kill(killed, signal.SIGKILL)
    died = time.monotonic()
    codes, said = finish_on_nodes(run.program)
    assert time.monotonic() - died < SOON
    assert all(code != 0 for code in codes)
    spoken = voices(said)
    assert len(spoken) == 1, said
    assert spoken[0].startswith(line)
    helpers = [pid for kind in run.processes.values() for pid in kind.values()]
    until(lambda: all(map(gone, helpers)))
