"""What a halo exchange alone costs, forward and backward: `python benchmarks/halo.py`.

`glued`: the halo is concatenated with the band. `edges`: only the halo's rows are brought, as a
convolution of stride 1 does it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from pinned import RANKS, on_pinned_ranks

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.exchange import RowExchange
from credit_dp.domain_parallel.poles import rows_with_poles

WIDTH = 1
# What each rank has.
SHAPES = ((1, 64, 180, 720), (1, 64, 90, 720), (1, 256, 45, 180))
ROUNDS = 50


def exchange(manager: DomainParallelManager, rows: int, glued: bool) -> RowExchange:
    """Plan a halo of `WIDTH` rows on either side."""
    bands = manager.partition(RANKS * rows)
    needs = []
    for start, stop in zip(bands.bounds, bands.bounds[1:], strict=False):
        sides = ((start - WIDTH, start), (stop, stop + WIDTH))
        if glued:
            sides = ((start - WIDTH, stop + WIDTH),)
        needs.append(
            tuple(run for side in sides for run in rows_with_poles(*side, bands.height, "zeros"))
        )
    return RowExchange(bands, tuple(needs), manager.domain_rank)


def best(manager: DomainParallelManager, shape: tuple[int, ...], glued: bool) -> float:
    """Return milliseconds of the fastest round, the slower rank's."""
    plan = exchange(manager, shape[-2], glued)
    x = torch.randn(shape, requires_grad=True)
    cotangent = torch.randn(*shape[:-2], plan.length, shape[-1])
    found = []
    for _ in range(ROUNDS):
        x.grad = None
        dist.barrier()
        start = time.perf_counter()
        plan.apply(x, manager.transport).backward(cotangent)
        spent = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        found.append(1e3 * spent.item())
    return min(found)


def main() -> None:
    """Print a table."""
    print(f"halo of {WIDTH} row, {RANKS} ranks of one thread, best of {ROUNDS}, milliseconds")
    for shape in SHAPES:
        glued, edges = (on_pinned_ranks(best, shape, kind)[0] for kind in (True, False))
        print(f"{shape!s:<20} glued {glued:6.2f}   edges {edges:6.2f}")


if __name__ == "__main__":
    main()
