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


def test_ranks_are_assigned_to_nodes() -> None:
    whole, spread, nodes = PlacementRequest(), PlacementRequest(spread=True), PlacementRequest
    unknown = ClusterNodes()
    for mesh, available, requested, device, expected in (
        ((1, None, 8), GPU_NODES, nodes(nodes=4), "cuda", Placement(4, 8, 8, 8, 4)),
        ((1, None, 2), GPU_NODES, nodes(nodes=1), "auto", Placement(1, 8, 8, 8, 4)),  # a full one
        ((2, 2, 4), GPU_NODES, whole, "cuda", Placement(2, 8, 8, 8, 2)),  # the fewest
        ((1, 3, 3), GPU_NODES, whole, "cuda", Placement(3, 3, 8, 3, 3)),  # whole groups
        ((1, 1, 4), CPU_NODES, whole, "auto", Placement(1, 4, 1, 0, 1)),
        ((1, 1, 16), GPU_NODES, spread, "cuda", Placement(2, 8, 8, 8, 1)),
        ((1, 1, 2), unknown, nodes(2, 1, spread=True), "cpu", Placement(2, 1, 1, 0, 1)),
        ((1, None, 4), unknown, nodes(nodes=2), "cuda", Placement(2, 4, 3, 4, 2)),
    ):
        assert placed(mesh, available, requested, device) == expected, (mesh, requested)


def test_what_fits_nowhere_is_refused() -> None:
    for mesh, available, requested, words in (
        (
            (1, 1, 16),
            GPU_NODES,
            PlacementRequest(),
            "16 ranks on one node need 16 GPUs, but nodes have 8 (a domain group stays on one "
            "node). Lower parallel.domain, or let groups span nodes with spread=true.",
        ),
        ((1, 1, 9), CPU_NODES, PlacementRequest(), "9 ranks on one node need 9 cores, but nodes h"),
        ((1, 5, 8), CPU_NODES, PlacementRequest(), "40 ranks need 5 nodes with 8 ranks on each"),
        (
            (1, 1, 8),
            CPU_NODES,
            PlacementRequest(nodes=2),
            "would split domain groups of 8 ranks. Use 1",
        ),
        (
            (1, 2, 4),
            CPU_NODES,
            PlacementRequest(nodes=3),
            "8 ranks can't be divided among 3 nodes with 2",
        ),
        ((1, 2, 8), CPU_NODES, PlacementRequest(nodes=1), "16 ranks on one node need 16 cores"),
        (
            (1, 1, 4),
            CPU_NODES,
            PlacementRequest(cpus_per_task=3),
            "4 ranks on one node need 12 cores",
        ),
    ):
        with pytest.raises(UserError) as refused:
            placed(mesh, available, requested, "cuda" if available is GPU_NODES else "cpu")
        assert words in str(refused.value), mesh
        assert "\n" not in str(refused.value)


def test_the_largest_nodes_of_the_default_partition_count() -> None:
    output = "gpu*|64|gpu:a100:4(S:0-1)\ngpu*|64|gpu:a100:8(S:0-1)\ngpu*|32|(null)\nbig|128|gpu:9\n"
    assert largest_nodes(output, is_one_partition=False) == ClusterNodes(1, 64, 8)
    assert largest_nodes(output, is_one_partition=True) == ClusterNodes(1, 128, 9)
    assert largest_nodes("", is_one_partition=True) == ClusterNodes()


def test_gpus_are_counted() -> None:
    texts = ("(null)", "gpu:4", "gpu:a100:4(S:0-1),nvme:1", "gpu:a:2,gpu:b:1")
    assert [count_gpus(gres) for gres in texts] == [0, 4, 4, 3]
