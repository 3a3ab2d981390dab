"""Where a model is cut into stages: by the cost of its segments, or by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from credit_dp.checks import nearest
from credit_dp.domain_parallel.dry_run import dataless, without_data
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentedModel, State


def segmented(model: nn.Module) -> SegmentedModel:
    """Return the model, if it says where it may be cut.

    Raises:
        UserError: it does not.
    """
    if not isinstance(model, SegmentedModel):
        raise UserError(
            f"parallel.pipeline: a pipeline needs a model in segments, {type(model).__name__} "
            "declares no segments. Derive it from SegmentedModel, or use parallel.pipeline=1."
        )
    return model


def float_type(model: nn.Module) -> torch.dtype | None:
    """Return what a model computes in; None if nothing tells."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def segment_costs(model: nn.Module, shape: Sequence[int]) -> dict[str, int]:
    """Return the multiply-adds of each segment's forward, estimated without data.

    Convolutions, matrix products and attention count; what acts on each number alone does not.

    Args:
        model: for the whole globe, not converted: then all ranks find the same numbers.
        shape: of the whole globe's input, `(B, C, H, W)`.

    Raises:
        UserError: the model has no segments, or several of one name.
    """
    empty = without_data(segmented(model))
    state: State = (torch.empty(tuple(shape), dtype=float_type(model), device="meta"),)
    costs: dict[str, int] = {}
    with dataless(), torch.no_grad():
        for segment in segmented(empty).segments():
            if segment.name in costs:
                raise UserError(
                    f"parallel.pipeline: {type(model).__name__} has several segments called "
                    f"{segment.name}. Name each after a module of its own."
                )
            with FlopCounterMode(display=False) as counter:
                state = segment.run(state)
            costs[segment.name] = counter.get_total_flops() // 2
    return costs


def cut_points(
    costs: Mapping[str, int], stages: int, named: Sequence[str] | None = None, *, virtual: int = 1
) -> list[slice]:
    """Return the segments of each stage: the dearest stage as cheap as can be, or as named.

    Args:
        costs: of all segments, in order.
        stages: of all ranks of the pipeline together.
        named: the first segment of every stage but the first.
        virtual: stages of each rank, for the message.

    Raises:
        UserError: there are fewer segments than stages, or the names do not fit.
    """
    names = list(costs)
    if len(names) < stages:
        of_each = f" with {virtual} stages of each rank" if virtual > 1 else ""
        raise UserError(
            f"parallel.pipeline: {stages} stages need as many segments, the model has "
            f"{len(names)}. Choose at most {len(names) // virtual}{of_each}."
        )
    starts = _balanced(list(costs.values()), stages) if named is None else [0]
    if named is not None:
        _check_names(names, stages, named)
        starts += [names.index(name) for name in named]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(names)])]


def _balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Return where the stages begin; of equally good cuts, the earliest."""
    sums = [0, *accumulate(costs)]
    ends = range(1, len(sums))
    # Of the segments before each end: what the dearest stage costs, and where stages begin.
    best = {end: (sums[end], [0]) for end in ends}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], cut])
                for cut in range(stage, end)
            )
            for end in ends[stage:]
        }
    return best[len(costs)][1]


def _check_names(names: Sequence[str], stages: int, named: Sequence[str]) -> None:
    every = f"The segments are {', '.join(names)}."
    unknown = next((name for name in named if name not in names), None)
    if unknown is not None:
        raise UserError(
            f"parallel.stages: the model has no segment {unknown!r}.{nearest(unknown, names)} "
            f"{every}"
        )
    if len(named) != stages - 1:
        raise UserError(
            f"parallel.stages: needs the first segment of each of the {stages} stages but the "
            f"first, {stages - 1} in all, got {len(named)}. {every}"
        )
    for before, name in pairwise([names[0], *named]):
        if names.index(name) <= names.index(before):
            raise UserError(
                f"parallel.stages: needs segments in the model's order, the first one not among "
                f"them, got {', '.join(named)}. {every}"
            )
