"""Following a converted model on fake tensors: which heights its layers see, that bands line up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel.partition import BandTable
from credit_dp.domain_parallel.trace import Trace, user_line
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.layers.row_layer import RowLayer

_active: ContextVar[Planner | None] = ContextVar("active planner", default=None)


def active_planner() -> Planner | None:
    """Return the planner that follows the model right now, if one does."""
    return _active.get()


class Visit(NamedTuple):
    """One call of a layer in a run of the whole globe: rows in, shape and dtype out."""

    taken: int
    made: tuple[int, ...]
    dtype: torch.dtype


@final
class Planner:
    """Follows two kinds of runs on fake tensors.

    The run of the whole globe calls the wrapped layers and notes their heights. The run of a band
    checks that each layer gets the rows that its height gives that rank, and only makes shapes.
    Layers and trusted modules leave no operations in the trace.
    """

    def __init__(self, model: nn.Module, names: dict[RowLayer, str], bands: BandTable) -> None:
        self.model = model
        self.names = names
        self.bands = bands
        self.seen: dict[RowLayer, set[tuple[int, int]]] = defaultdict(set)  # heights in and out
        self._rank: int | None = None
        self._visits: dict[RowLayer, list[Visit]] = {}
        self._calls: dict[RowLayer, int] = {}
        self._trace = Trace(model)

    @contextmanager
    def following(self, rank: int | None) -> Iterator[Trace]:
        """Make this planner the active one, for a run of the whole globe or of a rank's band."""
        self._rank = rank
        self._calls = defaultdict(int)
        if rank is None:
            self._visits = defaultdict(list)
        self._trace = Trace(self.model)
        token = _active.set(self)
        try:
            with self._trace:
                yield self._trace
        finally:
            _active.reset(token)

    def visit(self, layer: RowLayer, x: Tensor, *others: Tensor) -> Tensor:
        """Stand in for a layer's forward."""
        with self._trace.paused():
            if self._rank is None:
                made = self._visit_globe(layer, x, *others)
            else:
                made = self._visit_band(layer, x, self._rank)
        self._trace.mark((x, *others), (made,), id(layer))
        return made

    def _visit_globe(self, layer: RowLayer, x: Tensor, *others: Tensor) -> Tensor:
        made: Tensor = layer.__dict__["wrapped"].forward(x, *others)
        self._visits[layer].append(Visit(x.shape[layer.dim], tuple(made.shape), made.dtype))
        self.seen[layer].add((x.shape[layer.dim], made.shape[layer.dim]))
        return made

    def _visit_band(self, layer: RowLayer, x: Tensor, rank: int) -> Tensor:
        if self._calls[layer] >= len(self._visits[layer]):
            raise UserError(
                f"{user_line()}: control flow depends on the number of rows; {self.names[layer]} "
                "is called for a band and not for the globe."
            )
        visit = self._visits[layer][self._calls[layer]]
        self._calls[layer] += 1
        expected = self.bands[visit.taken].sizes[rank]
        if x.shape[layer.dim] != expected:
            raise UserError(
                f"{self.names[layer]}: rank {rank} of {self.bands.ranks} has {x.shape[layer.dim]} "
                f"rows where its band of {visit.taken} rows has {expected}. The code before this "
                "layer changes rows; put that into a module and name it in custom_converters."
            )
        shape = list(visit.made)
        shape[layer.dim] = self.bands[shape[layer.dim]].sizes[rank]
        return x.new_empty(shape, dtype=visit.dtype)

    @contextmanager
    def trusting(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Keep what these modules do inside out of the traces."""
        hooks = [
            hook
            for module in modules
            for hook in (
                module.register_forward_pre_hook(lambda *_: self._trace.pause()),
                module.register_forward_hook(self._leave),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _leave(self, module: nn.Module, args: Any, made: Any) -> None:
        self._trace.resume()
        taken, given = ([x for x in tree_leaves(t) if isinstance(x, Tensor)] for t in (args, made))
        self._trace.mark(taken, given, id(module))

    def heights(self) -> set[int]:
        """Return every global height that a layer takes or makes."""
        return {height for pairs in self.seen.values() for pair in pairs for height in pair}

    def planned(self, layer: RowLayer) -> dict[int, int]:
        """Return the heights of one layer: taken -> made.

        Raises:
            UserError: some rank could not tell two of the heights apart by its rows.
        """
        planned = dict(self.seen[layer])
        if len(planned) < len(self.seen[layer]):
            raise UserError(f"{self.names[layer]}: makes two heights of the same rows.")
        for rank in range(self.bands.ranks):
            sizes = [self.bands[height].sizes[rank] for height in planned]
            if len(set(sizes)) < len(sizes):
                raise UserError(
                    f"{self.names[layer]}: is used at the heights {sorted(planned)}, and rank "
                    f"{rank} has the same rows of two of them. Change parallel.domain."
                )
        return planned
