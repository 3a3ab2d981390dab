"""Ranks for tests: threads of this process, or a pool of live gloo processes.

Both call `fn(manager, *args)` on every rank and return the results in rank order. A hang fails
after eight minutes with every rank's stack.

With `CREDIT_DP_TEST_DEVICE=cuda` tensors are made on a GPU, and processes communicate over nccl;
all of them share the GPU.
"""

from __future__ import annotations

import atexit
import copy
import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.layers import base
from credit_dp.domain_parallel.partition import BandTable
from credit_dp.domain_parallel.thread_ranks import RankError, run_on_threads

DEVICE = os.environ.get("CREDIT_DP_TEST_DEVICE", "cpu")
TIMEOUT = 480.0  # two files at once, with up to eight ranks each that may compile, share the cores
# Live ranks with more process groups end: each group has a thread that polls all the time.
GROUPS = 8
# Three ranks have a first, a middle and a last band; the fast tier has no other number of ranks.
PROCESSES = [*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4)), 3]


def seeded(seed: int) -> torch.Generator:
    """Return a generator of the device on which tensors are made."""
    return torch.Generator(DEVICE).manual_seed(seed)


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Return a mark for tests that make no sense with tensors on a GPU."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=f"on a CPU only: {reason}")


def assert_same_numbers(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that tensors are equal; on a GPU, whose sums may have any order, to rounding."""
    if DEVICE == "cpu":
        assert torch.equal(a, b)
    else:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13 * float(b.abs().max()))


@cache
def load_linear_algebra() -> None:
    """Load torch's linear algebra for GPUs, as two threads that do so at once fail."""
    torch.linalg.inv(torch.eye(1, device=DEVICE))


def on_threads(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `fn(manager, *args)` on `ranks` threads that share one globe."""
    if DEVICE != "cpu":
        load_linear_algebra()
    faulthandler.dump_traceback_later(0.9 * TIMEOUT, file=sys.__stderr__)

    def on_device(manager: DomainParallelManager) -> Any:
        if DEVICE == "cpu":
            return fn(manager, *args)
        with torch.device(DEVICE):  # each thread has its own default
            return fn(manager, *args)

    try:
        return run_on_threads(ranks, on_device, TIMEOUT)
    finally:
        faulthandler.cancel_dump_traceback_later()


def warm_context() -> ForkServerContext:
    """The context of processes that are forked from one that has imported everything.

    For every test that forks: a test process has one fork server, with what its first user wants.
    """
    context = mp.get_context("forkserver")
    # A process that is forked can't use a GPU that its parent has looked for, nor torch's autograd
    # if that has threads for GPUs.
    preload = [] if torch.cuda.is_available() else ["tests.preload", "tests.ranks"]
    context.set_forkserver_preload(preload)
    return context


def moved(tree: Any, device: str) -> Any:
    """Return the arguments or results of a rank with all tensors and modules on a device."""
    if DEVICE == "cpu":
        return tree

    def move(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return copy.deepcopy(leaf).to(device)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(move, tree)


class _Pool:
    """Live gloo ranks, one process each, forked from one that has imported everything."""

    def __init__(self, ranks: int) -> None:
        context = warm_context()
        self._folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, ranks, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(
        self, mesh: tuple[int, int, int], fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> list[Any]:
        task = (mesh, fn, moved(args, "cpu"), base.SMALL_BAND_ENTRIES)
        try:
            for pipe in self.pipes:
                pipe.send(task)
        except OSError as error:
            self.close()
            raise RankError("a process died; its last words are on stderr") from error
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(replies) < len(self.pipes):
            waiting = {p: r for r, p in enumerate(self.pipes) if r not in replies}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close(dump=True)
                raise RankError(f"ranks {sorted(waiting.values())} hang; stacks are on stderr")
            for pipe in ready:
                try:
                    replies[waiting[pipe]] = pipe.recv()  # type: ignore[index]
                except (EOFError, OSError):
                    replies[waiting[pipe]] = (False, "the process died")  # type: ignore[index]
            failed = {r: text for r, (ok, text) in replies.items() if not ok}
            if failed:
                self.close(dump=False)
                rank, text = next(iter(failed.items()))
                raise RankError(f"rank {rank}: {text}")
        results, groups = zip(*(replies[rank][1] for rank in range(len(self.pipes))), strict=True)
        if max(groups) > GROUPS:
            self.close()
        return list(moved(results, DEVICE))

    def close(self, dump: bool = False) -> None:
        for process in self.processes:
            if dump and process.pid and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0 if dump else 0.0)
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()
        for ranks, pool in list(_POOLS.items()):
            if pool is self:
                del _POOLS[ranks]


_POOLS: dict[int, _Pool] = {}


def on_processes(
    ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    domain: int | None = None,
    pipeline: int = 1,
    ensemble: int = 1,
) -> list[Any]:
    """Run `fn(manager, *args)` on `ranks` live gloo processes.

    `domain` of them share a globe, `pipeline` x `domain` a model, `ensemble` models the members of
    a sample.
    """
    if ranks not in _POOLS:
        close_pools()
        _POOLS[ranks] = _Pool(ranks)
    mesh = (domain or ranks // pipeline // ensemble, pipeline, ensemble)
    return _POOLS[ranks].run(mesh, fn, args)


@atexit.register
def close_pools() -> None:
    """End all live ranks; the next test that needs some starts them."""
    for pool in list(_POOLS.values()):
        pool.close()


def _serve(rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    gpu = None
    if DEVICE == "cuda":
        gpu = torch.device("cuda", 0)
        torch.set_default_device(gpu)
        torch.cuda.set_device(gpu)
        # nccl refuses two ranks of one machine on a GPU; between machines it uses sockets.
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    torch.distributed.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        device_id=gpu,
    )
    managers: dict[tuple[int, int, int], DomainParallelManager] = {}
    while True:
        try:
            # A test may have replaced the constant in its own process.
            mesh, fn, args, base.SMALL_BAND_ENTRIES = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            domain, pipeline, ensemble = mesh
            if mesh not in managers:
                managers[mesh] = DomainParallelManager(
                    ranks,
                    domain,
                    pipeline_parallel_size=pipeline,
                    ensemble_parallel_size=ensemble,
                )
            managers[mesh].bands = BandTable(domain)
            result = moved(fn(managers[mesh], *moved(args, DEVICE)), "cpu")
            reply = (True, (result, len(distributed_c10d._world.pg_map)))
        except BaseException as error:  # noqa: BLE001
            reply = (False, f"{error}\n{traceback.format_exc()}")
        pipe.send(reply)
