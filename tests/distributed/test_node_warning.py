"""Domain groups that span nodes are reported with their numbers; others are not."""

import pytest

from credit_dp.distributed.placement import spread_warning


@pytest.mark.parametrize(
    ("nodes", "domain"),
    [
        pytest.param([0, 0, 0, 0], 4, id="one node"),
        pytest.param([0, 0, 0, 0, 1, 1, 1, 1], 2, id="two groups on each node"),
        pytest.param([0, 0, 0, 0, 1, 1], 2, id="uneven nodes"),
        pytest.param([0, 1, 2], 1, id="a rank a globe"),
        pytest.param([3, 3, 0, 0], 2, id="nodes in any order"),
    ],
)
def test_groups_on_one_node_are_not_reported(nodes: list[int], domain: int) -> None:
    assert spread_warning(nodes, domain) is None


@pytest.mark.parametrize(
    ("nodes", "domain", "parts"),
    [
        pytest.param(
            [0] * 4 + [1] * 4,
            8,
            [
                "1 of 1 domain groups",
                "ranks 0 to 7 on nodes 0 and 1: 1 of the 7 edges",
                "Nodes have 4 ranks. If that is too slow, set parallel.domain to 2 or 4, or start "
                "a multiple of 8 ranks on every node.",
            ],
            id="larger than a node",
        ),
        pytest.param(
            [0] * 6 + [1] * 6,
            4,
            [
                "1 of 3 domain groups",
                "ranks 4 to 7",
                "1 of the 3 edges",
                "parallel.domain to 2 or 3",
            ],
            id="across the boundary",
        ),
        pytest.param(
            [0] * 5 + [1] * 3,
            2,
            ["1 of 4 domain groups", "ranks 4 to 5", "Nodes have 3 or 5 ranks.", "slow, start a"],
            id="uneven nodes",
        ),
        pytest.param(
            [0, 1, 2] * 2,
            3,
            ["2 of 2", "nodes 0, 1 and 2: 2 of the 2 edges", "--distribution=block"],
            id="dealt in turn",
        ),
    ],
)
def test_groups_over_nodes_are_reported(nodes: list[int], domain: int, parts: list[str]) -> None:
    line = spread_warning(nodes, domain)
    assert line is not None
    assert "\n" not in line
    assert [part for part in parts if part not in line] == [], line
