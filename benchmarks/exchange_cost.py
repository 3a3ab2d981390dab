"""Measure what an exchange adds to a layer, relative to bare messages of the same rows.

`python benchmarks/exchange_cost.py`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pinned import RANKS, Contestants, field, layout, team
from side_by_side import Entry, Row, ratio, times
from table import show
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel
from credit_dp.domain_parallel.halo_exchange import HaloExchange

SHAPES = ((1, 64, 180, 720), (1, 64, 90, 720), (1, 256, 45, 180))  # of each rank's band
WIDTHS = (1, 3)


def convolutions(manager: DomainParallelManager, band: tuple[int, ...]) -> Contestants:
    """Return a convolution of the band, the sharded convolution, and only its messages."""
    channels = band[1]
    x = field(*band, requires_grad=True)
    cotangent = field(*band)
    alone, model = (
        nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1)).to(memory_format=layout())
        for _ in range(2)
    )
    whole = (*band[:2], RANKS * band[2], band[3])
    sharded = convert_to_domain_parallel(model, manager, input_shape=whole)

    def step(layer: nn.Module) -> None:
        layer(x).backward(cotangent)

    return {
        "band": lambda: step(alone),
        "sharded": lambda: step(sharded),
        "messages": messages(x.detach(), 1),
    }


def halos(manager: DomainParallelManager, band: tuple[int, ...], width: int) -> Contestants:
    """Return a halo exchange, and padding with zeros followed by messages of the same rows."""
    x = field(*band, requires_grad=True)
    cotangent = field(*band[:2], band[2] + 2 * width, band[3])
    exchange = HaloExchange(width, manager=manager)
    send = messages(x.detach(), width)

    def padded() -> None:
        F.pad(x, (0, 0, width, width)).backward(cotangent)
        send()

    return {"halo": lambda: exchange(x).backward(cotangent), "padded": padded}


def messages(x: Tensor, width: int) -> Callable[[], None]:
    """Return a function that swaps `width` rows with the neighbour twice: rows, then cotangents."""
    rank = dist.get_rank()
    rows = (x[:, :, :width] if rank else x[:, :, -width:]).contiguous()
    received = torch.empty_like(rows)
    swap = [
        dist.P2POp(dist.isend, rows, 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]

    def send() -> None:
        for _ in range(2):
            for work in dist.batch_isend_irecv(swap):
                work.wait()

    return send


def convolution_row(band: tuple[int, ...], rounds: int) -> Row:
    """Compare what sharding adds, without the work on the halo's rows, with bare messages."""
    with team(convolutions, band) as ranks:
        labels = ("messages", "band", "sharded", "band", "messages")
        entries = [Entry(f"{label} {at}", ranks, label) for at, label in enumerate(labels)]
        found = list(times(entries, rounds).values())
    sent, first, sharded, second, sent_again = found
    bare = [*sent, *sent_again]
    share = 1 / band[2]  # each band has one neighbour here, and gets one row from it
    alone = [mean(pair) for pair in zip(first, second, strict=True)]
    added = min(sharded) - (1 + share) * min(*first, *second)
    typical = median(s - (1 + share) * a for s, a in zip(sharded, alone, strict=True))
    noise = median(abs(a - b) for a, b in zip(first, second, strict=True))
    return Row(
        f"what sharding adds to a Conv2d 3x3, band {band}",
        "bare messages of the same rows",
        added / min(bare),
        3.0,
        typical / median(bare),
        max(min(sent), min(sent_again)) / min(bare),
        by_median=True,
        note=f"added {1e3 * added:.1f} ms, typically {1e3 * typical:.1f} ms; messages "
        f"{1e3 * min(bare):.2f} and {1e3 * median(bare):.2f} ms; the band takes "
        f"{1e3 * min(*first, *second):.0f} ms, in one round {1e3 * noise:.1f} ms more than again",
    )


def halo_row(band: tuple[int, ...], width: int, rounds: int) -> Row:
    """Compare a halo exchange with padding and messages."""
    with team(halos, band, width) as ranks:
        entries = [
            Entry("first", ranks, "padded"),
            Entry("halo", ranks, "halo"),
            Entry("second", ranks, "padded"),
        ]
        found = times(entries, rounds)
    against = ratio(found["halo"], found["first"], found["second"])
    return Row(
        f"HaloExchange of {width}, band {band}",
        "F.pad and bare messages of the same rows",
        against.best,
        1.3,
        against.typical,
        against.spread,
        note=f"{1e3 * min(found['halo']):.2f} ms",
    )


def rows(rounds: int) -> list[Row]:
    """Return all figures of this file."""
    made = [convolution_row(band, rounds) for band in SHAPES]
    return made + [halo_row(band, width, rounds) for band in SHAPES for width in WIDTHS]


if __name__ == "__main__":
    show(rows(int(sys.argv[1]) if sys.argv[1:] else 20))
