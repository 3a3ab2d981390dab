"""Planning a model at its first forward, when its input shapes were not told before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map_only

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.domain_parallel.plan import Inputs, Shape
from credit_dp.domain_parallel.planner import active_planner
from credit_dp.errors import UserError

# Where rows may be, counted from the start; both are the last dimension but one of some input.
ROWS_FROM_START = (2, 3)


@final
class PlanAtFirstForward:
    """A forward pre-hook that plans with what the model is called with, and then takes itself away.

    It stays after a refusal, and a copy of the model plans for itself.

    Args:
        manager: this rank's place in the mesh.
        shard_dim: the row dimension of what the model is called with.
        plan: called with the model, the whole-globe shapes and what makes its inputs.
    """

    def __init__(
        self,
        manager: DomainParallelManager,
        shard_dim: int,
        plan: Callable[[nn.Module, list[Shape], Inputs], None],
    ) -> None:
        self.manager = manager
        self.shard_dim = shard_dim
        self.plan = plan

    @_disable_dynamo  # it plans: there is nothing to compile
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan, unless this is a call of another plan."""
        if active_planner() is not None:
            return
        fields = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in fields[:1]:
            check_shard_dim(self.shard_dim, x.ndim)
        whole = {id(x): self._whole_shape(x) for x in fields}
        _check_some_have_rows([x for x in fields if x.ndim >= FIELD_DIMS], whole)

        def inputs(wanted: Callable[[Shape], Shape]) -> tuple[list[Any], dict[str, Any]]:
            def like(x: Tensor) -> Tensor:
                return torch.empty(wanted(whole[id(x)]), dtype=x.dtype, device=x.device)

            new_args, new_kwargs = tree_map_only(Tensor, like, (args, kwargs))
            return list(new_args), new_kwargs

        self.plan(model, list(whole.values()), inputs)
        remove_first_forward(model)

    def _whole_shape(self, x: Tensor) -> Shape:
        """Gather the globe's shape; a tensor with one row on every rank is taken for replicated."""
        if x.ndim < FIELD_DIMS:
            return tuple(x.shape)
        partition = self.manager.gathered_partition(x.shape[ROW_DIM])
        if set(partition.sizes) == {1}:
            return tuple(x.shape)
        self.manager.bands.adopt(partition)
        return (*x.shape[:ROW_DIM], partition.height, *x.shape[ROW_DIM + 1 :])


def _check_some_have_rows(fields: list[Tensor], whole: dict[int, Shape]) -> None:
    """Refuse a first field with one row on every rank: it may be the same one, or a band each."""
    banded = [x for x in fields if whole[id(x)] != tuple(x.shape)]
    if not fields or any(x is fields[0] for x in banded):
        return
    if not banded or fields[0].shape[-1] > 1:
        raise UserError(
            f"first forward: every rank was given one row, {tuple(fields[0].shape)}: it can't be "
            "known whether that is the same row or one band of a globe on each. Convert with "
            "input_shape, the whole globe's."
        )


def remove_first_forward(model: nn.Module) -> None:
    """Take away what plans at the first forward, if it is there."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, PlanAtFirstForward):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)


def check_shard_dim(shard_dim: int, ndim: int | None) -> None:
    """Refuse any dimension but the rows' of an input with `ndim` dimensions, None if unknown."""
    row_dim = shard_dim if shard_dim < 0 or ndim is None else shard_dim - ndim
    if row_dim == -1:
        raise UserError(
            f"shard_dim: {shard_dim} is longitude, which can't be sharded: only latitude rows can, "
            "the last dimension but one. Use shard_dim=-2."
        )
    if row_dim not in (ROW_DIM, *([] if ndim else ROWS_FROM_START)):
        raise UserError(
            f"shard_dim: only latitude rows, the last dimension but one, can be sharded, got "
            f"{shard_dim}. Use shard_dim=-2."
        )
