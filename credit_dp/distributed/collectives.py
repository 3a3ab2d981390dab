"""What all ranks find out together, so that none goes on, or waits, where another one can't."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from credit_dp.errors import UserError

T = TypeVar("T")


def global_rank() -> int:
    """This process among all of the run; 0 without a process group."""
    return dist.get_rank() if has_process_group() else 0


def has_process_group() -> bool:
    """Whether this process is one of several ranks, or could be."""
    return dist.is_available() and dist.is_initialized()


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank gives, in the order of the ranks, on every rank; collective.

    `group` has all ranks, too: a thread beside training has one of its own.
    """
    if not has_process_group() or dist.get_world_size() == 1:
        return [value]
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=group)
    return found  # type: ignore[return-value]  # every place has been filled


def run_on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Do something on every rank, or refuse it on every rank with the same line; see `gather`.

    Raises:
        UserError: that of the first rank that has one.
    """
    result, refusal = None, None
    try:
        result = action()
    except UserError as error:
        refusal = str(error)
    refusals = [line for line in all_gather_object(refusal, group) if line is not None]
    if refusals:
        raise UserError(refusals[0])
    return result  # type: ignore[return-value]  # nothing was refused, so there is one
