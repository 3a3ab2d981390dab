"""Replicas of parameters: equal bits pass, a difference is reported on all ranks."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.parameter_check import CHUNK_ENTRIES, checksum
from credit_dp.errors import UserError
from credit_dp.training.parameter_shards import fsdp_mesh, local_tensor
from credit_dp.training.replicas import check_replicas
from tests.ranks import on_processes

Parameters = dict[str, Tensor]
Change = Callable[[Parameters, int], None]


def build(manager: DomainParallelManager) -> Parameters:
    """Build parameters: equal on all ranks of a stage, with other names on each stage."""
    torch.manual_seed(7)
    stage = f"stage{manager.pipeline_rank}"
    found = {
        f"{stage}.weight": torch.randn(3, 5, dtype=torch.float64),
        f"{stage}.half": torch.randn(4).to(torch.bfloat16),
        f"{stage}.empty": torch.empty(0, 3),
        f"{stage}.number": torch.tensor(1.5),
        f"{stage}.odd": torch.tensor([float("nan"), 0.0, float("inf")]),
    }
    return found if manager.pipeline_rank == 0 else {**found, f"{stage}.more": torch.ones(2)}


def replica_error(manager: DomainParallelManager, change: Change | None = None) -> str:
    """Return the error of the check after one rank's parameters were changed."""
    parameters = build(manager)
    if change is not None:
        change(parameters, manager.rank)
    try:
        check_replicas(parameters, manager, 40)
    except UserError as error:
        return str(error)
    return ""


def flip(tensor: Tensor) -> None:
    """Change the lowest bit of the last entry."""
    words = tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    words[-1] ^= 1


def flip_half_on_1(parameters: Parameters, rank: int) -> None:
    if rank == 1:
        flip(parameters["stage0.half"])


def flip_weight_on_2(parameters: Parameters, rank: int) -> None:
    if rank == 2:
        flip(parameters["stage0.weight"])


def flip_two_on_different_ranks(parameters: Parameters, rank: int) -> None:
    if rank == 3:
        flip(parameters["stage1.weight"])
    if rank == 2:
        flip(parameters["stage1.number"])


def negative_zero_on_3(parameters: Parameters, rank: int) -> None:
    if rank == 3:
        parameters["stage0.odd"][1] = -0.0


def everywhere_else(parameters: Parameters, rank: int) -> None:
    parameters["stage0.weight"][0, 0] = rank


def other_name_on_1(parameters: Parameters, rank: int) -> None:
    if rank == 1:
        parameters["stage0.other"] = parameters.pop("stage0.weight")


def one_more_on_3(parameters: Parameters, rank: int) -> None:
    if rank == 3:
        parameters["more"] = torch.ones(1)


# Ranks that share a globe, stages, what is changed, and the words of the line.
CHANGES = [
    (
        2,
        1,
        flip_half_on_1,
        "stage0.half differs between {0, 0, 0, 0} and {1, 0, 0, 1} after step 40. ",
    ),
    (2, 1, flip_weight_on_2, "stage0.weight differs between {0, 0, 0, 0} and {2, 0, 1, 0} after"),
    (2, 1, negative_zero_on_3, "stage0.odd differs between {0, 0, 0, 0} and {3, 0, 1, 1} after"),
    (
        2,
        2,
        flip_two_on_different_ranks,
        "stage1.number differs between {2, 1, 0, 0} and {3, 1, 0, 1}",
    ),
    (
        1,
        2,
        flip_two_on_different_ranks,
        "stage1.number differs between {2, 1, 0, 0} and {3, 1, 1, 0}",
    ),
    (2, 1, other_name_on_1, "{0, 0, 0, 0} has 5 parameters and {1, 0, 0, 1} "),
    (2, 1, one_more_on_3, "has 5 parameters and {3, 0, 1, 1} has 6"),
]


def test_one_flipped_bit_is_named_on_all_ranks() -> None:
    check_replicas({"a": torch.ones(2)}, DomainParallelManager(1, 1))  # nothing to compare
    for pipeline in (1, 2):
        same = on_processes(4, replica_error, domain=2, pipeline=pipeline)
        assert same == [""] * 4
    for domain, pipeline, change, words in CHANGES:
        lines = on_processes(4, replica_error, change, domain=domain, pipeline=pipeline)
        assert lines == lines[:1] * 4, change
        assert lines[0].startswith("parallel.check_replicas_every: "), change
        place = r"{(\d), (\d), (\d), (\d)}"
        assert re.sub(place, r"rank \1 (pipeline \2, data \3, domain \4)", words) in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "pipeline"), [(4, 1), (1, 1)])
def test_ranks_without_bands_or_without_data_are_compared_too(domain: int, pipeline: int) -> None:
    assert on_processes(4, replica_error, domain=domain, pipeline=pipeline) == [""] * 4
    lines = on_processes(4, replica_error, flip_half_on_1, domain=domain, pipeline=pipeline)
    assert lines == lines[:1] * 4
    assert lines[0].startswith("parallel.check_replicas_every: parameter ")


@pytest.mark.slow
def test_many_that_differ_are_counted() -> None:
    lines = on_processes(8, replica_error, everywhere_else, domain=2)
    assert lines == lines[:1] * 8
    assert "between rank 0 (" in lines[0]
    assert "rank 3 (pipeline 0, data 1, domain 1) and 4 more after step 40" in lines[0]


def shared_out(manager: DomainParallelManager, bad: str) -> str:
    """Check parameters that FSDP shards, with one rank's shard, or a whole parameter, changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)).double()  # one bias has one entry
    fully_shard(model, mesh=fsdp_mesh(manager))
    parameters = {**dict(model.named_parameters()), "whole": torch.ones(2)}
    shards = [local_tensor(p).shape for p in parameters.values()]
    assert manager.rank == 0 or 0 in shards[-2]  # an empty shard is among them
    if manager.rank == 2:
        with torch.no_grad():
            flip(local_tensor(parameters[bad]))
    try:
        check_replicas(parameters, manager)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_shards_are_not_compared() -> None:
    assert on_processes(4, shared_out, "0.weight", domain=2) == [""] * 4
    lines = on_processes(4, shared_out, "whole", domain=2)
    assert lines == lines[:1] * 4
    ranks = "rank 0 (pipeline 0, data 0, domain 0) and rank 2 (pipeline 0, data 1, domain 0)"
    assert f"parameter whole differs between {ranks} at the start. " in lines[0]


def test_every_entry_and_place_counts() -> None:
    real = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for dtype in (*real, torch.complex64, torch.bool):
        tensor = torch.tensor([1, 0, 1, 1, 0], dtype=dtype)
        sums = {int(checksum(tensor))}
        for changed in ([0, 0, 1, 1, 0], [1, 0, 1, 1, 1], [0, 1, 1, 1, 0], [1, 0, 1, 1, 0, 0]):
            sums.add(int(checksum(torch.tensor(changed, dtype=dtype))))
        assert len(sums) == 5, dtype
        assert int(checksum(tensor.clone())) in sums, dtype
    # Beyond the first piece, too.
    tensor = torch.zeros(2 * CHUNK_ENTRIES + 3)
    found = []
    for place in (None, 0, CHUNK_ENTRIES, 2 * CHUNK_ENTRIES):
        changed = tensor.clone()
        if place is not None:
            changed[place] = 1.0
        found.append(int(checksum(changed)))
    assert len(set(found)) == 4


def test_a_view_is_summed_as_what_it_shows() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous()) != checksum(tensor)
