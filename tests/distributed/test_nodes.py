"""Runs on nodes that this machine stands for: their connections, and what ends them."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.processes import (
    ROOT,
    SOON,
    children,
    until,
    voices,
)

pytestmark = pytest.mark.slow

LONG_PATIENCE = 1200.0  # seconds; on a busy machine 24 ranks take minutes to start


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
        start_new_session=True,
        preexec_fn=partial(resource.setrlimit, *limits) if files else None,
    )


def launch_program(function: str, folder: Path, size: int) -> list[str]:
    """Arguments of a program whose ranks, all in one domain, call one of `rank_functions`."""
    for rank in range(size):
        (folder / f"of-rank-{rank}").mkdir()
    return ["tests.distributed.launch_program", function, str(size), "1", "1", str(folder)]


def finish_on_nodes(program: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Wait for a program, and return the exit codes of its ranks, and their stderr."""
    out, err = program.communicate(timeout=LONG_PATIENCE)
    return json.loads(out.splitlines()[-1]), err  # after what the program wrote


class Run:
    """Six ranks on three nodes, which communicate until a process is killed."""

    def __init__(self, folder: Path, agent: str) -> None:
        self.folder = folder
        self.program = begin_on_nodes(
            6, 2, launch_program("communicate", folder, 6), SEEN=str(folder), AGENT=agent
        )

    def start(self) -> None:
        files = [self.folder / f"pid{rank}" for rank in range(6)]
        until(
            lambda: all(file.exists() for file in files) or self.program.poll() is not None,
            LONG_PATIENCE,
        )
        self.ranks = [int(file.read_text()) for file in files]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(tmp_path, getattr(request, "param", "0"))
    yield run
    with suppress(ProcessLookupError):  # with the ranks
        os.killpg(run.program.pid, signal.SIGKILL)
    run.program.communicate()


@pytest.mark.parametrize(
    ("victim", "run"),
    [("rank 0", "0"), ("rank 3", "0"), ("agent", "1"), ("rank 0", "1")],
    indirect=["run"],
)
def test_whatever_is_killed_ends_all_ranks_with_one_line(run: Run, victim: str) -> None:
    """With the store in rank 0, or in an agent of torchrun."""
    run.start()
    if victim == "agent":
        killed = children(run.program.pid)[0]
        line = r"error: torchrun's agent at 127\.0\.0\.1:\d+ ended"
    else:
        killed = run.ranks[int(victim[-1])]
        line = rf"error: {victim} \(.* ended without a message"
    os.kill(killed, signal.SIGKILL)
    died = time.monotonic()
    codes, output = finish_on_nodes(run.program)
    assert time.monotonic() - died < SOON
    assert all(code != 0 for code in codes)
    spoken = voices(output)
    assert len(spoken) == 1, output
    assert re.match(line, spoken[0]), codes


@pytest.mark.parametrize(
    ("size", "per_node", "line"),
    [
        (6, 2, r"error: rank 0 \(.*\) ended without a message"),
        (3, 1, r"error: rank 0 \(.*\) ended, or its machine or the network to it was lost"),
    ],
)
def test_rank_0_is_named_though_the_others_wait_for_each_other(
    tmp_path: Path, size: int, per_node: int, line: str
) -> None:
    """One rank of another node notices the death of rank 0 in its collective; then others do."""
    arguments = launch_program("wait_in_ring", tmp_path, size)
    program = begin_on_nodes(size, per_node, arguments, SEEN=str(tmp_path))
    files = [tmp_path / f"pid{rank}" for rank in range(size)]
    until(lambda: all(file.exists() for file in files) or program.poll() is not None, LONG_PATIENCE)
    os.kill(int(files[0].read_text()), signal.SIGKILL)
    codes, output = finish_on_nodes(program)
    assert all(code != 0 for code in codes)
    [spoken] = voices(output)
    assert re.match(line, spoken), output
