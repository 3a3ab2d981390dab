"""Collectives on objects and small tensors, groups for threads, and errors raised by all ranks.

A rank that raises alone leaves the others waiting in their next collective. What can fail on one
rank only therefore goes through `run_on_all_ranks`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.domain_parallel.transport import message_device
from credit_dp.errors import UserError

T = TypeVar("T")

# Seconds that a thread beside training waits for those of other ranks. One rank may start to read
# or write long after another, for instance while the others evaluate, and disks differ: only the
# collectives of training itself find out that a rank hangs.
BACKGROUND_TIMEOUT = 24 * 3600.0


def global_rank() -> int:
    """Return the rank of this process in the run; 0 without a process group."""
    return dist.get_rank() if has_process_group() else 0


def has_process_group() -> bool:
    """Whether torch's default process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def new_background_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Create a gloo group for a thread beside training; collective over all ranks of the run.

    In the group of training, the collectives of the two threads could run in another order on each
    rank.

    Args:
        ranks: of the group; None: all.
    """
    timeout = timedelta(seconds=BACKGROUND_TIMEOUT)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend="gloo")
    return group


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank, in rank order, on every rank; collective.

    Args:
        value: any object that can be pickled.
        group: a group of all ranks. A thread beside training needs its own: collectives of two
            threads on one group could meet in another order on each rank.
    """
    if not has_process_group() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]  # torch has replaced every None


def all_gather_tensor(local: Tensor) -> Tensor:
    """Return a small tensor of every rank, in rank order, in the host's memory; collective.

    Shapes:
        `(...)`, the same on all ranks -> `(ranks, ...)`.
    """
    local = local.to(message_device())
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered).cpu()


def run_on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return the result of `action`, or raise the same error on every rank; collective.

    Raises:
        UserError: the error of the lowest rank whose `action` raised one.
    """
    result = None
    message = None
    try:
        result = action()
    except UserError as error:
        message = str(error)
    # Ranks that failed take part as well: the others wait for them here.
    messages = [line for line in all_gather_object(message, group) if line is not None]
    if messages:
        raise UserError(messages[0])
    return result  # type: ignore[return-value]  # no rank failed, so `action` has returned
