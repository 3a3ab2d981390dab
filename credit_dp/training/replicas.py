"""Checks that ranks which should hold the same parameters do, to the last bit."""

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from credit_dp.distributed.report import rank_name
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.parameter_shards import is_dtensor

CHUNK_ENTRIES = (
    1 << 20
)  # entries worked on at once, so that no second copy of a large tensor is made
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplying by them modulo 2**64 can be undone: different entries stay different.
STEP, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
LOWER = 0xFFFFFFFF


def checksum(tensor: Tensor) -> Tensor:
    """The sum of mixed entries modulo 2**64; of bits, not of numbers.

    One changed entry always changes it, several or a swap all but surely. NaNs of equal bits are
    equal, 0.0 and -0.0 are not.

    Shapes:
        any, of any dtype -> `()` int64, on the same device.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(INTEGER_DTYPES[flat.element_size()])
    total = torch.full((), len(words), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHUNK_ENTRIES):
        total += mix_bits(words[start : start + CHUNK_ENTRIES], start).sum()
    return total


def mix_bits(words: Tensor, start: int) -> Tensor:
    """Each entry and its position, from `start` on, spread over 64 bits; reversible in the entry.

    Integer arithmetic wraps around, on every device.
    """
    place = torch.arange(start, start + len(words), device=words.device)
    bits = words.to(torch.int64) ^ (place * STEP)
    for factor in (FIRST, SECOND):
        bits *= factor
        bits ^= (bits >> 32) & LOWER
    return bits


NAME_BYTES = 512
MAX_NAMED_RANKS = 3  # so many ranks are named, further ones are counted
ABSENT, SHARDED, REPLICATED = 0, 1, 2  # how a rank holds a parameter
ADVICE = (
    "Every rank has to build and update the same weights: look for random numbers, files or "
    "gradients that only some ranks use, and for faulty hardware; then resume from a checkpoint "
    "that is older than the difference."
)


@torch.no_grad()
def check_replicas(
    parameters: Mapping[str, Tensor], manager: DomainParallelManager, step: int = 0
) -> None:
    """Compare the bits of all parameters over the domain axis, and of whole ones over data.

    A collective of all ranks; `parameters` are those of this rank's stretch of the model. A
    `DTensor` is compared by its local shard, over the domain axis only. A rank sends 16 bytes for
    each parameter and axis, and 24 besides.

    Raises:
        UserError: some differ; on all ranks alike, with the first name that does and the ranks.
    """
    if manager.mesh is None:
        return
    names = sorted(parameters)
    check_same_parameters(names, parameters, manager, step)
    sums = [checksum(local_tensor(parameters[name])).to(manager.mesh.device_type) for name in names]
    whole = torch.tensor([not is_dtensor(parameters[name]) for name in names])
    first = first_difference(torch.stack(sums), whole, manager) if names else None
    if any_rank(first is not None, manager):
        suspect = "" if first is None else names[first]
        raise UserError(difference_message(suspect, parameters, manager, step))


def local_tensor(parameter: Tensor) -> Tensor:
    """What of a parameter is in this rank's memory; writing into that changes it."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def check_same_parameters(
    names: list[str],
    parameters: Mapping[str, Tensor],
    manager: DomainParallelManager,
    step: int,
) -> None:
    """Refuse ranks of one pipeline position that hold other parameters; else the rest would hang.

    Raises:
        UserError: number, names, shapes or dtypes differ; on all ranks alike.
    """
    told = [f"{n} {tuple(parameters[n].shape)} {parameters[n].dtype}" for n in names]
    table = all_gather_ints([len(names), zlib.crc32("\n".join(told).encode())], manager)
    per_position = manager.dp_world_size * manager.domain_world_size
    for start in range(0, manager.world_size, per_position):
        for rank in range(start + 1, start + per_position):
            if table[rank] != table[start]:
                raise UserError(
                    f"parallel.check_replicas_every: {replica_name(start, manager)} has "
                    f"{table[start][0]} "
                    f"parameters and {replica_name(rank, manager)} has {table[rank][0]}, with "
                    "other names, "
                    f"shapes or dtypes, {step_phrase(step)}. Every rank has to build the same "
                    "model: look "
                    "for settings or files that only some ranks see."
                )


def first_difference(sums: Tensor, whole: Tensor, manager: DomainParallelManager) -> int | None:
    """The first parameter whose checksum is not the same on all ranks that share it."""
    differs = differing_entries(sums, manager.domain_group)
    over_data = differing_entries(sums, manager.data_parallel_group)
    places = (differs | (over_data & whole.to(sums.device))).nonzero()
    return int(places[0]) if len(places) else None


def differing_entries(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Which entries differ within a group: largest and smallest value are not the same."""
    ends = torch.stack([sums, ~sums])  # ~ turns the order round, so that one maximum gives both
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    return ends[0] != ~ends[1]


def any_rank(flag: bool, manager: DomainParallelManager) -> bool:
    """Whether the flag is set on any rank, the other pipeline positions included."""
    return any(row[0] for row in all_gather_ints([int(flag)], manager))


def difference_message(
    suspect: str, parameters: Mapping[str, Tensor], manager: DomainParallelManager, step: int
) -> str:
    """The line that says which parameter differs, and where; a collective, the same everywhere.

    Only here names and checksums travel to all ranks.
    """
    encoded = list(suspect.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"))
    rows = all_gather_ints(encoded, manager)
    found = min(text for row in rows if (text := bytes(row).rstrip(b"\0")))
    mine = [n for n in parameters if n.encode()[:NAME_BYTES] == found]
    held = kind_and_checksum(parameters[mine[0]]) if mine else [ABSENT, 0]
    reference, odd = reference_and_differing_ranks(all_gather_ints(held, manager), manager)
    more = f" and {len(odd) - MAX_NAMED_RANKS} more" if len(odd) > MAX_NAMED_RANKS else ""
    others = ", ".join(replica_name(rank, manager) for rank in odd[:MAX_NAMED_RANKS])
    return (
        f"parallel.check_replicas_every: parameter {found.decode(errors='replace')} differs "
        f"between {replica_name(reference, manager)} and {others}{more} {step_phrase(step)}. "
        f"{ADVICE}"
    )


def kind_and_checksum(parameter: Tensor) -> list[int]:
    """How this rank holds a parameter, and the checksum of what it has."""
    kind = SHARDED if is_dtensor(parameter) else REPLICATED
    return [kind, int(checksum(local_tensor(parameter)))]


def reference_and_differing_ranks(
    table: list[list[int]], manager: DomainParallelManager
) -> tuple[int, list[int]]:
    """A rank that holds what most hold, and the ranks that should hold the same but don't.

    With as many on both sides it is the lower rank that is taken to be right.
    """
    for ranks in replica_groups(table, manager):
        values = [table[rank][1] for rank in ranks]
        common = max(values, key=values.count)  # the first of equals
        odd = [rank for rank in ranks if table[rank][1] != common]
        if odd:
            return ranks[values.index(common)], odd
    raise RuntimeError("checksums that differed a moment ago are equal now")


def replica_groups(table: list[list[int]], manager: DomainParallelManager) -> Iterable[list[int]]:
    """Lists of ranks that should hold the same bits of the parameter that the table is about."""
    domain = manager.domain_world_size
    per_position = manager.dp_world_size * domain
    for start in range(0, manager.world_size, per_position):
        kind = table[start][0]
        width = domain if kind == SHARDED else per_position
        for first in range(start, start + per_position, width):
            if kind != ABSENT:
                yield list(range(first, first + width))


def all_gather_ints(values: list[int], manager: DomainParallelManager) -> list[list[int]]:
    """The values of every rank of the world, in rank order."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    own = torch.tensor(values, dtype=torch.int64, device=device)
    table = [torch.empty_like(own) for _ in range(manager.world_size)]
    dist.all_gather(table, own)
    return [row.tolist() for row in table]


def replica_name(rank: int, manager: DomainParallelManager) -> str:
    """A rank with its place on the mesh."""
    return rank_name(rank, manager.dp_world_size, manager.domain_world_size)


def step_phrase(step: int) -> str:
    """When the check was made, for people."""
    return f"after step {step}" if step else "at the start"
