"""Ranks on nodes that this machine stands for: `python -m tests.distributed.nodes_program`.

Its arguments are RANKS PER_NODE PROGRAM and those of the program: a module, or a file. torch is
imported once; ranks are forked before it has any thread, and each runs the program with the
environment that a script for torchrun's variables would give it. With AGENT=1 they have a store
that another process serves, as an agent of torchrun does. The exit codes go to stdout. Each rank
writes what `OpenFiles` has counted into the folder FILES_SEEN, if it is set.
"""

import json
import os
import re
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from threading import current_thread, local
from typing import NoReturn

import torch
import torch.distributed.checkpoint

import credit_dp.training.run  # noqa: F401
from tests.distributed.processes import free_port, until


class OpenFiles:
    """The most files and connections that this process had open at once.

    They are counted whenever Python is about to open something; nothing is missed by chance. What
    a library in C++ opens is counted at the next such moment, unless it is closed by then.
    """

    OPENING = ("open", "socket.__new__", "os.listdir", "os.scandir", "subprocess.Popen")
    PIPE = 2  # that a new process reports to; it has no event of its own

    def __init__(self) -> None:
        self.most = 0
        self.readers = set[str]()  # names of the threads in which zarr has opened chunks
        self.in_hook = local()
        sys.addaudithook(self.count)

    def count(self, event: str, arguments: tuple[object, ...]) -> None:
        """Count what is open, and what is about to be; counting opens something itself."""
        if event not in self.OPENING or getattr(self.in_hook, "now", False):
            return
        self.in_hook.now = True
        try:
            now = len(os.listdir("/proc/self/fd"))  # and its own descriptor, for the new one
        except OSError:
            now = sys.maxsize  # none was left
        finally:
            self.in_hook.now = False
        self.most = max(self.most, now + (self.PIPE - 1 if event == "subprocess.Popen" else 0))
        if event == "open" and re.search(r"\.zarr/.*/c/", str(arguments[0])):
            self.readers.add(current_thread().name)

    def report_at_exit(self, path: Path) -> None:
        """Write what was counted when the process ends; a rank ends itself by `os._exit`."""
        exit_now = os._exit

        def report(code: int) -> NoReturn:
            path.write_text(json.dumps([self.most, *sorted(self.readers)]))
            exit_now(code)

        os._exit = report


def run_rank(rank: int, size: int, per_node: int, port: int, program: list[str]) -> int:
    """Run the program as one rank, in a process of its own, and return its exit code."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node}
    node = {"LOCAL_WORLD_SIZE": min(per_node, size - rank // per_node * per_node)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": rank // per_node}
    os.environ.update({k: str(v) for k, v in {**numbers, **node, **meeting}.items()})
    sys.argv = program
    try:
        if program[0].endswith(".py"):
            runpy.run_path(program[0], run_name="__main__")
        else:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def listens(port: int) -> bool:
    """Whether a process listens at a port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def start_agent(port: int) -> int:
    """Fork a process that serves a store until it is killed, and return its number."""
    pid = os.fork()
    if not pid:
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False
        )
        signal.pause()
        del store
    until(lambda: listens(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return pid


def main(size: int, per_node: int, program: list[str]) -> None:
    """Fork the ranks, wait for them, and print how each one ended."""
    port = free_port()
    agent = start_agent(port) if os.environ.get("AGENT") == "1" else None
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            code = 1
            if "FILES_SEEN" in os.environ:
                OpenFiles().report_at_exit(Path(os.environ["FILES_SEEN"], str(rank)))
            try:
                code = run_rank(rank, size, per_node, port, program)
            finally:
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()  # which _exit does not
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
    if agent is not None:
        os.kill(agent, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
