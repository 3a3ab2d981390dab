"""Programs that launch ranks: starts them, waits for them, and reads how they ended."""

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]
SOON = 60.0  # seconds; the promise is 10, on a machine that is not busy
TORCHRUN = ["-m", "torch.distributed.run"]
# Ranks of a 2 x 2 x 2 mesh, one along each axis, and their names in messages.
VICTIMS = [
    (4, "rank 4 (pipeline 1, data 0, domain 0)"),
    (2, "rank 2 (pipeline 0, data 1, domain 0)"),
    (1, "rank 1 (pipeline 0, data 0, domain 1)"),
]

Programs = list[subprocess.Popen[str]]


def begin(
    function: str,
    folder: Path,
    domain: int = 2,
    data: int = 0,
    pipeline: int = 1,
    files: int | None = None,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start a program that launches, as a terminal would: in a process group of its own.

    `files` limits how many files each of its processes may open.
    """
    limits = (resource.RLIMIT_NOFILE, (files or 0, files or 0))
    sizes = [str(domain), str(data), str(pipeline)]
    names = ["-m", "tests.distributed.launch_program", function, *sizes, str(folder)]
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, *names],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(resource.setrlimit, *limits) if files else None,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a program, and return its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


def ends(programs: Programs, timeout: float = TIMEOUT) -> list[tuple[int, str]]:
    """Wait for programs, and return exit code and stderr of each."""
    errors = [program.communicate(timeout=timeout)[1] for program in programs]
    return [(program.returncode, text) for program, text in zip(programs, errors, strict=True)]


def until(condition: Callable[[], bool], patience: float = TIMEOUT) -> None:
    """Wait until the condition holds; fail after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {patience} s"
        time.sleep(0.02)


def hanging(
    folder: Path, function: str = "hang", ranks: int = 2, **environment: str
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start ranks that wait for ever, or for a signal; return the program and their ids."""
    process = begin(function, folder, ranks, **environment)
    files = [folder / f"pid{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return process, [int(file.read_text()) for file in files]


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def children(parent: int, word: str = "") -> list[int]:
    """Ids of a process's children whose command has the word, in the order of their birth."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found if word in Path(f"/proc/{pid}/cmdline").read_text()]


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def voices(text: str) -> list[str]:
    """The first lines of our own program about a failure, without the launcher's lines."""
    return re.findall(r"^(?:error: .*|rank \d+ \(.*\) failed:)$", text, re.MULTILINE)
