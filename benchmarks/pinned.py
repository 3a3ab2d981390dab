"""Gloo ranks of one thread each, pinned to cores, for the benchmarks beside this file."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from credit_dp.domain_parallel import DomainParallelManager

RANKS = 2


def on_pinned_ranks(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = RANKS,
    domain: int | None = None,
    pipeline: int = 1,
) -> list[Any]:
    """Return what `fn(manager, *args)` returns on each of `ranks` fresh ranks.

    `domain` of them share a globe, by default all, and `pipeline` x `domain` a model. More ranks
    than cores share them, and tell nothing about time.
    """
    mesh = ranks, domain or ranks, pipeline
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        raise SystemExit(f"benchmarks need {RANKS} cores, this process may use {len(cores)}.")
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            setting = (rank, mesh, cores[rank % len(cores)], f"file://{folder}/store", theirs)
            process = context.Process(target=_rank, args=(setting, fn, args))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return results


def _rank(
    setting: tuple[int, tuple[int, int, int], int, str, Connection],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, (ranks, domain, pipeline), core, store, pipe = setting
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    manager = DomainParallelManager(ranks, domain, pipeline_parallel_size=pipeline)
    pipe.send(fn(manager, *args))
    dist.barrier()
    dist.destroy_process_group()
