"""In which order a rank of a pipeline works on its micro-batches, and what it holds meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """A forward or backward of one of this rank's stages on one micro-batch."""

    forward: bool
    part: int


def work_order(
    schedule: str, rank: int, pipeline: int, microbatches: int, virtual: int = 1
) -> list[Work]:
    """Return what a rank does in a step, in order.

    Args:
        schedule: gpipe, 1f1b or interleaved.
        rank: of the pipeline.
        pipeline: ranks.
        microbatches: of a step; for interleaved a multiple of the ranks.
        virtual: stages of each rank.

    Source: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    total = virtual * microbatches
    # Forwards go through the rank's stages in turn, with one micro-batch for each rank at a time.
    parts = [number // pipeline % virtual for number in range(total)]
    if schedule != "interleaved":
        parts = [0] * total
    ahead = {
        "gpipe": total,
        "1f1b": pipeline - rank,
        "interleaved": (virtual - 1) * pipeline + 2 * (pipeline - 1 - rank) + 1,
    }[schedule]
    forwards = [Work(True, part) for part in parts]
    backwards = [Work(False, virtual - 1 - part) for part in parts]
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + number : ahead + number + 1]]
    return order


def most_kept(order: Iterable[Work], kept: Sequence[int]) -> int:
    """Return the most bytes that are kept for backward at any time of a step.

    Args:
        order: this rank's.
        kept: bytes of each of its stages for one micro-batch.
    """
    now = most = 0
    for work in order:
        now += kept[work.part] if work.forward else -kept[work.part]
        most = max(most, now)
    return most


def times_gathered(order: Iterable[Work]) -> Counter[int]:
    """Return how often the blocks of each part are gathered in a step, if FSDP2 shares them out.

    What is gathered for a backward stays so until after the next forward, for gradients are shared
    out only once.
    """
    gathered: set[int] = set()
    times: Counter[int] = Counter()
    for work in order:
        if work.part not in gathered:
            times[work.part] += 1
        (gathered.discard if work.forward else gathered.add)(work.part)
    return times
