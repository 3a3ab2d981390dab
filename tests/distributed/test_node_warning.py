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
    ("nodes", "domain", "found"),
    [
        pytest.param(
            [0] * 4 + [1] * 4,
            8,
            "1 of 1 domain groups span several nodes, the first is ranks 0 to 7 on nodes 0 and 1:",
            id="larger than a node",
        ),
        pytest.param(
            [0] * 6 + [1] * 6,
            4,
            "1 of 3 domain groups span several nodes, the first is ranks 4 to 7 on nodes 0 and 1:",
            id="across the boundary",
        ),
        pytest.param(
            [0] * 5 + [1] * 3,
            2,
            "1 of 4 domain groups span several nodes, the first is ranks 4 to 5 on nodes 0 and 1:",
            id="uneven nodes",
        ),
        pytest.param(
            [0, 1, 2] * 2,
            3,
            "2 of 2 domain groups span several nodes, the first is ranks 0 to 2 on nodes 0 and 1 "
            "and 2:",
            id="dealt in turn",
        ),
    ],
)
def test_groups_over_nodes_are_reported(nodes: list[int], domain: int, found: str) -> None:
    line = spread_warning(nodes, domain)
    assert line is not None
    assert line.startswith(f"parallel.domain: {found}")
    assert f"lower parallel.domain, or start a multiple of {domain} ranks on every node" in line
    assert "\n" not in line
