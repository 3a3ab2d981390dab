"""What sharding costs a stack of 4 x [Conv2d 3x3, GroupNorm, SiLU]: `python benchmarks/stack.py`.

Two ranks work on half a globe each. `band` is the same stack on the same half without any exchange,
and so a wrong model: what the halves cost if nothing had to travel.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from peak import forget_peak, peak, resident
from pinned import RANKS, on_pinned_ranks
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel
from credit_dp.domain_parallel.layers import DomainParallelConv2d

SHAPE = (1, 64, 180, 720)
BAND = (1, 64, 180 // RANKS, 720)


def plain() -> nn.Sequential:
    """Build the stack."""
    layers = [(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU()) for _ in range(4)]
    return nn.Sequential(*(layer for block in layers for layer in block))


def build(manager: DomainParallelManager, kind: str) -> nn.Module:
    """Build one of the contestants: `band`, `sharded`, or `glued`."""
    model = plain()
    if kind == "band":
        return model
    model = convert_to_domain_parallel(model, manager, input_shape=SHAPE)
    if kind == "glued":
        for layer in model:
            if isinstance(layer, DomainParallelConv2d):
                # Halos are concatenated with the band, as a strided convolution does it.
                layer.__dict__["_keeps_rows"] = lambda bands: False
    return model


def step(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward."""
    model(x).sum().backward()


def times(manager: DomainParallelManager, kinds: list[str], rounds: int) -> dict[str, list[float]]:
    """Return seconds of each round of each contestant, in turn; the slower rank's."""
    models = [build(manager, kind) for kind in kinds]
    x = torch.randn(BAND, requires_grad=True)
    seconds: list[list[float]] = [[] for _ in kinds]
    for _ in range(rounds + 1):
        for model, found in zip(models, seconds, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step(model, x)
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            found.append(spent.item())
    return [found[1:] for found in seconds]


def growth(manager: DomainParallelManager, kind: str) -> int:
    """Return by how many bytes a rank's peak memory grows over three steps."""
    model = build(manager, kind)
    step(model, torch.randn(1, 64, BAND[-2], 8, requires_grad=True))
    x = torch.randn(BAND, requires_grad=True)
    before = resident()
    forget_peak()
    for _ in range(3):
        step(model, x)
    return peak() - before


def saved(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the bytes that a forward keeps for its backward, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        y = model(torch.randn(shape, requires_grad=True))
    y.sum().backward()
    return sum(kept.values())


def saved_shares(manager: DomainParallelManager) -> float:
    """Return what this rank keeps for backward, as a share of the unsharded stack's."""
    return saved(build(manager, "sharded"), BAND) / saved(plain(), SHAPE)


def main() -> None:
    """Print ratios; times are best of all rounds, memory the middle of three fresh starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    kinds = ["band", "sharded", "band", "glued"]
    found = on_pinned_ranks(times, kinds, rounds)[0]
    first, sharded, second, glued = (min(seconds) for seconds in found)
    band = min(first, second)
    memory = {
        kind: sorted(max(on_pinned_ranks(growth, kind)) for _ in range(3))[1]
        for kind in ("band", "sharded", "glued")
    }
    share = max(on_pinned_ranks(saved_shares))
    print(f"forward and backward at {SHAPE}, {RANKS} ranks of one thread, best of {rounds}")
    print(f"band without exchange     {1e3 * band:7.1f} ms   {memory['band'] / 2**20:5.0f} MiB")
    for kind, best in (("sharded", sharded), ("glued", glued)):
        ratio, more = best / band, memory[kind] / memory["band"]
        print(
            f"{kind:<8} {ratio:6.3f} x time  {more:6.3f} x memory   "
            f"{1e3 * best:7.1f} ms   {memory[kind] / 2**20:5.0f} MiB"
        )
    print(f"band against itself {max(first, second) / band:6.3f} x time")
    print(f"saved for backward  {share:6.3f} of the unsharded stack, on the rank with most")


if __name__ == "__main__":
    main()
