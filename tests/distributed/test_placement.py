"""Ranks of a mesh on the nodes of a cluster, and meshes that fit on none."""

from dataclasses import replace

import pytest

from credit_dp.distributed.placement import (
    ClusterNodes,
    Placement,
    PlacementRequest,
    count_gpus,
    largest_nodes,
    place_ranks,
)
from credit_dp.errors import UserError
from tests.distributed.launch_program import small_config

GPU_NODES = ClusterNodes(16, cores=64, gpus=8)
CPU_NODES = ClusterNodes(4, cores=8, gpus=0)


def placed(
    mesh: tuple[int, int | None, int],
    available: ClusterNodes,
    requested: PlacementRequest,
    device: str,
) -> Placement:
    pipeline, data, domain = mesh
    config = small_config("", domain, data, pipeline=pipeline)
    return place_ranks(replace(config, device=device), available, requested)


@pytest.mark.parametrize(
    ("mesh", "available", "requested", "device", "expected"),
    [
        pytest.param(
            (1, None, 8),
            GPU_NODES,
            PlacementRequest(nodes=4),
            "cuda",
            Placement(4, 8, 8, 8, 4),
            id="nodes",
        ),
        pytest.param(
            (1, None, 2),
            GPU_NODES,
            PlacementRequest(nodes=1),
            "auto",
            Placement(1, 8, 8, 8, 4),
            id="full node",
        ),
        pytest.param(
            (2, 2, 4),
            GPU_NODES,
            PlacementRequest(),
            "cuda",
            Placement(2, 8, 8, 8, 2),
            id="fewest nodes",
        ),
        pytest.param(
            (1, 3, 3),
            GPU_NODES,
            PlacementRequest(),
            "cuda",
            Placement(3, 3, 8, 3, 3),
            id="whole groups",
        ),
        pytest.param(
            (1, 1, 4), CPU_NODES, PlacementRequest(), "auto", Placement(1, 4, 1, 0, 1), id="no GPUs"
        ),
        pytest.param(
            (1, 1, 16),
            GPU_NODES,
            PlacementRequest(spread=True),
            "cuda",
            Placement(2, 8, 8, 8, 1),
            id="spread",
        ),
        pytest.param(
            (1, 1, 2),
            ClusterNodes(),
            PlacementRequest(2, 1, spread=True),
            "cpu",
            Placement(2, 1, 1, 0, 1),
            id="spread",
        ),
        pytest.param(
            (1, None, 4),
            ClusterNodes(),
            PlacementRequest(nodes=2),
            "cuda",
            Placement(2, 4, 3, 4, 2),
            id="not known",
        ),
    ],
)
def test_ranks_are_assigned_to_nodes(
    mesh: tuple[int, int | None, int],
    available: ClusterNodes,
    requested: PlacementRequest,
    device: str,
    expected: Placement,
) -> None:
    assert placed(mesh, available, requested, device) == expected


@pytest.mark.parametrize(
    ("mesh", "available", "requested", "device", "words"),
    [
        (
            (1, 1, 16),
            GPU_NODES,
            PlacementRequest(),
            "cuda",
            "16 ranks on one node need 16 GPUs, but nodes have 8 (a domain group stays on one "
            "node). Lower parallel.domain, or let groups span nodes with spread=true.",
        ),
        (
            (1, 1, 9),
            CPU_NODES,
            PlacementRequest(),
            "cpu",
            "9 ranks on one node need 9 cores, but nodes have 8",
        ),
        (
            (1, 5, 8),
            CPU_NODES,
            PlacementRequest(),
            "cpu",
            "40 ranks need 5 nodes with 8 ranks on each",
        ),
        (
            (1, 1, 8),
            CPU_NODES,
            PlacementRequest(nodes=2),
            "cpu",
            "would split domain groups of 8 ranks. Use 1",
        ),
        (
            (1, 2, 4),
            CPU_NODES,
            PlacementRequest(nodes=3),
            "cpu",
            "8 ranks can't be divided among 3 nodes with 2",
        ),
        (
            (1, 2, 8),
            CPU_NODES,
            PlacementRequest(nodes=1),
            "cpu",
            "16 ranks on one node need 16 cores",
        ),
        (
            (1, 1, 4),
            CPU_NODES,
            PlacementRequest(cpus_per_task=3),
            "cpu",
            "4 ranks on one node need 12 cores",
        ),
    ],
)
def test_what_fits_nowhere_is_refused(
    mesh: tuple[int, int | None, int],
    available: ClusterNodes,
    requested: PlacementRequest,
    device: str,
    words: str,
) -> None:
    with pytest.raises(UserError) as refused:
        placed(mesh, available, requested, device)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_largest_nodes_of_the_default_partition_count() -> None:
    output = "gpu*|64|gpu:a100:4(S:0-1)\ngpu*|64|gpu:a100:8(S:0-1)\ngpu*|32|(null)\nbig|128|gpu:9\n"
    assert largest_nodes(output, of_partition=False) == ClusterNodes(1, 64, 8)
    assert largest_nodes(output, of_partition=True) == ClusterNodes(1, 128, 9)
    assert largest_nodes("", of_partition=True) == ClusterNodes()


@pytest.mark.parametrize(
    ("gres", "count"),
    [("(null)", 0), ("gpu:4", 4), ("gpu:a100:4(S:0-1),nvme:1", 4), ("gpu:a:2,gpu:b:1", 3)],
)
def test_gpus_are_counted(gres: str, count: int) -> None:
    assert count_gpus(gres) == count
