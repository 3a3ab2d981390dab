"""Ranks on nodes that this machine stands for: `python -m tests.distributed.nodes_program`.

Its arguments are RANKS PER_NODE PROGRAM and those of the program: a module, or a file. torch is
imported once; ranks are forked before it has any thread, and each runs the program with the
environment that a script for torchrun's variables would give it. The exit codes go to stdout.
"""

import json
import os
import runpy
import sys

import torch
import torch.distributed.checkpoint  # noqa: F401

import credit_dp.training.run  # noqa: F401
from tests.distributed.processes import free_port


def run_rank(rank: int, size: int, per_node: int, port: int, program: list[str]) -> int:
    """Run the program as one rank, in a process of its own, and return its exit code."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node}
    node = {"LOCAL_WORLD_SIZE": min(per_node, size - rank // per_node * per_node)}
    os.environ.setdefault("CREDIT_DP_SHARED_STORE", "1")  # as with many more ranks
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


def main(size: int, per_node: int, program: list[str]) -> None:
    """Fork the ranks, wait for them, and print how each one ended."""
    port = free_port()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = run_rank(rank, size, per_node, port, program)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
