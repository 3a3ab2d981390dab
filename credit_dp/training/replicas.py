"""Checks that all ranks that should have the same parameters have them, to the last bit.

`check_replicas` compares a checksum of each parameter. Names and ranks are gathered only after a
difference was found, for the error message.
"""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from credit_dp.distributed.collectives import all_gather_object, all_gather_tensor
from credit_dp.distributed.failure_report import rank_name
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.parameter_check import checksum
from credit_dp.errors import UserError
from credit_dp.training.parameter_shards import is_dtensor, local_tensor

MAX_NAMED_RANKS = 3  # the message names these, and counts the others
ADVICE = (
    "Every rank has to build and update the same weights: look for random numbers, files or "
    "gradients that only some ranks use, and for faulty hardware; then resume from a checkpoint "
    "that is older than the difference."
)


@torch.no_grad()
def check_replicas(
    parameters: Mapping[str, Tensor], manager: DomainParallelManager, step: int = 0
) -> None:
    """Check that parameters are the same, bit by bit, on all ranks that should share them.

    Replicated parameters are compared over the domain, the ensemble and the data axis. The shards
    of a `DTensor` are not compared, nor, with more than 64 ranks, its copies. Collective of all
    ranks: each sends 16 bytes for each parameter and axis, and 24 more.

    Args:
        parameters: of this rank's pipeline stages, by name.
        step: for the message; 0: at the start.

    Raises:
        UserError: on all ranks, naming the first parameter that differs and the ranks.
    """
    if manager.mesh is None:
        return
    names = sorted(parameters)
    check_same_parameters(names, parameters, manager, step)
    sums = [checksum(local_tensor(parameters[name])).to(manager.mesh.device_type) for name in names]
    replicated = torch.tensor([not is_dtensor(parameters[name]) for name in names])
    first = first_difference(torch.stack(sums), replicated, manager) if names else None
    # Other pipeline stages may have found nothing, but the message is made by collectives of all.
    if any(has_found for (has_found,) in all_gather_ints([int(first is not None)])):
        suspect = "" if first is None else names[first]
        raise UserError(difference_message(suspect, parameters, manager, step))


def check_same_parameters(
    names: list[str],
    parameters: Mapping[str, Tensor],
    manager: DomainParallelManager,
    step: int,
) -> None:
    """Check that all ranks of a pipeline stage have parameters of the same names and shapes.

    Otherwise they would exchange tensors of different sizes next, and hang.

    Raises:
        UserError: on all ranks, if number, names, shapes or dtypes differ.
    """
    lines = [f"{n} {tuple(parameters[n].shape)} {parameters[n].dtype}" for n in names]
    table = all_gather_ints([len(names), zlib.crc32("\n".join(lines).encode())])
    per_stage = manager.replicas
    for start in range(0, manager.world_size, per_stage):
        for rank in range(start + 1, start + per_stage):
            if table[rank] != table[start]:
                raise UserError(
                    f"parallel.check_replicas_every: {replica_name(start, manager)} has "
                    f"{table[start][0]} parameters and {replica_name(rank, manager)} has "
                    f"{table[rank][0]}, with other names, shapes or dtypes, {step_phrase(step)}. "
                    "Every rank has to build the same model: look for settings or files that only "
                    "some ranks see."
                )


def first_difference(
    sums: Tensor, replicated: Tensor, manager: DomainParallelManager
) -> int | None:
    """Return the index of the first parameter whose checksums differ where they should not.

    Args:
        replicated: whether each parameter is equal on all ranks of these axes.
    """
    differing = differing_entries(sums, manager.domain_group)
    if manager.ensemble_parallel_size > 1:
        differing |= differing_entries(sums, manager.ensemble_group)
    differing |= differing_entries(sums, manager.data_parallel_group)
    indices = (differing & replicated.to(sums.device)).nonzero()
    return int(indices[0]) if len(indices) else None


def differing_entries(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return a mask of the entries whose largest and smallest value within a group differ."""
    # `~` reverses the order of integers, so that one maximum gives the largest and the smallest.
    extremes = torch.stack([sums, ~sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return extremes[0] != ~extremes[1]


def difference_message(
    suspect: str, parameters: Mapping[str, Tensor], manager: DomainParallelManager, step: int
) -> str:
    """Return the message that names a differing parameter and the ranks; collective.

    Ranks may suspect different parameters: all of them take the first name in alphabetical order,
    so that the message is the same everywhere.
    """
    first_name = min(filter(None, all_gather_object(suspect)))
    held = parameters.get(first_name)
    own_sum = None if held is None or is_dtensor(held) else int(checksum(held))
    reference, differing = reference_and_differing_ranks(all_gather_object(own_sum), manager)
    more = (
        f" and {len(differing) - MAX_NAMED_RANKS} more" if len(differing) > MAX_NAMED_RANKS else ""
    )
    others = ", ".join(replica_name(rank, manager) for rank in differing[:MAX_NAMED_RANKS])
    return (
        f"parallel.check_replicas_every: parameter {first_name} differs "
        f"between {replica_name(reference, manager)} and {others}{more} {step_phrase(step)}. "
        f"{ADVICE}"
    )


def reference_and_differing_ranks(
    sums: list[int | None], manager: DomainParallelManager
) -> tuple[int, list[int]]:
    """Return a rank with the most frequent checksum of its stage, and the ranks that differ.

    If two checksums are equally frequent, that of the lower rank is the reference. `sums` has the
    checksum on each rank; None: it has not all of the parameter.
    """
    per_stage = manager.replicas
    for start in range(0, manager.world_size, per_stage):
        if sums[start] is None:
            continue
        ranks = list(range(start, start + per_stage))
        values = [sums[rank] for rank in ranks]
        most_frequent = max(values, key=values.count)  # the first one, if several are
        differing = [rank for rank in ranks if sums[rank] != most_frequent]
        if differing:
            return ranks[values.index(most_frequent)], differing
    raise RuntimeError("checksums that differed a moment ago are equal now")


def all_gather_ints(values: list[int]) -> list[list[int]]:
    """Return the values of every rank, in rank order; collective of all ranks."""
    table: list[list[int]] = all_gather_tensor(torch.tensor(values, dtype=torch.int64)).tolist()
    return table


def replica_name(rank: int, manager: DomainParallelManager) -> str:
    """Return the name of a rank with its coordinates in the mesh."""
    return rank_name(
        rank, manager.dp_world_size, manager.domain_world_size, manager.ensemble_parallel_size
    )


def step_phrase(step: int) -> str:
    """Return the time of the check, for a message."""
    return f"after step {step}" if step else "at the start"
