"""Domain groups that span nodes are reported with their numbers; others are not."""

import re

from credit_dp.distributed.placement import spread_warning


def test_groups_on_one_node_are_not_reported() -> None:
    for nodes, domain in (
        ([0, 0, 0, 0], 4),
        ([0, 0, 0, 0, 1, 1, 1, 1], 2),
        ([0, 0, 0, 0, 1, 1], 2),
        ([0, 1, 2], 1),
        ([3, 3, 0, 0], 2),  # in any order
    ):
        assert spread_warning(nodes, domain) is None, (nodes, domain)


def test_groups_over_nodes_are_reported() -> None:
    for nodes, domain, found in (
        ([0] * 4 + [1] * 4, 8, "1 of 1 domain groups span.* is ranks 0 to 7 on nodes 0 and 1:"),
        ([0] * 6 + [1] * 6, 4, "1 of 3 domain groups span.* is ranks 4 to 7 on nodes 0 and 1:"),
        ([0] * 5 + [1] * 3, 2, "1 of 4 domain groups span.* is ranks 4 to 5 on nodes 0 and 1:"),
        ([0, 1, 2] * 2, 3, "2 of 2 domain groups span.* is ranks 0 to 2 on nodes 0 and 1 and 2:"),
    ):
        line = spread_warning(nodes, domain)
        assert line is not None, nodes
        advice = f"lower parallel.domain, or start a multiple of {domain} ranks on every node"
        assert re.fullmatch(f"parallel.domain: {found}.*{advice}.*", line), (nodes, line)
