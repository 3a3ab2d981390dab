"""One line that says what a conversion did."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel.layers.row_layer import Bands
from credit_dp.domain_parallel.row_tensors import cuts

if TYPE_CHECKING:
    from credit_dp.domain_parallel.conversion import Conversion
    from credit_dp.domain_parallel.planner import Planner, Visit


def summary(conversion: Conversion, planner: Planner | None = None) -> str:
    """Say what was put in, what was kept, what is trusted, and what this rank sends.

    Without a plan: as far as it is known before.
    """
    parts = [_listed(conversion.counts) or "no layer mixes rows"]
    if conversion.own_leaves:
        parts.append(f"layers of your own, kept and audited: {_listed(conversion.own_leaves)}")
    trusted = Counter(type(module).__name__ for module in conversion.trusted)
    if trusted:
        parts.append(f"trusted: {_listed(trusted)}")
    if planner is None:
        parts.append("planned and audited at the first forward")
    else:
        cut = [what.path for _, of_owner in cuts(planner.model) for what in of_owner.values()]
        parts += [f"cut into bands: {', '.join(cut)}"] if cut else []
        parts.append(f"this rank sends at most {_bytes_sent(planner):,} bytes of rows per forward")
    return "; ".join([*parts, "not verified numerically: credit-dp verify does"])


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _bytes_sent(planner: Planner) -> int:
    """Return what this rank sends forward; less where a layer shrinks its rows before they go."""
    visits = (visit for visit in planner.visits if visit.dim is not None)
    return sum(_rows_sent(planner, visit) * _row_bytes(planner, visit) for visit in visits)


def _rows_sent(planner: Planner, visit: Visit) -> int:
    made = next(call.made for call in planner.seen[visit.layer] if call.taken == visit.taken)
    exchange = visit.layer.exchange(Bands(planner.bands[visit.taken], planner.bands[made]))
    return sum(route.length for route in exchange.sends)


def _row_bytes(planner: Planner, visit: Visit) -> int:
    """Return the bytes of one row of a layer's input; a plan's batch has a size of its own."""
    batch, *_ = visit.shapes[0]
    made = next(leaf for leaf in tree_leaves(visit.made) if isinstance(leaf, Tensor))
    size = prod(visit.shapes[0]) // visit.taken * made.element_size()
    planned, given = planner.batch
    return size // planned * given if batch == planned else size
