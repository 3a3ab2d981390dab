"""Start the ranks of the benchmarks: with one thread each, pinned to a core, over gloo.

With `BENCH_DEVICE=cuda` each rank has a GPU, and they use nccl. `BENCH_DTYPE=bfloat16` and
`BENCH_LAYOUT=channels_last` change dtype and memory format of the tensors.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager

RANKS = 2
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
DTYPE = os.environ.get("BENCH_DTYPE", "float32")
LAYOUT = os.environ.get("BENCH_LAYOUT", "contiguous_format")
Contestants = Mapping[str, Callable[[], object]]


class Mesh(NamedTuple):
    """Number of ranks, of ranks that share a globe, of pipeline stages, and of threads per rank."""

    ranks: int = RANKS
    domain: int = RANKS
    pipeline: int = 1
    threads: int = 1


TWO = Mesh()


def on_pinned_ranks(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = RANKS,
    domain: int | None = None,
    pipeline: int = 1,
    threads: int = 1,
) -> list[Any]:
    """Return what `fn(manager, *args)` returns on each of `ranks` fresh ranks.

    `domain` ranks share a globe (by default all of them), and `pipeline` x `domain` share a model.
    Each has `threads` threads and cores. With more ranks than cores, times are meaningless.
    """
    with running(_answer, (fn, args), Mesh(ranks, domain or ranks, pipeline, threads)) as pipes:
        return [pipe.recv() for pipe in pipes]


class Team:
    """Ranks that run one of several contestants on command."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self.pipes = pipes

    def seconds(self, name: str) -> float:
        """Return the seconds of the slowest rank; all ranks start together."""
        for pipe in self.pipes:
            pipe.send(name)
        return max(pipe.recv() for pipe in self.pipes)


@contextmanager
def team(build: Callable[..., Contestants], *args: Any, mesh: Mesh = TWO) -> Iterator[Team]:
    """Start ranks, each with the contestants that `build(manager, *args)` returns there."""
    with running(_serve, (build, args), mesh) as pipes:
        for pipe in pipes:
            pipe.recv()
        yield Team(pipes)
        for pipe in pipes:
            pipe.send(None)


@contextmanager
def running(
    serve: Callable[..., None], args: tuple[Any, ...], mesh: Mesh
) -> Iterator[list[Connection]]:
    """Start ranks that call `serve(manager, pipe, *args)`; yield the other ends of their pipes."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        raise SystemExit(f"benchmarks need {RANKS} cores, this process may use {len(cores)}.")
    if DEVICE == "cuda" and mesh.ranks > torch.cuda.device_count():
        raise SystemExit(f"{mesh.ranks} ranks need a GPU each, {torch.cuda.device_count()} found.")
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(mesh.ranks):
            mine, theirs = context.Pipe()
            own = [cores[(rank * mesh.threads + n) % len(cores)] for n in range(mesh.threads)]
            setting = (rank, mesh, own, f"file://{folder}/store")
            process = context.Process(target=_rank, args=(setting, theirs, serve, args))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        yield pipes
        for process in processes:
            process.join()


def _rank(
    setting: tuple[int, Mesh, list[int], str],
    pipe: Connection,
    serve: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    rank, mesh, cores, store = setting
    backend = "gloo"
    torch.set_default_dtype(getattr(torch, DTYPE))
    torch.manual_seed(0)  # all ranks have the same models
    if DEVICE == "cuda":
        backend = "nccl"
        torch.set_default_device(f"cuda:{rank}")
        torch.cuda.set_device(rank)
    else:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(mesh.threads)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=mesh.ranks)
    manager = DomainParallelManager(mesh.ranks, mesh.domain, pipeline_parallel_size=mesh.pipeline)
    serve(manager, pipe, *args)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # like the ranks of a run: threads of libraries may crash in a normal exit


def _answer(
    manager: DomainParallelManager, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    pipe.send(fn(manager, *args))


def _serve(
    manager: DomainParallelManager,
    pipe: Connection,
    build: Callable[..., Contestants],
    args: tuple[Any, ...],
) -> None:
    contestants = build(manager, *args)
    for run in contestants.values():  # the first call includes work that is done only once
        run()
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        run = contestants[name]
        dist.barrier()
        synchronise()
        began = time.perf_counter()
        run()
        synchronise()
        pipe.send(time.perf_counter() - began)


@contextmanager
def frees_at_once() -> Iterator[None]:
    """Let ranks return freed tensors to the system, so that resident memory is the memory in use.

    The C library reads these variables when a process starts. They make the ranks slow.
    """
    keys = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    os.environ.update(dict.fromkeys(keys, "65536"))
    try:
        yield
    finally:
        for key in keys:
            del os.environ[key]


def field(*shape: int, requires_grad: bool = False) -> Tensor:
    """Return random numbers in the memory format that is measured."""
    return torch.randn(shape).to(memory_format=layout()).requires_grad_(requires_grad)


def layout() -> torch.memory_format:
    """Return the memory format of fields and weights."""
    memory_format: torch.memory_format = getattr(torch, LAYOUT)
    return memory_format


def synchronise() -> None:
    """Wait until the device has finished all queued work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
