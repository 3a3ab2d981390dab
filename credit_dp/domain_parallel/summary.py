"""One line that says what a conversion did."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel.layers.depthwise_layer import DepthwiseLayer
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
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
        traded = [name for layer, name in planner.names.items() if _trades(layer)]
        parts += [f"rows traded for channels: {', '.join(traded)}"] if traded else []
        parts.append(f"this rank sends at most {_bytes_sent(planner):,} bytes of rows per forward")
    return "; ".join([*parts, "not verified numerically: credit-dp verify does"])


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _bytes_sent(planner: Planner) -> int:
    """Return what this rank sends forward; less where a layer shrinks its rows before they go."""
    visits = (visit for visit in planner.visits if visit.dim is not None)
    return sum(_sent(planner, visit) for visit in visits)


def _sent(planner: Planner, visit: Visit) -> int:
    """Return what this rank sends for one call of a layer."""
    made = next(call.made for call in planner.seen[visit.layer] if call.taken == visit.taken)
    bands = Bands(planner.bands[visit.taken], planner.bands[made])
    if isinstance(visit.layer, DepthwiseLayer) and visit.layer.transposes(visit.taken):
        return _traded(planner, visit, visit.layer, bands)
    rows = sum(route.length for route in visit.layer.exchange(bands).sends)
    return rows * _bytes(planner, visit, visit.shapes[0]) // visit.taken


def _traded(planner: Planner, visit: Visit, layer: DepthwiseLayer, bands: Bands) -> int:
    """Return what this rank sends to trade rows for channels, and channels for rows."""
    sent, shapes = 0, (visit.shapes[0], tuple(visit.made.shape))
    for to_channels, shape, plan in zip(
        (True, False), shapes, layer.transposes_of(bands), strict=True
    ):
        rows = sum(plan.parcels(to_channels)[layer.manager.domain_rank])
        sent += rows * _bytes(planner, visit, shape) // (sum(plan.rows) * sum(plan.channels))
    return sent


def _trades(layer: RowLayer) -> bool:
    """Return whether a layer trades rows for channels, at any height."""
    return isinstance(layer, DepthwiseLayer) and any(map(layer.transposes, layer.planned))


def _bytes(planner: Planner, visit: Visit, shape: tuple[int, ...]) -> int:
    """Return the bytes of a whole tensor; a plan's batch has a size of its own."""
    made = next(leaf for leaf in tree_leaves(visit.made) if isinstance(leaf, Tensor))
    size = prod(shape) * made.element_size()
    planned, given = planner.batch
    return size // planned * given if shape[0] == planned else size
