"""Which parameters and buffers the code between the layers joins with the rows of fields."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import NamedTuple, final

import torch

from credit_dp.domain_parallel.operations import Layout, Rows
from credit_dp.domain_parallel.trace import Ref, Step

# Operations, beside pointwise ones, whose operands must all have the same rows.
JOINS = {"aten.cat", "aten.stack", "aten.copy_"}


class Wanted(NamedTuple):
    """`height` rows with `inner` entries each, in one dimension."""

    height: int
    inner: int


@final
class Origins:
    """Follows the tensors of the model through the run of the whole globe.

    `wanted`: for a tensor of the model, by identity, what it may have in one dimension because it,
    or what is made of it, meets a field with as many rows; the likeliest first.
    """

    def __init__(self) -> None:
        self.wanted: dict[int, list[Wanted]] = {}
        self._made_of: dict[int, frozenset[int]] = {}

    def follow(self, step: Step, given: list[Layout]) -> None:
        """Note a step; `given` are the layouts of its tensors, as far as they are known."""
        unknown = [ref for ref, layout in zip(step.refs, given, strict=True) if layout is None]
        sources = frozenset[int]().union(*map(self._sources, unknown))
        if step.op is None or not sources:
            return
        if not any(given):
            self._made_of.update({ref.number: sources for ref in step.made})
        elif torch.Tag.pointwise in step.op.tags or step.name in JOINS:
            for ref, rows in zip(step.refs, given, strict=True):
                if rows is not None and rows.outer == 1:
                    self._meet(unknown, ref.shape, rows)

    def _meet(self, unknown: list[Ref], shape: tuple[int, ...], rows: Rows) -> None:
        """Note which tensors are as long as a field of this shape where it has its rows."""
        dim = rows.dim - len(shape)
        # Columns may follow the rows in one dimension of a tensor that is unfolded before.
        inner = [*accumulate(shape[rows.dim + 1 :], mul, initial=rows.inner), 1]
        for ref in unknown:
            if len(ref.shape) >= -dim and ref.shape[dim] == shape[dim]:
                for source in self._sources(ref):
                    known = self.wanted.setdefault(source, [])
                    known += [Wanted(rows.height, i) for i in inner]

    def _sources(self, ref: Ref) -> frozenset[int]:
        if ref.number < 0:  # the model's own
            return frozenset([-ref.number])
        return self._made_of.get(ref.number, frozenset())
