"""Finds domain groups that reach over several nodes, where every exchange crosses the network."""

from collections.abc import Sequence
from itertools import pairwise


def spread_domains(nodes: Sequence[int], domain: int) -> str | None:
    """One line on domain groups that no single node holds; None if there are none.

    `nodes` tells of every rank on which node it runs. Such a mesh computes the same and may be what
    is wanted (a globe too large for a node, nodes that share a fast network), so it is no error.
    """
    groups = [range(first, first + domain) for first in range(0, len(nodes), domain)]
    spread = [group for group in groups if len({nodes[rank] for rank in group}) > 1]
    if not spread:
        return None
    group = spread[0]
    edges = sum(nodes[one] != nodes[other] for one, other in pairwise(group))
    sizes = sorted({nodes.count(node) for node in set(nodes)})
    return (
        f"parallel.domain: {len(spread)} of {len(groups)} domain groups reach over several nodes, "
        f"the first is ranks {group[0]} to {group[-1]} on nodes {listed(nodes, group)}: "
        f"{edges} of the {domain - 1} edges between its bands cross the network at every exchange "
        f"of rows. {remedy(nodes, domain, sizes)}"
    )


def listed(nodes: Sequence[int], group: Sequence[int]) -> str:
    """The nodes of a group, each once: `0, 1 and 2`."""
    names = [str(node) for node in dict.fromkeys(nodes[rank] for rank in group)]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def remedy(nodes: Sequence[int], domain: int, sizes: Sequence[int]) -> str:
    """What keeps each group on one node, as far as anything does."""
    per_node = " or ".join(map(str, sizes))
    if sum(one != other for one, other in pairwise(nodes)) >= len(set(nodes)):
        return (
            "Ranks that follow each other are on different nodes: number them node by node "
            "(srun --distribution=block)."
        )
    fit = [n for n in range(2, domain) if all(size % n == 0 for size in sizes)]
    smaller = f"set parallel.domain to {' or '.join(map(str, fit))}, or " if fit else ""
    return (
        f"Nodes have {per_node} ranks. If that is too slow, {smaller}start a multiple of {domain} "
        "ranks on every node."
    )
