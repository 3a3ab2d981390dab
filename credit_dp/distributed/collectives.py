"""Collectives on objects, sums over ranks, and errors that all ranks raise.

A rank that raises alone leaves the others waiting in their next collective. What can fail on one
rank only therefore goes through `run_on_all_ranks`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.distributed.process_groups import BACKGROUND_TAG, BACKGROUND_TIMEOUT
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import all_gather_single, message_device
from credit_dp.errors import UserError

T = TypeVar("T")


def global_rank() -> int:
    """Return the rank of this process in the run; 0 without a process group."""
    return dist.get_rank() if has_process_group() else 0


def has_process_group() -> bool:
    """Whether torch's default process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def all_gather_object(value: T) -> list[T]:
    """Return the value of every rank, in rank order, on every rank; collective."""
    if not has_process_group() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # torch has replaced every None


def all_gather_tensor(local: Tensor) -> Tensor:
    """Return a small tensor of every rank, in rank order, in the host's memory; collective.

    Shapes:
        `(...)`, the same on all ranks -> `(ranks, ...)`.
    """
    local = local.to(message_device()).contiguous()
    gathered = local.new_empty((dist.get_world_size(), *local.shape))
    all_gather_single(gathered, local)
    return gathered.cpu()


def sum_over_ranks(tensor: Tensor, manager: DomainParallelManager) -> Tensor:
    """Return the sum of a detached tensor over the domain and the data axis; collective."""
    # The domain axis first, then the data axis: the same order on every rank.
    return sum_over_data_ranks(manager.transport.all_reduce(tensor.detach()), manager)


def sum_over_data_ranks(tensor: Tensor, manager: DomainParallelManager) -> Tensor:
    """Return the sum of a tensor over the data axis, in place; collective."""
    if manager.data_parallel_size > 1:
        dist.all_reduce(tensor, group=manager.data_parallel_group)
    return tensor


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Return the result of `action`, or raise the same error on every rank; collective.

    Raises:
        UserError: the error of the lowest rank whose `action` raised one.
    """
    outcome = run_catching(action)
    # Ranks that failed take part as well: the others wait for them here.
    messages = [line for line in all_gather_object(outcome.message) if line is not None]
    if messages:
        raise UserError(messages[0])
    return result_or_raise(outcome)


@final
@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What an action returned on a rank, or the message of the `UserError` that it raised."""

    result: T | None
    message: str | None = None

    def as_list(self) -> list[Any]:
        """Return both, which JSON can hold if it can hold the result."""
        return [self.result, self.message]


def run_catching(action: Callable[[], T]) -> Outcome[T]:
    """Return the outcome of an action, to be sent to other ranks."""
    try:
        return Outcome(action())
    except UserError as error:
        return Outcome(None, str(error))


def result_or_raise(outcome: Outcome[T]) -> T:
    """Return the result of an outcome."""
    if outcome.message is not None:
        raise UserError(outcome.message)
    return outcome.result  # type: ignore[return-value]  # there was no error


def gather_from_all_ranks(action: Callable[[], T]) -> list[T]:
    """Return the results of `action` on all ranks, or raise the same error on every rank.

    Collective, like `run_on_all_ranks`; the results are pickled, so they should be small.
    """
    outcomes = all_gather_object(run_catching(action))
    return [result_or_raise(outcome) for outcome in outcomes]


def run_on_rank_0(action: Callable[[], T], background: dist.ProcessGroup | None = None) -> T:
    """Return the result that `action` has on rank 0, on every rank; collective.

    For what one rank can find out for all: a thousand of them would otherwise list the same folder.

    Args:
        background: in a thread beside training, what `join_background_group` returns.

    Raises:
        UserError: on all ranks, if `action` raises one.
    """
    outcome = run_catching(action) if global_rank() == 0 else Outcome[T](None)
    if background is None:
        return result_or_raise(broadcast_object(outcome, 0))
    result, message = _broadcast_in_tree(outcome.as_list(), background)
    return result_or_raise(Outcome[T](result, message))


def broadcast_object(value: T, source: int) -> T:
    """Return the value of the rank `source` on every rank; collective.

    Args:
        value: any object that can be pickled; that of other ranks than `source` is ignored.
    """
    if not has_process_group() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def gather_on_rank_0(
    action: Callable[[], T], background: dist.ProcessGroup | None = None
) -> list[Outcome[T]]:
    """Return the outcomes of `action` on all ranks, in rank order, on rank 0; collective.

    Nothing on the other ranks.

    Args:
        action: its result becomes JSON.
    """
    outcome = run_catching(action)
    if not has_process_group() or dist.get_world_size() == 1:
        return [outcome]
    if dist.get_backend(background) == "gloo":
        return [Outcome(*each) for each in _gather_in_tree(outcome.as_list(), background)]
    outcomes: list[Outcome[T] | None] = [None] * dist.get_world_size() if global_rank() == 0 else []
    dist.gather_object(outcome, outcomes or None, dst=0)
    return outcomes  # type: ignore[return-value]  # torch has replaced every None


# Messages along a tree of ranks. Rank 0 needs connections to ranks 1, 2, 4, 8, ... only; for gloo's
# gather, to all. The parent of a rank has its number without the highest bit.


def _gather_in_tree(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [(rank, value)]
    for bit in reversed(range((size - 1).bit_length())):
        distance = 1 << bit
        if rank >= distance:
            _send(gathered, rank - distance, group)
            return []
        if rank + distance < size:
            gathered += _receive(rank + distance, group)
    return [value for _, value in sorted(gathered, key=lambda pair: pair[0])]


def _broadcast_in_tree(value: Any, group: dist.ProcessGroup) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    for bit in range((size - 1).bit_length()):
        distance = 1 << bit
        if distance <= rank < 2 * distance:
            value = _receive(rank - distance, group)
        elif rank < distance and rank + distance < size:
            _send(value, rank + distance, group)
    return value


def _send(value: Any, to: int, group: dist.ProcessGroup | None) -> None:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    for tensor in (torch.tensor([len(text)]), text):
        work = dist.isend(tensor, to, group, BACKGROUND_TAG)
        if work is not None:
            work.wait(BACKGROUND_TIMEOUT)


def _receive(sender: int, group: dist.ProcessGroup | None) -> Any:
    def receive(tensor: Tensor) -> Tensor:
        work = dist.irecv(tensor, sender, group, BACKGROUND_TAG)
        if work is not None:
            work.wait(BACKGROUND_TIMEOUT)
        return tensor

    length = int(receive(torch.zeros(1, dtype=torch.int64)))
    return json.loads(bytes(receive(torch.zeros(length, dtype=torch.uint8)).tolist()))
